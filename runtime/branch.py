"""Branches: a run that takes another's state (train.branch_from, the trunk) and follows it with a decay alone.

The trunk's schedule is "wsd". While its rate is constant, its state does not depend on its length: a branch equals, bit
for bit, a run of the branch's settings that trained all steps itself. One trunk gives losses at several lengths.
"""

import json
import shlex
import shutil
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import configure
from common.files import write_atomic
from configure import Config
from configure.check import format_value
from runtime import RunError, checkpoint, describe_write_errors, folder
from runtime.distributed import Ranks
from runtime.metrics import list_arrays, read_metrics

# What a branch may set otherwise than its trunk, besides folder.MAY_CHANGE: it acts from the branch's step on.
OF_DECAY = ("train.branch_", "optim.decay_fraction:", "optim.decay:", "optim.min_lr_ratio:")


class Branch(NamedTuple):
    """Where a branch leaves its trunk."""

    trunk: Path  # folder of its run
    step: int

    @property
    def checkpoints(self) -> Path:
        """The trunk's folder of checkpoints."""
        return self.trunk / "checkpoints"

    def read_metadata(self, ranks: Ranks) -> dict[str, Any]:
        """What the trunk's checkpoint recorded, without its wandb run. Raises RunError if it is damaged or gone."""
        path = checkpoint.folder_of(self.checkpoints, self.step)
        try:
            metadata = checkpoint.verify(path, ranks)["facts"]
        except checkpoint.DamagedError as error:
            raise RunError(f"{error}; restore a copy of {path}, or branch at another step{_remedy(self)}") from None
        return {key: value for key, value in metadata.items() if key != "wandb"}

    def copy_metrics(self, own: Path) -> None:
        """Begin the metrics of the run in `own` with the trunk's up to the step. Raises RunError if it cannot write."""
        lines = [line for line in read_metrics(self.trunk / "metrics.jsonl") if line["step"] <= self.step]
        arrays, target = list_arrays(self.trunk / "metrics.jsonl"), own / "arrays"
        with describe_write_errors(own):
            shutil.rmtree(target, ignore_errors=True)  # of a start that got to no checkpoint
            target.mkdir()
            for file in arrays:
                if int(file.stem[-8:]) <= self.step:  # a file ends at each checkpoint
                    write_atomic(target / file.name, file.read_bytes())
            write_atomic(own / "metrics.jsonl", "".join(json.dumps(line) + "\n" for line in lines), durable=True)


def find_branch(config: Config) -> Branch | None:
    """Check train.branch_from against the run that it names; None if it is empty.

    Raises:
        RunError: the folder is no run, its settings differ in more than the decay, or it has no checkpoint of the step
            from before its own decay. The message has the remedy.
        ConfigError: the trunk's config.toml cannot be read.
    """
    if not config.train.branch_from:
        return None
    branch = Branch(Path(config.train.branch_from), config.train.branch_step)
    name = f"train.branch_from = {branch.trunk}"
    if not (branch.trunk / "config.toml").is_file():
        raise RunError(f"{name}: no config.toml there, so not a run; train it first, or name one that is")
    trunk = configure.load(branch.trunk / "config.toml")
    if trunk.optim.schedule != "wsd":
        raise RunError(
            f"{name}: its optim.schedule is {trunk.optim.schedule}, whose rate depends on the length of the run, so no "
            f"other decay can follow; train a trunk with --optim.schedule=wsd"
        )
    lines = configure.differences(trunk, folder.keep_dtype(config))
    if refused := [line for line in lines if not line.startswith(folder.allowed_changes(config) + OF_DECAY)]:
        keys = [line.split(":")[0] for line in refused]
        values = [attrgetter(key)(trunk) for key in keys]
        words = [shlex.quote(format_value(value)) for value in values]
        raise RunError(
            f"{name}: the trunk's config is another:\n  "
            + "\n  ".join(refused)
            + "\nA branch may change its decay and "
            f"where it runs alone. Add {' '.join(f'--{key}={word}' for key, word in zip(keys, words, strict=True))}"
        )
    start = trunk.optim.decay_start(trunk.train.max_steps)
    if branch.step > start:
        raise RunError(
            f"{name}: train.branch_step = {branch.step} is after step {start}, where the trunk's own decay begins; "
            f"branch there or before{_remedy(branch)}"
        )
    saved = checkpoint.steps(branch.checkpoints)
    if branch.step > max(saved, default=0):
        raise RunError(
            f"{name}: the trunk is at step {max(saved, default=0)}, and the decay of this run is to begin at step "
            f"{branch.step}; continue the trunk with --train.keep_steps={branch.step} first"
        )
    if branch.step not in saved:
        raise RunError(
            f"{name}: no checkpoint of step {branch.step}, where the decay of this run is to begin; branch at another "
            f"step{_remedy(branch)}; or train the trunk anew with --train.keep_steps={branch.step}"
        )
    return branch


def _remedy(branch: Branch) -> str:
    """`: the trunk has 400, 800 (--train.branch_step=800)`: other steps before the trunk's decay."""
    trunk = configure.load(branch.trunk / "config.toml")
    start = trunk.optim.decay_start(trunk.train.max_steps)
    steps = [step for step in checkpoint.steps(branch.checkpoints) if step <= start and step != branch.step]
    if not steps:
        return ": the trunk has no checkpoint before its decay"
    near = min(steps, key=lambda step: abs(step - branch.step))
    return f": the trunk has {', '.join(map(str, steps))} (--train.branch_step={near})"


def check_length(config: Config, last_step: int) -> None:
    """Refuse another train.max_steps for a run with schedule "wsd" that has begun its decay, or would be amid it.

    And a train.keep_steps beyond the end.

    Args:
        config: the run's.
        last_step: of its newest checkpoint; 0 if there is none.

    Raises:
        RunError: its rate would jump. A branch gives the other length. Or no checkpoint of a step would ever be.
    """
    own, kept = folder.path_of(config), max(config.train.kept_steps, default=0)
    if kept > config.train.max_steps:
        raise RunError(
            f"train.keep_steps = {config.train.keep_steps}: the run ends before step {kept}, at train.max_steps = "
            f"{config.train.max_steps}; leave that step out, or set --train.max_steps={kept}"
        )
    if not last_step or config.optim.schedule != "wsd":
        return
    old, new = configure.load(own / "config.toml").train.max_steps, config.train.max_steps
    start = min(config.optim.decay_start(steps) for steps in (old, new))
    if old != new and last_step > start:
        raise RunError(
            f"{own}: train.max_steps: {old} -> {new}, but the run is at step {last_step}, and its decay begins at step "
            f"{config.optim.decay_start(old)} of {old}, {config.optim.decay_start(new)} of {new}. Keep "
            f"--train.max_steps={old}, or branch from a checkpoint before its decay (--train.branch_from={own})"
        )
