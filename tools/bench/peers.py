"""Other projects' models of a config's shape, for `tools.bench step --peer NAME`."""

import importlib.util
from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from configure.schema import Model
from runtime import RunError


class Olmoe(nn.Module):
    """transformers' OlmoeForCausalLM: SwiGLU experts by `F.grouped_mm`, without a balance loss."""

    def __init__(self, config: Model) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        super().__init__()
        settings = AutoConfig.for_model(
            "olmoe",
            vocab_size=config.vocab_size,
            hidden_size=config.n_embd,
            num_hidden_layers=config.n_layer,
            num_attention_heads=config.n_head,
            num_key_value_heads=config.n_kv_head or config.n_head,
            max_position_embeddings=config.block_size,
            num_experts=config.n_expert,
            num_experts_per_tok=config.top_k,
            intermediate_size=config.expert_hidden,
            tie_word_embeddings=config.tie_embeddings,
            pad_token_id=None,
            eos_token_id=None,
        )
        self.model = AutoModelForCausalLM.from_config(
            settings, experts_implementation="grouped_mm", attn_implementation="sdpa"
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The mean loss of tokens x with targets y, (B, T) each."""
        logits = self.model(x, use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), y.flatten())


class NanoGPT(nn.Module):
    """nanoGPT's own model.py without biases, if it lies on the path as nanogpt.py.

    Its MLP has 4 * n_embd hidden units, its positions are learned, its embeddings tied.
    """

    def __init__(self, config: Model) -> None:
        import nanogpt  # pyrefly: ignore[missing-import]

        super().__init__()
        settings = nanogpt.GPTConfig(
            block_size=config.block_size,
            vocab_size=config.vocab_size,
            n_layer=config.n_layer,
            n_head=config.n_head,
            n_embd=config.n_embd,
            bias=False,
        )
        self.model = nanogpt.GPT(settings)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The mean loss of tokens x with targets y, (B, T) each."""
        return self.model(x, y)[1]


# {name: how to build it, the package that it needs}
PEERS: dict[str, tuple[Callable[[Model], nn.Module], str]] = {
    "olmoe": (Olmoe, "transformers"),
    "nanogpt": (NanoGPT, "nanogpt"),
}


def find_peer(name: str, config: Model) -> Callable[[Model], nn.Module]:
    """How to build a peer. Raises RunError if it has no such shape, or its package is missing."""
    hidden = (config.top_k + config.n_shared_expert) * config.expert_hidden
    if name == "nanogpt" and hidden != 4 * config.n_embd:
        raise RunError(
            f"--peer nanogpt: its MLPs have 4 * n_embd = {4 * config.n_embd} hidden units, these "
            f"{hidden} (top_k * expert_hidden); set --model.expert_hidden to compare like with like"
        )
    build, package = PEERS[name]
    if not importlib.util.find_spec(package):
        raise RunError(f"--peer {name}: no Python package {package} on the path")
    return build
