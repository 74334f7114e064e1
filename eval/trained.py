"""Load a run's model for evaluation: the weights of a checkpoint, or their EMA."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from common.files import is_file
from configure import Config
from data import DataError
from data.bins import (
    Tokens,
    check_dataset,
    fingerprint,
    open_tokens,
    read_meta,
    sha256_of,
)
from data.tokenizer import TOKENIZERS, Tokenizer, identity, load_tokenizer, open_tokenizer
from model import GPT
from runtime import RunError, checkpoint
from runtime.memory import check_host_memory, count_parameters
from runtime.runs import Run, check_settings


class Trained(NamedTuple):
    """A model and its origin."""

    model: GPT  # on the CPU, in evaluation mode
    config: Config
    step: int  # of its checkpoint
    metadata: dict[str, Any]  # of the checkpoint: sha256 of data and tokenizer, the wandb id
    folder: Path  # runs/<name>
    ema: bool = False  # True if the weights are the running mean (train.ema_decay)

    @property
    def label(self) -> str:
        """Folder name of results: step_00001000 or step_00001000_ema."""
        name = checkpoint.folder_of("", self.step).name
        return f"{name}_ema" if self.ema else name

    @property
    def mean(self) -> str:
        """Text that names the EMA; empty for the weights themselves."""
        return f"EMA of decay {self.config.train.ema_decay:g}" if self.ema else ""

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Lines of metrics.jsonl: `step`, `tokens`, and what was logged, such as `val/loss`."""
        return Run(self.folder).metrics


def add_run_arguments(parser: argparse.ArgumentParser, several: bool = False) -> None:
    """Add RUN, or with `several` RUN… as `runs`, --checkpoint (as `step`) and --ema."""
    runs: dict[str, Any] = {"dest": "run", "help": "run folder, such as runs/quickstart-kern"}
    if several:
        runs = {"dest": "runs", "nargs": "+", "help": "run folders; several are compared"}
    parser.add_argument(metavar="RUN", type=Path, **runs)
    add = parser.add_argument
    add("--checkpoint", dest="step", type=int, metavar="STEP", help="(default: the last)")
    add("--ema", action="store_true", help="the running mean of weights (train.ema_decay)")


def add_device_argument(parser: argparse.ArgumentParser) -> None:
    """Add --device."""
    parser.add_argument(
        "--device", choices=("auto", "cuda", "cpu"), default="auto", help="(default: %(default)s)"
    )


def load_model(folder: str | Path, step: int | None = None, ema: bool = False) -> Trained:
    """Load the model of a run.

    Args:
        folder: of the run.
        step: of the checkpoint; by default the last.
        ema: load the running mean (train.ema_decay) in place of the weights.

    Raises:
        ValueError: the folder is not a run; a checkpoint is missing or damaged; the run has no
            running mean; or the host cannot hold the weights.
    """
    run = Run(folder)
    folder, config = run.path, run.config
    if ema and not config.train.ema_decay:
        raise RunError(
            f"--ema: {folder} has no EMA of its weights (train.ema_decay = 0); leave --ema out, "
            f"or train with --train.ema_decay=0.999"
        )
    step = _choose_step(run, step)
    n_parameter, _ = count_parameters(config.model)
    check_host_memory(folder, "its weights", 4 * n_parameter)
    model = GPT(config.model).eval().requires_grad_(False)
    weights, metadata = checkpoint.open_weights(run.checkpoint_folder, step, model, ema)
    check_settings(config, metadata, checkpoint.folder_of(run.checkpoint_folder, step))
    for name, tensor in model.state_dict().items():
        tensor.copy_(weights[name])
    if config.data.document_mask:
        model.document_token = metadata["document_token"]
    return Trained(model, config, step, metadata, folder, ema)


def _choose_step(run: Run, step: int | None) -> int:
    """The step of a checkpoint, by default the last. Raises RunError if there is none of it."""
    steps = run.checkpoints
    damaged = checkpoint.steps(run.checkpoint_folder, ".damaged")
    present = f"it has {', '.join(map(str, steps)) or 'none'}"
    if damaged:
        present += f"; damaged: {', '.join(map(str, damaged))}"
    if not steps:
        raise RunError(f"{run}: no checkpoint, {present}; train it first")
    if step is None:
        step = steps[-1]
        if damaged and damaged[-1] > step:
            print(f"warning: {run}: {present}; using that of step {step}")
    if step not in steps:
        raise RunError(f"{run}: no checkpoint of step {step}, {present}; name one of these")
    return step


def check_comparable(first: Trained, other: Trained, metadata: Sequence[str]) -> None:
    """Raise RunError if two runs differ in block_size or in `metadata`."""
    differing = [key for key in metadata if first.metadata[key] != other.metadata[key]]
    if first.config.model.block_size != other.config.model.block_size:
        differing.append("model.block_size")
    if differing:
        raise RunError(
            f"{first.folder} and {other.folder} cannot be compared: they differ in "
            f"{', '.join(differing)}; name another run (or one set for both, --data)"
        )


def find_set(trained: Trained, name: str) -> Path | None:
    """The folder of a prepared set, by its path or its name in data.dir; None: no such set."""
    for folder in (Path(name), Path(trained.config.data.dir, name)):
        if is_file(folder / "meta.json"):
            return folder
    return None


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
    folder: str | Path, step: int | None = None, ema: bool = False
) -> tuple[Trained, Tokenizer]:
    """Load a run's model, see `load_model`, and its tokenizer.

    The tokenizer is read from the data set, or is a known one of the same hash.

    Raises:
        ValueError: as for `load_model`; the set in data.dir has another tokenizer; or both set and
            tokenizer are missing.
    """
    trained = load_model(folder, step, ema)
    folders = trained.config.data.folders
    for data in folders:
        if is_file(data / "meta.json"):
            _check_tokenizer(trained, data)
            return trained, open_tokenizer(data)
    for name, kind in TOKENIZERS.items():
        if sha256_of(identity(kind)) == trained.metadata.get("tokenizer"):
            return trained, load_tokenizer(name)
    raise RunError(
        f"{', '.join(map(str, folders))}: no such data set, and no known tokenizer is that of "
        f"{trained.config.run.name}; restore the data set (data.dir, data.name, data.mix)"
    )
