"""Weight names of model.py, of modeling_nanokern.py and of transformers' GPT-2, and how the first become the others.

model.py and GPT-2 have one matrix for queries, keys and values (qkv), modeling_nanokern.py has three. The w_in of a
gated MLP is its gate_proj above its up_proj. GPT-2 stores matrices transposed, as (in, out).
"""

import re
from collections.abc import Mapping

from torch import Tensor

MODULES = {  # of model.py: (of modeling_nanokern.py, of transformers' GPT-2); # stands for the layer
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
    "blocks.#.mlp.experts.w_in": ("model.layers.#.mlp.experts.up_proj", None),  # (E, C, H), a parameter; gated: 2H
    "blocks.#.mlp.experts.w_out": ("model.layers.#.mlp.experts.down_proj", None),  # (E, H, C)
}
HF = {name: hf for name, (hf, _) in MODULES.items()}
GPT2 = {name: gpt2 for name, (_, gpt2) in MODULES.items() if gpt2}
TRANSPOSED = re.compile(r"blocks\.\d+\.(attn\.(qkv|proj)|mlp\.w_(in|out))\.weight")  # (in, out) in GPT-2
BIASED = re.compile(rf"{TRANSPOSED.pattern}|(.*\.)?ln_.\.weight")  # of modules that always have a bias in GPT-2

BUFFERS = ("router.c", "selection_bias", "hash_table")  # of our routers, which classes of transformers lack

State = Mapping[str, Tensor]


def to_hf(state: State) -> dict[str, Tensor]:
    """Rename weights of model.py, all those of a model, to those of modeling_nanokern.py: views."""
    out = {}
    for name, tensor in state.items():
        new = _rename(name, HF)
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


def to_gpt2(state: State) -> dict[str, Tensor]:
    """Rename weights of a dense model with learned positions to GPT-2's: views, and zeros for biases it lacks."""
    out = {}
    for name, tensor in state.items():
        new = _rename(name, GPT2)
        out[new] = tensor.t() if TRANSPOSED.fullmatch(name) else tensor
        if BIASED.fullmatch(name) and name.removesuffix("weight") + "bias" not in state:
            out[new.removesuffix("weight") + "bias"] = tensor.new_zeros(len(tensor))
    return out


def _is_gated(name: str, state: State) -> bool:
    """Whether `name` is the w_in of an MLP or of experts, with twice as many pre-activations as activations."""
    if not name.endswith((".w_in", ".w_in.weight")):
        return False
    w_in, w_out = state[name], state[name.replace("w_in", "w_out")]
    return (w_in.shape[2] if w_in.dim() == 3 else len(w_in)) == 2 * w_out.shape[1]


def _rename(name: str, names: Mapping[str, str]) -> str:
    """Replace a parameter's name, or its module's, by that in `names`; keep the layer's number."""
    layer = re.search(r"\.\d+\.", name)
    general = name.replace(layer[0], ".#.", 1) if layer else name
    module, dot, leaf = (general, "", "") if general in names else general.rpartition(".")
    return (names[module] + dot + leaf).replace(".#.", layer[0] if layer else "")
