"""Generate text: how a token is sampled, the forward passes between two samples, and what becomes of prompts."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from attention import KVCache
from data.tokenizer import Tokenizer
from model import GPT

# a temperature below this takes the most likely token: dividing logits by it could overflow
GREEDY = 1e-4


class SamplingParams(NamedTuple):
    """How a token is sampled. top_p is nucleus sampling (arXiv 1904.09751)."""

    temperature: float = 1.0  # 0: the most likely token
    top_k: int = 0  # keep the k most likely tokens; 0: all
    top_p: float = 1.0  # keep the fewest tokens whose probabilities reach p

    def check(self) -> None:
        """Raise ValueError if a value is out of range."""
        if not self.temperature >= 0 or self.top_k < 0 or not 0 < self.top_p <= 1:
            raise ValueError("--temperature and --top-k must be at least 0, --top-p in (0, 1]")


def sample_token(
    logits: Tensor, params: SamplingParams, generator: torch.Generator | None = None
) -> Tensor:
    """Sample the next token of each row of logits (B, V): (B,) int64; `generator`, on their device, or torch's own."""
    logits = logits.float()
    if params.temperature < GREEDY:
        return logits.argmax(-1)
    logits, order = (logits / params.temperature).sort(dim=-1, descending=True)
    if params.top_k:
        logits[:, params.top_k :] = -torch.inf
    probabilities = logits.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities  # probability of all more likely tokens
    probabilities[before >= params.top_p] = 0
    return order.gather(-1, torch.multinomial(probabilities, 1, generator=generator)).squeeze(-1)


@torch.no_grad()
def generate(
    model: GPT,
    prompts: Sequence[Sequence[int]],
    count: int,
    params: SamplingParams,
    generator: torch.Generator | None = None,
    vocab_size: int | None = None,
    end: int | None = None,
) -> Iterator[list[int | None]]:
    """Continue each prompt by at most `count` tokens.

    The model sees the last block_size tokens. Keys and values are cached while all tokens fit;
    after that each token costs a forward pass over the whole window, because the positions in it
    shift.

    Args:
        model: in evaluation mode.
        prompts: token ids; none of them empty.
        count: new tokens per prompt, at most.
        params: how tokens are sampled.
        generator: on the model's device; torch's own by default.
        vocab_size: ids from here on only pad the model's vocabulary and are never sampled.
        end: the id that ends a text.

    Yields:
        One new token for each prompt; None once the prompt's text has ended.
    """
    device, block = model.head.device, model.config.block_size
    width = max(map(len, prompts))
    start = torch.tensor([width - len(prompt) for prompt in prompts], device=device)
    # (B, width)
    idx = torch.tensor(
        [[0] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=device
    )
    ended = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    new, cache = idx, KVCache(model.config, start, block)
    for _ in range(count):
        if cache.length + new.shape[1] > block:
            new = idx[:, -block:]
            cache = KVCache(model.config, (start - (idx.shape[1] - block)).clamp(min=0), block)
        logits = model(new, past=cache).logits[:, -1, :vocab_size]
        token = sample_token(logits, params, generator)
        yield [None if done else t for t, done in zip(token.tolist(), ended.tolist(), strict=True)]
        ended |= token == (-1 if end is None else end)
        if ended.all():
            return
        new = token[:, None]
        idx = torch.cat([idx, new], dim=1)


def begin_document(tokenizer: Tokenizer, text: str, block_size: int) -> list[int]:
    """The ids of a text after the token that begins a document.

    Raises ValueError if they exceed `block_size`.
    """
    ids = tokenizer.encode(text)
    if len(ids) + 1 > block_size:
        raise ValueError(
            f"a prompt of {len(ids)} tokens: with the token that begins a document the model sees at most {block_size} "
            f"(model.block_size); shorten it"
        )
    return [tokenizer.eot, *ids]


def continue_prompts(
    model: GPT,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    count: int,
    params: SamplingParams,
    seed: int,
    end: bool,
) -> Iterator[list[list[int]]]:
    """Continue prompts, each the beginning of a document, by `count` tokens at most, or if `end` to its end.

    Yields each text's ids so far, without end-of-text, after each step: the same lists. Raises as
    `begin_document`.
    """
    rows = [begin_document(tokenizer, prompt, model.config.block_size) for prompt in prompts]
    texts, last = [row[1:] for row in rows], tokenizer.eot if end else None
    generator = torch.Generator(model.head.device).manual_seed(seed)
    for tokens in generate(model, rows, count, params, generator, tokenizer.vocab_size, last):
        for text, token in zip(texts, tokens, strict=True):
            if token is not None and token != last:
                text.append(token)
        yield texts


def generate_text(
    model: GPT,
    tokenizer: Tokenizer,
    prompt: str,
    tokens: int = 200,
    temperature: float = 0.8,
    seed: int = 0,
) -> str:
    """A prompt, the beginning of a document, with its continuation by at most `tokens` tokens.

    Temperature 0 takes the most likely token; equal seeds give equal texts. Raises ValueError as
    `begin_document` does.
    """
    *_, (text,) = continue_prompts(
        model, tokenizer, [prompt], tokens, SamplingParams(temperature), seed, end=True
    )
    return tokenizer.decode(text)
