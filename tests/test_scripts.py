"""scripts/: sample, plan."""

import math
import re
import shutil
from functools import partial

import pytest
import torch
from conftest import write_tiny
from numerics import assert_near, seeded, tolerance
from runs import REPO_ROOT
from transformers import RepetitionPenaltyLogitsProcessor

import configure
import train
from attention import KVCache
from eval import generation
from model import GPT, parameter_shapes
from runtime import memory
from runtime.folder import path_of
from scripts import plan, sample


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


@pytest.mark.parametrize(
    "temperature, top_k, top_p",
    [(1.0, 0, 1.0), (0.5, 0, 1.0), (2.0, 3, 1.0), (1.0, 0, 0.7), (0.8, 4, 0.6), (1.0, 100, 1.0)],
)
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


def test_repetition_penalty_is_that_of_transformers():
    penalty, ids = 3.0, torch.tensor([[0, 3, 3], [0, 8, 2], [8, 8, 5]])
    logits = torch.stack([torch.linspace(*ends, 9) for ends in ((-1, 0.9), (-0.1, -0.9), (0.2, 1))])
    seen = torch.zeros(3, 9, dtype=torch.bool).scatter(1, ids, True)
    wanted = RepetitionPenaltyLogitsProcessor(penalty)(ids, logits.clone())
    assert wanted.argmax(1).tolist() == [8, 1, 7] and logits.argmax(1).tolist() == [8, 0, 8]  # so it matters
    params = generation.SamplingParams(0, repetition_penalty=penalty)
    assert generation.sample_token(logits, params, seen=seen).equal(wanted.argmax(1))


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


@pytest.mark.numerics
@pytest.mark.parametrize("pos", ["rope", "learned"])
@pytest.mark.parametrize("router", ["dense", "kern"])
def test_cached_logits_equal_those_of_full_passes(pos, router):
    """Rows of unequal length, some columns at once and one by one, and rows selected from a cache. In fp64."""
    model = small_model(**{"model.pos": pos, "model.router": router}).double()
    rows = [torch.randint(64, (length,), generator=seeded(length)).tolist() for length in (9, 11, 5)]
    start = torch.tensor([11 - len(row) for row in rows])
    idx = torch.tensor([[0] * (11 - len(row)) + row for row in rows])
    with torch.no_grad():
        cache = KVCache(model.config, start, 4, torch.float64)
        model(idx[:, :4], past=cache)
        cache = cache.select_rows(torch.tensor([2, 0, 1, 0]), 11)
        for first, last in ((4, 9), (9, 10), (10, 11)):
            logits = model(idx[[2, 0, 1, 0], first:last], past=cache).logits[:, 0]
            wanted = [model(torch.tensor([rows[i][: last - start[i]]])).logits[0, 0] for i in (2, 0, 1, 0)]
            assert_near(logits, torch.stack(wanted), tolerance(torch.float32, 32))  # rope rounds to fp32


@pytest.mark.parametrize("pos", ["rope", "learned"])
def test_batch_of_prompts_continues_as_each_alone_without_a_cache(pos):
    model = small_model(**{"model.pos": pos, "model.router": "dense"})
    prompts = [[1, 2, 3], list(range(16)), [7]]
    got = list(generation.generate(model, prompts, 20, generation.SamplingParams(0)))
    wanted = [without_cache(model, prompt, 20) for prompt in prompts]
    assert [list(row) for row in zip(*got, strict=True)] == wanted
    assert len(set(map(tuple, wanted))) == 3 and len(set(sum(wanted, []))) > 4


def test_generation_costs_a_column_a_token(monkeypatch):
    model, columns = small_model(), []
    hidden = model.hidden
    monkeypatch.setattr(model, "hidden", lambda idx, past: (columns.append(idx.shape[1]), hidden(idx, past))[1])
    assert len(list(generation.generate(model, [[1, 2, 3]], 16, generation.SamplingParams()))) == 16
    assert columns == [3] + [1] * 13 + [16, 16]


def test_repetition_penalty_covers_prompt_and_new_tokens():
    def continuation(penalty):
        params = generation.SamplingParams(0, repetition_penalty=penalty)
        return [token for (token,) in generation.generate(small_model(), [[1, 2]], 12, params)]

    assert len(set(continuation(1.0))) < 12  # so it matters
    assert len({1, 2, *continuation(1e6)}) == 14


def test_rows_end_one_by_one():
    model = small_model()

    def sample_rows(prompts, end=None):
        drawn = generation.generate(model, prompts, 14, generation.SamplingParams(), seeded(), end=end)
        return [list(row) for row in zip(*drawn, strict=True)]

    free = sample_rows([[1], [2]])[0]
    end = free[3]
    at = free.index(end) + 1
    assert free[at] != end  # which the row would sample if it had not ended
    row = sample_rows([[1], [2]], end)[0]
    assert row == free[:at] + [None] * (len(row) - at) and len(row) > at + 1
    free = sample_rows([[1]])[0]
    assert sample_rows([[1]], free[3])[0] == free[: free.index(free[3]) + 1]  # and the model is not asked for more


PARAMS = [generation.SamplingParams(0), generation.SamplingParams(), generation.SamplingParams(top_k=5)]


@pytest.mark.parametrize("choice", PARAMS, ids=["greedy", "sampled", "top_k"])
def test_padding_of_the_vocabulary_is_never_drawn(choice):
    tokens = list(generation.generate(small_model(), [[0]], 14, choice, vocab_size=3))
    assert {token for (token,) in tokens} <= {0, 1, 2}


@pytest.fixture(scope="module")
def trained(corpus, tmp_path_factory):
    config = configure.load(write_tiny(tmp_path_factory.mktemp("trained"), corpus), ["train.checkpoint_interval=2"])
    train.train(config)
    return path_of(config)


def test_sample_continues_the_prompt_the_same_way_for_a_seed(trained, call):
    text = partial(call, sample.main, trained, "--prompt", "a bee ", "--tokens", 20)
    first = text("--seed", "1")
    assert first.startswith("a bee ") and len(first) > len("a bee \n")
    assert text("--seed", "1") == first
    assert text("--seed", "2") != first
    assert text("--step", "2", "--seed", "1") != first  # the weights of another checkpoint
    assert text("--temperature", "0", "--seed", "1") == text("--top-k", "1", "--seed", "2")


def test_sample_prints_tokens_at_once_and_the_speed(trained, capsys, monkeypatch):
    """The pieces are the text; a character of several bytes waits for its last one. The prompt begins a document."""
    ids, asked, written = iter([*"é€x".encode(), 256, 0]), [], []
    monkeypatch.setattr(sample, "generate", lambda *args: asked.append(args) or ([next(ids)] for _ in range(7)))
    monkeypatch.setattr("builtins.print", lambda *words, **_: written.append("".join(map(str, words))))
    assert sample.main([str(trained), "--prompt", "à"]) == 0
    assert written[:-1] == ["à", "é", "€", "x", ""]
    assert re.fullmatch(r"7 tokens, [\d,.]+ tokens/s", written[-1])
    (_, prompts, count, _, _, vocab_size, end) = asked[0]
    assert (prompts, count, vocab_size, end) == ([[256, *"à".encode()]], 400, 257, 256)
    monkeypatch.setattr(sample, "generate", lambda *args: asked.append(args) or [])
    assert sample.main([str(trained), "--prompt", "à", "--ignore-end", "--tokens", "7"]) == 0
    assert asked[1][2] == 7 and asked[1][-1] is None


def test_sample_of_several_prompts(trained, call):
    text = partial(call, sample.main, trained, "--tokens", 9, "--temperature", 0, "--prompt")
    assert text("a bee ", "june") == f"--- 1 ---\n{text('a bee ')}--- 2 ---\n{text('june')}"


def test_sample_asks_for_prompts(trained, capsys, monkeypatch):
    prompts = iter(["june", "x" * 40, "kestrels"])
    monkeypatch.setattr("builtins.input", lambda _: next(prompts, None) or raise_(EOFError))
    assert sample.main([str(trained), "--tokens", "5"]) == 0
    said = capsys.readouterr()
    assert [line[:4] for line in said.out.splitlines() if line[:4] in ("june", "kest")] == ["june", "kest"]
    assert "a prompt of 40 tokens" in said.err and "at most 32 (model.block_size)" in said.err


def raise_(error):
    raise error


def test_sample_refuses_bad_input(trained, tmp_path, call):
    def error(*words):
        (line,) = call(sample.main, *words, code=2).splitlines()
        return line

    assert "no such folder" in error(tmp_path / "nothing")
    assert "no checkpoint of step 3, it has 2, 4; train" in error(trained, "--step", 3)
    assert "a prompt of 32 tokens" in error(trained, "--prompt", "x" * 32)
    call(sample.main, trained, "--prompt", "x" * 31, "--tokens", 1)
    for wrong in (("--temperature", -1), ("--top-k", -1), ("--top-p", 0), ("--top-p", 1.5), ("--tokens", 0)):
        assert wrong[0] in error(trained, *wrong)
    shutil.copytree(trained, tmp_path / "run", ignore=lambda *_: ["checkpoints"])
    assert "train it first" in error(tmp_path / "run")


def test_plan_of_the_largest_model(call):
    """6.9B parameters: 16 bytes each under DDP, an eighth of that on each of 8 GPUs under ZeRO-2 and FSDP2."""
    out = call(plan.main, REPO_ROOT / "config/1b3.toml", "--gpus", 8, "--memory", 80, "--mfu", 0.4)
    assert "6,952.4 M in all, 1,315.3 M active" in out and "6.55 B: 50,000 steps of 131,072" in out
    assert "checkpoint       77.7 GiB" in out and "host memory      207.2 GiB" in out  # 12 bytes, 4 on each of 8 ranks
    columns = [name.strip() for name in re.search(r"( +zero2.*)", out)[1].split("  ") if name]
    assert columns == [way + more for more in ("", ", checkpointing") for way in ("zero2", "ddp", "fsdp")]
    parts = {line.split()[0]: line.split()[1::2] for line in out.splitlines() if "iB   " in line}
    state = [sum(float(parts[part][i]) for part in ("weights", "gradients", "optimizer")) for i in (0, 1, 2)]
    assert [round(gib * 2**30 / 1e9) for gib in state] == [14, 111, 14]
    assert out.splitlines()[-1] == "--train.parallel=zero2"
    flops = configure.load(REPO_ROOT / "config/1b3.toml").train.max_steps * 131072 * 8.187e9
    hours = flops / 8 / 989e12 / 0.4 / 3600
    assert float(re.search(r"([\d.]+) h on 8 x H100", out)[1]) == pytest.approx(hours, abs=0.1)


@pytest.mark.parametrize(
    "words, last_line",
    [
        ("--gpus=16 --train.micro_batch_size=16", "--train.parallel=hsdp"),
        ("--gpus=4 --memory=24", "none fits"),
        # 43.2 GiB without checkpointing are more than 92%
        ("--gpus=8 --memory=45", "--train.activation_checkpointing=true"),
        ("--gpus=8 --memory=40 --train.micro_batch_size=16", "--train.parallel=fsdp"),
    ],
)
def test_plan_ends_with_what_to_choose(call, words, last_line):
    assert last_line in call(plan.main, REPO_ROOT / "config/1b3.toml", *words.split()).splitlines()[-1]


def test_plan_takes_the_mfu_of_a_run(tmp_path, call):
    file = REPO_ROOT / "config/125m.toml"
    lines = [f'{{"step": {i}, "tokens": {i}, "perf/mfu": {i / 10}}}\n' for i in (1, 2, 5)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    assert "at an MFU of 0.20" in call(plan.main, file, "--mfu", tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "tokens": 1}\n')
    assert "has no perf/mfu" in call(plan.main, file, "--mfu", tmp_path, code=2)


@pytest.mark.parametrize(
    "words, error",
    [
        (["--gpus=16"], "set --train.batch_size=512 or --train.micro_batch_size=16, or start 1, 2, 4, 8 ranks"),
        (["--gpus=0"], "--gpus 0: expected more than 0"),
        (["--mfu=0"], "--mfu 0: expected a number above 0"),
        (["--mfu=40"], "--mfu 40: expected a number above 0"),
    ],
)
def test_plan_refuses_bad_input(call, words, error):
    assert error in call(plan.main, REPO_ROOT / "config/1b3.toml", *words, code=2)


HEADS = ["--model.n_kv_head=2", "--model.pos=rope"]
GATED = ["--model.gated=true", "--model.activation=silu"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "router, more",
    [("dense", []), ("softmax", []), ("kern", []), ("dense", GATED), ("kern", [*GATED, "--model.n_shared_expert=2"])]
    + [("dense", HEADS), ("dense", HEADS[1:]), ("dense", HEADS[:1]), ("dense", ["--model.qk_norm=all"])]
    + [("kern", [*HEADS, *GATED, "--model.qk_norm=head"]), ("dense", [HEADS[1], "--model.qk_norm=head"])],
)
def test_activations_are_what_autograd_keeps(router, more, dtype):
    """Of one block more: bytes of the tensors saved for the backward pass that are neither weights nor their casts."""

    def measure(n_layer):
        sizes = "vocab_size=64 n_embd=192 block_size=256 expert_hidden=192 n_expert=16 top_k=4"
        words = [f"--model.{word}" for word in f"router={router} n_layer={n_layer} {sizes}".split()] + more
        model = configure.load(REPO_ROOT / "config/125m.toml", words).model
        gpt, sizes, alive = GPT(model), {}, []
        shapes = {tuple(p.shape) for p in gpt.parameters() if p.dim() > 1}
        shapes |= {shape[::-1] for shape in shapes}

        def pack(tensor):
            if tuple(tensor.shape) not in shapes:
                sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            alive.append(tensor)  # so that no address comes twice
            return tensor

        x = torch.zeros(8, 256, dtype=torch.int64).random_(64)
        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        with hooks, torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
            gpt(x, x)
        return sum(sizes.values()), model

    (two, model), (one, _) = measure(2), measure(1)
    assert memory.activation_bytes(model, 8 * 256, dtype, router == "dense") == pytest.approx(two - one, rel=0.05)


def test_shapes_without_the_model():
    model = configure.load(REPO_ROOT / "config/quickstart.toml", ["--model.router=kern-mc"]).model
    assert parameter_shapes(model) == {name: tuple(p.shape) for name, p in GPT(model).named_parameters()}
