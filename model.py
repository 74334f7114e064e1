"""The GPT of the paper: decoder-only, pre-LayerNorm, in every block a dense MLP or a mixture of experts in its place.

The paper leaves most of the architecture open; docs/paper.md lists each choice made here. Shapes: B sequences, T
positions, C = n_embd, N = B·T tokens, E experts, K = top_k, H = expert_hidden, V = vocab_size.
"""

import math
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from kernels import expert_mlp
from kernels.cross_entropy import linear_cross_entropy
from router import ROUTERS, Router, balance_loss, entropy, expert_loads, token_distribution, z_loss


class Stats(NamedTuple):
    """What a forward pass tells of its routers, a row per layer (L = 0 rows for a dense model)."""

    loads: torch.Tensor  # (L, E) int64, tokens that chose each expert
    balance_loss: torch.Tensor  # (L,) Switch load-balancing loss
    z_loss: torch.Tensor  # (L,) router z-loss
    entropy: torch.Tensor  # (L,) nats, mean over tokens of the entropy of the normalised scores
    zero_gates: torch.Tensor  # (L,) fraction of the N·K gates that are exactly 0


class Output(NamedTuple):
    logits: torch.Tensor | None  # (B, 1, V) of the last position; None if there were targets
    loss: torch.Tensor | None  # cross-entropy alone, nats per token
    stats: Stats
    losses: torch.Tensor | None  # (B,), that of each sequence, without gradient


class Cache:
    """Keys and values of the tokens so far, so that a token more costs one token's work. For evaluation alone.

    Rows of unequal length are filled up on the left, row b begins at column `start[b]`, or on the right, where nothing
    real comes after. `capacity` columns in all.
    """

    def __init__(self, config, start, capacity, dtype=torch.float32):
        """`start` (B,) int64, on the device of the model."""
        head = config.n_embd // config.n_head
        self.start, self.length, self.layer, self.block_size = start, 0, 0, config.block_size
        shape = (config.n_layer, 2, len(start), config.n_head, capacity, head)
        self.columns = torch.empty(shape, dtype=dtype, device=start.device)  # (L, 2, B, nh, S, hs)

    def extend(self, T):
        """Make room for T columns: their positions (B, T), and which columns each may see, (B, 1, T, S)."""
        device = self.start.device
        new, old = self.length + torch.arange(T, device=device), torch.arange(self.length + T, device=device)
        self.positions = (new - self.start[:, None]).clamp(0, self.block_size - 1)  # beyond lie filled-up columns alone
        real = old >= self.start[:, None, None]  # (B, 1, S)
        own = old == new[:, None]  # (T, S); a filled-up column sees itself: attention to nothing is nan
        self.mask = (real & (old <= new[:, None]) | own)[:, None]
        self.length, self.layer = self.length + T, 0

    def append(self, k, v):
        """The next layer's keys and values of all columns so far, those of the new ones given: (B, nh, T, hs) each."""
        first = self.length - k.shape[2]
        layer = self.columns[self.layer]
        layer[0, :, :, first : self.length], layer[1, :, :, first : self.length] = k, v
        self.layer += 1
        return layer[..., : self.length, :].unbind(0)

    def rows(self, index, capacity):
        """A copy that holds the rows `index`, some of them several times maybe, with room for `capacity` columns."""
        copy = Cache.__new__(Cache)
        copy.start, copy.length, copy.layer, copy.block_size = self.start[index], self.length, 0, self.block_size
        L, _, _, nh, _, hs = self.columns.shape
        copy.columns = self.columns.new_empty(L, 2, len(index), nh, capacity, hs)
        copy.columns[..., : self.length, :] = self.columns[:, :, index, :, : self.length]
        return copy


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.n_head = config.n_head
        self.dropout = config.dropout
        self.rope = config.pos == "rope"
        self.qkv = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)

    def forward(self, x, past=None):
        B, T, C = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.n_head, C // self.n_head).permute(2, 0, 3, 1, 4)  # (B, nh, T, hs) each
        if self.rope:
            positions = None if past is None else past.positions
            q, k = rotate(q, positions), rotate(k, positions)
        if past is None:
            dropout = self.dropout if self.training else 0.0
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        else:
            y = F.scaled_dot_product_attention(q, *past.append(k, v), attn_mask=past.mask)
        y = self.proj(y.transpose(1, 2).reshape(B, T, C))
        return F.dropout(y, self.dropout, self.training)


def rotate(x, positions=None):
    """Rotary position embedding (arXiv 2104.09864), base 10000, the halves of a head as pairs: (B, nh, T, hs) ->
    same. `positions` (B, T), or 0, 1, … of every row."""
    T, half = x.shape[-2], x.shape[-1] // 2
    frequency = 10000 ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    if positions is None:
        angle = torch.arange(T, device=x.device, dtype=torch.float32)[:, None] * frequency  # (T, hs/2)
    else:
        angle = positions[:, None, :, None].float() * frequency  # (B, 1, T, hs/2)
    cos, sin = angle.cos(), angle.sin()
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class MLP(nn.Module):
    """The dense baseline: hidden width K·H, as many active parameters as the mixture's experts."""

    def __init__(self, config):
        super().__init__()
        hidden = config.top_k * config.expert_hidden
        self.w_in = nn.Linear(config.n_embd, hidden, bias=config.bias)
        self.w_out = nn.Linear(hidden, config.n_embd, bias=config.bias)

    def forward(self, x):
        return self.w_out(F.gelu(self.w_in(x))), None


class Experts(nn.Module):
    """E MLPs as two stacked tensors: one parameter each, so that no rank ever lacks the gradient of an idle expert."""

    def __init__(self, config):
        super().__init__()
        E, C, H = config.n_expert, config.n_embd, config.expert_hidden
        self.w_in = nn.Parameter(torch.empty(E, C, H))
        self.w_out = nn.Parameter(torch.empty(E, H, C))
        self.backend = config.backend

    def forward(self, x, weights, experts):
        return expert_mlp(x, self.w_in, self.w_out, weights, experts, self.backend)


class MoE(nn.Module):
    """Mixture of experts, paper eq. 5: Σ_m g_m(x) E_m(x) over the K experts a token's router chose. No token is
    dropped."""

    def __init__(self, config):
        super().__init__()
        self.router = Router(config.n_embd, config.n_expert, config.top_k, ROUTERS[config.router], config.gate_scale)
        self.experts = Experts(config)

    def forward(self, x):
        tokens = x.reshape(-1, x.shape[-1])  # (N, C)
        routing = self.router(tokens)
        y = self.experts(tokens, routing.weights, routing.experts)
        loads = expert_loads(routing.experts, routing.scores.shape[-1])
        with torch.no_grad():
            zero_gates = (routing.weights == 0).float().mean()
        distribution = token_distribution(routing)
        balance = balance_loss(distribution, loads)
        return y.view_as(x), Stats(loads, balance, z_loss(routing), entropy(distribution), zero_gates)


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config) if ROUTERS[config.router] is None else MoE(config)
        self.dropout = config.dropout
        self.checkpointing = False  # keep x alone for the backward pass, and compute the block once more there

    def forward(self, x, past=None):
        if self.checkpointing and torch.is_grad_enabled():
            return checkpoint(self.compute, x, use_reentrant=False)
        return self.compute(x, past)

    def compute(self, x, past=None):
        x = x + self.attn(self.ln_1(x), past)
        y, stats = self.mlp(self.ln_2(x))
        return x + F.dropout(y, self.dropout, self.training), stats


class GPT(nn.Module):
    """`config` is anything with the attributes of `configure.schema.Model`."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd) if config.pos == "learned" else None
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.lm_head = None if config.tie_embeddings else nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self):
        """As GPT-2: N(0, init_std²), projections onto the residual stream by 1/√(2L). LayerNorms and γ 1, biases 0."""
        std = self.config.init_std
        for name, p in self.named_parameters():
            if p.dim() > 1:
                onto_residual = name.endswith(("attn.proj.weight", "w_out", "w_out.weight"))
                nn.init.normal_(p, std=std / math.sqrt(2 * self.config.n_layer) if onto_residual else std)
            elif name.endswith("bias"):
                p.zero_()

    def forward(self, idx, targets=None, past=None):
        """idx, targets (B, T) int64 -> Output. With `past`, a Cache, idx are the tokens after those in it, where it has
        room, and join it. Raises ValueError if T is more than block_size."""
        x, layers = self.hidden(idx, past)
        logits = loss = losses = None
        if targets is None:
            logits = self.logits(x[:, [-1]])
        else:
            x = self.ln_f(x).flatten(0, 1)
            loss, losses = linear_cross_entropy(x, self.head, targets.flatten(), self.config.backend)
            losses = losses.view(idx.shape).mean(1)
        return Output(logits, loss, stack(layers, idx.device), losses)

    def hidden(self, idx, past=None):
        """(The residual stream (B, T, C) after the last block, Stats of each)."""
        T = idx.shape[1]
        if T > self.config.block_size:
            raise ValueError(f"{T} tokens are more than the model's block_size of {self.config.block_size}")
        if past is not None:
            past.extend(T)
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
    def head(self):
        """(V, C)"""
        return self.wte.weight if self.lm_head is None else self.lm_head.weight

    def logits(self, x):
        """(..., C) of the residual stream after the last block -> (..., V)."""
        return F.linear(self.ln_f(x), self.head)


def stack(layers, device):
    """Per-layer Stats -> one Stats with a row per layer; no rows if the layers are dense."""
    if layers[0] is None:
        return Stats(torch.zeros(0, 0, dtype=torch.int64, device=device), *torch.zeros(4, 0, device=device))
    return Stats(*map(torch.stack, zip(*layers, strict=True)))


def parameter_shapes(config):
    """{name: shape} of the parameters of GPT(config), without allocating them."""
    with torch.device("meta"):
        return {name: tuple(p.shape) for name, p in GPT(config).named_parameters()}


def count_parameters(config):
    """(total, active) parameters. Active: what one token meets, K of E experts. A tied embedding counts once."""
    C, H, K, bias = config.n_embd, config.expert_hidden, config.top_k, config.bias
    shared = config.vocab_size * C * (1 if config.tie_embeddings else 2)
    shared += config.block_size * C if config.pos == "learned" else 0
    shared += C + C * bias  # final LayerNorm
    layer = 4 * C * C + 2 * C + 6 * C * bias  # attention, two LayerNorms
    spec = ROUTERS[config.router]
    if spec is None:
        total = active = shared + config.n_layer * (layer + 2 * C * H * K + (H * K + C) * bias)
        return total, active
    layer += config.n_expert * C + config.n_expert * spec.bias + spec.gamma  # router
    total = shared + config.n_layer * (layer + 2 * C * H * config.n_expert)
    active = shared + config.n_layer * (layer + 2 * C * H * K)
    return total, active


def flops_per_token(config):
    """Floating-point operations of one training step per token: 6 per active matrix weight (2 forward, 4 backward; the
    head too, embedding look-ups not), and 12·L·T·C for attention as in PaLM (arXiv 2204.02311, App. B), causality not
    deducted."""
    C, K, H = config.n_embd, config.top_k, config.expert_hidden
    router = 0 if ROUTERS[config.router] is None else config.n_expert * C
    weights = config.n_layer * (4 * C * C + 2 * C * H * K + router) + config.vocab_size * C
    return 6 * weights + 12 * config.n_layer * config.block_size * C
