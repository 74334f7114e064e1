"""eval/scoring.py against one forward pass per pair."""

import random

import pytest
import torch
from numerics import SEED, assert_near, tolerance
from test_generation import small_model

from eval.routing import record_routing
from eval.scoring import Scorer, batch_by_length

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
    """Contexts of all lengths, some of them too long."""
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


def test_batches_hold_at_most_the_tokens_asked_for():
    lengths = [3, 9, 1, 40, 8, 8, 2]
    batches = [*batch_by_length(lengths, 16)]
    assert batches == [[3], [1], [4, 5], [0, 6, 2]]  # one too long stands alone; the longest first
