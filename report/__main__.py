"""Compare runs.

    python -m scripts.report runs/small-*                          writes runs/report-small/
    python -m scripts.report runs                                  every run in the folder
    python -m scripts.report runs/books3_512-* --experiment books3_512
                                                                   with the paper's numbers
    python -m scripts.report runs/kern_after-* --baseline kern-nogamma
                                                                   loss minus that router's
    python -m scripts.report runs/norm-* --over model.gate_norm    a curve per router over that key;
                                                                   compared at their best values
    python -m scripts.report runs --follow                         while they train, until Ctrl-C
    python -m scripts.report runs/small-* --wandb online           sent to Weights & Biases, too

Writes report.html, a page with its pictures in it, and prints its tables. With --follow the page is
written again and again and reloads itself: open the file, or on a remote machine serve its folder
by `python -m http.server`. Runs of one corpus, size and schedule are one setting, with tables of
its own. Differences from the baseline are paired by seed; a verdict needs three seeds. Needs
requirements/report.txt.
"""

import math
import os
import sys
import time
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Sequence
from pathlib import Path

from common.command import build_parser, command, describe_error, require_packages, run_command
from common.files import exists, is_folder, write_atomic
from runtime.runs import find_runs


@command
def main(argv: Sequence[str] | None = None) -> None:
    """Write the report and print its tables."""
    args = build_report_parser().parse_args(argv)
    if args.out and exists(args.out) and not is_folder(args.out):
        raise ValueError(f"--out {args.out}: a file, not a folder; name another")
    require_packages("jinja2", "matplotlib", "pandas", "scipy")
    origin = ["scripts.report", *map(str, sys.argv[1:] if argv is None else argv)]
    if args.follow:
        follow_runs(args, origin)
    else:
        print(write_report(args, origin))


def write_report(args: Namespace, origin: Sequence[str]) -> str:
    """Write the page of the runs as they are now; the text has its tables and its place."""
    from report.page import build_section, build_verdicts, count_states, format_page, read_report

    report = read_report(args)
    sections = [build_section(group, args) for group in report.groups]
    out = args.out or name_folder(find_runs(args.runs))
    out.mkdir(parents=True, exist_ok=True)
    write_atomic(out / "report.html", format_page(report, sections, args, origin))
    if args.wandb:
        from report.overview import build_overview
        from runtime.tracker import send_report

        table = build_overview(report.runs)
        send_report(out / "report.html", args.wandb, report.runs, (table.columns, table.lines))
    verdicts = build_verdicts(sections)
    lines = [f"{verdicts.to_text(left=2)}\n"] if verdicts.rows else []
    for section in sections:
        lines.append(section.title)
        lines += [f"{table.to_text()}\n" for table in section.tables]
    lines += [f"{note}." for note in report.notes]
    lines.append(f"{count_states(report.runs)} (python -m scripts.watch shows each)")
    return "\n".join([*lines, f"report: {out}/report.html"])


def follow_runs(args: Namespace, origin: Sequence[str]) -> None:
    """Write the page again every `args.every` seconds; prints what is wrong, or where the page is.

    Nothing that is wrong with the runs or the disk ends it: both change.
    """
    printed = ""
    while True:
        try:
            said = write_report(args, origin).splitlines()[-1]
        except (ValueError, OSError) as error:
            said = f"warning: {describe_error(error)}"
        if said != printed:
            print(said, flush=True)
        printed = said
        time.sleep(args.every)


def build_report_parser() -> ArgumentParser:
    """The parser of the command."""
    parser = build_parser("scripts.report", __doc__)
    parser.add_argument(
        "runs",
        nargs="+",
        type=Path,
        help="folders of runs, such as runs/quickstart-*, or above them",
    )
    parser.add_argument(
        "--out", type=Path, help="folder; its report is replaced (default: report-NAME by the runs)"
    )
    parser.add_argument(
        "--baseline", default="kern", help="router, or label of an arm, to subtract (%(default)s)"
    )
    parser.add_argument(
        "--experiment", help="a file in config/paper, whose printed losses stand next to the runs'"
    )
    parser.add_argument(
        "--over", metavar="KEY", help="loss against this key, such as optim.lr, instead of steps"
    )
    parser.add_argument(
        "--margin", type=parse_number, default=0.0, help="nats: pairs within it are equivalent"
    )
    once = parser.add_mutually_exclusive_group()
    once.add_argument("--follow", action="store_true", help="write it again until Ctrl-C")
    where = ("online", "offline")
    once.add_argument("--wandb", choices=where, help="send the page and a table of the runs")
    parser.add_argument(
        "--every", type=parse_number, default=30, help="seconds, with --follow (%(default)s)"
    )
    return parser


def parse_number(text: str) -> float:
    """Parse a finite number of 0 or more."""
    number = float(text)
    if not 0 <= number < math.inf:
        raise ArgumentTypeError(f"{text}: expected 0 or more")
    return number


def name_folder(folders: Sequence[Path]) -> Path:
    """Default folder of a report: above its runs, as report-NAME.

    NAME is what the names of the runs have in common at their start.
    """
    parents = [folder.absolute().parent for folder in folders]
    names = [folder.name.split("-") for folder in folders]
    common_name = os.path.commonprefix(names)
    return Path(os.path.relpath(os.path.commonpath(parents))) / "-".join(["report", *common_name])


if __name__ == "__main__":
    run_command(main)
