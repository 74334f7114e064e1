"""The balance of the experts' loads: what is measured of a routing, and what evens the loads out.

Either a loss in training (`balance_loss`), or the selection bias β: moved by a sign after each step
(`update_selection_bias`), or set to a quantile (`solve_selection_bias`).

Shapes: N tokens, B sequences, L layers, E experts, K = top_k.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from common.measures import MEASURES
from router import EPS, Router, Routing

MARGIN_BINS = 1000


class Stats(NamedTuple):
    """Measures of a model's L layers with experts; without the dimension L, of one layer.

    `Router.fused` computes all but `margins`, in this order.
    """

    loads: Tensor  # (L, B, E) int64, tokens of each sequence that chose each expert
    # (L, B, E) mean over a sequence's tokens of `token_distribution`, with gradient
    probability: Tensor
    z_loss: Tensor  # (L,) router z-loss, with gradient
    entropy: Tensor  # (L,) nats, mean over tokens of the entropy of `token_distribution`
    zero_gates: Tensor  # (L,) fraction of the N·K gates that are exactly 0
    gate_square: Tensor  # (L,) mean over tokens of Σ g², the sum over a token's K gates
    gate_sum: Tensor  # (L,) mean over tokens of Σ g
    # (L, E, MARGIN_BINS) int64, `count_margins`; only for train.bias_update = "quantile"
    margins: Tensor | None = None


# fields of Stats that are added up, in the order of MEASURES
MEASURED_FIELDS = [measure.field for measure in MEASURES.values() if measure.field]


def summarize_routing(prefix: str, loads: Tensor, fields: dict[str, Tensor]) -> dict[str, Tensor]:
    """The values to log: `PREFIX/loads`, and of each measure `PREFIX/NAME`, `NAME_of_layers`.

    Args:
        prefix: "router" for training steps, "val" for an evaluation.
        loads: (L, E) tokens per expert. L = 0 for a dense model, which has no values.
        fields: {field of Stats: (L,) mean over tokens}, some of MEASURED_FIELDS; and by NAME what
            is measured otherwise.
    """
    if not len(loads):
        return {}
    unknown = fields.keys() - {measure.field or name for name, measure in MEASURES.items()}
    assert not unknown, f"MEASURES has no row for {list(unknown)}"
    values = {"loads": loads}
    for name, measure in MEASURES.items():
        layers = fields.get(measure.field or name)
        if measure.of_loads:
            layers = measure.of_loads(loads)
        if layers is None:
            continue
        if measure.of_mean:
            layers = measure.of_mean(layers)
        values[name] = measure.over_layers(layers)
        values[f"{name}_of_layers"] = layers
    return {f"{prefix}/{name}": value for name, value in values.items()}


def expert_loads(experts: Tensor, n_expert: int) -> Tensor:
    """Tokens that chose each expert: experts (..., N, K) int64 -> (..., E) int64."""
    flat = experts.flatten(-2)
    loads = torch.zeros(*flat.shape[:-1], n_expert, dtype=torch.int64, device=flat.device)
    return loads.scatter_add_(-1, flat, torch.ones_like(flat))


def token_distribution(routing: Routing) -> Tensor:
    """The routing scores, negative ones set to 0, normalised to sum to 1 per token: (N, E).

    For softmax these are its probabilities.
    """
    positive = routing.scores.relu()
    return positive / (positive.sum(-1, keepdim=True) + EPS)


def measure(routing: Routing, n_sequence: int) -> Stats:
    """Compute the statistics of tokens that form `n_sequence` sequences, except margins."""
    if routing.stats is not None:
        return Stats(*routing.stats)
    n_token, top_k = routing.experts.shape
    n_expert = routing.scores.shape[1]
    gates = routing.weights.detach()  # (N, K)
    distribution = token_distribution(routing)  # (N, E)
    return Stats(
        loads=expert_loads(routing.experts.view(n_sequence, -1, top_k), n_expert),
        probability=distribution.view(n_sequence, -1, n_expert).mean(1),
        z_loss=z_loss(routing),
        entropy=entropy(distribution),
        zero_gates=(gates == 0).float().mean(),
        gate_square=gates.square().sum() / n_token,
        gate_sum=gates.sum() / n_token,
    )


def balance_loss(probability: Tensor, loads: Tensor) -> Tensor:
    """Switch load-balancing loss E · Σ_e f_e P_e: 1 when balanced, E if one expert has all tokens.

    Scores are normalised per token, so the loss moves them against each other and cannot shrink
    KERN's γ or scale.

    Args:
        probability: (..., E) P, the mean over tokens of `token_distribution`. Carries the gradient.
        loads: (..., E), tokens per expert, of these tokens or of others; f_e is their share of all
            choices. No gradient.

    Returns:
        (...) dimensionless.

    Source: Switch Transformer (arXiv 2101.03961), eq. 4.
    """
    share = (loads / loads.sum(-1, keepdim=True)).to(probability.dtype)
    return loads.shape[-1] * (share * probability).sum(-1)


@torch.no_grad()
def entropy(distribution: Tensor) -> Tensor:
    """Mean entropy per token in nats, a scalar (), of `token_distribution` (N, E)."""
    return -(distribution * distribution.clamp_min(1e-30).log()).sum(-1).mean()


def z_loss(routing: Routing) -> Tensor:
    """Router z-loss, a scalar (): mean over tokens of logsumexp(logits)².

    Source: ST-MoE (arXiv 2202.08906), eq. 5.
    """
    return torch.logsumexp(routing.logits, dim=-1).square().mean()


@torch.no_grad()
def update_selection_bias(selection_bias: Tensor, loads: Tensor, rate: float | Tensor) -> None:
    """Move β in place, once per optimizer step: β_e += rate · sign(mean load - load of e).

    Args:
        selection_bias: (E,) β of one router.
        loads: (E,) tokens per expert, summed over all tokens of the step on all ranks.
        rate: step size, `train.bias_update_rate`; a 0-d tensor if the device decides to skip it.

    Source: DeepSeek-V3 (arXiv 2412.19437), Sec. 2.1.2.
    """
    loads = loads.to(selection_bias.dtype)
    selection_bias.add_(rate * torch.sign(loads.mean() - loads))


class SelectionBias:
    """Moves the routers' selection biases (train.bias_update), except in hash layers.

    Attributes:
        n_bin: bins of the histograms that a step's statistics need: MARGIN_BINS with "quantile",
            else 0.
        moved: (L,) mean distance that the last step moved the biases by; None except with
            "quantile".
    """

    def __init__(self, routers: Sequence[Router], update: str, rate: float) -> None:
        """Move the biases of `routers` by `update`, "sign" with a step of `rate` or "quantile"."""
        self.routers = routers
        self.rate = rate
        self.n_bin = MARGIN_BINS if update == "quantile" else 0
        self.moved: Tensor | None = None

    @torch.no_grad()
    def update(self, loads: Tensor, margins: Tensor, taken: Tensor) -> None:
        """Move the biases by a step's sums over all ranks.

        Args:
            loads: (L, E) tokens per expert.
            margins: (L, E, n_bin), histograms of `count_margins`.
            taken: () bool; where it is False, nothing changes.
        """
        if not self.rate and not self.n_bin:
            return
        distances = []
        for router, of_router, histogram in zip(self.routers, loads, margins, strict=True):
            bias = router.selection_bias
            old_bias = bias.clone()
            if router.hash_table is not None:
                pass  # its table chooses
            elif self.n_bin:
                bounds = router.spec.score_range
                solved = solve_selection_bias(bias, histogram, router.top_k, bounds)
                bias.copy_(torch.where(taken, solved, bias))
            else:
                update_selection_bias(bias, of_router, self.rate * taken)
            distances.append((bias - old_bias).abs().mean())
        if self.n_bin and distances:  # a dense model has none
            self.moved = torch.stack(distances)


# ---- quantile balancing
def margins_to_edges(margins: Tensor, span: Tensor) -> Tensor:
    """Map margins to positions in [-1, 1] on the axis of `count_margins`' bins.

    The map is a cube root, steepest at 0, where the margins of balanced experts end: in 1,000 even
    bins, all margins of softmax over hundreds of experts would share one.

    Args:
        margins: any shape, of absolute value at most `span`.
        span: (); inf where scores have no bounds: margins m then count as m / (1 + |m|).
    """
    unbounded = margins / (1 + margins.abs())
    fraction = torch.where(span.isinf(), unbounded, margins / span)
    return fraction.sign() * fraction.abs() ** (1 / 3)


def edges_to_margins(edges: Tensor, span: Tensor) -> Tensor:
    """Inverse of `margins_to_edges`."""
    fraction = edges**3
    return torch.where(span.isinf(), fraction / (1 - fraction.abs()), fraction * span)


def margin_span(selection_bias: Tensor, score_range: float) -> Tensor:
    """The largest possible margin, (): two scores + β differ by at most this."""
    return score_range + (selection_bias.amax() - selection_bias.amin())


@torch.no_grad()
def count_margins(
    scores: Tensor, experts: Tensor, selection_bias: Tensor, score_range: float
) -> Tensor:
    """Histograms of the margins by which tokens miss experts, for `solve_selection_bias`.

    A token's margin to an expert is α - (s + β), where α is the token's (K+1)-th largest s + β: the
    largest of those that it did not choose. It chose the experts with a negative margin.

    Args:
        scores: (N, E), of any part of a step: counts of parts add up.
        experts: (N, K) int64 with the largest s + β, K < E.
        selection_bias: (E,) β that they were chosen with.
        score_range: `RouterSpec.score_range` of the scores.

    Returns:
        (E, MARGIN_BINS) int64.
    """
    n_expert = len(selection_bias)
    shifted = scores + selection_bias  # (N, E)
    # not `topk` of K + 1, which took nearly half of the whole on a CPU
    threshold = shifted.scatter(-1, experts, -math.inf).amax(-1, keepdim=True)  # (N, 1) α
    margins = threshold - shifted  # (N, E)
    edges = margins_to_edges(margins, margin_span(selection_bias, score_range))
    bins = ((edges + 1) * (MARGIN_BINS / 2)).long().clamp(0, MARGIN_BINS - 1)
    first_bin = MARGIN_BINS * torch.arange(n_expert, device=bins.device)  # of each expert
    counts = expert_loads(bins + first_bin, n_expert * MARGIN_BINS)
    return counts.view(n_expert, MARGIN_BINS)


@torch.no_grad()
def solve_selection_bias(
    selection_bias: Tensor, margins: Tensor, top_k: int, score_range: float
) -> Tensor:
    """The selection bias that would have balanced a step, each expert's with the others' unchanged.

    An expert would have had K/E of the tokens if its β were higher by the K/E quantile of its
    margins, which is interpolated within a bin.

    Args:
        selection_bias: (E,) β that experts were chosen with.
        margins: (E, MARGIN_BINS) int64, `count_margins` summed over the step's tokens on all ranks.
        top_k: K < E.
        score_range: as for `count_margins`.

    Returns:
        (E,) new β, of mean 0.

    Source: Quantile Balancing (kexue.fm/archives/11619); histograms as in Kimi K3's report, App. D.
    """
    n_expert = len(selection_bias)
    beta = selection_bias.double()
    counts = margins.long()  # integers: their sums are exact, and deterministic on a GPU
    tokens_up_to_bin = counts.cumsum(-1)  # (E, bins)
    tokens = tokens_up_to_bin[:, -1:]  # (E, 1)
    is_below_target = tokens_up_to_bin * n_expert < top_k * tokens
    target = (top_k * tokens).double() / n_expert  # (E, 1) K/E of the tokens
    bin_of_target = is_below_target.sum(-1, keepdim=True)  # (E, 1)
    overshoot = tokens_up_to_bin.gather(-1, bin_of_target) - target
    quantile_in_bins = bin_of_target + 1 - overshoot / counts.gather(-1, bin_of_target)
    edge = 2 * quantile_in_bins[:, 0] / MARGIN_BINS - 1
    new = beta + edges_to_margins(edge, margin_span(beta, score_range))
    return (new - new.mean()).to(selection_bias.dtype)
