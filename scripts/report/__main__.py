"""Compare runs, and judge the paper's claims by them.

    python -m scripts.report runs/small-*                                    writes runs/report-small/
    python -m scripts.report runs                                            every run in the folder
    python -m scripts.report runs/books3_512-* --experiment books3_512       the paper's numbers beside the runs'
    python -m scripts.report runs/kern_after-* --baseline kern-nogamma       loss minus that router's
    python -m scripts.report runs/gate_norm-* --over model.gate_norm         a curve for each router over that key

Writes report.md with its pictures, and report.html, which contains all of it. Runs are paired by seed and by validation
window. Runs of one corpus, size and schedule are one setting: each setting has its own tables. Every pair of routers
gets its difference, and each claim a verdict, in each setting and over all of them. Needs requirements-report.txt.
"""

import argparse
import hashlib
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from common.command import require_packages, run_command
from common.text import text_table
from eval.paper import read_paper_losses
from scripts.report.claims import Finding
from scripts.report.runs import expand_folders, load_run_records
from scripts.report.settings import Setting, group_runs
from scripts.report.tables import COLUMNS, summarize_run
from scripts.watch.runs import find_runs

LINES = 40  # verdicts on the terminal, at most; the page has all of them


def main(argv: Sequence[str] | None = None) -> int:
    """Write the report and print its table and verdicts; 2 after an error that is the user's to fix."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.report", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs, such as runs/quickstart-*, or above them")
    parser.add_argument("--baseline", default="kern", help="router, or label of an arm, to subtract (default: kern)")
    parser.add_argument("--experiment", help="a file in config/paper, whose printed losses stand beside the runs'")
    parser.add_argument("--over", metavar="KEY", help="instead: loss against this key, such as optim.lr")
    parser.add_argument("--out", type=Path, help="folder (default: report-NAME beside the runs, NAME by their names)")
    args = parser.parse_args(argv)
    try:
        report(args)
    except BrokenPipeError:  # an OSError that is for run_command
        raise
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def report(args: argparse.Namespace) -> None:
    """The command. Raises ValueError and OSError before anything is written."""
    require_packages("matplotlib", "scipy")
    from scripts.report.curves import collect_curves, write_curves
    from scripts.report.page import write_report

    folders = expand_folders(args.runs)
    runs, notes = load_run_records(folders)
    if args.over:
        curves = collect_curves(runs, args.over)
        check_baseline(args.baseline, {curve.names[0] for curve in curves.curves})
        out = make_folder(args.out, folders)
        return print(f"{write_curves(curves, args.baseline, len(runs), notes, out)}\nreport: {out}/report.html")
    settings, more = group_runs(runs)
    if args.experiment:
        for setting in settings:
            setting.printed = read_paper_losses(args.experiment, setting.values)
    check_baseline(args.baseline, {name for of in settings for arm in of.arms for name in (arm.router, arm.label)})
    out = make_folder(args.out, folders)
    notes = find_ambiguous(settings, args.baseline) + more + notes
    findings = write_report(settings, notes, args.baseline, args.experiment, out)
    print(text_table(COLUMNS, [summarize_run(run) for run in runs], left=3))
    claimed = [{of.left, of.right} for of, *_ in findings if of.tenth == 10 and not of.equal]  # pairs have no tenth
    told = [one for one in findings if one.claim.tenth or {one.claim.left, one.claim.right} not in claimed]
    lines = [line for finding in told for line in format_finding(finding)]
    lines[LINES:] = [f"… and {len(lines) - LINES} more verdicts"] * (len(lines) > LINES)
    print("\n".join([*lines, *(f"note: {line}" for line in notes), f"report: {out}/report.html"]))


def check_baseline(baseline: str, names: set[str]) -> None:
    """Raise ValueError if no run has the baseline's name; kern, the default, may be missing."""
    if baseline not in {*names, "kern"}:
        raise ValueError(f"--baseline {baseline!r}: the runs have {'; '.join(sorted(names))}")


def format_finding(finding: Finding) -> list[str]:
    """A line for the verdict over all settings, and one for each setting."""
    _, words, cells, overall, _ = finding
    lines = [f"{words}: {overall.verdict}{overall.holm}, {overall.interval}"] if overall else []
    for where, found in cells.items():
        place = f"{'  ' * bool(overall)}{words}{' in ' * bool(where)}{where}"
        lines.append(f"{place}: {found.verdict}{found.holm}, {found.interval}")
    return lines


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

    def name_runs(folders: Iterable[Path]) -> list[str]:
        return sorted({"-".join(folder.absolute().relative_to(base).parts) for folder in folders})

    names = name_runs(folders)
    begin = "-".join(os.path.commonprefix([name.split("-") for name in names]))
    alike = [name for name in name_runs(find_runs([base])) if f"{name}-".startswith(f"{begin}-" * bool(begin))]
    parts = [] if alike == names else [name.removeprefix(begin).lstrip("-") for name in names]
    rest = "+".join(parts)
    if len(rest) > 40 or not all(parts):
        rest = hashlib.sha256("\n".join(names).encode()).hexdigest()[:6]
    folder = base / "-".join(filter(None, ("report", begin, rest)))
    return folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder


def find_ambiguous(settings: Sequence[Setting], baseline: str) -> list[str]:
    """A note if several arms could be the baseline."""
    for setting in settings:
        for arm in setting.arms:
            if len(found := [other.label for other in setting.counterparts(arm, baseline)]) > 1:
                return [f"several arms are {baseline}: pictures subtract {found[0]!r}; or --baseline {found[1]!r}"]
    return []


if __name__ == "__main__":
    run_command(main)
