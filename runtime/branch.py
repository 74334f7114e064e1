"""Branches: a run that takes another's state (train.branch_from, the trunk) and follows it with a decay alone.

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
from runtime.metrics import list_arrays, read_metrics


class Branch(NamedTuple):
    """Where a branch leaves its trunk."""

    trunk: RunFolder
    step: int
    dtype: str  # train.dtype of the trunk

    def read_metadata(self, ranks: Ranks) -> dict[str, Any]:
        """What the trunk's checkpoint recorded, without its wandb run.

        Raises RunError if it is damaged or gone.
        """
        path = checkpoint.folder_of(self.trunk.checkpoints, self.step)
        try:
            metadata = checkpoint.verify(path, ranks)["facts"]
        except checkpoint.DamagedError as error:
            raise RunError(
                f"{error}; restore a copy of {path}, or set another train.branch_step"
            ) from None
        return {key: value for key, value in metadata.items() if key != "wandb"}

    def copy_metrics(self, own: Path) -> None:
        """Begin the metrics of the run in `own` with the trunk's up to the step.

        Raises RunError if it cannot write.
        """
        source, target = self.trunk.path / "metrics.jsonl", own / "arrays"
        lines = [line for line in read_metrics(source) if line["step"] <= self.step]
        with describe_write_errors(own):
            shutil.rmtree(target, ignore_errors=True)  # of a start that got to no checkpoint
            target.mkdir()
            for file in list_arrays(source):
                if int(file.stem[-8:]) <= self.step:  # a file ends at each checkpoint
                    write_atomic(target / file.name, file.read_bytes())
            write_atomic(
                own / "metrics.jsonl",
                "".join(json.dumps(line) + "\n" for line in lines),
                durable=True,
            )


def find_branch(config: Config) -> Branch | None:
    """Check train.branch_from against the run that it names; None if it is empty.

    Raises:
        RunError: the folder is no run, its settings differ in more than the decay, or it has no
            checkpoint of the step from before its own decay. The message has the remedy.
        ConfigError: the trunk's config.toml cannot be read.
    """
    if not config.train.branch_from:
        return None
    trunk, step = RunFolder(config.train.branch_from), config.train.branch_step
    name, recorded = f"train.branch_from = {trunk}", trunk.recorded
    if recorded is None:
        raise RunError(
            f"{name}: no config.toml there, so not a run; train it first, or name one that is"
        )
    if recorded.optim.schedule != "wsd":
        raise RunError(
            f"{name}: its optim.schedule is {recorded.optim.schedule}, whose rate depends on the length of the run, so "
            f"no other decay can follow; train a trunk with --optim.schedule=wsd"
        )
    decay_keys = select_keys("decay_branch")
    if refused := refused_changes(recorded, trunk.keep_recorded(config), decay_keys):
        raise RunError(
            f"{name}: the trunk's config is another:\n  "
            + "\n  ".join(refused)
            + "\nSet these as the trunk has them: a branch may change only its decay and where it runs"
        )
    start = recorded.optim.decay_start(recorded.train.max_steps)
    saved = [other for other in checkpoint.steps(trunk.checkpoints) if other <= start]
    if step not in saved:
        raise RunError(
            f"{name}: no checkpoint of step {step}, where this run's decay would begin, up to step {start}, where "
            f"the trunk's own begins. Its steps: {', '.join(map(str, saved)) or 'none'}. Set --train.branch_step to "
            f"one of them, or train a trunk with --train.keep_steps={step}"
        )
    return Branch(trunk, step, recorded.train.dtype)


def check_length(run: RunFolder, config: Config) -> None:
    """Check train.max_steps against train.keep_steps and, with schedule "wsd", against the decay of the run in `run`.

    Raises:
        RunError: a step to keep is after the end; or the decay of the run has begun, or would have,
            so that its rate would jump. A branch gives the other length.
    """
    last = max(config.train.kept_steps, default=0)
    if last > config.train.max_steps:
        raise RunError(
            f"train.keep_steps = {config.train.keep_steps}: the run ends before step {last}, at train.max_steps = "
            f"{config.train.max_steps}; leave that step out, or set --train.max_steps={last}"
        )
    if not run.last_step or run.recorded is None or config.optim.schedule != "wsd":
        return
    old, new = run.recorded.train.max_steps, config.train.max_steps
    old_start, new_start = (config.optim.decay_start(steps) for steps in (old, new))
    if old != new and run.last_step > min(old_start, new_start):
        raise RunError(
            f"{run}: train.max_steps: {old} -> {new}, but the run is at step {run.last_step}, and its decay begins at "
            f"step {old_start} of {old}, {new_start} of {new}. Keep --train.max_steps={old}, or branch from a "
            f"checkpoint before its decay (--train.branch_from={run})"
        )
