"""The folder of a run that trains: what a resume keeps and refuses, its lock, its name, its trunk.

A branch is a run that starts from another's state (train.branch_from, the trunk) and decays the
rate. The trunk's schedule is "wsd". While its rate is constant, its state does not depend on its
length: a branch equals, bit for bit, a run of the branch's settings that trained all steps itself.
One trunk gives losses at several lengths.
"""

import json
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from math import isfinite, nan
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import configure
from common.files import exists, is_file, list_matching, sync_folder, take_lock, write_atomic
from configure import Config
from configure.schema import replace, select_keys
from runtime import FAILURE_FILE, RunError, Stopped, checkpoint, describe_write_errors
from runtime.distributed import Ranks, gather, print_once, share_errors
from runtime.identity import RUN_ID, Identity, read_id, write_id
from runtime.metrics import copy_arrays
from runtime.runs import SETTINGS, Run, check_settings, describe_settings, list_kept_changes

# NFS may report for this long that a new file does not exist (acdirmax is 60); not measured
NFS_SECONDS = 90
MAX_SUFFIX = 40  # characters in a folder's name that say how its config differs; not measured


def path_of(config: Config) -> Path:
    """The folder of a config's run, runs/<name>."""
    return Path(config.run.dir, config.run.name)


def refused_changes(old: Config, new: Config, more: Iterable[str] = ()) -> list[str]:
    """Lines `key: old -> new` of settings that must not change.

    They are the kept keys, but for `more`.
    """
    return list_kept_changes(describe_settings(old)[SETTINGS], new, more)


class RunFolder(Run):
    """The folder of a run that this process may train.

    Only `claim` and `write_config` change the folder.

    Attributes:
        identity: of the claimed folder, on rank 0; None before and elsewhere.
        has_begun: True once this process has written config.toml.
    """

    identity: Identity | None = None
    has_begun = False

    @cached_property
    def recorded(self) -> Config | None:
        """The settings of its last start; None if there is no config.toml.

        Raises ConfigError if it cannot be read.
        """
        return self.config if is_file(self.path / "config.toml") else None

    def keep_recorded(self, config: Config) -> Config:
        """`config` with the recorded settings that a resume keeps.

        They are the train.dtype that "auto" stands for, and checkpoints of keep_steps.
        """
        if self.recorded is None:
            return config
        recorded_train = self.recorded.train
        if config.train.dtype == "auto":
            config = replace(config, "train", dtype=recorded_train.dtype)
        steps = config.train.kept_steps
        dropped = recorded_train.kept_steps - steps
        still_ahead = {step for step in dropped if step <= config.train.max_steps}
        if still_ahead:
            keep_steps = ",".join(str(step) for step in sorted(steps | still_ahead))
            config = replace(config, "train", keep_steps=keep_steps)
        return config

    def find_changes(self, config: Config) -> list[str]:
        """Lines `key: old -> new` against the run in the folder; empty if there is none.

        Raises:
            RunError: another run is there, with each key that must not change, or checkpoints
                without a config.
            ConfigError: its config.toml cannot be read.
        """
        if self.recorded is None:
            if list_matching(self.checkpoint_folder, "step_*"):
                raise RunError(
                    f"{self} has checkpoints but no config.toml, so their settings are unknown. "
                    "Put it back, or start over in a new folder (--fresh)"
                )
            return []
        config = self.keep_recorded(config)
        refused = refused_changes(self.recorded, config)
        if refused:
            differences = "\n  ".join(refused)
            raise RunError(
                f"{self} holds a run with another config:\n  {differences}\n"
                f"Give this one another name (--run.name=NAME), or let it choose one (--fresh)"
            )
        return configure.differences(self.recorded, config)

    def holds(self, config: Config) -> bool:
        """True if this folder has the run of `config`; False if its config.toml cannot be read.

        A run that has ended, or whose name has its length, is another run than one of another
        length: going on with it would change its learning rates and replace its result.
        """
        try:
            recorded = self.recorded
            if recorded is None or refused_changes(recorded, self.keep_recorded(config)):
                return False
            old, new = recorded.train.max_steps, config.train.max_steps
            if old == new:
                return True
            if f"max_steps{old}" in self.path.name or f"max_steps{new}" in config.run.name:
                return False
            return not self.ended
        except (configure.ConfigError, RunError):
            return False

    def is_complete(self, config: Config, step: int) -> bool:
        """True if the checkpoint of `step` is the end, and the last evaluation is done."""
        return step == config.train.max_steps and step in self.val_losses

    def describe_finished(self, config: Config) -> str | None:
        """One line on the run in it if its newest intact checkpoint is the end, else None.

        Raises RunError and ConfigError as `find_changes` does, and RunError if the checkpoint was
        trained with other settings, or the run is beyond the end.
        """
        self.find_changes(config)
        end = config.train.max_steps
        warnings = ""
        for step in reversed(self.checkpoints):
            if step <= end and not self.is_complete(config, step):
                return None  # the start reports damaged checkpoints
            path = checkpoint.folder_of(self.checkpoint_folder, step)
            try:
                metadata = checkpoint.verify(path)["facts"]
            except checkpoint.DamagedError as error:
                warnings += f"warning: {error}\n"
                continue
            if step > end:
                raise RunError(
                    f"{self} is at step {step}, after train.max_steps = {end}: set "
                    f"--train.max_steps={step} or more, or give the shorter run another name "
                    "(--run.name=NAME)"
                )
            check_settings(self.keep_recorded(config), metadata, path)
            return f"{warnings}{self}: finished already, {self.describe_result(step)}"
        return None

    def describe_result(self, step: int) -> str:
        """Steps, loss, median speed, if known: `1000 steps, val loss 1.5931, 12,900 tokens/s`."""
        result = f"{step} steps"
        speeds = []
        for line in Run(self.path).metrics:  # as it is now
            if line["step"] == step and "val/loss" in line:
                result += f", val loss {line['val/loss']:.4f}"
            if isfinite(line.get("perf/tokens_per_sec", nan)):
                speeds.append(line["perf/tokens_per_sec"])
        if speeds:
            result += f", {median(speeds):,.0f} tokens/s"
        return result

    @contextmanager
    def claim(self, ranks: Ranks) -> Iterator[None]:
        """Within this context no other job writes to the folder.

        Rank 0 makes the folder, holds its lock and removes partial saves. The lock ends with the
        process, even if it is killed. An error after `write_config` is written to FAILURE_FILE, for
        readers of the folder. A start that is refused before leaves the run as it was.

        Raises:
            RunError: another process holds the folder, or it cannot be written.
        """
        if ranks.rank:
            yield
            return
        with describe_write_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            sync_folder(self.path.parent)
            file = (self.path / "lock").open("a+", errors="replace")
        with file:
            try:
                take_lock(file)
            except BlockingIOError:
                file.seek(0)
                owner = file.read(200).strip() or "unknown"
                raise RunError(
                    f"{self}: another process trains this run ({owner}). Wait for it or stop it, "
                    "or start another run (--run.name=NAME or --fresh)"
                ) from None
            except OSError as error:
                print(
                    f"warning: {file.name}: no locks on this file system ({error.strerror}): two "
                    "runs may collide"
                )
            with describe_write_errors(self.path):
                file.truncate(0)
                owner = f"process {os.getpid()} on {os.uname().nodename}\n"
                # a buffer would be written again at the end
                os.write(file.fileno(), owner.encode())
                run_id = read_id(self.path) or write_id(self.path, self.metadata.get(RUN_ID, ""))
                self.identity = Identity(self.path, run_id, self.path.stat().st_ino)
            checkpoint.remove_partial_saves(self.checkpoint_folder)
            try:
                yield
            except Stopped:
                raise
            except Exception as error:
                reason = str(error).removeprefix(f"{self}: ") or type(error).__name__
                text = f"{reason}\n".encode(errors="replace")
                if self.has_begun:
                    with suppress(OSError, RunError):  # must not hide the error that ends the run
                        self.identity.check()
                        write_atomic(self.path / FAILURE_FILE, text)
                raise

    def check_shared(self, ranks: Ranks) -> None:
        """Raise RunError, on all ranks, if one does not see the folder that rank 0 has claimed.

        Its parts of checkpoints would be elsewhere.
        """
        run_id = gather(self.identity.id if self.identity else "", ranks.control)[0]
        seconds = min(NFS_SECONDS, ranks.timeout.total_seconds() / 2)
        deadline = time.monotonic() + seconds
        with share_errors(ranks):
            while read_id(self.path) != run_id:
                if time.monotonic() >= deadline:
                    raise RunError(
                        f"{self}: rank {ranks.rank} on {os.uname().nodename} does not see the "
                        "folder in which rank 0 writes this run: run.dir must be on a file system "
                        "that all nodes share"
                    )
                time.sleep(1)

    def write_config(self, config: Config) -> None:
        """Write the resolved config.toml, and forget the error of an earlier start.

        Raises RunError if that fails.
        """
        with describe_write_errors(self.path):
            write_atomic(self.path / "config.toml", configure.dumps(config), durable=True)
            (self.path / FAILURE_FILE).unlink(missing_ok=True)
        self.has_begun = True


def find_or_rename(config: Config) -> Config:
    """`config` under the name of its run's folder or of a free one, if no name was chosen.

    The same config always finds its own folder, also under a shorter name (its sweep had fewer axes
    then). If another config's run is in NAME, or one of another length that has ended, this one
    goes to NAME followed by the settings that differ, such as NAME-lr0.001, and a line says so.

    Raises:
        RunError: NAME has checkpoints but no config.
        ConfigError: NAME's config cannot be read.
    """
    own = RunFolder(path_of(config))
    name = config.run.name
    held = []
    for path in [own.path, *list_matching(own.path.parent, "*")]:
        is_related = path.name.startswith(f"{name}-") or name.startswith(f"{path.name}-")
        if (path == own.path or is_related) and RunFolder(path).holds(config):
            held.append(RunFolder(path))
    if held:  # the first of its length, if there is one
        run = min(held, key=lambda run: run.max_steps != config.train.max_steps)
        return replace(config, "run", name=run.path.name)
    if own.recorded is None:
        own.find_changes(config)  # refuses checkpoints without a config
        return config
    kept = own.keep_recorded(config)
    refused = refused_changes(own.recorded, kept)
    if not refused:  # it has ended
        refused = [f"train.max_steps: {own.recorded.train.max_steps} -> {kept.train.max_steps}"]
    keys = [line.split(":")[0] for line in refused]
    config = _use_free_name(replace(config, "run", name=f"{name}-{_name_settings(kept, keys)}"))
    differences = "; ".join(refused)
    print_once(
        f"{own} holds a run with another config ({differences}); this one goes to {path_of(config)}"
    )
    return config


def _name_settings(config: Config, keys: Iterable[str]) -> str:
    """The values of `keys` as a part of a folder's name: `softmax-lr0.001`."""
    parts = []
    for key in keys:
        value = attrgetter(key)(config)
        if isinstance(value, str) and value:
            parts.append(value)
        else:
            parts.append(f"{key.split('.')[1]}{value}")
    return re.sub(r"[^A-Za-z0-9._]+", "-", "-".join(parts))[:MAX_SUFFIX]


def rename_fresh(config: Config) -> Config:
    """`config` under the first of NAME, NAME-2, NAME-3 … whose folder does not exist.

    Raises:
        RunError: the job was restarted by its launcher, and would start another run each time.
    """
    for key in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"):
        if os.environ.get(key, "0") != "0":
            raise RunError(
                f"{key} = {os.environ[key]}: --fresh would begin another run; name it "
                "(--run.name=NAME)"
            )
    return _use_free_name(config)


def _use_free_name(config: Config) -> Config:
    name = config.run.name
    number = 1
    while exists(path_of(config)):
        number += 1
        config = replace(config, "run", name=f"{name}-{number}")
    return config


# ---- branches
class Branch(NamedTuple):
    """The trunk of a branch, and the step at which the branch starts."""

    trunk: RunFolder
    step: int

    def read_metadata(self, ranks: Ranks) -> dict[str, Any]:
        """The metadata of the trunk's checkpoint, without its wandb run.

        Raises RunError if it is damaged or missing.
        """
        path = checkpoint.folder_of(self.trunk.checkpoint_folder, self.step)
        try:
            metadata = checkpoint.verify(path, ranks)["facts"]
        except checkpoint.DamagedError as error:
            raise RunError(
                f"{error}; restore a copy of {path}, or set another train.branch_step"
            ) from None
        return {key: value for key, value in metadata.items() if key != "wandb"}

    def copy_metrics(self, own: Path, run_id: str) -> None:
        """Start the metrics of the run in `own`, of id `run_id`, with the trunk's up to the step.

        Raises RunError if it cannot write, or an array file of the trunk is damaged.
        """
        lines = [line for line in self.trunk.metrics if line["step"] <= self.step]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        with describe_write_errors(own):
            shutil.rmtree(own / "arrays", ignore_errors=True)  # of a start without a checkpoint
            copy_arrays(self.trunk.path, own, self.step, run_id)
            write_atomic(own / "metrics.jsonl", text, durable=True)


def find_branch(config: Config) -> Branch | None:
    """Check train.branch_from against the run that it names; None if it is empty.

    Raises:
        RunError: the folder is no run, its settings differ in more than the decay, or it has no
            checkpoint of the step from before its own decay. The message has the remedy.
        ConfigError: the trunk's config.toml cannot be read.
    """
    if not config.train.branch_from:
        return None
    trunk = RunFolder(config.train.branch_from)
    step = config.train.branch_step
    name = f"train.branch_from = {trunk}"
    recorded = trunk.recorded
    if recorded is None:
        raise RunError(
            f"{name}: no config.toml there, so not a run; train it first, or name one that is"
        )
    if recorded.optim.schedule != "wsd":
        raise RunError(
            f"{name}: its optim.schedule is {recorded.optim.schedule}, whose rate depends on the "
            "length of the run, so no other decay can follow; train a trunk with "
            "--optim.schedule=wsd"
        )
    refused = refused_changes(recorded, trunk.keep_recorded(config), select_keys("decay_branch"))
    if refused:
        differences = "\n  ".join(refused)
        raise RunError(
            f"{name}: the trunk's config is another:\n  {differences}\n"
            f"Set these as the trunk has them: a branch may change only its decay and where it runs"
        )
    decay_start = recorded.optim.decay_start(recorded.train.max_steps)
    saved = [saved_step for saved_step in trunk.checkpoints if saved_step <= decay_start]
    if step not in saved:
        steps = ", ".join(str(saved_step) for saved_step in saved) or "none"
        raise RunError(
            f"{name}: no checkpoint of step {step}, where this run's decay would begin, up to "
            f"step {decay_start}, where the trunk's own begins. Its steps: {steps}. Set "
            f"--train.branch_step to one of them, or train a trunk with --train.keep_steps={step}"
        )
    return Branch(trunk, step)


def check_length(run: RunFolder, config: Config) -> None:
    """Check train.max_steps against train.keep_steps and, with schedule "wsd", against the decay.

    Raises:
        RunError: a step to keep is after the end; or the run has entered its decay, under the old
            or the new length, so that its rate would jump. A branch gives the other length.
    """
    last_kept = max(config.train.kept_steps, default=0)
    if last_kept > config.train.max_steps:
        raise RunError(
            f"train.keep_steps = {config.train.keep_steps}: the run ends before step {last_kept}, "
            f"at train.max_steps = {config.train.max_steps}; leave that step out, or set "
            f"--train.max_steps={last_kept}"
        )
    if not run.last_step or run.recorded is None or config.optim.schedule != "wsd":
        return
    old = run.recorded.train.max_steps
    new = config.train.max_steps
    old_start = config.optim.decay_start(old)
    new_start = config.optim.decay_start(new)
    if old != new and run.last_step > min(old_start, new_start):
        raise RunError(
            f"{run}: train.max_steps: {old} -> {new}, but the run is at step {run.last_step}, and "
            f"its decay begins at step {old_start} of {old}, {new_start} of {new}. Keep "
            f"--train.max_steps={old}, or branch from a checkpoint before its decay "
            f"(--train.branch_from={run})"
        )
