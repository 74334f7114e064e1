"""Compare how plain the code is with a base commit: four counts that may only fall.

    python -m tools.plain [--base COMMIT]

The counts are lines with `fmt: skip`, comprehensions inside a comprehension, literals and
conditional expressions that are splatted into a call or a display (`f(*(a, b))`), and functions
that ruff calls too complex (C901 above 10). Without --base, the base is where this branch left
origin/main, or the commit before the last. Exit code 1 if a count rose; the new places of that kind
are then printed.
"""

import ast
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from common.command import build_parser

COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
LITERALS = (ast.Tuple, ast.List, ast.Set, ast.ListComp, ast.IfExp)
COMPLEXITY = ["--select", "C901", "--config", "lint.mccabe.max-complexity=10"]
KINDS = ("fmt: skip", "nested comprehension", "splatted literal", "complex function")


def run_git(*arguments: str) -> bytes:
    """Standard output of a git command."""
    return subprocess.run(["git", *arguments], check=True, capture_output=True).stdout


def find_base() -> str:
    """The commit to compare with, by the rule in the module's docstring; "" if there is none."""
    head = run_git("rev-parse", "HEAD").decode().strip()
    for command in (["merge-base", "origin/main", "HEAD"], ["rev-parse", "--verify", "HEAD~1"]):
        answer = subprocess.run(["git", *command], capture_output=True, text=True)
        base = answer.stdout.strip()
        if answer.returncode == 0 and base != head:
            return base
    return ""


def find_places(root: Path, names: Iterable[str]) -> dict[str, list[str]]:
    """Places of each kind in the files `names` below `root`, as `FILE: line of code`."""
    places: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for name in names:
        text = (root / name).read_text(encoding="utf-8")
        lines = text.split("\n")
        for line in lines:
            if line.endswith("# fmt: skip"):
                places["fmt: skip"].append(f"{name}: {line.strip()}")
        for kind, node in find_packed_nodes(ast.parse(text)):
            places[kind].append(f"{name}: {lines[node.lineno - 1].strip()}")
    places["complex function"] = find_complex_functions(root, names)
    return places


def find_packed_nodes(tree: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Nested comprehensions and splatted literals, with their kind."""
    for node in ast.walk(tree):
        if isinstance(node, COMPREHENSIONS) and contains_comprehension(node):
            yield "nested comprehension", node
        if isinstance(node, ast.Starred) and isinstance(node.value, LITERALS):
            yield "splatted literal", node


def contains_comprehension(node: ast.AST) -> bool:
    """True if a comprehension stands below `node`."""
    inner = list(ast.walk(node))[1:]
    return any(isinstance(child, COMPREHENSIONS) for child in inner)


def find_complex_functions(root: Path, names: Iterable[str]) -> list[str]:
    """Functions of more than 10 branches in these files by ruff's C901, as `FILE: message`."""
    command = [
        sys.executable,
        "-m",
        "ruff",
        "check",
        "--isolated",
        "--no-cache",
        "--output-format",
        "concise",
    ]
    output = subprocess.run(
        [*command, *COMPLEXITY, *names], cwd=root, capture_output=True, text=True
    )
    places = []
    for line in output.stdout.splitlines():
        if "C901" in line:
            file, _, message = line.partition(":")
            places.append(f"{file}: {message.partition('C901 ')[2]}")
    return places


def main(argv: list[str]) -> int:
    """Print the counts before and after, and new places of kinds that rose."""
    parser = build_parser("tools.plain", __doc__)
    parser.add_argument("--base", default="", metavar="COMMIT", help="commit to compare with")
    base = parser.parse_args(argv).base or find_base()
    if not base:
        print("no commit to compare with: nothing is checked (a shallow clone?)")
        return 0
    listed = run_git("ls-files", "--cached", "--others", "--exclude-standard", "*.py").decode()
    after = find_places(Path(), [name for name in listed.splitlines() if Path(name).is_file()])
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["tar", "-x", "-C", folder], input=run_git("archive", base), check=True)
        names = [str(file.relative_to(folder)) for file in sorted(Path(folder).rglob("*.py"))]
        before = find_places(Path(folder), names)
    code = 0
    for kind in KINDS:
        print(f"{kind}: {len(before[kind])} at {base[:9]}, {len(after[kind])} now")
        if len(after[kind]) > len(before[kind]):
            code = 1
            print_new(before[kind], after[kind])
    return code


def print_new(before: list[str], after: list[str]) -> None:
    """Print the places whose code, whatever their file, was not there before."""
    known = {place.partition(": ")[2] for place in before}
    for place in after:
        if place.partition(": ")[2] not in known:
            print(f"  write plainly: {place}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
