"""Zero-shot tasks of lm-evaluation-harness, as in the paper (Sec. 4.5, table "downstream").

    pip install -r requirements-eval.txt
    python -m eval.downstream runs/NAME                                       the paper's six tasks, from the hub
    python -m eval.downstream runs/NAME --tasks-dir FOLDER                    from FOLDER/arc_easy.jsonl, … instead
    python -m eval.downstream runs/NAME --tasks lambada_openai gsm8k --num-fewshot 5
    torchrun --nproc_per_node=8 -m eval.downstream runs/NAME                  split across ranks

Writes runs/NAME/eval/step_…/: tasks/TASK.json as soon as a task is done, so that the same command resumes after a kill;
results.json and table.md at the end.
"""

import argparse
import difflib
import glob
import hashlib
import json
import logging
import os
import sys
import tempfile
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from configure import Config
from data.bins import sha256_of
from eval.pages import format_markdown
from eval.paper import find_paper_table
from eval.trained import Trained, add_run_arguments, load_run
from runtime import RunError, checkpoint, describe_write_errors, distributed
from runtime.output import first_line, require_packages, write_atomic
from runtime.tracker import start_wandb

if TYPE_CHECKING:  # an extra that other commands do not need
    from lm_eval.tasks import TaskManager

    from eval.harness import Adapter


class Task(NamedTuple):
    """One of the paper's tasks."""

    paper: str  # its name in the paper's table
    chance: float  # the accuracy of guessing
    columns: str  # of a document on the hub


TASKS = {
    "arc_easy": Task("ARC-E", 0.25, "question choices answerKey"),  # some questions of ARC have 3 or 5 answers
    "arc_challenge": Task("ARC-C", 0.25, "question choices answerKey"),
    "hellaswag": Task("HellaSwag", 0.25, "activity_label ctx_a ctx_b endings label"),
    "piqa": Task("PIQA", 0.5, "goal sol1 sol2 label"),
    "sciq": Task("SciQ", 0.25, "support question distractor1 distractor2 distractor3 correct_answer"),
    "winogrande": Task("WinoGrande", 0.5, "sentence option1 option2 answer"),
}
FOLDERS = ("arc", "hellaswag", "piqa", "sciq", "winogrande")  # of TASKS in lm-evaluation-harness

Metrics = dict[str, Any]  # {metric: value, "documents": count} of one task


# ---- tasks and their documents


def build_task_manager(names: Iterable[str]) -> "TaskManager":
    """Index the harness' tasks: the paper's alone if `names` has no other, since all take ten seconds.

    Raises:
        ValueError: lm-evaluation-harness is not installed.
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


def check_tasks(manager: "TaskManager", names: Iterable[str], folder: Path | None) -> None:
    """Raise RunError for an unknown task, or a local file that is missing or lacks columns."""
    for name in names:
        if name not in manager.all_tasks:
            near = difflib.get_close_matches(name, manager.all_tasks, 5)
            raise RunError(f"--tasks {name}: no such task; nearest: {', '.join(near) or 'none'}")
        if not folder:
            continue
        if name not in manager.all_subtasks:
            raise RunError(f"--tasks {name}: a group of tasks; with --tasks-dir name its tasks one by one")
        if manager.task_index[name].kind.name != "TASK":
            raise RunError(f"--tasks {name}: a task in Python cannot read local files; run it without --tasks-dir")
        file = local_file(folder, name)
        if not file.is_file():
            found = sorted(path.stem for path in Path(folder).glob("*.jsonl"))
            raise RunError(f"{file}: missing; --tasks-dir {folder} has {', '.join(found) or 'no .jsonl file'}")
        try:
            with file.open() as lines:
                columns = list(json.loads(next(lines, "null")))
        except (ValueError, TypeError, OSError) as error:
            raise RunError(f"{file}: not JSON lines, one object per line ({error})") from error
        wanted = TASKS[name].columns.split() if name in TASKS else []
        if missing := set(wanted) - set(columns):
            raise RunError(
                f"{file}: no {', '.join(sorted(missing))} in its first line, which has {', '.join(columns)}; add what "
                f"is missing"
            )


def local_file(folder: Path, name: str) -> Path:
    """The documents of a task in --tasks-dir."""
    return Path(folder, f"{name}.jsonl").absolute()


def write_task_spec(manager: "TaskManager", name: str, folder: Path | None, scratch: str | Path) -> str:
    """What the harness loads a task by: its name or, with local files, a new YAML file in `scratch`.

    The cache of `datasets` is in `scratch` too, as it would take a changed file of the same time for the old one.
    """
    if not folder:
        return name
    files = {"data_files": {"test": glob.escape(str(local_file(folder, name)))}, "cache_dir": str(scratch)}
    spec = {"include": str(manager.task_index[name].yaml_path), "task": name, "dataset_path": "json"}
    spec |= {"dataset_name": None, "dataset_kwargs": files, "training_split": None, "validation_split": None}
    path = Path(scratch, f"{name}.yaml")
    path.write_text(json.dumps(spec | {"test_split": "test", "fewshot_split": "test"}, ensure_ascii=False), "utf-8")
    return str(path)


def load_documents(manager: "TaskManager", specs: dict[str, str], folder: Path | None) -> None:
    """Read or download the documents of {task: spec}. Raises RunError if that fails, such as without a network."""
    import datasets

    datasets.disable_progress_bars()
    for name, spec in specs.items():
        try:
            manager.load([spec])
        except ImportError as error:
            raise RunError(f"{name} needs a package that is not installed: pip install {error.name}") from error
        except Exception as error:
            reason = f"{type(error).__name__}: {first_line(error)}"
            if folder:
                raise RunError(f"{local_file(folder, name)}: cannot be read as {name} ({reason})") from error
            raise RunError(
                f"{name}: its documents cannot be downloaded from the Hugging Face hub ({reason}). To use local files: "
                f"--tasks-dir FOLDER, which holds {name}.jsonl"
            ) from error


# ---- evaluation


def result_key(run: Path, trained: Trained, dtype: torch.dtype, folder: Path | None) -> dict[str, Any]:
    """What all results in one table must share: weights, precision, harness and source of the documents."""
    steps = checkpoint.steps(run / "checkpoints")
    steps = steps[: steps.index(trained.step) + 1][-trained.average :]
    files = [checkpoint.read_manifest(checkpoint.folder_of(run / "checkpoints", step))["files"] for step in steps]
    key = {"weights": sha256_of(files), "dtype": str(dtype).removeprefix("torch."), "lm_eval": version("lm_eval")}
    key |= {"ema": True} if trained.ema else {}
    return key | {"source": str(folder.absolute()) if folder else "hub"}


def load_task_results(folder: Path, shared: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Read `folder`/tasks: {task: {"key", "results"}} of the files whose key has all of `shared`."""
    found = {}
    for path in sorted(folder.glob("tasks/*.json")):
        try:
            body = json.loads(path.read_text())
            if shared.items() <= body["key"].items() and isinstance(body["results"], dict):
                found[path.stem] = body
        except (ValueError, KeyError, AttributeError, OSError):
            print(f"warning: {path} cannot be read; {path.stem} is evaluated again", file=sys.stderr)
    return found


def evaluate_task(
    manager: "TaskManager", adapter: "Adapter", spec: str, args: argparse.Namespace
) -> dict[str, Metrics] | None:
    """Evaluate a task or a group of tasks. Returns {task: Metrics}, on rank 0 only.

    Raises:
        RunError: the harness cannot evaluate it.
    """
    import lm_eval

    try:
        results = lm_eval.simple_evaluate(
            adapter, tasks=[spec], num_fewshot=args.num_fewshot, limit=args.limit, task_manager=manager,
            log_samples=False, bootstrap_iters=1000,
        )  # fmt: skip
    except RunError:
        raise
    except ValueError as error:
        few = ", or lower --num-fewshot" if args.num_fewshot else ""
        raise RunError(
            f"{Path(spec).stem}: lm-evaluation-harness failed ({error}); see the task's files{few}"
        ) from error
    if results is None:
        return None
    counts = {task: {"documents": count["effective"]} for task, count in results["n-samples"].items()}
    return {
        task: {key.removesuffix(",none"): value for key, value in values.items() if isinstance(value, float)}
        | counts.get(task, {"documents": None})
        for task, values in results["results"].items()
    }


def evaluate_tasks(
    manager: "TaskManager", adapter: "Adapter", folder: Path, shared: dict[str, Any], args: argparse.Namespace
) -> None:
    """Write one file in `folder`/tasks for each task of --tasks that has none with the same key."""
    ranks, keys = adapter.scorer.ranks, {}
    for name in args.tasks:
        data = local_file(args.tasks_dir, name).read_bytes() if args.tasks_dir else b""
        keys[name] = shared | {"sha256": hashlib.sha256(data).hexdigest() if data else None}
    done = {name: body["key"] for name, body in load_task_results(folder, shared).items()}
    done = distributed.gather(done, ranks.control)[0]  # rank 0 decides, as another command may write meanwhile
    todo = [name for name in args.tasks if done.get(name) != keys[name]]
    if not ranks.rank and len(todo) < len(args.tasks):
        print(f"done already: {', '.join(name for name in args.tasks if name not in todo)} ({folder}/tasks)")
    with tempfile.TemporaryDirectory() as scratch:
        specs = {name: write_task_spec(manager, name, args.tasks_dir, scratch) for name in todo}
        load_documents(manager, specs, args.tasks_dir)
        for name, spec in specs.items():
            if not ranks.rank:
                print(name, flush=True)
            found = evaluate_task(manager, adapter, spec, args)
            if not ranks.rank:
                write_result(folder / "tasks" / f"{name}.json", {"key": keys[name], "results": found})


# ---- report


def paper_accuracies(config: Config) -> dict[str, float]:
    """The paper's {task: accuracy}, with "average", for the run's router and width; {} if it has none."""
    values = {f"model.{key}": value for key, value in config.model.model_dump().items()}
    printed = find_paper_table("downstream", values).get("accuracy", {}).get(config.model.router, {})
    names = {name: task.paper for name, task in TASKS.items()} | {"average": "Avg"}
    return {task: printed[name] / 100 for task, name in names.items() if name in printed}


def mean_accuracy(results: dict[str, Metrics]) -> float | None:
    """Mean accuracy of the paper's six tasks; None unless all are there."""
    return sum(results[task]["acc"] for task in TASKS) / len(TASKS) if set(TASKS) <= set(results) else None


def format_metric(values: Metrics, metric: str) -> str:
    """A metric with its standard error, if any; "" for one that is not there."""
    if metric not in values:
        return ""
    name, comma, rest = metric.partition(",")  # "exact_match,strict-match": a filter after the comma
    error = values.get(f"{name}_stderr{comma}{rest}")
    return f"{values[metric]:.4f}" + (f" ± {error:.4f}" if error is not None else "")


def tabulate_results(results: dict[str, Metrics], config: Config) -> tuple[list[str], list[list[str]]]:
    """Head and rows: accuracies with standard errors, chance and the paper's accuracy; other metrics below."""
    paper = {task: f"{value:.4f}" for task, value in paper_accuracies(config).items()}
    chance = {name: f"{task.chance:.4f}" for name, task in TASKS.items()}
    rows = []
    for task, values in results.items():
        accuracies = [format_metric(values, "acc"), format_metric(values, "acc_norm")]
        rows.append([task, str(values["documents"] or ""), *accuracies, chance.get(task, ""), paper.get(task, "")])
        others = [key for key in values if key.split("_")[0] not in ("acc", "documents") and "stderr" not in key]
        rows += [[f"{task}: {key}", "", format_metric(values, key), "", "", ""] for key in others]
    if (mean := mean_accuracy(results)) is not None:
        guessing = sum(task.chance for task in TASKS.values()) / len(TASKS)
        rows.append(["average", "", f"{mean:.4f}", "", f"{guessing:.4f}", paper.get("average", "")])
    return ["task", "documents", "acc", "acc_norm", "chance", "paper"], rows


def write_result(path: Path, content: str | dict) -> None:
    """Write a text, or a dict as JSON. Raises RunError if that fails."""
    text = content if isinstance(content, str) else json.dumps(content, indent=1)
    with describe_write_errors(path):
        write_atomic(path, text + "\n")


def write_report(folder: Path, shared: dict[str, Any], trained: Trained, args: argparse.Namespace) -> None:
    """Write results.json and table.md from all files in `folder`/tasks, print the table, and send it to wandb."""
    bodies, config = load_task_results(folder, shared).values(), trained.config
    found = {task: values for body in bodies for task, values in body["results"].items()}
    results = {task: found[task] for task in [*TASKS, *found] if task in found}  # the paper's first
    mean = mean_accuracy(results)
    about = {"run": config.run.name, "step": trained.step, "averaged_checkpoints": trained.average}
    about |= {"num_fewshot": args.num_fewshot, "limit": args.limit, **shared, "average": mean}
    write_result(folder / "results.json", about | {"results": results})
    text = format_markdown("table", *tabulate_results(results, config))
    if not paper_accuracies(config):
        text += f"\n\nThe paper has no accuracies for router {config.model.router} at width {config.model.n_embd}."
    if args.limit:
        text += f"\n\nOnly the first {args.limit} documents of each task (--limit)."
    if args.num_fewshot and args.tasks_dir:
        text += "\n\nExamples in the prompts are other documents of the same files."
    write_result(folder / "table.md", text)
    print(f"{text}\n\n{folder}/results.json")
    if config.log.wandb != "disabled":
        send_to_wandb(results, trained, args)


def send_to_wandb(results: dict[str, Metrics], trained: Trained, args: argparse.Namespace) -> None:
    """Add the results of a finished run's last checkpoint to its wandb run. Prints a line if that fails."""
    config, mean = trained.config, mean_accuracy(results)
    if args.limit or trained.mean or trained.step < config.train.max_steps:
        print("wandb: not sent; only full evaluations of a finished run's last checkpoint are")
    elif tracker := start_wandb(config, args.run, trained.metadata.get("wandb")):
        name = "downstream" + (f"_{args.num_fewshot}shot" if args.num_fewshot else "")
        values = {f"{name}/{task}/{key}": value for task in results for key, value in results[task].items()}
        values |= {} if mean is None else {f"{name}/average": mean}
        try:
            tracker.summarize(values, f"{name}/table", *tabulate_results(results, config), trained.step + 1)
            tracker.finish()
        except Exception as error:
            print(f"wandb: not sent ({type(error).__name__}: {error}); results.json has every number")


# ---- the command


def evaluate_run(args: argparse.Namespace) -> None:
    """Evaluate all tasks and write the report. Raises ValueError."""
    if args.num_fewshot < 0 or (args.limit is not None and args.limit < 1):
        raise RunError("--num-fewshot must be at least 0, --limit at least 1")
    manager = build_task_manager(args.tasks)
    from eval.harness import Adapter
    from eval.scoring import Scorer

    check_tasks(manager, args.tasks, args.tasks_dir)
    trained, tokenizer = load_run(args.run, args.step, args.average, args.ema)
    device = distributed.pick_device(args.device)
    dtype = torch.float32
    if device.type == "cuda":
        dtype = distributed.pick_dtype(trained.config.train.dtype, device, trained.config.model.router)
    name = trained.label + (f"_{args.num_fewshot}shot" if args.num_fewshot else "")
    folder = args.run / "eval" / (name + (f"_limit{args.limit}" if args.limit else ""))
    shared = result_key(args.run, trained, dtype, args.tasks_dir)
    with describe_write_errors(folder):
        (folder / "tasks").mkdir(parents=True, exist_ok=True)
    with distributed.process_group(device, trained.config.train.timeout_minutes) as ranks:
        adapter = Adapter(Scorer(trained.model.to(ranks.device), dtype, ranks), tokenizer)
        evaluate_tasks(manager, adapter, folder, shared, args)
    if not ranks.rank:
        write_report(folder, shared, trained, args)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m eval.downstream", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add_run_arguments(parser)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), help="of the harness (default: the paper's six)")
    parser.add_argument("--tasks-dir", type=Path, metavar="FOLDER", help="local files TASK.jsonl instead of the hub")
    parser.add_argument("--limit", type=int, help="documents per task, for a trial")
    parser.add_argument("--num-fewshot", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="(default: %(default)s)")
    args = parser.parse_args(argv)
    args.tasks = list(dict.fromkeys(args.tasks))
    try:
        evaluate_run(args)
    except ValueError as error:  # RunError, DataError, ConfigError
        if "0" in (os.environ.get("RANK", "0"), os.environ.get("LOCAL_RANK")):  # once per node: one may lack the run
            print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
