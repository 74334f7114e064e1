"""Log-likelihoods of continuations: the arithmetic under eval.downstream and eval.val_loss.

Work is sorted by length, so that little of a batch is padding; a context that several continuations share goes through
the model once; the LM head sees no position but those that are scored.
"""

from collections import defaultdict
from contextlib import nullcontext
from typing import NamedTuple

import torch
from tqdm import tqdm

from model import Cache
from runtime import distributed

TOKENS = 8192  # a batch, at most: 16 rows of 512
CACHED = 2  # times as many in the cache
LOGITS = 2**24  # held at once


class Score(NamedTuple):
    """Of a continuation: its log-likelihood in nats, and whether each of its tokens was the likeliest."""

    loglikelihood: float
    greedy: bool


class Scorer:
    """`model` is a GPT in evaluation mode on its device; `ranks`, if there are several, share the work and all get all
    results. `dtype` is autocast's."""

    def __init__(self, model, dtype=torch.float32, ranks=None, tokens=TOKENS):
        self.model, self.config, self.ranks = model, model.config, ranks
        self.device, self.dtype, self.tokens = model.head.device, dtype, tokens
        self.autocast = nullcontext if dtype == torch.float32 else lambda: torch.autocast(self.device.type, dtype)

    def score(self, pairs, progress=None):
        """[Score] of (context, continuation) pairs, lists of ids, neither empty; in their order.

        A pair longer than block_size + 1 loses its first tokens, as in lm-evaluation-harness. A continuation longer
        than block_size, which the harness refuses, is scored in pieces of half that, each after what comes before it.
        `progress`: words before a bar, none without.
        """
        pieces = [in_pieces(*pair, self.config.block_size) for pair in pairs]
        scores = iter(self.score_pieces([piece for parts in pieces for piece in parts], progress))
        whole = ([next(scores) for _ in parts] for parts in pieces)
        return [Score(sum(part.loglikelihood for part in parts), all(part.greedy for part in parts)) for parts in whole]

    def score_pieces(self, pairs, progress):
        """The same of pairs whose continuations fit."""
        alone, groups = [], defaultdict(list)
        for i, (context, continuation) in enumerate(pairs):
            keep = self.config.block_size + 1 - len(continuation)
            groups[tuple(context[-keep:])].append(i)
        for context in [context for context, members in groups.items() if len(members) == 1]:
            alone.append((context, groups.pop(context)))
        several = [part for group in groups.items() for part in in_parts(*group, pairs, self.tokens)]
        work = [(self.whole, batch) for batch in batches(alone, pairs, self.tokens)]
        work += [(self.shared, batch) for batch in batches(several, pairs, self.tokens)]
        mine = work if self.ranks is None else work[self.ranks.rank :: self.ranks.world_size]
        found = {}
        total = sum(len(members) for _, batch in mine for _, members in batch)
        bar = tqdm(total=total, desc=progress, disable=None if progress else True)
        with bar, torch.inference_mode(), self.autocast():
            for function, batch in mine:
                scores = function(batch, pairs)
                found.update(scores)
                bar.update(len(scores))
        if self.ranks is not None and self.ranks.world_size > 1:
            for part in distributed.gather(found, self.ranks.control):
                found.update(part)
        return [found[i] for i in range(len(pairs))]

    def whole(self, batch, pairs):
        """{i: Score}, context and continuation in one pass, filled up on the right."""
        rows = [[*context, *pairs[i][1]][:-1] for context, (i,) in batch]
        x, _ = self.model.hidden(self.pad(rows))
        where = [(row, len(rows[row]) - n, n) for row, n in enumerate(len(pairs[i][1]) for _, (i,) in batch)]
        return self.read(x, where, [i for _, (i,) in batch], pairs)

    def shared(self, batch, pairs):
        """{i: Score}, contexts in one pass, filled up on the left, their continuations in a second."""
        contexts = [context for context, _ in batch]
        width = max(map(len, contexts))
        start = torch.tensor([width - len(context) for context in contexts], device=self.device)
        owners = [row for row, (_, members) in enumerate(batch) for _ in members]
        members = [i for _, members in batch for i in members]
        rest = [pairs[i][1][:-1] for i in members]
        cache = Cache(self.config, start, width, self.dtype)
        first = self.model.hidden(self.pad(contexts, left=True), cache)[0][:, -1:]  # (rows, 1, C)
        x = first[owners]
        if longest := max(map(len, rest)):
            cache = cache.rows(torch.tensor(owners, device=self.device), width + longest)
            x = torch.cat([x, self.model.hidden(self.pad(rest), cache)[0]], 1)
        return self.read(x, [(row, 0, len(tokens) + 1) for row, tokens in enumerate(rest)], members, pairs)

    def read(self, x, where, members, pairs):
        """{i: Score} from the residual stream x (rows, T, C): of (row, first, n) the n columns from `first` on predict
        the continuation of a member."""
        columns = torch.cat([torch.arange(first, first + n) + row * x.shape[1] for row, first, n in where])
        targets = torch.tensor([token for i in members for token in pairs[i][1]], device=self.device)
        x = x.flatten(0, 1)[columns.to(self.device)]  # (tokens, C)
        sums, right = [], []
        for part, wanted in zip(
            x.split(step := max(1, LOGITS // len(self.model.head))), targets.split(step), strict=True
        ):
            logits = self.model.logits(part).float()
            sums.append(logits.gather(1, wanted[:, None])[:, 0].double() - logits.logsumexp(1).double())
            right.append(logits.argmax(1) == wanted)
        lengths = [n for _, _, n in where]
        sums, right = (torch.cat(parts).cpu().split(lengths) for parts in (sums, right))
        return {i: Score(s.sum().item(), r.all().item()) for i, s, r in zip(members, sums, right, strict=True)}

    def pad(self, rows, left=False):
        """Lists of ids -> (rows, longest), filled up with 0."""
        width = max(map(len, rows))
        filled = [[0] * (width - len(row)) + list(row) if left else [*row] + [0] * (width - len(row)) for row in rows]
        return torch.tensor(filled, device=self.device)


def in_pieces(context, continuation, block):
    """[(context, continuation)] with continuations of at most `block` tokens."""
    if len(continuation) <= block:
        return [(context, continuation)]
    ids, half = [*context, *continuation], max(1, block // 2)
    return [(ids[:first], ids[first : first + half]) for first in range(len(context), len(ids), half)]


def in_parts(context, members, pairs, tokens):
    """[(context, some of the members)] such that each fits a batch: its continuations, and its rows of the cache."""
    members = sorted(members, key=lambda i: -len(pairs[i][1]))
    while members:
        long = len(pairs[members[0]][1])
        rows = max(1, min(tokens // long, CACHED * tokens // (len(context) + long)))
        yield context, members[:rows]
        members = members[rows:]


def batches(groups, pairs, tokens):
    """[(context, members)] sorted by length, longest first, in lists of at most `tokens` tokens, filling included, and
    at most CACHED times as many in the cache of those that share contexts."""

    def size(group):
        context, members = group
        return len(context), max(len(pairs[i][1]) for i in members), len(members)

    batch, wide, long, rows = [], 0, 0, 0
    for group in sorted(groups, key=lambda group: (sum(size(group)[:2]), size(group)), reverse=True):
        context, continuation, members = size(group)
        wide, long, rows = max(wide, context), max(long, continuation), rows + members
        if batch and ((len(batch) + 1) * wide + rows * long > tokens or rows * (wide + long) > CACHED * tokens):
            yield batch
            batch, wide, long, rows = [], context, continuation, members
        batch.append(group)
    if batch:
        yield batch
