"""Load a run's model for evaluation: one checkpoint, the mean of several, or the EMA."""

import argparse
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from functools import partial
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
from runtime import RunError, checkpoint, distributed
from runtime.checkpoint import LazyTensors
from runtime.parallel import without_parameters
from runtime.runs import Run
from runtime.settings import check_model_settings


class Trained(NamedTuple):
    """A model and its origin."""

    model: GPT  # on the CPU, in evaluation mode; with `lazy`, without memory for parameters
    config: configure.Config
    step: int
    average: int  # number of checkpoints averaged, the last one at `step`; 1: no averaging
    metadata: dict[str, Any]  # in the checkpoint: sha256 of data and tokenizer, the wandb id
    folder: Path  # runs/<name>
    ema: bool = False  # True if the weights are the running mean (train.ema_decay)
    lazy: LazyTensors | None = None  # the weights, if they stay in the checkpoint

    @property
    def state(self) -> Mapping[str, torch.Tensor]:
        """The model's weights and buffers."""
        return self.model.state_dict() if self.lazy is None else self.lazy

    @property
    def label(self) -> str:
        """Folder name of results: step_00001000, step_00001000_mean5 or step_00001000_ema."""
        name = checkpoint.folder_of("", self.step).name
        if self.ema:
            return f"{name}_ema"
        if self.average > 1:
            return f"{name}_mean{self.average}"
        return name

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Lines of metrics.jsonl: `step`, `tokens`, and what was logged, such as `val/loss`."""
        return Run(self.folder).metrics

    @property
    def mean(self) -> str:
        """Text for tables that says which mean the weights are; empty for one checkpoint."""
        if self.ema:
            return f"EMA of decay {self.config.train.ema_decay:g}"
        if self.average > 1:
            return f"mean of {self.average} checkpoints"
        return ""


def add_run_arguments(parser: argparse.ArgumentParser, several: bool = False) -> None:
    """Add RUN, or with `several` RUN… as `runs`, --checkpoint (as `step`), --average and --ema."""
    runs: dict[str, Any] = {"dest": "run", "help": "run folder, such as runs/quickstart-kern"}
    if several:
        runs = {"dest": "runs", "nargs": "+", "help": "run folders; several are compared"}
    parser.add_argument(metavar="RUN", type=Path, **runs)
    add = parser.add_argument
    add("--checkpoint", dest="step", type=int, metavar="STEP", help="(default: the last)")
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


def set_up_device(args: argparse.Namespace) -> torch.device:
    """Return the device of --device. Raises RunError if there is no such device."""
    return distributed.pick_device(args.device)


def load_model(
    folder: str | Path,
    step: int | None = None,
    average: int = 1,
    ema: bool = False,
    lazy: bool = False,
) -> Trained:
    """Load the model of a run.

    Args:
        folder: of the run.
        step: of the checkpoint; by default the last.
        average: load the mean of this many checkpoints up to `step`, summed in fp64.
        ema: load the running mean (train.ema_decay) in place of the weights.
        lazy: read no weights; `Trained.state` then reads each when it is needed.

    Raises:
        ValueError: the folder is not a run; a checkpoint is missing or damaged; or the run has no
            running mean.

    Source: LAWA (arXiv 2209.14981) for the mean.
    """
    run = Run(folder)
    folder, config = run.path, run.config
    _check_mean(config, folder, average, ema)
    checkpoints = run.checkpoint_folder
    steps = _choose_steps(run, step, average)
    for chosen in steps:
        _check_settings(config, checkpoint.folder_of(checkpoints, chosen))
    with without_parameters() if lazy else nullcontext():
        model = GPT(config.model).eval().requires_grad_(False)
    state = None
    if lazy:
        state, metadata = _open_states(checkpoints, steps, model, ema)
    else:
        metadata = checkpoint.restore_weights(checkpoints, steps[-1], model, ema)
    if average > 1 and not lazy:
        sums = {name: tensor.double() for name, tensor in model.state_dict().items()}
        for other in steps[:-1]:
            checkpoint.restore_weights(checkpoints, other, model)
            for name, tensor in model.state_dict().items():
                sums[name] += tensor
        model.load_state_dict({name: total / average for name, total in sums.items()})
    if config.data.document_mask:
        model.document_token = metadata["document_token"]
    return Trained(model, config, steps[-1], average, metadata, folder, ema, state)


def _open_states(
    checkpoints: Path, steps: list[int], model: GPT, ema: bool
) -> tuple[LazyTensors, dict[str, Any]]:
    """The weights at the last of `steps`, or their mean over all, and the last one's metadata."""
    last, metadata = checkpoint.open_weights(checkpoints, steps[-1], model, ema)
    others = []
    for step in steps[:-1]:
        others.append(checkpoint.open_weights(checkpoints, step, model)[0])

    def average(name: str) -> torch.Tensor:
        tensor = last[name]
        total = tensor.double()
        for other in others:
            total += other[name]
        return (total / len(steps)).to(tensor.dtype)

    if not others:
        return last, metadata
    return LazyTensors({name: partial(average, name) for name in last}), metadata


def _check_mean(config: configure.Config, folder: Path, average: int, ema: bool) -> None:
    """Raise RunError if the run has no mean as asked for."""
    if ema and not config.train.ema_decay:
        raise RunError(
            f"--ema: {folder} has no EMA of its weights (train.ema_decay = 0); leave --ema out, "
            f"use --average K, or train with --train.ema_decay=0.999"
        )
    if ema and average > 1:
        raise RunError(
            f"--ema with --average {average}: the weights can be one mean or the other; "
            f"leave one out"
        )


def _check_settings(config: configure.Config, path: Path) -> None:
    """Raise RunError if the checkpoint `path` was trained with other settings than `config`."""
    with suppress(checkpoint.DamagedError):  # `restore_weights` explains it
        check_model_settings(config, checkpoint.read_manifest(path)["facts"], path)


def _choose_steps(run: Run, step: int | None, average: int) -> list[int]:
    """Choose the steps of the `average` checkpoints up to `step`, by default the last.

    Raises RunError if there are fewer.
    """
    steps = run.checkpoints
    damaged = checkpoint.steps(run.checkpoint_folder, ".damaged")
    if step is None and steps:
        last = steps[-1]
        if damaged and damaged[-1] > last:
            print(
                f"warning: {run}: the checkpoint of step {damaged[-1]} is damaged; "
                f"using that of step {last}"
            )
    elif step in steps:
        last = step
    else:
        wanted = "" if step is None else f" of step {step}"
        present = ", ".join(map(str, steps)) or "none"
        if damaged:
            present += f"; damaged: {', '.join(map(str, damaged))}"
        remedy = "name one of these" if steps else "train it first"
        raise RunError(f"{run}: no checkpoint{wanted}, it has {present}; {remedy}")
    steps = [other for other in steps if other <= last]
    if not 1 <= average <= len(steps):
        raise RunError(
            f"--average {average}: {run} has {len(steps)} checkpoint(s) up to step {last}; "
            f"name 1 to {len(steps)}, or train with a larger train.keep_checkpoints"
        )
    return steps[-average:]


def open_set(trained: Trained, folder: Path, split: str) -> Tokens:
    """Open a split of a prepared data set for a model.

    Raises DataError if the set is damaged, incomplete, or not of the run's tokenizer.
    """
    _check_tokenizer(trained, folder)
    check_dataset(folder, trained.config.model.vocab_size)
    return open_tokens(folder, split)


def _check_tokenizer(trained: Trained, folder: Path) -> None:
    """Raise DataError if a set has another tokenizer than the run's data."""
    meta = read_meta(folder)
    if fingerprint(meta)["tokenizer"] != trained.metadata.get("tokenizer"):
        raise DataError(
            f"{folder}: its tokenizer ({meta.tokenizer['name']!r}) is not that of "
            f"{trained.config.run.name}; name a set prepared with the run's tokenizer, "
            f"or restore the run's own"
        )


def load_run(
    folder: str | Path,
    step: int | None = None,
    average: int = 1,
    ema: bool = False,
    lazy: bool = False,
) -> tuple[Trained, Tokenizer]:
    """Load a run's model, see `load_model`, and its tokenizer.

    The tokenizer is read from the data set, or is a known one of the same hash.

    Raises:
        ValueError: as for `load_model`; the set in data.dir has another tokenizer; or both set and
            tokenizer are missing.
    """
    trained = load_model(folder, step, average, ema, lazy)
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
