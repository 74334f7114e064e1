"""The router track: one fixed contest that says whether a router is better; see track/README.md.

    python -m scripts.track enter kern --parallel 2                     a listed entry, or a router
    python -m scripts.track enter mine --spec "tanh, post=l2 over topk" --set model.n_hash_layer=1
    python -m scripts.track enter mine --spec "tanh" --draft            rung 1 alone, no record
    python -m scripts.track enter --all --parallel 2                    every listed entry
    python -m scripts.track verify track/records/*/*.json               check records
    python -m scripts.track verify track/records/edition-2/kern.json --rerun 8 --parallel 2
    bash track/judge.sh COMMIT                                          what CI does with records
    python -m scripts.track ladder kern --rungs 3 --parallel 2          the gain on larger models
    python -m scripts.track table                                       write the tables

`enter` resumes where it was stopped. Entries are listed in the config file. A record is
track/records/edition-2/NAME.json; drafts stay in runs/.
"""

import re
import sys
from argparse import Namespace
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import configure
from common.command import build_parser, command, require_packages, run_command
from common.text import plural, text_table
from router import ROUTERS
from runtime.preflight import check_settings
from runtime.signals import Stop
from track import entry, retrain, verify
from track.contest import OPTIONS, Protocol, load_protocol
from track.ladder import Ladder, list_climb, load_climbs, load_ladder, plot, tabulate
from track.record import NAME, REPO_ROOT, losses_of, read_record, run_git
from track.table import build_table, load_complete, read_others, write_tables

FILE = "config/track/edition-2.toml"
PRINTED = 9  # columns of the table that `enter` prints; track/README.md has all


@command
def main(argv: list[str] | None, stop: Stop) -> int:
    """Run one of the five commands."""
    parser = build_parser("scripts.track", __doc__)
    parser.add_argument(
        "--track", default=FILE, metavar="FILE", help=f"the rules (default: {FILE})"
    )
    commands = parser.add_subparsers(dest="command", required=True)
    add = commands.add_parser("enter", help="tune, judge and record a router").add_argument
    add("name", nargs="?", default="", help="a listed entry, a router, or a new name with --spec")
    add("--all", action="store_true", help="every entry of the config file, one after the other")
    add("--spec", metavar="FORMULA", help='such as "tanh, post=l2 over topk, gamma, c=2"')
    add(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help=f"of {', '.join(OPTIONS[1:])}",
    )
    add("--draft", action="store_true", help="rung 1 alone, no record; code may be uncommitted")
    add_parallel(add)
    add = commands.add_parser("verify", help="check records").add_argument
    add("records", nargs="+", type=Path, metavar="RECORD")
    add("--rerun", type=int, metavar="K", help="train K judged runs of a record again, 4 or more")
    add_parallel(add)
    add = commands.add_parser("judge", help="judge a branch's records; see judge.sh").add_argument
    add("head", metavar="COMMIT", help="of the branch; its router.py and records are checked out")
    add("--salt", default="", metavar="TEXT", help="seeds follow from it and the commit")
    add_parallel(add)
    add = commands.add_parser("ladder", help="train entries on larger models").add_argument
    add("names", nargs="+", metavar="NAME", help="an entry whose record is complete")
    add("--rungs", type=int, default=3, metavar="N", help="rungs, the contest's too (%(default)s)")
    add("--picture", type=Path, metavar="FILE", help="draw the gains, such as ladder.svg")
    add_parallel(add)
    commands.add_parser("table", help="write the tables from all records")
    args = parser.parse_args(argv)
    require_packages("scipy")
    protocol = load_protocol(args.track)
    if getattr(args, "parallel", 1) < 1:
        raise ValueError(f"--parallel {args.parallel}: expected 1 or more")
    if args.command == "enter":
        return run_enter(protocol, args, stop)
    if args.command == "verify":
        return run_verify(protocol, args, stop)
    if args.command == "judge":
        return run_judge(protocol, args, stop)
    if args.command == "ladder":
        return run_ladder(load_ladder(protocol, args.rungs), protocol, args, stop)
    write_tables(protocol, load_complete(protocol))
    return 0


def add_parallel(add: Any) -> None:
    """Add the option to a command."""
    add("--parallel", type=int, default=1, metavar="N", help="runs at once, one core each")


# ---- enter
def run_enter(protocol: Protocol, args: Namespace, stop: Stop) -> int:
    """Enter one or all routers and print their verdicts."""
    named = bool(args.name or args.spec or args.set)
    if args.all == named:
        raise ValueError("name one entry, or give --all without a name, --spec or --set")
    entries = protocol.entries
    if named:
        entries = dict([choose_entry(protocol, args)])
    entered = protocol.as_draft() if args.draft else protocol
    if not args.draft:
        entry.check_committed()
    for name, options in entries.items():
        others = read_others(protocol, name)
        # a draft may be a variant of anything; only an entry must be a router of its own
        for fault in verify.find_router_faults(protocol, name, options, others):
            if not args.draft or "enters once" not in fault:
                raise ValueError(f"{name}: {fault}")
        settings = [f"{key}={value}" for key, value in options.items()]
        check_settings(configure.load(protocol.file, settings))
    entry.prepare_data(protocol)
    for name, options in entries.items():
        code, path = entry.enter(entered, name, options, args.parallel, stop)
        if code:
            print(f"stopped; the record so far: {path}. The same command resumes", flush=True)
            return code
        print(f"{path}: complete", flush=True)
        print_verdict(entered, path)
    return 0


def print_verdict(protocol: Protocol, path: Path) -> None:
    """Print the table of all complete records, or of a draft and the reference on rung 1."""
    records = load_complete(protocol.model_copy(update={"draft": False}))
    if protocol.draft:
        draft = read_record(path)
        records = [other for other in records if other["name"] == protocol.reference]
        records.append({**draft, "name": f"{draft['name']} (draft)"})
    if any(record["name"] == protocol.reference for record in records):
        head, rows = build_table(protocol, records)
        print(text_table(head[:PRINTED], [row[:PRINTED] for row in rows]), flush=True)
    else:
        print(f"no verdict yet: enter {protocol.reference}, the reference", flush=True)


def choose_entry(protocol: Protocol, args: Namespace) -> tuple[str, dict[str, Any]]:
    """Return the entry's name and its options, settings equal to defaults left out.

    Raises ValueError if one of them is wrong.
    """
    if args.name in protocol.entries and not args.spec and not args.set:
        return args.name, protocol.entries[args.name]
    router = args.spec or args.name
    name = args.name or re.sub(r"[^a-z0-9.]+", "-", router.lower()).strip("-")
    if not re.fullmatch(NAME, name):
        raise ValueError(f"{name!r}: a name has small letters, digits, dots and dashes")
    if not args.spec and router not in ROUTERS:
        raise ValueError(
            f"{name!r} is no router of router.py: add its line to ROUTERS, or give --spec"
        )
    options: dict[str, Any] = {"model.router": router}
    keys = [text.partition("=")[0] for text in args.set]
    for key in keys:
        if key not in OPTIONS[1:]:
            raise ValueError(
                f"--set {key}: an entry may set {' and '.join(OPTIONS[1:])}; all else is fixed or "
                "drawn"
            )
    config = configure.load(protocol.file, args.set)
    for key in keys:
        value = attrgetter(key)(config)
        if value != configure.KEYS[key]["default"]:
            options[key] = value
    return name, options


# ---- ladder
def run_ladder(ladder: Ladder, protocol: Protocol, args: Namespace, stop: Stop) -> int:
    """Train entries and the reference on the rungs above the contest's, and print the gains.

    Raises:
        ValueError: an entry has no complete record, or the picture cannot be written.
    """
    if args.picture:
        check_picture(args.picture)
    complete = {record["name"]: record for record in load_complete(protocol)}
    names = list(dict.fromkeys([protocol.reference, *args.names]))
    for name in names:
        if name not in complete:
            raise ValueError(
                f"{name}: no complete record; python -m scripts.track enter {name} makes one"
            )
    entry.check_committed()
    entry.prepare_data(protocol)
    for name in names:
        required = list_climb(ladder, name, losses_of(complete[name]))
        options = complete[name]["options"]
        with entry.open_record(ladder.protocol, name, options, args.parallel) as opened:
            code = entry.train_missing(
                ladder.protocol, *opened, lambda _, runs=required: runs, args.parallel, stop
            )
        if code:
            print("stopped; the same command resumes", flush=True)
            return code
    if len(names) == 1:
        print(f"no gains to show or draw: name a router to compare with {names[0]}")
        return 0
    entered = {name: losses_of(complete[name]) for name in names}
    climbs = load_climbs(ladder, entered)
    print(text_table(*tabulate(ladder, climbs)), flush=True)
    if args.picture:
        plot(ladder, climbs).savefig(args.picture)
        print(f"wrote {args.picture}")
    return 0


def check_picture(file: Path) -> None:
    """Raise ValueError or OSError if it cannot be written, before hours of training."""
    if file.suffix not in (".png", ".svg", ".pdf"):
        raise ValueError(f"--picture {file}: expected a name that ends with .png, .svg or .pdf")
    if not file.parent.is_dir():
        raise ValueError(f"--picture {file}: there is no folder {file.parent}; make it first")
    target = file.resolve()
    existed = target.exists()
    with target.open("ab"):
        pass
    if not existed:
        target.unlink()


# ---- verify and judge
def run_verify(protocol: Protocol, args: Namespace, stop: Stop) -> int:
    """Check records; exit code 1 if one has a fault."""
    if args.rerun is not None:
        if len(args.records) > 1:
            raise ValueError("--rerun takes one record")
        if args.records[0].parent.name == "ladder":
            raise ValueError(
                f"--rerun {args.records[0]}: takes an entry's record; runs of a ladder are not "
                "trained again"
            )
    if not check_records(protocol, args.records):
        return 1
    if args.rerun is None:
        return 0
    entry.prepare_data(protocol)
    record = read_record(args.records[0])
    text, stands = retrain.rerun(protocol, record, args.rerun, args.parallel, stop)
    print(text, flush=True)
    return int(not stands)


def check_records(protocol: Protocol, paths: Sequence[Path], head: str = "HEAD") -> bool:
    """Print the faults of records; return True if there are none."""
    intact = True
    for path in paths:
        others = read_others(protocol, path.stem)
        faults = verify.find_record_faults(protocol, path, others, head)
        print(f"{path}: {plural(len(faults), 'fault') if faults else 'intact'}", flush=True)
        for fault in faults:
            print(f"  {fault}")
            intact = False
    return intact


def run_judge(protocol: Protocol, args: Namespace, stop: Stop) -> int:
    """Judge the records that a branch brings: check them, and train their settings by its router.

    Returns:
        0 if all stand, or there is none; 1 if one is removed, has a fault, or its runs say
        otherwise.
    """
    if not args.head:  # git would compare HEAD with itself
        raise ValueError("judge: name a commit")
    status = run_git(
        "diff", "--name-status", "-z", "--no-renames", f"HEAD...{args.head}", "--", "track/records"
    )
    if status.returncode:
        raise ValueError(f"{args.head}: {status.stderr.decode().strip()}")
    fields = status.stdout.decode().split("\0")
    paths = []
    for kind, name in zip(fields[::2], fields[1::2], strict=False):  # the last field is empty
        path = REPO_ROOT / name
        if kind == "D" or path.parent != protocol.records or path.suffix != ".json":
            verb = "removes" if kind == "D" else "changes"
            print(f"{args.head} {verb} {name}: only a person can judge that")
            return 1
        paths.append(path)
    if not paths:
        print(f"{args.head} changes no record: nothing to judge")
        return 0
    if not check_records(protocol, paths, args.head):
        return 1
    entry.prepare_data(protocol)
    intact = True
    for path in paths:
        origin = f"{args.head} {args.salt}".strip()
        text, stands = retrain.judge_again(protocol, read_record(path), origin, args.parallel, stop)
        print(text, flush=True)
        intact = intact and stands
    return int(not intact)


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:], Stop().listen()))
