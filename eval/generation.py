"""Generate text: sample a token, run the model between two samples, continue prompts."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from attention import KVCache
from data.tokenizer import Tokenizer
from model import GPT

# Below this temperature the most likely token is chosen: dividing logits by it could overflow.
GREEDY = 1e-4


class SamplingParams(NamedTuple):
    """Parameters of sampling a token. top_p is nucleus sampling (arXiv 1904.09751)."""

    temperature: float = 1.0  # 0: the most likely token
    top_k: int = 0  # keep the k most likely tokens; 0: all
    top_p: float = 1.0  # keep the fewest tokens whose probabilities reach p

    def check(self) -> None:
        """Raise ValueError if a value is out of range."""
        in_range = self.temperature >= 0 and self.top_k >= 0 and 0 < self.top_p <= 1
        if not in_range:  # NaN neither
            raise ValueError("--temperature and --top-k must be at least 0, --top-p in (0, 1]")


def sample_token(
    logits: Tensor, params: SamplingParams, generator: torch.Generator | None = None
) -> Tensor:
    """Sample the next token of each row.

    Args:
        logits: (B, V).
        params: how to sample.
        generator: on the device of `logits`; torch's own by default.

    Returns:
        (B,) int64.
    """
    logits = logits.float()
    if params.temperature < GREEDY:
        return logits.argmax(-1)
    logits, order = (logits / params.temperature).sort(dim=-1, descending=True)
    if params.top_k:
        logits[:, params.top_k :] = -torch.inf
    probabilities = logits.softmax(-1)
    more_likely = probabilities.cumsum(-1) - probabilities  # (B, V) sum over more likely tokens
    probabilities[more_likely >= params.top_p] = 0
    rank = torch.multinomial(probabilities, 1, generator=generator)  # (B, 1) in sorted order
    return order.gather(-1, rank).squeeze(-1)


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
        params: how to sample.
        generator: on the model's device; torch's own by default.
        vocab_size: larger ids only pad the model's vocabulary and are never sampled.
        end: the id that ends a text.

    Yields:
        One new token for each prompt; None once the prompt's text has ended.
    """
    device = model.head.device
    block = model.config.block_size
    rows = [torch.tensor(prompt, device=device) for prompt in prompts]
    idx = pad_sequence(rows, batch_first=True, padding_side="left")  # (B, T), T grows
    lengths = torch.tensor([len(row) for row in rows], device=device)
    start = idx.shape[1] - lengths  # (B,) where each prompt starts
    ended = [False] * len(prompts)
    new = idx  # tokens that are not in the cache yet
    cache = KVCache(model.config, start, block)
    for _ in range(count):
        if cache.length + new.shape[1] > block:
            new = idx[:, -block:]
            dropped = idx.shape[1] - block
            cache = KVCache(model.config, (start - dropped).clamp(min=0), block)
        logits = model(new, past=cache).logits[:, -1, :vocab_size]  # (B, V)
        token = sample_token(logits, params, generator)  # (B,)
        sampled: list[int | None] = token.tolist()
        for row, is_ended in enumerate(ended):
            ended[row] = is_ended or sampled[row] == end
            if is_ended:
                sampled[row] = None
        yield sampled
        if all(ended):
            return
        new = token[:, None]
        idx = torch.cat([idx, new], dim=1)


def encode_prompt(tokenizer: Tokenizer, text: str, block_size: int) -> list[int]:
    """Encode a text after the end-of-text token, which starts a document.

    Raises ValueError if these ids exceed `block_size`.
    """
    ids = tokenizer.encode(text)
    if len(ids) + 1 > block_size:
        raise ValueError(
            f"a prompt of {len(ids)} tokens: with the token that begins a document the model sees "
            f"at most {block_size} (model.block_size); shorten it"
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
    """Continue prompts, each the start of a document, by at most `count` tokens.

    With `end` a text stops at its end-of-text token. Yields after each step the lists of all ids so
    far, without end-of-text; they are the same lists each time. Raises as `encode_prompt`.
    """
    block = model.config.block_size
    rows = [encode_prompt(tokenizer, prompt, block) for prompt in prompts]
    texts = [row[1:] for row in rows]
    last = tokenizer.eot if end else None
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
    """Return a prompt, the start of a document, with its continuation by at most `tokens` tokens.

    At temperature 0 each token is the most likely one. Equal seeds give equal texts. Raises
    ValueError as `encode_prompt` does.
    """
    ids = tokenizer.encode(prompt)
    params = SamplingParams(temperature)
    for texts in continue_prompts(model, tokenizer, [prompt], tokens, params, seed, end=True):
        ids = texts[0]
    return tokenizer.decode(ids)
