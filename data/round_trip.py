"""Loss of a tokenizer: the first documents of each source are encoded, decoded and compared."""

import json
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import groupby, islice
from pathlib import Path
from typing import Any, NamedTuple

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
        counts = f"{self.lost:,} of {self.characters:,} characters ({100 * self.share:.3g}%)"
        return f"{counts} of the first documents of {self.source} are lost: {self.example}"


def measure_losses(
    inputs: Iterable[Input], encoder: Encoder, allow_loss: bool, folder: Path | None = None
) -> list[dict[str, int | str]]:
    """Encode and decode the first documents of each source, and print what is lost.

    A normalisation that the tokenizer declares is printed once, and is no loss. If `folder` is the
    tokenizer's, and transformers is installed, the ids are compared with AutoTokenizer's.

    Returns:
        The losses as meta.json keeps them; empty if there are none.

    Raises:
        DataError: more than ALLOWED_SHARE of a source is lost, unless `allow_loss`; or
            AutoTokenizer gives other ids.
    """
    tokenizer = encoder.tokenizer
    peer = load_auto_tokenizer(folder) if folder else None
    losses = []
    normalised: dict[str, str] = {}  # examples by the normalisation
    for source, files in groupby(inputs, lambda file: file.source):
        loss = Loss(source or "the corpus")
        for text in _read_sample(list(files), encoder):
            if peer and isinstance(tokenizer, FileTokenizer):
                compare_ids(tokenizer, peer, text[:LEAST_CHARACTERS])
            change = compare_text(tokenizer, text)
            loss.characters += len(text)
            loss.lost += change.lost
            if change.lost:
                loss.example = loss.example or change.example
            elif change.example:
                normalised.setdefault(change.reason, change.example)
        if loss.lost:
            losses.append(loss)
    for reason, example in normalised.items():
        print(f"note: tokenizer {tokenizer.name} normalises text ({reason}): {example}")
    for loss in losses:
        if loss.share > ALLOWED_SHARE and not allow_loss:
            raise DataError(
                f"tokenizer {tokenizer.name}: {loss.describe()}. Choose another tokenizer, or "
                f"accept the loss with --allow-loss"
            )
        print(f"warning: tokenizer {tokenizer.name}: {loss.describe()}")
    return [asdict(loss) for loss in losses]


def load_auto_tokenizer(folder: Path) -> Any:
    """Transformers' tokenizer of a folder; None without transformers or if it cannot read it."""
    try:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception:  # of many kinds, and transformers is not needed here
        return None


def compare_ids(tokenizer: FileTokenizer, peer: Any, text: str) -> None:
    """Raise DataError if AutoTokenizer's `peer` gives other ids for a text.

    Some of transformers' classes do not read the normaliser and the rules of a tokenizer.json. A
    text that spells a special token, which transformers reads as the token, is not compared.
    """
    special = {*peer.all_special_tokens, str(tokenizer.file.id_to_token(tokenizer.eot))}
    for token in tokenizer.file.get_added_tokens_decoder().values():
        if token.special:
            special.add(token.content)
    if any(token in text for token in special):
        return
    if peer(text, add_special_tokens=False)["input_ids"] != tokenizer.encode(text):
        raise DataError(
            f"tokenizer {tokenizer.name}: transformers' {type(peer).__name__} gives other ids than "
            f"{TOKENIZER_FILE} for {text[:40]!r}: set tokenizer_class to PreTrainedTokenizerFast "
            f"in its tokenizer_config.json, which reads {TOKENIZER_FILE} as it is"
        )


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


class Change(NamedTuple):
    """What encoding and decoding changes in a text."""

    lost: int = 0  # characters that a declared normalisation does not explain
    example: str = ""  # empty: the text comes back as it is
    reason: str = ""  # the normalisation, if nothing is lost


def compare_text(tokenizer: Tokenizer, text: str) -> Change:
    """Encode and decode a text; describe what changed."""
    ids = tokenizer.encode(text)
    if isinstance(tokenizer, FileTokenizer):
        ids = [i for i in ids if i != tokenizer.unk]
    decoded = tokenizer.decode(ids)
    if decoded == text:
        return Change()
    lost = count_changes(text, decoded)
    if not lost:
        example = f"{text[:CONTEXT]!r} becomes {decoded[:CONTEXT]!r}"
        return Change(0, example, "a space at the start")
    expected = _normalize(tokenizer, text)
    unexplained = count_changes(expected, decoded) + count_dropped(text, expected)
    if not unexplained:
        return Change(0, show_difference(text, decoded), _name_normalizers(tokenizer))
    if unexplained < lost:
        return Change(unexplained, show_difference(expected, decoded))
    return Change(lost, show_difference(text, decoded))


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


def count_dropped(text: str, normalised: str) -> int:
    """Visible characters that a normaliser removes; case, accents and width do not count."""
    return (_fold(text) - _fold(normalised)).total()


def _fold(text: str) -> Counter[str]:
    """The letters, digits, punctuation and symbols of a text, in lower case without accents."""
    compatible = unicodedata.normalize("NFKD", unicodedata.normalize("NFKD", text).casefold())
    return Counter(c for c in compatible if unicodedata.category(c)[0] in "LNPS")


def _normalize(tokenizer: Tokenizer, text: str) -> str:
    """The text after the tokenizer's normaliser, with its marks for spaces as spaces."""
    if not isinstance(tokenizer, FileTokenizer) or tokenizer.file.normalizer is None:
        return text
    return tokenizer.file.normalizer.normalize_str(text).replace("▁", " ")


def _name_normalizers(tokenizer: Tokenizer) -> str:
    """The types of the normalisers in a tokenizer.json."""
    normalizer = json.loads(tokenizer.files.get(TOKENIZER_FILE, b"{}")).get("normalizer")
    assert normalizer  # or nothing had explained the change
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
