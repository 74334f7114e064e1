"""From text to training windows: corpora, tokenizers, the file format, and the order in which windows are read."""


class DataError(ValueError):
    """The data cannot be used as asked; the message names the thing at fault and the remedy."""
