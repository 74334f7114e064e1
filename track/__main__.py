"""The contest of routers: the same settings and seeds for all, compared in pairs (track/README.md).

    python -m scripts.track run --parallel 2                  train what the record lacks
    python -m scripts.track run --only kern-hash dense        of some questions
    python -m scripts.track enter tanh                        a router on the draft rung: 24 pairs
    python -m scripts.track enter mine --spec "tanh, post=l2 over topk" --balance loss
    python -m scripts.track verify                            check the record, print its tables
    python -m scripts.track verify --rerun 2                  train two of its runs again
    python -m scripts.track table                             write track/README.md and its picture

`run` and `enter` resume where they were stopped. The record is track/records/edition-3/main.jsonl,
one run a line, each added as it ends.
"""

import re
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from random import SystemRandom
from tempfile import TemporaryDirectory
from typing import Any

from pydantic import ValidationError

from common.command import build_parser, command, require_packages, run_command
from common.files import describe_invalid
from common.text import text_table
from router import find_spec
from runtime.launch import EXIT_CODE, Stop, protect_output
from track.contest import (
    FILE,
    NAME,
    RECORDS,
    Arm,
    Line,
    Protocol,
    Question,
    check_lines,
    load_protocol,
    read_lines,
)
from track.runner import Runner, describe
from track.score import answer
from track.table import tabulate_questions, write_page


@command
def main(argv: Sequence[str] | None, stop: Stop) -> int:
    """Run one of the commands."""
    parser = build_parser("scripts.track", __doc__)
    parser.add_argument("--track", default=FILE, metavar="FILE", help="the rules (%(default)s)")
    parser.add_argument("--records", type=Path, default=RECORDS, metavar="FOLDER")
    commands = parser.add_subparsers(dest="command", required=True)
    add = commands.add_parser("run", help="train what the record lacks").add_argument
    add("--only", nargs="+", metavar="QUESTION", help="of the config file (default: all)")
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
    asked = {name: one for name, one in protocol.questions.items() if one.rung == args.rung}
    protocol = protocol.model_copy(update={"questions": asked})
    if args.parallel < 1 or getattr(args, "rerun", 0) < 0:
        raise ValueError("--parallel and --rerun: expected a positive number")
    return {"run": run, "enter": enter, "verify": verify}[args.command](protocol, args, stop)


def add_training(add: Any, rung: str) -> None:
    """Add the options of commands that train."""
    add("--rung", default=rung, help="size, of the config file (default: %(default)s)")
    add("--parallel", type=int, default=1, metavar="N", help="runs at once, one thread each")


def run(protocol: Protocol, args: Namespace, stop: Stop) -> int:
    """Train what the questions of the config file lack."""
    questions = args.only or list(protocol.questions)
    for name in questions:
        if name not in protocol.questions:
            raise ValueError(f"--only {name}: another --rung, or some of {', '.join(protocol.questions)}")
    record = args.records / f"{args.rung}.jsonl"
    runner = Runner(args.track, protocol, args.rung, record)
    return runner.train(questions, read_lines(record), args.parallel, stop)


def enter(protocol: Protocol, args: Namespace, stop: Stop) -> int:
    """Train a router of the user's and the reference in pairs, and print what they say."""
    router = args.spec or args.name
    try:
        find_spec(router)
        arm = Arm(router=router, balance=args.balance, hash_layers=args.hash_layers)
        minus = "softmax-renorm-loss" if args.balance == "loss" else "softmax-renorm-quantile"
        question = Question(minus=[minus], settings=args.settings, rung=args.rung)
    except ValidationError as error:
        raise ValueError(describe_invalid("the new arm", error)) from None
    except ValueError as error:
        raise ValueError(f"no router {router!r}: {error}; --spec takes a formula") from None
    if minus not in protocol.arms:
        raise ValueError(f"{args.track} lacks the arm {minus}; add it to track.arms")
    if not re.fullmatch(NAME, args.name) or protocol.arms.get(args.name, arm) != arm:
        raise ValueError(f"{args.name!r}: take another name, of a-z, 0-9 and single dashes")
    arms = {**protocol.arms, args.name: arm}
    own = protocol.model_copy(update={"arms": arms, "questions": {args.name: question}})
    runner = Runner(args.track, own, args.rung, Path())
    runner.record = runner.folder.parent / f"{args.rung}-{args.name}.jsonl"
    recorded = read_lines(args.records / f"{args.rung}.jsonl")
    code = runner.train([args.name], recorded + read_lines(runner.record), args.parallel, stop)
    print_answers(own, recorded + read_lines(runner.record))
    print(f"{runner.record} has the runs; track/README.md says how to enter the contest")
    return code


def print_answers(protocol: Protocol, lines: Sequence[Line]) -> None:
    """Print what the questions say so far."""
    answers = [answer(protocol, name, lines) for name in protocol.questions]
    print(text_table(*tabulate_questions(protocol, answers)), flush=True)


def verify(protocol: Protocol, args: Namespace, stop: Stop) -> int:
    """Check the record, print what it says, and train some of its runs again."""
    file = args.records / f"{args.rung}.jsonl"
    lines = read_lines(file)
    check_lines(protocol, lines)
    print(f"{file}: {len(lines)} runs, in order")
    print_answers(protocol, lines)
    if args.rerun == 0:
        return 0
    count = min(args.rerun, len(lines))
    recorded = {line.run: line for line in SystemRandom().sample(lines, count)}
    runner = Runner(args.track, protocol, args.rung, file)
    with TemporaryDirectory() as folder:
        runner.folder = Path(folder)
        for again in runner.train_each(list(recorded), args.parallel, stop):
            before = recorded[again.run]
            print(f"{describe(again)}, recorded {before.loss} with {before.made}", flush=True)
    return EXIT_CODE if stop.asked else 0


if __name__ == "__main__":
    protect_output()
    run_command(lambda: main(sys.argv[1:], Stop().listen()))
