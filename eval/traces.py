"""Routing traces: experts and gates of every token, to replay in another model (docs/traces.md).

A training loop replays a trace by `replay_routing`, as reinforcement learning does with the experts
that its sampler chose (arXiv 2510.11370). Shapes: L layers with experts, W windows of T tokens,
N = W·T, K experts chosen per token.
"""

import io
import math
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from common.files import write_atomic
from common.text import first_line
from eval.trained import Trained
from model import GPT
from router import Router, Routing
from runtime import RunError

BATCH_TOKENS = 4096  # in a pass, approximate
FIELDS = ("experts", "gates", "losses", "tokens", "n_expert", "tokenizer", "source")


def find_routers(model: GPT) -> list[Router]:
    """Return the routers of a model, by layer."""
    return [module for module in model.modules() if isinstance(module, Router)]


@contextmanager
def record_decisions(model: GPT) -> Iterator[list[Routing]]:
    """Record the decision of each layer's router in every pass of the model."""
    decisions: list[Routing] = []

    def record(router: Router, inputs: tuple, routing: Routing) -> None:
        decisions.append(routing)

    with ExitStack() as hooks:
        for router in find_routers(model):
            hooks.enter_context(router.register_forward_hook(record))
        yield decisions


@contextmanager
def replay_routing(model: GPT, experts: Tensor) -> Iterator[None]:
    """Send tokens to the given experts; routers compute the gates, with gradients.

    A training step runs both its passes within: the backward pass may recompute activations.

    Args:
        model: not wrapped; its weights may be sharded.
        experts: (L, N, K) of any integer type, for the N tokens of every pass within.

    Raises:
        ValueError: the number of layers differs; a pass raises it if N or K differs.
    """
    routers = find_routers(model)
    if len(routers) != len(experts):
        raise ValueError(
            f"experts to replay are of {len(experts)} layers, the model has {len(routers)}: "
            f"take its own"
        )
    for router, chosen in zip(routers, experts.to(model.head.device).long(), strict=True):
        router.replay = chosen
    try:
        yield
    finally:
        for router in routers:
            router.replay = None


@torch.no_grad()
def trace_windows(
    model: GPT, tokens: np.ndarray, experts: np.ndarray | None = None
) -> dict[str, np.ndarray]:
    """Trace a model on windows.

    Args:
        model: in evaluation mode.
        tokens: (W, T + 1), windows with their targets.
        experts: (L, N, K), to replay in place of the model's own choice.

    Returns:
        The fields `experts` (L, N, K), `gates` (L, N, K) and `losses` (W,), nats per token.
    """
    T = tokens.shape[1] - 1
    n_batches = min(len(tokens), math.ceil(tokens.size / BATCH_TOKENS))
    chosen = []
    gates = []
    losses = []
    for rows in np.array_split(np.arange(len(tokens)), n_batches):
        ids = torch.from_numpy(tokens[rows]).long().to(model.head.device)
        inputs = ids[:, :-1].contiguous()
        targets = ids[:, 1:].contiguous()
        with ExitStack() as stack:
            if experts is not None:
                first = rows[0] * T
                part = torch.from_numpy(experts[:, first : first + inputs.numel()])
                stack.enter_context(replay_routing(model, part))
            decisions = stack.enter_context(record_decisions(model))
            losses.append(model(inputs, targets).losses.double())
        chosen.append(torch.stack([routing.experts for routing in decisions]).short())
        gates.append(torch.stack([routing.weights for routing in decisions]))
    return {
        "experts": torch.cat(chosen, 1).cpu().numpy(),
        "gates": torch.cat(gates, 1).cpu().numpy(),
        "losses": torch.cat(losses).cpu().numpy(),
    }


def write_trace(file: Path, trained: Trained, tokens: np.ndarray) -> None:
    """Write the trace of a model on windows with their targets, `tokens` (W, T + 1).

    Raises OSError.
    """
    data = io.BytesIO()
    np.savez_compressed(
        data,
        allow_pickle=False,
        **trace_windows(trained.model, tokens),
        tokens=tokens.astype(np.uint16),
        n_expert=trained.config.model.n_expert,
        source=f"{trained.config.run.name}, {trained.label}",
        tokenizer=trained.metadata["tokenizer"],
    )
    write_atomic(file, data.getvalue())


def read_trace(file: Path, trained: Trained) -> dict[str, np.ndarray]:
    """Read a trace to replay.

    Raises RunError if it is damaged or does not fit the model, and OSError.
    """
    model = trained.config.model
    run = trained.config.run.name
    with file.open("rb") as opened:
        if not zipfile.is_zipfile(file):
            raise RunError(f"{file} is not a routing trace (no .npz); write one with --trace")
        try:
            archive = np.load(opened)
            trace = {name: archive[name] for name in FIELDS}
            experts = trace["experts"]
            n_expert = int(trace["n_expert"])
            L, N, K = experts.shape
            W, width = trace["tokens"].shape
            T = width - 1
            intact = N == W * T and 0 <= experts.min() <= experts.max() < n_expert
        except Exception as error:  # numpy and zipfile raise many kinds
            raise RunError(
                f"{file} is not a routing trace ({first_line(error)}); write one with --trace"
            ) from error
    if trace["tokenizer"] != trained.metadata["tokenizer"]:
        raise RunError(
            f"{file}: its tokenizer is not that of {run}; "
            f"trace a run on data with the same tokenizer"
        )
    if not intact or trace["tokens"].max() >= model.vocab_size:
        raise RunError(
            f"{file}: its experts, of {N} tokens, are not those of {W} windows of {T}; "
            f"write it again"
        )
    of_model = (model.n_layer, model.n_expert, model.top_k)
    of_trace = (L, n_expert, K)
    if of_trace != of_model:
        raise RunError(
            f"{file} has {of_trace} layers with experts, n_expert and top_k, {run} {of_model}; "
            f"trace a run with these"
        )
    return trace
