"""Load and score tasks of lm-evaluation-harness, for eval.downstream and for training.

Every task with right answers has the metric `bits_per_byte` besides the harness' own: the bits that
the model needs for the right answer, over the bytes of what is scored: the answer, the space before
it and white space at the prompt's end; the mean over documents. It changes smoothly where accuracy
jumps.
"""

import glob
import json
import logging
import math
import os
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from common.command import require_packages
from common.files import is_file
from common.text import first_line
from runtime import RunError

if TYPE_CHECKING:  # lm_eval is an extra that other commands do not need
    from lm_eval.tasks import TaskManager

    from eval.harness import Adapter


class PaperTask(NamedTuple):
    """One of the paper's tasks."""

    paper: str  # name in the paper's table
    chance: float  # accuracy of guessing


TASKS = {
    "arc_easy": PaperTask("ARC-E", 0.25),  # some questions of ARC have 3 or 5 answers
    "arc_challenge": PaperTask("ARC-C", 0.25),
    "hellaswag": PaperTask("HellaSwag", 0.25),
    "piqa": PaperTask("PIQA", 0.5),
    "sciq": PaperTask("SciQ", 0.25),
    "winogrande": PaperTask("WinoGrande", 0.5),
}
# where lm-evaluation-harness has the TASKS
FOLDERS = ("arc", "hellaswag", "piqa", "sciq", "winogrande")
FEWSHOT_SEED = 1234  # the harness' own

TaskMetrics = dict[str, Any]  # {metric: value, "documents": count} of one task


def build_task_manager(names: Iterable[str]) -> "TaskManager":
    """Index the harness' tasks.

    If all `names` are in TASKS, only these are indexed: the whole index needs ten seconds. Raises
    ValueError if lm-evaluation-harness is not installed.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("LOGLEVEL", "ERROR")
    require_packages("lm_eval", requirements="requirements/eval.txt")
    import lm_eval
    from lm_eval.tasks import TaskManager

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    logging.getLogger("datasets").setLevel(logging.CRITICAL)  # it also raises what it logs
    if not set(names) <= set(TASKS):
        return TaskManager()
    tasks = Path(str(lm_eval.__file__)).parent / "tasks"
    return TaskManager(include_defaults=False, include_path=[tasks / folder for folder in FOLDERS])


def check_tasks(names: Sequence[str], folder: Path | None) -> "TaskManager":
    """Index the harness' tasks and check `names`.

    Raises RunError for an unknown task and, with a folder of local files, for a missing file or a
    task that is not defined by one YAML file.
    """
    manager = build_task_manager(names)
    for name in names:
        if name not in manager.all_tasks:
            raise RunError(f"task {name}: no such task; `lm_eval ls tasks` lists all")
        if not folder:
            continue
        if manager.task_index[name].kind.name != "TASK":
            raise RunError(
                f"task {name}: a group of tasks, or one in Python, cannot read local files; "
                f"name other tasks, or leave the folder of local files out"
            )
        file = local_file(folder, name)
        if not is_file(file):
            present = sorted(path.stem for path in folder.glob("*.jsonl"))
            files = ", ".join(present) or "no .jsonl file"
            raise RunError(f"{file}: missing; the folder has {files}")
    return manager


def local_file(folder: Path, name: str) -> Path:
    """Return the path of a task's documents in a folder of local files."""
    return Path(folder, f"{name}.jsonl").absolute()


def write_task_spec(
    manager: "TaskManager", name: str, folder: Path | None, scratch: str | Path
) -> str:
    """Return what the harness loads a task by: its name or, with local files, a new YAML file.

    The file is in `scratch`, as is the cache of `datasets`: a shared cache would mistake a changed
    file with the same time for the old one.
    """
    if not folder:
        return name
    spec = {
        "include": str(manager.task_index[name].yaml_path),
        "task": name,
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {
            "data_files": {"test": glob.escape(str(local_file(folder, name)))},
            "cache_dir": str(scratch),
        },
        "training_split": None,
        "validation_split": None,
        "test_split": "test",
        "fewshot_split": "test",
    }
    path = Path(scratch, f"{name}.yaml")
    path.write_text(json.dumps(spec, ensure_ascii=False), "utf-8")  # JSON is YAML
    return str(path)


def load_tasks(
    manager: "TaskManager", names: Iterable[str], folder: Path | None, scratch: str | Path
) -> dict[str, Any]:
    """Load tasks with their documents.

    Args:
        manager: from `check_tasks`, which has checked `names`.
        names: of the tasks.
        folder: of local files, or None for the hub.
        scratch: a folder that must exist as long as the tasks are used.

    Returns:
        {name: the argument `loaded` of `score_task`}.

    Raises:
        RunError: documents cannot be read or downloaded, such as without a network.
    """
    import datasets

    datasets.disable_progress_bars()
    loaded = {}
    for name in names:
        seed_as_harness()
        try:
            loaded[name] = manager.load([write_task_spec(manager, name, folder, scratch)])
        except Exception as error:
            reason = f"{type(error).__name__}: {first_line(error)}"
            if folder:
                raise RunError(
                    f"{local_file(folder, name)}: cannot be read as {name} ({reason})"
                ) from error
            raise RunError(
                f"{name} cannot be loaded from the Hugging Face hub ({reason}). To use local "
                f"files, name a folder that holds {name}.jsonl (--tasks-dir, eval.tasks_dir)"
            ) from error
    return loaded


def seed_as_harness() -> None:
    """Seed random numbers as the harness' own command does. Training seeds its own each step."""
    random.seed(0)
    np.random.seed(1234)
    torch.manual_seed(1234)


def count_scored_bytes(context: str, continuation: str) -> int:
    """UTF-8 bytes of the text that the harness scores.

    White space at the context's end belongs to it, see `_encode_pair` of the harness.
    """
    moved = context[len(context.rstrip()) :]
    return len((moved + continuation).encode("utf-8", "replace"))


def answer_bits(task: Any, sample: dict[str, Any]) -> float | None:
    """Compute the bits per byte of the right answer to a document.

    Args:
        task: of lm-evaluation-harness.
        sample: what the harness logs of the document.

    Returns:
        The least of all right answers; None if the document names none, or if the task's answers
        are not scored by log-likelihood.
    """
    right = sample["target"]
    choices: list[Any] = [right]
    if task.OUTPUT_TYPE == "multiple_choice":
        choices = task.doc_to_choice(sample["doc"])
        if task.multiple_input:  # choices are contexts of one answer; doc_to_text names the right
            right = task.doc_to_text(sample["doc"])
    elif task.OUTPUT_TYPE != "loglikelihood":
        return None
    bits = []
    for choice in right if isinstance(right, list) else [right]:
        index = choices.index(choice) if isinstance(choice, str) and choice in choices else choice
        if isinstance(index, int) and 0 <= index < len(choices):
            loglikelihood, _ = sample["resps"][index][0]
            size = count_scored_bytes(*sample["arguments"][index])
            bits.append(-loglikelihood / (math.log(2) * size))
    return min(bits, default=None)


def list_values(task: Any, samples: Iterable[dict[str, Any]]) -> dict[str, list[float]]:
    """The metrics of each document that are numbers, unfiltered, from the harness' samples."""
    values: dict[str, list[float]] = {}
    for sample in sorted(samples, key=lambda sample: sample["doc_id"]):
        if sample["filter"] != "none":
            continue
        metrics = {metric: sample[metric] for metric in sample["metrics"]}
        metrics["bits_per_byte"] = answer_bits(task, sample)
        for metric, value in metrics.items():
            if isinstance(value, int | float):
                values.setdefault(metric, []).append(float(value))
    return values


def score_task(
    name: str,
    loaded: Any,
    adapter: "Adapter",
    num_fewshot: int | None = None,
    limit: int | None = None,
) -> tuple[dict[str, TaskMetrics], dict[str, dict[str, list[float]]]]:
    """Score a model on a task or a group of tasks.

    Args:
        name: of the task.
        loaded: from `load_tasks`; may be scored again.
        adapter: of the model.
        num_fewshot: examples in a prompt, unless the task says 0; None: the task's own, else 0.
        limit: score the first documents of each task only.

    Returns:
        {task: metrics} and {task: {metric: [value of each document]}}, on every rank.

    Raises:
        RunError: the harness cannot evaluate it.
    """
    import lm_eval
    from jinja2 import TemplateError

    for task in loaded["tasks"].values():
        own_fewshot = task.get_config("num_fewshot")
        keeps_own = num_fewshot is None or own_fewshot == 0
        fewshot = own_fewshot or 0 if keeps_own else num_fewshot
        task.set_config(key="num_fewshot", value=fewshot)
        task.set_fewshot_seed(seed=FEWSHOT_SEED)
    seed_as_harness()
    try:
        # not lm_eval.simple_evaluate, which inspects the machine for seconds
        results: Any = lm_eval.evaluate(adapter, loaded, limit=limit, bootstrap_iters=1000)
    except RunError:
        raise
    # most often a document that lacks a column
    except (ValueError, LookupError, TypeError, TemplateError) as error:
        raise RunError(
            f"{name}: lm-evaluation-harness failed ({first_line(error)}); a document may lack a "
            f"column, or there are fewer documents than --num-fewshot asks for"
        ) from error
    scores = {}
    values = {}
    for task, metrics in results["results"].items():
        scores[task] = {
            key.removesuffix(",none"): value
            for key, value in metrics.items()
            if isinstance(value, float)
        }
        values[task] = list_values(loaded["tasks"].get(task), results["samples"].get(task, []))
        bits = values[task].get("bits_per_byte", [])
        if bits:
            scores[task]["bits_per_byte"] = float(np.mean(bits))
        if len(bits) > 1:
            scores[task]["bits_per_byte_stderr"] = float(np.std(bits, ddof=1)) / len(bits) ** 0.5
        count = results["n-samples"].get(task, {"effective": None})  # a group has no count
        scores[task]["documents"] = count["effective"]
    return scores, values
