"""notebooks/first_run.ipynb: it runs from top to bottom in a checkout, and is committed with its outputs."""

import shutil
from pathlib import Path

import pytest
from runs import REPO_ROOT


def outputs_of(notebook):
    return [output for cell in notebook.cells for output in cell.get("outputs", ())]


@pytest.mark.integration
def test_the_notebook_runs_in_a_checkout(tmp_path, monkeypatch):
    import nbformat  # the other tests do without
    from nbclient import NotebookClient

    def leave_out(folder, names):
        sets = [name for name in names if Path(folder, name, "meta.json").exists()]
        return {".git", ".venv", "runs", "shared", "wandb", "tests", *sets} & {*names}

    shutil.copytree(REPO_ROOT, tmp_path / "checkout", ignore=leave_out)
    notebook = nbformat.read(REPO_ROOT / "notebooks/first_run.ipynb", 4)
    committed, settings = outputs_of(notebook), notebook.cells[1]
    settings.source = settings.source.replace("STEPS = 500", "STEPS = 10")
    monkeypatch.chdir(tmp_path / "checkout/notebooks")  # where Jupyter starts it
    NotebookClient(notebook, timeout=300, kernel_name="python3").execute()  # raises what a cell raises
    for outputs, steps in ((outputs_of(notebook), 10), (committed, 500)):
        assert sum("image/png" in output.get("data", ()) for output in outputs) == 2
        text = "".join(output.get("text", "") for output in outputs)
        assert "error" not in text and "Traceback" not in text
        assert text.count(f"finished, {steps} steps") == 2 and "undecided (1 seed)" in text
