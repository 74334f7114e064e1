"""Generate text: sample a token, run the model between two samples, continue prompts."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

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
    prompt: Sequence[int],
    count: int,
    params: SamplingParams,
    generator: torch.Generator | None = None,
    vocab_size: int | None = None,
    end: int | None = None,
) -> Iterator[int]:
    """Continue a prompt by at most `count` tokens.

    The model sees the last block_size tokens. Keys and values are cached while all tokens fit;
    after that each token costs a forward pass over the whole window, because the positions in it
    shift.

    Args:
        model: in evaluation mode.
        prompt: token ids, at least one.
        count: new tokens, at most.
        params: how to sample.
        generator: on the model's device; torch's own by default.
        vocab_size: larger ids only pad the model's vocabulary and are never sampled.
        end: the id that ends the text; it is not yielded.
    """
    block = model.config.block_size
    idx = torch.tensor([prompt], device=model.head.device)  # (1, T), T grows
    start = torch.zeros(1, dtype=torch.int64, device=idx.device)
    cache = KVCache(model.config, start, block)
    new = idx[:, -block:]  # tokens that are not in the cache yet
    for _ in range(count):
        if cache.length + new.shape[1] > block:
            new = idx[:, -block:]
            cache = KVCache(model.config, start, block)
        logits = model(new, past=cache).logits[:, -1, :vocab_size]  # (1, V)
        new = sample_token(logits, params, generator)[:, None]  # (1, 1)
        token = int(new.item())
        if token == end:
            return
        yield token
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


def continue_text(
    model: GPT,
    tokenizer: Tokenizer,
    prompt: str,
    count: int,
    params: SamplingParams,
    seed: int,
    end: bool = True,
) -> Iterator[str]:
    """Yield a prompt, the start of a document, then what each of at most `count` tokens adds.

    A character waits for its last byte. With `end` the text stops where its document does. Raises
    ValueError as `encode_prompt`.
    """
    ids = encode_prompt(tokenizer, prompt, model.config.block_size)
    generator = torch.Generator(model.head.device).manual_seed(seed)
    last = tokenizer.eot if end else None
    shown = text = tokenizer.decode(ids[1:])
    yield text
    for token in generate(model, ids, count, params, generator, tokenizer.vocab_size, last):
        ids.append(token)
        text = tokenizer.decode(ids[1:])
        whole = text.rstrip("\ufffd")
        yield whole[len(shown) :]
        shown = max(shown, whole, key=len)
    yield text[len(shown) :]


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
    params = SamplingParams(temperature)
    return "".join(continue_text(model, tokenizer, prompt, tokens, params, seed))
