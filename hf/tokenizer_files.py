"""Write a data set's tokenizer as tokenizer.json and tokenizer_config.json, for transformers."""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from data.tokenizer import (
    END_OF_TEXT,
    TOKENIZER_FILE,
    FileTokenizer,
    Tokenizer,
    printable,
    token_bytes,
)

PADDING = "<|padding|>"
NAMES_OF_PADDING = re.compile(r"\W*pad(ding)?\W*", re.IGNORECASE)  # such as [PAD]


def write_json(path: Path, body: dict[str, Any]) -> None:
    """Write indented JSON as UTF-8."""
    path.write_text(json.dumps(body, ensure_ascii=False, indent=1) + "\n", "utf-8")


def choose_padding(tokenizer: Tokenizer, vocab_size: int) -> int | None:
    """The id of a padding token, which the data do not use and which is not the end of a text.

    transformers' collators leave padding out of the loss.

    Args:
        tokenizer: of the run.
        vocab_size: number of ids of the model.

    Returns:
        A special token of the tokenizer that is named so, such as [PAD]; else the id after its
        last; None if the model has no such id.
    """
    if isinstance(tokenizer, FileTokenizer):
        for number, token in tokenizer.file.get_added_tokens_decoder().items():
            is_padding = token.special and NAMES_OF_PADDING.fullmatch(token.content)
            if is_padding and number not in (tokenizer.eot, tokenizer.unk):
                return number
    return tokenizer.vocab_size if tokenizer.vocab_size < vocab_size else None


def write_tokenizer(
    tokenizer: Tokenizer, folder: str | Path, block_size: int, padding: int | None = None
) -> None:
    """Write both files into `folder`.

    They give the same ids, except where a text contains the marks of the end of a text or of
    padding: transformers reads them as the tokens, unless it is called with
    split_special_tokens=True. The tokenizer.json of another project is copied, but neither adds
    tokens to a text nor cuts it, as data.prepare does not.

    Args:
        tokenizer: of the run.
        folder: of the export.
        block_size: of the model.
        padding: see `choose_padding`.
    """
    if isinstance(tokenizer, FileTokenizer):
        body = json.loads(tokenizer.files[TOKENIZER_FILE])
        body |= {"post_processor": None, "truncation": None, "padding": None}
        body["model"].pop("dropout", None)
        end = tokenizer.file.id_to_token(tokenizer.eot)
    else:
        body = describe_tokenizer(tokenizer)
        end = END_OF_TEXT
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": block_size,
        "clean_up_tokenization_spaces": False,
        "bos_token": end,
        "eos_token": end,
    }
    if padding is not None:
        config["pad_token"] = name_padding(tokenizer, padding, body)
    write_json(Path(folder, TOKENIZER_FILE), body)
    write_json(Path(folder, "tokenizer_config.json"), config)


def name_padding(tokenizer: Tokenizer, padding: int, body: dict[str, Any]) -> str:
    """The name of the token `padding`, which is added to `body`, a tokenizer.json, if it is new."""
    vocabulary = make_vocabulary(tokenizer)
    for text, number in vocabulary.items():
        if number == padding:
            return text
    name = f"<|padding {padding}|>" if PADDING in vocabulary else PADDING
    body["added_tokens"].append(describe_special(padding, name))
    ids = body["model"]["vocab"]
    # some ids are of no token, and a new one would get the number (Unigram lists all ids)
    if len(vocabulary) < padding and isinstance(ids, dict):
        ids[name] = padding
    return name


def describe_special(number: int, text: str) -> dict[str, Any]:
    """A special token of a tokenizer.json."""
    return {
        "id": number,
        "content": text,
        "special": True,
        "normalized": False,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
    }


def describe_tokenizer(tokenizer: Tokenizer) -> dict[str, Any]:
    """The tokenizer.json of bytes or of GPT-2's encoding."""
    tokens = token_bytes(tokenizer)
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,  # GPT-2's regular expression splits a text first; bytes merge nothing
    }
    return {
        "version": "1.0",
        "added_tokens": [describe_special(tokenizer.eot, END_OF_TEXT)],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "ignore_merges": True,  # a word that is a token becomes that token, as in tiktoken
            "vocab": make_vocabulary(tokenizer),
            "merges": [[printable(left), printable(right)] for left, right in find_merges(tokens)],
        },
    }


def make_vocabulary(tokenizer: Tokenizer) -> dict[str, int]:
    """The id of each token by its text in a tokenizer.json."""
    if isinstance(tokenizer, FileTokenizer):
        return tokenizer.file.get_vocab()
    ids = {printable(token): rank for rank, token in enumerate(token_bytes(tokenizer))}
    return ids | {END_OF_TEXT: tokenizer.eot}


def find_merges(tokens: Sequence[bytes]) -> Iterator[list[bytes]]:
    """Yield each two tokens that make a token of several bytes, in the order of these tokens.

    tiktoken needs no such list: it merges any two neighbours that make a token, lowest rank first.
    So does transformers' TikTokenConverter.
    """
    known = set(tokens)
    for token in tokens:
        for i in range(1, len(token)):
            if token[:i] in known and token[i:] in known:
                yield [token[:i], token[i:]]
