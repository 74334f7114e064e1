"""scripts.mutate: every listed fault still applies, and the verdict is right."""

import pytest

from scripts import mutate
from scripts.mutate import Fault

FAULTS = mutate.read_faults()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.folder}: {fault.name}")
def test_every_fault_applies(fault):
    text = (mutate.REPO_ROOT / fault.file).read_text()
    faulty = fault.apply_to(text)
    assert faulty != text
    compile(faulty, fault.file, "exec") if fault.file.endswith(".py") else None
    for word in fault.tests.split():
        assert not word.startswith("tests/") or (mutate.REPO_ROOT / word.split("::")[0]).is_file()


def test_names_are_unique():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project of two functions, one of them tested."""
    root = tmp_path / "project"
    (root / "tests/faults").mkdir(parents=True)
    (root / "sums.py").write_text("def add(a, b):\n    return a + b\n\n\ndef double(a):\n    return 2 * a\n")
    (root / "tests/test_it.py").write_text("from sums import add\n\n\ndef test_add():\n    assert add(2, 3) == 5\n")
    (root / "pyproject.toml").write_text("[tool.pytest.ini_options]\npythonpath = ['.']\n")
    monkeypatch.setattr(mutate, "REPO_ROOT", root)
    monkeypatch.setattr(mutate, "FAULTS", root / "tests/faults")
    monkeypatch.setattr(mutate, "LIBRARIES", ())
    mutate.subprocess.run(["git", "init", "-q"], cwd=root, check=True)

    def write(find, replace, tests="tests/test_it.py"):
        row = f"name = '{find}'\nfile = 'sums.py'\nfind = '{find}'\nreplace = '{replace}'\ntests = '{tests}'\n"
        with (root / "tests/faults/all.toml").open("a") as file:
            file.write(f"[[fault]]\n{row}")

    return write


def test_tells_caught_from_missed(project, capsys):
    project("a + b", "a - b")
    assert mutate.main([]) == 0
    project("2 * a", "3 * a")
    assert mutate.main(["all"]) == 1
    lines = capsys.readouterr().out.splitlines()[-5:]
    assert lines[:2] == ["caught  sums.py: a + b", "MISSED  sums.py: 2 * a"]
    assert lines[-1].split() == ["sums.py", "1", "2", "50%"]
    assert (mutate.REPO_ROOT / "sums.py").read_text().count("a + b") == 1  # the tree is not touched


@pytest.mark.parametrize(
    "find, tests, said",
    [("a * b", "tests/test_it.py", "occurs 0 times"), ("a + b", "tests/none.py", "none.py")],
)
def test_what_cannot_be_judged_is_an_error(project, capsys, find, tests, said):
    project(find, "0", tests)
    assert mutate.main([]) == 2
    assert said in capsys.readouterr().err


def test_tests_that_fail_anyway_are_an_error(project, capsys):
    project("a + b", "a - b")
    (mutate.REPO_ROOT / "sums.py").write_text("def add(a, b):\n    return 4 - (a + b)\n")
    assert mutate.main([]) == 2
    assert "fails without any fault" in capsys.readouterr().err


def test_a_fault_is_applied_where_it_says_only():
    fault = Fault("two", "f.py", "x", "y", "")
    with pytest.raises(ValueError, match="occurs 2 times"):
        fault.apply_to("x x")
