"""The configuration of a nanoKERN model, for transformers. Copied into exports by scripts.export."""

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
        **{f"layers.*.self_attn.{part}_proj": "colwise" for part in "qkv"},
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
    }
    vocab_size: int = 50304
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    max_position_embeddings: int = 512
    router: str = "kern"
    n_expert: int = 64
    num_experts_per_tok: int = 8
    moe_intermediate_size: int = 384
    intermediate_size: int = 3072
    gate_scale: float = 1.0
    pos: str = "learned"
    bias: bool = False
    dropout: float = 0.0
    initializer_range: float = 0.02
    use_cache: bool = True
    tie_word_embeddings: bool = True
