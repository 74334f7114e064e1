"""Feed every command every damage of each file that it reads.

    python -m tools.damage [COMMAND ...]        all commands, or those whose names start so

Each case runs in a copy of a tiny run, its data set, export, records and texts, with one file
damaged or with a disk on which files cannot grow beyond some bytes. It ends in one way:

    refused      exit code 2 with a line
    told         exit code 0 or 1 with output that names the file or its kind
    same         the same output as from intact files; on a full disk no file is cut, either
    silent       other output that does not name it, or a file that is cut without a word
    traceback    an exception, or no end within the limit

Prints each silent case and traceback, and the counts. The exit code is 1 if there are any. All
commands take 26 minutes on two busy cores (2026-11-27).
"""

import contextlib
import io
import json
import os
import re
import resource
import shutil
import signal
import tarfile
import tempfile
import threading
import traceback
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import matplotlib
import pyarrow
import pyarrow.parquet
import torch

import train
from common.command import build_parser, command, run_command
from common.text import text_table
from data import prepare, verify
from data.bins import read_meta
from data.mixture import identify
from eval import downstream, routing, val_loss
from hf.export import export
from report import __main__ as report
from report.blocks import Table
from runtime.launch import check_command
from runtime.signals import Stop
from scripts import draw, plan, sample, sweep, watch
from studies import balancing, best, effects, growth, product, results
from track import __main__ as track
from track import contest, entry, table
from track.record import missing_tasks, new_record, write_record

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
# A contest of two rungs that `track enter` and `track table` read
RULES = """
[track]
edition = 7
reference = "softmax-renorm"
text = ["in/a.txt", "in/a.txt"]
data_sha256 = "{data}"
settings = 2
alpha = 0.01
margin = 0.02
tuning_sd = 0.002
seed_sd = 0.006
rerun_sd = 0.006
curve = [0.5, 2.0]
curve_settings = 1
[track.draws]
seed = 1
count = 3
length = 0.5
lr = [1e-3, 1e-2]
expert_out_lr_ratio = [0.5, 4.0]
router_lr_ratio = [0.2, 2.0]
gate_norm = [0.5, 8.0]
own_gate_norm = 0.25
balance_loss_coef = [1e-3, 1e-1]
bias_rate = [1e-3, 1e-1]
[[track.rungs]]
seeds = 2
minutes = 0.1
[[track.rungs]]
seeds = 2
minutes = 0.2
overrides = ["train.max_steps=6"]
[track.entries]
softmax-renorm = {{ "model.router" = "softmax-renorm" }}
kern = {{ "model.router" = "kern" }}
"""
STUDY = "runs/gamma-* --over model.gate_norm"
# Runs of other studies, enough for their commands
STUDY_RUNS = {
    "factorial": "runs/factorial-*-top_k8-seed[01]",
    "form_balance": "runs/form_balance-*-seed30[01]",
    "w_out": "runs/w_out-kern-*",
}
# Files can grow to so many bytes. Where one has just this size it is cut.
FULL_DISKS = (0, 101, 1009, 5003, 20011)
DISK = Path("full disk")  # stands for the damaged file
OUT_OF_SPACE = ("cannot be written", "could not be written", "File too large", "no page")


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
EDITED["records/contest/kern.json"] = {"absent", "a loop"}  # it would be trained
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


def run_contest(arguments: list[str]) -> int:
    """scripts.track with the rules, records and pages of the case; code may be uncommitted."""
    contest.RECORDS = Path("records")
    if arguments[0] == "judge":  # it compares with a commit; there is no record of the contest
        contest.RECORDS = REPO_ROOT / "track/records"
    table.PAGE = Path("page.md")
    table.FRONT_PAGE = Path("front.md")
    entry.check_committed = lambda: None
    return track.main(["--track", "contest.toml", *arguments], Stop())


def run_study(tabulate: Callable[[Sequence[str]], Sequence[Table]]) -> Callable[[list[str]], int]:
    """The command of a study, which prints tables."""

    @command
    def main(arguments: list[str]) -> None:
        for table_of_study in tabulate(results.expand_arguments(" ".join(arguments), Path())):
            print(table_of_study.to_text())

    return main


def draw_product(arguments: list[str]) -> int:
    """studies.product, whose picture has no text."""
    return product.main(results.expand_arguments(" ".join(arguments), Path()))


def run_results(arguments: list[str]) -> int:
    """studies.results with the records and the pages of the case."""
    results.RECORDS = Path("archives")
    results.DOCS = Path("docs")
    return results.main(arguments)


def serve_page(arguments: list[str]) -> int:
    """scripts.watch --serve, asked once: print the page, an element a line, without pictures."""
    server = watch.make_server(0, lambda: watch.read_places([Path(arguments[0])]))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}") as response:
            html = response.read().decode()
    except urllib.error.HTTPError as error:
        print(error.read().decode())
        return 1
    finally:
        server.shutdown()
        server.server_close()
    print(re.sub(r"data:image/[^\"]*", "", html).replace("<", "\n<"))
    return 0


SET = ["sets/set/meta.json", "sets/set/train-00000.bin", "sets/set/val-00000.bin"]
RUN = ["runs/tiny/config.toml", "runs/tiny/checkpoints/*4/manifest.json"]
RUN.append("runs/tiny/checkpoints/*4/*.distcp")
TASKS = "--tasks piqa --tasks-dir tasks --limit 4"
METRICS = ["runs/tiny/metrics.jsonl", "runs/tiny/arrays/val_*4.npz"]
BALANCED = "runs/form_balance-kern-balance_loss_coef0.0-sign-bias_update_rate0.0-seed300"
SCALED = "runs/w_out-kern-expert_out_lr_ratio1.0-gate_norm2.0"
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
    "data.prepare (tokenizer)": Command(
        prepare.main,
        "text --source in/a.txt --name new --out sets --tokenizer exported",
        ["exported/tokenizer.json", "exported/tokenizer_config.json", "exported/config.json"],
    ),
    "data.verify (tokenizer)": Command(
        verify.main, "tok --out sets", ["sets/tok/tokenizer.json", "sets/tok/meta.json"]
    ),
    "scripts.sample (tokenizer)": Command(
        sample.main, "runs/tok --tokens 4", ["sets/tok/tokenizer.json", "sets/tok/meta.json"]
    ),
    "scripts.export (tokenizer)": Command(
        export.main, "runs/tok out --format nanokern", ["sets/tok/tokenizer.json"]
    ),
    "eval.downstream": Command(
        downstream.main, f"runs/tiny {TASKS}", ["tasks/piqa.jsonl", *RUN, SET[0]]
    ),
    "eval.downstream (again)": Command(
        downstream.main, f"runs/tok {TASKS}", ["tasks/piqa.jsonl", "runs/tok/eval/*/*.json"]
    ),
    "scripts.draw": Command(draw.main, "routing.json", ["routing.json"]),
    "scripts.watch --serve": Command(serve_page, "runs/tiny", [RUN[0], *METRICS]),
    "studies.best": Command(
        run_study(best.tabulate),
        f"{STUDY} --choose-on 0",
        [f"runs/gamma-kern-gate_norm0.5/{name}" for name in ("config.toml", "metrics.jsonl")],
    ),
    "studies.growth": Command(
        run_study(growth.tabulate), STUDY, ["runs/gamma-kern-gate_norm0.5/arrays/*.npz"]
    ),
    "studies.effects": Command(
        run_study(effects.tabulate),
        STUDY_RUNS["factorial"],
        [f"runs/factorial-kern-top_k8-seed0/{name}" for name in ("config.toml", "metrics.jsonl")],
    ),
    "studies.balancing": Command(
        run_study(balancing.tabulate),
        STUDY_RUNS["form_balance"],
        [f"{BALANCED}/{name}" for name in ("config.toml", "metrics.jsonl")],
    ),
    "studies.product": Command(
        draw_product,
        f"{STUDY_RUNS['w_out']} --over optim.expert_out_lr_ratio",
        [f"{SCALED}/{name}" for name in ("config.toml", "metrics.jsonl")],
    ),
    "studies.results": Command(run_results, "--check", ["archives/gamma.tar.xz"]),
    "track verify": Command(run_track, "verify kern.json", ["kern.json"]),
    "track enter": Command(
        run_contest, "enter kern", ["contest.toml", "contest.json", "records/contest/kern.json"]
    ),
    "track table": Command(
        run_contest,
        "table",
        ["contest.toml", "records/contest/kern.json", "records/contest/ngram.tsv", "page.md"],
    ),
    "track judge": Command(run_contest, "judge --base HEAD", ["contest.toml", "contest.json"]),
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
    tok_arguments = "text --source in --name tok --out sets --tokenizer exported"
    make_tasks(folder / "tasks")
    for main, arguments in (
        (prepare.main, set_arguments),
        (run_train, "tiny.toml"),
        (export.main, export_arguments),
        (prepare.main, tok_arguments),
        (run_train, "tiny.toml --run.name=tok --data.name=tok"),
        (downstream.main, f"runs/tok {TASKS}"),
        (routing.main, "runs/tok"),
    ):
        code, output = call(main, arguments)
        assert code == 0, output
    shutil.copy(min(folder.glob("runs/tok/**/routing.json")), folder)
    make_contest(folder)
    make_study(folder)


def make_tasks(folder: Path) -> None:
    """Make a local file of a task."""
    folder.mkdir()
    rows = []
    for number in range(7):
        row = {"goal": f"{number} plus {number}", "sol1": f"{2 * number}", "sol2": "a kernel"}
        rows.append(json.dumps({**row, "label": 0}) + "\n")
    (folder / "piqa.jsonl").write_text("".join(rows))


def make_contest(folder: Path) -> None:
    """Make the rules of a contest, complete records of invented losses, and pages."""
    data = identify([read_meta(folder / "sets/set")], [1.0])["data"]
    text = CONFIG.replace('name = "tiny"\n', "", 1) + RULES.format(data=data)
    (folder / "contest.toml").write_text(text)
    listed = json.dumps([{"model.n_layer": 2}, {"model.n_layer": 2}])  # a value of each rung
    (folder / "contest.json").write_text(listed)
    contest.RECORDS = Path("records")
    protocol = contest.load_protocol("contest.toml")
    for name, options in protocol.entries.items():
        record = new_record(protocol, name, options)
        record["made"] = [{"commit": "", "code_sha256": ""}]
        while missing := missing_tasks(protocol, record):
            for number, task in enumerate(missing):
                loss = 1.6 + task.draw / 1000 + 0.003 * (number % 2)
                run = {**task._asdict(), "loss": loss, "made": 0}
                if task.round == "judge":
                    run["documents"] = [[loss - 0.4, 2], [loss + 0.4, 2]]
                record["runs"].append(run)
        record["step_ms"] = [{"reference": 10.0, "entry": 8.0}] * len(protocol.rungs)
        write_record(protocol.records / f"{name}.json", record)
    (protocol.records / "ngram.tsv").write_text("rung\tloss\n1\t2.5\n2\t2.4\n")
    for page in ("page.md", "front.md"):
        (folder / page).write_text(f"a\n{table.BEGIN}{table.END}\n")


def make_study(folder: Path) -> None:
    """Make the runs of a study, its archive, and a page with its table."""
    archive = REPO_ROOT / "studies/records/gamma.tar.xz"
    (folder / "archives").mkdir()
    shutil.copy(archive, folder / "archives")
    with tarfile.open(archive) as file:
        file.extractall(folder, filter="data")
    for name, pattern in STUDY_RUNS.items():
        with tarfile.open(archive.with_name(f"{name}.tar.xz")) as file:
            for member in file.getmembers():
                if PurePath(member.name).match(f"{pattern}/*") and member.isfile():
                    file.extract(member, folder, filter="data")
    (folder / "docs").mkdir()
    line = f"`python -m studies.best {STUDY} --choose-on 0`\n"
    for page in results.PAGES:
        (folder / "docs" / page).write_text(line)
    code, output = call(run_results, "")
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
    text = re.sub(r".*(it/s|\?it).*\n", "", output.getvalue())  # tqdm
    text = re.sub(r"<footer>.*", "", text)  # of a page
    text = re.sub(r"\d+:\d\d", "", text)  # of the progress bar
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
    # data.prepare counts files by their endings; a set or a run may be named as a whole; without
    # checkpoints a run that has lost all its lines is like one that was not trained
    names = [path.name, ": read: ", "half-prepared", "no runs in", "No runs yet", " lacks seed "]
    if path.parent.name.startswith("step_"):  # a checkpoint
        names.append(path.parent.name)
    if path == DISK:
        names = list(OUT_OF_SPACE)
    is_named = any(name in line for line in new_lines for name in names)
    return "told" if is_named else "silent"


@contextlib.contextmanager
def limited_files(size: int) -> Iterator[None]:
    """Within this context, writing beyond `size` bytes of a file fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def find_files_of_size(size: int) -> list[Path]:
    """The files below the working directory that have this size."""
    return [path for path in Path().rglob("*") if path.is_file() and path.stat().st_size == size]


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
    for limit in FULL_DISKS:
        start()
        with limited_files(limit):
            code, output = call(case.main, case.arguments)
        way = judge(code, output, intact, DISK)
        if way == "same" and limit and find_files_of_size(limit):
            way = "silent"
            output = f"{find_files_of_size(limit)} cut"
        yield str(DISK), f"{limit} bytes a file", way, output
    for pattern in case.files:
        for damage, change in DAMAGES.items():
            start()
            path = min(Path().glob(pattern))
            keys = (path.suffix, path.name, str(path))
            if any(damage in EDITED.get(key, ()) for key in keys):
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
