"""The router track: one fixed contest that says whether a router is better; see track/README.md.

    python -m scripts.track enter kern --parallel 2                     a router of router.py
    python -m scripts.track enter --spec "tanh, post=l2 over topk"      a formula, no code edited
    python -m scripts.track enter kern-quantile --spec kern --set train.bias_update=quantile
    python -m scripts.track enter mine --draft                          4 draws, 4 seeds, no record
    python -m scripts.track verify track/records/cpu/*.json             check records, show verdicts
    python -m scripts.track verify track/records/cpu/kern.json --rerun 100    train one seed again
    python -m scripts.track table                                       write tables and picture

`enter` resumes where it was stopped. Its record is track/records/cpu/NAME.json; drafts stay in
runs/.
"""

import re
import sys
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import configure
from common.command import build_parser, command, require_packages, run_command
from common.text import plural, text_table
from router import ROUTERS, find_spec
from runtime.preflight import check_settings
from runtime.signals import EXIT_CODE, Stop
from scripts.sweep import train_points
from track import entry
from track.protocol import OPTIONS, Protocol, Task, load_protocol, read_options
from track.record import LARGEST, Record, find_record_faults, judged_runs, losses_of, read_record

CPU = "config/track/cpu.toml"


@command
def main(argv: list[str] | None, stop: Stop) -> int:
    """Run one of the three commands."""
    parser = build_parser("scripts.track", __doc__)
    parser.add_argument(
        "--track", default=CPU, metavar="FILE", help="the protocol (default: config/track/cpu.toml)"
    )
    commands = parser.add_subparsers(dest="command", required=True)
    add = commands.add_parser("enter", help="tune, judge and record a router").add_argument
    add("name", nargs="?", default="", help="a router of router.py; with --spec, the entry's name")
    add("--spec", metavar="FORMULA", help='such as "tanh, post=l2 over topk, gamma, c=2"')
    add(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help=f"what the entry sets: {', '.join(OPTIONS)}",
    )
    add(
        "--parallel",
        type=int,
        default=1,
        metavar="N",
        help="runs at once, one thread each (default: 1)",
    )
    add(
        "--draft",
        action="store_true",
        help="4 draws and 4 seeds, no record; code may be uncommitted",
    )
    verify = commands.add_parser("verify", help="check records and show their verdicts")
    verify.add_argument("records", nargs="+", type=Path, metavar="RECORD")
    verify.add_argument(
        "--rerun",
        type=int,
        metavar="SEED",
        help="train a judged seed of a record again and compare",
    )
    commands.add_parser("table", help="write the tables and the picture from all records")
    args = parser.parse_args(argv)
    require_packages("scipy")
    protocol = load_protocol(args.track)
    if args.command == "enter":
        return run_enter(protocol, args, stop)
    if args.command == "verify":
        return run_verify(protocol, args, stop)
    return run_table(protocol)


def name_entry(protocol: Protocol, args: Namespace) -> tuple[str, str, dict[str, Any]]:
    """Return the entry's name, its `model.router`, and its options.

    Raises ValueError if one of them is wrong.
    """
    router = args.spec or args.name
    name = args.name or re.sub(r"[^a-z0-9.]+", "-", router.lower()).strip("-")
    if not args.spec and router not in ROUTERS:
        raise ValueError(
            f"{name or 'NAME'!r} is no router of router.py: add its line to ROUTERS, or give --spec"
        )
    if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", name):
        raise ValueError(f"{name!r}: a name has small letters, digits, dots and dashes")
    find_spec(router)
    options = read_options(protocol.file, args.set)
    if name in ROUTERS and (name != router or options):
        raise ValueError(
            f"{name} is a router of router.py; give the entry a name of its own: "
            f"NAME --spec {router}"
        )
    check_settings(configure.load(protocol.file, [f"model.router={router}", *args.set]))
    return name, router, options


def run_enter(protocol: Protocol, args: Namespace, stop: Stop) -> int:
    """Enter a router and print its verdict."""
    if args.parallel < 1:
        raise ValueError(f"--parallel {args.parallel}: expected 1 or more")
    name, router, options = name_entry(protocol, args)
    if not args.draft:
        entry.check_committed()
    entry.prepare_data(protocol)
    entered = protocol.as_draft() if args.draft else protocol
    code, path = entry.enter(entered, name, router, options, args.parallel, stop)
    if code:
        print(f"stopped; the record so far: {path}. The same command resumes", flush=True)
        return code
    print(f"{path}: complete", flush=True)
    others = load_complete(protocol)
    if args.draft:  # compared with the reference alone, so no other entry corrects it
        others = [other for other in others if other["name"] == protocol.reference]
        others.append({**read_record(path), "name": f"{name} (draft)"})
    print_verdicts(protocol, others)
    return 0


def load_complete(protocol: Protocol) -> list[Record]:
    """Read the records that have all judged runs of this protocol; others are named on stderr.

    The reference may lack runs of other lengths.
    """
    records = []
    for path in sorted(protocol.records.glob("*.json")):
        record = read_record(path)
        if record["version"] != protocol.version or record["fixed_sha256"] != protocol.fixed_sha256:
            reason = "of another protocol; scripts.track verify tells more"
        elif not judged_runs(record).keys() >= set(protocol.judge_seeds):
            reason = f"not complete; enter {record['name']} to resume"
        elif path.stem != record["name"]:
            reason = f"it is the record of {record['name']}: remove it, or give it that name"
        else:
            records.append(record)
            continue
        print(f"{path}: left out, {reason}", file=sys.stderr)
    return records


def print_verdicts(protocol: Protocol, records: list[Record]) -> None:
    """Print a row for each record; verdicts are corrected for the number of records."""
    from track.table import build_verdicts, judge_entries  # imports scipy

    head, cells = build_verdicts(protocol, judge_entries(protocol, records))
    print(text_table(head, cells), flush=True)


def run_verify(protocol: Protocol, args: Namespace, stop: Stop) -> int:
    """Check records; exit code 1 if one has a fault."""
    if args.rerun is not None:
        if len(args.records) > 1:
            raise ValueError("--rerun takes one record")
        return rerun(protocol, read_record(args.records[0]), args.rerun, stop)
    faulty = False
    paths: dict[Any, Path] = {}  # by name
    for path in args.records:
        faults = check_record(protocol, path, paths)
        print(f"{path}: {plural(len(faults), 'fault') if faults else 'intact'}", flush=True)
        for fault in faults:
            print(f"  {fault}")
            faulty = True
    if not faulty:
        print_verdicts(protocol, load_complete(protocol))
    return int(faulty)


def check_record(protocol: Protocol, path: Path, paths: dict[Any, Path]) -> list[str]:
    """List the faults of a record's file; `paths` holds the paths of earlier records by name."""
    faults = []
    try:
        record = read_record(path)
        other = paths.setdefault(record.get("name"), path)
        if other != path:
            faults.append(f"{other} is an entry of the same name; keep one")
        size = path.stat().st_size
        if size > LARGEST:
            faults.append(f"it has {size:,} bytes, at most {LARGEST:,} are allowed")
        faults += find_record_faults(protocol, record, path.name)
    except (ValueError, OSError) as error:
        faults.append(str(error))
    except (LookupError, TypeError, AttributeError) as error:
        kind = type(error).__name__
        faults.append(
            f"a field is missing or wrong ({kind}: {error}); take it from its commit again"
        )
    return faults


def rerun(protocol: Protocol, record: Record, seed: int, stop: Stop) -> int:
    """Train a judged seed again and compare its loss with the record's.

    With the same processor and versions a run is bit-equal; elsewhere rounding changes the loss by
    a few thousandths.

    Returns:
        0 if the losses are equal within the margin, else 1.
    """
    judged = judged_runs(record)
    if seed not in judged:
        seeds = ", ".join(str(other) for other in judged)
        raise ValueError(f"{record['name']} has no judged run of seed {seed}; it has {seeds}")
    entry.prepare_data(protocol)
    task = Task("judge", judged[seed]["draw"], seed)
    with tempfile.TemporaryDirectory() as folder:
        points = [entry.make_point(protocol, record, task, Path(folder))]
        code = EXIT_CODE
        again = None
        for point, exit_code in train_points(protocol.file, points, [[]], stop):
            code = exit_code
            again = entry.read_result(point.folder, task)
    if code == EXIT_CODE or again is None:
        print(f"{task.name}: ended with exit code {code} before its end")
        return code
    before = losses_of(record)[task]
    now = losses_of({"runs": [again]})[task]
    print(
        f"{record['name']}, seed {seed}: recorded {before:.7f}, now {now:.7f}, "
        f"difference {now - before:+.7f}"
    )
    # two runs that diverged are equal, too
    return int(before != now and not abs(before - now) <= protocol.margin)


def run_table(protocol: Protocol) -> int:
    """Write the tables and the picture."""
    require_packages("matplotlib")
    from track import table

    rows = table.judge_entries(protocol, load_complete(protocol))
    picture = table.write_tables(protocol, rows)
    print(f"{len(rows)} entries: {table.PAGE}, {table.FRONT_PAGE}, {picture}")
    return 0


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:], Stop().listen()))
