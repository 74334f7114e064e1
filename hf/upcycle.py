"""A dense model's weights as the initial weights of a mixture: its MLPs become experts.

Sparse upcycling (arXiv 2212.05055): the experts are copies of the MLP, or of slices of it. With D
hidden units in the MLP and H in an expert there are S = D/H slices, and E/S copies of each. Expert
r·S + s is slice s of copy r. The S experts of a copy have one row in the new router, so equal
logits, and ties go to the lower index: the K chosen ones are K/S complete copies (arXiv 2410.07524,
"virtual groups"). Their gates are equal, too. The sum over the chosen experts is then the MLP's
output times Σg/S, and w_out is multiplied by S/E[Σg]. That is the dense function if Σg is the same
for all tokens, as after l1 over topk.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from configure import Config
from configure.schema import Model
from data.bins import open_tokens, read_meta
from data.loader import choose_validation, windows
from hf.by_block import build_by_block
from hf.formats import dense_width
from model import build_router
from router import find_spec
from runtime.checkpoint import LazyTensors

WINDOWS = 4  # validation windows whose loss is compared after upcycling; not measured how few do
SAMPLES = 2**14  # tokens to estimate E[Σg] from: its standard error is below 1%


def is_upcycled(source: Model, model: Model) -> bool:
    """Return True if weights of `source`, a dense model, are to become a mixture, `model`."""
    return find_spec(source.router) is None and find_spec(model.router) is not None


def find_overrides(source: Model, model: Model) -> dict[str, Any]:
    """Keys of `model`, with the values that let its experts be copies or slices of the MLPs."""
    E, K = model.n_expert, model.top_k
    width = dense_width(source)
    needed = {}
    for key in ("n_shared_expert", "n_hash_layer"):
        if getattr(model, key):
            needed[key] = 0
    for key in ("router_groups", "router_group_k"):
        if getattr(model, key) > 1:
            needed[key] = 1
    n_slice, remainder = divmod(width, model.expert_hidden)
    if remainder or E % n_slice or K % n_slice:
        # K slices keep the number of active parameters
        can_have_k_slices = width % K == 0 and E % K == 0
        needed["expert_hidden"] = width // K if can_have_k_slices else width
    return needed


@torch.no_grad()
def upcycle(config: Config, source: Model, state: LazyTensors) -> str:
    """Replace the MLPs in `state`, weights of `source`, by experts, and add routers.

    A layer's experts are built when they are read. Routers are drawn from run.seed. Returns a note
    with the losses before and after.
    """
    model = config.model
    n_slice = dense_width(source) // model.expert_hidden
    n_copy = model.n_expert // n_slice
    loss_before = _measure_loss(config, source, source, state)
    reasons = []  # why the mixture computes another function
    names = [name for name in state if name.endswith((".mlp.w_in.bias", ".mlp.w_out.bias"))]
    biases = [state.pop(name) for name in names]
    if any(bias.any() for bias in biases):
        reasons.append("experts lack the biases of the MLPs")

    generator = torch.Generator().manual_seed(config.run.seed)
    router = build_router(model, 0)
    std = model.init_std * model.router_init_ratio
    # a norm leaves inputs of norm √C
    logits = torch.randn(SAMPLES, n_copy, generator=generator) * std * model.n_embd**0.5
    gates = router.choose(logits.repeat_interleave(n_slice, 1)).weights.double()  # (SAMPLES, K)
    gate_sums = gates.sum(-1)
    if gate_sums.std() > 1e-6 * gate_sums.mean():
        reasons.append(f"the sum of a token's {model.router} gates varies")
    scale = n_slice / gate_sums.mean().item()
    for layer in range(model.n_layer):
        mlp = f"blocks.{layer}.mlp"
        read_w_in = state.makers.pop(f"{mlp}.w_in.weight")
        read_w_out = state.makers.pop(f"{mlp}.w_out.weight")
        build_w_in = partial(_build_w_in, read_w_in, n_slice, model)
        build_w_out = partial(_build_w_out, read_w_out, n_slice, model, scale)
        state.makers[f"{mlp}.experts.w_in"] = build_w_in
        state.makers[f"{mlp}.experts.w_out"] = build_w_out
        rows = std * torch.randn(n_copy, model.n_embd, generator=generator)
        for name, tensor in router.state_dict().items():
            state[f"{mlp}.router.{name}"] = tensor
        state[f"{mlp}.router.weight"] = rows.repeat_interleave(n_slice, 0)  # (E, C)

    loss_after = _measure_loss(config, source, model, state)
    note = f"upcycled: a layer's {model.n_expert} experts are {n_copy} copies of its MLP"
    if n_slice > 1:
        note += f"'s {n_slice} slices"
    note += f", loss on {WINDOWS} validation windows {loss_before:.5f} -> {loss_after:.5f}"
    if reasons:
        note += f", because {' and '.join(reasons)}"
    return note


def _build_w_in(read: Callable[[], Tensor], n_slice: int, model: Model) -> Tensor:
    """All experts' w_in, (E, C, H), gated (E, C, 2H): copies of slices of an MLP's hidden units.

    `read` gives the MLP's, (D, C); if gated (2D, C), the gate above. D is n_slice times H.
    """
    w_in = read()
    C = w_in.shape[1]
    w_in = w_in.reshape(-1, n_slice, model.expert_hidden, C)  # (1, S, H, C), gated (2, S, H, C)
    w_in = w_in.permute(1, 3, 0, 2).reshape(n_slice, C, -1)
    return w_in.repeat(model.n_expert // n_slice, 1, 1)


def _build_w_out(read: Callable[[], Tensor], n_slice: int, model: Model, scale: float) -> Tensor:
    """All experts' w_out, (E, H, C), from an MLP's, (C, D), times `scale`."""
    w_out = scale * read()
    w_out = w_out.reshape(-1, n_slice, model.expert_hidden)  # (C, S, H)
    return w_out.permute(1, 2, 0).repeat(model.n_expert // n_slice, 1, 1)


@torch.no_grad()
def _measure_loss(config: Config, source: Model, model: Model, state: LazyTensors) -> float:
    """Loss, nats per token, of `model` with weights `state` on validation windows, on the CPU."""
    T = config.model.block_size
    tokens = [open_tokens(folder, "val") for folder in config.data.folders]
    chosen = choose_validation(tokens, T, WINDOWS, weights=list(config.data.sets.values()))
    x, y = windows(chosen.tokens, chosen.windows, T)
    settings = {
        "vocab_size": source.vocab_size,
        "block_size": max(source.block_size, T),
        "bias": source.bias,
        "backend": "auto",
    }
    gpt = build_by_block(model.model_copy(update=settings), state, torch.float32)
    if config.data.document_mask:
        gpt.document_token = read_meta(config.data.folders[0]).tokenizer["eot"]
    loss = gpt(torch.from_numpy(x), torch.from_numpy(y)).loss
    assert loss is not None, "there are targets"
    return loss.item()
