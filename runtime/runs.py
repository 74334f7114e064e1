"""A run's folder, read: `Run(path)` for everyone who reads one. Imports no torch.

Nothing here writes. runtime.folder has what a run that trains does with its own folder.
"""

import hashlib
import json
import math
import os
import platform
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import configure
from common.files import exists, is_file, is_folder, is_locked
from common.text import escape_controls
from configure import Config
from configure.schema import KEYS, Mix, has_effect
from runtime import FAILURE_FILE, RunError, describe_read_error
from runtime.identity import RUN_ID, check_origin
from runtime.metrics import Line, last_step_of, list_arrays, load_arrays, read_metrics

# ---- checkpoints: where they are, and manifest.json
MANIFEST = "manifest.json"
# Errors of reading a file that is not there any more: the others say nothing about its bytes.
LOST = (FileNotFoundError, NotADirectoryError, IsADirectoryError)


class DamagedError(RunError):
    """A checkpoint's files differ from what was written."""


@contextmanager
def describe_read_errors(file: Path) -> Iterator[None]:
    """Turn an OSError into a DamagedError if the file of a checkpoint is lost.

    Else it cannot be read now, which is an UnreadableError.
    """
    try:
        yield
    except LOST as error:
        raise DamagedError(f"{file}: damaged, {os.strerror(error.errno or 0).lower()}") from error
    except OSError as error:
        raise describe_read_error(file, error) from error


def steps(folder: str | Path, end: str = "") -> list[int]:
    """Steps of the checkpoints in `folder`, ascending; empty if it does not exist.

    Names of quarantined checkpoints end in .damaged: pass that as `end` to list them. Raises
    UnreadableError if the folder cannot be listed.
    """
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise describe_read_error(Path(folder), error) from error
    matches = (re.fullmatch(rf"step_([0-9]{{8}}){re.escape(end)}", name) for name in names)
    return sorted(int(match[1]) for match in matches if match)


def folder_of(folder: str | Path, step: int) -> Path:
    """The path of the checkpoint of `step`."""
    return Path(folder, f"step_{step:08d}")


def read_manifest(path: Path) -> dict[str, Any]:
    """manifest.json of a checkpoint, its own checksum verified.

    Returns:
        `step`; `files`: {name: {bytes, sha256}}; `facts`: the metadata.

    Raises:
        DamagedError: it is missing or changed.
        UnreadableError: it cannot be read now.
        ForeignError: the checkpoint is in the folder of another run.
    """
    file = Path(path, MANIFEST)
    with describe_read_errors(file):
        content = file.read_bytes()
    body = {}
    try:
        text = content.decode()
        body = json.loads(text)["body"]
        is_own = path.name == folder_of("", body["step"]).name
        names_are_plain = all(Path(name).name == name for name in body["files"])  # no subfolders
        has_form = isinstance(body["facts"], dict)
        has_form = has_form and all(isinstance(file, dict) for file in body["files"].values())
        intact = text == format_manifest(body) and is_own and names_are_plain and has_form
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        intact = False
    if not intact:
        raise DamagedError(f"{file}: damaged, checksum mismatch")
    check_origin(path, body["facts"].get(RUN_ID, ""), path.absolute().parents[1])
    return body


def format_manifest(body: dict[str, Any]) -> str:
    """The text of a manifest with its own checksum."""
    digest = hashlib.sha256(json.dumps(body).encode()).hexdigest()
    return json.dumps({"sha256": digest, "body": body}, indent=1) + "\n"


# ---- the settings that a run keeps: a checkpoint has them, too
SETTINGS = "settings"  # key of a checkpoint's metadata
OLD_SETTINGS = "model_settings"  # that of older ones, with those of the model alone; or neither


def list_kept_keys(config: Config) -> list[str]:
    """The keys whose values a run keeps for all its steps, dotted."""
    keys = [key for key, schema in KEYS.items() if not schema["resume"]]
    train = config.train
    if train.balance_loss_coef > 0 and train.balance_loss_scope == "micro_batch":
        keys.append("train.micro_batch_size")  # the loss depends on it
    return keys


def describe_settings(config: Config) -> dict[str, dict[str, Any]]:
    """The metadata that ties a checkpoint to its config."""
    return {SETTINGS: {key: attrgetter(key)(config) for key in list_kept_keys(config)}}


def list_kept_changes(
    recorded: dict[str, Any], config: Config, allowed: Iterable[str] = ()
) -> list[str]:
    """Lines `key: old -> new` of kept keys, but for `allowed`, that differ from `recorded`.

    A record that is older than a key knows nothing of it.
    """
    changes = []
    for key in list_kept_keys(config):
        now = attrgetter(key)(config)
        then = recorded.get(key, now)
        if then != now and key not in allowed:
            changes.append(f"{key}: {then!r} -> {now!r}")
    return changes


def check_settings(
    config: Config, metadata: dict[str, Any], path: Path, changed: Iterable[str] = ()
) -> None:
    """Compare a config with the metadata of the checkpoint `path`.

    Raises RunError if a key, but for those in `changed`, has another value than the weights were
    trained with.
    """
    recorded = metadata.get(SETTINGS, metadata.get(OLD_SETTINGS, {}))
    changes = list_kept_changes(recorded, config, changed)
    if changes:
        differences = "\n  ".join(changes)
        raise RunError(
            f"{path}: its weights were trained with other settings (checkpoint -> config):\n  "
            f"{differences}\nRestore them in the run's config.toml, or start over in a new folder "
            "(--fresh)"
        )


def check_is_run(folder: Path) -> None:
    """Raise RunError if `folder` is not a run's."""
    if not is_file(folder / "config.toml"):
        fault = "no config.toml, so not a run" if is_folder(folder) else "no such folder"
        if is_file(folder / "ckpt.pt"):
            fault = "no run but a folder of nanoGPT, whose ckpt.pt is not read here"
        raise RunError(f"{folder}: {fault}; give a run's folder, such as runs/quickstart-kern")


SILENT = 300  # seconds without a line of metrics that are trouble of a running run; not measured


# ---- runs
class Status(NamedTuple):
    """What a run does now.

    Attributes:
        state: "running" while a process holds its lock; "failed" if it ended with an error;
            "finished" if it was evaluated at its last step; "unknown" if it may train on another
            computer; else "stopped".
        step: the newest step of its metrics or checkpoints.
        trouble: the gravest problem, or why the state is unknown; "" without one.
    """

    state: str
    step: int
    trouble: str


class Run:
    """The folder of a run. Its files are read when they are asked for, each once.

    Attributes:
        path: runs/<name>; it need not exist.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._values: dict[str, Any] = {}  # of keys: tables of many runs ask for all of them

    def __str__(self) -> str:
        return str(self.path)

    def read(self) -> None:
        """Read all files that are compared.

        Raises:
            ValueError: the folder is not a run, a file is broken, or the config is not that of the
                last checkpoint. The message has the remedy.
        """
        check_settings(self.config, self.metadata, self.path)

    # ---- settings
    @cached_property
    def config(self) -> Config:
        """The settings of its last start, from config.toml. Raises RunError or ConfigError."""
        check_is_run(self.path)
        return configure.load_recorded(self.path / "config.toml")

    @property
    def seed(self) -> int:
        return self.config.run.seed

    @property
    def max_steps(self) -> int:
        return self.config.train.max_steps

    def value(self, key: str) -> Any:
        """The config's value of a dotted key, as runs are compared; a mixture's parts as text.

        A key without effect has its default. A mixture's data.name is empty: the mixture says it
        all. A balance loss over micro-batches depends on their size, so its scope names the size.
        """
        if key not in self._values:
            self._values[key] = self._find_value(key)
        return self._values[key]

    def _find_value(self, key: str) -> Any:
        schema = KEYS[key]
        if not has_effect(key, self.value):
            return schema["default"]
        value = attrgetter(key)(self.config)
        if key == "data.name" and self.config.data.mix:
            return ""
        if key == "train.balance_loss_scope" and value == "micro_batch":
            return f"{value} of {self.config.train.micro_batch_size}"
        if key == "data.mix":  # mixtures of equal parts are one
            return str(Mix(self.config.data.sets)) if value else ""
        return value

    def values(self, keys: Iterable[str]) -> tuple[Any, ...]:
        """The `value` of each key."""
        return tuple(self.value(key) for key in keys)

    # ---- checkpoints
    @property
    def checkpoint_folder(self) -> Path:
        return self.path / "checkpoints"

    @property
    def checkpoints(self) -> list[int]:
        """Steps of its checkpoints, intact or not, ascending."""
        return steps(self.checkpoint_folder)

    @property
    def last_step(self) -> int:
        """Step of the newest checkpoint, intact or not; 0 if there is none."""
        return max(self.checkpoints, default=0)

    @cached_property
    def _newest_manifest(self) -> tuple[dict[str, Any], list[str]]:
        """The metadata of the newest checkpoint whose manifest is intact, and what is damaged."""
        faults = []
        for step in reversed(self.checkpoints):
            path = folder_of(self.checkpoint_folder, step)
            try:
                return read_manifest(path)["facts"], faults
            except DamagedError as error:
                if exists(path):  # else a process that trains has removed it meanwhile
                    faults.append(str(error))
        return {}, faults

    @property
    def metadata(self) -> dict[str, Any]:
        """Metadata of the newest checkpoint with an intact manifest; {} without one."""
        return self._newest_manifest[0]

    @property
    def faults(self) -> list[str]:
        """The damaged manifests of newer checkpoints."""
        return self._newest_manifest[1]

    # ---- metrics
    @cached_property
    def metrics(self) -> list[Line]:
        """All lines of metrics.jsonl; see `read_metrics`."""
        return read_metrics(self.path / "metrics.jsonl")

    @property
    def val_losses(self) -> dict[int, float]:
        """{step: validation loss, nats per token} of all lines, also those that are not finite."""
        return {line["step"]: line["val/loss"] for line in self.metrics if "val/loss" in line}

    @cached_property
    def evaluations(self) -> dict[int, Line]:
        """{step: line with a finite validation loss}."""
        lines = {}
        for line in self.metrics:
            if math.isfinite(line.get("val/loss", math.nan)):
                lines[line["step"]] = line
        return lines

    @cached_property
    def lines(self) -> list[Line]:
        """Every line that has a loss: evaluations, then those of training."""
        return [*self.evaluations.values(), *(x for x in self.metrics if "train/loss" in x)]

    @cached_property
    def newest(self) -> Line:
        """The newest value of each name in its metrics."""
        newest: Line = {}
        for line in self.metrics:
            newest |= line
        return newest

    @property
    def last_evaluated(self) -> int:
        """The step of its last finite validation loss; 0 without any."""
        return max(self.evaluations, default=0)

    def series(self, name: str) -> dict[int, float]:
        """{step: value} of a name, without validation losses that are not finite."""
        return {line["step"]: line[name] for line in self.lines if name in line}

    @cached_property
    def loads(self) -> list[list[float]]:
        """(L, E) tokens of each expert in the last evaluation; empty if they were not logged.

        Raises RunError if their file is damaged or of another run.
        """
        step = self.last_evaluated
        line = self.evaluations.get(step, {})
        for file in list_arrays(self.path / "metrics.jsonl", "val"):
            if last_step_of(file) >= step:
                line = load_arrays(file, ["val/loads"]).get(step, line)
                break
        return line.get("val/loads", [])  # older runs have them in the line

    # ---- status
    @property
    def ended(self) -> bool:
        """True if it was evaluated at its last step."""
        return self.max_steps in self.evaluations

    @property
    def is_finished(self) -> bool:
        """True if its last loss counts: it was evaluated at its end, and did not fail."""
        return self.ended and self.status.state != "failed"

    @property
    def progress(self) -> str:
        """Its state and step, and what is wrong, as text."""
        text = f"{self.status.state} at step {self.status.step:,} of {self.max_steps:,}"
        return f"{text}: {self.status.trouble}" if self.status.trouble else text

    @cached_property
    def status(self) -> Status:
        """What it does, by the first look or the last `read`."""
        return self.find_status()

    def find_status(self) -> Status:
        """What it does now, by its files and its lock."""
        step = max(int(self.newest.get("step", 0)), self.last_step)
        trouble = self._find_trouble()
        trains = self._is_training()
        files = [self.path / "metrics.jsonl", self.path / "lock"]
        written = max((file.stat().st_mtime for file in files if exists(file)), default=0.0)
        if trains:
            if time.time() - written > SILENT:
                # a time, not a duration: the page is built again if a row changed
                trouble = trouble or f"no metrics since {format_time(written)}"
            return Status("running", step, trouble)
        failure = self._read_failure()
        if failure:
            return Status("failed", step, failure)
        if self.ended:
            return Status("finished", step, trouble)
        if trouble and not trouble.startswith("warning"):
            return Status("failed", step, trouble)
        if trains is None:
            unseen = f"its lock on {self._read_host()} is not visible here; "
            unseen += f"last written {format_time(written)}"
            return Status("unknown", step, f"{trouble}; {unseen}" if trouble else unseen)
        return Status("stopped", step, trouble)

    def _find_trouble(self) -> str:
        """The gravest problem that the run's files show; "" without one."""
        for name in ("val/loss", "train/loss"):
            loss = self.newest.get(name, 0.0)
            if not math.isfinite(loss):
                return f"{name} is {loss}"
        return f"warning: {self.faults[-1]}" if self.faults else ""

    def _read_failure(self) -> str:
        """The error that ended its last start; "" without one.

        It is the first sentence, which names the error. The others explain it.
        """
        file = self.path / FAILURE_FILE
        if not exists(file):
            return ""
        return file.read_text(errors="replace").partition(". ")[0].strip() or "unknown error"

    def _is_training(self) -> bool | None:
        """True if a process trains the run; None if that cannot be known from here.

        The lock decides, not the number of the process: the kernel gives that to another process,
        and containers have numbers of their own.
        """
        locked = is_locked(self.path / "lock")
        if locked is False and self._read_host() != platform.node():
            return None  # it trains on another computer, or did
        return locked

    def _read_host(self) -> str:
        """The name of the computer that wrote the lock file; this one's if there is none."""
        owner = None
        with suppress(OSError):
            text = (self.path / "lock").read_text(errors="replace")
            owner = re.match(r"process \d+ on (.*)", text)
        return owner[1] if owner else platform.node()


_last_read: dict[Path, tuple[list | None, Run]] = {}  # {folder: its files then, its run}


def read_runs(places: Iterable[Path]) -> tuple[list[Run], list[str]]:
    """Read the runs at these places and below.

    A run whose files have not changed since the last call is not read again; its status is.

    Returns:
        The runs, and a line for each folder that is left out.
    """
    runs = []
    left_out = []
    for path in list_candidates(places):
        try:
            files = list_changes(path)
            files_then, run = _last_read.get(path, (None, Run(path)))
            if files != files_then:
                run = Run(path)
                run.read()
            run.status = run.find_status()  # a lock changes without the files
            _last_read[path] = files, run
            runs.append(run)
        except Exception as error:  # whatever is wrong in one folder, the others are read
            reason = " ".join(str(error).split()) or type(error).__name__
            reason = reason.removeprefix(f"{path}: ")
            left_out.append(escape_controls(f"left out: {path}: {reason}"))
    return runs, left_out


def list_changes(path: Path) -> list[tuple[str, int, int]]:
    """Name, time of the last change and size of what `Run.read` reads, if it exists.

    The time of a folder is that at which a file in it was written anew, renamed or removed.
    """
    changes = []
    for name in ("config.toml", "metrics.jsonl", "checkpoints"):
        if exists(path / name):
            state = (path / name).stat()
            changes.append((name, state.st_mtime_ns, state.st_size))
    return changes


def list_candidates(places: Iterable[Path]) -> list[Path]:
    """The folders of runs at these places and below, and the places that hold no run.

    `Run.read` says what is wrong with the latter. A folder with a report is not one of them.
    """
    folders: list[Path] = []
    for place in places:
        below = find_runs([place])
        if not below and not is_file(place / "report.html"):
            below = [place]
        folders += [folder for folder in below if folder not in folders]
    return folders


def find_runs(places: Iterable[Path]) -> list[Path]:
    """The folders with a config.toml at `places` and below, in the order of their names.

    A folder that cannot be listed is one of them, because it may be a run; `Run.read` then raises
    an error. Links to folders are followed at `places` alone.
    """
    folders: set[Path] = set()

    def add_unlisted(error: OSError) -> None:
        is_gone = not os.path.lexists(error.filename)
        if not is_gone and not isinstance(error, NotADirectoryError):
            folders.add(Path(error.filename))

    for place in places:
        for folder, below, files in os.walk(place, onerror=add_unlisted):
            if "config.toml" in files + below:
                folders.add(Path(folder))
                below.clear()  # a run holds no other, and many files
    return sorted(folders)


def format_time(seconds: float) -> str:
    """A time in seconds since 1970, such as 2026-11-26 09:30:00."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
