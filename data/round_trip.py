"""Does a tokenizer give text back? Documents are encoded, decoded and compared."""

import os
from collections import Counter

from data import DataError
from data.tokenizer import Tokenizer

# Of a file's documents the first is compared, then each 31st: rows of two languages may alternate,
# so a number with few divisors.
EVERY = 31
PIECE = 2**14  # characters; of each 31 pieces of such a document the first is compared
ALLOWED_SHARE = 0.001  # share of characters lost; more is refused unless a flag allows it
CONTEXT = 15  # characters around a difference in an example


class Loss:
    """Compares texts with what comes back, and counts."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.example = ""  # the first difference

    def compare(self, tokenizer: Tokenizer, text: str, where: str) -> None:
        """Compare pieces of the document at `where`."""
        lost = 0
        for start in range(0, len(text), EVERY * PIECE):
            piece = text[start : start + PIECE]
            decoded = tokenizer.decode(tokenizer.encode(piece))
            self.counts["characters"] += len(piece)
            # many tokenizers add a space at the start, or drop one
            if decoded not in (piece, f" {piece}", piece.removeprefix(" ")):
                lost += count_changes(piece, decoded)
                self.example = self.example or f"{where}: {show_difference(piece, decoded)}"
        self.counts["lost"] += lost
        self.counts["compared"] += 1
        self.counts["different"] += lost > 0


def count_changes(text: str, decoded: str) -> int:
    """Characters of `text` that `decoded` lacks, or the other way round if these are more."""
    missing = Counter(text) - Counter(decoded)
    added = Counter(decoded) - Counter(text)
    return max(1, missing.total(), added.total())  # 1: the order differs


def show_difference(text: str, decoded: str) -> str:
    """The first place where two texts differ, in words."""
    same = len(os.path.commonprefix([text, decoded]))
    start = max(0, same - CONTEXT)
    stop = same + CONTEXT
    return f"{text[start:stop]!r} becomes {decoded[start:stop]!r}"


def describe_loss(counts: dict[str, int], example: str) -> str:
    """What `Loss` counted, in words; empty if every text came back."""
    if not counts.get("different"):
        return ""
    share = counts["lost"] / counts["characters"]
    return (
        f"decode(encode(x)) differs for {counts['different']:,} of {counts['compared']:,} "
        f"documents compared, in {100 * share:.3g}% of their characters, first {example}"
    )


def check_loss(tokenizer: Tokenizer, counts: dict[str, int], example: str) -> None:
    """Raise DataError if more than ALLOWED_SHARE of the compared characters are lost."""
    if counts.get("lost", 0) > ALLOWED_SHARE * counts.get("characters", 0):
        raise DataError(
            f"tokenizer {tokenizer.name}: {describe_loss(counts, example)}. Choose another "
            f"tokenizer, or accept the loss with --allow-loss"
        )
