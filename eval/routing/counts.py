"""Counts of what routers decide, and what they tell of a layer.

N tokens, E experts, K of them a token's. Co-activation, vocabulary specialization and router saturation are OLMoE's
(arXiv 2409.02060, Sec. 5). Chance is measured: everything is counted once more with each token's choices taken from
another token, of another window. That keeps how often each token and each expert comes, and nothing of what they have
to do with each other.
"""

from contextlib import contextmanager

import numpy as np
import torch
from tqdm import tqdm

from data.loader import windows
from router import entropy, expert_loads, token_distribution

MIN_COUNT = 10  # a token that came less often tells little of where such tokens go
BATCH_TOKENS = 4096  # about as many, in two windows or more: chance takes choices from another of the batch
GATE_TOKENS = 100_000  # whose gates are kept for quantiles
BINS = 60
QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
SHOWN = 8  # tokens of an expert, pairs of a layer
COMMON = 40  # tokens whose choices are told


class Tally:
    """Sums over tokens: L layers, E experts, U tokens that are counted by themselves and a row for all others.

    `row_of` (V,) int64 is the row of each token. Of a `share` of all tokens the gates' sums and norms are kept.
    """

    def __init__(self, config, row_of, share):
        L, E, device = config.n_layer, config.n_expert, row_of.device
        self.row_of, self.share, self.tokens, self.n_expert = row_of, share, 0, E
        self.together = torch.zeros(L, E, E, dtype=torch.int64, device=device)  # chose both; loads on the diagonal
        self.entropy = torch.zeros(L, dtype=torch.float64, device=device)
        self.zero_gates = torch.zeros(L, dtype=torch.int64, device=device)
        # How often tokens of a row chose an expert first [0], or at all [1].
        self.rows = torch.zeros(L, 2, int(row_of.max()) + 1, E, dtype=torch.int32, device=device)
        self.rows_by_chance = torch.zeros_like(self.rows)
        self.gates = [[] for _ in range(L)]  # of (n, 2): sum and l2 norm
        self.generator = torch.Generator().manual_seed(0)

    def add(self, layer, routing, idx):
        """The Routing of the tokens `idx` (B, T) in `layer`."""
        N = idx.numel()
        self.tokens += N if layer == 0 else 0
        self.together[layer] += pairs(routing.experts, routing.experts, self.n_expert)
        self.entropy[layer] += N * entropy(token_distribution(routing))
        self.zero_gates[layer] += (routing.weights == 0).sum()
        for table, ids in ((self.rows, idx), (self.rows_by_chance, elsewhere(idx))):
            places = self.row_of[ids.flatten()][:, None] * self.n_expert + routing.experts  # (N, K)
            for counts, chosen in zip(table[layer], (places[:, 0], places.flatten()), strict=True):
                counts += expert_loads(chosen, counts.numel()).view_as(counts)
        kept = torch.randperm(N, generator=self.generator)[: max(1, int(self.share * N))]
        gates = routing.weights[kept.to(idx.device)]
        self.gates[layer].append(torch.stack([gates.sum(-1), torch.linalg.vector_norm(gates, dim=-1)], -1).cpu())


class Agreement:
    """Tokens that chose expert i of one model and j of the other, (L, E, E), and how many by chance."""

    def __init__(self, config, device):
        self.n_expert = config.n_expert
        self.pairs, self.pairs_by_chance = torch.zeros(
            2, config.n_layer, config.n_expert, config.n_expert, dtype=torch.int64, device=device
        )

    def add(self, layer, mine, theirs):
        """Chosen experts of the same tokens, (B, T, K) each."""
        for counts, others in ((self.pairs, theirs), (self.pairs_by_chance, elsewhere(theirs))):
            counts[layer] += pairs(mine.flatten(0, 1), others.flatten(0, 1), self.n_expert)


def pairs(mine, theirs, n_expert):
    """Chosen experts (N, K) of the same tokens, N < 2²⁴ -> (E, E) int64, the tokens that chose i and j."""
    one, other = (torch.zeros(len(e), n_expert, device=e.device).scatter_(1, e, 1) for e in (mine, theirs))
    return (one.T @ other).long()


def elsewhere(x):
    """(B, T, ...) -> the same, each place's from another window and, in all windows alike, another position."""
    order = torch.randperm(x.shape[1], generator=torch.Generator().manual_seed(1))
    return x.roll(1, 0)[:, order.to(x.device)]


@contextmanager
def watched(model, see):
    """Within, `see(layer, routing)` is called with what each router decides."""

    def hook(layer):
        def tell(module, inputs, routing):
            see(layer, routing)

        return tell

    handles = [block.mlp.router.register_forward_hook(hook(layer)) for layer, block in enumerate(model.blocks)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def count(model, tokens, indices, other=None):
    """The windows `indices` of `tokens`, two or more, through `model` and, to compare with, `other`.

    Returns (Tally, Agreement or None, ids (U,) of the tokens that have a row, commonest first, and how often each
    came). Raises ValueError if there are none.
    """
    config, device = model.config, model.head.device
    n_batches = max(1, min(len(indices) // 2, len(indices) * config.block_size // BATCH_TOKENS))
    batches = np.array_split(indices, n_batches)
    seen = np.zeros(config.vocab_size, np.int64)
    for batch in batches:
        seen += np.bincount(windows(tokens, batch, config.block_size)[0].ravel(), minlength=len(seen))
    ids = np.argsort(-seen, kind="stable")[: (seen >= MIN_COUNT).sum()]
    if not len(ids):
        raise ValueError(f"no token comes {MIN_COUNT} times among {seen.sum():,} tokens; raise --windows")
    row_of = torch.full((len(seen),), len(ids))
    row_of[torch.from_numpy(ids)] = torch.arange(len(ids))
    tally = Tally(config, row_of.to(device), min(1, GATE_TOKENS / seen.sum()))
    agreement = Agreement(config, device) if other else None
    for batch in tqdm(batches, desc="windows", disable=None, leave=False):
        idx = torch.from_numpy(windows(tokens, batch, config.block_size)[0]).to(device)
        mine, theirs = [], []

        def see(layer, routing, idx=idx, mine=mine):
            tally.add(layer, routing, idx)
            mine.append(routing.experts.view(*idx.shape, -1))

        def see_other(layer, routing, idx=idx, theirs=theirs):
            theirs.append(routing.experts.view(*idx.shape, -1))

        with watched(model, see):
            model.hidden(idx)
        if other:
            with watched(other, see_other):
                other.hidden(idx)
            for layer, chosen in enumerate(zip(mine, theirs, strict=True)):
                agreement.add(layer, *chosen)
    return tally, agreement, ids, seen[ids]


# --- measures -------------------------------------------------------------------------------------------------------


def entropy_of(loads):
    """Of the distribution that loads (E,) are in proportion to, nats."""
    shares = loads[loads > 0] / loads.sum()
    return float(-(shares * np.log(shares)).sum())


def coactivation(together):
    """(E, E) counts of tokens that chose both -> the share of i's tokens that chose j as well, (E, E): OLMoE's
    co-activation. nan on the diagonal and where i has no tokens."""
    off = np.where(np.eye(len(together), dtype=bool), np.nan, together)
    loads = together.diagonal()[:, None].astype(float)
    return np.divide(off, loads, out=np.full(off.shape, np.nan), where=loads > 0)


def strongest(shares):
    """The largest share (E, E) of each expert that has tokens, in the mean over these."""
    shares = shares[~np.isnan(shares).all(1)]
    return float(np.nanmax(shares, 1).mean()) if len(shares) else 0.0


def vocabulary_specialization(rows, seen):
    """Of tokens that came `seen` (U,) times and chose experts `rows` (U, E) times: the share of a token's occurrences
    that its commonest expert has, in the mean over tokens. 1: each token has an expert of its own."""
    return float((rows.max(1) / seen).mean())


def information(rows):
    """Choices by tokens (U + 1, E) -> (E,) nats, how far the tokens that chose an expert are from those of the text:
    Σ_x P(x|e) ln(P(x|e) / P(x)). 0 of an expert that has none."""
    text = rows.sum(1, keepdims=True) / rows.sum()
    own = rows / np.maximum(rows.sum(0), 1)
    return np.where(own > 0, own * np.log(np.where(own > 0, own, 1) / np.where(text > 0, text, 1)), 0).sum(0)


def best_matching(gain):
    """The permutation π (E,) for which Σ_i gain[i, π(i)] is largest, of gain (E, E). Exact: the Hungarian method by
    shortest augmenting paths (Jonker and Volgenant 1987), O(E³)."""
    cost = float(gain.max()) - gain
    E = len(cost)
    of_row, of_column = np.zeros((2, E))  # dual prices: their sum is nowhere above the cost, and equal where matched
    row_at = np.full(E, -1)  # the row that has each column
    for new in range(E):
        distance, before, done = np.full(E, np.inf), np.full(E, -1), np.zeros(E, dtype=bool)
        row, column, length = new, -1, 0.0
        while row >= 0:
            reached = length + cost[row] - of_row[row] - of_column
            better = ~done & (reached < distance)
            distance[better], before[better] = reached[better], column
            column = int(np.where(done, np.inf, distance).argmin())
            length, row, done[column] = distance[column], row_at[column], True
        of_row[new] += length
        settled = np.flatnonzero(done & (row_at >= 0))
        of_row[row_at[settled]] += length - distance[settled]
        of_column[settled] -= length - distance[settled]
        while column >= 0:
            row_at[column] = row_at[before[column]] if before[column] >= 0 else new
            column = before[column]
    return row_at.argsort()


def shared(counts, matching, top_k):
    """The share of a token's experts that two models have in common when j = matching[i] (E,) is the same as i: counts
    (E, E) of tokens that chose i and j. 1: all of them."""
    return float(counts[np.arange(len(counts)), matching].sum() * top_k / counts.sum())


def compare(counts, by_chance, top_k):
    """Agreement of two models in one layer, from (E, E) counts of tokens that chose i and j."""
    same, best, best_by_chance = np.arange(len(counts)), best_matching(counts), best_matching(by_chance)
    return {
        "same_number": shared(counts, same, top_k),
        "same_number_by_chance": shared(by_chance, same, top_k),
        "matched": shared(counts, best, top_k),
        "matched_by_chance": shared(by_chance, best_by_chance, top_k),
        "matching": best.tolist(),
    }


def describe(tally, ids, seen, tokenizer):
    """A dict a layer, as routing.json has it."""
    gates = [torch.cat(parts).double().numpy() for parts in tally.gates]  # (n, 2) each
    edges = [edges_of(np.concatenate([layer[:, i] for layer in gates])) for i in range(2)]
    arrays = (tally.together, tally.entropy, tally.zero_gates, tally.rows, tally.rows_by_chance)
    layers = []
    for together, nats, zeros, rows, by_chance in zip(*(a.cpu().numpy() for a in arrays), strict=True):
        loads, N = together.diagonal(), tally.tokens
        shares = np.where(np.eye(len(loads), dtype=bool), np.nan, loads / N)
        told, told_by_chance = information(rows[1]), information(by_chance[1])
        layer = {
            "loads": loads.tolist(),
            "load_imbalance": float(loads.max() / loads.mean()),
            "dead_experts": int((loads == 0).sum()),
            "load_entropy": entropy_of(loads),
            "entropy": float(nats / N),
            "zero_gates": float(zeros / loads.sum()),
            "coactivation": together.tolist(),
            "strongest_partner": strongest(coactivation(together)),
            "strongest_partner_by_chance": strongest(shares),
            "pairs": commonest_pairs(together, N),
            "common": rows[1, :-1][:COMMON].tolist(),
            "experts": [
                {
                    "nats": float(told[e]),
                    "nats_by_chance": float(told_by_chance[e]),
                    "tokens": tokens_of(rows[1, :, e], ids, seen, N, tokenizer),
                }
                for e in range(len(loads))
            ],
        }
        for i, name in enumerate(("first", "any")):
            layer[f"vocabulary_{name}"] = vocabulary_specialization(rows[i, :-1], seen)
            layer[f"vocabulary_{name}_by_chance"] = vocabulary_specialization(by_chance[i, :-1], seen)
        for i, name in enumerate(("gate_sum", "gate_norm")):
            values = gates[len(layers)][:, i]
            quantiles = {
                f"{q:g}": float(value) for q, value in zip(QUANTILES, np.quantile(values, QUANTILES), strict=True)
            }
            histogram = np.histogram(values.clip(edges[i][0], edges[i][-1]), edges[i])[0]
            layer[name] = {"quantiles": quantiles, "histogram": histogram.tolist(), "edges": edges[i].tolist()}
        layers.append(layer)
    return layers


def edges_of(values):
    """BINS bins over nearly all of the values; the few beyond belong to the outermost."""
    low, high = np.quantile(values, (0.001, 0.999))
    margin = 0.05 * max(1, abs(high)) if high - low < 1e-4 * max(1, abs(high)) else 0.02 * (high - low)
    return np.linspace(low - margin, high + margin, BINS + 1)


def commonest_pairs(together, N):
    """[{experts, tokens, lift}] of the pairs that most tokens chose beyond what loads (on the diagonal) would give;
    lift is how many times as many."""
    loads = together.diagonal()
    expected = np.outer(loads, loads) / N
    excess = np.where(np.triu(np.ones(expected.shape, dtype=bool), 1), together - expected, -np.inf)
    places = np.argsort(-excess, axis=None, kind="stable")[:SHOWN]
    return [
        {"experts": [int(i), int(j)], "tokens": int(together[i, j]), "lift": float(together[i, j] / expected[i, j])}
        for i, j in zip(*np.unravel_index(places, excess.shape), strict=True)
        if excess[i, j] > 0
    ]


def tokens_of(chose, ids, seen, N, tokenizer):
    """[{id, text, share, lift, specialization}] of the tokens that make an expert's tokens differ most from the text's:
    `chose` (U + 1,) times each, which is `share` of its load, `lift` times the token's share of the text, and
    `specialization` of the token's occurrences."""
    chose, load = chose[:-1], max(1, chose.sum())
    lift = chose / load / (seen / N)
    gain = chose * np.log(np.maximum(lift, 1))
    return [
        {
            "id": int(ids[row]),
            "text": tokenizer.decode([ids[row]]),
            "share": float(chose[row] / load),
            "lift": float(lift[row]),
            "specialization": float(chose[row] / seen[row]),
        }
        for row in np.argsort(-gain, kind="stable")[:SHOWN]
        if gain[row] > 0
    ]
