"""Imports point down: nothing below imports what stands above it. Tests that the documentation names exist."""

import ast
import re
import subprocess

from runs import REPO_ROOT

LEVELS = [  # a file may import its own level and those before
    {"common"},
    {"configure", "data", "kernels", "router", "attention", "gate_norm"},
    {"model"},
    {"runtime"},
    {"hf", "eval"},
    {"scripts", "train"},
]
LEVEL = {name: level for level, names in enumerate(LEVELS) for name in names}
SIDEWAYS = {("hf", "eval"), ("eval", "hf"), ("data", "configure"), ("kernels", "configure"), ("router", "configure")}
UP = {("runtime/preflight.py", "hf"), ("train.py", "eval")}  # only for train.init_from and eval.tasks


def test_imports_point_down():
    files = subprocess.run(["git", "ls-files", "*.py"], cwd=REPO_ROOT, capture_output=True, text=True).stdout.split()
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
    for page in [*REPO_ROOT.glob("*.md"), *REPO_ROOT.glob("docs/*.md"), *REPO_ROOT.glob("track/*.md")]:
        named |= set(re.findall(r"`(?:tests/)?(?:(test_\w+)(?:\.py)?::)?(test_\w+?)(…|\.py)?`", page.read_text()))
    assert len(named) > 40
    for file, name, end in named:
        text = tests[file] if file else "".join(tests.values())
        assert name in tests or re.search(f"def {name}{'' if end else '[(]'}", text), f"{file}::{name}"
