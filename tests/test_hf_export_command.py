"""scripts/export/: its command and the tokenizers it writes."""

import json
import os
import sys
from pathlib import Path

import pytest
import transformers
from runs import modules_in
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer

import train
from data.tokenizer import RANKS_SHA256, GPT2Tokenizer, token_bytes
from eval.trained import load_model
from hf.export import CODE, choose_form
from hf.names import to_hf
from hf.tokenizer_files import find_merges, write_tokenizer
from model import count_parameters
from runtime import folder
from scripts import export

REAL_RANKS = Path(os.environ.get("NANOKERN_RANKS") or Path(__file__).parents[2] / "shared/data/gpt2.tiktoken")


@pytest.fixture(scope="module", autouse=True)
def modules(tmp_path_factory):
    with modules_in(tmp_path_factory.mktemp("modules")):
        transformers.utils.logging.disable_progress_bar()
        yield


TEXTS = [*export.ODD_TEXTS, "a" * 900 + " " * 300 + "b", "\x00\xad ¡ÿĀ"]
TEXTS += [chr(i) + " " + chr(i + 1) for i in range(0, 900, 2)]


def compare_on(tokenizer, folder, texts):
    write_tokenizer(tokenizer, folder, 32)
    theirs = AutoTokenizer.from_pretrained(folder)
    for text in texts:
        ids = tokenizer.encode(text)
        assert theirs.encode(text) == ids and theirs.decode(ids) == tokenizer.decode(ids) == text
    assert theirs.encode("a<|endoftext|>") == [*tokenizer.encode("a"), tokenizer.eot]
    assert (theirs.eos_token_id, len(theirs), theirs.model_max_length) == (tokenizer.eot, tokenizer.vocab_size, 32)


def test_merges_are_recovered(tmp_path, any_tokenizer):
    compare_on(any_tokenizer, tmp_path, TEXTS)
    tokens = [b"a", b"b", b"c", b"ab", b"bc", b"abc", b"abcab"]
    assert list(find_merges(tokens)) == [[b"a", b"b"], [b"b", b"c"], [b"ab", b"c"], [b"abc", b"ab"]]
    tokens = [b"a", b"b", b"c", b"bc", b"ab", b"abc"]
    assert list(find_merges(tokens)) == [[b"b", b"c"], [b"a", b"b"], [b"a", b"bc"]]


@pytest.mark.slow  # needs that file
@pytest.mark.skipif(not REAL_RANKS.is_file(), reason="no GPT-2 ranks: set NANOKERN_RANKS")
def test_gpt2_tokenizer(tmp_path):
    ranks = REAL_RANKS.read_bytes()
    tokenizer = GPT2Tokenizer(ranks)
    assert tokenizer.hash == RANKS_SHA256
    root = Path(__file__).parents[1]
    compare_on(tokenizer, tmp_path, [*TEXTS, *((root / name).read_text() for name in ("README.md", "model.py"))])
    merges = list(find_merges(token_bytes(tokenizer)))
    assert len(merges) == 50_000 and merges[:3] == [[b" ", b"t"], [b" ", b"a"], [b"h", b"e"]]


ROW = "| arc_easy | 20 | 0.2500 ± 0.0100 | 0.3000 ± 0.0200 | 0.2500 |  |\n"


@pytest.fixture(scope="module")
def run(module_tiny):
    """A run of 4 steps with checkpoints 2 and 4, and what eval.downstream leaves for 4 and for the mean."""
    train.train(config := module_tiny("train.checkpoint_interval=2"))
    for label, text in (("step_00000004", ROW), ("step_00000004_mean2", "results of the mean")):
        (folder.path_of(config) / "eval" / label).mkdir(parents=True)
        (folder.path_of(config) / "eval" / label / "table.md").write_text(text)
    return folder.path_of(config)


def command(*words):
    return export.main([str(word) for word in words])


def test_export_and_check(run, tmp_path, capsys):
    out = tmp_path / "there/out"
    assert command(run, out, "--check") == 0
    said = capsys.readouterr().out
    assert all(words in said for words in ("tokenizer: the same", "generated with a cache: at most", "in one pass: at"))
    names = {"README.md", "config.json", "config.toml", "generation_config.json", "model.safetensors"}
    assert {path.name for path in out.iterdir()} == names | {"tokenizer.json", "tokenizer_config.json", *CODE}
    assert list(out.parent.iterdir()) == [out]
    card = (out / "README.md").read_text()
    losses = [line["val/loss"] for line in map(json.loads, (run / "metrics.jsonl").open()) if "val/loss" in line]
    for words in (f"| {losses[-1]:.4f} (step 4) |", "RouterSpec(phi='relu'", "| n_expert | 8 |", "license: other"):
        assert words in card
    total, active = count_parameters(load_model(run).config.model)
    assert f"of {total:,} parameters, {active:,} of them active" in card
    assert ROW in card and "{" not in card
    config = AutoConfig.from_pretrained(out, trust_remote_code=True)
    assert config.eos_token_id == config.bos_token_id == config.pad_token_id == 256
    assert command(run, out) == 2
    assert "exists already; name a new folder" in capsys.readouterr().err
    assert json.loads((out / "config.json").read_text())["nanokern"] == {"run": "tiny", "weights": "step_00000004"}


def test_other_weights_behind_a_link(run, tmp_path):
    """An early checkpoint, and the mean of two in half precision: their weights, losses and results in the card."""
    (tmp_path / "out").symlink_to(tmp_path / "behind")
    assert command(run, tmp_path / "out", "--checkpoint", 2) == 0
    assert (tmp_path / "behind/README.md").is_file() and (tmp_path / "out").is_symlink()
    wanted = to_hf(load_model(run, 2).model.state_dict())
    assert all(tensor.equal(wanted[name]) for name, tensor in load_file(tmp_path / "out/model.safetensors").items())
    lines = map(json.loads, (run / "metrics.jsonl").open())
    loss = next(line["val/loss"] for line in lines if line["step"] == 2 and "val/loss" in line)
    card = (tmp_path / "out/README.md").read_text()
    assert f"| {loss:.4f} (step 2) |" in card and "step 4" not in card
    assert command(run, tmp_path / "mean", "--average", 2, "--dtype", "bfloat16", "--check") == 0
    card = (tmp_path / "mean/README.md").read_text()
    assert "the mean of 2 checkpoints up to step 4, in bfloat16" in card and "results of the mean" in card


def test_failed_export_leaves_no_files(run, tmp_path, monkeypatch, capsys):
    def full(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("hf.export.format_card", full)
        assert command(run, tmp_path / "out") == 2
    assert "error: [Errno 28] No space left" in capsys.readouterr().err
    assert not list(tmp_path.glob("*out*"))
    assert command(run, tmp_path / "out") == 0
    assert list(tmp_path.glob("*out*")) == [tmp_path / "out"]
    (tmp_path / "plain").mkdir()
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "plain").stat().st_mode
    assert len({path.stat().st_mode for path in (tmp_path / "out").iterdir()}) == 1  # safetensors writes 0600


def test_bad_input(run, tmp_path, monkeypatch, capsys):
    assert command(run, tmp_path / "out", "--format", "gpt2") == 2
    assert "the run has model.router = kern, unlike GPT2LMHeadModel; use --format nanokern" in capsys.readouterr().err
    assert command(tmp_path, tmp_path / "out") == 2
    assert "no config.toml, so not a run" in capsys.readouterr().err

    monkeypatch.setitem(sys.modules, "transformers", None)
    assert command(run, tmp_path / "out", "--check") == 2
    assert "transformers not installed: pip install -r requirements-dev.txt" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_form_is_gpt2_where_possible(tiny):
    for words in ("", "model.n_kv_head=2", "model.norm_eps=0.01", "model.bias=true"):
        assert choose_form("auto", tiny("model.router=dense", *words.split()).model) == "gpt2", words
    for word in ("router=kern", "pos=rope", "norm=rmsnorm", "gated=true", "n_kv_head=1", "activation=silu"):
        assert choose_form("auto", tiny("model.router=dense", f"model.{word}").model) == "nanokern", word
