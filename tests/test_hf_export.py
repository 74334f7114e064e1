"""hf/export/: models in the form of transformers, their tokenizers, and the command.

Both models compute in fp64, and must agree to the rounding of fp32: an error is either far below
that or a fault.
"""

import json
import os
import re
import shutil
import sys
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from numerics import assert_near, seeded, tolerance
from runs import (
    REPO_ROOT,
    all_logits,
    column,
    largest_file,
    meet_in,
    modules_in,
    start_ranks,
    wait_for_ranks,
)
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, GPT2LMHeadModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

import train
from attention import KVCache, rotate
from balance import balance_loss, expert_loads, token_distribution
from configure.schema import Mix
from data.tokenizer import ByteTokenizer
from eval.trained import Trained, load_model
from hf.by_block import build_by_block
from hf.export import export
from hf.export.export import CODE, choose_form, export_run
from hf.formats import FORMATS
from hf.tokenizer_files import find_merges, write_tokenizer
from hf.weight_files import read_tensors
from model import GPT
from router import ROUTERS, hash_table
from runtime import RunError, folder
from runtime.memory import count_parameters
from runtime.metrics import read_metrics

TOKENIZER = ByteTokenizer()
NEAR = tolerance(torch.float32, 32)


@pytest.fixture(scope="module", autouse=True)
def modules(tmp_path_factory):
    with modules_in(tmp_path_factory.mktemp("modules")):
        transformers.utils.logging.disable_progress_bar()
        yield


@pytest.fixture
def exported(tiny, tmp_path):
    """`exported("model.router=tanh", form="nanokern", dtype="float32")`: (GPT with random weights,
    folder).
    """

    def make(*overrides, form="nanokern", dtype="float32"):
        config = tiny("model.init_std=0.3", "model.n_head=4", *overrides)
        torch.manual_seed(seeded().initial_seed())
        model = GPT(config.model).eval().requires_grad_(False)
        for name, tensor in model.state_dict().items():
            if tensor.dim() == 1 and not name.endswith("router.c"):
                tensor += 0.2 * torch.randn_like(tensor)  # norms, biases, γ and β too
        run, out = tmp_path / "run", tmp_path / f"export_{form}"
        run.mkdir()
        (run / "config.toml").touch()
        trained = Trained(model, config, 4, 1, {}, run)
        export_run(trained, TOKENIZER, out, form, dtype)
        return trained, out

    return make


def load(out, dtype=torch.float32, **settings):
    return AutoModelForCausalLM.from_pretrained(
        out, trust_remote_code=True, dtype=dtype, **settings
    )


def random_ids(*shape):
    return torch.randint(TOKENIZER.vocab_size, shape, generator=seeded(1))


def logits_of(model, idx, start=None):
    """Logits (B, T, V); row b begins at column start[b]."""
    past = None if start is None else KVCache(model.config, start, idx.shape[1], torch.float64)
    return all_logits(model, idx, past)


def assert_same_model(own, theirs, use_cache=True):
    """Equal logits, of a batch and of every token generated from prompts of unequal length."""
    own = own.double()
    theirs = theirs.double().requires_grad_(False)
    idx = random_ids(3, 32)
    start = torch.tensor([0, 5, 8])
    assert_near(theirs(idx).logits, logits_of(own, idx), NEAR)
    mask = (torch.arange(9) >= start[:, None]).long()
    prompts = idx[:, :9].where(mask == 1, TOKENIZER.eot)
    output = theirs.generate(
        prompts,
        attention_mask=mask,
        do_sample=False,
        max_new_tokens=9,
        eos_token_id=None,
        use_cache=use_cache,
        output_logits=True,
        return_dict_in_generate=True,
    )
    wanted = logits_of(own, output.sequences, start)[:, 8:-1]
    assert_near(torch.stack(output.logits, dim=1), wanted, NEAR, "generated tokens")
    assert wanted.std() > 0.5 and output.sequences.max() < TOKENIZER.vocab_size


UNTIED = ("model.tie_embeddings=false", "model.vocab_size=320")
MODERN = (
    "model.norm=rmsnorm",
    "model.activation=silu",
    "model.gated=true",
    "model.pos=rope",
    "model.rope_base=500",
)
MODELS = [(f"model.router={router}",) for router in ROUTERS]
MODELS += [
    ("model.router=softmax", "model.gate_scale=1.7", "model.pos=rope", "model.bias=true"),
    ("model.router=softmax-renorm", "model.gate_norm=1", *UNTIED),
    ("model.router=dense", "model.pos=rope", *UNTIED),
    ("model.router=sigmoid-renorm", "model.router_groups=4", "model.router_group_k=2"),
    (*MODERN, "model.router=softmax", "model.qk_norm=all", "model.n_kv_head=2", *UNTIED),
    (
        *MODERN,
        "model.router=kern",
        "model.qk_norm=head",
        "model.n_shared_expert=2",
    ),
    (
        "model.router=softmax-renorm",
        "model.n_layer=3",
        "model.n_hash_layer=1",
    ),
    (
        *MODERN,
        "model.router=dense",
        "model.n_kv_head=1",
        "model.n_shared_expert=1",
        "model.norm_eps=0.01",
    ),
    (
        "model.router=tanh",
        "model.qk_norm=all",
        "model.bias=true",
        "model.n_shared_expert=1",
        "model.n_kv_head=1",
    ),
]


@pytest.mark.numerics
@pytest.mark.parametrize("overrides", MODELS, ids=" ".join)
def test_every_model_exports_the_same_model(exported, overrides):
    trained, out = exported(*overrides)
    theirs, info = load(out, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert_same_model(trained.model, theirs, use_cache="model.bias=true" not in overrides)
    if "model.n_hash_layer=1" in overrides:
        with pytest.raises(
            ValueError, match="inputs_embeds alone: hash layers choose experts by token id"
        ):
            theirs(inputs_embeds=torch.zeros(1, 2, 32, dtype=torch.float64))
    plan = theirs.config.base_model_tp_plan
    assert ("layers.*.self_attn.q_proj" in plan) == ("model.qk_norm=all" not in overrides)


@pytest.mark.numerics
@pytest.mark.parametrize(
    "more",
    [
        UNTIED,
        ("model.bias=true", "model.vocab_size=320"),
        ("model.norm_eps=0.01", "model.dropout=0.25"),
    ],
)
def test_dense_is_plain_gpt2(exported, more):
    trained, out = exported("model.router=dense", *more, form="gpt2")
    assert not list(out.glob("*.py")) and not (out / "LICENSE-code").exists()
    theirs, info = GPT2LMHeadModel.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    dropouts = {module.p for module in theirs.modules() if isinstance(module, torch.nn.Dropout)}
    assert dropouts == {trained.config.model.dropout}
    # with rows that are padded on the left
    assert export.check_export(trained, TOKENIZER, out) == 0
    assert_same_model(trained.model, theirs)


@pytest.mark.numerics
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_routers_stay_in_fp32(exported, dtype):
    """With all experts chosen, so that rounding cannot choose others."""
    name = str(dtype).removeprefix("torch.")
    trained, out = exported("model.router=kern", "model.top_k=8", dtype=name)
    with safe_open(out / "model.safetensors", "pt") as file:
        kinds = {key: file.get_tensor(key).dtype for key in file.keys()}  # noqa: SIM118
    assert {kind for key, kind in kinds.items() if ".router." in key} == {torch.float32}
    assert {kind for key, kind in kinds.items() if ".router." not in key} == {dtype}
    idx, theirs = random_ids(1, 30), load(out, "auto")
    assert {
        key: tensor.dtype for key, tensor in theirs.state_dict().items() if key in kinds
    } == kinds
    own = trained.model
    own.load_state_dict(export.round_weights(own.state_dict(), dtype, "nanokern"))
    wanted = logits_of(own.double(), idx)
    assert_near(load(out).double()(idx).logits, wanted, NEAR)
    assert theirs(idx).logits.dtype == dtype
    # 8 operations per layer round to dtype
    assert_near(theirs(idx).logits, wanted, tolerance(dtype, 32, 16))
    assert theirs.generate(idx, max_new_tokens=2).shape == (1, 32)
    with torch.autocast("cpu", torch.bfloat16):
        # as in training
        y, router_logits = load(out).model.layers[0].mlp(torch.randn(1, 3, 32))
        assert (y.dtype, router_logits.dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.numerics
@pytest.mark.parametrize("written", export.DTYPES)
def test_hash_layers_compute_in_every_dtype(exported, written):
    """By table alone, so that rounding cannot choose other experts."""
    trained, out = exported("model.router=kern", "model.n_hash_layer=2", dtype=written)
    own, idx = trained.model, random_ids(1, 30)
    own.load_state_dict(export.round_weights(own.state_dict(), export.DTYPES[written], "nanokern"))
    wanted = logits_of(own.double(), idx)
    for dtype in ("auto", *export.DTYPES.values()):
        theirs = load(out, dtype)
        buffers = dict(theirs.named_buffers())
        for layer, block in enumerate(own.blocks):
            table = buffers.pop(f"model.layers.{layer}.mlp.router.hash_table")
            assert table.dtype == torch.int64 and table.equal(block.mlp.router.hash_table)
        assert {buffer.dtype for buffer in buffers.values()} == {torch.float32}
        logits = theirs(idx).logits
        used = export.DTYPES[written] if dtype == "auto" else dtype
        assert logits.dtype == used
        assert_near(logits, wanted, tolerance(used, 32, 16), f"{written} loaded as {dtype}")


@pytest.mark.numerics
@pytest.mark.parametrize("checkpointing", [False, True])
def test_export_is_trained_as_the_run(exported, checkpointing):
    trained, out = exported("model.router=kern")
    own, theirs = trained.model.double().requires_grad_(True), load(out).double().train()
    if checkpointing:
        theirs.gradient_checkpointing_enable({"use_reentrant": False})
    idx = random_ids(2, 32)
    x, y = idx[:, :-1], idx[:, 1:]
    loss = own(x, y).loss
    assert_near(theirs(idx, labels=idx).loss, loss, NEAR)
    # Trainer gives the number of targets in all micro-batches
    assert_near(theirs(idx, labels=idx, num_items_in_batch=3 * y.numel()).loss, loss / 3, NEAR)
    loss.backward()
    # transformers' loss rounds to fp32
    F.cross_entropy(theirs(x).logits.flatten(0, 1), y.flatten()).backward()
    wanted = FORMATS["nanokern"].from_own({name: p.grad for name, p in own.named_parameters()})
    for name, p in theirs.named_parameters():
        assert_near(p.grad, wanted[name], NEAR, name)


def test_export_is_trained_with_dropout_and_from_scratch(exported):
    """Dropout of 1 leaves nothing of the embedding and of each part of a block; a new model gets
    the run's init_std.
    """
    _, out = exported("model.router=kern", "model.dropout=0.99", "model.bias=true")
    theirs = load(out).train()
    assert theirs.config.dropout == 0.99
    base, idx = AutoModel.from_pretrained(out, trust_remote_code=True), random_ids(1, 9)
    output = base(idx, output_hidden_states=True, use_cache=False)
    assert len(output.hidden_states) == 2 + 1 and output.hidden_states[-1].equal(
        output.last_hidden_state
    )
    assert output.past_key_values is None and base(idx).past_key_values.get_seq_length() == 9
    theirs.apply(
        lambda module: setattr(module, "dropout", 1.0) if hasattr(module, "dropout") else None
    )
    theirs.config.dropout = 1.0
    assert not theirs.model(idx, output_hidden_states=True).hidden_states[-2].any()
    new = AutoModelForCausalLM.from_config(theirs.config, trust_remote_code=True)
    for p in new.model.layers[0].mlp.experts.parameters():
        assert p.std().item() == pytest.approx(0.3, rel=0.2)


def load_in_parallel(out, meeting, modules):
    """A rank: the model split by its tensor-parallel plan gives the logits of the model in one
    piece.
    """
    meet_in(meeting)
    with modules_in(modules / os.environ["RANK"]):
        split, plain = load(out, tp_plan="auto").double(), load(out).double()
        idx = random_ids(1, 20)
        assert dist.get_world_size() == 2
        assert_near(split(idx).logits, plain(idx).logits, NEAR)


@pytest.mark.numerics
@pytest.mark.integration
@pytest.mark.parametrize("router", ["kern", "dense"])
def test_tensor_parallel_plan(exported, tmp_path, router):
    _, out = exported(f"model.router={router}", "model.pos=rope")
    wait_for_ranks(start_ranks(2, load_in_parallel, out, tmp_path / "meeting", tmp_path), 300)


@pytest.mark.numerics
def test_layout_that_vllm_expects(exported):
    """The contract of vLLM's Transformers backend (vllm/model_executor/models/transformers, read in
    0.32 and 0.33):
    attention is looked up by the name in the config and gets the layer and all keyword arguments;
    `experts` are packed and called with tokens, indices and weights. No name in the config makes
    vLLM replace them by its gated experts."""
    trained, out = exported("model.router=kern", "model.dropout=0.25")
    theirs, calls = load(out).double().requires_grad_(False), []

    def attend(module, query, key, value, mask, scaling, **settings):
        said = settings["dropout"], settings["probe"]
        calls.append((module.layer_idx, tuple(query.shape), scaling, mask, *said))
        later = torch.ones(9, 9).triu(1).bool()
        scores = (query @ key.mT * scaling).masked_fill(later, -torch.inf)
        return (scores.softmax(-1) @ value).transpose(1, 2), None

    idx = torch.arange(9)[None]
    wanted = theirs.model(idx).last_hidden_state
    ALL_ATTENTION_FUNCTIONS.register("probe", attend)
    theirs.config._attn_implementation = "probe"
    settings = {"use_cache": False, "return_dict": False, "probe": "it"}
    got = theirs.model(
        input_ids=None,
        inputs_embeds=theirs.get_input_embeddings()(idx),
        position_ids=idx,
        **settings,
    )
    assert_near(got[0], wanted, NEAR)
    assert calls == [(layer, (1, 4, 9, 8), 8**-0.5, None, 0.0, "it") for layer in range(2)]
    theirs.train().model(idx, **settings)
    assert [dropout for *_, dropout, _ in calls] == [0.0, 0.0, 0.25, 0.25]
    parts = {f"layers.*.self_attn.{part}_proj" for part in "qkvo"}
    assert (
        type(theirs)._supports_attention_backend
        and theirs.config.base_model_tp_plan.keys() >= parts
    )
    moe = theirs.model.layers[0].mlp
    assert {tuple(p.shape) for p in moe.experts.parameters()} == {(8, 32, 8), (8, 8, 32)}
    tokens = torch.randn(5, 32, dtype=torch.float64)
    routing = moe.router(tokens)
    named = {"top_k_index": routing.experts, "top_k_weights": routing.weights}
    assert moe.experts(hidden_states=tokens, **named).shape == (5, 32)
    known = {"num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts"}
    assert not known & json.loads((out / "config.json").read_text()).keys()


@pytest.mark.parametrize("kind", ["gpt2", "nanokern"])
def test_check_holds_one_block_of_each_model(exported, kind):
    """Blocks of neither model have weights before and after a pass; logits are a full model's."""
    words = {
        "gpt2": ["model.router=dense"],
        "nanokern": ["model.router=kern", "model.n_hash_layer=1"],
    }
    trained, out = exported(*words[kind], form=kind)
    idx = random_ids(2, 20)
    own = build_by_block(trained.config.model, trained.state, torch.float64)
    held = []  # blocks with weights in memory, while each block computes

    def count_held(*_):
        held.append(sum(not block.ln_1.weight.is_meta for block in own.blocks))

    for block in own.blocks:
        block.register_forward_pre_hook(count_held)
    logits = logits_of(own, idx)
    assert logits_of(own, idx).equal(logits) and held == [1, 1, 1, 1]
    assert all(p.is_meta for p in own.blocks.parameters())
    wanted = logits_of(trained.model.double(), idx)
    assert logits.equal(wanted)
    with export.load_from_disk(out, kind == "nanokern", dtype=torch.float64) as (theirs, _):
        blocks = theirs.get_decoder()
        blocks = blocks.h if kind == "gpt2" else blocks.layers
        for _ in range(2):
            assert_near(theirs(idx).logits, wanted, NEAR)
            assert all(p.is_meta for p in blocks.parameters())


def break_weights(out):
    """One is a little off."""
    state = load_file(out / "model.safetensors")
    state["model.layers.1.mlp.experts.down_proj"][:, 3] *= 1.001
    save_file(state, out / "model.safetensors", {"format": "pt"})


def flip_bit(out):
    """The lowest bit of the last weight, which changes logits by less than rounding."""
    file = out / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-4] ^= 1
    file.write_bytes(content)


def lose_weights(out):
    """One is missing."""
    state = load_file(out / "model.safetensors")
    del state["model.layers.0.mlp.router.gamma"]
    save_file(state, out / "model.safetensors", {"format": "pt"})


def break_tokenizer(out):
    body = json.loads((out / "tokenizer.json").read_text())
    body["model"]["vocab"] |= {"a": ord("b"), "b": ord("a")}
    (out / "tokenizer.json").write_text(json.dumps(body))


def break_end(out):
    settings = json.loads((out / "tokenizer_config.json").read_text())
    (out / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": "a"}))


def break_positions(out):
    """Every later token gets the first token's position."""
    code = (out / "modeling_nanokern.py").read_text()
    code = code.replace("if position_ids is None:", "if True:").replace(
        "[:, -len(columns) :]", "[:, : len(columns)]"
    )
    (out / "modeling_nanokern.py").write_text(code)


HARMS = {
    break_weights: ("in one pass: at most",),
    flip_bit: ("model.safetensors: damaged",),
    lose_weights: ("missing_keys: model.layers.0.mlp.router.gamma",),
    break_positions: ("generated with a cache: at most",),
    break_tokenizer: ("the tokenizer gives other ids",),
    break_end: ("the tokenizer ends a text with 97, not 256",),
}


def test_differences_are_found(exported, tmp_path, capsys):
    trained, out = exported()
    assert export.check_export(trained, TOKENIZER, out) == 0
    correct = capsys.readouterr().out
    for harm, words in HARMS.items():
        # transformers keeps the code it knows by a name
        copy = Path(shutil.copytree(out, tmp_path / harm.__name__))
        harm(copy)
        assert export.check_export(trained, TOKENIZER, copy) == 1
        printed = capsys.readouterr()
        assert all(said in printed.err and said not in printed.out for said in words), (
            harm,
            printed,
        )
        assert f"export {trained.folder} again, into a new folder" in printed.err
    assert correct.count("at most") == 2 and "tokenizer: the same" in correct
    assert correct.count("in float32, as loaded by default") == 2


def round_embeddings(code):
    """To 8 bits, in half precision alone."""
    line = "        x = F.dropout(x, self.config.dropout, self.training)\n        for layer"
    assert line in code
    rounding = "        if x.dtype != torch.float32 and x.dtype != torch.float64:\n"
    rounding += "            x = x.to(torch.float8_e5m2).to(x.dtype)\n"
    return code.replace(line, rounding + line)


def round_tables(code):
    """As 63e4928 did."""
    return code.replace('        "router.weight",', '        "router",')


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (round_embeddings, "in bfloat16, as loaded by default, in one pass: median error of a"),
        (round_tables, "cannot be loaded or run (RuntimeError: gather(): Expected dtype int"),
    ],
)
def test_differences_in_half_precision_are_found(exported, tmp_path, capsys, harm, words):
    trained, out = exported("model.router=kern", "model.n_hash_layer=1", dtype="bfloat16")
    out = out.rename(tmp_path / harm.__name__)
    file = out / "modeling_nanokern.py"
    code = file.read_text()
    assert harm(code) != code
    file.write_text(harm(code))
    assert export.check_export(trained, TOKENIZER, out) == 1
    printed = capsys.readouterr()
    assert words in printed.err and words not in printed.out
    assert printed.out.count("at most") == 2  # in fp64 all is well


# ---- uses that transformers and its clients make of a model
MIXTURES = [(f"model.router={router}",) for router, spec in ROUTERS.items() if spec]
MIXTURES.append(("model.router=tanh", "model.n_layer=4", "model.n_hash_layer=1"))


def list_training_cells():
    """Each mixture with each kind of gradient checkpointing; the default tests have one kind."""
    cells = []
    for number, overrides in enumerate(MIXTURES):
        for kind, reentrant in enumerate((None, False, True)):
            marks = () if number % 3 == kind else pytest.mark.integration
            name = f"{' '.join(overrides)}-{reentrant}"
            cells.append(pytest.param(overrides, reentrant, marks=marks, id=name))
    return cells


@pytest.mark.numerics
@pytest.mark.parametrize("overrides, reentrant", list_training_cells())
def test_aux_loss_is_that_of_training(exported, overrides, reentrant):
    """Value and gradients of the trainer's own balance loss, under any gradient checkpointing."""
    trained, out = exported(*overrides, "train.balance_loss_coef=0.3")
    own, theirs = trained.model.double().requires_grad_(True), load(out).double().train()
    if reentrant is not None:
        theirs.gradient_checkpointing_enable({"use_reentrant": reentrant})
    idx = random_ids(3, 32)
    stats = own(idx, idx).stats
    wanted = train.auxiliary_loss(trained.config.train, stats, n_hash_layer=own.config.n_hash_layer)
    output = theirs(idx, labels=idx, output_router_logits=True)
    assert theirs.config.router_aux_loss_coef == 0.3
    assert 0.3 * output.aux_loss.item() == pytest.approx(wanted.item(), abs=1e-6)
    plain = theirs(idx, labels=idx)
    assert plain.router_logits is None and plain.aux_loss is None
    assert (output.loss - plain.loss).item() == pytest.approx(wanted.item(), abs=1e-6)
    wanted.backward()
    (0.3 * output.aux_loss).backward()
    zeros = {name: torch.zeros_like(p) for name, p in own.named_parameters()}
    gradients = {name: p.grad for name, p in own.named_parameters() if p.grad is not None}
    wanted_gradients = FORMATS["nanokern"].from_own(zeros | gradients)
    for name, p in theirs.named_parameters():
        if p.grad is None:
            assert not wanted_gradients[name].any(), name
        elif wanted_gradients[name].any():
            assert_near(p.grad, wanted_gradients[name], NEAR, name)
    assert theirs.model.layers[-1].mlp.router.weight.grad.any()


@pytest.mark.numerics
@pytest.mark.parametrize("router", [router for router, spec in ROUTERS.items() if spec])
def test_aux_loss_does_not_count_padding(exported, router):
    """Equal to balance.py's loss of the tokens alone, whose logits are the raw ones.

    With a cache it is that of the new tokens.
    """
    trained, out = exported(f"model.router={router}")
    theirs = load(out).double()
    theirs.config.output_router_logits = True
    idx = random_ids(3, 32)
    mask = torch.arange(32) >= torch.tensor([0, 9, 20])[:, None]
    logits = []
    for block in trained.model.double().blocks:
        block.mlp.router.register_forward_hook(lambda *args: logits.append(args[2].logits))
    logits_of(trained.model, idx, (~mask).sum(1))

    def find_loss(counted):
        losses = []
        for block, raw in zip(trained.model.blocks, logits, strict=True):
            routing = block.mlp.router.choose(raw[counted.flatten()])
            loads = expert_loads(routing.experts, 8)
            losses.append(balance_loss(token_distribution(routing).mean(0), loads))
        return pytest.approx(sum(losses).item() / 2, abs=1e-6)

    is_late = torch.arange(32) >= 15
    for padding in (TOKENIZER.eot, 5):
        padded = idx.where(mask, padding)
        output = theirs(padded, attention_mask=mask.long())
        assert output.aux_loss.item() == find_loss(mask)
    first = theirs(padded[:, :15], attention_mask=mask[:, :15].long(), use_cache=True)
    cache = first.past_key_values
    second = theirs(padded[:, 15:], attention_mask=mask.long(), past_key_values=cache)
    assert second.aux_loss.item() == find_loss(mask & is_late)
    assert output.loss is None and len(output.router_logits) == 2
    for theirs_raw, raw in zip(output.router_logits, logits, strict=True):
        assert_near(theirs_raw[mask.flatten()], raw[mask.flatten()], NEAR)
    generated = theirs.generate(idx[:, :9], attention_mask=mask[:, 23:].long(), max_new_tokens=3)
    assert generated.shape == (3, 12)


def test_aux_loss_is_that_of_transformers_for_softmax(exported):
    """Of one layer and softmax, where both formulas are the same, but for the factor K."""
    _, out = exported("model.router=softmax", "model.n_layer=1")
    theirs = load(out)
    theirs.config.output_router_logits = True
    theirs.model.layers[0].mlp.router.selection_bias.zero_()  # softmax alone chooses there
    mask = (torch.arange(32) >= torch.tensor([0, 9])[:, None]).long()
    output = theirs(random_ids(2, 32), attention_mask=mask)
    sizes = theirs.config.num_experts, theirs.config.num_experts_per_tok
    wanted = load_balancing_loss_func(output.router_logits, *sizes, mask)
    assert output.aux_loss.item() == pytest.approx(wanted.item() / 2, abs=1e-6)


def test_number_of_experts_is_hidden_from_vllm(exported):
    """vLLM looks for these names, TRL too, after it has set output_router_logits."""
    _, out = exported("model.router=kern")
    config = AutoConfig.from_pretrained(out, trust_remote_code=True)
    assert not hasattr(config, "num_experts") and not hasattr(config, "num_local_experts")
    config.output_router_logits = True
    assert config.num_experts == config.num_local_experts == 8


HEADS = [
    ("model.n_kv_head=2", "model.qk_norm=head", "model.pos=rope"),
    ("model.n_kv_head=1", "model.bias=true"),
    ("model.n_hash_layer=1",),
]


@pytest.mark.numerics
@pytest.mark.parametrize("overrides", HEADS, ids=" ".join)
def test_attention_implementations_agree(exported, overrides):
    """Padded rows, in one pass and generated; attentions are a softmax written out."""
    _, out = exported(*overrides)
    idx = random_ids(3, 20)
    mask = torch.arange(20) >= torch.tensor([0, 5, 8])[:, None]
    first = {"attention_mask": mask[:, :12].long(), "max_new_tokens": 6, "do_sample": False}
    sdpa = load(out, attn_implementation="sdpa").requires_grad_(False)
    wanted = sdpa(idx, attention_mask=mask.long()).logits[mask]
    tokens = sdpa.generate(idx[:, :12], **first)
    assert sdpa.generate(idx[:, :12], **first, cache_implementation="static").equal(tokens)
    beams = [sdpa.generate(idx[:, :12], **first, num_beams=3, use_cache=on) for on in (True, False)]
    assert beams[0].equal(beams[1])
    for implementation in ("eager", "flex_attention"):  # the latter has no backward pass on CPUs
        theirs = load(out, attn_implementation=implementation).requires_grad_(False)
        # Inductor of torch 2.13 cannot compile flex attention for changing lengths on a CPU
        with torch.compiler.set_stance("force_eager"):
            logits = theirs(idx, attention_mask=mask.long()).logits[mask]
            assert_near(logits, wanted, tolerance(torch.float32, 64, 64), implementation)
            assert theirs.generate(idx[:, :12], **first).equal(tokens)

    eager = load(out, attn_implementation="eager").requires_grad_(False)
    inputs = []
    for layer in eager.model.layers:
        layer.self_attn.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    output = eager(idx, attention_mask=mask.long(), output_attentions=True)
    assert len(output.attentions) == eager.config.num_hidden_layers
    visible = torch.ones(20, 20).tril().bool() & mask[:, None, None]
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    for layer, x, attentions in zip(eager.model.layers, inputs, output.attentions, strict=True):
        attention = layer.self_attn
        query = split_heads(attention.q_proj(x), attention.q_norm)
        key = split_heads(attention.k_proj(x), attention.k_norm)
        if eager.config.pos == "rope":
            query = rotate(query, eager.config.rope_base, positions)
            key = rotate(key, eager.config.rope_base, positions)
        key = key.repeat_interleave(4 // key.shape[1], 1)
        scores = (query @ key.mT / 8**0.5).masked_fill(~visible, -torch.inf)
        by_row = attentions.transpose(1, 2)[mask]  # padding attends to anything
        assert_near(by_row, scores.softmax(-1).transpose(1, 2)[mask], NEAR)


def split_heads(x, norm):
    """(B, T, heads · 8) -> (B, heads, T, 8), with a norm per head."""
    heads = x.unflatten(-1, (-1, 8)).transpose(1, 2)
    return heads if norm is None else norm(heads)


@pytest.mark.numerics
@pytest.mark.parametrize(
    "overrides", [("model.pos=rope",), UNTIED, ("model.n_hash_layer=1",)], ids=" ".join
)
def test_embeddings_are_given_and_resized(exported, tmp_path, overrides):
    trained, out = exported("model.router=kern", *overrides)
    theirs, idx = load(out), random_ids(2, 20)
    size, hashed = theirs.config.vocab_size, "model.n_hash_layer=1" in overrides
    logits = theirs(idx).logits
    embeddings = theirs.get_input_embeddings()(idx)
    ask = {"max_new_tokens": 4, "do_sample": False}
    if hashed:
        for call in (theirs, partial(theirs.generate, **ask)):
            with pytest.raises(ValueError, match="give input_ids instead"):
                call(inputs_embeds=embeddings)
    else:
        assert_near(theirs(inputs_embeds=embeddings).logits, logits, NEAR)
        tokens = theirs.generate(inputs_embeds=embeddings, **ask)
        assert tokens.equal(theirs.generate(idx, **ask)[:, 20:])

    old = theirs.generation_config.suppress_tokens
    assert old == (list(range(257, 320)) if overrides == UNTIED else None)
    theirs.resize_token_embeddings(259, pad_to_multiple_of=64)  # two new tokens
    padding = theirs.generation_config.suppress_tokens
    assert padding == (list(range(259, 320)) if overrides == UNTIED else None)
    assert theirs.config.vocab_size == theirs.lm_head.out_features == 320
    assert_near(theirs(idx).logits[..., :size], logits, NEAR)
    if hashed:  # the rule of a model that had this vocabulary from the start
        table = theirs.model.layers[0].mlp.router.hash_table
        assert table.equal(hash_table(320, 8, 2, seed=0))
    new_ids = torch.tensor([[1, 257, 258]])
    resized = theirs(new_ids).logits
    theirs.save_pretrained(tmp_path / "resized")
    assert load(tmp_path / "resized")(new_ids).logits.equal(resized)
    theirs.resize_token_embeddings(258)
    assert_near(theirs(idx).logits[..., :257], logits[..., :257], NEAR)
    tied = theirs.lm_head.weight is theirs.model.embed_tokens.weight
    assert tied == (overrides != UNTIED)


def test_devices_and_saving_change_no_bit(exported, tmp_path):
    """And a saved model has the code that it needs."""
    _, out = exported(*MODERN, "model.n_hash_layer=1", dtype="bfloat16")
    theirs, idx = load(out, "auto"), random_ids(2, 20)
    card = (out / "README.md").read_text()
    assert '`target_parameters=["experts.gate_up_proj", "experts.down_proj"]`' in card
    logits = theirs(idx).logits
    theirs.save_pretrained(tmp_path / "again")
    weights = load_file(out / "model.safetensors")
    saved = load_file(tmp_path / "again/model.safetensors")
    assert saved.keys() == weights.keys()
    for name, tensor in saved.items():
        assert tensor.dtype == weights[name].dtype and tensor.equal(weights[name]), name
    code = [name for name in CODE if name.endswith(".py")]
    assert all((tmp_path / "again" / name).read_text() for name in code)
    for folder_, settings in (
        (tmp_path / "again", {}),
        (out, {"device_map": "auto"}),
        (out, {"device_map": "cpu"}),
    ):
        assert load(folder_, "auto", **settings)(idx).logits.equal(logits)


def read_alone(out, saved, text):
    """Read an export's tokenizer and a saved model without our modules; print what they give."""
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        if file.startswith(f"{REPO_ROOT}/") and "site-packages" not in file:
            del sys.modules[name]
    folders = [folder_ for folder_ in sys.path if "python" in folder_]
    sys.path[:] = folders
    tokenizer = AutoTokenizer.from_pretrained(out, trust_remote_code=False)
    ids = tokenizer.encode(text, return_tensors="pt")
    print(ids.tolist())
    print(AutoTokenizer.from_pretrained(out).encode(text))
    assert not [name for name in sys.modules if "nanokern" in name]
    model = AutoModelForCausalLM.from_pretrained(saved, trust_remote_code=True)
    print(model(ids).logits.double().sum().item())


def test_tokenizer_needs_no_code_and_saved_models_no_other(exported, tmp_path):
    """In a process of its own, where nobody answers transformers' question whether to run code.

    It asks because config.json names code, unless trust_remote_code is given; the tokenizer does
    not need the answer.
    """
    trained, out = exported("model.router=kern")
    load(out).save_pretrained(tmp_path / "saved")
    text = "naïve 日本語"
    printed = tmp_path / "printed"
    if not (child := os.fork()):
        code = 1
        try:
            with printed.open("w") as sys.stdout, open(os.devnull) as sys.stdin:
                sys.stderr = sys.stdout
                with modules_in(tmp_path / "cache"):
                    read_alone(out, tmp_path / "saved", text)
            code = 0
        except Exception as error:
            printed.write_text(repr(error))
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, printed.read_text()
    ids = TOKENIZER.encode(text)
    first, *question, second, total = printed.read_text().splitlines()
    assert first == f"[{ids}]" and second.endswith(f" {ids}")
    assert "custom code" in question[0] and "[y/N]" in second
    wanted = logits_of(trained.model.double(), torch.tensor([ids])).sum()
    assert float(total) == pytest.approx(wanted.item(), rel=1e-4, abs=1e-2)


@pytest.mark.parametrize(
    "overrides",
    [("model.router=kern",), (*MODERN, "model.router=softmax", "model.n_hash_layer=1")],
    ids=" ".join,
)
def test_lora_on_experts(exported, tmp_path, overrides):
    """PEFT trains each factor, and the merged, saved model has the logits of the adapted one."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    _, out = exported(*overrides)
    up = "experts.gate_up_proj" if MODERN[0] in overrides else "experts.up_proj"
    config = peft.LoraConfig(
        r=2, target_modules=[], target_parameters=[up, "experts.down_proj", "router.weight"]
    )
    adapted = peft.get_peft_model(load(out), config)
    factors = {name: p for name, p in adapted.named_parameters() if p.requires_grad}
    assert len(factors) == 2 * 3 * 2  # A and B of three matrices in two layers
    optimizer = torch.optim.AdamW(factors.values(), lr=0.02)
    idx, losses = random_ids(4, 32), []
    for _ in range(4):
        loss = adapted(idx, labels=idx, output_router_logits=True).loss
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert all(p.grad.any() for p in factors.values()) and losses[-1] < losses[0] - 0.1
    logits = adapted.eval()(idx).logits
    merged = adapted.merge_and_unload()
    assert_near(merged(idx).logits, logits, tolerance(torch.float32, 64, 64))
    merged.save_pretrained(tmp_path / "merged")
    assert load(tmp_path / "merged")(idx).logits.equal(merged(idx).logits)


# ---- tokenizers and the command
TEXTS = [*export.ODD_TEXTS, "a . b , c ! d ? e 's n't", "a" * 900 + " " * 300 + "b", "\x00\xad ¡ÿĀ"]
TEXTS += [chr(i) + " " + chr(i + 1) for i in range(0, 900, 2)]


def test_merges_are_recovered(tmp_path, any_tokenizer):
    write_tokenizer(any_tokenizer, tmp_path, 32)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        ids = any_tokenizer.encode(text)
        assert (
            theirs.encode(text) == ids and theirs.decode(ids) == any_tokenizer.decode(ids) == text
        )
    eot, size = any_tokenizer.eot, any_tokenizer.vocab_size
    assert theirs.encode("a<|endoftext|>") == [*any_tokenizer.encode("a"), eot]
    ids = [*any_tokenizer.encode("a"), eot]
    assert theirs.decode(ids, skip_special_tokens=True) == "a"
    assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).decode(ids) == "a"
    assert theirs.bos_token_id == theirs.pad_token_id == eot
    assert (theirs.eos_token_id, len(theirs), theirs.model_max_length) == (eot, size, 32)
    tokens = [b"a", b"b", b"c", b"ab", b"bc", b"abc", b"abcab"]
    assert list(find_merges(tokens)) == [[b"a", b"b"], [b"b", b"c"], [b"ab", b"c"], [b"abc", b"ab"]]
    tokens = [b"a", b"b", b"c", b"bc", b"ab", b"abc"]
    assert list(find_merges(tokens)) == [[b"b", b"c"], [b"a", b"b"], [b"a", b"bc"]]


ROW = "| arc_easy | 20 | 0.2500 ± 0.0100 | 0.3000 ± 0.0200 | 0.2500 |  |\n"


@pytest.fixture(scope="module")
def run(module_tiny):
    """A run of 4 steps with checkpoints 2 and 4, and what eval.downstream leaves for 4 and for the
    mean.
    """
    train.train(config := module_tiny("train.checkpoint_interval=2"))
    for label, text in (("step_00000004", ROW), ("step_00000004_mean2", "results of the mean")):
        (folder.path_of(config) / "eval" / label).mkdir(parents=True)
        (folder.path_of(config) / "eval" / label / "table.md").write_text(text)
    return folder.path_of(config)


def test_an_export_that_another_one_overtakes_says_so(run, tmp_path, call, monkeypatch):
    out = tmp_path / "out"
    write_card = export.format_card

    def overtake(*arguments):
        out.mkdir()
        (out / "config.json").write_text("theirs")
        return write_card(*arguments)

    monkeypatch.setattr(export, "format_card", overtake)
    said = call(export.main, run, out, code=2)
    assert f"{out}: written by another process meanwhile; name a new folder" in said
    assert (out / "config.json").read_text() == "theirs" and list(tmp_path.iterdir()) == [out]


def test_export_and_check(run, tmp_path, call):
    out = tmp_path / "there/out"
    said = call(export.main, run, out, "--check")
    assert all(
        words in said
        for words in ("tokenizer: the same", "generated with a cache: at most", "in one pass: at")
    )
    names = {
        "README.md",
        "config.json",
        "config.toml",
        "generation_config.json",
        "model.safetensors",
    }
    assert {path.name for path in out.iterdir()} == names | {
        "tokenizer.json",
        "tokenizer_config.json",
        *CODE,
    }
    assert list(out.parent.iterdir()) == [out]
    assert export.FILE_BYTES == 5 * 10**9  # "above 5 GB several files"
    card = (out / "README.md").read_text()
    losses = column(read_metrics(run / "metrics.jsonl"), "val/loss")
    for words in (
        f"| {losses[-1]:.4f} (step 4) |",
        "RouterSpec(phi='relu'",
        "| n_expert | 8 |",
        "license: other",
    ):
        assert words in card
    total, active = count_parameters(load_model(run).config.model)
    assert f"of {total:,} parameters, {active:,} of them active" in card
    assert ROW in card and "{" not in card
    assert "`vllm serve PATH --trust-remote-code --model-impl transformers`" in card
    assert 'AutoTokenizer.from_pretrained("PATH", trust_remote_code=False)' in card
    assert '`target_parameters=["experts.up_proj", "experts.down_proj"]`' in card
    config = AutoConfig.from_pretrained(out, trust_remote_code=True)
    assert config.eos_token_id == config.bos_token_id == config.pad_token_id == 256
    assert "exists already; name a new folder" in call(export.main, run, out, code=2)
    assert json.loads((out / "config.json").read_text())["nanokern"] == {
        "run": "tiny",
        "weights": "step_00000004",
    }


def test_a_full_disk_is_one_line_and_leaves_nothing(run, tmp_path, call):
    for size in (20_000, 500):  # the weights, or a smaller file, do not fit
        with largest_file(size):
            said = call(export.main, run, tmp_path / "out", code=2)
        assert "out" in said and said.count("\n") == 1
        assert list(tmp_path.iterdir()) == []


def test_other_weights_behind_a_link(run, tmp_path, call):
    """An early checkpoint, and the mean of two in half precision: their weights, losses and results
    in the card.
    """
    (tmp_path / "out").symlink_to(tmp_path / "behind")
    said = call(export.main, run, tmp_path / "out", "--checkpoint", 2)
    assert said == f"{tmp_path / 'out'}: {run} at step 2\n"
    assert (tmp_path / "behind/README.md").is_file() and (tmp_path / "out").is_symlink()
    wanted = FORMATS["nanokern"].from_own(load_model(run, 2).model.state_dict())
    assert all(
        tensor.equal(wanted[name])
        for name, tensor in load_file(tmp_path / "out/model.safetensors").items()
    )
    early = [line for line in read_metrics(run / "metrics.jsonl") if line["step"] == 2]
    card = (tmp_path / "out/README.md").read_text()
    assert "weights are those of step 2, in float32." in card and "step 4" not in card
    assert list_training(card) == expect_training(run, 2, early, "(step 2)")
    call(export.main, run, tmp_path / "mean", "--average", 2, "--dtype", "bfloat16", "--check")
    card = (tmp_path / "mean/README.md").read_text()
    assert (
        "the mean of 2 checkpoints up to step 4, in bfloat16" in card
        and "results of the mean" in card
    )
    late = [line for line in read_metrics(run / "metrics.jsonl") if line["step"] == 4]
    note = "(step 4, of that checkpoint, not of the mean)"
    assert list_training(card) == expect_training(run, 4, late, note)
    earlier = load_model(run, average=2)._replace(step=3)
    data = earlier.config.data.model_copy(update={"mix": Mix({"a": 1.0, "b": 3.0})})
    mixed = earlier._replace(config=earlier.config.model_copy(update={"data": data}))
    card = export.format_card(mixed, "nanokern", "float32")
    assert "checkpoints up to step 3, in" in card and f"| data set | {data.label} |" in card


def list_training(card):
    """{key: value} of the table under "Training"."""
    table = card.partition("## Training")[2].partition("## Evaluation")[0]
    return dict(re.findall(r"^\| (.+?) +\| +(.+?) +\|$", table, re.M)[2:])


def expect_training(run, step, lines, note):
    """Of 8 rows of 32 tokens a step, by the checkpoint and the last lines of metrics.jsonl."""
    facts = load_model(run, step).metadata
    rows = {"data set": "tiny", "steps": str(step)}
    rows |= {f"sha256 of the {key}": facts[key] for key in ("data", "tokenizer")}
    rows["tokens seen"] = f"{step * 8 * 32:,}"
    for key in ("train/loss", "val/loss"):
        rows[f"{key}, nats per token"] = f"{column(lines, key)[-1]:.4f} {note}"
    return rows


EMBEDDINGS = 4 * (257 + 32) * 32  # bytes


@pytest.mark.parametrize(
    ("average", "file_bytes", "n_file"), [(1, 20_000, 5), (2, 40_000, 3), (1, EMBEDDINGS, 3)]
)
def test_an_export_in_several_files(run, tmp_path, monkeypatch, call, average, file_bytes, n_file):
    """Of a run that is read block by block: the weights of `load_model`.

    Each part above 20 kB has a file, or both embeddings, which may fill it, a block, a block and
    the last norm.
    """
    monkeypatch.setattr(export, "FILE_BYTES", file_bytes)
    call(export.main, run, tmp_path / "out", "--average", average)
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert files == [f"model-0000{number}.safetensors" for number in range(1, n_file + 1)]
    own = load_model(run, average=average).model
    tensors, notes = read_tensors(tmp_path / "out", {})
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    wanted = FORMATS["nanokern"].from_own(own.state_dict())
    assert notes == [] and tensors.keys() == wanted.keys()
    assert all(tensor.equal(tensors[name]) for name, tensor in wanted.items())
    idx = random_ids(1, 30)
    assert_near(load(tmp_path / "out")(idx).logits, logits_of(own, idx), NEAR)


def test_failed_export_leaves_no_files(run, tmp_path, monkeypatch, call):
    with monkeypatch.context() as patch:
        patch.setattr(
            "hf.export.export.format_card",
            mock.Mock(side_effect=OSError(28, "No space left on device")),
        )
        assert "error: [Errno 28] No space left" in call(export.main, run, tmp_path / "out", code=2)
    assert not list(tmp_path.glob("*out*"))
    call(export.main, run, tmp_path / "out")
    assert list(tmp_path.glob("*out*")) == [tmp_path / "out"]
    # safetensors writes 0600
    assert len({path.stat().st_mode for path in (tmp_path / "out").iterdir()}) == 1


def test_bad_input(run, tmp_path, monkeypatch, call):
    says = "the run has model.router = kern, unlike GPT2LMHeadModel; use --format nanokern"
    assert says in call(export.main, run, tmp_path / "out", "--format", "gpt2", code=2)
    assert "no config.toml, so not a run" in call(export.main, tmp_path, tmp_path / "out", code=2)
    monkeypatch.setitem(sys.modules, "transformers", None)
    says = "transformers not installed: pip install -r requirements-dev.txt"
    assert says in call(export.main, run, tmp_path / "out", "--check", code=2)
    assert not (tmp_path / "out").exists()


def test_form_is_gpt2_where_possible(tiny):
    for words in ("", "model.n_kv_head=2", "model.norm_eps=0.01", "model.bias=true"):
        assert choose_form("auto", tiny("model.router=dense", *words.split()).model) == "gpt2", (
            words
        )
    for word in (
        "router=kern",
        "pos=rope",
        "norm=rmsnorm",
        "gated=true",
        "n_kv_head=1",
        "activation=silu",
    ):
        assert (
            choose_form("auto", tiny("model.router=dense", f"model.{word}").model) == "nanokern"
        ), word


def test_full_disk_is_no_damaged_export(exported, monkeypatch):
    trained, out = exported("model.router=kern")
    error = SafetensorError("I/O error: No space left on device (os error 28)")
    monkeypatch.setattr(export, "load_from_disk", mock.Mock(side_effect=error))
    with pytest.raises(RunError, match="written, but not checked: .*; make room, then export"):
        export.check_export(trained, TOKENIZER, out)
