"""eval/generation.py and scripts/sample.py: draws, cached passes against full ones, the command; eval/trained.py."""

import json
import math
import re
import shutil
from functools import partial

import pytest
import torch
from corpora import write_ids
from numerics import seeded
from runs import REPO_ROOT

import configure
import train
from data.tokenizer import ByteTokenizer
from eval import generation
from eval.trained import load_model, load_run
from model import GPT
from runtime import RunError, folder
from runtime.folder import path_of
from scripts import sample


def sampled_probabilities(logits, temperature, top_k, top_p):
    """{token: probability} by brute force: divide, keep k, then the fewest whose mass reaches p."""
    ranked = sorted(range(len(logits)), key=lambda token: -logits[token])[: top_k or None]
    exps = [math.exp((logits[token] - max(logits)) / temperature) for token in ranked]
    chosen, mass = {}, 0.0
    for token, exp in zip(ranked, exps, strict=True):
        if mass < top_p:
            chosen[token] = exp / sum(exps)
            mass += chosen[token]
    return {token: probability / sum(chosen.values()) for token, probability in chosen.items()}


LOGITS = [0.3, 2.0, -1.0, 1.2, 0.0, 1.6]


SETTINGS = [(1.0, 0, 1.0), (0.5, 0, 1.0), (2.0, 3, 1.0), (0.8, 4, 0.6), (1.0, 0, 0.85)]


@pytest.mark.parametrize("temperature, top_k, top_p", SETTINGS)
def test_tokens_are_sampled_as_often_as_expected(temperature, top_k, top_p):
    generator, draws = torch.Generator().manual_seed(0), 3000
    choice = generation.SamplingParams(temperature, top_k, top_p)
    drawn = generation.sample_token(torch.tensor([LOGITS] * draws), choice, generator)
    counts = torch.bincount(drawn, minlength=len(LOGITS)).tolist()
    expected = sampled_probabilities(LOGITS, temperature, top_k, top_p)
    for token, count in enumerate(counts):
        p = expected.get(token, 0.0)
        assert abs(count - draws * p) <= 4 * math.sqrt(draws * p * (1 - p)), token


@pytest.mark.parametrize("choice", [{"temperature": 0}, {"temperature": 1e-45}, {"top_k": 1}, {"top_p": 1e-6}])
def test_greedy_in_several_ways(choice):
    drawn = generation.sample_token(torch.tensor([LOGITS, LOGITS[::-1]]), generation.SamplingParams(**choice))
    assert drawn.tolist() == [1, 4]


def small_model(**settings):
    values = {"model.n_embd": 32, "model.n_layer": 2, "model.n_head": 2, "model.block_size": 16, "model.vocab_size": 64}
    values |= {"model.expert_hidden": 8, "model.n_expert": 8, "model.top_k": 2, "model.init_std": 0.3, **settings}
    config = configure.load(REPO_ROOT / "config/125m.toml", [f"--{key}={value}" for key, value in values.items()]).model
    torch.manual_seed(0)
    return GPT(config).eval()


def without_cache(model, prompt, count):
    """The likeliest continuation, a pass over the last block for each token. No two tokens are equally likely."""
    ids = list(prompt)
    for _ in range(count):
        (first, second), (token, _) = model(torch.tensor([ids[-model.config.block_size :]])).logits[0, -1].topk(2)
        assert first - second > 1e-3  # rounding, on any CPU, is far below
        ids.append(token.item())
    return ids[len(prompt) :]


@pytest.mark.parametrize("pos", ["rope", "learned"])
def test_batch_of_prompts_continues_as_each_alone_without_a_cache(pos):
    model = small_model(**{"model.pos": pos, "model.router": "dense"})
    prompts = [[1, 2, 3], list(range(16)), [7]]
    got = list(generation.generate(model, prompts, 20, generation.SamplingParams(0)))
    wanted = [without_cache(model, prompt, 20) for prompt in prompts]
    assert [list(row) for row in zip(*got, strict=True)] == wanted
    assert len(set(map(tuple, wanted))) == 3 and len(set(sum(wanted, []))) > 4


def test_rows_end_one_by_one_and_padding_is_never_drawn():
    model = small_model()

    def sample_row(prompts, **more):
        drawn = generation.generate(model, prompts, 14, generation.SamplingParams(), seeded(), **more)
        return list(next(zip(*drawn, strict=True)))

    free = sample_row([[1], [2]])
    at = free.index(free[3]) + 1
    assert free[at] != free[3]  # which the row would sample if it had not ended
    row = sample_row([[1], [2]], end=free[3])
    assert row == free[:at] + [None] * (len(row) - at) and len(row) > at + 1
    free = sample_row([[1]])
    assert sample_row([[1]], end=free[3]) == free[: free.index(free[3]) + 1]  # and the model is not asked for more
    assert {*sample_row([[0]], vocab_size=3)} <= {0, 1, 2}


@pytest.fixture(scope="module")
def trained(module_tiny):
    train.train(config := module_tiny("train.checkpoint_interval=2"))
    return path_of(config)


def test_sample_continues_the_prompt_the_same_way_for_a_seed(trained, call):
    text = partial(call, sample.main, trained, "--prompt", "a bee ", "--tokens", 20)
    first = text("--seed", "1")
    assert first.startswith("a bee ") and len(first) > len("a bee \n")
    assert text("--seed", "1") == first
    assert text("--seed", "2") != first
    assert text("--step", "2", "--seed", "1") != first  # the weights of another checkpoint
    greedy = text("--temperature", "0", "--seed", "1")
    assert greedy == text("--top-k", "1", "--seed", "2")
    run, tokenizer = load_run(trained)
    for options, printed in (({"seed": 1}, first), ({"temperature": 0}, greedy)):
        assert generation.generate_text(run.model, tokenizer, "a bee ", tokens=20, **options) == printed[:-1]


def test_sample_prints_tokens_at_once_and_the_speed(trained, capsys, monkeypatch):
    """The pieces are the text; a character of several bytes waits for its last one. The prompt begins a document."""
    ids, asked, written = iter([*"é€x".encode(), 256, 0]), [], []
    monkeypatch.setattr(generation, "generate", lambda *args: asked.append(args) or ([next(ids)] for _ in range(7)))
    monkeypatch.setattr("builtins.print", lambda *words, **_: written.append("".join(map(str, words))))
    assert sample.main([str(trained), "--prompt", "à"]) == 0
    assert written[:-1] == ["à", "é", "€", "x", ""]
    assert re.fullmatch(r"6 tokens, [\d,.]+ tokens/s", written[-1])
    (_, prompts, count, _, _, vocab_size, end) = asked[0]
    assert (prompts, count, vocab_size, end) == ([[256, *"à".encode()]], 400, 257, 256)
    monkeypatch.setattr(generation, "generate", lambda *args: asked.append(args) or ([97] for _ in range(3)))
    assert sample.main([str(trained), "--prompt", "à", "--ignore-end", "--tokens", "7"]) == 0
    assert asked[1][2] == 7 and asked[1][-1] is None


def test_sample_refuses_bad_input(trained, tmp_path, call):
    def error(*words):
        (line,) = call(sample.main, *words, code=2).splitlines()
        return line

    assert "no such folder" in error(tmp_path / "nothing")
    assert "no checkpoint of step 3, it has 2, 4; name one of these" in error(trained, "--step", 3)
    assert "a prompt of 32 tokens" in error(trained, "--prompt", "x" * 32)
    call(sample.main, trained, "--prompt", "x" * 31, "--tokens", 1)
    for wrong in (("--temperature", -1), ("--top-k", -1), ("--top-p", 0), ("--top-p", 1.5), ("--tokens", 0)):
        assert wrong[0] in error(trained, *wrong)
    shutil.copytree(trained, tmp_path / "run", ignore=lambda *_: ["checkpoints"])
    assert "train it first" in error(tmp_path / "run")


# ---- eval/trained.py: a run's weights and tokenizer
@pytest.fixture
def run(tiny):
    """A run folder with checkpoints of steps 2, 4, 6 and 8, whose data set is named like the run."""
    config = tiny("train.max_steps=8", "train.checkpoint_interval=2", "train.keep_checkpoints=9")
    train.train(config)
    return folder.path_of(config)


def test_average_is_the_mean_of_the_last_checkpoints(run):
    states = [load_model(run, step).model.state_dict() for step in (4, 6)]
    mean = load_model(run, 6, average=2)
    assert (mean.step, mean.label) == (6, "step_00000006_mean2") and not mean.model.training
    for name, tensor in mean.model.state_dict().items():
        wanted = (states[0][name].double() + states[1][name].double()) / 2
        torch.testing.assert_close(tensor, wanted.float(), rtol=0, atol=0)
    assert not torch.equal(mean.model.wte.weight, states[1]["wte.weight"])
    last = load_model(run)
    assert (last.step, last.label) == (8, "step_00000008")
    for wrong, word in ((0, "name 1 to 4"), (5, "name 1 to 4")):
        with pytest.raises(ValueError, match=f"--average {wrong}: .* has 4 checkpoint.* {word}"):
            load_model(run, average=wrong)
    with pytest.raises(ValueError, match="name 1 to 1"):
        load_model(run, 2, average=2)


def test_tokenizer_is_the_runs_own(run, corpus, tmp_path, monkeypatch):
    """The data set's; without the set, the known one of the same hash; never another."""
    trained, tokenizer = load_run(run)
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    assert tokenizer.eot == 256 and [line["step"] for line in trained.metrics] == [line["step"] for line in lines]
    config = (run / "config.toml").read_text()
    (run / "config.toml").write_text(config.replace(corpus.as_posix(), (tmp_path / "gone").as_posix()))
    assert load_run(run)[1].eot == 256
    (tmp_path / "gone").mkdir()
    monkeypatch.setattr(ByteTokenizer, "hash", "0" * 64)
    with pytest.raises(ValueError, match="no known tokenizer is that of tiny"):
        load_run(run)
    write_ids(tmp_path / "gone/tiny", range(99), range(99), tokenizer=ByteTokenizer())
    assert json.loads((tmp_path / "gone/tiny/meta.json").read_text())["tokenizer"]["hash"] == "0" * 64
    with pytest.raises(ValueError, match="gone/tiny: its tokenizer .'bytes'. is not that of tiny"):
        load_run(run)


def test_damaged_checkpoints_are_named(run, capsys):
    *older, newest = sorted((run / "checkpoints").glob("step_*"))
    newest.rename(f"{newest}.damaged")
    assert load_model(run).step == 6
    assert "step 8 is damaged; using that of step 6" in capsys.readouterr().out
    for path in older:
        path.rename(f"{path}.damaged")
    with pytest.raises(RunError, match="it has none; damaged: 2, 4, 6, 8"):
        load_model(run)
