"""Text to token ids and back: UTF-8 bytes, GPT-2's byte-pair encoding, or a tokenizer.json of Hugging Face."""

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

from common.text import first_line
from data import DataError

END_OF_TEXT = "<|endoftext|>"
TOKENIZER_FILE = "tokenizer.json"
RANKS_FILE = "gpt2.tiktoken"
RANKS_URL = "https://openaipublic.blob.core.windows.net/encodings/r50k_base.tiktoken"
RANKS_SHA256 = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"
WHISPER = "openai_whisper-20250625"  # its source distribution on PyPI has the file

# tiktoken's regular expression fails (a Rust panic) where it must step back over 10^6 white-space
# characters, so longer runs are cut first. The ids still decode to the same text.
MAX_GAP = 500_000
LONG_GAP = re.compile(rf"(\s{{{MAX_GAP}}})")


class _Encoder(ABC):
    @abstractmethod
    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """One uint16 array, (n,), per text."""

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0].tolist()


class ByteTokenizer(_Encoder):
    """The UTF-8 bytes of a text (ids 0 to 255); 256 ends a document."""

    name = "bytes"
    hash = hashlib.sha256(b"utf-8 bytes, 256 = end of text").hexdigest()
    vocab_size = 257
    eot = 256
    files: ClassVar[dict[str, bytes]] = {}

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """One uint16 array, (n,), per text.

        Lone surrogates, which UTF-8 cannot hold, become `?`.
        """
        return [
            np.frombuffer(text.encode("utf-8", "replace"), np.uint8).astype(np.uint16)
            for text in texts
        ]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; broken UTF-8 becomes U+FFFD, 256 the end-of-text mark."""
        data = b"".join(
            END_OF_TEXT.encode() if i == self.eot else bytes([i]) for i in map(int, ids)
        )
        return data.decode("utf-8", "replace")


class GPT2Tokenizer(_Encoder):
    """GPT-2's byte-pair encoding, by tiktoken.

    `hash` is the sha256 of its BPE file, whose content `ranks` is.
    """

    name = "gpt2"
    hash = RANKS_SHA256
    vocab_size = 50257
    eot = 50256

    def __init__(self, ranks: bytes) -> None:
        import tiktoken
        from tiktoken_ext.openai_public import r50k_pat_str

        self.hash = hashlib.sha256(ranks).hexdigest()
        # stored beside the tokens, so that they decode without a network
        self.files = {RANKS_FILE: ranks}
        self.bpe = tiktoken.Encoding(
            self.name,
            pat_str=r50k_pat_str,
            mergeable_ranks={
                b64decode(token): int(rank) for token, rank in map(bytes.split, ranks.splitlines())
            },
            special_tokens={END_OF_TEXT: self.eot},
            explicit_n_vocab=self.vocab_size,
        )

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """One uint16 array, (n,), per text.

        `<|endoftext|>` is ordinary text; lone surrogates become U+FFFD.
        """
        return [self._encode(text) for text in texts]

    def _encode(self, text: str) -> np.ndarray:
        pieces = [text] if len(text) < MAX_GAP else LONG_GAP.split(text)
        try:
            ids = [self.bpe.encode_to_numpy(piece, disallowed_special=()) for piece in pieces]
        except UnicodeEncodeError:
            return self._encode(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
        return np.concatenate(ids).astype(np.uint16)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; broken UTF-8 becomes U+FFFD, 50256 the end-of-text mark."""
        return self.bpe.decode([int(i) for i in ids], errors="replace")


class FileTokenizer(_Encoder):
    """A tokenizer.json of Hugging Face, by the library `tokenizers`.

    `hash` is the sha256 of its `content`.

    `name` is what to call it, such as its model's folder; the id `eot` ends a document.
    """

    def __init__(self, name: str, content: bytes, eot: int) -> None:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # data.prepare has processes
        import tokenizers

        self.name, self.eot, self.hash = name, eot, hashlib.sha256(content).hexdigest()
        self.files = {TOKENIZER_FILE: content}
        self.file = tokenizers.Tokenizer.from_buffer(content)
        self.file.encode_special_tokens = True  # their texts are ordinary text
        self.vocab_size = 1 + max(self.file.get_vocab().values())

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """One uint16 array, (n,), per text, without special tokens.

        Lone surrogates become U+FFFD.
        """
        texts = [
            text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") for text in texts
        ]
        encoded = self.file.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(one.ids, np.uint16) for one in encoded]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; broken UTF-8 becomes U+FFFD, special tokens their own text."""
        return self.file.decode([int(i) for i in ids], skip_special_tokens=False)


def read_tokenizer_folder(folder: Path) -> FileTokenizer:
    """The tokenizer of a model's folder: its tokenizer.json, and the id that its config.json ends a text with.

    Raises DataError if a file is missing or unreadable, or names no such id.
    """
    try:
        eot = json.loads((folder / "config.json").read_bytes())["eos_token_id"]
        eot = eot[0] if isinstance(eot, list) else eot
        tokenizer = FileTokenizer(
            folder.resolve().name, (folder / TOKENIZER_FILE).read_bytes(), eot
        )
    except Exception as error:  # the library raises its own, all of them plain Exceptions
        raise DataError(
            f"{folder}: cannot be read as a tokenizer ({type(error).__name__}: {first_line(error)}); it needs the "
            f"library tokenizers, {TOKENIZER_FILE} and config.json with eos_token_id, which ends a document"
        ) from error
    if type(eot) is not int or not 0 <= eot < tokenizer.vocab_size:
        raise DataError(
            f"{folder}: eos_token_id is {eot!r}, no id of the tokenizer; use another tokenizer"
        )
    return tokenizer


Tokenizer = ByteTokenizer | GPT2Tokenizer | FileTokenizer
# those that need no file of the user's
TOKENIZERS = {kind.name: kind for kind in (ByteTokenizer, GPT2Tokenizer)}


def load_tokenizer(name: str, ranks: str | Path | None = None) -> Tokenizer:
    """The tokenizer called `name`, or in the folder `name`.

    `ranks` is GPT-2's BPE file; others ignore it.

    Raises DataError if the name is unknown, or the BPE file is missing and unreachable, or has
    another sha256.
    """
    if name == ByteTokenizer.name:
        return ByteTokenizer()
    if name == GPT2Tokenizer.name:
        return GPT2Tokenizer(_read_bpe_file(ranks))
    if Path(name).is_dir():
        return read_tokenizer_folder(Path(name))
    known = ", ".join([*TOKENIZERS, f"a folder with {TOKENIZER_FILE}"])
    raise DataError(f"no tokenizer {name!r}: choose one of {known}")


def identity(tokenizer: Tokenizer | type[ByteTokenizer | GPT2Tokenizer]) -> dict:
    """What meta.json says about a tokenizer."""
    return {key: getattr(tokenizer, key) for key in ("name", "hash", "vocab_size", "eot")}


def token_bytes(tokenizer: Tokenizer) -> list[bytes]:
    """The bytes of each token by id; without end-of-text where that is the last id, else b"" for special tokens."""
    if isinstance(tokenizer, ByteTokenizer):
        return [bytes([i]) for i in range(256)]
    if isinstance(tokenizer, GPT2Tokenizer):
        return [tokenizer.bpe.decode_single_token_bytes(i) for i in range(tokenizer.eot)]
    of_bytes = "ByteLevel" in str(json.loads(tokenizer.files[TOKENIZER_FILE])["decoder"])
    special = {
        i for i, token in tokenizer.file.get_added_tokens_decoder().items() if token.special
    } | {tokenizer.eot}
    texts = [
        "" if i in special else tokenizer.file.id_to_token(i) or ""
        for i in range(tokenizer.vocab_size)
    ]
    return [_bytes_of_token(text, of_bytes) for text in texts]


def _bytes_of_token(text: str, of_bytes: bool) -> bytes:
    """The bytes that a token of a tokenizer.json decodes to; `of_bytes`: each of its characters stands for one."""
    if of_bytes and all(character in FROM_CHARACTERS for character in text):
        return bytes(FROM_CHARACTERS[character] for character in text)
    if match := re.fullmatch("<0x([0-9A-F]{2})>", text):  # a byte that has no other token
        return bytes([int(match[1], 16)])
    return text.replace("▁", " ").encode()


SEEN = [
    *range(ord("!"), ord("~") + 1),
    *range(ord("¡"), ord("¬") + 1),
    *range(ord("®"), ord("ÿ") + 1),
]
HIDDEN = [byte for byte in range(256) if byte not in SEEN]
CHARACTERS = {byte: chr(byte) for byte in SEEN} | {
    byte: chr(256 + i) for i, byte in enumerate(HIDDEN)
}
FROM_CHARACTERS = {character: byte for byte, character in CHARACTERS.items()}


def printable(token: bytes) -> str:
    """Each byte as a visible character, as in GPT-2's files: printable Latin-1 unchanged, the others from U+0100 on."""
    return "".join(CHARACTERS[byte] for byte in token)


def _read_bpe_file(ranks: str | Path | None = None) -> bytes:
    """GPT-2's BPE file: the one given, else the one in tiktoken's cache, else tiktoken's download (r50k_base)."""
    import requests
    from tiktoken.load import read_file_cached

    cache = os.environ.get("TIKTOKEN_CACHE_DIR") or Path(tempfile.gettempdir(), "data-gym-cache")
    cached = Path(cache, hashlib.sha1(RANKS_URL.encode()).hexdigest())  # tiktoken's own name for it
    path = Path(ranks) if ranks else cached
    try:
        if ranks or cached.is_file():
            data = path.read_bytes()
        else:
            # tiktoken itself waits for a dead network forever
            requests.head(RANKS_URL, timeout=5).raise_for_status()
            data = read_file_cached(RANKS_URL, RANKS_SHA256)
        actual = hashlib.sha256(data).hexdigest()
        fault = (
            f"not GPT-2's BPE file: sha256 {actual}, expected {RANKS_SHA256}"
            if actual != RANKS_SHA256
            else ""
        )
    except requests.RequestException as error:
        data, fault = b"", f"no such file, and its download fails ({type(error).__name__})"
    except (OSError, ValueError) as error:
        data, fault = b"", f"cannot read GPT-2's BPE file ({first_line(error)})"
    if fault:
        raise DataError(
            f"{path}: {fault}. Prepare with --tokenizer bytes, which needs no file, or put GPT-2's BPE file there or "
            f"into --bpe-ranks FILE: PyPI has it in {WHISPER}.tar.gz, whisper/assets/{RANKS_FILE}"
        )
    return data
