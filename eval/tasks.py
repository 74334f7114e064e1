"""Tasks of lm-evaluation-harness: their documents, and a model's scores; for eval.downstream and for training.

Beside the harness' own metrics every task with right answers gets `bits_per_byte`: the bits that
the model needs for a document's right answer, over the bytes of that answer as it is scored, so
with the space before it; the mean over documents. It moves smoothly where accuracy does not.
"""

import difflib
import glob
import json
import logging
import math
import os
import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from common.command import require_packages
from common.text import first_line
from runtime import RunError

if TYPE_CHECKING:  # an extra that other commands do not need
    from lm_eval.tasks import TaskManager

    from eval.harness import Adapter


class Task(NamedTuple):
    """One of the paper's tasks."""

    paper: str  # its name in the paper's table
    chance: float  # the accuracy of guessing


TASKS = {
    "arc_easy": Task("ARC-E", 0.25),  # some questions of ARC have 3 or 5 answers
    "arc_challenge": Task("ARC-C", 0.25),
    "hellaswag": Task("HellaSwag", 0.25),
    "piqa": Task("PIQA", 0.5),
    "sciq": Task("SciQ", 0.25),
    "winogrande": Task("WinoGrande", 0.5),
}
FOLDERS = ("arc", "hellaswag", "piqa", "sciq", "winogrande")  # of TASKS in lm-evaluation-harness

Metrics = dict[str, Any]  # {metric: value, "documents": count} of one task


def build_task_manager(names: Iterable[str]) -> "TaskManager":
    """Index the harness' tasks: the paper's alone if `names` has no other, since all take ten seconds.

    Raises ValueError if lm-evaluation-harness is not installed.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("LOGLEVEL", "ERROR")
    require_packages("lm_eval", requirements="requirements-eval.txt")
    import lm_eval
    from lm_eval.tasks import TaskManager

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    logging.getLogger("datasets").setLevel(logging.CRITICAL)  # it also raises what it logs
    if not set(names) <= set(TASKS):
        return TaskManager()
    tasks = Path(str(lm_eval.__file__)).parent / "tasks"
    return TaskManager(include_defaults=False, include_path=[tasks / folder for folder in FOLDERS])


def check_tasks(names: Sequence[str], folder: Path | None) -> "TaskManager":
    """`build_task_manager`; RunError for an unknown task, a missing local file, or one for no single task of YAML."""
    manager = build_task_manager(names)
    for name in names:
        if name not in manager.all_tasks:
            near = difflib.get_close_matches(name, manager.all_tasks, 5)
            raise RunError(f"task {name}: no such task; nearest: {', '.join(near) or 'none'}")
        if not folder:
            continue
        if manager.task_index[name].kind.name != "TASK":
            raise RunError(
                f"task {name}: a group of tasks, or one in Python, cannot read local files; name other tasks, or leave "
                f"the folder of local files out"
            )
        if not (file := local_file(folder, name)).is_file():
            present = sorted(path.stem for path in folder.glob("*.jsonl"))
            raise RunError(
                f"{file}: missing; the folder has {', '.join(present) or 'no .jsonl file'}"
            )
    return manager


def local_file(folder: Path, name: str) -> Path:
    """The documents of a task in a folder of local files."""
    return Path(folder, f"{name}.jsonl").absolute()


def write_task_spec(
    manager: "TaskManager", name: str, folder: Path | None, scratch: str | Path
) -> str:
    """What the harness loads a task by: its name or, with local files, a new YAML file in `scratch`.

    The cache of `datasets` is in `scratch` too, as it would take a changed file of the same time
    for the old one.
    """
    if not folder:
        return name
    files = {
        "data_files": {"test": glob.escape(str(local_file(folder, name)))},
        "cache_dir": str(scratch),
    }
    spec = {
        "include": str(manager.task_index[name].yaml_path),
        "task": name,
        "dataset_path": "json",
    }
    spec |= {
        "dataset_name": None,
        "dataset_kwargs": files,
        "training_split": None,
        "validation_split": None,
    }
    path = Path(scratch, f"{name}.yaml")
    path.write_text(
        json.dumps(spec | {"test_split": "test", "fewshot_split": "test"}, ensure_ascii=False),
        "utf-8",
    )
    return str(path)


def load_tasks(
    manager: "TaskManager", names: Iterable[str], folder: Path | None, scratch: str | Path
) -> dict[str, Any]:
    """Load tasks that `check_tasks` has seen, with their documents: {name: what `score_task` takes}.

    The folder `scratch` must stay as long as they are used.

    Raises:
        RunError: documents cannot be read or downloaded, such as without a network.
    """
    import datasets

    datasets.disable_progress_bars()
    loaded = {}
    for name in names:
        try:
            with fixed_seeds():
                loaded[name] = manager.load([write_task_spec(manager, name, folder, scratch)])
        except Exception as error:
            reason = f"{type(error).__name__}: {first_line(error)}"
            if folder:
                raise RunError(
                    f"{local_file(folder, name)}: cannot be read as {name} ({reason})"
                ) from error
            raise RunError(
                f"{name} cannot be loaded from the Hugging Face hub ({reason}). To use local files, name a folder that "
                f"holds {name}.jsonl (--tasks-dir, eval.tasks_dir)"
            ) from error
        for task in loaded[name]["tasks"].values():
            add_bits_per_byte(task)
    return loaded


@contextmanager
def fixed_seeds() -> Iterator[None]:
    """Within it random numbers are those that the harness' own command would draw; after it those of before go on."""
    states = random.getstate(), np.random.get_state()
    cuda = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(cuda):
        random.seed(0)
        np.random.seed(1234)
        torch.manual_seed(1234)
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


def add_bits_per_byte(task: Any) -> None:
    """Add the metric `bits_per_byte` to a task whose answers are scored by log-likelihood; other tasks stay."""
    from lm_eval.api.metrics import mean
    from lm_eval.api.task import ConfigurableTask

    if not isinstance(task, ConfigurableTask) or task.OUTPUT_TYPE not in (
        "multiple_choice",
        "loglikelihood",
    ):
        return
    score = task.process_results

    def process_results(doc: dict, results: Any) -> dict[str, Any]:
        bits = answer_bits(task, doc, [loglikelihood for loglikelihood, _ in results])
        return score(doc, results) | ({} if bits is None else {"bits_per_byte": bits})

    task.process_results = process_results  # pyrefly: ignore[missing-attribute]
    task.aggregation()["bits_per_byte"] = mean
    task.higher_is_better()["bits_per_byte"] = False


def answer_bits(task: Any, doc: dict, loglikelihoods: list[float]) -> float | None:
    """Bits per byte of the right answer to a document, of several the least; None if the document names none.

    `task` is a ConfigurableTask of lm-evaluation-harness; the log-likelihoods, in nats, are of its
    answers in order.
    """
    target = task.doc_to_target(doc)
    if task.OUTPUT_TYPE == "loglikelihood":
        right, answers = [0], [str(target)]
    else:
        choices, delimiter = task.doc_to_choice(doc), task.config.target_delimiter
        # choices of contexts: its text names one
        named = task.doc_to_text(doc) if task.multiple_input else target
        named = [named] if isinstance(named, int | str) else [*named]
        right = [
            choices.index(one) if isinstance(one, str) and one in choices else one for one in named
        ]
        answers = [f"{delimiter}{target if task.multiple_input else choice}" for choice in choices]
    bits = [
        -loglikelihoods[i] / (math.log(2) * len(answers[i].encode()))
        for i in right
        if isinstance(i, int) and 0 <= i < len(answers) and answers[i]
    ]
    return min(bits, default=None)


def score_task(
    name: str, loaded: Any, adapter: "Adapter", num_fewshot: int = 0, limit: int | None = None
) -> dict[str, Metrics]:
    """Score a model on what `load_tasks` loaded by `name`: {task: Metrics}, on every rank.

    It may be scored again.

    Prompts have `num_fewshot` examples, unless the task says 0; of each task the first `limit`
    documents are scored.

    Raises:
        RunError: the harness cannot evaluate it.
    """
    import lm_eval
    from jinja2 import TemplateError

    for task in loaded["tasks"].values():
        if task.get_config("num_fewshot") != 0:
            task.set_config(key="num_fewshot", value=num_fewshot)
        task.set_fewshot_seed(seed=1234)  # the harness' own
    try:
        with fixed_seeds():
            # Of the lower level: lm_eval.simple_evaluate would look at the machine for seconds.
            results: Any = lm_eval.evaluate(
                adapter, loaded, limit=limit, log_samples=False, bootstrap_iters=1000
            )
    except RunError:
        raise
    # of a document that lacks a column, too
    except (ValueError, LookupError, TypeError, TemplateError) as error:
        raise RunError(
            f"{name}: lm-evaluation-harness failed ({first_line(error)}); a document may lack a column, or there "
            f"are fewer documents than --num-fewshot asks for"
        ) from error
    counts = {
        task: {"documents": count["effective"]} for task, count in results["n-samples"].items()
    }
    return {
        task: {
            key.removesuffix(",none"): value
            for key, value in values.items()
            if isinstance(value, float)
        }
        | counts.get(task, {"documents": None})
        for task, values in results["results"].items()
    }
