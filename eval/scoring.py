"""Score log-likelihoods of continuations, for eval.downstream and eval.val_loss.

Batches hold sequences of similar length, so little of them is padding. The LM head sees only the
positions that are scored.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence

from common.progress import progress_bar
from configure import Config
from model import GPT
from runtime import distributed

TOKENS = 8192  # in a batch, at most, such as 16 rows of 512 (not measured)
LOGITS = 2**24  # in memory at once: 64 MiB in float32

Pair = tuple[Sequence[int], Sequence[int]]  # context and continuation


class Score(NamedTuple):
    """The score of a continuation."""

    loglikelihood: float  # nats
    greedy: bool  # True if each of its tokens was the most likely one


class Interrupted(Exception):
    """Scoring was asked to stop before its end."""


def scoring_dtype(config: Config, device: torch.device) -> torch.dtype:
    """Return the dtype that a model is scored in: on CUDA as in training, on a CPU float32."""
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
        """Score with a model in evaluation mode, on its device.

        Args:
            model: not wrapped.
            dtype: of autocast.
            ranks: split the work; by default one process.
            tokens: in a batch, at most.
            is_stopped: asked between batches.
        """
        self.model = model
        self.config = model.config
        self.device = model.head.device
        self.dtype = dtype
        self.tokens = tokens
        self.is_stopped = is_stopped
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
            Interrupted: a rank was asked to stop. Raised on every rank, after the others have done
                their part.
        """
        pieces = []
        counts = []  # pieces of each pair
        for context, continuation in pairs:
            parts = split_continuation(context, continuation, self.config.block_size)
            pieces += parts
            counts.append(len(parts))
        piece_scores = iter(self._score_pieces(pieces, progress))
        scores = []
        for count in counts:
            parts = list(islice(piece_scores, count))
            loglikelihood = sum(part.loglikelihood for part in parts)
            scores.append(Score(loglikelihood, all(part.greedy for part in parts)))
        return scores

    def _score_pieces(self, pairs: Sequence[Pair], progress: str | None) -> list[Score]:
        """Score pairs whose continuations fit into the block."""
        longest = self.config.block_size + 1
        lengths = [min(len(context) + len(answer), longest) for context, answer in pairs]
        all_batches = list(batch_by_length(lengths, self.tokens))
        batches = all_batches[self.ranks.rank :: self.ranks.world_size]
        count = sum(len(batch) for batch in batches)
        scored: dict[int, Score] = {}
        bar = progress_bar(total=count, desc=progress, disable=not progress)
        autocast = torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)
        with bar, torch.inference_mode(), autocast:
            for batch in batches:
                if self.is_stopped():
                    break
                scores = self._score_batch([pairs[i] for i in batch])
                scored.update(zip(batch, scores, strict=True))
                bar.update(len(batch))
        for of_rank in distributed.gather(scored, self.ranks.control):
            scored.update(of_rank)
        if len(scored) < len(pairs):
            raise Interrupted
        return [scored[i] for i in range(len(pairs))]

    def _score_batch(self, pairs: Sequence[Pair]) -> list[Score]:
        """Score pairs in one pass, padded on the right."""
        longest = self.config.block_size + 1
        rows = []
        counts = []
        for context, continuation in pairs:
            tokens = [*context, *continuation]
            rows.append(torch.tensor(tokens[-longest:]))
            counts.append(len(continuation))
        ids = pad_sequence(rows, batch_first=True)  # (B, T + 1)
        is_scored = torch.zeros_like(ids[:, 1:], dtype=torch.bool)  # (B, T)
        for mask, row, count in zip(is_scored, rows, counts, strict=True):
            last = len(row) - 1
            mask[last - count : last] = True
        targets = ids[:, 1:][is_scored].to(self.device)  # (N,) scored tokens
        hidden, _ = self.model.hidden(ids[:, :-1].to(self.device))  # (B, T, C)
        hidden = hidden[is_scored.to(self.device)]  # (N, C)

        loglikelihoods = []
        greedy = []
        step = max(1, LOGITS // len(self.model.head))
        for part, target in zip(hidden.split(step), targets.split(step), strict=True):
            logits = self.model.logits(part).float()  # (step, V)
            of_target = logits.gather(1, target[:, None])[:, 0]
            loglikelihoods.append(of_target.double() - logits.logsumexp(1).double())
            greedy.append(logits.argmax(1) == target)
        sums = torch.cat(loglikelihoods).cpu().split(counts)
        matches = torch.cat(greedy).cpu().split(counts)
        scores = []
        for nats, match in zip(sums, matches, strict=True):
            scores.append(Score(nats.sum().item(), bool(match.all())))
        return scores


def split_continuation(
    context: Sequence[int], continuation: Sequence[int], block: int
) -> list[Pair]:
    """Cut a continuation longer than `block` into pairs with continuations of half that length."""
    if len(continuation) <= block:
        return [(context, continuation)]
    ids = [*context, *continuation]
    half = max(1, block // 2)
    starts = range(len(context), len(ids), half)
    return [(ids[:start], ids[start : start + half]) for start in starts]


def batch_by_length(lengths: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """Yield batches of indices of `lengths`, longest first, of at most `tokens` with padding."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    start = 0
    while start < len(order):
        longest = lengths[order[start]]
        stop = start + max(1, tokens // longest)
        yield order[start:stop]
        start = stop
