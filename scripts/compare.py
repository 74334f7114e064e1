"""Two runs beside each other: what their configs differ in, size and speed, losses and their difference, a sample.

    python -m scripts.compare runs/small-kern runs/small-softmax
    python -m scripts.compare runs/small-kern runs/small-kern-seed1 --prompt "It was " --tokens 400
    python -m scripts.compare runs/small-kern runs/small-softmax --no-sample

Losses are paired by validation window, at steps at which both runs were evaluated. For several seeds of each, and what
they say of the paper's claims: python -m scripts.report.
"""

import argparse
import math
import shutil
import sys
import textwrap
from itertools import zip_longest
from pathlib import Path

import torch

from configure.schema import KEYS
from eval.generation import SamplingParams, check_prompt_length, generate
from eval.trained import load_run
from runtime import distributed
from runtime.output import text_table
from scripts.report.__main__ import COLUMNS, row
from scripts.report.claims import differences, interval
from scripts.report.runs import Arm, Setting, identity_of, load

SIDES = ("A", "B")
STEPS = 5  # in the table of losses, at most
TEMPERATURE = 0.8
NARROW = 80  # columns of a terminal below which samples come one below the other
REMEDY = "score both on one text instead: python -m eval.val_loss RUN --data SET_OR_FILE"


# ---- configs, sizes, losses


def config_table(runs):
    """Text: every key but run.name that has two values."""
    rows = [(key, *(shown(run.value(key)) for run in runs)) for key in KEYS if key != "run.name"]
    rows = [cells for cells in rows if cells[1] != cells[2]]
    return text_table(("config", *SIDES), rows) if rows else "Their configs differ in nothing but run.name."


def shown(value):
    """As in a config file, but for quotes around text."""
    return str(value).lower() if isinstance(value, bool) else str(value) if value != "" else '""'


def pair(runs):
    """The Setting of two arms with a Run each. Raises ValueError if their losses are not to be paired."""
    names = " and ".join(str(run.folder) for run in runs)
    facts = [identity_of(run) or {} for run in runs]
    for what in ("data", "tokenizer"):
        if len({fact[what] for fact in facts if what in fact}) > 1:
            raise ValueError(f"{names} were trained on different {what} (sha256 in their checkpoints); {REMEDY}")
    for key in ["model.block_size", *["data.name"] * (not all(facts))]:
        same(names, key, [run.value(key) for run in runs])
    arms = [Arm(side, run.value("model.router"), (), {0: run}) for side, run in zip(SIDES, runs, strict=True)]
    setting = Setting("", {}, arms)
    if not setting.steps:
        at = " and ".join(f"{', '.join(map(str, list(run.evaluations)[:4]))} …" for run in runs)
        raise ValueError(f"{names} were evaluated at no common step (at {at}); {REMEDY}")
    same(names, "the number of validation windows", [windows(run, setting.end) for run in runs])
    return setting


def same(names, what, values):
    """Raises ValueError if the two differ."""
    if values[0] != values[1]:
        raise ValueError(f"{names}: {what} is {values[0]} and {values[1]}, so their losses are of other text; {REMEDY}")


def windows(run, step):
    return len(run.evaluations[step].get("val/window_losses", ())) or run.value("eval.windows")


def some(steps):
    """STEPS of them, evenly spread, with the last and without step 0, if there are others."""
    steps = [step for step in steps if step] or steps
    places = [len(steps) * i // STEPS for i in range(1, STEPS + 1)]
    return sorted({steps[place - 1] for place in places if place})


def loss_table(setting):
    """Text: losses at some steps, and A's minus B's."""
    rows = []
    for step in some(setting.steps):
        losses = [f"{run.loss(step):.4f}" for run in setting.runs]
        rows.append((f"{step:,}", *losses, str(interval([differences(*setting.arms, step)]))))
    return text_table(("step", *SIDES, "A minus B, 95% interval"), rows)


def verdict(setting):
    """Lines: what the last difference says, and what it leaves open."""
    found, count = interval([differences(*setting.arms, setting.end)]), windows(setting.runs[0], setting.end)
    size = f"{abs(found.mean):.4f} nats a token"
    if math.isnan(found.low):
        says = f"A minus B is {found.mean:+.4f} nats a token, without an interval: losses of windows were not logged"
    elif found.low <= 0 <= found.high:
        says = f"which of the two is lower stays open ({size} apart)"
    else:
        says = f"{'A' if found.high < 0 else 'B'} is lower by {size}, more than other text would explain"
    over = f"The interval is over the {count} validation windows that both share. " * (not math.isnan(found.low))
    seeds = (
        "Seeds are not covered: two runs of another seed may differ otherwise, and python -m scripts.report with "
        "several seeds of each tells how much."
    )
    return [f"At step {setting.end:,}, the last that both have, {says}.", over + seeds, *caveats(setting)]


def caveats(setting):
    """Lines on what besides the model may make the difference."""
    lines, (one, other) = [], setting.runs
    if one.value("run.seed") != other.value("run.seed"):
        lines.append("Their seeds differ, so the difference is partly one of first weights and order of windows.")
    tokens = [run.value("train.batch_size") * run.value("model.block_size") for run in setting.runs]
    if tokens[0] != tokens[1]:
        lines.append(f"A step is {tokens[0]:,} tokens in A and {tokens[1]:,} in B: equal steps are not equal training.")
    ends = [run.value("train.max_steps") for run in setting.runs]
    if set(ends) != {setting.end}:
        lines.append(
            f"Step {setting.end:,} is one of {ends[0]:,} in A and of {ends[1]:,} in B: before the end of training the "
            f"learning rate is still to fall, and the loss with it."
        )
    for side, run in zip(SIDES, setting.runs, strict=True):
        if run.diverged is not None:
            lines.append(f"{side} diverged: its loss was not finite at step {run.diverged:,}.")
    return lines


# ---- samples


def load_both(args):
    """([(Trained, Tokenizer)], why there are none). Raises ValueError of a prompt that is too long for one of them."""
    try:
        loaded = [load_run(folder) for folder in args.runs]
    except ValueError as error:  # no checkpoint, a damaged one: losses do without
        return [], str(error)
    for trained, tokenizer in loaded:
        check_prompt_length(tokenizer.encode(args.prompt), trained.config.model.block_size)
    return loaded, ""


def draw(trained, tokenizer, args):
    """The prompt and what the model makes of it, up to the end of the document or --tokens."""
    model = trained.model.to(distributed.pick_device(args.device))
    generator = torch.Generator(model.head.device).manual_seed(args.seed)
    ids, choice, end = tokenizer.encode(args.prompt), SamplingParams(TEMPERATURE), tokenizer.eot
    for (token,) in generate(
        model, [[end, *ids]], args.tokens, choice, generator, vocab_size=tokenizer.vocab_size, end=end
    ):
        ids += [token] * (token != end)
    return tokenizer.decode(ids)


def beside(heads, texts, width):
    """Two texts in two columns of a terminal so wide, or one below the other if that is narrow."""
    if width < NARROW:
        return "\n\n".join("\n".join(column(*each, width)) for each in zip(heads, texts, strict=True))
    half = (width - 3) // 2
    columns = [column(head, text, half) for head, text in zip(heads, texts, strict=True)]
    return "\n".join(f"{left:<{half}} | {right}".rstrip() for left, right in zip_longest(*columns, fillvalue=""))


def column(head, text, width):
    """Lines of at most `width`: head, rule, and the text, in which nothing moves the terminal's cursor."""
    text = text.expandtabs(4)
    text = "".join(letter if letter.isprintable() or letter == "\n" else "\ufffd" for letter in text)
    lines = [part for line in text.split("\n") for part in textwrap.wrap(line, width) or [""]]
    return [head, "-" * width, *lines]


def main(argv=None):
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
        return compare(args)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def compare(args):
    if args.tokens < 1:
        raise ValueError(f"--tokens {args.tokens}: expected 1 or more")
    runs = [load(folder) for folder in args.runs]
    print("\n".join(f"{side}: {run.folder}" for side, run in zip(SIDES, runs, strict=True)))
    print(f"\n{config_table(runs)}", flush=True)
    setting = pair(runs)
    loaded, reason = ([], "") if args.no_sample else load_both(args)
    print(f"\n{text_table(('', *SIDES), [*zip(COLUMNS, *map(row, runs), strict=True)])}")
    print(f"\nvalidation loss, nats a token\n{loss_table(setting)}\n")
    width = shutil.get_terminal_size().columns
    print("\n".join(textwrap.fill(line, width) for line in verdict(setting)))
    if reason:
        print(f"\nno samples: {reason}")
    if loaded:
        words = f"continuations of {args.prompt!r}" if args.prompt else "documents from their beginning"
        print(f"\n{words}, at most {args.tokens} tokens, temperature {TEMPERATURE}, seed {args.seed}\n", flush=True)
        heads = [f"{side}, step {trained.step:,}" for side, (trained, _) in zip(SIDES, loaded, strict=True)]
        print(beside(heads, [draw(*one, args) for one in loaded], width))
    return 0


if __name__ == "__main__":
    sys.exit(main())
