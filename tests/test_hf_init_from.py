"""hf/init_from.py: runs that start from GPT-2 checkpoints, exports and runs, and weights that are
refused.
"""

import json
import os
import shutil

import pytest
import torch
from conftest import Payload
from numerics import assert_near, seeded, tolerance
from runs import (
    ALONE,
    all_logits,
    checkpoints,
    end,
    flip,
    run,
)
from safetensors.torch import load_file, save_file

import train
from eval.trained import load_model
from gate_norm import gate_scale
from hf.export import export
from hf.init_from import read_initial_weights
from model import GPT
from router import monte_carlo_scale
from runtime import RankError, RunError, checkpoint, distributed, folder
from runtime.metrics import read_metrics

GPT2 = {
    "vocab_size": 257,
    "n_positions": 32,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 2,
    "n_inner": 16,
    "activation_function": "gelu",
    "bos_token_id": 256,
    "eos_token_id": 256,
}
DENSE = ["model.router=dense", "model.bias=true"]  # the model that fits GPT2


def make_gpt2(**update):
    """A GPT-2 of transformers whose LayerNorms are not 1 and whose biases are not 0."""
    # not at the top: ranks import this file too
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seeded(1).initial_seed())
    model = GPT2LMHeadModel(GPT2Config(**GPT2 | update)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    place = tmp_path_factory.mktemp("gpt2")
    make_gpt2().save_pretrained(place)
    return place


@pytest.fixture
def copy(gpt2, tmp_path):
    return shutil.copytree(gpt2, tmp_path / "copy")


def start(config):
    """The GPT that a run of `config` starts with, and the line printed about it."""
    weights = read_initial_weights(config)
    torch.manual_seed(config.run.seed)
    model = GPT(config.model).eval()
    weights.load_into(model, ALONE)
    assert weights.state == {}
    return model, "; ".join(weights.notes)


def refused(config):
    with pytest.raises(RankError) as caught:
        read_initial_weights(config)
    text = str(caught.value)
    assert text.startswith(f"train.init_from = {config.train.init_from}: ") and "\n" not in text
    return text


def find_fault(config):
    """The message that refuses the weights; empty if they fit."""
    try:
        read_initial_weights(config)
    except RunError as error:
        return str(error)
    return ""


def ids(T):
    return torch.randint(257, (2, T), generator=seeded())


# A logit is a sum over 32 channels of what 2 layers of about 10 roundings each leave.
LOGITS = tolerance(torch.float32, 32, roundings=20)


@pytest.mark.numerics
@pytest.mark.parametrize("form, tie", [("one file", False), ("shards", True), ("OpenAI's", True)])
def test_logits_equal_those_of_transformers(tiny, tmp_path, form, tie):
    width = None if form == "OpenAI's" else 16  # of an MLP; None: 4 times 32
    theirs, place = make_gpt2(tie_word_embeddings=tie, n_inner=width), tmp_path / "gpt2"
    theirs.save_pretrained(place, max_shard_size="20KB" if form == "shards" else "1GB")
    assert form != "shards" or len([*place.glob("model-*.safetensors")]) > 2
    if form == "OpenAI's":  # bare names, masks and the tied head
        state = {
            name.removeprefix("transformer."): tensor.clone()
            for name, tensor in theirs.state_dict().items()
        }
        masks = {"h.0.attn.bias": torch.ones(1, 1, 32, 32), "h.0.attn.masked_bias": torch.ones(())}
        save_file(state | masks, place / "model.safetensors")
    own = [
        *DENSE,
        f"model.tie_embeddings={json.dumps(tie)}",
        f"model.expert_hidden={(width or 128) // 2}",
    ]
    config = tiny(f"train.init_from={place}", *own)
    model, words = start(config)
    assert_near(all_logits(model, ids(32)), theirs(ids(32)).logits, LOGITS, "logits")
    assert (
        words == f"{folder.path_of(config)}: starts from {place}, a model of class GPT2LMHeadModel"
    )


@pytest.mark.numerics
def test_differences_in_computation_are_printed(tiny, tmp_path):
    theirs = make_gpt2(activation_function="gelu_new", layer_norm_epsilon=1e-4)
    norm = theirs.half().transformer.ln_f.float()  # each weight is read in its own dtype
    with torch.no_grad():
        norm.weight += 1e-5
    theirs.save_pretrained(tmp_path / "gpt2")
    edit(tmp_path / "gpt2/config.json", activation_function=None)  # gelu_new by default
    model, words = start(tiny(f"train.init_from={tmp_path / 'gpt2'}", *DENSE))
    assert torch.equal(model.ln_f.weight, norm.weight)
    assert not torch.equal(norm.weight, norm.weight.half().float())
    assert (
        "gelu_new is computed as exact GELU, up to 5e-4 apart; model.norm_eps changes from 0.0001"
        in words
    )
    wanted = theirs.float()(ids(32)).logits
    error = (all_logits(model, ids(32)) - wanted).norm() / wanted.norm()
    assert 20 * LOGITS < error < 0.01  # that of the formulas, far from rounding
    assert model.wte.weight.dtype == torch.float32


# γ, b and selection bias move
MOVED = ["train.bias_update_rate=0.01", "model.gate_scale=2.0", "model.router=kern"]


@pytest.fixture
def source(tiny):
    """The Config of a run in whose router everything has moved."""
    config = tiny("run.name=source", *MOVED, "train.checkpoint_interval=2")
    run(config)
    return config


def start_from(tiny, source, *overrides):
    return tiny(*MOVED, f"train.init_from={folder.path_of(source)}", *overrides)


def test_run_starts_where_another_ended(tiny, source, capsys):
    config = start_from(tiny, source, "run.seed=7")
    first = run(config)[0]
    last = read_metrics(folder.path_of(source) / "metrics.jsonl", ["val/window_losses"])[-1]
    assert (first["step"], last["step"]) == (0, 4)
    assert first["val/window_losses"] == last["val/window_losses"]
    line = f"{folder.path_of(config)}: starts from {folder.path_of(source)}, a run at step 4\n"
    assert line in capsys.readouterr().out
    assert run(tiny(*MOVED, "run.name=random", "run.seed=7"))[0]["val/loss"] > first["val/loss"]


def test_resumed_run_does_not_need_init_from(tiny, source, capsys):
    config = start_from(tiny, source, "train.checkpoint_interval=2")
    run(config)
    undisturbed = end(config)
    shutil.rmtree(checkpoint.folder_of(checkpoints(config), 4))
    shutil.rmtree(folder.path_of(source))
    assert capsys.readouterr().out.count("starts from") == 1
    run(config)
    assert "starts from" not in capsys.readouterr().out
    assert end(config) == undisturbed
    fresh = start_from(tiny, source, "run.name=fresh")
    with pytest.raises(RunError, match="no such folder"):
        train.train(fresh)
    assert not folder.path_of(fresh).exists()


MODERN = [
    "model.norm=rmsnorm",
    "model.activation=silu",
    "model.gated=true",
    "model.n_head=4",
    "model.n_kv_head=2",
    "model.pos=rope",
    "model.rope_base=500",
]
EXPORTED = {
    "mixture": MOVED,
    "rope, untied": ["model.router=softmax", "model.pos=rope", "model.tie_embeddings=false"],
    "gpt2": ["model.router=dense"],
    "dense": [*DENSE, "model.pos=rope"],
    "hash": ["model.router=softmax", "model.n_hash_layer=1"],
    "gate_norm": ["model.router=sqrtsoftplus", "model.gate_norm=1.5"],
    "modern": [*MODERN, "model.qk_norm=all", "model.n_shared_expert=1"],
    "modern dense": [
        *MODERN,
        "model.router=dense",
        "model.n_shared_expert=3",
        "model.norm_eps=0.001",
    ],
}


@pytest.mark.parametrize("kind", EXPORTED)
def test_export_starts_where_its_run_ended(tiny, tmp_path, kind):
    """In its own model. In the default one, every override that is needed is named at once."""
    run(theirs := tiny("run.name=source", *EXPORTED[kind]))
    assert export.main([str(folder.path_of(theirs)), str(tmp_path / "export")]) == 0
    place = f"train.init_from={tmp_path / 'export'}"
    model, words = start(tiny(*EXPORTED[kind], place, "run.seed=7"))
    for name, tensor in load_model(folder.path_of(theirs)).model.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    assert "; " not in words  # nothing changes
    router = "dense" if "dense" in kind or kind == "gpt2" else "kern"
    _, words = start(
        tiny(
            place,
            f"model.router={router}",
            *remedy(find_fault(tiny(place, f"model.router={router}"))),
        )
    )
    assert ("model.norm_eps changes from 0.001 to 1e-05" in words) == (kind == "modern dense")
    if kind == "mixture":  # an export older than groups
        edit(tmp_path / "export/config.json", router_groups=None, router_group_k=None)
        _, words = start(tiny(*MOVED, place, "model.router_groups=4", "model.router_group_k=2"))
        assert "router_groups changes from 1 to 4; model.router_group_k changes from 1" in words
    if kind == "hash":
        assert "n_hash_layer changes from 1 to 0" in words
        assert "not used: mlp.router.hash_table" in words
        assert remedy(refused(tiny(*EXPORTED[kind], place, "model.top_k=1"))) == ["--model.top_k=2"]
    if kind == "modern":  # e125ff1 had exports whose first layer is dense
        edit(tmp_path / "export/config.json", n_dense_layer=1)
        words = "n_dense_layer is 1, and model.py computes 0 only"
        assert words in refused(tiny(*EXPORTED[kind], place))


def test_another_router_takes_the_weights_in_common(tiny, source):
    wanted = load_model(folder.path_of(source)).model.state_dict()
    model, words = start(
        start_from(tiny, source, "model.router=sigmoid", "model.top_k=1", "model.gate_scale=1.5")
    )
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, wanted[name]) != name.endswith(("router.c", "selection_bias")), (
            name
        )
        assert not (name.endswith("selection_bias") and tensor.any())
    changes = (
        "router changes from kern to sigmoid",
        "top_k changes from 2 to 1",
        "gate_scale changes from 2.0 to 1.5",
    )
    assert all(f"; model.{change}; " in words for change in changes)
    assert words.endswith(
        "; not used: mlp.router.bias, mlp.router.gamma, mlp.router.selection_bias"
    )
    run(plain := tiny("run.name=plain", "model.router=softmax"))
    _, words = start(start_from(tiny, plain, "model.gate_scale=1.0"))
    missing = "missing, so initialised as usual: mlp.router.bias, mlp.router.gamma"
    assert (
        "model.router changes from softmax to kern; router weights are centred" in words
        and words.endswith(missing)
    )


def test_first_positions_and_ids_are_taken(tiny, source):
    wanted = load_model(folder.path_of(source)).model
    model, words = start(start_from(tiny, source, "model.block_size=20", "model.vocab_size=320"))
    assert (
        "; model.vocab_size changes from 257 to 320; model.block_size changes from 32 to" in words
    )
    assert model.wpe.weight.equal(wanted.wpe.weight[:20])
    assert model.wte.weight[:257].equal(wanted.wte.weight) and model.wte.weight[257:].all()


def test_a_routers_constant_is_that_of_the_new_settings(tiny):
    """Whichever of them differs alone."""
    run(mc := tiny("run.name=mc", "model.router=kern-mc", "train.max_steps=1"))
    for change in ("top_k=3", "gate_scale=1.5", "router=kern", "gate_norm=0.5"):
        own = ["model.router=kern-mc", "model.gate_scale=1", f"model.{change}"]
        config = start_from(tiny, mc, *own)
        model, _ = start(config)
        wanted = gate_scale(config.model)
        if config.model.router == "kern-mc":
            wanted *= monte_carlo_scale(8, config.model.top_k)
        for block in model.blocks:
            assert block.mlp.router.c.item() == pytest.approx(wanted), change


def test_ranks_with_other_weights_are_refused(tiny, source, monkeypatch):
    """Ranks that start with equal weights: test_parallel.py."""
    config = start_from(tiny, source)
    first, second, other = (read_initial_weights(config) for _ in range(3))
    other.state["ln_f.weight"] = 2 * other.state["ln_f.weight"]
    sums = []  # of each rank
    monkeypatch.setattr(distributed, "gather", lambda value, _: sums.append(value) or sums)
    for weights in (first, second):
        weights.load_into(GPT(config.model), ALONE)
    with pytest.raises(RunError, match="holds different weights on different ranks"):
        other.load_into(GPT(config.model), ALONE)


def remedy(text):
    return text.partition(" Add ")[2].split()


def test_all_overrides_for_a_gpt2_are_named_at_once(tiny, gpt2, tmp_path):
    wrong = "router=dense n_layer=1 n_head=4 n_embd=16 block_size=40 tie_embeddings=false top_k=3 "
    wrong += "expert_hidden=9"
    other = [f"model.{word}" for word in wrong.split()] + [f"train.init_from={gpt2}"]
    text = refused(tiny(*other))
    right = "n_layer=2 n_head=2 n_embd=32 tie_embeddings=true top_k=1 expert_hidden=16 "
    right += "block_size=32 bias=true"
    assert remedy(text) == [f"--model.{word}" for word in right.split()]
    start(tiny(*other, *remedy(text)))
    assert remedy(refused(tiny("model.router=dense", f"train.init_from={gpt2}"))) == [
        "--model.bias=true"
    ]
    make_gpt2(vocab_size=300).save_pretrained(tmp_path / "gpt2")
    assert remedy(refused(tiny(*DENSE, f"train.init_from={tmp_path / 'gpt2'}"))) == [
        "--model.vocab_size=300"
    ]


def test_all_overrides_for_a_mixture_are_named_at_once(tiny, source):
    remedies = {
        ("model.router=dense", "model.n_expert=4", "model.top_k=4", "model.expert_hidden=4"): (
            "--model.router=kern --model.n_expert=8 --model.expert_hidden=8 --model.top_k=2"
        ),
        ("model.n_expert=16", "model.top_k=16"): "--model.n_expert=8 --model.top_k=2",
        ("model.pos=rope",): "--model.pos=learned",
        # routers are of that width
        ("model.n_embd=64", "model.n_hash_layer=1"): "--model.n_embd=32",
    }
    for other, wanted in remedies.items():
        text = refused(start_from(tiny, source, *other))
        assert remedy(text) == wanted.split()
        start(start_from(tiny, source, *other, *remedy(text)))


def edit(file, **update):
    """Change keys of a JSON file; None removes one."""
    table = json.loads(file.read_text()) | update
    file.write_text(json.dumps({key: value for key, value in table.items() if value is not None}))


def test_damaged_files_are_refused(tiny, copy, canary):
    config = tiny(*DENSE, f"train.init_from={copy}")
    torch.save({"wte.weight": Payload(canary)}, copy / "model.safetensors")  # which is not executed
    assert "model.safetensors cannot be read (Error" in refused(config)
    for content in ("[" * 10**6, "{", "[]"):
        (copy / "config.json").write_text(content)
        assert (
            f"{copy}/config.json: " in (said := refused(config)) and "; download it again" in said
        )
    (copy / "config.json").unlink()
    assert "neither a config.json of transformers nor a run's" in refused(config)


def test_one_flipped_bit_of_an_export_is_refused(tiny, source, tmp_path):
    """As another program saves it again, it has no digest, and starts, also in float64."""
    out = tmp_path / "export"
    assert export.main([str(folder.path_of(source)), str(out)]) == 0
    config = start_from(tiny, source, f"train.init_from={out}")
    file = out / "model.safetensors"
    intact = file.read_bytes()
    first_value = 8 + int.from_bytes(intact[:8], "little")  # after the header
    for byte in (first_value, len(intact) - 1):
        flip(file, 8 * byte)
        assert "model.safetensors: damaged: its weights differ" in refused(config)
        file.write_bytes(intact)
    wider = {name: t.double() for name, t in load_file(file).items()}
    save_file(wider, file, {"format": "pt"})
    start(config)


def test_place_without_weights_is_refused(tiny, source, monkeypatch):
    config = tiny("train.init_from=openai-community/gpt2")
    assert refused(config).endswith("hf download openai-community/gpt2 --local-dir gpt2")
    monkeypatch.setenv("LOCAL_RANK", "1")  # of whose node the first one reports the folder
    with pytest.raises(RunError) as caught:
        read_initial_weights(config)
    assert not isinstance(caught.value, RankError)
    monkeypatch.delenv("LOCAL_RANK")
    os.truncate(sorted(checkpoints(source).glob("*/*.distcp"))[-1], 1000)
    assert "damaged, " in refused(start_from(tiny, source))
    shutil.rmtree(checkpoints(source))
    assert "the run has no checkpoint; train it first" in refused(start_from(tiny, source))


def test_weights_of_another_tokenizer_are_refused(tiny, copy, source, corpus, tmp_path):
    config = tiny(*DENSE, f"train.init_from={copy}")
    right = {text: number for number, text in enumerate(map(chr, range(256)))}
    right["<|endoftext|>"] = 256
    listed = [[text, 0.5] for text in right]  # of Unigram, whose ids are the places
    accepted = {"one": right, "two": listed, "three": right | {"<new>": 300}}
    wrong = {"'a' is 98": right | {"a": 98, "b": 97}, "is 34": [["x", 0], *listed]}
    for says, vocabulary in (accepted | wrong).items():
        (copy / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
        said = find_fault(config)
        if says in accepted:
            assert said == ""
            continue
        assert says in said
        assert f"that of the data set {corpus / 'tiny'} is bytes. Prepare the text with" in said
    (copy / "tokenizer.json").write_text("{}")
    assert "tokenizer.json: model is missing; download it again" in refused(config)
    (copy / "tokenizer.json").unlink()
    for beyond in (257, 50256):  # GPT2Config's default is beyond these ids
        edit(copy / "config.json", eos_token_id=beyond)
        start(config)
    edit(copy / "config.json", eos_token_id=0)
    assert "its tokenizer is one whose texts end with id 0" in refused(config)
    make_gpt2(vocab_size=200, eos_token_id=None).save_pretrained(copy)
    assert "its tokenizer is one of 200 ids" in refused(config)
    shutil.copytree(corpus / "tiny", tmp_path / "data/tiny")
    meta = tmp_path / "data/tiny/meta.json"
    edit(meta, tokenizer=json.loads(meta.read_text())["tokenizer"] | {"hash": "0" * 64})
    text = refused(start_from(tiny, source, f"data.dir={tmp_path / 'data'}"))
    assert "its tokenizer is another, that of the data set" in text
