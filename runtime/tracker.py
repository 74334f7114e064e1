"""Send a run's metrics to Weights & Biases (log.wandb). docs/wandb.md lists the names.

If the tracker raises anything, runtime.metrics drops it and prints one line, so it cannot stop a
run that has started.
"""

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from balance import MEASURES
from common.text import first_line
from configure import Config
from runtime.metrics import Line

# To start a run, and to finish one: wandb's own default waits for a network for ever. Not measured.
WANDB_SECONDS = 30


class WandbTracker:
    """Sends lines to a wandb run."""

    name = "wandb"

    def __init__(self, run: Any, wandb: Any, folder: Path) -> None:
        """Wrap a run.

        Args:
            run: the result of wandb.init.
            wandb: the module.
            folder: the run's folder.
        """
        self.remedy = f"; `wandb sync {folder}/wandb/*run-*` sends what wandb has got of them"
        self.run = run
        self.id = run.id
        self.wandb = wandb
        self.best = math.inf

    def recall(self, lines: Sequence[Line]) -> None:
        """Update the summary with the least val loss of the run so far, and the last in `lines`."""
        losses = [line["val/loss"] for line in lines if "val/loss" in line]
        if not losses:
            return
        self.best = min([self.best, *losses])  # a NaN is never less, so it does not become the best
        self.run.summary.update({"val/loss_best": self.best, "val/loss_final": losses[-1]})

    def log(self, line: Line) -> None:
        self.run.log(flatten_line(line), step=line["step"])
        self.recall([line])

    def finish(self, exit_code: int = 0) -> None:
        """Wait, for WANDB_SECONDS at most, until all is sent; `exit_code` 0 means success."""
        self.run.finish(exit_code)


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


def flatten_line(line: Line) -> Line:
    """The numbers of a line; lists by layer become `router/gamma/layer_00` and so on.

    `router/loads` becomes the load imbalance and the dead
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
        for layer, value in enumerate(values):
            numbers[f"{name}/layer_{layer:02}"] = value
    return numbers
