"""Text to token ids and back: UTF-8 bytes, GPT-2's BPE, or a tokenizer.json of Hugging Face."""

import hashlib
import json
import os
import re
import tempfile
from abc import ABC, abstractmethod
from base64 import b64decode
from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar

import numpy as np

from common.files import exists, is_file, is_folder, read_content
from common.text import first_line
from data import DataError
from data.bins import name_remedy, read_meta

END_OF_TEXT = "<|endoftext|>"
TOKENIZER_FILE = "tokenizer.json"
RANKS_FILE = "gpt2.tiktoken"
RANKS_URL = "https://openaipublic.blob.core.windows.net/encodings/r50k_base.tiktoken"
RANKS_SHA256 = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"
WHISPER = "openai_whisper-20250625"  # its source distribution on PyPI has the file

BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")  # name of a byte token (byte fallback)

# tiktoken's regular expression fails (a Rust panic) on 10^6 white-space characters in a row, so
# longer runs are cut first. The ids still decode to the same text.
MAX_GAP = 500_000
# From its start, and never less than all of it: time grows with the text, not with its square.
LONG_GAP = re.compile(rf"(?<!\s)\s{{{MAX_GAP},}}+")


class _Encoder(ABC):
    @abstractmethod
    def encode_array(self, text: str) -> np.ndarray:
        """The ids of a text, (n,) uint16."""

    def encode(self, text: str) -> list[int]:
        return self.encode_array(text).tolist()


class ByteTokenizer(_Encoder):
    """The UTF-8 bytes of a text (ids 0 to 255); 256 ends a document."""

    name = "bytes"
    hash = hashlib.sha256(b"utf-8 bytes, 256 = end of text").hexdigest()
    vocab_size = 257
    eot = 256
    files: ClassVar[dict[str, bytes]] = {}

    def encode_array(self, text: str) -> np.ndarray:
        """The ids of a text, (n,) uint16.

        Lone surrogates, which UTF-8 cannot hold, become `?`.
        """
        return np.frombuffer(text.encode("utf-8", "replace"), np.uint8).astype(np.uint16)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; broken UTF-8 becomes U+FFFD, 256 the end-of-text mark."""
        data = bytearray()
        for i in ids:
            data += END_OF_TEXT.encode() if i == self.eot else bytes([i])
        return data.decode("utf-8", "replace")


def cut_gaps(text: str) -> list[str]:
    """Cut a text at the start of each LONG_GAP and after every MAX_GAP characters of it."""
    pieces = []
    start = 0
    for gap in LONG_GAP.finditer(text):
        for end in range(gap.start(), gap.end() + 1, MAX_GAP):
            pieces.append(text[start:end])
            start = end
    return [*pieces, text[start:]]


def _replace_surrogates(text: str) -> str:
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class GPT2Tokenizer(_Encoder):
    """GPT-2's byte-pair encoding, by tiktoken.

    `ranks` is the content of its BPE file, `hash` its sha256.
    """

    name = "gpt2"
    hash = RANKS_SHA256
    vocab_size = 50257
    eot = 50256

    def __init__(self, ranks: bytes) -> None:
        import tiktoken
        from tiktoken_ext.openai_public import r50k_pat_str

        self.hash = hashlib.sha256(ranks).hexdigest()
        self.files = {RANKS_FILE: ranks}  # stored with the tokens: they decode without a network
        rank_of_token = {}
        for line in ranks.splitlines():
            token, rank = line.split()
            rank_of_token[b64decode(token)] = int(rank)
        self.bpe = tiktoken.Encoding(
            self.name,
            pat_str=r50k_pat_str,
            mergeable_ranks=rank_of_token,
            special_tokens={END_OF_TEXT: self.eot},
            explicit_n_vocab=self.vocab_size,
        )

    def encode_array(self, text: str) -> np.ndarray:
        """The ids of a text, (n,) uint16.

        `<|endoftext|>` is ordinary text; lone surrogates become U+FFFD.
        """
        pieces = cut_gaps(text) if len(text) >= MAX_GAP else [text]
        try:
            ids = [self.bpe.encode_to_numpy(piece, disallowed_special=()) for piece in pieces]
        except UnicodeEncodeError:
            return self.encode_array(_replace_surrogates(text))
        return np.concatenate(ids).astype(np.uint16)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; broken UTF-8 becomes U+FFFD, 50256 the end-of-text mark."""
        return self.bpe.decode([int(i) for i in ids], errors="replace")


class FileTokenizer(_Encoder):
    """A tokenizer.json of Hugging Face, by the library `tokenizers`.

    It gives the ids of `AutoTokenizer.from_pretrained(folder)(text, add_special_tokens=False)`, but
    a special token that a text spells is ordinary text.

    Args:
        name: any name, such as its model's folder.
        content: of the file; `hash` is its sha256.
        eot: the id that ends a document.
    """

    def __init__(self, name: str, content: bytes, eot: int) -> None:
        # data.prepare already has a process per core
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        import tokenizers

        self.name = name
        self.eot = eot
        self.hash = hashlib.sha256(content).hexdigest()
        self.files = {TOKENIZER_FILE: content}
        self.file = tokenizers.Tokenizer.from_buffer(content)  # decodes
        body = hide_special_tokens(json.loads(content), eot)
        self.encoder = tokenizers.Tokenizer.from_str(json.dumps(body))
        self.encoder.encode_special_tokens = True  # not searched for in texts
        self.vocab_size = 1 + max(self.file.get_vocab().values())
        self.unk = find_unknown_id(body["model"])
        decoder = str(body.get("decoder"))
        self.byte_level = "ByteLevel" in decoder
        self.tokens_have_bytes = self.byte_level or "▁" in decoder  # not in WordPiece

    def encode_array(self, text: str) -> np.ndarray:
        """The ids of a text, (n,) uint16, without special tokens.

        Lone surrogates become U+FFFD. Raises DataError if the tokenizer cannot encode a text.
        """
        text = _replace_surrogates(text)
        try:
            # of a batch, because only that does not compute the places of the tokens
            encodings = self.encoder.encode_batch_fast([text], add_special_tokens=False)
        except Exception as error:  # `tokenizers` raises plain ones, such as for a missing unk_id
            raise DataError(
                f"tokenizer {self.name} cannot encode a text ({first_line(error)}); "
                f"use another tokenizer"
            ) from error
        return np.array(encodings[0].ids, np.uint16)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; broken UTF-8 becomes U+FFFD, special tokens their own text."""
        return self.file.decode([int(i) for i in ids], skip_special_tokens=False)


def hide_special_tokens(body: dict, eot: int) -> dict:
    """Change a tokenizer.json so that texts are encoded whole and spell no special token.

    Truncation, padding and dropout are off. Special tokens and `eot` keep their ids and get names
    that no text spells: a Unigram or WordPiece model would find the old ones.
    """
    body |= {"truncation": None, "padding": None, "post_processor": None}
    model = body["model"]
    model.pop("dropout", None)
    hidden = {}  # new names by the old ones
    for token in body["added_tokens"]:
        is_byte = model.get("byte_fallback") and BYTE_TOKEN.fullmatch(token["content"])
        if (token["special"] or token["id"] == eot) and not is_byte:
            hidden[token["content"]] = f"\uf8ffspecial token {token['id']}\uf8ff"
            token["content"] = hidden[token["content"]]
            token["special"] = True
    if isinstance(model["vocab"], dict):
        model["vocab"] = {hidden.get(token, token): i for token, i in model["vocab"].items()}
    else:
        model["vocab"] = [[hidden.get(token, token), score] for token, score in model["vocab"]]
    if model.get("unk_token") in hidden:
        model["unk_token"] = hidden[model["unk_token"]]
    return body


def find_unknown_id(model: dict) -> int | None:
    """The id of what a tokenizer.json's model does not know; None if it has none."""
    if "unk_id" in model:
        return model["unk_id"]
    unknown = model.get("unk_token")
    return None if unknown is None else model["vocab"].get(unknown)


def read_tokenizer_folder(folder: Path) -> FileTokenizer:
    """The tokenizer of a model's folder: tokenizer.json, and the token that ends a document.

    Raises DataError if a file is missing or unreadable, ids do not fit uint16, or no token can end
    a document, see `find_eot`.
    """
    try:
        contents = [read_content(folder / TOKENIZER_FILE)]
        for name in ("config.json", "tokenizer_config.json"):
            file = folder / name
            contents.append(read_content(file) if exists(file) else b"{}")
        eot = find_eot(*map(json.loads, contents))
        tokenizer = FileTokenizer(folder.resolve().name, contents[0], eot)
        if tokenizer.vocab_size > 2**16:
            raise DataError(
                f"it has {tokenizer.vocab_size} ids, shards hold 65536; use another tokenizer"
            )
        return tokenizer
    except DataError as error:
        raise DataError(f"{folder}: {error}") from None
    except Exception as error:  # `tokenizers` raises plain Exceptions
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise DataError(
            f"{folder}: cannot be read as a tokenizer ({reason}); it needs the library tokenizers, "
            f"{TOKENIZER_FILE} and config.json with eos_token_id, which ends a document"
        ) from error


def find_eot(body: dict, config: dict, settings: dict) -> int:
    """The id that ends a document: eos_token_id of config.json, else tokenizer_config's eos_token.

    Args:
        body: of tokenizer.json.
        config: of config.json, empty if there is none.
        settings: of tokenizer_config.json, empty if there is none.

    Raises:
        DataError: names the candidates. There is none, the files disagree, or the token is an
            ordinary one, which texts contain.
    """
    added = {token["id"]: token["content"] for token in body["added_tokens"]}
    name = settings.get("eos_token")
    if isinstance(name, dict):
        name = name["content"]
    named = [i for i, content in added.items() if content == name]
    ids = config.get("eos_token_id")
    if ids is None:
        ids = named
    elif not isinstance(ids, list):
        ids = [ids]
    unknown = find_unknown_id(body["model"])
    if not ids:
        fault = (
            "neither config.json's eos_token_id nor tokenizer_config.json's eos_token names a "
            f"token of {TOKENIZER_FILE} that ends a document"
        )
    elif named and named[0] not in ids:
        fault = (
            f"config.json's eos_token_id is {ids[0]}, tokenizer_config.json's eos_token {named[0]}"
        )
    elif ids[0] == unknown:
        fault = f"eos_token_id {ids[0]} also stands for unknown text"
    elif type(ids[0]) is not int or ids[0] not in added:
        fault = f"eos_token_id {ids[0]} is none of added_tokens, so texts may contain it"
    else:
        return ids[0]
    candidates = [f"{i} ({added[i]})" for i in sorted(added) if i != unknown]
    remedy = f"set config.json's eos_token_id to one of {', '.join(candidates[:20])}"
    if not candidates:
        remedy = "its added_tokens have none that can end a document; use another tokenizer"
    raise DataError(f"{fault}; {remedy}")


Tokenizer = ByteTokenizer | GPT2Tokenizer | FileTokenizer
TOKENIZERS = {"bytes": ByteTokenizer, "gpt2": GPT2Tokenizer}  # the others are files of the user


def load_tokenizer(name: str, ranks: str | Path | None = None) -> Tokenizer:
    """The tokenizer called `name`, or the one in the folder `name`.

    `ranks` is GPT-2's BPE file; other tokenizers ignore it.

    Raises DataError if the name is unknown, or the BPE file is missing and unreachable, or its
    sha256 is wrong.
    """
    if name == ByteTokenizer.name:
        return ByteTokenizer()
    if name == GPT2Tokenizer.name:
        return GPT2Tokenizer(_read_bpe_file(ranks))
    if is_folder(Path(name)):
        return read_tokenizer_folder(Path(name))
    known = ", ".join([*TOKENIZERS, f"a folder with {TOKENIZER_FILE}"])
    raise DataError(f"no tokenizer {name!r}: choose one of {known}")


def open_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer that made this set, from the set's own files; needs no network.

    Raises DataError if a file is another tokenizer's.
    """
    meta = read_meta(folder)
    info = meta.tokenizer
    tokenizer_file = folder / TOKENIZER_FILE
    tokenizer: Tokenizer | None = None
    content = b""
    if is_file(tokenizer_file):
        content = read_content(tokenizer_file)
        found = hashlib.sha256(content).hexdigest()  # before it is parsed: it may be damaged
    else:
        ranks_file = folder / RANKS_FILE
        tokenizer = load_tokenizer(info["name"], ranks_file if is_file(ranks_file) else None)
        found = tokenizer.hash
    if found != info["hash"]:
        raise DataError(
            f"{tokenizer_file}: not of the tokenizer that made the set: expected sha256 "
            f"{info['hash']}, found {found}. Put the set's own back, or remove it if the "
            f"set has none. {name_remedy(meta, folder)}"
        )
    return tokenizer or FileTokenizer(info["name"], content, info["eot"])


def identity(tokenizer: Tokenizer | type[ByteTokenizer | GPT2Tokenizer]) -> dict:
    """The identity of a tokenizer as in meta.json."""
    return {key: getattr(tokenizer, key) for key in ("name", "hash", "vocab_size", "eot")}


def token_bytes(tokenizer: Tokenizer) -> list[bytes]:
    """The bytes of each token by id.

    The lists of `bytes` and `gpt2` end before end-of-text, the last id. In others end-of-text and
    special tokens are b"".
    """
    if isinstance(tokenizer, ByteTokenizer):
        return [bytes([i]) for i in range(256)]
    if isinstance(tokenizer, GPT2Tokenizer):
        return [tokenizer.bpe.decode_single_token_bytes(i) for i in range(tokenizer.eot)]
    added = tokenizer.file.get_added_tokens_decoder()
    empty = {tokenizer.eot}
    for i, token in added.items():
        if token.special and not BYTE_TOKEN.fullmatch(token.content):
            empty.add(i)
    tokens = []
    for i in range(tokenizer.vocab_size):
        text = "" if i in empty else tokenizer.file.id_to_token(i) or ""
        byte = BYTE_TOKEN.fullmatch(text)  # a byte without another token
        if tokenizer.byte_level and FROM_CHARACTERS.keys() >= {*text}:
            tokens.append(bytes(FROM_CHARACTERS[character] for character in text))
        elif byte:
            tokens.append(bytes([int(byte[1], 16)]))
        else:
            tokens.append(text.replace("▁", " ").encode())
    return tokens


# GPT-2's visible character for each byte: itself in printable Latin-1, else from U+0100 on
VISIBLE = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), 256)]
HIDDEN = sorted(set(range(256)) - set(VISIBLE))
CHARACTERS = {byte: chr(byte) for byte in VISIBLE}
CHARACTERS |= {byte: chr(256 + number) for number, byte in enumerate(HIDDEN)}
FROM_CHARACTERS = {character: byte for byte, character in CHARACTERS.items()}


def printable(token: bytes) -> str:
    """The bytes of a token as visible characters, as GPT-2's files have them."""
    return "".join(CHARACTERS[byte] for byte in token)


def _read_bpe_file(ranks: str | Path | None = None) -> bytes:
    """Read GPT-2's BPE file: `ranks`, else tiktoken's cached copy, else download r50k_base."""
    import requests
    from tiktoken.load import read_file_cached

    cache = os.environ.get("TIKTOKEN_CACHE_DIR") or Path(tempfile.gettempdir(), "data-gym-cache")
    cached = Path(cache, hashlib.sha1(RANKS_URL.encode()).hexdigest())  # tiktoken's name for it
    path = Path(ranks or cached)
    try:
        if not ranks and not is_file(cached):
            # tiktoken alone would wait for an unreachable network forever
            requests.head(RANKS_URL, timeout=5).raise_for_status()
            return read_file_cached(RANKS_URL, RANKS_SHA256)
        data = path.read_bytes()
        actual = hashlib.sha256(data).hexdigest()
        if actual == RANKS_SHA256:
            return data
        fault = f"not GPT-2's BPE file: sha256 {actual}, expected {RANKS_SHA256}"
    except (OSError, ValueError) as error:  # those of requests are OSErrors
        fault = f"cannot be read or downloaded ({type(error).__name__}: {first_line(error)})"
    raise DataError(
        f"{path}: {fault}. Prepare with --tokenizer bytes, which needs no file, or put GPT-2's BPE "
        f"file there or into --bpe-ranks FILE: PyPI has it in {WHISPER}.tar.gz, "
        f"whisper/assets/{RANKS_FILE}"
    )
