"""The GPT of the paper: decoder-only, pre-LayerNorm, with a dense MLP or a mixture of experts (MoE) in every block.

The paper leaves most of the architecture open; docs/paper.md lists each choice made here. Shapes in comments: B
sequences, T positions, C = n_embd, nh heads of size hs, N = B·T tokens, E experts, K = top_k, H = expert_hidden,
V = vocab_size, L = n_layer.
"""

import math
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from configure.schema import Model as ModelConfig
from gate_norm import gate_scale
from kernels import expert_mlp
from kernels.cross_entropy import linear_cross_entropy
from router import ROUTERS, Router, entropy, expert_loads, token_distribution, z_loss


class Stats(NamedTuple):
    """What a forward pass reports about its routers, one row per layer (L = 0 rows for a dense model)."""

    loads: Tensor  # (L, B, E) int64, tokens of each sequence that chose each expert
    probability: Tensor  # (L, B, E) mean over a sequence's tokens of the normalised scores, with gradient
    z_loss: Tensor  # (L,) router z-loss
    entropy: Tensor  # (L,) nats, mean over tokens of the entropy of the normalised scores
    zero_gates: Tensor  # (L,) fraction of the N·K gates that are exactly 0
    gate_square: Tensor  # (L,) mean over tokens of Σ g², the sum over a token's K gates
    gate_sum: Tensor  # (L,) mean over tokens of Σ g


class Output(NamedTuple):
    """What a forward pass of GPT returns."""

    logits: Tensor | None  # (B, 1, V) of the last position; None if there were targets
    loss: Tensor | None  # () cross-entropy alone, nats per token; None without targets
    stats: Stats
    losses: Tensor | None  # (B,) mean cross-entropy of each sequence, without gradient; None without targets


class KVCache:
    """Keys and values of the tokens so far, so that each new token costs one token's work. For evaluation only.

    Rows of unequal length are padded on the left, so row b begins at column start[b], or on the right, where later
    columns attend to nothing real. A forward pass of T tokens calls `prepare` once and `update` once per layer.
    """

    def __init__(self, config: ModelConfig, start: Tensor, capacity: int, dtype: torch.dtype = torch.float32) -> None:
        """Allocate `capacity` columns (S) for len(start) rows; `start` (B,) int64 is on the model's device."""
        self.start, self.length, self.layer, self.block_size = start, 0, 0, config.block_size
        shape = (config.n_layer, 2, len(start), config.n_head, capacity, config.n_embd // config.n_head)
        self.columns = torch.empty(shape, dtype=dtype, device=start.device)  # (L, 2, B, nh, S, hs)

    def prepare(self, T: int) -> None:
        """Add T columns: set their positions (B, T) and the mask (B, 1, T, S) of columns that each may attend to."""
        device = self.start.device
        new = self.length + torch.arange(T, device=device)  # (T,)
        old = torch.arange(self.length + T, device=device)  # (S,)
        self.positions = (new - self.start[:, None]).clamp(0, self.block_size - 1)  # only padding is clamped
        real = old >= self.start[:, None, None]  # (B, 1, S)
        own = old == new[:, None]  # (T, S): padding attends to itself, since attention to nothing gives NaN
        self.mask = (real & (old <= new[:, None]) | own)[:, None]  # (B, 1, T, S)
        self.length, self.layer = self.length + T, 0

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Store the next layer's keys and values (B, nh, T, hs) and return those of all columns, (B, nh, S, hs)."""
        first = self.length - k.shape[2]
        layer = self.columns[self.layer]
        layer[0, :, :, first : self.length], layer[1, :, :, first : self.length] = k, v
        self.layer += 1
        return layer[..., : self.length, :].unbind(0)

    def select_rows(self, index: Tensor, capacity: int) -> "KVCache":
        """Copy the rows `index` (n,) int64, repeats allowed, to a new cache of `capacity` columns."""
        copy = KVCache.__new__(KVCache)
        copy.start, copy.length, copy.layer, copy.block_size = self.start[index], self.length, 0, self.block_size
        L, _, _, nh, _, hs = self.columns.shape
        copy.columns = self.columns.new_empty(L, 2, len(index), nh, capacity, hs)
        copy.columns[..., : self.length, :] = self.columns[:, :, index, :, : self.length]
        return copy


def rotate(x: Tensor, positions: Tensor | None = None) -> Tensor:
    """Rotary position embedding, base 10000; channels i and i + hs/2 of a head are a pair.

    Args:
        x: (B, nh, T, hs) queries or keys.
        positions: (B, T) int64; None: 0, 1, … T - 1 in every row.

    Returns:
        (B, nh, T, hs) in x's dtype.

    Source: RoFormer (arXiv 2104.09864).
    """
    T, half = x.shape[-2], x.shape[-1] // 2
    frequency = 10000 ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)  # (hs/2,)
    if positions is None:
        positions = torch.arange(T, device=x.device)
    angle = positions[..., None, :, None].float() * frequency  # (B, 1, T, hs/2) or (1, T, hs/2)
    cos, sin = angle.cos(), angle.sin()
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.n_head = config.n_head
        self.dropout = config.dropout
        self.rope = config.pos == "rope"
        self.qkv = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)

    def forward(self, x: Tensor, past: KVCache | None = None) -> Tensor:
        B, T, C = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.n_head, C // self.n_head).permute(2, 0, 3, 1, 4)  # (B, nh, T, hs) each
        if self.rope:
            positions = None if past is None else past.positions
            q, k = rotate(q, positions), rotate(k, positions)
        if past is None:
            dropout = self.dropout if self.training else 0.0
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        else:
            y = F.scaled_dot_product_attention(q, *past.update(k, v), attn_mask=past.mask)
        y = self.proj(y.transpose(1, 2).reshape(B, T, C))  # heads side by side
        return F.dropout(y, self.dropout, self.training)


class MLP(nn.Module):
    """The dense baseline: hidden width K·H, as many active parameters as the K experts of a token."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden = config.top_k * config.expert_hidden
        self.w_in = nn.Linear(config.n_embd, hidden, bias=config.bias)
        self.w_out = nn.Linear(hidden, config.n_embd, bias=config.bias)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return self.w_out(F.gelu(self.w_in(x))), None


class Experts(nn.Module):
    """E MLPs as two stacked tensors. As separate parameters, an idle expert's would get no gradient and stall DDP."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        E, C, H = config.n_expert, config.n_embd, config.expert_hidden
        self.w_in = nn.Parameter(torch.empty(E, C, H))
        self.w_out = nn.Parameter(torch.empty(E, H, C))
        self.backend = config.backend

    def forward(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        return expert_mlp(x, self.w_in, self.w_out, weights, experts, self.backend)


class MoE(nn.Module):
    """Mixture of experts, paper eq. 5: Σ_m g_m(x) E_m(x) over the K experts the router chose. No token is dropped."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        spec = ROUTERS[config.router]
        assert spec is not None, "a dense model has no MoE"
        self.router = Router(config.n_embd, config.n_expert, config.top_k, spec, gate_scale(config))
        self.experts = Experts(config)

    def forward(self, x: Tensor) -> tuple[Tensor, Stats]:
        """Return the output (B, T, C) and the Stats of this layer, without their dimension L."""
        tokens = x.reshape(-1, x.shape[-1])  # (N, C)
        routing = self.router(tokens)
        y = self.experts(tokens, routing.weights, routing.experts)  # (N, C)
        loads = expert_loads(routing.experts.view(*x.shape[:2], -1), routing.scores.shape[-1])  # (B, E)
        distribution = token_distribution(routing)  # (N, E)
        probability = distribution.view(*x.shape[:2], -1).mean(1)  # (B, E)
        gates = routing.weights.detach()
        of_gates = ((gates == 0).float().mean(), gates.square().sum() / len(gates), gates.sum() / len(gates))
        return y.view_as(x), Stats(loads, probability, z_loss(routing), entropy(distribution), *of_gates)


class Block(nn.Module):
    """One transformer layer: x + attention(LN(x)), then x + MLP(LN(x)) or x + MoE(LN(x))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config) if ROUTERS[config.router] is None else MoE(config)
        self.dropout = config.dropout
        self.checkpointing = False  # activation checkpointing: keep only x, recompute the block in the backward pass

    def forward(self, x: Tensor, past: KVCache | None = None) -> tuple[Tensor, Stats | None]:
        if self.checkpointing and torch.is_grad_enabled():
            return checkpoint(self._forward, x, use_reentrant=False)
        return self._forward(x, past)

    def _forward(self, x: Tensor, past: KVCache | None = None) -> tuple[Tensor, Stats | None]:
        x = x + self.attn(self.ln_1(x), past)
        y, stats = self.mlp(self.ln_2(x))
        return x + F.dropout(y, self.dropout, self.training), stats


class GPT(nn.Module):
    """The language model. `config` may be any object with the attributes of `configure.schema.Model`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd) if config.pos == "learned" else None
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.lm_head = None if config.tie_embeddings else nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """As GPT-2: N(0, init_std²), residual projections divided by √(2L). LayerNorms and γ stay 1, biases 0."""
        std = self.config.init_std
        for name, p in self.named_parameters():
            if p.dim() > 1:
                residual = name.endswith(("attn.proj.weight", "w_out", "w_out.weight"))
                nn.init.normal_(p, std=std / math.sqrt(2 * self.config.n_layer) if residual else std)
            elif name.endswith("bias"):
                p.zero_()

    def forward(self, idx: Tensor, targets: Tensor | None = None, past: KVCache | None = None) -> Output:
        """Compute the loss of the targets, or the logits of the next token.

        Args:
            idx: (B, T) int64 token ids.
            targets: (B, T) int64, the token after each of idx.
            past: cache of the tokens before idx, with room for T more; idx is added to it.

        Raises:
            ValueError: T is more than block_size.
        """
        x, layers = self.hidden(idx, past)
        logits = loss = losses = None
        if targets is None:
            logits = self.logits(x[:, [-1]])  # (B, 1, V)
        else:
            x = self.ln_f(x).flatten(0, 1)  # (N, C)
            loss, losses = linear_cross_entropy(x, self.head, targets.flatten(), self.config.backend)
            losses = losses.view(idx.shape).mean(1)
        return Output(logits, loss, stack_stats(layers, idx.device), losses)

    def hidden(self, idx: Tensor, past: KVCache | None = None) -> tuple[Tensor, list[Stats | None]]:
        """Return the residual stream (B, T, C) after the last block, before ln_f, and the Stats of each block."""
        T = idx.shape[1]
        if T > self.config.block_size:
            raise ValueError(f"{T} tokens are more than the model's block_size of {self.config.block_size}")
        if past is not None:
            past.prepare(T)
        x = self.wte(idx)  # (B, T, C)
        if self.wpe is not None:
            x = x + self.wpe(torch.arange(T, device=idx.device) if past is None else past.positions)
        x = F.dropout(x, self.config.dropout, self.training)
        layers = []
        for block in self.blocks:
            x, stats = block(x, past)
            layers.append(stats)
        return x, layers

    @property
    def head(self) -> Tensor:
        """(V, C) weight of the LM head."""
        return self.wte.weight if self.lm_head is None else self.lm_head.weight

    def logits(self, x: Tensor) -> Tensor:
        """Logits (..., V) of the residual stream x (..., C) after the last block."""
        return F.linear(self.ln_f(x), self.head)


def stack_stats(layers: list[Stats | None], device: torch.device) -> Stats:
    """Stack the Stats of all layers to one with a row per layer; no rows if the layers are dense."""
    if layers[0] is None:
        none = torch.zeros(0, 0, 0, device=device)
        return Stats(none.long(), none, *torch.zeros(len(Stats._fields) - 2, 0, device=device))
    return Stats(*map(torch.stack, zip(*layers, strict=True)))


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of each parameter of GPT(config) by name, without allocating them."""
    with torch.device("meta"):
        return {name: tuple(p.shape) for name, p in GPT(config).named_parameters()}


def count_parameters(config: ModelConfig) -> tuple[int, int]:
    """Count (total, active) parameters; active ones include K of E experts. A tied embedding counts once."""
    C, H, E, K, bias = config.n_embd, config.expert_hidden, config.n_expert, config.top_k, config.bias
    fixed = config.vocab_size * C * (1 if config.tie_embeddings else 2)
    fixed += config.block_size * C if config.pos == "learned" else 0
    fixed += C + C * bias  # final LayerNorm
    layer = 4 * C * C + 2 * C + 6 * C * bias  # attention, two LayerNorms
    spec = ROUTERS[config.router]
    if spec is None:
        E = K  # the MLP is as wide as K experts
        layer += (H * K + C) * bias
    else:
        layer += E * (C + spec.bias) + spec.gamma  # router
    fixed, expert = fixed + config.n_layer * layer, config.n_layer * 2 * C * H
    return fixed + E * expert, fixed + K * expert


def flops_per_token(config: ModelConfig) -> int:
    """Floating-point operations of one training step per token, as in PaLM (arXiv 2204.02311, App. B).

    6 per active matrix weight (2 forward, 4 backward), including the LM head but not embedding look-ups, and 12·L·T·C
    for attention, without halving it for causality.
    """
    C, K, H = config.n_embd, config.top_k, config.expert_hidden
    router = 0 if ROUTERS[config.router] is None else config.n_expert * C
    weights = config.n_layer * (4 * C * C + 2 * C * H * K + router) + config.vocab_size * C
    return 6 * weights + 12 * config.n_layer * config.block_size * C
