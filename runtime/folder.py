"""A run's folder runs/<name>/: whether a config may go on with the run in it, and who writes there."""

import fcntl
import os
from pathlib import Path

import configure
from runtime import RunError, writing
from runtime.metrics import read

# Keys that may differ from those the run was begun with: how long, how often and where it computes, not what.
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


_locks = {}  # this process holds; it may train a run again after an error


def path_of(config):
    return Path(config.run.dir, config.run.name)


def changes(config):
    """Lines `key: old -> new` of what differs from the run that is there, all of it allowed; none if there is none.
    Raises RunError, key by key, if another run is there."""
    folder = path_of(config)
    if not (folder / "config.toml").exists():
        if any((folder / "checkpoints").glob("step_*")):
            raise RunError(
                f"{folder} has checkpoints but no config.toml, so nobody knows what they are of. Put it back, or start "
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


def is_finished(config, step):
    """Whether nothing is left to do after the checkpoint of `step`."""
    if step == config.train.max_steps:  # stopped before the last evaluation, it still has that to do
        return step in evaluated(path_of(config))
    return step > config.train.max_steps


def evaluated(folder):
    """{step: val loss} of metrics.jsonl."""
    return {line["step"]: line["val/loss"] for line in read(folder / "metrics.jsonl") if "val/loss" in line}


def renamed(config):
    """`config` under the first of NAME, NAME-2, NAME-3 … whose folder is not there. Raises RunError in a job that was
    started again, which would begin once more each time."""
    number = 1
    while (folder := path_of(config) if number == 1 else Path(config.run.dir, f"{config.run.name}-{number}")).exists():
        number += 1
    again = [key for key in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT") if os.environ.get(key, "0") != "0"]
    if again:
        raise RunError(
            f"{again[0]} = {os.environ[again[0]]}: this job was started again; --fresh would begin yet another run, "
            f"{folder}. Name the run instead (--run.name=NAME)"
        )
    return config.model_copy(update={"run": config.run.model_copy(update={"name": folder.name})})


def lock(folder):
    """Make `folder` and keep other processes out of it, until `unlock` or this process' end, by whatever death. Raises
    RunError if another process has it."""
    unlock(folder)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / "lock").open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        owner = file.read(200).strip() or "unknown"
        file.close()
        raise RunError(
            f"{folder}: another process trains this run ({owner}). Wait for it or stop it, or start another run "
            f"(--run.name=NAME or --fresh)"
        ) from None
    except OSError as error:
        print(f"warning: {folder / 'lock'}: this file system has no locks ({error.strerror}): two processes may meet")
    with writing(folder):
        file.truncate(0)
        file.write(f"process {os.getpid()} on {os.uname().nodename}\n")
        file.flush()
    _locks[folder] = file


def unlock(folder):
    if folder in _locks:
        _locks.pop(folder).close()


def write_config(folder, config):
    with writing(folder):
        with (folder / "config.tmp").open("w") as file:
            file.write(configure.dumps(config))
            file.flush()
            os.fsync(file.fileno())
        os.replace(folder / "config.tmp", folder / "config.toml")
