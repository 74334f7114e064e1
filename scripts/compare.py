"""Two runs side by side: config differences, size and speed, losses and their difference, a sample of each.

    python -m scripts.compare runs/small-kern runs/small-softmax
    python -m scripts.compare runs/small-kern runs/small-kern-seed1 --prompt "It was " --tokens 400
    python -m scripts.compare runs/small-kern runs/small-softmax --no-sample

Losses are paired by validation window, at steps at which both runs were evaluated. For verdicts, which need three seeds
of each, and for the paper's claims: python -m scripts.report. Needs requirements-report.txt.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import configure
from common.command import build_parser, command, require_packages, run_command
from common.text import text_table
from scripts.report.runs import Run, check_same_text, load_evaluated
from scripts.report.settings import Arm, Setting

STEPS = 5  # in the table of losses, at most


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Print the comparison and the samples."""
    parser = build_parser("scripts.compare", __doc__)
    parser.add_argument("runs", nargs=2, type=Path, metavar="RUN", help="run folders, A and B")
    parser.add_argument("--prompt", default="", help="text that both continue (default: the start of a document)")
    parser.add_argument("--tokens", type=int, default=200, help="of each sample at most (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of both samples (default: %(default)s)")
    parser.add_argument("--no-sample", action="store_true", help="no samples: checkpoints are not loaded")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="(default: %(default)s)")
    args = parser.parse_args(argv)
    require_packages("scipy", "matplotlib")
    compare_runs(*map(load_evaluated, args.runs))
    if args.no_sample:
        return 0
    from scripts import sample

    options = ["--prompt", args.prompt, "--tokens", args.tokens, "--seed", args.seed, "--device", args.device]
    for side, folder in zip("AB", args.runs, strict=True):
        print(f"\nsample of {side}, {folder}:", flush=True)
        if code := sample.main([str(folder), *map(str, options)]):
            return code
    return 0


def compare_runs(a: Run, b: Run) -> None:
    """Print everything except the samples.

    Raises:
        ValueError: the runs cannot be compared. The differences of their configs are printed before.
    """
    from scripts.report.comparisons import estimate
    from scripts.report.tables import RUN_COLUMNS, summarize_run

    print(f"A: {a.folder}, {a.progress}\nB: {b.folder}, {b.progress}\n")
    changes = [line for line in configure.differences(a.config, b.config) if not line.startswith("run.name:")]
    print("\n  ".join(["config, A -> B", *changes]) if changes else "The configs differ only in run.name.")
    check_same_text([a, b])
    left, right = Arm("A", {}, {None: {0: a}}), Arm("B", {}, {None: {0: b}})  # as if of one seed
    setting = Setting("", {}, [left, right])
    if not setting.steps:
        raise ValueError(f"{a.folder} and {b.folder} were evaluated at no common step")
    columns = zip(RUN_COLUMNS, summarize_run(a), summarize_run(b), strict=True)
    print("\n" + text_table(("", "A", "B"), [[*column] for column in columns]))
    rows = []
    for step in setting.steps[:: -math.ceil(len(setting.steps) / STEPS)][::-1]:
        losses = [f"{run.evaluations[step]['val/loss']:.4f}" for run in (a, b)]
        rows.append([f"{step:,}", *losses, str(estimate(setting, left, right, step))])
    print(f"\nvalidation loss, {a.unit}\n" + text_table(("step", "A", "B", "A minus B, 95% interval"), rows))
    print("Intervals are over documents: other seeds may differ by more. With three of each: python -m scripts.report")


if __name__ == "__main__":
    run_command(main)
