"""The corpora that `python -m data.prepare` knows, read from sources.toml, and the input files of each."""

import stat
import sysconfig
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from common.text import first_line
from data import DataError
from data.readers import KINDS, Input


class Hub(NamedTuple):
    """Files of one data set on the Hugging Face hub."""

    repo: str
    files: str  # a pattern, relative to the repository
    download: str
    tokens: str
    licence: str


class Source(NamedTuple):
    """A corpus; tokenizer and validation fraction are defaults."""

    about: str
    val_fraction: float  # of the documents
    tokenizer: str = "gpt2"
    hub: dict[str, Hub] = {}  # by the name that --config takes; the first is the default
    local: str = ""  # what --source takes; empty: nothing
    notes: str = ""


def read_sources() -> dict[str, Source]:
    """The corpora of sources.toml by name."""
    tables = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
    tables["text"]["about"] += f": {' '.join(KINDS)}"
    for table in tables.values():
        table["hub"] = {name: Hub(**hub) for name, hub in table.get("hub", {}).items()}
    return {name: Source(**table) for name, table in tables.items()}


SOURCES = read_sources()

# Tests are more than half of the library, and many systems ship Python without them; encodings and
# pydoc_data are generated tables; the others are installed packages.
STDLIB_SKIPS = {
    "test",
    "tests",
    "idle_test",
    "encodings",
    "pydoc_data",
    "site-packages",
    "dist-packages",
}


def stdlib_inputs(roots: Iterable[Path] = ()) -> list[Input]:
    """Every module of the running Python's standard library in the order of relative paths, or every one below `roots`.

    Raises DataError if a root is missing or has no module.
    """
    inputs = []
    for root in roots or [Path(sysconfig.get_path("stdlib"))]:
        modules = [
            path for path in root.rglob("*") if path.name.lower().endswith(".py") and path.is_file()
        ]
        if not modules:
            raise DataError(f"{root}: no .py file there: name another --roots")
        for path in sorted(modules, key=lambda path: path.relative_to(root).as_posix()):
            if roots:
                inputs.append(_input(path, root, f"{root.resolve().name}/"))
            elif STDLIB_SKIPS.isdisjoint(path.relative_to(root).parts):
                inputs.append(_input(path, root))
    return inputs


def local_inputs(paths: Iterable[Path], option: str = "--source") -> list[Input]:
    """The files named, and those below the folders named in sorted order; links are followed.

    Raises DataError, which tells to correct `option`, at a missing path, a file of unknown kind or
    a folder without files of a known kind; OSError at a folder that may not be read or a link that
    leads nowhere.
    """
    inputs = []
    for path in paths:
        if not path.exists():
            raise DataError(f"{path}: no such file or folder: correct {option}")
        if path.is_dir():
            files, root = list(_walk(path, {})), path
        else:
            files, root = [path] if path.name.lower().endswith(KINDS) else [], path.parent
        if not files:
            raise DataError(
                f"{path}: no file of a known kind ({' '.join(KINDS)}): name another {option}, or convert it"
            )
        inputs += [_input(file, root) for file in files]
    return inputs


def _walk(folder: Path, read: dict[tuple[int, int], Path]) -> Iterator[Path]:
    """The files of known kinds below `folder`, sorted by the parts of their paths.

    `read` has device and inode of the folders read so far, none of which is read again: links may
    lead back to them.
    """
    state = folder.stat()
    if read.setdefault((state.st_dev, state.st_ino), folder) != folder:
        return
    for path in sorted(folder.iterdir()):
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            yield from _walk(path, read)
        elif stat.S_ISREG(mode) and path.name.lower().endswith(KINDS):
            yield path


def _input(path: Path, root: Path, prefix: str = "") -> Input:
    return Input(str(path), prefix + path.relative_to(root).as_posix(), path.stat().st_size)


def hub_inputs(hub: Hub, revision: str | None = None) -> tuple[str, list[Input]]:
    """Files of a data set on the hub at `revision`, a commit, branch or tag; by default the newest commit.

    Returns (the commit's name, its files in sorted order). Raises DataError if the hub is
    unreachable, or has no such data set or files.
    """
    import fsspec
    from huggingface_hub import HfApi

    page = f"https://huggingface.co/datasets/{hub.repo}"
    try:
        commit = HfApi().dataset_info(hub.repo, revision=revision, timeout=30).sha
        root = f"datasets/{hub.repo}@{commit}/"
        files = fsspec.filesystem("hf").glob(root + hub.files, detail=True)
    except Exception as error:  # whatever the client libraries raise
        raise DataError(
            f"{page} is unreachable ({type(error).__name__}: {first_line(error)}). Without a network, add --source "
            f"FOLDER and fetch the files into it on another machine:\n"
            f"  hf download {hub.repo} --repo-type dataset --include '{hub.files}' --local-dir FOLDER"
        ) from error
    if not files:
        raise DataError(
            f"{page} has no files {hub.files!r} at revision {commit}: choose another --config"
        )
    return str(commit), [
        Input(f"hf://{path}", path.removeprefix(root), files[path]["size"])
        for path in sorted(files)
    ]


def describe_sources() -> str:
    """What `python -m data.prepare --list` prints."""
    lines = []
    for name, source in SOURCES.items():
        lines.append(f"{name}: {source.about}")
        for config, hub in source.hub.items():
            lines.append(f"    --config {config}: {hub.repo}, {hub.files}")
            lines.append(
                f"        download {hub.download}; {hub.tokens} tokens; licence: {hub.licence}"
            )
        lines.append(
            f"    tokenizer {source.tokenizer}, {source.val_fraction:.2%} of the documents for validation"
        )
        lines += [
            f"    {key}: {text}"
            for key, text in (("--source", source.local), ("notes", source.notes))
            if text
        ]
    return "\n".join(lines)
