"""From raw documents to token ids: decode, parse, choose the split, tokenize."""

import hashlib
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from common.text import plural
from data import DataError
from data.readers import Input, Raw, read_documents
from data.sources import local_inputs
from data.tokenizer import Tokenizer

JSON_TYPES = {bool: "boolean", int: "number", float: "number", list: "list", dict: "object"}
MARK = r"\|?(?:end_?of_?(?:text|document|doc)|eos|eot|eod|/?s|/?doc|sep)\|?"
# <|endoftext|> anywhere, others such as </s> or [EOS] on a line of their own
SEPARATORS = re.compile(
    rf"(<\|(?:end_?of_?(?:text|document|doc)|eos|eot|eod)\|>)"
    rf"|^[ \t]*(<{MARK}>|\[(?:EOS|EOT|SEP)\])[ \t\r]*$",
    re.IGNORECASE | re.MULTILINE,
)
FEW_DOCUMENTS = 10  # fewer documents are cut; also the number suggested for validation


class Encoded(NamedTuple):
    """The ids of a list of raw documents, and counts of documents that were left out.

    An end-of-text token stands after each document; before it if the split is "ends".
    """

    train: np.ndarray  # (n,) uint16
    val: np.ndarray  # (n,) uint16
    empty: int  # documents of white space only
    bad: int  # documents that could not be read
    links: int  # links in archives, which have no content
    separators: dict[str, int]  # marks between documents in text files that are one document each
    left: dict[str, int]  # members of archives that are no text, by ending


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
        separators: Counter[str] = Counter()
        left: Counter[str] = Counter()
        for raw in documents:
            text = self.try_text(raw)
            if raw.left:
                left[raw.left] += 1
            elif raw.is_link:
                links += 1
            elif text is None:
                bad += 1
            elif text.strip():
                if not raw.is_json and not raw.file.separator:
                    separators.update(find_separators(text))
                train_part, val_part = self.divide(text, raw.file.split)
                if train_part:
                    train.append(train_part)
                if val_part:
                    val.append(val_part)
            else:
                empty += 1
        ends_first = any(raw.file.split == "ends" for raw in documents)  # all of a batch or none
        train_ids = self._join(train, ends_first)
        val_ids = self._join(val, ends_first)
        return Encoded(train_ids, val_ids, empty, bad, links, dict(separators), dict(left))

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
        if raw.is_link or raw.left:
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
        row = self._parse_row(text)
        if not isinstance(row, dict):
            raise ValueError("is not a JSON object: correct or remove it")
        if self.text_field not in row:
            fields = ", ".join(map(repr, row)) or "none at all"
            raise ValueError(
                f"has no text in field {self.text_field!r}; it has {fields}: "
                f"choose one with --text-field"
            )
        value = row[self.text_field]
        if value is not None and not isinstance(value, str):
            raise ValueError(
                f"has no text in field {self.text_field!r} but a {JSON_TYPES[type(value)]} "
                f"({repr(value)[:40]}): choose another --text-field"
            )
        return value or ""

    def _parse_row(self, text: str) -> Any:
        """Parse a line of JSON. Raises ValueError that names the fault."""
        try:
            row = parse_json(text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"is not JSON ({error}): correct or remove it") from error
        field = json.dumps(self.text_field, ensure_ascii=False)
        if text.count(field) > 1 and isinstance(row, dict):
            pairs = json.loads(text, parse_int=float, object_pairs_hook=list)
            names = [name for name, _ in pairs]  # a dict would keep the last of several
            if names.count(self.text_field) > 1:
                raise ValueError(f"has several fields {self.text_field!r}: rename all but one")
        return row


def find_separators(text: str) -> list[str]:
    """The marks between documents, such as <|endoftext|>, that stand in a text."""
    if "<" not in text and "[" not in text:
        return []
    return [first or second for first, second in SEPARATORS.findall(text)]


def parse_json(text: str) -> Any:
    """Parse JSON; an integer of more than 4300 digits, which Python refuses, becomes a float."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        raise
    except ValueError:
        return json.loads(text, parse_int=float)


def split_position(text: str) -> float:
    """Hash a text to [0, 1); documents below the validation fraction are for validation.

    The hash depends on the text alone, so a document keeps its split when the corpus grows.
    """
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def validation_inputs(
    paths: Iterable[Path],
    inputs: list[Input],
    notes: list[str] | None = None,
    any_text: bool = False,
) -> list[Input]:
    """The files of --val-source; `notes` and `any_text` as in `local_inputs`.

    Raises DataError as `local_inputs` does, and if a file is among `inputs`.
    """
    train_paths = {os.path.realpath(file.url) for file in inputs}
    val_inputs = []
    for file in local_inputs(paths, "--val-source", notes, any_text):
        if os.path.realpath(file.url) in train_paths:
            raise DataError(f"{file.url} is in --source and in --val-source: take it out of one")
        val_inputs.append(file._replace(split="val"))
    return val_inputs


def choose_split(inputs: list[Input], val_inputs: list[Input], encoder: Encoder) -> str:
    """Choose how local `inputs` are split: by "documents", or at their "ends" if there are few.

    Stops reading documents when the decision is clear. Raises DataError if there is nothing to
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
    count = max(1, round(better * total))
    return (
        f"none of {plural(total, 'document')} fell into {missing} at --val-fraction "
        f"{val_fraction}: --val-fraction {better:.2g} makes about {count} of them "
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
