"""The model of a run as it was trained: of one checkpoint, or the mean of several."""

from pathlib import Path
from typing import NamedTuple

import configure
from data.bins import fingerprint, open_tokenizer, read_meta, sha256_of
from data.tokenizer import TOKENIZERS, Tokenizer, identity, load_tokenizer
from model import GPT
from runtime import RunError, checkpoint


class Trained(NamedTuple):
    model: GPT  # on the CPU, in evaluation mode
    config: configure.Config
    step: int
    average: int  # checkpoints up to that step whose mean it is; 1: the checkpoint itself
    facts: dict  # what the checkpoint keeps besides tensors

    @property
    def label(self):
        """A name for files: step_00001000, step_00001000_mean5."""
        return checkpoint.folder_of("", self.step).name + (f"_mean{self.average}" if self.average > 1 else "")


def add_arguments(parser):
    """RUN, --checkpoint (--step in `args`) and --average."""
    parser.add_argument("run", type=Path, help="run folder, such as runs/quickstart-kern")
    parser.add_argument("--checkpoint", "--step", dest="step", type=int, metavar="STEP", help="(default: the last)")
    parser.add_argument(
        "--average", type=int, default=1, metavar="K", help="mean of the weights of the K checkpoints up to that one"
    )


def load_model(folder, step=None, average=1):
    """The Trained of a run folder at `step`, the last by default. With `average` > 1 its weights are the mean of those
    of as many checkpoints, taken in fp64 (as in LAWA, arXiv 2209.14981). Raises ValueError if there are not so many, or
    if one is damaged."""
    folder = Path(folder)
    if not (folder / "config.toml").is_file():
        raise RunError(f"{folder}: no config.toml, so not a run; give a folder such as runs/quickstart-kern")
    config = configure.load(folder / "config.toml")
    steps = checkpoint.steps(folder / "checkpoints")
    if not steps or (step is not None and step not in steps):
        wanted = "" if step is None else f" of step {step}"
        raise RunError(
            f"{folder}: no checkpoint{wanted}, it has {', '.join(map(str, steps)) or 'none'}; train it first"
        )
    step = steps[-1] if step is None else step
    steps = [other for other in steps if other <= step]
    if not 1 <= average <= len(steps):
        raise RunError(
            f"--average {average}: {folder} has {len(steps)} checkpoint(s) up to step {step}; name 1 to {len(steps)}, "
            f"or train with a larger train.keep_checkpoints"
        )
    model = GPT(config.model).eval()
    sums = {}
    for one in steps[-average:]:
        facts = checkpoint.load_model(folder / "checkpoints", one, model)
        if average > 1:
            sums = {name: sums.get(name, 0) + tensor.double() for name, tensor in model.state_dict().items()}
    if average > 1:
        model.load_state_dict({name: total / average for name, total in sums.items()})
    return Trained(model.requires_grad_(False), config, step, average, facts)


def tokenizer_of(trained) -> Tokenizer:
    """The tokenizer of the data that the run was trained on: that of the data set, or, where the set is gone, the one
    of the same name and hash. Raises ValueError if the set there now has another."""
    config, wanted = trained.config, trained.facts.get("tokenizer")
    folder = Path(config.data.dir, config.data.name)
    if (folder / "meta.json").is_file():
        found = fingerprint(read_meta(folder))["tokenizer"]
        if found != wanted:
            name = read_meta(folder).tokenizer["name"]
            raise RunError(
                f"{folder}: its tokenizer ({name!r}) is not the one {config.run.name} was trained with. Bring back the "
                f"set it was trained on, or move this one away"
            )
        return open_tokenizer(folder)
    for name in TOKENIZERS:
        if sha256_of(identity(name)) == wanted:
            return load_tokenizer(name)
    raise RunError(
        f"{folder}: not there, and no tokenizer known here is the one {config.run.name} was trained with. Bring back "
        f"the set it was trained on (data.dir, data.name)"
    )


def load_run(folder, step=None, average=1):
    """(Trained, Tokenizer)."""
    trained = load_model(folder, step, average)
    return trained, tokenizer_of(trained)
