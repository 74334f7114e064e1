"""Read runs' files and say what came out: a table on the terminal, loss curves as a PNG.

python -m scripts.report runs/quickstart-*  [--out runs/report.png]
"""

import argparse
import math
import statistics
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

import configure
from model import count_parameters
from runtime.metrics import read

COLUMNS = ("run", "router", "total", "active", "step", "val loss", "tokens/s", "load imbalance")


def load(folder):
    """(Config, metrics lines) of a run. Raises ValueError if `folder` holds no evaluated run."""
    if not (folder / "config.toml").is_file():
        raise ValueError(f"{folder}: no config.toml, so not a run; give folders such as runs/quickstart-kern")
    lines = read(folder / "metrics.jsonl")
    if not any("val/loss" in line for line in lines):
        raise ValueError(f"{folder}: not evaluated yet; go on with train.py, or leave it out")
    return configure.load(folder / "config.toml"), lines


def row(config, lines):
    """The table's cells, COLUMNS in order. tokens/s is the median over the run; load imbalance is that of the last
    validation: the busiest expert's load over the mean, averaged over layers."""
    total, active = count_parameters(config.model)
    last = [line for line in lines if "val/loss" in line][-1]
    speeds = [line["perf/tokens_per_sec"] for line in lines if "perf/tokens_per_sec" in line]
    return (
        config.run.name,
        config.model.router,
        f"{total / 1e6:.2f}M",
        f"{active / 1e6:.2f}M",
        f"{last['step']:,}" + ("" if last["step"] == config.train.max_steps else f" of {config.train.max_steps:,}"),
        f"{last['val/loss']:.4f}",
        f"{statistics.median(speeds):,.0f}" if speeds else "-",
        f"{last['val/load_imbalance']:.2f}" if "val/load_imbalance" in last else "-",
    )


def table(rows):
    """Aligned text: the first two columns to the left, numbers to the right."""
    rows = [COLUMNS, *rows]
    widths = [max(len(cells[i]) for cells in rows) for i in range(len(COLUMNS))]
    lines = [
        "  ".join(
            cell.ljust(w) if i < 2 else cell.rjust(w) for i, (cell, w) in enumerate(zip(cells, widths, strict=True))
        )
        for cells in rows
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def draw(runs, path):
    """Validation loss (lines with dots) and training loss (faint) over training tokens."""
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    shown = []  # losses that must lie in the picture: not the first, steep quarter
    for config, lines in runs:
        val = [(line["tokens"] / 1e6, line["val/loss"]) for line in lines if "val/loss" in line]
        train = [(line["tokens"] / 1e6, line["train/loss"]) for line in lines if "train/loss" in line]
        (curve,) = axes.plot(*zip(*val, strict=True), "o-", markersize=3, label=f"{config.run.name}: {val[-1][1]:.4f}")
        if train:
            axes.plot(*zip(*train, strict=True), color=curve.get_color(), alpha=0.25, linewidth=0.8)
        shown += [loss for _, loss in val[len(val) // 4 :] if math.isfinite(loss)]
    if shown:
        margin = 0.1 * (max(shown) - min(shown)) or 0.1
        axes.set_ylim(min(shown) - margin, max(shown) + margin)
    axes.set(xlabel="training tokens, millions", ylabel="loss, nats per token")
    axes.set_title("Validation loss (dots) and training loss (faint)")
    axes.grid(alpha=0.3)
    axes.legend(title="run: last validation loss")
    figure.savefig(path, dpi=150)


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m scripts.report", description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path, help="run folders, such as runs/quickstart-*")
    parser.add_argument("--out", type=Path, default=Path("runs/report.png"), help="picture (default: %(default)s)")
    args = parser.parse_args(argv)
    try:
        runs = [load(folder) for folder in args.runs]
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(table(row(*run) for run in runs))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    try:
        draw(runs, args.out)
    except ValueError as error:
        print(f"error: {args.out}: {error}", file=sys.stderr)
        return 2
    print(f"loss curves: {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
