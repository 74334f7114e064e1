"""runtime/initial.py: runs that begin with the weights of GPT-2 checkpoints, exports and runs; what is refused."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from conftest import Payload
from runs import checkpoints, column, end, meet_in, run, start_ranks
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

import configure
import scripts.export.__main__ as export
import train
from eval.trained import load_model
from model import GPT
from runtime import RunError, checkpoint, distributed, folder, initial
from runtime.metrics import read
from runtime.names import to_gpt2

ALONE = distributed.Ranks(0, 1, torch.device("cpu"))
GPT2 = {"vocab_size": 257, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_inner": 16}
GPT2 |= {"activation_function": "gelu", "bos_token_id": 256, "eos_token_id": 256}
DENSE = ["model.router=dense", "model.bias=true"]  # what fits it


def gpt2(**update):
    """A GPT-2 of transformers whose LayerNorms are not 1 and whose biases are not 0."""
    from transformers import GPT2Config, GPT2LMHeadModel  # ranks, which import this file, need none of it

    torch.manual_seed(1)
    model = GPT2LMHeadModel(GPT2Config(**GPT2 | update)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model


@pytest.fixture(scope="module")
def there(tmp_path_factory):
    """A folder with such a checkpoint."""
    place = tmp_path_factory.mktemp("gpt2")
    gpt2().save_pretrained(place)
    return place


@pytest.fixture
def copy(there, tmp_path):
    """One of its own for a test that damages it."""
    return shutil.copytree(there, tmp_path / "copy")


def begun(config):
    """(the GPT that a run of `config` begins with, what is said of it)."""
    weights = initial.read(config)
    torch.manual_seed(config.run.seed)
    model = GPT(config.model).eval()
    initial.fill(model, weights, ALONE)
    assert weights.state == {}
    return model, weights.words


def refused(config):
    with pytest.raises(RunError) as caught:
        initial.read(config)
    text = str(caught.value)
    assert text.startswith(f"train.init_from = {config.train.init_from}: ") and "\n" not in text
    return text


def logits(model, idx):
    with torch.no_grad():
        return model.logits(model.hidden(idx)[0])


def ids(T, vocab_size=257):
    return torch.randint(vocab_size, (2, T), generator=torch.Generator().manual_seed(0))


# ---- GPT-2 checkpoints of transformers


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("form", ["safetensors", "shards", "bin", "bin shards", "bare names"])
def test_logits_are_those_of_transformers(tiny, tmp_path, form, tie):
    theirs, place = gpt2(tie_word_embeddings=tie), tmp_path / "gpt2"
    theirs.save_pretrained(place, max_shard_size="20KB" if "shards" in form else "1GB")
    if "bin" in form or form == "bare names":  # as older versions wrote them, masks and tied head included
        state = {
            name.removeprefix("transformer.") if "bare" in form else name: t for name, t in theirs.state_dict().items()
        }
        state["h.0.attn.bias" if "bare" in form else "transformer.h.0.attn.masked_bias"] = torch.ones(1)
        for file in place.glob("model*"):
            file.unlink()
        names = sorted(state)
        parts = [names[::2], names[1::2]] if "shards" in form else [names]
        files = [f"pytorch_model-{i}.bin" for i in range(2)] if "shards" in form else ["pytorch_model.bin"]
        for file, part in zip(files, parts, strict=True):
            torch.save({name: state[name] for name in part}, place / file)
        if "shards" in form:
            table = {name: file for file, part in zip(files, parts, strict=True) for name in part}
            (place / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": table}))
    assert form != "shards" or len([*place.glob("model-*.safetensors")]) > 2
    config = tiny(f"train.init_from={place}", *DENSE, f"model.tie_embeddings={json.dumps(tie)}")
    model, words = begun(config)
    assert_close(logits(model, ids(32)), theirs(ids(32)).logits.detach(), rtol=0, atol=1e-5)
    assert words == f"{folder.path_of(config)}: begins with {place}, a GPT-2 checkpoint"


def test_more_ids_and_fewer_positions(tiny, there):
    config = tiny(f"train.init_from={there}", *DENSE, "model.vocab_size=320", "model.block_size=20", "run.seed=3")
    model, words = begun(config)
    found = logits(model, ids(20))
    assert_close(found[..., :257], gpt2()(ids(20)).logits.detach(), rtol=0, atol=1e-5)
    torch.manual_seed(3)
    assert torch.equal(model.wte.weight[257:], GPT(config.model).wte.weight[257:])
    assert words.endswith("; the first 20 of 32 positions; ids 257 to 319 are not among them and stay as drawn")


def test_what_is_computed_otherwise_is_said(tiny, tmp_path):
    theirs = gpt2(activation_function="gelu_new", layer_norm_epsilon=1e-4)
    theirs.half().save_pretrained(tmp_path / "gpt2")
    model, words = begun(tiny(f"train.init_from={tmp_path / 'gpt2'}", *DENSE))
    assert "gelu_new there is the exact GELU here, up to 5e-4 apart; layer_norm_epsilon was 0.0001" in words
    difference = (logits(model, ids(32)) - theirs.float()(ids(32)).logits).abs().max()
    assert 1e-5 < difference < 0.02
    assert model.wte.weight.dtype == torch.float32


def test_biases_of_0_need_no_place_and_a_place_needs_no_biases(tiny, tmp_path):
    """What scripts.export writes of a model without biases."""
    config = tiny("model.router=dense", f"train.init_from={tmp_path / 'gpt2'}")
    without = GPT(config.model).eval()
    theirs = gpt2()
    theirs.load_state_dict(to_gpt2(without.state_dict()), strict=False)
    theirs.save_pretrained(tmp_path / "gpt2")
    model, words = begun(config)
    assert torch.equal(logits(model, ids(32)), logits(without, ids(32))) and words.endswith("a GPT-2 checkpoint")
    torch.manual_seed(0)
    source = run(tiny("model.router=dense", "run.name=source", "train.max_steps=1", "optim.warmup_steps=0"))
    model, words = begun(tiny(*DENSE, f"train.init_from={tmp_path / 'runs/source'}"))
    assert words.endswith(
        "a run at step 1; not there, at first values here: ln_1.bias, attn.qkv.bias, attn.proj.bias, ln_2.bias, "
        "mlp.w_in.bias, mlp.w_out.bias, ln_f.bias"
    )
    assert not any(p.any() for name, p in model.named_parameters() if name.endswith("bias"))
    assert source


# ---- exports and runs


MOVED = ["train.bias_update_rate=0.01", "model.gate_scale=2.0", "model.router=kern"]  # γ, b and selection bias


@pytest.fixture
def source(tiny):
    """The Config of a run of whose router everything has moved."""
    config = tiny("run.name=source", *MOVED)
    run(config)
    return config


def begin_with(tiny, source, *overrides):
    return tiny(*MOVED, f"train.init_from={folder.path_of(source)}", *overrides)


def test_a_run_begins_where_another_ended(tiny, source, capsys):
    config = begin_with(tiny, source, "run.seed=7")
    first = run(config)[0]
    last = read(folder.path_of(source) / "metrics.jsonl")[-1]
    assert (first["step"], last["step"]) == (0, 4)
    assert first["val/window_losses"] == last["val/window_losses"]
    place, its = folder.path_of(source), folder.path_of(config)
    assert f"{its}: begins with {place}, a run at step 4\n" in capsys.readouterr().out
    assert run(tiny(*MOVED, "run.name=random", "run.seed=7"))[0]["val/loss"] > first["val/loss"]


def test_resumed_it_needs_the_folder_no_more(tiny, source, capsys):
    config = begin_with(tiny, source, "train.checkpoint_interval=2")
    run(config)
    undisturbed = end(config)
    shutil.rmtree(checkpoint.folder_of(checkpoints(config), 4))
    shutil.rmtree(folder.path_of(source))
    assert capsys.readouterr().out.count("begins with") == 1
    run(config)
    assert "begins with" not in capsys.readouterr().out
    assert end(config) == undisturbed
    with pytest.raises(RunError, match="(?s)holds a run with another config:.*train.init_from: .*source' -> ''"):
        train.train(tiny(*MOVED))
    fresh = begin_with(tiny, source, "run.name=fresh")
    with pytest.raises(RunError, match="no such folder"):
        train.train(fresh)
    assert not folder.path_of(fresh).exists()


EXPORTED = {
    "mixture": MOVED,
    "rope, untied": ["model.router=softmax", "model.pos=rope", "model.tie_embeddings=false"],
    "gpt2": ["model.router=dense"],
    "dense": [*DENSE, "model.pos=rope"],
}


@pytest.mark.parametrize("settings", EXPORTED.values(), ids=EXPORTED)
def test_an_export_begins_as_its_run_ended(tiny, tmp_path, settings):
    theirs = tiny("run.name=source", *settings)
    run(theirs)
    place = tmp_path / "export"
    assert export.main([str(folder.path_of(theirs)), str(place)]) == 0
    model, words = begun(tiny(*settings, f"train.init_from={place}", "run.seed=7"))
    wanted = load_model(folder.path_of(theirs)).model
    for name, tensor in wanted.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    assert words.endswith(("an exported model", "a GPT-2 checkpoint"))


def test_another_router_takes_what_it_has_in_common(tiny, source):
    wanted = load_model(folder.path_of(source)).model.state_dict()
    model, words = begun(begin_with(tiny, source, "model.router=sigmoid", "model.top_k=1", "model.gate_scale=1.5"))
    for name, tensor in model.state_dict().items():
        alike = torch.equal(tensor, wanted[name])
        assert alike != name.endswith(("router.c", "selection_bias")), name
    assert not any(tensor.any() for name, tensor in model.state_dict().items() if name.endswith("selection_bias"))
    assert words.endswith(
        "a run at step 4; model.router was kern there and is sigmoid here; model.top_k was 2 there and is 1 here; "
        "model.gate_scale was 2.0 there and is 1.5 here; not used here: mlp.router.bias, mlp.router.gamma, "
        "mlp.router.selection_bias"
    )
    after = begin_with(tiny, theirs := tiny("run.name=plain", "model.router=softmax"), "model.gate_scale=1.0")
    run(theirs)
    assert begun(after)[1].endswith(
        "model.router was softmax there and is kern here; not there, at first values here: mlp.router.bias, "
        "mlp.router.gamma"
    )


# ---- on many ranks


def train_on_ranks(file, place, rank_1_place):
    """Both ways of sharing, then rank 1 with other weights."""
    rank = int(os.environ["RANK"])
    for parallel in ("ddp", "fsdp", "other"):
        meet_in(Path(f"{file}-{parallel}"))
        given = rank_1_place if (parallel, rank) == ("other", 1) else place
        overrides = [f"run.name={parallel}", f"train.init_from={given}", "train.micro_batch_size=4"]
        overrides += ["train.max_steps=1", "optim.warmup_steps=1"]
        overrides += [f"train.parallel={parallel}"] if parallel != "other" else []
        try:
            train.train(configure.load(file, [*MOVED, *overrides], 2))
        except RunError as error:
            print(error)
            distributed.stop()


def test_two_ranks_begin_alike(tiny, tiny_file, source):
    other = tiny("run.name=other-source", *MOVED, "run.seed=1")
    run(other)
    places = [folder.path_of(config) for config in (source, other)]
    for rank in start_ranks(2, train_on_ranks, tiny_file, *places):
        code, printed = rank.wait(120)
        assert code == 0, printed
        assert printed.count("train.init_from holds other weights for one rank than for another") == 1
    wanted = column(read(folder.path_of(source) / "metrics.jsonl"), "val/loss")[-1]
    for parallel in ("ddp", "fsdp"):
        lines = read(folder.path_of(tiny(f"run.name={parallel}")) / "metrics.jsonl")
        assert column(lines, "val/loss")[0] == pytest.approx(wanted, rel=1e-6)
        assert len(column(lines, "train/loss")) == 1


# ---- what is refused


def added(text):
    """The overrides that an error names."""
    return text.partition(" Add ")[2].split()


def test_all_that_differs_is_named_at_once(tiny, there):
    other = [
        "model.n_layer=1",
        "model.n_head=4",
        "model.n_embd=16",
        "model.block_size=40",
        "model.tie_embeddings=false",
    ]
    other += ["model.top_k=3", "model.expert_hidden=9", f"train.init_from={there}"]
    text = refused(tiny(*other))
    assert text.endswith(
        "a GPT-2 checkpoint, whose weights do not fit this model. Add --model.n_layer=2 --model.n_head=2 "
        "--model.n_embd=32 --model.tie_embeddings=true --model.router=dense --model.top_k=1 --model.expert_hidden=16 "
        "--model.block_size=32 --model.bias=true"
    )
    begun(tiny(*other, *added(text)))
    assert added(refused(tiny("model.router=dense", f"train.init_from={there}"))) == ["--model.bias=true"]
    assert added(refused(tiny(*DENSE, f"train.init_from={there}", "model.n_head=4"))) == ["--model.n_head=2"]


def test_all_that_differs_from_a_mixture_is_named_at_once(tiny, source):
    more = ["model.n_expert=4", "model.top_k=4", "model.expert_hidden=4"]
    remedies = {
        ("model.router=dense",): "--model.router=kern",
        ("model.router=dense", *more): "--model.router=kern --model.n_expert=8 --model.expert_hidden=8 --model.top_k=2",
        tuple(more): "--model.n_expert=8 --model.expert_hidden=8",
        ("model.n_expert=16", "model.top_k=16"): "--model.n_expert=8 --model.top_k=2",
        ("model.pos=rope",): "--model.pos=learned",
    }
    for other, remedy in remedies.items():
        text = refused(begin_with(tiny, source, *other))
        assert text.endswith(f"a run at step 4, whose weights do not fit this model. Add {remedy}"), other
        begun(begin_with(tiny, source, *other, *added(text)))


def test_more_ids_than_the_model_has(tiny, tmp_path):
    gpt2(vocab_size=300).save_pretrained(tmp_path / "gpt2")
    config = tiny(*DENSE, f"train.init_from={tmp_path / 'gpt2'}")
    assert added(refused(config)) == ["--model.vocab_size=300"]


def edit(file, **update):
    """Of a JSON file; None removes a key."""
    table = json.loads(file.read_text()) | update
    file.write_text(json.dumps({key: value for key, value in table.items() if value is not None}))


def weights(place, **update):
    """In model.safetensors; None removes one."""
    state = load_file(place / "model.safetensors") | {f"transformer.{key}": value for key, value in update.items()}
    save_file({key: value for key, value in state.items() if value is not None}, place / "model.safetensors")


def sharded(place, files):
    (place / "model.safetensors").unlink()
    (place / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


def in_place_of_safetensors(place, value):
    (place / "model.safetensors").unlink()
    torch.save(value, place / "pytorch_model.bin")


FAULTS = {
    "no config": (lambda p: (p / "config.json").unlink(), "neither a config.json (with model.safetensors) nor a run's"),
    "no json": (lambda p: (p / "config.json").write_text("{"), "config.json cannot be read (Expecting"),
    "a list": (lambda p: (p / "config.json").write_text("[]"), "config.json holds no settings"),
    "another model": (lambda p: edit(p / "config.json", model_type="llama"), "model_type is 'llama'"),
    "no layers": (lambda p: edit(p / "config.json", n_layer=None), "'n_layer' is missing"),
    "text": (lambda p: edit(p / "config.json", n_head="2"), "n_head: Input should be a valid integer"),
    "wide": (lambda p: edit(p / "config.json", vocab_size=128256), "vocab_size: Input should be less than or equal"),
    "relu": (lambda p: edit(p / "config.json", activation_function="relu"), "activation_function is 'relu'"),
    "scaled": (
        lambda p: edit(p / "config.json", scale_attn_by_inverse_layer_idx=True),
        "scale_attn_by_inverse_layer_idx is True",
    ),
    "no weights": (lambda p: (p / "model.safetensors").unlink(), "neither model.safetensors nor pytorch_model.bin"),
    "cut off": (
        lambda p: os.truncate(p / "model.safetensors", 20_000),
        "model.safetensors cannot be read (SafetensorError",
    ),
    "git lfs": (
        lambda p: (p / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\n"),
        "model.safetensors cannot be read (SafetensorError",
    ),
    "a shard is missing": (
        lambda p: sharded(p, {"wte.weight": "model-1.safetensors"}),
        "model-1.safetensors is missing",
    ),
    "a shard elsewhere": (lambda p: sharded(p, {"wte.weight": "../x.safetensors"}), "lists no files of this folder"),
    "no list of shards": (lambda p: sharded(p, None), "lists no files of this folder"),
    "more layers": (lambda p: edit(p / "config.json", n_layer=3), "blocks.2.ln_1.weight is missing, expected (32,)"),
    "another width": (
        lambda p: edit(p / "config.json", n_inner=8),
        "blocks.0.mlp.w_in.weight is (16, 32), expected (8, 32)",
    ),
    "fewer layers": (lambda p: edit(p / "config.json", n_layer=1), "blocks.1.attn.qkv.bias is (96,), expected none"),
    "a classifier": (
        lambda p: weights(p, **{"score.weight": torch.zeros(2, 32)}),
        "score.weight: no weight of that name",
    ),
    "not a number": (
        lambda p: weights(p, **{"ln_f.bias": torch.full((32,), torch.nan)}),
        "ln_f.bias (torch.float32) holds",
    ),
    "integers": (
        lambda p: weights(p, **{"ln_f.bias": torch.ones(32, dtype=torch.int8)}),
        "ln_f.bias (torch.int8) holds",
    ),
    "not tensors": (lambda p: in_place_of_safetensors(p, {"model": {}}), "pytorch_model.bin holds more than tensors"),
}


@pytest.mark.parametrize(("damage", "says"), FAULTS.values(), ids=FAULTS)
def test_a_faulty_checkpoint(tiny, copy, damage, says):
    damage(copy)
    assert says in refused(tiny(*DENSE, f"train.init_from={copy}"))


def test_nothing_is_executed(tiny, copy, canary):
    in_place_of_safetensors(copy, {"wte.weight": Payload(canary)})
    assert "pytorch_model.bin cannot be read (UnpicklingError" in refused(tiny(*DENSE, f"train.init_from={copy}"))


def test_a_place_without_weights(tiny, tmp_path, source, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert refused(tiny("train.init_from=gpt2")).endswith("hub: hf download gpt2 --local-dir gpt2")
    text = refused(tiny("train.init_from=openai-community/gpt2"))
    assert text.endswith("hub: hf download openai-community/gpt2 --local-dir gpt2")
    assert refused(tiny(f"train.init_from={tmp_path}/gone")).endswith("from this machine alone")
    file = folder.path_of(source) / "config.toml"
    assert "not a folder; give the one that holds it" in refused(tiny(f"train.init_from={file}"))
    shutil.rmtree(checkpoints(source))
    assert "a run without a checkpoint; train it first" in refused(begin_with(tiny, source))
    file.write_text("[model]\nn_layers = 2")
    with pytest.raises(RunError, match="did you mean 'model.n_layer'"):
        initial.read(begin_with(tiny, source))


def test_a_damaged_checkpoint_of_a_run(tiny, source):
    (file,) = checkpoints(source).glob("*/*.distcp")
    os.truncate(file, 1000)
    assert "damaged, " in refused(begin_with(tiny, source))


def test_weights_of_another_tokenizer(tiny, copy, source, tmp_path, corpus):
    config = tiny(*DENSE, f"train.init_from={copy}")
    begun(config)
    vocabulary = {text: number for number, text in enumerate(map(chr, range(256)))} | {"<|endoftext|>": 256}
    described = {"model": {"type": "BPE", "vocab": vocabulary, "merges": []}}
    (copy / "tokenizer.json").write_text(json.dumps(described))
    begun(config)
    for wrong, says in (
        (vocabulary | {"a": 98, "b": 97}, "'a'"),
        (vocabulary | {"Ġthe": 33}, "'Ġthe'"),
        ([["a", 0.5]], "not"),
    ):
        described["model"]["vocab"] = wrong
        (copy / "tokenizer.json").write_text(json.dumps(described))
        text = refused(config)
        assert says in text and f"that of the data set {corpus / 'tiny'} is bytes. Prepare the text with" in text
    (copy / "tokenizer.json").unlink()
    (copy / "vocab.json").write_text(json.dumps({"b": 97}))
    assert "its tokenizer is one whose id 97 is 'b'" in refused(config)
    (copy / "vocab.json").unlink()
    edit(copy / "config.json", eos_token_id=50256)  # GPT2Config's default says nothing of so few ids
    begun(config)
    edit(copy / "config.json", eos_token_id=0)
    assert "its tokenizer is one whose texts end with id 0" in refused(config)
    gpt2(vocab_size=200, eos_token_id=None).save_pretrained(copy)
    assert "its tokenizer is one of 200 ids" in refused(config)


def test_a_run_of_another_tokenizer(tiny, source, corpus, tmp_path):
    shutil.copytree(corpus / "tiny", tmp_path / "data/tiny")
    table = json.loads((tmp_path / "data/tiny/meta.json").read_text())
    table["tokenizer"]["hash"] = "0" * 64
    (tmp_path / "data/tiny/meta.json").write_text(json.dumps(table))
    text = refused(begin_with(tiny, source, f"data.dir={tmp_path / 'data'}"))
    assert "its tokenizer is bytes, that of the data set" in text
