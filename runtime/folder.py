"""A run's folder runs/<name>/: whether a config may resume the run in it, and who may write there."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import configure
from configure import Config
from runtime import RunError, checkpoint, describe_write_errors
from runtime.distributed import Ranks
from runtime.metrics import read_metrics
from runtime.output import write_atomic

# Keys that may differ from those the run started with: how long, how often and where it computes, not what.
MAY_CHANGE = ("log.", "run.name:", "run.dir:", "data.dir:", "eval.interval:") + tuple(
    f"train.{key}:"
    for key in [
        "max_steps",
        "micro_batch_size",
        "parallel",
        "compile",
        "activation_checkpointing",
        "device",
        "deterministic",
        "timeout_minutes",
        "checkpoint_interval",
        "checkpoint_minutes",
        "keep_checkpoints",
        "on_save_error",
    ]
)


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
    lines = configure.differences(configure.load(folder / "config.toml"), config)
    refused = [line for line in lines if not line.startswith(MAY_CHANGE)]
    if refused:
        raise RunError(
            f"{folder} holds a run with another config:\n  " + "\n  ".join(refused) + "\n"
            "Give this one another name (--run.name=NAME), or let it choose one (--fresh)"
        )
    return lines


def is_finished(config: Config, step: int) -> bool:
    """Whether nothing is left to do after the checkpoint of `step`."""
    if step == config.train.max_steps:  # stopped before the last evaluation, it still has that to do
        return step in val_losses(path_of(config))
    return step > config.train.max_steps


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
    number = 1
    while (folder := path_of(config) if number == 1 else Path(config.run.dir, f"{config.run.name}-{number}")).exists():
        number += 1
    restarts = [key for key in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT") if os.environ.get(key, "0") != "0"]
    if restarts:
        raise RunError(
            f"{restarts[0]} = {os.environ[restarts[0]]}: this job was restarted; --fresh would begin yet another run, "
            f"{folder}. Name the run instead (--run.name=NAME)"
        )
    return config.model_copy(update={"run": config.run.model_copy(update={"name": folder.name})})


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
        file = (folder / "lock").open("a+")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            owner = file.read(200).strip() or "unknown"
            raise RunError(
                f"{folder}: another process trains this run ({owner}). Wait for it or stop it, or start another run "
                f"(--run.name=NAME or --fresh)"
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
