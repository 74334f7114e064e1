"""Checkpoints: folders `step_00001000` under runs/<name>/checkpoints.

step_00001000/__0_0.distcp …  tensors: weights, buffers, AdamW's moments (torch.distributed.checkpoint)
step_00001000/.metadata       where in those files each tensor lies (torch.distributed.checkpoint)
step_00001000/manifest.json   length and sha256 of all files, and what is no tensor: counters, loss scale, data set

A checkpoint is written under a temporary name, synced to the disk and renamed when it is whole; the latest is found by
looking. Reading one executes nothing: torch's readers would unpickle anything, the one here knows tensors alone.
"""

import hashlib
import json
import logging
import os
import pickle
import re
import shutil
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_state_dict
from torch.utils._pytree import tree_map

from runtime import RunError, distributed, writing

NAME = re.compile(r"step_(\d{8})")
MANIFEST = "manifest.json"
SAVE_TIMEOUT = timedelta(hours=1)  # for the slowest rank's part to be written

# torch warns where one process saves alone, which is meant here, and logs tracebacks of what is reported below.
warnings.filterwarnings("ignore", "torch.distributed is disabled", module="torch.distributed")
logging.getLogger("torch.distributed.checkpoint._dedup_save_plans").setLevel(logging.WARNING)


class DamagedError(RunError):
    """A checkpoint is not what was written."""


def steps(folder):
    """Steps of the checkpoints in `folder`, ascending."""
    folder = Path(folder)
    names = os.listdir(folder) if folder.is_dir() else []
    return sorted(int(match[1]) for name in names if (match := NAME.fullmatch(name)))


def folder_of(folder, step):
    return Path(folder, f"step_{step:08d}")


class Saver:
    """Writes a run's checkpoints while training goes on. Every rank has one and calls its methods at the same steps.

    `sharded`: each rank holds a part of the tensors, and writes it; else the first writes alone. `keep`: how many
    checkpoints stay. `on_error`: "stop" raises RunError where a save has failed, "warn" prints it.
    """

    def __init__(self, folder, ranks, sharded, keep, on_error):
        self.folder, self.keep, self.on_error = Path(folder), keep, on_error
        self.first, self.writes = ranks.rank == 0, sharded or ranks.rank == 0
        group = dist.new_group(backend="gloo", timeout=SAVE_TIMEOUT) if ranks.world_size > 1 else None
        self.all_ranks, self.writers = group, group if sharded else None
        self.thread = ThreadPoolExecutor(1, "checkpoint", _give_way)
        self.pending, self.failure = None, None  # the save under way, and what became of the last

    def save(self, step, model, optimizer, tensors, facts):
        """Copy weights, AdamW's moments and `tensors` ({name: tensor}) to host memory and begin to write them, with
        `facts`, which JSON can hold. Returns when the copy is made."""
        self.wait()
        if self.all_ranks:
            dist.barrier(self.all_ranks)  # for the slowest writer, who may take longer than ranks wait otherwise
        if self.writes:
            state = tree_map(lambda tensor: tensor.detach().to("cpu", copy=True), _state(model, optimizer, tensors))
            self.pending = self.thread.submit(self._write, step, state, facts)

    def poll(self):
        """Report on a save that has ended since."""
        if self.pending and self.pending.done():
            self.wait()

    def wait(self):
        """Wait for the save that is under way. Raises RunError if it failed and the run is to stop then."""
        pending, self.pending = self.pending, None
        try:
            if pending:
                self.failure = None
                pending.result()
        except RunError as error:
            self.failure = error
            if self.on_error == "stop":
                raise
            if self.first:
                print(f"warning: {error}", flush=True)

    def finish(self):
        """Wait until the last save is whole on all ranks; raises RunError if it is not, whatever `on_error`."""
        self.on_error = "stop"
        self.wait()
        if self.failure:
            raise self.failure
        if self.all_ranks:
            dist.barrier(self.all_ranks)

    def _write(self, step, state, facts):
        path = folder_of(self.folder, step)
        temporary = path.with_suffix(".tmp")
        try:
            self._together(lambda: temporary.mkdir(parents=True) if self.first else None)
            writer = dcp.FileSystemWriter(temporary)
            dcp.save(state, storage_writer=writer, process_group=self.writers, no_dist=self.writers is None)
            files = self._together(lambda: self._own_files(temporary))
            self._together(lambda: self._publish(step, path, files, facts) if self.first else None)
        except (Exception, CheckpointException) as error:
            if self.first:
                shutil.rmtree(temporary, ignore_errors=True)
            last = max(steps(self.folder), default=None)
            there = "There is none yet" if last is None else f"That of step {last} is whole"
            then = "and start the run again; train.on_save_error = warn would go on without"
            raise RunError(
                f"{path}: the checkpoint could not be written ({_reason(error)}). {there}. Make room on the disk"
                + (f", {then}" if self.on_error == "stop" else "")
            ) from error

    def _own_files(self, folder):
        """{name: its length and sha256} of what this rank has written."""
        rank = dist.get_rank(self.writers) if self.writers else 0
        paths = [*folder.glob(f"__{rank}_*"), *([folder / ".metadata"] if self.first else [])]
        return {path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)} for path in paths}

    def _publish(self, step, path, files, facts):
        body = {"step": step, "files": {name: entry for part in files for name, entry in part.items()}, "facts": facts}
        temporary = path.with_suffix(".tmp")
        with (temporary / MANIFEST).open("w") as file:
            file.write(_manifest_text(body))
            file.flush()
            os.fsync(file.fileno())
        _sync_folder(temporary)
        os.replace(temporary, path)
        _sync_folder(self.folder)
        _sync_folder(self.folder.parent)
        for old in steps(self.folder)[: -self.keep]:
            shutil.rmtree(folder_of(self.folder, old))

    def _together(self, action):
        """What `action` returned on each of the ranks that write. Raises OSError on all if it did on one."""
        try:
            outcome = (action(), None)
        except OSError as error:
            outcome = (None, str(error))
        outcomes = distributed.gather(outcome, self.writers) if self.writers else [outcome]
        for _, fault in outcomes:
            if fault:
                raise OSError(fault)
        return [result for result, _ in outcomes]


def sweep(folder):
    """Remove what saves that were cut off have left. For a process that holds the run's lock."""
    for path in Path(folder).glob("step_*.tmp"):
        shutil.rmtree(path)


def latest(folder, ranks):
    """(step, facts) of the newest checkpoint whose every byte is as it was written, or (0, None) where there is none.

    Ranks share the reading. Damaged ones are named and put aside as `step_….damaged`. Raises RunError if all are.
    """
    found = steps(folder)
    for step in reversed(found):
        path = folder_of(folder, step)
        try:
            return step, verify(path, ranks)["facts"]
        except DamagedError as error:
            aside = path.with_suffix(".damaged")
            if ranks.rank == 0:
                print(f"warning: {error}; it is put aside as {aside.name}", flush=True)
                shutil.rmtree(aside, ignore_errors=True)
                with writing(path):
                    os.replace(path, aside)
    if found or any(Path(folder).glob("step_*.damaged")):  # never begun anew here: its metrics would go, too
        raise RunError(
            f"{folder}: all checkpoints are damaged and put aside. Start over in a new folder (--fresh), or put back a "
            f"copy of one of them under its name"
        )
    return 0, None


def verify(path, ranks=None):
    """The manifest of the checkpoint `path`. Raises DamagedError, on all ranks, if a file is not what it states."""
    rank, world_size, group = (ranks.rank, ranks.world_size, ranks.control) if ranks else (0, 1, None)
    fault, manifest = None, None
    try:
        manifest = read_manifest(path)
        for name in sorted(manifest["files"])[rank::world_size]:
            _check_file(path / name, **manifest["files"][name])
    except DamagedError as error:
        fault = str(error)
    for other in distributed.gather(fault, group) if world_size > 1 else [fault]:
        if other:
            raise DamagedError(other)
    return manifest


def read_manifest(path):
    """manifest.json of a checkpoint: `step`, `files` {name: {bytes, sha256}}, `facts`. Raises DamagedError."""
    file = Path(path, MANIFEST)
    try:
        text = file.read_bytes().decode()
        body = json.loads(text)["body"]
        intact = text == _manifest_text(body) and path.name == folder_of("", body["step"]).name
        intact = intact and isinstance(body["facts"], dict) and ".metadata" in body["files"]
        for name, entry in body["files"].items():
            intact = intact and Path(name).name == name and entry.keys() == {"bytes", "sha256"}
    except FileNotFoundError:
        raise DamagedError(f"{path}: damaged, it has no {MANIFEST}") from None
    except OSError as error:
        raise DamagedError(f"{file}: damaged, it cannot be read ({error.strerror})") from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        intact = False
    if not intact:
        raise DamagedError(f"{file}: damaged, it is not what was written")
    return body


def load(folder, step, model, optimizer, tensors):
    """Bring model, optimizer and `tensors` back to what `Saver.save` saw at `step`, in place. Every rank calls it."""
    state = _state(model, optimizer, tensors)
    _read(folder_of(folder, step), state)
    groups = get_state_dict(model, optimizer)[1]["param_groups"]
    optimizer_state = {"state": state["optimizer"], "param_groups": groups}
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=optimizer_state)


def load_model(folder, step, model):
    """Weights and buffers alone, for evaluation and sampling, by one process. `model` is changed in place. Returns the
    checkpoint's facts. Raises RunError if it is damaged."""
    path = folder_of(folder, step)
    try:
        facts = verify(path)["facts"]
    except DamagedError as error:
        older = max((other for other in steps(folder) if other < step), default=None)
        other = "" if older is None else f"take that of step {older}, or "
        raise RunError(f"{error}; {other}remove {path} and start the run again, to train what is missing") from None
    state = {"model": get_model_state_dict(model)}
    _read(path, state)
    model.load_state_dict(state["model"])
    return facts


def _state(model, optimizer, tensors):
    """All tensors of a checkpoint, nested, in an order that a resume does not change, so that equal states give equal
    files. AdamW's settings are no part of it: they come from the config."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    moments = {name: dict(sorted(state.items())) for name, state in sorted(optimizer_state["state"].items())}
    return {"model": model_state, "optimizer": moments, "run": tensors}


def _read(path, state):
    try:
        dcp.load(state, storage_reader=Reader(path), no_dist=not dist.is_initialized())
    except (Exception, CheckpointException) as error:  # its bytes are right: so it is of another model or another torch
        raise RunError(
            f"{path} does not fit this run ({type(error).__name__}: {_reason(error)}). Start over in a new folder "
            f"(--fresh), or use the code that wrote it"
        ) from error


class Reader(dcp.FileSystemReader):
    """As torch's, but for `.metadata`, which is a pickle: of that only names, shapes, types and offsets of tensors."""

    def read_metadata(self, *args, **kwargs):
        with open(Path(self.path, ".metadata"), "rb") as file:
            metadata = TensorUnpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(f"a {type(metadata).__name__} in place of Metadata")
        metadata.storage_meta = None
        return metadata


class TensorUnpickler(pickle.Unpickler):
    KNOWN = {
        "torch.distributed.checkpoint.metadata": {
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorStorageMetadata",
            "TensorProperties",
            "ChunkStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        },
        "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
        "torch.serialization": {"_get_layout"},
        "torch": {"Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))},
        "pathlib": {"PosixPath", "PurePosixPath"},
    }

    def find_class(self, module, name):
        if name not in self.KNOWN.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} has no place in a checkpoint")
        return super().find_class(module, name)


def _manifest_text(body):
    digest = hashlib.sha256(json.dumps(body).encode()).hexdigest()
    return json.dumps({"sha256": digest, "body": body}, indent=1) + "\n"


def _check_file(path, bytes, sha256):
    try:
        size = path.stat().st_size
        found = _sha256(path) if size == bytes else None
    except FileNotFoundError:
        raise DamagedError(f"{path}: damaged, the file is missing") from None
    except OSError as error:
        raise DamagedError(f"{path}: damaged, it cannot be read ({error.strerror})") from error
    if size != bytes:
        raise DamagedError(f"{path}: damaged, {bytes} bytes were written, found {size}")
    if found != sha256:
        raise DamagedError(f"{path}: damaged, sha256 {sha256} was written, found {found}")


def _sha256(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync_folder(path):
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _give_way():
    """Lets the threads that train go first where cores are few; priorities are a thread's own on Linux alone."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


def _reason(error):
    return str(error).strip().split("\n")[-1] or type(error).__name__
