"""Another router for a mixture whose weights were trained with a first one.

W stays. But softmax leaves a common shift of a token's logits to chance or a z-loss, while KERN's
ReLU cuts at 0: so W is centred. And the gates would have another size: so the constant c is set by
layer.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from configure import Config
from configure.schema import Model
from gate_norm import gate_scale
from model import GPT
from router import Router, Routing, find_spec
from runtime.distributed import Ranks, sum_over_ranks

TOKENS = 2**13  # at least, to measure the gates of a new router on


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
def match_gates(
    model: GPT,
    old: dict[str, Router],
    config: Config,
    batches: Iterator[tuple[Tensor, Tensor]],
    autocast: torch.autocast,
    ranks: Ranks,
) -> str:
    """Give each layer's gates the norm √E‖g‖² of its `old` router's, on training windows.

    Every rank calls it.

    Both routers of a layer are given the input that the old model has there. The new one's c is
    multiplied by the ratio of their norms, if train.match_gates is set and neither model.gate_norm
    nor model.gate_scale is. `model` is as `parallel.distribute` leaves it. Returns in words what
    both routers have, and the factors.
    """
    settings = config.model
    train = config.train
    tokens_per_batch = train.micro_batch_size * settings.block_size * ranks.world_size
    first_batches = list(islice(batches, -(-TOKENS // tokens_per_batch)))
    news: dict[str, Router] = {place: model.get_submodule(place) for place in old}  # pyrefly: ignore[bad-assignment]
    # Σ g² of the new routers
    squares = dict.fromkeys(old, torch.zeros((), dtype=torch.float64, device=ranks.device))

    def route_as_before(
        place: str, _: Router, args: tuple, given: dict[str, Any], routing: Routing
    ) -> Routing:
        gate_square = routing.weights.square().sum() / len(routing.weights)
        squares[place] = squares[place] + gate_square.double() / len(first_batches)
        return old[place].to(ranks.device)(*args, **given)

    model.eval()
    with torch.compiler.set_stance("force_eager"):  # compiled blocks would keep the hooks
        with ExitStack() as hooks:
            for place, router in news.items():
                hook = router.register_forward_hook(
                    partial(route_as_before, place), with_kwargs=True
                )
                hooks.enter_context(hook)
            wanted, before = measure(model, first_batches, autocast, ranks)
        ratio = wanted / (sum_over_ranks(torch.stack([*squares.values()])) / ranks.world_size)
        text = ""
        if train.match_gates and not settings.gate_norm and settings.gate_scale == 1:
            # 1: all gates are 0
            factors = torch.where(ratio.isfinite() & (ratio > 0), ratio.sqrt(), 1).tolist()
            for router, factor in zip(news.values(), factors, strict=True):
                router.c.mul_(factor)
            text = f"; its gates times {', '.join(f'{factor:.3g}' for factor in factors)} (train.match_gates)"
        _, now = measure(model, first_batches, autocast, ranks)
    model.train()
    return f"old router: {before}; {settings.router}: {now}{text}"


def measure(
    model: GPT, batches: list[tuple[Tensor, Tensor]], autocast: torch.autocast, ranks: Ranks
) -> tuple[Tensor, str]:
    """Means over the tokens of all ranks' `batches`: Σ g² by layer, (L,); and loss, zero gates and norm in words."""
    rows = []
    for x, y in batches:
        with autocast:
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
