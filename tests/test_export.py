"""scripts/export/: models in the form of transformers."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch
import transformers
from runs import modules_in
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2LMHeadModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import scripts.export.__main__ as export
import train
from data.tokenizer import RANKS_SHA256, ByteTokenizer, GPT2Tokenizer, token_bytes
from eval import generation
from eval.trained import Trained
from model import GPT
from router import ROUTERS
from runtime import folder
from runtime.names import from_gpt2, from_hf, to_gpt2, to_hf
from scripts.export import check
from scripts.export.tokenizer_files import find_merges, write_tokenizer

TOKENIZER = ByteTokenizer()
REAL_RANKS = Path(os.environ.get("NANOKERN_RANKS") or Path(__file__).parents[2] / "shared/data/gpt2.tiktoken")


@pytest.fixture(scope="module", autouse=True)
def modules(tmp_path_factory):
    with modules_in(tmp_path_factory.mktemp("modules")):
        transformers.utils.logging.disable_progress_bar()
        yield


@pytest.fixture
def exported(tiny, tmp_path):
    """`exported("model.router=tanh", form="nanokern", dtype="float32")`: (GPT with random weights, folder)."""

    def make(*overrides, form="nanokern", dtype="float32"):
        config = tiny("model.init_std=0.3", "model.n_head=4", *overrides)
        torch.manual_seed(0)
        model = GPT(config.model).eval().requires_grad_(False)
        for name, tensor in model.state_dict().items():
            if tensor.dim() == 1 and not name.endswith("router.c"):
                tensor += 0.2 * torch.randn_like(tensor)  # norms, biases, γ and β too
        run, out = tmp_path / "run", tmp_path / f"export_{form}"
        run.mkdir()
        (run / "config.toml").touch()
        out.mkdir()
        trained = Trained(model, config, 4, 1, {})
        export.write_export(trained, TOKENIZER, run, out, form, dtype)
        return trained, out

    return make


def load(out, **settings):
    return AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True, **({"dtype": torch.float32} | settings))


def logits_of(model, idx):
    return model.logits(model.hidden(idx)[0])


def assert_same_model(trained, theirs):
    """Equal logits, and equal continuations of prompts of unequal length, also after the end of a document; ids that
    pad the vocabulary are never generated."""
    own, vocab_size = trained.model, TOKENIZER.vocab_size
    idx = torch.randint(vocab_size, (3, 32), generator=torch.Generator().manual_seed(1))
    wanted = logits_of(own, idx)
    with torch.no_grad():
        torch.testing.assert_close(theirs(idx).logits, wanted, atol=1e-4, rtol=0)
    assert wanted.std() > 0.5
    prompts = [row[:length].tolist() for row, length in zip(idx, (9, 4, 1), strict=True)]
    ids = torch.tensor([[TOKENIZER.eot] * (9 - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (9 - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    drawn = zip(
        *generation.generate(own, prompts, 20, generation.SamplingParams(0), vocab_size=vocab_size), strict=True
    )
    for use_cache in (True, False):
        settings = {"do_sample": False, "max_new_tokens": 20, "eos_token_id": None, "use_cache": use_cache}
        got = theirs.generate(ids, attention_mask=mask, **settings)[:, 9:]
        drawn = [list(row) for row in drawn]
        assert got.tolist() == drawn
    assert len({tuple(row) for row in drawn}) == 3


VARIANTS = [(), ("model.pos=rope",), ("model.tie_embeddings=false", "model.vocab_size=320"), ("model.bias=true",)]


@pytest.mark.parametrize("router", ROUTERS)
def test_every_router_exports_the_same_model(exported, router):
    """Each router with one of VARIANTS."""
    trained, out = exported(f"model.router={router}", *VARIANTS[list(ROUTERS).index(router) % 4])
    theirs, info = load(out, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert_same_model(trained, theirs)


@pytest.mark.parametrize(
    "overrides",
    [
        ("model.router=softmax", "model.gate_scale=1.7", "model.pos=rope", "model.bias=true"),
        ("model.router=kern-mc", *VARIANTS[2]),
        ("model.router=dense", "model.pos=rope", *VARIANTS[2]),
        ("model.router=dense", "model.bias=true"),
    ],
)
def test_variants(exported, overrides):
    trained, out = exported(*overrides)
    assert_same_model(trained, load(out))


@pytest.mark.parametrize("more", [*VARIANTS[2:], ("model.bias=true", "model.vocab_size=320")])
def test_dense_is_plain_gpt2(exported, more):
    trained, out = exported("model.router=dense", *more, form="gpt2")
    assert not list(out.glob("*.py")) and not (out / "LICENSE-code").exists()
    theirs, info = GPT2LMHeadModel.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert_same_model(trained, theirs)


def test_hf_names_round_trip(exported):
    state = exported("model.bias=true", "model.tie_embeddings=false")[0].model.state_dict()
    back = from_hf(to_hf(state))
    assert back.keys() == state.keys() and all(back[name].equal(state[name]) for name in state)
    assert len(to_hf(state)) == len(state) + 2 * 2 * 2  # qkv in three, weight and bias, in two layers


def test_gpt2_names_round_trip(tiny):
    state = GPT(tiny("model.router=dense").model).state_dict()
    theirs = {name.removeprefix("transformer."): tensor for name, tensor in to_gpt2(state).items()}  # as on the hub
    back = from_gpt2(theirs | {"h.0.attn.bias": torch.ones(1, 1, 32, 32), "h.0.attn.masked_bias": torch.ones(())})
    assert all(back[name].equal(state[name]) for name in state)
    added = back.keys() - state.keys()
    assert len(added) == 2 * 6 + 1 and all(name.endswith(".bias") and not back[name].any() for name in added)
    for function in (from_gpt2, from_hf, to_hf, to_gpt2):
        with pytest.raises(ValueError, match="h.0.crossattention.q.weight: no weight of that name"):
            function({"h.0.crossattention.q.weight": torch.ones(1)})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_routers_stay_in_fp32(exported, dtype):
    name = str(dtype).removeprefix("torch.")
    trained, out = exported("model.router=kern", dtype=name)
    with safe_open(out / "model.safetensors", "pt") as file:
        kinds = {key: file.get_tensor(key).dtype for key in file.keys()}  # noqa: SIM118
    assert {kind for key, kind in kinds.items() if ".router." in key} == {torch.float32}
    assert {kind for key, kind in kinds.items() if ".router." not in key} == {dtype}
    theirs = load(out, dtype="auto")
    assert {key: tensor.dtype for key, tensor in theirs.state_dict().items() if key in kinds} == kinds
    idx = torch.arange(30)[None]
    wanted = logits_of(check.round_weights(trained.model, dtype), idx)
    torch.testing.assert_close(load(out)(idx).logits, wanted, atol=1e-4, rtol=0)
    assert theirs(idx).logits.dtype == dtype
    assert (theirs(idx).logits - wanted).abs().mean() < 0.1 * wanted.std()  # a token may meet another expert
    assert theirs.generate(idx, max_new_tokens=2).shape == (1, 32)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_equal_trainings(exported, checkpointing):
    trained, out = exported("model.router=kern")
    own, theirs = trained.model.requires_grad_(True), load(out).train()
    if checkpointing:
        theirs.gradient_checkpointing_enable({"use_reentrant": False})
    idx = torch.randint(257, (2, 32), generator=torch.Generator().manual_seed(1))
    loss = own(idx[:, :-1], idx[:, 1:]).loss
    got = theirs(idx, labels=idx).loss
    loss.backward()
    got.backward()
    assert got.item() == pytest.approx(loss.item(), abs=1e-5)
    wanted = to_hf({name: p.grad for name, p in own.named_parameters()})
    for name, p in theirs.named_parameters():
        torch.testing.assert_close(p.grad, wanted[name], atol=1e-4, rtol=1e-3)


def test_layout_that_vllm_expects(exported):
    """The contract of vLLM's Transformers backend (vllm/model_executor/models/transformers, read in 0.32 and 0.33):
    attention is looked up by the name in the config and gets the layer and all keyword arguments; `experts` are packed
    and called with tokens, indices and weights. No name in the config makes vLLM replace them by its gated experts."""
    trained, out = exported("model.router=kern")
    theirs, calls = load(out), []

    def attend(module, query, key, value, mask, scaling, **settings):
        calls.append((module.layer_idx, tuple(query.shape), scaling, mask, settings["probe"]))
        weights = (query @ key.mT * scaling).masked_fill(torch.ones(9, 9).triu(1).bool(), -torch.inf).softmax(-1)
        return (weights @ value).transpose(1, 2), None

    idx = torch.arange(9)[None]
    wanted = theirs.model(idx).last_hidden_state
    ALL_ATTENTION_FUNCTIONS.register("probe", attend)
    theirs.config._attn_implementation = "probe"
    settings = {"use_cache": False, "return_dict": False, "probe": "it"}
    got = theirs.model(input_ids=None, inputs_embeds=theirs.get_input_embeddings()(idx), position_ids=idx, **settings)
    torch.testing.assert_close(got[0], wanted, atol=1e-5, rtol=0)
    assert calls == [(layer, (1, 4, 9, 8), 8**-0.5, None, "it") for layer in range(2)]
    assert type(theirs)._supports_attention_backend and theirs.config.base_model_tp_plan.keys() >= {
        f"layers.*.self_attn.{part}_proj" for part in "qkvo"
    }
    moe = theirs.model.layers[0].mlp
    assert {tuple(p.shape) for p in moe.experts.parameters()} == {(8, 32, 8), (8, 8, 32)}
    routing = moe.router(torch.randn(5, 32))
    named = {"top_k_index": routing.experts, "top_k_weights": routing.weights}
    assert moe.experts(hidden_states=torch.randn(5, 32), **named).shape == (5, 32)
    known = {"num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts"}
    assert not known & json.loads((out / "config.json").read_text()).keys()


# ---- tokenizers


TEXTS = [
    *check.ODD_TEXTS,
    "a" * 900 + " " * 300 + "b",
    "\x00\xad ¡ÿĀ",
    *(chr(i) + " " + chr(i + 1) for i in range(0, 900, 2)),
]


def compare_on(tokenizer, folder, texts):
    write_tokenizer(tokenizer, folder, 32)
    theirs = AutoTokenizer.from_pretrained(folder)
    for text in texts:
        ids = tokenizer.encode(text)
        assert theirs.encode(text) == ids and theirs.decode(ids) == tokenizer.decode(ids) == text
    assert theirs.encode("a<|endoftext|>") == [*tokenizer.encode("a"), tokenizer.eot]
    assert (theirs.eos_token_id, len(theirs), theirs.model_max_length) == (tokenizer.eot, tokenizer.vocab_size, 32)


def test_bytes_tokenizer(tmp_path):
    compare_on(TOKENIZER, tmp_path, TEXTS)


def test_merges_are_recovered(tmp_path, fake_ranks):
    compare_on(GPT2Tokenizer(fake_ranks), tmp_path, TEXTS)
    tokens = [b"a", b"b", b"c", b"ab", b"bc", b"abc", b"abcab"]
    assert list(find_merges(tokens)) == [[b"a", b"b"], [b"b", b"c"], [b"ab", b"c"], [b"abc", b"ab"]]


@pytest.mark.skipif(not REAL_RANKS.is_file(), reason="no GPT-2 ranks: set NANOKERN_RANKS")
def test_gpt2_tokenizer(tmp_path):
    ranks = REAL_RANKS.read_bytes()
    tokenizer = GPT2Tokenizer(ranks)
    assert tokenizer.hash == RANKS_SHA256
    root = Path(__file__).parents[1]
    compare_on(tokenizer, tmp_path, [*TEXTS, *((root / name).read_text() for name in ("README.md", "model.py"))])
    merges = list(find_merges(token_bytes(tokenizer)))
    assert len(merges) == 50_000 and merges[:3] == [[b" ", b"t"], [b" ", b"a"], [b"h", b"e"]]


# ---- the command


@pytest.fixture
def run(tiny):
    config = tiny("train.checkpoint_interval=2")
    train.train(config)
    return folder.path_of(config)


def command(*words):
    return export.main([str(word) for word in words])


def test_export_and_check(run, tmp_path, capsys):
    out = tmp_path / "there/out"
    row = "| arc_easy | 20 | 0.2500 ± 0.0100 | 0.3000 ± 0.0200 | 0.2500 |  |"
    (run / "eval/step_00000004").mkdir(parents=True)
    (run / "eval/step_00000004/table.md").write_text(row + "\n")
    assert command(run, out, "--check") == 0
    printed = capsys.readouterr().out
    assert (
        "4 windows of 32 random tokens: at most" in printed and "32 tokens generated with a cache: at most" in printed
    )
    names = {path.name for path in out.iterdir()}
    assert names == {"README.md", "config.json", "config.toml", "generation_config.json", "model.safetensors"} | {
        "tokenizer.json",
        "tokenizer_config.json",
        *export.CODE,
    }
    assert list(out.parent.iterdir()) == [out]
    card = (out / "README.md").read_text()
    losses = [line["val/loss"] for line in map(json.loads, (run / "metrics.jsonl").open()) if "val/loss" in line]
    for words in (
        f"| {losses[-1]:.4f} (step 4) |",
        "`RouterSpec(phi='relu'",
        "| n_expert | 8 |",
        "license: other",
        "tiny",
    ):
        assert words in card
    assert row in card and "{" not in card
    assert command(run, out) == 2
    assert "exists already; name a new folder" in capsys.readouterr().err
    assert command(run, out, "--check") == 0
    for option in (("--checkpoint", 2), ("--average", 2), ("--format", "gpt2"), ("--dtype", "float32")):
        assert command(run, out, "--check", *option) == 2
        assert "exists already, so --check takes no other option" in capsys.readouterr().err
    own = json.loads((out / "config.json").read_text())["nanokern"]
    assert (own["step"], own["tokenizer"]["hash"]) == (4, ByteTokenizer.hash)


def test_mean_of_checkpoints_in_half_precision(run, tmp_path, capsys):
    assert command(run, tmp_path / "out", "--average", 2, "--dtype", "bfloat16", "--check") == 0
    assert command(run, tmp_path / "out", "--check") == 0  # of the mean, too
    assert "mean of those of 2 checkpoints up to step 4, in bfloat16" in (tmp_path / "out/README.md").read_text()


def break_weight(out):
    state = load_file(out / "model.safetensors")
    state["model.layers.1.mlp.experts.down_proj"][:, 3] *= 1.5
    save_file(state, out / "model.safetensors", {"format": "pt"})


def break_names(out):
    state = load_file(out / "model.safetensors")
    state["model.layers.0.mlp.router.gama"] = state.pop("model.layers.0.mlp.router.gamma")
    save_file(state, out / "model.safetensors", {"format": "pt"})


def break_tokenizer(out):
    file = out / "tokenizer.json"
    body = json.loads(file.read_text())
    body["model"]["vocab"] |= {"a": ord("b"), "b": ord("a")}
    file.write_text(json.dumps(body))


def break_cache(out):
    """Every later token gets the first token's position."""
    file = out / "modeling_nanokern.py"
    code = file.read_text()
    for old, new in (("if position_ids is None:", "if True:"), ("[:, -len(columns) :]", "[:, : len(columns)]")):
        assert code.count(old) == 1
        code = code.replace(old, new)
    file.write_text(code)


def cut(out):
    (out / "model.safetensors").write_bytes((out / "model.safetensors").read_bytes()[:-10])


@pytest.mark.parametrize(
    "harm, words",
    [
        (break_weight, "logits of 4 windows"),
        (break_names, "missing keys: model.layers.0.mlp.router.gamma"),
        (break_tokenizer, "the tokenizer gives other ids"),
        (break_cache, "generated with a cache"),
        (cut, "cannot be loaded or run"),
    ],
)
def test_differences_are_found(exported, harm, words, capsys):
    trained, out = exported()
    assert check.check_export(trained, TOKENIZER, "runs/x", out) == 0
    harm(out)
    out = out.rename(out.with_name(harm.__name__))  # transformers keeps the code it knows by a name
    capsys.readouterr()
    assert check.check_export(trained, TOKENIZER, "runs/x", out) == 1
    printed = capsys.readouterr()
    assert words in printed.err and words not in printed.out
    assert "remedy: export again, into a new folder: python -m scripts.export runs/x NEW --check" in printed.err


def test_generated_padding_is_found(exported, capsys):
    trained, out = exported("model.vocab_size=1024")
    (out / "generation_config.json").write_text("{}")
    assert check.check_export(trained, TOKENIZER, "runs/x", out) == 1
    assert "which pads the vocabulary of 257" in capsys.readouterr().err


def test_failed_export_leaves_no_files(run, tmp_path, monkeypatch, capsys):
    def full(*args):
        raise OSError(28, "No space left on device")

    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial/kept").touch()  # somebody's
    with monkeypatch.context() as patch:
        patch.setattr(export, "format_card", full)
        assert command(run, tmp_path / "out") == 2
    assert "error: [Errno 28] No space left" in capsys.readouterr().err
    assert list(tmp_path.glob("*out*")) == [tmp_path / "out.partial"]
    assert command(run, tmp_path / "out") == 0
    assert sorted(tmp_path.glob("*out*")) == [tmp_path / "out", tmp_path / "out.partial"]
    assert (tmp_path / "out.partial/kept").exists()
    (tmp_path / "plain").mkdir()
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_out_may_be_a_link_or_a_relative_path(run, tmp_path, monkeypatch, capsys):
    (tmp_path / "link").symlink_to(tmp_path / "behind")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name, place in (("link", "behind"), ("zz/../detour", "detour")):
        export.export_run(run, tmp_path / name)
        assert (tmp_path / place / "README.md").is_file()
    assert (tmp_path / "link").is_symlink() and not (tmp_path / "zz").exists()
    monkeypatch.chdir(tmp_path / "behind")
    for name in (".", tmp_path / "loop", tmp_path / "link"):
        assert command(run, name) == 2
        assert "exists already; name a new folder" in capsys.readouterr().err


def test_check_needs_an_export(run, tmp_path, capsys):
    """A folder that is not a complete export, or one of another run."""
    out = tmp_path / "out"
    out.mkdir()
    for body in (None, "{", "[]", '{"nanokern": {}}'):
        if body:
            (out / "config.json").write_text(body)
        assert command(run, out, "--check") == 2
        assert "config.json: missing, or not written by scripts.export; export the run" in capsys.readouterr().err
    out = tmp_path / "incomplete"
    export.export_run(run, out)
    (out / "model.safetensors").unlink()
    assert command(run, out, "--check") == 1
    said = capsys.readouterr().err
    assert "incomplete: cannot be loaded or run (OSError: " in said and "model.safetensors" in said


def test_bad_input(run, tmp_path, monkeypatch, capsys):
    assert command(run, tmp_path / "out", "--format", "gpt2") == 2
    assert (
        "the run has model.router = kern and model.pos = learned, GPT-2 supports only dense and learned"
        in capsys.readouterr().err
    )
    assert command(tmp_path, tmp_path / "out") == 2
    assert "no config.toml, so not a run" in capsys.readouterr().err

    monkeypatch.setitem(sys.modules, "transformers", None)
    assert command(run, tmp_path / "out", "--check") == 2
    assert "transformers not installed: pip install -r requirements-dev.txt" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "overrides, form",
    [((), "nanokern"), (("model.router=dense",), "gpt2"), (("model.router=dense", "model.pos=rope"), "nanokern")],
)
def test_form_is_gpt2_where_possible(tiny, overrides, form):
    model = tiny(*overrides).model
    assert export.choose_form("auto", model) == form
    assert export.choose_form("nanokern", model) == "nanokern"
