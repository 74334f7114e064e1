"""The classes of transformers that runs start from and are exported to: their config.json and weights beside ours.

FORMATS has one entry for each model_type: GPT-2, the open mixtures of experts OLMoE, Qwen3-MoE and
Mixtral, and nanokern, any model with the code that computes it.

Of weights, model.py and GPT-2 have one matrix for queries, keys and values (qkv),
modeling_nanokern.py has three. The w_in of a gated MLP is its gate_proj above its up_proj. GPT-2
stores matrices transposed, as (in, out).
"""

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from attention import kv_heads
from configure.schema import Model, select_model_keys
from gate_norm import gate_scale
from runtime import RunError

# of model.py: (of modeling_nanokern.py, of transformers' GPT-2); # stands for the layer
MODULES = {
    "wte": ("model.embed_tokens", "transformer.wte"),
    "wpe": ("model.embed_positions", "transformer.wpe"),
    "ln_f": ("model.norm", "transformer.ln_f"),
    "lm_head": ("lm_head", "lm_head"),
    "blocks.#.ln_1": ("model.layers.#.input_layernorm", "transformer.h.#.ln_1"),
    "blocks.#.ln_2": ("model.layers.#.post_attention_layernorm", "transformer.h.#.ln_2"),
    "blocks.#.attn.qkv": ("model.layers.#.self_attn.qkv_proj", "transformer.h.#.attn.c_attn"),
    "blocks.#.attn.proj": ("model.layers.#.self_attn.o_proj", "transformer.h.#.attn.c_proj"),
    "blocks.#.attn.q_norm": ("model.layers.#.self_attn.q_norm", None),
    "blocks.#.attn.k_norm": ("model.layers.#.self_attn.k_norm", None),
    "blocks.#.mlp.w_in": ("model.layers.#.mlp.up_proj", "transformer.h.#.mlp.c_fc"),
    "blocks.#.mlp.w_out": ("model.layers.#.mlp.down_proj", "transformer.h.#.mlp.c_proj"),
    "blocks.#.mlp.router": ("model.layers.#.mlp.router", None),
    "blocks.#.mlp.shared.w_in": ("model.layers.#.mlp.shared_experts.up_proj", None),
    "blocks.#.mlp.shared.w_out": ("model.layers.#.mlp.shared_experts.down_proj", None),
    # (E, C, H), a parameter; gated: 2H
    "blocks.#.mlp.experts.w_in": ("model.layers.#.mlp.experts.up_proj", None),
    "blocks.#.mlp.experts.w_out": ("model.layers.#.mlp.experts.down_proj", None),  # (E, H, C)
}
# (in, out) in GPT-2
TRANSPOSED = re.compile(r"blocks\.\d+\.(attn\.(qkv|proj)|mlp\.w_(in|out))\.weight")
# of modules that always have a bias in GPT-2
BIASED = re.compile(rf"{TRANSPOSED.pattern}|(.*\.)?ln_.\.weight")

# of our routers, which classes of transformers lack
BUFFERS = ("router.c", "selection_bias", "hash_table")

State = Mapping[str, Tensor]
Settings = Mapping[str, Any]  # of config.json


def _is_gated(name: str, state: State) -> bool:
    """Whether `name` is the w_in of an MLP or of experts, with twice as many pre-activations as activations."""
    if not name.endswith((".w_in", ".w_in.weight")):
        return False
    w_in, w_out = state[name], state[name.replace("w_in", "w_out")]
    return (w_in.shape[2] if w_in.dim() == 3 else len(w_in)) == 2 * w_out.shape[1]


def _rename(name: str, column: int) -> str:
    """Replace a parameter's name, or its module's, by that in a column of MODULES; keep the layer's number."""
    layer = re.search(r"\.\d+\.", name)
    general = name.replace(layer[0], ".#.", 1) if layer else name
    module, dot, leaf = (general, "", "") if general in MODULES else general.rpartition(".")
    return f"{MODULES[module][column]}{dot}{leaf}".replace(".#.", layer[0] if layer else "")


def dense_width(model: Model) -> int:
    """Hidden width of the MLP of a dense model, and of dense layers."""
    return (model.top_k + model.n_shared_expert) * model.expert_hidden


class Format:
    """A class of transformers.

    Subclasses fill in the tables, and override where these do not suffice.
    """

    architecture: str
    keys: Mapping[str, str]  # key of [model]: key of config.json
    # those of `keys` that config.json may lack: our default is meant
    optional: tuple[str, ...] = ()
    block: Mapping[str, Any] = {}  # settings of [model] that all its models have
    # key of config.json: its default, and what else model.py computes
    allowed: Mapping[str, tuple] = {}
    tied = True  # tie_word_embeddings by default

    def read_config(self, settings: Settings) -> dict[str, Any]:
        """The keys of [model] that a config.json describes, not yet validated.

        A dense MLP is one expert.

        Raises:
            RunError: a key is missing, or has a value that model.py does not compute.
        """
        for key, values in {**self.allowed, "quantization_config": (None,)}.items():
            if settings.get(key, values[0]) not in values:
                only = f"and model.py computes {values[0]!r} only; use another model"
                raise RunError(f"config.json: {key} is {settings[key]!r}, {only}")
        keys = {
            ours: settings[theirs]
            for ours, theirs in self.keys.items()
            if settings.get(theirs) is not None
        }
        missing = [
            theirs for ours, theirs in self.keys.items() if ours not in (*keys, *self.optional)
        ]
        if missing:
            raise RunError(f"config.json: {', '.join(missing)} missing; download it again")
        return {
            **keys,
            **self.block,
            "tie_embeddings": settings.get("tie_word_embeddings", self.tied),
        }

    def make_config(self, model: Model) -> dict[str, Any]:
        """The keys of config.json for `model`, without those that all formats have."""
        values = model.model_dump() | {
            "n_kv_head": kv_heads(model),
            "gate_scale": gate_scale(model),
        }
        return {theirs: values[ours] for ours, theirs in self.keys.items()}

    def find_misfits(self, model: Model) -> list[str]:
        """Settings of `model` that the format does not compute, such as "model.router = kern"; none if it fits."""
        values = model.model_dump()
        return [
            f"model.{key} = {values[key]}"
            for key, value in self.block.items()
            if values[key] != value
        ]

    def unify_names(self, state: State) -> dict[str, Tensor]:
        """Weights by the names that a file may have -> by those of `from_own`; unknown names and shapes stay."""
        return dict(state)

    def from_own(self, state: State) -> dict[str, Tensor]:
        """Weights of model.py, all those of a model -> those of the format; here, those of modeling_nanokern.py.

        They are views: to read weights of the format, write into those of weights that are still
        empty.
        """
        out = {}
        for name, tensor in state.items():
            new = _rename(name, 0)
            if ".qkv." in name:
                C = len(state[re.sub(r"qkv\.\w+$", "proj.weight", name)])
                kv = (len(tensor) - C) // 2
                for letter, part in zip("qkv", tensor.split([C, kv, kv]), strict=True):
                    out[new.replace("qkv_proj", f"{letter}_proj")] = part
            elif not _is_gated(name, state):
                out[new] = tensor
            elif tensor.dim() == 3:
                out[new.replace("up_proj", "gate_up_proj")] = tensor
            else:
                out[new.replace("up_proj", "gate_proj")], out[new] = tensor.chunk(2)
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
    optional = tuple(select_model_keys("exported", "later"))
    keys = {key: key for key in (*select_model_keys("exported", "always"), *optional)}
    keys |= SHARED_KEYS | {"expert_hidden": "moe_intermediate_size"}

    def read_config(self, settings: Settings) -> dict[str, Any]:
        keys = super().read_config(settings)
        if keys["router"] == "dense":
            keys |= {
                "top_k": 1,
                "n_shared_expert": 0,
                "expert_hidden": settings.get("intermediate_size"),
            }
        return keys

    def make_config(self, model: Model) -> dict[str, Any]:
        classes = {
            "AutoConfig": "configuration_nanokern.NanoKernConfig",
            "AutoModel": "modeling_nanokern.NanoKernModel",
            "AutoModelForCausalLM": "modeling_nanokern.NanoKernForCausalLM",
        }
        more = {
            "auto_map": classes,
            "intermediate_size": dense_width(model),
            "dropout": model.dropout,
        }
        return super().make_config(model) | more


class GPT2(Format):
    """GPT-2: dense models with its block."""

    architecture = "GPT2LMHeadModel"
    keys = {key: key for key in ("n_layer", "n_head", "n_embd", "vocab_size")}
    keys |= {"block_size": "n_positions", "norm_eps": "layer_norm_epsilon"}
    optional = ("norm_eps",)
    block = {"router": "dense", "pos": "learned", "norm": "layernorm", "qk_norm": "off"}
    block |= {"activation": "gelu", "gated": False}
    allowed = {
        "activation_function": ("gelu_new", "gelu", "gelu_fast", "gelu_pytorch_tanh"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
    }

    def read_config(self, settings: Settings) -> dict[str, Any]:
        keys = super().read_config(settings)
        return keys | {
            "bias": True,
            "top_k": 1,
            "expert_hidden": settings.get("n_inner") or 4 * keys["n_embd"],
        }

    def make_config(self, model: Model) -> dict[str, Any]:
        # exact
        config = super().make_config(model) | {
            "n_inner": dense_width(model),
            "activation_function": "gelu",
        }
        return config | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), model.dropout)

    def find_misfits(self, model: Model) -> list[str]:
        misfits = super().find_misfits(model)
        return (
            misfits
            if kv_heads(model) == model.n_head
            else [*misfits, f"model.n_kv_head = {model.n_kv_head}"]
        )

    def unify_names(self, state: State) -> dict[str, Tensor]:
        """Add the prefix that OpenAI's files lack, and drop the causal masks of older files."""
        masks = (".attn.bias", ".attn.masked_bias")
        return {
            name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}": tensor
            for name, tensor in state.items()
            if not name.endswith(masks)
        }

    def from_own(self, state: State) -> dict[str, Tensor]:
        """As for any format, of a dense model with learned positions; zeros for biases that it lacks."""
        out = {}
        for name, tensor in state.items():
            new = _rename(name, 1)
            out[new] = tensor.t() if TRANSPOSED.fullmatch(name) else tensor
            if BIASED.fullmatch(name) and name.removesuffix("weight") + "bias" not in state:
                out[new.removesuffix("weight") + "bias"] = tensor.new_zeros(len(tensor))
        return out


OPEN_KEYS = SHARED_KEYS | {
    "norm_eps": "rms_norm_eps",
    "n_expert": "num_experts",
    "expert_hidden": "intermediate_size",
}
OPEN_BLOCK = {"norm": "rmsnorm", "pos": "rope", "gated": True, "bias": False}
OPEN_BLOCK |= {"n_shared_expert": 0, "n_dense_layer": 0, "n_hash_layer": 0, "dropout": 0.0}


class OpenMoE(Format):
    """A mixture of experts of transformers, with one weight (out, in) for each expert and matrix."""

    # if there are two, norm_topk_prob chooses softmax-renorm
    routers: tuple[str, ...] = ("softmax", "softmax-renorm")
    mlp: str = "mlp"  # module of a layer
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")  # of an expert
    optional = ("n_kv_head",)
    tied = False
    allowed = {
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
        rope = settings.get("rope_parameters") or {}
        renamed = {"rope_type": rope.get("rope_type", rope.get("type"))}  # the older name
        if self.keys["n_expert"] not in settings:
            # as transformers 5 writes it
            renamed[self.keys["n_expert"]] = settings.get("num_local_experts")
        return super().read_config({**settings, **renamed}) | {
            "rope_base": rope.get("rope_theta") or settings.get("rope_theta"),
            "router": self.routers[-1] if settings.get("norm_topk_prob") else self.routers[0],
        }

    def make_config(self, model: Model) -> dict[str, Any]:
        config = super().make_config(model) | {"rope_theta": model.rope_base}
        if len(self.routers) > 1:
            config["norm_topk_prob"] = model.router == "softmax-renorm"
        if self.block["qk_norm"] == "head":  # the norm of one head has its width
            config["head_dim"] = model.n_embd // model.n_head
        return config

    def find_misfits(self, model: Model) -> list[str]:
        misfits = super().find_misfits(model)
        return (
            misfits
            if model.router in self.routers
            else [*misfits, f"model.router = {model.router}"]
        )

    def from_own(self, state: State) -> dict[str, Tensor]:
        """As for any format.

        These classes have no constant c on gates: where there is one, it multiplies w_out.
        """
        out = {}
        parameters = {name: tensor for name, tensor in state.items() if not name.endswith(BUFFERS)}
        for name, tensor in super().from_own(parameters).items():
            name = name.replace(".mlp.router.", ".mlp.gate.").replace(".mlp.", f".{self.mlp}.")
            place, _, leaf = name.rpartition(".")
            if leaf == "gate_up_proj":
                stacks = dict(zip(self.parts, tensor.chunk(2, dim=-1), strict=False))
            elif leaf == "down_proj":
                c = state.get(f"blocks.{name.split('.')[2]}.mlp.router.c")
                stacks = {self.parts[2]: tensor if c is None else tensor * c}
            else:
                out[name], stacks = tensor, {}
            for part, stack in stacks.items():  # (E, in, out)
                out |= {
                    f"{place}.{number}.{part}.weight": matrix.mT
                    for number, matrix in enumerate(stack)
                }
        return out


class Olmoe(OpenMoE):
    """OLMoE (arXiv 2409.02060)."""

    architecture = "OlmoeForCausalLM"
    keys = OPEN_KEYS
    block = OPEN_BLOCK | {"qk_norm": "all"}


class Qwen3Moe(OpenMoE):
    """Qwen3-MoE (arXiv 2505.09388)."""

    architecture = "Qwen3MoeForCausalLM"
    keys = OPEN_KEYS | {"expert_hidden": "moe_intermediate_size"}
    block = OPEN_BLOCK | {"qk_norm": "head"}
    allowed = {key: values for key, values in OpenMoE.allowed.items() if key != "sliding_window"}
    allowed |= {"use_sliding_window": (False,)}  # without which transformers ignores sliding_window


class Mixtral(OpenMoE):
    """Mixtral (arXiv 2401.04088)."""

    architecture = "MixtralForCausalLM"
    keys = OPEN_KEYS | {"n_expert": "num_local_experts"}
    block = OPEN_BLOCK | {"qk_norm": "off"}
    routers = ("softmax-renorm",)
    mlp = "block_sparse_moe"
    parts = ("w1", "w3", "w2")


OPEN_MOES = {"olmoe": Olmoe(), "qwen3_moe": Qwen3Moe(), "mixtral": Mixtral()}  # by model_type
FORMATS = {"gpt2": GPT2(), **OPEN_MOES, "nanokern": NanoKern()}  # "auto" takes the first that fits
