"""data/: a preparation that is stopped, killed or out of disk resumes, and the set is the same to
the byte.
"""

import itertools
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from corpora import BYTES, jsonl, snapshot, write_tree
from runs import Forked, be_killed, fork_with_fault, wait_until

from data import DataError, prepare, verify, workers
from data.bins import check_dataset, read_meta
from data.writer import Writer

pytest_plugins = ["corpora"]  # its fixtures
LAST = "the last shard"


@pytest.fixture
def undisturbed(run, books, tmp_path, small_batches):
    """The files of a set prepared from `books` in small units, without a stop.

    They are removed again.
    """
    run(*books)
    files = snapshot(tmp_path / "out")
    shutil.rmtree(tmp_path / "out")
    return files


def test_stopped_it_resumes(run, books, tmp_path, undisturbed, stop_at):
    stop_at(13, *books)
    with pytest.raises(
        DataError, match="text: half-prepared. Resume with the command that started it"
    ):
        check_dataset(tmp_path / "out/text", 257)
    run("text", main=verify.main, code=2)
    unfinished = snapshot(tmp_path / "out")

    rows = (tmp_path / "in/b.jsonl").read_bytes()
    for what, *changed in (("val_fraction", "--val-fraction", 0.5), ("the input files differ",)):
        (tmp_path / "in/b.jsonl").write_bytes(rows if changed else jsonl(["another"]))
        out = run(*books, *changed, code=2)
        assert "text.partial holds an unfinished set made with other arguments" in out
        assert all(words in out for words in (what, "--force", "--name"))
        assert snapshot(tmp_path / "out") == unfinished
    (tmp_path / "in/b.jsonl").write_bytes(rows)

    out = run(*books)
    written = sum(
        split["tokens"]
        for split in json.loads(unfinished["text.partial/progress.json"])["splits"].values()
    )
    assert f", resuming after {written:,} tokens" in out and written > 999
    assert snapshot(tmp_path / "out") == undisturbed


def test_files_that_are_tokenized_are_not_read_again(
    run, books, tmp_path, undisturbed, stop_at, monkeypatch
):
    """And what was written after the last record of progress is cut off."""
    stop_at(22, *books)  # in b.jsonl
    last = max((tmp_path / "out/text.partial").glob("train-*.bin"))
    last.write_bytes(last.read_bytes() + b"more")
    opened, read = [], workers.read_documents
    monkeypatch.setattr(
        workers, "read_documents", lambda file, *args: opened.append(file.name) or read(file, *args)
    )
    out = run(*books)
    assert opened == ["b.jsonl"]
    done, total = re.search(r"text: (\S+)/(\S+)B, ", out).groups()  # the bar at its end
    assert done == total
    assert snapshot(tmp_path / "out") == undisturbed


@pytest.mark.parametrize("name", ["train-00000.bin", LAST, "val-00000.bin"])
@pytest.mark.parametrize("size", [0, 10, None])
def test_shards_that_lack_tokens_are_not_resumed(
    run, books, tmp_path, undisturbed, stop_at, name, size
):
    stop_at(22, *books)
    path = tmp_path / "out/text.partial" / name
    if name == LAST:
        path = max(path.parent.glob("train-*.bin"))
    if size is None:
        path.unlink()
    else:
        os.truncate(path, size)
    assert f"{path}: missing or shorter than progress.json says: start over with --force" in run(
        *books, code=2
    )
    (path.parent / "progress.json").unlink()
    run(*books)
    assert snapshot(tmp_path / "out") == undisturbed


def test_a_set_of_other_arguments_is_started_over(run, books, tmp_path, undisturbed, stop_at):
    """Its files are removed, also a shard that the new set does not have."""
    stop_at(13, *books, "--val-fraction", 0.5)
    write_tree(tmp_path / "out/text.partial", {"train-00099.bin": b"x"})
    assert "resuming" not in run(*books, "--force")
    assert snapshot(tmp_path / "out") == undisturbed


def test_a_set_begun_before_tokenizers_were_recorded_resumes(
    run, books, tmp_path, undisturbed, stop_at
):
    stop_at(13, *books)
    record = tmp_path / "out/text.partial/progress.json"
    content = json.loads(record.read_text())
    del content["made_from"]["tokenizer_files"]
    record.write_text(json.dumps(content))
    assert "resuming after" in run(*books)
    assert snapshot(tmp_path / "out") == undisturbed


def test_a_set_with_a_damaged_record_is_started_over(run, books, tmp_path, undisturbed, stop_at):
    stop_at(13, *books)
    (tmp_path / "out/text.partial/progress.json").write_text("{")
    out = run(*books, code=2)
    assert "progress.json cannot be read" in out and "--force" in out
    assert "resuming" not in run(*books, "--force")
    assert snapshot(tmp_path / "out") == undisturbed


def test_bad_documents_are_counted_once_by_a_resumed_set(
    run, stop_at, books, tmp_path, small_batches
):
    with (tmp_path / "in/a.jsonl").open("ab") as file:
        file.write(b"not JSON\n")
    run(*books, "--skip-bad")
    undisturbed = snapshot(tmp_path / "out")
    shutil.rmtree(tmp_path / "out")
    assert "--skip-bad" in run(*books, code=2)
    stop_at(3, *books, "--skip-bad")  # in b.jsonl
    assert "resuming after" in run(*books, "--skip-bad")
    assert read_meta(tmp_path / "out/text").source["bad"] == 1
    assert snapshot(tmp_path / "out") == undisturbed


def test_two_commands_at_once(run, books, tmp_path, small_batches):
    (tmp_path / "out").mkdir()
    with Writer(tmp_path / "out/text", BYTES):
        for force in ([], ["--force"]):
            assert "another process is preparing this set: wait for it" in run(
                *books, *force, code=2
            )
    run(*books)


def be_interrupted():
    raise KeyboardInterrupt


def start(argv: list[str], folder: Path, k: int = -1, fault=be_killed) -> tuple[int, str]:
    """Runs the command in a fork, stopped before its step k (-1: not); (exit code, what it
    printed).
    """
    return fork_with_fault(lambda: prepare.main(argv), folder, k, fault)


def begin_scenario(folder: Path, scenario: str) -> list[str]:
    """Leave in folder/out what `scenario` finds there; returns the arguments of the command to
    stop.
    """
    workers.BATCH_BYTES, prepare.SAVE_BYTES = 150, 1
    source = folder / "in"
    out = folder / "out"
    texts = [f"{i} green bottles hanging on the wall" for i in range(7)]
    write_tree(source, {"a.jsonl": jsonl(texts[:4]), "b.jsonl": jsonl(texts[4:])})
    command = f"text --source {source} --tokenizer bytes --shard-tokens 60 --name set --out {out}"
    first = [*command.split(), "--val-fraction", "0.6"]
    second = [*command.split(), "--val-fraction", "0.4"]
    out.mkdir()
    if scenario == "begin":
        return second
    if scenario == "replace":  # a complete set
        assert start(first, out, -1)[0] == 0
    else:  # an unfinished one
        assert start(first, out, 30)[0] == -signal.SIGKILL
    return [*second, "--force"]


def stop_everywhere(folder: Path, scenario: str, fault) -> None:
    """Stop `scenario` before each of its steps in turn, start it again, and demand the result of an
    undisturbed run.

    Prints the number of steps.
    """
    argv = begin_scenario(folder, scenario)
    out = folder / "out"
    template = folder / "template"
    shutil.copytree(out, template)
    code, printed = start(argv, out)
    assert code == 0, printed
    wanted = snapshot(out)
    assert (
        set(map(os.path.dirname, wanted)) == {"set"}
        and len(wanted) > 4
        and wanted != snapshot(template)
    )

    def begin_again():
        shutil.rmtree(out)
        shutil.copytree(template, out)

    def resume(context):
        complete = [
            out / name
            for name in ("set", "set.old", "set.partial")
            if (out / name / "meta.json").exists()
        ]
        # what is in use; .old may be half removed where there is another
        for place in complete[:1]:
            check_dataset(place, 257)
        assert complete or scenario != "replace", f"{context}: the set that was there is lost"
        code, printed = start(argv, out)
        assert code == 0, f"{context}: {printed}"
        files = snapshot(out)
        differing = [name for name in files | wanted if files.get(name) != wanted.get(name)]
        assert not differing, f"{context}: {differing}"

    for k in itertools.count():
        begin_again()
        code, printed = start(argv, out, k, fault)
        if "FAULT" not in printed:
            break
        assert code == (-signal.SIGKILL if fault is be_killed else 130), (
            f"step {k}: {code} {printed}"
        )
        resume(f"step {k}: {printed}")
    rng = random.Random(0)
    for round_ in range(2 if fault is be_killed else 0):  # killed again and again
        begin_again()
        for _ in range(100):
            if start(argv, out, rng.randrange(k), fault)[0] == 0:
                break
        resume(f"round {round_}")
    print(k)


INTEGRATION = pytest.mark.integration  # one scenario is in the default tier


@pytest.mark.parametrize(
    ("scenario", "fault", "least"),
    [
        ("begin", be_killed, 30),
        pytest.param("replace", be_killed, 40, marks=INTEGRATION),
        pytest.param("start over", be_killed, 35, marks=INTEGRATION),
        pytest.param("begin", be_interrupted, 30, marks=INTEGRATION),
    ],
)
def test_stopped_at_any_step_nothing_is_lost(tmp_path, scenario, fault, least):
    code, printed = Forked(stop_everywhere, tmp_path, scenario, fault).wait(1200)
    assert code == 0, printed[-3000:]
    assert int(printed.split()[-1]) >= least


def state_and_parent(stat: Path) -> tuple[str, int]:
    """State and parent of a process; ("Z", 0), a zombie without parent, if it is gone."""
    with suppress(OSError):
        state, parent = stat.read_text().rpartition(")")[2].split()[:2]
        return state, int(parent)
    return "Z", 0


def prepare_and_pause(paused, argv):
    """Begin to prepare a set, and make the file `paused` when 12 batches are cut."""

    def cut_and_pause(*args):
        for number, batch in enumerate(cut(*args)):
            if number == 12:
                paused.touch()
                time.sleep(3600)
            yield batch

    workers.BATCH_BYTES, prepare.SAVE_BYTES, prepare.WORKER_BYTES = 50, 1, 500
    cut, workers.cut_batches = workers.cut_batches, cut_and_pause
    sys.exit(prepare.main(list(map(str, argv))))


@pytest.mark.integration
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads Linux' /proc")
def test_killed_while_its_workers_write(run, books, tmp_path, undisturbed, many_workers):
    """No worker outlives the command, and a later start resumes."""
    arguments = [*books, "--tokenizer", "bytes", "--out", tmp_path / "out", "--workers", 2]
    command = Forked(prepare_and_pause, tmp_path / "paused", arguments)
    files = tmp_path / "paused", tmp_path / "out/text.partial/progress.json"
    wait_until(lambda: all(file.exists() for file in files), command.process.is_alive)
    children = [
        stat
        for stat in Path("/proc").glob("[0-9]*/stat")
        if state_and_parent(stat)[1] == command.process.pid
    ]
    command.process.kill()
    assert command.wait(60)[0] == -signal.SIGKILL and len(children) >= 2
    wait_until(lambda: all(state_and_parent(stat)[0] == "Z" for stat in children))
    assert not (tmp_path / "out/text").exists()
    assert "resuming after" in run(*books)
    assert snapshot(tmp_path / "out") == undisturbed


@pytest.mark.integration
def test_killed_workers_are_an_error(run, books, tmp_path, undisturbed, many_workers, monkeypatch):
    cuts, cut = itertools.count(1), workers.cut_batches

    def kill_workers(*args):
        for batch in cut(*args):
            if next(cuts) == 11:
                # one that lives could finish all batches
                for child in multiprocessing.active_children():
                    child.kill()
            yield batch

    with monkeypatch.context() as patch:
        patch.setattr(workers, "cut_batches", kill_workers)
        out = run(*books, "--workers", 2, code=2)
    assert "a worker process died" in out and "start again to resume, with fewer --workers" in out
    assert not (tmp_path / "out/text").exists() and not multiprocessing.active_children()
    assert "resuming after" in run(*books)
    assert snapshot(tmp_path / "out") == undisturbed


@pytest.mark.parametrize("name", ["train-00000.bin", LAST, "progress.json", "meta.json"])
def test_the_disk_is_full(run, books, tmp_path, undisturbed, monkeypatch, name):
    """Both flushing and closing the file fail."""
    if name == LAST:
        name = max(name for name in undisturbed if "train" in name).rpartition("/")[2]
    real = Path.open

    def open_(path, mode="r", *args, **more):
        file = real(path, mode, *args, **more)
        if path.name.startswith(name) and "w" in mode:
            file.write(b"what did fit")
            file.close()
            return real(Path("/dev/full"), mode, *args, **more)
        return file

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", open_)
        out = run(*books, code=2)
    assert "No space left on device" in out and "make room and start again to resume" in out
    assert not list((tmp_path / "out").rglob("*.tmp"))
    recorded = (tmp_path / "out/text.partial/progress.json").exists()
    assert recorded == (name not in ("train-00000.bin", "progress.json"))
    assert ("resuming after" in run(*books)) == recorded
    assert snapshot(tmp_path / "out") == undisturbed
