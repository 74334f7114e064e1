"""data/: tokenizers, the file format and its check, the order of windows. The commands: test_prepare.py."""

import hashlib
import os
import re
import resource
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from corpora import edit_meta, write_ids
from hypothesis import given, settings
from hypothesis import strategies as st

from data import DataError, bins, loader, tokenizer
from data.bins import Tokens, check_dataset, fingerprint, open_tokenizer, open_tokens, read_meta
from data.loader import Loader, fixed_windows, permute, prefetch, stream_seed, window_documents, windows
from data.tokenizer import ByteTokenizer, GPT2Tokenizer, TokenizerError, load_tokenizer
from data.writer import Writer

BYTES = ByteTokenizer()
REPO_ROOT = Path(__file__).parents[1]
REAL_RANKS = Path(os.environ.get("NANOKERN_RANKS") or REPO_ROOT.parent / "shared/data/gpt2.tiktoken")


# tokenizers
@given(texts=st.lists(st.text(max_size=40), max_size=4))
@settings(deadline=None, max_examples=25)
def test_tokenizers_round_trip(any_tokenizer, texts):
    batch = any_tokenizer.encode_batch(texts)
    assert [any_tokenizer.decode(ids) for ids in batch] == texts
    assert all(ids.dtype == np.uint16 and (ids < any_tokenizer.vocab_size).all() for ids in batch)
    assert [any_tokenizer.encode(text) for text in texts] == [ids.tolist() for ids in batch]


def test_end_of_text_is_text_when_encoded_and_a_mark_when_decoded(any_tokenizer):
    ids = any_tokenizer.encode("a<|endoftext|>b")
    assert any_tokenizer.eot == any_tokenizer.vocab_size - 1
    assert any_tokenizer.eot not in ids
    assert any_tokenizer.decode([*ids, any_tokenizer.eot]) == "a<|endoftext|>b<|endoftext|>"


def test_broken_text_never_fails(any_tokenizer):
    assert any_tokenizer.decode(any_tokenizer.encode("\ud800 x")).endswith(" x")  # a lone surrogate
    assert any_tokenizer.decode([0xC3, 0x28]) == "\ufffd("  # ids below 256 are bytes in both


def test_gpt2_takes_any_run_of_white_space(fake_ranks):
    text = "a" + " " * 1_000_001 + "b"  # tiktoken alone panics here
    gpt2 = GPT2Tokenizer(fake_ranks)
    assert gpt2.decode(gpt2.encode(text)) == text


@pytest.mark.skipif(not REAL_RANKS.is_file(), reason="no GPT-2 ranks: set NANOKERN_RANKS")
def test_gpt2_ids_are_gpt2s():
    gpt2 = load_tokenizer("gpt2", REAL_RANKS)
    assert gpt2.hash == "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"
    assert gpt2.encode("Hello world") == [15496, 995]
    assert gpt2.encode("Hello, I'm a language model,") == [15496, 11, 314, 1101, 257, 3303, 2746, 11]


def test_ranks_file_is_checked(tmp_path):
    wrong = tmp_path / "ranks"
    wrong.write_bytes(b"IQ== 0\n")
    with pytest.raises(TokenizerError, match=f"{wrong}: not GPT-2's BPE file: sha256 [0-9a-f]*, expected 306cd27f"):
        load_tokenizer("gpt2", wrong)
    with pytest.raises(TokenizerError, match="absent.*No such file.*--bpe-ranks FILE"):
        load_tokenizer("gpt2", tmp_path / "absent")


def test_ranks_come_from_tiktokens_cache(tmp_path, monkeypatch, fake_ranks):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tokenizer, "RANKS_SHA256", hashlib.sha256(fake_ranks).hexdigest())
    (tmp_path / hashlib.sha1(tokenizer.RANKS_URL.encode()).hexdigest()).write_bytes(fake_ranks)
    assert load_tokenizer("gpt2").files == {"gpt2.tiktoken": fake_ranks}


@pytest.fixture
def offline(tmp_path, monkeypatch):
    import requests

    def refuse(*args, **kwargs):
        assert kwargs["timeout"] <= 5
        raise requests.ConnectionError("no network")

    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "empty"))
    monkeypatch.setattr(requests, "head", refuse)


def test_offline_error_says_how_to_supply_the_ranks(offline):
    with pytest.raises(TokenizerError) as error:
        load_tokenizer("gpt2")
    download = "pip download --no-deps --no-binary :all: openai-whisper=="
    for part in ("--bpe-ranks FILE", "TIKTOKEN_CACHE_DIR", download, "tar xzf"):
        assert part in str(error.value)


# the file format
def write_set(folder: Path, shard_tokens: int = 7) -> list[np.ndarray]:
    """Five training documents of 4 ids and one of validation; returns what the splits should read as."""
    train = np.concatenate([[*range(start, start + 4), 256] for start in range(0, 100, 20)]).astype(np.uint16)
    val = np.array([250, 251, 252, 256], np.uint16)
    with Writer(folder, BYTES, shard_tokens) as writer:
        writer.write("train", train[:5])
        writer.write("val", val)
        writer.write("train", train[5:], documents=4)
        writer.finish("set", {"corpus": "text"}, "python -m data.prepare text --source x --name set")
    return [train, val]


def test_shards_read_as_one_array(tmp_path):
    folder = tmp_path / "set"
    train, val = write_set(folder)
    tokens = open_tokens(folder, "train")
    assert sorted(path.name for path in folder.glob("train*")) == [f"train-0000{i}.bin" for i in range(4)]
    assert len(tokens) == len(train) == 25
    for start in range(26):
        for count in range(26 - start):
            part = tokens.read(start, count)
            assert part.dtype == np.uint16 and np.array_equal(part, train[start : start + count])
    assert np.array_equal(open_tokens(folder, "val").read(0, 4), val)
    assert (folder / "val-00000.bin").read_bytes() == val.astype("<u2").tobytes()
    for start, count in ((-1, 1), (0, 26), (26, 0), (3, -1)):
        with pytest.raises(IndexError):
            tokens.read(start, count)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux' /proc")
def test_memory_does_not_grow_with_what_is_read(tmp_path, monkeypatch):
    size = 2**25  # 64 MB
    write_ids(tmp_path / "set", np.arange(16, dtype=np.uint16).repeat(size // 16), shard_tokens=size // 4)
    monkeypatch.setattr(bins, "RELEASE_BYTES", 2**22)
    tokens = open_tokens(tmp_path / "set", "train")

    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before, most = resident(), 0
    for start in range(0, size, 2**14):
        assert tokens.read(start, 2**14).sum(dtype=np.int64) == start * 16 // size * 2**14
        most = max(most, resident() - before)
    assert most < 2**24


def test_more_shards_than_a_process_may_open_files(tmp_path):
    train, _ = write_set(tmp_path / "set", shard_tokens=1)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    in_use = max(map(int, os.listdir("/dev/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (in_use + 10, limits[1]))
    try:
        assert np.array_equal(open_tokens(tmp_path / "set", "train").read(0, 25), train)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_meta_describes_the_set(tmp_path):
    folder = tmp_path / "set"
    write_set(folder)
    meta = check_dataset(folder, vocab_size=257)
    assert meta == read_meta(folder)
    assert meta.tokenizer == {"name": "bytes", "hash": BYTES.hash, "vocab_size": 257, "eot": 256}
    assert (meta.splits["train"].tokens, meta.splits["train"].documents) == (25, 5)
    assert (meta.splits["val"].tokens, meta.splits["val"].documents) == (4, 1)
    assert [shard.tokens for shard in meta.splits["train"].files] == [7, 7, 7, 4]
    for split in meta.splits.values():
        for shard in split.files:
            assert shard.sha256 == hashlib.sha256((folder / shard.name).read_bytes()).hexdigest()
    names = {shard.name for split in meta.splits.values() for shard in split.files}
    assert {path.name for path in folder.iterdir()} == {"meta.json"} | names
    assert [path.name for path in tmp_path.iterdir()] == ["set"]


def test_set_carries_its_tokenizer(tmp_path, monkeypatch, fake_ranks, offline):
    monkeypatch.setattr(tokenizer, "RANKS_SHA256", hashlib.sha256(fake_ranks).hexdigest())
    gpt2 = GPT2Tokenizer(fake_ranks)
    with Writer(tmp_path / "set", gpt2) as writer:
        writer.write("train", np.append(gpt2.encode_batch(["à propos"])[0], np.uint16(gpt2.eot)))
        writer.finish("set", {}, "")
    tokens = open_tokens(tmp_path / "set", "train")
    assert open_tokenizer(tmp_path / "set").decode(tokens.read(0, len(tokens))) == "à propos<|endoftext|>"


def flip(data: bytes, position: int) -> bytes:
    return data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data + b"!", r"expected 14 bytes \(7 tokens\), found 15"),
        (lambda data: data[:12], r"expected 14 bytes \(7 tokens\), found 12"),
        (lambda data: flip(data, 2), "expected sha256 [0-9a-f]{64}, found [0-9a-f]{64}"),
        (lambda data: flip(data, 3), r"id 279 at token 1, expected below 257"),
        (lambda data: np.frombuffer(data, "<u2").astype(">u2").tobytes(), "id 5632 at token 0, expected below 257"),
        (None, "no such file, expected 7 tokens"),
    ],
)
def test_check_finds_damage(tmp_path, damage, message):
    write_set(tmp_path / "set")
    path = tmp_path / "set/train-00001.bin"
    data = path.read_bytes()
    path.unlink()
    if damage:
        path.write_bytes(damage(data))
    with pytest.raises(DataError, match=rf"train-00001.bin: {message}.*--source x --name set --force"):
        check_dataset(tmp_path / "set", 257)


@pytest.mark.parametrize("dtype", ["<u4", "<i8", ">u4"])
@pytest.mark.parametrize("hashed", [0, 2**30])
def test_wider_ids_are_recognised_by_their_zeros(tmp_path, monkeypatch, dtype, hashed):
    """Such as nanoGPT's own scripts would write for a larger vocabulary. Lengths and sha256 would fit."""
    ids = np.random.default_rng(0).integers(0, 250, 100)
    write_ids(tmp_path / "set", np.frombuffer(ids.astype(dtype), "<u2"), np.arange(200))
    monkeypatch.setattr(bins, "HASHED_BYTES", hashed)
    says = "id [0-9]+ at token 1, expected below 257" if dtype == ">u4" else "expected uint16, found every second of"
    with pytest.raises(DataError, match=f"train-00000.bin: {says}.*--force"):
        check_dataset(tmp_path / "set", 257)


def test_a_shard_never_written_is_refused(tmp_path, monkeypatch):
    write_ids(tmp_path / "set", np.arange(200))
    os.truncate(tmp_path / "set/train-00000.bin", 0)
    os.truncate(tmp_path / "set/train-00000.bin", 400)
    monkeypatch.setattr(bins, "HASHED_BYTES", 0)
    with pytest.raises(DataError, match="a file of which a part was never written"):
        check_dataset(tmp_path / "set", 257)


# ids beyond the vocabulary
@pytest.fixture
def beyond(tmp_path):
    """A set of three shards of training text; the second has an id of 257 at token 150 and of 999 at token 180."""
    ids = np.random.default_rng(0).integers(0, 257, 550)
    ids[[200 + 150, 200 + 180]] = 257, 999
    return write_ids(tmp_path / "set", ids, ids[:100], 200)


@pytest.mark.parametrize(
    "sizes",
    [{"CHUNK_BYTES": 64, "SAMPLE_BYTES": 128}, {"HASHED_BYTES": 0}],
    ids=["in two chunks, not in the sample", "in the sample of a large set"],
)
def test_an_id_beyond_the_vocabulary_is_found_at_start(beyond, monkeypatch, sizes):
    for name, size in sizes.items():
        monkeypatch.setattr(bins, name, size)
    says = "train-00001.bin: id 257 at token 150, expected below 257. Prepare it again: .*text --name set --force"
    with pytest.raises(DataError, match=says):
        check_dataset(beyond, 50304)  # the tokenizer's ids count, not the model's


def test_an_id_beyond_the_vocabulary_in_a_window_of_a_large_set(beyond, monkeypatch):
    monkeypatch.setattr(bins, "HASHED_BYTES", 0)
    monkeypatch.setattr(bins, "SAMPLE_BYTES", 128)
    check_dataset(beyond, 50304)
    tokens = open_tokens(beyond, "train")
    bad = [w for w in range(549 // 9) if 350 in range(9 * w, 9 * w + 10) or 380 in range(9 * w, 9 * w + 10)]
    assert len(bad) == 2
    says = "train split of .*set: id (257|999) at token 3[58]0, expected below 257. Find the damaged file with"
    for w in range(549 // 9):
        with pytest.raises(DataError, match=f"{says} python -m data.verify") if w in bad else nullcontext():
            windows(tokens, np.array([0, w, 1]), 9)
    windows(tokens, np.array([0]), 349)
    for length in (350, 549):  # the last target; from the first shard into the third
        with pytest.raises(DataError, match="id 257 at token 350"):
            windows(tokens, np.array([0]), length)


# fingerprints, which checkpoints store
def prepared(folder: Path, train=b"to beor not", val=b"that is", name="set") -> dict[str, str]:
    write_ids(folder, list(train), list(val), 7, name)
    return fingerprint(check_dataset(folder, 257))


def test_fingerprint_depends_on_tokens_and_tokenizer_only(tmp_path):
    once = prepared(tmp_path / "a")
    assert once == prepared(tmp_path / "b/c", name="other")
    assert set(once) == {"data", "tokenizer"} and all(len(value) == 64 for value in once.values())


@pytest.mark.parametrize(
    "change",
    [{"train": b"to beor nor"}, {"train": b"or notto be"}, {"train": b"to beor not!"}, {"val": b"that iz"}]
    + [{"train": b"that is", "val": b"to beor not"}, {"train": b"to beor no", "val": b"tthat is"}],
)
def test_fingerprint_of_other_tokens(tmp_path, change):
    once, other = prepared(tmp_path / "a"), prepared(tmp_path / "b", **change)
    assert once["data"] != other["data"] and once["tokenizer"] == other["tokenizer"]


def test_fingerprint_depends_on_where_training_text_ends(tmp_path):
    once = prepared(tmp_path / "a", b"to be, or not ", b"to be")  # shards of 7, 7 and 5 tokens either way
    assert once["data"] != prepared(tmp_path / "b", b"to be, ", b"or not to be")["data"]


@pytest.mark.parametrize("change", [{"name": "utf8"}, {"hash": "0" * 64}, {"eot": 0}, {"vocab_size": 256}])
def test_fingerprint_of_another_tokenizer(tmp_path, change):
    once = prepared(tmp_path / "a")
    edit_meta(tmp_path / "a", lambda meta: meta["tokenizer"].update(change))
    other = fingerprint(read_meta(tmp_path / "a"))
    assert once["data"] == other["data"] and once["tokenizer"] != other["tokenizer"]


def test_check_refuses_a_set_that_does_not_fit(tmp_path):
    write_set(tmp_path / "set")
    with pytest.raises(DataError, match="'bytes' has 257 ids, the model's vocab_size is 256. Set model.vocab_size"):
        check_dataset(tmp_path / "set", 256)
    edit_meta(tmp_path / "set", lambda meta: meta.update(dtype="int32"))
    with pytest.raises(DataError, match="dtype 'int32', expected 'uint16'.*--force"):
        check_dataset(tmp_path / "set", 257)
    (tmp_path / "set/meta.json").write_text('{"name": ')
    with pytest.raises(DataError, match="meta.json: cannot be read.*--force"):
        check_dataset(tmp_path / "set", 257)


def test_check_names_the_prepare_command(tmp_path, monkeypatch):
    message = f"{tmp_path}/stdlib: no such data set. Prepare it: python -m data.prepare stdlib --out {tmp_path}$"
    with pytest.raises(DataError, match=message):
        check_dataset(tmp_path / "stdlib", 257)
    monkeypatch.setattr(bins, "DATA_DIR", tmp_path)
    with pytest.raises(DataError, match="Prepare it: python -m data.prepare stdlib$"):
        check_dataset(tmp_path / "stdlib", 257)
    (tmp_path / "mybook").mkdir()
    (tmp_path / "mybook/meta.json").touch()
    with pytest.raises(DataError, match=r"--name mybok; or did you mean mybook\?$"):
        check_dataset(tmp_path / "mybok", 257)
    (tmp_path / "books").mkdir()
    with pytest.raises(DataError, match="half-prepared.*python -m data.prepare text --source FILES --name books$"):
        check_dataset(tmp_path / "books", 257)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda meta: meta.pop("splits"), "splits: Field required"),
        (lambda meta: meta["splits"].pop("val"), "splits train, expected train, val"),
        (lambda meta: meta["splits"].update(test=meta["splits"]["val"]), "splits train, val, test, expected"),
        (lambda meta: meta["splits"]["train"].update(tokens=24), "train has 24 tokens, its files 25"),
        (lambda meta: meta["splits"]["train"]["files"][0].update(tokens=7.0), "splits.train.files.0.tokens: Input"),
        (lambda meta: meta["splits"]["train"]["files"][0].update(tokens=0), "splits.train.files.0.tokens: Input"),
        (lambda meta: meta["splits"]["train"]["files"][0].update(sha256="0"), "splits.train.files.0.sha256: String"),
        (lambda meta: meta["splits"]["train"]["files"][1].update(name="../train-00001.bin"), "file 1 is '../train-"),
        (lambda meta: meta["splits"]["train"]["files"][1].update(name="train-00000.bin"), "file 1 is 'train-00000"),
        (lambda meta: meta["splits"]["val"]["files"][0].update(name="train-00000.bin"), "val file 0 is 'train-00000"),
        (lambda meta: meta["tokenizer"].pop("vocab_size"), "tokenizer.vocab_size: Field required"),
        (lambda meta: meta["tokenizer"].update(vocab_size=65537), "tokenizer.vocab_size: Input should be less"),
        (lambda meta: meta.update(unknown=1, more=2), "unknown: Unexpected keyword argument, and 1 more"),
    ],
)
def test_meta_of_another_form(tmp_path, change, says):
    write_set(tmp_path / "set")
    edit_meta(tmp_path / "set", change)
    with pytest.raises(DataError) as caught:
        check_dataset(tmp_path / "set", 257)
    assert str(caught.value).startswith(f"{tmp_path}/set/meta.json: cannot be read (") and says in str(caught.value)
    assert re.search("Prepare the set again: .*--name set.*--force$", str(caught.value))


def test_an_unfinished_set_leaves_no_files(tmp_path):
    with pytest.raises(KeyboardInterrupt), Writer(tmp_path / "set", BYTES, 2) as writer:
        writer.write("train", np.arange(5, dtype=np.uint16))
        assert len(list((tmp_path / "set.partial").glob("train*"))) == 3
        says = "set: half-prepared. Resume with the command that began it: .*text --source FILES --name set --out"
        with pytest.raises(DataError, match=says):
            check_dataset(tmp_path / "set", 257)
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())


def test_ids_must_fit_uint16(tmp_path):
    with pytest.raises(DataError, match="65537 ids; uint16"):
        Writer(tmp_path / "set", SimpleNamespace(name="big", vocab_size=65537))


# the order of windows
def counting(n: int) -> Tokens:
    """Tokens 0, 1, 2, … in two shards, so that a window's first token is its position."""
    ids = np.arange(n, dtype=np.uint16)
    return Tokens([ids[: n // 3], ids[n // 3 :]])


@given(n_windows=st.integers(1, 70), batch_size=st.integers(1, 9), block_size=st.integers(1, 5), seed=st.integers())
@settings(deadline=None, max_examples=25)
def test_every_window_once_an_epoch(n_windows, batch_size, block_size, seed):
    loader = Loader(counting(n_windows * block_size + 1), block_size, batch_size, seed)
    steps = -(-3 * n_windows // batch_size)
    x, y = map(np.concatenate, zip(*(loader.batch(step) for step in range(steps)), strict=True))
    assert loader.n_windows == n_windows
    assert x.shape == y.shape == (steps * batch_size, block_size) and x.dtype == y.dtype == np.int64
    assert np.array_equal(y, x + 1)  # the tokens count upwards
    epochs = x[: 3 * n_windows, 0].reshape(3, n_windows)
    assert (np.sort(epochs) == np.arange(n_windows) * block_size).all()


@given(batch_size=st.integers(1, 24), step=st.integers(0, 10**12), cuts=st.lists(st.integers(0, 24), max_size=4))
@settings(deadline=None, max_examples=25)
def test_global_batch_does_not_depend_on_its_slices(batch_size, step, cuts):
    loader = Loader(counting(101), 4, batch_size, seed=1)
    batch = loader.batch(step)
    edges = sorted({0, batch_size, *(min(cut, batch_size) for cut in cuts)})
    parts = [loader.batch(step, a, b - a) for a, b in zip(edges, edges[1:], strict=False)]
    for i in (0, 1):
        assert np.array_equal(np.concatenate([part[i] for part in parts]), batch[i])


def test_indices_are_the_windows_of_the_batch():
    loader = Loader(counting(101), 4, 10, seed=1)
    for step in (0, 1, 2, 77):
        all_rows = loader.indices(step)
        assert all_rows.shape == (10,) and all_rows.dtype == np.int64
        assert np.array_equal(loader.batch(step)[0], 4 * all_rows[:, None] + np.arange(4))
        assert np.array_equal(loader.indices(step, 3), all_rows[3:])
        assert np.array_equal(loader.indices(step, 3, 4), all_rows[3:7])


def test_seeds_and_epochs_give_unrelated_orders():
    n = 5000
    orders = [permute(np.arange(n), n, seed, np.full(n, epoch)) for seed in (0, 1, -1) for epoch in (0, 1, 2)]
    identity = np.arange(n)
    for i, order in enumerate(orders):
        assert np.array_equal(np.sort(order), identity)
        assert abs(np.abs(order - identity).mean() / n - 1 / 3) < 0.02  # what random permutations have
        assert (np.abs(np.diff(order)) == 1).sum() < 12  # neighbours stay together about twice
        for other in [identity, *orders[:i]]:
            assert abs(np.corrcoef(order, other)[0, 1]) < 0.07  # five standard deviations
            assert (order == other).sum() < 10  # about one


def test_every_order_of_three_windows_is_equally_frequent():
    orders = permute(np.tile(np.arange(3), 6000), 3, 0, np.repeat(np.arange(6000), 3)).reshape(6000, 3)
    counts = np.unique(orders, axis=0, return_counts=True)[1]
    assert len(counts) == 6 and (abs(counts - 1000) < 150).all()  # five standard deviations


def test_order_is_frozen():
    """A changed order would silently unpair new runs from old ones."""
    assert permute(np.arange(8), 8, 0, np.zeros(8, np.int64)).tolist() == [1, 6, 2, 0, 4, 3, 7, 5]
    assert permute(np.array([10**9]), 10**10, 1337, np.array([3])).tolist() == [5094186605]
    # and the seeds of streams, on which dropout of a resumed run depends
    assert stream_seed(0) == 8147104208329303767
    seeds = {(0, 0): 3269731276231068113, (0, 1): 7635188740105049934, (1, 0): 8663415526776124837}
    assert {place: stream_seed(1337, *place) for place in seeds} == seeds
    assert stream_seed(-1, 2**64 + 3) == stream_seed(2**64 - 1, 3)


def test_stream_seeds_differ():
    """For every seed, step and rank of a grid, and when two numbers change places."""
    grid = [stream_seed(seed, step, rank) for seed in (0, 1, -1) for step in range(100) for rank in range(20)]
    assert len(set(grid)) == len(grid) and 0 <= min(grid) and max(grid) < 2**63
    bits = np.array(grid, np.uint64)[:, None] >> np.arange(63, dtype=np.uint64) & np.uint64(1)
    assert abs(bits.mean(axis=0) - 0.5).max() < 0.033  # 6,000 seeds: a bit is set in half of them, 5 sigma
    assert stream_seed(1, 2, 3) not in (stream_seed(1, 3, 2), stream_seed(2, 1, 3), stream_seed(1, 2, 3, 0))


def test_fixed_windows_are_spread_over_the_split():
    assert fixed_windows(counting(101), 4, 5).tolist() == [0, 5, 10, 15, 20]
    for count in (25, 26, 99):
        assert fixed_windows(counting(101), 4, count).tolist() == list(range(25))
    spread = fixed_windows(counting(1001), 1, 300)
    assert len(set(spread.tolist())) == 300 and set(np.diff(spread).tolist()) == {3, 4}


LENGTHS = st.lists(st.one_of(st.integers(1, 9), st.integers(1, 300)), min_size=1, max_size=30)  # tokens of documents


def documents_of(*lengths: int) -> Tokens:
    """Documents of that many tokens, the last of each end-of-text (7), in two shards."""
    ids = np.zeros(sum(lengths), np.uint16)
    ids[np.cumsum(lengths) - 1] = 7
    return Tokens([ids[: len(ids) // 3], ids[len(ids) // 3 :]], eot=7)


def label_windows(tokens: Tokens, block_size: int) -> list[int]:
    """The document of each window's middle target, by counting."""
    ids = tokens.read(0, len(tokens)).tolist()
    middles = [window * block_size + (block_size + 1) // 2 for window in range((len(ids) - 1) // block_size)]
    return [ids[:middle].count(7) for middle in middles]


@given(lengths=LENGTHS, block_size=st.integers(1, 9), count=st.integers(1, 60), size=st.sampled_from([16, 2**16]))
@settings(deadline=None, max_examples=150)
def test_validation_takes_no_more_of_a_document_than_it_needs(lengths, block_size, count, size):
    tokens = documents_of(*lengths, block_size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader, "CANDIDATES", size)
        found = fixed_windows(tokens, block_size, count)
    documents, n = label_windows(tokens, block_size), (len(tokens) - 1) // block_size
    assert len(found) == min(count, n) and found.tolist() == sorted(set(found.tolist())) and 0 <= found[0]
    size = min(n, max(len(found), size))
    candidates = [documents[i * n // size] for i in range(size)]
    sizes = [candidates.count(document) for document in {*candidates}]
    least = next(c for c in range(1, count + 1) if sum(min(c, size) for size in sizes) >= len(found))
    taken = [documents[window] for window in found]
    if len(found) < size:
        assert max(map(taken.count, taken)) == least or len(sizes) == 1


def test_validation_prefers_long_documents_where_it_needs_one_window_of_each():
    """Where there are many documents the mean over windows stays a mean over tokens."""
    lengths = np.random.default_rng(0).permutation([40] * 8000 + [80] * 4000)
    found = fixed_windows(documents_of(*lengths), 4, 1200)
    taken = lengths[np.searchsorted(np.cumsum(lengths), found * 4 + 2, side="right")]
    assert 540 < sum(taken == 80) < 660  # half of the tokens (3.5 deviations around it), a third of the documents
    book = fixed_windows(documents_of(*[40] * 100, 4000, *[40] * 100), 4, 100)
    assert [1000 <= window < 2000 for window in book.tolist()].count(True) == 1  # not 33
    few = fixed_windows(documents_of(400, 401), 4, 8)
    assert few.tolist() == [12, 37, 62, 87, 112, 137, 162, 187]


def test_validation_windows_as_before_documents_counted():
    """Over tokens on request, without known ends, and in a single document."""
    tokens = documents_of(*[40] * 10, 4000)
    assert fixed_windows(tokens, 4, 10, "tokens").tolist() == [i * 1099 // 10 for i in range(10)]
    for alike in (counting(4400), documents_of(4400)):
        assert fixed_windows(alike, 4, 10).tolist() == [i * 1099 // 10 for i in range(10)]
    assert window_documents(counting(4400), 4, np.arange(9)).tolist() == [0] * 9


@given(lengths=LENGTHS, block_size=st.integers(1, 9), data=st.data(), stretch=st.sampled_from([1, 2, 5, 64, 2**14]))
@settings(deadline=None, max_examples=150)
def test_documents_of_windows(lengths, block_size, data, stretch):
    """Equal numbers for windows of one document, whichever windows are asked for, and what lies between them."""
    tokens = documents_of(*lengths, block_size)
    labels = np.array(label_windows(tokens, block_size))
    asked = np.array(sorted(data.draw(st.sets(st.integers(0, len(labels) - 1), min_size=1))))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader, "STRETCH", stretch)
        found = window_documents(tokens, block_size, asked)
    assert ((np.diff(found) > 0) == (np.diff(labels[asked]) > 0)).all() and (np.diff(found) >= 0).all()
    ids = tokens.read(0, len(tokens))
    for window, label in zip(asked, labels[asked], strict=True):  # a document with more than half of it is its own
        first = window * block_size + 1
        of = [int(np.count_nonzero(ids[:place] == 7)) for place in range(first, first + block_size)]
        assert all(document == label for document in of if of.count(document) > block_size / 2)


def test_validation_windows_of_a_huge_split():
    """A hundred billion tokens: what is read depends on the number of candidates alone."""
    read = []

    class Endless(Tokens):
        def __len__(self) -> int:
            return 10**11

        def read(self, start: int, count: int) -> np.ndarray:
            read.append(count)
            return np.where((np.arange(start, start + count) + 1) % 1000, 0, 7).astype(np.uint16)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader, "CANDIDATES", 2**10)
        found = fixed_windows(Endless([], eot=7), 512, 256)
    assert len(found) == 256 and found[-1] > 10**11 / 512 * 0.99 and len(set(np.diff(found))) <= 3
    assert sum(read) <= 2**10 * loader.STRETCH


def test_too_few_tokens_for_a_window():
    assert Loader(counting(9), 8, 1, 0).n_windows == 1
    with pytest.raises(DataError, match="8 tokens, but one window of block_size 8 needs 9.*model.block_size"):
        Loader(counting(8), 8, 1, 0)
    with pytest.raises(DataError):
        fixed_windows(counting(8), 8, 1)


def test_prefetch_makes_one_item_while_another_is_in_use():
    made = threading.Semaphore(0)
    begun = []

    def items():
        for i in range(4):
            begun.append(i)
            made.release()
            yield i

    source = prefetch(items())
    for i in range(4):
        assert next(source) == i
        for _ in range(2 if i == 0 else i < 3):  # this one and the next are made by now, or soon
            assert made.acquire(timeout=120)
        assert begun == list(range(min(4, i + 2)))
    assert next(source, "end") == "end"


def test_prefetch_raises_errors_at_their_item():
    def items():
        yield 1
        raise DataError("broken")

    source = prefetch(items())
    assert next(source) == 1
    with pytest.raises(DataError, match="broken"):
        next(source)
