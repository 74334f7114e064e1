"""Compare runs.

    python -m scripts.report runs/small-*                                    writes runs/report-small/
    python -m scripts.report runs                                            every run in the folder
    python -m scripts.report runs/books3_512-* --experiment books3_512       the paper's numbers beside the runs'
    python -m scripts.report runs/kern_after-* --baseline kern-nogamma       loss minus that router's
    python -m scripts.report runs/norm-* --over model.gate_norm              a curve for each router over that key

Writes report.md with its pictures, and report.html, which contains all of it. Runs of one corpus,
size and schedule are one setting, with tables of its own. Differences are paired by seed; a verdict
needs three seeds. Needs requirements-report.txt.
"""

import os
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from common.command import build_parser, command, require_packages, run_command
from common.text import text_table
from report.runs import find_runs


@command
def main(argv: Sequence[str] | None = None) -> None:
    """Write the report and print its tables."""
    parser = make_parser()
    parser.add_argument(
        "--out", type=Path, help="folder; its report is replaced (default: report-NAME beside them)"
    )
    args = parser.parse_args(argv)
    require_packages("matplotlib", "scipy")
    from report.page import read_report, write_report

    report = read_report(args)
    out = args.out or name_folder(find_runs(args.runs))
    out.mkdir(parents=True, exist_ok=True)
    for kind, *parts in write_report(report, out):  # all but its text
        if kind == "h2":
            print(parts[0])
        elif kind == "list":
            print("\n".join(parts[0]).replace("**", "") + "\n")
        elif kind == "table":
            print(text_table(*parts) + "\n")
    print(f"report: {out}/report.html")


def make_parser() -> ArgumentParser:
    """Of what a report is of."""
    parser = build_parser("scripts.report", __doc__)
    parser.add_argument(
        "runs",
        nargs="+",
        type=Path,
        help="folders of runs, such as runs/quickstart-*, or above them",
    )
    parser.add_argument(
        "--baseline", default="kern", help="router, or label of an arm, to subtract (%(default)s)"
    )
    parser.add_argument(
        "--experiment", help="a file in config/paper, whose printed losses stand beside the runs'"
    )
    parser.add_argument(
        "--over", metavar="KEY", help="loss against this key, such as optim.lr, instead of steps"
    )
    choose = "with --over: also compare the best values, each chosen by these seeds and judged by the others"
    parser.add_argument("--choose-on", nargs="+", type=int, default=(), metavar="SEED", help=choose)
    parser.add_argument(
        "--margin", type=float, default=0.0, help="nats: pairs within it are equivalent"
    )
    return parser


def name_folder(folders: Sequence[Path]) -> Path:
    """Where a report goes by default: above its runs, as report-NAME, where NAME is what their names begin with."""
    names = [folder.name.split("-") for folder in folders]
    above = os.path.commonpath([folder.absolute().parent for folder in folders])
    return Path(os.path.relpath(above), "-".join(["report", *os.path.commonprefix(names)]))


if __name__ == "__main__":
    run_command(main)
