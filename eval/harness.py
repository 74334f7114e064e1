"""The client of lm-evaluation-harness for a GPT in memory."""

from collections.abc import Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from data.tokenizer import Tokenizer
from eval.scoring import Scorer
from runtime import RunError


class Adapter(TemplateLM):
    """lm-evaluation-harness' interface to a Scorer.

    With several ranks all get every request and all results, so the harness computes the same on
    each of them; the model's work is split inside.
    """

    def __init__(self, scorer: Scorer, tokenizer: Tokenizer) -> None:
        super().__init__()
        self.scorer, self.tokens = scorer, tokenizer
        self.max_length = scorer.config.block_size
        self.first = scorer.ranks.rank == 0

    @property
    def eot_token_id(self) -> int:
        return self.tokens.eot

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        return self.tokens.encode(string)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Score (context, continuation) texts.

        Raises RunError for a continuation without tokens, as HFLM does.
        """
        for (context, continuation), _, ids in requests:
            if not ids:
                raise RunError(
                    f"the answer {continuation!r} after {context[-60:]!r} has no token, or shares its only one with "
                    f"the context; correct the task"
                )
        pairs = [
            (context or [self.prefix_token_id], continuation)
            for _, context, continuation in requests
        ]
        scores = [
            tuple(score) for score in self.scorer.score(pairs, "scored" if self.first else None)
        ]
        for (key, _, _), score in zip(requests, scores, strict=True):
            self.cache_hook.add_partial("loglikelihood", key, score)
        return scores

    def loglikelihood_rolling(
        self, requests: Sequence[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Score whole texts, in disjoint windows."""
        pairs, counts = [], []
        for (text,) in (request.args for request in requests):
            windows = get_rolling_token_windows(
                self.tok_encode(text), self.prefix_token_id, self.max_length, 1
            )
            parts = [make_disjoint_window(window) for window in windows]
            pairs += parts
            counts.append(len(parts))
        scores = iter(
            self.scorer.score(pairs, None if disable_tqdm or not self.first else "scored")
        )
        return [sum(next(scores).loglikelihood for _ in range(count)) for count in counts]

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        raise RunError(
            "the task asks for generated text, not for likelihoods; write the run as a transformers model "
            "(python -m scripts.export) and score that: lm_eval --model hf"
        )
