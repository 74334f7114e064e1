"""Scores on tasks while a run trains (eval.tasks): those of eval.downstream, of HFLM, and by hand;
and bad input.
"""

import math
import random
from functools import partial
from types import SimpleNamespace

import pytest
from runs import ALONE, column, end, meet_in, metrics, start_ranks, wait_for_ranks
from test_downstream import DOCUMENTS, results, write_tasks

import configure
import train
from eval import downstream, tasks
from eval.harness import Loglikelihood
from eval.in_loop import TaskScores
from eval.scoring import Scorer
from model import GPT
from runtime import RankError, RunError
from runtime.folder import path_of
from runtime.signals import Stop

LONG = [
    "model.block_size=64",
    "optim.lr=0.05",
    "train.checkpoint_interval=2",
    "train.keep_checkpoints=9",
]


@pytest.fixture
def folder(tmp_path):
    return write_tasks(tmp_path / "tasks", 5)


def run(config):
    train.train(config, open_tasks=TaskScores)
    return metrics(config)


def scored(folder, names=DOCUMENTS, *more):
    return [f"eval.tasks={','.join(names)}", f"eval.tasks_dir={folder}", *more]


def test_bits_of_answers_that_are_several_or_none():
    """The most likely of several right ones; a text to continue; an answer that is not among the
    choices.
    """

    def bits(target, *likelihoods, kind="multiple_choice"):
        task = SimpleNamespace(
            OUTPUT_TYPE=kind, multiple_input=0, config=SimpleNamespace(target_delimiter=" ")
        )
        task.doc_to_target = lambda doc: target
        task.doc_to_choice = lambda doc: ["one", "three", "no"]
        sizes = [len(" one"), len(" three"), len(" no")]
        if kind == "loglikelihood":
            sizes = [len(target.encode())]
        scores = []
        for bits, size in zip(likelihoods, sizes, strict=True):
            scores.append(Loglikelihood(-bits * math.log(2)))
            scores[-1].size = size
        return tasks.answer_bits(task, {}, scores)

    assert bits([0, 1], 8, 6, 1) == pytest.approx(1)  # 6 bits for " three", 8 for " one"
    assert bits("no", 8, 6, 9) == pytest.approx(3) and bits(2, 8, 6, 9) == pytest.approx(3)
    assert bits("four", 8, 6, 9) is bits(3, 8, 6, 9) is bits(-100, 8, 6, 9) is None
    assert bits(" caf\u00e9", 12, kind="loglikelihood") == pytest.approx(2)


def test_scores_are_those_of_downstream_and_training_is_as_without(tiny, folder):
    own = [*LONG, "model.dropout=0.1", "eval.interval=1", "train.max_steps=5"]
    scores = scored(folder, ["sciq", "winogrande", "hellaswag"], "eval.task_interval=2")
    config = tiny(*own, *scores)
    lines = run(config)
    with_scores = [line for line in lines if "tasks/sciq/acc" in line]
    assert [line["step"] for line in with_scores] == [0, 2, 4, 5]  # the last step, too
    for line in with_scores[1:]:
        words = [
            str(path_of(config)),
            "--tasks-dir",
            str(folder),
            "--tasks",
            "sciq",
            "winogrande",
            "hellaswag",
        ]
        assert downstream.main([*words, "--checkpoint", str(line["step"])]) == 0
        report = results(path_of(config), f"step_{line['step']:08}")["results"].items()
        values = {
            f"tasks/{task}/{key}": value
            for task, metrics in report
            for key, value in metrics.items()
        }
        wanted = {key: value for key, value in values.items() if "stderr" not in key}
        assert {key: value for key, value in line.items() if key.startswith("tasks/")} == wanted
        assert {"tasks/sciq/bits_per_byte", "tasks/hellaswag/acc_norm"} <= wanted.keys()
    bits = column(lines, "tasks/sciq/bits_per_byte")
    assert len(set(bits)) == 4 and min(bits) > 0
    alone = tiny(*own, "run.name=alone")
    run(alone)
    one, other = end(config), end(alone)
    assert one.tensors == other.tensors and one.facts == other.facts
    bare = [
        {key: value for key, value in line.items() if not key.startswith("tasks/")}
        for line in one.lines
    ]
    assert bare == other.lines


def be_a_rank(file, folder):
    for parallel in ("ddp", "zero2", "fsdp"):
        where = [
            "train.micro_batch_size=4",
            f"train.parallel={parallel}",
            f"run.dir={file.parent / parallel}",
        ]
        meet_in(file.parent / f"{parallel}.store")
        train.train(
            configure.load(file, [*LONG, *where, *scored(folder, ["sciq", "piqa"])], 2),
            open_tasks=TaskScores,
        )


@pytest.mark.integration
def test_scores_on_two_ranks_are_those_of_downstream_alone(tiny, tiny_file, folder):
    wait_for_ranks(start_ranks(2, be_a_rank, tiny_file, folder), 300)
    for parallel in ("ddp", "zero2", "fsdp"):
        config = tiny(*LONG, f"run.dir={tiny_file.parent / parallel}")
        line = metrics(config)[-1]
        assert (
            downstream.main(
                [str(path_of(config)), "--tasks-dir", str(folder), "--tasks", "sciq", "piqa"]
            )
            == 0
        )
        for task, metrics_of_task in results(path_of(config))["results"].items():
            for key in ("acc", "bits_per_byte"):
                assert line[f"tasks/{task}/{key}"] == metrics_of_task[key], (parallel, task, key)


def test_what_is_missing_is_said_before_the_first_step(tiny, folder, monkeypatch):
    def refused(message, name, kind=RankError):
        with pytest.raises(RunError, match=message) as caught:
            train.train(tiny(*scored(folder, [name])), open_tasks=TaskScores)
        assert type(caught.value) is kind

    monkeypatch.setattr(
        "eval.tasks.build_task_manager",
        lambda names, build=tasks.build_task_manager: build(["sciq"]),
    )
    refused("eval.tasks: task sciqq: no such task; nearest: sciq", "sciqq")
    nearest = "nearest: arc_challenge, arc_challenge_chat$"
    refused(nearest, "arc_challeng")
    refused("task zzz: no such task; nearest: none$", "zzz")
    refused("task ai2_arc: a group of tasks, or one in Python, cannot read local", "ai2_arc")
    with monkeypatch.context() as patch:
        patch.setenv("LOCAL_RANK", "1")  # the first rank of the node reports what it lacks
        refused("task zzz: no such task", "zzz", RunError)
    (folder / "sciq.jsonl").unlink()
    refused(r"sciq.jsonl: missing; the folder has arc_challenge, arc_easy", "sciq")
    assert not path_of(tiny()).exists()
    with (folder / "piqa.jsonl").open("a") as file:
        file.write('{"goal": "x"}\n')
    said = "^piqa: lm-evaluation-harness failed .*; a document may lack a column"
    refused(said, "piqa", RunError)
    for file in folder.iterdir():
        file.unlink()
    refused(r"sciq.jsonl: missing; the folder has no .jsonl file$", "sciq")
    assert not metrics(tiny())
    monkeypatch.setattr("common.command.find_spec", lambda name: None)
    refused(r"eval.tasks: lm_eval not installed: pip install -r requirements-eval.txt", "piqa")


def test_scores_end_once_asked_to_stop(tiny, folder, monkeypatch):
    """Between batches; also if a task has ended meanwhile.

    Random numbers of training stay as they are.
    """
    config = tiny(*LONG, *scored(folder, ["hellaswag", "piqa"]))
    scores = TaskScores(config)
    model = GPT(config.model)
    state = random.getstate()
    stop = Stop()
    score = Scorer._score_batch
    batches = []

    def stop_after_a_batch(*given):
        stop.asked = True
        batches.append(1)
        return score(*given)

    assert set(scores(model, 0, ALONE, stop)) >= {"tasks/piqa/acc"} and model.training
    monkeypatch.setattr(Scorer, "_score_batch", stop_after_a_batch)
    monkeypatch.setattr("eval.in_loop.Scorer", partial(Scorer, tokens=64))
    assert scores(model, 0, ALONE, stop) is None and model.training and random.getstate() == state
    assert scores(model, 0, ALONE, stop) is None and len(batches) == 1  # asked before
    # a group of tasks has no number of documents; all ranks stop if another one is asked to
    results = {"group": {"acc": 0.5, "acc_stderr": 0.1, "documents": None}}
    monkeypatch.setattr("eval.in_loop.score_task", lambda *args, **_: results)
    stop.asked = False
    assert scores(model, 0, ALONE, stop) == {"tasks/group/acc": 0.5}
    monkeypatch.setattr("eval.in_loop.distributed.any_rank", lambda *_: [True])
    assert scores(model, 0, ALONE, stop) is None
