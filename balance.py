"""The balance of the experts' loads: what is measured of a routing, and what evens the loads out.

Either a loss in training (`balance_loss`), or the selection bias β: moved by a sign after each step
(`update_selection_bias`), or set to a quantile (`solve_selection_bias`).

Shapes: N tokens, B sequences, L layers, E experts, K = top_k.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from router import EPS, Routing

MARGIN_BINS = 1000


class Stats(NamedTuple):
    """Measures of a model's L layers with experts; without the dimension L, of one layer."""

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


# computed by `Router.fused`, in its order
FUSED_FIELDS = (
    "loads",
    "probability",
    "z_loss",
    "entropy",
    "zero_gates",
    "gate_square",
    "gate_sum",
)


class LayerMetric(NamedTuple):
    """How a field of Stats that is a mean over tokens, (L,), is logged."""

    name: str  # router/NAME for training steps and val/NAME: the mean over layers
    by_layer: bool = True  # each layer, too, as NAME_of_layers
    in_validation: bool = True
    transform: Callable[[Tensor], Tensor] | None = None  # of the mean over tokens


# {field of Stats: how it is logged}. Checkpoints have sums in this order: add at the end.
LAYER_METRICS = {
    "entropy": LayerMetric("entropy", in_validation=False),
    "zero_gates": LayerMetric("zero_gates", by_layer=False),
    "gate_square": LayerMetric("gate_norm", transform=torch.sqrt),
    "gate_sum": LayerMetric("gate_sum"),
}


def expert_loads(experts: Tensor, n_expert: int) -> Tensor:
    """Count the tokens that chose each expert: experts (..., N, K) int64 -> (..., E) int64."""
    flat = experts.flatten(-2)
    loads = torch.zeros(*flat.shape[:-1], n_expert, dtype=torch.int64, device=flat.device)
    return loads.scatter_add_(-1, flat, torch.ones_like(flat))


def token_distribution(routing: Routing) -> Tensor:
    """Normalise the routing scores, negative ones set to 0, to sum to 1 per token: (N, E).

    For softmax these are its probabilities.
    """
    positive = routing.scores.relu()
    return positive / (positive.sum(-1, keepdim=True) + EPS)


def measure(routing: Routing, n_sequence: int) -> Stats:
    """Compute the statistics of tokens that form `n_sequence` sequences."""
    if routing.stats is None:
        fields = measure_in_torch(routing, n_sequence)
    else:
        fields = dict(zip(FUSED_FIELDS, routing.stats, strict=True))
    # A metric that `Router.fused` does not compute is added to `fields` here.
    return Stats(**fields)


def measure_in_torch(routing: Routing, n_sequence: int) -> dict[str, Tensor]:
    """The FUSED_FIELDS of Stats."""
    n_token, top_k = routing.experts.shape
    n_expert = routing.scores.shape[1]
    gates = routing.weights.detach()  # (N, K)
    distribution = token_distribution(routing)  # (N, E)
    return {
        "loads": expert_loads(routing.experts.view(n_sequence, -1, top_k), n_expert),
        "probability": distribution.view(n_sequence, -1, n_expert).mean(1),
        "z_loss": z_loss(routing),
        "entropy": entropy(distribution),
        "zero_gates": (gates == 0).float().mean(),
        "gate_square": gates.square().sum() / n_token,
        "gate_sum": gates.sum() / n_token,
    }


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
    """Once per optimizer step, in place: β_e += rate · sign(mean load - load of e).

    Args:
        selection_bias: (E,) β of one router.
        loads: (E,) tokens per expert, summed over all tokens of the step on all ranks.
        rate: step size, `train.bias_update_rate`; a 0-d tensor to skip the step on the device.

    Source: DeepSeek-V3 (arXiv 2412.19437), Sec. 2.1.2.
    """
    loads = loads.to(selection_bias.dtype)
    selection_bias.add_(rate * torch.sign(loads.mean() - loads))


def squash(margins: Tensor, span: Tensor) -> Tensor:
    """Margins of at most `span` (0-d), or of any size if that is inf, as numbers in [-1, 1]."""
    return torch.where(span.isinf(), margins / (1 + margins.abs()), margins / span)


def unsquash(x: Tensor, span: Tensor) -> Tensor:
    """The margins that `squash` makes x of."""
    return torch.where(span.isinf(), x / (1 - x.abs()), x * span)


@torch.no_grad()
def count_margins(scores: Tensor, selection_bias: Tensor, top_k: int, reach: float) -> Tensor:
    """Histograms (E, MARGIN_BINS) int64 of the margins by which tokens miss experts.

    A token's margins are α - (s + β), where α is its (K+1)-th largest s + β: it is an expert's if
    the margin is negative. Bins span ±(reach + max β - min β), beyond which no margin lies; if
    scores have no bounds (reach is inf), they span the margins m as m / (1 + |m|). Their edges are
    the cubes of even steps, finest at 0, where the margins of balanced experts end: in 1,000 even
    bins, those of softmax over hundreds of experts share one.

    Args:
        scores: (N, E), of any part of a step: counts of parts add up.
        selection_bias: (E,) β that experts were chosen with.
        top_k: K < E.
        reach: of the scores, `RouterSpec.reach`; inf if they have no bounds.
    """
    n_expert, shifted = len(selection_bias), scores + selection_bias
    margins = shifted.topk(top_k + 1, dim=-1).values[:, -1:] - shifted  # (N, E)
    margins = squash(margins, reach + selection_bias.amax() - selection_bias.amin())  # in [-1, 1]
    place = margins.sign() * margins.abs() ** (1 / 3)
    bins = ((place + 1) * (MARGIN_BINS / 2)).long().clamp(0, MARGIN_BINS - 1)
    bins = bins + MARGIN_BINS * torch.arange(n_expert, device=bins.device)
    return expert_loads(bins, n_expert * MARGIN_BINS).view(n_expert, MARGIN_BINS)


@torch.no_grad()
def solve_selection_bias(
    selection_bias: Tensor, margins: Tensor, top_k: int, reach: float
) -> Tensor:
    """The β (E,), of mean 0, under which an expert would have had K/E of a step's tokens, were other β as they are.

    It is the K/E quantile of margin + β, interpolated within a bin. `margins` (E, MARGIN_BINS) are
    sums over the step's tokens on all ranks; the other arguments are those of `count_margins`.

    Source: Quantile Balancing (kexue.fm/archives/11619); histograms as in Kimi K3's report, App. D.
    """
    n_expert, counts, old = len(selection_bias), margins.long(), selection_bias.double()
    below = counts.cumsum(-1)  # (E, bins); of integers, so exact and deterministic on a GPU, too
    wanted = top_k * below[:, -1:]  # times E, an integer
    # (E, 1) first bin with enough tokens up to its end
    at = (below * n_expert < wanted).sum(-1, keepdim=True)
    inside = counts.gather(-1, at)
    place = at + 1 - (below.gather(-1, at) - wanted.double() / n_expert) / inside
    edge = (2 * place[:, 0] / MARGIN_BINS - 1) ** 3
    new = old + unsquash(edge, reach + old.amax() - old.amin())
    return (new - new.mean()).to(selection_bias.dtype)
