"""Compare runs.

    python -m scripts.report runs/small-*                          writes runs/report-small/
    python -m scripts.report runs                                  every run in the folder
    python -m scripts.report runs/books3_512-* --experiment books3_512
                                                                   with the paper's numbers
    python -m scripts.report runs/kern_after-* --baseline kern-nogamma
                                                                   loss minus that router's
    python -m scripts.report runs/norm-* --over model.gate_norm    a curve per router over that key

Writes report.html, a page with its pictures in it, and prints its tables. Runs of one corpus, size
and schedule are one setting, with tables of its own. Differences are paired by seed; a verdict
needs three seeds. Needs requirements-report.txt.
"""

import os
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from common.command import build_parser, command, require_packages, run_command
from common.files import write_atomic
from report.overview import build_overview
from runtime.runs import find_runs


@command
def main(argv: Sequence[str] | None = None) -> None:
    """Write the report and print its tables."""
    parser = make_report_parser("scripts.report", __doc__)
    parser.add_argument(
        "--out", type=Path, help="folder; its report is replaced (default: report-NAME by the runs)"
    )
    args = parser.parse_args(argv)
    if args.out and args.out.exists() and not args.out.is_dir():
        raise ValueError(f"--out {args.out}: a file, not a folder; name another")
    require_packages("jinja2", "matplotlib", "scipy")
    from report.page import build_sections, format_page, read_report

    report = read_report(args)
    out = args.out or name_folder(find_runs(args.runs))
    out.mkdir(parents=True, exist_ok=True)
    command = ["scripts.report", *map(str, sys.argv[1:] if argv is None else argv)]
    sections = build_sections(report, {}).values()
    write_atomic(out / "report.html", format_page(report, sections, command))
    print(f"{build_overview(report.runs, report.baseline).to_text()}\n")
    for note in report.notes:
        print(f"{note}.")
    for section in sections:
        print(section.title)
        for table in section.tables:
            print(f"{table.to_text()}\n")
    print(f"report: {out}/report.html")


def make_report_parser(module: str, doc: str | None) -> ArgumentParser:
    """A parser of `python -m MODULE` for the runs of a report and how they are compared."""
    parser = build_parser(module, doc)
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
        "--experiment", help="a file in config/paper, whose printed losses stand next to the runs'"
    )
    parser.add_argument(
        "--over", metavar="KEY", help="loss against this key, such as optim.lr, instead of steps"
    )
    parser.add_argument(
        "--margin", type=float, default=0.0, help="nats: pairs within it are equivalent"
    )
    return parser


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
