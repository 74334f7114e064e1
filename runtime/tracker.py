"""Send a run to Weights & Biases (log.wandb): the lines of metrics.jsonl, pictures of expert loads and a summary.

docs/wandb.md lists the names. Nothing here can stop a run: a failure costs one printed line.
"""

import math
import netrc
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import numpy as np
import torch
from tqdm import tqdm

from common.text import first_line
from configure import Config
from runtime.metrics import imbalance_and_dead

Line = dict[str, Any]  # of metrics.jsonl: numbers, or lists of them by layer, expert or window

WANDB_SECONDS = 30  # to start a run, and to finish one; wandb's own default waits for a network for ever
LOADS = ["1/8", "1/4", "1/2", "1", "2", "4", "8"]  # ticks, the same in all pictures so that runs compare
BINS = np.r_[0, 1e-12, 2 ** ((np.arange(24) - 11.5) / 4), np.inf]  # of histograms: dead, then quarter octaves


class Tracker:
    """Sends lines of metrics.jsonl to a wandb run. Raises whatever wandb raises, except in drawing pictures."""

    name = "wandb"

    def __init__(self, run: Any, to_image: Callable, to_table: Callable, folder: Path, first_layer: int = 0) -> None:
        """Take what wandb.init returned, wandb.Image, wandb.Table, the run's folder, the first layer with experts."""
        self.remedy = f"; `wandb sync {folder}/wandb/*run-*` sends what wandb has got of them"
        self.run, self.id, self.to_image, self.to_table = run, run.id, to_image, to_table
        self.best, self.draws, self.first_layer = math.inf, True, first_layer

    def recall(self, lines: Sequence[Line]) -> None:
        """Update the summary with `lines`: the least val loss of the run so far, and the last."""
        losses = [line["val/loss"] for line in lines if "val/loss" in line]
        self.best = min([self.best, *losses])  # a NaN is never less, so it does not become the best
        if losses:
            self.run.summary.update({"val/loss_best": self.best, "val/loss_final": losses[-1]})

    def log(self, line: Line) -> None:
        """Send one line, with pictures if it has `val/loads`. If drawing fails, print one line and stop drawing."""
        values = flatten_line(line, self.first_layer)
        if self.draws and "val/loads" in line:
            try:
                pictures = draw_loads(line, self.first_layer)
                values |= {name: self.to_image(pixels) for name, pixels in pictures.items()}
            except Exception as error:
                self.draws = False
                install = "; pip install -r requirements-report.txt" * isinstance(error, ImportError)
                tqdm.write(f"wandb: no pictures of loads ({first_line(error)}{install}); arrays/ has the loads")
        self.run.log(values, step=line["step"])
        self.recall([line])

    def summarize(self, values: Line, name: str, head: list[str], rows: list[list[str]], step: int) -> None:
        """Add results after training: `values` to the summary, and a table called `name` at `step`."""
        self.run.summary.update(values)
        self.run.log({name: self.to_table(columns=head, data=rows)}, step=step)

    def finish(self, exit_code: int = 0) -> None:
        """Wait, for WANDB_SECONDS at most, until everything is sent; an `exit_code` other than 0 means a failed run."""
        self.run.finish(exit_code)


def start_wandb(config: Config, folder: Path, id: str | None = None, tags: Sequence[str] = ()) -> Tracker | None:
    """Start or resume a wandb run; None if log.wandb is "disabled" or wandb fails, which costs one printed line.

    Without an API key or a network "online" becomes "offline". Under a wandb agent, project and id are the agent's.

    Args:
        config: the run's.
        folder: the run's folder; wandb's files go to `folder`/wandb.
        id: of the wandb run to resume; by default a new run.
        tags: of the run in wandb.
    """
    mode = config.log.wandb
    if mode == "disabled":
        return None
    try:
        import wandb

        if mode == "online" and not _has_wandb_key(os.environ.get("WANDB_BASE_URL") or wandb.Settings().base_url):
            print("wandb: no API key (`wandb login`, or WANDB_API_KEY): logging offline; `wandb sync` sends it later")
            mode = "offline"
        try:
            run = _init_wandb(wandb, mode, config, folder, id, tags)
        except Exception as error:
            if mode == "offline":
                raise
            print(f"wandb: no run online ({first_line(error)}): logging offline; `wandb sync` sends it later")
            with suppress(Exception):
                wandb.teardown()  # otherwise it refuses the id as in use
            run = _init_wandb(wandb, "offline", config, folder, id, tags)
        return Tracker(run, wandb.Image, wandb.Table, folder, config.model.n_dense_layer)
    except Exception as error:
        print(f"wandb: no run ({first_line(error)}): continuing without it; metrics.jsonl has every number")
        return None


def _init_wandb(wandb: Any, mode: str, config: Config, folder: Path, id: str | None, tags: Sequence[str]) -> Any:
    """The wandb run. Raises whatever wandb raises."""
    bounds = {"init_timeout": WANDB_SECONDS, "finish_timeout": WANDB_SECONDS, "finish_timeout_raises": True}
    names = {"name": config.run.name, "group": config.log.group, "tags": tags, "job_type": "train"}
    if not os.environ.get("WANDB_SWEEP_ID"):  # an agent has set project and id, and wandb refuses others
        names |= {"project": config.log.project, "id": id, "resume": "allow"}
    settings = wandb.Settings(**bounds, silent=True)
    run = wandb.init(mode=mode, dir=str(folder), config=config.model_dump(), settings=settings, **names)
    run.define_metric("*", step_metric="tokens")
    return run


def _has_wandb_key(base_url: str) -> bool:
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(urlparse(base_url).hostname or "") is not None
    except (OSError, netrc.NetrcParseError):
        return False


def flatten_line(line: Line, first_layer: int = 0) -> Line:
    """The numbers of a line; lists by layer become `router/gamma/layer_00` and so on, beginning at `first_layer`.

    `router/loads` becomes the load imbalance and the dead experts of each layer. Other lists are left out.
    """
    values = {name: value for name, value in line.items() if not isinstance(value, list)}
    layers = {name.removesuffix("_of_layers"): line[name] for name in line if name.endswith("_of_layers")}
    if "router/loads" in line:
        imbalance, dead = imbalance_and_dead(torch.tensor(line["router/loads"], dtype=torch.float64))
        layers |= {"router/load_imbalance": imbalance.tolist(), "router/dead_experts": dead.tolist()}
    for name, of_layers in layers.items():
        values |= {f"{name}/layer_{layer:02}": value for layer, value in enumerate(of_layers, first_layer)}
    return values


def draw_loads(line: Line, first_layer: int = 0) -> dict[str, np.ndarray]:
    """Draw `val/loads` (L, E), each layer over its mean, as a heat map and as one histogram per layer.

    The first row is layer `first_layer`.

    Returns:
        {name: pixels (height, width, 3), uint8}. Scales are fixed, so that pictures of several runs compare.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    loads = np.array(line["val/loads"])
    L, E = loads.shape
    relative = loads / loads.mean(1, keepdims=True)
    title = f"step {line['step']:,}: busiest expert {relative.max():.1f} times its layer's mean, "
    title += f"{(loads == 0).sum():,} of {loads.size:,} dead"
    size = np.clip((2 + E / 10, 1.5 + 0.4 * L), (8, 3.5), (16, 13))  # inches
    pictures = {}
    for name, draw in {"val/load_heatmap": _draw_heatmap, "val/load_histogram": _draw_histograms}.items():
        figure = Figure(tuple(size), layout="constrained")  # without pyplot there is nothing to close
        axes, ticks = figure.add_subplot(ylabel="layer"), range(0, L, 1 + L // 40)
        axes.set_yticks(ticks, [str(first_layer + row) for row in ticks])
        draw(axes, relative)
        figure.suptitle(title, fontsize="medium")
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        pictures[name] = np.asarray(canvas.buffer_rgba())[..., :3]
    return pictures


def _draw_heatmap(ax: Any, relative: np.ndarray) -> None:
    # The black background shows where an expert is dead: a logarithmic scale leaves 0 out.
    image = ax.imshow(relative, "coolwarm", norm="log", vmin=1 / 8, vmax=8, aspect="auto", interpolation="none")
    bar = ax.figure.colorbar(image, extend="both", label="load over mean load; black: dead")
    bar.set_ticks(2.0 ** np.arange(-3, 4), labels=LOADS)
    bar.minorticks_off()
    ax.set(xlabel="expert", facecolor="black")
    ax.locator_params(axis="x", integer=True)


def _draw_histograms(ax: Any, relative: np.ndarray) -> None:
    counts = np.array([np.histogram(row, BINS)[0] for row in relative])
    bars = np.insert(0.9 * counts / counts.max(), 1, 0, axis=1)  # a gap after the dead ones
    edges = np.r_[-3.75, -3.45, (np.arange(26) - 12.5) / 4]  # octaves
    for layer, heights in enumerate(bars):
        foot = layer + 0.45  # the y-axis points down
        ax.stairs(foot - heights, edges, baseline=foot, fill=True, color="#0072B2")
        ax.axhline(foot, color="0.8", linewidth=0.8, zorder=0)
    ax.axvline(0, color="0.6", linewidth=0.8, zorder=0)
    ax.set_xticks([-3.6, *range(-3, 4)], ["dead", *LOADS])
    ax.set(xlabel="load over mean load; outermost: 1/8 and less, 8 and more", ylim=(len(bars) - 0.5, -0.5))
    ax.set_ylabel(f"layer (highest bar: {counts.max()} experts)")
