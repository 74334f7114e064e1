"""Branches: runs that start from another's state (train.branch_from, the trunk) and decay the rate.

The trunk's schedule is "wsd". While its rate is constant, its state does not depend on its length:
a branch equals, bit for bit, a run of the branch's settings that trained all steps itself. One
trunk gives losses at several lengths.
"""

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from common.files import write_atomic
from configure import Config
from configure.schema import select_keys
from runtime import RunError, checkpoint, describe_write_errors
from runtime.distributed import Ranks
from runtime.folder import RunFolder, refused_changes


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

    def copy_metrics(self, own: Path) -> None:
        """Start the metrics of the run in `own` with the trunk's up to the step.

        Raises RunError if it cannot write.
        """
        arrays = self.trunk.path / "arrays"
        lines = [line for line in self.trunk.metrics if line["step"] <= self.step]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        with describe_write_errors(own):
            shutil.rmtree(own / "arrays", ignore_errors=True)  # of a start without a checkpoint
            if arrays.is_dir():  # a file ends at each checkpoint; `Metrics` removes later ones
                shutil.copytree(arrays, own / "arrays")
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
