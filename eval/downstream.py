"""Score tasks of lm-evaluation-harness, as in the paper (Sec. 4.5, table "downstream").

    pip install -r requirements-eval.txt
    python -m eval.downstream runs/NAME                        the paper's six tasks, from the hub
    python -m eval.downstream runs/NAME --tasks-dir FOLDER     from FOLDER/arc_easy.jsonl, … instead
    python -m eval.downstream runs/NAME --tasks lambada_openai boolq --num-fewshot 5
    python -m eval.downstream runs/A runs/B                    both, and B minus A in one table
    torchrun --nproc_per_node=8 -m eval.downstream runs/NAME   split across ranks

Writes to runs/NAME/eval/step_…/: tasks/TASK.json as soon as a task is done, so that the same
command resumes after a kill; results.json and table.md at the end. Differences of several runs from
the first are paired by document, with 95% intervals by Student's t; they say nothing of other
seeds.
"""

import argparse
import hashlib
import json
import math
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from common.command import build_parser, command, run_command
from common.files import write_atomic
from common.text import Table, markdown_table, text_table
from configure import Config
from data.bins import sha256_of
from eval.scoring import Scorer, scoring_dtype
from eval.tasks import TASKS, TaskMetrics, check_tasks, load_tasks, local_file, score_task
from eval.trained import Trained, add_device_argument, add_run_arguments, load_run, set_up_device
from report.comparisons import Difference
from report.paper import find_paper_table
from runtime import RunError, checkpoint, distributed
from runtime.tracker import start_wandb

if TYPE_CHECKING:  # lm_eval is an extra that other commands do not need
    from lm_eval.tasks import TaskManager

    from eval.harness import Adapter

# {name in the code: in the table}
COLUMNS = {
    "task": "task",
    "documents": "documents",
    "acc": "acc",
    "acc_norm": "acc_norm",
    "bits_per_byte": "bits per byte",
    "chance": "chance",
    "paper": "paper",
}
DIFFERENCE = "minus the first's, 95%"


def result_key(
    run: Path, trained: Trained, dtype: torch.dtype, folder: Path | None
) -> dict[str, Any]:
    """Return what all results in one table share: weights, precision, harness, documents."""
    checkpoints = run / "checkpoints"
    steps = checkpoint.steps(checkpoints)
    stop = steps.index(trained.step) + 1
    files = []
    for step in steps[stop - trained.average : stop]:
        manifest = checkpoint.read_manifest(checkpoint.folder_of(checkpoints, step))
        files.append(manifest["files"])
    key: dict[str, Any] = {
        "weights": sha256_of(files),
        "dtype": str(dtype).removeprefix("torch."),
        "lm_eval": version("lm_eval"),
    }
    if trained.ema:
        key["ema"] = True
    key["source"] = str(folder.absolute()) if folder else "hub"
    return key


def load_task_results(folder: Path, shared: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Read `folder`/tasks: {task: {"key", "results"}}, of files whose key contains `shared`."""
    bodies = {}
    for path in sorted(folder.glob("tasks/*.json")):
        try:
            body = json.loads(path.read_text())
        except ValueError:
            print(
                f"warning: {path} cannot be read; {path.stem} is evaluated again", file=sys.stderr
            )
            continue
        if shared.items() <= body["key"].items():
            bodies[path.stem] = body
    return bodies


def evaluate_tasks(
    manager: "TaskManager",
    adapter: "Adapter",
    folder: Path,
    shared: dict[str, Any],
    args: argparse.Namespace,
) -> None:
    """Write one file in `folder`/tasks for each task of --tasks that has none with the same key.

    To compare runs, a file of earlier versions, without the values of documents, does not count.
    """
    ranks = adapter.scorer.ranks
    keys = {}
    for name in args.tasks:
        sha256 = None
        if args.tasks_dir:
            sha256 = hashlib.sha256(local_file(args.tasks_dir, name).read_bytes()).hexdigest()
        keys[name] = {**shared, "sha256": sha256}
    done = {}
    for name, body in load_task_results(folder, shared).items():
        if "values" in body or len(args.runs) == 1:
            done[name] = body["key"]
    # rank 0 decides for all: another command may be writing
    done = distributed.gather(done, ranks.control)[0]
    todo = [name for name in args.tasks if done.get(name) != keys[name]]
    if not ranks.rank and len(todo) < len(args.tasks):
        names = ", ".join(name for name in args.tasks if name not in todo)
        print(f"done already: {names} ({folder}/tasks)")
    with tempfile.TemporaryDirectory() as scratch:
        for name, loaded in load_tasks(manager, todo, args.tasks_dir, scratch).items():
            if not ranks.rank:
                print(name, flush=True)
            results = score_task(
                name, loaded, adapter, args.num_fewshot, args.limit, by_document=True
            )
            values = {task: metrics.pop("values", {}) for task, metrics in results.items()}
            if not ranks.rank:
                (folder / "tasks").mkdir(parents=True, exist_ok=True)
                body = {"key": keys[name], "results": results, "values": values}
                write_atomic(folder / "tasks" / f"{name}.json", json.dumps(body) + "\n")


def mean_accuracy(results: dict[str, TaskMetrics]) -> float | None:
    """Average the accuracy of the paper's six tasks; None if one is missing."""
    if not set(TASKS) <= set(results):
        return None
    return sum(results[task]["acc"] for task in TASKS) / len(TASKS)


def format_metric(values: TaskMetrics, metric: str) -> str:
    """Format a metric with its standard error, if any; "" if the metric is missing."""
    if metric not in values:
        return ""
    text = f"{values[metric]:.4f}"
    error = values.get(f"{metric}_stderr")
    return text if error is None else f"{text} ± {error:.4f}"


def find_paper_accuracies(config: Config) -> dict[str, str]:
    """Find the accuracies that the paper prints for the model's size and router, by task."""
    model = {f"model.{key}": value for key, value in config.model.model_dump().items()}
    printed = find_paper_table("downstream", model).get("accuracy", {}).get(config.model.router, {})
    columns = {name: task.paper for name, task in TASKS.items()}
    columns["average"] = "Avg"
    accuracies = {}
    for task, column in columns.items():
        if column in printed:
            accuracies[task] = f"{printed[column] / 100:.4f}"
    return accuracies


def tabulate_results(results: dict[str, TaskMetrics], config: Config) -> Table:
    """Make head and rows: scores with standard errors, chance, the paper's accuracy.

    Other metrics of a task have rows below it.
    """
    paper = find_paper_accuracies(config)
    rows = []

    def add_row(**cells: str) -> None:
        rows.append([cells.get(column, "") for column in COLUMNS])

    for task, values in results.items():
        add_row(
            task=task,
            documents=str(values["documents"] or ""),
            acc=format_metric(values, "acc"),
            acc_norm=format_metric(values, "acc_norm"),
            bits_per_byte=format_metric(values, "bits_per_byte"),
            chance=f"{TASKS[task].chance:.4f}" if task in TASKS else "",
            paper=paper.get(task, ""),
        )
        for key in values:
            has_column = key.startswith(("acc", "documents", "bits_per_byte"))
            if not has_column and "stderr" not in key:
                add_row(task=f"{task}: {key}", acc=format_metric(values, key))
    mean = mean_accuracy(results)
    if mean is not None:
        chance = sum(task.chance for task in TASKS.values()) / len(TASKS)
        average = paper.get("average", "")
        add_row(task="average", acc=f"{mean:.4f}", chance=f"{chance:.4f}", paper=average)
    return list(COLUMNS.values()), rows


def write_results(
    folder: Path, shared: dict[str, Any], trained: Trained, args: argparse.Namespace
) -> str:
    """Write results.json and table.md from all of `folder`/tasks; send them to wandb.

    Returns:
        The table, aligned.
    """
    config = trained.config
    by_task: dict[str, TaskMetrics] = {}
    for body in load_task_results(folder, shared).values():
        by_task.update(body["results"])
    # the paper's tasks first
    results = {task: by_task[task] for task in [*TASKS, *by_task] if task in by_task}
    report = {
        "run": config.run.name,
        "step": trained.step,
        "averaged_checkpoints": trained.average,
        "num_fewshot": args.num_fewshot,
        "limit": args.limit,
        **shared,
        "average": mean_accuracy(results),
        "results": results,
    }
    write_atomic(folder / "results.json", json.dumps(report, indent=1) + "\n")
    table = tabulate_results(results, config)
    note = ""
    if args.limit:
        note = f"\n\nOnly the first {args.limit} documents of each task (--limit)."
    write_atomic(folder / "table.md", f"{markdown_table(*table)}{note}\n")
    if config.log.wandb != "disabled":
        send_to_wandb(results, trained, args)
    return text_table(*table) + note


def send_to_wandb(
    results: dict[str, TaskMetrics], trained: Trained, args: argparse.Namespace
) -> None:
    """Add the results of a finished run's last checkpoint to its wandb run.

    Prints a line if that fails.
    """
    config = trained.config
    if args.limit or trained.mean or trained.step < config.train.max_steps:
        print("wandb: not sent; only full evaluations of a finished run's last checkpoint are")
        return
    tracker = start_wandb(config, trained.folder, trained.metadata.get("wandb"))
    if not tracker:
        return
    prefix = f"downstream{name_fewshot(args)}"
    values = {}
    for task, metrics in results.items():
        for key, value in metrics.items():
            values[f"{prefix}/{task}/{key}"] = value
    mean = mean_accuracy(results)
    if mean is not None:
        values[f"{prefix}/average"] = mean
    head, rows = tabulate_results(results, config)
    try:
        tracker.summarize(values, f"{prefix}/table", head, rows, trained.step + 1)
        tracker.finish()
    except Exception as error:  # wandb raises many kinds
        print(f"wandb: not sent ({type(error).__name__}: {error}); results.json has every number")


def compare_values(values: Sequence[float], first: Sequence[float]) -> Difference:
    """The mean of one run's values minus the first run's, paired by document, by Student's t."""
    differences = np.subtract(values, first)
    n = len(differences)
    error = float(differences.std(ddof=1)) / math.sqrt(n) if n > 1 else math.nan
    return Difference(float(differences.mean()), 1, error, n - 1.0, "documents")


def tabulate_differences(runs: Sequence[Path], bodies: Sequence[dict[str, dict]]) -> Table:
    """Head and rows: each metric of each task for every run, and what it is minus the first's.

    Args:
        runs: folders.
        bodies: of each run, {task: the contents of its file}, for the same documents.
    """
    head = ["task", "metric", "documents", str(runs[0])]
    for run in runs[1:]:
        head += [str(run), DIFFERENCE]
    rows = []
    for name, body in bodies[0].items():
        for task, by_metric in body["values"].items():
            for metric, first in by_metric.items():
                row = [task, metric, str(len(first)), f"{np.mean(first):.4f}"]
                for other in bodies[1:]:
                    values = other[name]["values"][task][metric]
                    row += [f"{np.mean(values):.4f}", str(compare_values(values, first))]
                rows.append(row)
    return head, rows


def name_fewshot(args: argparse.Namespace) -> str:
    """Name --num-fewshot in folders and wandb; "" for zero-shot."""
    return f"_{args.num_fewshot}shot" if args.num_fewshot else ""


@command
def main(argv: Sequence[str] | None = None) -> None:
    """Evaluate all tasks and write the report."""
    parser = build_parser("eval.downstream", __doc__)
    add_run_arguments(parser, several=True)
    parser.add_argument(
        "--tasks", nargs="+", default=list(TASKS), help="of the harness (default: the paper's six)"
    )
    parser.add_argument(
        "--tasks-dir", type=Path, metavar="FOLDER", help="local files TASK.jsonl instead of the hub"
    )
    parser.add_argument("--limit", type=int, help="documents per task, for a trial")
    parser.add_argument("--num-fewshot", type=int, default=0, help="(default: %(default)s)")
    add_device_argument(parser)
    args = parser.parse_args(argv)
    args.tasks = list(dict.fromkeys(args.tasks))
    if args.num_fewshot < 0 or (args.limit is not None and args.limit < 1):
        raise RunError("--num-fewshot must be at least 0, --limit at least 1")
    manager = check_tasks(args.tasks, args.tasks_dir)
    from eval.harness import Adapter

    args.runs = list(dict.fromkeys(args.runs))
    models = [load_run(run, args.step, args.average, args.ema) for run in args.runs]
    device = set_up_device(args)
    limit = f"_limit{args.limit}" if args.limit else ""
    timeout = models[0][0].config.train.timeout_minutes
    bodies = []
    with distributed.process_group(device, timeout) as ranks:
        for trained, tokenizer in models:
            folder = trained.folder / "eval" / f"{trained.label}{name_fewshot(args)}{limit}"
            dtype = scoring_dtype(trained.config, device)
            shared = result_key(trained.folder, trained, dtype, args.tasks_dir)
            adapter = Adapter(Scorer(trained.model.to(ranks.device), dtype, ranks), tokenizer)
            evaluate_tasks(manager, adapter, folder, shared, args)
            trained.model.cpu()  # the device has one model at a time
            if not ranks.rank:
                table = write_results(folder, shared, trained, args)
                if len(models) == 1:
                    print(table)
                print(f"\n{folder}/results.json")
                done = load_task_results(folder, shared)
                bodies.append({name: done[name] for name in args.tasks})
    if len(bodies) > 1:
        head, rows = tabulate_differences(args.runs, bodies)
        print(text_table(head, rows, 2, ["task", "metric", DIFFERENCE]))


if __name__ == "__main__":
    run_command(main)
