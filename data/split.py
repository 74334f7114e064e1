"""Which documents are for validation, decided before anything is tokenized; see also Encoder in encode.py."""

import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from common.text import plural
from data import DataError
from data.encode import Encoder
from data.readers import Input, read_documents
from data.sources import local_inputs

FEW_DOCUMENTS = 10  # fewer are not enough to split by document, or to validate on


def validation_inputs(paths: Iterable[str], inputs: list[Input]) -> list[Input]:
    """The files of --val-source. Raises DataError as `local_inputs` does, and if one is among `inputs`."""
    val_inputs = [file._replace(split="val") for file in local_inputs(map(Path, paths), "--val-source")]
    train = {os.path.realpath(file.url) for file in inputs}
    for file in val_inputs:
        if os.path.realpath(file.url) in train:
            raise DataError(f"{file.url} is in --source and in --val-source: take it out of one")
    return val_inputs


def choose_split(inputs: list[Input], val_inputs: list[Input], encoder: Encoder) -> str:
    """How validation is chosen from local `inputs`: by "documents", or at their "ends" where there are too few.

    Reads no more documents than it needs to know. Raises DataError if there is nothing to train or to validate on.
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
        raise DataError(f"no documents to read, all are empty or bad: name other files with {option}")
