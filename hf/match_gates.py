"""Another router for a mixture whose weights were trained with a first one.

W stays, with two changes. Softmax is invariant to a constant added to all logits of a token; KERN's
ReLU is not, so W is centred. And the new gates would have another size, so each layer's constant c
is scaled.
"""

from collections.abc import Iterator, MutableMapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from configure.schema import Model
from model import GPT, build_router
from router import Router, Routing, find_spec
from runtime.distributed import Ranks, sum_over_ranks

TOKENS = 2**13  # at least, to measure the gates of a new router; not measured how few would do


def take_routers(
    state: MutableMapping[str, Tensor], source: Model, model: Model
) -> tuple[dict[str, Router], list[str]]:
    """Copy the routers that `model` replaces, and centre W if only the old ones ignore a shift.

    Args:
        state: weights of `source`. Centring subtracts from W (E, C), and from b, the mean over
            experts. The logits of a token then differ by a constant, so the old router computes
            the same.
        source: the model of the weights.
        model: the new model.

    Returns:
        The old routers by name, none if the formula stays, and notes to print.
    """
    old_spec = find_spec(source.router)
    new_spec = find_spec(model.router)
    if old_spec is None or new_spec is None or old_spec == new_spec:
        return {}, []
    must_centre = old_spec.ignores_shift and not new_spec.ignores_shift
    routers = {}
    for layer in range(source.n_layer):
        name = f"blocks.{layer}.mlp.router"
        router = build_router(source, layer).requires_grad_(False)
        names = [key for key in router.state_dict() if f"{name}.{key}" in state]
        own = {key: state[f"{name}.{key}"] for key in names}
        router.load_state_dict(own, strict=False)  # weights of other projects have no buffers
        if must_centre:
            for key in own.keys() & {"weight", "bias"}:  # (E, C), (E,)
                exact = own[key].double()
                state[f"{name}.{key}"] = (exact - exact.mean(0)).float()
        routers[name] = router
    if not must_centre:
        return routers, []
    note = "router weights are centred (mean over experts 0): "
    return routers, [f"{note}{source.router} ignores that, {model.router} does not"]


@torch.no_grad()
def match_gates(
    model: GPT,
    old: dict[str, Router],
    batches: Iterator[tuple[Tensor, Tensor]],
    autocast: torch.autocast,
    ranks: Ranks,
) -> str:
    """Give each layer's gates the norm √E‖g‖² of its old router's gates. Every rank calls it.

    In one pass over TOKENS tokens, both routers of a layer get the input that the old model has
    there. The new router's c is multiplied by the ratio of their norms.

    Args:
        model: with the new routers, as `parallel.distribute` leaves it.
        old: the routers that were replaced, by name.
        batches: training windows of this rank.
        autocast: the run's context for forward passes.
        ranks: all ranks of the run.

    Returns:
        Text with the factors.
    """
    squares = torch.zeros(2, len(old), dtype=torch.float64, device=ranks.device)  # Σ g², old, new

    def route_by_old(
        layer: int, router: Router, _: Router, args: tuple, kwargs: dict[str, Any], new: Routing
    ) -> Routing:
        before = router(*args, **kwargs)
        squares[0, layer] += before.weights.square().sum()
        squares[1, layer] += new.weights.square().sum()
        return before

    routers = [model.get_submodule(name) for name in old]
    hooks = []
    for layer, (router, replaced) in enumerate(zip(routers, old.values(), strict=True)):
        route = partial(route_by_old, layer, replaced.to(ranks.device))
        hooks.append(router.register_forward_hook(route, with_kwargs=True))
    model.eval()
    tokens = 0
    with torch.compiler.set_stance("force_eager"):  # a block compiled with a hook would keep it
        while tokens < TOKENS:
            x, y = next(batches)
            with autocast:
                model(x.to(ranks.device), y.to(ranks.device))
            tokens += x.numel() * ranks.world_size
    model.train()
    for hook in hooks:
        hook.remove()
    before, after = sum_over_ranks(squares)  # (L,) each
    ratio = (before / after).sqrt()
    usable = ratio.isfinite() & (ratio > 0)  # else all gates of a router are 0
    factors = torch.where(usable, ratio, 1).tolist()
    for router, factor in zip(routers, factors, strict=True):
        router.c.mul_(factor)  # pyrefly: ignore[not-callable, missing-attribute]
    return ", ".join(f"{factor:.3g}" for factor in factors)
