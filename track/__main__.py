"""The contest of routers: the same settings and seeds for all, compared in pairs (track/README.md).

    python -m scripts.track run --parallel 2                  train what the record lacks
    python -m scripts.track run --only kern-hash dense        of some questions
    python -m scripts.track enter tanh                        a router on the draft rung: 24 pairs
    python -m scripts.track enter mine --spec "tanh, post=l2 over topk" --balance loss
    python -m scripts.track verify                            check the record, print its tables
    python -m scripts.track verify --rerun 2                  train two of its runs again
    python -m scripts.track table                             write track/README.md and its picture

`run` and `enter` resume where they were stopped. The records are track/records/edition-3/*.jsonl: a
file for each rung, one run a line, each added as it ends.
"""

import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import SystemRandom
from tempfile import TemporaryDirectory
from typing import Any

from common.command import build_parser, command, require_packages, run_command
from common.text import text_table
from router import find_spec
from runtime.launch import EXIT_CODE, Stop, protect_output
from track.contest import (
    FILE,
    RECORDS,
    Line,
    Protocol,
    build_protocol,
    load_protocol,
    read_lines,
    read_records,
)
from track.runner import Runner, describe
from track.score import answer_all
from track.table import tabulate_questions, write_page


@command
def main(argv: Sequence[str] | None, stop: Stop) -> int:
    """Run one of the commands."""
    parser = build_parser("scripts.track", __doc__)
    parser.add_argument("--track", default=FILE, metavar="FILE", help="the rules (%(default)s)")
    parser.add_argument("--records", type=Path, default=RECORDS, metavar="FOLDER")
    commands = parser.add_subparsers(dest="command", required=True)
    add = commands.add_parser("run", help="train what the record lacks").add_argument
    add("--only", nargs="+", default=[], metavar="QUESTION", help="(default: all of the rung)")
    add_training(add, "main")
    add = commands.add_parser("enter", help="try a router of your own").add_argument
    add("name", metavar="NAME", help="a router, or a new name with --spec")
    add("--spec", metavar="FORMULA", help='such as "tanh, post=l2 over topk, gamma, c=2"')
    add("--balance", choices=["loss", "quantile", "bias", "none"], default="quantile")
    add("--hash-layers", type=int, default=0, metavar="N", help="first layers that route by token")
    add("--settings", type=int, default=24, metavar="N", help="pairs (%(default)s)")
    add_training(add, "draft")
    add = commands.add_parser("verify", help="check the record").add_argument
    add("--rerun", type=int, default=0, metavar="K", help="train K of its runs again")
    add_training(add, "main")
    commands.add_parser("table", help="write track/README.md and its picture")
    args = parser.parse_args(argv)
    require_packages("scipy")
    protocol = load_protocol(args.track)
    if args.command == "table":
        require_packages("matplotlib", "pandas")
        write_page(protocol, args.records)
        return 0
    if args.parallel < 1 or getattr(args, "rerun", 0) < 0:
        raise ValueError("--parallel and --rerun: expected a positive number")
    return {"run": run, "enter": enter, "verify": verify}[args.command](protocol, args, stop)


def add_training(add: Any, rung: str) -> None:
    """Add the options of commands that train."""
    add("--rung", default=rung, help="size, of the config file (default: %(default)s)")
    add("--parallel", type=int, default=1, metavar="N", help="runs at once, one thread each")


def run(protocol: Protocol, args: Namespace, stop: Stop) -> int:
    """Train what the questions of a rung lack."""
    asked = [name for name, one in protocol.questions.items() if one.rung == args.rung]
    for name in args.only:
        if name not in asked:
            raise ValueError(f"--only {name}: another --rung, or some of {', '.join(asked)}")
    record = args.records / f"{args.rung}.jsonl"
    runner = Runner(args.track, protocol, args.rung, record)
    return runner.train(args.only or asked, read_lines(protocol, record), args.parallel, stop)


def enter(protocol: Protocol, args: Namespace, stop: Stop) -> int:
    """Train a router of the user's and the reference in pairs, and print what they say."""
    router = args.spec or args.name
    try:
        find_spec(router)
    except ValueError as error:
        raise ValueError(f"no router {router!r}: {error}; --spec takes a formula") from None
    arm = {"router": router, "balance": args.balance, "hash_layers": args.hash_layers}
    minus = "softmax-renorm-loss" if args.balance == "loss" else "softmax-renorm-quantile"
    question = {"minus": [minus], "settings": args.settings, "rung": args.rung}
    table = protocol.model_dump()
    if table["arms"].setdefault(args.name, arm) != arm:
        raise ValueError(f"{args.name!r} is another arm: take another name")
    table |= {"questions": {args.name: question}, "growth": {}}
    own = build_protocol(f"enter {args.name}", table)
    runner = Runner(args.track, own, args.rung, Path())
    runner.record = runner.folder.parent / f"{args.rung}-{args.name}.jsonl"
    recorded = read_lines(own, args.records / f"{args.rung}.jsonl")
    code = runner.train([args.name], recorded + read_lines(own, runner.record), args.parallel, stop)
    print_answers(own, {args.rung: recorded + read_lines(own, runner.record)})
    print(f"{runner.record} has the runs; track/README.md says how to enter the contest")
    return code


def print_answers(protocol: Protocol, lines: Mapping[str, Sequence[Line]]) -> None:
    """Print what the questions say so far, by the lines of each rung."""
    print(text_table(*tabulate_questions(protocol, answer_all(protocol, lines))), flush=True)


def verify(protocol: Protocol, args: Namespace, stop: Stop) -> int:
    """Check the records, print what they say, and train some runs of one rung again."""
    of_rung = read_records(protocol, args.records)
    print_answers(protocol, of_rung)
    if args.rerun == 0:
        return 0
    runner = Runner(args.track, protocol, args.rung, Path())
    lines = of_rung[args.rung]
    drawn = SystemRandom().sample(lines, min(args.rerun, len(lines)))
    recorded = {line.run: line for line in drawn}
    with TemporaryDirectory() as folder:
        runner.folder = Path(folder)
        for again in runner.train_each(list(recorded), args.parallel, stop):
            before = recorded[again.run]
            print(f"{describe(again)}, recorded {before.loss} with {before.made}", flush=True)
    return EXIT_CODE if stop.asked else 0


if __name__ == "__main__":
    protect_output()
    run_command(lambda: main(sys.argv[1:], Stop().listen()))
