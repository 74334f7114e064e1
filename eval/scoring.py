"""Log-likelihoods of continuations, for eval.downstream and eval.val_loss.

Batches hold sequences of similar length, so little of them is padding. The LM head sees only the
positions that are scored.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence

from common.progress import progress_bar
from configure import Config
from model import GPT
from runtime import distributed

TOKENS = 8192  # in a batch, at most: 16 rows of 512
LOGITS = 2**24  # in memory at once

Pair = tuple[Sequence[int], Sequence[int]]  # context and continuation


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
        """Take a model in evaluation mode, on its device.

        A batch has at most `tokens`; `dtype` is autocast's.
        """
        self.is_stopped = is_stopped  # asked between batches
        self.model, self.config = model, model.config
        self.device, self.dtype, self.tokens = model.head.device, dtype, tokens
        self.ranks = ranks or distributed.Ranks(0, 1, self.device)

    def score(self, pairs: Sequence[Pair], progress: str | None = None) -> list[Score]:
        """Score each continuation after its context.

        A pair longer than block_size + 1 loses its first tokens, as in lm-evaluation-harness. A
        continuation longer than block_size, which the harness refuses, is scored in pieces of half
        that length, each after its prefix.

        Args:
            pairs: (context, continuation), lists of token ids; neither empty.
            progress: the label of a progress bar; None: no bar.

        Raises:
            Interrupted: a rank was asked to stop; on every rank, once the others have done their
                part.
        """
        pieces = [split_continuation(*pair, self.config.block_size) for pair in pairs]
        scores = iter(self._score_pieces([piece for parts in pieces for piece in parts], progress))
        whole = ([next(scores) for _ in parts] for parts in pieces)
        return [
            Score(sum(part.loglikelihood for part in parts), all(part.greedy for part in parts))
            for parts in whole
        ]

    def _score_pieces(self, pairs: Sequence[Pair], progress: str | None) -> list[Score]:
        """Score pairs whose continuations fit into the block."""
        longest = self.config.block_size + 1
        lengths = [
            min(len(context) + len(continuation), longest) for context, continuation in pairs
        ]
        batches = [*batch_by_length(lengths, self.tokens)][self.ranks.rank :: self.ranks.world_size]
        scored: dict[int, Score] = {}
        bar = progress_bar(total=sum(map(len, batches)), desc=progress, disable=not progress)
        autocast = torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)
        with bar, torch.inference_mode(), autocast:
            for batch in batches:
                if self.is_stopped():
                    break
                scored.update(zip(batch, self._score_batch([pairs[i] for i in batch]), strict=True))
                bar.update(len(batch))
        for part in distributed.gather(scored, self.ranks.control):
            scored.update(part)
        if len(scored) < len(pairs):
            raise Interrupted
        return [scored[i] for i in range(len(pairs))]

    def _score_batch(self, pairs: Sequence[Pair]) -> list[Score]:
        """Score pairs in one pass, padded on the right."""
        longest = self.config.block_size + 1
        rows = [
            torch.tensor([*context, *continuation][-longest:]) for context, continuation in pairs
        ]
        counts = [len(continuation) for _, continuation in pairs]
        ids = pad_sequence(rows, batch_first=True)  # (B, T + 1)
        scored = torch.zeros_like(ids[:, 1:], dtype=torch.bool)  # (B, T)
        for mask, row, count in zip(scored, rows, counts, strict=True):
            mask[len(row) - 1 - count : len(row) - 1] = True
        targets = ids[:, 1:][scored].to(self.device)  # (tokens,)
        x = self.model.hidden(ids[:, :-1].to(self.device))[0][scored.to(self.device)]  # (tokens, C)
        sums, right = [], []
        step = max(1, LOGITS // len(self.model.head))
        for part, wanted in zip(x.split(step), targets.split(step), strict=True):
            logits = self.model.logits(part).float()
            sums.append(
                logits.gather(1, wanted[:, None])[:, 0].double() - logits.logsumexp(1).double()
            )
            right.append(logits.argmax(1) == wanted)
        by_row = zip(
            *(torch.cat(parts).cpu().split(counts) for parts in (sums, right)), strict=True
        )
        return [Score(nats.sum().item(), bool(greedy.all())) for nats, greedy in by_row]


def split_continuation(
    context: Sequence[int], continuation: Sequence[int], block: int
) -> list[Pair]:
    """Cut a continuation longer than `block` into pairs with continuations of half that length."""
    if len(continuation) <= block:
        return [(context, continuation)]
    ids, half = [*context, *continuation], max(1, block // 2)
    return [
        (ids[:first], ids[first : first + half]) for first in range(len(context), len(ids), half)
    ]


def batch_by_length(lengths: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """Yield indices of `lengths`, longest first, in batches of at most `tokens` tokens, padding included."""
    order, start = sorted(range(len(lengths)), key=lambda i: -lengths[i]), 0
    while start < len(order):
        yield (batch := order[start : start + max(1, tokens // lengths[order[start]])])
        start += len(batch)
