"""A tiny corpus and a tiny model config that the tests of several packages share."""

import gc
import logging
import os
import random
from base64 import b64encode
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

import configure
from configure.schema import Optim
from data.tokenizer import ByteTokenizer, GPT2Tokenizer
from data.writer import Writer

pytest.register_assert_rewrite("corpora")
os.environ["OMP_NUM_THREADS"] = "1"  # for the processes that tests start
# cuBLAS reads it once, at the first matrix product
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
# A sync takes longer than the rest of a tiny save, and only a power cut would show that it was
# left out; `disk_calls` has where it is asked for.
os.fsync = os.fstat
# torch.distributed.checkpoint would flood the report of a failing test
logging.disable(logging.DEBUG)

WORDS = [
    "a",
    "bee",
    "can",
    "dance",
    "early",
    "for",
    "grain",
    "however",
    "in",
    "june",
    "kestrels",
    "learn",
    "maps",
]

fuzz = settings(  # the same examples in each run
    max_examples=80,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

TINY = """\
[run]
name = "tiny"
dir = "{runs}"

[model]
n_layer = 2
n_head = 2
n_embd = 32
block_size = 32
vocab_size = 257
n_expert = 8
top_k = 2
expert_hidden = 8

[data]
name = "tiny"
dir = "{data}"

[train]
batch_size = 8
micro_batch_size = 8
max_steps = 4
checkpoint_interval = 5000
dtype = "float32"
device = "cpu"

[optim]
lr = 3e-3
warmup_steps = 2

[eval]
interval = 2
windows = 6

[log]
interval = 1
"""


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one prepared corpus, `tiny`: 33 kB of training text, tokenized as bytes."""
    folder = tmp_path_factory.mktemp("data")
    tokenizer, choice = ByteTokenizer(), random.Random(0).choice
    with Writer(folder / "tiny", tokenizer) as writer:
        for split, documents in {"train": 60, "val": 4}.items():
            for _ in range(documents):
                text = " ".join(choice(WORDS) for _ in range(100))
                ids = np.append(tokenizer.encode_array(text), np.uint16(tokenizer.eot))
                writer.write(split, ids)
        writer.finish(
            "tiny", {}, "python -m data.prepare text --source FILES --name tiny --tokenizer bytes"
        )
    return folder


def write_tiny(folder: Path, corpus: Path) -> Path:
    """Write folder/tiny.toml: 2 layers, 8 experts, 4 steps on the tiny corpus, runs in folder."""
    file = folder / "tiny.toml"
    file.write_text(TINY.format(runs=(folder / "runs").as_posix(), data=corpus.as_posix()))
    return file


@pytest.fixture
def tiny_file(tmp_path: Path, corpus: Path) -> Path:
    """`write_tiny` in tmp_path."""
    return write_tiny(tmp_path, corpus)


@pytest.fixture
def tiny(tiny_file: Path) -> Callable[..., configure.Config]:
    """A function: `tiny("train.max_steps=9")` is the Config of `tiny_file` with that override."""
    return lambda *overrides: configure.load(tiny_file, overrides)


@pytest.fixture(scope="module")
def module_tiny(
    tmp_path_factory: pytest.TempPathFactory, corpus: Path
) -> Callable[..., configure.Config]:
    """`tiny` for all tests of a module: their runs are in one folder."""
    file = write_tiny(tmp_path_factory.mktemp("module"), corpus)
    return lambda *overrides: configure.load(file, overrides)


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """A function: `write(text)` writes x.toml, or the file that it is given the name of, and
    returns its path.
    """

    def write(text: str = "", name: str = "x.toml") -> Path:
        (tmp_path / name).write_text(text, encoding="utf-8")
        return tmp_path / name

    return write


@pytest.fixture
def call(capsys: pytest.CaptureFixture) -> Callable[..., str]:
    """A function: `call(main, *arguments)` runs a command and returns what it prints.

    With `code=2` it must end with that code, print nothing to stdout, and the error on stderr is
    returned.
    """

    def call(main: Callable[[list[str]], int], *arguments: object, code: int = 0) -> str:
        capsys.readouterr()
        assert main([*map(str, arguments)]) == code
        printed = capsys.readouterr()
        assert code == 0 or printed.out == ""
        return printed.err if code else printed.out

    return call


@pytest.fixture(scope="session")
def fake_ranks() -> bytes:
    """A BPE file with GPT-2's format and size but other merges: the 256 bytes, then 50,000 random
    pairs of bytes.
    """
    tokens, pairs = [bytes([i]) for i in range(256)], [*product(range(256), repeat=2)]
    tokens += map(bytes, random.Random(0).sample(pairs, 50_000))
    return b"".join(b"%s %d\n" % (b64encode(token), rank) for rank, token in enumerate(tokens))


@pytest.fixture(scope="session", params=["bytes", "gpt2"])
def any_tokenizer(request: pytest.FixtureRequest) -> ByteTokenizer | GPT2Tokenizer:
    """Each kind of tokenizer."""
    return (
        ByteTokenizer()
        if request.param == "bytes"
        else GPT2Tokenizer(request.getfixturevalue("fake_ranks"))
    )


@pytest.fixture
def canary(tmp_path: Path) -> Iterator[Path]:
    """A path for `Payload` to create; the test fails if the file exists at its end."""
    path = tmp_path / "canary"
    yield path
    assert not path.exists(), "the payload ran"


class Payload:
    """An object whose pickle creates the file `path` when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return Path.touch, (self.path,)


@pytest.fixture
def saves_end_first(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """A function: after it is called, training waits until each checkpoint is written."""
    from runtime.checkpoint import Saver

    def saving(saver: Saver, *args: object) -> None:
        save(saver, *args)
        saver.pending.join()

    save = Saver.save
    return lambda: monkeypatch.setattr(Saver, "save", saving)


@pytest.fixture
def before_steps(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int], object]], None]:
    """A function: after `before_steps(action)`, training calls action(step) between a step's seed
    and its forward pass.

    Given None it calls nothing any more.
    """
    import train  # not at the top: it imports Triton's kernels

    rate, actions = train.learning_rate, []

    def learning_rate(optim: Optim, max_steps: int, step: int) -> float:
        for action in actions:
            action(step)
        return rate(optim, max_steps, step)

    monkeypatch.setattr(train, "learning_rate", learning_rate)
    return lambda action: actions.append(action) if action else actions.clear()


@pytest.fixture
def disk_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows with "sync NAME" and "rename NEW NAME" for each os.fsync, os.rename and os.replace,
    without process ids.
    """
    calls: list[str] = []

    def record(name: str, what: str) -> None:
        def recorded(*arguments: int | str | Path) -> None:
            path = arguments[-1]
            if what == "sync":
                path = os.readlink(f"/proc/self/fd/{path}")
            calls.append(f"{what} {Path(path).name}".replace(f".{os.getpid()}.", "."))
            call(*arguments)

        call = getattr(os, name)
        monkeypatch.setattr(os, name, recorded)

    record("fsync", "sync")
    record("rename", "rename")
    record("replace", "rename")
    return calls


@pytest.fixture
def without_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports draw no pictures, which are most of their work."""
    import report.page  # not at the top: it imports matplotlib

    monkeypatch.setattr(report.page, "draw_group", lambda *args: [])


def pytest_sessionstart(session: pytest.Session) -> None:
    """Set up torch before the first test module is imported, in the processes that run tests.

    With -n 2 a third one starts them and hands the tests out: 3 s sooner without torch.
    """
    if not session.config.pluginmanager.hasplugin("dsession"):
        gc.disable()  # until all is imported: a quarter of that time, and nothing is garbage
        import torch_settings  # noqa: F401


def pytest_collection_finish() -> None:
    """Collect garbage again, without looking at what is imported."""
    gc.freeze()
    gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests marked `gpu` where there is none."""
    import torch

    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("no CUDA device")


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Give cached memory back after a test marked `gpu`: several test processes share a GPU."""
    import torch

    if item.get_closest_marker("gpu") and torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()
