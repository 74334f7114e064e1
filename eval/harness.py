"""The client of lm-evaluation-harness for a GPT in memory."""

from collections.abc import Sequence
from itertools import islice
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from data.tokenizer import Tokenizer
from eval.scoring import Scorer
from runtime import RunError


class Loglikelihood(float):
    """A log-likelihood, nats, that knows the UTF-8 bytes of the text it is of."""

    size: int


def count_scored_bytes(context: str, continuation: str) -> int:
    """UTF-8 bytes of the text that the harness scores.

    White space at the context's end belongs to it, see `_encode_pair` of the harness.
    """
    moved = context[len(context.rstrip()) :]
    return len((moved + continuation).encode("utf-8", "replace"))


class Adapter(TemplateLM):
    """Lets lm-evaluation-harness ask a Scorer.

    Each rank gets every request and every result, so that the harness computes the same on all of
    them; the Scorer splits the model's work.
    """

    def __init__(self, scorer: Scorer, tokenizer: Tokenizer) -> None:
        super().__init__()
        self.scorer = scorer
        self.tokens = tokenizer
        self.max_length = scorer.config.block_size
        # label of the progress bar, which only the first rank shows
        self.progress = None if scorer.ranks.rank else "scored"

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
                    f"the answer {continuation!r} after {context[-60:]!r} has no token, or shares "
                    f"its only one with the context; correct the task"
                )
        pairs = []
        for _, context, continuation in requests:
            pairs.append((context or [self.prefix_token_id], continuation))
        scores: list[tuple[float, bool]] = []
        results = self.scorer.score(pairs, self.progress)
        for (key, _, _), result in zip(requests, results, strict=True):
            loglikelihood = Loglikelihood(result.loglikelihood)
            loglikelihood.size = count_scored_bytes(*key)
            scores.append((loglikelihood, result.greedy))
        return scores

    def loglikelihood_rolling(
        self, requests: Sequence[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Score whole texts, in disjoint windows."""
        pairs = []
        counts = []  # windows of each text
        for request in requests:
            ids = self.tok_encode(request.args[0])
            windows = get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, 1)
            of_text = [make_disjoint_window(window) for window in windows]
            pairs += of_text
            counts.append(len(of_text))
        scores = iter(self.scorer.score(pairs, None if disable_tqdm else self.progress))
        sums = []
        for count in counts:
            sums.append(sum(score.loglikelihood for score in islice(scores, count)))
        return sums

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        raise RunError(
            "the task asks for generated text, not for likelihoods; write the run as a "
            "transformers model (python -m scripts.export) and score that: lm_eval --model hf"
        )
