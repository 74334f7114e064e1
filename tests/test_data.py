"""data/: tokenizers, the file format and its check, the order of windows, the prepare command."""

import gzip
import hashlib
import json
import os
import re
from base64 import b64encode
from itertools import islice, product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data import DataError, bins, prepare, tokenizer
from data.bins import Tokens, Writer, check, open_tokenizer, open_tokens, read_meta
from data.loader import Loader, fixed_windows, permute, windows
from data.tokenizer import ByteTokenizer, GPT2Tokenizer, TokenizerError, load_tokenizer

BYTES = ByteTokenizer()
HOUSE = Path(__file__).parents[1]
REAL_RANKS = Path(os.environ.get("NANOKERN_RANKS") or HOUSE.parent / "shared/data/gpt2.tiktoken")


# tokenizers


@pytest.fixture(scope="module")
def fake_ranks() -> bytes:
    """A file of GPT-2's form and size, with other merges: all bytes, then 50,000 pairs of them."""
    tokens = [bytes([i]) for i in range(256)]
    tokens += [bytes(pair) for pair in islice(product(range(256), repeat=2), 50_000)]
    return b"".join(b"%s %d\n" % (b64encode(token), rank) for rank, token in enumerate(tokens))


@pytest.fixture(scope="module", params=["bytes", "gpt2"])
def any_tokenizer(request):
    return BYTES if request.param == "bytes" else GPT2Tokenizer(request.getfixturevalue("fake_ranks"))


@given(texts=st.lists(st.text(max_size=40), max_size=4))
@settings(deadline=None, max_examples=60)
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


def test_unknown_tokenizer():
    with pytest.raises(TokenizerError, match="bytes, gpt2"):
        load_tokenizer("gpt3")


def test_ranks_file_is_checked(tmp_path):
    wrong = tmp_path / "ranks"
    wrong.write_bytes(b"IQ== 0\n")
    with pytest.raises(TokenizerError, match=f"{wrong}: not GPT-2's ranks: sha256 [0-9a-f]*, expected 306cd27f"):
        load_tokenizer("gpt2", wrong)
    with pytest.raises(TokenizerError, match="absent.*No such file.*--ranks FILE"):
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
    for part in ("--ranks FILE", "TIKTOKEN_CACHE_DIR", download, "tar xzf"):
        assert part in str(error.value)


# the file format


def write_set(folder: Path, shard_tokens: int = 7) -> list[np.ndarray]:
    """Five training documents of 4 ids and one of validation; returns what the splits should read as."""
    train = [np.arange(start, start + 4, dtype=np.uint16) for start in range(0, 100, 20)]
    val = np.array([250, 251, 252], np.uint16)
    with Writer(folder, BYTES, shard_tokens) as writer:
        for ids in train:
            writer.add("train", ids)
        writer.add("val", val)
        writer.finish("set", {"corpus": "text"}, "python -m data.prepare text --source x --name set")
    return [np.concatenate([np.append(ids, 256) for ids in train]), np.append(val, 256)]


def test_shards_read_as_one_array(tmp_path):
    train, val = write_set(tmp_path)
    tokens = open_tokens(tmp_path, "train")
    assert sorted(path.name for path in tmp_path.glob("train*")) == [f"train-0000{i}.bin" for i in range(4)]
    assert len(tokens) == len(train) == 25
    for start in range(26):
        for count in range(26 - start):
            part = tokens.read(start, count)
            assert part.dtype == np.uint16 and np.array_equal(part, train[start : start + count])
    assert np.array_equal(open_tokens(tmp_path, "val").read(0, 4), val)
    assert (tmp_path / "val-00000.bin").read_bytes() == val.astype("<u2").tobytes()
    for start, count in ((-1, 1), (0, 26), (26, 0), (3, -1)):
        with pytest.raises(IndexError):
            tokens.read(start, count)


def test_meta_tells_what_is_there(tmp_path):
    write_set(tmp_path)
    meta = check(tmp_path, vocab_size=257)
    assert meta == read_meta(tmp_path)
    assert meta.tokenizer == {"name": "bytes", "hash": BYTES.hash, "vocab_size": 257, "eot": 256}
    assert (meta.splits["train"].tokens, meta.splits["train"].documents) == (25, 5)
    assert [shard.tokens for shard in meta.splits["train"].files] == [7, 7, 7, 4]
    last = meta.splits["train"].files[-1]
    assert last.sha256 == hashlib.sha256((tmp_path / last.name).read_bytes()).hexdigest()
    assert not list(tmp_path.glob("*.tmp"))


def test_set_carries_its_tokenizer(tmp_path, monkeypatch, fake_ranks, offline):
    monkeypatch.setattr(tokenizer, "RANKS_SHA256", hashlib.sha256(fake_ranks).hexdigest())
    gpt2 = GPT2Tokenizer(fake_ranks)
    with Writer(tmp_path, gpt2) as writer:
        writer.add("train", gpt2.encode_batch(["à propos"])[0])
        writer.finish("set", {}, "")
    tokens = open_tokens(tmp_path, "train")
    assert open_tokenizer(tmp_path).decode(tokens.read(0, len(tokens))) == "à propos<|endoftext|>"


def damage_odd(folder):
    with (folder / "train-00001.bin").open("ab") as file:
        file.write(b"!")


def damage_truncate(folder):
    os.truncate(folder / "train-00001.bin", 10)


def damage_flip(folder):
    data = bytearray((folder / "train-00001.bin").read_bytes())
    data[3] ^= 1
    (folder / "train-00001.bin").write_bytes(data)


def damage_remove(folder):
    (folder / "train-00001.bin").unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_odd, r"expected 14 bytes \(7 tokens\), found 15"),
        (damage_truncate, r"expected 14 bytes \(7 tokens\), found 10"),
        (damage_flip, "expected sha256 [0-9a-f]{64}, found [0-9a-f]{64}"),
        (damage_remove, "missing, expected 7 tokens"),
    ],
)
def test_check_finds_damage(tmp_path, damage, message):
    write_set(tmp_path)
    damage(tmp_path)
    with pytest.raises(DataError, match=rf"train-00001.bin: {message}.*--source x --name set --force"):
        check(tmp_path, 257)


def test_big_sets_are_not_hashed(tmp_path, monkeypatch):
    write_set(tmp_path)
    damage_flip(tmp_path)
    monkeypatch.setattr(bins, "HASHED_BYTES", 10)
    assert check(tmp_path, 257).splits["train"].tokens == 25


def test_check_wants_a_set_that_fits(tmp_path):
    write_set(tmp_path)
    with pytest.raises(DataError, match="'bytes' has 257 ids, the model's vocab_size is 256. Set model.vocab_size"):
        check(tmp_path, 256)
    meta = json.loads((tmp_path / "meta.json").read_text())
    (tmp_path / "meta.json").write_text(json.dumps(meta | {"dtype": "int32"}))
    with pytest.raises(DataError, match="dtype 'int32', expected 'uint16'.*--force"):
        check(tmp_path, 257)
    (tmp_path / "meta.json").write_text('{"name": ')
    with pytest.raises(DataError, match="meta.json: cannot be read.*--force"):
        check(tmp_path, 257)


def test_check_names_the_prepare_command(tmp_path, monkeypatch):
    elsewhere = f"{tmp_path}/stdlib: no such data set. Prepare it: python -m data.prepare stdlib --out {tmp_path}$"
    with pytest.raises(DataError, match=elsewhere):
        check(tmp_path / "stdlib", 257)
    monkeypatch.setattr(bins, "DATA_DIR", tmp_path)
    with pytest.raises(DataError, match="Prepare it: python -m data.prepare stdlib$"):
        check(tmp_path / "stdlib", 257)
    (tmp_path / "books").mkdir()
    with pytest.raises(DataError, match="half-prepared.*python -m data.prepare text --source FILES --name books$"):
        check(tmp_path / "books", 257)


def test_killed_preparation_is_not_taken_for_a_set(tmp_path):
    write_set(tmp_path)
    with pytest.raises(KeyboardInterrupt), Writer(tmp_path, BYTES, 2) as writer:
        writer.add("train", np.zeros(4, np.uint16))
        raise KeyboardInterrupt
    assert not (tmp_path / "meta.json").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "train-00000.bin",
        "train-00001.bin",
        "train-00002.bin.tmp",
    ]
    write_set(tmp_path, shard_tokens=100)
    check(tmp_path, 257)
    assert {path.name for path in tmp_path.iterdir()} == {"meta.json", "train-00000.bin", "val-00000.bin"}


def test_ids_must_fit_uint16(tmp_path):
    with pytest.raises(DataError, match="65537 ids; uint16"):
        Writer(tmp_path, SimpleNamespace(name="big", vocab_size=65537))


# the order of windows


def counting(n: int) -> Tokens:
    """Tokens 0, 1, 2, … in two shards, so that a window's first token tells where it lies."""
    ids = np.arange(n, dtype=np.uint16)
    return Tokens([ids[: n // 3], ids[n // 3 :]])


@given(n_windows=st.integers(1, 70), batch_size=st.integers(1, 9), block_size=st.integers(1, 5), seed=st.integers())
@settings(deadline=None, max_examples=60)
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
@settings(deadline=None, max_examples=60)
def test_global_batch_is_the_same_however_it_is_cut(batch_size, step, cuts):
    loader = Loader(counting(101), 4, batch_size, seed=1)
    whole = loader.batch(step)
    edges = sorted({0, batch_size, *(min(cut, batch_size) for cut in cuts)})
    parts = [loader.batch(step, a, b - a) for a, b in zip(edges, edges[1:], strict=False)]
    for i in (0, 1):
        assert np.array_equal(np.concatenate([part[i] for part in parts]), whole[i])


def test_batch_depends_on_seed_and_step_alone():
    tokens = counting(4001)
    loader, again = Loader(tokens, 4, 16, seed=7), Loader(tokens, 4, 16, seed=7)
    for step in (90, 3, 3, 1000):
        assert np.array_equal(loader.batch(step)[0], again.batch(step)[0])
        again.batch(step + 1)


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


def test_every_order_of_three_windows_comes_up_alike():
    orders = permute(np.tile(np.arange(3), 6000), 3, 0, np.repeat(np.arange(6000), 3)).reshape(6000, 3)
    counts = np.unique(orders, axis=0, return_counts=True)[1]
    assert len(counts) == 6 and (abs(counts - 1000) < 150).all()  # five standard deviations


def test_order_is_frozen():
    """A changed order would silently unpair new runs from old ones."""
    assert permute(np.arange(8), 8, 0, np.zeros(8, np.int64)).tolist() == [1, 6, 2, 0, 4, 3, 7, 5]
    assert permute(np.array([10**9]), 10**10, 1337, np.array([3])).tolist() == [5094186605]


def test_windows_are_read_where_they_lie():
    x, y = windows(counting(101), np.array([5, 0, 24]), 4)
    assert x.tolist() == [[20, 21, 22, 23], [0, 1, 2, 3], [96, 97, 98, 99]]
    assert np.array_equal(y, x + 1)


def test_fixed_windows_are_spread_over_the_split():
    assert fixed_windows(counting(101), 4, 5).tolist() == [0, 5, 10, 15, 20]
    for count in (25, 26, 99):
        assert fixed_windows(counting(101), 4, count).tolist() == list(range(25))
    spread = fixed_windows(counting(1001), 1, 300)
    assert len(set(spread.tolist())) == 300 and set(np.diff(spread).tolist()) == {3, 4}


def test_too_few_tokens_for_a_window():
    assert Loader(counting(9), 8, 1, 0).n_windows == 1
    with pytest.raises(DataError, match="8 tokens, but one window of block_size 8 needs 9.*model.block_size"):
        Loader(counting(8), 8, 1, 0)
    with pytest.raises(DataError):
        fixed_windows(counting(8), 8, 1)


# the command


@pytest.fixture
def run(tmp_path, capsys):
    """Runs the command on sets below tmp_path; returns (exit code, what it printed)."""

    def run(*args) -> tuple[int, str]:
        code = prepare.main([*map(str, args), "--out", str(tmp_path / "out")])
        printed = capsys.readouterr()
        assert printed.err.startswith("error: ") if code else "error" not in printed.err
        return code, printed.out + printed.err

    return run


@pytest.fixture
def corpus(tmp_path) -> Path:
    """A folder of every known kind of file; 3 documents in rows.jsonl.gz, one in each other."""
    folder = tmp_path / "corpus"
    (folder / "deep").mkdir(parents=True)
    (folder / "b.txt").write_text("bee\n")
    (folder / "a.md").write_bytes("# naïve\r\n".encode())
    (folder / "deep" / "c.txt.gz").write_bytes(gzip.compress(b"sea"))
    (folder / "empty.txt").write_text(" \n")
    (folder / "ignored.pdf").write_bytes(b"\xff")
    rows = "\n".join(json.dumps({"text": text, "id": 1}) for text in ("one", "two", "<|endoftext|>"))
    (folder / "rows.jsonl.gz").write_bytes(gzip.compress(rows.encode() + b"\n\n"))
    return folder


def documents_of(folder: Path) -> dict[str, list[str]]:
    """What the set in `folder` decodes to."""
    found = {}
    for split in ("train", "val"):
        tokens = open_tokens(folder, split)
        ids = tokens.read(0, len(tokens))
        found[split] = [BYTES.decode(part[:-1]) for part in np.split(ids, np.flatnonzero(ids == 256) + 1)[:-1]]
    return found


def test_text_becomes_a_set(run, corpus, tmp_path):
    code, out = run("text", "--source", corpus, "--name", "mine", "--tokenizer", "bytes", "--val-fraction", 0.3)
    assert code == 0 and "prepared:" in out and "skipped 1 documents" in out and "empty.txt" in out
    found = documents_of(tmp_path / "out" / "mine")
    assert found["train"] and found["val"]
    assert {*found["train"], *found["val"]} == {"bee\n", "# naïve\r\n", "sea", "one", "two", "<|endoftext|>"}
    meta = check(tmp_path / "out" / "mine", 257)
    assert meta.splits["train"].documents + meta.splits["val"].documents == 6
    assert meta.prepare.startswith(f"python -m data.prepare text --source {corpus} --name mine")


def test_prepared_again_it_is_already_there(run, corpus, tmp_path):
    command = ("text", "--source", corpus, "--tokenizer", "bytes")
    assert run(*command)[0] == 0
    before = (tmp_path / "out/text/meta.json").stat().st_mtime_ns
    code, out = run(*command)
    assert code == 0 and "already there" in out
    assert (tmp_path / "out/text/meta.json").stat().st_mtime_ns == before

    code, out = run(*command, "--val-fraction", "0.5")
    assert code == 2 and "val_fraction 0.01, now 0.5" in out and "--force" in out and "--name" in out
    assert run(*command, "--val-fraction", "0.5", "--force")[0] == 0
    assert "--force" not in read_meta(tmp_path / "out/text").prepare

    damaged = tmp_path / "out/text/train-00000.bin"
    damaged.write_bytes(damaged.read_bytes()[:-2])
    code, out = run(*command, "--val-fraction", "0.5")
    assert code == 2 and "train-00000.bin: expected" in out


def test_half_prepared_is_prepared_again(run, corpus, tmp_path):
    (tmp_path / "out/text").mkdir(parents=True)
    (tmp_path / "out/text/train-00007.bin").write_bytes(b"left over")
    assert run("text", "--source", corpus, "--tokenizer", "bytes")[0] == 0
    check(tmp_path / "out/text", 257)
    assert not (tmp_path / "out/text/train-00007.bin").exists()


def test_stdlib_is_prepared_from_the_running_python(run, tmp_path, monkeypatch):
    library = tmp_path / "lib"
    for name in ("b.py", "a/c.py", "a/test/t.py", "site-packages/p.py", "latin.py", "notes.txt"):
        (library / name).parent.mkdir(parents=True, exist_ok=True)
        (library / name).write_text(f"# {name}")
    (library / "latin.py").write_bytes(b"\xe9")
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(library))
    code, out = run("stdlib")
    assert code == 0 and "skipped 1 documents" in out and "latin.py" in out
    found = documents_of(tmp_path / "out/stdlib")
    assert sorted(found["train"] + found["val"]) == ["# a/c.py", "# b.py"]


texts = st.lists(st.text(max_size=3), min_size=2, max_size=30)


@given(texts=texts, val_fraction=st.sampled_from([1e-9, 0.01, 0.3]))
def test_split_loses_nothing_and_leaves_nothing_empty(texts, val_fraction):
    pairs = list(prepare.assign(texts, val_fraction))
    assert sorted(text for _, text in pairs) == sorted(texts)
    assert any(split == "val" for split, _ in pairs)


def test_split_stays_when_the_corpus_grows():
    texts = [f"document {i}" for i in range(2000)]
    small, large = ({text: split for split, text in prepare.assign(part, 0.1)} for part in (texts[::3], texts))
    assert all(large[text] == split for text, split in small.items())
    assert 150 < list(large.values()).count("val") < 250


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.jsonl", b'{"text": "a"}\n{"text"\n', "rows.jsonl: line 2 is not JSON"),
        ("rows.jsonl", b'{"body": "a", "id": 3}\n', "line 1 has no field 'text'; it has 'body', 'id'.*--text-field"),
        ("rows.jsonl", b'{"text": 3}\n', "line 1: field 'text' is a int, expected a string"),
        ("rows.jsonl", b'["a"]\n', "line 1 is a list, expected a JSON object"),
        ("rows.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', "rows.jsonl: not UTF-8 at byte 24"),
        ("a.txt", b"abc\xff", "a.txt: not UTF-8 at byte 3"),
        ("a.txt.gz", gzip.compress(bytes(1000))[:20], "a.txt.gz: broken gzip file"),
        ("a.txt.gz", b"not gzip", "a.txt.gz: broken gzip file"),
        ("a.pdf", b"", r"a.pdf: not a file of a known kind \(.txt"),
        ("folder/a.pdf", b"", r"folder: no file of a known kind \(.txt"),
        ("a.txt", b"only one", "1 document to read.*one each.*split"),
        ("a.txt", b"", "no documents to read"),
    ],
)
def test_bad_files(run, tmp_path, name, content, message):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    source = path.parent if "/" in name else path
    code, out = run("text", "--source", source, "--tokenizer", "bytes")
    assert code == 2
    assert re.search(message, out)
    assert not (tmp_path / "out/text/meta.json").exists()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["stdlbi"], "invalid choice: 'stdlbi'.*stdlib"),
        (["text"], "text needs files: add --source"),
        (["text", "--source", "absent.txt"], "absent.txt: no such file or folder"),
        (["stdlib", "--source", "x"], "takes no --source"),
        (["stdlib", "--name", "../x"], "letters, digits"),
        (["text", "--source", "x", "--name", "stdlib"], "a corpus' own name"),
        (["stdlib", "--val-fraction", "1.5"], "1.5: expected a number between 0 and 1"),
        (["stdlib", "--shard-tokens", "0"], "at least 1"),
        (["stdlib", "--tokenizer", "gpt2", "--ranks", "absent"], "absent: cannot read GPT-2's ranks"),
    ],
)
def test_bad_arguments(run, tmp_path, args, message):
    code, out = run(*args)
    assert code == 2
    assert re.search(message, out)
    assert not (tmp_path / "out").exists()


def test_everything_in_validation(run, tmp_path):
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.txt").write_text("b")
    code, out = run("text", "--source", tmp_path, "--tokenizer", "bytes", "--val-fraction", "0.999999")
    assert code == 2 and "lower --val-fraction" in out
