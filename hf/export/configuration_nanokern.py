"""The configuration of a nanoKERN model, for transformers.

Copied into exports by scripts.export.
"""

from transformers import PretrainedConfig


class NanoKernConfig(PretrainedConfig):
    """Sizes and variants of a nanoKERN model.

    The number of experts is `n_expert`. As `num_experts` or `num_local_experts` it can be read only
    if output_router_logits is true, for trainers: under these names vLLM would compute the experts
    itself, as gated SiLU experts with weights in its own layout. It has to run modeling_nanokern.py
    instead, so serve a model with output_router_logits = false.

    Args:
        router: a name or formula, see `router.find_spec`. "dense" has one MLP of hidden
            width `intermediate_size` per block. Others have `n_expert` experts of hidden width
            `moe_intermediate_size`, `num_experts_per_tok` per token, and `n_shared_expert` that
            every token uses. In the first `n_hash_layer` blocks the token's id chooses.
        router_groups: groups of experts; a token's are in its best `router_group_k` groups, see
            `router.leave_best_groups`.
        gated: MLPs and experts compute hidden_act(gate) * up.
        norm: "layernorm" or "rmsnorm", with `norm_eps`.
        qk_norm: norm of queries and keys: "off", over each "head", or over "all" heads.
        num_key_value_heads: None: as many as of queries.
        gate_scale: constant factor on all gates.
        pos: "learned" or "rope".
        rope_base: base of the rotary angles.
        output_router_logits: return router logits and the balance loss, see
            `NanoKernForCausalLM.forward`.
        router_aux_loss_coef: weight of the balance loss in the loss; in an export that of the run,
            train.balance_loss_coef.
        bias: biases in LayerNorms, attention and dense MLP; experts have none.
    """

    model_type = "nanokern"
    # the name of the cache since transformers 5.24, and before
    keys_to_ignore_at_inference = ["cache", "past_key_values"]
    vocab_size: int = 50304
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    num_key_value_heads: int | None = None
    qk_norm: str = "off"
    max_position_embeddings: int = 512
    router: str = "kern"
    n_expert: int = 64
    num_experts_per_tok: int = 8
    moe_intermediate_size: int = 384
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    gated: bool = False
    n_shared_expert: int = 0
    n_hash_layer: int = 0
    router_groups: int = 1
    router_group_k: int = 1
    gate_scale: float = 1.0
    norm: str = "layernorm"
    norm_eps: float = 1e-5
    pos: str = "learned"
    rope_base: float = 10000.0
    bias: bool = False
    dropout: float = 0.0
    initializer_range: float = 0.02
    use_cache: bool = True
    output_router_logits: bool = False
    router_aux_loss_coef: float = 0.0
    tie_word_embeddings: bool = True

    @property
    def num_experts(self) -> int:
        if not self.output_router_logits:
            raise AttributeError("num_experts: set output_router_logits = True, or read n_expert")
        return self.n_expert

    @property
    def num_local_experts(self) -> int:
        return self.num_experts
