"""Routing traces: experts and gates of every token, to replay in another model (docs/traces.md).

Shapes: L layers with experts, W windows of T tokens, N = W·T, K experts chosen per token.
"""

import io
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from common.files import write_atomic
from common.progress import progress_bar
from eval.trained import Trained
from model import GPT, Output
from router import Router, Routing
from runtime.batches import score

BATCH_TOKENS = 4096  # in a pass, approximate


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


class Trace(NamedTuple):
    """What the routers of a model decide for W windows of T tokens."""

    experts: np.ndarray  # (L, N, K) int16, highest score first
    gates: np.ndarray  # (L, N, K) float32
    losses: np.ndarray  # (W,) float64, nats per token
    entropy: np.ndarray  # (L,) float64, see `balance.Stats`


def trace_windows(model: GPT, tokens: np.ndarray) -> Trace:
    """Trace a model on windows.

    Args:
        model: in evaluation mode.
        tokens: (W, T + 1), windows with their targets.
    """
    W = len(tokens)
    T = tokens.shape[1] - 1
    size = max(1, BATCH_TOKENS // T)
    chosen, gates, entropies = [], [], []

    def read_batches() -> Iterator[tuple[Tensor, Tensor]]:
        for start in progress_bar(iterable=range(0, W, size), desc="traced", leave=False):
            ids = torch.from_numpy(tokens[start : start + size]).long()
            yield ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    with record_decisions(model) as decisions:

        def observe(output: Output) -> None:
            chosen.append(torch.stack([routing.experts for routing in decisions]).short().cpu())
            gates.append(torch.stack([routing.weights for routing in decisions]).float().cpu())
            entropies.append(output.stats.entropy.double() * chosen[-1].shape[1])
            decisions.clear()

        losses = score(model, read_batches(), model.head.device, observe)
    assert losses is not None, "nobody stops it"
    return Trace(
        experts=torch.cat(chosen, 1).numpy(),
        gates=torch.cat(gates, 1).numpy(),
        losses=losses.double().cpu().numpy(),
        entropy=(torch.stack(entropies).sum(0) / (W * T)).cpu().numpy(),
    )


def write_trace(file: Path, trained: Trained, tokens: np.ndarray) -> None:
    """Write the trace of a model on windows with their targets, `tokens` (W, T + 1).

    Raises OSError.
    """
    trace = trace_windows(trained.model, tokens)
    data = io.BytesIO()
    np.savez_compressed(
        data,
        allow_pickle=False,
        experts=trace.experts,
        gates=trace.gates,
        losses=trace.losses,
        tokens=tokens.astype(np.uint16),
        n_expert=trained.config.model.n_expert,
        source=f"{trained.config.run.name}, {trained.label}",
        tokenizer=trained.metadata["tokenizer"],
    )
    write_atomic(file, data.getvalue())
