"""data.packages: which files of which wheels become rows, counted by hand."""

import hashlib
import json
import lzma
import zipfile
from types import SimpleNamespace

from data import packages

LONG = [f"line {i} of a file that has enough characters to count" for i in range(20)]


def order_rows(files):
    """The rows of files {source: text}, in the order of their contents' hashes."""
    rows = [{"text": text, "source": source} for source, text in files.items()]
    return sorted(rows, key=lambda row: hashlib.sha256(row["text"].encode()).hexdigest())


def test_rows_of_wheels(tmp_path, monkeypatch, capsys):
    own = "\n".join(LONG)
    other = own.upper()
    near = "\n".join([*LONG[:11], *(line[::-1] for line in LONG[11:])])  # 11 of 20 lines
    far = "\n".join([*LONG[:10], *(line[::-1] for line in LONG[10:])])  # half
    wheels = {  # in place of those that pip would download
        "train/a.whl": {"x.py": own, "y.txt": own + "y", "s.py": "s"},
        "train/b.whl": {"copy.py": own, "bytes.py": b"\xff" * 400},
        "val/c.whl": {"x.md": own, "n.py": near, "f.py": far},
        "val/d.whl": {"o.rst": other, "big.py": "a\n" * 300_000, "g.py": far + "!"},
    }
    for name, files in wheels.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            for path, text in files.items():
                archive.writestr(path, text)
    monkeypatch.setattr(
        packages, "download", lambda file, _: sorted((tmp_path / file.stem).iterdir())
    )
    assert packages.main([str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    wanted = {"train": {"a.whl/x.py": own}, "val": {"c.whl/f.py": far, "d.whl/o.rst": other}}
    wanted["val"]["d.whl/g.py"] = far + "!"  # copies within validation stay
    for split, files in wanted.items():
        content = lzma.decompress((tmp_path / f"out/{split}.jsonl.xz").read_bytes())
        assert [json.loads(line) for line in content.splitlines()] == order_rows(files)
    printed = capsys.readouterr().out
    assert "1 files of 2 packages" in printed and "left out: 1 duplicates, 0 near copies" in printed
    assert "3 files of 2 packages" in printed and "left out: 1 duplicates, 1 near copies" in printed


def test_a_download_that_fails_writes_nothing(tmp_path, monkeypatch, capsys):
    failed = SimpleNamespace(returncode=1)
    monkeypatch.setattr(packages, "subprocess", SimpleNamespace(run=lambda command: failed))
    assert packages.main([str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert "train.txt: pip download ended with 1" in capsys.readouterr().err
    assert not list((tmp_path / "out").iterdir())
