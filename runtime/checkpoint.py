"""Checkpoints: folders `step_00001000` under runs/<name>/checkpoints, written by torch.distributed.checkpoint.

A checkpoint is written under a temporary name and renamed when it is whole, so every `step_…` folder can be loaded.
"""

import logging
import os
import re
import shutil
import warnings
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_state_dict

from runtime import RunError

NAME = re.compile(r"step_(\d{8})")


def steps(folder):
    """Steps of the checkpoints in `folder`, ascending."""
    folder = Path(folder)
    names = os.listdir(folder) if folder.is_dir() else []
    return sorted(int(match[1]) for name in names if (match := NAME.fullmatch(name)))


def save(folder, step, model, optimizer, scaler, keep):
    """Write the checkpoint of `step`, then remove all but the last `keep`. Every rank calls it."""
    path = Path(folder, f"step_{step:08d}")
    temporary = path.with_suffix(".tmp")
    first = not dist.is_initialized() or dist.get_rank() == 0
    if first:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    _barrier()
    with _quiet():
        dcp.save(_state(model, optimizer, scaler), checkpoint_id=temporary)
    if first:
        os.replace(temporary, path)
        for old in steps(folder)[:-keep]:
            shutil.rmtree(Path(folder, f"step_{old:08d}"))
    _barrier()


def load(folder, step, model, optimizer, scaler):
    """Bring model, optimizer and scaler back to what `save` saw at `step`, in place. Raises RunError if damaged."""
    state = _state(model, optimizer, scaler)
    _read(folder, step, state)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    scaler.load_state_dict(state["scaler"])


def load_model(folder, step, model):
    """Weights alone, for evaluation and sampling, in one process. `model` is changed in place. Raises RunError."""
    state = {"model": get_model_state_dict(model)}
    _read(folder, step, state)
    model.load_state_dict(state["model"])


def _read(folder, step, state):
    path = Path(folder, f"step_{step:08d}")
    try:
        with _quiet():
            dcp.load(state, checkpoint_id=path)
    except (Exception, CheckpointException) as error:  # a damaged file shows itself in many ways
        others = [other for other in steps(folder) if other != step]
        then = f"go on from step {others[-1]}" if others else "start over"
        reason = str(error).strip().split("\n")[-1]
        raise RunError(
            f"{path} cannot be read ({type(error).__name__}: {reason}); remove that folder to {then}"
        ) from error


def _state(model, optimizer, scaler):
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state, "scaler": scaler.state_dict()}


def _barrier():
    if dist.is_initialized():
        dist.barrier()


@contextmanager
def _quiet():
    """torch warns where one process saves alone, which is meant here, and logs tracebacks of what `_read` reports."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="torch.distributed")
            yield
    finally:
        logging.disable(before)
