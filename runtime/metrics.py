"""Where a run's numbers go: runs/<name>/metrics.jsonl always, Weights & Biases when asked, and routing numbers in
words."""

import json
import netrc
import os
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlparse

import torch
from tqdm import tqdm

from runtime import RunError, writing

WANDB_SECONDS = 30  # to begin a run and again to end one; a client left alone waits for a network without end


class Metrics:
    """One JSON object a line, `step` and `tokens` (seen in training so far) in each. Rank 0 alone has one. Values are
    numbers, or lists of them by layer, expert or window, which a tracker does not get.

    Infinite and NaN values are written `Infinity` and `NaN`, as Python's json does and reads. A tracker that fails
    is dropped with one printed line. Where the file cannot be written methods raise RunError, or, if `on_error` is
    "warn", print it once and try again with the next line; `close` raises it in any case.
    """

    def __init__(self, folder, resume_step, tracker=None, on_error="stop"):
        """`resume_step`: lines after this step, left by a run that was killed later, are dropped; below 0 all are, into
        metrics.old.jsonl. Of lines of the same step and names the last is kept."""
        self.path = Path(folder, "metrics.jsonl")
        self.tracker, self.on_error, self.waiting = tracker, on_error, b""
        kept = {(line["step"], *line): line for line in read(self.path) if line["step"] <= resume_step}
        with writing(self.path):
            temporary = self.path.with_suffix(".tmp")
            with temporary.open("w") as file:
                file.writelines(json.dumps(line) + "\n" for line in kept.values())
                file.flush()
                os.fsync(file.fileno())
            old = self.path.with_suffix(".old.jsonl")
            if resume_step < 0 and _size(self.path) > _size(old):
                os.replace(self.path, old)
            os.replace(temporary, self.path)
            self.file = self.path.open("ab", buffering=0)

    def log(self, step, tokens, **values):
        line = {"step": step, "tokens": tokens} | {name: _number(value) for name, value in values.items()}
        self._write(json.dumps(line).encode() + b"\n")
        self._tell("log", {name: value for name, value in line.items() if not isinstance(value, list)}, step=step)

    def sync(self):
        """Every line so far outlives a power failure. Comes before a checkpoint, whose steps are not trained again."""
        self._write(b"", sync=True)

    def close(self):
        self.on_error = "stop"
        self.sync()
        self.file.close()
        self._tell("finish")

    def _write(self, lines, sync=False):
        """Lines that wait, and these; no line at all rather than half of one."""
        lines, length = self.waiting + lines, os.fstat(self.file.fileno()).st_size
        try:
            with writing(self.path):
                rest = memoryview(lines)
                while rest:
                    rest = rest[self.file.write(rest) :]
                if sync:
                    os.fsync(self.file.fileno())
            self.waiting = b""
        except RunError as error:
            self.file.truncate(length)
            if self.on_error == "stop":
                raise
            if not self.waiting:
                tqdm.write(f"warning: {error}")
            self.waiting = lines

    def _tell(self, method, *arguments, **named):
        if not self.tracker:
            return
        try:
            getattr(self.tracker, method)(*arguments, **named)
        except Exception as error:  # whatever it is: the numbers are in the file
            self.tracker = None
            tqdm.write(
                f"wandb: {method} failed ({_reason(error)}): on without it. {self.path} has every number; what wandb "
                f"has got of them, `wandb sync {self.path.parent}/wandb/*run-*` sends"
            )


def read(path):
    """The lines of a metrics.jsonl, none if it is not there: dicts of numbers and lists of them, `step` (an int)
    and `tokens` in each.

    A last line that a kill cut short, or that a power failure filled with NUL bytes, is left out. Raises RunError that
    names any other line which is none of these.
    """
    lines = Path(path).read_bytes().removesuffix(b"\n").split(b"\n") if Path(path).is_file() else []
    records = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line.decode())
        except (ValueError, RecursionError):
            record = None
        whole = isinstance(record, dict) and type(record.get("step")) is int and "tokens" in record
        if whole and _are_numbers(record.values()):
            records.append(record)
        elif number < len(lines):
            raise RunError(f"{path}, line {number} is no JSON object of numbers with step and tokens; remove that line")
    return records


def start_wandb(mode, project, name, folder, config, id=None, tags=()):
    """A wandb run, or None if `mode` is "disabled" or wandb fails. "online" without a key or a network becomes
    "offline". Whatever fails costs a printed line, never the run: its numbers are in metrics.jsonl. With the `id` of a
    run that there is, that one goes on."""
    if mode == "disabled":
        return None
    try:
        import wandb

        if mode == "online" and not _has_wandb_key(os.environ.get("WANDB_BASE_URL") or wandb.Settings().base_url):
            print("wandb: no API key (`wandb login`, or WANDB_API_KEY): logging offline; `wandb sync` sends it later")
            mode = "offline"
        bounds = {"init_timeout": WANDB_SECONDS, "finish_timeout": WANDB_SECONDS, "finish_timeout_raises": True}
        settings = wandb.Settings(**bounds, silent=True)
        names = {"project": project, "name": name, "dir": str(folder), "tags": tags, "job_type": "train"}
        run = wandb.init(mode=mode, config=config, id=id, resume="allow", settings=settings, **names)
        run.define_metric("*", step_metric="tokens")
        return run
    except Exception as error:
        if mode == "online" and not isinstance(error, ImportError):
            print(f"wandb: no run online ({_reason(error)}): logging offline, `wandb sync` sends it later")
            with suppress(Exception):
                wandb.teardown()  # it would say that the id is in use
            return start_wandb("offline", project, name, folder, config, id, tags)
        print(f"wandb: no run ({_reason(error)}): on without it, metrics.jsonl has every number")
        return None


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


def _reason(error):
    return (str(error) or type(error).__name__).splitlines()[0]


def _size(path):
    return path.stat().st_size if path.exists() else 0


def _are_numbers(values):
    return all(_are_numbers(value) if isinstance(value, list) else isinstance(value, int | float) for value in values)


def _number(value):
    return value.tolist() if isinstance(value, torch.Tensor) else value
