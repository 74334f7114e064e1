"""The corpora of `python -m data.prepare`, which sources.toml lists, and their input files."""

import re
import stat
import sysconfig
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from common.text import first_line
from data import DataError
from data.readers import HEAD_BYTES, KINDS, TEXT, Input, is_text


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
    val_fraction: float  # fraction of the documents
    tokenizer: str = "gpt2"
    hub: dict[str, Hub] = {}  # keys are the values of --config; the first is the default
    local: str = ""  # the files for --source; empty if there are none
    notes: str = ""


def read_sources() -> dict[str, Source]:
    """The corpora of sources.toml by name."""
    tables = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
    sources = {}
    for name, table in tables.items():
        hub = table.pop("hub", {})
        configs = {config: Hub(**values) for config, values in hub.items()}
        sources[name] = Source(**table, hub=configs)
    return sources


SOURCES = read_sources()

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
CARD_KEYS = re.compile(
    r"^(dataset_info|configs|license|pretty_name|size_categories|task_categories|task_ids"
    r"|annotations_creators|language_creators|source_datasets)\s*:",
    re.MULTILINE,
)
DATA_FILES = tuple(kind for kind in KINDS if not kind.startswith(TEXT))
BARE_TOKENS = (
    "a .bin of nanoGPT or the like: tokens without a meta.json that says which tokenizer made "
    "them. Prepare the text they were made from"
)


def stdlib_inputs(roots: Iterable[Path] = ()) -> list[Input]:
    """The modules of the running Python's standard library, or all modules below `roots`.

    They are sorted by their relative paths. Raises DataError if a root has no module.
    """
    inputs = []
    for root in roots or [Path(sysconfig.get_path("stdlib"))]:
        modules = []
        for path in root.rglob("*"):
            if path.name.lower().endswith(".py") and path.is_file():
                modules.append(path)
        if not modules:
            raise DataError(f"{root}: no .py file there: name another --roots")
        for path in sorted(modules, key=lambda path: path.relative_to(root).as_posix()):
            if roots:
                inputs.append(make_input(path, root, f"{root.resolve().name}/"))
            elif STDLIB_SKIPS.isdisjoint(path.relative_to(root).parts):
                inputs.append(make_input(path, root))
    return inputs


def local_inputs(
    paths: Iterable[Path],
    option: str = "--source",
    notes: list[str] | None = None,
    any_text: bool = False,
) -> list[Input]:
    """The given files, and the files below the given folders in sorted order; links are followed.

    Hidden paths and cards of data sets below a folder are left out. To `notes` a line for each
    folder is added: the files that are read and those that are not, by ending. With `any_text`,
    files and members of archives of other endings are read if they are text (`is_text`).

    Raises DataError, whose remedy names `option`, for a missing path, a file of unknown kind or a
    folder without files of a known kind. Raises OSError for a folder that may not be read or a
    broken link.
    """
    inputs = []
    for path in paths:
        if not path.exists():
            raise DataError(f"{path}: no such file or folder: correct {option}")
        left: Counter[str] = Counter()
        if path.is_dir():
            files = [make_input(file, path) for file in _walk(path, set(), left, any_text)]
            if notes is not None:
                notes.append(describe_folder(path, files, left))
        elif not path.is_file():
            raise DataError(
                f"{path}: a pipe, socket or device, which cannot be read twice: copy it to a file "
                f"and name that with {option}"
            )
        elif path.name.lower().endswith(KINDS) or (any_text and is_text_file(path)):
            files = [make_input(path, path.parent)]
        else:
            files = []
        if not files and (path.suffix == ".bin" or left[".bin"]):
            raise DataError(f"{path}: {BARE_TOKENS} and name it with {option}")
        if not files:
            kinds = " ".join(KINDS)
            raise DataError(
                f"{path}: no file of a known kind ({kinds}) or of UTF-8 text: "
                f"name another {option}, or convert it"
            )
        inputs += [file._replace(source=str(path), any_text=any_text) for file in files]
    return inputs


def describe_folder(path: Path, files: list[Input], left: Counter[str]) -> str:
    """The files of a folder that are read, and those that are not, by ending and count."""
    read: Counter[str] = Counter()
    for file in files:
        endings = [kind for kind in KINDS if file.name.lower().endswith(kind)]
        ending = Path(file.name).suffix.lower() or "without an ending"
        read[max(endings, key=len, default=ending)] += 1
    text = f"{path}: read: {count_names(read)}"
    return f"{text}; left: {count_names(left)}" if left else text


def is_text_file(path: Path) -> bool:
    """Return True if the content of a file is text (`is_text`)."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return is_text(path.name, file.read(HEAD_BYTES))


def count_names(counts: Counter[str]) -> str:
    """Counts with their names, the most frequent first: `12 .txt, 3 .md`."""
    return ", ".join(f"{count:,} {name}" for name, count in counts.most_common()) or "none"


def _is_card(path: Path) -> bool:
    """Return True if a file of a folder describes a data set and is no text of it."""
    name = path.name.lower()
    if name in CARD_FILES:
        return True
    if name != "readme.md":
        return False
    if any(other.name.lower().endswith(DATA_FILES) for other in path.parent.iterdir()):
        return True
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES).decode("utf-8", "replace")
    front_matter = re.match(r"---\r?\n(.*?)\n---", head.removeprefix("\ufeff"), re.DOTALL)
    return bool(front_matter and CARD_KEYS.search(front_matter[1]))


def _walk(
    folder: Path, visited: set[tuple[int, int]], left: Counter[str], any_text: bool
) -> Iterator[Path]:
    """The files of `local_inputs` below `folder`, sorted by the parts of their paths.

    `left` counts the others by their endings, and hidden paths without a look into them. `visited`
    has device and inode of all folders read so far; a link to one of them is skipped.
    """
    state = folder.stat()
    identity = (state.st_dev, state.st_ino)
    if identity in visited:
        return
    visited.add(identity)
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):  # such as .git, .cache and .ipynb_checkpoints
            left["hidden"] += 1
            continue
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            yield from _walk(path, visited, left, any_text)
            continue
        is_known = path.name.lower().endswith(KINDS) or (any_text and is_text_file(path))
        if not stat.S_ISREG(mode) or not is_known:
            left[path.suffix.lower() or "without an ending"] += 1
        elif _is_card(path):
            left["cards of data sets"] += 1
        else:
            yield path


def make_input(path: Path, root: Path, prefix: str = "") -> Input:
    """The input for a local file; its name is `prefix` and the path relative to `root`."""
    return Input(str(path), prefix + path.relative_to(root).as_posix(), path.stat().st_size)


def hub_inputs(hub: Hub, revision: str | None = None) -> tuple[str, list[Input]]:
    """The files of a data set on the hub at `revision`, a commit, branch or tag.

    By default at the newest commit. Returns (the commit's name, its files in sorted order). Raises
    DataError if the hub is unreachable, or has no such data set or files.
    """
    import fsspec
    from huggingface_hub import HfApi

    page = f"https://huggingface.co/datasets/{hub.repo}"
    try:
        commit = HfApi().dataset_info(hub.repo, revision=revision, timeout=30).sha
        root = f"datasets/{hub.repo}@{commit}/"
        files = fsspec.filesystem("hf").glob(root + hub.files, detail=True)
    except Exception as error:  # the client libraries raise many kinds
        command = f"hf download {hub.repo} --repo-type dataset --include '{hub.files}'"
        raise DataError(
            f"{page} is unreachable ({type(error).__name__}: {first_line(error)}). "
            f"Without a network, add --source FOLDER and fetch the files into it on another "
            f"machine:\n  {command} --local-dir FOLDER"
        ) from error
    if not files:
        raise DataError(
            f"{page} has no files {hub.files!r} at revision {commit}: choose another --config"
        )
    inputs = []
    for path in sorted(files):
        inputs.append(Input(f"hf://{path}", path.removeprefix(root), files[path]["size"]))
    return str(commit), inputs


def describe_sources() -> str:
    """The text of `python -m data.prepare --list`: all corpora."""
    lines = []
    for name, source in SOURCES.items():
        lines.append(f"{name}: {source.about}")
        for config, hub in source.hub.items():
            size = f"download {hub.download}; {hub.tokens} tokens"
            lines.append(f"    --config {config}: {hub.repo}, {hub.files}")
            lines.append(f"        {size}; licence: {hub.licence}")
        share = f"{source.val_fraction:.2%} of the documents for validation"
        lines.append(f"    tokenizer {source.tokenizer}, {share}")
        if source.local:
            lines.append(f"    --source: {source.local}")
        if source.notes:
            lines.append(f"    notes: {source.notes}")
    return "\n".join(lines)
