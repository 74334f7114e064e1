"""eval/scoring.py against one pass per pair; eval/downstream.py and eval/harness.py against the
harness' own client.
"""

import json
import math
import os
import random
import re
import shutil
import statistics
from unittest import mock

import lm_eval
import numpy as np
import pytest
import torch
from conftest import WORDS as BASIC
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.models.huggingface import HFLM
from numerics import SEED, assert_near, tolerance
from runs import REPO_ROOT, modules_in, read_tables
from scipy import stats
from test_generation import small_model
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

import configure
import train
from data.tokenizer import ByteTokenizer
from eval import downstream, scoring, tasks
from eval.harness import Adapter, Loglikelihood, count_scored_bytes
from eval.routing import record_routing
from eval.scoring import Scorer, batch_by_length
from eval.trained import load_run
from hf.export.export import export_run
from hf.formats import FORMATS
from hf.tokenizer_files import write_tokenizer
from runtime import RunError, folder

DENSE = {"model.router": "dense", "model.pos": "learned"}


@pytest.fixture(scope="module")
def clients(tmp_path_factory):
    """Of a random GPT2LMHeadModel, sharp enough to give both greedy and other answers, and of our
    dense model with its
    weights, without biases, which are 0 at GPT-2's initialisation."""
    torch.manual_seed(3)
    shape = {
        "n_layer": 2,
        "n_head": 2,
        "n_embd": 32,
        "n_inner": 24,
        "vocab_size": 257,
        "n_positions": 32,
    }
    config = GPT2Config(
        **shape,
        activation_function="gelu",
        initializer_range=0.5,
        eos_token_id=256,
        bos_token_id=256,
    )
    theirs = GPT2LMHeadModel(config).eval()
    sizes = {"block_size": 32, "vocab_size": 257, "top_k": 2, "expert_hidden": 12}
    ours = small_model(**{f"model.{key}": value for key, value in sizes.items()}, **DENSE)
    for name, view in FORMATS["gpt2"].from_own(ours.state_dict(), ours.config).items():
        view.copy_(theirs.state_dict()[name])
    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(ByteTokenizer(), path, 32)
    tokenizer = AutoTokenizer.from_pretrained(path)
    return HFLM(theirs, tokenizer=tokenizer, batch_size=3, max_length=32), Adapter(
        Scorer(ours), ByteTokenizer()
    )


def ask(client, kind, arguments):
    requests = [
        Instance(request_type=kind, doc={}, arguments=one, idx=i) for i, one in enumerate(arguments)
    ]
    return getattr(client, kind)(requests, disable_tqdm=True)


WORDS = [*BASIC, "\u00e9t\u00e9", "\U0001f41d"]


def words(rng, count):
    return " ".join(rng.choice(WORDS) for _ in range(count))


@pytest.mark.numerics
def test_loglikelihoods_equal_hflms(clients):
    """With contexts that are shared, unshared, empty, only spaces, or too long, and the model's own
    next token.
    """
    theirs, ours = clients
    rng = random.Random(SEED)
    pairs = [
        (words(rng, rng.randint(1, 9)), " " + words(rng, rng.randint(1, 2))) for _ in range(40)
    ]
    pairs += [(context, f" {letter}") for context, _ in pairs[:9] for letter in "abcd"]
    pairs += [
        ("", "maps"),
        ("", " a"),
        ("in june ", "bees"),
        ("x" * 40, "y" * 32),
        ("so", "y" * 31),
        pairs[0],
    ]
    for context, _ in pairs[:40]:
        with torch.no_grad():
            best = (
                theirs.model(torch.tensor([list(context.encode())[-32:]]))
                .logits[0, -1]
                .argmax()
                .item()
            )
        pairs += [(context, chr(best))] if 33 <= best < 127 else []
    hand = [
        by_hand(ours.scorer.model, list(text.encode()) or [256], list(answer.encode()))
        for text, answer in pairs
    ]
    got, wanted = (ask(client, "loglikelihood", pairs) for client in (ours, theirs))
    assert_same_scores(got, wanted, [margin for *_, margin in hand], "GPT-2")
    assert {greedy for _, greedy in wanted} == {True, False}
    texts = [(words(rng, count),) for count in (1, 3, 9, 30)]
    wanted, got = (
        torch.tensor(ask(client, "loglikelihood_rolling", texts)).double() for client in clients
    )
    assert_near(got, wanted, tolerance(torch.float32, 32), "rolling")


def test_generation_and_an_answer_without_a_token_are_refused(clients):
    with pytest.raises(ValueError, match=f"'' after '{'x' * 58}so' has no token"):
        ask(clients[1], "loglikelihood", [("start" + "x" * 70 + "so", "")])
    assert count_scored_bytes(" so  ", "\ud800é") == 2 + 1 + 2  # half a pair counts as one byte
    with pytest.raises(ValueError, match="scripts.export"):
        ask(clients[1], "generate_until", [("x", {"until": []})])


EASY = {"text": ["a", "bé", "c{i}", "d"], "label": ["A", "B", "C", "D"]}
CHALLENGE = {"text": ["x", "y", "z"], "label": ["1", "2", "3"]}
CONTEXT = {"activity_label": "Hop", "ctx_a": "He{i}", "ctx_b": "he"}
DISTRACTORS = {"distractor1": "o", "distractor2": "u{i}", "distractor3": "e"}
DOCUMENTS = {
    "arc_easy": {"question": "Q{i}?", "choices": EASY, "answerKey": "B"},
    "arc_challenge": {"question": "R{i}?", "choices": CHALLENGE, "answerKey": "3"},
    "hellaswag": CONTEXT | {"endings": ["hops.", "is.", "a", "b{i}"], "label": "1"},
    "piqa": {"goal": "Go {i}", "sol1": "walk", "sol2": "fly {i}", "label": 0},
    "sciq": {"support": "S", "question": "T{i}?", "correct_answer": "i"} | DISTRACTORS,
    "winogrande": {"sentence": "A{i} _ b", "option1": "c", "option2": "d", "answer": "2"},
}


def write_tasks(path, count=6):
    path.mkdir(exist_ok=True)
    for name, document in DOCUMENTS.items():
        lines = [json.dumps(document).replace("{i}", str(i)) for i in range(count)]
        (path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def finished(module_tiny):
    """A finished run of 4 steps, whose block holds the documents above."""
    sizes = [
        "model.block_size=64",
        "optim.lr=0.05",
        "train.checkpoint_interval=2",
        "train.keep_checkpoints=3",
        "train.ema_decay=0.5",
    ]
    train.train(config := module_tiny(*sizes))
    return folder.path_of(config)


@pytest.fixture
def run(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "runs/tiny")


def call(*arguments):
    return downstream.main(list(map(str, arguments)))


def results(run, label="step_00000004"):
    return json.loads((run / "eval" / label / "results.json").read_text())


# Of each task: what the harness asks of document i of DOCUMENTS for its right answer, that answer,
# its place.
RIGHT = {
    "arc_easy": ("Question: Q{i}?\nAnswer:", " bé", 1),  # of more bytes than characters
    "arc_challenge": ("Question: R{i}?\nAnswer:", " z", 2),
    "hellaswag": ("Hop: He{i} He", " is.", 1),
    "piqa": ("Question: Go {i}\nAnswer:", " walk", 0),
    "sciq": ("S\nQuestion: T{i}?\nAnswer:", " i", 3),
    "winogrande": ("A{i} d", " b", 1),
}


@pytest.mark.numerics
def test_six_tasks_score_as_hflm_scores_the_export(run, tmp_path, capsys, monkeypatch):
    """Accuracies, and bits per byte of the right answers, by lm-evaluation-harness' own client."""
    run = run.rename(tmp_path / "runs/kern")
    folder = write_tasks(tmp_path / "tasks")
    assert call(run, "--tasks-dir", folder, "--limit", 4) == 0
    report, out = results(run, "step_00000004_limit4"), capsys.readouterr().out
    assert list(report["results"]) == list(downstream.TASKS) and report["step"] == 4
    mean = sum(values["acc"] for values in report["results"].values()) / 6
    assert report["average"] == pytest.approx(mean)
    table = (run / "eval/step_00000004_limit4/table.md").read_text()
    assert f"| average |  | {mean:.4f} |  |  | 0.3333 |  |" in table
    assert re.search(rf"^average +{mean:.4f} +0.3333$", out, re.M)
    note = "Only the first 4 documents of each task (--limit).\n"
    assert note in out and table.endswith(note)
    export_run(*load_run(run), tmp_path / "export")
    with modules_in(tmp_path / "modules"):
        model = AutoModelForCausalLM.from_pretrained(
            tmp_path / "export", trust_remote_code=True
        ).eval()
    client = HFLM(
        model,
        tokenizer=AutoTokenizer.from_pretrained(tmp_path / "export"),
        batch_size=4,
        max_length=64,
    )
    manager = tasks.build_task_manager(RIGHT)
    specs = [tasks.write_task_spec(manager, name, folder, tmp_path) for name in RIGHT]
    theirs = lm_eval.simple_evaluate(
        client, tasks=specs, task_manager=manager, bootstrap_iters=1000, limit=4
    )
    for name, (context, answer, place) in RIGHT.items():
        ours, samples = report["results"][name], theirs["samples"][name]
        for metric in ("acc", "acc_stderr", "acc_norm", "acc_norm_stderr"):
            assert ours.get(metric) == theirs["results"][name].get(f"{metric},none"), (name, metric)
        asked = [(context.replace("{i}", str(i)), answer) for i in range(4)]
        assert [sample["arguments"][place] for sample in samples] == asked
        assert ours["documents"] == 4
        nats = torch.tensor(
            [sample["resps"][place][0][0] for sample in samples], dtype=torch.float64
        )
        bits = -nats / math.log(2) / len(answer.encode())
        got = torch.tensor(
            [ours["bits_per_byte"], ours["bits_per_byte_stderr"]], dtype=torch.float64
        )
        assert_near(
            got,
            torch.stack([bits.mean(), bits.std() / 2]),
            tolerance(torch.float32, 257, roundings=8),
            name,
        )


def test_differences_are_those_of_scipys_paired_test():
    values, first = np.random.default_rng(0).normal(size=(2, 6))
    test = stats.ttest_rel(values, first)
    wanted = [(values - first).mean(), *test.confidence_interval()]
    said = re.findall(r"[+-]\d+\.\d+", str(downstream.compare_values(values, first)))
    assert [float(text) for text in said] == pytest.approx(wanted, abs=6e-5)
    samples = []  # as a rank gathers them, and once more by another filter
    for number, kind in ((1, "none"), (0, "none"), (1, "strict")):
        samples.append({"doc_id": number, "filter": kind, "metrics": ["acc"], "acc": number})
    assert tasks.list_values(samples) == {"acc": [0.0, 1.0]}


def test_runs_are_compared_by_document(run, tmp_path, capsys):
    """Bits per byte of each document by lm-evaluation-harness' own client; then scipy's t-test."""
    folder = write_tasks(tmp_path / "tasks")
    other = shutil.copytree(run, tmp_path / "runs/other")
    shutil.rmtree(other / "checkpoints/step_00000004")
    assert call(run, other, "--tasks-dir", folder, "--tasks", "piqa", "sciq") == 0
    printed = capsys.readouterr().out
    manager = tasks.build_task_manager(RIGHT)
    spec = tasks.write_task_spec(manager, "piqa", folder, tmp_path)
    bits = []
    for path in (run, other):
        export = tmp_path / f"export-{path.name}"
        export_run(*load_run(path), export)
        with modules_in(tmp_path / "modules"):
            model = AutoModelForCausalLM.from_pretrained(export, trust_remote_code=True).eval()
        tokenizer = AutoTokenizer.from_pretrained(export)
        client = HFLM(model, tokenizer=tokenizer, batch_size=4, max_length=64)
        theirs = lm_eval.simple_evaluate(
            client, tasks=[spec], task_manager=manager, bootstrap_iters=0
        )
        nats = [-sample["resps"][0][0][0] for sample in theirs["samples"]["piqa"]]
        bits.append([nat / math.log(2) / len(" walk") for nat in nats])
    test = stats.ttest_rel(bits[1], bits[0])
    interval = test.confidence_interval()
    wanted = [statistics.fmean(bits[1]) - statistics.fmean(bits[0]), interval.low, interval.high]
    (rows,) = read_tables(printed)
    (row,) = [row for row in rows if (row["task"], row["metric"]) == ("piqa", "bits_per_byte")]
    said = [float(text) for text in re.findall(r"[+-]\d+\.\d+", row["minus the first's, 95%"])]
    assert abs(wanted[0]) > 1e-3 and said == pytest.approx(wanted, abs=2e-4)
    folders = (run / "eval/step_00000004", other / "eval/step_00000002")
    assert all((path / "results.json").is_file() for path in folders)
    cells = []
    for task in ("piqa", "sciq"):
        first, second = [
            json.loads((path / f"tasks/{task}.json").read_text())["values"][task]
            for path in folders
        ]
        for metric, values in first.items():
            means = [f"{statistics.fmean(part):.4f}" for part in (values, second[metric])]
            cells.append([task, metric, "6", *means])
    assert [list(row.values())[:5] for row in rows] == cells and len(cells) > 4


ANSWERS = {"doc_to_choice": ["Oui", "Non, été"], "doc_to_target": "{{label}}"}
SPECS = {
    "newline": {"doc_to_text": "{{'\n' + text}}\n\n"} | ANSWERS,
    "none": {"doc_to_text": "{{text}}:"} | ANSWERS,
    "spaces": {"output_type": "loglikelihood", "doc_to_text": "{{text}} \u00a0 "}
    | {"doc_to_target": "{{text}}"},
    "contexts": {"doc_to_text": "{{label}}", "doc_to_choice": ["Oui \n", "é"]}
    | {"doc_to_target": "{{text}}"},
}


@pytest.mark.numerics
@pytest.mark.parametrize("spec", SPECS)
def test_bits_per_byte_divide_by_the_bytes_that_hflm_scores(clients, tmp_path, spec):
    """White space at a prompt's end is scored with the answer. With bytes as tokens, the harness'
    own pairs of token lists have as many tokens as bytes are scored.
    """
    theirs, ours = clients
    rows = [{"text": f"é{i}", "label": i % 2} for i in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    body = {"task": spec, "dataset_path": "json", "test_split": "test", "target_delimiter": " "}
    body["dataset_kwargs"] = {"data_files": {"test": str(tmp_path / "rows.jsonl")}}
    body |= {"output_type": "multiple_choice", "metric_list": [{"metric": "acc"}]} | SPECS[spec]
    (tmp_path / "spec.yaml").write_text(json.dumps(body))
    manager = tasks.build_task_manager(RIGHT)
    loaded = manager.load([str(tmp_path / "spec.yaml")])
    samples = lm_eval.evaluate(theirs, loaded, log_samples=True)["samples"][spec]
    wanted = []
    for sample in samples:
        right = 0 if spec == "spaces" else sample["doc"]["label"]
        _, scored = theirs._encode_pair(*sample["arguments"][right])
        wanted.append(-sample["resps"][right][0][0] / math.log(2) / len(scored))
    loaded = manager.load([str(tmp_path / "spec.yaml")])
    tasks.add_bits_per_byte(loaded["tasks"][spec])
    got = tasks.score_task(spec, loaded, ours)[spec]["bits_per_byte"]
    assert got == pytest.approx(sum(wanted) / 4, rel=1e-5)


@pytest.fixture
def evaluated(monkeypatch):
    """The tasks that are evaluated, each time; results are made up: accuracy 0.5 and the number of
    lines.
    """
    names = []

    def score(name, file, *given, **options):
        names.append(name)
        return {name: {"acc": 0.5, "documents": len(file.open().readlines())}}

    def files(manager, names, folder, scratch):
        return {name: downstream.local_file(folder, name) for name in names}

    monkeypatch.setattr(downstream, "score_task", score)
    monkeypatch.setattr(downstream, "load_tasks", files)
    return names


def test_finished_tasks_are_skipped_unless_their_file_changed(
    run, tmp_path, capsys, evaluated, monkeypatch
):
    folder = write_tasks(tmp_path / "tasks")
    other = write_tasks(tmp_path / "other", 2)
    assert call(run, "--tasks-dir", folder) == 0 and evaluated == list(downstream.TASKS)
    assert call(run, "--tasks-dir", folder) == 0 and len(evaluated) == 6
    assert "done already: arc_easy" in capsys.readouterr().out
    monkeypatch.chdir(tmp_path)  # by another path, and named twice
    assert call(run, run, "--tasks-dir", "tasks") == 0 and len(evaluated) == 6
    assert "minus the first's" not in capsys.readouterr().out
    file, time = folder / "piqa.jsonl", (folder / "piqa.jsonl").stat().st_mtime_ns
    file.write_text(file.read_text().replace("walk", "talk"))
    os.utime(file, ns=(time, time))  # of the same size and time, as rsync and tar may leave it
    assert call(run, "--tasks-dir", folder, "--tasks", "piqa", "piqa") == 0
    assert evaluated[6:] == ["piqa"]
    assert results(run)["results"]["piqa"]["documents"] == 6 and results(run)["average"] == 0.5
    assert call(run, "--tasks-dir", other, "--tasks", "piqa") == 0 and len(evaluated) == 8
    # no mix of two sources
    assert list(results(run)["results"]) == ["piqa"] and results(run)["average"] is None
    (run / "eval/step_00000004/tasks/piqa.json").write_text('{"key"')
    # a damaged file
    assert call(run, "--tasks-dir", other, "--tasks", "piqa") == 0 and len(evaluated) == 9
    assert "piqa is evaluated again" in capsys.readouterr().err
    # what rank 0 has read counts: another command may have written since
    monkeypatch.setattr(downstream.distributed, "gather", lambda *_: [{}])
    assert call(run, "--tasks-dir", other, "--tasks", "piqa") == 0 and len(evaluated) == 10


def test_results_of_an_earlier_version_are_not_compared(run, tmp_path, evaluated):
    """They lack the values of documents: a task is evaluated again to compare runs, else not."""
    folder = write_tasks(tmp_path / "tasks")
    other = shutil.copytree(run, tmp_path / "runs/other")
    words = ["--tasks-dir", folder, "--tasks", "piqa"]
    assert call(run, *words) == 0 and evaluated == ["piqa"]
    file = run / "eval/step_00000004/tasks/piqa.json"
    body = json.loads(file.read_text())
    del body["values"]
    file.write_text(json.dumps(body))
    assert call(run, *words) == 0 and evaluated == ["piqa"]
    assert call(run, other, *words) == 0 and evaluated == ["piqa"] * 3
    assert "values" in json.loads(file.read_text())


def test_each_checkpoint_and_trial_has_a_folder_and_a_key(run, tmp_path, evaluated):
    folder, weights = write_tasks(tmp_path / "tasks", 2), {}
    keys = ("dtype", "source", "step", "averaged_checkpoints", "num_fewshot", "limit")
    assert load_run(run, ema=True)[0].mean == "EMA of decay 0.5"
    for label, more, values in (
        ("step_00000002", ["--checkpoint", 2], [2, 1, 0, None]),
        ("step_00000004", [], [4, 1, 0, None]),
        ("step_00000004_1shot", ["--num-fewshot", 1], [4, 1, 1, None]),
        ("step_00000004_limit2", ["--limit", 2], [4, 1, 0, 2]),
        ("step_00000004_ema", ["--ema"], [4, 1, 0, None]),
        ("step_00000004_mean2", ["--average", 2], [4, 2, 0, None]),
    ):
        assert call(run, "--tasks-dir", folder, "--tasks", "sciq", *more) == 0
        report = results(run, label)
        assert [report[key] for key in keys] == ["float32", str(folder), *values]
        weights[label] = report["weights"]
        assert report.get("ema", False) == ("--ema" in more)
    assert sorted(path.name for path in (run / "eval").iterdir()) == sorted(weights)
    assert len(evaluated) == 6
    first, *last, mean = weights.values()
    assert len(set(last)) == 1 and len({first, *last, mean}) == 3  # the same weights, and others
    assert "Only the first 2 documents" in (run / "eval/step_00000004_limit2/table.md").read_text()
    shutil.rmtree(run / "checkpoints/step_00000002")
    # not part of the key
    assert call(run, "--tasks-dir", folder, "--tasks", "sciq") == 0 and len(evaluated) == 6


def test_killed_evaluation_resumes(run, tmp_path, monkeypatch, evaluated):
    """Tasks done before are kept, also those of another command meanwhile."""
    folder, evaluate = write_tasks(tmp_path / "tasks", 2), downstream.score_task

    def interrupted(*given, **options):
        if evaluated == ["sciq"]:
            monkeypatch.setattr(downstream, "score_task", evaluate)
            assert call(run, "--tasks-dir", folder, "--tasks", "winogrande") == 0
            raise KeyboardInterrupt
        return evaluate(*given, **options)

    monkeypatch.setattr(downstream, "score_task", interrupted)
    with pytest.raises(KeyboardInterrupt):
        call(run, "--tasks-dir", folder, "--tasks", "sciq", "piqa")
    assert call(run, "--tasks-dir", folder, "--tasks", "sciq", "piqa") == 0
    assert evaluated == ["sciq", "winogrande", "piqa"]
    assert list(results(run)["results"]) == [
        "piqa",
        "sciq",
        "winogrande",
    ]


def test_results_are_sent_to_the_runs_wandb(run, tmp_path, monkeypatch, evaluated):
    """Only for a finished run that logs to wandb; a failure there is one printed line."""
    kept = []

    class Fake:
        def summarize(self, *given):
            kept.append(given)
            raise OSError("no network")

    monkeypatch.setattr(downstream, "start_wandb", lambda config, folder, id: Fake())
    words = (run, "--tasks-dir", write_tasks(tmp_path / "tasks", 2), "--tasks", "piqa")
    assert call(*words) == 0 and not kept
    text = (run / "config.toml").read_text()
    (run / "config.toml").write_text(text.replace('wandb = "disabled"', 'wandb = "offline"'))
    # not the run's end, not all documents
    for less in ([], ["--checkpoint", 2], ["--limit", 1], ["--average", 2]):
        assert call(*words, *less) == 0
    ((values, name, head, rows, step),) = kept
    assert values == {"downstream/piqa/acc": 0.5, "downstream/piqa/documents": 2}
    assert step == 5 and name == "downstream/table" and head[0] == "task" and rows[0][0] == "piqa"
    assert call(*words[:3], "--num-fewshot", 1) == 0
    values, name, *_ = kept[1]
    assert name == "downstream_1shot/table" and values["downstream_1shot/sciq/acc"] == 0.5
    assert len(values) == 2 * 6 + 1 and values["downstream_1shot/average"] == 0.5


def test_errors_name_the_input(run, tmp_path, capsys, monkeypatch):
    import datasets
    from huggingface_hub import constants

    def error(*arguments):
        assert call(*arguments) == 2
        said = capsys.readouterr().err.strip()
        assert said.splitlines()[-1].startswith("error: ") and "Traceback" not in said
        return said.splitlines()[-1]

    folder = write_tasks(tmp_path / "tasks", 2)
    assert "--limit at least 1" in error(run, "--limit", 0)
    assert "--num-fewshot" in error(run, "--num-fewshot", -1)
    assert "not a run" in error(tmp_path, "--tasks-dir", folder)
    with (folder / "piqa.jsonl").open("a") as file:
        file.write('{"goal": "x\n')
    assert "piqa.jsonl: cannot be read as piqa" in error(
        run, "--tasks-dir", folder, "--tasks", "piqa"
    )
    said = error(run, "--tasks-dir", folder, "--tasks", "arc_easy", "--num-fewshot", 9)
    assert "arc_easy: lm-evaluation-harness failed" in said and "than --num-fewshot" in said
    odd = write_tasks(tmp_path / "ev[1]*", 2)  # no pattern
    assert call(run, "--tasks-dir", odd, "--tasks", "piqa") == 0

    def offline(*args, **options):
        raise ConnectionError("Couldn't reach 'allenai/sciq' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody answers
    shutil.rmtree(run / "eval")
    said = error(run, "--tasks", "sciq")
    assert constants.HF_HUB_OFFLINE and datasets.config.HF_HUB_OFFLINE
    assert not (run / "eval").exists()
    assert "(ConnectionError: Couldn't reach 'allenai/sciq' on the Hub)" in said
    assert "sciq.jsonl (--tasks-dir" in said


def test_table_of_results():
    """Each accuracy in its column, the mean of acc, the paper's figures where it has them, other
    metrics below.
    """
    config = configure.load(REPO_ROOT / "config/125m.toml", ["model.router=kern"])
    same = {"acc_stderr": 0.01, "acc_norm": 0.9, "acc_norm_stderr": 0.02, "documents": 7}
    same |= {"bits_per_byte": 1.5, "bits_per_byte_stderr": 0.25}
    six = {task: same | {"acc": 0.1 * i} for i, task in enumerate(downstream.TASKS)}
    head, rows = downstream.tabulate_results(six, config)
    assert head[2:] == ["acc", "acc_norm", "bits per byte", "chance", "paper"]
    assert rows[3] == [
        "piqa",
        "7",
        "0.3000 ± 0.0100",
        "0.9000 ± 0.0200",
        "1.5000 ± 0.2500",
        "0.5000",
        "0.7089",
    ]
    assert rows[6] == ["average", "", "0.2500", "", "", "0.3333", "0.5214"]
    del six["sciq"]
    assert len(downstream.tabulate_results(six, config)[1]) == 5  # no average of five
    gaps = {"text": {"nll": 1.0, "nll_stderr": 0.1, "documents": 3}}
    gaps["group"] = {"acc": 0.5, "documents": None}
    rows = [row[:3] for row in downstream.tabulate_results(gaps, config)[1]]
    assert rows[:2] == [["text", "3", ""], ["text: nll", "", "1.0000 ± 0.1000"]]
    assert rows[2:] == [["group", "", "0.5000"]]


# ---- eval/scoring.py
MARGIN = 1e-3  # of logits and router scores: more than rounding can change, so ranks are certain


def by_hand(model, context, continuation):
    """One forward pass over the pair; a pair that is too long loses its first tokens.

    Returns:
        The log-likelihood, whether the model would write the continuation, and the smallest margin
        of a rank.
    """
    ids = torch.tensor([[*context, *continuation][-(model.config.block_size + 1) :]])
    n = len(continuation)
    with torch.no_grad():
        logits = model.logits(model.hidden(ids[:, :-1])[0])[0, -n:].double()
        routings = record_routing(model, ids[:, :-1])
    targets = torch.tensor(continuation)[:, None]
    target = logits.gather(1, targets)
    best = logits.scatter(1, targets, -torch.inf).amax(1, keepdim=True)
    margins = [(target - best).abs().min().item()]
    for routing in routings:
        k = routing.experts.shape[1]
        last, next_ = routing.scores.topk(k + 1).values[:, -2:].T
        margins += (last - next_)[last > 0].tolist()  # a gate of 0 is the same for any expert
    logp = logits.gather(1, targets) - logits.logsumexp(1, keepdim=True)
    return logp.sum().item(), bool((target > best).all()), min(margins)


def assert_same_scores(got, wanted, margins, name):
    """Equal log-likelihoods and greedy flags of pairs, where the margins are large enough for both
    to be certain.
    """
    sure = [i for i, margin in enumerate(margins) if margin > MARGIN]
    assert len(sure) > len(margins) / 2
    sums = (torch.tensor([rows[i][0] for i in sure], dtype=torch.float64) for rows in (got, wanted))
    assert_near(*sums, tolerance(torch.float32, 32), name)
    assert [got[i][1] for i in sure] == [wanted[i][1] for i in sure]


def assert_as_by_hand(got, wanted, name):
    assert_same_scores(got, wanted, [margin for *_, margin in wanted], name)


@pytest.mark.numerics
@pytest.mark.parametrize(
    ("router", "pos", "tokens"),
    [
        ("kern", "rope", 1),
        ("kern", "learned", 64),
        ("softmax", "rope", 100_000),
        ("dense", "learned", 100_000),
    ],
)
def test_scores_equal_one_pass_per_pair(router, pos, tokens):
    model = small_model(**{"model.router": router, "model.pos": pos})
    rng = random.Random(SEED)
    pairs = []
    while len(pairs) < 30:
        context = [rng.randrange(64) for _ in range(rng.randint(1, 20))]
        for _ in range(rng.choice([1, 1, 2, 4])):
            pairs.append((context, [rng.randrange(64) for _ in range(rng.randint(1, 8))]))
    rng.shuffle(pairs)
    with torch.no_grad():
        best = [
            model.logits(model.hidden(torch.tensor([c[-16:]]))[0])[0, -1].argmax().item()
            for c, _ in pairs
        ]
    pairs += [(context, [token]) for (context, _), token in zip(pairs, best, strict=True)]
    pairs += [
        (context[-9:], [token, 1, 2]) for (context, _), token in zip(pairs[:9], best, strict=False)
    ]
    wanted = [by_hand(model, *pair) for pair in pairs]
    assert_as_by_hand(Scorer(model, tokens=tokens).score(pairs), wanted, router)
    assert {greedy for _, greedy, _ in wanted} == {True, False}


@pytest.mark.numerics
def test_continuation_longer_than_the_block():
    """Every token is scored after at least half a block, or after all tokens before it. The model
    would write the last piece, one token, and none of the others.
    """
    model, rng = small_model(**{"model.router": "dense"}), random.Random(SEED)
    context, continuation = ([rng.randrange(64) for _ in range(count)] for count in (5, 32))
    hidden, _ = model.hidden(torch.tensor([continuation[-16:]]))
    continuation.append(model.logits(hidden)[0, -1].argmax().item())
    ends = range(0, 33, 8)
    parts = [
        by_hand(model, (context + continuation)[: 5 + at], continuation[at : at + 8]) for at in ends
    ]
    assert [part[1] for part in parts] == [False] * 4 + [True]
    wanted = [
        (sum(part[0] for part in parts), False, 1.0),
        by_hand(model, context, continuation[:3]),
    ]
    assert_as_by_hand(
        Scorer(model).score([(context, continuation), (context, continuation[:3])]),
        wanted,
        "pieces",
    )


def test_logits_in_memory_are_few(monkeypatch):
    """Of three positions at a time here; scores are those of all at once."""
    model = small_model(**{"model.router": "dense"})
    pairs = [([1, 2, 3], [4, 5, 6, 7]), ([8], [9, 10])]
    wanted = Scorer(model).score(pairs)
    monkeypatch.setattr(scoring, "LOGITS", 3 * 64 + 63)
    sizes, logits = [], model.logits
    monkeypatch.setattr(model, "logits", lambda x: sizes.append(len(x)) or logits(x))
    for score, other in zip(Scorer(model).score(pairs), wanted, strict=True):
        assert score.greedy == other.greedy
        assert score.loglikelihood == pytest.approx(other.loglikelihood, rel=1e-5)
    assert sizes == [3, 3]


def test_random_numbers_are_the_harness_own_and_come_back():
    def draw():
        return random.random(), np.random.rand(), torch.rand(1).item()

    def seed():
        random.seed(5)
        np.random.seed(5)
        torch.manual_seed(5)
        return draw()

    seed()
    with tasks.fixed_seeds():
        inside = draw()
    after = draw()
    first = torch.rand(1, generator=torch.Generator().manual_seed(1234)).item()
    assert inside == (random.Random(0).random(), np.random.RandomState(1234).rand(), first)
    seed()
    assert after == draw()


class Recorder(LM):
    """Notes the requests of a task, and likes each answer equally."""

    def loglikelihood(self, requests):
        self.asked = [request.args for request in requests]
        likelihood = Loglikelihood(-1)
        likelihood.size = 1
        return [(likelihood, False)] * len(requests)

    loglikelihood_rolling = generate_until = None


def test_examples_in_a_prompt_are_those_of_the_harness(tmp_path):
    """As its own command chooses and orders them; the second time, too."""
    folder = write_tasks(tmp_path, 9)
    manager = tasks.build_task_manager(RIGHT)
    assert len(manager.all_tasks) < 99  # the whole index takes ten seconds
    loaded = tasks.load_tasks(manager, ["sciq"], folder, tmp_path)["sciq"]
    asked = []
    for _ in range(2):
        ours = Recorder()
        tasks.score_task("sciq", loaded, ours, num_fewshot=3)
        asked.append(ours.asked)
    theirs = Recorder()
    spec = tasks.write_task_spec(manager, "sciq", folder, tmp_path)
    lm_eval.simple_evaluate(
        theirs, tasks=[spec], task_manager=manager, num_fewshot=3, bootstrap_iters=0
    )
    assert asked == [theirs.asked] * 2 and theirs.asked[0][0].count("Question:") == 4
    loaded["tasks"]["sciq"].set_config(key="num_fewshot", value=0)  # such a task has none
    tasks.score_task("sciq", loaded, ours, num_fewshot=3)
    assert ours.asked[0][0].count("Question:") == 1
    ours.loglikelihood = mock.Mock(side_effect=RunError("an answer has no token"))
    with pytest.raises(RunError, match="^an answer has no token$"):
        tasks.score_task("sciq", loaded, ours)


def test_batches_hold_at_most_the_tokens_asked_for():
    lengths = [3, 9, 1, 40, 8, 8, 2]
    batches = list(batch_by_length(lengths, 16))
    assert batches == [[3], [1], [4, 5], [0, 6, 2]]  # one too long stands alone; the longest first
