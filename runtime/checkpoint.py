"""Checkpoints: folders `step_00001000` under runs/<name>/checkpoints.

step_00001000/__0_0.distcp …  tensors: weights, buffers, AdamW's moments
(torch.distributed.checkpoint) step_00001000/.metadata       where in those files each tensor is
(torch.distributed.checkpoint) step_00001000/manifest.json   length and sha256 of all files, and
everything that is not a tensor

A checkpoint is written under a temporary name, synced to the disk and renamed when it is complete;
the latest is found by listing the folder. Reading one executes nothing: torch's readers would
unpickle anything, the one here accepts tensors alone.
"""

import hashlib
import json
import logging
import os
import pickle
import shutil
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.utils._pytree import tree_map

from common.files import sync_folder, write_atomic
from configure.schema import Train
from runtime import RankError, RunError, describe_write_errors, distributed
from runtime.distributed import Ranks

MANIFEST = "manifest.json"
SAVE_TIMEOUT = timedelta(hours=1)  # for the slowest rank's part to be written

# torch warns where one process saves alone, which is meant here, and logs tracebacks of what is
# reported below.
warnings.filterwarnings("ignore", "torch.distributed is disabled", module="torch.distributed")
logging.getLogger("torch.distributed.checkpoint._dedup_save_plans").setLevel(logging.WARNING)


class DamagedError(RunError):
    """A checkpoint's files differ from what was written."""


def steps(folder: str | Path, end: str = "") -> list[int]:
    """Steps of the checkpoints in `folder`, ascending; empty if it does not exist.

    Quarantined ones end in .damaged.
    """
    return sorted(int(path.name[5:13]) for path in Path(folder).glob(f"step_{8 * '[0-9]'}{end}"))


def folder_of(folder: str | Path, step: int) -> Path:
    """Where in `folder` the checkpoint of `step` is."""
    return Path(folder, f"step_{step:08d}")


class Saver(AbstractContextManager["Saver"]):
    """Writes a run's checkpoints while training continues. Every rank has one.

    Ranks call its methods at the same steps. Leaving the context without an error waits for the
    last save (`finish`). After an error that all ranks raise alike, and on a single rank, the save
    under way may end too; after any other error another rank may be lost, and a save that needs it
    is given up: its partial folder stays until the next start.
    """

    def __init__(self, folder: Path, ranks: Ranks, sharded: bool, train: Train) -> None:
        """Save to `folder`, runs/<name>/checkpoints: rank 0 alone or, if `sharded`, each rank its part of the tensors.

        `train` says which checkpoints stay (keep_checkpoints, keep_steps) and what a failed save
        does (on_save_error).
        """
        self.folder, self.on_error = folder, train.on_save_error
        self.keep, self.keep_steps = train.keep_checkpoints, train.kept_steps
        self.first, self.writes = ranks.rank == 0, sharded or ranks.rank == 0
        self.all_ranks: Any = (
            dist.new_group(backend="gloo", timeout=SAVE_TIMEOUT) if ranks.world_size > 1 else None
        )
        self.writers: Any = self.all_ranks if sharded else None  # the group that writes together
        self.pending: threading.Thread | None = None  # writes the save under way
        self.failure: RunError | None = None  # of the last save

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            self.finish()
        elif self.writers is None or (
            isinstance(error, RunError) and not isinstance(error, RankError)
        ):
            self.on_error = "warn"  # the error under way is the one to be raised
            self.wait()

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        tensors: dict,
        metadata: dict,
    ) -> None:
        """Copy the state after `step` steps to host memory and begin to write it; returns when the copy is made.

        Saved are weights, buffers, AdamW's moments, `tensors` ({name: tensor}) and `metadata`,
        which JSON can hold.

        Raises:
            RunError: the save before failed, and `on_error` is "stop".
        """
        self.wait()
        if self.all_ranks:
            # for the slowest writer, who may take longer than other collectives wait
            dist.barrier(self.all_ranks)
        self.failure = None
        if self.writes:
            state = tree_map(
                lambda tensor: tensor.detach().to("cpu", copy=True),
                _state(model, optimizer, tensors),
            )
            # A daemon: stuck in a collective, it would keep the process alive for an hour. It is
            # joined before the interpreter ends, since a daemon that still frees tensors then
            # aborts the process.
            self.pending = threading.Thread(
                target=self._save, args=(step, state, metadata), daemon=True
            )
            self.pending.start()

    def poll(self) -> None:
        """Report on a save that has ended since. Raises RunError as `wait` does."""
        if self.pending and not self.pending.is_alive():
            self.wait()

    def wait(self) -> None:
        """Wait for the save under way. Raises RunError if it failed and `on_error` is "stop"."""
        pending, self.pending = self.pending, None
        if pending is None:
            return
        pending.join()
        if self.failure and self.on_error == "stop":
            raise self.failure
        if self.failure and self.first:
            print(f"warning: {self.failure}", flush=True)

    def finish(self) -> None:
        """Wait until the last save is complete on all ranks.

        Raises RunError if it failed, whatever `on_error`.
        """
        self.on_error = "stop"
        self.wait()
        if self.failure:
            raise self.failure
        if self.all_ranks:
            dist.barrier(self.all_ranks)

    def _save(self, step: int, state: dict, metadata: dict) -> None:
        # where a priority is a thread's own: the threads that train go first
        if sys.platform == "linux":
            this = threading.get_native_id()
            # lower is refused
            os.setpriority(os.PRIO_PROCESS, this, max(10, os.getpriority(os.PRIO_PROCESS, this)))
        path = folder_of(self.folder, step)
        temporary = path.with_suffix(".tmp")
        try:
            self._on_each_writer(lambda: temporary.mkdir(parents=True) if self.first else None)
            writer = dcp.FileSystemWriter(temporary)
            dcp.save(
                state,
                storage_writer=writer,
                process_group=self.writers,
                no_dist=self.writers is None,
            )
            files = self._on_each_writer(lambda: self._hash_own_files(temporary))
            self._on_each_writer(
                lambda: self._publish(step, path, files, metadata) if self.first else None
            )
        except (Exception, CheckpointException) as error:
            if self.first:
                shutil.rmtree(temporary, ignore_errors=True)
            self.failure = RunError(
                f"{path}: the checkpoint could not be written ({_last_line(error)}). Older ones are intact. Make room "
                f"on the disk and start the run again; train.on_save_error = warn would continue without"
            )

    def _hash_own_files(self, folder: Path) -> dict[str, dict]:
        """{name: its length and sha256} of what this rank has written."""
        rank = dist.get_rank(self.writers) if self.writers else 0
        paths = [*folder.glob(f"__{rank}_*"), *([folder / ".metadata"] if self.first else [])]
        return {path.name: _describe(path) for path in paths}

    def _publish(self, step: int, path: Path, files: list[dict], metadata: dict) -> None:
        """Write the manifest, give the folder its name, and delete checkpoints beyond `keep` and `keep_steps`."""
        entries = {name: entry for part in files for name, entry in part.items()}
        temporary = path.with_suffix(".tmp")
        # "facts" is the key since the first version, so that old checkpoints stay readable.
        manifest = _manifest_text({"step": step, "files": entries, "facts": metadata})
        write_atomic(temporary / MANIFEST, manifest, durable=True)
        os.replace(temporary, path)
        sync_folder(self.folder)
        sync_folder(self.folder.parent)
        for old in steps(self.folder)[: -self.keep]:
            if old not in self.keep_steps:
                shutil.rmtree(folder_of(self.folder, old))

    def _on_each_writer(self, action: Callable[[], Any]) -> list:
        """What `action` returned on each of the ranks that write.

        Raises OSError on all if it did on one.
        """
        try:
            outcome = action()
        except OSError as error:
            outcome = error
        outcomes = distributed.gather(outcome, self.writers)
        for fault in outcomes:
            if isinstance(fault, OSError):
                raise fault
        return outcomes


def remove_partial_saves(folder: str | Path) -> None:
    """Remove what interrupted saves have left. Only for a process that holds the run's lock."""
    for path in Path(folder).glob("step_*.tmp"):
        shutil.rmtree(path)


def latest(folder: str | Path, ranks: Ranks) -> tuple[int, dict[str, Any]]:
    """The newest checkpoint whose every byte is as it was written. Ranks share the reading.

    Damaged ones are named and quarantined: renamed to `step_….damaged`.

    Returns:
        (step, metadata), or (0, {}) where there is no checkpoint.

    Raises:
        RunError: all checkpoints are damaged.
    """
    saved = steps(folder)
    for step in reversed(saved):
        path = folder_of(folder, step)
        try:
            return step, verify(path, ranks)["facts"]
        except DamagedError as error:
            quarantine = path.with_suffix(".damaged")
            if ranks.rank == 0:
                print(f"warning: {error}; it is quarantined as {quarantine.name}", flush=True)
                shutil.rmtree(quarantine, ignore_errors=True)
                with describe_write_errors(path):
                    os.replace(path, quarantine)
    # not started over here: its metrics would go, too
    if saved or any(Path(folder).glob("step_*.damaged")):
        raise RunError(
            f"{folder}: all checkpoints are damaged and quarantined. Start over in a new folder (--fresh), or restore "
            f"a copy of one of them under its name"
        )
    return 0, {}


def verify(path: Path, ranks: Ranks | None = None) -> dict[str, Any]:
    """The manifest of the checkpoint `path`.

    Raises DamagedError, on all ranks, if a file differs from what it says.
    """
    rank, world_size, group = (
        (ranks.rank, ranks.world_size, ranks.control) if ranks else (0, 1, None)
    )
    fault, manifest = None, {}
    try:
        manifest = read_manifest(path)
        for name in sorted(manifest["files"])[rank::world_size]:
            if _describe(path / name) != manifest["files"][name]:
                raise DamagedError(f"{path / name}: damaged, checksum mismatch")
    except DamagedError as error:
        fault = str(error)
    except OSError as error:
        fault = f"{error.filename or path}: damaged, it cannot be read ({error.strerror})"
    for other in distributed.gather(fault, group):
        if other:
            raise DamagedError(other)
    return manifest


def read_manifest(path: Path) -> dict[str, Any]:
    """manifest.json of a checkpoint, its own checksum verified.

    Returns:
        `step`; `files`: {name: {bytes, sha256}}; `facts`: the metadata.

    Raises:
        DamagedError: it is missing, unreadable or changed.
    """
    file, body = Path(path, MANIFEST), {}
    try:
        text = file.read_bytes().decode()
        body = json.loads(text)["body"]
        intact = text == _manifest_text(body) and path.name == folder_of("", body["step"]).name
        # none outside of the folder
        intact = intact and all(Path(name).name == name for name in body["files"])
    except OSError as error:
        raise DamagedError(f"{file}: damaged, it cannot be read ({error.strerror})") from error
    except (ValueError, TypeError, KeyError, RecursionError):
        intact = False
    if not intact:
        raise DamagedError(f"{file}: damaged, checksum mismatch")
    return body


def load(
    folder: str | Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict
) -> None:
    """Restore what `Saver.save` copied at `step`, in place. Every rank calls it.

    Raises:
        RunError: the checkpoint does not fit the model, the optimizer or `tensors`.
    """
    state = _state(model, optimizer, tensors)
    _read(folder_of(folder, step), state)
    groups = get_state_dict(model, optimizer)[1]["param_groups"]
    optimizer_state = {"state": state["optimizer"], "param_groups": groups}
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=optimizer_state
    )


def load_model(
    folder: str | Path, step: int, model: nn.Module, ema: bool = False
) -> dict[str, Any]:
    """Restore weights and buffers alone, or with `ema` their running mean, in place; for one process.

    Returns:
        The checkpoint's metadata.

    Raises:
        RunError: it is damaged, or does not fit the model.
    """
    path = folder_of(folder, step)
    try:
        metadata = verify(path)["facts"]
    except DamagedError as error:
        raise RunError(
            f"{error}; use another step, or remove {path} and start the run again"
        ) from None
    weights = get_model_state_dict(model)
    _read(path, {"run": {"ema": weights}} if ema else {"model": weights})
    model.load_state_dict(weights)
    return metadata


def _state(
    model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]
) -> dict[str, Any]:
    """All tensors of a checkpoint, nested, in an order that a resume does not change: equal states give equal files.

    AdamW's settings are not in it: they come from the config.
    """
    model_state, optimizer_state = get_state_dict(model, optimizer)
    by_name: Any = optimizer_state["state"]
    moments = {name: dict(sorted(state.items())) for name, state in sorted(by_name.items())}
    return {"model": model_state, "optimizer": moments, "run": tensors}


def _read(path: Path, state: dict[str, Any]) -> None:
    try:
        dcp.load(state, storage_reader=Reader(path), no_dist=not dist.is_initialized())
    # the bytes are right: it is another model's, or another torch's
    except (Exception, CheckpointException) as error:
        raise RunError(
            f"{path} does not fit this run ({type(error).__name__}: {_last_line(error)}). Start over in a new folder "
            f"(--fresh), or use the code that wrote it"
        ) from error


class Reader(dcp.FileSystemReader):
    """torch's reader, but of `.metadata`, a pickle, only names, shapes, types and offsets of tensors are accepted."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Unpickle `.metadata`. Raises UnpicklingError if it holds anything unexpected."""
        with open(Path(self.path, ".metadata"), "rb") as file:
            metadata = TensorUnpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(f"a {type(metadata).__name__} instead of Metadata")
        metadata.storage_meta = None
        return metadata


class TensorUnpickler(pickle.Unpickler):
    """Knows the classes that describe tensors, and no other."""

    METADATA = (
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorStorageMetadata",
        "TensorProperties",
    )
    KNOWN = {
        "torch.distributed.checkpoint.metadata": {
            *METADATA,
            "ChunkStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        },
        "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
        "torch.serialization": {"_get_layout"},
        "torch": {
            "Size",
            *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype)),
        },
        "pathlib": {"PosixPath", "PurePosixPath"},
    }

    def find_class(self, module: str, name: str) -> Any:
        """The class, if it is known. Raises UnpicklingError."""
        if name not in self.KNOWN.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} has no place in a checkpoint")
        return super().find_class(module, name)


def _manifest_text(body: dict[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(body).encode()).hexdigest()
    return json.dumps({"sha256": digest, "body": body}, indent=1) + "\n"


def _describe(path: Path) -> dict[str, Any]:
    """A file's entry in the manifest. Raises OSError."""
    with path.open("rb") as file:
        return {
            "bytes": path.stat().st_size,
            "sha256": hashlib.file_digest(file, "sha256").hexdigest(),
        }


def _last_line(error: BaseException) -> str:
    """What torch's checkpoint errors say: the cause stands in their last line."""
    if "inline_container" in str(error):  # torch's archive, of the disk's own error
        return "a file was cut short"
    return str(error).strip().split("\n")[-1] or type(error).__name__
