"""Send a run's metrics to Weights & Biases (log.wandb). docs/wandb.md lists the names.

If the tracker raises anything, runtime.metrics drops it and prints one line, so it cannot stop a
run that has started.
"""

import math
import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from common.files import list_matching
from common.text import Table, first_line
from configure import Config
from runtime.metrics import Line
from runtime.runs import Run

# To start a run, and to finish one: wandb's own default waits for a network for ever. Not measured.
WANDB_SECONDS = 30
PIXELS = 12  # of a heat map's cell, each way


class WandbTracker:
    """Sends lines to a wandb run, with pictures of loads."""

    name = "wandb"

    def __init__(self, run: Any, wandb: Any, config: Config, folder: Path) -> None:
        """Wrap a run, and send its config.toml.

        Args:
            run: the result of wandb.init.
            wandb: the module.
            config: of the run.
            folder: of the run.
        """
        self.run = run
        # Of a run that is resumed online the first step that wandb has not got; else none is.
        self.first_step = run.starting_step if run.resumed else math.inf
        self.id = run.id
        self.wandb = wandb
        self.best = math.inf
        self.draws = find_spec("PIL") is not None
        if not self.draws and config.model.router != "dense":
            print(
                "wandb: no heat maps of loads: pillow not installed: pip install -r "
                "requirements/report.txt"
            )
        run.log_artifact(folder / "config.toml", f"config-{run.id}", "config")

    def resume(self, lines: Sequence[Line]) -> None:
        """Take the lines of earlier starts; of the last, if it was killed, wandb may lack some."""
        for line in lines:
            if line["step"] >= self.first_step:
                self.run.log(flatten_line(line), step=line["step"])
        self.recall(lines)

    def recall(self, lines: Sequence[Line]) -> None:
        """Update the summary with the least val loss of the run so far, and the last in `lines`."""
        losses = [line["val/loss"] for line in lines if "val/loss" in line]
        if not losses:
            return
        self.best = min([self.best, *losses])  # a NaN is never less, so it does not become the best
        self.run.summary.update({"val/loss_best": self.best, "val/loss_final": losses[-1]})

    def log(self, line: Line) -> None:
        """Send a line; its loads as a heat map."""
        values = flatten_line(line)
        if self.draws and "val/loads" in line:
            pixels = draw_loads(np.array(line["val/loads"]))
            caption = "rows are layers, columns experts; black 0, white twice the mean load"
            values["val/loads"] = self.wandb.Image(pixels, caption=caption)
        step = line["step"]
        if "val/loss" in line and step == self.first_step - 1:
            # a stop has postponed the evaluation, and wandb takes no more for that step
            step = self.first_step
        self.run.log(values, step=step)
        self.recall([line])

    def finish(self, exit_code: int = 0) -> None:
        """Wait, for WANDB_SECONDS at most, until all is sent.

        Args:
            exit_code: 0 means success.
        """
        self.run.finish(exit_code)


def draw_loads(loads: np.ndarray) -> np.ndarray:
    """Loads (L, E) as a grey picture, uint8; white is twice the mean of a layer or more."""
    relative = loads / loads.mean(1, keepdims=True)
    grey = (255 * np.minimum(relative / 2, 1)).astype(np.uint8)
    return np.kron(grey, np.ones((PIXELS, PIXELS), np.uint8))


def start_wandb(
    config: Config, folder: Path, id: str | None = None, tags: Sequence[str] = ()
) -> WandbTracker | None:
    """Start or resume a wandb run; None if it is "disabled" or fails, with a printed line.

    Under a wandb agent, project and id are the agent's.
    """
    if config.log.wandb == "disabled":
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
        run, wandb = init_wandb(config.log.wandb, options)
        run.define_metric("*", step_metric="tokens")
        return WandbTracker(run, wandb, config, folder)
    except Exception as error:
        print(
            f"wandb: no run ({first_line(error)}): continuing without it; metrics.jsonl has every "
            "number"
        )
        return None


def init_wandb(mode: str, options: dict[str, Any]) -> tuple[Any, Any]:
    """The result of wandb.init, and the module.

    Without an API key or a network "online" becomes "offline", with a printed line. Raises what
    wandb raises.
    """
    import wandb

    options["settings"] = wandb.Settings(
        init_timeout=WANDB_SECONDS,
        finish_timeout=WANDB_SECONDS,
        finish_timeout_raises=True,
        silent=True,
    )
    # artifacts wait with the run's other files for `wandb sync`, which another machine may do
    os.environ.setdefault("WANDB_DATA_DIR", f"{options['dir']}/wandb")
    if mode == "offline":
        return wandb.init(**options, mode="offline"), wandb
    problem = find_login_problem(wandb) or find_unsent(options)
    if not problem:
        try:
            run = wandb.init(**options, mode="online")
            print(f"wandb: {run.url}")
            return run, wandb
        except Exception as error:
            wandb.teardown()  # otherwise it refuses the id as in use
            if options.get("id") and "previously created and deleted" in str(error):
                print("wandb: the run was deleted there: logging to a new one")
                return init_wandb(mode, options | {"id": None})
            problem = f"no run online ({first_line(error)})"
    print(f"wandb: {problem}: logging offline; `wandb sync` sends it later")
    return wandb.init(**options, mode="offline"), wandb


def find_login_problem(wandb: Any) -> str:
    """Say why there is no API key; empty if there is one."""
    try:
        found = wandb.login(prompt=False, verify=False)
    except Exception as error:  # such as a key of another length
        return f"no API key ({first_line(error)})"
    return "" if found else "no API key (`wandb login`, or WANDB_API_KEY)"


def find_unsent(options: dict[str, Any]) -> str:
    """Name a part of the run that `wandb sync` has not sent; empty without one.

    Sent after what follows it, it would be taken for the run's end.
    """
    if options.get("id"):
        for part in list_matching(Path(options["dir"], "wandb"), f"offline-run-*-{options['id']}"):
            if not list_matching(part, "*.sync*"):  # synced, or syncstate of one that is cut short
                return f"{part} is not sent (remove it if a copy of it was)"
    return ""


def send_report(page: Path, mode: str, runs: Sequence[Run], table: Table) -> None:
    """Send a report as a run of its runs' group: the page, and the table of their losses.

    Prints a line if wandb fails.

    Args:
        page: report.html; it is an artifact, too.
        mode: online or offline.
        runs: of the report; the first names project and group.
        table: head and rows.
    """
    log = runs[0].config.log
    options = {"name": page.parent.name, "project": log.project, "group": log.group}
    try:
        run, wandb = init_wandb(mode, options | {"job_type": "report", "dir": str(page.parent)})
        head, rows = table
        run.log({"runs": wandb.Table(head, rows), "report": wandb.Html(page, inject=False)})
        run.log_artifact(page, f"report-{run.id}", "report")
        run.finish()
    except Exception as error:
        print(f"wandb: report not sent ({first_line(error)}): send it again, or open {page}")


def flatten_line(line: Line) -> Line:
    """The numbers of a line; NAME_of_layers becomes NAME_of_layers/00, /01 and so on.

    Other lists are left out.
    """
    numbers = {}
    for name, value in line.items():
        if name.endswith("_of_layers"):
            for layer, number in enumerate(value):
                numbers[f"{name}/{layer:02}"] = number
        elif not isinstance(value, list):
            numbers[name] = value
    return numbers
