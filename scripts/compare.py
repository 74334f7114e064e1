"""Two runs side by side: config differences, size and speed, losses and their difference, a sample of each.

    python -m scripts.compare runs/small-kern runs/small-softmax
    python -m scripts.compare runs/small-kern runs/small-kern-seed1 --prompt "It was " --tokens 400
    python -m scripts.compare runs/small-kern runs/small-softmax --no-sample

Losses are paired by validation window, at steps at which both runs were evaluated. For several seeds of each, and for
the paper's claims: python -m scripts.report. Needs requirements-report.txt.
"""

import argparse
import math
import shutil
import sys
import textwrap
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

import torch

from configure.schema import KEYS
from data.tokenizer import Tokenizer
from eval.generation import SamplingParams, check_prompt_length, generate
from eval.trained import Trained, load_run
from runtime import distributed
from runtime.output import require_packages, text_table
from scripts.report.claims import estimate_interval, pair_differences
from scripts.report.runs import Arm, Setting, check_same_text, load_run_record
from scripts.report.tables import COLUMNS, summarize_run

STEPS = 5  # in the table of losses, at most
TEMPERATURE = 0.8


def main(argv: Sequence[str] | None = None) -> int:
    """Print the comparison; 2 after an error that is the user's to fix."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.compare", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("runs", nargs=2, type=Path, metavar="RUN", help="run folders, A and B")
    parser.add_argument("--prompt", default="", help="text that both continue (default: the start of a document)")
    parser.add_argument("--tokens", type=int, default=200, help="of each sample at most (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of both samples (default: %(default)s)")
    parser.add_argument("--no-sample", action="store_true", help="no samples: checkpoints are not loaded")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="(default: %(default)s)")
    args = parser.parse_args(argv)
    try:
        compare(args)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def compare(args: argparse.Namespace) -> None:
    """The command. Raises ValueError if the runs cannot be compared; their configs are printed before."""
    require_packages("scipy")
    if args.tokens < 1:
        raise ValueError(f"--tokens {args.tokens}: expected 1 or more")
    a, b = (load_run_record(folder) for folder in args.runs)
    print(f"A: {a.folder}, {a.progress}\nB: {b.folder}, {b.progress}\n")
    values = [(key, format_value(a.value(key)), format_value(b.value(key))) for key in KEYS if key != "run.name"]
    differing = [row for row in values if row[1] != row[2]]
    print(text_table(("config", "A", "B"), differing) if differing else "The configs differ only in run.name.")
    setting = Setting("", {}, [Arm(side, "", (), {0: run}) for side, run in (("A", a), ("B", b))])
    check_same_text(setting)
    models, reason = ([], "") if args.no_sample else load_models(args)
    print("\n" + text_table(("", "A", "B"), list(zip(COLUMNS, summarize_run(a), summarize_run(b), strict=True))))
    print(f"\nvalidation loss, nats per token\n{format_losses(setting)}")
    print(
        f"Intervals are over the {a.count_windows(setting.end)} validation windows of both runs. Other seeds may "
        "differ by more: python -m scripts.report with several of each."
    )
    if reason:
        print(f"\nno samples: {reason}")
    if models:
        words = f"continuations of {args.prompt!r}" if args.prompt else "documents from their beginning"
        print(f"\n{words}, at most {args.tokens} tokens, temperature {TEMPERATURE}, seed {args.seed}\n", flush=True)
        texts = [draw_sample(trained, tokenizer, args) for trained, tokenizer in models]
        heads = [f"{side}, step {trained.step:,}" for side, (trained, _) in zip("AB", models, strict=True)]
        print(format_columns(heads, texts, shutil.get_terminal_size().columns))


def format_value(value: object) -> str:
    """As in a config file, but without quotes around text."""
    return str(value).lower() if isinstance(value, bool) else str(value) or '""'


def format_losses(setting: Setting) -> str:
    """A table of both losses and their difference, at STEPS common steps or fewer, the last among them."""
    (a, b), steps, rows = setting.arms, [step for step in setting.steps if step] or setting.steps, []
    for step in steps[:: -math.ceil(len(steps) / STEPS)][::-1]:
        found = estimate_interval([pair_differences(a, b, step)])
        lower = "A" if found.high < 0 else "B" if found.low > 0 else "undecided"
        rows.append((f"{step:,}", f"{a.first.loss(step):.4f}", f"{b.first.loss(step):.4f}", str(found), lower))
    return text_table(("step", "A", "B", "A minus B, 95% interval", "lower"), rows)


def load_models(args: argparse.Namespace) -> tuple[list[tuple[Trained, Tokenizer]], str]:
    """Both models with their tokenizers, or why there are none. Raises ValueError if the prompt is too long."""
    try:
        loaded = [load_run(folder) for folder in args.runs]
    except ValueError as error:  # no checkpoint, or a damaged one: losses can be compared without
        return [], str(error)
    for trained, tokenizer in loaded:
        check_prompt_length(tokenizer.encode(args.prompt), trained.config.model.block_size)
    return loaded, ""


def draw_sample(trained: Trained, tokenizer: Tokenizer, args: argparse.Namespace) -> str:
    """The prompt and its continuation, up to the end of the document or --tokens."""
    model = trained.model.to(distributed.pick_device(args.device))
    generator = torch.Generator(model.head.device).manual_seed(args.seed)
    ids, params, end = tokenizer.encode(args.prompt), SamplingParams(TEMPERATURE), tokenizer.eot
    for (token,) in generate(model, [[end, *ids]], args.tokens, params, generator, tokenizer.vocab_size, end):
        ids += [] if token is None or token == end else [token]
    return tokenizer.decode(ids)


def format_columns(heads: Sequence[str], texts: Sequence[str], width: int) -> str:
    """Two texts in two columns of a terminal of `width`; nothing in them moves its cursor."""
    half, columns = max(20, (width - 3) // 2), []
    for head, text in zip(heads, texts, strict=True):
        shown = "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text.expandtabs(4))
        wrapped = [textwrap.wrap(line, half) or [""] for line in shown.split("\n")]
        columns.append([head, "-" * half, *sum(wrapped, [])])
    return "\n".join(f"{left:<{half}} | {right}".rstrip() for left, right in zip_longest(*columns, fillvalue=""))


if __name__ == "__main__":
    sys.exit(main())
