"""Causal self-attention of model.py: rotary positions, documents, and the cache of keys and values.

This file imports only torch, so that exported models can ship it: its names are a public interface
of theirs. A `config` is any object with a model's settings.

Shapes in comments: B sequences, T positions, S columns of the cache, C = n_embd, nh heads of size
hs for queries, nkv for keys and values, L = n_layer.
"""

from typing import Any, NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor


def make_norm(config: Any, width: int) -> nn.LayerNorm | nn.RMSNorm:
    """The norm of model.norm over a last dimension of size `width`."""
    if config.norm == "rmsnorm":
        return nn.RMSNorm(width, eps=config.norm_eps)
    return nn.LayerNorm(width, eps=config.norm_eps, bias=config.bias)


class Documents(NamedTuple):
    """The documents of windows: positions, and what each position may see."""

    positions: Tensor  # (B, T) int64, counted from the start of a document, or of the window
    # (B, 1, T, T) added to scores: 0 for positions of the same document up to a query's own, else
    # -inf
    mask: Tensor


def find_documents(idx: Tensor, token: int, dtype: torch.dtype) -> Documents:
    """Find the documents of windows: an end-of-text token starts each.

    As an input that token only predicts how the next document begins, so it sees nothing of the one
    before.

    Args:
        idx: (B, T) int64 token ids.
        token: the id of end-of-text.
        dtype: of queries, and so of the mask: each layer would keep a copy of a boolean mask in
            this dtype for its backward pass.
    """
    position = torch.arange(idx.shape[1], device=idx.device)
    start = find_starts(idx, token, position)
    not_later = position <= position[:, None]  # (T, T) of query and key
    seen = (start[:, :, None] <= position) & not_later  # (B, T, T)
    zeros = torch.zeros(seen.shape, dtype=dtype, device=idx.device)
    mask = zeros.masked_fill_(~seen, -torch.inf)
    return Documents(position - start, mask[:, None])


def find_starts(idx: Tensor, token: int, position: Tensor) -> Tensor:
    """The position (B, T) of the last `token` so far in idx (B, T); 0 without one."""
    own = torch.where(idx == token, position, 0)
    return own.cummax(1).values


class KVCache:
    """Keys and values of the tokens so far, so that a new token costs one token's work.

    For evaluation only. Rows may have unequal length. Padded on the left, row b starts at column
    start[b]. Padded on the right, start[b] is 0, and columns after its end see only padding and
    the row. With document masks start[b] is where the document of its last column starts. A forward
    pass calls `prepare` once and `update` once per layer.
    """

    def __init__(
        self, config: Any, start: Tensor, capacity: int, dtype: torch.dtype = torch.float32
    ) -> None:
        """Allocate `capacity` columns (S) for len(start) rows; `start` is (B,) int64."""
        self.start = start
        self.length = 0  # columns in use
        self.layer = 0  # the next layer to `update`
        self.block_size = config.block_size
        head_size = config.n_embd // config.n_head
        shape = (config.n_layer, 2, len(start), kv_heads(config), capacity, head_size)
        self.columns = torch.empty(shape, dtype=dtype, device=start.device)  # (L, 2, B, nkv, S, hs)

    def prepare(self, idx: Tensor, token: int | None = None) -> None:
        """Add T columns; set `positions` (B, T) and `mask` (B, 1, T, S), what each may attend to.

        Args:
            idx: (B, T) int64 token ids of the new columns.
            token: the id that starts a document (see `find_documents`); None: attention crosses
                documents.
        """
        T = idx.shape[1]
        device = self.start.device
        query = self.length + torch.arange(T, device=device)  # (T,) the new columns
        key = torch.arange(self.length + T, device=device)  # (S,) all columns
        start = self.start[:, None]  # (B, 1), or (B, T) with documents
        if token is not None:
            # padding may hold the token too, always before `self.start`
            start = find_starts(idx, token, query).maximum(start)
            self.start = start[:, -1]
        self.positions = (query - start).clamp(0, self.block_size - 1)  # only padding is clamped
        is_real = key >= start[..., None]  # (B, 1 or T, S)
        not_later = key <= query[:, None]  # (T, S)
        # padding attends to itself: attention to nothing gives NaN
        is_own = key == query[:, None]  # (T, S)
        is_seen = is_real & not_later | is_own  # (B, T, S)
        self.mask = is_seen[:, None]  # (B, 1, T, S)
        self.length += T
        self.layer = 0

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store the next layer's keys and values.

        Args:
            k: (B, nkv, T, hs) keys of the new columns.
            v: (B, nkv, T, hs) values of the new columns.

        Returns:
            Keys and values of all columns, (B, nkv, S, hs) each.
        """
        first = self.length - k.shape[2]
        keys, values = self.columns[self.layer, ..., : self.length, :]
        keys[:, :, first:] = k
        values[:, :, first:] = v
        self.layer += 1
        return keys, values


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
    T = x.shape[-2]
    half = x.shape[-1] // 2
    pair = torch.arange(half, device=x.device, dtype=torch.float32)
    frequency = base ** (-pair / half)  # (hs/2,)
    if positions is None:
        positions = torch.arange(T, device=x.device)
    angle = positions[..., None, :, None].float() * frequency  # (B, 1, T, hs/2) or (1, T, hs/2)
    cos = angle.cos()
    sin = angle.sin()
    a, b = x.float().chunk(2, dim=-1)
    turned_a = a * cos - b * sin
    turned_b = b * cos + a * sin
    return torch.cat((turned_a, turned_b), dim=-1).to(x.dtype)


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
        kv_width = self.n_kv_head * self.head_size
        self.widths = [config.n_embd, kv_width, kv_width]  # of queries, keys, values
        self.qkv = nn.Linear(config.n_embd, sum(self.widths), bias=config.bias)
        self.q_norm = None
        self.k_norm = None
        if config.qk_norm == "head":
            self.q_norm = make_norm(config, self.head_size)
            self.k_norm = make_norm(config, self.head_size)
        elif config.qk_norm == "all":
            self.q_norm = make_norm(config, config.n_embd)
            self.k_norm = make_norm(config, kv_width)
        self.proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)

    def forward(
        self, x: Tensor, past: KVCache | None = None, documents: Documents | None = None
    ) -> Tensor:
        B, T, C = x.shape
        seen = documents if past is None else past  # positions and mask, None: a plain window
        positions = None
        mask = None
        if seen is not None:
            positions = seen.positions
            mask = seen.mask
        q, k, v = self.qkv(x).split(self.widths, dim=-1)  # (B, T, nh·hs), twice (B, T, nkv·hs)
        if self.q_norm is not None and self.k_norm is not None:
            q = normalize_heads(q, self.q_norm)
            k = normalize_heads(k, self.k_norm)
        q = self._split_heads(q)  # (B, nh, T, hs)
        k = self._split_heads(k)  # (B, nkv, T, hs)
        v = self._split_heads(v)
        if self.rope_base:
            q = rotate(q, self.rope_base, positions)
            k = rotate(k, self.rope_base, positions)
        if past is not None:
            k, v = past.update(k, v)
        dropout = 0.0
        if past is None and self.training:
            dropout = self.dropout
        y = attend(q, k, v, mask, dropout)  # (B, nh, T, hs)
        y = self.proj(y.transpose(1, 2).reshape(B, T, C))  # heads side by side
        return F.dropout(y, self.dropout, self.training)

    def _split_heads(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        return x.view(B, T, -1, self.head_size).transpose(1, 2)  # (B, heads, T, hs)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float = 0.0) -> Tensor:
    """Softmax attention, (B, nh, T, hs).

    Args:
        q: (B, nh, T, hs) queries.
        k: (B, nkv, S, hs) keys.
        v: (B, nkv, S, hs) values.
        mask: the keys that each query sees, (B, 1, T, S) bool or added to scores; None: all up to
            the query's own position.
        dropout: of probabilities.
    """
    groups = q.shape[1] // k.shape[1]
    shares_keys = groups > 1 and can_share_keys(q, mask)
    if groups > 1 and not shares_keys:
        k = k.repeat_interleave(groups, 1)  # (B, nh, S, hs)
        v = v.repeat_interleave(groups, 1)
    return F.scaled_dot_product_attention(
        q, k, v, mask, dropout, is_causal=mask is None, enable_gqa=shares_keys
    )


def can_share_keys(q: Tensor, mask: Tensor | None) -> bool:
    """True if a fused kernel reads keys that several heads share.

    CUDA's kernels for masks and for float32 do not: torch then keeps all scores.
    """
    return not q.is_cuda or (mask is None and q.dtype != torch.float32)


def normalize_heads(x: Tensor, norm: nn.Module) -> Tensor:
    """Normalise queries or keys (B, T, heads·hs) in the norm's dtype, over groups of its width.

    A norm of width hs is per head, a wider one over all heads.
    """
    weight = norm.get_parameter("weight")
    groups = x.to(weight.dtype).unflatten(-1, (-1, len(weight)))
    return norm(groups).flatten(-2).to(x.dtype)


def kv_heads(config: Any) -> int:
    """Number of heads of keys and values: model.n_kv_head, or n_head where that is 0."""
    return config.n_kv_head or config.n_head
