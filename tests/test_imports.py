"""Imports point down: nothing below imports what stands above it."""

import ast
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
