"""What the pages name exists: files, config keys. Their commands parse.

Pages are the Markdown files, the notebook, and the docstrings of commands. A command is parsed by
its own parser, and goes no further.
"""

import importlib.util
import itertools
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from argparse import ArgumentParser
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
from runs import REPO_ROOT

import configure
from configure.schema import KEYS, SECTIONS
from runtime.launch import Stop

LIST = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
LISTED = subprocess.check_output(LIST, cwd=REPO_ROOT, text=True).split()
FILES = {file for file in LISTED if (REPO_ROOT / file).is_file()}
FOLDERS = {str(folder) for file in FILES for folder in Path(file).parents}
PAST = ("docs/CHANGELOG.md", "docs/LOG", "track/records/edition-")  # they name what was once
# of other projects; in an export's folder; of a run
OTHER_FILES = {"train_llama_small_adam_80g8.py", "gpu_model/host.py", "array.sbatch"}
OTHER_FILES |= {"settings.toml", "config.toml"}
LEFT_OUT = ("…", "CORPUS")  # words of commands
NO_KEYS = {"model.generate"}  # a method of transformers
OTHER_PROGRAMS = {
    "pip",
    "curl",
    "source",
    "hf",
    "wandb",
    "sbatch",
    "vllm",
    "lm_eval",
    "lm-eval",
    "trl",
    "for",  # part in …; do wandb sync
}
PLACEHOLDER = re.compile(r"\b(FILES?|FOLDER|NAME|SET|OUT|OTHER)\b|section\.key|…|\.\.\.")


class Parsed(BaseException):
    """Raised in place of all that a command does after its arguments are parsed."""


def read_pages() -> dict[str, str]:
    """{file: Markdown}; of the notebook its cells."""
    pages = {}
    for file in sorted(FILES):
        if file.endswith(".md") and not file.startswith(PAST):
            pages[file] = (REPO_ROOT / file).read_text().replace("\\_", "_")
        elif file.endswith(".ipynb"):
            cells = json.loads((REPO_ROOT / file).read_text())["cells"]
            pages[file] = "\n".join("".join(cell["source"]) for cell in cells)
    return pages


PAGES = read_pages()


def find_commands() -> list[str]:
    """Every command of a code block, of inline code and of an indented line of a docstring."""
    commands = set()
    for text in PAGES.values():
        for block in re.findall(r"^```sh\n(.*?)^```", text, re.M | re.S):
            commands.update(block.replace("\\\n", " ").splitlines())
        commands.update(re.findall(r"`((?:python|bash|torchrun|sbatch) [^`\n]+)`", text))
    for file in FILES:
        if file.endswith(".py") and not file.startswith("tests/"):
            text = (REPO_ROOT / file).read_text()
            for line in re.findall(r"^    ((?:python|torchrun) .*)$", text, re.M):
                commands.add(re.split(r"\s{2,}| [\[(]", line)[0])  # before its explanation
    return sorted(command.strip() for command in commands if command.strip())


def parse_module(module: str, words: list[str], monkeypatch) -> None:
    """Run `python -m MODULE` until its arguments are parsed.

    Raises SystemExit if they are wrong. Arguments that it leaves over are overrides of keys.
    """

    def parse_and_end(parser, args=None, namespace=None):
        patch.undo()  # subparsers parse as always
        _, left = parser.parse_known_args(args or words)
        if left and sys._getframe(1).f_code.co_name in ("parse_args", "parse_intermixed_args"):
            parser.error(f"unrecognized arguments: {left}")
        for word in left:
            key, _, value = word.removeprefix("--").partition("=")
            if not word.startswith("--"):
                check_file(word)
            elif key not in KEYS or not value:
                raise ValueError(f"{word}: no key with a value")
        raise Parsed

    with monkeypatch.context() as patch:
        patch.setattr(ArgumentParser, "parse_known_args", parse_and_end)
        patch.setattr(ArgumentParser, "parse_known_intermixed_args", parse_and_end)
        patch.setattr(Stop, "listen", lambda stop: stop)  # it would catch pytest's signals
        patch.setattr(sys, "argv", [module, *words])
        with pytest.raises(Parsed):
            runpy.run_module(module, run_name="__main__", alter_sys=True)


def check_file(name: str) -> None:
    """A file of the repository, or a placeholder."""
    if name not in FILES | OTHER_FILES and not PLACEHOLDER.search(name):
        raise ValueError(f"{name} does not exist")


def check_command(words: list[str], monkeypatch) -> None:
    """Parse a command's words; see find_commands."""
    if words[0] in ("torchrun", "sbatch"):
        while words[1].startswith("-") and words[1] != "-m":
            del words[1]
    if words[0] in OTHER_PROGRAMS - {"sbatch"}:
        return
    if words[1] == "-m":
        if not words[3:]:
            if not importlib.util.find_spec(words[2]):
                raise ValueError(f"{words[2]}: no module")
        elif words[2] != "pytest" and words[3:] != ["--help"]:
            parse_module(words[2], words[3:], monkeypatch)
        return
    check_file(words[1])
    if words[1] in ("train.py", "scripts/slurm/train.sbatch") and "--help" not in words:
        words = [word for word in words if word not in ("--fresh", "…")]
        file, overrides = configure.split_command_line(words[2:])
        check_file(file)
        if file in FILES:
            configure.load(REPO_ROOT / file, overrides)


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
def test_the_commands_of_the_pages_parse(monkeypatch, capsys):
    monkeypatch.chdir(REPO_ROOT)
    commands = find_commands()
    assert len(commands) > 100
    faults = []
    for command in commands:
        try:
            words = [word for word in shlex.split(command, comments=True) if word not in LEFT_OUT]
            if words:
                check_command(words, monkeypatch)
        except (SystemExit, ValueError, pytest.fail.Exception) as error:
            faults.append(f"{command}: {error} {capsys.readouterr().err}")
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("page", PAGES)
def test_the_files_that_a_page_names_exist(page):
    """In links, and wherever a name ends like one of the project's files."""
    text = PAGES[page]
    here = Path(page).parent
    known = FILES | FOLDERS | OTHER_FILES
    names = {Path(file).name for file in FILES} | OTHER_FILES
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
    files = re.findall(r"(?<![\w/.*])[\w./-]+\.(?:py|sh|toml|sbatch|ipynb)\b", text)
    named = {*links, *files} - known
    missing = {name for name in named if os.path.normpath(here / name) not in known}
    assert not [name for name in missing - names if not PLACEHOLDER.search(name)]
    assert not missing & {*links}
    for name in re.findall(r"`((?:[a-z]+/)+)`", text):
        assert name.split("/")[0] not in FOLDERS or name.rstrip("/") in FOLDERS, name


@pytest.mark.parametrize("page", PAGES)
def test_the_keys_that_a_page_names_exist(page):
    sections = "|".join(SECTIONS)
    named = {*re.findall(rf"(?<![\w./-])(?:--)?((?:{sections})\.\w+)", PAGES[page])}
    unknown = named - KEYS.keys() - NO_KEYS
    for key in unknown:
        section, name = key.split(".")
        is_file = f".{name}" in (".py", ".md", ".jsonl", ".safetensors", ".sbatch")
        assert is_file or (REPO_ROOT / section / f"{name}.py").exists(), key


@pytest.mark.parametrize(
    "router, minus, settings",
    [
        ("kern", "softmax-renorm", 24),
        ("kern", "softmax", 8),
        ("kern", "tanh", 8),
        ("kern", "sigmoid", 8),
        ("dense", "softmax-renorm", 8),
    ],
)
def test_pages_have_the_differences_of_the_records(router, minus, settings):
    """Those of the contest; each setting's balancing, and what is a pair, as the rules say."""
    runs = {}  # of each arm and setting
    for line in (REPO_ROOT / "track/records/edition-3/main.jsonl").read_text().splitlines():
        run = json.loads(line)
        runs.setdefault((run["arm"], run["setting"]), []).append(run)
    differences = []
    for setting in range(settings):
        balancing = "loss" if settings == 24 and setting % 2 == 0 else "quantile"
        names = [name if name == "dense" else f"{name}-{balancing}" for name in (router, minus)]
        arms = [runs[name, setting] for name in names]
        pairs = [(a, b) for a, b in itertools.product(*arms) if a["made"] == b["made"]]
        differences.append(pairs[0][0]["loss"] - pairs[0][1]["loss"])
    mean, error = np.mean(differences), scipy.stats.sem(differences)
    low, high = scipy.stats.t.interval(0.95, settings - 1, mean, error)
    difference = f"{mean:+.4f} [{low:+.4f}, {high:+.4f}]"
    assert f"| {router} | {minus} | {settings} | {difference} |" in PAGES["README.md"]
    if settings == 24:
        assert f"is {difference}" in " ".join(PAGES["docs/results.md"].split())
        n_lower = sum(difference < 0 for difference in differences)
        assert f"it has the lower loss at {n_lower}, " in " ".join(PAGES["README.md"].split())
