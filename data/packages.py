"""Make a corpus of source code from packages of PyPI, which anybody can make again.

    python -m data.packages config/paper_size --out FOLDER

The folder named has two requirements files of pip, train.txt and val.txt, with versions and hashes;
pip downloads those wheels and refuses other files. FOLDER gets train.jsonl.xz and val.jsonl.xz, a
file of a package each row, for `data.prepare text --source FOLDER/train.jsonl.xz --val-source
FOLDER/val.jsonl.xz`. Files are in the order of their content's hash. A file that occurs before, in
any package, is left out, and so is a validation file most of whose lines are in the training text.
"""

if not __package__:
    raise SystemExit("error: start it in the checkout's root as python -m data.packages")

import hashlib
import json
import lzma
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from common.command import build_parser, command, run_command
from common.files import write_atomic

SUFFIXES = (".py", ".pyi", ".rst", ".md")
SMALLEST, LARGEST = 200, 400_000  # bytes of a file; larger ones are tables of data
NEAR_COPY = 0.5  # share of a validation file's lines that are in the training text
LONG_LINE = 30  # characters; shorter lines are in many files
# One file per version and package, on any machine
WHEELS = ["--no-deps", "--only-binary=:all:", "--python-version=3.12", "--implementation=cp"]
for glibc in ("2_28", "2_27", "2_24", "2_17"):
    WHEELS.append(f"--platform=manylinux_{glibc}_x86_64")
WHEELS.append("--platform=manylinux2014_x86_64")


class SourceFile(NamedTuple):
    """A text file of a package."""

    digest: str  # sha256 of the content
    source: str  # package file and path within
    text: str


def download(requirements: Path, folder: Path) -> list[Path]:
    """Download the wheels of a requirements file; pip compares their hashes.

    Raises ValueError if pip fails.
    """
    words = [sys.executable, "-m", "pip", "download", "--quiet", "--require-hashes", *WHEELS]
    done = subprocess.run([*words, "--requirement", str(requirements), "--dest", str(folder)])
    if done.returncode:
        raise ValueError(f"{requirements}: pip download ended with {done.returncode}")
    return sorted(folder.glob("*.whl"))


def read_files(wheel: Path) -> Iterator[SourceFile]:
    """The text files of a wheel, of a size between SMALLEST and LARGEST."""
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            is_text = member.filename.endswith(SUFFIXES)
            if not is_text or not SMALLEST <= member.file_size <= LARGEST:
                continue
            content = archive.read(member)
            try:
                text = content.decode()
            except UnicodeDecodeError:
                continue
            digest = hashlib.sha256(content).hexdigest()
            yield SourceFile(digest, f"{wheel.name}/{member.filename}", text)


def hash_lines(text: str) -> set[int]:
    """Hashes of a text's long lines."""
    lines = (line.strip() for line in text.splitlines())
    return {hash(line) for line in lines if len(line) >= LONG_LINE}


def write_rows(path: Path, files: Sequence[SourceFile]) -> None:
    """Write rows {"text", "source"} in the order of their hashes."""
    rows = []
    for file in sorted(files):
        rows.append(json.dumps({"text": file.text, "source": file.source}, ensure_ascii=False))
    write_atomic(path, lzma.compress("".join(f"{row}\n" for row in rows).encode(), preset=7))


@command
def main(argv: Sequence[str] | None = None) -> None:
    """Download, select and write."""
    parser = build_parser("data.packages", __doc__)
    parser.add_argument("packages", type=Path, help="folder of train.txt and val.txt")
    parser.add_argument("--out", type=Path, required=True, help="folder for the corpus")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    seen: set[str] = set()
    train_lines: set[int] = set()
    for split in ("train", "val"):
        files = []
        n_duplicate = n_near_copy = 0
        with tempfile.TemporaryDirectory() as folder:
            wheels = download(args.packages / f"{split}.txt", Path(folder))
            for file in (file for wheel in wheels for file in read_files(wheel)):
                lines = hash_lines(file.text)
                if file.digest in seen:
                    n_duplicate += 1
                elif split == "val" and len(lines & train_lines) > NEAR_COPY * len(lines):
                    n_near_copy += 1
                else:
                    files.append(file)
                    if split == "train":
                        train_lines |= lines
                seen.add(file.digest)
        path = args.out / f"{split}.jsonl.xz"
        write_rows(path, files)
        size = sum(len(file.text.encode()) for file in files)
        print(
            f"{path}: {len(files):,} files of {len(wheels)} packages, {size / 1e6:.1f} MB "
            f"({path.stat().st_size / 2**20:.1f} MiB compressed); left out: {n_duplicate:,} "
            f"duplicates, {n_near_copy:,} near copies of training files",
            flush=True,
        )


if __name__ == "__main__":
    run_command(main)
