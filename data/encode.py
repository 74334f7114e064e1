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

    train: np.ndarray  # (n,) uint16, an end-of-text token after each document (before it where the split is "ends")
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
        """Encodes documents in their order. Raises DataError at a bad one unless `skip_bad` is set."""
        pieces: list[tuple[str, str, str]] = []  # split of the file, train or val, text
        empty = bad = links = 0
        for raw in documents:
            text = self.try_text(raw)
            if text is None:
                bad, links = bad + (not raw.is_link), links + raw.is_link
            elif text.strip():
                train, val = self.divide(text, raw.file.split)
                pieces += [(raw.file.split, name, part) for name, part in (("train", train), ("val", val)) if part]
            else:
                empty += 1
        ids: dict[str, list[np.ndarray]] = {name: [np.empty(0, np.uint16)] for name in ("train", "val")}
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
        """`text`; None where it is left out. Raises DataError at an unreadable one unless `skip_bad` is set."""
        if raw.is_link:
            return None
        try:
            return self.text(raw)
        except ValueError as error:
            if self.skip_bad:
                return None
            raise DataError(f"{raw.where} {error}; or leave such documents out with --skip-bad") from error

    def text(self, raw: Raw) -> str:
        """The text of a document. Raises ValueError naming the fault."""
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
            raise ValueError("is not a JSON object: correct or remove it")
        text = row.get(self.text_field, False)
        if text is not None and not isinstance(text, str):
            fields = ", ".join(map(repr, row)) or "none at all"
            raise ValueError(f"has no text in field {self.text_field!r}; it has {fields}: choose one with --text-field")
        return text or ""


def split_position(text: str) -> float:
    """Hash of a text, in [0, 1); documents below the validation fraction go to validation.

    It depends on the text alone, so a document stays in its split when the corpus grows.
    """
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64
