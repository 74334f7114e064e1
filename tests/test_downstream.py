"""Tasks (eval/downstream.py, harness.py, scoring.py, tasks.py and in_loop.py) against the harness'
own client and command.
"""

import json
import math
import re
import shutil
import statistics
import sys
from functools import partial
from types import SimpleNamespace

import lm_eval
import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.models.huggingface import HFLM
from runs import (
    ALONE,
    REPO_ROOT,
    column,
    end,
    meet_in,
    metrics,
    modules_in,
    read_tables,
    start_ranks,
    wait_for_ranks,
)
from runs import run as train_run
from scipy import stats
from test_generation import small_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import configure
import train
from eval import downstream, scoring, tasks
from eval.harness import Adapter
from eval.in_loop import TaskScores
from eval.scoring import Scorer, scoring_dtype
from eval.trained import load_run
from hf.export.export import export_run
from model import GPT
from runtime import RankError, RunError
from runtime.folder import path_of
from runtime.launch import Stop

LONG = [
    "model.block_size=64",
    "optim.lr=0.05",
    "train.checkpoint_interval=2",
    "train.keep_checkpoints=9",
]


def ask(client, kind, arguments):
    requests = [
        Instance(request_type=kind, doc={}, arguments=one, idx=i) for i, one in enumerate(arguments)
    ]
    return getattr(client, kind)(requests, disable_tqdm=True)


@pytest.fixture(scope="module")
def clients(finished, tmp_path_factory):
    """The harness' own client of an export, and ours, in fp64: rounding decides no greedy answer.

    Ours has batches of few tokens.
    """
    folder = tmp_path_factory.mktemp("clients")
    trained, tokenizer = load_run(finished)
    export_run(trained, tokenizer, folder / "export")
    with modules_in(folder / "modules"):
        model = AutoModelForCausalLM.from_pretrained(folder / "export", trust_remote_code=True)
    read = AutoTokenizer.from_pretrained(folder / "export")
    theirs = HFLM(model.eval().double(), tokenizer=read, batch_size=4, max_length=64)
    return theirs, Adapter(Scorer(trained.model.double(), tokens=200), tokenizer)


@pytest.mark.numerics
def test_loglikelihoods_equal_hflms(clients):
    """With contexts that are shared, unshared, empty, only spaces, or too long, and the model's own
    next token.
    """
    theirs, ours = clients
    text = "the b\u00e9e in june \U0001f41d learns maps of fields"
    pairs = [("", "maps"), ("", " a"), ("x" * 80, "y" * 64), ("so", "y" * 63)]
    for stop in range(1, len(text)):
        context = text[:stop]
        logits = theirs.model(torch.tensor([list(context.encode())])).logits
        best = chr(logits[0, -1].argmax())
        answers = [" a", f" {context}", best, f"{best} or not"]
        pairs += [(context, answer) for answer in answers]
    got, wanted = (
        list(zip(*ask(client, "loglikelihood", pairs), strict=True)) for client in (ours, theirs)
    )
    assert got[0] == pytest.approx(wanted[0], rel=1e-5, abs=1e-6)
    assert got[1] == wanted[1] and len(set(got[1])) == 2
    # white space belongs to the answer; the harness' client refuses a context of nothing else
    assert ask(ours, "loglikelihood", [(" ", "bees")]) == ask(
        ours, "loglikelihood", [("", " bees")]
    )


def test_generation_and_an_answer_without_a_token_are_refused(clients):
    with pytest.raises(ValueError, match=f"'' after '{'x' * 58}so' has no token"):
        ask(clients[1], "loglikelihood", [("start" + "x" * 70 + "so", "")])
    # half a pair counts as one byte
    assert tasks.count_scored_bytes(" so  ", "\ud800é") == 2 + 1 + 2
    for kind in ("generate_until", "loglikelihood_rolling"):
        with pytest.raises(RunError, match="eval.val_loss.*scripts.export"):
            ask(clients[1], kind, [("x", {"until": []})])


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
    train.train(config := module_tiny(*LONG, "train.ema_decay=0.5"))
    return path_of(config)


@pytest.fixture
def run(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "runs/tiny")


def call(*arguments):
    return downstream.main(list(map(str, arguments)))


def results(run, label="step_00000004"):
    return json.loads((run / "eval" / label / "results.json").read_text())


def scores_of(report):
    """{task: metrics} of results.json."""
    scores = {}
    for task in report["tasks"].values():
        scores |= task["results"]
    return scores


# Of each task: the place of its right answer, and what the harness scores as this
RIGHT = {
    "arc_easy": (1, " bé"),  # of more bytes than characters
    "arc_challenge": (2, " z"),
    "hellaswag": (1, " is."),
    "piqa": (0, " walk"),
    "sciq": (3, " i"),
    "winogrande": (1, " b"),
}


@pytest.mark.numerics
def test_six_tasks_score_as_hflm_scores_the_export(run, clients, tmp_path, capsys):
    """Accuracies, and bits per byte of the right answers, by lm-evaluation-harness' own client.

    Another run's difference and interval by scipy from the values in results.json.
    """
    run = run.rename(tmp_path / "runs/kern")
    other = shutil.copytree(run, tmp_path / "runs/other")
    shutil.rmtree(other / "checkpoints/step_00000004")
    folder = write_tasks(tmp_path / "tasks")
    assert call(run, other, "--tasks-dir", folder, "--limit", 4) == 0
    (rows,) = read_tables(capsys.readouterr().out)
    reports = [results(run, "step_00000004_limit4"), results(other, "step_00000002_limit4")]
    assert (reports[0]["step"], reports[0]["key"]["dtype"]) == (4, "float32")
    all_scores = [scores_of(report) for report in reports]
    scores = all_scores[0]
    mean = statistics.fmean(values["acc"] for values in scores.values())
    table = (run / "eval/step_00000004_limit4/table.md").read_text()
    assert f"| average |  | {mean:.4f} |  |  | 0.3333 |  |" in table
    manager = tasks.build_task_manager(RIGHT)
    specs = [tasks.write_task_spec(manager, name, folder, tmp_path) for name in RIGHT]
    theirs = lm_eval.simple_evaluate(
        clients[0], tasks=specs, task_manager=manager, bootstrap_iters=1000, limit=4
    )
    for name, (place, answer) in RIGHT.items():
        bits = []
        for sample in theirs["samples"][name]:
            assert sample["arguments"][place][1] == answer
            nats = -sample["resps"][place][0][0]
            bits.append(nats / math.log(2) / len(answer.encode()))
        wanted = {"documents": 4, "bits_per_byte": statistics.fmean(bits)}
        wanted["bits_per_byte_stderr"] = statistics.stdev(bits) / 2
        for key, value in theirs["results"][name].items():
            if key.endswith(",none"):
                wanted[key.removesuffix(",none")] = value
        assert scores[name] == pytest.approx(wanted, rel=1e-4, abs=1e-6), name
    assert {row["task"] for row in rows} == set(RIGHT)
    for row in rows:
        task, metric, *shown = row.values()
        first, second = (report["tasks"][task]["values"][task][metric] for report in reports)
        means = [statistics.fmean(first), statistics.fmean(second)]
        assert means == pytest.approx([scores[task][metric] for scores in all_scores])
        assert shown[:3] == ["4", *(f"{mean:.4f}" for mean in means)]
        if metric == "bits_per_byte":  # the values of other metrics may be equal
            low, high = stats.ttest_rel(second, first).confidence_interval()
            assert shown[3] == f"{means[1] - means[0]:+.4f} [{low:+.4f}, {high:+.4f}]"


@pytest.fixture
def evaluated(monkeypatch):
    """The `names` of tasks that are evaluated, each time, and what happens `meanwhile`, {name:
    function}; results are made up.
    """
    record = SimpleNamespace(names=[], meanwhile={})

    def score(name, *given):
        record.names.append(name)
        record.meanwhile.pop(name, int)()
        return {name: {"acc": 0.5}}, {name: {}}

    monkeypatch.setattr(downstream, "score_task", score)
    monkeypatch.setattr(downstream, "load_tasks", lambda manager, names, *_: dict.fromkeys(names))
    return record


def test_finished_tasks_are_skipped_unless_their_file_changed(
    run, tmp_path, capsys, evaluated, monkeypatch
):
    """Also after a kill, and what another command has done meanwhile."""
    folder = write_tasks(tmp_path / "tasks")
    other = write_tasks(tmp_path / "other", 2)
    evaluated.meanwhile = {
        "arc_challenge": partial(call, run, "--tasks-dir", folder, "--tasks", "winogrande"),
        "piqa": sys.exit,
    }
    with pytest.raises(SystemExit):
        call(run, "--tasks-dir", folder)

    def score_again(tasks_dir, *names, count):
        """Evaluates `count` tasks, of the six by default."""
        evaluated.names.clear()
        names = names or DOCUMENTS
        assert call(run, "--tasks-dir", tasks_dir, "--tasks", *names) == 0
        assert len(evaluated.names) == count
        return capsys.readouterr()

    said = "done already: arc_easy, arc_challenge, hellaswag, winogrande ("
    assert said in score_again(folder, count=2).out
    monkeypatch.chdir(tmp_path)  # by another path
    assert re.search(r"^average +0.5000 +0.3333$", score_again("tasks", count=0).out, re.M)
    file = folder / "piqa.jsonl"
    file.write_text(file.read_text().replace("walk", "talk"))
    score_again(folder, "piqa", "piqa", count=1)
    assert len(results(run)["tasks"]) == 6
    score_again(other, "piqa", count=1)
    assert list(results(run)["tasks"]) == ["piqa"]  # no mix of two sources
    (run / "eval/step_00000004/results.json").write_text('{"key"')
    assert "all tasks are evaluated again" in score_again(other, "piqa", count=1).err
    # what rank 0 has read counts: another command may have written since
    monkeypatch.setattr(downstream.distributed, "gather", lambda *_: [{}])
    score_again(other, "piqa", count=1)


LABELS = {
    "step_00000002": "--checkpoint 2",
    "step_00000004": "",
    "step_00000004_0shot": "--num-fewshot 0",
    "step_00000004_1shot": "--num-fewshot 1",
    "step_00000004_limit2": "--limit 2",
    "step_00000004_ema": "--ema",
}


def test_each_checkpoint_and_trial_has_a_folder_and_a_key(run, tmp_path, evaluated):
    folder, weights = write_tasks(tmp_path / "tasks", 2), []
    for label, words in LABELS.items():
        assert call(run, "--tasks-dir", folder, "--tasks", "sciq", *words.split()) == 0
        weights.append(results(run, label)["key"]["weights"])
    assert len(evaluated.names) == len(LABELS)
    first, *last = weights
    assert len(set(last)) == 1 and first not in last  # of one checkpoint, and of another


@pytest.fixture
def offline(monkeypatch):
    """Nobody answers: neither the hub, nor its cache."""
    import datasets

    load_dataset = datasets.load_dataset

    def load(path, **options):
        if path == "json":
            return load_dataset(path, **options)
        raise ConnectionError("Couldn't reach 'allenai/sciq' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", load)


# {words after the run: the error}. TASKS is a folder of files, of which piqa's is damaged.
ERRORS = {
    "--limit 0": "--num-fewshot must be at least 0, --limit at least 1",
    "--num-fewshot -1": "--num-fewshot must be at least 0, --limit at least 1",
    "--tasks-dir TASKS --tasks piqa": "piqa.jsonl: cannot be read as piqa",
    "--tasks-dir TASKS --tasks arc_easy --num-fewshot 9": "than --num-fewshot",
    "--tasks-dir TASKS --tasks winogrande": "cannot be read as winogrande (KeyError: 'answer')",
    "--tasks-dir TASKS --tasks sciq": "sciq.jsonl: missing; the folder has arc_challenge, arc",
    "--tasks-dir TASKS/none --tasks sciq": "sciq.jsonl: missing; the folder has no .jsonl file",
    "--tasks-dir TASKS --tasks sciqq": "task sciqq: no such task; `lm_eval ls tasks` lists all",
    "--tasks-dir TASKS --tasks ai2_arc": "task ai2_arc: a group of tasks, or one in Python, cannot",
    "--tasks sciq": "(ConnectionError: Couldn't reach 'allenai/sciq' on the Hub). To use local",
}


@pytest.fixture
def few_tasks(monkeypatch):
    """The index of the paper's tasks, whatever is asked for; the whole takes ten seconds."""
    build = tasks.build_task_manager
    monkeypatch.setattr(tasks, "build_task_manager", lambda names: build(["sciq"]))


@pytest.mark.parametrize("words", ERRORS)
def test_errors_name_the_input(finished, tmp_path, capsys, offline, few_tasks, words):
    folder = write_tasks(tmp_path / "ev[1]*", 2)  # no pattern
    (folder / "sciq.jsonl").unlink()
    (folder / "piqa.jsonl").write_text('{"goal": "x\n')
    (folder / "winogrande.jsonl").write_text('{"sentence": "x"}\n')
    assert call(finished, *words.replace("TASKS", str(folder)).split()) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said.startswith("error: ") and ERRORS[words] in said
    assert not (finished / "eval").exists()


def test_table_of_results():
    """Each score in its column, the mean of acc, the paper's figures where it has them."""
    config = configure.load(REPO_ROOT / "config/125m.toml", ["model.router=kern"])
    same = {"acc_stderr": 0.01, "acc_norm": 0.9, "documents": 7, "bits_per_byte": 1.5}
    scores = {task: same | {"acc": 0.1 * i} for i, task in enumerate(tasks.TASKS)}
    scores["text"] = {"nll": 1.0, "nll_stderr": 0.1, "documents": 3}
    scores["group"] = {"acc": 0.5, "documents": None}

    def tabulate():
        return downstream.tabulate_results({"all": {"results": scores}}, config)

    head, rows = tabulate()
    assert head[2:] == ["acc", "acc_norm", "bits_per_byte", "nll", "chance", "paper"]
    assert rows[3] == [
        "piqa",
        "7",
        "0.3000 (SE 0.0100)",
        "0.9000",
        "1.5000",
        "",
        "0.5000",
        "0.7089",
    ]
    chances = [task.chance for task in tasks.TASKS.values()]
    assert statistics.fmean(chances) == pytest.approx(1 / 3)
    assert rows[6:] == [
        ["average", "", "0.2500", "", "", "", "0.3333", "0.5214"],
        ["text", "3", "", "", "", "1.0000 (SE 0.1000)", "", ""],
        ["group", "", "0.5000", "", "", "", "", ""],
    ]
    del scores["sciq"]
    assert len(tabulate()[1]) == 7  # no average of five


@pytest.mark.parametrize(
    ("target", "kind", "wanted"),
    [
        ([0, 1], "multiple_choice", 1),  # 6 bits for " three", 8 for " one"
        ("no", "multiple_choice", 3),
        (2, "multiple_choice", 3),
        ("four", "multiple_choice", None),
        (3, "multiple_choice", None),
        (-100, "multiple_choice", None),
        ("one", "loglikelihood", 2),
        ("one", "generate_until", None),
    ],
)
def test_bits_of_answers_that_are_several_or_none(target, kind, wanted):
    """The most likely of several right ones; a text to continue; an answer that is no choice. The
    harness logs documents out of order, and again by another filter.
    """
    task = SimpleNamespace(OUTPUT_TYPE=kind, multiple_input=0)
    task.doc_to_choice = lambda doc: ["one", "three", "no"]
    sample = {"doc": {}, "target": target, "metrics": ["acc"]}
    # the harness scores the space at a context's end with the answer
    sample["arguments"] = [("so ", "one"), ("so", " three"), ("so", " no")]
    sample["resps"] = [[(-bits * math.log(2), False)] for bits in (8, 6, 9)]
    samples = []
    for number, name in ((1, "none"), (0, "none"), (1, "strict")):
        samples.append(sample | {"doc_id": number, "filter": name, "acc": number})
    values = tasks.list_values(task, samples)
    assert values.pop("acc") == [0.0, 1.0]
    assert values == ({} if wanted is None else {"bits_per_byte": pytest.approx([wanted] * 2)})


# ---- eval/scoring.py


@pytest.mark.numerics
def test_answers_longer_than_the_block_are_scored_in_pieces():
    """17 tokens: pieces of 8, 8 and 1, each after what is before it. All are the likeliest ones,
    but the last of another answer.
    """
    model = small_model(**{"model.pos": "learned"}).double()
    ids = list(range(5))
    nats = 0.0
    for stop in [13] * 8 + [21] * 8 + [22]:
        with torch.no_grad():
            logits = model(torch.tensor([ids[max(0, stop - 17) :]])).logits[0, -1]
        nats += logits.log_softmax(-1).max().item()
        ids.append(logits.argmax().item())
    answers = [ids[5:], [*ids[5:-1], ids[-1] ^ 1], [7, 8]]
    pairs = [(ids[:5], answer) for answer in answers]
    for tokens in (1, 9999):
        likely, other, short = Scorer(model, tokens=tokens).score(pairs)
        assert likely == (pytest.approx(nats), True) and not other.greedy
        assert [short] == Scorer(model).score(pairs[2:])


class Recorder(LM):
    """Notes the requests of a task, and likes each answer equally."""

    def loglikelihood(self, requests):
        self.asked = [request.args for request in requests]
        return [(-1.0, False)] * len(requests)

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
    scores, _ = tasks.score_task("sciq", loaded, ours, limit=1)
    assert scores["sciq"]["documents"] == 1 and "bits_per_byte_stderr" not in scores["sciq"]
    for own, asked_for, wanted in ((0, 3, 0), (2, None, 2), (2, 0, 0), (None, None, 0)):
        loaded["tasks"]["sciq"].set_config(key="num_fewshot", value=own)
        tasks.score_task("sciq", loaded, ours, num_fewshot=asked_for)
        assert ours.asked[0][0].count("Question:") == 1 + wanted


def test_batches_hold_at_most_the_tokens_asked_for():
    pieces = []
    for number, length in enumerate([3, 9, 1, 40, 8, 8, 2]):
        pieces.append(scoring.Piece(number, torch.zeros(length), 1))
    batches = list(scoring.batch_by_length(pieces, 16))
    # one too long stands alone; the longest first
    numbers = [[piece.pair for piece in batch] for batch in batches]
    assert numbers == [[3], [1], [4, 5], [0, 6, 2]]


def test_a_cpu_scores_in_float32_whatever_the_run_trained_in(tiny):
    config = tiny("train.dtype=bfloat16")
    assert scoring_dtype(config, torch.device("cpu")) == torch.float32
    assert scoring_dtype(config, torch.device("cuda")) == torch.bfloat16  # as in training


# ---- eval/in_loop.py: scores while a run trains
@pytest.fixture
def folder(tmp_path):
    return write_tasks(tmp_path / "tasks", 5)


def scored(folder, names=DOCUMENTS, *more):
    return [f"eval.tasks={','.join(names)}", f"eval.tasks_dir={folder}", *more]


def test_scores_are_those_of_downstream_and_training_is_as_without(tiny, folder):
    own = [*LONG, "model.dropout=0.1", "eval.interval=1", "train.max_steps=5"]
    names = ["sciq", "hellaswag"]
    config = tiny(*own, *scored(folder, names, "eval.task_interval=2"))
    with_scores = [line for line in train_run(config) if "tasks/sciq/acc" in line]
    assert [line["step"] for line in with_scores] == [0, 2, 4, 5]  # the last step, too
    words = [path_of(config), "--tasks-dir", folder, "--tasks", *names]
    for line in with_scores[1:]:
        assert call(*words, "--checkpoint", line["step"]) == 0
        wanted = as_logged(path_of(config), f"step_{line['step']:08}")
        assert {key: value for key, value in line.items() if key.startswith("tasks/")} == wanted
        assert {"tasks/sciq/bits_per_byte", "tasks/hellaswag/acc_norm"} <= wanted.keys()
    bits = column(with_scores, "tasks/sciq/bits_per_byte")
    assert len(set(bits)) == 4 and min(bits) > 0
    train_run(alone := tiny(*own, "run.name=alone"))
    one, other = end(config), end(alone)
    assert one.tensors == other.tensors and one.facts == other.facts
    for line, plain in zip(one.lines, other.lines, strict=True):
        assert plain.items() <= line.items()


def as_logged(run, label):
    """The scores of eval.downstream by the names in metrics.jsonl."""
    wanted = {}
    for task, values in scores_of(results(run, label)).items():
        for key, value in values.items():
            if "stderr" not in key:
                wanted[f"tasks/{task}/{key}"] = value
    return wanted


def be_a_rank(file, folder):
    for parallel in ("ddp", "fsdp"):
        where = [f"train.parallel={parallel}", f"run.dir={file.parent / parallel}"]
        where += ["train.micro_batch_size=4", *LONG, *scored(folder, ["sciq", "piqa"])]
        meet_in(file.parent / f"{parallel}.store")
        train.train(configure.load(file, where, 2))


@pytest.mark.integration
def test_scores_on_two_ranks_are_those_of_downstream_alone(tiny, tiny_file, folder):
    wait_for_ranks(start_ranks(2, be_a_rank, tiny_file, folder), 300)
    for parallel in ("ddp", "fsdp"):
        config = tiny(*LONG, f"run.dir={tiny_file.parent / parallel}")
        words = ["--tasks-dir", folder, "--tasks", "sciq", "piqa"]
        assert call(path_of(config), *words) == 0
        wanted = as_logged(path_of(config), "step_00000004")
        assert len(wanted) == 8 and wanted.items() <= metrics(config)[-1].items(), parallel


def test_what_is_missing_is_said_before_the_first_step(tiny, folder, monkeypatch, few_tasks):
    def refused(message, name, kind=RankError):
        with pytest.raises(RunError, match=message) as caught:
            train.train(tiny(*scored(folder, [name])))
        assert type(caught.value) is kind

    refused("eval.tasks: task sciqq: no such task; `lm_eval", "sciqq")
    with monkeypatch.context() as patch:
        patch.setenv("LOCAL_RANK", "1")  # the first rank of the node reports what it lacks
        refused("eval.tasks: task zzz: no such task", "zzz", RunError)
    assert not path_of(tiny()).exists()
    with (folder / "piqa.jsonl").open("a") as file:
        file.write('{"goal": "x"}\n')
    said = "^piqa: lm-evaluation-harness failed .*; a document may lack a column"
    refused(said, "piqa", RunError)
    assert not metrics(tiny())
    monkeypatch.undo()  # the index of few_tasks
    monkeypatch.setattr("common.command.find_spec", lambda name: None)
    refused(r"eval.tasks: lm_eval not installed: pip install -r requirements/eval.txt", "piqa")


def test_scores_end_once_asked_to_stop(tiny, folder, monkeypatch):
    """Between batches; also if a task has ended meanwhile, and if another rank is asked."""
    config = tiny(*LONG, *scored(folder, ["hellaswag", "piqa"]))
    scores = TaskScores(config)
    model = GPT(config.model)
    stop = Stop()
    batches = []
    make_batch = scoring.make_batch

    def stop_after_a_batch(pieces):
        stop.asked = True
        batches.append(1)
        return make_batch(pieces)

    monkeypatch.setattr(scoring, "make_batch", stop_after_a_batch)
    monkeypatch.setattr("eval.in_loop.Scorer", partial(Scorer, tokens=64))
    assert scores(model, 0, ALONE, stop) is None and model.training and len(batches) == 1
    with pytest.raises(scoring.Interrupted):  # no scores of a part
        Scorer(model, tokens=1, is_stopped=lambda: True).score([([1], [2]), ([3], [4])])
    # a group of tasks has no number of documents
    results = {"group": {"acc": 0.5, "acc_stderr": 0.1, "documents": None}}
    monkeypatch.setattr("eval.in_loop.score_task", lambda *args, **_: (results, {}))
    assert scores(model, 0, ALONE, stop) is None
    stop.asked = False
    assert scores(model, 0, ALONE, stop) == {"tasks/group/acc": 0.5}
    monkeypatch.setattr("eval.in_loop.distributed.any_rank", lambda *_: [True])
    assert scores(model, 0, ALONE, stop) is None
