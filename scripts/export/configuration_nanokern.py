"""The configuration of a nanoKERN model, for transformers. Copied into exports by scripts.export."""

from typing import Any

from transformers import PretrainedConfig


class NanoKernConfig(PretrainedConfig):
    """Sizes and variants of a nanoKERN model.

    The number of experts is not called `num_experts`: under that name vLLM computes the experts itself, as gated SiLU
    experts. These are GELU experts without a gate, so it has to run modeling_nanokern.py.

    Args:
        router: a key of ROUTERS in router.py. "dense" has one MLP of hidden width `intermediate_size` per block, any
            other `n_expert` experts of hidden width `moe_intermediate_size`, `num_experts_per_tok` per token.
        gate_scale: constant factor on all gates.
        pos: "learned" or "rope".
        bias: biases in LayerNorms, attention and dense MLP; experts have none.
    """

    model_type = "nanokern"
    keys_to_ignore_at_inference = ["past_key_values"]
    base_model_tp_plan = {
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.k_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
    }
    base_model_pp_plan = {
        "embed_tokens": (["input_ids"], ["inputs_embeds"]),
        "embed_positions": (["inputs_embeds"], ["inputs_embeds"]),
        "layers": (["hidden_states", "attention_mask"], ["hidden_states"]),
        "norm": (["hidden_states"], ["hidden_states"]),
    }

    def __init__(
        self,
        vocab_size: int = 50304,
        hidden_size: int = 768,
        num_hidden_layers: int = 12,
        num_attention_heads: int = 12,
        max_position_embeddings: int = 512,
        router: str = "kern",
        n_expert: int = 64,
        num_experts_per_tok: int = 8,
        moe_intermediate_size: int = 384,
        intermediate_size: int = 3072,
        gate_scale: float = 1.0,
        pos: str = "learned",
        bias: bool = False,
        dropout: float = 0.0,
        initializer_range: float = 0.02,
        use_cache: bool = True,
        tie_word_embeddings: bool = True,
        **kwargs: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.max_position_embeddings = max_position_embeddings
        self.router = router
        self.n_expert = n_expert
        self.num_experts_per_tok = num_experts_per_tok
        self.moe_intermediate_size = moe_intermediate_size
        self.intermediate_size = intermediate_size
        self.gate_scale = gate_scale
        self.pos = pos
        self.bias = bias
        self.dropout = dropout
        self.initializer_range = initializer_range
        self.use_cache = use_cache
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)  # pyrefly: ignore[unexpected-keyword]
