"""Folders of runs that were never trained: a config, invented metrics and, if wanted, a
checkpoint's manifest.
"""

import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import configure
from configure.schema import KEYS, Mix
from report.frame import Group, group_runs
from runtime import checkpoint
from runtime.metrics import Metrics
from runtime.runs import Run, format_manifest

CONFIG = Path(__file__).parents[1] / "config"


def make_run(
    folder: Path,
    *overrides: str,
    file: Path = CONFIG / "small.toml",
    **shape: Any,
) -> Path:
    """Make a run's folder, of kern and seed 0; `shape` goes to `metric_lines`."""
    config = configure.load(
        file, ["run.seed=0", "model.router=kern", "train.dtype=float16", *overrides]
    )
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(configure.dumps(config))
    metrics = Metrics(folder, -1)
    for line in metric_lines(config, **shape):
        metrics.log(**line)
    metrics.close()
    return folder


def make_seeds(
    folder: Path,
    ends: dict[str, float],
    seeds: int = 3,
    overrides: Sequence[str] = (),
    **shape: Any,
) -> list[Path]:
    """Runs `folder`/ROUTER + SEED of each router in `ends`, which says the loss at its end."""
    return [
        make_run(
            folder / f"{router}{seed}",
            f"run.seed={seed}",
            f"model.router={router}",
            *overrides,
            end=end,
            **shape,
        )
        for router, end in ends.items()
        for seed in range(seeds)
    ]


def make_curves(folder: Path, seeds: int = 4) -> list[Path]:
    """Runs of two routers at three gate norms; tanh's loss is 0.05 higher than kern's."""
    runs = []
    for x, end in ((1, 2.3), (2, 2.1), (8, 2.2)):
        ends = {"kern": end, "tanh": end + 0.05}
        runs += make_seeds(folder / str(x), ends, seeds, [f"model.gate_norm={x}"], noise=0.003 * x)
    return runs


def read_series(folder: Path, name: str = "val/loss") -> dict[int, float]:
    """{step: value} of a name in a run's metrics.jsonl, without the report's reader."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line[name] for line in lines if name in line}


def loss_of(folder: Path, step: int = -1) -> float:
    """val/loss of a run by `read_series`, at the end by default."""
    losses = read_series(folder)
    return losses[max(losses) if step < 0 else step]


def change_lines(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Call `change` on each line of a run's metrics.jsonl; a line that is then empty leaves."""
    file = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines:
        change(line)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines if line))


def load_groups(*folders: Path, key: str | None = None) -> list[Group]:
    """The groups that a report has of these runs."""
    return group_runs([*map(Run, folders)], key)[0]


def with_other(config: configure.Config, key: str) -> configure.Config:
    """`config` with another valid value of `key`."""
    section, name = key.split(".")
    part = getattr(config, section)
    now, schema = getattr(part, name), KEYS[key]
    if "enum" in schema:
        # the last one: "auto" keeps what the run has
        other = next(value for value in reversed(schema["enum"]) if value != now)
    elif schema["type"] == "boolean":
        other = not now
    elif schema["type"] == "object":
        other = Mix({"other": 1.0})
    elif schema["type"] == "string":
        other = "4" if key == "train.keep_steps" else f"{now}-other"
    else:
        other = now // 2 if schema["type"] == "integer" else now / 2
        if other == now:
            other = now + 1
    return config.model_copy(update={section: part.model_copy(update={name: other})})


def metric_lines(
    config: configure.Config,
    end: float = 2.0,
    noise: float = 0.0,
    points: int = 10,
    until: float = 1.0,
    without: Sequence[str] = (),
) -> Iterator[dict[str, Any]]:
    """Lines of a metrics.jsonl, with `points` evaluations after step 0 of a run that trained the
    part `until`.

    `end` is the last validation loss, which seeds move alike for all routers; `noise` deviates
    this run's alone. Keys that begin with `without` are left out.
    """
    model, steps = config.model, config.train.max_steps
    own = np.random.default_rng([config.run.seed, zlib.crc32(model.router.encode())])
    shift = 0.1 * (config.run.seed % 2) + noise * own.standard_normal()
    shares = own.dirichlet(np.ones(model.n_expert), model.n_layer)
    if model.router == "dense":
        without = (*without, "router/", "val/load", "val/dead", "val/gate")
    for i in range(round(points * until) + 1):
        step, left = steps * i // points, 1 - i / points
        at = {"step": step, "tokens": step * config.train.batch_size * model.block_size}
        loss = end + 3 * left**4 + shift
        log = {
            "train/loss": loss + 0.1,
            "perf/tokens_per_sec": 1000.0,
            "router/load_imbalance": 4.0,
            "router/entropy": 3.0,
            "router/gate_norm": 2.0,
        }
        if model.router.startswith("kern"):
            log["router/gamma"] = 1.5
        val = {
            "val/loss": loss,
            "val/gate_norm": 2.0,
            "val/load_imbalance": 2.0,
            "val/dead_experts": 5,
            "val/loads": np.floor(1000 * shares),
        }
        for values in (log, val) if i else (val,):
            kept = {key: values[key] for key in values if not key.startswith(tuple(without))}
            yield at | kept


def add_checkpoint(folder: Path, step: int = 100, **facts: str) -> Path:
    """Add a checkpoint's manifest with those facts to a run; returns its folder."""
    path = checkpoint.folder_of(folder / "checkpoints", step)
    path.mkdir(parents=True)
    body = {"step": step, "files": {".metadata": {"bytes": 1, "sha256": "0"}}, "facts": facts}
    (path / checkpoint.MANIFEST).write_text(format_manifest(body))
    return path
