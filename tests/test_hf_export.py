"""hf/export/: models in the form of transformers, their tokenizers, and the command.

Both models compute in fp64, and must agree to the rounding of fp32: an error is either far below
that or a fault.
"""

import json
import shutil
import sys
from functools import partial
from inspect import signature

import pytest
import torch
import torch.nn.functional as F
import transformers
from numerics import assert_near, seeded, tolerance
from runs import (
    REPO_ROOT,
    all_logits,
    flip,
    largest_file,
    modules_in,
)
from safetensors.torch import load_file, save_file
from test_hf_init_from import edit, start
from test_hf_open_moe import OURS, SHAPE
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer
from transformers.dynamic_module_utils import get_imports, get_relative_imports
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import train
from attention import KVCache
from balance import balance_loss, expert_loads, token_distribution
from data.tokenizer import ByteTokenizer
from eval.trained import Trained, load_model
from hf.export import export
from hf.export.export import CODE, choose_form, export_run
from hf.formats import FORMATS
from hf.tokenizer_files import find_merges, write_tokenizer
from hf.weight_files import hash_tensors, read_tensors
from model import GPT
from router import ROUTERS
from runtime import RunError, folder
from runtime.runs import find_runs

TOKENIZER = ByteTokenizer()
NEAR = tolerance(torch.float32, 32)
# Transformers' mixtures round norms, positions and routing to float32, in fp64 too: some 4 a block
ROUNDED = tolerance(torch.float32, 32, roundings=16)


@pytest.fixture(scope="module", autouse=True)
def modules(tmp_path_factory):
    with modules_in(tmp_path_factory.mktemp("modules")):
        transformers.utils.logging.disable_progress_bar()
        yield


@pytest.fixture
def exported(tiny, tmp_path):
    """`exported("model.router=tanh", dtype="float32")`: (GPT with random weights, folder)."""

    def make(*overrides, dtype="float32", biased=True):
        config = tiny("model.init_std=0.3", "model.n_head=4", *overrides)
        torch.manual_seed(seeded().initial_seed())
        model = GPT(config.model).eval().requires_grad_(False)
        for name, tensor in model.state_dict().items():
            if tensor.dim() == 1 and not name.endswith("router.c"):
                tensor += 0.2 * torch.randn_like(tensor)  # norms, biases, γ and β too
            if name.endswith("router.c"):  # as a swap of the router leaves it
                tensor *= 1.3
            if name.endswith("selection_bias") and not biased:
                tensor.zero_()
        run, out = tmp_path / "run", tmp_path / "export"
        run.mkdir()
        (run / "config.toml").touch()
        trained = Trained(model, config, 4, {}, run)
        export_run(trained, TOKENIZER, out, dtype)
        return trained, out

    return make


def load(out, dtype=torch.float32, **settings):
    return AutoModelForCausalLM.from_pretrained(
        out, trust_remote_code=True, dtype=dtype, **settings
    )


def random_ids(*shape):
    return torch.randint(TOKENIZER.vocab_size, shape, generator=seeded(1))


UNTIED = ("model.tie_embeddings=false", "model.vocab_size=320")

MODERN = (
    "model.norm=rmsnorm",
    "model.activation=silu",
    "model.gated=true",
    "model.pos=rope",
    "model.rope_base=500",
)

MODELS = [(f"model.router={router}",) for router in ROUTERS if router != "dense"]
MODELS += [
    ("model.router=softmax", "model.gate_scale=1.7", "model.pos=rope", "model.bias=true"),
    ("model.router=softmax-renorm", "model.gate_norm=1", *UNTIED),
    ("model.router=dense", "model.pos=rope", *UNTIED),
    ("model.router=sigmoid-renorm", "model.router_groups=4", "model.router_group_k=2"),
    (*MODERN, "model.router=sigmoid", "model.qk_norm=all", "model.n_kv_head=2", *UNTIED),
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
    ("model.router=tanh", "model.bias=true", "model.n_shared_expert=1", "model.n_kv_head=1"),
]
NATIVE = [  # models of transformers' own classes
    ("GPT2", "model.router=dense", *UNTIED),
    ("GPT2", "model.router=dense", "model.bias=true", "model.vocab_size=320"),
    ("GPT2", "model.router=dense", "model.norm_eps=0.01", "model.dropout=0.25"),
    ("Olmoe", *SHAPE, *OURS["olmoe"], "model.gate_scale=1.5"),
    ("Qwen3Moe", *SHAPE, *OURS["qwen3_moe"]),
    ("Mixtral", *SHAPE, *OURS["mixtral"], "model.vocab_size=320"),
]


@pytest.mark.numerics
@pytest.mark.parametrize("overrides", MODELS + NATIVE, ids=" ".join)
def test_every_model_exports_the_same_model(exported, tiny, overrides, capsys):
    """transformers computes it, in its own class without our code; and a run starts from it.

    Equal are the logits of a batch and of every token generated from prompts of unequal length.
    """
    kind = "NanoKern"
    if overrides in NATIVE:
        kind, *overrides = overrides
    trained, out = exported(
        *overrides, biased=kind == "NanoKern" and "model.gated=true" not in overrides
    )
    # transformers' faster experts know no fp64
    eager = {"experts_implementation": "eager"} if kind in ("Olmoe", "Qwen3Moe", "Mixtral") else {}
    theirs, info = load(out, torch.float64, output_loading_info=True, **eager)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    code = {path.name for path in out.iterdir()} & CODE.keys()
    assert code == (CODE.keys() if kind == "NanoKern" else set())
    assert kind in type(theirs).__name__
    assert export.check_export(trained, TOKENIZER, out) == 0, capsys.readouterr().err
    limit = ROUNDED if eager else NEAR
    own, theirs = trained.model.double(), theirs.double()
    idx, start_of = random_ids(3, 32), torch.tensor([0, 5, 8])
    logits = all_logits(own, idx)
    assert_near(theirs(idx).logits, logits, limit)
    mask = (torch.arange(9) >= start_of[:, None]).long()
    output = theirs.generate(
        idx[:, :9].where(mask == 1, TOKENIZER.eot),
        attention_mask=mask,
        do_sample=False,
        max_new_tokens=9,
        eos_token_id=None,
        use_cache="model.bias=true" not in overrides,
        output_logits=True,
        return_dict_in_generate=True,
    )
    past = KVCache(own.config, start_of, 18, torch.float64)
    wanted = all_logits(own, output.sequences, past)[:, 8:-1]
    assert_near(torch.stack(output.logits, dim=1), wanted, limit, "generated tokens")
    assert wanted.std() > 0.5 and output.sequences.max() < TOKENIZER.vocab_size
    more = ["model.init_std=0.3", "model.n_head=4", f"train.init_from={out}"]
    if kind == "Olmoe":
        more.append("model.gate_scale=1")  # the constant is in the experts
    again, words = start(tiny(*overrides, *more))
    assert "; " not in words  # nothing changes
    assert_near(all_logits(again.double(), idx), logits, NEAR)
    if kind == "GPT2":
        dropouts = {module.p for module in theirs.modules() if isinstance(module, torch.nn.Dropout)}
        assert dropouts == {trained.config.model.dropout}
    if "model.n_hash_layer=1" in overrides:
        with pytest.raises(
            ValueError, match="inputs_embeds alone: hash layers choose experts by token id"
        ):
            theirs(inputs_embeds=torch.zeros(1, 2, 32, dtype=torch.float64))
        with pytest.raises(ValueError, match="hash layers choose experts for 257 ids alone"):
            theirs.resize_token_embeddings(320)


SHARED = {"n_shared_expert": 1}


# by the sha256 of the weights that commit e125ff1 wrote
@pytest.mark.numerics
@pytest.mark.parametrize("written", export.DTYPES)
def test_routers_and_tables_keep_their_type(exported, tmp_path, written):
    """With a hash layer, and with all experts chosen, so that rounding cannot choose others.

    Saving and devices change no bit.
    """
    more = ("model.n_hash_layer=1", "model.top_k=8")
    trained, out = exported("model.router=kern", *more, dtype=written)
    own, idx = trained.model, random_ids(1, 30)
    own.load_state_dict(export.round_weights(own.state_dict(), export.DTYPES[written], "nanokern"))
    wanted = all_logits(own.double(), idx)
    for dtype in ("auto", *export.DTYPES.values()):
        theirs = load(out, dtype)
        used = export.DTYPES[written] if dtype == "auto" else dtype
        for name, tensor in theirs.state_dict().items():
            kind = torch.float32 if ".router." in name else used
            assert tensor.dtype == (torch.int64 if name.endswith("hash_table") else kind), name
        # 8 operations per layer round to dtype
        assert_near(theirs(idx).logits, wanted, tolerance(used, 32, 16), f"{written}, {dtype}")
    theirs = load(out, "auto")
    theirs.save_pretrained(tmp_path / "again")
    for place, device in ((tmp_path / "again", None), (out, "auto")):
        again = load(place, "auto", device_map=device)
        assert again(idx).logits.equal(theirs(idx).logits)
    with torch.autocast("cpu", torch.bfloat16):  # as in training
        y, router_logits = load(out).model.layers[1].mlp(torch.randn(1, 3, 32))
        assert (y.dtype, router_logits.dtype) == (torch.bfloat16, torch.float32)


def test_dropout_and_new_weights_are_those_of_the_run(exported):
    """Dropout of 1 leaves nothing of the embedding and of each part of a block."""
    _, out = exported("model.router=kern", "model.bias=true")
    base = AutoModel.from_pretrained(out, trust_remote_code=True, dropout=1.0).train()
    output = base(random_ids(1, 9), output_hidden_states=True, use_cache=False)
    assert len(output.hidden_states) == 2 + 1 and output.past_key_values is None
    assert not output.hidden_states[-2].any()
    new = AutoModelForCausalLM.from_config(base.config, trust_remote_code=True)
    for p in new.model.layers[0].mlp.experts.parameters():
        assert p.std().item() == pytest.approx(0.3, rel=0.2)


@pytest.mark.numerics
def test_layout_that_vllm_expects(exported):
    """The contract of vLLM's Transformers backend (vllm/model_executor/models/transformers, read in
    0.32 and 0.33): attention is looked up by the name in the config and gets the layer and all
    keyword arguments; `experts` are packed and called with tokens, indices and weights. No name in
    the config makes vLLM replace them by its gated experts; TRL reads these names.
    """
    _, out = exported("model.router=kern", "model.dropout=0.25")
    theirs, calls = load(out), []

    def attend(module, query, key, value, mask, *, probe, **settings):
        call = (settings["scaling"], settings["dropout"], mask, probe)
        calls.append((module.layer_idx, tuple(query.shape), *call))
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, mask, **settings)

    idx = torch.arange(9)[None]
    wanted = theirs.model(idx).last_hidden_state
    ALL_ATTENTION_FUNCTIONS.register("probe", attend)
    theirs.config._attn_implementation = "probe"
    settings = {"position_ids": idx, "use_cache": False, "return_dict": False, "probe": "it"}
    assert_near(theirs.model(idx, **settings)[0], wanted, NEAR)
    theirs.train().model(idx, **settings)
    assert calls == [
        (layer, (1, 4, 9, 8), 8**-0.5, dropout, None, "it")
        for dropout in (0.0, 0.25)
        for layer in range(2)
    ]
    assert type(theirs)._supports_attention_backend
    experts = theirs.model.layers[0].mlp.experts
    assert {tuple(p.shape) for p in experts.parameters()} == {(8, 32, 8), (8, 8, 32)}
    named = ["hidden_states", "top_k_index", "top_k_weights"]
    assert [*signature(experts.forward).parameters] == named
    config = AutoConfig.from_pretrained(out, trust_remote_code=True)
    for name in ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts"):
        assert not hasattr(config, name)
    config.output_router_logits = True  # as TRL sets it
    assert config.num_experts == config.num_local_experts == 8


def scale_weights(factor, out):
    """Of one channel of the last layer."""
    state = load_file(out / "model.safetensors")
    state["model.layers.1.mlp.experts.down_proj"][:, 3] *= factor
    save_file(state, out / "model.safetensors", {"format": "pt"})


def break_tokenizer(out):
    body = (out / "tokenizer.json").read_text()
    body = body.replace('"a": 97', '"a": 98').replace('"b": 98', '"b": 97')
    (out / "tokenizer.json").write_text(body)


def ignore_cache(out):
    code = (out / "modeling_nanokern.py").read_text()
    assert "cache.update(key, value" in code
    (out / "modeling_nanokern.py").write_text(code.replace("if cache is not None:", "if False:"))


HARMS = {
    "apart, allowed are 1e-05": ignore_cache,
    "e-05 apart, allowed are 1e-05": partial(scale_weights, 1.00003),
    "random rows: at most nan": partial(scale_weights, float("nan")),
    # the lowest bit of the last weight, which changes logits by less than rounding
    "model.safetensors: damaged": lambda out: flip(out / "model.safetensors", -32),
    "the tokenizer gives other ids": break_tokenizer,
    "the tokenizer ends a text with 97, not 256": lambda out: edit(
        out / "tokenizer_config.json", eos_token="a"
    ),
    "cannot be loaded or run (FileNotFoundError": shutil.rmtree,
}


def test_differences_are_found(exported, tmp_path, capsys):
    trained, out = exported()
    for number, (words, harm) in enumerate(HARMS.items()):
        # transformers keeps the code it knows by a name
        copy = shutil.copytree(out, tmp_path / f"copy_{number}")
        harm(copy)
        assert export.check_export(trained, TOKENIZER, copy) == 1
        printed = capsys.readouterr()
        assert words in printed.err and words not in printed.out, words
        assert f"export {trained.folder} again, into a new folder" in printed.err


# ---- uses that transformers and its clients make of a model
MIXTURES = [(f"model.router={router}",) for router, spec in ROUTERS.items() if spec]
MIXTURES.append(("model.router=tanh", "model.n_layer=4", "model.n_hash_layer=1"))


def gradients_of(model):
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in model.named_parameters()
    }


@pytest.mark.numerics
@pytest.mark.parametrize("number", range(len(MIXTURES)))
def test_aux_loss_is_that_of_training(exported, number):
    """Value and gradients of the trainer's own balance loss, under any gradient checkpointing."""
    trained, out = exported(*MIXTURES[number], "train.balance_loss_coef=0.3")
    own, theirs = trained.model.double().requires_grad_(True), load(out).double().train()
    if number % 3:
        theirs.gradient_checkpointing_enable({"use_reentrant": number % 3 == 1})
    idx = random_ids(3, 32)
    wanted = train.auxiliary_loss(
        trained.config.train, own(idx, idx).stats, n_hash_layer=own.config.n_hash_layer
    )
    output = theirs(idx, labels=idx, output_router_logits=True)
    plain = theirs(idx, labels=idx)
    assert plain.router_logits is None and plain.aux_loss is None
    # Trainer gives the number of targets in all micro-batches
    in_batch = theirs(idx, labels=idx, num_items_in_batch=2 * 3 * 31).loss
    assert_near(in_batch, plain.loss / 2, NEAR)
    assert (output.loss - plain.loss).item() == pytest.approx(wanted.item(), abs=1e-6)
    logits = all_logits(own, idx)
    (wanted + F.cross_entropy(logits[:, :-1].flatten(0, 1), idx[:, 1:].flatten())).backward()
    # of two passes, as above: a dead token's gradient (DeadTokenGradient) is no linear function of
    # the loss
    (0.3 * output.aux_loss).backward()
    plain.loss.backward()
    wanted_gradients = FORMATS["nanokern"].from_own(gradients_of(own), own.config)
    for name, gradient in gradients_of(theirs).items():
        assert_near(gradient, wanted_gradients[name], 4 * NEAR, name)


@pytest.mark.numerics
def test_loss_of_micro_batches(exported):
    """What Trainer adds up: means over targets of micro-batches, the own balance loss of each."""
    trained, out = exported("model.router=kern", "train.balance_loss_coef=0.3")
    own, theirs = trained.model.double(), load(out).double().train()
    theirs.config.output_router_logits = True
    idx = random_ids(4, 32)
    labels = idx.clone()
    labels[0, :20] = -100  # 31 - 19 and 31 targets in the first part, 2 * 31 in the second
    n_target = [43, 62]
    total, wanted = 0.0, 0.0
    for part, targets, count in zip(idx.split(2), labels.split(2), n_target, strict=True):
        total += theirs(part, labels=targets, num_items_in_batch=torch.tensor(sum(n_target))).loss
        logits = all_logits(own, part)[:, :-1]
        wanted += F.cross_entropy(logits.mT, targets[:, 1:], reduction="sum") / sum(n_target)
        balance = train.auxiliary_loss(trained.config.train, own(part, part).stats)
        wanted += balance * count / sum(n_target)
    assert_near(total, wanted, NEAR)


@pytest.mark.numerics
@pytest.mark.parametrize("name", ["kern", "sigmoid-renorm"])
def test_aux_loss_does_not_count_padding(exported, name):
    """Equal to balance.py's loss of the tokens alone; with a cache, of the new tokens."""
    trained, out = exported(f"model.router={name}", "model.n_layer=1", biased=False)
    theirs = load(out).double()
    theirs.config.output_router_logits = True
    idx = random_ids(3, 32)
    mask = (torch.arange(32) >= torch.tensor([0, 9, 20])[:, None]).long()
    output = theirs(idx, attention_mask=mask)
    past = theirs(idx[:, :15], attention_mask=mask[:, :15], use_cache=True).past_key_values
    late = theirs(idx[:, 15:], attention_mask=mask, past_key_values=past)
    new = mask * (torch.arange(32) >= 15)
    for loss, counted in ((output.aux_loss, mask), (late.aux_loss, new)):
        logits = output.router_logits[0][counted.flatten() == 1]
        routing = trained.model.blocks[0].mlp.router.choose(logits)
        loads = expert_loads(routing.experts, 8)
        wanted = balance_loss(token_distribution(routing).mean(0), loads)
        assert loss.item() == pytest.approx(wanted.item(), abs=1e-6)


def test_a_cache_has_one_of_two_names(exported):
    """past_key_values before transformers 5.24, and cache. By another name it is refused."""
    _, out = exported("model.router=kern")
    theirs, idx = load(out, torch.float64), random_ids(2, 20)
    wanted = theirs(idx).logits[:, 12:]
    for name in ("cache", "past_key_values"):
        past = theirs(idx[:, :12], use_cache=True).past_key_values
        assert_near(theirs(idx[:, 12:], **{name: past}).logits, wanted, NEAR, name)
    with pytest.raises(TypeError, match="memory: this model knows a cache by the name of cache"):
        theirs(idx[:, 12:], memory=past)


HEADS = [
    ("model.n_kv_head=2", "model.qk_norm=head", "model.pos=rope"),
    ("model.n_kv_head=1", "model.bias=true", "model.n_hash_layer=1"),
]


@pytest.mark.numerics
@pytest.mark.parametrize("overrides", HEADS, ids=" ".join)
def test_attention_implementations_agree(exported, overrides):
    """Padded rows, in one pass and generated."""
    _, out = exported(*overrides)
    idx = random_ids(3, 20)
    mask = torch.arange(20) >= torch.tensor([0, 5, 8])[:, None]
    ask = {"attention_mask": mask[:, :12].long(), "max_new_tokens": 6, "do_sample": False}
    sdpa = load(out, attn_implementation="sdpa")
    wanted = sdpa(idx, attention_mask=mask.long()).logits[mask]
    tokens = sdpa.generate(idx[:, :12], **ask)
    assert sdpa.generate(idx[:, :12], **ask, cache_implementation="static").equal(tokens)
    for implementation in ("flex_attention", "eager"):  # the first has no backward pass on CPUs
        theirs = load(out, attn_implementation=implementation).requires_grad_(False)
        # Inductor of torch 2.13 cannot compile flex attention for changing lengths on a CPU
        with torch.compiler.set_stance("force_eager"):
            output = theirs(idx, attention_mask=mask.long(), output_attentions=True)
            assert_near(output.logits[mask], wanted, tolerance(torch.float32, 64, 64))
            assert theirs.generate(idx[:, :12], **ask).equal(tokens)
    visible = torch.ones(20, 20).tril() * mask[:, None, None]  # (B, 1, T, T)
    for layer in output.attentions:
        seen = (layer * visible).sum(-1).transpose(1, 2)[mask]  # (tokens, nh)
        assert_near(seen, torch.ones(seen.shape), NEAR)


@pytest.mark.numerics
@pytest.mark.parametrize("overrides", [("model.pos=rope",), UNTIED], ids=" ".join)
def test_embeddings_are_given_and_resized(exported, tmp_path, overrides):
    _, out = exported("model.router=kern", *overrides)
    theirs, idx, tied = load(out), random_ids(2, 20), overrides != UNTIED
    logits = theirs(idx).logits
    ask = {"max_new_tokens": 4, "do_sample": False}
    tokens = theirs.generate(inputs_embeds=theirs.get_input_embeddings()(idx), **ask)
    assert tokens.equal(theirs.generate(idx, **ask)[:, 20:])
    assert theirs.generation_config.suppress_tokens == (None if tied else [*range(257, 320)])
    theirs.resize_token_embeddings(259, pad_to_multiple_of=64)  # two new tokens
    assert theirs.generation_config.suppress_tokens == (None if tied else [*range(259, 320)])
    assert theirs.config.vocab_size == theirs.lm_head.out_features == 320
    assert (theirs.lm_head.weight is theirs.model.embed_tokens.weight) == tied
    assert_near(theirs(idx).logits[..., : logits.shape[-1]], logits, NEAR)
    theirs.save_pretrained(tmp_path / "resized")
    idx[:, -1] = 258
    assert load(tmp_path / "resized")(idx).logits.equal(theirs(idx).logits)


def test_shipped_code_needs_torch_and_transformers_alone():
    """Saved models import each other's files, and nothing of this repository."""
    for name in CODE.keys() - {"LICENSE-code"}:
        file = REPO_ROOT / CODE[name]
        outside = set(get_imports(file)) - sys.stdlib_module_names
        assert outside <= {"torch", "transformers"}, name
        assert {f"{other}.py" for other in get_relative_imports(file)} <= CODE.keys(), name


@pytest.mark.parametrize("overrides", [(), (*MODERN, "model.n_hash_layer=1")], ids=" ".join)
def test_lora_on_experts(exported, tmp_path, overrides):
    """PEFT trains each factor, and the merged, saved model has the logits of the adapted one."""
    import peft

    _, out = exported("model.router=kern", *overrides)
    up = "experts.gate_up_proj" if overrides else "experts.up_proj"
    targets = [up, "experts.down_proj", "router.weight"]
    config = peft.LoraConfig(r=2, target_modules=[], target_parameters=targets)
    adapted = peft.get_peft_model(load(out), config)
    factors = [p for p in adapted.parameters() if p.requires_grad]
    assert len(factors) == 2 * 3 * 2  # A and B of three matrices in two layers
    optimizer = torch.optim.AdamW(factors, lr=0.02)
    idx, losses = random_ids(4, 32), []
    for _ in range(4):
        optimizer.zero_grad()
        loss = adapted(idx, labels=idx, output_router_logits=True).loss
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
    assert all(p.grad.any() for p in factors) and losses[-1] < losses[0] - 0.1
    logits = adapted.eval()(idx).logits
    merged = adapted.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    again = load(tmp_path / "merged")
    assert_near(again(idx).logits, logits, tolerance(torch.float32, 64, 64))


# ---- tokenizers and the command
TEXTS = [*export.ODD_TEXTS, "a . b , c ! d ? e 's n't", "a" * 900 + " " * 300 + "b", "\x00\xad ¡ÿĀ"]
TEXTS += [chr(i) + " " + chr(i + 1) for i in range(0, 900, 2)]


def test_merges_are_recovered(tmp_path, any_tokenizer):
    eot, size = any_tokenizer.eot, any_tokenizer.vocab_size
    write_tokenizer(any_tokenizer, tmp_path, 32, padding=size)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        ids = any_tokenizer.encode(text)
        assert theirs.encode(text) == ids
        assert theirs.decode(ids) == any_tokenizer.decode(ids) == text
    ids = [*any_tokenizer.encode("a"), eot]
    assert theirs.encode("a<|endoftext|>") == ids
    assert theirs.decode(ids, skip_special_tokens=True) == "a"
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (eot, eot, size)
    assert (len(theirs), theirs.model_max_length) == (size + 1, 32)
    write_tokenizer(any_tokenizer, tmp_path, 32)
    assert AutoTokenizer.from_pretrained(tmp_path).pad_token_id is None


def test_merges_are_all_pairs():
    found = find_merges([b"a" * n for n in (1, 2, 3, 6, 7)])
    pairs = [f"{len(left)}+{len(right)}" for left, right in found]
    assert pairs == ["1+1", "1+2", "2+1", "3+3", "1+6", "6+1"]


@pytest.fixture(scope="module")
def run(module_tiny):
    """A run of 4 steps with checkpoints 2 and 4."""
    config = module_tiny("train.checkpoint_interval=2", "train.ema_decay=0.5")
    train.train(config)
    return folder.path_of(config)


def test_export_and_check(run, tmp_path, call):
    out = tmp_path / "there/out"
    said = call(export.main, run, out, "--check")
    assert "tokenizer: the same" in said and "random rows: at most" in said
    assert "note: the vocabulary has no room for a padding token" in said
    names = {"README.md", "config.json", "settings.toml", "generation_config.json"}
    names |= {"model.safetensors", "tokenizer.json", "tokenizer_config.json", *CODE}
    assert {path.name for path in out.iterdir()} == names and list(out.parent.iterdir()) == [out]
    assert len({path.stat().st_mode for path in out.iterdir()}) == 1  # safetensors writes 0600
    assert "exists already; name a new folder" in call(export.main, run, out, code=2)
    written = json.loads((out / "config.json").read_text())["nanokern"]
    run_id = (run / "run_id").read_text().strip()
    assert written == {"run": "tiny", "weights": "step_00000004", "run_id": run_id}
    assert find_runs([out.parent]) == []  # an export among runs is none
    assert (out / "settings.toml").read_bytes() == (run / "config.toml").read_bytes()


# arguments; the same of load_model; words of the card
WEIGHTS = [
    ("--checkpoint 2", {"step": 2}, "weights of step 2, in float32."),
    ("--ema", {"ema": True}, "EMA of decay 0.5 of step 4, in float32."),
    ("--dtype bfloat16", {}, "weights of step 4, in bfloat16."),
]


@pytest.mark.parametrize("words, chosen, says", WEIGHTS)
def test_other_weights(run, tmp_path, call, words, chosen, says):
    """Behind a link; and the weights of another export are refused."""
    out = tmp_path / "out"
    out.symlink_to(tmp_path / "behind")
    said = call(export.main, run, out, *words.split(), "--check")
    assert said.startswith(f"{out}: {run} at step {chosen.get('step', 4)}\n") and out.is_symlink()
    assert says in (tmp_path / "behind/README.md").read_text()
    own = load_model(run, **chosen).model
    wanted = FORMATS["nanokern"].from_own(own.state_dict(), own.config)
    if "bfloat16" in words:
        wanted = {k: v if ".router." in k else v.bfloat16() for k, v in wanted.items()}
    config = json.loads((out / "config.json").read_text())
    assert hash_tensors(read_tensors(out, config)) == hash_tensors(wanted)
    config["nanokern"]["weights"] = "step_00000003"
    with pytest.raises(RunError, match="of another export: it has .*step_0000000[24]"):
        read_tensors(out, config)


def test_a_failed_export_leaves_nothing(run, tmp_path, call, monkeypatch):
    """Without transformers, on a full disk, and where another export is faster."""
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "transformers", None)
        says = "transformers not installed: pip install -r requirements/dev.txt"
        assert says in call(export.main, run, out, "--check", code=2)
    for size in (20_000, 500):  # the weights, or a smaller file, do not fit
        with largest_file(size):
            said = call(export.main, run, out, code=2)
        assert "out" in said and said.count("\n") == 1
        assert list(tmp_path.iterdir()) == []

    def overtake(*arguments):
        out.mkdir()
        (out / "config.json").write_text("theirs")
        return "ours"

    monkeypatch.setattr(export, "format_card", overtake)
    said = call(export.main, run, out, code=2)
    assert f"{out}: cannot be written ([Errno 39] Directory not empty" in said
    assert (out / "config.json").read_text() == "theirs" and list(tmp_path.iterdir()) == [out]


def test_a_weight_without_a_name_is_named(tiny):
    """In each class of transformers; a module that someone adds ended in a KeyError."""
    weights = {"blocks.0.mlp.router.project.weight": torch.ones(2, 2)}
    for form in FORMATS.values():
        with pytest.raises(RunError, match="^blocks.0.mlp.router.project.weight: no name for it"):
            form.from_own(weights, tiny().model)


# by format, the changes to a model of its class, each of which needs our code
OTHERS = {
    "gpt2": "router=kern norm=rmsnorm gated=true n_kv_head=1 activation=silu qk_norm=head",
    "olmoe": "router=sigmoid n_shared_expert=1 dropout=0.1 n_hash_layer=1 qk_norm=off "
    "router=softmax-renorm norm_eps=1e-6 tie_embeddings=true",  # vLLM's differs in the last three
    "qwen3_moe": "router=softmax-l2 norm=layernorm gated=false pos=learned router_groups=4",
    "mixtral": "router=softmax activation=gelu",
}


@pytest.mark.parametrize("form", OTHERS)
def test_what_a_class_does_not_compute_needs_our_code(tiny, form):
    own = [*SHAPE, *OURS[form]] if form in OURS else ["model.router=dense"]
    assert choose_form(tiny(*own).model, False) == form
    assert choose_form(tiny(*own).model, True) == "nanokern"  # a selection bias has moved
    for word in OTHERS[form].split():
        assert choose_form(tiny(*own, f"model.{word}").model, False) == "nanokern", word
