"""Checkpoints: folders `step_00001000` under runs/<name>/checkpoints, written by torch.distributed.checkpoint.

A checkpoint is written under a temporary name and renamed when it is whole, so every `step_…` folder can be loaded.
"""

import os
import re
import shutil
import warnings
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_state_dict

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
    """Bring model, optimizer, scaler and this process' random numbers back to what `save` saw at `step`, in place."""
    state = _state(model, optimizer, scaler)
    with _quiet():
        dcp.load(state, checkpoint_id=Path(folder, f"step_{step:08d}"))
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    scaler.load_state_dict(state["scaler"])
    torch.set_rng_state(state["rng"])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda_rng"])


def load_model(folder, step, model):
    """Weights alone, for evaluation and sampling, in one process. `model` is changed in place."""
    state = {"model": get_model_state_dict(model)}
    with _quiet():
        dcp.load(state, checkpoint_id=Path(folder, f"step_{step:08d}"))
    model.load_state_dict(state["model"])


def _state(model, optimizer, scaler):
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {
        "model": model_state,
        "optimizer": optimizer_state,
        "scaler": scaler.state_dict(),
        "rng": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda_rng"] = torch.cuda.get_rng_state()
    return state


def _barrier():
    if dist.is_initialized():
        dist.barrier()


@contextmanager
def _quiet():
    """torch warns where one process saves alone; here that is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="torch.distributed")
        yield
