"""What to look at after a loss that is NaN or Inf: runs/<name>/crash-step_00001234.json."""

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from model import GPT
from runtime import distributed
from runtime.distributed import Ranks
from runtime.output import write_atomic
from runtime.parallel import full_tensor
from runtime.preflight import Plan


@torch.no_grad()
def dump_crash(
    plan: Plan, step: int, metadata: dict[str, Any], model: GPT, rows: list[int], losses: list[Tensor], ranks: Ranks
) -> Path:
    """Write what is known of optimizer step `step` (from 0). Every rank calls it, after the backward pass.

    The first micro-batch whose loss is NaN or Inf, or the first of all, goes through the model once more, to see in
    which layer numbers grow.

    Args:
        plan: the run's plan.
        step: the step that failed.
        metadata: written as it is.
        model: with gradients in place.
        rows: the first row of each of this rank's micro-batches among those of the step.
        losses: their losses, () each, nats per token.
        ranks: this rank.

    Returns:
        The file, written by rank 0.
    """
    size, values = plan.config.train.micro_batch_size, [loss.item() for loss in losses]
    worst = next((micro for micro, loss in enumerate(values) if not math.isfinite(loss)), 0)
    mine = {
        "rank": ranks.rank,
        "micro_batches": [
            {"loss": loss, "windows": plan.loader.indices(step, row, size).tolist()}
            for row, loss in zip(rows, values, strict=True)
        ],
        "layers_of_micro_batch": worst,
        "layers": measure_layers(plan, model, plan.loader.batch(step, rows[worst], size)),
    }
    parameters = {  # full_tensor() is a collective of all ranks
        name: {"weight_norm": _norm(p.detach()), "gradient_norm": None if p.grad is None else _norm(p.grad)}
        for name, p in model.named_parameters()
    }
    every = distributed.gather(mine, ranks.control)
    path = plan.folder / f"crash-step_{step:08d}.json"
    if ranks.rank == 0:
        report = {"step": step, **metadata, "ranks": every, "parameters": parameters}
        try:
            write_atomic(path, json.dumps(_as_json(report), indent=1) + "\n")
        except OSError as error:  # must not hide what went wrong
            print(f"warning: {path} could not be written ({error.strerror})", flush=True)
    return path


def measure_layers(plan: Plan, model: GPT, batch: tuple[np.ndarray, np.ndarray]) -> dict[str, dict[str, float]]:
    """Root mean square and largest magnitude of each layer's output, in order of the forward pass.

    Args:
        plan: the run's plan.
        model: left in training mode.
        batch: inputs and targets, (B, T) int64.

    Returns:
        {module: {"rms", "max"}}.
    """
    found = {}

    def note(name: str, module: nn.Module, args: tuple, output: Any) -> None:
        output = (output[0] if isinstance(output, tuple) else output).double()
        found[name] = {"rms": output.square().mean().sqrt().item(), "max": output.abs().max().item()}

    blocks = [f"blocks.{i}{part}" for i in range(len(model.blocks)) for part in (".attn", ".mlp", "")]
    hooks = [model.get_submodule(name).register_forward_hook(partial(note, name)) for name in ["wte", *blocks, "ln_f"]]
    model.eval()
    x, y = (torch.from_numpy(part).to(plan.device) for part in batch)
    with plan.autocast:
        model(x, y)
    model.train()
    for hook in hooks:
        hook.remove()
    return found


def _norm(tensor: Tensor) -> float:
    return full_tensor(torch.linalg.vector_norm(tensor, dtype=torch.float64)).item()


def _as_json(value: Any) -> Any:
    """With NaN and Inf as strings, since JSON has no numbers for them."""
    if isinstance(value, dict):
        return {key: _as_json(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_as_json(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
