"""Another router for a mixture whose weights were trained with a first one.

W stays, with two changes. Softmax is invariant to a constant added to all logits of a token; KERN's
ReLU is not, so W is centred. And the new gates would have another size, so each layer's constant c
is scaled.
"""

import math
from collections.abc import Iterator, MutableMapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from configure import Config
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
        own = {}
        for key in state:
            if key.startswith(f"{name}."):
                own[key.removeprefix(f"{name}.")] = state[key]
        router = build_router(source, layer).requires_grad_(False)
        router.load_state_dict(own, strict=False)  # weights of other projects have no buffers
        routers[name] = router
        if must_centre:
            _centre_router(state, name)
    if not must_centre:
        return routers, []
    note = "router weights are centred (mean over experts 0): "
    return routers, [f"{note}{source.router} ignores that, {model.router} does not"]


def _centre_router(state: MutableMapping[str, Tensor], name: str) -> None:
    for key in (f"{name}.weight", f"{name}.bias"):  # (E, C), (E,)
        if key in state:
            exact = state[key].double()
            state[key] = (exact - exact.mean(0)).float()


class RouterSwap:
    """A layer's new router, which routes by the old one until `handle` is removed.

    Attributes:
        square: () fp64, the sum over batches of the mean over tokens of Σ g² of the new router, on
            the inputs that the old one has.
    """

    def __init__(self, new: Router, old: Router) -> None:
        device = new.c.device
        self.new = new
        self.old = old.to(device)
        self.square = torch.zeros((), dtype=torch.float64, device=device)
        self.handle = new.register_forward_hook(self._route_by_old, with_kwargs=True)

    def _route_by_old(
        self, _: Router, args: tuple, kwargs: dict[str, Any], routing: Routing
    ) -> Routing:
        gates = routing.weights  # (N, K)
        self.square += (gates.square().sum() / len(gates)).double()
        return self.old(*args, **kwargs)


@torch.no_grad()
def match_gates(
    model: GPT,
    old: dict[str, Router],
    config: Config,
    batches: Iterator[tuple[Tensor, Tensor]],
    autocast: torch.autocast,
    ranks: Ranks,
) -> str:
    """Give each layer's gates the norm √E‖g‖² of its old router's gates. Every rank calls it.

    Both routers of a layer get the input that the old model has there. The new router's c is
    multiplied by the ratio of their norms, unless model.gate_norm or model.gate_scale is set.

    Args:
        model: with the new routers, as `parallel.distribute` leaves it.
        old: the routers that were replaced, by name.
        config: of the run.
        batches: training windows of this rank.
        autocast: the run's context for forward passes.
        ranks: all ranks of the run.

    Returns:
        Text with the measures of both routers, and the factors.
    """
    settings = config.model
    train = config.train
    tokens_per_batch = train.micro_batch_size * settings.block_size * ranks.world_size
    windows = list(islice(batches, math.ceil(TOKENS / tokens_per_batch)))
    text = ""
    model.eval()
    with torch.compiler.set_stance("force_eager"):  # a block compiled with a hook would keep it
        swaps = []
        for name, router in old.items():
            swaps.append(RouterSwap(model.get_submodule(name), router))  # pyrefly: ignore[bad-argument-type]
        before = _measure_gates(model, windows, autocast, ranks)
        for swap in swaps:
            swap.handle.remove()
        if not settings.gate_norm and settings.gate_scale == 1:
            sums = sum_over_ranks(torch.stack([swap.square for swap in swaps]))  # (L,)
            ratio = before[2] / (sums / (len(windows) * ranks.world_size))
            usable = ratio.isfinite() & (ratio > 0)  # else all gates of a router are 0
            factors = torch.where(usable, ratio.sqrt(), 1).tolist()
            for swap, factor in zip(swaps, factors, strict=True):
                swap.new.c.mul_(factor)
            listed = ", ".join(f"{factor:.3g}" for factor in factors)
            text = f"; its gates times {listed}"
        after = _measure_gates(model, windows, autocast, ranks)
    model.train()
    return f"old router: {_describe(before)}; {settings.router}: {_describe(after)}{text}"


def _measure_gates(
    model: GPT, batches: list[tuple[Tensor, Tensor]], autocast: torch.autocast, ranks: Ranks
) -> Tensor:
    """Loss, zero gates and Σ g² of each layer, (3, L) fp64: means over tokens of all ranks."""
    measures = []
    for x, y in batches:
        with autocast:
            _, loss, stats, _ = model(x.to(ranks.device), y.to(ranks.device))
        losses = loss.expand(len(stats.zero_gates))
        measures.append(torch.stack([losses, stats.zero_gates, stats.gate_square]).double())
    return sum_over_ranks(torch.stack(measures).mean(0)) / ranks.world_size


def _describe(measures: Tensor) -> str:
    """`_measure_gates` as text, averaged over layers."""
    loss, zero_gates, gate_square = measures
    norm = gate_square.sqrt().mean()
    return f"loss {loss[0]:.4f}, zero gates {zero_gates.mean():.2%}, gate norm {norm:.3g}"
