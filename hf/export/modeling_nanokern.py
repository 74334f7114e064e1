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
from transformers.modeling_outputs import MoeCausalLMOutputWithPast, MoeModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import eager_attention_forward
from transformers.utils import can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .attention import make_norm, normalize_heads, rotate  # pyrefly: ignore[missing-import]  (in the same folder of an export)
from .configuration_nanokern import NanoKernConfig
from .router import EPS, Router, find_spec, hash_table  # pyrefly: ignore[missing-import]
from .torch_grouped import ACTIVATIONS, expert_mlp  # pyrefly: ignore[missing-import]

# since transformers 5.24 the argument, and the output, past_key_values has the name cache
CACHE = "cache" if hasattr(MoeModelOutputWithPast, "cache") else "past_key_values"

# the sizes of its products depend on the loads: traced, the graph would break into pieces
expert_mlp = torch.compiler.disable(expert_mlp)


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
        *,
        position_ids: Tensor,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """(B, T, C) -> (B, T, C), and attention probabilities (B, nh, T, S) if eager."""
        cache = kwargs.pop(CACHE, None)
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
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        implementation = self.config._attn_implementation
        attend = ALL_ATTENTION_FUNCTIONS.get(implementation, eager_attention_forward)
        y, probabilities = attend(
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
        return F.dropout(y, self.config.dropout, self.training), probabilities


class NanoKernMLP(nn.Module):
    """A dense MLP."""

    def __init__(self, config: NanoKernConfig, hidden: int, bias: bool) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, hidden, bias=bias) if config.gated else None
        self.up_proj = nn.Linear(config.hidden_size, hidden, bias=bias)
        self.down_proj = nn.Linear(hidden, config.hidden_size, bias=bias)
        self.act_fn = ACTIVATIONS[config.hidden_act]

    def forward(self, hidden_states: Tensor) -> Tensor:
        up = self.up_proj(hidden_states)
        if self.gate_proj is None:
            return self.down_proj(self.act_fn(up))
        return self.down_proj(self.act_fn(self.gate_proj(hidden_states)) * up)


class NanoKernExperts(nn.Module):
    """E MLPs without bias, packed as in transformers, each matrix (in, out)."""

    is_transposed = True  # PEFT reads it: the order is (in, out)

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
        if layer_idx < config.n_hash_layer:
            table = hash_table(config.vocab_size, E, K, seed=layer_idx)
        self.chooses_by_id = table is not None
        groups = (config.router_groups, config.router_group_k)
        self.router = Router(config.hidden_size, E, K, spec, config.gate_scale, table, *groups)
        self.experts = NanoKernExperts(config)
        shared = config.n_shared_expert * config.moe_intermediate_size
        self.shared_experts = NanoKernMLP(config, shared, bias=False) if shared else None

    def forward(
        self, hidden_states: Tensor, input_ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(B, T, C), (B, T) -> (B, T, C), and router logits (N, E)."""
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])  # (N, C)
        if input_ids is None and self.chooses_by_id:
            raise ValueError(
                "inputs_embeds alone: hash layers choose experts by token id; "
                "give input_ids instead"
            )
        routing = self.router(tokens, ids=input_ids)
        y = self.experts(tokens, routing.experts, routing.weights)
        if self.shared_experts is not None:
            y = y + self.shared_experts(tokens)
        return y.view_as(hidden_states), routing.logits


class NanoKernDecoderLayer(GradientCheckpointingLayer):
    """One block: attention, then MLP or MoE, each after a norm."""

    def __init__(self, config: NanoKernConfig, layer_idx: int) -> None:
        super().__init__()
        self.input_layernorm = make_norm(config, config.hidden_size)
        self.self_attn = NanoKernAttention(config, layer_idx)
        self.post_attention_layernorm = make_norm(config, config.hidden_size)
        self.is_dense = find_spec(config.router) is None
        if self.is_dense:
            self.mlp = NanoKernMLP(config, config.intermediate_size, config.bias)
        else:
            self.mlp = NanoKernMoE(config, layer_idx)
        self.dropout = config.dropout

    def forward(
        self, hidden_states: Tensor, input_ids: Tensor | None, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """(B, T, C), (B, T) -> (B, T, C), and router logits (N, E) unless it is dense.

        NanoKernAttention gets the other arguments. The logits are returned, not caught inside the
        block, so that they have a gradient under any kind of gradient checkpointing.
        """
        y, _ = self.self_attn(self.input_layernorm(hidden_states), *args, **kwargs)
        x = hidden_states + y
        y = self.post_attention_layernorm(x)
        router_logits = None
        if self.is_dense:
            y = self.mlp(y)
        else:
            y, router_logits = self.mlp(y, input_ids)
        return x + F.dropout(y, self.dropout, self.training), router_logits


class NanoKernPreTrainedModel(PreTrainedModel):
    """Attributes of both models below that transformers reads."""

    config: NanoKernConfig  # pyrefly: ignore[bad-override-mutable-attribute]  (as in transformers)
    config_class = NanoKernConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["NanoKernDecoderLayer"]
    _skip_keys_device_placement = [CACHE]
    # As in training, for any dtype of other weights. Not "router", whose hash_table is int64.
    _keep_in_fp32_modules_strict = [
        "router.weight",
        "router.bias",
        "router.gamma",
        "router.c",
        "router.selection_bias",
    ]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_record_outputs = {
        "hidden_states": NanoKernDecoderLayer,
        "router_logits": OutputRecorder(NanoKernDecoderLayer, index=1),
        "attentions": OutputRecorder(NanoKernAttention, index=1),
    }

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, NanoKernExperts):
            for weight in module.parameters():
                nn.init.normal_(weight, std=self.config.initializer_range)

    def resize_token_embeddings(
        self,
        new_num_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        mean_resizing: bool = True,
    ) -> nn.Embedding:
        """As in transformers; new ids are generated, too."""
        n_id = self.config.vocab_size
        if self.config.n_hash_layer and new_num_tokens not in (None, n_id):
            raise ValueError(f"hash layers choose experts for {n_id} ids alone; keep this number")
        embeddings = super().resize_token_embeddings(
            new_num_tokens, pad_to_multiple_of, mean_resizing
        )
        if new_num_tokens is not None and self.can_generate():
            suppressed = self.generation_config.suppress_tokens or []
            kept = [i for i in suppressed if new_num_tokens <= i < self.config.vocab_size]
            self.generation_config.suppress_tokens = kept or None
        return embeddings


class NanoKernModel(NanoKernPreTrainedModel):
    """The model without its LM head."""

    def __init__(self, config: NanoKernConfig) -> None:
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
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> MoeModelOutputWithPast:
        """Compute the last hidden states (B, T, C).

        Args:
            input_ids: (B, T) int64. Give these or `inputs_embeds`.
            attention_mask: (B, S), 0 where a row is padded.
            position_ids: (B, T); by default 0 at a row's first token after padding on the left.
            cache: keys and values of the tokens before these.
            inputs_embeds: (B, T, C).
            use_cache: return a cache.
            past_key_values: the name of `cache` before transformers 5.24.
            **kwargs: passed on to the attention, or read by transformers (output_hidden_states,
                output_router_logits; output_attentions with eager attention).

        Raises:
            TypeError: a cache has another name.
        """
        cache = past_key_values if cache is None else cache
        for name, value in kwargs.items():
            if isinstance(value, Cache):  # ignored, the text would be wrong without a word
                raise TypeError(f"{name}: this model knows a cache by the name of cache")
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        start = cache.get_seq_length() if cache is not None else 0
        columns = torch.arange(x.shape[1], device=x.device) + start  # (T,) in the cache
        if position_ids is None:
            position_ids = columns[None]
            # from a row's first token, not its padding
            if attention_mask is not None and attention_mask.dim() == 2:
                positions = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)
                position_ids = positions[:, -len(columns) :]
        named: dict[str, Any] = {CACHE: cache, "position_ids": position_ids}
        mask = create_causal_mask(self.config, x, attention_mask, **named)
        if self.embed_positions is not None:
            x = x + self.embed_positions(position_ids)
        x = F.dropout(x, self.config.dropout, self.training)
        for layer in self.layers:
            x, _ = layer(x, input_ids, mask, **named, **kwargs)
        return MoeModelOutputWithPast(self.norm(x), cache if use_cache else None)


def load_balancing_loss(router: Router, logits: Tensor, counted: Tensor) -> Tensor:
    """Switch load-balancing loss of a layer, E · Σ_e f_e P_e: 1 when balanced, E at worst.

    As in nanoKERN's training (train.balance_loss_scope = "global"): f_e is an expert's share of all
    choices of the batch. P_e is the mean over its tokens of the routing scores, negative ones set
    to 0, normalised to sum to 1 per token. (transformers' mixtures take a softmax of the logits
    for P_e, their f_e sums to K, and layers share one f_e and P_e.)

    Args:
        router: of the layer; it chooses experts by scores.
        logits: (N, E). They carry the gradient.
        counted: (N,) 1 for tokens, 0 for padding.
    """
    with torch.autocast(logits.device.type, enabled=False):
        routing = router.choose(logits)
        scores = routing.scores.relu()  # (N, E)
        distribution = scores / (scores.sum(-1, keepdim=True) + EPS)
        counted = counted.to(logits)
        probability = counted @ distribution / counted.sum()  # (E,)
        choices = counted.repeat_interleave(router.top_k)
        loads = torch.zeros_like(probability)
        loads = loads.scatter_add(0, routing.experts.flatten(), choices)  # (E,)
        return len(loads) * (loads / loads.sum() * probability).sum()


def share_of_targets(
    labels: Tensor, num_items_in_batch: Tensor | int | None = None, **kwargs: Any
) -> Tensor | float:
    """The share of a step's targets that `labels` (B, T) have, by which the loss is multiplied.

    Trainer gives their number in all micro-batches and ranks, and adds up the losses of these. A
    loss that is a mean of its own must be divided like the cross-entropy.
    """
    if num_items_in_batch is None:
        return 1.0
    targets = kwargs.get("shift_labels")
    targets = labels[:, 1:] if targets is None else targets
    count = (targets != -100).sum().to(labels.device)
    return count / torch.as_tensor(num_items_in_batch, device=labels.device)


class NanoKernForCausalLM(NanoKernPreTrainedModel, GenerationMixin):
    """The model with its LM head, for generation and training."""

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
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_router_logits: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> MoeCausalLMOutputWithPast:
        """Compute logits, and the loss if there are labels.

        Args:
            input_ids: this and the next arguments are described in NanoKernModel.
            attention_mask: see there.
            position_ids: see there.
            cache: see there.
            inputs_embeds: see there.
            labels: (B, T) int64, the input ids; they are shifted here. -100 is ignored.
            use_cache: see NanoKernModel.
            output_router_logits: return also router_logits, (N, E) of each layer with experts, and
                aux_loss, see `compute_aux_loss`; aux_loss times config.router_aux_loss_coef is then
                added to the loss, in proportion to `share_of_targets`. Default:
                config.output_router_logits.
            logits_to_keep: number of last positions to compute logits at, 0 for all; or positions.
            **kwargs: passed on to the model and the loss.
        """
        if output_router_logits is None:
            output_router_logits = self.config.output_router_logits
        outputs = self.model(
            input_ids,
            attention_mask,
            position_ids,
            cache,
            inputs_embeds,
            use_cache=use_cache,
            output_router_logits=output_router_logits,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
        aux_loss = None
        if output_router_logits:
            hidden_states = outputs.last_hidden_state
            aux_loss = self.compute_aux_loss(outputs.router_logits, hidden_states, attention_mask)
            if labels is not None and loss is not None:
                share = share_of_targets(labels.to(loss.device), **kwargs)
                loss = loss + share * self.config.router_aux_loss_coef * aux_loss.to(loss.device)
        return MoeCausalLMOutputWithPast(
            loss=loss,
            aux_loss=aux_loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            router_logits=outputs.router_logits,
            **{CACHE: getattr(outputs, CACHE)},
        )

    def compute_aux_loss(
        self,
        router_logits: tuple[Tensor, ...],
        hidden_states: Tensor,
        attention_mask: Tensor | None,
    ) -> Tensor:
        """Mean of `load_balancing_loss` over the layers that choose experts by scores, ().

        Hash layers do not. Where all layers are hash layers or dense, it is 0.
        """
        x = hidden_states
        counted = torch.ones_like(x[..., 0])  # (B, T)
        if attention_mask is not None and attention_mask.dim() == 2:
            counted = attention_mask[:, -x.shape[1] :]  # the mask has columns of the cache, too
        losses = []
        for layer, logits in zip(self.model.layers, router_logits, strict=False):  # dense: none
            if not layer.mlp.chooses_by_id:
                router = getattr(layer.mlp.router, "base_layer", layer.mlp.router)  # PEFT's wrapper
                loss = load_balancing_loss(router, logits, counted.flatten())
                losses.append(loss.to(x.device))
        return torch.stack(losses).mean() if losses else x.new_zeros(())
