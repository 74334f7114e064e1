"""Count what routers decide over validation windows, and measure what the counts show about each layer.

N tokens, E experts, K chosen per token, U tokens of the vocabulary that are common enough to be counted one by one.
Co-activation, vocabulary specialization and router saturation are those of OLMoE (arXiv 2409.02060, Sec. 5).

The chance level is measured too: everything is counted a second time with each token's choices taken from another
token of another window. That keeps how often each token and each expert occurs, and removes how they are related.
"""

import json
import math
from typing import Any

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from scipy.special import entr, rel_entr
from torch import Tensor

from common.progress import progress_bar
from data.bins import Tokens
from data.loader import windows
from data.mixture import JoinedTokens
from data.tokenizer import Tokenizer
from model import GPT
from router import Router, Routing, entropy, expert_loads, token_distribution

MIN_COUNT = 10  # rarer tokens say little about where such tokens go
BATCH_TOKENS = 4096  # approximate; at least two windows, since chance takes choices from another window of the batch
GATE_TOKENS = 100_000  # at most this many tokens' gates are kept, for quantiles
QUANTILES = ("0.05", "0.5", "0.95")
SHOWN = 8  # tokens per expert

Described = dict[str, Any]


class LayerCounts:
    """Sums over the tokens of one layer.

    Attributes:
        tokens: N.
        together: (E, E) int64, tokens that chose both experts; the diagonal holds the loads.
        by_token: (2, U + 1, E) int32, choices by [measured, by chance], token, expert. The last row of tokens holds
            all rare ones.
        agreement: (2, E, E) int64, tokens that chose expert i here and j in the other model, [measured, by chance].
        entropy: summed over tokens, nats.
        zero_gates: gates that are exactly 0.
        gates: (2, n) each, sum and l2 norm of the gates of every `stride`-th token.
    """

    def __init__(self, n_expert: int, n_rows: int, stride: int, device: torch.device) -> None:
        self.tokens, self.stride, self.gates = 0, stride, []
        self.together = torch.zeros(n_expert, n_expert, dtype=torch.int64, device=device)
        self.by_token = torch.zeros(2, n_rows, n_expert, dtype=torch.int32, device=device)
        self.agreement = torch.zeros(2, n_expert, n_expert, dtype=torch.int64, device=device)
        self.entropy = torch.zeros((), dtype=torch.float64, device=device)
        self.zero_gates = torch.zeros((), dtype=torch.int64, device=device)

    def add(self, routing: Routing, rows: Tensor, other: Routing | None = None) -> None:
        """Add the routing of B windows, and the other model's routing of the same windows.

        Args:
            routing: of N = B·T tokens.
            rows: (B, T) int64, each token's row in `by_token`.
            other: of the same tokens.
        """
        N, E = routing.scores.shape
        self.tokens += N
        self.together += count_pairs(routing.experts, routing.experts, E)
        self.entropy += N * entropy(token_distribution(routing))
        self.zero_gates += (routing.weights == 0).sum()
        for table, places in zip(self.by_token, (rows, shuffled_baseline(rows)), strict=True):
            cells = places.flatten()[:, None] * E + routing.experts  # (N, K)
            table += expert_loads(cells, table.numel()).view_as(table)
        gates = routing.weights[:: self.stride]
        self.gates.append(torch.stack([gates.sum(-1), torch.linalg.vector_norm(gates, dim=-1)]).cpu())
        if other is not None:
            theirs = other.experts.view(*rows.shape, -1)  # (B, T, K)
            for counts, chosen in zip(self.agreement, (theirs, shuffled_baseline(theirs)), strict=True):
                counts += count_pairs(routing.experts, chosen.flatten(0, 1), E)


def count_pairs(mine: Tensor, theirs: Tensor, n_expert: int) -> Tensor:
    """(N, K) chosen experts of the same tokens, twice, N < 2²⁴ -> (E, E) int64, the tokens that chose i and j."""
    one, other = (torch.zeros(len(e), n_expert, device=e.device).scatter_(1, e, 1) for e in (mine, theirs))
    return (one.T @ other).long()


def shuffled_baseline(x: Tensor) -> Tensor:
    """(B, T, ...) -> the same values, each moved to another window and, in all windows alike, to another position."""
    order = torch.randperm(x.shape[1], generator=torch.Generator().manual_seed(1))
    return x.roll(1, 0)[:, order.to(x.device)]


def record_routing(model: GPT, idx: Tensor) -> list[Routing]:
    """Run tokens `idx` (B, T) through the model and return what the router of each layer decides."""
    seen: list[Routing] = []
    routers = [module for module in model.modules() if isinstance(module, Router)]
    hooks = [router.register_forward_hook(lambda module, inputs, routing: seen.append(routing)) for router in routers]
    try:
        model.hidden(idx)
    finally:
        for hook in hooks:
            hook.remove()
    return seen


@torch.no_grad()
def count_routing(
    model: GPT, other: GPT | None = None, *, tokens: Tokens | JoinedTokens, indices: np.ndarray
) -> tuple[list[LayerCounts], np.ndarray, np.ndarray]:
    """Run the windows `indices` of `tokens`, two or more, through a model and the one to compare it with.

    Returns:
        The counts of each layer with experts; the ids (U,) of the tokens counted one by one, the most common first;
        and how often each of them occurs (U,).

    Raises:
        ValueError: no token occurs MIN_COUNT times.
    """
    config, device = model.config, model.head.device
    n_batches = max(1, min(len(indices) // 2, len(indices) * config.block_size // BATCH_TOKENS))
    batches = np.array_split(indices, n_batches)
    seen = np.zeros(config.vocab_size, np.int64)
    for batch in batches:
        seen += np.bincount(windows(tokens, batch, config.block_size)[0].ravel(), minlength=len(seen))
    ids = np.argsort(-seen, kind="stable")[: (seen >= MIN_COUNT).sum()]
    if not len(ids):
        raise ValueError(f"no token occurs {MIN_COUNT} times among {seen.sum():,} tokens; raise --windows")
    row_of = torch.full((len(seen),), len(ids))
    row_of[torch.from_numpy(ids)] = torch.arange(len(ids))
    stride = math.ceil(seen.sum() / GATE_TOKENS)
    n_layer = config.n_layer - config.n_dense_layer  # with experts
    layers = [LayerCounts(config.n_expert, len(ids) + 1, stride, device) for _ in range(n_layer)]
    for batch in progress_bar(iterable=batches, desc="windows", leave=False):
        idx = torch.from_numpy(windows(tokens, batch, config.block_size)[0])
        mine = record_routing(model, idx.to(device))
        theirs = record_routing(other, idx.to(device)) if other else [None] * len(mine)
        for counts, routing, others in zip(layers, mine, theirs, strict=True):
            counts.add(routing, row_of[idx].to(device), others)
    return layers, ids, seen[ids]


# --- measures -------------------------------------------------------------------------------------------------------


def coactivation_shares(together: np.ndarray) -> np.ndarray:
    """(E, E) tokens that chose both -> (E, E) share of i's tokens that chose j too, OLMoE's co-activation.

    NaN on the diagonal, and in the rows of experts without tokens.
    """
    with np.errstate(invalid="ignore"):  # 0 / 0
        shares = together / together.diagonal()[:, None]
    np.fill_diagonal(shares, np.nan)
    return shares


def mean_strongest(shares: np.ndarray) -> float:
    """Mean over experts of the largest of their `coactivation_shares` (E, E); experts without tokens do not count."""
    shares = shares[~np.isnan(shares).all(1)]
    return float(np.nanmax(shares, 1).mean()) if len(shares) else 0.0


def vocabulary_specialization(rows: np.ndarray, seen: np.ndarray) -> float:
    """Mean over tokens of the share of a token's occurrences (U,) that its most frequent expert has, rows (U, E)."""
    return float((rows.max(1) / seen).mean())


def divergence_from_text(rows: np.ndarray) -> np.ndarray:
    """Choices by token (U + 1, E) -> (E,) nats, KL divergence of an expert's tokens from the tokens of the text.

    Σ_x P(x|e) ln(P(x|e) / P(x)); 0 for an expert without tokens.
    """
    return rel_entr(rows / np.maximum(rows.sum(0), 1), rows.sum(1, keepdims=True) / rows.sum()).sum(0)


def compare_choices(agreement: np.ndarray, top_k: int) -> Described:
    """Agreement of two models in one layer, from (2, E, E) tokens that chose i and j, measured and by chance.

    `same_number` is the share of a token's experts with equal numbers in both; `matched` the same after the best
    one-to-one renumbering of the other model's experts, `matching` (E,).
    """
    found: Described = {"matching": linear_sum_assignment(agreement[0], maximize=True)[1].tolist()}
    for counts, suffix in zip(agreement, ("", "_by_chance"), strict=True):
        found[f"same_number{suffix}"] = float(counts.trace() * top_k / counts.sum())
        matched = counts[linear_sum_assignment(counts, maximize=True)]
        found[f"matched{suffix}"] = float(matched.sum() * top_k / counts.sum())
    return found


def describe_layer(counts: LayerCounts, ids: np.ndarray, seen: np.ndarray, tokenizer: Tokenizer) -> Described:
    """The layer's entry of routing.json; `ids` and `seen` (U,) as `count_routing` returns them."""
    together, N = counts.together.cpu().numpy(), counts.tokens
    by_token, by_chance = counts.by_token.cpu().numpy()  # (U + 1, E) each
    loads = together.diagonal()
    unrelated = np.where(np.eye(len(loads), dtype=bool), np.nan, loads / N)
    layer: Described = {
        "loads": loads,
        "load_imbalance": loads.max() / loads.mean(),
        "dead_experts": (loads == 0).sum(),
        "load_entropy": entr(loads / loads.sum()).sum(),
        "entropy": counts.entropy.item() / N,
        "zero_gates": counts.zero_gates.item() / loads.sum(),
        "coactivation": together,
        "strongest_partner": mean_strongest(coactivation_shares(together)),
        "strongest_partner_by_chance": mean_strongest(unrelated),
        "vocabulary": vocabulary_specialization(by_token[:-1], seen),
        "vocabulary_by_chance": vocabulary_specialization(by_chance[:-1], seen),
        "experts": [
            {"nats": nats, "nats_by_chance": nats_by_chance, "tokens": find_tokens(chose, ids, seen, N, tokenizer)}
            for nats, nats_by_chance, chose in zip(
                divergence_from_text(by_token), divergence_from_text(by_chance), by_token.T, strict=True
            )
        ],
    }
    for name, values in zip(("gate_sum", "gate_norm"), torch.cat(counts.gates, 1).double().numpy(), strict=True):
        layer[name] = dict(zip(QUANTILES, np.quantile(values, [float(q) for q in QUANTILES]), strict=True))
    return json.loads(json.dumps(layer, default=lambda array: array.tolist()))  # no NumPy types


def find_tokens(chose: np.ndarray, ids: np.ndarray, seen: np.ndarray, N: int, tokenizer: Tokenizer) -> list[Described]:
    """The tokens that add most to an expert's divergence from the text, from how often each `chose` it (U + 1,).

    `share` is of the expert's load, `lift` that over the token's share of the text.
    """
    chose, load = chose[:-1], max(1, chose.sum())
    lift = chose / load / (seen / N)
    gain = chose * np.log(np.maximum(lift, 1))
    return [
        {
            "id": ids[row],
            "text": tokenizer.decode([ids[row]]),
            "share": chose[row] / load,
            "lift": lift[row],
        }
        for row in np.argsort(-gain, kind="stable")[:SHOWN]
        if gain[row] > 0
    ]
