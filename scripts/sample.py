"""Generate text from a trained run.

    python -m scripts.sample runs/quickstart-kern --prompt "def " --tokens 400 --top-k 50

A text ends with its document (not with --ignore-end) or after --tokens. It goes to stdout while it
is sampled, the speed to stderr. Several prompts are continued one after the other.
"""

if not __package__:
    raise SystemExit("error: start it in the checkout's root as python -m scripts.sample")

import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial

from common.command import build_parser, command, run_command
from common.text import escape_controls
from eval.generation import SamplingParams, continue_text
from eval.trained import add_device_argument, add_run_arguments, load_run
from runtime import distributed

# Besides what prints; the last three are spaces and the joiner of emojis.
KEPT = "\n\t\u00a0\u3000\u200d"


def print_text(pieces: Iterator[str]) -> None:
    """Print pieces of text as they come, and their number and speed on stderr."""
    show = partial(escape_controls, keep=KEPT) if sys.stdout.isatty() else str
    print(show(next(pieces)), end="", flush=True)  # the prompt
    start = time.perf_counter()
    count = -1  # the last piece is the rest after the last token
    for piece in pieces:
        print(show(piece), end="", flush=True)
        count += 1
    print()
    speed = count / (time.perf_counter() - start)
    print(f"{count} tokens, {speed:,.1f} tokens/s", file=sys.stderr)


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
    trained, tokenizer = load_run(args.run, args.step, args.ema)
    model = trained.model.to(distributed.pick_device(args.device))
    for prompt in args.prompt:
        end = not args.ignore_end
        print_text(continue_text(model, tokenizer, prompt, args.tokens, params, args.seed, end))


if __name__ == "__main__":
    run_command(main)
