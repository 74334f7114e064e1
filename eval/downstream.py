"""Zero-shot tasks of lm-evaluation-harness, as in the paper (Sec. 4.5, table "downstream").

    pip install -r requirements-eval.txt
    python -m eval.downstream runs/NAME                                       the paper's six tasks, from the hub
    python -m eval.downstream runs/NAME --tasks-dir FOLDER                    the same from FOLDER/arc_easy.jsonl, …
    python -m eval.downstream runs/NAME --tasks lambada_openai gsm8k --num-fewshot 5
    torchrun --nproc_per_node=8 -m eval.downstream runs/NAME                  the ranks share the work

Writes runs/NAME/eval/step_…/: tasks/TASK.json as soon as a task is done, so that the same command goes on after a kill;
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
from importlib.metadata import version
from pathlib import Path

import torch

from data.bins import sha256_of
from eval.pages import markdown
from eval.paper import find_paper_table
from eval.trained import add_run_arguments, load_run
from runtime import RunError, checkpoint, distributed, writing
from runtime.tracker import start_wandb

TASKS = ("arc_easy", "arc_challenge", "hellaswag", "piqa", "sciq", "winogrande")
PAPER = dict(zip(TASKS, ("ARC-E", "ARC-C", "HellaSwag", "PIQA", "SciQ", "WinoGrande"), strict=True))
CHANCE = dict(zip(TASKS, (0.25, 0.25, 0.25, 0.5, 0.25, 0.5), strict=True))  # some questions of ARC have 3 or 5 answers
COLUMNS = {
    "arc_easy": {"question", "choices", "answerKey"},
    "arc_challenge": {"question", "choices", "answerKey"},
    "hellaswag": {"activity_label", "ctx_a", "ctx_b", "endings", "label"},
    "piqa": {"goal", "sol1", "sol2", "label"},
    "sciq": {"support", "question", "distractor1", "distractor2", "distractor3", "correct_answer"},
    "winogrande": {"sentence", "option1", "option2", "answer"},
}


def harness():
    """The modules of lm-evaluation-harness. Raises RunError if it is not installed."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("LOGLEVEL", "ERROR")
    try:
        import lm_eval
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise RunError(f"{error.name} is not installed: pip install -r requirements-eval.txt") from error
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    logging.getLogger("datasets").setLevel(logging.CRITICAL)  # what it logs it also raises
    return lm_eval, TaskManager


def index_of(names, lm_eval, TaskManager):
    """The harness' index of tasks; of the paper's alone where no other is asked for: the whole takes ten seconds."""
    if not set(names) <= set(TASKS):
        return TaskManager()
    tasks = Path(lm_eval.__file__).parent / "tasks"
    folders = [tasks / folder for folder in ("arc", "hellaswag", "piqa", "sciq", "winogrande")]
    return TaskManager(include_defaults=False, include_path=folders)


def check_tasks(manager, names, folder):
    """Raises RunError of a task that the harness has not, with the nearest it has, and of local files that are not
    there or lack columns."""
    for name in names:
        if name not in manager.all_tasks:
            near = difflib.get_close_matches(name, manager.all_tasks, 5)
            raise RunError(f"--tasks {name}: no such task; nearest: {', '.join(near) or 'none'}")
        if not folder:
            continue
        if name not in manager.all_subtasks:
            raise RunError(f"--tasks {name}: several tasks under one name; with --tasks-dir name them one by one")
        if manager.task_index[name].kind.name != "TASK":
            raise RunError(f"--tasks {name}: a task in Python, which takes no local file; leave --tasks-dir out")
        file = local_file(folder, name)
        if not file.is_file():
            there = sorted(path.stem for path in Path(folder).glob("*.jsonl"))
            raise RunError(f"{file}: not there; --tasks-dir {folder} has {', '.join(there) or 'no .jsonl file'}")
        check_columns(file, COLUMNS.get(name, set()))


def check_columns(file, wanted):
    try:
        with file.open() as lines:
            found = json.loads(next(lines, "null"))
        missing = wanted - set(found)
    except (ValueError, TypeError, OSError) as error:
        raise RunError(f"{file}: not JSON lines, an object each ({error})") from error
    if missing:
        raise RunError(f"{file}: no {', '.join(sorted(missing))} in its first line, which has {', '.join(found)}")


def local_file(folder, name):
    return Path(folder, f"{name}.jsonl").absolute()


def spec_of(manager, name, folder, scratch):
    """What the harness knows the task by: its name, or with `folder` a YAML file in `scratch` that takes the
    documents from there. (`datasets` knows a file again by its path and time: so its cache lies in `scratch`, too.)"""
    if not folder:
        return name
    files = {"data_files": {"test": glob.escape(str(local_file(folder, name)))}, "cache_dir": str(scratch)}
    lines = [
        f"include: {manager.task_index[name].yaml_path}",
        f"task: {name}",
        "dataset_path: json",
        "dataset_name: null",
        f"dataset_kwargs: {json.dumps(files)}",
        "training_split: null",
        "validation_split: null",
        "test_split: test",
        "fewshot_split: test",
    ]
    path = Path(scratch, f"{name}.yaml")
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def fetch(manager, specs, folder):
    """Have the documents of all tasks on this machine. Raises RunError, also without a network."""
    import datasets

    datasets.disable_progress_bars()
    for name, spec in specs.items():
        try:
            manager.load([spec])
        except ImportError as error:
            raise RunError(f"{name} needs a package that is not installed: pip install {error.name}") from error
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
            if folder:
                raise RunError(f"{local_file(folder, name)}: cannot be read as {name} ({reason})") from error
            raise RunError(
                f"{name}: its documents cannot be had from the Hugging Face hub ({reason}). With files of your own: "
                f"--tasks-dir FOLDER, which holds {name}.jsonl"
            ) from error


def common_key(run, trained, dtype, folder):
    """What all results of a table have in common: weights, computation, where documents are from."""
    steps = checkpoint.steps(run / "checkpoints")
    steps = steps[: steps.index(trained.step) + 1][-trained.average :]
    files = [checkpoint.read_manifest(checkpoint.folder_of(run / "checkpoints", step))["files"] for step in steps]
    key = {"weights": sha256_of(files), "dtype": str(dtype).removeprefix("torch."), "lm_eval": version("lm_eval")}
    return key | {"source": str(folder.absolute()) if folder else "hub"}


def key_of(name, common, folder):
    """What a task's result hangs on: with another key it is computed again."""
    sha256 = hashlib.sha256(local_file(folder, name).read_bytes()).hexdigest() if folder else None
    return common | {"sha256": sha256}


def kept_results(folder, common):
    """{task asked for: {"key", "results"}} of the files in `folder`/tasks that share `common`."""
    kept = {}
    for path in sorted(folder.glob("tasks/*.json")):
        try:
            body = json.loads(path.read_text())
            if common.items() <= body["key"].items() and isinstance(body["results"], dict):
                kept[path.stem] = body
        except (ValueError, KeyError, AttributeError, OSError):
            print(f"warning: {path} cannot be read; {path.stem} is done again", file=sys.stderr)
    return kept


def evaluate(lm_eval, manager, adapter, spec, args):
    """{task: {metric: value, "documents": count}} of a task, or of those of a group; None on ranks but the first."""
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
            f"{Path(spec).stem}: lm-evaluation-harness cannot do it ({error}); see the task's files{few}"
        ) from error
    if results is None:
        return None
    found = {}
    for task, values in results["results"].items():
        metrics = {key.removesuffix(",none"): value for key, value in values.items() if isinstance(value, float)}
        found[task] = metrics | {"documents": results["n-samples"].get(task, {}).get("effective")}
    return found


def paper_row(config):
    """{task: the paper's accuracy, a fraction; also "average"} for the run's router and width; {} if it has none."""
    values = {f"model.{key}": value for key, value in config.model.model_dump().items()}
    printed = find_paper_table("downstream", values).get("accuracy", {}).get(config.model.router, {})
    return {task: printed[name] / 100 for task, name in (PAPER | {"average": "Avg"}).items() if name in printed}


def table(results, config):
    """Head and rows: accuracy and its standard error, normalised accuracy, chance, the paper's accuracy."""
    paper, rows = paper_row(config), []
    for task, values in results.items():
        others = [key for key in values if key.split("_")[0] not in ("acc", "documents") and "stderr" not in key]
        rows.append([task, str(values["documents"] or ""), with_error(values, "acc"), with_error(values, "acc_norm")])
        rows[-1] += [f"{CHANCE[task]:.4f}" if task in CHANCE else "", f"{paper[task]:.4f}" if task in paper else ""]
        rows += [[f"{task}: {key}", "", with_error(values, key), "", "", ""] for key in others]
    if (mean := average(results)) is not None:
        chance = f"{sum(CHANCE.values()) / len(CHANCE):.4f}"
        rows.append(["average", "", f"{mean:.4f}", "", chance, f"{paper['average']:.4f}" if paper else ""])
    return ["task", "documents", "acc", "acc_norm", "chance", "paper"], rows


def with_error(values, metric):
    if metric not in values:
        return ""
    name, comma, rest = metric.partition(",")  # "exact_match,strict-match": a filter behind the comma
    error = values.get(f"{name}_stderr{comma}{rest}")
    return f"{values[metric]:.4f}" + (f" ± {error:.4f}" if error is not None else "")


def average(results):
    """Mean accuracy of the paper's six tasks, None unless all are there."""
    return sum(results[task]["acc"] for task in TASKS) / len(TASKS) if set(TASKS) <= set(results) else None


def write_whole(path, value):
    with writing(path):
        temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        temporary.write_text(json.dumps(value, indent=1) + "\n")
        os.replace(temporary, path)


def report(folder, common, trained, args):
    """results.json and table.md of all that is in `folder`, the table on the terminal, the numbers in wandb where the
    run is in it."""
    found = {task: values for one in kept_results(folder, common).values() for task, values in one["results"].items()}
    order = [*filter(found.__contains__, TASKS), *(task for task in found if task not in TASKS)]
    results, config = {task: found[task] for task in order}, trained.config
    about = {"run": config.run.name, "step": trained.step, "averaged_checkpoints": trained.average}
    about |= {"num_fewshot": args.num_fewshot, "limit": args.limit, **common, "average": average(results)}
    write_whole(folder / "results.json", about | {"results": results})
    text = markdown("table", *table(results, config))
    if not paper_row(config):
        text += f"\n\nThe paper has no accuracies for router {config.model.router} at width {config.model.n_embd}."
    if args.limit:
        text += f"\n\nOf each task the first {args.limit} documents alone (--limit)."
    if args.num_fewshot and args.tasks_dir:
        text += "\n\nExamples in the prompts are other documents of the same files."
    with writing(folder / "table.md"):
        (folder / "table.md").write_text(text + "\n")
    print(f"{text}\n\n{folder}/results.json")
    if config.log.wandb == "disabled":
        return
    if args.limit or trained.average > 1 or trained.step < config.train.max_steps:
        print("wandb: not sent; whole evaluations of a finished run's last checkpoint are")
    else:
        send(results, about["average"], trained, args)


def send(results, mean, trained, args):
    """The numbers to the run in wandb: `downstream/TASK/acc` and so on in its summary, and the table."""
    tracker = start_wandb(trained.config, args.run, trained.metadata.get("wandb"))
    if not tracker:
        return
    shots = f"_{args.num_fewshot}shot" if args.num_fewshot else ""
    values = {f"downstream{shots}/{task}/{key}": value for task in results for key, value in results[task].items()}
    values |= {} if mean is None else {f"downstream{shots}/average": mean}
    try:
        tracker.summarize(values, f"downstream{shots}/table", *table(results, trained.config), trained.step + 1)
        tracker.finish()
    except Exception as error:
        print(f"wandb: {type(error).__name__}: {error}: on without it, results.json has every number")


def main(argv=None):
    parser = argparse.ArgumentParser(
        prog="python -m eval.downstream", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add_run_arguments(parser)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), help="of the harness (default: the paper's six)")
    parser.add_argument("--tasks-dir", type=Path, metavar="FOLDER", help="local files TASK.jsonl instead of the hub")
    parser.add_argument("--limit", type=int, help="documents a task, for a trial")
    parser.add_argument("--num-fewshot", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="(default: %(default)s)")
    parser.add_argument(
        "--dtype", choices=("float16", "bfloat16", "float32"), help="of autocast (default: float32, on CUDA the run's)"
    )
    args = parser.parse_args(argv)
    args.tasks = list(dict.fromkeys(args.tasks))
    try:
        run(args)
    except ValueError as error:  # RunError, DataError, ConfigError
        if "0" in (os.environ.get("RANK", "0"), os.environ.get("LOCAL_RANK")):  # once a node, which may lack the run
            print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def run(args):
    if args.num_fewshot < 0 or (args.limit is not None and args.limit < 1):
        raise RunError("--num-fewshot must be at least 0, --limit at least 1")
    lm_eval, TaskManager = harness()
    from eval.harness import Adapter
    from eval.scoring import Scorer

    manager = index_of(args.tasks, lm_eval, TaskManager)
    check_tasks(manager, args.tasks, args.tasks_dir)
    trained, tokenizer = load_run(args.run, args.step, args.average)
    device = distributed.pick_device(args.device)
    dtype = distributed.pick_dtype(trained.config.train.dtype, device) if device.type == "cuda" else torch.float32
    dtype = getattr(torch, args.dtype) if args.dtype else dtype
    name = trained.label + (f"_{args.num_fewshot}shot" if args.num_fewshot else "")
    folder = args.run / "eval" / (name + (f"_limit{args.limit}" if args.limit else ""))
    common = common_key(args.run, trained, dtype, args.tasks_dir)
    with writing(folder):
        (folder / "tasks").mkdir(parents=True, exist_ok=True)
    ranks = distributed.start(device, trained.config.train.timeout_minutes)
    try:
        adapter = Adapter(Scorer(trained.model.to(ranks.device), dtype, ranks), tokenizer)
        with tempfile.TemporaryDirectory() as scratch:
            score(lm_eval, manager, adapter, folder, common, args, scratch)
    finally:
        distributed.stop()
    if not ranks.rank:
        report(folder, common, trained, args)


def score(lm_eval, manager, adapter, folder, common, args, scratch):
    """A file in `folder`/tasks for each task asked for; what is there already is not done again."""
    ranks = adapter.scorer.ranks
    keys = {name: key_of(name, common, args.tasks_dir) for name in args.tasks}
    kept = {name: one["key"] for name, one in kept_results(folder, common).items()}
    kept = distributed.gather(kept, ranks.control)[0]  # as the first rank saw it
    specs = {
        name: spec_of(manager, name, args.tasks_dir, scratch) for name in args.tasks if kept.get(name) != keys[name]
    }
    if not ranks.rank and len(specs) < len(args.tasks):
        print(f"done already: {', '.join(name for name in args.tasks if name not in specs)} ({folder}/tasks)")
    fetch(manager, specs, args.tasks_dir)
    for name, spec in specs.items():
        if not ranks.rank:
            print(name, flush=True)
        found = evaluate(lm_eval, manager, adapter, spec, args)
        if not ranks.rank:
            write_whole(folder / "tasks" / f"{name}.json", {"key": keys[name], "results": found})


if __name__ == "__main__":
    sys.exit(main())
