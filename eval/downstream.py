"""Score tasks of lm-evaluation-harness, as in the paper (Sec. 4.5, table "downstream").

    pip install -r requirements/eval.txt
    python -m eval.downstream runs/NAME                        the paper's six tasks, from the hub
    python -m eval.downstream runs/NAME --tasks-dir FOLDER     from FOLDER/arc_easy.jsonl, … instead
    python -m eval.downstream runs/NAME --tasks boolq copa --num-fewshot 5
    python -m eval.downstream runs/A runs/B                    both, and B minus A in one table
    torchrun --nproc_per_node=8 -m eval.downstream runs/NAME   split across ranks

Writes results.json and table.md to runs/NAME/eval/step_…/, after each task, so that the same
command resumes after a kill. Differences of several runs from the first are paired by document,
with 95% intervals by Student's t; they say nothing of other seeds.
"""

if not __package__:
    raise SystemExit("error: start it in the checkout's root as python -m eval.downstream")

import argparse
import hashlib
import json
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from typing_extensions import TypedDict  # pydantic reads typing's from Python 3.12 on

from common.command import build_parser, command, run_command
from common.files import DamagedFile, read_json, write_atomic
from common.text import Table, markdown_table, text_table
from configure import Config
from data.bins import sha256_of
from eval.scoring import Scorer, scoring_dtype
from eval.tasks import (
    TASKS,
    PaperTask,
    TaskMetrics,
    check_tasks,
    load_tasks,
    local_file,
    score_task,
)
from eval.trained import Trained, add_device_argument, add_run_arguments, load_run
from report.compare import paired
from report.paper import find_paper_table
from runtime import RunError, checkpoint, distributed

if TYPE_CHECKING:  # lm_eval is an extra that other commands do not need
    from lm_eval.tasks import TaskManager

    from eval.harness import Adapter

METRICS = ["acc", "acc_norm", "bits_per_byte"]  # the first columns
PAPER = TASKS | {"average": PaperTask("Avg", 1 / 3)}
DIFFERENCE = "minus the first's, 95%"


class Scored(TypedDict):
    """A task, or a group of tasks, that was scored."""

    sha256: str  # of its local file
    results: dict[str, TaskMetrics]
    values: dict[str, dict[str, list[float]]]  # {task: {metric: [value of each document]}}


class Results(TypedDict):
    """What results.json must have for a later command to use it."""

    key: dict[str, Any]  # what all its results share: weights, precision, harness, documents
    tasks: dict[str, Scored]


def result_key(
    trained: Trained, dtype: torch.dtype, tasks_dir: Path | None, num_fewshot: int | None
) -> dict[str, Any]:
    """Return what all results in one file share: weights, precision, harness, documents, shots."""
    path = checkpoint.folder_of(trained.folder / "checkpoints", trained.step)
    return {
        "weights": sha256_of([checkpoint.read_manifest(path)["files"]]),
        "dtype": str(dtype).removeprefix("torch."),
        "lm_eval": version("lm_eval"),
        "source": str(tasks_dir.absolute()) if tasks_dir else "hub",
        "num_fewshot": "of the task" if num_fewshot is None else num_fewshot,
    }


def read_results(folder: Path, key: dict[str, Any]) -> dict[str, Scored]:
    """The tasks of `folder`/results.json, {name: scores}; none if it has another key."""
    try:
        results = read_json(folder / "results.json", Results)
    except FileNotFoundError:
        return {}
    except DamagedFile as error:
        print(f"warning: {error}; all tasks are evaluated again", file=sys.stderr)
        return {}
    return results["tasks"] if results["key"] == key else {}


def evaluate_tasks(
    manager: "TaskManager",
    adapter: "Adapter",
    trained: Trained,
    key: dict[str, Any],
    args: argparse.Namespace,
) -> tuple[Path, dict[str, Scored]]:
    """Score the tasks of --tasks that have no results of the same model and documents.

    Returns:
        The folder of the results, which are written after each task; and all tasks in it.
    """
    ranks = adapter.ranks
    fewshot = "" if args.num_fewshot is None else f"_{args.num_fewshot}shot"
    limit = f"_limit{args.limit}" if args.limit else ""
    folder = trained.folder / "eval" / f"{trained.label}{fewshot}{limit}"
    # rank 0 decides for all: another command may be writing
    done = distributed.gather(read_results(folder, key), ranks.control)[0]
    sha256 = {}
    for name in args.tasks:
        documents = local_file(args.tasks_dir, name).read_bytes() if args.tasks_dir else b""
        sha256[name] = hashlib.sha256(documents).hexdigest()
    todo = [name for name in args.tasks if done.get(name, {}).get("sha256") != sha256[name]]
    if not ranks.rank and len(todo) < len(args.tasks):
        names = ", ".join(name for name in args.tasks if name not in todo)
        print(f"done already: {names} ({folder}/results.json)")
    with tempfile.TemporaryDirectory() as scratch:
        for name, loaded in load_tasks(manager, todo, args.tasks_dir, scratch).items():
            if not ranks.rank:
                print(name, flush=True)
            results, values = score_task(name, loaded, adapter, args.num_fewshot, args.limit)
            if ranks.rank:
                continue
            scored = Scored(sha256=sha256[name], results=results, values=values)
            done = read_results(folder, key) | {name: scored}
            folder.mkdir(parents=True, exist_ok=True)
            report = {"run": trained.config.run.name, "step": trained.step, "key": key}
            text = json.dumps(report | {"tasks": done}) + "\n"
            write_atomic(folder / "results.json", text)
            table = markdown_table(*tabulate_results(done, trained.config))
            write_atomic(folder / "table.md", f"{table}\n")
    return folder, done


def tabulate_results(done: dict[str, Scored], config: Config) -> Table:
    """Make head and rows: scores with standard errors, chance, the paper's accuracy.

    The paper's tasks are first, then their average if all are there.
    """
    results: dict[str, TaskMetrics] = {}
    for scored in done.values():
        results |= scored["results"]
    metrics = list(METRICS)
    for key in chain(*results.values()):
        if key not in metrics and key != "documents" and "stderr" not in key:
            metrics.append(key)
    if set(TASKS) <= set(results):
        accuracies = [results[task]["acc"] for task in TASKS]
        results["average"] = {"acc": sum(accuracies) / len(TASKS)}
    model = {f"model.{key}": value for key, value in config.model.model_dump().items()}
    table = find_paper_table("downstream", model)
    paper = table.get("accuracy", {}).get(config.model.router, {})
    rows = []
    for task in sorted(results, key=[*PAPER, *results].index):
        values = results[task]
        column, chance = PAPER.get(task, ("", None))
        row = [task, str(values.get("documents") or "")]
        row += [format_metric(values, metric) for metric in metrics]
        row.append(f"{chance:.4f}" if chance else "")
        row.append(f"{paper[column] / 100:.4f}" if column in paper else "")
        rows.append(row)
    return ["task", "documents", *metrics, "chance", "paper"], rows


def format_metric(values: TaskMetrics, metric: str) -> str:
    """Format a metric with its standard error, if any; "" if the metric is missing."""
    if metric not in values:
        return ""
    error = values.get(f"{metric}_stderr")
    return f"{values[metric]:.4f}" + (f" (SE {error:.4f})" if error is not None else "")


def tabulate_differences(runs: Sequence[Path], scored: Sequence[dict[str, Scored]]) -> Table:
    """Head and rows: each metric of each task for every run, and what it is minus the first's.

    Args:
        runs: folders.
        scored: of each run, {task: scores}, for the same documents.
    """
    head = ["task", "metric", "documents", str(runs[0])]
    for run in runs[1:]:
        head += [str(run), DIFFERENCE]
    rows = []
    for name, scores in scored[0].items():
        for task, by_metric in scores["values"].items():
            for metric, first in by_metric.items():
                row = [task, metric, str(len(first)), f"{np.mean(first):.4f}"]
                for other in scored[1:]:
                    values = other[name]["values"][task][metric]
                    row += [f"{np.mean(values):.4f}", str(paired(values, first))]
                rows.append(row)
    return head, rows


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line. Raises RunError for a number out of range."""
    parser = build_parser("eval.downstream", __doc__)
    add_run_arguments(parser, several=True)
    add = parser.add_argument
    add("--tasks", nargs="+", default=list(TASKS), help="of the harness (default: the paper's six)")
    folder = "local files TASK.jsonl instead of the hub"
    add("--tasks-dir", type=Path, metavar="FOLDER", help=folder)
    add("--limit", type=int, help="documents per task, for a trial")
    add("--num-fewshot", type=int, help="examples in a prompt (default: the task's, else 0)")
    add_device_argument(parser)
    args = parser.parse_args(argv)
    if (args.num_fewshot or 0) < 0 or (args.limit is not None and args.limit < 1):
        raise RunError("--num-fewshot must be at least 0, --limit at least 1")
    return args


@command
def main(argv: Sequence[str] | None = None) -> None:
    """Evaluate all tasks, and print a table of one run or of the differences between several."""
    args = parse_arguments(argv)
    manager = check_tasks(args.tasks, args.tasks_dir)
    from eval.harness import Adapter

    models = [load_run(run, args.step, args.ema) for run in args.runs]
    device = distributed.pick_device(args.device)
    scored = []
    with distributed.process_group(device, models[0][0].config.train.timeout_minutes) as ranks:
        for trained, tokenizer in models:
            dtype = scoring_dtype(trained.config, device)
            key = result_key(trained, dtype, args.tasks_dir, args.num_fewshot)
            adapter = Adapter(Scorer(trained.model.to(ranks.device), dtype, ranks), tokenizer)
            folder, done = evaluate_tasks(manager, adapter, trained, key, args)
            trained.model.cpu()  # the device has one model at a time
            if ranks.rank:
                continue
            scored.append({name: done[name] for name in args.tasks})
            if len(models) == 1:
                print(text_table(*tabulate_results(done, trained.config)))
            print(f"\n{folder}/results.json")
    if len(scored) > 1:
        head, rows = tabulate_differences(args.runs, scored)
        print(text_table(head, rows, 2, ["task", "metric", DIFFERENCE]))


if __name__ == "__main__":
    run_command(main)
