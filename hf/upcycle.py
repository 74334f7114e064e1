"""A dense model's weights as the initial weights of a mixture: what becomes of its MLPs.

Sparse upcycling (arXiv 2212.05055) makes a dense model a mixture: its experts are copies of the
MLP, or of slices of it. With D hidden units in the MLP and H in an expert there are S = D/H slices,
and E/S copies of each. Expert r·S + s is slice s of copy r. The S experts of a copy have one row in
the new router, so equal logits, and ties go to the lower index: the K chosen ones are K/S whole
copies (arXiv 2410.07524, "virtual groups"). Their gates are equal, too, so the sum over the chosen
is the MLP's output times Σg/S, and w_out is multiplied by S/E[Σg]. That is the dense function where
all tokens' gates have one sum, as after l1 over topk.
"""

from typing import Any

import torch
from torch import Tensor

from configure import Config
from configure.schema import Model
from data.bins import open_tokens, read_meta
from data.loader import choose_validation, windows
from gate_norm import gate_scale
from hf.formats import dense_width
from model import GPT
from router import Router, find_spec

WINDOWS = 4  # whose loss is compared after upcycling
SAMPLES = 2**14  # tokens to estimate E[Σg] from: its standard error is below 1%


def is_upcycled(theirs: Model, model: Model) -> bool:
    """Whether weights of `theirs`, a dense model, are to become a mixture, `model`."""
    return find_spec(theirs.router) is None and find_spec(model.router) is not None


def find_overrides(theirs: Model, model: Model) -> dict[str, Any]:
    """The keys of `model` that must change, with their values, so that its experts can be copies or slices."""
    width, E, K = dense_width(theirs), model.n_expert, model.top_k
    S, rest = divmod(width, model.expert_hidden)
    needed = {
        key: 0
        for key in ("n_shared_expert", "n_dense_layer", "n_hash_layer")
        if getattr(model, key)
    }
    if rest or E % S or K % S:  # K slices keep the number of active parameters
        needed["expert_hidden"] = width // K if width % K == 0 and E % K == 0 else width
    return needed


@torch.no_grad()
def upcycle(config: Config, theirs: Model, state: dict[str, Tensor]) -> str:
    """Replace the MLPs in `state` by experts, and routers drawn from run.seed.

    Returns a note with both losses.
    """
    model, spec = config.model, find_spec(config.model.router)
    assert spec is not None, "a mixture"
    E, C, H = model.n_expert, model.n_embd, model.expert_hidden
    S = dense_width(theirs) // H
    # lost: why the function is another
    before, lost = _measure_loss(config, theirs, theirs, state), []
    biases = [
        state.pop(name)
        for name in list(state)
        if name.endswith((".mlp.w_in.bias", ".mlp.w_out.bias"))
    ]
    if any(bias.any() for bias in biases):
        lost.append("experts lack the biases of the MLPs")

    generator = torch.Generator().manual_seed(config.run.seed)
    router = Router(C, E, model.top_k, spec, gate_scale(model))
    std = model.init_std * model.router_init_ratio
    # of inputs that a norm leaves
    logits = torch.randn(SAMPLES, E // S, generator=generator) * std * C**0.5
    sums = router.choose(logits.repeat_interleave(S, 1)).weights.double().sum(-1)
    scale = S / sums.mean().item()
    if sums.std() > 1e-6 * sums.mean():
        lost.append(f"the sum of a token's {model.router} gates varies")
    for mlp in (f"blocks.{layer}.mlp" for layer in range(model.n_layer)):
        # gated: 2H
        w_in = (
            state.pop(f"{mlp}.w_in.weight")
            .reshape(-1, S, H, C)
            .permute(1, 3, 0, 2)
            .reshape(S, C, -1)
        )
        # (S, H, C)
        w_out = scale * state.pop(f"{mlp}.w_out.weight").reshape(C, S, H).permute(1, 2, 0)
        state |= {
            f"{mlp}.experts.w_in": w_in.repeat(E // S, 1, 1),
            f"{mlp}.experts.w_out": w_out.repeat(E // S, 1, 1),
        }
        rows = std * torch.randn(E // S, C, generator=generator)
        new = router.state_dict() | {"weight": rows.repeat_interleave(S, 0)}
        state |= {f"{mlp}.router.{name}": tensor for name, tensor in new.items()}

    after, slices = _measure_loss(config, theirs, model, state), f"'s {S} slices" if S > 1 else ""
    note = f"upcycled: a layer's {E} experts are {E // S} copies of its MLP{slices}, "
    note += f"loss on {WINDOWS} validation windows {before:.5f} -> {after:.5f}"
    return note + (f", because {' and '.join(lost)}" if lost else "")


@torch.no_grad()
def _measure_loss(config: Config, theirs: Model, model: Model, state: dict[str, Tensor]) -> float:
    """Loss, nats per token, of `model` with weights `state` on a few validation windows, on the CPU."""
    T, folders, sets = config.model.block_size, config.data.folders, config.data.sets
    chosen = choose_validation(
        [open_tokens(place, "val") for place in folders], T, WINDOWS, weights=[*sets.values()]
    )
    x, y = windows(chosen.tokens, chosen.windows, T)
    shared = {
        "vocab_size": theirs.vocab_size,
        "block_size": max(theirs.block_size, T),
        "bias": theirs.bias,
    }
    with torch.device("meta"):
        gpt = GPT(model.model_copy(update=shared | {"backend": "auto"})).eval()
    gpt.load_state_dict({name: tensor.float() for name, tensor in state.items()}, assign=True)
    gpt.document_token = (
        read_meta(folders[0]).tokenizer["eot"] if config.data.document_mask else None
    )
    loss = gpt(torch.from_numpy(x), torch.from_numpy(y)).loss
    assert loss is not None, "there are targets"
    return loss.item()
