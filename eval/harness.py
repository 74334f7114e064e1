"""The client of lm-evaluation-harness for a GPT in memory."""

from collections.abc import Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM

from data.tokenizer import Tokenizer
from eval.scoring import Scorer
from runtime import RunError


class Adapter(TemplateLM):
    """Lets lm-evaluation-harness ask a Scorer.

    Each rank gets every request and every result, so that the harness computes the same on all of
    them; the Scorer splits the model's work.
    """

    def __init__(self, scorer: Scorer, tokenizer: Tokenizer) -> None:
        super().__init__()
        self.scorer = scorer
        self.ranks = scorer.ranks
        self.tokens = tokenizer
        # label of the progress bar, which only the first rank shows
        self.progress = None if self.ranks.rank else "scored"

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
        return list(self.scorer.score(pairs, self.progress))

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> Any:
        """Refuse what is neither a choice nor a continuation."""
        raise RunError(
            "the task asks for generated text, or scores whole texts (for these: eval.val_loss); "
            "write the run as a transformers model (python -m scripts.export) and score that: "
            "lm_eval --model hf"
        )

    loglikelihood_rolling = generate_until
