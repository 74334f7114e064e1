"""Send a run's metrics to Weights & Biases (log.wandb) and to TensorBoard's files (log.tensorboard), if it asks so.

A tracker has `recall(lines)` for the lines of metrics.jsonl from earlier starts, `log(line)` for
each new one, and `finish(exit_code)`. It may raise whatever its library raises: runtime.metrics
then drops it and prints one line. So nothing here can stop a run that has begun. docs/wandb.md
lists the names.
"""

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from common.text import first_line
from configure import Config
from runtime.metrics import imbalance_and_dead

Line = dict[str, Any]  # of metrics.jsonl: numbers, or lists of them by layer, expert or window

# to start a run, and to finish one; wandb's own default waits for a network for ever
WANDB_SECONDS = 30


class WandbTracker:
    """Sends lines to a wandb run."""

    name = "wandb"

    def __init__(self, run: Any, wandb: Any, folder: Path, first_layer: int = 0) -> None:
        """Take what wandb.init returned, the module, the run's folder, and the first layer with experts."""
        self.remedy = f"; `wandb sync {folder}/wandb/*run-*` sends what wandb has got of them"
        self.run, self.id, self.wandb, self.first_layer = run, run.id, wandb, first_layer
        self.best = math.inf

    def recall(self, lines: Sequence[Line]) -> None:
        """Update the summary with `lines`: the least val loss of the run so far, and the last."""
        losses = [line["val/loss"] for line in lines if "val/loss" in line]
        self.best = min([self.best, *losses])  # a NaN is never less, so it does not become the best
        if losses:
            self.run.summary.update({"val/loss_best": self.best, "val/loss_final": losses[-1]})

    def log(self, line: Line) -> None:
        self.run.log(flatten_line(line, self.first_layer), step=line["step"])
        self.recall([line])

    def summarize(
        self, values: Line, name: str, head: list[str], rows: list[list[str]], step: int
    ) -> None:
        """Add results after training: `values` to the summary, and a table called `name` at `step`."""
        self.run.summary.update(values)
        self.run.log({name: self.wandb.Table(columns=head, data=rows)}, step=step)

    def finish(self, exit_code: int = 0) -> None:
        """Wait, for WANDB_SECONDS at most, until everything is sent; an `exit_code` other than 0 means a failed run."""
        self.run.finish(exit_code)


class TensorBoardTracker:
    """Writes lines to TensorBoard's files in a folder, under their names."""

    name, remedy = "tensorboard", ""

    def __init__(self, folder: Path, resume_step: int, first_layer: int = 0) -> None:
        """Steps after `resume_step`, which an earlier start may have written, are purged: TensorBoard hides them."""
        from torch.utils.tensorboard import SummaryWriter

        self.first_layer = first_layer
        self.writer = SummaryWriter(str(folder), purge_step=resume_step + 1)

    def recall(self, lines: Sequence[Line]) -> None:
        """Nothing: earlier starts wrote their lines."""

    def log(self, line: Line) -> None:
        """Write one line, so that a kill does not lose it."""
        for name, value in flatten_line(line, self.first_layer).items():
            if name not in ("step", "tokens"):
                self.writer.add_scalar(name, value, line["step"])
        self.writer.flush()

    def finish(self, exit_code: int = 0) -> None:
        self.writer.close()


def start_trackers(
    config: Config, folder: Path, resume_step: int, id: str | None, tags: Sequence[str]
) -> list[WandbTracker | TensorBoardTracker]:
    """Start what [log] asks for, with files in `folder`/wandb and `folder`/tensorboard; a failure costs a printed line.

    `resume_step` is that of the checkpoint, -1 at the start; `id` of the wandb run to resume, None
    for a new one.
    """
    trackers: list[WandbTracker | TensorBoardTracker] = []
    if wandb := start_wandb(config, folder, id, tags):
        trackers.append(wandb)
    if config.log.tensorboard:
        try:
            trackers.append(
                TensorBoardTracker(folder / "tensorboard", resume_step, config.model.n_dense_layer)
            )
        except Exception as error:
            print(
                f"tensorboard: no files ({first_line(error)}): continuing without; metrics.jsonl has every number"
            )
    return trackers


def start_wandb(
    config: Config, folder: Path, id: str | None = None, tags: Sequence[str] = ()
) -> WandbTracker | None:
    """Start or resume a wandb run; None if log.wandb is "disabled" or wandb fails, which costs one printed line.

    Without an API key or a network "online" becomes "offline". Under a wandb agent, project and id
    are the agent's.
    """
    mode = config.log.wandb
    if mode == "disabled":
        return None
    bounds = {
        "init_timeout": WANDB_SECONDS,
        "finish_timeout": WANDB_SECONDS,
        "finish_timeout_raises": True,
    }
    names: dict[str, Any] = {
        "name": config.run.name,
        "group": config.log.group,
        "tags": tags,
        "job_type": "train",
    }
    # an agent has set project and id, and wandb refuses others
    if not os.environ.get("WANDB_SWEEP_ID"):
        names |= {"project": config.log.project, "id": id, "resume": "allow"}
    try:
        import wandb

        if mode == "online" and not wandb.login(prompt=False, verify=False):
            print(
                "wandb: no API key (`wandb login`, or WANDB_API_KEY): logging offline; `wandb sync` sends it later"
            )
            mode = "offline"
        names |= {
            "dir": str(folder),
            "config": config.model_dump(),
            "settings": wandb.Settings(**bounds, silent=True),
        }
        try:
            run = wandb.init(mode=mode, **names)
        except Exception as error:
            if mode == "offline":
                raise
            print(
                f"wandb: no run online ({first_line(error)}): logging offline; `wandb sync` sends it later"
            )
            wandb.teardown()  # otherwise it refuses the id as in use
            run = wandb.init(mode="offline", **names)
        run.define_metric("*", step_metric="tokens")
        return WandbTracker(run, wandb, folder, config.model.n_dense_layer)
    except Exception as error:
        print(
            f"wandb: no run ({first_line(error)}): continuing without it; metrics.jsonl has every number"
        )
        return None


def flatten_line(line: Line, first_layer: int = 0) -> Line:
    """The numbers of a line; lists by layer become `router/gamma/layer_00` and so on, beginning at `first_layer`.

    `router/loads` becomes the load imbalance and the dead experts of each layer. Other lists are
    left out.
    """
    values = {name: value for name, value in line.items() if not isinstance(value, list)}
    layers = {
        name.removesuffix("_of_layers"): line[name] for name in line if name.endswith("_of_layers")
    }
    if "router/loads" in line:
        imbalance, dead = imbalance_and_dead(
            torch.tensor(line["router/loads"], dtype=torch.float64)
        )
        layers |= {
            "router/load_imbalance": imbalance.tolist(),
            "router/dead_experts": dead.tolist(),
        }
    for name, numbers in layers.items():
        values |= {
            f"{name}/layer_{layer:02}": value for layer, value in enumerate(numbers, first_layer)
        }
    return values
