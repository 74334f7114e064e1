"""Causal self-attention of model.py: rotary positions, documents, and the cache of keys and values.

This file imports only torch, so that exported models can ship it. A `config` is any object with a
model's settings.

Shapes in comments: B sequences, T positions, S columns of the cache, C = n_embd, nh heads of size
hs for queries, nkv for keys and values, L = n_layer.
"""

from typing import Any, NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention


def make_norm(config: Any, width: int) -> nn.LayerNorm | nn.RMSNorm:
    """A LayerNorm, or the RMSNorm that has neither its mean nor its bias, over the last dimension of size `width`."""
    if config.norm == "rmsnorm":
        return nn.RMSNorm(width, eps=config.norm_eps)
    return nn.LayerNorm(width, eps=config.norm_eps, bias=config.bias)


class Documents(NamedTuple):
    """What each position of a window may see (data.document_mask)."""

    # (B, T) int64, from the start of each document, or of the window within its first
    positions: Tensor
    # (B, 1, T, T): the same document, no later position; as a tensor 0, or -inf where hidden
    mask: Tensor | BlockMask


def find_documents(idx: Tensor, token: int, dtype: torch.dtype, blocks: bool = False) -> Documents:
    """Find the documents of windows: one starts at each end-of-text token, which precedes its first token.

    As an input that token only predicts how the next document begins, so it sees nothing of the one
    before.

    Args:
        idx: (B, T) int64 token ids.
        token: the id of end-of-text.
        dtype: that of queries. Of a mask of booleans each layer would keep a copy in it for its
            backward pass.
        blocks: whether the mask is a BlockMask of flex_attention, which skips blocks that it hides,
            or a tensor.
    """
    B, T = idx.shape
    at = torch.arange(T, device=idx.device)
    # (B, T), of each position's document
    begins = torch.where(idx == token, at, 0).cummax(1).values

    def is_seen(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (begins[b, q] <= k) & (k <= q)

    if blocks:
        mask = create_block_mask(is_seen, B, None, T, T, device=idx.device)
    else:
        seen = (begins[:, :, None] <= at) & (at <= at[:, None])
        mask = torch.zeros(seen.shape, dtype=dtype, device=idx.device).masked_fill_(
            ~seen, -torch.inf
        )[:, None]
    return Documents(at - begins, mask)


class KVCache:
    """Keys and values of the tokens so far, so that each new token costs one token's work.

    For evaluation only.

    Rows of unequal length are padded on the left, so row b starts at column start[b], or on the
    right, where later columns attend to nothing real. With document masks start[b] is where the
    document of its last column begins. A forward pass calls `prepare` once and `update` once per
    layer.
    """

    def __init__(
        self, config: Any, start: Tensor, capacity: int, dtype: torch.dtype = torch.float32
    ) -> None:
        """Allocate `capacity` columns (S) for len(start) rows; `start` (B,) int64 is on the model's device."""
        self.start, self.length, self.layer, self.block_size = start, 0, 0, config.block_size
        shape = (
            config.n_layer,
            2,
            len(start),
            kv_heads(config),
            capacity,
            config.n_embd // config.n_head,
        )
        self.columns = torch.empty(shape, dtype=dtype, device=start.device)  # (L, 2, B, nkv, S, hs)

    def prepare(self, idx: Tensor, token: int | None = None) -> None:
        """Add T columns, of ids (B, T): set positions (B, T) and the mask (B, 1, T, S) of what each may attend to.

        `token` is the id that begins a document (see `find_documents`); None: attention crosses
        documents.
        """
        T, device = idx.shape[1], self.start.device
        new = self.length + torch.arange(T, device=device)  # (T,)
        old = torch.arange(self.length + T, device=device)  # (S,)
        begins = self.start[:, None]  # (B, 1) or (B, T)
        if token is not None:  # padding may hold it too, always before `start`
            begins = torch.where(idx == token, new, 0).cummax(1).values.maximum(begins)
            self.start = begins[:, -1]
        self.positions = (new - begins).clamp(0, self.block_size - 1)  # only padding is clamped
        real = old >= begins[..., None]  # (B, 1 or T, S)
        # (T, S): padding attends to itself, since attention to nothing gives NaN
        own = old == new[:, None]
        self.mask = (real & (old <= new[:, None]) | own)[:, None]  # (B, 1, T, S)
        self.length, self.layer = self.length + T, 0

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Store the next layer's keys and values (B, nkv, T, hs) and return those of all columns, (B, nkv, S, hs)."""
        first = self.length - k.shape[2]
        layer = self.columns[self.layer]
        layer[0, :, :, first : self.length], layer[1, :, :, first : self.length] = k, v
        self.layer += 1
        return layer[..., : self.length, :].unbind(0)


def rotate(x: Tensor, base: float, positions: Tensor | None = None) -> Tensor:
    """Rotary position embedding; channels i and i + hs/2 of a head are a pair.

    Args:
        x: (B, nh, T, hs) queries or keys.
        base: pair i turns by base^(-2i/hs) radians per position.
        positions: (B or 1, T) int64; None: 0, 1, … T - 1 in every row.

    Returns:
        (B, nh, T, hs) in x's dtype.

    Source: RoFormer (arXiv 2104.09864).
    """
    T, half = x.shape[-2], x.shape[-1] // 2
    # (hs/2,)
    frequency = base ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    if positions is None:
        positions = torch.arange(T, device=x.device)
    angle = positions[..., None, :, None].float() * frequency  # (B, 1, T, hs/2) or (1, T, hs/2)
    cos, sin = angle.cos(), angle.sin()
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention: `n_head` heads of queries share `n_kv_head` heads of keys and values.

    Source: grouped-query attention (arXiv 2305.13245); norms of queries and keys: Qwen3 per head,
    OLMoE over all heads.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.head_size = config.n_embd // config.n_head
        self.n_kv_head = kv_heads(config)
        self.dropout = config.dropout
        self.rope_base = config.rope_base if config.pos == "rope" else None
        # of queries, keys, values
        self.widths = [config.n_embd, *[self.n_kv_head * self.head_size] * 2]
        self.qkv = nn.Linear(config.n_embd, sum(self.widths), bias=config.bias)
        self.q_norm = self.k_norm = None
        if config.qk_norm != "off":
            per_head = config.qk_norm == "head"
            self.q_norm, self.k_norm = (
                make_norm(config, self.head_size if per_head else w) for w in self.widths[:2]
            )
        self.proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)

    def forward(
        self, x: Tensor, past: KVCache | None = None, documents: Documents | None = None
    ) -> Tensor:
        B, T, C = x.shape
        given = documents if past is None else past
        q, k, v = self.qkv(x).split(self.widths, dim=-1)  # (B, T, nh·hs), twice (B, T, nkv·hs)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = normalize_heads(q, self.q_norm), normalize_heads(k, self.k_norm)
        # (B, nh or nkv, T, hs)
        q, k, v = (t.view(B, T, -1, self.head_size).transpose(1, 2) for t in (q, k, v))
        if self.rope_base:
            positions = None if given is None else given.positions
            q, k = rotate(q, self.rope_base, positions), rotate(k, self.rope_base, positions)
        dropout = self.dropout if past is None and self.training else 0.0
        if past is not None:
            k, v = past.update(k, v)
        y = attend(q, k, v, None if given is None else given.mask, dropout)
        y = self.proj(y.transpose(1, 2).reshape(B, T, C))  # heads side by side
        return F.dropout(y, self.dropout, self.training)


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | BlockMask | None, dropout: float = 0.0
) -> Tensor:
    """Softmax attention, (B, nh, T, hs).

    Args:
        q: (B, nh, T, hs) queries.
        k: (B, nkv, S, hs) keys.
        v: (B, nkv, S, hs) values.
        mask: what each query sees, (B, 1, T, S) bool or added to scores, or as blocks; None: no
            later position.
        dropout: of probabilities; flex_attention has none.
    """
    groups = q.shape[1] // k.shape[1]
    if isinstance(mask, BlockMask):
        # inductor's kernel for CPUs reads values with the keys' strides
        q, k, v = (t.contiguous() for t in (q, k, v))
        return flex_attention(q, k, v, block_mask=mask, enable_gqa=groups > 1)
    if groups > 1 and not reads_groups(q, mask):
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)  # (B, nh, T or S, hs)
    shared = k.shape[1] < q.shape[1]
    return F.scaled_dot_product_attention(
        q, k, v, mask, dropout, is_causal=mask is None, enable_gqa=shared
    )


def reads_groups(q: Tensor, mask: Tensor | None) -> bool:
    """Whether a fused kernel shares keys between heads.

    CUDA's for masks and for float32 do not: torch keeps scores.
    """
    return not q.is_cuda or (mask is None and q.dtype != torch.float32)


def normalize_heads(x: Tensor, norm: nn.Module) -> Tensor:
    """Norm of queries or keys (B, T, heads·hs), of each head or of all as the norm is wide, in its weight's dtype."""
    weight = norm.get_parameter("weight")
    return norm(x.to(weight.dtype).unflatten(-1, (-1, len(weight)))).flatten(-2).to(x.dtype)


def kv_heads(config: Any) -> int:
    """The heads of keys and values: model.n_kv_head, or as many as of queries where that is 0."""
    return config.n_kv_head or config.n_head
