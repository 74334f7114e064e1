"""Send a run's metrics to Weights & Biases (log.wandb) and TensorBoard (log.tensorboard).

A tracker has `recall(lines)` for the lines of metrics.jsonl from earlier starts, `log(line)` for
each new one, and `finish(exit_code)`. If it raises anything, runtime.metrics drops it and prints
one line, so it cannot stop a run that has started. docs/wandb.md lists the names.
"""

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import configure
from balance import MEASURES
from common.text import first_line
from configure import Config

Line = dict[str, Any]  # line of metrics.jsonl: numbers, or lists by layer, expert or window

# To start a run, and to finish one: wandb's own default waits for a network for ever. Not measured.
WANDB_SECONDS = 30


class WandbTracker:
    """Sends lines to a wandb run."""

    name = "wandb"

    def __init__(self, run: Any, wandb: Any, folder: Path, first_layer: int = 0) -> None:
        """Wrap a run.

        Args:
            run: the result of wandb.init.
            wandb: the module.
            folder: the run's folder.
            first_layer: the first layer with experts.
        """
        self.remedy = f"; `wandb sync {folder}/wandb/*run-*` sends what wandb has got of them"
        self.run = run
        self.id = run.id
        self.wandb = wandb
        self.first_layer = first_layer
        self.best = math.inf

    def recall(self, lines: Sequence[Line]) -> None:
        """Update the summary with the least val loss of the run so far, and the last in `lines`."""
        losses = [line["val/loss"] for line in lines if "val/loss" in line]
        if not losses:
            return
        self.best = min([self.best, *losses])  # a NaN is never less, so it does not become the best
        self.run.summary.update({"val/loss_best": self.best, "val/loss_final": losses[-1]})

    def log(self, line: Line) -> None:
        self.run.log(flatten_line(line, self.first_layer), step=line["step"])
        self.recall([line])

    def summarize(
        self, values: Line, name: str, head: list[str], rows: list[list[str]], step: int
    ) -> None:
        """Add results after training: `values` to the summary, and a table `name` at `step`."""
        self.run.summary.update(values)
        self.run.log({name: self.wandb.Table(columns=head, data=rows)}, step=step)

    def finish(self, exit_code: int = 0) -> None:
        """Wait, for WANDB_SECONDS at most, until all is sent; `exit_code` 0 means success."""
        self.run.finish(exit_code)


class TensorBoardTracker:
    """Writes lines to TensorBoard's files in a folder, under their names.

    Its folder by_tokens has the losses over tokens in place of steps.
    """

    name, remedy = "tensorboard", ""

    def __init__(self, folder: Path, resume_step: int, config: Config) -> None:
        """Open the files; TensorBoard hides steps after `resume_step` of earlier starts."""
        from torch.utils.tensorboard import SummaryWriter

        self.first_layer = 0
        next_step = resume_step + 1
        self.writer = SummaryWriter(str(folder), purge_step=next_step)
        tokens_per_step = config.train.batch_size * config.model.block_size
        tokens = next_step * tokens_per_step
        self.by_tokens = SummaryWriter(str(folder / "by_tokens"), purge_step=tokens)
        code = configure.dumps(config).replace("\n", "\n    ")  # Markdown, which TensorBoard shows
        self.writer.add_text("config", f"    {code}", next_step)

    def recall(self, lines: Sequence[Line]) -> None:
        """Do nothing: earlier starts wrote their lines."""

    def log(self, line: Line) -> None:
        """Write one line, so that a kill does not lose it."""
        for name, value in flatten_line(line, self.first_layer).items():
            if name not in ("step", "tokens"):
                self.writer.add_scalar(name, value, line["step"])
            if name in ("train/loss", "val/loss"):
                self.by_tokens.add_scalar(name, value, line["tokens"])
        self.writer.flush()
        self.by_tokens.flush()

    def finish(self, exit_code: int = 0) -> None:
        self.writer.close()
        self.by_tokens.close()


def start_trackers(
    config: Config, folder: Path, resume_step: int, id: str | None, tags: Sequence[str]
) -> list[WandbTracker | TensorBoardTracker]:
    """Start the trackers of [log], with files in `folder`/wandb and `folder`/tensorboard.

    If one fails, a line is printed and the run continues without it.

    Args:
        config: the run's settings.
        folder: the run's folder.
        resume_step: step of the checkpoint, -1 at the start.
        id: the wandb run to resume, None for a new one.
        tags: of the wandb run.
    """
    trackers: list[WandbTracker | TensorBoardTracker] = []
    wandb = start_wandb(config, folder, id, tags)
    if wandb:
        trackers.append(wandb)
    if config.log.tensorboard:
        place = folder / "tensorboard"
        try:
            trackers.append(TensorBoardTracker(place, resume_step, config))
        except Exception as error:
            print(
                f"tensorboard: no files ({first_line(error)}): continuing without; metrics.jsonl "
                "has every number"
            )
    return trackers


def start_wandb(
    config: Config, folder: Path, id: str | None = None, tags: Sequence[str] = ()
) -> WandbTracker | None:
    """Start or resume a wandb run; None if it is "disabled" or fails, with a printed line.

    Without an API key or a network "online" becomes "offline". Under a wandb agent, project and id
    are the agent's.
    """
    mode = config.log.wandb
    if mode == "disabled":
        return None
    options: dict[str, Any] = {
        "name": config.run.name,
        "group": config.log.group,
        "tags": tags,
        "job_type": "train",
        "dir": str(folder),
        "config": config.model_dump(),
    }
    # an agent has set project and id, and wandb refuses others
    if not os.environ.get("WANDB_SWEEP_ID"):
        options |= {"project": config.log.project, "id": id, "resume": "allow"}
    try:
        import wandb

        options["settings"] = wandb.Settings(
            init_timeout=WANDB_SECONDS,
            finish_timeout=WANDB_SECONDS,
            finish_timeout_raises=True,
            silent=True,
        )
        if mode == "online" and not wandb.login(prompt=False, verify=False):
            print(
                "wandb: no API key (`wandb login`, or WANDB_API_KEY): logging offline; `wandb "
                "sync` sends it later"
            )
            mode = "offline"
        try:
            run = wandb.init(mode=mode, **options)
        except Exception as error:
            if mode == "offline":
                raise
            print(
                f"wandb: no run online ({first_line(error)}): logging offline; `wandb sync` sends "
                "it later"
            )
            wandb.teardown()  # otherwise it refuses the id as in use
            run = wandb.init(mode="offline", **options)
        run.define_metric("*", step_metric="tokens")
        return WandbTracker(run, wandb, folder)
    except Exception as error:
        print(
            f"wandb: no run ({first_line(error)}): continuing without it; metrics.jsonl has every "
            "number"
        )
        return None


def flatten_line(line: Line, first_layer: int = 0) -> Line:
    """The numbers of a line; lists by layer become `router/gamma/layer_00` and so on.

    Layers are counted from `first_layer`. `router/loads` becomes the load imbalance and the dead
    experts of each layer. Other lists are left out.
    """
    numbers = {}
    by_layer = {}
    for name, value in line.items():
        if not isinstance(value, list):
            numbers[name] = value
        elif name.endswith("_of_layers"):
            by_layer[name.removesuffix("_of_layers")] = value
    if "router/loads" in line:
        loads = torch.tensor(line["router/loads"], dtype=torch.float64)
        for name, measure in MEASURES.items():
            if measure.of_loads:
                by_layer[f"router/{name}"] = measure.of_loads(loads).tolist()
    for name, values in by_layer.items():
        for layer, value in enumerate(values, first_layer):
            numbers[f"{name}/layer_{layer:02}"] = value
    return numbers
