"""The client of lm-evaluation-harness for a GPT in memory."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from common.progress import progress_bar
from data.tokenizer import Tokenizer
from eval.generation import SamplingParams, generate
from eval.scoring import Scorer
from runtime import RunError, distributed

MAX_NEW_TOKENS = 256  # where a task does not set it
ROWS = 32  # in a batch of generations


class GenerationRequest(NamedTuple):
    """One text to continue."""

    params: SamplingParams
    max_new_tokens: int
    prompt: list[int]
    stops: list[str]  # the text ends before the first of these


class Adapter(TemplateLM):
    """lm-evaluation-harness' interface to a Scorer.

    With several ranks all get every request and all results, so the harness computes the same on each of them; the
    model's work is split inside.
    """

    def __init__(self, scorer: Scorer, tokenizer: Tokenizer, seed: int = 0) -> None:
        super().__init__()
        self.scorer, self.tokens, self.seed = scorer, tokenizer, seed
        self.max_length, self.warned = scorer.config.block_size, False
        self.first = scorer.ranks.rank == 0

    @property
    def eot_token_id(self) -> int:
        return self.tokens.eot

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        return self.tokens.encode(string)

    def _loglikelihood_tokens(self, requests: Sequence[tuple], **kwargs: Any) -> list[tuple[float, bool]]:
        """Score (context, continuation) texts. Raises RunError for a continuation without tokens, as HFLM does."""
        for (context, continuation), _, ids in requests:
            if not ids:
                raise RunError(
                    f"the answer {continuation!r} after {context[-60:]!r} has no token, or shares its only one with the "
                    f"context; correct the task"
                )
        pairs = [(context or [self.prefix_token_id], continuation) for _, context, continuation in requests]
        scores = [tuple(score) for score in self.scorer.score(pairs, "scored" if self.first else None)]
        for (key, _, _), score in zip(requests, scores, strict=True):
            self.cache_hook.add_partial("loglikelihood", key, score)
        return scores

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """Score whole texts, in disjoint windows."""
        pairs, counts = [], []
        for (text,) in (request.args for request in requests):
            windows = get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self.max_length, 1)
            parts = [make_disjoint_window(window) for window in windows]
            pairs += parts
            counts.append(len(parts))
        scores = iter(self.scorer.score(pairs, None if disable_tqdm or not self.first else "scored"))
        return [sum(next(scores).loglikelihood for _ in range(count)) for count in counts]

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continue texts up to their first stop sequence.

        Takes the harness' options until, max_gen_toks, do_sample, temperature, top_k, top_p and repetition_penalty. At
        most half of block_size are new tokens; a context longer than the rest loses its first tokens.
        """
        todo = [self.parse_request(*request.args) for request in requests]
        order = sorted(range(len(todo)), key=lambda i: (*todo[i][:2], -len(todo[i].prompt)))
        batches = []
        for _, group in groupby(order, key=lambda i: todo[i][:2]):  # equal params and max_new_tokens
            members = list(group)
            batches += [members[i : i + ROWS] for i in range(0, len(members), ROWS)]
        ranks, found = self.scorer.ranks, {}
        mine = list(enumerate(batches))[ranks.rank :: ranks.world_size]
        total, hidden = sum(len(members) for _, members in mine), disable_tqdm or not self.first
        with progress_bar(total=total, desc="generated", disable=hidden) as bar:
            for number, members in mine:
                texts = self._continue_batch([todo[i] for i in members], self.seed + number)
                found.update(zip(members, texts, strict=True))
                bar.update(len(members))
        for part in distributed.gather(found, ranks.control):
            found.update(part)
        return [found[i] for i in range(len(todo))]

    def parse_request(self, context: str, given: dict[str, Any]) -> GenerationRequest:
        """Read the harness' options. Raises ValueError if one is out of range."""
        options = dict[str, Any](normalize_gen_kwargs(given, MAX_NEW_TOKENS))
        wanted: int = options["max_gen_toks"]
        count = min(wanted, max(1, self.max_length // 2))
        if count < wanted and self.first and not self.warned:
            print(f"note: {wanted} new tokens are asked for, {count} are generated: half of the model's block_size")
            self.warned = True
        params = SamplingParams(
            options.get("temperature", 1.0) if options["do_sample"] else 0,
            options.get("top_k") or 0,
            options.get("top_p") or 1.0,
            options.get("repetition_penalty") or 1.0,
        )
        params.check()
        prompt = self.tok_encode(context)[-(self.max_length - count) :] or [self.prefix_token_id]
        stops = [stop for stop in handle_stop_sequences(options["until"], eos=None) if stop]
        return GenerationRequest(params, count, prompt, stops)

    def _continue_batch(self, batch: list[GenerationRequest], seed: int) -> list[str]:
        """The continuations of requests with equal params and max_new_tokens."""
        generator = torch.Generator(self.scorer.device).manual_seed(seed)
        ids, texts, ended = [[] for _ in batch], [""] * len(batch), [False] * len(batch)
        params, count, *_ = batch[0]
        prompts = [request.prompt for request in batch]
        limits = generator, self.tokens.vocab_size, self.eot_token_id
        with self.scorer.autocast():
            for tokens in generate(self.scorer.model, prompts, count, params, *limits):
                for row, token in enumerate(tokens):
                    if token is None or token == self.eot_token_id or ended[row]:
                        ended[row] = True
                        continue
                    ids[row].append(token)
                    texts[row] = self.tokens.decode(ids[row])
                    if found := [at for stop in batch[row].stops if (at := texts[row].find(stop)) >= 0]:
                        texts[row], ended[row] = texts[row][: min(found)], True
                if all(ended):
                    break
        return texts
