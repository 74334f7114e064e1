"""Loss of a tokenizer: the first documents of each source are encoded, decoded and compared."""

import json
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import groupby, islice

from data import DataError
from data.encode import Encoder
from data.readers import Input, read_documents
from data.tokenizer import TOKENIZER_FILE, FileTokenizer, Tokenizer

DOCUMENTS = 1000  # the most documents per source; its files share them
CHARACTERS = 2**20  # the most per source; about a second of work (not measured)
LEAST_DOCUMENTS = 20  # the least per file
LEAST_CHARACTERS = 2**14
ALLOWED_SHARE = 0.001  # share of characters lost; more is refused unless a flag allows it
CONTEXT = 15  # characters around a difference in an example


@dataclass
class Loss:
    """Differences of the first documents of a source after decoding, as in meta.json."""

    source: str
    characters: int = 0  # compared
    lost: int = 0  # changed, and not by a normalisation that the tokenizer declares
    example: str = ""

    @property
    def share(self) -> float:
        """Of the characters."""
        return self.lost / max(1, self.characters)

    def describe(self) -> str:
        """The loss in words."""
        counts = f"{self.lost:,} of {self.characters:,} characters ({self.share:.2%})"
        return f"{counts} of the first documents of {self.source} are lost: {self.example}"


def measure_losses(
    inputs: Iterable[Input], encoder: Encoder, allow_loss: bool
) -> list[dict[str, int | str]]:
    """Encode and decode the first documents of each source, and print what is lost.

    A normalisation that the tokenizer declares is printed once, and is no loss.

    Returns:
        The losses as meta.json keeps them; empty if there are none.

    Raises:
        DataError: more than ALLOWED_SHARE of a source is lost, unless `allow_loss`.
    """
    tokenizer = encoder.tokenizer
    losses = []
    normalised = ""
    for source, files in groupby(inputs, lambda file: file.source):
        loss = Loss(source or "the corpus")
        for text in _read_sample(list(files), encoder):
            lost, example = compare_text(tokenizer, text)
            loss.characters += len(text)
            loss.lost += lost
            if lost:
                loss.example = loss.example or example
            else:
                normalised = normalised or example
        if loss.lost:
            losses.append(loss)
    if normalised:
        print(
            f"note: {tokenizer.name} normalises text ({_name_normalizers(tokenizer)}): {normalised}"
        )
    for loss in losses:
        if loss.share > ALLOWED_SHARE and not allow_loss:
            raise DataError(
                f"tokenizer {tokenizer.name}: {loss.describe()}. Choose another tokenizer, or "
                f"accept the loss with --allow-loss"
            )
        print(f"warning: tokenizer {tokenizer.name}: {loss.describe()}")
    return [asdict(loss) for loss in losses]


def _read_sample(files: list[Input], encoder: Encoder) -> Iterator[str]:
    """The first documents of each file, long ones cut, up to CHARACTERS in all."""
    documents = max(LEAST_DOCUMENTS, DOCUMENTS // len(files))
    characters = max(LEAST_CHARACTERS, CHARACTERS // len(files))
    from_file = isinstance(encoder.tokenizer, FileTokenizer)
    total = 0
    for file in files:
        if "://" in file.url and (file is not files[0] or not from_file):
            return  # each is a download; bytes and gpt2 lose nothing
        room = characters
        for raw in islice(read_documents(file, encoder.text_field), documents):
            text = (encoder.try_text(raw) or "")[:room]
            room -= len(text)
            total += len(text)
            if text:
                yield text
            if not room:
                break
        if total >= CHARACTERS:
            return


def compare_text(tokenizer: Tokenizer, text: str) -> tuple[int, str]:
    """Encode and decode a text.

    Returns:
        (number of characters that are lost, an example of what changed). With 0 characters the
        change is a normalisation that the tokenizer declares; without an example there is none.
    """
    ids = tokenizer.encode(text)
    if isinstance(tokenizer, FileTokenizer):
        ids = [i for i in ids if i != tokenizer.unk]
    decoded = tokenizer.decode(ids)
    if decoded == text:
        return 0, ""
    lost = count_changes(text, decoded)
    if not lost:
        return 0, f"{text[:CONTEXT]!r} becomes {decoded[:CONTEXT]!r}"
    expected = _normalize(tokenizer, text)
    if expected != text:
        changes = count_changes(expected, decoded) + count_dropped_letters(text, expected)
        if changes < lost:
            return changes, show_difference(expected if changes else text, decoded)
    return lost, show_difference(text, decoded)


def count_changes(text: str, decoded: str) -> int:
    """Characters of `text` that `decoded` lacks, or the other way round if these are more.

    A space at the start, which many tokenizers add and remove, does not count.
    """
    text = text.removeprefix(" ")
    decoded = decoded.removeprefix(" ")
    if text == decoded:
        return 0
    missing = Counter(text) - Counter(decoded)
    added = Counter(decoded) - Counter(text)
    return max(1, missing.total(), added.total())  # 1: the order differs


def count_dropped_letters(text: str, normalised: str) -> int:
    """Letters and digits that a normaliser removes; case, accents and width do not count."""
    return (_fold(text) - _fold(normalised)).total()


def _fold(text: str) -> Counter[str]:
    compatible = unicodedata.normalize("NFKD", unicodedata.normalize("NFKD", text).casefold())
    return Counter(character for character in compatible if character.isalnum())


def _normalize(tokenizer: Tokenizer, text: str) -> str:
    """The text after the tokenizer's normaliser, with its marks for spaces as spaces."""
    if not isinstance(tokenizer, FileTokenizer) or tokenizer.file.normalizer is None:
        return text
    return tokenizer.file.normalizer.normalize_str(text).replace("▁", " ")


def _name_normalizers(tokenizer: Tokenizer) -> str:
    """The types of the normalisers in a tokenizer.json."""
    normalizer = json.loads(tokenizer.files.get(TOKENIZER_FILE, b"{}")).get("normalizer")
    if not normalizer:
        return "a space at the start"
    parts = normalizer.get("normalizers", [normalizer])
    return ", ".join(part["type"] for part in parts)


def show_difference(text: str, decoded: str) -> str:
    """The first place where two texts differ, in words."""
    text = text.removeprefix(" ")
    decoded = decoded.removeprefix(" ")
    same = 0
    while same < min(len(text), len(decoded)) and text[same] == decoded[same]:
        same += 1
    start = max(0, same - CONTEXT)
    stop = same + CONTEXT
    return f"{text[start:stop]!r} becomes {decoded[start:stop]!r}"
