"""A run in Weights & Biases, where it is asked for: the lines of metrics.jsonl, also layer by layer, pictures of the
experts' loads and a summary. docs/wandb.md has the names."""

import math
import netrc
import os
from contextlib import suppress
from urllib.parse import urlparse

import numpy as np
import torch
from tqdm import tqdm

from runtime.metrics import imbalance_and_dead, reason

WANDB_SECONDS = 30  # to begin a run and again to end one; a client left alone waits for a network without end
LOADS = ["1/8", "1/4", "1/2", "1", "2", "4", "8"]  # ticks of pictures, the same in all of them so that runs compare


class Tracker:
    """Sends the lines of a metrics.jsonl to a run of wandb, whose `id` it has. Raises whatever wandb raises; pictures
    that cannot be drawn cost one printed line, and the numbers go on."""

    def __init__(self, run, to_image, to_table=None):
        """`run` as wandb.init gives it; `to_image` is wandb.Image, `to_table` wandb.Table."""
        self.run, self.id, self.to_image, self.to_table = run, run.id, to_image, to_table
        self.best, self.draws = math.inf, True

    def recall(self, lines):
        """Bring the summary up to `lines`: the least val loss of the run so far, and the last one."""
        losses = [line["val/loss"] for line in lines if "val/loss" in line]
        self.best = min([self.best, *losses])  # a NaN is not less than a number before it
        if losses:
            self.run.summary.update({"val/loss_best": self.best, "val/loss_final": losses[-1]})

    def log(self, line):
        values = numbers(line)
        if self.draws and "val/loads" in line:
            try:
                values |= {name: self.to_image(pixels) for name, pixels in pictures(line).items()}
            except Exception as error:
                self.draws = False
                tqdm.write(
                    f"wandb: no pictures of loads ({reason(error)}): on without them, metrics.jsonl has the loads"
                )
        self.run.log(values, step=line["step"])
        self.recall([line])

    def summarize(self, values, name, head, rows, step):
        """What was found after training: `values` into the summary, and a table at `step`, after all lines."""
        self.run.summary.update(values)
        self.run.log({name: self.to_table(columns=head, data=rows)}, step=step)

    def finish(self):
        self.run.finish()


def start_wandb(config, folder, id=None, tags=()):
    """A Tracker, or None if `log.wandb` is "disabled" or wandb fails. "online" without a key or a network becomes
    "offline". Whatever fails costs a printed line, never the run: its numbers are in metrics.jsonl.

    With the `id` of a run that there is, that one goes on. Under an agent of wandb's own the run is the agent's."""
    mode = config.log.wandb
    if mode == "disabled":
        return None
    try:
        import wandb

        if mode == "online" and not _has_wandb_key(os.environ.get("WANDB_BASE_URL") or wandb.Settings().base_url):
            print("wandb: no API key (`wandb login`, or WANDB_API_KEY): logging offline; `wandb sync` sends it later")
            mode = "offline"
        try:
            run = _begin(wandb, mode, config, folder, id, tags)
        except Exception as error:
            if mode == "offline":
                raise
            print(f"wandb: no run online ({reason(error)}): logging offline, `wandb sync` sends it later")
            with suppress(Exception):
                wandb.teardown()  # it would say that the id is in use
            run = _begin(wandb, "offline", config, folder, id, tags)
        return Tracker(run, wandb.Image, wandb.Table)
    except Exception as error:
        print(f"wandb: no run ({reason(error)}): on without it, metrics.jsonl has every number")
        return None


def _begin(wandb, mode, config, folder, id, tags):
    bounds = {"init_timeout": WANDB_SECONDS, "finish_timeout": WANDB_SECONDS, "finish_timeout_raises": True}
    names = {"name": config.run.name, "group": config.log.group, "tags": tags, "job_type": "train"}
    if not os.environ.get("WANDB_SWEEP_ID"):  # else the agent has set project and id, and wandb takes no other
        names |= {"project": config.log.project, "id": id, "resume": "allow"}
    settings = wandb.Settings(**bounds, silent=True)
    run = wandb.init(mode=mode, dir=str(folder), config=config.model_dump(), settings=settings, **names)
    run.define_metric("*", step_metric="tokens")
    return run


def _has_wandb_key(base_url):
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(urlparse(base_url).hostname) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def numbers(line):
    """What a tracker plots of a line of metrics.jsonl: its numbers, and of lists by layer `router/gamma/layer_00` and
    so on; also load imbalance and dead experts of each layer, by its loads."""
    values = {name: value for name, value in line.items() if not isinstance(value, list)}
    layers = {name.removesuffix("_of_layers"): line[name] for name in line if name.endswith("_of_layers")}
    if "router/loads" in line:
        imbalance, dead = imbalance_and_dead(torch.tensor(line["router/loads"], dtype=torch.float64))
        layers |= {"router/load_imbalance": imbalance.tolist(), "router/dead_experts": dead.tolist()}
    for name, of_layers in layers.items():
        values |= {f"{name}/layer_{layer:02}": value for layer, value in enumerate(of_layers)}
    return values


def pictures(line):
    """{name: pixels (height, width, 3), uint8} of a line with `val/loads`, each layer's over their mean."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    loads = np.array(line["val/loads"])
    relative = loads / loads.mean(1, keepdims=True)
    found = {}
    for name, draw in (("val/load_heatmap", _draw_heatmap), ("val/load_histogram", _draw_histograms)):
        figure = Figure(layout="constrained")  # pyplot has no hold on it, so nothing is left to close
        draw(figure, relative)
        figure.suptitle(
            f"step {line['step']:,}: busiest expert {relative.max():.1f} times its layer's mean, "
            f"{(loads == 0).sum():,} of {loads.size:,} dead",
            fontsize="medium",
        )
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        found[name] = np.asarray(canvas.buffer_rgba())[..., :3]
    return found


def _draw_heatmap(figure, relative):
    """Layers by experts; the same colour is the same load in every run."""
    L, E = relative.shape
    figure.set_size_inches(min(max(8, 2 + E / 10), 16), min(max(3.5, 1.5 + L / 4), 12))
    ax = figure.add_subplot(facecolor="black")  # seen through what no load leaves out
    image = ax.imshow(
        np.ma.masked_equal(relative, 0), "coolwarm", norm="log", vmin=1 / 8, vmax=8, aspect="auto", interpolation="none"
    )
    bar = figure.colorbar(image, extend="both", label="load over mean load; black: dead")
    bar.set_ticks(2.0 ** np.arange(-3, 4), labels=LOADS)
    bar.minorticks_off()
    ax.set(xlabel="expert", ylabel="layer", yticks=range(0, L, 1 + L // 40))
    ax.locator_params(axis="x", integer=True)


def _draw_histograms(figure, relative):
    """A row a layer: how many of its experts have which load, in steps of a quarter of an octave."""
    L, edges = len(relative), (np.arange(26) - 12.5) / 4
    figure.set_size_inches(8, min(max(3.5, 1.5 + 0.4 * L), 14))
    dead = (relative == 0).sum(1)
    alive = [np.rint(4 * np.log2(row[row > 0])).clip(-12, 12).astype(int) for row in relative]
    counts = np.array([np.bincount(bins + 12, minlength=25) for bins in alive])
    most = max(counts.max(), dead.max())
    ax = figure.add_subplot(ylim=(L - 0.5, -0.5), xlabel="load over mean load; outermost: 1/8 and less, 8 and more")
    for layer in range(L):
        foot = layer + 0.45
        ax.stairs(foot - 0.9 * counts[layer] / most, edges, baseline=foot, fill=True, color="#0072B2")
        ax.bar(-3.6, -0.9 * dead[layer] / most, width=0.25, bottom=foot, color="black")
        ax.axhline(foot, color="0.8", linewidth=0.8, zorder=0)
    ax.axvline(0, color="0.6", linewidth=0.8, zorder=0)
    ax.set_xticks([-3.6, *range(-3, 4)], ["dead", *LOADS])
    ax.set(ylabel=f"layer (highest bar: {most} experts)", yticks=range(0, L, 1 + L // 40))
