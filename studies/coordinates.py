"""Sizes of activations over widths, with and without optim.transfer: the check by coordinates.

    python -m studies.coordinates --picture docs/transfer-coordinates.png

Models of 64 to 1024 channels take ten steps on bytes of a file of Python's library, from the same
settings, which are meant for the first width. After each step the root mean square of several
activations is taken on other bytes, over all seeds and layers. The table has the largest factor
between two widths at any step. The LM head's initial logits shrink as 1/√width by design, so its
logits have a second row, from step 5 on.
"""

import argparse
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from matplotlib import colormaps
from matplotlib.figure import Figure
from torch import Tensor

from common.command import build_parser, command, run_command
from configure.schema import Model, Optim
from model import GPT, MoE
from report.blocks import Table
from router import Routing
from runtime.optimizers import build_optimizer
from runtime.transfer import scale_initial_weights

N_STEP = 10
N_SEQUENCE = 8  # per step
LEARNED = 5  # from this step on the logits are learned ones
LR = 3e-3  # the rate of the studies at their smallest size
TEXT = Path(argparse.__file__)  # 100 KB of plain text that every Python has
BASE = Model(
    n_layer=2,
    n_head=2,
    n_embd=64,
    block_size=64,
    vocab_size=256,
    n_expert=64,  # with 8, KERN's gates differ by 2 between seeds: few draws of W
    top_k=8,
    expert_hidden=4,
    pos="rope",
    init_std=0.06,
    router="softmax-renorm",
)

Sizes = dict[str, np.ndarray]  # {activation: root mean squares (widths, steps + 1)}


def widen(base: Model, width: int) -> Model:
    """`base` at another width, with heads of its size and its ratio of K·H to the width."""
    sizes = {
        "n_embd": width,
        "n_head": base.n_head * width // base.n_embd,
        "expert_hidden": base.expert_hidden * width // base.n_embd,
    }
    return base.model_copy(update=sizes)


def make_optim(base: Model, name: str, transfer: str) -> Optim:
    """Settings of the optimizer `name`, tuned at `base`."""
    sizes = {"base_width": base.n_embd, "base_hidden": base.active_hidden}
    return Optim.model_validate({"name": name, "lr": LR, "transfer": transfer, **sizes})


def draw_windows(n_batch: int, block_size: int, seed: int) -> Tensor:
    """(n_batch, N_SEQUENCE, block_size + 1) int64 bytes at random places of TEXT."""
    text = torch.tensor(list(TEXT.read_bytes()))
    generator = torch.Generator().manual_seed(seed)
    shape = (n_batch, N_SEQUENCE, 1)
    starts = torch.randint(len(text) - block_size, shape, generator=generator)
    return text[starts + torch.arange(block_size + 1)]


@torch.no_grad()
def measure_squares(model: GPT, x: Tensor) -> dict[str, float]:
    """Mean squares of activations on tokens x (B, T), those of routers over all layers."""
    squares: dict[str, list[Tensor]] = defaultdict(list)

    def add_square(name: str, value: Tensor) -> None:
        squares[name].append(value.square().mean())

    def keep_stream(name: str, _block: object, _inputs: object, output: tuple) -> None:
        x, y, _ = output
        add_square(name, x.flatten(0, -2) + y.flatten(0, -2))

    def keep_routing(_router: object, _inputs: object, routing: Routing) -> None:
        add_square("router logits", routing.logits)
        add_square("router scores", routing.scores)
        add_square("gates", routing.weights)

    hooks = []
    for number, block in enumerate(model.blocks, 1):
        keep = partial(keep_stream, f"after block {number}")
        hooks.append(block.register_forward_hook(keep))
        if isinstance(block.mlp, MoE):
            hooks.append(block.mlp.router.register_forward_hook(keep_routing))
    stream, _ = model.hidden(x)
    for hook in hooks:
        hook.remove()
    add_square("logits", model.logits(stream))
    return {name: torch.stack(values).mean().item() for name, values in squares.items()}


def train_and_measure(config: Model, optim: Optim, seed: int) -> list[dict[str, float]]:
    """Mean squares before and after each of N_STEP steps."""
    torch.manual_seed(seed)
    model = GPT(config)
    scale_initial_weights(model, optim)
    optimizer = build_optimizer(model, optim)
    batches = draw_windows(N_STEP, config.block_size, seed)
    probe = draw_windows(1, config.block_size, seed=-1)[0, :, :-1]
    squares = [measure_squares(model, probe)]
    for batch in batches:
        loss = model(batch[:, :-1], batch[:, 1:]).loss
        assert loss is not None
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = optim.lr * group["lr_ratio"]
        optimizer.step(torch.ones(()), torch.zeros(()))
        optimizer.zero_grad()
        squares.append(measure_squares(model, probe))
    return squares


def compare_widths(base: Model, optim: Optim, widths: Sequence[int], n_seed: int) -> Sizes:
    """Sizes of activations at each width and step, over seeds."""
    sizes = defaultdict(list)
    for width in widths:
        runs = [train_and_measure(widen(base, width), optim, seed) for seed in range(n_seed)]
        for name in runs[0][0]:
            mean_squares = np.zeros(N_STEP + 1)
            for run in runs:
                mean_squares += [step[name] / n_seed for step in run]
            sizes[name].append(np.sqrt(mean_squares))
    return {name: np.array(rows) for name, rows in sizes.items()}


def find_spreads(sizes: Sizes) -> dict[str, float]:
    """The largest factor between two widths at any step, of each activation."""
    spreads = {}
    for name, values in sizes.items():
        factors = values.max(0) / values.min(0)  # (steps + 1,)
        spreads[name] = float(factors.max())
        if name == "logits":
            spreads[f"logits, from step {LEARNED}"] = float(factors[LEARNED:].max())
    return spreads


def draw(sizes: dict[str, Sizes], widths: Sequence[int], file: Path) -> None:
    """A row of panels with each setting of optim.transfer, a panel for each activation."""
    names = list(sizes["mup"])
    figure = Figure(figsize=(2.4 * len(names), 4.8), layout="constrained")
    panels = figure.subplots(len(sizes), len(names), sharex=True, sharey="col", squeeze=False)
    colours = colormaps["viridis"](np.linspace(0, 0.9, N_STEP + 1))
    for row, (transfer, by_name) in zip(panels, sizes.items(), strict=True):
        row[0].set_ylabel(f'transfer = "{transfer}"\nroot mean square')
        for axes, name in zip(row, names, strict=True):
            for step in range(N_STEP + 1):
                label = f"step {step}" if step in (0, N_STEP) else None
                axes.plot(widths, by_name[name][:, step], color=colours[step], label=label)
            axes.set_xscale("log", base=2)
            axes.set_yscale("log", base=2)
    for axes, name in zip(panels[0], names, strict=True):
        axes.set_title(name)
    for axes in panels[-1]:
        axes.set_xlabel("width")
    panels[0, 0].legend()
    figure.savefig(file, dpi=90)


@command
def main(argv: Sequence[str] | None = None) -> None:
    """Print the table, and draw the picture of the first router under AdamW."""
    parser = build_parser("studies.coordinates", __doc__)
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128, 256, 512, 1024])
    parser.add_argument("--routers", nargs="+", default=["softmax-renorm", "kern"])
    parser.add_argument("--seeds", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--picture", type=Path, help="a PNG file to write")
    args = parser.parse_args(argv)
    head_size = BASE.n_embd // BASE.n_head
    for width in args.widths:
        if width < head_size or width % head_size:
            raise ValueError(f"--widths {width}: expected a multiple of {head_size}, a head's size")
    table = Table(["router", "optimizer", "activation", "mup", "none"])
    for router in args.routers:
        base = BASE.model_copy(update={"router": router})
        for name in ("adamw", "muon"):
            sizes = {}
            for transfer in ("mup", "none"):
                optim = make_optim(base, name, transfer)
                sizes[transfer] = compare_widths(base, optim, args.widths, args.seeds)
            if args.picture and router == args.routers[0] and name == "adamw":
                draw(sizes, args.widths, args.picture)
            spreads = {transfer: find_spreads(sizes[transfer]) for transfer in sizes}
            for activation in spreads["mup"]:
                row = {"router": router, "optimizer": name, "activation": activation}
                for transfer, by_activation in spreads.items():
                    row[transfer] = f"{by_activation[activation]:.2f}"
                table.rows.append(row)
    print(table.to_text())


if __name__ == "__main__":
    run_command(main)
