"""data.mix: which row is of which set, validation of each set, resume, and the commands that open a
mixture's data.
"""

import hashlib
import json
import random
import re
import shutil
from argparse import Namespace

import numpy as np
import pytest
from conftest import WORDS, write_tiny
from corpora import write_ids
from hypothesis import example, given, settings
from hypothesis import strategies as st
from runs import metrics

import configure
import train
from data import DataError
from data.bins import Tokens, check_dataset, fingerprint, open_tokens
from data.loader import (
    SHARE_SUM,
    Loader,
    assign_rows,
    check_sets,
    choose_validation,
    fixed_windows,
    identify,
    split_windows,
    to_shares,
    window_documents,
)
from eval import val_loss
from eval.routing import read_validation
from eval.trained import load_model, load_run
from runtime import RunError
from runtime.folder import path_of

WEIGHTS = {"arxiv": 0.3, "books": 0.5, "edu": 0.2}
MIX = "data.mix={books = 0.5, arxiv = 0.3, edu = 0.2}"
some_weights = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=9)


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    """A folder with three prepared sets of bytes, of different sizes."""
    folder = tmp_path_factory.mktemp("sets")
    choices = random.Random(1).choices
    for name, documents in {"arxiv": 20, "books": 30, "edu": 3}.items():
        texts = [name + " ".join(choices(WORDS, k=60)) for _ in range(documents + 4)]
        ids = [[*text.encode(), 256] for text in texts]
        write_ids(folder / name, sum(ids[4:], []), sum(ids[:4], []), name=name)
    return folder


@pytest.fixture
def mixed(tmp_path, sets):
    """A function: `mixed("train.max_steps=9")` is the Config of a tiny run on the mixture, with
    that override.
    """
    file = write_tiny(tmp_path, sets)
    return lambda *overrides: configure.load(file, [MIX, "eval.windows=17", *overrides])


@pytest.fixture(scope="module")
def trained(tmp_path_factory, sets):
    """The Config of a finished run on the mixture."""
    config = configure.load(
        write_tiny(tmp_path_factory.mktemp("mixed"), sets), [MIX, "eval.windows=17"]
    )
    train.train(config)
    return config


@given(weights=some_weights, first=st.sampled_from([0, 0, 77, 10**12]))
@example(weights=[1.0] * 5, first=0)
@example(weights=[5e-324, 1.0], first=0)
@settings(deadline=None, max_examples=60)
def test_every_set_has_its_part_of_the_rows(weights, first):
    rows = np.arange(first, first + 3000)
    shares = to_shares(weights)
    sets, places = assign_rows(rows, shares)
    assert shares.sum() == SHARE_SUM and len(sets) == len(places) == 3000
    for number, share in enumerate(shares.tolist()):
        mine = places[sets == number]
        # none twice, none left out
        assert np.array_equal(mine, mine[:1].repeat(len(mine)) + np.arange(len(mine)))
        # rows of the set up to each row
        before = np.cumsum(sets == number) + (mine[0] if len(mine) else 0)
        assert not len(mine) or np.abs(before - (rows + 1.0) * share / SHARE_SUM).max() < 2


def test_order_of_a_mixture_is_frozen():
    """Of shares 1/2, 3/10 and 1/5: rows alternate between the first set and the others, which get
    round(3 n / 5) and the rest of n rows. The largest set is first; equal ones keep their order.
    """
    sets, numbers = assign_rows(np.arange(10), to_shares([5, 3, 2]))
    assert sets.tolist() == [0, 1, 0, 2, 0, 1, 0, 2, 0, 1]
    assert numbers.tolist() == [0, 0, 1, 0, 2, 1, 3, 1, 4, 2]
    assert assign_rows(np.arange(3), to_shares([1, 1]))[0].tolist() == [0, 1, 0]
    assert assign_rows(np.arange(4), to_shares([1, 2, 1]))[0].tolist() == [1, 0, 1, 2]
    assert split_windows(5, [1, 1, 1], [9] * 3) == [2, 2, 1]


def tokens_from(first, count):
    """Tokens first, first + 1, …: a window's first token tells its set and its number."""
    return Tokens([np.arange(first, first + count, dtype=np.uint16)])


def test_each_set_is_read_as_if_alone():
    """Also over epochs: that of 9 windows has some 25 of them here, the others less than one."""
    windows = [900, 9, 800]
    parts = [tokens_from(10_000 * i, 4 * count + 1 + i) for i, count in enumerate(windows)]
    mixture = Loader(parts, 4, 7, seed=3, weights=[5, 2, 3])
    assert np.allclose(mixture.count_epochs(160), 112 * np.array([5, 2, 3]) / windows)
    seen = [[], [], []]
    for step in range(160):
        for slice_ in ((0, 2), (2, 1), (3,)):
            for row in mixture.batch(step, *slice_)[0]:
                seen[row[0] // 10_000].append(row)
    for part, mine, weight in zip(parts, seen, [5, 2, 3], strict=True):
        alone = Loader([part], 4, len(mine), seed=3).batch(0)[0]
        assert abs(len(mine) - 1120 * weight / 10) < 1 and np.array_equal(mine, alone)


def test_validation_windows_are_those_of_each_set(sets):
    # a short split gives what it has
    assert split_windows(100, [0.5, 0.3, 0.2], [999, 7, 999]) == [50, 7, 20]
    assert split_windows(4, [0.98, 0.01, 0.01], [9] * 3) == [4, 1, 1]  # each has one
    parts = [open_tokens(sets / name, "val") for name in WEIGHTS]
    firsts = np.cumsum([0, *((len(part) - 1) // 32 for part in parts)])
    chosen = choose_validation(parts, 32, 17, weights=[3, 5, 2])
    assert np.bincount(chosen.sets).tolist() == [5, 9, 3]
    assert np.bincount(chosen.sets, chosen.weights) == pytest.approx([5.1, 8.5, 3.4])
    starts = np.array([5, 14])
    windows = np.split(chosen.windows - firsts[chosen.sets], starts)
    documents = np.split(chosen.documents, starts)
    for part, mine, labels in zip(parts, windows, documents, strict=True):
        alone = fixed_windows(part, 32, len(mine))
        assert np.array_equal(mine, alone)
        assert np.array_equal(labels - labels[0], window_documents(part, 32, alone))
    assert (np.diff(chosen.documents)[starts - 1] > 0).all()


def test_losses_of_sets_are_those_of_val_loss(trained, call):
    last = metrics(trained)[-1]
    said = call(val_loss.main, path_of(trained))
    for name in WEIGHTS:
        loss = last[f"val/{name}/loss"]
        assert re.search(rf"/{name} +val .* {loss:.4f}", said)
    assert f"mean by the weights of the mixture {last['val/loss']:.4f}" in said
    assert "no longer" not in said
    assert "mean by" not in call(val_loss.main, path_of(trained), "--data", "books")


def test_the_tokenizer_is_that_of_any_set_that_is_left(trained, sets, tmp_path, monkeypatch):
    run = shutil.copytree(path_of(trained), tmp_path / "run")
    file = run / "config.toml"
    file.write_text(file.read_text().replace(str(sets), str(tmp_path / "left")))
    monkeypatch.setattr("eval.trained.TOKENIZERS", {})
    missing = ", ".join(f"{tmp_path}/left/{name}" for name in WEIGHTS)
    with pytest.raises(RunError, match=f"^{missing}: no such data set, and no known"):
        load_run(run)
    shutil.copytree(sets / "edu", tmp_path / "left/edu")
    assert load_run(run)[1].eot == 256


def test_routing_is_measured_on_the_mixture_or_on_one_set(trained, sets):
    model = load_model(path_of(trained))
    parts = [open_tokens(sets / part, "val") for part in WEIGHTS]
    for data, counts, label in (
        (None, (5, 9, 3), trained.data.label),
        ("books", (0, 4, 0), str(sets / "books")),
        (str(sets / "books"), (0, 4, 0), str(sets / "books")),
    ):
        tokens, name = read_validation(model, Namespace(data=data, windows=sum(counts)))
        wanted = []
        for part, count in zip(parts, counts, strict=True):
            wanted += [part.read(32 * w, 32) for w in fixed_windows(part, 32, count)]
        assert name == label and np.array_equal(tokens[:, :-1], wanted)


def test_other_weights_do_not_resume(mixed):
    """Nor does a run whose recorded weights were edited, too."""
    config = mixed("train.checkpoint_interval=2")
    train.train(config)
    other = "data.mix={books = 0.6, arxiv = 0.3, edu = 0.2}"
    file = path_of(config) / "config.toml"
    with pytest.raises(
        RunError,
        match="data.mix: {'arxiv': 0.3, 'books': 0.5, 'edu': 0.2} -> {'arxiv': 0.3, 'books'",
    ):
        train.train(mixed(other))
    file.write_text(file.read_text().replace('"books" = 0.5', '"books" = 0.6'))
    with pytest.raises(RunError, match="(?s)the data has changed since step 4.*data.mix"):
        train.train(mixed(other, "train.max_steps=9"))


def test_identity_of_a_mixture(sets):
    """Checkpoints have it: a change would keep all runs on mixtures from resuming."""
    metas = [check_dataset(sets / name, 257) for name in WEIGHTS]
    one = identify(metas, [3, 5, 2])
    prints = [fingerprint(meta)["data"] for meta in metas]
    shares = (3 * 2**30 // 10, 2**29 + 1, 2 * 2**30 // 10)  # 2**30 in all
    pairs = [*zip(shares, prints, strict=True)]
    assert one["data"] == hashlib.sha256(json.dumps(pairs).encode()).hexdigest()
    assert one == identify(metas, [0.3, 0.5, 0.2]) != identify(metas, [3, 5, 2.1])
    assert one["tokenizer"] == identify(metas[:1], [1])["tokenizer"]


def test_sets_of_different_tokenizers(mixed, sets, tmp_path):
    folder = shutil.copytree(sets, tmp_path / "copy")
    meta = folder / "edu/meta.json"
    meta.write_text(re.sub(r'"hash": "\w+"', f'"hash": "{"0" * 64}"', meta.read_text()))
    with pytest.raises(
        DataError, match=f"{folder}/edu: its tokenizer 'bytes' is not that of .*--tokenizer"
    ):
        train.train(mixed(f"data.dir={folder}"))
    check_sets([folder / "arxiv", folder / "books"], 257)


def test_a_mixture_in_a_file(write):
    file = write('[data.mix]\n"fineweb-edu" = 0.5\nbooks = 2\n')
    sets = configure.load(file).data.sets
    # the order in the file means nothing
    assert [*sets.items()] == [("books", 0.8), ("fineweb-edu", 0.2)]
    assert configure.load(file, ["--data.mix={}"]).data.sets == {"books3": 1.0}
    assert configure.schema.Data(mix={"b": 1e308, "a": 1e308, "c": 1e-300}).sets["a"] == 0.5
