"""Compare runs, and judge the paper's claims by them.

    python -m scripts.report runs/small-*                                    writes runs/report-small/
    python -m scripts.report runs                                            every run in the folder
    python -m scripts.report runs/books3_512-* --experiment books3_512       the paper's numbers beside the runs'
    python -m scripts.report runs/kern_after-* --baseline kern-nogamma       loss minus that router's
    python -m scripts.report runs/gate_norm-* --over model.gate_norm         a curve for each router over that key

Writes report.md with its pictures, and report.html, which contains all of it. Runs of one corpus, size and schedule are
one setting, with tables of its own. Differences are paired by seed; a verdict needs three seeds. Needs
requirements-report.txt.
"""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from common.command import build_parser, command, require_packages, run_command
from common.text import text_table
from eval.paper import read_paper_losses
from scripts.report.runs import expand_folders, find_runs, load_all_evaluated
from scripts.report.settings import Setting, group_runs

if TYPE_CHECKING:  # it needs matplotlib
    from scripts.report.page import Report

LINES = 40  # pairs on the terminal, at most; the page has all of them


@command
def main(argv: Sequence[str] | None = None) -> None:
    """Write the report and print its tables."""
    parser = build_parser("scripts.report", __doc__)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs, such as runs/quickstart-*, or above them")
    parser.add_argument("--baseline", default="kern", help="router, or label of an arm, to subtract (default: kern)")
    parser.add_argument("--experiment", help="a file in config/paper, whose printed losses stand beside the runs'")
    parser.add_argument("--over", metavar="KEY", help="loss against this key, such as optim.lr, instead of steps")
    parser.add_argument(
        "--choose-on",
        nargs="+",
        type=int,
        default=(),
        metavar="SEED",
        help="with --over: also compare the best\nvalues, each chosen by these seeds and judged by the others",
    )
    parser.add_argument("--margin", type=float, help="nats: pairs within it are equivalent (default: none are)")
    parser.add_argument("--out", type=Path, help="folder (default: report-NAME beside the runs, NAME by their names)")
    args = parser.parse_args(argv)
    if args.choose_on and not args.over:
        raise ValueError("--choose-on chooses a value of a key: name the key with --over")
    require_packages("matplotlib", "scipy")
    from scripts.report.page import Report, write_report

    folders = expand_folders(args.runs)
    runs, left_out = load_all_evaluated(folders)
    settings, notes = group_runs(runs, args.over)
    for setting in settings if args.experiment else ():
        setting.printed = read_paper_losses(args.experiment, setting.values)
    check_baseline(args.baseline, settings)
    out = make_folder(args.out, folders)
    notes = find_ambiguous(settings, args.baseline) + notes + left_out
    report = Report(settings, notes, args.baseline, args.experiment, args.choose_on, args.margin)
    write_report(report, out)
    print_report(report)
    print(f"report: {out}/report.html")


def print_report(report: "Report") -> None:
    """Losses and pairs of each setting, and the notes."""
    from scripts.report.tables import build_loss_table, build_pairs_table

    for setting in report.settings:
        if setting.label:
            print(f"{setting.label}:")
        shown = [build_loss_table(setting)]
        if comparisons := report.compare(setting):
            shown.append(build_pairs_table(comparisons))
        for table in shown:
            rows = [[cell.replace("**", "") for cell in row] for row in table.rows]
            print(text_table(table.head, rows[:LINES], table.left) + "\n")
            if len(rows) > LINES:
                print(f"… and {len(rows) - LINES} more rows on the page")
    for line in report.notes:
        print(f"note: {line}")


def check_baseline(baseline: str, settings: Sequence[Setting]) -> None:
    """Raise ValueError if no run has the baseline's name; kern, the default, may be missing."""
    names = {name for setting in settings for arm in setting.arms for name in (arm.router, arm.label)}
    if baseline not in {*names, "kern"}:
        raise ValueError(f"--baseline {baseline!r}: the runs have {'; '.join(sorted(names))}")


def find_ambiguous(settings: Sequence[Setting], baseline: str) -> list[str]:
    """A note if several arms could be the baseline."""
    for setting in settings:
        for arm in setting.arms:
            labels = [other.label for other in setting.counterparts(arm, baseline)]
            if len(labels) > 1:
                return [f"several arms are {baseline}: {labels[0]!r} is subtracted; or --baseline {labels[1]!r}"]
    return []


def make_folder(out: Path | None, folders: Sequence[Path]) -> Path:
    """Make `out`, or by default the folder that `name_folder` names. Raises ValueError if it cannot be."""
    out = out or name_folder([folder for folder in folders if (folder / "config.toml").is_file()])
    if (out / "config.toml").is_file():
        raise ValueError(f"--out {out}: a run's folder; name another")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{out}: {error.strerror}; name another folder with --out") from None
    return out


def name_folder(folders: Sequence[Path]) -> Path:
    """Where the report of these runs goes by default: the same folder for the same runs, and for no others.

    It is beside the runs: report-NAME, where NAME is what the runs' names begin with. If other runs there begin so too,
    it goes on with the parts in which these differ, or with a hash of their names if that is long.
    """
    base = Path(os.path.commonpath([folder.absolute().parent for folder in folders]))

    def name_runs(folders: Sequence[Path]) -> list[str]:
        return sorted({"-".join(folder.absolute().relative_to(base).parts) for folder in folders})

    names = name_runs(folders)
    begin = "-".join(os.path.commonprefix([name.split("-") for name in names]))
    alike = [name for name in name_runs(find_runs([base])) if not begin or f"{name}-".startswith(f"{begin}-")]
    parts = [] if alike == names else [name.removeprefix(begin).lstrip("-") for name in names]
    rest = "+".join(parts)
    if len(rest) > 40 or not all(parts):
        rest = hashlib.sha256("\n".join(names).encode()).hexdigest()[:6]
    folder = base / "-".join(filter(None, ("report", begin, rest)))
    return folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder


if __name__ == "__main__":
    run_command(main)
