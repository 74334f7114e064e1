"""Text to token ids and back: UTF-8 bytes, or GPT-2's byte-pair encoding."""

import hashlib
import os
import re
import tempfile
from base64 import b64decode
from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar

import numpy as np

from data import DataError
from runtime.output import first_line

END_OF_TEXT = "<|endoftext|>"
RANKS_FILE = "gpt2.tiktoken"
RANKS_URL = "https://openaipublic.blob.core.windows.net/encodings/r50k_base.tiktoken"
RANKS_SHA256 = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"
WHISPER = "openai_whisper-20250625"  # its source distribution on PyPI has the file

# tiktoken's regular expression fails (a Rust panic) where it must step back over 10^6 white-space characters,
# so longer runs are cut first. The ids still decode to the same text.
MAX_GAP = 500_000
LONG_GAP = re.compile(rf"(\s{{{MAX_GAP}}})")


class TokenizerError(DataError):
    """The tokenizer is unknown, or the file that defines it is missing or wrong."""


class ByteTokenizer:
    """The UTF-8 bytes of a text (ids 0 to 255); 256 ends a document."""

    name = "bytes"
    hash = hashlib.sha256(b"utf-8 bytes, 256 = end of text").hexdigest()
    vocab_size = 257
    eot = 256
    files: ClassVar[dict[str, bytes]] = {}

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """One uint16 array, (n,), per text. Lone surrogates, which UTF-8 cannot hold, become `?`."""
        return [np.frombuffer(text.encode("utf-8", "replace"), np.uint8).astype(np.uint16) for text in texts]

    def encode(self, text: str) -> list[int]:
        """The ids of one text."""
        return self.encode_batch([text])[0].tolist()

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; broken UTF-8 becomes U+FFFD, 256 the end-of-text mark."""
        data = b"".join(END_OF_TEXT.encode() if i == self.eot else bytes([i]) for i in map(int, ids))
        return data.decode("utf-8", "replace")


class GPT2Tokenizer:
    """GPT-2's byte-pair encoding, by tiktoken. `hash` is the sha256 of its BPE file.

    Args:
        ranks: the content of that file.
    """

    name = "gpt2"
    vocab_size = 50257
    eot = 50256

    def __init__(self, ranks: bytes) -> None:
        import tiktoken
        from tiktoken_ext.openai_public import r50k_pat_str

        self.hash = hashlib.sha256(ranks).hexdigest()
        self.files = {RANKS_FILE: ranks}  # stored beside the tokens, so that they decode without a network
        self.bpe = tiktoken.Encoding(
            self.name,
            pat_str=r50k_pat_str,
            mergeable_ranks={b64decode(token): int(rank) for token, rank in map(bytes.split, ranks.splitlines())},
            special_tokens={END_OF_TEXT: self.eot},
            explicit_n_vocab=self.vocab_size,
        )

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """One uint16 array, (n,), per text. `<|endoftext|>` is ordinary text; lone surrogates become U+FFFD."""
        return [self._encode(text) for text in texts]

    def _encode(self, text: str) -> np.ndarray:
        pieces = [text] if len(text) < MAX_GAP else LONG_GAP.split(text)
        try:
            ids = [self.bpe.encode_to_numpy(piece, disallowed_special=()) for piece in pieces]
        except UnicodeEncodeError:
            return self._encode(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
        return np.concatenate(ids).astype(np.uint16)

    def encode(self, text: str) -> list[int]:
        """The ids of one text."""
        return self.encode_batch([text])[0].tolist()

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; broken UTF-8 becomes U+FFFD, 50256 the end-of-text mark."""
        return self.bpe.decode([int(i) for i in ids], errors="replace")


Tokenizer = ByteTokenizer | GPT2Tokenizer
TOKENIZERS = (ByteTokenizer.name, GPT2Tokenizer.name)


def load_tokenizer(name: str, ranks: str | Path | None = None) -> Tokenizer:
    """The tokenizer called `name`. `ranks` is GPT-2's BPE file; `bytes` ignores it.

    Raises:
        TokenizerError: the name is unknown, or the BPE file is missing and unreachable, or has another sha256.
    """
    if name == ByteTokenizer.name:
        return ByteTokenizer()
    if name == GPT2Tokenizer.name:
        return GPT2Tokenizer(_read_bpe_file(ranks))
    raise TokenizerError(f"no tokenizer {name!r}: choose one of {', '.join(TOKENIZERS)}")


def identity(tokenizer: Tokenizer | str) -> dict:
    """What meta.json says about a tokenizer, given itself or its name."""
    if tokenizer == GPT2Tokenizer.name:
        return {"hash": RANKS_SHA256} | {key: getattr(GPT2Tokenizer, key) for key in ("name", "vocab_size", "eot")}
    found = ByteTokenizer if tokenizer == ByteTokenizer.name else tokenizer
    return {key: getattr(found, key) for key in ("name", "hash", "vocab_size", "eot")}


def token_bytes(tokenizer: Tokenizer) -> list[bytes]:
    """The bytes of each token by id, without end-of-text, which is the last id."""
    if isinstance(tokenizer, ByteTokenizer):
        return [bytes([i]) for i in range(256)]
    return [tokenizer.bpe.decode_single_token_bytes(i) for i in range(tokenizer.eot)]


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
            requests.head(RANKS_URL, timeout=5).raise_for_status()  # tiktoken itself waits for a dead network forever
            data = read_file_cached(RANKS_URL, RANKS_SHA256)
        found = hashlib.sha256(data).hexdigest()
        fault = f"not GPT-2's BPE file: sha256 {found}, expected {RANKS_SHA256}" if found != RANKS_SHA256 else ""
    except (requests.RequestException, OSError, ValueError) as error:
        data, download = b"", "" if ranks else f", nor download it from {RANKS_URL}"
        fault = f"cannot read GPT-2's BPE file{download} ({type(error).__name__}: {first_line(error)})"
    if fault:
        raise TokenizerError(f"{path}: {fault}. {_how_to_supply(cached.name)}")
    return data


def _how_to_supply(cache_name: str) -> str:
    archive_path = f"{WHISPER}/whisper/assets/{RANKS_FILE}"
    return (
        f"Pass the file (sha256 {RANKS_SHA256[:8]}…) with `--bpe-ranks FILE`, or save it as {cache_name} in the folder "
        f"TIKTOKEN_CACHE_DIR. PyPI has it:\n"
        f"  pip download --no-deps --no-binary :all: openai-whisper=={WHISPER.rpartition('-')[2]}\n"
        f"  tar xzf {WHISPER}.tar.gz {archive_path}\n"
        f"and then add: --bpe-ranks {archive_path}"
    )
