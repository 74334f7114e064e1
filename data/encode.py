"""From raw documents to token ids: decode, parse, choose the split, tokenize."""

import hashlib
import json
import sys
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from common.text import decode_utf8, plural
from data import DataError
from data.readers import Input, Raw, read_documents
from data.round_trip import Loss
from data.tokenizer import END_OF_TEXT, Tokenizer

FEW_DOCUMENTS = 10  # fewer documents are cut; also the number suggested for validation


class Encoded(NamedTuple):
    """The ids of a list of raw documents.

    An end-of-text token stands after each document; before it if the split is "ends". `counts` has
    those of round_trip.py, and

    - empty: documents of white space only, which are left out
    - bad: documents that could not be read, which are left out
    - shared: documents for training that are validation documents, too, and so left out
    - marks: end-of-text marks in text files that are one document each
    """

    ids: dict[str, np.ndarray]  # of train and val, (n,) uint16
    counts: dict[str, int]
    example: str  # the first text that does not come back


class Encoder(NamedTuple):
    """Turns a list of raw documents into ids. It can be pickled and sent to worker processes.

    The validation text depends on the split of the input file:

    - "documents": documents whose text hashes below the validation fraction
    - "ends": the last characters of each document, by the validation fraction
    - "val": all documents

    `held_out` has the `split_position` of texts that are not for training.
    """

    tokenizer: Tokenizer
    val_fraction: float
    text_field: str = "text"
    skip_bad: bool = False
    held_out: frozenset[float] = frozenset()

    def __call__(self, documents: list[Raw]) -> Encoded:
        """Encode documents in their order.

        Raises DataError at a bad document unless `skip_bad` is set.
        """
        ids = {split: [np.empty(0, np.uint16)] for split in ("train", "val")}
        end = np.array([self.tokenizer.eot], np.uint16)
        loss = Loss()
        for raw in documents:
            text = self.try_text(raw)
            if text is None:
                loss.counts["bad"] += 1
                continue
            if not text.strip():
                loss.counts["empty"] += 1
                continue
            is_val = raw.file.split == "val"
            if self.held_out and not is_val and split_position(text) in self.held_out:
                loss.counts["shared"] += 1
                continue
            if raw.where == raw.file.url:
                loss.counts["marks"] += text.count(END_OF_TEXT)
            if raw.is_checked:
                loss.compare(self.tokenizer, text, raw.where)
            for split, part in self.divide(text, raw.file.split).items():
                part_ids = self.tokenizer.encode_array(part)
                ids[split] += [end, part_ids] if raw.file.split == "ends" else [part_ids, end]
        joined = {split: np.concatenate(arrays) for split, arrays in ids.items()}
        return Encoded(joined, dict(loss.counts), loss.example)

    def divide(self, text: str, split: str) -> dict[str, str]:
        """The parts of a document for training and for validation, without empty ones."""
        if split == "ends":
            cut = int(len(text) * (1 - self.val_fraction))
            parts = {"train": text[:cut], "val": text[cut:]}
            return {name: part for name, part in parts.items() if part}
        if split == "val" or split_position(text) < self.val_fraction:
            return {"val": text}
        return {"train": text}

    def try_text(self, raw: Raw) -> str | None:
        """The text of a document; None if it is unreadable and `skip_bad` is set.

        Raises DataError, which names the fault, at an unreadable document otherwise.
        """
        try:
            text = decode_utf8(raw.data)
            return self._find_field(json.loads(text)) if raw.is_json else text
        except json.JSONDecodeError as error:
            fault = f"is not JSON ({error}): expected one object per line; correct or remove it"
        except (ValueError, RecursionError) as error:
            fault = str(error)
        if self.skip_bad:
            return None
        raise DataError(f"{raw.where} {fault}; data.prepare --skip-bad leaves it out")

    def _find_field(self, row: Any) -> str:
        """The text of a row of JSON. Raises ValueError that names the fault."""
        if not isinstance(row, dict):
            raise ValueError(
                "is not a JSON object, one of which is expected per line: correct or remove it"
            )
        if self.text_field not in row:
            fields = ", ".join(map(repr, row)) or "none at all"
            raise ValueError(
                f"has no field {self.text_field!r}; it has {fields}: choose one with --text-field"
            )
        text = row[self.text_field]
        if text is not None and not isinstance(text, str):
            raise ValueError(
                f"has no text in field {self.text_field!r} but {repr(text)[:40]}: choose another "
                "--text-field"
            )
        return text or ""


def split_position(text: str) -> float:
    """Hash a text to [0, 1); documents below the validation fraction are for validation.

    The hash depends on the text alone, so a document keeps its split when the corpus grows.
    """
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def choose_split(inputs: list[Input], encoder: Encoder) -> str:
    """Choose how local `inputs` are split: by "documents", or at their "ends" if there are few.

    Stops reading documents when the decision is clear. Raises DataError if there is nothing to
    train or to validate on.
    """
    train = val = 0
    for text in read_texts(inputs, encoder):
        if split_position(text) < encoder.val_fraction:
            val += 1
        else:
            train += 1
        if train and val and train + val >= FEW_DOCUMENTS:
            return "documents"
    count = plural(train + val, "document")
    if train + val >= FEW_DOCUMENTS**2:  # a very small fraction of many documents
        better = FEW_DOCUMENTS / (train + val)
        raise DataError(
            f"none of {count} fell into {'validation' if train else 'training'} at --val-fraction "
            f"{encoder.val_fraction}: --val-fraction {better:.2g} makes about {FEW_DOCUMENTS} of "
            "them validation"
        )
    print(
        f"warning: {count}, too few to set some aside: validation is the last "
        f"{100 * encoder.val_fraction:.3g}% of each; --val-source names other text for it",
        file=sys.stderr,
    )
    return "ends"


def read_texts(inputs: Iterable[Input], encoder: Encoder) -> Iterator[str]:
    """Yield the texts of all documents that are not empty.

    Raises DataError at the end if there was none, and as `read_documents` and `Encoder.try_text`.
    """
    inputs = list(inputs)
    any_text = False
    for file in inputs:
        for raw in read_documents(file, encoder.text_field):
            text = encoder.try_text(raw)
            if text and text.strip():
                any_text = True
                yield text
    if not any_text:
        names = ", ".join(file.name for file in inputs[:3])
        raise DataError(f"no documents to read, all are empty or bad ({names}): name other files")
