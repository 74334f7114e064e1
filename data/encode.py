"""From raw documents to token ids: decode, parse, choose the split, tokenize."""

import hashlib
import json
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from common.text import plural
from data import DataError
from data.readers import Input, Raw, read_documents
from data.sources import local_inputs
from data.tokenizer import Tokenizer

FEW_DOCUMENTS = 10  # fewer are not enough to split by document, or to validate on


class Encoded(NamedTuple):
    """What a list of raw documents became."""

    # (n,) uint16, an end-of-text token after each document (before it where the split is "ends")
    train: np.ndarray
    val: np.ndarray  # the same for validation
    empty: int  # documents of white space only
    bad: int  # documents that could not be read
    links: int  # in archives, which have no content of their own


class Encoder(NamedTuple):
    """Turns a list of raw documents into ids; picklable, so that worker processes can share one.

    Which documents are for validation depends on the split of their input file:

    - "documents": those whose text hashes below the validation fraction
    - "ends": of each document that fraction of its characters, at its end
    - "val": all
    """

    tokenizer: Tokenizer
    val_fraction: float
    text_field: str = "text"
    skip_bad: bool = False

    def __call__(self, documents: list[Raw]) -> Encoded:
        """Encodes documents in their order.

        Raises DataError at a bad one unless `skip_bad` is set.
        """
        pieces: list[tuple[str, str, str]] = []  # split of the file, train or val, text
        empty = bad = links = 0
        for raw in documents:
            text = self.try_text(raw)
            if text is None:
                bad, links = bad + (not raw.is_link), links + raw.is_link
            elif text.strip():
                train, val = self.divide(text, raw.file.split)
                pieces += [
                    (raw.file.split, name, part)
                    for name, part in (("train", train), ("val", val))
                    if part
                ]
            else:
                empty += 1
        ids: dict[str, list[np.ndarray]] = {
            name: [np.empty(0, np.uint16)] for name in ("train", "val")
        }
        end = np.array([self.tokenizer.eot], np.uint16)
        encoded = self.tokenizer.encode_batch([text for _, _, text in pieces])
        for (split, name, _), new in zip(pieces, encoded, strict=True):
            ids[name].extend([end, new] if split == "ends" else [new, end])
        train, val = map(np.concatenate, ids.values())
        return Encoded(train, val, empty, bad, links)

    def divide(self, text: str, split: str) -> tuple[str, str]:
        """The parts of a document for training and for validation."""
        if split == "ends":
            cut = int(len(text) * (1 - self.val_fraction))
            return text[:cut], text[cut:]
        val = split == "val" or split_position(text) < self.val_fraction
        return ("", text) if val else (text, "")

    def try_text(self, raw: Raw) -> str | None:
        """`text`; None where it is left out.

        Raises DataError at an unreadable one unless `skip_bad` is set.
        """
        if raw.is_link:
            return None
        try:
            return self.text(raw)
        except ValueError as error:
            if self.skip_bad:
                return None
            raise DataError(
                f"{raw.where} {error}; or leave such documents out with --skip-bad"
            ) from error

    def text(self, raw: Raw) -> str:
        """The text of a document. Raises ValueError naming the fault."""
        try:
            text = raw.data.decode()
        except UnicodeDecodeError as error:
            raise ValueError(
                f"is not UTF-8 at byte {error.start}: convert it with iconv -t utf-8"
            ) from error
        if not raw.is_json:
            return text
        try:
            row = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"is not JSON ({error}): correct or remove it") from error
        if not isinstance(row, dict):
            raise ValueError("is not a JSON object: correct or remove it")
        text = row.get(self.text_field, False)
        if text is not None and not isinstance(text, str):
            fields = ", ".join(map(repr, row)) or "none at all"
            raise ValueError(
                f"has no text in field {self.text_field!r}; it has {fields}: choose one with --text-field"
            )
        return text or ""


def split_position(text: str) -> float:
    """Hash of a text, in [0, 1); documents below the validation fraction go to validation.

    It depends on the text alone, so a document stays in its split when the corpus grows.
    """
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def validation_inputs(paths: Iterable[str], inputs: list[Input]) -> list[Input]:
    """The files of --val-source.

    Raises DataError as `local_inputs` does, and if one is among `inputs`.
    """
    val_inputs = [
        file._replace(split="val") for file in local_inputs(map(Path, paths), "--val-source")
    ]
    train = {os.path.realpath(file.url) for file in inputs}
    for file in val_inputs:
        if os.path.realpath(file.url) in train:
            raise DataError(f"{file.url} is in --source and in --val-source: take it out of one")
    return val_inputs


def choose_split(inputs: list[Input], val_inputs: list[Input], encoder: Encoder) -> str:
    """How validation is chosen from local `inputs`: by "documents", or at their "ends" where there are too few.

    Reads no more documents than it needs to know. Raises DataError if there is nothing to train or
    to validate on.
    """
    if val_inputs:
        for option, files in (("--source", inputs), ("--val-source", val_inputs)):
            next(_read_texts(files, encoder, option))
        return "documents"
    train = val = 0
    for text in _read_texts(inputs, encoder, "--source"):
        in_val = bool(encoder.divide(text, "documents")[1])
        train, val = train + (not in_val), val + in_val
        if train and val and train + val >= FEW_DOCUMENTS:
            return "documents"
    share = f"{100 * encoder.val_fraction:.3g}%"
    if train + val >= FEW_DOCUMENTS**2:  # very small parts of very many documents
        raise DataError(explain_empty_split(train, val, encoder.val_fraction))
    few = f"{plural(train + val, 'document')}, too few to set some aside: validation is the last {share} of each"
    print(f"warning: {few}; --val-source names other text for it", file=sys.stderr)
    return "ends"


def explain_empty_split(train: int, val: int, val_fraction: float) -> str:
    """What is wrong, and the remedy, where training or validation got none of many documents."""
    missing, total = "validation" if train else "training", train + val
    return (
        f"none of {plural(total, 'document')} fell into {missing} at --val-fraction {val_fraction}: "
        f"--val-fraction {min(0.5, FEW_DOCUMENTS / max(1, total)):.2g} makes about {FEW_DOCUMENTS} of them validation"
    )


def _read_texts(inputs: list[Input], encoder: Encoder, option: str) -> Iterator[str]:
    """The documents that are not empty. At the end, raises DataError if there was none."""
    any_text = False
    for file in inputs:
        for raw in read_documents(file, encoder.text_field):
            text = encoder.try_text(raw)
            if text and text.strip():
                any_text = True
                yield text
    if not any_text:
        raise DataError(
            f"no documents to read, all are empty or bad: name other files with {option}"
        )
