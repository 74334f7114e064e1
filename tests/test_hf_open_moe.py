"""hf/formats.py: OLMoE, Qwen3-MoE and Mixtral as initial weights and exports; tokenizers."""

import re

import pytest
import torch
from numerics import assert_near, seeded, tolerance
from runs import REPO_ROOT, all_logits
from safetensors.torch import load_file, save_file
from test_hf_init_from import edit, ids, make_gpt2, refused, start
from transformers import AutoConfig

import configure
from hf.formats import FORMATS
from runtime import RunError
from runtime.memory import count_parameters

SIZES = {
    "vocab_size": 257,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "eos_token_id": 256,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    # padding would get no gradient
    "pad_token_id": None,
    "bos_token_id": 256,
    "rms_norm_eps": 1e-4,
}
THEIRS = {  # what else makes a small model of that class
    "olmoe": {"intermediate_size": 16, "num_experts": 8},
    "qwen3_moe": {
        "moe_intermediate_size": 16,
        "num_experts": 8,
        "head_dim": 8,
        "norm_topk_prob": True,
    },
    "mixtral": {"intermediate_size": 16, "tie_word_embeddings": True},
}
SHAPE = [
    "model.norm=rmsnorm",
    "model.pos=rope",
    "model.gated=true",
    "model.activation=silu",
    "model.n_head=4",
    "model.n_kv_head=2",
    "model.n_expert=8",
    "model.top_k=2",
    "model.expert_hidden=16",
    "model.block_size=32",
]
OURS = {  # the same model as settings
    "olmoe": ["model.router=softmax", "model.qk_norm=all", "model.tie_embeddings=false"],
    "qwen3_moe": [
        "model.router=softmax-renorm",
        "model.qk_norm=head",
        "model.tie_embeddings=false",
    ],
    "mixtral": [
        "model.router=softmax-renorm",
        "model.tie_embeddings=true",
        "model.rope_base=1000000",
    ],
}
KINDS = pytest.mark.parametrize("kind", OURS)
LIMIT = tolerance(torch.float32, 64, roundings=30)  # two blocks of some 15 roundings each


def make_model(kind, **update):
    """A small model of transformers with norms that are not 1."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seeded(1).initial_seed())
    config = AutoConfig.for_model(kind, **SIZES | THEIRS[kind] | update)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model


@pytest.mark.numerics
@KINDS
def test_logits_equal_those_of_transformers(tiny, tmp_path, kind):
    theirs = make_model(kind)
    theirs.save_pretrained(tmp_path / kind, max_shard_size="40KB")  # several files
    if kind == "qwen3_moe":  # a window that it does not use
        edit(tmp_path / kind / "config.json", sliding_window=16, use_sliding_window=False)
    model, words = start(
        tiny(f"train.init_from={tmp_path / kind}", "model.norm_eps=1e-4", *SHAPE, *OURS[kind])
    )
    # and nothing changes, as the router
    assert words.endswith(f"a model of class {FORMATS[kind].architecture}")
    if kind == "olmoe":  # whose routers have no buffers
        own = [*SHAPE, *OURS[kind], "model.router=kern"]
        changes = start(tiny(f"train.init_from={tmp_path / kind}", *own))[1]
        assert "model.router changes from softmax to kern; router weights are centred" in changes
        missing = "missing, so initialised as usual: mlp.router.bias, mlp.router.gamma"
        assert changes.endswith(missing)
    assert_near(all_logits(model, ids(32)), theirs(ids(32)).logits, LIMIT, "logits")


GATE = "model.layers.1.mlp.experts.3.gate_proj.weight"
# of a Qwen3-MoE, by words of the error: keys of config.json that change, weights that change or go
DAMAGES = {
    "rope_type is 'yarn'": {"rope_parameters": {"type": "yarn", "rope_theta": 1e4}},
    "head_dim is 16, and model.py computes 8 only": {"head_dim": 16},
    "a value has the wrong type": {"rope_parameters": "default"},
    "hidden_size missing": {"hidden_size": None},
    "tie_word_embeddings is true, and lm_head.weight differs from": {"tie_word_embeddings": True},
    "model.top_k = 9 is more than model.n_expert = 8; use": {"num_experts_per_tok": 9},
    "model_type is 'llama'": {"model_type": "llama"},
    f"{GATE} contains NaN or Inf": {GATE: torch.full((16, 32), torch.inf)},
    f"{GATE} is missing": {GATE: None},
    "experts.8.gate_proj.weight is (16, 32), expected none": {
        GATE.replace(".3.", ".8."): torch.ones(16, 32)
    },
    f"{GATE} (torch.int8) is not floating": {GATE: torch.ones(16, 32, dtype=torch.int8)},
    f"{GATE} is (32, 16), expected (16, 32)": {GATE: torch.ones(32, 16)},
    "norm_topk_prob is 2, and model.py computes False only": {"norm_topk_prob": 2},
    "vocab_size: Input should be": {"vocab_size": "true"},
}


@pytest.mark.parametrize("words", DAMAGES)
def test_damage_is_refused(tiny, tmp_path, words):
    make_model("qwen3_moe").save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    for key, value in DAMAGES[words].items():
        if key.startswith("model."):
            state[key] = value
        else:
            edit(tmp_path / "config.json", **{key: value})
    present = {key: value for key, value in state.items() if value is not None}
    save_file(present, tmp_path / "model.safetensors")
    config = tiny(f"train.init_from={tmp_path}", *SHAPE, *OURS["qwen3_moe"])
    assert words in refused(config)


def test_the_preset_has_the_shape_of_olmoe():
    from transformers import OlmoeConfig, OlmoeForCausalLM

    model = configure.load(REPO_ROOT / "config/olmoe.toml").model
    # whose other defaults are the released model's
    released = OlmoeConfig(intermediate_size=1024)
    with torch.device("meta"):
        theirs = OlmoeForCausalLM(released)
    total, active = count_parameters(model)
    assert total == theirs.num_parameters() == 6_919_161_856
    assert active == total - 16 * 56 * 3 * 2048 * 1024  # without 56 of 64 experts in each layer
    written = FORMATS["olmoe"].make_config(model)
    for key in written.keys() & SIZES.keys():
        assert written[key] == getattr(released, key), key


UNSUPPORTED = {
    "olmoe qwen3_moe mixtral": {
        "attention_bias": True,
        "clip_qkv": 8.0,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        "mlp_only_layers": [0],
        "decoder_sparse_step": 2,
        "attention_dropout": 0.1,
        "router_jitter_noise": 0.1,
        "quantization_config": {"bits": 8},
    },
    "olmoe mixtral": {"sliding_window": 16},
    "qwen3_moe": {"use_sliding_window": True},
    "gpt2": {
        "activation_function": "relu",
        "scale_attn_weights": False,
        "scale_attn_by_inverse_layer_idx": True,
        "quantization_config": {"bits": 8},
    },
}


@pytest.mark.parametrize("kind", [*OURS, "gpt2"])
def test_settings_that_change_the_function_are_refused(kind):
    """Each is named with its value; a key that is missing has the class's default."""
    config = (make_gpt2() if kind == "gpt2" else make_model(kind)).config
    settings = config.to_diff_dict()
    settings.pop("tie_word_embeddings", None)
    tied = FORMATS[kind].read_config(settings)["tie_embeddings"]
    assert tied == AutoConfig.for_model(kind).tie_word_embeddings
    for kinds, table in UNSUPPORTED.items():
        for key, value in table.items():
            if kind not in kinds.split():
                continue
            says = f"config.json: {key} is {value!r}, and model.py computes "
            with pytest.raises(RunError, match=re.escape(says)):
                FORMATS[kind].read_config(settings | {key: value})
