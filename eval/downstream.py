"""Zero-shot tasks of lm-evaluation-harness, as in the paper (Sec. 4.5, table "downstream").

    pip install -r requirements-eval.txt
    python -m eval.downstream runs/NAME                                       the paper's six tasks, from the hub
    python -m eval.downstream runs/NAME --tasks-dir FOLDER                    from FOLDER/arc_easy.jsonl, … instead
    python -m eval.downstream runs/NAME --tasks lambada_openai boolq --num-fewshot 5
    torchrun --nproc_per_node=8 -m eval.downstream runs/NAME                  split across ranks

Writes runs/NAME/eval/step_…/: tasks/TASK.json as soon as a task is done, so that the same command
resumes after a kill; results.json and table.md at the end.
"""

import argparse
import hashlib
import json
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from common.command import build_parser, command, run_command
from common.files import write_atomic
from common.text import markdown_table
from configure import Config
from data.bins import sha256_of
from eval.scoring import Scorer, scoring_dtype
from eval.tasks import TASKS, Metrics, check_tasks, load_tasks, local_file, score_task
from eval.trained import Trained, add_device_argument, add_run_arguments, load_run, pick_device
from report.paper import find_paper_table
from runtime import RunError, checkpoint, distributed
from runtime.tracker import start_wandb

if TYPE_CHECKING:  # an extra that other commands do not need
    from lm_eval.tasks import TaskManager

    from eval.harness import Adapter


def result_key(
    run: Path, trained: Trained, dtype: torch.dtype, folder: Path | None
) -> dict[str, Any]:
    """What all results in one table must share: weights, precision, harness and source of the documents."""
    steps = checkpoint.steps(run / "checkpoints")
    steps = steps[: steps.index(trained.step) + 1][-trained.average :]
    files = [
        checkpoint.read_manifest(checkpoint.folder_of(run / "checkpoints", step))["files"]
        for step in steps
    ]
    key = {
        "weights": sha256_of(files),
        "dtype": str(dtype).removeprefix("torch."),
        "lm_eval": version("lm_eval"),
    }
    key |= {"ema": True} if trained.ema else {}
    return key | {"source": str(folder.absolute()) if folder else "hub"}


def load_task_results(folder: Path, shared: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Read `folder`/tasks: {task: {"key", "results"}} of the files whose key has all of `shared`."""
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
    """Write one file in `folder`/tasks for each task of --tasks that has none with the same key."""
    ranks, keys = adapter.scorer.ranks, {name: shared | {"sha256": None} for name in args.tasks}
    for name in args.tasks if args.tasks_dir else ():
        keys[name]["sha256"] = hashlib.sha256(
            local_file(args.tasks_dir, name).read_bytes()
        ).hexdigest()
    done = {name: body["key"] for name, body in load_task_results(folder, shared).items()}
    # rank 0 decides, as another command may write meanwhile
    done = distributed.gather(done, ranks.control)[0]
    todo = [name for name in args.tasks if done.get(name) != keys[name]]
    if not ranks.rank and len(todo) < len(args.tasks):
        print(
            f"done already: {', '.join(name for name in args.tasks if name not in todo)} ({folder}/tasks)"
        )
    with tempfile.TemporaryDirectory() as scratch:
        for name, loaded in load_tasks(manager, todo, args.tasks_dir, scratch).items():
            if not ranks.rank:
                print(name, flush=True)
            results = score_task(name, loaded, adapter, args.num_fewshot, args.limit)
            if not ranks.rank:
                body = {"key": keys[name], "results": results}
                write_atomic(folder / "tasks" / f"{name}.json", json.dumps(body, indent=1) + "\n")


def mean_accuracy(results: dict[str, Metrics]) -> float | None:
    """Mean accuracy of the paper's six tasks; None unless all are there."""
    return (
        sum(results[task]["acc"] for task in TASKS) / len(TASKS)
        if set(TASKS) <= set(results)
        else None
    )


def format_metric(values: Metrics, metric: str) -> str:
    """A metric with its standard error, if any; "" for one that is not there."""
    if metric not in values:
        return ""
    error = values.get(f"{metric}_stderr")
    return f"{values[metric]:.4f}" + (f" ± {error:.4f}" if error is not None else "")


def tabulate_results(
    results: dict[str, Metrics], config: Config
) -> tuple[list[str], list[list[str]]]:
    """Head and rows: scores with standard errors, chance and the paper's accuracy; other metrics below."""
    model = {f"model.{key}": value for key, value in config.model.model_dump().items()}
    printed = find_paper_table("downstream", model).get("accuracy", {}).get(config.model.router, {})
    names = {name: task.paper for name, task in TASKS.items()} | {"average": "Avg"}
    paper = {task: f"{printed[name] / 100:.4f}" for task, name in names.items() if name in printed}
    chance = {name: f"{task.chance:.4f}" for name, task in TASKS.items()}
    rows = []
    for task, values in results.items():
        scores = [format_metric(values, key) for key in ("acc", "acc_norm", "bits_per_byte")]
        rows.append(
            [
                task,
                str(values["documents"] or ""),
                *scores,
                chance.get(task, ""),
                paper.get(task, ""),
            ]
        )
        others = [
            key for key in values if not key.startswith(("acc", "documents", "bits_per_byte"))
        ]
        others = [key for key in others if "stderr" not in key]
        rows += [
            [f"{task}: {key}", "", format_metric(values, key), "", "", "", ""] for key in others
        ]
    if (mean := mean_accuracy(results)) is not None:
        guessing = sum(task.chance for task in TASKS.values()) / len(TASKS)
        rows.append(
            ["average", "", f"{mean:.4f}", "", "", f"{guessing:.4f}", paper.get("average", "")]
        )
    return ["task", "documents", "acc", "acc_norm", "bits per byte", "chance", "paper"], rows


def write_report(
    folder: Path, shared: dict[str, Any], trained: Trained, args: argparse.Namespace
) -> None:
    """Write results.json and table.md from all files in `folder`/tasks, print the table, and send it to wandb."""
    bodies, config = load_task_results(folder, shared).values(), trained.config
    by_task = {task: values for body in bodies for task, values in body["results"].items()}
    # the paper's first
    results = {task: by_task[task] for task in [*TASKS, *by_task] if task in by_task}
    mean = mean_accuracy(results)
    about = {"run": config.run.name, "step": trained.step, "averaged_checkpoints": trained.average}
    about |= {"num_fewshot": args.num_fewshot, "limit": args.limit, **shared, "average": mean}
    write_atomic(folder / "results.json", json.dumps(about | {"results": results}, indent=1) + "\n")
    text = markdown_table(*tabulate_results(results, config))
    if args.limit:
        text += f"\n\nOnly the first {args.limit} documents of each task (--limit)."
    write_atomic(folder / "table.md", text + "\n")
    print(f"{text}\n\n{folder}/results.json")
    if config.log.wandb != "disabled":
        send_to_wandb(results, trained, args)


def send_to_wandb(results: dict[str, Metrics], trained: Trained, args: argparse.Namespace) -> None:
    """Add the results of a finished run's last checkpoint to its wandb run.

    Prints a line if that fails.
    """
    config, mean = trained.config, mean_accuracy(results)
    if args.limit or trained.mean or trained.step < config.train.max_steps:
        print("wandb: not sent; only full evaluations of a finished run's last checkpoint are")
    elif tracker := start_wandb(config, args.run, trained.metadata.get("wandb")):
        name = "downstream" + (f"_{args.num_fewshot}shot" if args.num_fewshot else "")
        values = {
            f"{name}/{task}/{key}": value
            for task in results
            for key, value in results[task].items()
        }
        values |= {} if mean is None else {f"{name}/average": mean}
        try:
            tracker.summarize(
                values, f"{name}/table", *tabulate_results(results, config), trained.step + 1
            )
            tracker.finish()
        except Exception as error:
            print(
                f"wandb: not sent ({type(error).__name__}: {error}); results.json has every number"
            )


@command
def main(argv: Sequence[str] | None = None) -> None:
    """Evaluate all tasks and write the report."""
    parser = build_parser("eval.downstream", __doc__)
    add_run_arguments(parser)
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

    trained, tokenizer = load_run(args.run, args.step, args.average, args.ema)
    device = pick_device(args)
    dtype = scoring_dtype(trained.config, device)
    name = trained.label + (f"_{args.num_fewshot}shot" if args.num_fewshot else "")
    folder = args.run / "eval" / (name + (f"_limit{args.limit}" if args.limit else ""))
    shared = result_key(args.run, trained, dtype, args.tasks_dir)
    (folder / "tasks").mkdir(parents=True, exist_ok=True)
    with distributed.process_group(device, trained.config.train.timeout_minutes) as ranks:
        adapter = Adapter(Scorer(trained.model.to(ranks.device), dtype, ranks), tokenizer)
        evaluate_tasks(manager, adapter, folder, shared, args)
    if not ranks.rank:
        write_report(folder, shared, trained, args)


if __name__ == "__main__":
    run_command(main)
