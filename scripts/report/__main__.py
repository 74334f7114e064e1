"""Compare runs, and judge the paper's claims by them.

    python -m scripts.report runs/small-* --out runs/report-small
    python -m scripts.report runs/books3_512-* --experiment books3_512       the paper's numbers beside the runs'
    python -m scripts.report runs/kern_after-* --baseline kern-nogamma       loss minus that router's

Writes report.md with its pictures, and report.html, which contains all of it. Runs are paired by seed and by validation
window. Runs of one corpus, size and schedule are one setting: each setting has its own tables, and each claim is also
judged over all settings. Needs requirements-report.txt.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from eval.paper import read_paper_losses
from runtime.output import require_packages, text_table
from scripts.report.runs import Setting, group_runs, load_run_records
from scripts.report.tables import COLUMNS, summarize_run


def main(argv: Sequence[str] | None = None) -> int:
    """Write the report and print its table and verdicts; 2 after an error that is the user's to fix."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.report", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, help="run folders, such as runs/quickstart-*")
    parser.add_argument("--baseline", default="kern", help="router, or label of an arm, to subtract (default: kern)")
    parser.add_argument("--experiment", help="a file in config/paper, whose printed losses stand beside the runs'")
    parser.add_argument("--out", type=Path, default=Path("runs/report"), help="folder (default: %(default)s)")
    args = parser.parse_args(argv)
    try:
        report(args)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def report(args: argparse.Namespace) -> None:
    """The command. Raises ValueError and OSError before anything is written."""
    require_packages("matplotlib", "scipy")
    from scripts.report.page import write_report

    runs, notes = load_run_records(args.runs)
    settings, more = group_runs(runs)
    if args.experiment:
        for setting in settings:
            setting.printed = read_paper_losses(args.experiment, setting.values)
    names = {name for setting in settings for arm in setting.arms for name in (arm.router, arm.label)}
    if args.baseline not in {*names, "kern"}:
        raise ValueError(f"--baseline {args.baseline!r}: the runs have {'; '.join(sorted(names))}")
    if (args.out / "config.toml").is_file():
        raise ValueError(f"--out {args.out}: a run's folder; name another")
    args.out.mkdir(parents=True, exist_ok=True)
    notes += more + find_ambiguous(settings, args.baseline)
    findings = write_report(settings, notes, args.baseline, args.experiment, args.out)
    print(text_table(COLUMNS, [summarize_run(run) for run in runs], left=2))
    for _, words, cells, overall in findings:
        if overall:
            print(f"{words}: {overall[1]}, {overall[0]}")
        for where, (found, verdict) in cells.items():
            print(f"{'  ' * bool(overall)}{words}{' in ' * bool(where)}{where}: {verdict}, {found}")
    print("".join(f"note: {line}\n" for line in notes) + f"report: {args.out}/report.html")


def find_ambiguous(settings: Sequence[Setting], baseline: str) -> list[str]:
    """A note if several arms could be the baseline."""
    for setting in settings:
        for arm in setting.arms:
            if len(found := [other.label for other in setting.counterparts(arm, baseline)]) > 1:
                return [f"several arms are {baseline}: pictures subtract {found[0]!r}; or --baseline {found[1]!r}"]
    return []


if __name__ == "__main__":
    sys.exit(main())
