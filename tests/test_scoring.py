"""eval/scoring.py against one forward pass per pair."""

import random

import pytest
import torch
from numerics import SEED, assert_near, tolerance
from test_generation import small_model

from eval.routing import record_routing
from eval.scoring import CACHED, Scorer, make_batches, split_group

MARGIN = 1e-3  # of logits and router scores: more than rounding can change, so ranks are certain


def by_hand(model, context, continuation):
    """One forward pass over the pair; a pair that is too long loses its first tokens.

    Returns:
        The log-likelihood, whether the model would write the continuation, and the smallest margin of a rank.
    """
    ids = torch.tensor([[*context, *continuation][-(model.config.block_size + 1) :]])
    n = len(continuation)
    with torch.no_grad():
        logits = model.logits(model.hidden(ids[:, :-1])[0])[0, -n:].double()
        routings = record_routing(model, ids[:, :-1])
    targets = torch.tensor(continuation)[:, None]
    target, best = logits.gather(1, targets), logits.scatter(1, targets, -torch.inf).amax(1, keepdim=True)
    margins = [(target - best).abs().min().item()]
    for routing in routings:
        k = routing.experts.shape[1]
        last, next_ = routing.scores.topk(k + 1).values[:, -2:].T
        margins += (last - next_)[last > 0].tolist()  # a gate of 0 is the same for any expert
    logp = logits.gather(1, targets) - logits.logsumexp(1, keepdim=True)
    return logp.sum().item(), bool((target > best).all()), min(margins)


def assert_same_scores(got, wanted, margins, name):
    """Equal log-likelihoods and greedy flags of pairs, where the margins are large enough for both to be certain."""
    sure = [i for i, margin in enumerate(margins) if margin > MARGIN]
    assert len(sure) > len(margins) / 2
    sums = (torch.tensor([rows[i][0] for i in sure], dtype=torch.float64) for rows in (got, wanted))
    assert_near(*sums, tolerance(torch.float32, 32), name)
    assert [got[i][1] for i in sure] == [wanted[i][1] for i in sure]


def assert_as_by_hand(got, wanted, name):
    assert_same_scores(got, wanted, [margin for *_, margin in wanted], name)


@pytest.mark.numerics
@pytest.mark.parametrize(
    ("router", "pos", "tokens"),
    [("kern", "rope", 1), ("kern", "learned", 64), ("softmax", "rope", 100_000), ("dense", "learned", 100_000)],
)
def test_scores_equal_one_pass_per_pair(router, pos, tokens):
    """Contexts of all lengths, some of them shared by several continuations, some too long."""
    model, rng, pairs = small_model(**{"model.router": router, "model.pos": pos}), random.Random(SEED), []
    while len(pairs) < 60:
        context = [rng.randrange(64) for _ in range(rng.randint(1, 20))]
        for _ in range(rng.choice([1, 1, 2, 4])):
            pairs.append((context, [rng.randrange(64) for _ in range(rng.randint(1, 8))]))
    rng.shuffle(pairs)
    with torch.no_grad():
        best = [model.logits(model.hidden(torch.tensor([c[-16:]]))[0])[0, -1].argmax().item() for c, _ in pairs]
    pairs += [(context, [token]) for (context, _), token in zip(pairs, best, strict=True)]
    pairs += [(context[-9:], [token, 1, 2]) for (context, _), token in zip(pairs[:9], best, strict=False)]
    wanted = [by_hand(model, *pair) for pair in pairs]
    assert_as_by_hand(Scorer(model, tokens=tokens).score(pairs), wanted, router)
    assert {greedy for _, greedy, _ in wanted} == {True, False}


@pytest.mark.numerics
def test_continuation_longer_than_the_block():
    """Every token is scored after at least half a block, or after all tokens before it."""
    model, rng = small_model(**{"model.router": "dense"}), random.Random(SEED)
    context, continuation = ([rng.randrange(64) for _ in range(count)] for count in (5, 37))
    ends = range(0, 37, 8)
    parts = [by_hand(model, (context + continuation)[: 5 + at], continuation[at : at + 8]) for at in ends]
    wanted = [(sum(part[0] for part in parts), False, 1.0), by_hand(model, context, continuation[:3])]
    assert_as_by_hand(Scorer(model).score([(context, continuation), (context, continuation[:3])]), wanted, "pieces")


def test_shared_context_is_computed_once(monkeypatch):
    model, seen = small_model(), []
    hidden = model.hidden
    monkeypatch.setattr(model, "hidden", lambda idx, past=None: (seen.append(idx.numel()), hidden(idx, past))[1])
    Scorer(model).score([([1] * 10, [token, 2]) for token in range(4)])
    assert seen == [10, 4]


@pytest.mark.numerics
def test_context_shared_by_many_is_split_into_batches():
    """For instance the first tokens of all documents, whose context is end-of-text."""
    rng = random.Random(SEED)
    pairs = [([1], [rng.randrange(64) for _ in range(rng.randint(1, 12))]) for _ in range(300)]
    parts = list(split_group((1,), list(range(300)), pairs, 64))
    assert sorted(i for _, members in parts for i in members) == list(range(300))
    made = list(make_batches([*parts, *((tuple([2] * n), [n, n + 1]) for n in range(1, 16))], pairs, 64))
    short = [i for i, (_, continuation) in enumerate(pairs) if len(continuation) == 1][:4]
    made += make_batches([((2,) * 10, short)] * 6, pairs, 64)  # the cache is full before the batch
    for batch in [*([part] for part in parts), *made]:
        width, rows = max(len(context) for context, _ in batch), sum(len(members) for _, members in batch)
        longest = max(len(pairs[i][1]) for _, members in batch for i in members)
        assert rows * longest <= 64 and rows * (width + longest) <= CACHED * 64
    assert all(len(batch) * max(len(context) for context, _ in batch) <= 64 for batch in made)
    model = small_model(**{"model.router": "dense"})
    wanted = [by_hand(model, *pair) for pair in pairs[:20]]
    assert_as_by_hand(Scorer(model, tokens=64).score(pairs)[:20], wanted, "shared")
