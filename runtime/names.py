"""Names of weights: those of model.py, of modeling_nanokern.py and of transformers' GPT-2.

Functions of {name: tensor} that need torch alone. model.py has one projection for queries, keys and values, one above
the other, as GPT-2 has; modeling_nanokern.py has three. GPT-2 keeps matrices the other way round (in, out).
"""

import re

import torch

HF = {  # module of model.py: module of modeling_nanokern.py
    "wte": "model.embed_tokens",
    "wpe": "model.embed_positions",
    "ln_f": "model.norm",
    "lm_head": "lm_head",
    "ln_1": "input_layernorm",
    "ln_2": "post_attention_layernorm",
    "attn.qkv": "self_attn.qkv_proj",  # in three: q_proj, k_proj, v_proj
    "attn.proj": "self_attn.o_proj",
    "mlp.w_in": "mlp.up_proj",
    "mlp.w_out": "mlp.down_proj",
    "mlp.router": "mlp.router",
    "mlp.experts": "mlp.experts",
}
GPT2 = {  # module of model.py: module of transformers' GPT-2
    "wte": "transformer.wte",
    "wpe": "transformer.wpe",
    "ln_f": "transformer.ln_f",
    "lm_head": "lm_head",
    "ln_1": "ln_1",
    "ln_2": "ln_2",
    "attn.qkv": "attn.c_attn",
    "attn.proj": "attn.c_proj",
    "mlp.w_in": "mlp.c_fc",
    "mlp.w_out": "mlp.c_proj",
}
EXPERTS = {"w_in": "up_proj", "w_out": "down_proj"}  # (E, C, H) and (E, H, C) in both
MATRICES = ("attn.qkv", "attn.proj", "mlp.w_in", "mlp.w_out")  # what GPT-2 transposes
BIASED = ("ln_1", "ln_2", "ln_f", *MATRICES)  # what always has a bias in GPT-2
MASKS = re.compile(r".*\.attn\.(bias|masked_bias)")  # no weights: GPT-2's causal masks in older files


def to_hf(state):
    """Names of model.py -> those of modeling_nanokern.py. Raises ValueError of a name unknown here."""
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


def from_hf(state):
    """Names of modeling_nanokern.py -> those of model.py. Raises ValueError of a name unknown here."""
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


def to_gpt2(state):
    """Names of model.py, of a dense model with learned positions -> those of GPT-2, matrices the other way round, zeros
    for biases that are not there. Raises ValueError of a name that GPT-2 has no place for."""
    out = {}
    for name, tensor in state.items():
        new, module = _rename(name, "blocks.", GPT2, "transformer.h."), _module(name)
        turned = module in MATRICES and name.endswith(".weight")
        out[new] = tensor.t().contiguous() if turned else tensor
        bias = name.removesuffix("weight") + "bias"
        if module in BIASED and name.endswith(".weight") and bias not in state:
            out[new.removesuffix("weight") + "bias"] = tensor.new_zeros(len(tensor))
    return out


def from_gpt2(state):
    """Names of GPT-2, with or without `transformer.`, -> those of model.py with biases, matrices turned round. Causal
    masks, which old files hold, are left out. Raises ValueError of a name unknown here."""
    names = {new: old for old, new in GPT2.items()}
    out = {}
    for name, tensor in state.items():
        if MASKS.fullmatch(name):
            continue
        full = name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}"
        new = _rename(full, "transformer.h.", names, "blocks.")
        out[new] = tensor.t().contiguous() if _module(new) in MATRICES and new.endswith(".weight") else tensor
    return out


def _module(name):
    """blocks.3.attn.qkv.weight -> attn.qkv"""
    return re.sub(r"^blocks\.\d+\.", "", name).rpartition(".")[0]


def _rename(name, blocks, modules, new_blocks):
    """`name` with its module's name replaced by that of the table, `blocks` 3. by `new_blocks` 3."""
    layer = re.match(re.escape(blocks) + r"(\d+)\.", name)
    module, _, leaf = name[layer.end() if layer else 0 :].rpartition(".")
    if module not in modules:
        raise ValueError(f"{name}: no weight of that name is known here")
    return f"{new_blocks}{layer[1]}.{modules[module]}.{leaf}" if layer else f"{modules[module]}.{leaf}"
