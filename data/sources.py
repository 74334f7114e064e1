"""The corpora that `python -m data.prepare` knows: one table, and the input files of each row.

Sizes and counts come from the corpora's own pages and scripts as stored in 2026-11 (docs/data.md names them); "~" marks
estimates from them. The hub may have changed since.
"""

import stat
import sysconfig
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


COPY = "a downloaded copy"
ODC_BY = "ODC-By 1.0, Common Crawl's terms of use"
FINEWEB = "HuggingFaceFW/fineweb-edu"
PROOF_PILE = "EleutherAI/proof-pile-2"
SHAKESPEARE = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
COMMON_PILE = "CC BY, CC BY-SA or CC0, row by row"
SOURCES = {
    "stdlib": Source(
        "the source text of the running Python's standard library",
        val_fraction=0.05,
        tokenizer="bytes",
        notes="for the quickstart; needs no network; PSF licence; --roots FOLDER: Python sources there instead, under "
        "their own licences (site-packages of a GPU image has over 100 M GPT-2 tokens)",
    ),
    "text": Source(
        f"your own files and folders of them: {' '.join(KINDS)}", val_fraction=0.05, local="files and folders"
    ),
    "shakespeare": Source(
        "nanoGPT's character-level text, 1.1 MB in one file; the last tenth is validation",
        val_fraction=0.1,
        tokenizer="bytes",
        local="input.txt",
        notes=f"for config/shakespeare.toml; a token is a character, for the text is ASCII; download it: {SHAKESPEARE}",
    ),
    "fineweb-edu": Source(
        "web pages of educational value",
        val_fraction=0.0005,
        hub={
            "sample-10BT": Hub(FINEWEB, "sample/10BT/*.parquet", "28.5 GB, 14 files", "10 B", ODC_BY),
            "sample-100BT": Hub(FINEWEB, "sample/100BT/*.parquet", "~285 GB, ~140 files", "100 B", ODC_BY),
            "sample-350BT": Hub(FINEWEB, "sample/350BT/*.parquet", "~1 TB", "350 B", ODC_BY),
            "default": Hub(FINEWEB, "data/*/*.parquet", "~5 TB", "1.3 T", ODC_BY),
        },
        local=COPY,
    ),
    "arxiv": Source(
        "LaTeX sources of arXiv papers",
        val_fraction=0.001,
        hub={
            "proof-pile-2": Hub(PROOF_PILE, "arxiv/train/*.jsonl.zst", "~24 GB, 100 files", "~28 B", "none stated"),
            "pile-sample": Hub("timaeus/pile-arxiv", "data/train-*.parquet", "2.2 GB", "~1.7 B", "none stated"),
            "common-pile": Hub("common-pile/arxiv_papers", "*.json*.gz", "~6 GB", "~5 B", COMMON_PILE),
        },
        local=COPY,
        notes="pile-sample: 8% of the ArXiv part of the Pile; common-pile: plain text, not LaTeX",
    ),
    "books3": Source(
        "196,640 books in plain text, 101 GiB, ~27 B tokens",
        val_fraction=0.001,
        local="books3.tar.gz, or a folder, or jsonl(.gz, .zst)",
        notes="withdrawn for copyright in 2023: prepared only from your own copy; pg19 is the public-domain substitute",
    ),
    "pg19": Source(
        "28,602 books of Project Gutenberg published before 1919, 10.9 GiB",
        val_fraction=0.005,
        hub={"default": Hub("emozilla/pg19", "data/train-*.parquet", "~6.5 GB, 23 files", "~3 B", "Apache-2.0")},
        local=COPY,
        notes="the texts are in the public domain; a substitute for Books3",
    ),
}

# Tests are more than half of the library, and many systems ship Python without them; encodings and pydoc_data are
# generated tables; the others are installed packages.
STDLIB_SKIPS = {"test", "tests", "idle_test", "encodings", "pydoc_data", "site-packages", "dist-packages"}


def stdlib_inputs(roots: Iterable[Path] = ()) -> list[Input]:
    """Every module of the running Python's standard library in the order of relative paths, or every one below `roots`.

    Raises DataError if a root is missing or has no module.
    """
    inputs = []
    for root in roots or [Path(sysconfig.get_path("stdlib"))]:
        modules = [path for path in root.rglob("*") if path.name.lower().endswith(".py") and path.is_file()]
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

    Raises DataError, which tells to correct `option`, at a missing path, a file of unknown kind or a folder without
    files of a known kind; OSError at a folder that may not be read or a link that leads nowhere.
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

    `read` has device and inode of the folders read so far, none of which is read again: links may lead back to them.
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

    Returns (the commit's name, its files in sorted order). Raises DataError if the hub is unreachable, or has no such
    data set or files.
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
        raise DataError(f"{page} has no files {hub.files!r} at revision {commit}: choose another --config")
    return str(commit), [Input(f"hf://{path}", path.removeprefix(root), files[path]["size"]) for path in sorted(files)]


def describe_sources() -> str:
    """What `python -m data.prepare --list` prints."""
    lines = []
    for name, source in SOURCES.items():
        lines.append(f"{name}: {source.about}")
        for config, hub in source.hub.items():
            lines.append(f"    --config {config}: {hub.repo}, {hub.files}")
            lines.append(f"        download {hub.download}; {hub.tokens} tokens; licence: {hub.licence}")
        lines.append(f"    tokenizer {source.tokenizer}, {source.val_fraction:.2%} of the documents for validation")
        lines += [f"    {key}: {text}" for key, text in (("--source", source.local), ("notes", source.notes)) if text]
    return "\n".join(lines)
