"""runtime/checkpoint.py: what is restored, saving while training continues, durability, damage,
full disks, pickles.
"""

import errno
import io
import itertools
import os
import pickle
import random
import re
import shutil
import signal
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import Payload
from runs import ALONE, Forked, be_killed, content, flip, fork_with_fault
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    MetadataIndex,
)

from configure.schema import Model, Optim, Train
from model import GPT
from runtime import RankError, RunError, UnreadableError, checkpoint, describe_write_errors
from runtime.checkpoint import DamagedError
from runtime.folder import RunFolder
from runtime.runs import format_manifest
from runtime.state import build_optimizer

SMALL = Model(
    n_layer=1,
    n_head=2,
    n_embd=16,
    block_size=32,
    vocab_size=64,
    n_expert=4,
    top_k=2,
    expert_hidden=8,
)


class Training:
    """A tiny model in the middle of its training, with sums of a log interval."""

    def __init__(self, seed=0):
        torch.manual_seed(seed)
        self.model = GPT(SMALL)
        self.optimizer = build_optimizer(self.model, Optim())
        self.interval = torch.full((3,), seed / 3, dtype=torch.float64)
        self.idx = torch.arange(64).view(2, 32)
        self.step()

    def step(self):
        loss = self.model(self.idx, self.idx).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.interval += loss.item()

    def save(self, saver, step):
        saver.save(step, self.model, self.optimizer.state, {"interval": self.interval}, {})

    def load(self, folder, step):
        checkpoint.restore(
            folder, step, self.model, self.optimizer.state, {"interval": self.interval}
        )

    def tensors(self):
        states = [self.optimizer.state[parameter] for parameter in self.model.parameters()]
        moments = [state[key] for state in states for key in sorted(state)]
        return [*self.model.state_dict().values(), *moments, self.interval]

    def fill(self, number):
        with torch.no_grad():
            for tensor in self.tensors():
                tensor.fill_(number)


def saver_in(folder, keep=9):
    return checkpoint.Saver(folder, ALONE, sharded=False, train=Train(keep_checkpoints=keep))


def write(folder, *steps, keep=9):
    saver = saver_in(folder, keep)
    for step in steps:
        Training().save(saver, step)
        saver.wait()


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def failing(number):
    return mock.Mock(side_effect=OSError(number, os.strerror(number)))


# ---- saving while training continues
@pytest.fixture
def slow_disk(monkeypatch):
    """Nothing is written before `slow_disk.set()`."""
    allowed, save = threading.Event(), dcp.save

    def slow_save(*args, **options):
        assert allowed.wait(timeout=300)
        return save(*args, **options)

    monkeypatch.setattr(dcp, "save", slow_save)
    yield allowed
    allowed.set()


def test_checkpoint_holds_the_weights_of_its_step(tmp_path, slow_disk):
    training = Training()
    saved = [tensor.clone() for tensor in training.tensors()]
    saver = saver_in(tmp_path)
    training.save(saver, 1)
    for _ in range(3):
        training.step()  # training did not wait
    saver.poll()
    assert checkpoint.steps(tmp_path) == []
    slow_disk.set()
    saver.wait()
    other = Training(1)
    other.load(tmp_path, 1)
    assert all(torch.equal(a, b) for a, b in zip(other.tensors(), saved, strict=True))
    assert not any(map(torch.equal, training.model.parameters(), other.model.parameters()))


def test_a_save_may_be_slow_but_not_hang(tmp_path, monkeypatch, slow_disk):
    """Each look at the save makes the test's clock 40 s later; 6 minutes are allowed."""
    slow = Train(timeout_minutes=1)
    looks = []
    clock = SimpleNamespace(monotonic=lambda: 40 * len(looks))
    monkeypatch.setattr(checkpoint, "time", clock)

    def look(seconds):
        if len(looks) < 8:
            looks.append(seconds)
        else:
            slow_disk.set()
            time.sleep(0.02)

    clock.sleep = look
    with checkpoint.Saver(tmp_path, ALONE, sharded=False, train=slow) as saver:
        Training().save(saver, 1)
    assert len(looks) == 8
    clock.sleep = looks.append
    slow_disk.clear()
    with (
        pytest.raises(RunError, match=r"hangs.* 6 minutes \(6 times train.timeout_minutes\)"),
        checkpoint.Saver(tmp_path, ALONE, sharded=False, train=slow) as saver,
    ):
        Training().save(saver, 2)
    assert len(looks) == 18  # the tenth look at this save
    assert checkpoint.latest(tmp_path, ALONE)[0] == 1


# ---- which checkpoints stay
def test_last_intact_checkpoint_stays_when_saves_fail_and_newer_ones_are_damaged(
    tmp_path, monkeypatch, capsys
):
    write(tmp_path, 1, keep=1)
    with monkeypatch.context() as patch:
        patch.setattr(dcp, "save", failing(errno.EIO))
        for step in (2, 3):
            with pytest.raises(RunError):
                write(tmp_path, step, keep=1)
    assert checkpoint.latest(tmp_path, ALONE)[0] == 1
    write(tmp_path, 4, 5, keep=3)
    flip(tmp_path / "step_00000005/__0_0.distcp", 1000)
    (tmp_path / "step_00000004/manifest.json").unlink()
    before, _ = sorted(content(tmp_path).values()), capsys.readouterr()
    for _ in range(2):
        assert checkpoint.latest(tmp_path, ALONE)[0] == 1
    newest, older = capsys.readouterr().out.splitlines()
    said = "step_00000005/__0_0.distcp: damaged.* quarantined as step_00000005.damaged"
    assert re.search(said, newest)
    assert "step_00000004/manifest.json: damaged, no such file or directory" in older
    assert sorted(content(tmp_path).values()) == before
    write(tmp_path, 4, keep=2)  # quarantined ones do not count
    kept = ["step_00000001", "step_00000004"]
    assert names(tmp_path) == [*kept, "step_00000004.damaged", "step_00000005.damaged"]
    assert checkpoint.latest(tmp_path, ALONE)[0] == 4
    flip(tmp_path / "step_00000004/__0_0.distcp", 1000)  # once more at a step
    assert checkpoint.latest(tmp_path, ALONE)[0] == 1


def test_what_interrupted_saves_left_is_removed_at_the_next_start_or_named(
    tmp_path, monkeypatch, capsys
):
    """What cannot be removed hinders no save, and the next one tries again."""
    path = tmp_path / "checkpoints"
    write(path, 1)
    for step in (2, 8):  # complete but not renamed
        shutil.copytree(path / "step_00000001", path / f"step_{step:08d}.tmp")
    others = ["step_00000003.damaged", "step_9"]
    for name in others:
        (path / name).mkdir()
    remove, stuck = os.rmdir, ["step_00000001", "step_00000002.tmp"]

    def refuse(name, *args, **options):
        if Path(name).name in stuck:
            failing(errno.EPERM)()
        remove(name, *args, **options)

    monkeypatch.setattr(os, "rmdir", refuse)
    with RunFolder(tmp_path).claim(ALONE):
        printed = capsys.readouterr().out
        assert "step_00000002.tmp: " in printed and "(Operation not permitted)" in printed
        assert names(path) == sorted([*stuck, *others]) and checkpoint.steps(path) == [1]
        for step in (2, 3):
            write(path, step, keep=1)
            printed = capsys.readouterr().out
            assert "step_00000001: this old or partial checkpoint could not" in printed
            assert checkpoint.latest(path, ALONE)[0] == step
        stuck.clear()
        write(path, 4, keep=1)
    assert capsys.readouterr().out == "" and names(path) == sorted(["step_00000004", *others])


# ---- durability
def test_save_is_synced_before_it_is_renamed(tmp_path, disk_calls):
    write(tmp_path / "checkpoints", 1)
    assert disk_calls == [
        *("sync __0_0.distcp", "sync .metadata.tmp", "rename .metadata"),
        *("sync manifest.json.tmp", "rename manifest.json"),
        *(
            "sync step_00000001.tmp",
            "rename step_00000001",
            "sync checkpoints",
            f"sync {tmp_path.name}",
        ),
    ]


# ---- damage
@pytest.fixture(scope="module")
def intact(tmp_path_factory):
    folder = tmp_path_factory.mktemp("intact")
    write(folder, 2)
    return folder / "step_00000002"


@pytest.fixture
def copied(intact, tmp_path):
    return Path(shutil.copytree(intact, tmp_path / intact.name))


def assert_damaged(file):
    with pytest.raises(DamagedError, match=f"{file.parent.name}/{file.name}: damaged"):
        checkpoint.verify(file.parent)


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "manifest.json"])
def test_any_damage_of_a_file_is_detected(copied, name):
    assert checkpoint.verify(copied)["step"] == 2 and len(names(copied)) == 3
    file = copied / name
    data = file.read_bytes()
    bits = range(8 * len(data))
    for bit in (*range(32), *random.Random(0).sample(bits, 32), *bits[-32:]):
        flip(file, bit)
        assert_damaged(file)
        flip(file, bit)
    for damaged in (b"", data[:-1], data + b"\0"):
        file.write_bytes(damaged)
        assert_damaged(file)
    file.unlink()
    assert_damaged(file)
    file.mkdir()  # in place of the file
    assert_damaged(file)


def test_a_file_that_one_rank_cannot_read_comes_before_damage(copied, monkeypatch):
    """Else the others would rename the checkpoint."""
    faults = [DamagedError("damaged"), UnreadableError("cannot be read"), None]
    monkeypatch.setattr(checkpoint.distributed, "gather", lambda fault, group: faults)
    with pytest.raises(UnreadableError):
        checkpoint.verify(copied)


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EMFILE, errno.EACCES])
@pytest.mark.parametrize("owner, call, name", [
    (checkpoint, "_describe_file", r"/step_00000002/\S+"),
    (Path, "read_bytes", "/step_00000002/manifest.json"),
    (os, "listdir", ""),
])  # fmt: skip
def test_what_cannot_be_read_is_not_damaged(copied, monkeypatch, owner, call, name, number):
    """An error that passes: nothing is renamed, and the next start goes on."""
    before = content(copied.parent)
    said = f"^{copied.parent}{name} cannot be read .{os.strerror(number)}.*intact"
    with monkeypatch.context() as patch, pytest.raises(RunError, match=said):
        patch.setattr(owner, call, failing(number))
        checkpoint.latest(copied.parent, ALONE)
    assert content(copied.parent) == before
    assert checkpoint.latest(copied.parent, ALONE)[0] == 2


def test_an_error_of_reading_within_torch_is_told_as_one(copied, monkeypatch):
    error = OSError(errno.EMFILE, os.strerror(errno.EMFILE), "a file")
    monkeypatch.setattr(dcp.FileSystemReader, "read_data", mock.Mock(side_effect=error))
    with pytest.raises(UnreadableError, match="^a file cannot be read .Too many open files"):
        Training().load(copied.parent, 2)


ADVICE = {
    errno.EIO: "Check the disk and its network",
    errno.EACCES: "Give yourself the right",
    errno.ENOSPC: "Make room on the disk",
    errno.EDQUOT: "Make room on the disk",
}


@pytest.mark.parametrize("number", ADVICE)
def test_the_remedy_is_that_of_the_error(tmp_path, monkeypatch, number):
    for owner, call in ((checkpoint, "write_atomic"), (dcp.FileSystemWriter, "write_data")):
        said = f"{os.strerror(number)}.*intact. {ADVICE[number]}"
        with monkeypatch.context() as patch, pytest.raises(RunError, match=said):
            patch.setattr(owner, call, failing(number))
            write(tmp_path, 1)
    refused = f"^here cannot be written .*{ADVICE[number]}"
    with pytest.raises(RunError, match=refused), describe_write_errors("here"):
        failing(number)()


# ---- kills and a full disk before any call to the file system
def save_filled(training, path, step):
    """Save numbers that are all `step`; the exit code."""
    saver = saver_in(path, keep=2)
    training.fill(step)
    try:
        training.save(saver, step)
        saver.wait()
    except RunError as error:
        print(error)
        return 2
    return 0


def find_no_room():
    failing(errno.ENOSPC)()


def fail_at_every_call(path, fault):
    """In forks, stop a save before its first call to the file system, before its second … until it
    succeeds.
    """
    training = Training()
    write(path, 1, 2)  # and torch loads what it needs when it first saves
    step, in_a_save = 2, 0
    for number in itertools.count():
        code, printed = fork_with_fault(
            partial(save_filled, training, path, step + 1), path, number, fault
        )
        left = list(path.glob("*.tmp"))
        assert not left or fault is be_killed
        in_a_save += code == 2 or bool(left)
        checkpoint.remove_partial_saves(path)
        newest = checkpoint.latest(path, ALONE)[0]
        assert newest in (step, step + 1) and not list(path.glob("*.damaged"))
        if newest > 2:
            training.load(path, newest)
            assert all((tensor == newest).all() for tensor in training.tensors())
        if "FAULT" not in printed:
            break
        assert code in ((-signal.SIGKILL,) if fault is be_killed else (0, 2)), printed
        assert code != 2 or re.search("No space left on device.*Make room", printed), printed
        step = newest
    assert (code, newest) == (0, step + 1)
    assert in_a_save >= 8 and newest >= (6 if fault is be_killed else 3)


@pytest.mark.integration
@pytest.mark.parametrize("fault", [be_killed, find_no_room])
def test_checkpoints_survive_a_fault_before_every_file_system_call(tmp_path, fault):
    code, printed = Forked(fail_at_every_call, tmp_path / "checkpoints", fault).wait(300)
    assert code == 0, printed


# ---- pickles that would run
def forge(path, **replaced):
    """Replace files of a checkpoint, with a manifest that fits: who can write the files can write
    it, too.
    """
    for name, data in replaced.items():
        (path / name).write_bytes(data)
    (path / "manifest.json").unlink()
    entries = {file.name: checkpoint._describe_file(file) for file in path.iterdir()}
    (path / "manifest.json").write_text(format_manifest({"step": 2, "files": entries, "facts": {}}))
    checkpoint.verify(path)


def read_as_torch_does(path):
    reader = dcp.FileSystemReader(path)
    dcp.load({"model": GPT(SMALL).state_dict()}, storage_reader=reader, no_dist=True)


# through a module of torch
BACK_DOOR = b"\x80\x04ctorch.distributed.checkpoint.metadata\nos.mknod\n(V%s\ntR."


def test_metadata_of_another_python_is_read(copied, monkeypatch):
    """3.11.2, which Debian 12 has, pickles members of enums by getattr; 3.13 renamed a module."""
    metadata = pickle.loads((copied / ".metadata").read_bytes())

    def reduce_by_name(member, protocol):
        return getattr, (type(member), member.name)

    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", reduce_by_name)
    data = pickle.dumps(metadata, protocol=2, fix_imports=False)
    assert b"cbuiltins\ngetattr\n" in data
    assert b"cpathlib\n" in data
    forge(copied, **{".metadata": data.replace(b"cpathlib\n", b"cpathlib._local\n")})
    Training().load(copied.parent, 2)
    for owner in (GPT, object(), _MEM_FORMAT_ENCODING):
        with pytest.raises(pickle.UnpicklingError, match="has no place in a checkpoint"):
            checkpoint._find_memory_format(owner, "__init__")


def forge_metadata(path, canary):
    forge(path, **{".metadata": pickle.dumps(Payload(canary))})


def forge_a_back_door(path, canary):
    forge(path, **{".metadata": BACK_DOOR % bytes(canary)})


def forge_an_entry(path, canary):
    """torch's readers give entries that are not tensors to torch.load(weights_only=False)."""
    torch.save(Payload(canary), evil := io.BytesIO())
    metadata = pickle.loads((path / ".metadata").read_bytes())
    (index,) = (index for index in metadata.storage_data if index.fqn == "model.wte.weight")
    evil_entry = _StorageInfo("evil.distcp", 0, len(evil.getvalue()))
    metadata.storage_data |= {index: evil_entry, MetadataIndex(index.fqn): evil_entry}
    metadata.state_dict_metadata["model.wte.weight"] = BytesStorageMetadata()
    forge(path, **{"evil.distcp": evil.getvalue(), ".metadata": pickle.dumps(metadata)})


@pytest.mark.parametrize("forge_one", [forge_metadata, forge_a_back_door, forge_an_entry])
def test_a_pickle_runs_nothing(copied, canary, caplog, forge_one):
    """Torch's own reader runs it, or the test would prove nothing."""
    forge_one(copied, canary)
    with suppress(CheckpointException):
        read_as_torch_does(copied)
    canary.unlink()
    caplog.clear()
    for load in (
        lambda: dict(checkpoint.open_weights(copied.parent, 2, GPT(SMALL))[0]),
        lambda: Training().load(copied.parent, 2),
    ):
        with pytest.raises(RunError, match=f"{copied.name} does not fit this run .*--fresh"):
            load()
    assert not caplog.records  # torch logs a traceback of every reader that fails


@pytest.mark.parametrize(
    "changed",
    [
        {"files": {"../outside": {"bytes": 0, "sha256": ""}}},
        {"files": []},
        {"files": [".metadata"]},
        {"facts": [1]},
        {"step": [2]},
    ],
)
def test_manifest_of_another_form_is_damaged(copied, changed):
    """It names no file outside the checkpoint."""
    body = {"step": 2, "files": {}, "facts": {}} | changed
    (copied / "manifest.json").write_text(format_manifest(body))  # its own checksum fits
    with pytest.raises(DamagedError, match="manifest.json: damaged"):
        checkpoint.verify(copied)


@pytest.mark.parametrize(
    "error, waits", [(RunError, True), (RankError, False), (RuntimeError, False)]
)
def test_saver_of_many_ranks_waits_only_after_errors_that_all_ranks_raise(tmp_path, error, waits):
    """A lost rank would keep it waiting for an hour."""
    saver, waited = checkpoint.Saver(tmp_path, ALONE, sharded=True, train=Train()), []
    saver.writers, saver._wait = object(), lambda ranks: waited.append(True)
    with pytest.raises(error), saver:
        raise error("a rank is lost")
    assert bool(waited) == waits
    saver.writers = None  # a rank alone has nobody to wait for
    with pytest.raises(error), saver:
        raise error("a rank is lost")
    assert len(waited) == 1 + waits
