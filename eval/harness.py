"""The adapter between lm-evaluation-harness and a GPT that lies in memory."""

from typing import NamedTuple

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from eval.generation import SamplingParams, generate
from runtime import RunError, distributed

MAX_NEW_TOKENS = 256  # where a task does not say
ROWS = 32  # of a batch of generations


class Adapter(TemplateLM):
    """`scorer` an eval.scoring.Scorer, `tokenizer` one of data.tokenizer. With several ranks all have every request:
    the work is shared below, and each rank gets all results, so the harness computes the same on all of them."""

    def __init__(self, scorer, tokenizer, seed=0):
        super().__init__()
        self.scorer, self.tokens, self.seed = scorer, tokenizer, seed
        self.max_length, self.warned = scorer.config.block_size, False

    @property
    def eot_token_id(self):
        return self.tokens.eot

    def tok_encode(self, string, add_special_tokens=None, **kwargs):
        return self.tokens.encode(string)

    def loglikelihood(self, requests, disable_tqdm=False):
        """Raises RunError of an answer that has no token: the harness' own client stops there, too."""
        for context, continuation in (request.args for request in requests):
            if not continuation:
                raise RunError(f"an empty answer after {context[-60:]!r} cannot be scored: correct the task")
        return super().loglikelihood(requests, disable_tqdm=True)  # one bar, that of the scores, is enough

    def _loglikelihood_tokens(self, requests, **kwargs):
        for (context, continuation), _, ids in requests:
            if not ids:
                raise RunError(
                    f"{continuation!r} after {context[-60:]!r} makes one token with what is before it, so it has none "
                    f"of its own to be scored: put a space between them in the task"
                )
        pairs = [(context or [self.prefix_token_id], continuation) for _, context, continuation in requests]
        scores = self.scorer.score(pairs, "scored" if self.first else None)
        for (key, _, _), score in zip(requests, scores, strict=True):
            self.cache_hook.add_partial("loglikelihood", key, tuple(score))
        return [tuple(score) for score in scores]

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        pairs, counts = [], []
        for (text,) in (request.args for request in requests):
            ids = self.tok_encode(text)
            windows = list(get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, 1))
            pairs += map(make_disjoint_window, windows)
            counts.append(len(windows))
        scores = iter(self.scorer.score(pairs, None if disable_tqdm or not self.first else "scored"))
        return [sum(next(scores).loglikelihood for _ in range(count)) for count in counts]

    def generate_until(self, requests, disable_tqdm=False):
        """Continuations up to the first stop sequence, by the harness' names of options: until, max_gen_toks,
        do_sample, temperature, top_k, top_p, repetition_penalty. A context loses its first tokens where it and
        max_gen_toks are more than block_size, and there are at most half a block of new tokens."""
        wishes = [self.wish(request.args) for request in requests]
        order = sorted(range(len(wishes)), key=lambda i: (wishes[i].choice, wishes[i].most, -len(wishes[i].ids)))
        rows = [order[i : i + ROWS] for i in range(0, len(order), ROWS)]
        parts = [part for batch in rows for part in alike(batch, wishes)]
        ranks = self.scorer.ranks
        numbers = {part[0]: number for number, part in enumerate(parts)}
        found = {}
        mine = parts if ranks is None else parts[ranks.rank :: ranks.world_size]
        with tqdm(
            total=sum(map(len, mine)), desc="generated", disable=None if self.first and not disable_tqdm else True
        ) as bar:
            for part in mine:
                found |= dict(zip(part, self.continue_all([wishes[i] for i in part], numbers[part[0]]), strict=True))
                bar.update(len(part))
        if ranks is not None and ranks.world_size > 1:
            for other in distributed.gather(found, ranks.control):
                found |= other
        return [found[i] for i in range(len(requests))]

    def wish(self, args):
        context, options = args
        options = normalize_gen_kwargs(options, MAX_NEW_TOKENS)
        until = handle_stop_sequences(options["until"], eos=None)
        most = min(options["max_gen_toks"], max(1, self.max_length // 2))
        if most < options["max_gen_toks"] and self.first and not self.warned:
            print(f"note: {options['max_gen_toks']} new tokens are asked for, {most} are made: half the model's block")
            self.warned = True
        choice = SamplingParams(
            options["temperature"] if options["do_sample"] else 0,
            options.get("top_k") or 0,
            options.get("top_p") or 1.0,
            options.get("repetition_penalty") or 1.0,
        )
        choice.check()
        ids = self.tok_encode(context)[-(self.max_length - most) :] or [self.prefix_token_id]
        return GenerationRequest(ids, [stop for stop in until if stop], most, choice)

    def continue_all(self, wishes, number):
        """The texts of wishes that are alike in `most` and `choice`, a batch of that number."""
        first = wishes[0]
        generator = torch.Generator(self.scorer.device).manual_seed(self.seed + number)
        drawn, texts, over = [[] for _ in wishes], [""] * len(wishes), [False] * len(wishes)
        prompts = [wish.ids for wish in wishes]
        limits = generator, self.tokens.vocab_size, self.eot_token_id
        with self.scorer.autocast():
            for tokens in generate(self.scorer.model, prompts, first.most, first.choice, *limits):
                for row, token in enumerate(tokens):
                    if token is None or token == self.eot_token_id or over[row]:
                        over[row] = True
                        continue
                    drawn[row].append(token)
                    texts[row] = self.tokens.decode(drawn[row])
                    places = [place for stop in wishes[row].until if (place := texts[row].find(stop)) >= 0]
                    if places:
                        texts[row], over[row] = texts[row][: min(places)], True
                if all(over):
                    break
        return texts

    @property
    def first(self):
        return self.scorer.ranks is None or self.scorer.ranks.rank == 0


class GenerationRequest(NamedTuple):
    ids: list[int]
    until: list[str]
    most: int
    choice: SamplingParams


def alike(batch, wishes):
    """The members of `batch`, in order, in lists that are alike in `most` and `choice`."""
    parts = []
    for i in batch:
        if parts and wishes[parts[-1][-1]][2:] == wishes[i][2:]:
            parts[-1].append(i)
        else:
            parts.append([i])
    return parts
