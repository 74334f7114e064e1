"""The corpora of `python -m data.prepare`, which sources.toml lists, and their input files."""

import os
import sysconfig
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from common.files import check_regular, exists, is_file, is_folder
from data import DataError
from data.readers import (
    BYTE_ORDER_MARK,
    DECOMPRESS,
    JSON,
    KINDS,
    OTHER,
    TEXT,
    Input,
    is_text,
)


class Source(NamedTuple):
    """A corpus; tokenizer and validation fraction are defaults."""

    about: str
    val_fraction: float  # fraction of the documents
    tokenizer: str
    hub: dict[str, dict[str, str]] = {}  # repo, files, … by --config; the first is the default
    local: str = ""  # the files for --source; empty if there are none
    notes: str = ""


LIST = Path(__file__).with_suffix(".toml").read_text("utf-8")
SOURCES = {name: Source(**table) for name, table in tomllib.loads(LIST).items()}

# Folders of the standard library that are not read: tests, more than half of it, which many systems
# do not ship; encodings and pydoc_data, which are generated tables; installed packages.
STDLIB_SKIPS = {
    "test",
    "tests",
    "idle_test",
    "encodings",
    "pydoc_data",
    "site-packages",
    "dist-packages",
}
# files of the Hugging Face hub and of `datasets` that describe a data set
CARD_FILES = {"dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json"}


def stdlib_inputs() -> list[Input]:
    """The modules of the running Python's standard library, sorted by their relative paths."""
    root = Path(sysconfig.get_path("stdlib"))
    inputs = []
    for path in root.rglob("*"):
        is_module = path.name.lower().endswith(".py") and is_file(path)
        if is_module and STDLIB_SKIPS.isdisjoint(path.relative_to(root).parts):
            inputs.append(make_input(path, root))
    return sorted(inputs, key=lambda file: file.name)


def local_inputs(
    paths: Iterable[Path], option: str = "--source", any_text: bool = False
) -> tuple[list[Input], list[str]]:
    """The given files, and the files below the given folders in sorted order; links are followed.

    Hidden paths and cards of data sets below a folder are left out. With `any_text`, files of
    other endings are read if they are text (`is_text`).

    Returns:
        (the inputs, for each folder a line that says which files are read and which are not).

    Raises:
        DataError: its remedy names `option`. A path is missing, a file is of unknown kind, or a
            folder has no file of a known kind.
        OSError: a folder may not be read, or a link is broken.
    """
    inputs = []
    notes = []
    for path in paths:
        if not exists(path):
            raise DataError(f"{path}: no such file or folder: correct {option}")
        check_regular(path)
        in_folder = is_folder(path)
        read: Counter[str] = Counter()
        left: Counter[str] = Counter()
        for file in sorted(_walk(path)) if in_folder else [path]:
            kind = name_kind(file)
            if in_folder and file.name.startswith("."):  # such as .git
                left["hidden"] += 1
            elif in_folder and _is_card(file):
                left["cards of data sets"] += 1
            elif can_read(file, any_text):
                read[kind] += 1
                inputs.append(make_input(file, path if in_folder else path.parent))
            else:
                left[kind] += 1
        remedies = {words: None for ending, words in OTHER.items() if left[ending]}
        about_left = f"left: {'. '.join([count_names(left), *remedies])}"
        if not read:
            raise DataError(
                f"{path}: no file of a known kind ({' '.join(TEXT + JSON)}, plain or compressed, "
                f".parquet) or of UTF-8 text: name another {option}, or convert it; {about_left}"
            )
        if in_folder:
            notes.append(f"{path}: read: {count_names(read)}; {about_left}")
    return inputs, notes


def name_kind(path: Path) -> str:
    """The end of a file's name without that of a compression: `.jsonl` of `a.JSONL.gz`."""
    name = Path(path.name.lower())
    if name.suffix in DECOMPRESS:
        name = name.with_suffix("")
    return name.suffix or "without an ending"


def _walk(folder: Path) -> Iterator[Path]:
    """All files below a folder, and hidden folders without a look into them."""

    def fail(error: OSError) -> None:
        raise error

    visited = set()
    for root, folders, files in os.walk(folder, followlinks=True, onerror=fail):
        if os.path.realpath(root) in visited:  # by a link
            folders.clear()
            continue
        visited.add(os.path.realpath(root))
        hidden = [name for name in folders if name.startswith(".")]
        folders[:] = sorted(set(folders) - set(hidden))
        yield from (Path(root, name) for name in files + hidden)


def can_read(path: Path, any_text: bool) -> bool:
    """Return True if a file is of a known kind; with `any_text` also if it is text."""
    path.stat()  # a broken link is an error
    if not is_file(path) or name_kind(path) in OTHER:
        return False
    return path.name.lower().endswith(KINDS) or (any_text and is_text(path))


def _is_card(path: Path) -> bool:
    """Return True if a file of a folder describes a data set of the hub and is no text of it."""
    if path.name.lower() != "readme.md":
        return path.name.lower() in CARD_FILES
    with path.open("rb") as file:
        return file.read(6).removeprefix(BYTE_ORDER_MARK).startswith(b"---")  # the hub's header


def count_names(counts: Counter[str]) -> str:
    """Counts with their names, the most frequent first: `12 .txt, 3 .md`."""
    return ", ".join(f"{count:,} {name}" for name, count in counts.most_common()) or "none"


def make_input(path: Path, root: Path) -> Input:
    """The input for a local file; its name is the path relative to `root`."""
    return Input(str(path), path.relative_to(root).as_posix(), path.stat().st_size)


def hub_inputs(hub: dict[str, str], revision: str | None = None) -> tuple[str, list[Input]]:
    """The files of a data set on the hub at `revision`, a commit, branch or tag.

    By default at the newest commit. Returns (the commit's name, its files in sorted order). Raises
    DataError if the hub is unreachable, or has no such data set or files.
    """
    import fsspec
    from huggingface_hub import HfApi

    repo = hub["repo"]
    page = f"https://huggingface.co/datasets/{repo}"
    try:
        commit = HfApi().dataset_info(repo, revision=revision, timeout=30).sha
        root = f"datasets/{repo}@{commit}/"
        files = fsspec.filesystem("hf").glob(root + hub["files"], detail=True)
    except Exception as error:  # the client libraries raise many kinds
        reason = " ".join(str(error).split())  # the cause stands below the first line
        raise DataError(
            f"{page} cannot be read at {revision or 'its newest commit'} ({type(error).__name__}: "
            f"{reason}). If an unfinished set is of a commit that is gone, --force begins a newer "
            "one. Without a network, add --source FOLDER and fetch the files into it on another "
            "machine:\n"
            f"  hf download {repo} --repo-type dataset --include '{hub['files']}' "
            "--local-dir FOLDER"
        ) from error
    if not files:
        raise DataError(
            f"{page} has no files {hub['files']!r} at revision {commit}: choose another --config"
        )
    inputs = []
    for path in sorted(files):
        inputs.append(Input(f"hf://{path}", path.removeprefix(root), files[path]["size"]))
    return str(commit), inputs
