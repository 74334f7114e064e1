"""eval/trained.py, eval/generation.py with scripts/sample.py, and eval/val_loss.py: runs, by hand
and as commands.
"""

import gzip
import json
import math
import re
import shutil
from functools import partial
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from corpora import jsonl, write_ids
from numerics import SEED, assert_near, seeded, tolerance
from runs import REPO_ROOT, read_tables
from runs import run as train_run
from scipy import stats

import configure
import train
from data import DataError
from data.tokenizer import ByteTokenizer, GPT2Tokenizer
from eval import generation, val_loss
from eval.scoring import Scorer, scoring_dtype
from eval.trained import load_model, load_run
from eval.val_loss import main, open_prepared, open_text
from model import GPT
from runtime import RunError, checkpoint, folder
from runtime import settings as run_settings
from runtime.folder import path_of
from runtime.manifest import format_manifest
from runtime.metrics import ARRAYS, read_metrics
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
SETTINGS = [
    (1.0, 0, 1.0),
    (0.5, 0, 1.0),
    (2.0, 3, 1.0),
    (0.8, 4, 0.6),
    (1.0, 0, 0.85),
    (0.09, 0, 1.0),
]


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


@pytest.mark.parametrize(
    "choice", [{"temperature": 0}, {"temperature": 1e-45}, {"top_k": 1}, {"top_p": 1e-6}]
)
def test_greedy_in_several_ways(choice):
    drawn = generation.sample_token(
        torch.tensor([LOGITS, LOGITS[::-1]]), generation.SamplingParams(**choice)
    )
    assert drawn.tolist() == [1, 4]
    if choice.get("top_p"):  # one of two equal ones is enough for half of all
        half = generation.SamplingParams(top_p=0.5)
        assert len(set(generation.sample_token(torch.zeros(99, 2), half).tolist())) == 1


def small_model(**settings):
    values = {
        "model.n_embd": 32,
        "model.n_layer": 2,
        "model.n_head": 2,
        "model.block_size": 16,
        "model.vocab_size": 64,
    }
    values |= {
        "model.expert_hidden": 8,
        "model.n_expert": 8,
        "model.top_k": 2,
        "model.init_std": 0.3,
        **settings,
    }
    config = configure.load(
        REPO_ROOT / "config/125m.toml", [f"--{key}={value}" for key, value in values.items()]
    ).model
    torch.manual_seed(0)
    return GPT(config).eval()


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
        drawn = generation.generate(
            model, prompts, 14, generation.SamplingParams(), seeded(), **more
        )
        return list(next(zip(*drawn, strict=True)))

    free = sample_row([[1], [2]])
    at = free.index(free[3]) + 1
    assert free[at] != free[3]  # which the row would sample if it had not ended
    row = sample_row([[1], [2]], end=free[3])
    assert row == free[:at] + [None] * (len(row) - at) and len(row) > at + 1
    free = sample_row([[1]])
    # and the model is not asked for more
    assert sample_row([[1]], end=free[3]) == free[: free.index(free[3]) + 1]
    assert set(sample_row([[0]], vocab_size=3)) <= {0, 1, 2}


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
    assert text("--checkpoint", "2", "--seed", "1") != first  # the weights of another checkpoint
    greedy = text("--temperature", "0", "--seed", "1")
    assert greedy == text("--top-k", "1", "--seed", "2")
    run, tokenizer = load_run(trained)
    write = partial(generation.generate_text, run.model, tokenizer)
    for options, printed in (({"seed": 1}, first), ({"temperature": 0}, greedy)):
        assert write("a bee ", tokens=20, **options) == printed[:-1]
    assert write("a bee ", tokens=0) == "a bee "
    several = call(sample.main, trained, "--temperature", 0, "--tokens", 5, "--prompt", "a", "bee")
    texts = [write(prompt, tokens=5, temperature=0) for prompt in ("a", "bee")]
    assert several == f"--- 1 ---\n{texts[0]}\n--- 2 ---\n{texts[1]}\n"


def test_sample_counts_the_new_tokens_alone(trained, capsys, monkeypatch):
    """On a clock that a sampled token turns by half a second; two prompts of 2 and 3 tokens."""
    passed = []
    sample_token = generation.sample_token
    monkeypatch.setattr(sample.time, "perf_counter", lambda: sum(passed))
    monkeypatch.setattr(
        generation, "sample_token", lambda *args: passed.append(0.5) or sample_token(*args)
    )
    arguments = [str(trained), "--ignore-end", "--tokens", "4", "--prompt"]
    for prompts, said in ((["ab"], "4 tokens, 2.0"), (["ab", "cde"], "8 tokens, 4.0")):
        assert sample.main([*arguments, *prompts]) == 0
        assert f"{said} tokens/s" in capsys.readouterr().err.splitlines()


def test_sample_prints_tokens_at_once_and_the_speed(trained, capsys, monkeypatch):
    """The pieces are the text; a character of several bytes waits for its last one.

    The prompt begins a document.
    """
    ids, asked, written = iter([*"é€x".encode(), 256, 0]), [], []
    monkeypatch.setattr(
        generation, "generate", lambda *args: asked.append(args) or ([next(ids)] for _ in range(7))
    )
    monkeypatch.setattr(
        "builtins.print", lambda *words, **_: written.append("".join(map(str, words)))
    )
    assert sample.main([str(trained), "--prompt", "à"]) == 0
    assert written[:-1] == ["à", "é", "€", "x", ""]
    (_, prompts, count, params, generator, vocab_size, end) = asked[0]
    assert (prompts, count, vocab_size, end) == ([[256, *"à".encode()]], 400, 257, 256)
    assert params == (0.8, 0, 1.0) and generator.initial_seed() == 0
    monkeypatch.setattr(
        generation, "generate", lambda *args: asked.append(args) or ([97] for _ in range(3))
    )
    assert sample.main([str(trained), "--ignore-end", "--tokens", "7", "--seed", "9"]) == 0
    _, prompts, count, _, generator, _, end = asked[1]
    assert (prompts, count, generator.initial_seed(), end) == ([[256]], 7, 9, None)
    # a terminal would obey control bytes, a file gets them as they are
    joined = "👩\u200d👧\u3000\u00a0\n\t".encode()  # which a terminal only shows
    for is_terminal, text in ((True, "\\x1b"), (False, "\x1b")):
        written.clear()
        monkeypatch.setattr("sys.stdout.isatty", lambda is_terminal=is_terminal: is_terminal)
        tokens = [[token] for token in (0x1B, *joined)]
        monkeypatch.setattr(generation, "generate", lambda *args, ids=tokens: ids)
        assert sample.main([str(trained), "--prompt", "à"]) == 0
        assert "".join(written[:-1]) == f"à{text}{joined.decode()}"
        written.clear()
        monkeypatch.setattr(generation, "generate", lambda *args: [[0x1B, 0x1B]])
        assert sample.main([str(trained), "--prompt", "à", "b"]) == 0
        assert written[:-1] == [f"--- 1 ---\nà{text}", f"--- 2 ---\nb{text}"]


def test_sample_refuses_bad_input(trained, tmp_path, call):
    def error(*words):
        (line,) = call(sample.main, *words, code=2).splitlines()
        return line

    assert "no such folder" in error(tmp_path / "nothing")
    assert "no checkpoint of step 3, it has 2, 4; name one of these" in error(
        trained, "--checkpoint", 3
    )
    assert "a prompt of 32 tokens" in error(trained, "--prompt", "x" * 32)
    call(sample.main, trained, "--prompt", "x" * 31, "--tokens", 1)
    for wrong in (
        ("--temperature", -1),
        ("--top-k", -1),
        ("--top-p", 0),
        ("--top-p", 1.5),
        ("--tokens", 0),
    ):
        assert wrong[0] in error(trained, *wrong)
    shutil.copytree(trained, tmp_path / "run", ignore=lambda *_: ["checkpoints"])
    assert "train it first" in error(tmp_path / "run")


# ---- eval/trained.py: a run's weights and tokenizer
@pytest.fixture
def run(tiny):
    """A run with checkpoints of steps 2, 4, 6 and 8, whose data set is named like the run."""
    config = tiny("train.max_steps=8", "train.checkpoint_interval=2", "train.keep_checkpoints=9")
    train.train(config)
    return folder.path_of(config)


def test_average_is_the_mean_of_the_last_checkpoints(run, monkeypatch):
    """A checkpoint's description, which is as long as the model is deep, is read once."""
    states = [load_model(run, step).model.state_dict() for step in (2, 4, 6)]
    unpickler = mock.Mock(wraps=checkpoint.TensorUnpickler)
    monkeypatch.setattr(checkpoint, "TensorUnpickler", unpickler)
    mean = load_model(run, 6, average=3)
    assert unpickler.call_count == 3
    assert (mean.step, mean.label) == (6, "step_00000006_mean3") and not mean.model.training
    lazy = load_model(run, 6, average=3, lazy=True)
    for name, tensor in mean.model.state_dict().items():
        wanted = sum(state[name].double() for state in states) / 3
        torch.testing.assert_close(tensor, wanted.float(), rtol=0, atol=0)
        assert torch.equal(lazy.state[name], tensor)
    assert not torch.equal(mean.model.wte.weight, states[2]["wte.weight"])
    last = load_model(run)
    assert (last.step, last.label) == (8, "step_00000008")
    for wrong, word in ((0, "name 1 to 4"), (5, "name 1 to 4")):
        said = rf"--average {wrong}: .* has 4 checkpoint\(s\) up to step 8; {word}, or train"
        with pytest.raises(ValueError, match=said):
            load_model(run, average=wrong)
    with pytest.raises(ValueError, match="up to step 2; name 1 to 1"):
        load_model(run, 2, average=2)
    path = run / "checkpoints/step_00000004"
    body = checkpoint.read_manifest(path)
    body["facts"][run_settings.SETTINGS]["model.gate_scale"] = 7.0
    (path / checkpoint.MANIFEST).write_text(format_manifest(body))
    load_model(run, 8, average=2)
    with pytest.raises(RunError, match="step_00000004: its weights were trained with other"):
        load_model(run, 8, average=3)


def test_tokenizer_is_the_runs_own(run, corpus, tmp_path, monkeypatch):
    """The data set's; without the set, the known one of the same hash; never another."""
    trained, tokenizer = load_run(run)
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    assert tokenizer.eot == 256
    assert [line["step"] for line in trained.metrics] == [line["step"] for line in lines]
    config = (run / "config.toml").read_text()
    (run / "config.toml").write_text(
        config.replace(corpus.as_posix(), (tmp_path / "gone").as_posix())
    )
    assert load_run(run)[1].eot == 256
    (tmp_path / "gone").mkdir()
    monkeypatch.setattr(ByteTokenizer, "hash", "0" * 64)
    with pytest.raises(ValueError, match="no known tokenizer is that of tiny"):
        load_run(run)
    write_ids(tmp_path / "gone/tiny", range(99), range(99), tokenizer=ByteTokenizer())
    assert (
        json.loads((tmp_path / "gone/tiny/meta.json").read_text())["tokenizer"]["hash"] == "0" * 64
    )
    config = (run / "config.toml").read_text()  # the first set of a mixture is missing
    (run / "config.toml").write_text(config.replace("mix = {}", "mix = {absent = 1.0, tiny = 1.0}"))
    with pytest.raises(ValueError, match="gone/tiny: its tokenizer .'bytes'. is not that of tiny"):
        load_run(run)


def test_damaged_checkpoints_are_named(run, capsys):
    oldest, *older, newest = sorted((run / "checkpoints").glob("step_*"))
    oldest.rename(f"{oldest}.damaged")
    assert load_model(run).step == 8 and "damaged" not in capsys.readouterr().out
    newest.rename(f"{newest}.damaged")
    assert load_model(run).step == 6
    assert "step 8 is damaged; using that of step 6" in capsys.readouterr().out
    for path in older:
        path.rename(f"{path}.damaged")
    with pytest.raises(RunError, match="it has none; damaged: 2, 4, 6, 8"):
        load_model(run)


def test_a_cpu_scores_in_float32_whatever_the_run_trained_in(tiny):
    config = tiny("train.dtype=bfloat16")
    assert scoring_dtype(config, torch.device("cpu")) == torch.float32
    assert scoring_dtype(config, torch.device("cuda")) == torch.bfloat16  # as in training


# ---- eval/val_loss.py: which tokens are scored after which, the run's own logged loss, bytes, bad
# input
EOT = 256
TEXT = "Ünder the bëe, june learns maps. " * 2  # 70 bytes: 3 windows of 32, the last one short


@pytest.fixture(scope="module")
def dense_run(module_tiny):
    """A run folder with checkpoints of steps 2 and 4; its data.dir holds only `tiny`.

    Dense: a router's choice could depend on the batch, where two experts are equal but for
    rounding.
    """
    # 6 windows: 4, then 2
    own = ["train.micro_batch_size=4", "train.checkpoint_interval=2", f"run.seed={SEED}"]
    own += ["train.ema_decay=0.5", "eval.spread=tokens"]
    train_run(config := module_tiny("model.router=dense", "run.name=dense", *own))
    return folder.path_of(config)


@pytest.fixture
def score(dense_run, capsys):
    """score("--stride", 8): the lines of JSON that the command writes, and what it prints."""

    def call(*arguments):
        file = dense_run / "eval/step_00000004/val_loss.json"
        file.unlink(missing_ok=True)
        assert main([str(dense_run), *map(str, arguments)]) == 0
        return [json.loads(line) for line in file.read_text().splitlines()], capsys.readouterr().out

    return call


@torch.no_grad()
def by_hand(model, documents, block, stride):
    """Nats of each token of `documents` but the first of each, from the definition: windows begin
    at multiples of
    `stride`, and the first that holds a token among its targets scores it."""
    nats = []
    for ids in documents:
        for at in range(1, len(ids)):
            start = next(
                start for start in range(0, len(ids), stride) if start < at <= start + block
            )
            # by a forward pass of its own
            logits = model(torch.tensor([ids[start:at]])).logits[0, -1]
            nats.append(-logits.double().log_softmax(-1)[ids[at]].item())
    return nats


def assert_close(measured, wanted, name):
    """Equal but for the rounding of fp32 in the model; sums over windows are in fp64."""
    values = (torch.tensor([float(value)], dtype=torch.float64) for value in (measured, wanted))
    assert_near(*values, tolerance(torch.float32, 32), name)


def test_files_after_the_run_are_texts(dense_run, score, tmp_path, monkeypatch):
    """As with --data, before and after options, whatever their endings."""
    monkeypatch.chdir(tmp_path)
    texts = {"a.txt": "one word", "b.py": "print(2)", "NOTES": "three little words"}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    wanted, _ = score("--stride", 8, "--data", *texts)
    lines, _ = score("a.txt", "--stride", 8, "b.py", "NOTES")
    assert lines == wanted and [line["data"] for line in lines] == list(texts)


@pytest.mark.numerics
def test_loss_equals_the_logged_one(dense_run, score):
    steps = {
        line["step"]: line
        for line in read_metrics(dense_run / "metrics.jsonl", ARRAYS)
        if "val/loss" in line
    }
    (line,), _ = score()
    losses = np.array(steps[4]["val/window_losses"])
    assert_close(line["loss"], losses.mean(), "loss")
    assert main([str(dense_run)]) == 0
    # results are added
    assert (dense_run / "eval/step_00000004/val_loss.json").read_text().count("\n") == 2
    assert (line["windows"], line["tokens"], line["split"], line["step"]) == (6, 6 * 32, "val", 4)
    labels = np.unique(steps[4]["val/window_documents"], return_inverse=True)[1]
    apart = losses - losses.mean()  # windows of equal length: the variance of a mean over documents
    parts = [
        (apart[labels == document].sum() ** 2, (labels == document).mean())
        for document in range(max(labels) + 1)
    ]
    variance = sum(square / (1 - share) for square, share in parts) / 6**2
    assert line["stderr"] == pytest.approx(math.sqrt(variance), rel=1e-3)
    assert line["perplexity"] == pytest.approx(math.exp(line["loss"]))
    assert abs(steps[2]["val/loss"] - steps[4]["val/loss"]) > 1e-3  # so step and checkpoint matter
    assert main([str(dense_run), "--checkpoint", "2"]) == 0
    line = json.loads((dense_run / "eval/step_00000002/val_loss.json").read_text())
    assert_close(line["loss"], steps[2]["val/loss"], "loss of step 2")


@pytest.mark.numerics
@pytest.mark.parametrize("stride, at_once", [(None, 8192), (8, 40)])
def test_text_is_scored_as_defined(dense_run, score, tmp_path, monkeypatch, stride, at_once):
    monkeypatch.setattr(val_loss, "Scorer", partial(Scorer, tokens=at_once))
    monkeypatch.setattr(val_loss, "WINDOWS", 4)
    texts = [TEXT, "x", " \n", "kestrels dance", "é" * 20]
    (tmp_path / "many.jsonl").write_bytes(jsonl(texts))
    file = tmp_path / "one.txt.gz"
    file.write_bytes(gzip.compress(b"a bee"))
    lines, printed = score(
        "--data", tmp_path / "many.jsonl", file, *([] if stride is None else ["--stride", stride])
    )
    model = load_model(dense_run).model
    for line, documents in zip(lines, ([TEXT, "x", *texts[3:]], ["a bee"]), strict=True):
        nats = by_hand(model, [[EOT, *text.encode()] for text in documents], 32, stride or 32)
        size = len("".join(documents).encode())
        assert line["tokens"] == line["bytes"] == len(nats) == size
        assert_close(line["loss"], np.mean(nats), "loss")
        assert_close(line["bits_per_byte"], sum(nats) / math.log(2) / size, "bits per byte")
        assert line["split"] is None
    assert lines[0]["stderr"] > 0 and lines[1]["stderr"] is None  # of one window
    (rows,) = read_tables(printed)
    assert [list(row.values()) for row in rows] == [format_scores(line) for line in lines]
    said = "no overlap" if stride is None else f"stride {stride}"
    assert printed.startswith(f"{dense_run}, step 4; {said}\n")
    few, _ = score("--data", tmp_path / "many.jsonl", "--stride", 8, "--windows", 3)
    assert few[0]["tokens"] == 32 + 8 + 8  # the first three
    few, _ = score("--data", tmp_path / "many.jsonl", "--windows", 3)
    assert few[0]["tokens"] == 32 + 6 + 14  # windows 0, 2 and 4 of 7, the third of the first text
    assert [line["windows"] for line in lines] == (
        [3 + 1 + 1 + 2, 1] if stride is None else [6 + 1 + 1 + 2, 1]
    )


@pytest.mark.numerics
def test_windows_overlap_from_the_start_of_a_set(dense_run, score, corpus):
    tokens = np.fromfile(corpus / "tiny/val-00000.bin", "<u2").tolist()
    (line,), out = score("--stride", 20, "--windows", 3)
    ids = tokens[: 32 + 2 * 20 + 1]
    assert (line["windows"], line["tokens"], line["stride"]) == (3, len(ids) - 1, 20)
    assert_close(line["loss"], np.mean(by_hand(load_model(dense_run).model, [ids], 32, 20)), "loss")
    assert "stride 20" in out
    (line,), _ = score("--stride", 32, "--windows", "all")
    assert line["tokens"] == len(tokens) - 1  # the whole split, its last tokens too
    assert line["bytes"] == len(
        ByteTokenizer().decode(token for token in tokens[1:] if token != EOT).encode()
    )
    assert line["bytes"] == line["tokens"] - tokens.count(EOT)


def test_standard_error_of_unequal_windows():
    """By the definition for a ratio of sums; it equals that of a mean only for equal lengths."""
    nats = np.array([10.0, 4.0, 9.0])
    counts = np.array([4, 2, 3])
    each = np.arange(3)
    result = val_loss.summarize_losses(nats, counts, 18, each)
    assert result.loss == pytest.approx(23 / 9)
    assert result.bits_per_byte == pytest.approx(23 / math.log(2) / 18)
    apart = [10 - 4 * 23 / 9, 4 - 2 * 23 / 9, 9 - 3 * 23 / 9]
    shares = [1 - count / 9 for count in counts]
    assert result.stderr == pytest.approx(
        math.sqrt(sum(d * d / s for d, s in zip(apart, shares, strict=True))) / 9
    )
    # of a single document: over windows
    assert val_loss.summarize_losses(nats, counts, 18, np.zeros(3)) == result
    shared = val_loss.summarize_losses(nats, counts, 18, np.array([0, 0, 1]))
    assert shared._replace(stderr=0) == result._replace(stderr=0)
    assert shared.stderr == pytest.approx(
        math.sqrt((apart[0] + apart[1]) ** 2 * (9 / 3 + 9 / 6)) / 9
    )
    alone = val_loss.summarize_losses(nats[:1], counts[:1], 0, each[:1])
    assert math.isnan(alone.stderr) and math.isnan(alone.bits_per_byte)


def test_documents_of_scored_windows(dense_run, tmp_path, score, corpus):
    """Of a set by its end-of-text tokens, of a text file by its documents: ± is over these, however
    windows overlap.
    """
    trained_model, tokenizer = load_run(dense_run)
    tokens = np.fromfile(corpus / "tiny/val-00000.bin", "<u2")
    for stride in (None, 8):
        args = SimpleNamespace(split="val", stride=stride, windows=math.inf)
        scored = open_prepared(corpus / "tiny", trained_model, args, 6)
        middles = [(first + stop + 1) // 2 for _, stop, first in scored.windows.tolist()]
        wanted = [int(np.count_nonzero(tokens[:middle] == EOT)) for middle in middles]
        assert (np.diff(scored.documents) > 0).tolist() == (np.diff(wanted) > 0).tolist()
        assert wanted[-1] > 2
    (tmp_path / "two.jsonl").write_bytes(jsonl([TEXT, "x" * 40]))
    scored = open_text(
        tmp_path / "two.jsonl", trained_model, tokenizer, SimpleNamespace(stride=8, windows=None)
    )
    assert scored.documents.tolist() == [0] * 6 + [1] * 2


def test_losses_of_two_runs_are_paired_by_document(dense_run, module_tiny, tmp_path, call):
    """The difference and its interval by hand: a ratio of sums over documents, Student's t."""
    own = ["model.router=dense", "run.name=other", "run.seed=5", "model.n_embd=32"]
    train_run(config := module_tiny(*own))
    other = folder.path_of(config)
    texts = [TEXT, "kestrels dance", "é" * 20, "a bee learns maps of the field"]
    file = tmp_path / "many.jsonl"
    file.write_bytes(jsonl(texts))
    printed = call(main, dense_run, other, file, "--stride", 8)
    first, second = (load_model(run).model for run in (dense_run, other))
    documents = [[EOT, *text.encode()] for text in texts]
    sums = []  # of the differences of each document
    for document in documents:
        nats = np.subtract(by_hand(second, [document], 32, 8), by_hand(first, [document], 32, 8))
        sums.append(nats.sum())
    counts = np.array([len(document) - 1 for document in documents])
    mean = sum(sums) / counts.sum()
    shares = counts / counts.sum()
    variance = sum((np.array(sums) - mean * counts) ** 2 / (1 - shares)) / counts.sum() ** 2
    freedom = max(1, (shares**2).sum() ** 2 / (shares**4).sum() - 1)
    half = stats.t.ppf(0.975, freedom) * math.sqrt(variance)
    row = next(line for line in printed.splitlines() if line.startswith(f"{other} "))
    said = [float(text) for text in re.findall(r"[+-]\d+\.\d+", row.partition(" ± ")[2])]
    assert abs(mean) > 1e-3 and said == pytest.approx([mean, mean - half, mean + half], abs=2e-4)
    (rows,) = read_tables(printed)
    for run, row in zip((dense_run, other), rows, strict=True):
        line = json.loads((run / "eval/step_00000004/val_loss.json").read_text().splitlines()[-1])
        difference = row.pop("minus the first's, 95%")
        assert (difference == "") == (run == dense_run)
        assert list(row.values()) == [str(run), *format_scores(line)]
    words = ["a.txt", "--stride", "8", str(other), "b.txt", "--data", "c", "--ema", str(dense_run)]
    args = val_loss.parse_arguments([str(dense_run), *words])
    assert args.runs == [dense_run, other, dense_run] and args.data == ["a.txt", "b.txt", "c"]


def format_scores(line):
    """The cells of a line of val_loss.json, without empty ones."""
    name = line["data"] if line["split"] is None else f"{line['data']} ({line['split']})"
    loss = f"{line['loss']:.4f}"
    if line["stderr"] is not None:
        loss += f" ± {line['stderr']:.4f}"
    counts = [f"{line[key]:,}" for key in ("windows", "tokens", "bytes")]
    return [name, *counts, loss, f"{line['perplexity']:,.3f}", f"{line['bits_per_byte']:.4f}"]


def test_runs_that_cannot_be_paired(dense_run, module_tiny, call):
    train_run(config := module_tiny("model.router=dense", "run.name=short", "model.block_size=16"))
    said = call(main, dense_run, folder.path_of(config), code=2)
    assert "have other windows of" in said and "(--windows)" in said


def test_what_cannot_be_paired_is_named():
    def make(folder, tokenizer, *corpora):
        return (SimpleNamespace(folder=folder, metadata={"tokenizer": tokenizer}), None), corpora

    def corpus(name, stop=8):
        return SimpleNamespace(name=name, windows=np.array([[0, stop, 0]]))

    first = make("runs/a", "bytes", corpus("x"), corpus("y"))
    for other, said in (
        (make("runs/b", "gpt2", corpus("x"), corpus("y")), "have other tokenizers: score them one"),
        (make("runs/b", "bytes", corpus("y")), "have the sets y and x, y: name one set or text"),
        (make("runs/b", "bytes", corpus("x"), corpus("y", 9)), "have other windows of y: name"),
    ):
        models, corpora = zip(first, first, other, strict=True)
        with pytest.raises(DataError, match=f"^runs/b and runs/a {said}"):
            val_loss.check_paired(models, corpora)
    val_loss.check_paired(*zip(first, first, strict=True))


def test_a_long_document_leaves_one_degree_of_freedom():
    windows = np.array([[0, 1000, 0], [1000, 1001, 1000]])
    corpus = val_loss.Corpus("x", None, windows, np.array([0, 1]))
    scored = [
        val_loss.Scored(corpus, np.array(nats), None) for nats in ([900.0, 2.0], [800.0, 1.0])
    ]
    assert val_loss.compare_scored(*scored).freedom == 1


def test_weights_and_data_are_said(dense_run, tmp_path, call, monkeypatch, corpus, capsys):
    """Which mean, a set here before one in data.dir, and that a set is no longer the same."""
    monkeypatch.chdir(tmp_path)
    write_set(tmp_path / "tiny", ByteTokenizer(), 99)
    printed = call(main, dense_run, "--average", 2, "--data", "tiny")
    assert printed.startswith(f"{dense_run}, step 4, mean of 2 checkpoints; no overlap\n")
    (row,) = read_tables(printed)[0]
    assert (row["data"], row["windows"]) == ("tiny (val)", "3")
    file = dense_run / "eval/step_00000004_mean2/val_loss.json"
    line = json.loads(file.read_text().splitlines()[-1])
    facts = {"run": "dense", "step": 4, "average": 2, "ema": False, "data": "tiny", "split": "val"}
    assert {key: line[key] for key in facts} == facts
    assert ", step 4, EMA of decay 0.5; stride 8\n" in call(main, dense_run, "--ema", "--stride", 8)
    file = dense_run / "eval/step_00000004_ema/val_loss.json"
    line = json.loads(file.read_text().splitlines()[-1])
    assert (line["average"], line["ema"]) == (1, True)
    trained_model = load_model(dense_run)
    args = SimpleNamespace(split="val", stride=None, windows=2)
    for data, is_same in (("0", False), (trained_model.metadata["data"], True)):
        metadata = trained_model.metadata | {"data": data}
        val_loss.open_own(trained_model._replace(metadata=metadata), args)
        said = capsys.readouterr().out
        note = f"note: {corpus / 'tiny'} is no longer the data that dense was trained on\n"
        assert said == ("" if is_same else note)


def write_set(path, tokenizer, length=99):
    ids = tokenizer.encode("x" * length)
    write_ids(path, ids, ids, tokenizer=tokenizer)


BAD_INPUT = {
    "--data tiny2": "--data tiny2: no such file, and no prepared set here or in {data}, which "
    "holds tiny; name one",
    "--stride 33": "--stride 33: expected 1 to 32",
    "--data {}/short.txt": "short.txt: 1 token(s), expected at least 2",
    "--data {}/other": "other: its tokenizer ('gpt2') is not that of dense",
    "--data {}/small": "20 tokens, but one window of block_size 32 needs 33",
    "--data {}/damaged": "damaged/val-00000.bin: expected sha256",
}


@pytest.mark.parametrize(("words", "message"), BAD_INPUT.items())
def test_bad_input(dense_run, tmp_path, call, fake_ranks, words, message, corpus):
    (tmp_path / "short.txt").write_text("x")
    write_set(tmp_path / "other", GPT2Tokenizer(fake_ranks))
    write_set(tmp_path / "small", ByteTokenizer(), 20)
    write_set(tmp_path / "damaged", ByteTokenizer())
    (tmp_path / "damaged/val-00000.bin").write_bytes(b"y\0" * 99)
    said = call(main, dense_run, *words.format(tmp_path).split(), code=2)
    assert said.startswith("error: ") and message.format(data=corpus) in said
    with pytest.raises(SystemExit, match="2"):
        main([str(dense_run), "--windows", "0"])


@pytest.mark.parametrize(
    "loss, perplexity",
    [(2.0, math.exp(2)), (19.9, math.exp(19.9)), (20.1, math.inf), (1e3, math.inf)],
)
def test_perplexity_beyond_reason_is_infinite(loss, perplexity):
    """Guessing among all tokens has a loss of 11 at most: perplexity is then 65,536."""
    two = np.array([8, 8])
    result = val_loss.summarize_losses(loss * two, two, 0, np.array([0, 1]))
    assert result.perplexity == pytest.approx(perplexity)
    corpus = val_loss.Corpus("x", None, None, None)
    cells = val_loss.format_result(corpus, result._replace(stderr=math.nan))
    assert cells == ["x", "2", "16", "0", f"{loss:.4f}", f"{perplexity:,.3f}", "-"]
    assert val_loss.format_result(corpus._replace(split="train"), result)[0] == "x (train)"
