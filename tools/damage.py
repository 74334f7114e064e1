"""Feed every command every damage of each file that it reads.

    python -m tools.damage [COMMAND ...]        all commands, or those whose names start so

Each case runs in a copy of a tiny run, its data set, export, record and texts. It ends in one way:

    refused      exit code 2 with a line
    told         exit code 0 or 1 with output that names the file or its kind
    same         the same output as from intact files
    silent       other output that does not name it
    traceback    an exception, or no end within the limit

Prints each silent case and traceback, and the counts. The exit code is 1 if there are any.
"""

import contextlib
import io
import json
import os
import re
import shutil
import signal
import tarfile
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import pyarrow
import pyarrow.parquet
import torch

import train
from common.command import build_parser, command, run_command
from common.text import text_table
from data import prepare, verify
from eval import routing, val_loss
from hf.export import export
from report import __main__ as report
from runtime.launch import check_command
from runtime.signals import Stop
from scripts import plan, sample, sweep, watch
from track import __main__ as track

REPO_ROOT = Path(__file__).parents[1]
WAYS = ("refused", "told", "same", "silent", "traceback")
LIMIT = 120  # seconds of a case; the slowest intact command needs 10 on two cores (2026-11-27)
WORDS = ["an", "expert", "chooses", "tokens", "by", "a", "kernel", "of", "their", "features"]
CONFIG = """\
[run]
name = "tiny"
dir = "runs"
[model]
n_layer = 2
n_head = 2
n_embd = 32
block_size = 32
vocab_size = 257
n_expert = 4
top_k = 2
expert_hidden = 8
[data]
name = "set"
dir = "sets"
[train]
batch_size = 4
micro_batch_size = 4
max_steps = 4
checkpoint_interval = 2
dtype = "float32"
device = "cpu"
[eval]
interval = 2
windows = 4
[log]
interval = 1
"""


class HungError(BaseException):
    """A command did not end."""


# ---- damages: functions that change a file
def replace(content: bytes) -> Callable[[Path], object]:
    """The damage that gives a file other content."""
    return lambda path: path.write_bytes(content)


def cut(path: Path) -> None:
    """Keep the first half."""
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path) -> None:
    """Flip a bit in the middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def append_zeros(path: Path) -> None:
    """Append a page of zeros, as some file systems do after a power failure."""
    with path.open("ab") as file:
        file.write(bytes(4096))


def write_huge_numbers(path: Path) -> None:
    """Replace every number by one that is beyond floats."""
    path.write_bytes(re.sub(rb"(?<=[ :=\[])\d[\d.e-]*", b"1" + b"0" * 400, path.read_bytes()))


def make_folder(path: Path) -> None:
    """A folder instead."""
    path.unlink()
    path.mkdir()


def make_fifo(path: Path) -> None:
    """A FIFO instead: who opens it waits for a writer."""
    path.unlink()
    os.mkfifo(path)


def make_loop(path: Path) -> None:
    """A link to itself instead."""
    path.unlink()
    path.symlink_to(path.name)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "absent": Path.unlink,
    "empty": replace(b""),
    "cut": cut,
    "flipped": flip,
    "zeros at the end": append_zeros,
    "zeros": replace(bytes(5000)),
    "not UTF-8": replace(b"\xff\xfe\n" * 50),
    "deep": replace(b"[" * 100_000),
    "deep object": replace(b'{"a":' * 100_000),
    "a list": replace(b"[]"),
    "huge numbers": write_huge_numbers,
    "a folder": make_folder,
    "a FIFO": make_fifo,
    "a loop": make_loop,
}
# A user may edit these, so what is still well-formed is no damage: other text, other settings.
EDITED = {".toml": {"flipped"}, ".txt": {"cut", "flipped", "zeros at the end", "zeros", "deep"}}
EDITED[".txt"] |= {"deep object", "a list", "huge numbers"}
EDITED[".jsonl"] = {"flipped", "huge numbers"}
EDITED["tiny.toml"] = {"empty"}  # the defaults
EDITED[".gz"] = {"zeros at the end"}  # tapes pad with zeros, and gzip ignores them


# ---- commands
class Command(NamedTuple):
    """A command, its arguments in the folder of a case, and the files that it reads."""

    main: Callable[[list[str]], Any]
    arguments: str
    files: list[str]


def run_train(arguments: list[str]) -> int:
    """train.py with its early checks."""
    check_command(arguments)
    return train.main(arguments)


def run_track(arguments: list[str]) -> int:
    """scripts.track with the repository's rules."""
    return track.main(["--track", str(REPO_ROOT / track.FILE), *arguments], Stop())


SET = ["sets/set/meta.json", "sets/set/train-00000.bin", "sets/set/val-00000.bin"]
RUN = ["runs/tiny/config.toml", "runs/tiny/checkpoints/*4/manifest.json"]
RUN.append("runs/tiny/checkpoints/*4/*.distcp")
METRICS = ["runs/tiny/metrics.jsonl", "runs/tiny/arrays/val_*4.npz"]
COMMANDS = {
    "train (resume)": Command(run_train, "tiny.toml --train.max_steps=6", [*RUN, *METRICS, *SET]),
    "train (again)": Command(run_train, "tiny.toml", ["tiny.toml", *RUN, *METRICS]),
    "train (new)": Command(run_train, "tiny.toml --run.name=b", ["tiny.toml", *SET]),
    "train (init_from)": Command(
        run_train,
        "tiny.toml --run.name=b --train.init_from=exported",
        ["exported/config.json", "exported/model.safetensors"],
    ),
    "eval.val_loss": Command(val_loss.main, "runs/tiny text.txt", ["text.txt", *RUN, *SET]),
    "eval.routing": Command(routing.main, "runs/tiny", [*RUN, *SET]),
    "scripts.sample": Command(sample.main, "runs/tiny --tokens 4", [*RUN, SET[0]]),
    "scripts.export": Command(export.main, "runs/tiny out --format nanokern", [*RUN, SET[0]]),
    "scripts.report": Command(report.main, "runs/tiny --out out", [RUN[0], *METRICS]),
    "scripts.watch": Command(watch.main, "runs/tiny", [RUN[0], *METRICS]),
    "scripts.plan": Command(plan.main, "tiny.toml --gpus 1", ["tiny.toml"]),
    "scripts.sweep": Command(sweep.main, "sweep.toml --dry-run", ["sweep.toml", SET[0]]),
    "data.verify": Command(verify.main, "set --out sets", SET),
    "data.prepare": Command(
        prepare.main,
        "text --source in --name new --out sets --tokenizer bytes",
        ["in/a.txt", "in/b.jsonl", "in/c.tar.gz", "in/d.parquet"],
    ),
    "data.prepare (there)": Command(
        prepare.main,
        "text --source in --name set --out sets --tokenizer bytes",
        ["in/a.txt", "in/b.jsonl", "in/c.tar.gz", "in/d.parquet", *SET],
    ),
    "track verify": Command(run_track, "verify kern.json", ["kern.json"]),
}


# ---- cases
def make_files(folder: Path) -> None:
    """Make the intact files of all commands in `folder`, the working directory."""
    texts = [f"{number}: {' '.join(WORDS[number % 7 :])}" for number in range(400)]
    rows = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (folder / "in").mkdir()
    (folder / "in/a.txt").write_text("\n".join(texts))
    (folder / "in/b.jsonl").write_text(rows)
    with tarfile.open(folder / "in/c.tar.gz", "w:gz") as archive:
        archive.add(folder / "in/a.txt", "a.txt")
    table = pyarrow.table({"text": texts})
    pyarrow.parquet.write_table(table, folder / "in/d.parquet")
    (folder / "text.txt").write_text("\n".join(texts))
    (folder / "tiny.toml").write_text(CONFIG)
    (folder / "sweep.toml").write_text(
        CONFIG.replace('name = "tiny"\n', "", 1) + "[sweep]\nrun.seed = [0, 1]\n"
    )
    shutil.copy(REPO_ROOT / "track/records/edition-1/kern.json", folder)
    set_arguments = "text --source in --name set --out sets --tokenizer bytes"
    export_arguments = "runs/tiny exported --format nanokern"
    for main, arguments in (
        (prepare.main, set_arguments),
        (run_train, "tiny.toml"),
        (export.main, export_arguments),
    ):
        code, output = call(main, arguments)
        assert code == 0, output


def call(main: Callable[[list[str]], Any], arguments: str) -> tuple[int | None, str]:
    """Run a command: its exit code, None after an exception, and its output.

    Times and speeds in the output are left out.
    """
    output = io.StringIO()
    signal.alarm(LIMIT)
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            code = main(arguments.split())
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        except BaseException:
            code = None
            traceback.print_exc()
    signal.alarm(0)
    text = re.sub(r"\d+:\d\d", "", output.getvalue())  # of the progress bar
    return code, re.sub(r"[\d.,]+ (tokens/s|ms|s|min|minutes|hours)\b", "", text)


def end_hung(number: int, frame: object) -> None:
    """End the command, which must not take this for an error of its own."""
    raise HungError(f"no end within {LIMIT} s")


def find_new_lines(output: str, intact: str) -> list[str]:
    """The lines that the output from intact files does not have."""
    known = intact.splitlines()
    return [line for line in output.splitlines() if line not in known]


def judge(code: int | None, output: str, intact: str, path: Path) -> str:
    """The way in which a case ended."""
    if code is None:
        return "traceback"
    if code == 2:
        return "refused" if "error: " in output else "silent"
    new_lines = find_new_lines(output, intact)
    if not new_lines:
        return "same"
    # data.prepare counts files by their endings; a set or a run may be named as a whole
    names = [path.name, ": read: ", "half-prepared", "no runs in"]
    if path.parent.name.startswith("step_"):  # a checkpoint
        names.append(path.parent.name)
    is_named = any(name in line for line in new_lines for name in names)
    return "told" if is_named else "silent"


def run_cases(name: str, files: Path, folder: Path) -> Iterator[tuple[str, str, str, str]]:
    """Yield the file, the damage, the way each case of a command ended, and its output."""
    case = COMMANDS[name]

    def start() -> None:
        os.chdir(folder.parent)
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(files, folder)  # with times
        os.chdir(folder)

    start()
    code, intact = call(case.main, case.arguments)
    assert code == 0, f"{name}: {code}: {intact}"
    for pattern in case.files:
        for damage, change in DAMAGES.items():
            start()
            path = min(Path().glob(pattern))
            if damage in EDITED.get(path.suffix, set()) | EDITED.get(path.name, set()):
                continue
            change(path)
            code, output = call(case.main, case.arguments)
            way = judge(code, output, intact, path)
            if way == "silent":
                output = "\n".join(find_new_lines(output, intact))
            yield str(path), damage, way, output


@command
def main(argv: list[str] | None = None) -> int:
    """Run the cases and print the counts."""
    parser = build_parser("tools.damage", __doc__)
    parser.add_argument("commands", nargs="*", metavar="COMMAND", help="(default: all)")
    parser.add_argument("--verbose", action="store_true", help="print every case")
    args = parser.parse_args(argv)
    matplotlib.rcParams["savefig.dpi"] = 25
    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, end_hung)
    rows = []
    total: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as temporary:
        files = Path(temporary, "files")
        files.mkdir()
        os.chdir(files)
        make_files(files)
        for name in COMMANDS:
            if args.commands and not name.startswith(tuple(args.commands)):
                continue
            counts: Counter[str] = Counter()
            for path, damage, way, output in run_cases(name, files, Path(temporary, "case")):
                counts[way] += 1
                if args.verbose or way in ("silent", "traceback"):
                    print(f"{way}: {name}, {path}: {damage}", flush=True)
                    print("  " + "\n  ".join(output.splitlines()[-6:]), flush=True)
            total += counts
            rows.append([name, *(str(counts[way]) for way in WAYS)])
        os.chdir(REPO_ROOT)
    rows.append(["all", *(str(total[way]) for way in WAYS)])
    print(text_table(["command", *WAYS], rows))
    return int(total["silent"] + total["traceback"] > 0)


if __name__ == "__main__":
    run_command(main)
