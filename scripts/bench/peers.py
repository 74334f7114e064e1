"""Other implementations in the shape of a config, for `scripts.bench step`: a module whose forward(x, y) has a `.loss`.

A gated expert has three matrices and gets two thirds of the hidden width of ours without a gate, so that a token meets
as many weights, rounded up to a multiple of 8, which grouped_mm asks for: weights are equal if `expert_hidden` is a
multiple of 12. Positions are learned in the plain GPT and rotary in transformers' OLMoE.
"""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from attention import kv_heads
from configure.schema import Model


class PlainGPT(nn.Module):
    """A dense GPT as nanoGPT has it: learned positions, biases, SDPA, full logits, and F.cross_entropy over them."""

    def __init__(self, config: Model) -> None:
        super().__init__()
        C, H, self.n_head = config.n_embd, config.top_k * config.expert_hidden, config.n_head
        self.wte, self.wpe = nn.Embedding(config.vocab_size, C), nn.Embedding(config.block_size, C)
        self.layers = nn.ModuleList()
        for _ in range(config.n_layer):
            attention = {"ln_1": nn.LayerNorm(C), "qkv": nn.Linear(C, 3 * C), "proj": nn.Linear(C, C)}
            mlp = {"ln_2": nn.LayerNorm(C), "up": nn.Linear(C, H), "down": nn.Linear(H, C)}
            self.layers.append(nn.ModuleDict(attention | mlp))
        self.ln_f, self.head = nn.LayerNorm(C), nn.Linear(C, config.vocab_size, bias=False)
        self.head.weight = self.wte.weight
        for weight in self.parameters():
            if weight.dim() > 1:
                nn.init.normal_(weight, std=config.init_std)

    def forward(self, x: Tensor, y: Tensor) -> SimpleNamespace:
        """Compute the loss of tokens x (B, T) int64 with targets y (B, T)."""
        B, T = x.shape
        h = self.wte(x) + self.wpe(torch.arange(T, device=x.device))
        layers: Any = self.layers
        for layer in layers:
            qkv = layer["qkv"](layer["ln_1"](h)).view(B, T, 3, self.n_head, -1)
            attended = F.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4), is_causal=True)  # (B, nh, T, hs)
            h = h + layer["proj"](attended.transpose(1, 2).reshape(B, T, -1))
            h = h + layer["down"](F.gelu(layer["up"](layer["ln_2"](h))))
        logits = self.head(self.ln_f(h))
        return SimpleNamespace(loss=F.cross_entropy(logits.flatten(0, 1), y.flatten()))


class Labelled(nn.Module):
    """A model of transformers, which shifts labels itself.

    Its experts compute in the autocast dtype, as ours do: autocast does not know F.grouped_mm, which would compute in
    float32.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, y: Tensor) -> Any:
        """Compute the loss of tokens x (B, T) int64; y is not used."""
        device, cast = x.device.type, {}
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            cast = {name: weight.to(dtype) for name, weight in self.model.named_parameters() if weight.dim() == 3}
        return functional_call(self.model, cast, (x,), {"labels": x, "use_cache": False})


def build_olmoe(config: Model, experts: str) -> nn.Module:
    """Build transformers' OLMoE, with experts computed as `experts`: "eager", a loop, or "grouped_mm"."""
    import transformers

    transformers.logging.set_verbosity_error()
    settings = transformers.OlmoeConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.n_embd,
        intermediate_size=config.expert_hidden if config.gated else -(-config.expert_hidden * 2 // 24) * 8,
        num_hidden_layers=config.n_layer,
        num_attention_heads=config.n_head,
        num_key_value_heads=kv_heads(config),
        max_position_embeddings=config.block_size,
        num_experts_per_tok=config.top_k,
        num_experts=config.n_expert,
        tie_word_embeddings=config.tie_embeddings,
        pad_token_id=None,
        experts_implementation=experts,  # pyrefly: ignore[unexpected-keyword]
    )
    return Labelled(transformers.OlmoeForCausalLM(settings))


PEERS: dict[str, Callable[[Model], nn.Module]] = {  # all but nanogpt need transformers
    "nanogpt": PlainGPT,
    "olmoe-eager": partial(build_olmoe, experts="eager"),
    "olmoe-grouped": partial(build_olmoe, experts="grouped_mm"),
}
