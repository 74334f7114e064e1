"""The commands in another user's world: paths, locale, time zone, home, variables, other processes.

The oracle is the same work in this process.
"""

import json
import os
import subprocess
import sys

import conftest
import pytest
from corpora import write_tree
from runs import REPO_ROOT, end

import configure
import train
from data import prepare

TEXT = "\ufeffA line 🙂 𝄞 日本\r\nof a text\r\n" * 40  # a byte order mark, planes, CRLF
COMMANDS = """
import json, os, sys
import train
from data import prepare, verify
from eval import val_loss
from report import __main__ as report
from scripts import sample

codes = []
before = dict(os.environ)
for name, arguments in json.loads(sys.argv[1]):
    main = {"prepare": prepare.main, "verify": verify.main, "train": train.main}.get(name)
    main = main or {"val_loss": val_loss.main, "report": report.main, "sample": sample.main}[name]
    codes.append(main(arguments) or 0)
changed = {key for key in before | dict(os.environ) if before.get(key) != os.environ.get(key)}
print(json.dumps([codes, sorted(changed)]))
"""
# a locale without letters, a day ahead, and a home that cannot be written, even by root
WORLD = {
    "LC_ALL": "C",
    "TZ": "Pacific/Kiritimati",
    "HOME": "/dev/null/home",
    "XDG_CACHE_HOME": "/dev/null/cache",
    "TMPDIR": "",
    "CUBLAS_WORKSPACE_CONFIG": ":16:8",
    "TOKENIZERS_PARALLELISM": "true",
    "OMP_NUM_THREADS": "1",
    "COLUMNS": "20",
}


def prepare_source(folder):
    """A folder with texts in three files, one of them another's name with more letters."""
    files = {"a.txt": TEXT.encode(), "a.txt.txt": b"another " * 40, "c.txt": b"one more " * 40}
    write_tree(folder / "in", files)
    return folder


def list_tokens(folder):
    return {file.name: file.read_bytes() for file in folder.rglob("*.bin")}


@pytest.mark.integration
def test_all_commands_in_another_world(tmp_path):
    usual = prepare_source(tmp_path / "usual")
    options = ["--tokenizer", "bytes", "--name", "set", "--val-fraction", "0.4"]
    arguments = ["text", "--source", str(usual / "in"), "--out", str(usual / "data"), *options]
    assert prepare.main(arguments) == 0
    file = conftest.write_tiny(usual, usual / "data")
    settings = ["data.name=set", "run.name=run"]
    config = configure.load(file, settings)
    train.train(config)

    real = prepare_source(tmp_path / "of é 🙂")
    odd = tmp_path / "a link"
    odd.symlink_to(real)
    own_file = conftest.write_tiny(real, odd / "data")
    run = f"{odd}/runs/run/"
    overrides = [f"--{setting}" for setting in settings]
    commands = [
        ("prepare", ["text", "--source", f"{odd}//in", "--out", f"{odd}/data/", *options]),
        ("verify", ["set", "--out", f"{odd}/data/"]),
        ("train", [str(own_file), f"--run.dir={odd}/runs/", f"--data.dir={odd}/data/", *overrides]),
        ("val_loss", [run]),
        ("sample", [run, "--prompt", "a", "--tokens", "5"]),
        ("report", [run, "--out", f"{odd}/report 🙂/"]),
    ]
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    variables = os.environ | WORLD | {"TMPDIR": str(temporary)}
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS, json.dumps(commands)],
        cwd=REPO_ROOT,
        env=variables,
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    codes, changed = json.loads(done.stdout.splitlines()[-1])
    assert codes == [0] * len(commands), done.stderr.decode()[-3000:]
    # those of the user are kept; matplotlib has a folder of its own without a home
    assert set(changed) <= {"LOGLEVEL", "MPLCONFIGDIR"}
    assert list_tokens(real / "data") == list_tokens(usual / "data")
    assert end(configure.load(file, [*settings, f"run.dir={real / 'runs'}"])) == end(config)
    assert "kern" in (real / "report 🙂/report.html").read_text(encoding="utf-8")
    left = {path.name for path in real.iterdir()}
    assert left == {"data", "in", "report 🙂", "runs", own_file.name}
    assert not list(temporary.iterdir())
