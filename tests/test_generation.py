"""eval/generation.py with scripts/sample.py, and eval/trained.py: by hand, and as commands."""

import shutil

import pytest
import torch
from corpora import write_ids
from numerics import seeded
from runs import REPO_ROOT, change_facts
from transformers import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import configure
import train
from data.tokenizer import ByteTokenizer
from eval import generation
from eval.trained import load_model, load_run
from model import GPT
from runtime import RunError
from runtime.folder import path_of
from scripts import sample

LOGITS = torch.tensor([0.3, 2.0, -1.0, 1.2, 0.0, 1.6])


@pytest.mark.parametrize(
    "temperature, top_k, top_p",
    [(1.0, 0, 1.0), (0.5, 0, 1.0), (2.0, 3, 1.0), (0.8, 4, 0.6), (1.0, 0, 0.85), (0.09, 0, 1.0)],
)
def test_tokens_are_sampled_as_often_as_by_transformers(temperature, top_k, top_p):
    warpers = [TemperatureLogitsWarper(temperature), TopPLogitsWarper(top_p)]
    if top_k:
        warpers.insert(1, TopKLogitsWarper(top_k))
    expected = LogitsProcessorList(warpers)(None, LOGITS[None]).softmax(-1)[0]
    draws = 3000
    params = generation.SamplingParams(temperature, top_k, top_p)
    drawn = generation.sample_token(
        LOGITS.expand(draws, -1), params, torch.Generator().manual_seed(0)
    )
    off = drawn.bincount(minlength=6) / draws - expected
    assert (off.abs() <= 4 * (expected * (1 - expected) / draws).sqrt()).all(), off


def test_greedy_in_several_ways():
    for choice in ({"temperature": 0}, {"temperature": 1e-45}, {"top_k": 1}, {"top_p": 1e-6}):
        params = generation.SamplingParams(**choice)
        drawn = generation.sample_token(torch.stack([LOGITS, LOGITS.flip(0)]), params)
        assert drawn.tolist() == [1, 4], choice
    # one of two equal ones is enough for half of all
    half = generation.SamplingParams(top_p=0.5)
    assert len(generation.sample_token(torch.zeros(99, 2), half).unique()) == 1


SMALL = {
    "model.n_embd": 32,
    "model.n_layer": 2,
    "model.n_head": 2,
    "model.block_size": 16,
    "model.vocab_size": 64,
    "model.expert_hidden": 8,
    "model.n_expert": 8,
    "model.top_k": 2,
    "model.init_std": 0.3,
}


def small_model(**settings):
    words = [f"--{key}={value}" for key, value in (SMALL | settings).items()]
    torch.manual_seed(0)
    return GPT(configure.load(REPO_ROOT / "config/125m.toml", words).model).eval()


def without_cache(model, prompt, count):
    """The likeliest continuation, a pass over the last block for each token.

    No two tokens are equally likely.
    """
    ids = list(prompt)
    for _ in range(count):
        (first, second), (token, _) = (
            model(torch.tensor([ids[-model.config.block_size :]])).logits[0, -1].topk(2)
        )
        assert first - second > 1e-3  # rounding, on any CPU, is far below
        ids.append(token.item())
    return ids[len(prompt) :]


@pytest.mark.parametrize("pos", ["rope", "learned"])
def test_prompts_continue_as_without_a_cache(pos):
    """Also beyond the block, and from a prompt that is longer."""
    model = small_model(**{"model.pos": pos, "model.router": "dense"})
    texts = []
    for prompt in ([1, 2, 3], list(range(16)), [7], list(range(30))):
        texts.append(list(generation.generate(model, prompt, 20, generation.SamplingParams(0))))
        assert texts[-1] == without_cache(model, prompt, 20)
    assert len(set(map(tuple, texts))) == 4 and len(set(sum(texts, []))) > 4


def test_texts_end_and_padding_is_never_drawn():
    model = small_model()

    def draw(**more):
        params = generation.SamplingParams()
        return list(generation.generate(model, [1], 14, params, seeded(), **more))

    free = draw()
    assert draw(end=free[3]) == free[: free.index(free[3])] and len(free) == 14
    assert set(draw(vocab_size=3)) <= {0, 1, 2} and max(free) > 2


@pytest.fixture(scope="module")
def trained(module_tiny):
    """A run with checkpoints of steps 2, 4, 6 and 8, whose data set is named like the run."""
    own = ["train.max_steps=8", "train.checkpoint_interval=2", "train.keep_checkpoints=9"]
    train.train(config := module_tiny(*own))
    return path_of(config)


def test_sample_prints_what_generate_text_returns(trained, call):
    model, tokenizer = load_run(trained, 2)[0].model, ByteTokenizer()
    wanted = ""
    for prompt in ("a bee ", "maps"):
        text = generation.generate_text(model, tokenizer, prompt, 20, seed=1, temperature=0.7)
        wanted += f"{text}\n"
    words = ["--prompt", "a bee ", "maps", "--tokens", 20, "--seed", 1, "--temperature", 0.7]
    assert call(sample.main, trained, *words, "--checkpoint", 2) == wanted
    assert call(sample.main, trained, *words) != wanted and wanted.startswith("a bee ")
    assert generation.generate_text(model, tokenizer, "a bee ", tokens=0) == "a bee "


def test_sample_prints_characters_at_once(trained, capsys, monkeypatch):
    """A character waits for its last byte; a terminal gets control bytes escaped. The prompt begins
    a document, and a text ends at the next one's start, but with --ignore-end.
    """
    pieces = []
    monkeypatch.setattr(sample, "print", lambda *words, **_: pieces.append(words), raising=False)
    asked = []

    def sample_tokens(ids, *words):
        def generate(model, prompt, count, params, generator, vocab_size, end):
            asked.append((list(prompt), count, params, generator.initial_seed(), vocab_size, end))
            return ids

        monkeypatch.setattr(generation, "generate", generate)
        pieces.clear()
        assert sample.main([str(trained), *words]) == 0
        return [piece for (piece,) in filter(None, pieces)]

    *text, speed = sample_tokens([*"é€x".encode(), 0x1B, 0xC3], "--prompt", "à")
    assert text == ["à", "", "é", "", "", "€", "x", "\x1b", "", "\ufffd"]
    assert speed.startswith("8 tokens, ")
    assert "".join(sample_tokens("é".encode(), "--prompt", "a\ufffd")[:-1]) == "a\ufffdé"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    words = "--ignore-end --tokens 7 --seed 9 --temperature 0.5 --top-k 5 --top-p 0.9"
    assert "".join(sample_tokens([97, 0x1B, 10], *words.split())[:-1]) == "a\\x1b\n"
    assert asked[0] == ([256, *"à".encode()], 400, (0.8, 0, 1.0), 0, 257, 256)
    assert asked[2] == ([256], 7, (0.5, 5, 0.9), 9, 257, None)


SAMPLE_ERRORS = {
    "nothing": "no such folder",
    "RUN --checkpoint 3": "no checkpoint of step 3, it has 2, 4, 6, 8; name one of these",
    f"RUN --prompt {'x' * 32}": "a prompt of 32 tokens: with the token that begins a document",
    "RUN --temperature -1": "--temperature and --top-k must be at least 0",
    "RUN --top-k -1": "--temperature and --top-k must be at least 0",
    "RUN --top-p 0": "--top-p in (0, 1]",
    "RUN --top-p 1.5": "--top-p in (0, 1]",
    "RUN --tokens 0": "--tokens 0: expected 1 or more",
    "RUN --ema": "has no EMA of its weights (train.ema_decay = 0); leave --ema out",
    "EMPTY": "no checkpoint, it has none; train it first",
    "DAMAGED": "no checkpoint, it has none; damaged: 2, 4, 6, 8; train it first",
    "CHANGED --checkpoint 2": "step_00000002: its weights were trained with other settings",
}


@pytest.fixture(scope="module")
def faulty(trained, tmp_path_factory):
    """Copies of the run: without checkpoints, with damaged ones, with other settings."""
    folder = tmp_path_factory.mktemp("faulty")
    shutil.copytree(trained, folder / "EMPTY", ignore=lambda *_: ["checkpoints"])
    for path in (shutil.copytree(trained, folder / "DAMAGED") / "checkpoints").glob("step_*"):
        path.rename(f"{path}.damaged")
    path = shutil.copytree(trained, folder / "CHANGED") / "checkpoints/step_00000002"
    change_facts(path, lambda facts: facts["settings"].update({"model.gate_scale": 7.0}))
    return folder


@pytest.mark.parametrize("words", SAMPLE_ERRORS)
def test_errors_of_sample(trained, faulty, call, words):
    run, *more = words.replace("RUN", str(trained)).split()
    said = call(sample.main, faulty / run, *more, code=2)
    assert said.startswith("error: ") and SAMPLE_ERRORS[words] in said


def test_the_longest_prompt_and_intact_checkpoints_do(trained, faulty, call):
    call(sample.main, trained, "--prompt", "x" * 31, "--tokens", 1)
    call(sample.main, faulty / "CHANGED", "--tokens", 1)


# ---- eval/trained.py: a run's weights and tokenizer
@pytest.fixture
def run(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "tiny")


def test_last_intact_checkpoint_is_loaded(run, capsys):
    last = load_model(run)
    assert (last.step, last.label) == (8, "step_00000008") and not last.model.training
    (run / "checkpoints/step_00000002").rename(run / "checkpoints/step_00000002.damaged")
    assert load_model(run).step == 8 and "damaged" not in capsys.readouterr().out
    (run / "checkpoints/step_00000008").rename(run / "checkpoints/step_00000008.damaged")
    assert load_model(run).step == 6
    said = "it has 4, 6; damaged: 2, 8; using that of step 6"
    assert said in capsys.readouterr().out


def test_tokenizer_is_the_runs_own(run, corpus, tmp_path, monkeypatch):
    """The data set's; without the set, the known one of the same hash; never another. Of a mixture:
    test_mixture.py.
    """
    trained, tokenizer = load_run(run)
    assert tokenizer.eot == 256 and trained.metrics[-1]["step"] == 8
    file = run / "config.toml"
    file.write_text(file.read_text().replace(corpus.as_posix(), (tmp_path / "gone").as_posix()))
    assert load_run(run)[1].eot == 256
    (tmp_path / "gone").mkdir()
    monkeypatch.setattr(ByteTokenizer, "hash", "0" * 64)
    with pytest.raises(RunError, match="no known tokenizer is that of tiny"):
        load_run(run)
    write_ids(tmp_path / "gone/tiny", range(99), range(99), tokenizer=ByteTokenizer())
    with pytest.raises(ValueError, match="gone/tiny: its tokenizer .'bytes'. is not that of tiny"):
        load_run(run)
