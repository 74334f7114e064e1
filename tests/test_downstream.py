"""eval/downstream.py and eval/harness.py: against HFLM, the harness' own client, and as a command."""

import json
import os
import random
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import WORDS as BASIC
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from runs import Forked, meet_in, modules_in, start_ranks
from test_scripts import small_model
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

import train
from data.tokenizer import ByteTokenizer
from eval import downstream
from eval.harness import Adapter
from eval.scoring import Scorer
from runtime import checkpoint, distributed, folder
from runtime.names import from_gpt2
from scripts.export.__main__ import export_run
from scripts.export.tokenizer_files import write_tokenizer

# ---- against HFLM


def gpt2_and_ours(block=32):
    """A random GPT2LMHeadModel, sharp enough to give both greedy and other answers, and our dense model with its
    weights, without biases, which are 0 at GPT-2's initialisation."""
    torch.manual_seed(3)
    shape = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_inner": 24, "vocab_size": 257, "n_positions": block}
    theirs = GPT2LMHeadModel(
        GPT2Config(**shape, activation_function="gelu", initializer_range=0.5, eos_token_id=256, bos_token_id=256)
    ).eval()
    ours = small_model(
        **{"model.router": "dense", "model.pos": "learned", "model.block_size": block, "model.vocab_size": 257},
        **{"model.top_k": 2, "model.expert_hidden": 12},
    )
    state = from_gpt2(theirs.transformer.state_dict())
    ours.load_state_dict({name: state[name] for name in ours.state_dict()})
    return theirs, ours


@pytest.fixture(scope="module")
def clients(tmp_path_factory):
    theirs, ours = gpt2_and_ours()
    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(ByteTokenizer(), path, 32)
    tokenizer = AutoTokenizer.from_pretrained(path)
    return HFLM(theirs, tokenizer=tokenizer, batch_size=3, max_length=32), Adapter(Scorer(ours), ByteTokenizer())


def ask(client, kind, arguments):
    requests = [Instance(request_type=kind, doc={}, arguments=one, idx=i) for i, one in enumerate(arguments)]
    return getattr(client, kind)(requests, disable_tqdm=True)


WORDS = [*BASIC, "\u00e9t\u00e9", "\U0001f41d"]


def words(rng, count):
    return " ".join(rng.choice(WORDS) for _ in range(count))


def test_loglikelihoods_equal_hflms(clients):
    """With contexts that are shared, unshared, empty, only spaces, or too long for the model."""
    theirs, ours = clients
    rng = random.Random(0)
    pairs = [(words(rng, rng.randint(1, 9)), " " + words(rng, rng.randint(1, 2))) for _ in range(60)]
    pairs += [(context, f" {letter}") for context, _ in pairs[:9] for letter in "abcd"]
    pairs += [("", "maps"), ("", " a"), ("in june ", "bees"), ("x" * 40, "y" * 32), ("so", "y" * 31), pairs[0]]
    wanted, got = ask(theirs, "loglikelihood", pairs), ask(ours, "loglikelihood", pairs)
    for (context, continuation), (logp, greedy), mine in zip(pairs, wanted, got, strict=True):
        assert mine == (pytest.approx(logp, abs=1e-4), greedy), (context, continuation)
    texts = [greedy for _, greedy in wanted]
    assert len(set(round(logp, 3) for logp, _ in wanted)) > 80 and not all(texts)


@pytest.mark.parametrize("router", ["kern", "softmax"])
def test_exported_moe_scores_like_the_run(router, tiny, tmp_path):
    """Through HFLM, with the model that transformers loads."""
    config = tiny(f"model.router={router}", "optim.lr=0.05")
    train.train(config)
    trained, tokenizer = export_run(folder.path_of(config), tmp_path / "export")
    with modules_in(tmp_path / "modules"):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "export", trust_remote_code=True).eval()
    theirs = HFLM(model, tokenizer=AutoTokenizer.from_pretrained(tmp_path / "export"), batch_size=4, max_length=32)
    rng = random.Random(2)
    pairs = [(words(rng, rng.randint(1, 7)), " " + rng.choice(WORDS)) for _ in range(30)]
    pairs += [(context, f" {letter}") for context, _ in pairs[:5] for letter in "abcd"]
    wanted = ask(theirs, "loglikelihood", pairs)
    got = ask(Adapter(Scorer(trained.model), tokenizer), "loglikelihood", pairs)
    assert [greedy for _, greedy in got] == [greedy for _, greedy in wanted]
    assert [logp for logp, _ in got] == pytest.approx([logp for logp, _ in wanted], abs=1e-4)
    assert len({round(logp, 3) for logp, _ in wanted}) > 30


def test_greedy_flags_equal_hflms(clients):
    """The model's own next token is greedy, another is not."""
    theirs, ours = clients
    pairs = []
    for context in (words(random.Random(i), 2) for i in range(40)):
        with torch.no_grad():
            said = theirs.model(torch.tensor([[*context.encode()]])).logits[0, -1].argmax().item()
        if 33 <= said < 127:
            pairs += [(context, chr(said)), (context, chr(159 - said))]
    wanted, got = ask(theirs, "loglikelihood", pairs), ask(ours, "loglikelihood", pairs)
    assert [greedy for _, greedy in got] == [greedy for _, greedy in wanted]
    assert [greedy for _, greedy in wanted] == [True, False] * (len(pairs) // 2) and len(pairs) > 6


def test_rolling_loglikelihoods_equal_hflms(clients):
    theirs, ours = clients
    texts = [(words(random.Random(i), i),) for i in (1, 3, 9, 30)]
    wanted, got = (ask(client, "loglikelihood_rolling", texts) for client in clients)
    assert got == pytest.approx(wanted, abs=1e-3) and len(texts[-1][0].encode()) > 4 * 32


def test_continuations_equal_hflms(clients):
    """Up to the first stop sequence or the end, also after contexts that are too long."""
    theirs, ours = clients
    rng = random.Random(1)
    free = [(words(rng, rng.randint(1, 9)), {"until": [], "max_gen_toks": 12 - 5 * (i % 2)}) for i in range(12)]
    wanted = ask(theirs, "generate_until", free)
    assert ask(ours, "generate_until", free) == wanted and any(wanted)
    ends = [{"until": [text[3:4] or "q", "\x00"], "max_gen_toks": 9} for text in wanted]
    stops = [(context, end) for (context, _), end in zip(free, ends, strict=True)]
    cut = ask(theirs, "generate_until", stops)
    assert ask(ours, "generate_until", stops) == cut != [text[:9] for text in wanted]


def test_sampled_continuations_depend_only_on_the_seed(clients):
    ours = clients[1]
    options = {"until": [], "max_gen_toks": 8, "do_sample": True, "temperature": 1.0, "top_k": 5}
    asked = [(words(random.Random(i), 3), options) for i in range(5)]
    first = ask(ours, "generate_until", asked)
    assert first == ask(ours, "generate_until", asked)
    assert first != ask(Adapter(ours.scorer, ByteTokenizer(), seed=1), "generate_until", asked)
    many = ask(ours, "generate_until", [asked[0]] * 64)
    assert many[:32] != many[32:] and len({*many[:32]}) > 3  # a draw each


def test_answer_without_a_token_is_refused(clients, monkeypatch):
    ours = clients[1]
    with pytest.raises(ValueError, match="an empty answer after 'so' cannot be scored; correct the task"):
        ask(ours, "loglikelihood", [("so", "")])
    monkeypatch.setattr(ours.tokens, "encode", lambda text: [1] * ((len(text) + 1) // 2), raising=False)
    with pytest.raises(ValueError, match="'e' after 'abc' shares its only token with the context, so no token is left"):
        ask(ours, "loglikelihood", [("abc", "e")])


def test_prompt_keeps_half_the_block(clients, capsys):
    ours = clients[1]
    request = ours.parse_request("maps " * 20, {"until": [], "max_gen_toks": 256})
    assert (len(request.prompt), request.max_new_tokens) == (16, 16)
    assert "256 new tokens are asked for, 16 are generated" in capsys.readouterr().out


# ---- the command

DOCUMENTS = {
    "arc_easy": {
        "question": "Q{i}?",
        "choices": {"text": ["a", "bb", "c{i}", "d"], "label": ["A", "B", "C", "D"]},
        "answerKey": "B",
    },
    "arc_challenge": {
        "question": "R{i}?",
        "choices": {"text": ["x", "y", "z"], "label": ["1", "2", "3"]},
        "answerKey": "3",
    },
    "hellaswag": {
        "activity_label": "Hop",
        "ctx_a": "He{i}",
        "ctx_b": "he",
        "ctx": "He he",
        "endings": ["hops.", "is.", "a", "b{i}"],
        "label": "1",
        "source_id": "",
    },
    "piqa": {"goal": "Go {i}", "sol1": "walk", "sol2": "fly {i}", "label": 0},
    "sciq": {
        "support": "S",
        "question": "T{i}?",
        "distractor1": "o",
        "distractor2": "u{i}",
        "distractor3": "e",
        "correct_answer": "i",
    },
    "winogrande": {"sentence": "A{i} _ b", "option1": "c", "option2": "d", "answer": "2"},
}


def write_tasks(path, count=6):
    path.mkdir(exist_ok=True)
    for name, document in DOCUMENTS.items():
        lines = [json.dumps(document).replace("{i}", str(i)) for i in range(count)]
        (path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def run(tiny):
    """A finished run of 4 steps, whose block holds the documents above."""
    config = tiny("model.block_size=64", "train.checkpoint_interval=2", "train.keep_checkpoints=3")
    train.train(config)
    return folder.path_of(config)


def call(*arguments):
    return downstream.main([*map(str, arguments)])


def results(run, label="step_00000004"):
    return json.loads((run / "eval" / label / "results.json").read_text())


def test_six_tasks_from_local_files(run, tmp_path, capsys, monkeypatch):
    """Accuracies by hand; finished tasks are skipped, except where their file has changed."""
    tasks, asked = write_tasks(tmp_path / "tasks"), []
    score = Adapter._loglikelihood_tokens
    monkeypatch.setattr(
        Adapter,
        "_loglikelihood_tokens",
        lambda self, requests, **options: asked.append(requests) or score(self, requests, **options),
    )
    assert call(run, "--tasks-dir", tasks) == 0
    found, out = results(run), capsys.readouterr().out
    assert [*found["results"]] == [*downstream.TASKS] and found["step"] == 4
    assert found["average"] == pytest.approx(sum(one["acc"] for one in found["results"].values()) / 6)
    assert f"| average |  | {found['average']:.4f} |  | 0.3333 |  |" in out and "no accuracies for router kern" in out
    assert all(one["documents"] == 6 and "acc_stderr" in one for one in found["results"].values())

    (requests,) = [batch for batch in asked if batch[0][0][0].startswith("Question: Q0")]
    trained, tokenizer = downstream.load_run(run)
    right = 0
    for i in range(6):
        values = []
        for answer in ("a", "bb", f"c{i}", "d"):
            context, continuation = tokenizer.encode(f"Question: Q{i}?\nAnswer:"), tokenizer.encode(f" {answer}")
            assert ((f"Question: Q{i}?\nAnswer:", f" {answer}"), context, continuation) in requests
            logits = trained.model.logits(trained.model.hidden(torch.tensor([context + continuation[:-1]]))[0])[0]
            logp = logits[len(context) - 1 :].log_softmax(-1)
            values.append(sum(row[token].item() for row, token in zip(logp, continuation, strict=True)))
        right += values[1] == max(values)
    assert found["results"]["arc_easy"]["acc"] == right / 6

    asked.clear()
    assert call(run, "--tasks-dir", tasks) == 0 and not asked and "done already: arc_easy" in capsys.readouterr().out
    (tasks / "piqa.jsonl").write_text((tasks / "piqa.jsonl").read_text() * 2)
    assert call(run, "--tasks-dir", tasks, "--tasks", "piqa") == 0 and len(asked) == 1
    assert results(run)["results"]["piqa"]["documents"] == 12 and results(run)["average"] is not None
    time = (tasks / "piqa.jsonl").stat().st_mtime_ns
    (tasks / "piqa.jsonl").write_text("\n".join((tasks / "piqa.jsonl").read_text().splitlines()[:5]) + "\n")
    os.utime(tasks / "piqa.jsonl", ns=(time, time))  # as rsync and tar leave it
    assert call(run, "--tasks-dir", tasks, "--tasks", "piqa", "piqa") == 0
    assert results(run)["results"]["piqa"]["documents"] == 5
    asked.clear()
    other = write_tasks(tmp_path / "other", 2)
    assert call(run, "--tasks-dir", other, "--tasks", "piqa") == 0 and len(asked) == 1
    assert [*results(run)["results"]] == ["piqa"] and results(run)["average"] is None  # no mix of two sources
    asked.clear()
    assert call(run, "--tasks-dir", tasks, "--tasks", "sciq", "--limit", 2) == 0 and len(asked) == 1
    assert results(run)["limit"] is None and results(run, "step_00000004_limit2")["results"]["sciq"]["documents"] == 2
    assert call(run, "--tasks-dir", tasks, "--tasks", "sciq", "--checkpoint", 2) == 0
    assert call(run, "--tasks-dir", tasks, "--tasks", "sciq", "--average", 2) == 0
    assert (results(run, "step_00000002")["step"], results(run, "step_00000004_mean2")["averaged_checkpoints"]) == (
        2,
        2,
    )


def test_killed_evaluation_resumes(run, tmp_path, monkeypatch):
    tasks, evaluate, done = write_tasks(tmp_path / "tasks", 2), downstream.evaluate_task, []

    def interrupted(manager, adapter, spec, args):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(Path(spec).stem)
        return evaluate(manager, adapter, spec, args)

    monkeypatch.setattr(downstream, "evaluate_task", interrupted)
    with pytest.raises(KeyboardInterrupt):
        call(run, "--tasks-dir", tasks)
    monkeypatch.setattr(
        downstream, "evaluate_task", lambda *given: done.append(Path(given[2]).stem) or evaluate(*given)
    )
    assert call(run, "--tasks-dir", tasks) == 0
    assert done == [*downstream.TASKS] and results(run)["average"] is not None


def evaluate_as_a_rank(meeting, arguments):
    meet_in(Path(meeting))
    raise SystemExit(downstream.main(arguments))


def generate_as_a_rank(meeting, folder):
    meet_in(Path(meeting))
    with distributed.process_group(torch.device("cpu")) as ranks:
        client = Adapter(Scorer(gpt2_and_ours()[1], ranks=ranks), ByteTokenizer())
        Path(folder, f"{ranks.rank}.json").write_text(json.dumps(ask(client, "generate_until", DRAWN)))


OPTIONS = {"until": ["\x00"], "max_gen_toks": 6, "do_sample": True, "temperature": 1.0}
DRAWN = [(words(random.Random(i), 1 + i % 5), OPTIONS) for i in range(80)]


def test_generation_is_the_same_on_two_ranks(clients, tmp_path):
    wanted = ask(clients[1], "generate_until", DRAWN)
    for rank in start_ranks(2, generate_as_a_rank, str(tmp_path / "meeting"), str(tmp_path)):
        assert rank.wait(120)[0] == 0
    assert [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)] == [wanted, wanted]


def test_other_weights_are_evaluated_again(run, tmp_path, capsys):
    """Results of another model are never reused."""
    tasks = write_tasks(tmp_path / "tasks", 2)
    assert call(run, "--tasks-dir", tasks, "--tasks", "piqa") == 0
    last = run / "checkpoints/step_00000004"
    shutil.rmtree(last)
    folder_now = json.loads((run / "checkpoints/step_00000002/manifest.json").read_text())["body"] | {"step": 4}
    shutil.copytree(run / "checkpoints/step_00000002", last)
    (last / "manifest.json").write_text(checkpoint._manifest_text(folder_now))
    capsys.readouterr()
    assert call(run, "--tasks-dir", tasks, "--tasks", "piqa") == 0 and "done already" not in capsys.readouterr().out


def test_two_commands_on_one_run_keep_all_results(run, tmp_path, monkeypatch):
    """The later table includes the results of the other command; a damaged file is evaluated again."""
    tasks, evaluate = write_tasks(tmp_path / "tasks", 2), downstream.evaluate_task

    def meanwhile(*given):
        monkeypatch.setattr(downstream, "evaluate_task", evaluate)
        assert call(run, "--tasks-dir", tasks, "--tasks", "sciq") == 0
        return evaluate(*given)

    monkeypatch.setattr(downstream, "evaluate_task", meanwhile)
    assert call(run, "--tasks-dir", tasks, "--tasks", "piqa") == 0
    assert [*results(run)["results"]] == ["piqa", "sciq"]
    (run / "eval/step_00000004/tasks/piqa.json").write_text('{"key"')
    assert call(run, "--tasks-dir", tasks, "--tasks", "piqa") == 0 and [*results(run)["results"]] == ["piqa", "sciq"]


def test_results_are_the_same_on_two_ranks(run, tmp_path):
    tasks = write_tasks(tmp_path / "tasks", 9)
    assert call(run, "--tasks-dir", tasks) == 0
    alone = results(run)
    (run / "eval").rename(run / "alone")
    arguments = [str(run), "--tasks-dir", str(tasks)]
    ends = [rank.wait(120) for rank in start_ranks(2, evaluate_as_a_rank, str(tmp_path / "meeting"), arguments)]
    assert [code for code, _ in ends] == [0, 0], ends
    assert results(run) == alone and "average" in ends[0][1] and "average" not in ends[1][1]


def test_results_are_sent_to_the_runs_wandb(run, tmp_path, monkeypatch):
    """Only for a finished run that logs to wandb; a failure there is one printed line."""
    kept = []

    class Fake:
        def summarize(self, *given):
            kept.append(given)

        def finish(self):
            raise OSError("no network")

    started = []
    monkeypatch.setattr(downstream, "start_wandb", lambda config, folder, id: started.append(id) or Fake())
    tasks = write_tasks(tmp_path / "tasks", 2)
    assert call(run, "--tasks-dir", tasks, "--tasks", "piqa") == 0 and not kept
    text = (run / "config.toml").read_text()
    (run / "config.toml").write_text(text.replace('wandb = "disabled"', 'wandb = "offline"'))
    assert call(run, "--tasks-dir", tasks, "--tasks", "piqa") == 0
    assert call(run, "--tasks-dir", tasks, "--tasks", "piqa", "--checkpoint", 2) == 0  # not the run's end
    ((values, name, head, rows, step),) = kept
    assert values["downstream/piqa/acc"] == results(run)["results"]["piqa"]["acc"] and started == [None]
    assert step == 5 and name == "downstream/table" and head[0] == "task" and rows[0][0] == "piqa"


def test_errors_name_the_input(run, tmp_path, capsys, monkeypatch):
    def error(*arguments):
        assert call(*arguments) == 2
        said = capsys.readouterr().err.strip()
        assert said.splitlines()[-1].startswith("error: ") and "Traceback" not in said
        return said.splitlines()[-1]

    tasks = write_tasks(tmp_path / "tasks", 2)
    assert "--limit at least 1" in error(run, "--limit", 0)
    assert "not a run" in error(tmp_path, "--tasks-dir", tasks)
    assert "no checkpoint of step 3" in error(run, "--tasks-dir", tasks, "--checkpoint", 3)
    (tasks / "sciq.jsonl").write_text('{"support": "", "question": ""}\n')
    assert "sciq.jsonl: no correct_answer, distractor1, distractor2" in error(run, "--tasks-dir", tasks)
    (tasks / "sciq.jsonl").write_text("nonsense\n")
    assert "sciq.jsonl: not JSON lines" in error(run, "--tasks-dir", tasks)
    (tasks / "sciq.jsonl").unlink()
    assert "sciq.jsonl: missing; --tasks-dir" in error(run, "--tasks-dir", tasks)
    good = (tasks / "piqa.jsonl").read_text()
    (tasks / "piqa.jsonl").write_text(good + good[:30] + "\n")
    assert "piqa.jsonl: cannot be read as piqa" in error(run, "--tasks-dir", tasks, "--tasks", "piqa")

    (run / "eval").rename(run / "kept")
    (run / "eval").touch()
    assert "eval/step_00000004 cannot be written" in error(run, "--tasks-dir", tasks, "--tasks", "arc_easy")
    (run / "eval").unlink()
    said = error(run, "--tasks-dir", tasks, "--tasks", "arc_easy", "--num-fewshot", 9)
    assert "arc_easy: lm-evaluation-harness failed" in said and "lower --num-fewshot" in said
    odd = write_tasks(tmp_path / "ev[1]*", 2)
    assert call(run, "--tasks-dir", odd, "--tasks", "piqa") == 0
    monkeypatch.setenv("RANK", "8")
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert "not a run" in error(tmp_path, "--tasks-dir", odd)  # of a second node
    monkeypatch.delenv("RANK")
    monkeypatch.delenv("LOCAL_RANK")

    import datasets

    def offline(*args, **options):
        raise ConnectionError("Couldn't reach 'allenai/sciq' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    said = error(run, "--tasks", "sciq")
    assert "hub (ConnectionError: Couldn't reach 'allenai/sciq' on the Hub)" in said and "--tasks-dir FOLDER" in said


def test_table_of_results_with_gaps(tiny):
    tasks = {"group": {"acc": 0.25, "documents": None}, "text": {"nll": 1.0, "nll_stderr": 0.1, "documents": 3}}
    head, rows = downstream.tabulate_results(tasks, tiny())
    assert rows[0] == ["group", "", "0.2500", "", "", ""]
    assert rows[1:] == [["text", "3", "", "", "", ""], ["text: nll", "", "1.0000 ± 0.1000", "", "", ""]]
    assert {len(row) for row in rows} == {len(head)}


def test_unknown_task(tmp_path):
    manager = downstream.build_task_manager(["arc_easy", "ai2_arc"])
    with pytest.raises(ValueError, match="--tasks hellswag: no such task; nearest: hellaswag"):
        downstream.check_tasks(manager, ["hellswag"], None)
    with pytest.raises(ValueError, match="--tasks ai2_arc: a group of tasks"):
        downstream.check_tasks(manager, ["ai2_arc"], tmp_path)
    downstream.check_tasks(manager, ["ai2_arc", "mmlu", "gsm8k", "lambada_openai"], None)
    assert {*downstream.TASKS} <= {*manager.all_subtasks}


def test_missing_harness_error_says_what_to_install(run):
    code, printed = Forked(partial(without_the_harness, str(run))).wait(60)
    assert code == 2 and "error: lm_eval not installed: pip install -r requirements-eval.txt" in printed


def without_the_harness(run):
    import sys

    sys.modules["lm_eval"] = None
    raise SystemExit(downstream.main([run]))


def test_paper_accuracies():
    import configure

    root = Path(__file__).parents[1]
    config = configure.load(root / "config/125m.toml", ["model.router=kern"])
    assert (
        downstream.paper_accuracies(config)["arc_easy"] == 0.5332
        and downstream.paper_accuracies(config)["average"] == 0.5214
    )
    assert downstream.paper_accuracies(configure.load(root / "config/350m.toml", ["model.router=kern-mc"])) == {}
