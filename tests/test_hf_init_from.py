"""hf/init_from.py: runs that start from GPT-2 checkpoints, exports and runs, and weights that are
refused.
"""

import json
import os
import shutil
from itertools import cycle

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
    metrics,
    run,
)
from safetensors.torch import load_file, save_file

import train
from eval.trained import load_model
from gate_norm import gate_scale
from hf.export import export
from hf.formats import FORMATS
from hf.init_from import read_initial_weights
from model import GPT
from router import monte_carlo_scale
from runtime import RankError, RunError, checkpoint, distributed, folder

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


@pytest.fixture
def copy(saved, tmp_path):
    return shutil.copytree(saved / "one", tmp_path / "copy")


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


def ids(T):
    return torch.randint(257, (2, T), generator=seeded())


# A logit is a sum over 32 channels of what 2 layers of about 10 roundings each leave.
LOGITS = tolerance(torch.float32, 32, roundings=20)


@pytest.mark.numerics
@pytest.mark.parametrize("bare", [False, True])
def test_logits_equal_those_of_transformers(tiny, tmp_path, bare):
    """Also in OpenAI's form: bare names, masks, a tied head, and MLPs of 4 times the width."""
    theirs = make_gpt2(tie_word_embeddings=bare, n_inner=None if bare else 16)
    theirs.save_pretrained(place := tmp_path / "gpt2")
    if bare:
        state = load_file(place / "model.safetensors")
        state = {name.removeprefix("transformer."): tensor for name, tensor in state.items()}
        masks = {"h.0.attn.bias": torch.ones(1, 1, 32, 32), "h.0.attn.masked_bias": torch.ones(())}
        save_file(state | masks, place / "model.safetensors")
    own = [f"model.tie_embeddings={json.dumps(bare)}", f"model.expert_hidden={64 if bare else 8}"]
    config = tiny(f"train.init_from={place}", *DENSE, *own)
    model, words = start(config)
    assert_near(all_logits(model, ids(32)), theirs(ids(32)).logits, LOGITS, "logits")
    assert (
        words == f"{folder.path_of(config)}: starts from {place}, a model of class GPT2LMHeadModel"
    )


@pytest.mark.numerics
def test_differences_in_computation_are_printed(tiny, tmp_path):
    theirs = make_gpt2(activation_function="gelu_new", layer_norm_epsilon=1e-4).half()
    norm = theirs.transformer.ln_f.float().weight  # each weight is read in its own dtype
    norm.data += 1e-5
    theirs.save_pretrained(tmp_path / "gpt2")
    edit(tmp_path / "gpt2/config.json", activation_function=None)  # gelu_new by default
    model, words = start(tiny(f"train.init_from={tmp_path / 'gpt2'}", *DENSE))
    assert (
        "gelu_new is computed as exact GELU, up to 5e-4 apart; model.norm_eps changes from 0.0001"
        in words
    )
    assert model.ln_f.weight.equal(norm)
    wanted = theirs.float()(ids(32)).logits
    error = (all_logits(model, ids(32)) - wanted).norm() / wanted.norm()
    assert 20 * LOGITS < error < 0.01  # that of the formulas, far from rounding


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


def test_run_starts_where_another_ended_and_resumes_without_it(tiny, source, capsys):
    config = start_from(tiny, source, "run.seed=7", "train.checkpoint_interval=2")
    first = run(config)[0]
    last = metrics(source)[-1]
    assert (first["step"], last["step"]) == (0, 4)
    assert first["val/window_losses"] == last["val/window_losses"]
    line = f"{folder.path_of(config)}: starts from {folder.path_of(source)}, a run at step 4\n"
    assert capsys.readouterr().out.count(line) == 1
    undisturbed = end(config)
    shutil.rmtree(checkpoint.folder_of(checkpoints(config), 4))
    shutil.rmtree(folder.path_of(source))
    run(config)
    assert "starts from" not in capsys.readouterr().out
    assert end(config) == undisturbed
    fresh = start_from(tiny, source, "run.name=fresh")
    with pytest.raises(RunError, match="no such folder"):
        train.train(fresh)
    assert not folder.path_of(fresh).exists()


@pytest.fixture
def exported(tiny, tmp_path):
    """`exported(…)`: the `train.init_from=` of the export of a run with these settings."""

    def make(*overrides):
        run(theirs := tiny("run.name=source", *overrides))
        assert export.main([str(folder.path_of(theirs)), str(tmp_path / "export")]) == 0
        return f"train.init_from={tmp_path / 'export'}"

    return make


def test_an_export_that_is_older_than_keys(tiny, tmp_path, exported):
    """As 2e5054b1 wrote it, before hash layers and groups: a run starts with the run's weights."""
    place = exported("model.router=kern")
    edit(
        tmp_path / "export/config.json", n_hash_layer=None, router_groups=None, router_group_k=None
    )
    model, _ = start(tiny(place, "model.router=kern"))
    expected = load_model(folder.path_of(tiny("run.name=source"))).model.state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


def test_an_export_in_another_model(tiny, tmp_path, exported):
    """Exports start in their own model in test_hf_export.py."""
    hashed = ["model.router=softmax", "model.n_hash_layer=1"]
    place = exported(*hashed)
    assert remedy(refused(tiny(*hashed, place, "model.top_k=1"))) == ["--model.top_k=2"]
    _, words = start(tiny(place, "model.router=softmax", "model.norm_eps=0.01"))
    assert "; model.norm_eps changes from 1e-05 to 0.01; " in words
    assert "n_hash_layer changes from 1 to 0" in words
    assert "not used: mlp.router.hash_table" in words
    config = tmp_path / "export/config.json"
    edit(config, router_groups=None, router_group_k=None)  # an export older than groups
    grouped = [hashed[0], "model.router_groups=4", "model.router_group_k=2"]
    _, words = start(tiny(*grouped, place))
    for change in ("router_groups changes from 1 to 4", "router_group_k changes from 1 to 2"):
        assert f"; model.{change}; " in words
    edit(config, n_dense_layer=1)  # e125ff1 had exports whose first layer is dense
    assert "n_dense_layer is 1, and model.py computes 0 only" in refused(tiny(*hashed, place))


def test_another_router_takes_the_weights_in_common(tiny, source):
    """And a shorter context the first positions, more ids those that there are."""
    wanted = load_model(folder.path_of(source)).model.state_dict()
    more = ["model.block_size=20", "model.vocab_size=320"]
    more += ["model.router=sigmoid", "model.top_k=1", "model.gate_scale=1.5"]
    model, words = start(start_from(tiny, source, *more))
    state = model.state_dict()
    assert state["wte.weight"][257:].all() and len(state["wpe.weight"]) == 20
    for name, tensor in state.items():
        first = tuple(map(slice, map(min, tensor.shape, wanted[name].shape)))
        same = tensor[first].equal(wanted[name][first])
        assert same != name.endswith(("router.c", "selection_bias")), name
        assert not (name.endswith("selection_bias") and tensor.any())
    changes = "; model.vocab_size changes from 257 to 320; model.block_size changes from 32 to 20; "
    changes += "model.router changes from kern to sigmoid; model.top_k changes from 2 to 1; "
    changes += "model.gate_scale changes from 2.0 to 1.5; "
    unused = "not used: mlp.router.bias, mlp.router.gamma, mlp.router.selection_bias"
    assert words.endswith(changes + unused)


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
    other.state["wte.weight"] = 2 * other.state["wte.weight"]
    sums = []  # of each rank
    monkeypatch.setattr(distributed, "gather", lambda value, _: sums.append(value) or sums)
    for weights in (first, second):
        weights.load_into(GPT(config.model), ALONE)
    with pytest.raises(RunError, match="holds different weights on different ranks"):
        other.load_into(GPT(config.model), ALONE)


def remedy(text):
    return text.partition(" Add ")[2].split()


WRONG = "router=dense n_layer=1 n_head=4 n_embd=16 block_size=40 tie_embeddings=false top_k=3 "
WRONG += "expert_hidden=9"
DEEP = "router=dense norm=rmsnorm activation=silu gated=true n_head=4 n_kv_head=2 pos=rope "
DEEP += "rope_base=500 n_shared_expert=3"
# weights, settings that do not fit them, and how many overrides are needed
MISFITS = [
    ("gpt2", WRONG, 8),
    ("gpt2", "router=dense", 1),
    ("wide", "router=dense bias=true", 1),
    ("run", "router=dense n_expert=4 top_k=4 expert_hidden=4", 4),
    ("run", "n_expert=16 top_k=16", 2),
    ("run", "pos=rope", 1),
    ("run", "n_embd=64 n_hash_layer=1", 1),  # routers are of that width
    ("dense", "router=dense", 9),
]


@pytest.mark.parametrize("place, words, number", MISFITS)
def test_all_overrides_are_named_at_once(tiny, request, exported, tmp_path, place, words, number):
    other = [f"model.{word}" for word in words.split()]
    if place == "run":
        source = folder.path_of(request.getfixturevalue("source"))
        other = [*MOVED, f"train.init_from={source}", *other]
    elif place == "dense":
        other.append(exported(*(f"model.{word}" for word in DEEP.split())))
    else:
        make_gpt2(vocab_size=300 if place == "wide" else 257).save_pretrained(tmp_path / "gpt2")
        other.append(f"train.init_from={tmp_path / 'gpt2'}")
    overrides = remedy(refused(tiny(*other)))
    assert len(overrides) == number
    start(tiny(*other, *overrides))


def edit(file, **update):
    """Change keys of a JSON file; None removes one."""
    table = json.loads(file.read_text()) | update
    file.write_text(json.dumps({key: value for key, value in table.items() if value is not None}))


def test_pickles_are_not_executed(tiny, copy, canary):
    torch.save({"wte.weight": Payload(canary)}, copy / "model.safetensors")
    config = tiny(*DENSE, f"train.init_from={copy}")
    assert "model.safetensors cannot be read (Error" in refused(config)


def test_one_flipped_bit_of_an_export_is_refused(tiny, exported, tmp_path):
    """As another program saves it again, it has no digest, and starts, also in float64."""
    config = tiny(*MOVED, exported(*MOVED))
    file = tmp_path / "export/model.safetensors"
    first = 8 * (8 + int.from_bytes(file.read_bytes()[:8], "little"))  # after the header
    flip(file, first)
    assert "model.safetensors: damaged: its weights differ" in refused(config)
    flip(file, first)
    wider = {name: t.double() for name, t in load_file(file).items()}
    save_file(wider, file, {"format": "pt"})
    start(config)


def test_place_without_weights_is_refused(tiny, source, monkeypatch):
    config = tiny("train.init_from=openai-community/gpt2")
    says = "hf download openai-community/gpt2 --include '*.json' --include '*.safetensors' --local"
    assert says in refused(config)
    assert refused(tiny("train.init_from=/x/y")).endswith("or a download from the hub")
    monkeypatch.setenv("LOCAL_RANK", "1")  # of whose node the first one reports the folder
    with pytest.raises(RunError) as caught:
        read_initial_weights(config)
    assert not isinstance(caught.value, RankError)
    monkeypatch.delenv("LOCAL_RANK")
    os.truncate(sorted(checkpoints(source).glob("*/*.distcp"))[-1], 1000)
    assert "damaged, " in refused(start_from(tiny, source))
    shutil.rmtree(checkpoints(source))
    assert "the run has no checkpoint; train it first" in refused(start_from(tiny, source))


def test_runs_of_another_tokenizer_are_refused(tiny, source, corpus, tmp_path):
    data = shutil.copytree(corpus / "tiny", tmp_path / "data/tiny")
    meta = data / "meta.json"
    edit(meta, tokenizer=json.loads(meta.read_text())["tokenizer"] | {"hash": "0" * 64})
    text = refused(start_from(tiny, source, f"data.dir={tmp_path / 'data'}"))
    says = f"its tokenizer is another, that of the data set {data} is bytes. Prepare the text with"
    assert says in text


# ---- the files of a folder are from_pretrained's
ONE = "model.safetensors"
INDEX = "model.safetensors.index.json"
FIRST, SECOND, LAST = (f"model-0000{number}-of-00005.safetensors" for number in (1, 2, 5))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A model in one file and in shards; in `other`, another model."""
    place = tmp_path_factory.mktemp("saved")
    model = make_gpt2()
    model.save_pretrained(place / "one")
    model.save_pretrained(place / "shards", max_shard_size="20KB")
    make_gpt2(initializer_range=0.5).save_pretrained(place / "other")
    return place


def scatter(folder):
    """As in the hub's cache each file is a link; and tensors are in other shards than the index
    says.
    """
    table = json.loads((folder / INDEX).read_text())["weight_map"]
    files = sorted(path.name for path in folder.glob("model-*"))
    edit(folder / INDEX, weight_map=dict(zip(table, cycle(files), strict=False)))
    for path in sorted(folder.iterdir()):
        path.symlink_to(path.rename(folder.parent / f"blob of {path.name}"))


# form of the folder, files of the other model that are copied into it, another change
FOLDERS = [
    ("shards", [ONE, "model-00001-of-00009.safetensors"], None),
    ("shards", ["pytorch_model.bin", "model.gguf", f".cache/{INDEX}.metadata"], scatter),
    ("one", [INDEX, "model.fp16.safetensors", f"checkpoint-5/{ONE}"], None),
]


@pytest.mark.parametrize("form, copies, change", FOLDERS)
def test_files_are_those_of_transformers(tiny, tmp_path, saved, form, copies, change):
    """A run starts with from_pretrained's weights, whatever else is there."""
    from transformers import AutoModelForCausalLM  # not at the top, as above

    folder = shutil.copytree(saved / form, tmp_path / "copy")
    for name in copies:
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(saved / "other" / ONE, folder / name)
    if change:
        change(folder)
    theirs = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    model, _ = start(tiny(*DENSE, f"train.init_from={folder}"))
    own = FORMATS["gpt2"].from_own(model.state_dict(), model.config)
    assert theirs.keys() - own.keys() == {"lm_head.weight"}  # tied
    for name, tensor in own.items():
        assert torch.equal(tensor, theirs[name]), name


def save_twice(folder):
    """A shard also has the tensors of another one."""
    both = load_file(folder / FIRST) | load_file(folder / SECOND)
    save_file(both, folder / SECOND, {"format": "pt"})


def write(name, content):
    """A change: the file `name` has this content."""
    return lambda folder: (folder / name).write_text(content)


def change_vocabulary(**ids):
    """A change: a tokenizer.json with these tokens beside the end of a text."""
    vocabulary = {"<|endoftext|>": 256, "<new>": 300} | ids
    return write("tokenizer.json", json.dumps({"model": {"vocab": vocabulary}}))


# by the words of the error; weights that fit have none. Other vocabularies: test_tokenizers.py
HARMS = {
    f"{INDEX} names {LAST}, and no such file is in the folder; download": lambda folder: (
        folder / LAST
    ).unlink(),
    f"{LAST} cannot be read (": lambda folder: os.truncate(folder / LAST, 900),
    f"is in {SECOND} and in another file, so they were not saved together": save_twice,
    f"{INDEX} names ../copy/{FIRST}, and no such": lambda folder: edit(
        folder / INDEX, weight_map={"wte.weight": f"../copy/{FIRST}"}
    ),
    "weight_map = 3": lambda folder: edit(folder / INDEX, weight_map=3),
    "weight_map = {}": lambda folder: edit(folder / INDEX, weight_map={}),
    "config.json: damaged, not JSON": write("config.json", "{"),
    "copy/config.json: ": write("config.json", "[" * 10**6),
    "copy/config.json: the content = []: should be an object; download it again": write(
        "config.json", "[]"
    ),
    "neither a config.json of transformers nor a run's": lambda folder: (
        folder / "config.json"
    ).unlink(),
    f"{INDEX}: damaged, not JSON": lambda folder: os.truncate(folder / INDEX, 99),
    "from_pretrained adds this adapter": write("adapter_config.json", ""),
    f"neither {ONE} nor {INDEX}; download it": lambda folder: (folder / INDEX).unlink(),
    "its tokenizer is one whose id of 'a' is 98": change_vocabulary(a=98),
    "tokenizer.json: model is missing; download it again": write("tokenizer.json", "{}"),
    "its tokenizer is one whose texts end with id 0": lambda folder: edit(
        folder / "config.json", eos_token_id=0
    ),
    "its tokenizer is one of 200 ids": lambda folder: make_gpt2(
        vocab_size=200, eos_token_id=None
    ).save_pretrained(folder),
}


def test_a_tokenizer_that_fits(tiny, copy):
    """The end of a text, GPT2Config's default, may be beyond the ids."""
    change_vocabulary(a=97)(copy)
    edit(copy / "config.json", eos_token_id=257)
    start(tiny(*DENSE, f"train.init_from={copy}"))


@pytest.mark.parametrize("words", HARMS)
def test_incomplete_and_ambiguous_folders_are_refused(tiny, tmp_path, saved, words):
    folder = shutil.copytree(saved / "shards", tmp_path / "copy")
    HARMS[words](folder)
    assert words in refused(tiny(*DENSE, f"train.init_from={folder}"))
