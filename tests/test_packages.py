"""data.packages: which files of which wheels become rows, counted by hand."""

import hashlib
import json
import lzma
import zipfile
from types import SimpleNamespace

import pytest

from data import packages

LONG = [f"line {i} of a file that has enough characters to count" for i in range(20)]


def write_wheel(folder, name, files):
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / name, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)


@pytest.fixture
def wheels(tmp_path, monkeypatch):
    """Wheels in place of those that pip would download."""
    own = "\n".join(LONG)
    other = own.upper()
    near = "\n".join([*LONG[:11], *(line[::-1] for line in LONG[11:])])  # 11 of 20 lines
    far = "\n".join([*LONG[:10], *(line[::-1] for line in LONG[10:])])  # half
    train, val = tmp_path / "wheels/train", tmp_path / "wheels/val"
    write_wheel(train, "a-1-py3-none-any.whl", {"a/x.py": own, "a/y.txt": own + "y", "a/s.py": "s"})
    write_wheel(train, "b-1-py3-none-any.whl", {"b/copy.py": own, "b/bytes.py": b"\xff" * 400})
    write_wheel(val, "c-1-py3-none-any.whl", {"c/x.md": own, "c/n.py": near, "c/f.py": far})
    write_wheel(val, "d-1-py3-none-any.whl", {"d/o.rst": other, "d/big.py": "a\n" * 300_000})
    monkeypatch.setattr(
        packages,
        "download",
        lambda requirements, folder: sorted((tmp_path / "wheels" / requirements.stem).iterdir()),
    )
    return {"a/x.py": own, "c/f.py": far, "d/o.rst": other}


def read_rows(path):
    """Files by their names, which must be in the order of their hashes."""
    rows = [json.loads(line) for line in lzma.decompress(path.read_bytes()).splitlines()]
    hashes = [hashlib.sha256(row["text"].encode()).hexdigest() for row in rows]
    assert hashes == sorted(hashes)
    return {row["source"].partition("/")[2]: row["text"] for row in rows}


def test_rows_of_wheels(wheels, tmp_path, capsys):
    assert packages.main([str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    train, val = (read_rows(tmp_path / f"out/{split}.jsonl.xz") for split in ("train", "val"))
    assert train == {"a/x.py": wheels["a/x.py"]}
    assert val == {name: wheels[name] for name in ("c/f.py", "d/o.rst")}
    printed = capsys.readouterr().out
    assert "1 files of 2 packages" in printed and "left out: 1 duplicates, 0 near copies" in printed
    assert "2 files of 2 packages" in printed and "left out: 1 duplicates, 1 near copies" in printed


def test_a_download_that_fails_writes_nothing(tmp_path, monkeypatch, capsys):
    failed = SimpleNamespace(returncode=1)
    monkeypatch.setattr(packages, "subprocess", SimpleNamespace(run=lambda command: failed))
    assert packages.main([str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert "train.txt: pip download ended with 1" in capsys.readouterr().err
    assert not list((tmp_path / "out").iterdir())
