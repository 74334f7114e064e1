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

FEW_DOCUMENTS = 10  # with fewer, documents are cut; also the number suggested for validation


class Encoded(NamedTuple):
    """The ids of a list of raw documents, and counts of those that were left out.

    An end-of-text token stands after each document; before it if the split is "ends".
    """

    train: np.ndarray  # (n,) uint16
    val: np.ndarray  # (n,) uint16
    empty: int  # documents of white space only
    bad: int  # documents that could not be read
    links: int  # links in archives, which have no content


class Encoder(NamedTuple):
    """Turns a list of raw documents into ids. It can be pickled and sent to worker processes.

    The validation text depends on the split of the input file:

    - "documents": documents whose text hashes below the validation fraction
    - "ends": the last characters of each document, by the validation fraction
    - "val": all documents
    """

    tokenizer: Tokenizer
    val_fraction: float
    text_field: str = "text"
    skip_bad: bool = False

    def __call__(self, documents: list[Raw]) -> Encoded:
        """Encode documents in their order.

        Raises DataError at a bad document unless `skip_bad` is set.
        """
        train: list[str] = []
        val: list[str] = []
        empty = bad = links = 0
        for raw in documents:
            text = self.try_text(raw)
            if raw.is_link:
                links += 1
            elif text is None:
                bad += 1
            elif text.strip():
                train_part, val_part = self.divide(text, raw.file.split)
                if train_part:
                    train.append(train_part)
                if val_part:
                    val.append(val_part)
            else:
                empty += 1
        ends_first = any(raw.file.split == "ends" for raw in documents)  # of all or of none
        return Encoded(
            self._join(train, ends_first), self._join(val, ends_first), empty, bad, links
        )

    def _join(self, texts: list[str], ends_first: bool) -> np.ndarray:
        """The ids of `texts` with an end-of-text token before or after each, (n,) uint16."""
        end = np.array([self.tokenizer.eot], np.uint16)
        ids = [np.empty(0, np.uint16)]
        for text_ids in self.tokenizer.encode_batch(texts):
            ids += [end, text_ids] if ends_first else [text_ids, end]
        return np.concatenate(ids)

    def divide(self, text: str, split: str) -> tuple[str, str]:
        """The parts of a document for training and for validation."""
        if split == "ends":
            cut = int(len(text) * (1 - self.val_fraction))
            return text[:cut], text[cut:]
        if split == "val" or split_position(text) < self.val_fraction:
            return "", text
        return text, ""

    def try_text(self, raw: Raw) -> str | None:
        """The text of a document; None if it is left out.

        Raises DataError at an unreadable document unless `skip_bad` is set.
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
        """The text of a document. Raises ValueError that names the fault."""
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
                f"has no text in field {self.text_field!r}; it has {fields}: "
                f"choose one with --text-field"
            )
        return text or ""


def split_position(text: str) -> float:
    """Hash a text to [0, 1); documents below the validation fraction are for validation.

    The hash depends on the text alone, so a document keeps its split when the corpus grows.
    """
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def validation_inputs(paths: Iterable[Path], inputs: list[Input]) -> list[Input]:
    """The files of --val-source.

    Raises DataError as `local_inputs` does, and if a file is among `inputs`.
    """
    train_paths = {os.path.realpath(file.url) for file in inputs}
    val_inputs = []
    for file in local_inputs(paths, "--val-source"):
        if os.path.realpath(file.url) in train_paths:
            raise DataError(f"{file.url} is in --source and in --val-source: take it out of one")
        val_inputs.append(file._replace(split="val"))
    return val_inputs


def choose_split(inputs: list[Input], val_inputs: list[Input], encoder: Encoder) -> str:
    """Choose how local `inputs` are split: by "documents", or at their "ends" if there are few.

    Reads only as many documents as the decision needs. Raises DataError if there is nothing to
    train or to validate on.
    """
    if val_inputs:
        for option, files in (("--source", inputs), ("--val-source", val_inputs)):
            next(_read_texts(files, encoder, option))
        return "documents"
    train = val = 0
    for text in _read_texts(inputs, encoder, "--source"):
        if split_position(text) < encoder.val_fraction:
            val += 1
        else:
            train += 1
        if train and val and train + val >= FEW_DOCUMENTS:
            return "documents"
    if train + val >= FEW_DOCUMENTS**2:  # a very small fraction of many documents
        raise DataError(explain_empty_split(train, val, encoder.val_fraction))
    print(
        f"warning: {plural(train + val, 'document')}, too few to set some aside: "
        f"validation is the last {100 * encoder.val_fraction:.3g}% of each; "
        f"--val-source names other text for it",
        file=sys.stderr,
    )
    return "ends"


def explain_empty_split(train: int, val: int, val_fraction: float) -> str:
    """The error, with its remedy, if none of many documents is for training or for validation."""
    missing = "validation" if train else "training"
    total = train + val
    better = min(0.5, FEW_DOCUMENTS / max(1, total))
    return (
        f"none of {plural(total, 'document')} fell into {missing} at --val-fraction "
        f"{val_fraction}: --val-fraction {better:.2g} makes about {FEW_DOCUMENTS} of them "
        f"validation"
    )


def _read_texts(inputs: list[Input], encoder: Encoder, option: str) -> Iterator[str]:
    """Yield the texts that are not empty. At the end, raises DataError if there was none."""
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
