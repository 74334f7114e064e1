"""What a user would pick instead, for `scripts.bench step`: models of other makes in the shape of a config.

One function each, from the section [model] to a module whose forward(x, y) has a `.loss`. A gated expert has three
matrices and gets two thirds of our hidden width, so that a token meets as many weights; up to a multiple of 8, which
grouped_mm asks for: equal weights need an `expert_hidden` that is a multiple of 12. Their positions are their own:
learned ones of the plain GPT, rotary ones of transformers' models.
"""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.func import functional_call


class PlainGPT(nn.Module):
    """A dense GPT as nanoGPT has it: learned positions, biases, SDPA, full logits, and F.cross_entropy over them."""

    def __init__(self, config):
        super().__init__()
        self.config, C, H = config, config.n_embd, config.top_k * config.expert_hidden
        self.wte, self.wpe = nn.Embedding(config.vocab_size, C), nn.Embedding(config.block_size, C)
        names = ("ln_1", "qkv", "proj", "ln_2", "up", "down")
        sizes = ((C, None), (C, 3 * C), (C, C), (C, None), (C, H), (H, C))
        layer = [nn.LayerNorm(i) if o is None else nn.Linear(i, o) for _ in range(config.n_layer) for i, o in sizes]
        step = len(names)
        self.layers = nn.ModuleList(
            nn.ModuleDict(zip(names, layer[i : i + step], strict=True)) for i in range(0, len(layer), step)
        )
        self.ln_f, self.head = nn.LayerNorm(C), nn.Linear(C, config.vocab_size, bias=False)
        self.head.weight = self.wte.weight
        for weight in self.parameters():
            if weight.dim() > 1:
                nn.init.normal_(weight, std=config.init_std)

    def forward(self, x, y):
        B, T = x.shape
        nh = self.config.n_head
        h = self.wte(x) + self.wpe(torch.arange(T, device=x.device))
        for layer in self.layers:
            q, k, v = (part.view(B, T, nh, -1).transpose(1, 2) for part in layer["qkv"](layer["ln_1"](h)).chunk(3, -1))
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            h = h + layer["proj"](attended.transpose(1, 2).reshape(B, T, -1))
            h = h + layer["down"](F.gelu(layer["up"](layer["ln_2"](h))))
        logits = self.head(self.ln_f(h))
        return SimpleNamespace(loss=F.cross_entropy(logits.flatten(0, 1), y.flatten()))


class Labelled(nn.Module):
    """A model of transformers, which shifts labels itself. Its experts compute in the autocast dtype, as ours do:
    F.grouped_mm knows nothing of autocast, and would in float32."""

    def __init__(self, model):
        super().__init__()
        self.model, self.config = model, model.config

    def forward(self, x, y):
        device, cast = x.device.type, {}
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            cast = {name: weight.to(dtype) for name, weight in self.model.named_parameters() if weight.dim() == 3}
        return functional_call(self.model, cast, (x,), {"labels": x, "use_cache": False})


def mixture(name, experts):
    """Of transformers: its experts computed as `experts`, "eager" a loop, or "grouped_mm"."""

    def build(config):
        import transformers

        transformers.logging.set_verbosity_error()
        shape = {
            "vocab_size": config.vocab_size,
            "hidden_size": config.n_embd,
            "intermediate_size": -(-config.expert_hidden * 2 // 24) * 8,
            "num_hidden_layers": config.n_layer,
            "num_attention_heads": config.n_head,
            "num_key_value_heads": config.n_head,
            "max_position_embeddings": config.block_size,
            "num_experts_per_tok": config.top_k,
            "tie_word_embeddings": config.tie_embeddings,
            "experts_implementation": experts,
        }
        count = "num_local_experts" if name == "Mixtral" else "num_experts"
        model_config = getattr(transformers, f"{name}Config")(**shape, **{count: config.n_expert}, pad_token_id=None)
        return Labelled(getattr(transformers, f"{name}ForCausalLM")(model_config))

    return build


PEERS = {  # name: function; all but nanogpt need transformers
    "nanogpt": PlainGPT,
    "olmoe-eager": mixture("Olmoe", "eager"),
    "olmoe-grouped": mixture("Olmoe", "grouped_mm"),
    "mixtral-grouped": mixture("Mixtral", "grouped_mm"),
}
