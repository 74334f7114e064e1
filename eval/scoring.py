"""Log-likelihoods of continuations, for eval.downstream.

Batches hold sequences of similar length, so little of them is padding. A context shared by several continuations goes
through the model once. The LM head sees only the positions that are scored.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from attention import KVCache
from common.progress import progress_bar
from configure import Config
from model import GPT
from runtime import distributed

TOKENS = 8192  # in a batch, at most: 16 rows of 512
CACHED = 2  # times as many in the cache
LOGITS = 2**24  # in memory at once

Pair = tuple[Sequence[int], Sequence[int]]  # context and continuation
Group = tuple[Sequence[int], list[int]]  # a context, and the indices of the pairs that share it


class Score(NamedTuple):
    """What the model says of a continuation."""

    loglikelihood: float  # nats
    greedy: bool  # whether each of its tokens was the most likely one


class Interrupted(Exception):
    """Scoring was asked to stop before its end."""


def scoring_dtype(config: Config, device: torch.device) -> torch.dtype:
    """What a run's model computes in when it is scored: on CUDA as in training, on a CPU float32."""
    if device.type != "cuda":
        return torch.float32
    return distributed.pick_dtype(config.train.dtype, device, config.model.router)


class Scorer:
    """Scores continuations with a GPT. Several ranks split the work, and each gets all results."""

    def __init__(
        self,
        model: GPT,
        dtype: torch.dtype = torch.float32,
        ranks: distributed.Ranks | None = None,
        tokens: int = TOKENS,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """Take a model in evaluation mode, on its device. A batch has at most `tokens`; `dtype` is autocast's."""
        self.is_stopped = is_stopped  # asked between batches
        self.model, self.config = model, model.config
        self.device, self.dtype, self.tokens = model.head.device, dtype, tokens
        self.ranks = ranks or distributed.Ranks(0, 1, self.device)

    def score(self, pairs: Sequence[Pair], progress: str | None = None) -> list[Score]:
        """Score each continuation after its context.

        A pair longer than block_size + 1 loses its first tokens, as in lm-evaluation-harness. A continuation longer
        than block_size, which the harness refuses, is scored in pieces of half that length, each after its prefix.

        Args:
            pairs: (context, continuation), lists of token ids; neither empty.
            progress: the label of a progress bar; None: no bar.

        Raises:
            Interrupted: a rank was asked to stop; on every rank, once the others have done their part.
        """
        pieces = [split_continuation(*pair, self.config.block_size) for pair in pairs]
        scores = iter(self._score_pieces([piece for parts in pieces for piece in parts], progress))
        whole = ([next(scores) for _ in parts] for parts in pieces)
        return [Score(sum(part.loglikelihood for part in parts), all(part.greedy for part in parts)) for parts in whole]

    def _score_pieces(self, pairs: Sequence[Pair], progress: str | None) -> list[Score]:
        """Score pairs whose continuations fit into the block."""
        members = defaultdict(list)
        for i, (context, continuation) in enumerate(pairs):
            keep = self.config.block_size + 1 - len(continuation)
            members[tuple(context[-keep:])].append(i)
        groups = [part for group in members.items() for part in split_group(*group, pairs, self.tokens)]
        alone, shared = ([group for group in groups if (len(group[1]) > 1) == several] for several in (False, True))
        work = [(self._score_alone, batch) for batch in make_batches(alone, pairs, self.tokens)]
        work += [(self._score_shared, batch) for batch in make_batches(shared, pairs, self.tokens)]
        work = work[self.ranks.rank :: self.ranks.world_size]
        total = sum(len(members) for _, batch in work for _, members in batch)
        scored: dict[int, Score] = {}
        bar = progress_bar(total=total, desc=progress, disable=not progress)
        autocast = torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)
        with bar, torch.inference_mode(), autocast:
            for score_batch, batch in work:
                if self.is_stopped():
                    break
                scores = score_batch(batch, pairs)
                scored.update(scores)
                bar.update(len(scores))
        for part in distributed.gather(scored, self.ranks.control):
            scored.update(part)
        if len(scored) < len(pairs):
            raise Interrupted
        return [scored[i] for i in range(len(pairs))]

    def _score_alone(self, batch: list[Group], pairs: Sequence[Pair]) -> dict[int, Score]:
        """Context and continuation in one pass, padded on the right."""
        members = [i for _, (i,) in batch]
        rows = [[*context, *pairs[i][1]][:-1] for context, (i,) in batch]
        x, _ = self.model.hidden(self._pad(rows))
        first = [len(row) - len(pairs[i][1]) for row, i in zip(rows, members, strict=True)]
        return self._score_columns(x, first, members, pairs)

    def _score_shared(self, batch: list[Group], pairs: Sequence[Pair]) -> dict[int, Score]:
        """Contexts in one pass, padded on the left; their continuations in a second."""
        contexts = [context for context, _ in batch]
        width = max(map(len, contexts))
        start = torch.tensor([width - len(context) for context in contexts], device=self.device)
        owners = [row for row, (_, members) in enumerate(batch) for _ in members]
        members = [i for _, members in batch for i in members]
        rest = [pairs[i][1][:-1] for i in members]
        cache = KVCache(self.config, start, width, self.dtype)
        first = self.model.hidden(self._pad(contexts, left=True), cache)[0][:, -1:]  # (rows, 1, C)
        x = first[owners]
        if longest := max(map(len, rest)):
            cache = cache.select_rows(torch.tensor(owners, device=self.device), width + longest)
            x = torch.cat([x, self.model.hidden(self._pad(rest), cache)[0]], 1)
        return self._score_columns(x, [0] * len(members), members, pairs)

    def _score_columns(
        self, x: Tensor, first: list[int], members: list[int], pairs: Sequence[Pair]
    ) -> dict[int, Score]:
        """{index of a pair: Score} from the residual stream x (rows, T, C).

        In row r the columns from first[r] on predict the continuation of the pair members[r].
        """
        lengths = [len(pairs[i][1]) for i in members]
        starts = [column + row * x.shape[1] for row, column in enumerate(first)]
        columns = torch.cat([torch.arange(at, at + n) for at, n in zip(starts, lengths, strict=True)])
        targets = torch.tensor([token for i in members for token in pairs[i][1]], device=self.device)
        x = x.flatten(0, 1)[columns.to(self.device)]  # (tokens, C)
        sums, right = [], []
        step = max(1, LOGITS // len(self.model.head))
        for part, wanted in zip(x.split(step), targets.split(step), strict=True):
            logits = self.model.logits(part).float()
            sums.append(logits.gather(1, wanted[:, None])[:, 0].double() - logits.logsumexp(1).double())
            right.append(logits.argmax(1) == wanted)
        by_row = zip(members, *(torch.cat(parts).cpu().split(lengths) for parts in (sums, right)), strict=True)
        return {i: Score(s.sum().item(), bool(r.all())) for i, s, r in by_row}

    def _pad(self, rows: Sequence[Sequence[int]], left: bool = False) -> Tensor:
        """Lists of ids -> (rows, longest) int64, padded with 0."""
        tensors = [torch.tensor(row, dtype=torch.int64) for row in rows]
        padded = pad_sequence(tensors, batch_first=True, padding_side="left" if left else "right")
        return padded.to(self.device)


def split_continuation(context: Sequence[int], continuation: Sequence[int], block: int) -> list[Pair]:
    """Cut a continuation longer than `block` into pairs with continuations of half that length."""
    if len(continuation) <= block:
        return [(context, continuation)]
    ids, half = [*context, *continuation], max(1, block // 2)
    return [(ids[:first], ids[first : first + half]) for first in range(len(context), len(ids), half)]


def split_group(context: Sequence[int], members: Iterable[int], pairs: Sequence[Pair], tokens: int) -> Iterator[Group]:
    """Split the pairs that share a context into groups that fit a batch, both its tokens and its cache."""
    members = sorted(members, key=lambda i: -len(pairs[i][1]))
    while members:
        longest = len(pairs[members[0]][1])
        rows = max(1, min(tokens // longest, CACHED * tokens // (len(context) + longest)))
        yield context, members[:rows]
        members = members[rows:]


def make_batches(groups: Iterable[Group], pairs: Sequence[Pair], tokens: int) -> Iterator[list[Group]]:
    """Yield batches of groups, longest first.

    A batch has at most `tokens` tokens, padding included, and at most CACHED times as many in the cache.
    """

    def measure(group: Group) -> tuple[int, int, int]:
        context, members = group
        return len(context), max(len(pairs[i][1]) for i in members), len(members)

    batch, width, longest, rows = [], 0, 0, 0
    for group in sorted(groups, key=lambda group: (sum(measure(group)[:2]), measure(group)), reverse=True):
        context, continuation, members = measure(group)
        width, longest, rows = max(width, context), max(longest, continuation), rows + members
        if batch and ((len(batch) + 1) * width + rows * longest > tokens or rows * (width + longest) > CACHED * tokens):
            yield batch
            batch, width, longest, rows = [], context, continuation, members
        batch.append(group)
    if batch:
        yield batch
