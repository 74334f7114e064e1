"""From raw documents to token ids: decode, parse, choose the split, tokenize."""

import hashlib
import json
from typing import NamedTuple

import numpy as np

from data import DataError
from data.readers import Raw
from data.tokenizer import Tokenizer


class Encoded(NamedTuple):
    """What a list of raw documents became."""

    train: np.ndarray  # (n,) uint16, an end-of-text token after each document
    val: np.ndarray  # the same for validation
    empty: int  # documents of white space only
    bad: int  # documents that could not be read
    examples: list[str]  # the first three of those: where and why
    lowest: float  # of the documents' positions, see `split_position`; 1 if there are none


class Encoder(NamedTuple):
    """Turns a list of raw documents into ids; picklable, so that worker processes can share one."""

    tokenizer: Tokenizer
    val_fraction: float
    text_field: str = "text"
    only: tuple[str, str] | None = None  # of JSON rows: keep those whose field (dots for nesting) has this value
    skip_bad: bool = False

    def __call__(self, documents: list[Raw]) -> Encoded:
        """Encodes documents in their order. Raises DataError at a bad one unless `skip_bad` is set."""
        texts: list[str] = []
        empty, bad = 0, []
        for raw in documents:
            try:
                text = self.text(raw)
            except ValueError as error:
                bad.append(f"{raw.where} {error}")
                if not self.skip_bad:
                    raise DataError(f"{bad[0]}; or leave such documents out with --skip-bad") from error
                continue
            if text is not None and text.strip():
                texts.append(text)
            elif text is not None:
                empty += 1
        positions = [split_position(text) for text in texts]
        train, val = [np.empty(0, np.uint16)], [np.empty(0, np.uint16)]
        end = np.array([self.tokenizer.eot], np.uint16)
        for position, ids in zip(positions, self.tokenizer.encode_batch(texts), strict=True):
            (val if position < self.val_fraction else train).extend([ids, end])
        lowest = min(positions, default=1.0)
        return Encoded(np.concatenate(train), np.concatenate(val), empty, len(bad), bad[:3], lowest)

    def text(self, raw: Raw) -> str | None:
        """The text of a document; None if it belongs to another corpus. Raises ValueError naming the fault."""
        try:
            text = raw.data.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"is not UTF-8 at byte {error.start}: convert it with iconv -t utf-8") from error
        if not raw.is_json:
            return text
        try:
            row = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"is not JSON ({error}): correct or remove it") from error
        if not isinstance(row, dict):
            raise ValueError(f"is a {type(row).__name__}, expected a JSON object with a field {self.text_field!r}")
        if self.only and _nested_value(row, self.only[0]) != self.only[1]:
            return None
        if self.text_field not in row:
            fields = ", ".join(map(repr, row)) or "none at all"
            raise ValueError(f"has no field {self.text_field!r}; it has {fields}: choose one with --text-field")
        text = row[self.text_field]
        if text is not None and not isinstance(text, str):
            found = f"has a {type(text).__name__} in field {self.text_field!r}"
            raise ValueError(f"{found}, expected a string: choose another --text-field")
        return text or ""


def split_position(text: str) -> float:
    """Hash of a text, in [0, 1); documents below the validation fraction go to validation.

    It depends on the text alone, so a document stays in its split when the corpus grows.
    """
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def _nested_value(row: object, field: str) -> object:
    """The value of a nested field such as "meta.name"; None if it is missing."""
    for key in field.split("."):
        row = row.get(key) if isinstance(row, dict) else None
    return row
