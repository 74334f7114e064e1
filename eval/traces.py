"""Routing traces: the experts and gates of every token, to be replayed in another model (docs/traces.md).

A training loop replays one by `replay_routing`, as reinforcement learning does with the experts
that its sampler took (arXiv 2510.11370). Shapes: L layers with experts, W windows of T tokens, N =
W·T, K experts chosen per token.
"""

import io
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

BATCH_TOKENS = 4096  # of a pass, approximate
FIELDS = ("experts", "gates", "losses", "tokens", "n_expert", "tokenizer", "source")


def find_routers(model: GPT) -> list[Router]:
    """The routers of a model, by layer."""
    return [module for module in model.modules() if isinstance(module, Router)]


@contextmanager
def record_decisions(model: GPT) -> Iterator[list[Routing]]:
    """Within it, each pass of the model appends what the router of each layer decides."""
    decisions: list[Routing] = []
    with ExitStack() as hooks:
        for router in find_routers(model):
            hooks.enter_context(
                router.register_forward_hook(lambda _, inputs, routing: decisions.append(routing))
            )
        yield decisions


@contextmanager
def replay_routing(model: GPT, experts: Tensor) -> Iterator[None]:
    """Within it, tokens take the given experts, and routers compute their gates anew, with gradients.

    A training step has its forward and its backward pass within: activations may be recomputed.

    Args:
        model: not wrapped; its weights may be sharded.
        experts: (L, N, K) of any integer type, for the N tokens of every pass within.

    Raises:
        ValueError: experts of another number of layers; from a pass, of another N or K.
    """
    routers = find_routers(model)
    if len(routers) != len(experts):
        raise ValueError(
            f"experts to replay are of {len(experts)} layers, the model has {len(routers)}: take its own"
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
    """The fields `experts`, `gates` and `losses` for windows with their targets, `tokens` (W, T + 1).

    The model takes the `experts` (L, N, K), if they are given, in place of its own choice.
    """
    T, count = tokens.shape[1] - 1, min(len(tokens), -(-tokens.size // BATCH_TOKENS))
    chosen, gates, losses = [], [], []
    for rows in np.array_split(np.arange(len(tokens)), count):
        ids = torch.from_numpy(tokens[rows]).long().to(model.head.device)
        with ExitStack() as stack:
            if experts is not None:
                part = torch.from_numpy(experts[:, rows[0] * T : (rows[-1] + 1) * T])
                stack.enter_context(replay_routing(model, part))
            decisions = stack.enter_context(record_decisions(model))
            losses.append(model(ids[:, :-1].contiguous(), ids[:, 1:].contiguous()).losses.double())
        chosen.append(torch.stack([routing.experts for routing in decisions]).short())
        gates.append(torch.stack([routing.weights for routing in decisions]))
    joined = (torch.cat(chosen, 1), torch.cat(gates, 1), torch.cat(losses))
    return {name: tensor.cpu().numpy() for name, tensor in zip(FIELDS, joined, strict=False)}


def write_trace(file: Path, trained: Trained, tokens: np.ndarray) -> None:
    """Write the trace of a model on windows with their targets, `tokens` (W, T + 1).

    Raises OSError.
    """
    data, source = io.BytesIO(), f"{trained.config.run.name}, {trained.label}"
    more = {
        "tokens": tokens.astype(np.uint16),
        "n_expert": trained.config.model.n_expert,
        "source": source,
    }
    more["tokenizer"] = trained.metadata["tokenizer"]
    np.savez_compressed(data, allow_pickle=False, **trace_windows(trained.model, tokens), **more)
    write_atomic(file, data.getvalue())


def read_trace(file: Path, trained: Trained) -> dict[str, np.ndarray]:
    """Read a trace to replay.

    Raises RunError if it is damaged or does not fit the model, and OSError.
    """
    model, run = trained.config.model, trained.config.run.name
    with file.open("rb") as opened:
        try:
            archive = np.load(opened)
            trace = {name: archive[name] for name in FIELDS}
            experts, ids, of_trace = trace["experts"], trace["tokens"], int(trace["n_expert"])
            (L, N, K), (W, row) = experts.shape, ids.shape
            intact = N == W * (row - 1) and 0 <= experts.min() <= experts.max() < of_trace
        except Exception as error:  # numpy and zipfile raise many kinds
            raise RunError(
                f"{file} is not a routing trace ({first_line(error)}); write one with --trace"
            ) from error
    if trace["tokenizer"] != trained.metadata["tokenizer"]:
        raise RunError(
            f"{file}: its tokenizer is not that of {run}; trace a run on data with the same tokenizer"
        )
    if not intact or ids.max() >= model.vocab_size:
        raise RunError(
            f"{file}: its experts, of {N} tokens, are not those of {W} windows of {row - 1}; write it again"
        )
    mine = (model.n_layer - model.n_dense_layer, model.n_expert, model.top_k)
    if (L, of_trace, K) != mine:
        numbers = f"{(L, of_trace, K)} layers with experts, n_expert and top_k, {run} {mine}"
        raise RunError(f"{file} has {numbers}; trace a run with these")
    return trace
