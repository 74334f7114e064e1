"""Experts in plain torch, for CPU and any GPU: products over (token, chosen expert) rows.

Rows are sorted by expert and stored in slots, some of them padding, so that one `bmm` multiplies
the blocks of several experts. Dropless at any imbalance. Three ways:

    make_blocks      GPU: blocks of 128 slots, as many as any routing can need, so the host never
                     waits for the device.
    make_parts       CPU: takes a few experts at a time, with one block each and of similar loads,
                     so that their data is in the cache.
    NarrowExperts    CPU, few hidden units: computes each token's hidden units one by one.

docs/performance.md compares their times with those of alternatives.

The backward pass keeps only x, the pre-activations and indices: with A = act(H) and dO the output's
gradient, the gate's gradient is <dO W_outᵀ, A>, so neither the experts' outputs nor the gathered
inputs are needed (SonicMoE, arXiv 2512.14080). NarrowExperts keeps reordered weights, too.

Experts with a gate of their own (SwiGLU) have two pre-activations, P = 2H columns of one product: A
= act(a) · b.

Shapes: N tokens, C = n_embd, E experts, K = top_k, H = expert_hidden, P = H or 2H pre-activations,
S slots. This file imports only torch, so that exported models can ship it: its names
are a public interface of theirs.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)
NARROW = 16  # the H up to which hidden units are computed one by one
# In half precision a CPU computes experts of up to so many hidden units in fp32, because oneDNN
# compiles each half-precision product anew for each number of rows. Both passes, 128 channels, H 24
# and 64: with AMX 0.60 and 0.93 of bfloat16's time (H 128: 1.17), 0.5 and 0.73 of float16's; with
# bf16 units alone 0.55 and 0.61; AVX2 0.12 and 0.10 (Xeon, one thread, 2026-11-27)
FP32_WIDTH = 64
BLOCK = 128  # slots per block on a GPU
PART_BYTES = 2**22  # of gathered tokens that a CPU works on at a time
COPY_BYTES = 2**14  # of w_in per row up to which experts share a part, which copies their weights
ALL = slice(None)


# oneDNN compiles a GELU for each number of rows that it meets, in fp32 too, and loads change the
# numbers in every step. It takes contiguous tensors alone: transposed ones go to torch's own
# kernel. A step of kern takes 0.84 of the time at 96 channels and H 48, rung 2 of the contest, and
# 0.85 at 128 and 24 (Xeon with AMX, one thread, 2026-11-27).
def gelu(x: Tensor) -> Tensor:
    """GELU of (…, S, H) in torch's own kernel."""
    return F.gelu(x.mT).mT


def gelu_backward(d_act: Tensor, x: Tensor) -> Tensor:
    """Gradient of x from that of `gelu(x)`."""
    return torch.ops.aten.gelu_backward(d_act.mT, x.mT).mT


ACTIVATIONS = {"gelu": gelu, "silu": F.silu}
BACKWARD = {"gelu": gelu_backward, "silu": torch.ops.aten.silu_backward}


def activate(hidden: Tensor, width: int, activation: str) -> tuple[Tensor, Tensor | None]:
    """Apply a key of ACTIVATIONS to pre-activations (…, H), of `width` H, or (…, 2 H) if gated.

    Returns the activations (…, H), and what `activate_backward` needs besides: act(a) if gated.
    """
    function = ACTIVATIONS[activation]
    if hidden.shape[-1] == width:
        return function(hidden), None
    a, b = hidden.chunk(2, -1)
    inner = function(a)
    return inner * b, inner


def activate_backward(
    d_act: Tensor, hidden: Tensor, inner: Tensor | None, activation: str
) -> Tensor:
    """Return the gradient of `hidden` from the activations', which it may overwrite."""
    function = BACKWARD[activation]
    if inner is None:
        return function(d_act, hidden)
    a, b = hidden.chunk(2, -1)
    return torch.cat([function(d_act * b, a), d_act.mul_(inner)], -1)


@dataclass
class Part:
    """Some experts in blocks of as many slots each.

    Padding slots read zeros (token N); their gate is 0.
    """

    experts: Tensor | slice  # of each block
    shape: tuple[int, int]  # blocks, slots per block
    slots: slice  # ALL: an expert may have several blocks
    token: Tensor  # (S,) of each slot
    gate: Tensor  # (S, 1)

    def to_blocks(self, rows: Tensor) -> Tensor:
        """View (S, n) as (blocks, slots per block, n)."""
        return rows.view(*self.shape, rows.shape[1])

    def gather(self, x: Tensor) -> Tensor:
        """(N + 1, C), the last of zeros -> (S, C)."""
        return x.index_select(0, self.token)

    def multiply(self, rows: Tensor, w: Tensor, out: Tensor | None = None) -> Tensor:
        """(S, in), (E, in, out) -> (S, out), each slot times the weights of its expert."""
        out = rows.new_empty(len(rows), w.shape[2]) if out is None else out
        if self.shape[1]:  # idle experts' weights are not copied
            torch.bmm(self.to_blocks(rows), w[self.experts], out=self.to_blocks(out))
        return out

    def weight_grad(self, rows: Tensor, grads: Tensor, out: Tensor) -> None:
        """Set the part's experts in out (E, in, out) to their sums of rowᵀ grad."""
        alone = isinstance(self.experts, slice)
        blocks = out[self.experts] if alone else out.new_empty(self.shape[0], *out.shape[1:])
        # autocast changes no dtype of `out`
        torch.bmm(self.to_blocks(rows).mT, self.to_blocks(grads), out=blocks)
        if self.slots == ALL:
            # an expert can have many blocks to sum
            wide = torch.promote_types(blocks.dtype, torch.float32)
            total = torch.zeros(out.shape, dtype=wide, device=out.device)
            out.copy_(total.index_add_(0, self.experts, blocks.to(wide)))  # pyrefly: ignore[bad-argument-type]
        elif not alone:
            out[self.experts] = blocks


Layout = tuple[Tensor, int, list[Part]]  # slot (N, K) of each row, the number of slots, the parts


def make_blocks(weights: Tensor, experts: Tensor, n_expert: int) -> Layout:
    """Make one part of blocks of BLOCK slots, as many as any routing can need.

    So the host never waits for a GPU.

    There the weights' gradients repeat bit for bit only under train.deterministic: `index_add_`
    uses atomics.
    """
    load, order = sort_by_expert(experts, n_expert)
    blocks = (load + BLOCK - 1) // BLOCK
    index = torch.arange(experts.numel() // BLOCK + n_expert, device=load.device)
    expert = torch.searchsorted(blocks.cumsum(0), index, right=True).clamp_(max=n_expert - 1)
    slot, token, gate = fill_slots(
        weights, experts, load, order, blocks * BLOCK, len(index) * BLOCK
    )
    return slot, len(token), [Part(expert, (len(expert), BLOCK), ALL, token, gate)]


def make_parts(
    weights: Tensor, experts: Tensor, n_expert: int, most: int, together: int, unit: int
) -> Layout:
    """Make parts of experts of similar loads, for a CPU. The host reads the loads.

    A part has one expert, or at most `together` in at most `most` slots. They have equally many, a
    multiple of `unit`; at most 1/16 is added to make them equal.
    """
    loads = torch.bincount(experts.flatten(), minlength=n_expert)
    by_load = loads.argsort(descending=True, stable=True)  # (E,) numbers of experts
    rank = by_load.argsort()  # (E,) place of an expert in it
    experts = rank[experts]  # numbered by rank from here on
    load, order = sort_by_expert(experts, n_expert)
    sizes = [-(-rows // unit) * unit for rows in load.tolist()]  # rounded up
    ranges = group_experts(sizes, most, together)
    for first, end in ranges:
        sizes[first:end] = [sizes[first]] * (end - first)
    n_slot = sum(sizes)
    slot, token, gate = fill_slots(weights, experts, load, order, load.new_tensor(sizes), n_slot)
    numbers = by_load.tolist()
    parts = []
    start = 0
    for first, end in ranges:
        n_block = end - first
        slots = slice(start, start + n_block * sizes[first])
        start = slots.stop
        which = by_load[first:end]
        if n_block == 1:
            which = slice(numbers[first], numbers[first] + 1)  # a view of weights, not a copy
        parts.append(Part(which, (n_block, sizes[first]), slots, token[slots], gate[slots]))
    return slot, n_slot, parts


def group_experts(sizes: list[int], most: int, together: int) -> list[tuple[int, int]]:
    """Divide experts into ranges [first, end), the parts of `make_parts`.

    `sizes` are their slots, in descending order. Idle experts are one range.
    """
    ranges = []
    first = 0
    for end in range(1, len(sizes)):
        group = sizes[first : end + 1]  # with one more expert
        n_slot = len(group) * group[0]
        is_padded = n_slot > 17 / 16 * sum(group)
        is_full = len(group) > together or n_slot > most or is_padded
        if is_full and group[0] > 0:
            ranges.append((first, end))
            first = end
    ranges.append((first, len(sizes)))
    return ranges


def sort_by_expert(experts: Tensor, n_expert: int) -> tuple[Tensor, Tensor]:
    """Return rows (E,) of each expert, and indices (N·K,) sorted by expert, then by token."""
    flat = experts.flatten()
    load = torch.zeros(n_expert, dtype=torch.int64, device=flat.device).scatter_add_(
        0, flat, torch.ones_like(flat)
    )
    return load, flat.int().argsort(stable=True)  # int32 sorts in half the time of int64


def fill_slots(
    weights: Tensor, experts: Tensor, load: Tensor, order: Tensor, sizes: Tensor, n_slot: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Give experts sizes (E,) slots in turn, and each row in `order` one of its expert's.

    Returns the slot (N, K) of each row, the token (S,) and the gate (S, 1) of each slot.
    """
    N, K = experts.shape
    # (E,) padding before an expert's first row
    shift = (sizes.cumsum(0) - sizes) - (load.cumsum(0) - load)
    slot = shift[experts.flatten()[order]] + torch.arange(N * K, device=order.device)
    token = order.new_full((n_slot,), N).scatter_(0, slot, order // K)
    gate = weights.new_zeros(n_slot).scatter_(0, slot, weights.flatten()[order]).unsqueeze(-1)
    return torch.empty_like(slot).scatter_(0, order, slot).view(N, K), token, gate


def scale(rows: Tensor, gate: Tensor) -> Tensor:
    """Multiply rows (S, H), which it may overwrite, by their gates (S, 1), fp32 at least.

    A CPU would convert bfloat16 rows to fp32 and back, in twice the time: there a gate is a sum of
    two numbers, and `addcmul` rounds once.
    """
    if rows.dtype != torch.bfloat16 or rows.device.type != "cpu":
        return rows.mul_(gate)
    rounded = gate.to(rows.dtype)
    return torch.addcmul(rows * (gate - rounded).to(rows.dtype), rows, rounded)


# A CPU could also add each part's rows to the tokens while they are in the cache. It then does not
# share this work among threads: when this replaced it, steps of kern at H 24 to 64 took as long on
# one thread and 0.94 to 0.97 of the time on two (128 channels, Xeon, 2026-11-28).
def sum_slots(rows: Tensor, slot: Tensor) -> Tensor:
    """Add the rows (S, C) in each token's slots (N, K), in fp32 at least: (N, C)."""
    return F.embedding_bag(slot, rows, mode="sum")


def add_zeros(x: Tensor) -> Tensor:
    """Add a token of zeros: (N, C) -> (N + 1, C)."""
    return torch.cat([x, x.new_zeros(1, x.shape[1])])


class ExpertMLP(torch.autograd.Function):
    """The experts' MLP over parts."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w_in: Tensor,
        w_out: Tensor,
        weights: Tensor,
        experts: Tensor,
        activation: str,
    ) -> Tensor:
        if experts.device.type == "cpu":
            together = 8 if w_in.nbytes <= COPY_BYTES * experts.numel() else 1
            # oneDNN compiles a kernel for each number of rows that it meets
            unit = 32 if x.dtype in HALF else 1
            layout = make_parts(
                weights, experts, len(w_in), PART_BYTES // (x.shape[1] * x.itemsize), together, unit
            )
        else:
            layout = make_blocks(weights, experts, len(w_in))
        ctx.slot, n_slot, ctx.parts = layout
        ctx.activation = activation
        width = w_out.shape[1]
        tokens = add_zeros(x)
        hidden = x.new_empty(n_slot, w_in.shape[2])  # (S, P) pre-activations
        rows = x.new_empty(n_slot, x.shape[1])
        for part in ctx.parts:
            h = part.multiply(part.gather(tokens), w_in, hidden[part.slots])
            act = scale(activate(h, width, activation)[0], part.gate)
            part.multiply(act, w_out, rows[part.slots])
        ctx.save_for_backward(x, w_in, w_out, hidden)
        return sum_slots(rows, ctx.slot)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]  # *grads there
        x, w_in, w_out, hidden = ctx.saved_tensors
        d_w_in = torch.empty_like(w_in)
        d_w_out = torch.empty_like(w_out)
        d_gate = ctx.parts[0].gate.new_empty(len(hidden))  # (S,)
        d_rows = x.new_empty(len(hidden), x.shape[1])
        tokens = add_zeros(x)
        d_tokens = add_zeros(d_out)
        for part in ctx.parts:
            rows = part.gather(d_tokens)
            h = hidden[part.slots]
            d_act = part.multiply(rows, w_out.mT)  # (S, H), before the gate
            act, inner = activate(h, w_out.shape[1], ctx.activation)
            torch.sum(act * d_act, -1, dtype=d_gate.dtype, out=d_gate[part.slots])
            part.weight_grad(scale(act, part.gate), rows, d_w_out)
            d_h = activate_backward(scale(d_act, part.gate), h, inner, ctx.activation)  # (S, P)
            part.weight_grad(part.gather(tokens), d_h, d_w_in)
            part.multiply(d_h, w_in.mT, d_rows[part.slots])
        return sum_slots(d_rows, ctx.slot), d_w_in, d_w_out, d_gate[ctx.slot], None, None


class NarrowExperts(torch.autograd.Function):
    """Experts by products of two rows and weighted sums of rows, one hidden unit at a time.

    For a matrix product an expert of a few hidden units is too thin: gathering its tokens takes
    longer. Here nothing is gathered, and the time hardly depends on the number of experts. A hidden
    unit is a row of the weights; each token has J = K·H of them, or K·P.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w_in: Tensor,
        w_out: Tensor,
        weights: Tensor,
        experts: Tensor,
        activation: str,
    ) -> Tensor:
        x = x.contiguous()
        w_out = w_out.contiguous()
        units = w_in.mT.flatten(0, 1)  # (E·P, C)
        K = experts.shape[1]
        H = w_out.shape[1]
        P = w_in.shape[2]
        hidden = dots(x, units, unit_rows(experts, P)).unflatten(1, (K, P))  # (N, K, P)
        act, _ = activate(hidden, H, activation)  # (N, K, H)
        act = act * weights.to(x.dtype).unsqueeze(-1)
        ctx.activation = activation
        ctx.save_for_backward(x, units, w_out, weights, experts, hidden)
        return weighted_sums(unit_rows(experts, H), w_out.flatten(0, 1), act.flatten(1))

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]  # *grads there
        x, units, w_out, weights, experts, hidden = ctx.saved_tensors
        E, H, _ = w_out.shape
        _, K, P = hidden.shape
        d_out = d_out.contiguous()
        gate = weights.to(x.dtype).unsqueeze(-1)  # (N, K, 1)
        d_act = dots(d_out, w_out.flatten(0, 1), unit_rows(experts, H)).unflatten(1, (K, H))
        act, inner = activate(hidden, H, ctx.activation)
        d_gate = (act * d_act).sum(-1, dtype=weights.dtype)
        d_hidden = activate_backward(d_act.mul_(gate), hidden, inner, ctx.activation)  # (N, K, P)
        d_x = weighted_sums(unit_rows(experts, P), units, d_hidden.flatten(1))

        load, order = sort_by_expert(experts, E)
        token = order // K  # (N·K,)
        first = load.cumsum(0) - load  # (E,) of each expert in `order`

        def weight_grad(factors: Tensor, rows: Tensor) -> Tensor:  # (N, K, n), (N, C) -> (n, E, C)
            factors = factors.flatten(0, 1)[order].t()  # (n, N·K) by expert
            bags = first + len(order) * torch.arange(len(factors)).unsqueeze(1)
            sums = weighted_sums(
                token.repeat(len(factors)), rows, factors.flatten(), bags.flatten()
            )
            return sums.view(len(factors), E, -1)

        d_w_in = weight_grad(d_hidden, x).permute(1, 2, 0)  # (E, C, P)
        d_w_out = weight_grad(act.mul_(gate), d_out).transpose(0, 1)  # (E, H, C)
        return d_x, d_w_in, d_w_out, d_gate, None, None


def unit_rows(experts: Tensor, width: int) -> Tensor:
    """Return the rows (N, K·width) of experts' hidden units, `width` of each expert (N, K)."""
    return (experts.unsqueeze(-1) * width + torch.arange(width)).flatten(1)


def dots(rows: Tensor, table: Tensor, index: Tensor) -> Tensor:
    """Return products (N, J) of each row (N, C) with the rows index (N, J) of a table (R, C)."""
    N, J = index.shape
    bag = torch.arange(N).repeat_interleave(J)
    starts = torch.arange(0, N * J, J)
    dot = torch.ops.aten._embedding_bag_per_sample_weights_backward
    return dot(rows, table, index.flatten(), starts, bag, 0).view(N, J)


def weighted_sums(
    index: Tensor, table: Tensor, factors: Tensor, bags: Tensor | None = None
) -> Tensor:
    """Return sums (N, C) of rows of a table (R, C) times factors, by index (N, J) or bags (S,)."""
    return F.embedding_bag(index, table, bags, mode="sum", per_sample_weights=factors)


def expert_mlp(
    x: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    weights: Tensor,
    experts: Tensor,
    activation: str = "gelu",
) -> Tensor:
    """See `kernels.expert_mlp`."""
    if experts.device.type != "cpu":
        return ExpertMLP.apply(x, w_in, w_out, weights, experts, activation)
    dtype = x.dtype
    width = w_out.shape[1]
    if dtype in HALF and width <= FP32_WIDTH:
        x, w_in, w_out = x.float(), w_in.float(), w_out.float()
    function = NarrowExperts if width <= NARROW else ExpertMLP
    return function.apply(x, w_in, w_out, weights, experts, activation).to(dtype)
