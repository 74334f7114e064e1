"""data/: tokenizers, and the file format with its check. test_loader.py: the order of windows."""

import hashlib
import json
import os
import re
import resource
import shutil
import tempfile
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import requests
from corpora import BYTES, documents_of, write_ids
from hypothesis import given
from hypothesis import strategies as st
from runs import REPO_ROOT

from data import DataError, bins, tokenizer
from data.bins import check_dataset, fingerprint, open_tokens
from data.loader import Windows
from data.tokenizer import (
    GPT2Tokenizer,
    identity,
    load_tokenizer,
    open_tokenizer,
)
from data.verify import verify_dataset
from data.writer import Writer
from hf.tokenizer_files import describe_tokenizer

REAL_RANKS = Path(
    os.environ.get("NANOKERN_RANKS") or REPO_ROOT.parent / "shared/data/gpt2.tiktoken"
)


# tokenizers
def test_special_and_broken_text(any_tokenizer):
    end = any_tokenizer.eot
    assert end == any_tokenizer.vocab_size - 1
    ids = any_tokenizer.encode("a<|endoftext|>b")  # ordinary text
    assert end not in ids and any_tokenizer.decode([*ids, end]) == "a<|endoftext|>b<|endoftext|>"
    # two surrogates that are a pair, and a lone one
    surrogates = any_tokenizer.decode(any_tokenizer.encode("\ud83d\ude42 \udcff"))
    assert surrogates == ("🙂 \ufffd" if any_tokenizer.name == "gpt2" else "?? ?")
    assert any_tokenizer.decode([0xC3, 0x28]) == "\ufffd("  # ids below 256 are bytes in both
    text = "a" + " " * 1_000_001 + "b"  # tiktoken alone panics here
    assert any_tokenizer.decode(any_tokenizer.encode(text)) == text


@given(text=st.text(" \t\u2003x", max_size=40))
def test_long_gaps_are_cut_as_by_a_simple_pattern(text):
    """Which looks at each of a gap's characters as a possible start: its time is quadratic."""
    gap = re.compile(tokenizer.LONG_GAP.pattern.replace("500000", "3"))
    with mock.patch.multiple(tokenizer, MAX_GAP=3, LONG_GAP=gap):
        pieces = tokenizer.cut_gaps(text)
    wanted = re.split(r"(\s{3})", text)
    assert [piece for piece in pieces if piece] == [piece for piece in wanted if piece]


@pytest.mark.skipif(not REAL_RANKS.is_file(), reason="no GPT-2 ranks: set NANOKERN_RANKS")
def test_gpt2_ids_are_gpt2s():
    gpt2 = load_tokenizer("gpt2", REAL_RANKS)
    assert gpt2.hash == "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"
    ids = "15496 11 314 1101 257 3303 2746 11"
    assert " ".join(map(str, gpt2.encode("Hello, I'm a language model,"))) == ids
    assert identity(GPT2Tokenizer) == identity(gpt2) and identity(gpt2)["eot"] == 50256


# the file format
TRAIN, VAL = range(25), [250, 251, 252, 256]


def test_where_gpt2s_file_is_sought(tmp_path, monkeypatch, fake_ranks):
    """In tiktoken's cache, by default below the folder of temporary files, then at its address.

    A set carries it.
    """
    sha256 = hashlib.sha256(fake_ranks).hexdigest()
    asked = mock.Mock(side_effect=requests.ConnectionError("no network"))
    download = mock.Mock(return_value=fake_ranks)
    monkeypatch.setattr(tokenizer, "RANKS_SHA256", sha256)
    monkeypatch.delenv("TIKTOKEN_CACHE_DIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(requests, "head", asked)
    monkeypatch.setattr("tiktoken.load.read_file_cached", download)
    with pytest.raises(DataError, match="ConnectionError: no network.*--tokenizer bytes.*PyPI has"):
        load_tokenizer("gpt2")
    asked.side_effect = None
    assert load_tokenizer("gpt2").files == {"gpt2.tiktoken": fake_ranks}
    asked.assert_called_with(tokenizer.RANKS_URL, timeout=5)
    download.assert_called_once_with(tokenizer.RANKS_URL, sha256)
    cached = tmp_path / "data-gym-cache" / hashlib.sha1(tokenizer.RANKS_URL.encode()).hexdigest()
    cached.parent.mkdir()
    cached.write_bytes(fake_ranks)
    gpt2 = load_tokenizer("gpt2")
    assert asked.call_count == 2
    cached.write_bytes(fake_ranks[:-1])
    for ranks in (None, cached):
        with pytest.raises(DataError, match=f"{cached}: not GPT-2.s BPE file: .*{sha256}"):
            load_tokenizer("gpt2", ranks)
    ids = [*gpt2.encode("à propos"), gpt2.eot]
    folder = write_ids(tmp_path / "set", ids, ids, tokenizer=gpt2)  # the set has the file
    assert documents_of(folder) == {"train": ["à propos"], "val": ["à propos"]}


def test_set_refuses_another_tokenizer(corpus, tmp_path):
    """A tokenizer.json that came into the folder later neither decodes nor encodes."""
    folder = shutil.copytree(corpus / "tiny", tmp_path / "tiny")
    assert open_tokenizer(folder).decode([104, 105]) == "hi"
    says = f"{folder}/tokenizer.json: not of the tokenizer that made .* or remove it.* Prepare it "
    for content in (json.dumps(describe_tokenizer(BYTES)), ""):
        (folder / "tokenizer.json").write_text(content)
        for read in (open_tokenizer, verify_dataset):
            with pytest.raises(DataError, match=f"^{says}again: "):
                read(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (bytes(15), r"expected 14 bytes \(7 tokens\), found 15"),
        (bytes(14), "expected sha256 [0-9a-f]{64}, found [0-9a-f]{64}"),
        (b"\7\0" + b"\7\1" * 6, "id 263 at token 1, expected below 257"),
        (None, r"expected 14 bytes \(7 tokens\), no such file"),
    ],
)
def test_check_finds_damage(tmp_path, content, message):
    write_ids(tmp_path / "set", TRAIN, VAL, 7)
    path = tmp_path / "set/train-00001.bin"
    path.write_bytes(content) if content else path.unlink()
    with pytest.raises(
        DataError, match=rf"train-00001.bin: {message}.*--name set --force --out \S+$"
    ):
        check_dataset(tmp_path / "set", 257)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('"tokens": 25', '"tokens": 24', "train has 24 tokens, its files 25"),
        ("train-00001", "../train-00001", "the content = {'name': 'set'"),
        ('"tokens": 4', '"tokens": 0', "splits.train.files.3.tokens = 0: should be greater"),
        ("257", "65537", "tokenizer.vocab_size = 65537: should be less"),
        ('"train"', '"more": null, "train"', "splits.more = None"),
        ('"dtype"', '"more": 2, "dtype"', "more = 2: Unexpected keyword argument"),
        ("{", "[" * 100_000, "damaged, not JSON"),
    ],
)
def test_meta_of_another_form(tmp_path, old, new, says):
    path = write_ids(tmp_path / "set", TRAIN, VAL, 7) / "meta.json"
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(
        DataError, match=rf"^{path}: (?s:.*){re.escape(says)}(?s:.*)--name set.*--force$"
    ):
        check_dataset(path.parent, 257)


def test_sets_that_are_not_there(tmp_path, monkeypatch):
    (tmp_path / "books").mkdir()
    command = "python -m data.prepare"
    for name, says in {
        "stdlib": f"stdlib: no such data set. Prepare it: {command} stdlib --out {tmp_path}",
        "my set": f"{command} text --source FILES --name 'my set' --out {tmp_path}",
        "books": f"half-prepared. Resume with the command that started it: {command} text --source",
    }.items():
        with pytest.raises(DataError, match=re.escape(says)):
            check_dataset(tmp_path / name, 257)
    monkeypatch.setattr(bins, "DATA_DIR", tmp_path)  # the default of --out
    with pytest.raises(DataError, match="--source FILES --name mybok$"):
        check_dataset(tmp_path / "mybok", 257)
    write_ids(tmp_path / "set", TRAIN, VAL, 7)
    with pytest.raises(
        DataError, match="'bytes' has 257 ids, the model's vocab_size is 256. Set model.vocab_size"
    ):
        check_dataset(tmp_path / "set", 256)


@pytest.mark.parametrize("place", [350, 380, 399])
def test_an_id_beyond_the_vocabulary_in_a_window_of_a_large_set(tmp_path, monkeypatch, place):
    """Of shards of 200 tokens that are checked in chunks of three."""
    monkeypatch.setattr(bins, "CHUNK_BYTES", 6)
    ids = np.zeros(550, np.uint16)
    ids[place : place + 4] = 257
    folder = write_ids(tmp_path / "set", ids, ids[:100], 200)
    fault = f"id 257 at token {place % 200}, expected below 257"
    monkeypatch.setattr(bins, "HASHED_BYTES", 1300)
    with pytest.raises(DataError, match=fault):
        check_dataset(folder, 50304)
    monkeypatch.setattr(bins, "HASHED_BYTES", 1299)  # of 1300
    check_dataset(folder, 50304)
    with pytest.raises(DataError, match=fault):
        verify_dataset(folder)
    tokens = open_tokens(folder, "train")
    says = f"train split of .*set: id 257 at token {place}, .*file with python -m data.verify"
    Windows([tokens], 9).read(np.arange((place - 1) // 9))  # those before it
    # the window that has it, and from the first shard into the third
    for indices, block_size in (([0, place // 9, 1], 9), ([0], 549)):
        with pytest.raises(DataError, match=says):
            Windows([tokens], block_size).read(np.array(indices))


# what a split of many files and of many bytes takes
@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="reads Linux' /proc")
def test_memory_of_a_split_is_released_as_it_is_read(tmp_path, monkeypatch):
    """Of 2 x 8 MB that are read in parts, or a token in each 32 KiB, a part stays mapped."""
    monkeypatch.setattr(bins, "RELEASE_BYTES", 2**21)
    ids = np.arange(2**23, dtype=np.uint16) % 256
    folder = write_ids(tmp_path / "set", ids, shard_tokens=2**22)
    tokens = open_tokens(folder, "train")
    mapped = []
    for count, start in product((2**14, 1), range(0, len(ids), 2**14)):
        assert np.array_equal(tokens.read(start, count), ids[start : start + count])
        if start % 2**20 == 0:
            text = Path("/proc/self/smaps").read_text()
            sizes = re.findall(rf"{folder}/train-\S+\n(?:\S+: .*\n)*?Rss: +(\d+) kB", text)
            mapped.append(sum(map(int, sizes)))
    assert 0 < max(mapped) < 8000  # a page may have 2 MB


def test_a_set_of_more_files_than_a_process_may_open(tmp_path):
    """The limit is raised, and leaves room for the files of the rest of the program."""
    folder = write_ids(tmp_path / "set", np.arange(300) % 256, shard_tokens=1)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (400, hard))
    try:
        with ExitStack() as stack:
            tokens = open_tokens(folder, "train")
            for _ in range(500):
                stack.enter_context(open(os.devnull))
            assert tokens.read(290, 10).tolist() == list(range(34, 44))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# fingerprints, which checkpoints store
def test_a_set_of_commit_11388ef(tmp_path):
    """It is read, is written again the same to the byte, and has the same fingerprint."""
    with Writer(tmp_path / "set", BYTES, 7) as writer:
        writer.write("train", np.array([*b"to be", 256, *b"or not", 256], np.uint16), 2)
        writer.write("val", np.array([*b"that is", 256], np.uint16), 1)
        writer.finish(
            "old", {"corpus": "text"}, "python -m data.prepare text --source x --name old"
        )
    meta = (tmp_path / "set/meta.json").read_bytes()
    assert (
        hashlib.sha256(meta).hexdigest()
        == "13f78bc7b64dd21050e2271b03068223e338cead99550b382b33c7fd0388cbc5"
    )
    assert fingerprint(check_dataset(tmp_path / "set", 257)) == {
        "data": "56148868d57603a5f97d436577f477d9ab31580a2cd130474622de85f3a8f693",
        "tokenizer": "94ee84f3939b59f259e8a7e84263007f81464e1833de3b2d613a5eb0df978516",
    }
