"""Text token by token from a model: how a token is drawn, and the passes between two draws."""

from typing import NamedTuple

import torch

from model import Cache

GREEDY = 1e-4  # a temperature below which the likeliest token is taken: logits divided by it could overflow


class SamplingParams(NamedTuple):
    """How a token is drawn. `temperature` 0 takes the likeliest one. `top_k` > 0 keeps the k likeliest, `top_p` < 1 the
    fewest whose probabilities reach p (nucleus sampling, arXiv 1904.09751). `repetition_penalty` divides positive
    logits of tokens that were there already, and multiplies negative ones (arXiv 1909.05858)."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0

    def check(self):
        """Raises ValueError."""
        if not self.temperature >= 0 or self.top_k < 0 or not 0 < self.top_p <= 1 or not self.repetition_penalty > 0:
            raise ValueError(
                "--temperature and --top-k must be at least 0, --top-p in (0, 1], --repetition-penalty above 0"
            )


def sample_token(logits, choice, generator=None, seen=None):
    """Logits (B, V) -> tokens (B,). `seen` (B, V) bool: tokens that were there already."""
    logits = logits.float()
    if choice.repetition_penalty != 1:
        penalty = torch.where(logits > 0, 1 / choice.repetition_penalty, choice.repetition_penalty)
        logits = torch.where(seen, logits * penalty, logits)
    if choice.temperature < GREEDY:
        return logits.argmax(-1)
    logits, order = (logits / choice.temperature).sort(dim=-1, descending=True)
    if choice.top_k:
        logits[:, choice.top_k :] = -torch.inf
    probabilities = logits.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities  # what the likelier tokens hold already
    probabilities[before >= choice.top_p] = 0
    return order.gather(-1, torch.multinomial(probabilities, 1, generator=generator)).squeeze(-1)


@torch.no_grad()
def generate(model, prompts, count, choice, generator=None, vocab_size=None, end=None):
    """Continue each of `prompts`, lists of ids, by at most `count` tokens: yields a list with a token for each prompt,
    None after its `end`.

    The model sees the last block_size tokens. While there are no more, keys and values are kept; after that each token
    costs a pass over the whole window, as positions in it shift. Ids from `vocab_size` on, which pad the model's
    vocabulary, are never drawn.
    """
    device, block = next(model.parameters()).device, model.config.block_size
    width = max(map(len, prompts))
    start = torch.tensor([width - len(prompt) for prompt in prompts], device=device)
    idx = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=device)  # (B, width)
    seen = torch.zeros(len(prompts), model.config.vocab_size, dtype=torch.bool, device=device)
    for row, prompt in zip(seen, prompts, strict=True):
        row[list(prompt)] = True
    over = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    new, cache = idx, Cache(model.config, start, block)
    for _ in range(count):
        if cache.length + new.shape[1] > block:
            new = idx[:, -block:]
            cache = Cache(model.config, (start - (idx.shape[1] - block)).clamp(min=0), block)
        logits = model(new, past=cache).logits[:, -1, :vocab_size]
        token = sample_token(logits, choice, generator, seen[:, : logits.shape[1]])
        yield [None if done else int(t) for t, done in zip(token, over, strict=True)]
        over |= token == (-1 if end is None else end)
        if over.all():
            return
        seen.scatter_(1, token[:, None], True)
        new = token[:, None]
        idx = torch.cat([idx, new], dim=1)


def check_length(ids, config):
    """Raises ValueError if a prompt and the token that begins a document are more than the model sees at once."""
    if len(ids) + 1 > config.block_size:
        raise ValueError(
            f"a prompt of {len(ids)} tokens: with the one that begins a document the model sees at most "
            f"{config.block_size} (model.block_size); shorten it"
        )
