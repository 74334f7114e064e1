"""Scores on tasks while a run trains (eval.tasks): those of eval.downstream, of HFLM, and by hand; and bad input."""

import math
import random
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from runs import REPO_ROOT, column, end, meet_in, metrics, start_ranks
from test_downstream import DOCUMENTS, RIGHT, results, write_tasks

import configure
import train
from data.tokenizer import ByteTokenizer
from eval import downstream, tasks
from eval.harness import Adapter
from eval.in_loop import open_tasks
from eval.scoring import Scorer
from model import GPT, count_parameters, parameter_shapes
from runtime import RankError, RunError, distributed, memory
from runtime.distributed import Ranks
from runtime.folder import path_of
from runtime.reporter import describe_scores
from runtime.signals import Stop
from scripts.plan import main as plan_main

ONE_RANK = Ranks(0, 1, torch.device("cpu"))
LONG = ["model.block_size=64", "optim.lr=0.05", "train.checkpoint_interval=2", "train.keep_checkpoints=9"]


@pytest.fixture
def folder(tmp_path):
    return write_tasks(tmp_path / "tasks", 5)


def run(config):
    train.train(config, open_tasks=open_tasks)
    return metrics(config)


def scored(folder, names=DOCUMENTS, *more):
    return [f"eval.tasks={','.join(names)}", f"eval.tasks_dir={folder}", *more]


# ---- bits per byte


@pytest.mark.numerics
def test_bits_per_byte_are_those_of_the_right_answer_by_hand(folder, tmp_path):
    """By a model of made-up likelihoods, on all six tasks, one with an answer of more bytes than characters."""

    def likelihood(context, answer):
        return -sum(map(ord, context + answer)) % 97 / 7 - 0.125

    class Client(Adapter):
        def loglikelihood(self, requests, disable_tqdm=False):
            return [(likelihood(*request.args), False) for request in requests]

    lines = (folder / "arc_easy.jsonl").read_text().replace("bb", "b\u00e9")
    (folder / "arc_easy.jsonl").write_text(lines, "utf-8")
    right = RIGHT | {"arc_easy": (RIGHT["arc_easy"][0], " b\u00e9", 1)}
    manager = tasks.build_task_manager(DOCUMENTS)
    specs = {name: tasks.write_task_spec(manager, name, folder, tmp_path) for name in DOCUMENTS}
    model = SimpleNamespace(config=SimpleNamespace(block_size=64), head=torch.zeros(1))
    client = Client(Scorer(model), ByteTokenizer())
    for name, loaded in tasks.load_tasks(manager, specs, folder).items():
        for limit in (None, 3):
            found = tasks.score_task(name, loaded, client, limit=limit)[name]
            context, answer, _ = right[name]
            bits = [-likelihood(context.replace("{i}", str(i)), answer) / math.log(2) for i in range(limit or 5)]
            wanted = [one / len(answer.encode()) for one in bits]
            mean = sum(wanted) / len(wanted)
            assert found["bits_per_byte"] == pytest.approx(mean, rel=1e-12), name
            error = math.sqrt(sum((one - mean) ** 2 for one in wanted) / (len(wanted) - 1) / len(wanted))
            assert found["bits_per_byte_stderr"] == pytest.approx(error, rel=1e-9)
            assert found["documents"] == (limit or 5)


def test_bits_of_answers_that_are_several_or_none():
    """The most likely of several right ones; a text to continue; an answer that is not among the choices."""

    def bits(target, *likelihoods, kind="multiple_choice"):
        task = SimpleNamespace(OUTPUT_TYPE=kind, multiple_input=0, config=SimpleNamespace(target_delimiter=" "))
        task.doc_to_target, task.doc_to_choice = lambda doc: target, lambda doc: ["one", "three", "no"]
        return tasks.answer_bits(task, {}, [-one * math.log(2) for one in likelihoods])

    assert bits([0, 1], 8, 6, 1) == pytest.approx(1)  # 6 bits for " three", 8 for " one"
    assert bits("no", 8, 6, 9) == pytest.approx(3) and bits(2, 8, 6, 9) == pytest.approx(3)
    assert bits("four", 8, 6, 9) is bits(3, 8, 6, 9) is bits(-100, 8, 6, 9) is None
    assert bits(" caf\u00e9", 12, kind="loglikelihood") == pytest.approx(2)


# ---- a run


def test_scores_are_those_of_downstream_and_training_is_as_without(tiny, folder):
    own = [*LONG, "model.dropout=0.1", "eval.interval=1", "train.max_steps=5"]
    config = tiny(
        *own, *scored(folder, ["sciq", "winogrande", "hellaswag"], "eval.task_interval=2", "eval.task_limit=4")
    )
    lines = run(config)
    with_scores = [line for line in lines if "tasks/sciq/acc" in line]
    assert [line["step"] for line in with_scores] == [0, 2, 4, 5]  # the last step, too
    for line in with_scores[1:]:
        words = [str(path_of(config)), "--tasks-dir", str(folder), "--tasks", "sciq", "winogrande", "hellaswag"]
        assert downstream.main([*words, "--limit", "4", "--checkpoint", str(line["step"])]) == 0
        found = results(path_of(config), f"step_{line['step']:08}_limit4")["results"]
        values = {f"tasks/{task}/{key}": value for task in found for key, value in found[task].items()}
        wanted = {key: value for key, value in values.items() if "stderr" not in key}
        assert {key: value for key, value in line.items() if key.startswith("tasks/")} == wanted
        assert {"tasks/sciq/bits_per_byte", "tasks/hellaswag/acc_norm"} <= wanted.keys()
    bits = column(lines, "tasks/sciq/bits_per_byte")
    assert len(set(bits)) == 4 and min(bits) > 0
    alone = tiny(*own, "run.name=alone")
    run(alone)
    one, other = end(config), end(alone)
    assert one.tensors == other.tensors and one.facts == other.facts
    bare = [{key: value for key, value in line.items() if not key.startswith("tasks/")} for line in one.lines]
    assert bare == other.lines


def test_random_numbers_go_on_after_scores_as_if_there_were_none():
    def draw():
        return random.random(), np.random.rand(), torch.rand(()).item()

    def begin():
        random.seed(7)
        np.random.seed(7)
        torch.manual_seed(7)

    begin()
    wanted = draw()
    begin()
    with tasks.fixed_seeds():
        first = draw()
    with tasks.fixed_seeds():
        assert draw() == first != wanted
    assert draw() == wanted


@pytest.mark.parametrize("first", ["before", "within a task", "after a task"])
def test_scores_are_left_out_once_asked_to_stop(tiny, folder, monkeypatch, first):
    scores, model = open_tasks(config := tiny(*LONG, *scored(folder, ["hellaswag", "piqa"]))), GPT(config.model)
    assert {*scores(model, 0, ONE_RANK, Stop())} >= {"tasks/piqa/acc"} and model.training
    batches, stop, state = [], Stop(), random.getstate()
    score_columns, score_task = Scorer._score_columns, tasks.score_task

    def score_batch(*given):
        batches.append(given)
        stop.asked = first == "within a task"
        return score_columns(*given)

    def score_one(name, *given, **options):
        results = score_task(name, *given, **options)
        stop.asked = True
        return results

    monkeypatch.setattr("eval.scoring.make_batches", lambda groups, *_: ([group] for group in groups))
    monkeypatch.setattr(Scorer, "_score_columns", score_batch)
    if first == "after a task":
        monkeypatch.setattr(tasks, "score_task", score_one)
    stop.asked = first == "before"
    assert scores(model, 0, ONE_RANK, stop) is None and model.training and random.getstate() == state
    assert len(batches) == {"before": 0, "within a task": 1, "after a task": 5}[first]


def test_scores_are_due_at_multiples_and_at_the_end(tiny, folder):
    config = tiny(*LONG, *scored(folder, ["piqa"], "eval.interval=2", "eval.task_interval=6", "train.max_steps=8"))
    scores, model = open_tasks(config), GPT(config.model)
    assert [bool(scores(model, step, ONE_RANK, Stop())) for step in range(9)] == [n in (0, 6, 8) for n in range(9)]


def test_scores_in_words():
    values = {"val/loss": 1.0, "tasks/sciq/acc": 0.25, "tasks/sciq/acc_norm": 0.5, "tasks/sciq/bits_per_byte": 1.5}
    assert describe_scores(values | {"tasks/piqa/acc": 1.0}) == "sciq acc 0.2500, 1.5000 bits/byte; piqa acc 1.0000"
    assert describe_scores({"val/loss": 1.0}) == ""


@pytest.mark.integration
def test_training_imports_eval_for_tasks_alone(tiny_file, folder):
    code = "import sys, train; train.main(sys.argv[1:]); assert ('eval' in sys.modules) == ('tasks' in sys.argv[-1])"
    for name, more in (("with", scored(folder, ["piqa"])), ("without", [])):
        words = [str(tiny_file), f"--run.name={name}", "--model.block_size=64", *(f"--{word}" for word in more[::-1])]
        subprocess.run([sys.executable, "-c", code, *words], cwd=REPO_ROOT, check=True)
        lines = (tiny_file.parent / "runs" / name / "metrics.jsonl").read_text()
        assert ("tasks/piqa/acc" in lines) == (name == "with")


def be_a_rank(file, folder):
    for parallel in ("ddp", "zero2", "fsdp"):
        where = ["train.micro_batch_size=4", f"train.parallel={parallel}", f"run.dir={file.parent / parallel}"]
        meet_in(file.parent / f"{parallel}.store")
        train.train(configure.load(file, [*LONG, *where, *scored(folder, ["sciq", "piqa"])], 2), open_tasks=open_tasks)


@pytest.mark.integration
def test_scores_on_two_ranks_are_those_of_downstream_alone(tiny, tiny_file, folder):
    """Split across ranks; under FSDP2 and ZeRO-2 of full weights that each gathers."""
    for process in start_ranks(2, be_a_rank, tiny_file, folder):
        code, printed = process.wait(300)
        assert code == 0, printed
    for parallel in ("ddp", "zero2", "fsdp"):
        config = tiny(*LONG, f"run.dir={tiny_file.parent / parallel}")
        line = metrics(config)[-1]
        assert downstream.main([str(path_of(config)), "--tasks-dir", str(folder), "--tasks", "sciq", "piqa"]) == 0
        found = results(path_of(config))["results"]
        for task in ("sciq", "piqa"):
            for key in ("acc", "bits_per_byte"):
                assert line[f"tasks/{task}/{key}"] == found[task][key], (parallel, task, key)


def be_a_rank_of_two_one_of_which_stops(file, folder):
    meet_in(file.parent / "stop.store")
    config = configure.load(file, [*LONG, "train.micro_batch_size=4", *scored(folder, ["hellaswag", "piqa"])], 2)
    found, model, stop = open_tasks(config), GPT(config.model), Stop()
    with distributed.process_group(torch.device("cpu"), 1) as ranks:
        stop.asked = ranks.rank == 1
        assert found(model, 0, ranks, stop) is None


@pytest.mark.integration
def test_one_rank_that_is_asked_to_stop_stops_the_scores_of_both(tiny_file, folder):
    for process in start_ranks(2, be_a_rank_of_two_one_of_which_stops, tiny_file, folder):
        code, printed = process.wait(120)
        assert code == 0, printed


# ---- bad input


def test_memory_plan_counts_gathered_weights(tiny, call):
    """Each rank gathers all weights, when what a step needs besides its state is free again."""
    sizes = ("model.n_layer=12", "model.expert_hidden=512", "train.batch_size=1000")
    model = tiny(*sizes).model
    shapes, full = parameter_shapes(model), 4 * count_parameters(model)[0]
    for parallel, shards, size in (("ddp", 1, 1), ("zero2", 4, 1), ("fsdp", 4, 1), ("fsdp", 4, 1000)):
        without, plan = (
            memory.estimate_memory(
                tiny(*sizes, f"train.micro_batch_size={size}", tasks), shapes, "bfloat16", parallel, shards, False
            )
            for tasks in ("eval.tasks=[]", 'eval.tasks=["sciq"]')
        )
        more = full - without.copies - without.activations - without.logits
        assert plan == without._replace(scoring=0 if parallel == "ddp" or size == 1000 else more)
        assert (more > 0) == (size == 1)
    words = ["config/1b3.toml", "--data.name=any", "--gpus=64", "--train.micro_batch_size=1"]
    texts = [call(plan_main, *words, f"--eval.tasks={tasks}") for tasks in ("[]", '["sciq"]')]
    assert ["\nscoring " in text for text in texts] == [False, True]


def test_what_is_missing_is_said_before_the_run_begins(tiny, folder, monkeypatch):
    def refused(message, name):
        with pytest.raises(RunError, match=message):
            train.train(tiny(*scored(folder, [name])), open_tasks=open_tasks)
        assert not path_of(tiny()).exists()

    monkeypatch.setattr("eval.tasks.build_task_manager", lambda names, build=tasks.build_task_manager: build(["sciq"]))
    refused("eval.tasks: task sciqq: no such task; nearest: sciq", "sciqq")
    (folder / "sciq.jsonl").unlink()
    refused(r"sciq.jsonl: missing; eval.tasks_dir .* has arc_challenge, arc_easy", "sciq")
    (folder / "piqa.jsonl").write_text('{"goal": "a"}\n')
    refused(r"piqa.jsonl: no label, sol1, sol2 in its first line", "piqa")
    monkeypatch.setattr("common.command.find_spec", lambda name: None)
    refused(r"eval.tasks: lm_eval not installed: pip install -r requirements-eval.txt", "piqa")
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(RunError) as caught:  # of another rank of a node: its first one speaks for all
        train.train(tiny(*scored(folder, ["piqa"])), open_tasks=open_tasks)
    assert not isinstance(caught.value, RankError)


def test_a_later_document_that_lacks_a_column_is_said_before_the_first_step(tiny, folder):
    with (folder / "sciq.jsonl").open("a") as file:
        file.write('{"question": "x"}\n')
    with pytest.raises(RunError, match="^sciq: lm-evaluation-harness failed .*; a document may lack a column: see"):
        train.train(config := tiny(*scored(folder, ["sciq"])), open_tasks=open_tasks)
    assert not metrics(config)


def test_names_of_tasks_in_a_config(tiny, tiny_file):
    for given in ('["sciq", "piqa"]', "sciq,piqa", "sciq, piqa,sciq,"):
        config = tiny(f"eval.tasks={given}")
        assert config.eval.task_names == ["sciq", "piqa"]
        tiny_file.with_name("config.toml").write_text(configure.dumps(config))
        assert configure.load(tiny_file.with_name("config.toml")) == config
    text = tiny_file.read_text()
    for wrong in ("[1, 2]", "[sciq", "3"):
        tiny_file.write_text(text.replace("windows = 6", f"windows = 6\ntasks = {wrong}"))
        with pytest.raises(configure.ConfigError):
            tiny()
    tiny_file.write_text(text)
    with pytest.raises(configure.ConfigError, match=r"task_interval = 3 is not a multiple of .*--eval.task_interval=4"):
        tiny("eval.tasks=sciq", "eval.task_interval=3")
