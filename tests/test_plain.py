import subprocess
from pathlib import Path

import pytest

from tools import plain

PLAIN = """\
def count(rows):
    lengths = [len(row) for row in rows]
    print(*lengths)
    return sum(lengths)
"""
PACKED = {
    "fmt: skip": "x = [1,  2]  # fmt: skip\n",
    "nested comprehension": "x = [list(a for a in row) for row in ()]\n",
    "splatted literal": "print(*(1, 2))\n",
    "complex function": "def f(x):\n"
    + "".join(f"    if x == {i}:\n        x += 1\n" for i in range(11)),
}


@pytest.fixture
def commit(tmp_path, monkeypatch):
    """Write files and commit them in a repository of their own."""
    monkeypatch.chdir(tmp_path)
    subprocess.run(["git", "init", "-q"], check=True)

    def commit(**files):
        for name, text in files.items():
            (tmp_path / f"{name}.py").write_text(text)
        author = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        subprocess.run(["git", "add", "-A"], check=True)
        subprocess.run(["git", *author, "commit", "-qm", "x"], check=True)

    return commit


@pytest.mark.parametrize("kind", PACKED)
def test_packed_code_is_refused_and_old_code_may_move(commit, capsys, kind):
    commit(a=PLAIN)
    assert plain.main([]) == 0 and "nothing is checked" in capsys.readouterr().out
    commit(a=PLAIN + PACKED[kind])
    # as on main itself, once it is pushed
    subprocess.run(["git", "update-ref", "refs/remotes/origin/main", "HEAD"], check=True)
    assert plain.main([]) == 1
    printed = capsys.readouterr().out
    assert f"{kind}: 0 at" in printed and printed.count("write plainly: a.py: ") == 1
    commit(a=PLAIN, moved=PACKED[kind])
    assert plain.main([]) == 0
    commit(moved=PLAIN)
    assert plain.main([]) == 0 and plain.main(["--base", "HEAD~2"]) == 0
    Path("new.py").write_text(PACKED[kind])  # not yet added
    assert plain.main(["--base", "HEAD"]) == 1
