"""eval/scoring.py against one forward pass per pair."""

import random

import pytest
import torch
from test_scripts import small_model

from eval.scoring import CACHED, Scorer, make_batches, split_group


def by_hand(model, context, continuation):
    """One forward pass over the pair; a pair that is too long loses its first tokens."""
    ids = [*context, *continuation][-(model.config.block_size + 1) :]
    n = len(continuation)
    x, _ = model.hidden(torch.tensor([ids[:-1]]))
    logp = model.logits(x)[0, -n:].double().log_softmax(-1)
    picked = logp[torch.arange(n), continuation]
    return picked.sum().item(), bool((logp.argmax(-1) == torch.tensor(continuation)).all())


def some_pairs(count, block, seed=0):
    """Contexts of all lengths, some of them shared by several continuations, some too long."""
    rng = random.Random(seed)
    pairs = []
    while len(pairs) < count:
        context = [rng.randrange(64) for _ in range(rng.randint(1, block + 4))]
        for _ in range(rng.choice([1, 1, 2, 4])):
            pairs.append((context, [rng.randrange(64) for _ in range(rng.randint(1, block // 2))]))
    rng.shuffle(pairs)
    return pairs


@pytest.mark.parametrize("router", ["dense", "softmax", "kern"])
@pytest.mark.parametrize("pos", ["rope", "learned"])
@pytest.mark.parametrize("tokens", [1, 64, 100_000])
def test_scores_equal_one_pass_per_pair(router, pos, tokens):
    model = small_model(**{"model.router": router, "model.pos": pos})
    pairs = some_pairs(60, 16)
    with torch.no_grad():
        wanted = [by_hand(model, *pair) for pair in pairs]
        wanted_best = [model.logits(model.hidden(torch.tensor([c[-16:]]))[0])[0, -1].argmax().item() for c, _ in pairs]
    pairs += [(context, [best]) for (context, _), best in zip(pairs, wanted_best, strict=True)]
    with torch.no_grad():
        wanted += [by_hand(model, *pair) for pair in pairs[60:]]
    got = Scorer(model, tokens=tokens).score(pairs)
    assert [score.loglikelihood for score in got] == pytest.approx([value for value, _ in wanted], abs=2e-4)
    assert [score.greedy for score in got] == [greedy for _, greedy in wanted]
    assert any(score.greedy for score in got) and not all(score.greedy for score in got)


def test_continuation_longer_than_the_block():
    """Every token is scored after at least half a block, or after all tokens before it."""
    model, rng = small_model(), random.Random(0)
    context, continuation = ([rng.randrange(64) for _ in range(count)] for count in (5, 37))
    with torch.no_grad():
        wanted = [by_hand(model, (context + continuation)[: 5 + first], continuation[first : first + 8])[0]
                  for first in range(0, 37, 8)]  # fmt: skip
    scores = Scorer(model).score([(context, continuation), (context, continuation[:3])])
    assert scores[0].loglikelihood == pytest.approx(sum(wanted), abs=2e-4) and not scores[0].greedy
    assert scores[1].loglikelihood == pytest.approx(by_hand(model, context, continuation[:3])[0], abs=2e-4)


def test_shared_context_is_computed_once(monkeypatch):
    model, seen = small_model(), []
    hidden = model.hidden
    monkeypatch.setattr(model, "hidden", lambda idx, past=None: (seen.append(idx.numel()), hidden(idx, past))[1])
    Scorer(model).score([([1] * 10, [token, 2]) for token in range(4)])
    assert seen == [10, 4]


def test_context_shared_by_many_is_split_into_batches():
    """For instance the first tokens of all documents, whose context is end-of-text."""
    rng = random.Random(0)
    pairs = [([1], [rng.randrange(64) for _ in range(rng.randint(1, 12))]) for _ in range(300)]
    parts = list(split_group((1,), list(range(300)), pairs, 64))
    assert sorted(i for _, members in parts for i in members) == list(range(300))
    for context, members in parts:
        long = max(len(pairs[i][1]) for i in members)
        assert len(members) * long <= 64 and len(members) * (len(context) + long) <= CACHED * 64
    made = list(make_batches([*parts, (tuple([2] * 15), [0, 1])], pairs, 64))
    assert all(sum(len(members) for _, members in batch) <= 64 for batch in made)
    model = small_model()
    wanted = [by_hand(model, *pair)[0] for pair in pairs[:20]]
    got = Scorer(model, tokens=64).score(pairs)
    assert [score.loglikelihood for score in got[:20]] == pytest.approx(wanted, abs=2e-4)


def test_batches_hold_little_padding():
    pairs = [([0] * length, [1] * 3) for length in random.Random(0).choices(range(1, 200), k=500)]
    groups = [(tuple(context), [i]) for i, (context, _) in enumerate(pairs)]
    made = list(make_batches(groups, pairs, 4096))
    assert sorted(i for batch in made for _, (i,) in batch) == list(range(500))
    held = sum(len(batch) * max(len(context) + 3 for context, _ in batch) for batch in made)
    assert held < 1.1 * sum(len(context) + 3 for context, _ in pairs)
    assert all(len(batch) * max(len(context) + 3 for context, _ in batch) <= 4096 for batch in made)
