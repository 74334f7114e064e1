"""Two runs side by side: config differences, size and speed, losses and their difference, a sample of each.

    python -m scripts.compare runs/small-kern runs/small-softmax
    python -m scripts.compare runs/small-kern runs/small-kern-seed1 --prompt "It was " --tokens 400
    python -m scripts.compare runs/small-kern runs/small-softmax --no-sample

Losses are paired by validation window, at steps at which both runs were evaluated. For several seeds of each, and for
the paper's claims: python -m scripts.report. Needs requirements-report.txt.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import configure
from common.command import require_packages, run_command
from common.text import text_table
from scripts import sample
from scripts.report.claims import compare_arms
from scripts.report.runs import check_same_text, load_run_record
from scripts.report.settings import Arm, Setting, describe_windows
from scripts.report.tables import COLUMNS, summarize_run

STEPS = 5  # in the table of losses, at most


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
        compare(args.runs)
    except BrokenPipeError:  # an OSError that is for run_command
        raise
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    options = ["--prompt", args.prompt, "--tokens", args.tokens, "--seed", args.seed, "--device", args.device]
    for side, folder in [] if args.no_sample else zip("AB", args.runs, strict=True):
        print(f"\nsample of {side}, {folder}:", flush=True)
        if code := sample.main([str(folder), *map(str, options)]):
            return code
    return 0


def compare(folders: Sequence[Path]) -> None:
    """Print everything except the samples.

    Raises:
        ValueError: the runs cannot be compared. The differences of their configs are printed before.
    """
    require_packages("scipy")
    a, b = (load_run_record(folder) for folder in folders)
    print(f"A: {a.folder}, {a.progress}\nB: {b.folder}, {b.progress}\n")
    changes = [line for line in configure.differences(a.config, b.config) if not line.startswith("run.name:")]
    print("\n  ".join(["config, A -> B", *changes]) if changes else "The configs differ only in run.name.")
    setting = Setting("", {}, [Arm(side, "", (), {0: run}) for side, run in (("A", a), ("B", b))])
    check_same_text(setting.runs, setting.steps)
    print("\n" + text_table(("", "A", "B"), list(zip(COLUMNS, summarize_run(a), summarize_run(b), strict=True))))
    print(f"\nvalidation loss, nats per token\n{format_losses(setting)}")
    print(
        f"Intervals are over the {describe_windows(setting)}, of both runs. Other seeds may differ by more: "
        "python -m scripts.report with several of each."
    )


def format_losses(setting: Setting) -> str:
    """A table of both losses and their difference, at STEPS common steps or fewer, the last among them."""
    (a, b), steps, rows = setting.arms, [step for step in setting.steps if step] or setting.steps, []
    for step in steps[:: -math.ceil(len(steps) / STEPS)][::-1]:
        found = compare_arms(a, b, step)
        losses = [f"{arm.first.loss(step):.4f}" for arm in (a, b)]
        rows.append([f"{step:,}", *losses, str(found), found.decide("A", "B")])
    return text_table(("step", "A", "B", "A minus B, 95% interval", "lower"), rows)


if __name__ == "__main__":
    run_command(main)
