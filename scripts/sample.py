"""Text from a trained run.

    python -m scripts.sample runs/quickstart-kern --prompt "def " --tokens 400 --temperature 0.8 --top-k 50
    python -m scripts.sample runs/quickstart-kern                          asks for prompts, one a line

A sample ends with its document (--ignore-end goes on) or after --tokens. Text goes to stdout as it is drawn, the speed
to stderr. Several prompts go through the model at once, and their texts come at the end.
"""

import argparse
import sys
import time

import torch

from eval.generation import SamplingParams, check_length, generate
from eval.trained import add_arguments, load_run
from runtime import distributed


def settle(args):
    """(model on its device, Tokenizer, SamplingParams). Raises ValueError, also of a prompt that is too long."""
    choice = SamplingParams(args.temperature, args.top_k, args.top_p, args.repetition_penalty)
    choice.check()
    if args.tokens < 1:
        raise ValueError(f"--tokens {args.tokens}: expected 1 or more")
    trained, tokenizer = load_run(args.run, args.step, args.average)
    for prompt in args.prompt:
        check_length(tokenizer.encode(prompt), trained.config.model)
    return trained.model.to(distributed.pick_device(args.device)), tokenizer, choice


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
