"""What to look at after a loss that is not finite: runs/<name>/crash-step_00001234.json."""

import json
import math
from functools import partial

import torch

from runtime import distributed
from runtime.parallel import full_tensor


@torch.no_grad()
def dump(folder, step, facts, model, autocast, loader, rows, micro_batch, losses, ranks):
    """Write what is known of the optimizer step after `step` of them, and return the file. Every rank calls it, after
    the backward pass.

    `rows`: the first row of each micro-batch of this rank, of `micro_batch` rows each; `losses`: its loss. The first
    micro-batch whose loss is not finite, or the first of all, goes through the model once more, to see in which layer
    numbers grow. `facts` go into the file as they are.
    """
    losses = [loss.item() for loss in losses]
    worst = next((micro for micro, loss in enumerate(losses) if not math.isfinite(loss)), 0)
    mine = {
        "rank": ranks.rank,
        "micro_batches": [
            {"loss": loss, "windows": loader.indices(step, row, micro_batch).tolist()}
            for row, loss in zip(rows, losses, strict=True)
        ],
        "layers_of_micro_batch": worst,
        "layers": layer_norms(model, autocast, loader.batch(step, rows[worst], micro_batch), ranks.device),
    }
    parameters = {  # full_tensor() asks all ranks
        name: {"weight_norm": norm(p.detach()), "gradient_norm": None if p.grad is None else norm(p.grad)}
        for name, p in model.named_parameters()
    }
    every = distributed.gather(mine, ranks.control)
    path = folder / f"crash-step_{step:08d}.json"
    if ranks.rank == 0:
        report = {"step": step, **facts, "ranks": every, "parameters": parameters}
        path.write_text(json.dumps(readable(report), indent=1) + "\n")
    return path


def layer_norms(model, autocast, batch, device):
    """{module: root mean square and largest magnitude of what it puts out}, in order of the forward pass."""
    found = {}

    def note(name, module, args, output):
        output = (output[0] if isinstance(output, tuple) else output).double()
        found[name] = {"rms": output.square().mean().sqrt().item(), "max": output.abs().max().item()}

    names = (
        ["wte"] + [f"blocks.{i}{part}" for i in range(len(model.blocks)) for part in (".attn", ".mlp", "")] + ["ln_f"]
    )
    hooks = [model.get_submodule(name).register_forward_hook(partial(note, name)) for name in names]
    model.eval()
    x, y = (torch.from_numpy(part).to(device) for part in batch)
    with autocast():
        model(x, y)
    model.train()
    for hook in hooks:
        hook.remove()
    return found


def norm(tensor):
    return full_tensor(torch.linalg.vector_norm(tensor, dtype=torch.float64)).item()


def readable(value):
    """With nan and inf as strings, which JSON has no numbers for."""
    if isinstance(value, dict):
        return {key: readable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [readable(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
