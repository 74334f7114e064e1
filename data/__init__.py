"""From text to training windows: corpora, tokenizers, the file format, the order of windows."""


class DataError(ValueError):
    """The data cannot be used as requested; the message names the fault and the remedy."""
