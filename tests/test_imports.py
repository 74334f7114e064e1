"""Imports point down, and a run imports little; docs/first_run.ipynb runs in a checkout."""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter

import pytest
from runs import REPO_ROOT

LEVELS = [  # a file may import its own level and those before
    {"common"},
    {"data", "kernels", "router"},  # plain arguments, no config object
    {"balance", "configure"},
    {"attention", "gate_norm"},
    {"model"},
    {"runtime"},
    {"report"},
    {"eval"},
    {"hf"},
    {"scripts", "tools", "track", "train"},
]
LEVEL = {name: level for level, names in enumerate(LEVELS) for name in names}


def read_imports() -> dict[str, set[str]]:
    """{module: modules of the project that it imports}, also within functions."""
    command = ["git", "ls-files", "*.py", ":!tests"]
    files = {}
    for file in subprocess.check_output(command, cwd=REPO_ROOT, text=True).split():
        module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        files[module] = ast.parse((REPO_ROOT / file).read_text())
    imports = {}
    for module, tree in files.items():
        names = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    submodule = f"{node.module}.{alias.name}"
                    names.add(submodule if submodule in files else str(node.module))
        imports[module] = names & files.keys()
    return imports


def test_imports_point_down_and_have_no_circle():
    """Neither of files nor of folders; a folder's own files are one node of the second graph."""
    imports = read_imports()
    assert len(imports) > 50
    folders = {}
    for module, names in imports.items():
        package = module.split(".")[0]
        others = {name.split(".")[0] for name in names} - {package}
        folders[package] = folders.get(package, set()) | others
        if package in LEVEL:
            assert all(LEVEL[other] <= LEVEL[package] for other in others), f"{module}: {names}"
    for graph in (imports, folders):
        TopologicalSorter(graph).prepare()  # raises CycleError


# of a run; torch._dynamo takes 1.4 s of CPU, as much as torch; the others are for other commands
UNUSED = {"torch._dynamo", "torch._inductor", "triton", "datasets", "pandas", "pyarrow", "scipy"}
UNUSED |= {"transformers", "tokenizers", "tiktoken", "matplotlib", "jinja2", "wandb", "lm_eval"}


def test_a_run_and_a_report_import_only_what_they_use(tiny_file):
    """A run on one CPU with a checkpoint and evaluations, which compiles and shards nothing; torch
    is half of the memory that a report of long runs would take.
    """
    out = tiny_file.parent / "out"
    commands = {
        "import train as module": ([str(tiny_file)], "finished, 4 steps", UNUSED),
        "import report.__main__ as module": (
            [str(tiny_file.parent / "runs"), "--out", str(out)],
            f"report: {out}",
            {"torch", "wandb"},
        ),
    }
    for import_module, (arguments, said, unused) in commands.items():
        code = f"""
import gc, sys
{import_module}
module.main({arguments})
print(f"collects: {{gc.isenabled()}}", *sys.modules, sep="\\n")
"""
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, cwd=REPO_ROOT, capture_output=True, text=True)
        assert said in done.stdout, done.stdout + done.stderr
        lines = {*done.stdout.splitlines()}
        assert "collects: True" in lines and not unused & lines


# ---- docs/first_run.ipynb: from top to bottom, committed with its outputs
def outputs_of(notebook):
    return [output for cell in notebook.cells for output in cell.get("outputs", ())]


@pytest.mark.integration
def test_the_notebook_runs_in_a_checkout(tmp_path, monkeypatch):
    import nbformat  # the other tests do without
    from nbclient import NotebookClient

    copy = f"git ls-files | xargs cp --parents -t {tmp_path}"
    subprocess.run(copy, shell=True, cwd=REPO_ROOT, check=True)
    notebook = nbformat.read(REPO_ROOT / "docs/first_run.ipynb", 4)
    committed, settings = outputs_of(notebook), notebook.cells[1]
    settings.source = settings.source.replace("STEPS = 500", "STEPS = 10")
    monkeypatch.chdir(tmp_path / "docs")  # where Jupyter starts it
    # raises what a cell raises
    NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    for outputs, steps in ((outputs_of(notebook), 10), (committed, 500)):
        assert sum("image/png" in output.get("data", ()) for output in outputs) == 2
        text = "".join(output.get("text", "") for output in outputs)
        assert "error" not in text and "Traceback" not in text
        assert text.count(f"finished, {steps} steps") == 2 and "undecided (1 seed)" in text
