"""Initial weights of another kind of model than the run's: what becomes of its MLPs and routers.

Sparse upcycling (arXiv 2212.05055) makes a dense model a mixture: its experts are copies of the
MLP, or of slices of it. With D hidden units in the MLP and H in an expert there are S = D/H slices,
and E/S copies of each. Expert r·S + s is slice s of copy r. The S experts of a copy have one row in
the new router, so equal logits, and ties go to the lower index: the K chosen ones are K/S whole
copies (arXiv 2410.07524, "virtual groups"). Their gates are equal, too, so the sum over the chosen
is the MLP's output times Σg/S, and w_out is multiplied by S/E[Σg]. That is the dense function where
all tokens' gates have one sum, as after l1 over topk.

A mixture may get another router. W stays. But softmax leaves a common shift of a token's logits to
chance or a z-loss, while KERN's ReLU cuts at 0: so W is centred. And the gates would have another
size: so the constant c is set by layer.
"""

from contextlib import ExitStack
from functools import partial
from itertools import count, islice
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
from router import Router, Routing, find_spec
from runtime.batches import micro_batches
from runtime.distributed import Ranks, sum_over_ranks
from runtime.preflight import Plan

WINDOWS = 4  # whose loss is compared after upcycling
SAMPLES = 2**14  # tokens to estimate E[Σg] from: its standard error is below 1%
TOKENS = 2**13  # at least, to measure the gates of a new router on


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


def take_routers(
    state: dict[str, Tensor], theirs: Model, model: Model
) -> tuple[dict[str, Router], list[str]]:
    """Copy the routers of weights `state`, of `theirs`, that `model` replaces; centre W if only they ignore a shift.

    Centring subtracts from W (E, C), and from b, the mean over experts. It shifts all logits of a
    token alike: the old router computes the same. Returns the old routers by name, none if the
    formula stays, and notes to print.
    """
    before, now = find_spec(theirs.router), find_spec(model.router)
    if before is None or now is None or before == now:
        return {}, []
    routers, centred = {}, before.ignores_shift and not now.ignores_shift
    for place in (
        f"blocks.{layer}.mlp.router" for layer in range(theirs.n_dense_layer, theirs.n_layer)
    ):
        sizes, table = (
            (theirs.n_embd, theirs.n_expert, theirs.top_k),
            state.get(f"{place}.hash_table"),
        )
        router = Router(*sizes, before, gate_scale(theirs), table).requires_grad_(False)
        # other projects have no buffers
        names = [name for name in router.state_dict() if f"{place}.{name}" in state]
        router.load_state_dict({name: state[f"{place}.{name}"] for name in names}, strict=False)
        routers[place] = router
        for name in {"weight", "bias"}.intersection(names) if centred else ():
            own = state[f"{place}.{name}"].double()
            state[f"{place}.{name}"] = (own - own.mean(0)).float()
    note = f"router weights are centred (mean over experts 0): {theirs.router} ignores that, {model.router} does not"
    return routers, [note] if centred else []


@torch.no_grad()
def match_gates(model: GPT, old: dict[str, Router], plan: Plan, ranks: Ranks) -> str:
    """Give each layer's gates the norm √E‖g‖² of its `old` router's, on training windows.

    Every rank calls it.

    Both routers of a layer are given the input that the old model has there. The new one's c is
    multiplied by the ratio of their norms, if train.match_gates is set and neither model.gate_norm
    nor model.gate_scale is. `model` is as `parallel.distribute` leaves it. Returns in words what
    both routers have, and the factors.
    """
    settings, train = plan.config.model, plan.config.train
    size = train.micro_batch_size * settings.block_size * ranks.world_size
    batches = [*islice(micro_batches(plan, count(), ranks), -(-TOKENS // size))]
    news: dict[str, Router] = {place: model.get_submodule(place) for place in old}  # pyrefly: ignore[bad-assignment]
    # Σ g² of the new routers
    squares = dict.fromkeys(old, torch.zeros((), dtype=torch.float64, device=ranks.device))

    def route_as_before(
        place: str, _: Router, args: tuple, given: dict[str, Any], routing: Routing
    ) -> Routing:
        assert routing.stats is not None, "asked for"
        squares[place] = squares[place] + routing.stats.gate_square.double() / len(batches)
        return old[place].to(ranks.device)(*args, **given)

    model.eval()
    with torch.compiler.set_stance("force_eager"):  # compiled blocks would keep the hooks
        with ExitStack() as hooks:
            for place, router in news.items():
                hook = router.register_forward_hook(
                    partial(route_as_before, place), with_kwargs=True
                )
                hooks.enter_context(hook)
            wanted, before = measure(model, batches, plan, ranks)
        ratio = wanted / (sum_over_ranks(torch.stack([*squares.values()])) / ranks.world_size)
        text = ""
        if train.match_gates and not settings.gate_norm and settings.gate_scale == 1:
            # 1: all gates are 0
            factors = torch.where(ratio.isfinite() & (ratio > 0), ratio.sqrt(), 1).tolist()
            for router, factor in zip(news.values(), factors, strict=True):
                router.c.mul_(factor)
            text = f"; its gates times {', '.join(f'{factor:.3g}' for factor in factors)} (train.match_gates)"
        _, now = measure(model, batches, plan, ranks)
    model.train()
    return f"old router: {before}; {settings.router}: {now}{text}"


def measure(
    model: GPT, batches: list[tuple[Tensor, Tensor]], plan: Plan, ranks: Ranks
) -> tuple[Tensor, str]:
    """Means over the tokens of all ranks' `batches`: Σ g² by layer, (L,); and loss, zero gates and norm in words."""
    rows = []
    for x, y in batches:
        with plan.autocast:
            _, loss, stats, _ = model(x.to(ranks.device), y.to(ranks.device))
        rows.append(
            torch.stack(
                [loss.expand(len(stats.zero_gates)), stats.zero_gates, stats.gate_square]
            ).double()
        )
    loss, zeros, square = sum_over_ranks(torch.stack(rows).mean(0)) / ranks.world_size  # (L,) each
    norm = square.sqrt().mean()
    return (
        square,
        f"loss {loss[0].item():.4f}, zero gates {zeros.mean().item():.2%}, gate norm {norm.item():.3g}",
    )
