"""The corpora that `python -m data.prepare` knows: one table, and the list of input files behind each row.

Sizes and counts come from the corpora's own pages and scripts as stored in 2026-11 (docs/data.md names them); "~" marks
what is reckoned from them. The hub may have moved on since.
"""

import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from data import DataError
from data.readers import KINDS, Input


class Hub(NamedTuple):
    """Files of one data set on the Hugging Face hub."""

    repo: str
    files: str  # a pattern below the repository
    download: str
    tokens: str
    licence: str
    only: tuple[str, str] | None = None  # rows whose field, dots for nesting, has this value


class Source(NamedTuple):
    about: str
    tokenizer: str  # unless told otherwise
    val_fraction: float  # of the documents, unless told otherwise
    paper: str = "-"  # what the paper used
    notes: str = "-"
    text_field: str = "text"
    hub: dict[str, Hub] = {}  # by the name that --config takes; the first unless told otherwise
    local: str = ""  # what --source takes; empty: nothing


COPY = "a downloaded copy"
OWN = "files and folders"
ODC_BY = "ODC-By 1.0, Common Crawl's terms of use"
FINEWEB = "HuggingFaceFW/fineweb-edu"
SOURCES = {
    "stdlib": Source(
        about="the source text of the running Python's standard library",
        tokenizer="bytes",
        val_fraction=0.05,
        notes="for the quickstart; needs no network; PSF licence; --roots FOLDER: Python sources there instead, under "
        "licences of their own (a GPU image's site-packages holds over 100 M GPT-2 tokens)",
    ),
    "text": Source(
        about=f"your own files and folders of them: {' '.join(KINDS)}",
        tokenizer="gpt2",
        val_fraction=0.05,
        local=OWN,
    ),
    "fineweb-edu": Source(
        about="web pages of educational value",
        tokenizer="gpt2",
        val_fraction=0.0005,
        paper="50 B tokens of FineWeb-Edu, sample not named: sample-100BT holds enough to see none twice",
        local=COPY,
        hub={
            "sample-10BT": Hub(FINEWEB, "sample/10BT/*.parquet", "28.5 GB, 14 files", "10 B", ODC_BY),
            "sample-100BT": Hub(FINEWEB, "sample/100BT/*.parquet", "~285 GB, ~140 files", "100 B", ODC_BY),
            "sample-350BT": Hub(FINEWEB, "sample/350BT/*.parquet", "~1 TB", "350 B", ODC_BY),
            "default": Hub(FINEWEB, "data/*/*.parquet", "~5 TB", "1.3 T", ODC_BY),
        },
    ),
    "arxiv": Source(
        about="LaTeX sources of arXiv papers",
        tokenizer="gpt2",
        val_fraction=0.001,
        paper="`Arxiv`, not said which: the Pile's meaning, LaTeX source, is assumed",
        notes="pile: the rows of the whole Pile that are ArXiv's, each paper about twice, as the Pile has them; "
        "pile-sample: 8% of them; common-pile: plain text, not LaTeX",
        local=COPY,
        hub={
            "proof-pile-2": Hub(
                "EleutherAI/proof-pile-2", "arxiv/train/*.jsonl.zst", "~24 GB, 100 files", "~28 B", "none stated"
            ),
            "pile": Hub(
                "monology/pile-uncopyrighted",
                "train/*.jsonl.zst",
                "~330 GB, 30 files",
                "~42 B",
                "none stated",
                ("meta.pile_set_name", "ArXiv"),
            ),
            "pile-sample": Hub(
                "timaeus/pile-arxiv", "data/train-*.parquet", "2.2 GB, 10 files", "~1.7 B", "none stated"
            ),
            "common-pile": Hub(
                "common-pile/arxiv_papers", "*.json*.gz", "~6 GB", "~5 B", "CC BY, CC BY-SA or CC0, row by row"
            ),
        },
    ),
    "books3": Source(
        about="196,640 books in plain text, 101 GiB",
        tokenizer="gpt2",
        val_fraction=0.001,
        paper="Books3, ~27 B tokens",
        notes="withdrawn for copyright in 2023: prepared from your own copy alone; pg19 is the public-domain stand-in",
        local="books3.tar.gz, or a folder, or jsonl(.gz, .zst)",
    ),
    "pg19": Source(
        about="28,602 books of Project Gutenberg published before 1919, 10.9 GiB",
        tokenizer="gpt2",
        val_fraction=0.005,
        paper="- (stands in for Books3)",
        local=COPY,
        hub={
            "default": Hub(
                "emozilla/pg19",
                "data/train-*.parquet",
                "~6.5 GB, 23 files",
                "~3 B",
                "Apache-2.0; texts in the public domain",
            )
        },
    ),
}

# Tests are more than half of the library, and many systems ship Python without them;
# encodings and pydoc_data are generated tables; the rest is other people's code.
STDLIB_SKIPS = {"test", "tests", "idle_test", "encodings", "pydoc_data", "site-packages", "dist-packages"}


def stdlib_inputs(roots: Iterable[Path] = ()) -> list[Input]:
    """Every module of the running Python's standard library, in the order of their relative paths; or every one below
    the folders `roots`. Raises DataError of a root that is no folder or has none."""
    if not roots:
        root = Path(sysconfig.get_path("stdlib"))
        paths = [path for path in modules_of(root) if STDLIB_SKIPS.isdisjoint(path.relative_to(root).parts)]
        return [Input(str(path), path.relative_to(root).as_posix(), path.stat().st_size) for path in paths]
    inputs = []
    for root in roots:
        paths = [path for path in modules_of(root) if path.is_file()]
        if not paths:
            found = "no .py file in it" if root.is_dir() else "no such folder"
            raise DataError(f"{root}: {found}: name another --roots, such as {sysconfig.get_path('purelib')}")
        base = root.resolve().name
        inputs += [
            Input(str(path), f"{base}/{path.relative_to(root).as_posix()}", path.stat().st_size) for path in paths
        ]
    return inputs


def modules_of(root: Path) -> list[Path]:
    return sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix())


def local_inputs(paths: Iterable[Path]) -> list[Input]:
    """The files named, and those below the folders named in sorted order.

    Raises DataError of a path that is not there, a file of no known kind, a folder without files of a known kind.
    """
    inputs = []
    for path in paths:
        if path.is_dir():
            files = sorted(file for file in path.rglob("*") if file.name.lower().endswith(KINDS) and file.is_file())
            if not files:
                raise DataError(
                    f"{path}: no file of a known kind ({' '.join(KINDS)}) in this folder: name another --source"
                )
            inputs += [Input(str(file), file.relative_to(path).as_posix(), file.stat().st_size) for file in files]
        elif not path.is_file():
            raise DataError(f"{path}: no such file or folder: correct --source")
        elif not path.name.lower().endswith(KINDS):
            raise DataError(f"{path}: not a file of a known kind ({' '.join(KINDS)}): rename or convert it")
        else:
            inputs.append(Input(str(path), path.name, path.stat().st_size))
    return inputs


def hub_inputs(hub: Hub, revision: str | None = None) -> tuple[str, list[Input]]:
    """(revision, its files in sorted order): the commit `revision`, or the newest and what it is called.

    Raises DataError where the hub cannot be reached, or has no such data set or files.
    """
    import fsspec
    from huggingface_hub import HfApi

    page = f"https://huggingface.co/datasets/{hub.repo}"
    try:
        revision = HfApi().dataset_info(hub.repo, revision=revision, timeout=30).sha
        root = f"datasets/{hub.repo}@{revision}/"
        found = fsspec.filesystem("hf").glob(root + hub.files, detail=True)
    except Exception as error:  # whatever the client libraries raise
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        raise DataError(
            f"{page} cannot be had ({reason}). With a network, see whether the page opens; `hf auth login` and "
            f"HF_TOKEN help with limits, HF_ENDPOINT names a mirror. Without one, fetch the files elsewhere:\n"
            f"  hf download {hub.repo} --repo-type dataset --include '{hub.files}' --local-dir FOLDER\n"
            f"and add --source FOLDER to this command"
        ) from error
    if not found:
        raise DataError(f"{page} has no files {hub.files!r} at revision {revision}: choose another --config")
    return revision, [Input(f"hf://{path}", path.removeprefix(root), found[path]["size"]) for path in sorted(found)]


def table() -> str:
    """What `python -m data.prepare --list` prints."""
    lines = []
    for name, source in SOURCES.items():
        lines += [f"{name}: {source.about}"]
        for i, (config, hub) in enumerate(source.hub.items()):
            chosen = " (unless told otherwise)" if i == 0 and len(source.hub) > 1 else ""
            lines += [
                f"    --config {config}{chosen}: {hub.repo}, {hub.files}",
                f"        download {hub.download}; {hub.tokens} tokens; licence: {hub.licence}",
            ]
        lines += [f"    --source: {source.local}"] if source.local else []
        lines += [
            f"    text field {source.text_field!r}, tokenizer {source.tokenizer}, "
            f"{source.val_fraction:.2%} of the documents for validation"
        ]
        lines += [f"    paper: {source.paper}"] if source.paper != "-" else []
        lines += [f"    notes: {source.notes}"] if source.notes != "-" else []
    return "\n".join(lines)
