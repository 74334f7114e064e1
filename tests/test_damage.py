"""Every kind of damage to every file that commands read: one line and an exit code, no traceback.

What is protected by a checksum is never read as if it were intact.
"""

import shutil
import sys
from functools import partial
from pathlib import Path

import pytest
from conftest import write_tiny
from runs import content, steps

import configure
import train
from common.command import command
from data import verify
from data.bins import read_meta, scan_shards
from eval import val_loss
from hf.export import export
from report import __main__ as report
from runtime.identity import read_id
from scripts import sample, watch
from track.contest import FILE, load_protocol, read_records

SIZE = 40  # bytes of a flipped file that are left alone at its start, at least


def flip(content: bytes) -> bytes:
    middle = min(max(len(content) // 2, SIZE), len(content) - 1)
    return content[:middle] + bytes([content[middle] ^ 0x55]) + content[middle + 1 :]


DAMAGES = {
    "empty": lambda content: b"",
    "cut": lambda content: content[: 2 * len(content) // 3],
    "flipped": flip,
    "zeros": lambda content: bytes(len(content)),
    "other JSON": lambda content: b'[{"a": 1}, "\\ud800", NaN]',
    "no UTF-8": lambda content: b"\xff\xfe" + content,
    "a folder": None,
}
# {file below the world's folder: commands that read it}
READERS = {
    "data/tiny/meta.json": ("train", "verify", "val_loss"),
    "data/tiny/train-00000.bin": ("train", "verify"),
    "data/tiny/val-00000.bin": ("verify", "val_loss"),
    "runs/tiny/config.toml": ("train", "report", "watch", "val_loss", "sample", "export"),
    "runs/tiny/metrics.jsonl": ("train", "report", "watch"),
    "runs/tiny/arrays/val_00000002.npz": ("report",),
    "runs/tiny/checkpoints/step_00000002/manifest.json": ("train", "val_loss", "sample", "export"),
    "runs/tiny/checkpoints/step_00000002/__0_0.distcp": ("train", "val_loss", "sample", "export"),
}
HASHED = (".bin", ".npz", "manifest.json", "__0_0.distcp")


@pytest.fixture(scope="module")
def world(tmp_path_factory, corpus):
    """A data set, and a run of it that stopped at step 2 of 4."""
    folder = tmp_path_factory.mktemp("world")
    shutil.copytree(corpus, folder / "data")
    file = write_tiny(folder, folder / "data")
    for place in ("other", "runs"):  # equal runs, but for their ids
        config = configure.load(file, ["train.max_steps=2", f"run.dir={folder / place}"])
        train.train(config)
        assert steps(config) == [2]
    (folder / "runs/tiny/arrays/val_0.npz").write_bytes(b"the user's")
    return folder


def run_command(command: str, folder: Path) -> int:
    """The exit code of a command that reads the run or the set of `folder`."""
    run = str(folder / "runs/tiny")
    overrides = ["--run.name=tiny", "--train.max_steps=4"]  # it resumes
    main, *arguments = {
        "train": [train.main, str(folder / "tiny.toml"), *overrides],
        "verify": [verify.main, "tiny", "--out", str(folder / "data")],
        "report": [report.main, run, "--out", str(folder / "report")],
        "watch": [watch.main, run],
        "val_loss": [val_loss.main, run],
        "sample": [sample.main, run, "--prompt", "a", "--tokens", "2"],
        "export": [export.main, run, str(folder / "export")],
    }[command]
    try:
        return main(arguments) or 0
    except SystemExit as end:
        return int(end.code or 0)


def list_cases(readers):
    """(file, command) of {file: commands}."""
    return [(file, command) for file, commands in readers.items() for command in commands]


@pytest.fixture
def folder(world, tmp_path):
    """A copy of the world."""
    folder = tmp_path / "world"
    shutil.copytree(world, folder)
    for file in (folder / "tiny.toml", folder / "runs/tiny/config.toml"):
        file.write_text(file.read_text().replace(str(world), str(folder)))
    return folder


@pytest.mark.usefixtures("without_pictures")
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize(("file", "command"), list_cases(READERS))
def test_damage_is_a_line_and_an_exit_code(folder, capsys, file, command, damage):
    path = folder / file
    content = path.read_bytes()
    path.unlink()
    if DAMAGES[damage] is None:
        path.mkdir()
    else:
        path.write_bytes(DAMAGES[damage](content))
    code = run_command(command, folder)
    printed = capsys.readouterr()
    text = printed.out + printed.err
    assert "Traceback" not in text
    assert code in (0, 1, 2), text
    if file.endswith(HASHED) or (file.endswith("config.toml") and damage != "flipped"):
        assert code or "damaged" in text or "left out" in text, text
    if code == 2:
        assert printed.err.startswith("error: "), printed.err
        assert any(part in text for part in (file, str(path.parent))), text


def scan_the_set(folder):
    set_folder = folder / "data/tiny"
    list(scan_shards(set_folder, read_meta(set_folder)))


@pytest.mark.skipif(sys.platform != "linux", reason="/proc/self/mem cannot be read at its start")
@pytest.mark.parametrize(("file", "read"), [
    ("data/tiny/meta.json", partial(run_command, "verify")),
    ("runs/tiny/config.toml", partial(run_command, "val_loss")),
    ("runs/tiny/run_id", partial(run_command, "val_loss")),
    ("runs/tiny/metrics.jsonl", partial(run_command, "train")),
    ("runs/tiny/checkpoints/step_00000002/manifest.json", partial(run_command, "val_loss")),
    ("data/tiny/val-00000.bin", command(scan_the_set)),
    ("main.jsonl", command(lambda folder: read_records(load_protocol(FILE), folder))),
])  # fmt: skip
def test_an_error_of_the_disk_names_the_file(folder, capsys, file, read):
    (folder / file).unlink(missing_ok=True)
    (folder / file).symlink_to("/proc/self/mem")
    assert read(folder) == 2
    error = capsys.readouterr().err
    assert str(folder / file) in error and "Input/output error" in error


STEP = "runs/tiny/checkpoints/step_00000002"
FOREIGN = {  # {file: commands that read it}
    f"{STEP}/manifest.json": ("train", "report", "watch", "val_loss", "sample", "export"),
    "runs/tiny/metrics.jsonl": ("train", "report", "watch"),
    "runs/tiny/arrays/val_00000002.npz": ("report",),
}


@pytest.mark.usefixtures("without_pictures")
@pytest.mark.parametrize(("file", "command"), list_cases(FOREIGN))
def test_a_file_of_another_run_is_refused(folder, capsys, file, command):
    """And left as it is."""
    shutil.copy(folder / "other" / file.removeprefix("runs/"), folder / file)
    before = content(folder)
    code = run_command(command, folder)
    text = "".join(capsys.readouterr())
    other, own = (read_id(folder / place / "tiny") for place in ("other", "runs"))
    said = f"of another run: its run_id is {other}, that of {folder}/runs/tiny is {own}"
    assert said in text and "is damaged" not in text and other != own
    assert code == 2 or command == "watch"
    assert content(folder) == before
