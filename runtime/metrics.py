"""Where a run's numbers go: runs/<name>/metrics.jsonl always, Weights & Biases when asked, and routing numbers in
words."""

import json
import netrc
import os
from pathlib import Path
from urllib.parse import urlparse

import torch

from runtime import RunError


class Metrics:
    """One JSON object a line, `step` and `tokens` (seen in training so far) in each. Rank 0 alone has one."""

    def __init__(self, folder, resume_step, tracker=None):
        """`resume_step`: lines after this step, left by a run that was killed later, are dropped."""
        self.path = Path(folder, "metrics.jsonl")
        kept = [line for line in read(self.path) if line["step"] <= resume_step]
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(line) + "\n" for line in kept))
        os.replace(temporary, self.path)
        self.file = self.path.open("a")
        self.tracker = tracker

    def log(self, step, tokens, **values):
        line = {"step": step, "tokens": tokens} | {name: _number(value) for name, value in values.items()}
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()
        if self.tracker:
            self.tracker.log(line, step=step)

    def close(self):
        self.file.close()
        if self.tracker:
            self.tracker.finish()


def read(path):
    """The lines of a metrics.jsonl as dicts; none if it is not there. A last line cut short by a kill is left out."""
    lines = Path(path).read_text().splitlines() if Path(path).is_file() else []
    records = []
    for number, line in enumerate(lines):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            if number != len(lines) - 1:
                raise RunError(f"{path}, line {number + 1} is not JSON; remove that line") from None
    return records


def start_wandb(mode, project, name, folder, config):
    """A wandb run, or None if `mode` is "disabled". "online" without a key or a network becomes "offline", in one
    line."""
    if mode == "disabled":
        return None
    import wandb

    if mode == "online" and not _has_wandb_key(os.environ.get("WANDB_BASE_URL") or wandb.Settings().base_url):
        print("wandb: no API key (`wandb login`, or set WANDB_API_KEY): logging offline; `wandb sync` sends it later")
        mode = "offline"
    settings = wandb.Settings(init_timeout=30, silent=True)
    arguments = {"project": project, "name": name, "dir": str(folder), "config": config, "settings": settings}
    try:
        run = wandb.init(mode=mode, **arguments)
    except wandb.errors.Error as error:
        if mode == "offline":
            raise
        reason = str(error).splitlines()[0]
        print(f"wandb: cannot be reached ({reason}): logging offline, `wandb sync` sends it later")
        run = wandb.init(mode="offline", **arguments)
    run.define_metric("*", step_metric="tokens")
    return run


def _has_wandb_key(base_url):
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(urlparse(base_url).hostname) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def load_metrics(loads):
    """Expert loads (L, E), counts, in two numbers; empty for a dense model (L = 0).

    `load_imbalance` is the busiest expert's load over the mean load, averaged over layers: 1 when balanced, E / K at
    worst. `dead_experts` is the number, over all layers, of experts that no token chose.
    """
    if not len(loads):
        return {}
    return {"load_imbalance": (loads.amax(1) / loads.double().mean(1)).mean(), "dead_experts": (loads == 0).sum()}


def _number(value):
    return value.item() if isinstance(value, torch.Tensor) else value
