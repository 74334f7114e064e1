"""Checkpoints: folders `step_00001000` under runs/<name>/checkpoints.

    step_00001000/__0_0.distcp …  tensors: weights, buffers, optimizer moments
    step_00001000/.metadata       where in those files each tensor is
    step_00001000/manifest.json   length and sha256 of all files; everything except tensors

The first two are written by torch.distributed.checkpoint. A checkpoint is written under a temporary
name, synced to the disk and renamed when it is complete; the latest is found by listing the folder.
Reading one executes nothing: torch's readers would unpickle anything, ours accepts tensors alone.
"""

import hashlib
import logging
import os
import pickle
import shutil
import sys
import threading
import time
import warnings
from collections import UserDict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from enum import Enum
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata

from common.files import list_matching, rename, sync_folder, write_atomic
from configure.schema import Train
from runtime import (
    RankError,
    RunError,
    advise,
    describe_read_error,
    describe_write_errors,
    distributed,
)
from runtime.distributed import Ranks
from runtime.identity import Identity
from runtime.runs import (
    MANIFEST,
    DamagedError,
    describe_read_errors,
    folder_of,
    format_manifest,
    read_manifest,
    steps,
)

# A save that lasts this many times train.timeout_minutes hangs: one hour by default; not measured.
LONGEST_SAVE = 6
POLL_SECONDS = 0.05  # between two looks at a save that all ranks wait for

# torch warns if one process saves alone, which is intended here, and logs tracebacks of errors that
# are reported below.
warnings.filterwarnings("ignore", "torch.distributed is disabled", module="torch.distributed")
logging.getLogger("torch.distributed.checkpoint._dedup_save_plans").setLevel(logging.WARNING)


class Saver(AbstractContextManager["Saver"]):
    """Writes a run's checkpoints while training continues. Every rank has one.

    Ranks call its methods at the same steps. Leaving the context without an error waits for the
    last save. After an error that all ranks raise, and on a single rank, it waits for
    the save as well. After any other error another rank may be lost, and a save that needs it is
    given up: its partial folder stays until the next start.

    A save may be slow. One that lasts LONGEST_SAVE · train.timeout_minutes ends the run.
    """

    def __init__(
        self,
        folder: Path,
        ranks: Ranks,
        sharded: bool,
        train: Train,
        identity: Identity | None = None,
    ) -> None:
        """Prepare to save.

        Args:
            folder: runs/<name>/checkpoints.
            ranks: this rank and the others.
            sharded: each rank writes its part of the tensors; otherwise rank 0 writes them alone.
            train: which checkpoints stay (keep_checkpoints, keep_steps).
            identity: of the run's folder, which is compared before each change, on rank 0.
        """
        self.identity = identity
        self.folder = folder
        self.ranks = ranks
        self.limit = 60 * LONGEST_SAVE * train.timeout_minutes  # seconds of a save
        self.train = train
        self.first = ranks.rank == 0
        self.writes = sharded or self.first
        self.writers: Any = None  # the group that writes together
        if sharded and ranks.world_size > 1:
            self.writers = dist.new_group(backend="gloo", timeout=timedelta(seconds=self.limit))
        self.pending: threading.Thread | None = None  # writes the current save
        self.failure: RunError | None = None  # what ended a save
        self.started = 0.0  # time.monotonic() of the current save

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        on_all_ranks = isinstance(error, RunError) and not isinstance(error, RankError)
        if error is None:
            self.wait()
        elif self.writers is None or on_all_ranks:
            try:
                self._wait(self.ranks._replace(control=None))
            except RunError as failure:  # must not replace the error that is already raised
                if self.first:
                    print(f"warning: {failure}", flush=True)

    def save(
        self,
        step: int,
        model: nn.Module,
        moments: dict,
        tensors: dict,
        metadata: dict,
    ) -> None:
        """Copy the state to host memory and start to write it; returns when the copy is made.

        Args:
            step: optimizer steps done.
            model: weights and buffers to save.
            moments: {parameter: its step count and moments}.
            tensors: {name: tensor}, may be nested.
            metadata: everything else, as JSON can hold it.

        Raises:
            RunError: the previous save failed.
        """
        self.wait()
        self.started = time.monotonic()
        if self.writes:
            state = _copy_to_host(collect_tensors(model, moments, tensors))
            # A daemon: stuck in a collective, another thread would keep the process alive for an
            # hour. It is joined before the interpreter ends, since a daemon that still frees
            # tensors then aborts the process.
            self.pending = threading.Thread(
                target=self._save, args=(step, state, metadata), daemon=True
            )
            self.pending.start()

    def poll(self) -> None:
        """Report on a save that has ended meanwhile. Raises RunError as `wait` does."""
        if self.pending and not self.pending.is_alive():
            self._report()

    def wait(self) -> None:
        """Wait until the current save is complete on all ranks.

        Raises RunError if it hangs or failed.
        """
        self._wait(self.ranks)

    def hangs(self) -> bool:
        """True if this rank's save has lasted too long; `end_if` hears if any rank's has."""
        return self.is_writing() and time.monotonic() - self.started > self.limit

    def end_if(self, hangs: bool) -> None:
        """Raise RunError, on all ranks, if a save `hangs`."""
        if hangs:
            self.pending = None  # nothing waits for it any more
            raise RunError(
                f"{self.folder}: the save of a checkpoint hangs: it has lasted more than "
                f"{self.limit / 60:g} minutes ({LONGEST_SAVE} times train.timeout_minutes). Older "
                "ones are intact. Check the disk and its network, or give a slow one more "
                "train.timeout_minutes, and start the run again"
            )

    def is_writing(self) -> bool:
        """True while this rank writes a checkpoint."""
        return self.pending is not None and self.pending.is_alive()

    def _wait(self, ranks: Ranks) -> None:
        """Wait until no save is written on `ranks`; then report on it."""
        is_writing = True
        while is_writing:
            flags = [self.is_writing(), self.hangs()]
            is_writing, hangs = distributed.any_rank(flags, ranks)
            self.end_if(hangs)
            if is_writing:
                time.sleep(POLL_SECONDS)
        self._report()

    def _report(self) -> None:
        """Report on a save that has ended: raise its failure."""
        if self.pending is None:
            return
        self.pending.join()
        self.pending = None
        if self.failure:
            raise self.failure

    def _save(self, step: int, state: dict, metadata: dict) -> None:
        """Write a checkpoint; the thread `pending` runs it.

        Sets `failure` if that fails.
        """
        _lower_priority()
        if self.ranks.device.type == "cuda":
            # A thread starts on GPU 0, and dcp.save asks for its current stream there.
            torch.cuda.set_device(self.ranks.device)
        path = folder_of(self.folder, step)
        temporary = path.with_suffix(".tmp")
        try:
            self._on_each_writer(self._make_folder, temporary)
            dcp.save(
                state,
                storage_writer=dcp.FileSystemWriter(temporary),
                process_group=self.writers,
                no_dist=self.writers is None,
            )
            files = self._on_each_writer(self._hash_own_files, temporary)
            self._on_each_writer(self._publish, step, path, files, metadata)
        except (Exception, CheckpointException) as error:
            self.failure = self._give_up(path, error)

    def _give_up(self, path: Path, error: BaseException) -> RunError:
        """Remove what there is of a checkpoint that `error` has ended; returns the run's error."""
        try:
            self._check_folder()
        except RunError as moved:  # a cause of other errors, too
            return moved
        if self.first:
            shutil.rmtree(path.with_suffix(".tmp"), ignore_errors=True)
        return RunError(
            f"{path}: the checkpoint could not be written ({_last_line(error)}). Older ones are "
            f"intact. {advise(_find_cause(error))}, and start the run again"
        )

    def _make_folder(self, folder: Path) -> None:
        if self.first:
            self._check_folder()
            shutil.rmtree(folder, ignore_errors=True)  # what a start could not remove
            folder.mkdir(parents=True, exist_ok=True)

    def _hash_own_files(self, folder: Path) -> dict[str, dict]:
        """{name: length and sha256} of the files that this rank has written."""
        rank = dist.get_rank(self.writers) if self.writers else 0
        paths = list_matching(folder, f"__{rank}_*")
        if self.first:
            paths.append(folder / ".metadata")
        return {path.name: _describe_file(path) for path in paths}

    def _publish(self, step: int, path: Path, files: list[dict], metadata: dict) -> None:
        """Write the manifest, rename the folder, and delete old checkpoints.

        Rank 0 does so, with the `files` of all writers.
        """
        if not self.first:
            return
        entries = {}
        for rank_files in files:
            entries.update(rank_files)
        temporary = path.with_suffix(".tmp")
        # "facts" is the key since the first version, so that old checkpoints stay readable.
        manifest = format_manifest({"step": step, "files": entries, "facts": metadata})
        self._check_folder()
        write_atomic(temporary / MANIFEST, manifest, durable=True)
        rename(temporary, path)
        sync_folder(self.folder)
        sync_folder(self.folder.parent)
        old = set(steps(self.folder)[: -self.train.keep_checkpoints]) - self.train.kept_steps
        for old_step in sorted(old):
            self._check_folder()
            remove_checkpoint(folder_of(self.folder, old_step))

    def _check_folder(self) -> None:
        """Raise RunError if the folder at the run's path is no longer its own."""
        if self.identity:
            self.identity.check()

    def _on_each_writer(self, action: Callable[..., Any], *arguments: Any) -> list:
        """Call `action` on each rank that writes; returns the results of all.

        Raises OSError or RunError on all of them if one did.
        """
        try:
            outcome = action(*arguments)
        except (OSError, RunError) as error:
            outcome = error
        outcomes = distributed.gather(outcome, self.writers)
        for fault in outcomes:
            if isinstance(fault, OSError | RunError):
                raise fault
        return outcomes


def _lower_priority() -> None:
    """Let the threads that train go first, on Linux, where a thread has a priority of its own."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        niceness = max(10, os.getpriority(os.PRIO_PROCESS, thread))  # less is refused
        os.setpriority(os.PRIO_PROCESS, thread, niceness)


def _copy_to_host(state: Any) -> Any:
    """Copy the tensors of nested dicts."""
    if isinstance(state, Tensor):
        return state.detach().to("cpu", copy=True)
    return {name: _copy_to_host(part) for name, part in state.items()}


def remove_partial_saves(folder: str | Path) -> None:
    """Remove the folders of interrupted saves. Only for a process that holds the run's lock."""
    for path in list_matching(Path(folder), "step_*.tmp"):
        remove_checkpoint(path)


def remove_checkpoint(path: Path) -> None:
    """Remove an old checkpoint or a part of one; a warning if that fails: the run goes on."""
    try:
        shutil.rmtree(path)
    except OSError as error:
        print(
            f"warning: {path}: this old or partial checkpoint could not be removed "
            f"({error.strerror}). The next save or start tries again; give yourself the right to "
            "remove it, or move it away",
            flush=True,
        )


def latest(folder: str | Path, ranks: Ranks) -> tuple[int, dict[str, Any]]:
    """Find the newest intact checkpoint; each rank reads a part of its files.

    Damaged ones are named and quarantined: renamed to `step_….damaged`.

    Returns:
        (step, metadata), or (0, {}) where there is no checkpoint.

    Raises:
        RunError: all checkpoints are damaged; or one cannot be read now, or is of another run, and
            then none is renamed.
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
                    rename(path, quarantine)
    # starting over in this folder would drop the run's metrics
    if saved or steps(folder, ".damaged"):
        raise RunError(
            f"{folder}: all checkpoints are damaged and quarantined. Start over in a new folder "
            "(--fresh), or restore a copy of one of them under its name"
        )
    return 0, {}


def verify(path: Path, ranks: Ranks | None = None) -> dict[str, Any]:
    """The manifest of the checkpoint `path`, with all files compared; `ranks` share the reading.

    Raises, on all ranks:
        DamagedError: a file differs from the manifest, or is missing.
        UnreadableError: a file cannot be read now.
        ForeignError: the checkpoint is in the folder of another run.
    """
    if ranks is None:
        ranks = Ranks(0, 1, torch.device("cpu"))
    fault: RunError | None = None
    manifest = {}
    try:
        manifest = read_manifest(path)
        for name in sorted(manifest["files"])[ranks.rank :: ranks.world_size]:
            with describe_read_errors(path / name):
                entry = _describe_file(path / name)
            if entry != manifest["files"][name]:
                raise DamagedError(f"{path / name}: damaged, checksum mismatch")
    except RunError as error:
        fault = error
    faults = [fault for fault in distributed.gather(fault, ranks.control) if fault]
    if faults:  # one that is no damage comes first: nobody may rename the checkpoint
        raise min(faults, key=lambda fault: isinstance(fault, DamagedError))
    return manifest


def restore(folder: str | Path, step: int, model: nn.Module, moments: dict, tensors: dict) -> None:
    """Restore what `Saver.save` copied at `step`, in place. Every rank calls it.

    Raises:
        RunError: the checkpoint does not fit the model, the optimizer or `tensors`.
    """
    _fill_tensors(Reader(folder_of(folder, step)), collect_tensors(model, moments, tensors))


def open_weights(
    folder: str | Path, step: int, model: nn.Module, ema: bool = False
) -> tuple["LazyTensors", dict[str, Any]]:
    """The weights of a checkpoint, read one by one; for one process.

    Args:
        folder: runs/<name>/checkpoints.
        step: of the checkpoint.
        model: has their names and shapes.
        ema: read their running mean.

    Returns:
        Weights and buffers, and the checkpoint's metadata.

    Raises:
        RunError: it is damaged; later, if it does not fit the model.
    """
    path = folder_of(folder, step)
    try:
        metadata = verify(path)["facts"]
    except DamagedError as error:
        raise RunError(
            f"{error}; use another step, or remove {path} and start the run again"
        ) from None
    shapes = model.state_dict()
    reader = Reader(path)

    def read(name: str) -> Tensor:
        weights = {name: torch.empty_like(shapes[name], device="cpu")}
        _fill_tensors(reader, {"run": {"ema": weights}} if ema else {"model": weights})
        return weights[name]

    return LazyTensors({name: partial(read, name) for name in shapes}), metadata


class LazyTensors(UserDict[str, Any]):
    """Tensors by name; each is made when it is read, and again when it is read again.

    So a state larger than the host's memory can be converted tensor by tensor.

    Attributes:
        data: {name: function that makes the tensor}.
    """

    def __init__(self, makers: Mapping[str, Callable[[], Tensor]]) -> None:
        super().__init__()
        self.data.update(makers)

    def __getitem__(self, key: str) -> Tensor:
        return self.data[key]()

    def __setitem__(self, key: str, item: Tensor) -> None:
        self.data[key] = lambda: item


def collect_tensors(model: nn.Module, moments: dict, tensors: dict) -> dict[str, Any]:
    """All tensors of a checkpoint, nested: not copies, so that reading into them restores a run.

    In one order, so that equal states give equal files. The optimizers' settings are left out: they
    come from the config.
    """
    # First: it makes FSDP2 put back the shards of modules that are still gathered, as the root is
    # after a forward pass. Their gathered parameters are not the optimizer's.
    weights = model.state_dict()
    by_name = {name: moments[p] for name, p in model.named_parameters() if p in moments}
    assert len(by_name) == len(moments)
    return {"model": weights, "optimizer": by_name, "run": tensors}


def _fill_tensors(reader: "Reader", state: dict[str, Any]) -> None:
    try:
        reader.read_metadata()  # torch would log two tracebacks if it is refused
        dcp.load(state, storage_reader=reader, no_dist=not dist.is_initialized())
    except (Exception, CheckpointException) as error:
        cause = _find_cause(error)
        if isinstance(cause, OSError):
            raise describe_read_error(Path(cause.filename or reader.path), cause) from error
        # the bytes are right: another model or torch
        raise RunError(
            f"{reader.path} does not fit this run ({type(error).__name__}: {_last_line(error)}). "
            "Start over in a new folder (--fresh), or use the code that wrote it"
        ) from error


class Reader(dcp.FileSystemReader):
    """torch's reader, which accepts only descriptions of tensors from `.metadata`, a pickle."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What `description` is; torch asks for it at each load."""
        return self.description

    @cached_property
    def description(self) -> Metadata:
        """Unpickle `.metadata`. Raises UnpicklingError if it holds anything unexpected."""
        with open(Path(self.path, ".metadata"), "rb") as file:
            metadata = TensorUnpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(f"a {type(metadata).__name__} instead of Metadata")
        metadata.storage_meta = None
        return metadata


DTYPES = {name for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
# {module: names} that `.metadata` may refer to
DESCRIPTIONS = {
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
    "torch": DTYPES | {"Size"},
    "pathlib": {"PosixPath", "PurePosixPath"},
}


class TensorUnpickler(pickle.Unpickler):
    """Knows the classes that describe tensors, and no other."""

    def find_class(self, module: str, name: str) -> Any:
        """The class, if it is known. Raises UnpicklingError."""
        if (module, name) == ("builtins", "getattr"):
            return _find_memory_format
        if module == "pathlib._local":  # what Python 3.13 calls it
            module = "pathlib"
        if name not in DESCRIPTIONS.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} has no place in a checkpoint")
        return super().find_class(module, name)


def _find_memory_format(owner: object, name: str) -> Enum:
    """A memory format in place of getattr(owner, name), by which Python 3.11.2 pickles an Enum."""
    if owner is not _MEM_FORMAT_ENCODING or name not in _MEM_FORMAT_ENCODING.__members__:
        raise pickle.UnpicklingError(f"getattr({owner!r}, {name!r}) has no place in a checkpoint")
    return _MEM_FORMAT_ENCODING[name]


def _describe_file(path: Path) -> dict[str, Any]:
    """A file's entry in the manifest. Raises OSError."""
    with open(path, "rb") as file:
        return {
            "bytes": path.stat().st_size,
            "sha256": hashlib.file_digest(file, "sha256").hexdigest(),
        }


def _find_cause(error: BaseException) -> BaseException:
    """The first of the errors of all ranks that torch collects; else the error itself."""
    if isinstance(error, CheckpointException):
        return next(iter(error.failures.values()))[0]
    return error


def _last_line(error: BaseException) -> str:
    """The last line of an error from torch's checkpoints, which has the cause."""
    if "inline_container" in str(error):  # how torch's archive reports an error of the disk
        return "a file was cut short"
    return str(error).strip().split("\n")[-1] or type(error).__name__
