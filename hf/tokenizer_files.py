"""Write a data set's tokenizer as tokenizer.json and tokenizer_config.json, for transformers."""

import json
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


def write_json(path: Path, body: dict[str, Any]) -> None:
    """Write indented JSON as UTF-8."""
    path.write_text(json.dumps(body, ensure_ascii=False, indent=1) + "\n", "utf-8")


def write_tokenizer(tokenizer: Tokenizer, folder: str | Path, block_size: int) -> None:
    """Write both files into `folder`.

    They give the same ids, except where a text contains the end-of-text mark: transformers reads
    the mark as the token. The tokenizer.json of another project is copied, but adds no token to a
    text, as data.prepare adds none.
    """
    if isinstance(tokenizer, FileTokenizer):
        body = json.loads(tokenizer.files[TOKENIZER_FILE])
        body["post_processor"] = None
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
        "pad_token": end,
    }
    write_json(Path(folder, TOKENIZER_FILE), body)
    write_json(Path(folder, "tokenizer_config.json"), config)


def describe_tokenizer(tokenizer: Tokenizer) -> dict[str, Any]:
    """The tokenizer.json of bytes or of GPT-2's encoding."""
    tokens = token_bytes(tokenizer)
    end = {
        "id": tokenizer.eot,
        "content": END_OF_TEXT,
        "special": True,
        "normalized": False,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
    }
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": tokenizer.name == "gpt2",  # GPT-2's regular expression splits a text first
    }
    return {
        "version": "1.0",
        "added_tokens": [end],
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
    """Yield the two tokens that each token of several bytes is merged from.

    To find them, the token's bytes are merged, lowest rank first, until two parts are left.
    tiktoken needs no such list, because it merges by rank alone.
    """
    ranks = {token: rank for rank, token in enumerate(tokens)}
    for rank, token in enumerate(tokens):
        parts = [token[i : i + 1] for i in range(len(token))]
        while len(parts) > 2:
            pairs = zip(parts, parts[1:], strict=False)
            ranks_of_pairs = [ranks.get(left + right, rank) for left, right in pairs]
            lowest = min(ranks_of_pairs)
            assert lowest < rank, f"token {rank} ({token!r}) is not made of two other tokens"
            first = ranks_of_pairs.index(lowest)
            parts[first : first + 2] = [tokens[lowest]]
        if len(parts) == 2:
            yield parts
