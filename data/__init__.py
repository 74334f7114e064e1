"""From text to training windows: corpora, tokenizers, the file format, the order of windows."""

import common  # noqa: F401  # checks this Python first

BARE_TOKENS = (
    "a .bin of nanoGPT or the like: tokens without a meta.json that says which tokenizer made "
    "them. Prepare the text they were made from"
)


class DataError(ValueError):
    """The data cannot be used as requested; the message names the fault and the remedy."""
