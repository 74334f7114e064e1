"""Imports point down; tests that the documentation names exist; notebooks/first_run.ipynb runs in a
checkout.
"""

import ast
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from runs import REPO_ROOT

LEVELS = [  # a file may import its own level and those before
    {"common"},
    {"configure", "data", "kernels", "router", "balance", "attention", "gate_norm"},
    {"model"},
    {"runtime"},
    {"report"},
    {"eval"},
    {"hf"},
    {"scripts", "studies", "tools", "track", "train"},
]
LEVEL = {name: level for level, names in enumerate(LEVELS) for name in names}
SIDEWAYS = {
    ("data", "configure"),
    ("kernels", "configure"),
    ("router", "configure"),
    ("router", "balance"),  # exports ship router.py
}
UP = {("runtime/preflight.py", "hf")}  # only for train.init_from


def test_imports_point_down():
    files = subprocess.run(
        ["git", "ls-files", "*.py"], cwd=REPO_ROOT, capture_output=True, text=True
    ).stdout.split()
    files = [file for file in files if not file.startswith("tests/")]
    assert len(files) > 80
    for file in files:
        own = file.split("/")[0].removesuffix(".py")
        for node in ast.walk(ast.parse((REPO_ROOT / file).read_text())):
            names = [node.module] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in {str(name).split(".")[0] for name in names} & set(LEVEL):
                up = LEVEL[name] > LEVEL[own] or (own, name) in SIDEWAYS
                assert not up or (file, name) in UP, f"{file} imports {name}"


def test_the_tests_that_the_documentation_names_exist():
    """`test_file::test_name`, `test_name` or the beginning of one with an ellipsis."""
    tests = {file.stem: file.read_text() for file in (REPO_ROOT / "tests").glob("test_*.py")}
    named = set()
    for page in [
        *REPO_ROOT.glob("*.md"),
        *REPO_ROOT.glob("docs/*.md"),
        *REPO_ROOT.glob("track/*.md"),
    ]:
        named |= set(
            re.findall(
                r"`(?:tests/)?(?:(test_\w+)(?:\.py)?::)?(test_\w+?)(…|\.py)?`", page.read_text()
            )
        )
    assert len(named) > 40
    for file, name, end in named:
        text = tests[file] if file else "".join(tests.values())
        assert name in tests or re.search(f"def {name}{'' if end else '[(]'}", text), (
            f"{file}::{name}"
        )


# ---- notebooks/first_run.ipynb: from top to bottom, committed with its outputs
def outputs_of(notebook):
    return [output for cell in notebook.cells for output in cell.get("outputs", ())]


@pytest.mark.integration
def test_the_notebook_runs_in_a_checkout(tmp_path, monkeypatch):
    import nbformat  # the other tests do without
    from nbclient import NotebookClient

    def leave_out(folder, names):
        sets = [name for name in names if Path(folder, name, "meta.json").exists()]
        return {".git", ".venv", "runs", "shared", "wandb", "tests", *sets} & {*names}

    shutil.copytree(REPO_ROOT, tmp_path / "checkout", ignore=leave_out)
    notebook = nbformat.read(REPO_ROOT / "notebooks/first_run.ipynb", 4)
    committed, settings = outputs_of(notebook), notebook.cells[1]
    settings.source = settings.source.replace("STEPS = 500", "STEPS = 10")
    monkeypatch.chdir(tmp_path / "checkout/notebooks")  # where Jupyter starts it
    # raises what a cell raises
    NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    for outputs, steps in ((outputs_of(notebook), 10), (committed, 500)):
        assert sum("image/png" in output.get("data", ()) for output in outputs) == 2
        text = "".join(output.get("text", "") for output in outputs)
        assert "error" not in text and "Traceback" not in text
        assert text.count(f"finished, {steps} steps") == 2 and "undecided (1 seed)" in text
