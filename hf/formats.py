"""The classes of transformers that runs start from and are exported to: config.json and weights.

FORMATS has one entry for each model_type: GPT-2, the open mixtures of experts OLMoE, Qwen3-MoE and
Mixtral, and nanokern, any model with the code that computes it. Weights are renamed by one table
per format, read in both directions.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attention import kv_heads
from configure.schema import KEYS, Model, select_model_keys
from gate_norm import gate_scale
from runtime import RunError

# By a module or parameter of model.py: the format's name; or an operation and names, see
# `Row.join`. # stands for the layer, * for the expert.
Names = dict[str, str | tuple[str, ...]]

BLOCK_NAMES: Names = {  # of nanokern and of the open mixtures of experts
    "wte": "model.embed_tokens",
    "wpe": "model.embed_positions",
    "ln_f": "model.norm",
    "lm_head": "lm_head",
    "blocks.#.ln_1": "model.layers.#.input_layernorm",
    "blocks.#.ln_2": "model.layers.#.post_attention_layernorm",
    "blocks.#.attn.qkv": (
        "cat",
        "model.layers.#.self_attn.q_proj",
        "model.layers.#.self_attn.k_proj",
        "model.layers.#.self_attn.v_proj",
    ),
    "blocks.#.attn.proj": "model.layers.#.self_attn.o_proj",
    "blocks.#.attn.q_norm": "model.layers.#.self_attn.q_norm",
    "blocks.#.attn.k_norm": "model.layers.#.self_attn.k_norm",
}
NANOKERN_NAMES: Names = {
    **BLOCK_NAMES,
    "blocks.#.mlp.w_out": "model.layers.#.mlp.down_proj",
    "blocks.#.mlp.router": "model.layers.#.mlp.router",
    "blocks.#.mlp.shared.w_out": "model.layers.#.mlp.shared_experts.down_proj",
    "blocks.#.mlp.experts.w_out": "model.layers.#.mlp.experts.down_proj",
}
GATED_NAMES: Names = {
    "blocks.#.mlp.w_in": ("cat", "model.layers.#.mlp.gate_proj", "model.layers.#.mlp.up_proj"),
    "blocks.#.mlp.shared.w_in": (
        "cat",
        "model.layers.#.mlp.shared_experts.gate_proj",
        "model.layers.#.mlp.shared_experts.up_proj",
    ),
    "blocks.#.mlp.experts.w_in": "model.layers.#.mlp.experts.gate_up_proj",
}
PLAIN_NAMES: Names = {
    "blocks.#.mlp.w_in": "model.layers.#.mlp.up_proj",
    "blocks.#.mlp.shared.w_in": "model.layers.#.mlp.shared_experts.up_proj",
    "blocks.#.mlp.experts.w_in": "model.layers.#.mlp.experts.up_proj",
}
GPT2_NAMES: Names = {
    "wte": "transformer.wte",
    "wpe": "transformer.wpe",
    "ln_f": "transformer.ln_f",
    "lm_head": "lm_head",
    "blocks.#.ln_1": "transformer.h.#.ln_1",
    "blocks.#.ln_2": "transformer.h.#.ln_2",
    "blocks.#.attn.qkv": ("transpose", "transformer.h.#.attn.c_attn"),
    "blocks.#.attn.proj": ("transpose", "transformer.h.#.attn.c_proj"),
    "blocks.#.mlp.w_in": ("transpose", "transformer.h.#.mlp.c_fc"),
    "blocks.#.mlp.w_out": ("transpose", "transformer.h.#.mlp.c_proj"),
}
# buffers of our routers, which classes of transformers lack
BUFFERS = ("router.c", "selection_bias", "hash_table")

State = Mapping[str, Tensor]
Settings = Mapping[str, Any]  # content of config.json


class Row(NamedTuple):
    """A weight of model.py, and the tensors of a format that it is made of."""

    operation: str
    names: list[str]  # of the tensors; of a stack, those of an expert after another's
    shares: Sequence[int]  # of the parts in the rows of what is concatenated

    def join(self, parts: list[Tensor]) -> Tensor:
        """Make the weight of model.py from the format's tensors."""
        if self.operation == "cat":
            return torch.cat(parts)
        if self.operation == "transpose":  # of a matrix; GPT-2 stores (in, out)
            return parts[0].t()
        if self.operation == "stack":  # (out, in) of each expert, to (E, in, out)
            n = len(self.shares)
            experts = [torch.cat(parts[i : i + n]) for i in range(0, len(parts), n)]
            return torch.stack(experts).mT
        return parts[0]

    def split(self, tensor: Tensor) -> list[Tensor]:
        """The inverse of `join`, without copies."""
        if self.operation == "transpose":
            return [tensor.t()]
        if self.operation == "same":
            return [tensor]
        parts: list[Tensor] = []
        for whole in [tensor] if self.operation == "cat" else tensor.mT:
            unit = len(whole) // sum(self.shares)
            parts += whole.split([unit * share for share in self.shares])
        return parts


def dense_width(model: Model) -> int:
    """Hidden width of the MLP of a dense model."""
    return (model.top_k + model.n_shared_expert) * model.expert_hidden


class Format:
    """A class of transformers.

    Subclasses fill in the tables, and override methods where tables do not suffice.
    """

    architecture: str
    names: Names
    skipped: tuple[str, ...] = ()  # endings of weights of model.py that it lacks
    keys: Mapping[str, str]  # key of [model]: key of config.json
    optional: tuple[
        str, ...
    ] = ()  # keys of [model] whose default is meant where config.json lacks them
    routers: tuple[str, ...] = ()  # model.router of all its models; empty: any
    block: Mapping[str, Any] = {}  # other settings of [model] that all its models have
    # values of config.json keys that model.py supports; the first is the default
    allowed: dict[str, tuple] = {"quantization_config": (None,)}
    tied = True  # tie_word_embeddings by default

    def read_config(self, settings: Settings) -> dict[str, Any]:
        """The keys of [model] that a config.json describes, not yet validated.

        A dense MLP is one expert.

        Raises:
            RunError: a key is missing, or has a value that model.py does not compute.
        """
        for key, values in self.allowed.items():
            value = settings.get(key, values[0])
            if value not in values:
                raise RunError(
                    f"config.json: {key} is {value!r}, and model.py computes {values[0]!r} only; "
                    f"use another model"
                )
        config = dict(self.block)
        if self.routers:
            config["router"] = self.routers[0]
        missing = []
        for ours, theirs in self.keys.items():
            if settings.get(theirs) is not None:
                config[ours] = settings[theirs]
            elif ours not in self.optional:
                missing.append(theirs)
        if missing:
            raise RunError(f"config.json: {', '.join(missing)} missing; download it again")
        config["tie_embeddings"] = settings.get("tie_word_embeddings", self.tied)
        return config

    def make_config(self, model: Model) -> dict[str, Any]:
        """The keys of config.json for `model`, without the keys that all formats have."""
        values = model.model_dump()
        values["n_kv_head"] = kv_heads(model)
        values["gate_scale"] = gate_scale(model)
        return {theirs: values[ours] for ours, theirs in self.keys.items()}

    def computes(self, model: Model) -> bool:
        """Return True if the class computes `model`."""
        if self.routers and model.router not in self.routers:
            return False
        return all(getattr(model, key) == value for key, value in self.block.items())

    def unify_names(self, state: Settings) -> dict[str, Any]:
        """Weights, or anything else, by the names of `from_own`; `state` has a file's names."""
        return dict(state)

    def find_names(self, model: Model) -> Names:
        """The table of names for `model`."""
        return self.names

    def find_row(self, name: str, model: Model) -> Row:
        """The row of the table for the weight `name` of model.py.

        Raises RunError if there is none.
        """
        table = self.find_names(model)
        layer = re.match(r"blocks\.(\d+)", name)
        key = re.sub(r"^blocks\.\d+", "blocks.#", name)
        leaf = ""
        if key not in table:  # a parameter of a module in the table
            key, dot, leaf = key.rpartition(".")
            leaf = dot + leaf
        if key not in table:
            raise RunError(
                f"{name}: no name for it in {self.architecture}; add one to hf/formats.py, and "
                "what it computes to hf/export/modeling_nanokern.py"
            )
        entry = table[key]
        operation, *patterns = ("same", entry) if isinstance(entry, str) else entry
        names = []
        for expert in range(model.n_expert if operation == "stack" else 1):
            for pattern in patterns:
                theirs = pattern.replace("#", layer[1] if layer else "")
                names.append(theirs.replace("*", str(expert)) + leaf)
        shares = [1] * len(patterns)
        if key.endswith(".qkv"):
            shares = [model.n_head, kv_heads(model), kv_heads(model)]
        return Row(operation, names, shares)

    def from_own(self, state: State, model: Model) -> dict[str, Tensor]:
        """Weights of `model` by the format's names: views of those in `state`, by model.py's."""
        out = {}
        for name, tensor in state.items():
            if not name.endswith(self.skipped):
                row = self.find_row(name, model)
                out.update(zip(row.names, row.split(tensor), strict=True))
        return out


SHARED_KEYS = {  # of nanokern and of the open mixtures of experts
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_kv_head": "num_key_value_heads",
    "n_embd": "hidden_size",
    "block_size": "max_position_embeddings",
    "top_k": "num_experts_per_tok",
    "activation": "hidden_act",
    "vocab_size": "vocab_size",
}


class NanoKern(Format):
    """Any model, computed by modeling_nanokern.py."""

    architecture = "NanoKernForCausalLM"
    names = NANOKERN_NAMES
    # younger than the first exports
    optional = ("n_hash_layer", "router_groups", "router_group_k")
    keys = {key: key for key in select_model_keys("exported")}
    keys |= SHARED_KEYS
    keys["expert_hidden"] = "moe_intermediate_size"
    allowed = Format.allowed | {"n_dense_layer": (0,)}  # a key of e125ff1

    def find_names(self, model: Model) -> Names:
        return {**self.names, **(GATED_NAMES if model.gated else PLAIN_NAMES)}

    def read_config(self, settings: Settings) -> dict[str, Any]:
        config = super().read_config(settings)
        if config["router"] == "dense":
            config["top_k"] = 1
            config["n_shared_expert"] = 0
            config["expert_hidden"] = settings.get("intermediate_size")
        return config

    def make_config(self, model: Model) -> dict[str, Any]:
        config = super().make_config(model)
        config["auto_map"] = {
            "AutoConfig": "configuration_nanokern.NanoKernConfig",
            "AutoModel": "modeling_nanokern.NanoKernModel",
            "AutoModelForCausalLM": "modeling_nanokern.NanoKernForCausalLM",
        }
        config["intermediate_size"] = dense_width(model)
        config["dropout"] = model.dropout
        return config


class GPT2(Format):
    """GPT-2: dense models with its block."""

    architecture = "GPT2LMHeadModel"
    names = GPT2_NAMES
    keys = {
        "n_layer": "n_layer",
        "n_head": "n_head",
        "n_embd": "n_embd",
        "vocab_size": "vocab_size",
        "block_size": "n_positions",
        "norm_eps": "layer_norm_epsilon",
    }
    optional = ("norm_eps",)
    routers = ("dense",)
    block = {
        "pos": "learned",
        "norm": "layernorm",
        "qk_norm": "off",
        "activation": "gelu",
        "gated": False,
        "n_kv_head": 0,
    }
    allowed = Format.allowed | {
        "activation_function": ("gelu_new", "gelu", "gelu_fast", "gelu_pytorch_tanh"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
    }

    def read_config(self, settings: Settings) -> dict[str, Any]:
        config = super().read_config(settings)
        config["bias"] = True
        config["top_k"] = 1
        config["expert_hidden"] = settings.get("n_inner") or 4 * config["n_embd"]
        return config

    def make_config(self, model: Model) -> dict[str, Any]:
        config = super().make_config(model)
        config["n_inner"] = dense_width(model)
        config["activation_function"] = "gelu"  # the exact one
        for key in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
            config[key] = model.dropout
        return config

    def unify_names(self, state: Settings) -> dict[str, Any]:
        """Add the prefix that OpenAI's files lack, and drop the causal masks of older files."""
        unified = {}
        for name, tensor in state.items():
            if name.endswith((".attn.bias", ".attn.masked_bias")):
                continue
            if not name.startswith(("transformer.", "lm_head.")):
                name = f"transformer.{name}"
            unified[name] = tensor
        return unified

    def from_own(self, state: State, model: Model) -> dict[str, Tensor]:
        """As in Format; the biases that a model without them lacks are zeros."""
        zeros = {}
        for name, tensor in state.items():
            module = name.removesuffix(".weight")
            if not model.bias and module not in ("wte", "wpe", "lm_head"):
                zeros[f"{module}.bias"] = tensor.new_zeros(len(tensor))
        return super().from_own({**state, **zeros}, model)


OPEN_KEYS = SHARED_KEYS | {
    "norm_eps": "rms_norm_eps",
    "n_expert": "num_experts",
    "expert_hidden": "intermediate_size",
}
OPEN_BLOCK = {
    "norm": "rmsnorm",
    "pos": "rope",
    "gated": True,
    "bias": False,
    "n_shared_expert": 0,
    "dropout": 0.0,
}
for name in select_model_keys("chooses"):
    if name not in ("router", "top_k"):  # without groups and tables
        OPEN_BLOCK[name] = KEYS[f"model.{name}"]["default"]


class OpenMoE(Format):
    """A mixture of experts of transformers, with a weight (out, in) for each expert and matrix."""

    # if there are two, norm_topk_prob chooses softmax-renorm
    routers = ("softmax", "softmax-renorm")
    names: Names = BLOCK_NAMES | {
        "blocks.#.mlp.router": "model.layers.#.mlp.gate",
        "blocks.#.mlp.experts.w_in": (
            "stack",
            "model.layers.#.mlp.experts.*.gate_proj.weight",
            "model.layers.#.mlp.experts.*.up_proj.weight",
        ),
        "blocks.#.mlp.experts.w_out": ("stack", "model.layers.#.mlp.experts.*.down_proj.weight"),
    }
    skipped = BUFFERS  # these classes compute as if c were 1
    optional = ("n_kv_head",)
    tied = False
    allowed = Format.allowed | {
        "attention_bias": (False, None),
        "clip_qkv": (None,),
        "rope_scaling": (None,),
        "rope_type": ("default", None),
        "sliding_window": (None,),
        "mlp_only_layers": ([], None),
        "decoder_sparse_step": (1, None),
        "attention_dropout": (0.0, None),
        "router_jitter_noise": (0.0, None),
        "norm_topk_prob": (False, True),
    }

    def read_config(self, settings: Settings) -> dict[str, Any]:
        settings = dict(settings)
        rope = settings.get("rope_parameters") or {}
        settings["rope_type"] = rope.get("rope_type", rope.get("type"))  # "type" is the older name
        # transformers 5 writes num_local_experts for every class
        settings.setdefault(self.keys["n_expert"], settings.get("num_local_experts"))
        config = super().read_config(settings)
        config["rope_base"] = rope.get("rope_theta") or settings.get("rope_theta")
        if settings.get("norm_topk_prob"):
            config["router"] = self.routers[-1]
        return config

    def computes(self, model: Model) -> bool:
        """As in Format; vLLM, too, which computes these classes' experts by SiLU alone (0.32)."""
        return super().computes(model) and model.activation == "silu"

    def make_config(self, model: Model) -> dict[str, Any]:
        config = super().make_config(model)
        config["rope_theta"] = model.rope_base
        if len(self.routers) > 1:
            config["norm_topk_prob"] = model.router == "softmax-renorm"
        if self.block["qk_norm"] == "head":  # the norm of one head has its width
            config["head_dim"] = model.n_embd // model.n_head
        return config


class Olmoe(OpenMoE):
    """OLMoE (arXiv 2409.02060)."""

    architecture = "OlmoeForCausalLM"
    keys = OPEN_KEYS
    block = OPEN_BLOCK | {"qk_norm": "all"}

    def computes(self, model: Model) -> bool:
        """As in OpenMoE; vLLM reads neither norm_topk_prob nor rms_norm_eps, and ties no head."""
        is_released = model.router == "softmax" and model.norm_eps == 1e-5
        return super().computes(model) and is_released and not model.tie_embeddings


class Qwen3Moe(OpenMoE):
    """Qwen3-MoE (arXiv 2505.09388)."""

    architecture = "Qwen3MoeForCausalLM"
    keys = OPEN_KEYS | {"expert_hidden": "moe_intermediate_size"}
    block = OPEN_BLOCK | {"qk_norm": "head"}
    allowed = OpenMoE.allowed | {"use_sliding_window": (False,)}
    del allowed["sliding_window"]  # ignored by transformers without use_sliding_window


class Mixtral(OpenMoE):
    """Mixtral (arXiv 2401.04088)."""

    architecture = "MixtralForCausalLM"
    keys = OPEN_KEYS | {"n_expert": "num_local_experts"}
    block = OPEN_BLOCK | {"qk_norm": "off"}
    routers = ("softmax-renorm",)
    names: Names = BLOCK_NAMES | {
        "blocks.#.mlp.router": "model.layers.#.block_sparse_moe.gate",
        "blocks.#.mlp.experts.w_in": (
            "stack",
            "model.layers.#.block_sparse_moe.experts.*.w1.weight",
            "model.layers.#.block_sparse_moe.experts.*.w3.weight",
        ),
        "blocks.#.mlp.experts.w_out": (
            "stack",
            "model.layers.#.block_sparse_moe.experts.*.w2.weight",
        ),
    }


OPEN_MOES = {"olmoe": Olmoe(), "qwen3_moe": Qwen3Moe(), "mixtral": Mixtral()}  # by model_type
# choose_form takes the first that computes a model
FORMATS = {"gpt2": GPT2(), **OPEN_MOES, "nanokern": NanoKern()}
