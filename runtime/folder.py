"""A run's folder runs/<name>/: whether a config may resume the run in it, and who may write there."""

import difflib
import fcntl
import glob
import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from operator import attrgetter
from pathlib import Path

import configure
from common.files import sync_folder, write_atomic
from configure import Config
from runtime import RunError, checkpoint, describe_write_errors
from runtime.distributed import Ranks, print_once
from runtime.metrics import read_metrics

# Keys that may differ from those the run started with: how long, how often and where it computes, not what.
MAY_CHANGE = ("log.", "run.name:", "run.dir:", "data.dir:", "eval.interval:", "eval.task")
MAY_CHANGE += ("train.max_steps:", "train.micro_batch_size:", "train.activation_checkpointing:", "train.compile:")
MAY_CHANGE += ("train.parallel:", "train.device:", "train.deterministic:", "train.timeout_minutes:")
MAY_CHANGE += ("train.checkpoint_", "train.keep_checkpoints:", "train.keep_steps:", "train.on_save_error:")
MAX_SUFFIX = 40  # characters of what differs, in the name of a folder


def allowed_changes(config: Config) -> tuple[str, ...]:
    """MAY_CHANGE for this config: a balance loss over each micro-batch depends on how large they are."""
    by_batch = config.train.balance_loss_coef > 0 and config.train.balance_loss_scope == "micro_batch"
    return tuple(key for key in MAY_CHANGE if not (by_batch and key == "train.micro_batch_size:"))


def path_of(config: Config) -> Path:
    """The run's folder, runs/<name>."""
    return Path(config.run.dir, config.run.name)


def changes(config: Config) -> list[str]:
    """What differs from the run that is in the folder, as lines `key: old -> new`; empty if there is none.

    Raises:
        RunError: another run is there, naming each key that must not change, or checkpoints without a config.
    """
    folder = path_of(config)
    if not (folder / "config.toml").exists():
        if any((folder / "checkpoints").glob("step_*")):
            raise RunError(
                f"{folder} has checkpoints but no config.toml, so their settings are unknown. Put it back, or start "
                f"over in a new folder (--fresh)"
            )
        return []
    lines = configure.differences(configure.load(folder / "config.toml"), keep_dtype(config))
    if refused := [line for line in lines if not line.startswith(allowed_changes(config))]:
        missing = ", ".join(str(data) for data in config.data.folders if not data.is_dir())
        key = "data.mix" if config.data.mix else "data.name"
        raise RunError(
            f"{folder} holds a run with another config:\n  " + "\n  ".join(refused) + "\n"
            "Give this one another name (--run.name=NAME), or let it choose one (--fresh)"
            + f"\n{missing}: no such data set either: prepare it, or correct {key}"
            * bool(missing)
        )
    return lines


def keep_dtype(config: Config) -> Config:
    """`config` with the train.dtype that the run in its folder, or its trunk, began with, if it is "auto"."""
    file = path_of(config) / "config.toml"
    if config.train.branch_from and not file.exists():
        file = Path(config.train.branch_from, "config.toml")
    if config.train.dtype != "auto" or not file.exists():
        return config
    return set_dtype(config, configure.load(file).train.dtype)


def keep_kept(config: Config) -> Config:
    """`config` with the train.keep_steps of the run in its folder too: a resume deletes no checkpoint kept for good."""
    file, train = path_of(config) / "config.toml", config.train
    before = configure.load(file).train.kept_steps if file.exists() else frozenset()
    added = {step for step in before - train.kept_steps if step <= train.max_steps}
    if not added:
        return config
    kept = ",".join(map(str, sorted(added | train.kept_steps)))
    return config.model_copy(update={"train": train.model_copy(update={"keep_steps": kept})})


def set_dtype(config: Config, dtype: str) -> Config:
    """`config` with another train.dtype."""
    return config.model_copy(update={"train": config.train.model_copy(update={"dtype": dtype})})


def find_or_rename(config: Config) -> Config:
    """`config`, whose run.name nobody chose, under the name of the folder that holds its run, or of a free one.

    The same config always finds its own folder, be it one of a shorter name (its sweep had fewer axes then). If
    another config's run is in NAME, this one goes to NAME followed by what differs, such as NAME-lr0.001, or by a hash
    of that where it is long; one line says so.

    Raises:
        RunError: NAME has checkpoints but no config.
        ConfigError: NAME's config cannot be read.
    """
    own = path_of(config)
    shorter = [folder for folder in own.parent.glob("*") if own.name.startswith(f"{folder.name}-")]
    for folder in [own, *sorted(own.parent.glob(f"{glob.escape(own.name)}-*")), *sorted(shorter)]:
        with suppress(RunError, configure.ConfigError):  # another config's run, or one of other code
            if (folder / "config.toml").exists():
                changes(named := _rename(config, folder.name))
                return named
    if not (own / "config.toml").exists():
        changes(config)
        return config
    old = configure.load(own / "config.toml")
    fixed = {key: attrgetter(key) for key in configure.KEYS if not f"{key}:".startswith(allowed_changes(config))}
    new = keep_dtype(config)
    differ = {key: read(new) for key, read in fixed.items() if read(new) != read(old)}
    words = (
        value if value and isinstance(value, str) else f"{key.split('.')[1]}{value}" for key, value in differ.items()
    )
    suffix = re.sub(r"[^A-Za-z0-9._]+", "-", "-".join(words))
    if len(suffix) > MAX_SUFFIX or Path(config.run.dir, f"{own.name}-{suffix}").exists():
        suffix = hashlib.sha256(repr(differ).encode()).hexdigest()[:8]
    named = _rename(config, f"{own.name}-{suffix}")
    print_once(f"{own} holds a run with another config; this one goes to {path_of(named)}")
    return named


def _rename(config: Config, name: str) -> Config:
    return config.model_copy(update={"run": config.run.model_copy(update={"name": name})})


def is_finished(config: Config, step: int) -> bool:
    """Whether nothing is left to do after the checkpoint of `step`: not even the last evaluation."""
    return step > config.train.max_steps or (step == config.train.max_steps and step in val_losses(path_of(config)))


def finished_line(config: Config) -> str | None:
    """One line on the run in the folder if it is finished, else None. Raises RunError if another run is there."""
    changes(config)
    folder = path_of(config)
    step = max(checkpoint.steps(folder / "checkpoints"), default=0)
    if not step or not is_finished(config, step):
        return None
    losses = val_losses(folder)
    return f"{folder}: finished already, {step} steps" + (f", val loss {losses[max(losses)]:.4f}" if losses else "")


def val_losses(folder: Path) -> dict[int, float]:
    """{step: val loss, nats per token} of a run's metrics.jsonl."""
    return {line["step"]: line["val/loss"] for line in read_metrics(folder / "metrics.jsonl") if "val/loss" in line}


def renamed(config: Config) -> Config:
    """`config` under the first of NAME, NAME-2, NAME-3 … whose folder does not exist.

    Raises:
        RunError: the job was restarted by its launcher: it would begin yet another run each time.
    """
    name = config.run.name
    for number in count(2):
        if not Path(config.run.dir, name).exists():
            break
        name = f"{config.run.name}-{number}"
    for key in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"):
        if os.environ.get(key, "0") != "0":
            raise RunError(
                f"{key} = {os.environ[key]}: this job was restarted; --fresh would begin yet another run, {name}. "
                f"Name the run instead (--run.name=NAME)"
            )
    return _rename(config, name)


def find_owner(folder: Path) -> str | None:
    """Who trains the run in `folder` now, such as `process 12 on host`; None if nobody does."""
    if not (folder / "lock").exists():
        return None
    with (folder / "lock").open("a+") as file, suppress(OSError):
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            return file.read(200).strip() or "unknown"
    return None


def explain_missing(folder: Path) -> str:
    """Why `folder` is not a run's, and which may be meant."""
    fault = "no config.toml, so not a run" if folder.is_dir() else "no such folder"
    runs = [other.name for other in folder.parent.glob("*") if (other / "config.toml").is_file()]
    close = difflib.get_close_matches(folder.name, runs, 1)
    remedy = f"did you mean {folder.parent / close[0]}?" if close else "give a run's, such as runs/quickstart-kern"
    return f"{folder}: {fault}; {remedy}"


@contextmanager
def claim(folder: Path, ranks: Ranks) -> Iterator[None]:
    """Within it, no other job writes to `folder`. Rank 0 makes the folder, holds its lock and removes cut-off saves.

    The lock ends with the process, however it dies.

    Raises:
        RunError: another process holds the folder, or it cannot be written.
    """
    if ranks.rank:
        yield
        return
    with describe_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        sync_folder(folder.parent)
        file = (folder / "lock").open("a+")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(
                f"{folder}: another process trains this run ({find_owner(folder)}). Wait for it or stop it, or start "
                f"another run (--run.name=NAME or --fresh)"
            ) from None
        except OSError as error:
            print(f"warning: {file.name}: no locks on this file system ({error.strerror}): two processes may collide")
        with describe_write_errors(folder):
            file.truncate(0)
            file.write(f"process {os.getpid()} on {os.uname().nodename}\n")
            file.flush()
        checkpoint.remove_partial_saves(folder / "checkpoints")
        yield


def write_config(folder: Path, config: Config) -> None:
    """Write the resolved config.toml. Raises RunError if that fails."""
    with describe_write_errors(folder):
        write_atomic(folder / "config.toml", configure.dumps(config), durable=True)
