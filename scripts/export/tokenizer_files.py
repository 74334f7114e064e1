"""A data set's tokenizer as the files that transformers reads: tokenizer.json and tokenizer_config.json."""

import json
from base64 import b64decode
from pathlib import Path

from data.tokenizer import END_OF_TEXT, RANKS_FILE


def write_tokenizer(tokenizer, folder, block_size):
    """Write both files of a ByteTokenizer or GPT2Tokenizer into `folder`. Ids are the same; but where a text holds the
    end-of-text mark, transformers reads it as that token."""
    tokens = [bytes([i]) for i in range(256)] if tokenizer.name == "bytes" else tokens_of(tokenizer.files[RANKS_FILE])
    end = {"id": tokenizer.eot, "content": END_OF_TEXT, "special": True, "normalized": False}
    end |= dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    by_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    body = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [end],
        "normalizer": None,
        "pre_tokenizer": by_bytes | {"use_regex": tokenizer.name == "gpt2"},  # its regular expression is GPT-2's
        "post_processor": None,
        "decoder": by_bytes,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,  # a word that is a token is that token, as in tiktoken
            "vocab": {printable(token): rank for rank, token in enumerate(tokens)} | {END_OF_TEXT: tokenizer.eot},
            "merges": [[printable(left), printable(right)] for left, right in merges_of(tokens)],
        },
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": block_size,
        "clean_up_tokenization_spaces": False,
        **dict.fromkeys(("bos_token", "eos_token", "pad_token"), END_OF_TEXT),
    }
    Path(folder, "tokenizer.json").write_text(json.dumps(body, ensure_ascii=False, indent=1) + "\n", "utf-8")
    Path(folder, "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n", "utf-8")


def tokens_of(ranks):
    """The bytes of each token, by rank, in tiktoken's file of them."""
    pairs = sorted((int(rank), b64decode(token)) for token, rank in map(bytes.split, ranks.splitlines()))
    return [token for _, token in pairs]


def merges_of(tokens):
    """Yields the pair of tokens that each of two bytes or more is made of: what merging its bytes, the lowest rank
    first, leaves while the token itself is not known yet. tiktoken needs no such list, as it merges by ranks alone."""
    ranks = {token: rank for rank, token in enumerate(tokens)}
    for rank, token in enumerate(tokens):
        parts = [token[i : i + 1] for i in range(len(token))]
        while len(parts) > 2:
            pairs = [ranks.get(left + right, rank) for left, right in zip(parts, parts[1:], strict=False)]
            at = pairs.index(min(pairs))
            assert pairs[at] < rank, f"token {rank} ({token!r}) cannot be made of two others"
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        if len(parts) == 2:
            yield parts


def printable(token):
    """The token with each byte as a character that can be seen, GPT-2's way: printable Latin-1 as it is, the others
    from U+0100 on."""
    return "".join(CHARACTERS[byte] for byte in token)


SEEN = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
HIDDEN = [byte for byte in range(256) if byte not in SEEN]
CHARACTERS = {byte: chr(byte) for byte in SEEN} | {byte: chr(256 + i) for i, byte in enumerate(HIDDEN)}
