"""Text from a trained run.

    python -m scripts.sample runs/quickstart-kern --prompt "def " --tokens 400 --temperature 0.8 --top-k 50
    python -m scripts.sample runs/quickstart-kern                          asks for prompts, one a line

A sample ends with its document (--ignore-end goes on) or after --tokens. Text goes to stdout as it is drawn, the speed
to stderr. Several prompts go through the model at once, and their texts come at the end.
"""

import argparse
import sys
import time
from typing import NamedTuple

import torch

from model import Cache
from runtime import distributed
from scripts.trained import add_arguments, load_run

GREEDY = 1e-4  # a temperature below which the likeliest token is taken: logits divided by it could overflow


class Choice(NamedTuple):
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


def draw(logits, choice, generator=None, seen=None):
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
        token = draw(logits, choice, generator, seen[:, : logits.shape[1]])
        yield [None if done else int(t) for t, done in zip(token, over, strict=True)]
        over |= token == (-1 if end is None else end)
        if over.all():
            return
        seen.scatter_(1, token[:, None], True)
        new = token[:, None]
        idx = torch.cat([idx, new], dim=1)


def settle(args):
    """(model on its device, Tokenizer, Choice). Raises ValueError, also of a prompt that is too long."""
    choice = Choice(args.temperature, args.top_k, args.top_p, args.repetition_penalty)
    choice.check()
    if args.tokens < 1:
        raise ValueError(f"--tokens {args.tokens}: expected 1 or more")
    trained, tokenizer = load_run(args.run, args.step, args.average)
    for prompt in args.prompt:
        check_length(tokenizer.encode(prompt), trained.config.model)
    return trained.model.to(distributed.pick_device(args.device)), tokenizer, choice


def check_length(ids, config):
    """Raises ValueError if a prompt and the token that begins a document are more than the model sees at once."""
    if len(ids) + 1 > config.block_size:
        raise ValueError(
            f"a prompt of {len(ids)} tokens: with the one that begins a document the model sees at most "
            f"{config.block_size} (model.block_size); shorten it"
        )


def respond(model, tokenizer, prompts, args, choice):
    """Print each prompt with its continuation: as it comes if there is one, all at the end if there are several."""
    generator = torch.Generator(model.head.device).manual_seed(args.seed)
    texts = [tokenizer.encode(prompt) for prompt in prompts]
    rows = [[tokenizer.eot, *ids] for ids in texts]
    end = None if args.ignore_end else tokenizer.eot
    written, drawn, begun = "", 0, time.perf_counter()
    for tokens in generate(model, rows, args.tokens, choice, generator, tokenizer.vocab_size, end):
        for text, token in zip(texts, tokens, strict=True):
            if token is not None:
                drawn += 1
                if token != end:
                    text.append(token)
        if len(prompts) == 1:
            written = show(tokenizer.decode(texts[0]), written)
    seconds = time.perf_counter() - begun
    if len(prompts) == 1:
        print(tokenizer.decode(texts[0])[len(written) :])
    else:
        for number, text in enumerate(texts, 1):
            print(f"--- {number} ---\n{tokenizer.decode(text)}")
    print(f"{drawn} tokens, {drawn / seconds:,.1f} tokens/s", file=sys.stderr)


def show(text, written):
    """Print what `text` has beyond `written`, a character only when it is whole; returns all that is written."""
    whole = text.rstrip("\ufffd")
    if len(whole) > len(written):
        print(whole[len(written) :], end="", flush=True)
        return whole
    return written


def main(argv=None):
    parser = argparse.ArgumentParser(
        prog="python -m scripts.sample", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add_arguments(parser)
    parser.add_argument("--prompt", nargs="+", default=[], help='texts to continue, "" for the start of a document')
    parser.add_argument("--tokens", type=int, default=400, help="tokens to add at most (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: the likeliest token (default: %(default)s)")
    parser.add_argument("--top-k", type=int, default=0, help="keep the k likeliest tokens (default: all)")
    parser.add_argument("--top-p", type=float, default=1.0, help="keep the likeliest up to this mass (default: 1)")
    parser.add_argument(
        "--repetition-penalty", type=float, default=1.0, help="above 1: tokens that were there are rarer (default: 1)"
    )
    parser.add_argument("--ignore-end", action="store_true", help="go on after the end of the document")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="(default: %(default)s)")
    args = parser.parse_args(argv)
    try:
        model, tokenizer, choice = settle(args)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.prompt:
        respond(model, tokenizer, args.prompt, args, choice)
        return 0
    asking = sys.stdin.isatty()
    if asking:
        print("one prompt a line, empty for the start of a document; Ctrl-D ends", file=sys.stderr)
    while True:
        try:
            prompt = input("> " if asking else "")
            check_length(tokenizer.encode(prompt), model.config)
            respond(model, tokenizer, [prompt], args, choice)
        except (EOFError, KeyboardInterrupt):
            return 0
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
