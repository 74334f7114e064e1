"""Open mixtures of experts of Hugging Face, OLMoE, Qwen3-MoE and Mixtral, as models of model.py, and back."""

import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attention import kv_heads
from configure.schema import Model
from gate_norm import gate_scale
from runtime import RunError
from runtime.names import BUFFERS, from_hf, to_hf


class Family(NamedTuple):
    """How one class of transformers differs from the others."""

    architecture: str
    qk_norm: str
    routers: Mapping[str, dict[str, bool]]  # of ours: the keys of config.json that choose it
    expert_hidden: str  # key of config.json
    experts: str  # key of config.json
    mlp: str  # module of a layer
    parts: tuple[str, str, str]  # gate, up and down of an expert


RENORM = {"softmax": {"norm_topk_prob": False}, "softmax-renorm": {"norm_topk_prob": True}}
PARTS = ("gate_proj", "up_proj", "down_proj")
FAMILIES = {  # by config.json's model_type
    "olmoe": Family("OlmoeForCausalLM", "all", RENORM, "intermediate_size", "num_experts", "mlp", PARTS),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", "head", RENORM, "moe_intermediate_size", "num_experts", "mlp", PARTS),
    "mixtral": Family(
        *("MixtralForCausalLM", "off", {"softmax-renorm": {}}, "intermediate_size", "num_local_experts"),
        *("block_sparse_moe", ("w1", "w3", "w2")),
    ),
}
SIZES = {  # key of [model]: key of config.json
    "vocab_size": "vocab_size",
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_kv_head": "num_key_value_heads",
    "block_size": "max_position_embeddings",
    "top_k": "num_experts_per_tok",
    "norm_eps": "rms_norm_eps",
    "activation": "hidden_act",
}
SHARED = {"norm": "rmsnorm", "pos": "rope", "gated": True, "bias": False}  # by all families
ABSENT = {  # keys of config.json that name what model.py lacks: their value without it
    "attention_bias": False,
    "clip_qkv": None,
    "rope_scaling": None,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
    "attention_dropout": 0.0,
    "router_jitter_noise": 0.0,
}
EXPERT = re.compile(r"(model\.layers\.\d+)\.\w+\.experts\.(\d+)\.(\w+)\.weight")

State = Mapping[str, Tensor]


def read_open_config(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of [model] that a config.json of one of FAMILIES describes.

    Raises:
        RunError: it names something that model.py does not compute, or a value has another type.
        KeyError: a key is missing.
    """
    family = FAMILIES[settings["model_type"]]
    rope, C, heads = settings.get("rope_parameters") or {}, settings["hidden_size"], settings["num_attention_heads"]
    if not (isinstance(rope, dict) and type(C) is type(heads) is int and heads > 0):
        raise RunError(
            f"config.json: hidden_size is {C!r}, num_attention_heads {heads!r}, rope_parameters {rope!r}, expected two "
            f"numbers above 0 and an object; download it again"
        )
    found = {key: settings.get(key, value) for key, value in ABSENT.items()}
    found["sliding_window"] = settings.get("sliding_window") if settings.get("use_sliding_window", True) else None
    found["rope_type"] = rope.get("rope_type", rope.get("type"))  # the older name
    found["head_dim"] = settings.get("head_dim")
    wanted = ABSENT | {"sliding_window": None, "rope_type": "default", "head_dim": C // heads}
    for key, value in found.items():
        if value not in (wanted[key], None):
            raise RunError(
                f"config.json: {key} is {value!r}, and model.py computes {wanted[key]!r} only; use another model"
            )
    experts = settings[family.experts] if family.experts in settings else settings["num_local_experts"]
    base = rope.get("rope_theta") or settings["rope_theta"]
    chosen = [router for router, keys in family.routers.items() if keys.items() <= settings.items() or not keys]
    return {
        **{ours: settings[theirs] for ours, theirs in SIZES.items()},
        **SHARED,
        "n_expert": experts,
        "expert_hidden": settings[family.expert_hidden],
        "rope_base": base,
        "qk_norm": family.qk_norm,
        "router": chosen[0] if chosen else next(iter(family.routers)),  # norm_topk_prob is False by default
    }


def find_misfits(model: Model, kind: str) -> list[str]:
    """Settings of `model` that the family does not compute, such as "model.router = kern"; none if it fits."""
    family = FAMILIES[kind]
    wanted = {**SHARED, "qk_norm": family.qk_norm, "n_shared_expert": 0, "n_dense_layer": 0, "dropout": 0.0}
    found = [f"model.{key} = {getattr(model, key)}" for key, value in wanted.items() if getattr(model, key) != value]
    return found + ([] if model.router in family.routers else [f"model.router = {model.router}"])


def make_open_config(model: Model, kind: str) -> dict[str, Any]:
    """config.json of that family for `model`, without the ids that end texts."""
    family = FAMILIES[kind]
    return {
        "architectures": [family.architecture],
        "model_type": kind,
        **{theirs: getattr(model, ours) for ours, theirs in SIZES.items()},
        "num_key_value_heads": kv_heads(model),
        family.experts: model.n_expert,
        family.expert_hidden: model.expert_hidden,
        "rope_theta": model.rope_base,
        **family.routers[model.router],
        "tie_word_embeddings": model.tie_embeddings,
        "initializer_range": model.init_std,
        **({"head_dim": model.n_embd // model.n_head} if kind == "qwen3_moe" else {}),
    }


def from_open(state: State, kind: str) -> dict[str, Tensor]:
    """Weights of a family as those of model.py. Experts are one tensor each, or those of a layer stacked.

    Raises:
        RunError: a name is unknown.
        KeyError: an expert lacks a part.
    """
    family, out, experts = FAMILIES[kind], {}, defaultdict(dict)
    for name, tensor in state.items():
        if match := EXPERT.fullmatch(name):
            layer, number, part = match.groups()
            experts[layer][part, int(number)] = tensor.mT
        else:
            name = name.replace(f".{family.mlp}.", ".mlp.").replace(".mlp.gate.", ".mlp.router.")
            out[name] = tensor.mT if ".mlp.experts." in name else tensor
    for layer, of in experts.items():
        gate, up, down = (
            torch.stack([of[part, number] for number in range(len(of) // 3)]) for part in family.parts
        )  # (E, C, H) twice, (E, H, C)
        out[f"{layer}.mlp.experts.gate_up_proj"] = torch.cat([gate, up], -1)
        out[f"{layer}.mlp.experts.down_proj"] = down
    return from_hf(out)


def to_open(state: State, model: Model, kind: str) -> dict[str, Tensor]:
    """Weights of model.py as those of a family, whose gates have no constant factor: it goes to the experts' w_out."""
    family, out = FAMILIES[kind], {}
    parameters = {name: tensor for name, tensor in state.items() if not name.endswith(BUFFERS)}
    for name, tensor in to_hf(parameters).items():
        name = name.replace(".mlp.router.", ".mlp.gate.").replace(".mlp.", f".{family.mlp}.")
        place, _, leaf = name.rpartition(".")
        if leaf == "gate_up_proj":
            parts = zip(family.parts[:2], tensor.chunk(2, -1), strict=True)
        elif leaf == "down_proj":
            parts = [(family.parts[2], tensor * gate_scale(model))]
        else:
            out[name] = tensor
            continue
        for part, stacked in parts:
            out |= {f"{place}.{number}.{part}.weight": one.mT for number, one in enumerate(stacked)}
    return out
