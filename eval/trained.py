"""Load a run's model for evaluation: the weights of one checkpoint, the mean of several, or their running mean."""

import argparse
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import torch

import configure
from data import DataError
from data.bins import (
    Tokens,
    check_dataset,
    fingerprint,
    open_tokenizer,
    open_tokens,
    read_meta,
    sha256_of,
)
from data.tokenizer import TOKENIZERS, Tokenizer, identity, load_tokenizer
from model import GPT
from runtime import RunError, check_is_run, checkpoint, distributed
from runtime.metrics import read_metrics


class Trained(NamedTuple):
    """A model and where it comes from."""

    model: GPT  # on the CPU, in evaluation mode
    config: configure.Config
    step: int
    average: int  # number of checkpoints averaged, the last one at `step`; 1: no averaging
    # stored in the checkpoint besides tensors: the data's sha256, the wandb id
    metadata: dict[str, Any]
    folder: Path  # runs/<name>
    ema: bool = False  # the running mean (train.ema_decay) in place of the weights

    @property
    def label(self) -> str:
        """Name of the folder for results: step_00001000, step_00001000_mean5 or step_00001000_ema."""
        name = checkpoint.folder_of("", self.step).name
        if self.ema:
            return f"{name}_ema"
        return f"{name}_mean{self.average}" if self.average > 1 else name

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl: `step` and `tokens`, and `train/loss` or `val/loss` with what else was logged."""
        return read_metrics(self.folder / "metrics.jsonl")

    @property
    def mean(self) -> str:
        """In words, which mean the weights are; empty for those of a checkpoint."""
        if self.ema:
            return f"EMA of decay {self.config.train.ema_decay:g}"
        return f"mean of {self.average} checkpoints" if self.average > 1 else ""


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add RUN, --checkpoint (stored as `step`), --average and --ema."""
    parser.add_argument("run", type=Path, help="run folder, such as runs/quickstart-kern")
    add = parser.add_argument
    add("--checkpoint", "--step", dest="step", type=int, metavar="STEP", help="(default: the last)")
    add(
        "--average",
        type=int,
        default=1,
        metavar="K",
        help="mean weights of the K checkpoints up to that step",
    )
    add("--ema", action="store_true", help="the running mean of weights (train.ema_decay)")


def add_device_argument(parser: argparse.ArgumentParser) -> None:
    """Add --device."""
    parser.add_argument(
        "--device", choices=("auto", "cuda", "cpu"), default="auto", help="(default: %(default)s)"
    )


def pick_device(args: argparse.Namespace) -> torch.device:
    """The device of --device, which must exist.

    On a CPU torch takes as many threads as there are free cores.
    """
    device = distributed.pick_device(args.device)
    with redirect_stdout(sys.stderr):  # stdout has the command's results
        distributed.choose_threads(device, None)
    return device


def load_model(
    folder: str | Path, step: int | None = None, average: int = 1, ema: bool = False
) -> Trained:
    """Load the model of a run folder: the weights of its last checkpoint, or that of `step`.

    With `average` = K > 1 they are the mean of the K checkpoints up to it, summed in fp64; with
    `ema` the running mean (train.ema_decay).

    Raises:
        ValueError: not a run, no such checkpoint, fewer than `average` checkpoints, a damaged one,
            or no running mean.

    Source: LAWA (arXiv 2209.14981) for the mean.
    """
    folder = Path(folder)
    check_is_run(folder)
    config = configure.load(folder / "config.toml")
    if ema and not config.train.ema_decay:
        raise RunError(
            f"--ema: {folder} has no EMA of its weights (train.ema_decay = 0); leave --ema out, use "
            f"--average K, or train with --train.ema_decay=0.999"
        )
    if ema and average > 1:
        raise RunError(
            f"--ema with --average {average}: the weights can be one mean or the other; leave one out"
        )
    steps = _choose_steps(folder, step, average)
    model = GPT(config.model).eval().requires_grad_(False)
    metadata = checkpoint.load_model(folder / "checkpoints", steps[-1], model, ema)
    if average > 1:
        sums = {name: tensor.double() for name, tensor in model.state_dict().items()}
        for other in steps[:-1]:
            checkpoint.load_model(folder / "checkpoints", other, model)
            for name, tensor in model.state_dict().items():
                sums[name] += tensor
        model.load_state_dict({name: total / average for name, total in sums.items()})
    if config.data.document_mask:
        model.document_token = metadata["document_token"]
    return Trained(model, config, steps[-1], average, metadata, folder, ema)


def _choose_steps(folder: Path, step: int | None, average: int) -> list[int]:
    """The `average` checkpoints up to `step`, by default the last.

    Raises RunError if there are not that many.
    """
    steps, damaged = (
        checkpoint.steps(folder / "checkpoints"),
        checkpoint.steps(folder / "checkpoints", ".damaged"),
    )
    if not steps or (step is not None and step not in steps):
        wanted = "" if step is None else f" of step {step}"
        broken = f"; damaged: {', '.join(map(str, damaged))}" if damaged else ""
        remedy = "name one of these" if steps else "train it first"
        raise RunError(
            f"{folder}: no checkpoint{wanted}, it has {', '.join(map(str, steps)) or 'none'}{broken}; {remedy}"
        )
    if step is None and damaged and damaged[-1] > steps[-1]:
        print(
            f"warning: {folder}: the checkpoint of step {damaged[-1]} is damaged; using that of step {steps[-1]}"
        )
    last = steps[-1] if step is None else step
    steps = [other for other in steps if other <= last]
    if not 1 <= average <= len(steps):
        raise RunError(
            f"--average {average}: {folder} has {len(steps)} checkpoint(s) up to step {last}; name 1 to {len(steps)}, "
            f"or train with a larger train.keep_checkpoints"
        )
    return steps[-average:]


def open_set(trained: Trained, folder: Path, split: str) -> Tokens:
    """Open a split of a prepared data set for a model.

    Raises DataError if the set is damaged or incomplete, or has another tokenizer than the run's
    data.
    """
    _check_tokenizer(trained, folder)
    check_dataset(folder, trained.config.model.vocab_size)
    return open_tokens(folder, split)


def _check_tokenizer(trained: Trained, folder: Path) -> None:
    meta = read_meta(folder)
    if fingerprint(meta)["tokenizer"] != trained.metadata.get("tokenizer"):
        raise DataError(
            f"{folder}: its tokenizer ({meta.tokenizer['name']!r}) is not that of {trained.config.run.name}; name a "
            f"set prepared with the run's tokenizer, or restore the run's own"
        )


def load_run(
    folder: str | Path, step: int | None = None, average: int = 1, ema: bool = False
) -> tuple[Trained, Tokenizer]:
    """Load a run's model (see `load_model`) and its tokenizer: its data set's, else a known one of the same hash.

    Raises:
        ValueError: as for `load_model`; the set in data.dir has another tokenizer; neither set nor
            tokenizer is there.
    """
    trained = load_model(folder, step, average, ema)
    folders = trained.config.data.folders
    for data in folders:
        if (data / "meta.json").is_file():
            _check_tokenizer(trained, data)
            return trained, open_tokenizer(data)
    for name, kind in TOKENIZERS.items():
        if sha256_of(identity(kind)) == trained.metadata.get("tokenizer"):
            return trained, load_tokenizer(name)
    raise RunError(
        f"{', '.join(map(str, folders))}: no such data set, and no known tokenizer is that of "
        f"{trained.config.run.name}; restore the data set (data.dir, data.name, data.mix)"
    )
