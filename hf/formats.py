"""The classes of transformers that runs start from and are exported to: their config.json and weights beside ours.

FORMATS has one entry for each model_type: GPT-2, the open mixtures of experts OLMoE, Qwen3-MoE and Mixtral, and
nanokern, any model with the code that computes it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attention import kv_heads
from configure.schema import Model
from gate_norm import gate_scale
from hf.names import BUFFERS, State, from_gpt2, from_hf, to_gpt2, to_hf
from runtime import RunError

Settings = Mapping[str, Any]  # of config.json


class NanoKern:
    """Any model, computed by modeling_nanokern.py. The other formats have the same methods."""

    architecture = "NanoKernForCausalLM"
    source = "an exported model"
    keys = {  # key of [model]: key of config.json
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_embd": "hidden_size",
        "block_size": "max_position_embeddings",
        "top_k": "num_experts_per_tok",
        "expert_hidden": "moe_intermediate_size",
    } | {key: key for key in ("vocab_size", "router", "n_expert", "gate_scale", "pos", "bias")}
    keys_if_set = {  # the same for keys that are there only where the value is not our default
        "n_kv_head": "num_key_value_heads",
        "activation": "hidden_act",
    } | {key: key for key in ("qk_norm", "gated", "n_shared_expert", "n_dense_layer", "norm", "norm_eps", "rope_base")}

    def read_config(self, settings: Settings) -> dict[str, Any]:
        """The keys of [model] that a config.json describes, not yet validated. A dense MLP is one expert.

        Raises:
            RunError: a key is missing, or has a value that model.py does not compute.
        """
        keys = _read_keys(settings, self.keys)
        keys["tie_embeddings"] = settings.get("tie_word_embeddings", True)
        for ours, theirs in self.keys_if_set.items():
            if settings.get(theirs) is not None:
                keys[ours] = settings[theirs]
        if keys["router"] == "dense":
            keys |= {"top_k": 1, "n_shared_expert": 0, "expert_hidden": _read_count(settings, "intermediate_size")}
        return keys

    def make_config(self, model: Model) -> dict[str, Any]:
        """The keys of config.json for `model`, without those that all formats have."""
        defaults = Model()
        changed = [key for key in self.keys_if_set if getattr(model, key) != getattr(defaults, key)]
        return {
            "auto_map": {
                "AutoConfig": "configuration_nanokern.NanoKernConfig",
                "AutoModel": "modeling_nanokern.NanoKernModel",
                "AutoModelForCausalLM": "modeling_nanokern.NanoKernForCausalLM",
            },
            **{theirs: getattr(model, ours) for ours, theirs in self.keys.items()},
            **{self.keys_if_set[key]: getattr(model, key) for key in changed},
            "gate_scale": gate_scale(model),  # what model.gate_norm makes of it
            "intermediate_size": dense_width(model),
            "dropout": model.dropout,
        }

    def find_misfits(self, model: Model) -> list[str]:
        """Settings of `model` that the format does not compute, such as "model.router = kern"; none if it fits."""
        return []

    def unify_names(self, state: State) -> State:
        """Weights by the names that a file may have -> by those of `from_own`; unknown names and shapes stay."""
        return state

    def to_own(self, state: State) -> dict[str, Tensor]:
        """Weights of the format -> those of model.py. They have the names and shapes of `from_own`."""
        return from_hf(state)

    def from_own(self, state: State, model: Model) -> dict[str, Tensor]:
        """Weights of model.py, all those of `model` -> those of the format."""
        return to_hf(state)


class GPT2:
    """GPT-2: dense models with its block."""

    architecture = "GPT2LMHeadModel"
    source = "a GPT-2 checkpoint"
    keys = {key: key for key in ("n_layer", "n_head", "n_embd", "vocab_size")} | {"block_size": "n_positions"}
    block = {
        "router": "dense",
        "pos": "learned",
        "norm": "layernorm",
        "qk_norm": "off",
        "activation": "gelu",
        "gated": False,
    }
    computed = {  # key of config.json: its default, and what else is close enough to what model.py computes
        "activation_function": ("gelu_new", "gelu", "gelu_fast", "gelu_pytorch_tanh"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
    }

    def read_config(self, settings: Settings) -> dict[str, Any]:
        for key, allowed in self.computed.items():
            if settings.get(key, allowed[0]) not in allowed:
                raise RunError(f"config.json: {key} is {settings[key]!r}, expected {allowed[0]!r}; use other weights")
        keys = _read_keys(settings, self.keys)
        hidden = settings.get("n_inner") or 4 * _read_count(settings, "n_embd")
        return {
            **keys,
            **self.block,
            **{"bias": True, "top_k": 1, "expert_hidden": hidden},
            "norm_eps": settings.get("layer_norm_epsilon", 1e-5),
            "tie_embeddings": settings.get("tie_word_embeddings", True),
        }

    def make_config(self, model: Model) -> dict[str, Any]:
        config = {theirs: getattr(model, ours) for ours, theirs in self.keys.items()}
        config |= {"n_inner": dense_width(model), "activation_function": "gelu"}  # the exact one
        if model.norm_eps != Model().norm_eps:
            config["layer_norm_epsilon"] = model.norm_eps
        return config | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), model.dropout)

    def find_misfits(self, model: Model) -> list[str]:
        misfits = _find_differences(model, self.block)
        if kv_heads(model) != model.n_head:
            misfits.append(f"model.n_kv_head = {model.n_kv_head}")
        return misfits

    def unify_names(self, state: State) -> State:
        """Add the prefix that OpenAI's files lack, and drop the causal masks of older files."""
        masks = (".attn.bias", ".attn.masked_bias")
        return {
            name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}": tensor
            for name, tensor in state.items()
            if not name.endswith(masks)
        }

    def to_own(self, state: State) -> dict[str, Tensor]:
        return from_gpt2(state)

    def from_own(self, state: State, model: Model) -> dict[str, Tensor]:
        return to_gpt2(state)


@dataclass(frozen=True)
class OpenMoE:
    """A mixture of experts of transformers, with one weight (out, in) for each expert and matrix."""

    architecture: str
    qk_norm: str
    routers: tuple[str, ...]  # of ours; if there are two, norm_topk_prob chooses softmax-renorm
    experts: str  # key of config.json
    expert_hidden: str  # key of config.json
    mlp: str = "mlp"  # module of a layer
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")  # of an expert
    has_window_switch: bool = False  # use_sliding_window, without which sliding_window means nothing

    @property
    def source(self) -> str:
        """In words."""
        return f"a model of class {self.architecture}"

    def read_config(self, settings: Settings) -> dict[str, Any]:
        experts = self.experts if self.experts in settings else "num_local_experts"  # transformers 5 writes this one
        keys = _read_keys(settings, OPEN_KEYS | {"n_expert": experts, "expert_hidden": self.expert_hidden})
        rope = settings.get("rope_parameters") or {}
        if not isinstance(rope, dict):
            raise RunError(f"config.json: rope_parameters is {rope!r}, expected an object; download it again")
        rope_type = rope.get("rope_type", rope.get("type"))  # the older name
        self._refuse_unsupported({**settings, "rope_type": rope_type})
        renormalize = settings.get("norm_topk_prob", False)
        if not isinstance(renormalize, bool):
            raise RunError(f"config.json: norm_topk_prob is {renormalize!r}, expected true or false; download it again")
        return {
            **keys,
            **OPEN_BLOCK,
            "qk_norm": self.qk_norm,
            "rope_base": rope.get("rope_theta") or settings.get("rope_theta"),
            "router": self.routers[-1] if renormalize else self.routers[0],
            "tie_embeddings": settings.get("tie_word_embeddings", False),
        }

    def _refuse_unsupported(self, settings: Settings) -> None:
        """Raise RunError if a key asks for something that model.py does not compute."""
        head_dim = _read_count(settings, "hidden_size") // _read_count(settings, "num_attention_heads")
        computed = UNSUPPORTED | {"head_dim": head_dim}
        if self.has_window_switch and not settings.get("use_sliding_window"):
            del computed["sliding_window"]
        for key, value in computed.items():
            if settings.get(key, value) not in (value, None):
                raise RunError(
                    f"config.json: {key} is {settings[key]!r}, and model.py computes {value!r} only; use another model"
                )

    def make_config(self, model: Model) -> dict[str, Any]:
        config = {theirs: getattr(model, ours) for ours, theirs in OPEN_KEYS.items()}
        config |= {"num_key_value_heads": kv_heads(model), self.experts: model.n_expert}
        config |= {self.expert_hidden: model.expert_hidden, "rope_theta": model.rope_base}
        if len(self.routers) > 1:
            config["norm_topk_prob"] = model.router == "softmax-renorm"
        if self.qk_norm == "head":  # the norm of one head has its width
            config["head_dim"] = model.n_embd // model.n_head
        return config

    def find_misfits(self, model: Model) -> list[str]:
        block = {**OPEN_BLOCK, "qk_norm": self.qk_norm, "n_shared_expert": 0, "n_dense_layer": 0, "dropout": 0.0}
        misfits = _find_differences(model, block)
        return misfits if model.router in self.routers else [*misfits, f"model.router = {model.router}"]

    def unify_names(self, state: State) -> State:
        """Split experts that are stacked, as in the modules of transformers 5 (E, out, in)."""
        out = {}
        for name, tensor in state.items():
            name = name.replace(".mlp.", f".{self.mlp}.")
            place, _, leaf = name.rpartition(".")
            if leaf in ("gate_up_proj", "down_proj") and tensor.dim() == 3:
                out |= self._split_experts(place, leaf, tensor)
            else:
                out[name] = tensor
        return out

    def to_own(self, state: State) -> dict[str, Tensor]:
        out = {}
        for name, tensor in state.items():
            place, is_expert, rest = name.partition(".experts.")
            if not is_expert:
                out[name.replace(f".{self.mlp}.", ".mlp.").replace(".mlp.gate.", ".mlp.router.")] = tensor
            elif rest == f"0.{self.parts[0]}.weight":  # once for each layer
                count = sum(other.startswith(f"{place}.experts.") for other in state) // len(self.parts)
                gate, up, down = (
                    torch.stack([state[f"{place}.experts.{number}.{part}.weight"].mT for number in range(count)])
                    for part in self.parts
                )  # (E, C, H) twice, (E, H, C)
                own = f"{place.removesuffix(self.mlp)}mlp.experts"
                out |= {f"{own}.gate_up_proj": torch.cat([gate, up], dim=-1), f"{own}.down_proj": down}
        return from_hf(out)

    def from_own(self, state: State, model: Model) -> dict[str, Tensor]:
        """As for any format. These classes have no constant factor on gates: the experts' w_out is multiplied by it."""
        out = {}
        parameters = {name: tensor for name, tensor in state.items() if not name.endswith(BUFFERS)}
        for name, tensor in to_hf(parameters).items():
            name = name.replace(".mlp.router.", ".mlp.gate.").replace(".mlp.", f".{self.mlp}.")
            place, _, leaf = name.rpartition(".")
            if leaf == "gate_up_proj":
                out |= self._split_experts(place, leaf, tensor.mT)
            elif leaf == "down_proj":
                out |= self._split_experts(place, leaf, tensor.mT * gate_scale(model))
            else:
                out[name] = tensor
        return out

    def _split_experts(self, place: str, leaf: str, stacked: Tensor) -> dict[str, Tensor]:
        """Stacked matrices of experts, (E, 2H, C) of "gate_up_proj" or (E, C, H) of "down_proj", by their names."""
        parts = self.parts[:2] if leaf == "gate_up_proj" else self.parts[2:]
        return {
            f"{place}.{number}.{part}.weight": matrix
            for part, matrices in zip(parts, stacked.tensor_split(len(parts), dim=1), strict=True)
            for number, matrix in enumerate(matrices)
        }


OPEN_KEYS = {  # key of [model]: key of config.json
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
OPEN_BLOCK = {"norm": "rmsnorm", "pos": "rope", "gated": True, "bias": False}
UNSUPPORTED = {  # keys of config.json that name what model.py lacks: their value without it
    "attention_bias": False,
    "clip_qkv": None,
    "rope_scaling": None,
    "rope_type": "default",
    "sliding_window": None,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
    "attention_dropout": 0.0,
    "router_jitter_noise": 0.0,
    "quantization_config": None,
}
BOTH = ("softmax", "softmax-renorm")
OPEN_MOES = {  # by model_type
    "olmoe": OpenMoE("OlmoeForCausalLM", "all", BOTH, "num_experts", "intermediate_size"),
    "qwen3_moe": OpenMoE(
        *("Qwen3MoeForCausalLM", "head", BOTH, "num_experts", "moe_intermediate_size"), has_window_switch=True
    ),
    "mixtral": OpenMoE(
        *("MixtralForCausalLM", "off", ("softmax-renorm",), "num_local_experts", "intermediate_size"),
        mlp="block_sparse_moe",
        parts=("w1", "w3", "w2"),
    ),
}
FORMATS = {"gpt2": GPT2(), **OPEN_MOES, "nanokern": NanoKern()}  # "auto" takes the first that fits


def dense_width(model: Model) -> int:
    """Hidden width of the MLP of a dense model, and of dense layers."""
    return (model.top_k + model.n_shared_expert) * model.expert_hidden


def _find_differences(model: Model, block: Mapping[str, Any]) -> list[str]:
    return [f"model.{key} = {getattr(model, key)}" for key, value in block.items() if getattr(model, key) != value]


def _read_keys(settings: Settings, keys: Mapping[str, str]) -> dict[str, Any]:
    """The values of `settings` by the keys of [model]. Raises RunError if one is missing."""
    missing = [theirs for theirs in keys.values() if theirs not in settings]
    if missing:
        raise RunError(f"config.json: {', '.join(missing)} missing; download it again")
    return {ours: settings[theirs] for ours, theirs in keys.items()}


def _read_count(settings: Settings, key: str) -> int:
    value = settings.get(key)
    if type(value) is not int or value < 1:
        raise RunError(f"config.json: {key} is {value!r}, expected a whole number above 0; download it again")
    return value
