"""Training a tiny run in a test, and what it leaves behind."""

from typing import NamedTuple

import train
from runtime import checkpoint, folder
from runtime.metrics import read


def run(config):
    """Train, and read the lines of metrics.jsonl."""
    train.train(config)
    return read(folder.path_of(config) / "metrics.jsonl")


def column(lines, key):
    return [line[key] for line in lines if key in line]


def checkpoints(config):
    return folder.path_of(config) / "checkpoints"


def steps(config):
    return checkpoint.steps(checkpoints(config))


class End(NamedTuple):
    """What two equal runs have in common at their ends, bit for bit."""

    lines: list[dict]  # of metrics.jsonl, but for times
    tensors: dict  # sha256 of the files that hold weights, AdamW's moments and selection biases
    facts: dict  # counters, loss scale, history of losses


def end(config):
    lines = [
        {key: value for key, value in line.items() if not key.startswith("perf/")}
        for line in read(folder.path_of(config) / "metrics.jsonl")
    ]
    manifest = checkpoint.verify(checkpoint.folder_of(checkpoints(config), config.train.max_steps))
    tensors = {name: file["sha256"] for name, file in manifest["files"].items() if name != ".metadata"}
    return End(lines, tensors, manifest["facts"])
