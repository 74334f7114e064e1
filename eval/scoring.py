"""Score log-likelihoods of continuations, for eval.downstream and eval.val_loss.

Batches hold sequences of similar length, so little of them is padding. The LM head sees only the
positions that are scored.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from common.progress import progress_bar
from configure import Config
from model import GPT
from runtime import distributed
from runtime.batches import score

TOKENS = 8192  # in a batch, at most, such as 16 rows of 512 (not measured)
LOGITS = 2**24  # in memory at once: 64 MiB in float32
UNSCORED = -1  # the target of a token that is not scored

Ids = Sequence[int] | np.ndarray
Pair = tuple[Ids, Ids]  # context and continuation


class Score(NamedTuple):
    """The score of a continuation."""

    loglikelihood: float  # nats
    greedy: bool  # True if each of its tokens was the most likely one


class Piece(NamedTuple):
    """A window whose last tokens are scored."""

    pair: int  # index of the pair that it is of
    ids: Tensor  # (n,) at most block_size + 1
    count: int  # of the scored ones


class Scores(NamedTuple):
    """The scores of a batch of windows."""

    losses: Tensor  # (B,) nats in fp64, summed over the scored tokens
    greedy: Tensor  # (B,) bool


class Interrupted(Exception):
    """Scoring was asked to stop before its end."""


def scoring_dtype(config: Config, device: torch.device) -> torch.dtype:
    """Return the dtype that a model is scored in: on CUDA as in training, on a CPU float32."""
    if device.type != "cuda":
        return torch.float32
    return distributed.pick_dtype(config.train.dtype, device, config.model.router)


@dataclass
class Scorer:
    """Scores continuations with a GPT. Several ranks split the work, and each gets all results.

    Attributes:
        model: in evaluation mode, not wrapped.
        dtype: of autocast.
        ranks: split the work; by default one process.
        tokens: in a batch, at most.
        is_stopped: asked after each batch.
    """

    model: GPT
    dtype: torch.dtype = torch.float32
    ranks: distributed.Ranks = distributed.Ranks(0, 1, torch.device("cpu"))
    tokens: int = TOKENS
    is_stopped: Callable[[], bool] | None = None

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
        for number, pair in enumerate(pairs):
            pieces += split_pair(number, *pair, self.model.config.block_size)
        batches = list(batch_by_length(pieces, self.tokens))
        batches = batches[self.ranks.rank :: self.ranks.world_size]
        greedy: list[bool] = []
        with progress_bar(iterable=batches, desc=progress, disable=not progress) as bar:
            losses = score(
                self._score_tokens,
                map(make_batch, bar),
                self.model.head.device,
                lambda scores: greedy.extend(scores.greedy.tolist()),
                self.is_stopped,
            )
        own: list[tuple[int, float, bool]] = []
        if losses is not None:
            numbers = [piece.pair for batch in batches for piece in batch]
            own = list(zip(numbers, losses.tolist(), greedy, strict=True))
        parts = sorted(chain(*distributed.gather(own, self.ranks.control)))
        if len(parts) < len(pieces):
            raise Interrupted
        scores = [Score(0.0, True)] * len(pairs)
        for number, loss, is_greedy in parts:
            before = scores[number]
            scores[number] = Score(before.loglikelihood - loss, before.greedy and is_greedy)
        return scores

    def _score_tokens(self, inputs: Tensor, targets: Tensor) -> Scores:
        """Score the targets (B, T) that are not UNSCORED."""
        is_scored = targets != UNSCORED
        counts = is_scored.sum(1).tolist()
        with torch.autocast(inputs.device.type, self.dtype, self.dtype != torch.float32):
            hidden, _ = self.model.hidden(inputs)  # (B, T, C)
            hidden = hidden[is_scored]  # (N, C)
            step = max(1, LOGITS // len(self.model.head))
            losses, greedy = [], []
            for part, target in zip(
                hidden.split(step), targets[is_scored].split(step), strict=True
            ):
                logits = self.model.logits(part).float()  # (step, V)
                of_target = logits.gather(1, target[:, None])[:, 0]
                losses.append(logits.logsumexp(1).double() - of_target.double())
                greedy.append(logits.argmax(1) == target)
        sums = [part.sum() for part in torch.cat(losses).split(counts)]
        matches = [part.all() for part in torch.cat(greedy).split(counts)]
        return Scores(torch.stack(sums), torch.stack(matches))


def make_batch(pieces: Sequence[Piece]) -> tuple[Tensor, Tensor]:
    """Inputs and targets, (B, T) each, padded on the right."""
    ids = pad_sequence([piece.ids for piece in pieces], batch_first=True)  # (B, T + 1)
    targets = torch.full_like(ids[:, 1:], UNSCORED)
    for target, piece in zip(targets, pieces, strict=True):
        stop = len(piece.ids) - 1
        target[stop - piece.count : stop] = piece.ids[-piece.count :]
    return ids[:, :-1], targets


def split_pair(number: int, context: Ids, continuation: Ids, block: int) -> list[Piece]:
    """Cut a continuation longer than `block` into pieces of half that length, with prefixes."""
    ids = torch.from_numpy(np.concatenate([context, continuation]).astype(np.int64))
    size = len(continuation)
    if size > block:
        size = max(1, block // 2)
    pieces = []
    for start in range(len(context), len(ids), size):
        window = ids[: start + size]
        pieces.append(Piece(number, window[-(block + 1) :], len(window) - start))
    return pieces


def batch_by_length(pieces: Sequence[Piece], tokens: int) -> Iterator[list[Piece]]:
    """Yield batches of pieces, longest first, of at most `tokens` with padding."""
    order = sorted(pieces, key=lambda piece: -len(piece.ids))
    start = 0
    while start < len(order):
        stop = start + max(1, tokens // len(order[start].ids))
        yield order[start:stop]
        start = stop
