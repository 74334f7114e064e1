"""The GPT of nanoKERN's model.py for transformers: loading, generation, training.

Copied into exports by scripts.export, with attention.py, router.py and torch_grouped.py, which
trained the model. Shapes: B sequences, T positions, C = hidden_size, N = B·T tokens, E experts, K
experts per token, H their hidden width.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import eager_attention_forward
from transformers.utils import can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .attention import make_norm, normalize_heads, rotate  # pyrefly: ignore[missing-import]  (in the same folder of an export)
from .configuration_nanokern import NanoKernConfig
from .router import Router, find_spec, hash_table  # pyrefly: ignore[missing-import]
from .torch_grouped import ACTIVATIONS, expert_mlp  # pyrefly: ignore[missing-import]


class NanoKernAttention(nn.Module):
    """Causal self-attention, by any implementation that transformers knows."""

    def __init__(self, config: NanoKernConfig, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.scaling = self.head_dim**-0.5
        self.is_causal = True
        kv_heads = config.num_key_value_heads or config.num_attention_heads
        kv_size = kv_heads * self.head_dim
        # attention functions read it
        self.num_key_value_groups = config.num_attention_heads // kv_heads
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=config.bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=config.bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=config.bias)
        self.q_norm = self.k_norm = None
        if config.qk_norm != "off":
            per_head = config.qk_norm == "head"
            self.q_norm = make_norm(config, self.head_dim if per_head else config.hidden_size)
            self.k_norm = make_norm(config, self.head_dim if per_head else kv_size)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=config.bias)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        *,
        position_ids: Tensor,
        **kwargs: Any,
    ) -> Tensor:
        query = self.q_proj(hidden_states)  # (B, T, C)
        key = self.k_proj(hidden_states)  # (B, T, nkv·hs)
        value = self.v_proj(hidden_states)
        if self.q_norm is not None and self.k_norm is not None:
            query = normalize_heads(query, self.q_norm)
            key = normalize_heads(key, self.k_norm)
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query = query.view(shape).transpose(1, 2)  # (B, nh, T, hs)
        key = key.view(shape).transpose(1, 2)  # (B, nkv, T, hs)
        value = value.view(shape).transpose(1, 2)
        if self.config.pos == "rope":
            query = rotate(query, self.config.rope_base, position_ids)
            key = rotate(key, self.config.rope_base, position_ids)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        implementation = self.config._attn_implementation
        attend = ALL_ATTENTION_FUNCTIONS.get(implementation, eager_attention_forward)
        y, _ = attend(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.config.dropout if self.training else 0.0,
            scaling=self.scaling,
            position_ids=position_ids,
            **kwargs,
        )
        y = self.o_proj(y.reshape(*hidden_states.shape[:-1], -1))
        return F.dropout(y, self.config.dropout, self.training)


class NanoKernMLP(nn.Module):
    """A dense MLP."""

    def __init__(self, config: NanoKernConfig, hidden: int, bias: bool) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, hidden, bias=bias) if config.gated else None
        self.up_proj = nn.Linear(config.hidden_size, hidden, bias=bias)
        self.down_proj = nn.Linear(hidden, config.hidden_size, bias=bias)
        self.act_fn = ACTIVATIONS[config.hidden_act]

    def forward(self, hidden_states: Tensor, input_ids: Tensor | None = None) -> Tensor:
        up = self.up_proj(hidden_states)
        if self.gate_proj is None:
            return self.down_proj(self.act_fn(up))
        return self.down_proj(self.act_fn(self.gate_proj(hidden_states)) * up)


class NanoKernExperts(nn.Module):
    """E MLPs without bias, packed as in transformers, each matrix (in, out)."""

    def __init__(self, config: NanoKernConfig) -> None:
        super().__init__()
        E, C, H = config.n_expert, config.hidden_size, config.moe_intermediate_size
        self.gated = config.gated
        self.activation = config.hidden_act
        if self.gated:
            self.gate_up_proj = nn.Parameter(torch.empty(E, C, 2 * H))
        else:
            self.up_proj = nn.Parameter(torch.empty(E, C, H))
        self.down_proj = nn.Parameter(torch.empty(E, H, C))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """(N, C), (N, K) int64, (N, K) fp32 -> (N, C)."""
        x = hidden_states
        up = self.gate_up_proj if self.gated else self.up_proj
        down = self.down_proj
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x = x.to(dtype)
            up = up.to(dtype)
            down = down.to(dtype)
        return expert_mlp(x, up, down, top_k_weights, top_k_index, self.activation)


class NanoKernMoE(nn.Module):
    """A router, its experts, and shared experts, which every token uses."""

    def __init__(self, config: NanoKernConfig, layer_idx: int) -> None:
        super().__init__()
        spec = find_spec(config.router)
        assert spec is not None  # dense models have no MoE
        E, K = config.n_expert, config.num_experts_per_tok
        table = None
        if layer_idx < config.n_dense_layer + config.n_hash_layer:
            table = hash_table(config.vocab_size, E, K, seed=layer_idx)
        self.router = Router(config.hidden_size, E, K, spec, config.gate_scale, table)
        self.experts = NanoKernExperts(config)
        shared = config.n_shared_expert * config.moe_intermediate_size
        self.shared_experts = NanoKernMLP(config, shared, bias=False) if shared else None

    def forward(self, hidden_states: Tensor, input_ids: Tensor | None = None) -> Tensor:
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])  # (N, C)
        if input_ids is None and self.router.hash_table is not None:
            raise ValueError(
                "inputs_embeds alone: hash layers choose experts by token id; "
                "give input_ids instead"
            )
        routing = self.router(tokens, ids=input_ids)
        y = self.experts(tokens, routing.experts, routing.weights)
        if self.shared_experts is not None:
            y = y + self.shared_experts(tokens)
        return y.view_as(hidden_states)


class NanoKernDecoderLayer(GradientCheckpointingLayer):
    """One block: attention, then MLP or MoE, each after a norm."""

    def __init__(self, config: NanoKernConfig, layer_idx: int) -> None:
        super().__init__()
        self.input_layernorm = make_norm(config, config.hidden_size)
        self.self_attn = NanoKernAttention(config, layer_idx)
        self.post_attention_layernorm = make_norm(config, config.hidden_size)
        if find_spec(config.router) is None or layer_idx < config.n_dense_layer:
            self.mlp = NanoKernMLP(config, config.intermediate_size, config.bias)
        else:
            self.mlp = NanoKernMoE(config, layer_idx)
        self.dropout = config.dropout

    def forward(
        self, hidden_states: Tensor, input_ids: Tensor | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """(B, T, C), (B, T) -> (B, T, C). NanoKernAttention gets the other arguments."""
        x = hidden_states
        x = x + self.self_attn(self.input_layernorm(x), *args, **kwargs)
        y = self.mlp(self.post_attention_layernorm(x), input_ids)
        return x + F.dropout(y, self.dropout, self.training)


class NanoKernPreTrainedModel(PreTrainedModel):
    """Attributes of both models below that transformers reads."""

    config: NanoKernConfig  # pyrefly: ignore[bad-override-mutable-attribute]  (as in transformers)
    config_class = NanoKernConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["NanoKernDecoderLayer"]
    _skip_keys_device_placement = ["past_key_values"]
    _keep_in_fp32_modules_strict = ["router"]  # as in training, for any dtype of other weights
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_attention_backend = True
    _can_record_outputs = {"hidden_states": NanoKernDecoderLayer}

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, NanoKernExperts):
            for weight in module.parameters():
                nn.init.normal_(weight, std=self.config.initializer_range)


class NanoKernModel(NanoKernPreTrainedModel):
    """The model without its LM head."""

    def __init__(self, config: NanoKernConfig) -> None:
        if config.qk_norm == "all":  # a norm over all heads cannot be split between devices
            plan = dict(NanoKernConfig.base_model_tp_plan or {})
            for name in list(plan):
                if ".self_attn." in name:
                    del plan[name]
            config.base_model_tp_plan = plan  # pyrefly: ignore[read-only]
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embed_positions = None
        if config.pos == "learned":
            self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.layers = nn.ModuleList(
            NanoKernDecoderLayer(config, i) for i in range(config.num_hidden_layers)
        )
        self.norm = make_norm(config, config.hidden_size)
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Compute the last hidden states (B, T, C).

        Args:
            input_ids: (B, T) int64. Give these or `inputs_embeds`.
            attention_mask: (B, S), 0 where a row is padded.
            position_ids: (B, T); by default 0 at a row's first token after padding on the left.
            past_key_values: the cache.
            inputs_embeds: (B, T, C).
            use_cache: return a cache.
            **kwargs: passed on to the attention, or read by transformers (output_hidden_states).
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        start = past_key_values.get_seq_length() if past_key_values is not None else 0
        columns = torch.arange(start, start + x.shape[1], device=x.device)  # (T,) in the cache
        if position_ids is None:
            position_ids = columns[None]
            # from a row's first token, not its padding
            if attention_mask is not None and attention_mask.dim() == 2:
                positions = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)
                position_ids = positions[:, -len(columns) :]
        mask = create_causal_mask(
            self.config,
            x,
            attention_mask,
            past_key_values=past_key_values,
            position_ids=position_ids,
        )
        if self.embed_positions is not None:
            x = x + self.embed_positions(position_ids)
        x = F.dropout(x, self.config.dropout, self.training)
        for layer in self.layers:
            x = layer(
                x,
                input_ids,
                mask,
                past_key_values=past_key_values,
                position_ids=position_ids,
                **kwargs,
            )
        return BaseModelOutputWithPast(
            last_hidden_state=self.norm(x), past_key_values=past_key_values if use_cache else None
        )


class NanoKernForCausalLM(NanoKernPreTrainedModel, GenerationMixin):
    """The model with its LM head, for generation and training."""

    _tp_plan = {"lm_head": "colwise_rep"}
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: NanoKernConfig) -> None:
        super().__init__(config)
        self.model = NanoKernModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Compute logits, and the loss if there are labels.

        Args:
            input_ids: this and the next arguments are described in NanoKernModel.
            attention_mask: see there.
            position_ids: see there.
            past_key_values: see there.
            inputs_embeds: see there.
            labels: (B, T) int64, the input ids; they are shifted here. -100 is ignored.
            use_cache: see NanoKernModel.
            logits_to_keep: number of last positions to compute logits at, 0 for all; or positions.
            **kwargs: passed on to the model and the loss.
        """
        outputs = self.model(
            input_ids,
            attention_mask,
            position_ids,
            past_key_values,
            inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss, logits, outputs.past_key_values, outputs.hidden_states)
