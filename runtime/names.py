"""Weight names of model.py, of modeling_nanokern.py and of transformers' GPT-2, and conversions between them.

model.py and GPT-2 have one matrix for queries, keys and values, modeling_nanokern.py has three. GPT-2 stores matrices
transposed, as (in, out).
"""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from runtime import RunError

MODULES = {  # of model.py: (of modeling_nanokern.py, of transformers' GPT-2)
    "wte": ("model.embed_tokens", "transformer.wte"),
    "wpe": ("model.embed_positions", "transformer.wpe"),
    "ln_f": ("model.norm", "transformer.ln_f"),
    "lm_head": ("lm_head", "lm_head"),
    "ln_1": ("input_layernorm", "ln_1"),
    "ln_2": ("post_attention_layernorm", "ln_2"),
    "attn.qkv": ("self_attn.qkv_proj", "attn.c_attn"),  # qkv_proj is stored as q_proj, k_proj, v_proj
    "attn.proj": ("self_attn.o_proj", "attn.c_proj"),
    "mlp.w_in": ("mlp.up_proj", "mlp.c_fc"),
    "mlp.w_out": ("mlp.down_proj", "mlp.c_proj"),
    "mlp.router": ("mlp.router", None),
    "mlp.experts": ("mlp.experts", None),
}
HF = {name: hf for name, (hf, _) in MODULES.items()}
GPT2 = {name: gpt2 for name, (_, gpt2) in MODULES.items() if gpt2}
EXPERTS = {"w_in": "up_proj", "w_out": "down_proj"}  # (E, C, H) and (E, H, C) in both
TRANSPOSED = ("attn.qkv", "attn.proj", "mlp.w_in", "mlp.w_out")  # (in, out) in GPT-2
BIASED = ("ln_1", "ln_2", "ln_f", *TRANSPOSED)  # modules that always have a bias in GPT-2
MASKS = re.compile(r".*\.attn\.(bias|masked_bias)")  # not weights: GPT-2's causal masks in older files

State = Mapping[str, Tensor]


def to_hf(state: State) -> dict[str, Tensor]:
    """Rename weights of model.py to those of modeling_nanokern.py. Raises RunError for an unknown name."""
    out = {}
    for name, tensor in state.items():
        new = _rename(name, "blocks.", HF, "model.layers.")
        if ".qkv_proj." in new:
            for part, piece in zip("qkv", tensor.chunk(3), strict=True):
                out[new.replace(".qkv_proj.", f".{part}_proj.")] = piece
        else:
            module, _, leaf = new.rpartition(".")
            out[f"{module}.{EXPERTS.get(leaf, leaf)}"] = tensor
    return out


def from_hf(state: State) -> dict[str, Tensor]:
    """Rename weights of modeling_nanokern.py to those of model.py.

    Raises:
        RunError: a name is unknown.
        KeyError: of q_proj, k_proj and v_proj only some are in `state`.
    """
    names, experts = {new: old for old, new in HF.items()}, {new: old for old, new in EXPERTS.items()}
    out = {}
    for name, tensor in state.items():
        if (part := re.search(r"\.([qkv])_proj\.", name)) is None:
            module, _, leaf = _rename(name, "model.layers.", names, "blocks.").rpartition(".")
            out[f"{module}.{experts.get(leaf, leaf)}"] = tensor
        elif part[1] == "q":
            qkv = [state[name.replace(".q_proj.", f".{other}_proj.")] for other in "qkv"]
            out[_rename(name.replace(".q_proj.", ".qkv_proj."), "model.layers.", names, "blocks.")] = torch.cat(qkv)
    return out


def to_gpt2(state: State) -> dict[str, Tensor]:
    """Rename weights of a dense model with learned positions to GPT-2's; biases it lacks become zeros.

    Raises:
        RunError: GPT-2 has no weight for a name.
    """
    out = {}
    for name, tensor in state.items():
        new, module = _rename(name, "blocks.", GPT2, "transformer.h."), _module(name)
        is_weight = name.endswith(".weight")
        out[new] = tensor.t().contiguous() if is_weight and module in TRANSPOSED else tensor
        if is_weight and module in BIASED and name.removesuffix("weight") + "bias" not in state:
            out[new.removesuffix("weight") + "bias"] = tensor.new_zeros(len(tensor))
    return out


def from_gpt2(state: State) -> dict[str, Tensor]:
    """Rename weights of GPT-2, with or without the prefix `transformer.`, to those of model.py with biases.

    Raises:
        RunError: a name is unknown.
    """
    names = {new: old for old, new in GPT2.items()}
    out = {}
    for name, tensor in state.items():
        if MASKS.fullmatch(name):
            continue
        full = name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}"
        new = _rename(full, "transformer.h.", names, "blocks.")
        out[new] = tensor.t().contiguous() if _module(new) in TRANSPOSED and new.endswith(".weight") else tensor
    return out


def _module(name: str) -> str:
    """blocks.3.attn.qkv.weight -> attn.qkv."""
    return re.sub(r"^blocks\.\d+\.", "", name).rpartition(".")[0]


def _rename(name: str, blocks: str, modules: Mapping[str, str], new_blocks: str) -> str:
    """Replace the prefix `blocks` by `new_blocks` and the module by its name in `modules`; keep layer and leaf."""
    layer = re.match(re.escape(blocks) + r"(\d+)\.", name)
    module, _, leaf = name[layer.end() if layer else 0 :].rpartition(".")
    if module not in modules:
        raise RunError(f"{name}: no weight of that name is known; use an unmodified GPT-2 or exported language model")
    return f"{new_blocks}{layer[1]}.{modules[module]}.{leaf}" if layer else f"{modules[module]}.{leaf}"
