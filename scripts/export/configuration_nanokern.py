"""What a nanoKERN model is, for transformers. Copied into exports by scripts.export."""

from transformers import PretrainedConfig


class NanoKernConfig(PretrainedConfig):
    """`router` is a key of ROUTERS in router.py: "dense" for an MLP of hidden width `intermediate_size`, any other for
    `n_expert` experts of hidden width `moe_intermediate_size`, `num_experts_per_tok` a token. `pos`: "learned" or
    "rope". `bias`: biases in LayerNorms, attention and dense MLP; experts have none.

    The number of experts is not called `num_experts`: by that name vLLM knows mixtures whose experts it computes
    itself, as gated SiLU ones. These are plain GELU ones, so it is to run modeling_nanokern.py as it stands.
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
        vocab_size=50304,
        hidden_size=768,
        num_hidden_layers=12,
        num_attention_heads=12,
        max_position_embeddings=512,
        router="kern",
        n_expert=64,
        num_experts_per_tok=8,
        moe_intermediate_size=384,
        intermediate_size=3072,
        gate_scale=1.0,
        pos="learned",
        bias=False,
        dropout=0.0,
        initializer_range=0.02,
        use_cache=True,
        tie_word_embeddings=True,
        **kwargs,
    ):
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
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)
