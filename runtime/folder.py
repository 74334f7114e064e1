"""A run's folder runs/<name>/: its config, who may write there, and which folder the run of a config goes to."""

import fcntl
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import Any

import configure
from common.files import sync_folder, write_atomic
from configure import KEYS, Config
from configure.schema import select_keys
from runtime import RunError, checkpoint, describe_write_errors
from runtime.distributed import Ranks, print_once
from runtime.metrics import read_metrics

MAX_SUFFIX = 40  # characters of what differs, in the name of a folder


def path_of(config: Config) -> Path:
    """The folder of a config's run, runs/<name>."""
    return Path(config.run.dir, config.run.name)


def replace(config: Config, section: str, **values: Any) -> Config:
    """`config` with other values in one section. They are not checked."""
    return config.model_copy(update={section: getattr(config, section).model_copy(update=values)})


def refused_changes(old: Config, new: Config, more: Iterable[str] = ()) -> list[str]:
    """Lines `key: old -> new` of settings that must not change: all but the schema's and `more`."""
    allowed = {*select_keys("resume"), *more}
    if new.train.balance_loss_coef > 0 and new.train.balance_loss_scope == "micro_batch":
        # the loss depends on how large micro-batches are
        allowed = allowed - {"train.micro_batch_size"}
    return [line for line in configure.differences(old, new) if line.split(":")[0] not in allowed]


class RunFolder:
    """The folder of one run.

    Its config.toml is read once; only `claim` and `write_config` change the folder.

    Attributes:
        path: runs/<name>; it need not exist.
        checkpoints: the folder of its checkpoints.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.checkpoints = self.path / "checkpoints"

    def __str__(self) -> str:
        return str(self.path)

    @cached_property
    def recorded(self) -> Config | None:
        """The settings of its last start, from config.toml. None if there is no such file.

        Raises ConfigError.
        """
        file = self.path / "config.toml"
        return configure.load(file) if file.is_file() else None

    @property
    def last_step(self) -> int:
        """Step of the newest checkpoint, intact or not; 0 if there is none."""
        return max(checkpoint.steps(self.checkpoints), default=0)

    def read_val_losses(self) -> dict[int, float]:
        """{step: val loss, nats per token}, from metrics.jsonl."""
        lines = read_metrics(self.path / "metrics.jsonl")
        return {line["step"]: line["val/loss"] for line in lines if "val/loss" in line}

    def keep_recorded(self, config: Config) -> Config:
        """`config` with what a resume keeps.

        That is the train.dtype that "auto" stands for, checkpoints of keep_steps, and values that
        were the defaults when the run began, where `config` has today's.
        """
        if self.recorded is None:
            return config
        before, train = self.recorded.train, config.train
        if train.dtype == "auto":
            config = replace(config, "train", dtype=before.dtype)
        for key, schema in KEYS.items():
            if (
                attrgetter(key)(self.recorded) == schema.get("before")
                and attrgetter(key)(config) == schema["default"]
            ):
                section, name = key.split(".")
                config = replace(config, section, **{name: schema["before"]})
        kept = {step for step in before.kept_steps - train.kept_steps if step <= train.max_steps}
        if kept:
            config = replace(
                config, "train", keep_steps=",".join(map(str, sorted(kept | train.kept_steps)))
            )
        return config

    def find_changes(self, config: Config) -> list[str]:
        """What differs from the run that is in the folder, as lines `key: old -> new`; empty if there is none.

        Raises:
            RunError: another run is there, naming each key that must not change, or checkpoints
                without a config.
            ConfigError: its config.toml cannot be read.
        """
        if self.recorded is None:
            if any(self.checkpoints.glob("step_*")):
                raise RunError(
                    f"{self} has checkpoints but no config.toml, so their settings are unknown. Put it back, or start "
                    f"over in a new folder (--fresh)"
                )
            return []
        config = self.keep_recorded(config)
        if refused := refused_changes(self.recorded, config):
            message = f"{self} holds a run with another config:\n  " + "\n  ".join(refused)
            message += (
                "\nGive this one another name (--run.name=NAME), or let it choose one (--fresh)"
            )
            raise RunError(message)
        return configure.differences(self.recorded, config)

    def holds(self, config: Config) -> bool:
        """Whether the run in it is that of `config`.

        One whose config.toml cannot be read is not.
        """
        try:
            recorded = self.recorded
        except configure.ConfigError:
            return False
        return recorded is not None and not refused_changes(recorded, self.keep_recorded(config))

    def is_finished(self, config: Config, step: int) -> bool:
        """Whether nothing is left to do after the checkpoint of `step`: not even the last evaluation."""
        last = config.train.max_steps
        return step > last or (step == last and step in self.read_val_losses())

    def describe_finished(self, config: Config) -> str | None:
        """One line on the run in it if its newest intact checkpoint is the end, else None.

        Raises RunError as above.
        """
        self.find_changes(config)
        damages = ""
        for step in reversed(checkpoint.steps(self.checkpoints)):
            if not self.is_finished(config, step):
                return None  # the start says what is damaged
            try:
                checkpoint.verify(checkpoint.folder_of(self.checkpoints, step))
            except checkpoint.DamagedError as error:
                damages += f"warning: {error}\n"
                continue
            return f"{damages}{self}: finished already, {self.describe_result(step)}"
        return None

    def describe_result(self, step: int) -> str:
        """`1000 steps, val loss 1.5931, 12,900 tokens/s`, as far as it is known; the speed is the median."""
        result, speeds = f"{step} steps", []
        for line in read_metrics(self.path / "metrics.jsonl"):
            if line["step"] == step and "val/loss" in line:
                result += f", val loss {line['val/loss']:.4f}"
            if "perf/tokens_per_sec" in line:
                speeds.append(line["perf/tokens_per_sec"])
        return result + (f", {median(speeds):,.0f} tokens/s" if speeds else "")

    @contextmanager
    def claim(self, ranks: Ranks) -> Iterator[None]:
        """Within it, no other job writes to the folder.

        Rank 0 makes it, holds its lock and removes partial saves.

        The lock ends with the process, however it dies.

        Raises:
            RunError: another process holds the folder, or it cannot be written.
        """
        if ranks.rank:
            yield
            return
        with describe_write_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            sync_folder(self.path.parent)
            file = (self.path / "lock").open("a+")
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                owner = file.read(200).strip() or "unknown"
                raise RunError(
                    f"{self}: another process trains this run ({owner}). Wait for it or stop it, or start "
                    f"another run (--run.name=NAME or --fresh)"
                ) from None
            except OSError as error:
                print(
                    f"warning: {file.name}: no locks on this file system ({error.strerror}): two runs may collide"
                )
            with describe_write_errors(self.path):
                file.truncate(0)
                file.write(f"process {os.getpid()} on {os.uname().nodename}\n")
                file.flush()
            checkpoint.remove_partial_saves(self.checkpoints)
            yield

    def write_config(self, config: Config) -> None:
        """Write the resolved config.toml. Raises RunError if that fails."""
        with describe_write_errors(self.path):
            write_atomic(self.path / "config.toml", configure.dumps(config), durable=True)


def find_or_rename(config: Config, tell: Callable[[str], object] = print_once) -> Config:
    """`config`, whose run.name nobody chose, under the name of the folder that holds its run, or of a free one.

    The same config always finds its own folder, be it one of a shorter name (its sweep had fewer
    axes then). If another config's run is in NAME, this one goes to NAME followed by what differs,
    such as NAME-lr0.001; `tell` is called with a line that says so.

    Raises:
        RunError: NAME has checkpoints but no config.
        ConfigError: NAME's config cannot be read.
    """
    own, name = RunFolder(path_of(config)), config.run.name
    others = sorted(own.path.parent.glob("*"))
    longer = [path for path in others if path.name.startswith(f"{name}-")]
    shorter = [path for path in others if name.startswith(f"{path.name}-")]
    for run in [own, *map(RunFolder, [*longer, *shorter])]:
        if run.holds(config):
            return replace(config, "run", name=run.path.name)
    if own.recorded is None:
        own.find_changes(config)  # refuses checkpoints without a config
        return config
    new = own.keep_recorded(config)
    refused, parts = refused_changes(own.recorded, new), []
    for key in (line.split(":")[0] for line in refused):
        value = attrgetter(key)(new)
        parts.append(value if value and isinstance(value, str) else f"{key.split('.')[1]}{value}")
    suffix = re.sub(r"[^A-Za-z0-9._]+", "-", "-".join(parts))[:MAX_SUFFIX]
    config = _under_free_name(replace(config, "run", name=f"{name}-{suffix}"))
    tell(
        f"{own} holds a run with another config ({'; '.join(refused)}); this one goes to {path_of(config)}"
    )
    return config


def renamed(config: Config) -> Config:
    """`config` under the first of NAME, NAME-2, NAME-3 … whose folder does not exist.

    Raises:
        RunError: the job was restarted by its launcher: it would begin yet another run each time.
    """
    for key in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"):
        if os.environ.get(key, "0") != "0":
            raise RunError(
                f"{key} = {os.environ[key]}: --fresh would begin another run; name it (--run.name=NAME)"
            )
    return _under_free_name(config)


def _under_free_name(config: Config) -> Config:
    name, number = config.run.name, 1
    while path_of(config).exists():
        number += 1
        config = replace(config, "run", name=f"{name}-{number}")
    return config
