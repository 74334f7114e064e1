"""Generate text from a trained run.

    python -m scripts.sample runs/quickstart-kern --prompt "def " --tokens 400 --top-k 50

A text ends with its document (not with --ignore-end) or after --tokens. It goes to stdout while it
is sampled, the speed to stderr. Several prompts are one batch, and their texts are printed at the
end.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from functools import partial

from common.command import build_parser, command, run_command
from common.text import escape_controls
from data.tokenizer import Tokenizer
from eval.generation import SamplingParams, continue_prompts
from eval.trained import add_device_argument, add_run_arguments, load_run
from model import GPT
from runtime import distributed

# Besides what prints; the last three are spaces and the joiner of emojis.
KEPT = "\n\t\u00a0\u3000\u200d"


def print_continuations(
    model: GPT,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    args: argparse.Namespace,
    params: SamplingParams,
) -> None:
    """Print prompts and continuations: a single one while it is sampled, several at the end."""
    alone = len(prompts) == 1
    show = partial(escape_controls, keep=KEPT) if sys.stdout.isatty() else str
    printed = ""
    texts: list[list[int]] = []  # token ids of each prompt and its continuation so far
    start = time.perf_counter()
    for texts in continue_prompts(
        model, tokenizer, prompts, args.tokens, params, args.seed, not args.ignore_end
    ):
        # a character waits for its last byte
        text = tokenizer.decode(texts[0]).rstrip("\ufffd") if alone else ""
        if len(text) > len(printed):
            print(show(text[len(printed) :]), end="", flush=True)
            printed = text
    seconds = time.perf_counter() - start
    if alone:
        print(show(tokenizer.decode(texts[0])[len(printed) :]))
    else:
        for number, ids in enumerate(texts, 1):
            print(f"--- {number} ---\n{show(tokenizer.decode(ids))}")
    given = sum(len(tokenizer.encode(prompt)) for prompt in prompts)
    sampled = sum(len(ids) for ids in texts) - given
    print(f"{sampled} tokens, {sampled / seconds:,.1f} tokens/s", file=sys.stderr)


@command
def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = build_parser("scripts.sample", __doc__)
    add_run_arguments(parser)
    add = parser.add_argument
    add(
        "--prompt",
        nargs="+",
        default=[""],
        help="texts to continue (default: the start of a document)",
    )
    add("--tokens", type=int, default=400, help="new tokens, at most (default: %(default)s)")
    add("--temperature", type=float, default=0.8, help="0: the most likely token (default: 0.8)")
    add("--top-k", type=int, default=0, help="keep the k most likely tokens (default: all)")
    add(
        "--top-p", type=float, default=1.0, help="keep the most likely up to this mass (default: 1)"
    )
    add("--ignore-end", action="store_true", help="continue after the end of the document")
    add("--seed", type=int, default=0, help="(default: %(default)s)")
    add_device_argument(parser)
    args = parser.parse_args(argv)
    params = SamplingParams(args.temperature, args.top_k, args.top_p)
    params.check()
    if args.tokens < 1:
        raise ValueError(f"--tokens {args.tokens}: expected 1 or more")
    trained, tokenizer = load_run(args.run, args.step, args.average, args.ema)
    model = trained.model.to(distributed.pick_device(args.device))
    print_continuations(model, tokenizer, args.prompt, args, params)


if __name__ == "__main__":
    run_command(main)
