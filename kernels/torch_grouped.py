"""Experts in plain torch, for CPU and any GPU: matrix products over rows, a row being one (token, chosen expert) pair.

Rows are sorted by expert and stored in slots, some of them padding, but for NarrowExperts. Three ways, all dropless at
any imbalance:

    PaddedBMM        GPU: pads each expert's rows to blocks of 128 and multiplies all blocks in one `bmm`. The number of
                     blocks is the most any routing can need, so the host never waits for the device.
    PerExpertMM      CPU: takes a few experts at a time, from gathering tokens to the weighted sum, while their data is
                     in the cache; one `mm` per expert.
    NarrowExperts    CPU, few hidden units: computes each token's hidden units one by one.

docs/performance.md compares their times with those of alternatives.

The backward pass keeps only x, the pre-activations and indices: with A = act(H) and dO the output's gradient, the
gate's gradient is <dO W_outᵀ, A>, so neither the experts' outputs nor the gathered inputs are needed (SonicMoE, arXiv
2512.14080). NarrowExperts keeps reordered weights, too.

Experts with a gate of their own (SwiGLU) have two pre-activations, P = 2H columns of one product: A = act(a) · b.

Shapes: N tokens, C = n_embd, E experts, K = top_k, H = expert_hidden, P = H or 2H pre-activations, S slots. This file
imports only torch, so that exported models can ship it.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

NARROW = 16  # the H up to which hidden units are computed one by one
PART_BYTES = 2**22  # of gathered tokens that a CPU works on at a time
ACTIVATIONS = {"gelu": F.gelu, "silu": F.silu}
BACKWARD = {"gelu": torch.ops.aten.gelu_backward, "silu": torch.ops.aten.silu_backward}  # of a gradient and the input
Layout = tuple[Tensor, int, list[Any]]  # slot (N, K) of each row, the number of slots, the parts


def activate(hidden: Tensor, width: int, activation: str, dim: int = -1) -> tuple[Tensor, Tensor | None]:
    """Apply a key of ACTIVATIONS to `width` (H) pre-activations along `dim`, or to twice as many if gated.

    Returns the activations, H of them along `dim`, and what `activate_backward` needs besides: act(a) if gated.
    """
    function = ACTIVATIONS[activation]
    if hidden.shape[dim] == width:
        return function(hidden), None
    a, b = hidden.chunk(2, dim)
    inner = function(a)
    return inner * b, inner


def activate_backward(d_act: Tensor, hidden: Tensor, inner: Tensor | None, activation: str, dim: int = -1) -> Tensor:
    """The gradient of `hidden` from that of the activations, which it may overwrite; `inner` is from `activate`."""
    function = BACKWARD[activation]
    if inner is None:
        return function(d_act, hidden)
    a, b = hidden.chunk(2, dim)
    return torch.cat([function(d_act * b, a), d_act.mul_(inner)], dim)


def sort_by_expert(experts: Tensor, n_expert: int, block: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Order the rows of experts (N, K) by expert, then by token, and pad each expert's to a multiple of `block` slots.

    Returns, all int64: rows (E,) and blocks (E,) of each expert; the sorted indices (N·K,) into the flattened `experts`
    and the slot (N·K,) of each.
    """
    flat = experts.flatten()
    load = torch.zeros(n_expert, dtype=torch.int64, device=flat.device).scatter_add_(0, flat, torch.ones_like(flat))
    blocks = (load + block - 1) // block
    order = flat.int().argsort(stable=True)  # int32 sorts in half the time of int64
    owner = flat[order]
    shift = (blocks.cumsum(0) - blocks) * block - (load.cumsum(0) - load)  # (E,) padding before an expert's first row
    return load, blocks, order, shift[owner] + torch.arange(len(flat), device=flat.device)


def fill_slots(values: Tensor, slot: Tensor, n_slot: int, fill: int = 0) -> Tensor:
    """Put values (R,) at their slots (R,) of a tensor (n_slot,) whose other entries are `fill`."""
    return torch.full((n_slot,), fill, dtype=values.dtype, device=values.device).scatter_(0, slot, values)


class PaddedBMM:
    """All experts in blocks of `size` rows. Padding slots read zeros (token N, which does not exist) and have gate 0.

    On a GPU the weights' gradients repeat bit for bit only under train.deterministic: `index_add_` uses atomics.
    """

    size = 128  # rows per block

    def __init__(self, slot: Tensor, token: Tensor, gate: Tensor, expert: Tensor) -> None:
        """Take slot (N, K) of each row, token (S,) and gate (S, 1) of each slot, expert (blocks,) of each block."""
        self.slot, self.token, self.gate, self.expert = slot, token, gate, expert
        self.experts, self.slots = slice(None), slice(None)

    @classmethod
    def build(cls, weights: Tensor, experts: Tensor, w_in: Tensor, dtype: torch.dtype) -> Layout:
        """Return the Layout of one part with all experts."""
        (N, K), n_expert = experts.shape, len(w_in)
        _, blocks, order, slot = sort_by_expert(experts, n_expert, cls.size)
        n_block = N * K // cls.size + n_expert  # the most any routing needs
        index = torch.arange(n_block, device=slot.device)
        expert = torch.searchsorted(blocks.cumsum(0), index, right=True).clamp_(max=n_expert - 1)
        token = fill_slots(order // K, slot, n_block * cls.size, fill=N)
        gate = fill_slots(weights.flatten()[order], slot, n_block * cls.size).unsqueeze(-1)
        slots = torch.empty_like(slot).scatter_(0, order, slot).view(N, K)
        return slots, n_block * cls.size, [cls(slots, token, gate, expert)]

    def to_blocks(self, rows: Tensor) -> Tensor:
        """View (S, n) as (blocks, size, n)."""
        return rows.view(-1, self.size, rows.shape[-1])

    def gather(self, x: Tensor) -> Tensor:
        return torch.cat([x, x.new_zeros(1, x.shape[1])]).index_select(0, self.token)

    def multiply(self, rows: Tensor, w: Tensor, out: Tensor | None = None) -> Tensor:
        product = torch.bmm(self.to_blocks(rows), w.index_select(0, self.expert)).flatten(0, 1)
        return product if out is None else out.copy_(product)

    def weight_grad(self, rows: Tensor, grads: Tensor, out: Tensor) -> None:
        blocks = torch.bmm(self.to_blocks(rows).mT, self.to_blocks(grads))  # (blocks, in, out)
        wide = torch.promote_types(blocks.dtype, torch.float32)  # an expert can have many blocks to sum
        total = torch.zeros(out.shape, dtype=wide, device=out.device)
        out.copy_(total.index_add_(0, self.expert, blocks.to(wide)))

    def add_to_tokens(self, rows: Tensor, out: Tensor) -> None:
        out += F.embedding_bag(self.slot, rows, mode="sum")  # a gather: no atomics


class PerExpertMM:
    """Some consecutive experts. Padding slots have gate 0 and repeat a token of their expert.

    So a NaN or Inf in a token reaches no token of other experts.
    """

    def __init__(self, experts: slice, slots: slice, sizes: list[int], token: Tensor, gate: Tensor) -> None:
        """Take the part's range of experts and of slots, the slots of each expert, token (S,) and gate (S, 1)."""
        self.experts, self.slots, self.sizes, self.token, self.gate = experts, slots, sizes, token, gate

    @classmethod
    def build(cls, weights: Tensor, experts: Tensor, w_in: Tensor, dtype: torch.dtype) -> Layout:
        """Return the Layout of parts of a few experts. The host reads the loads.

        In half precision an expert's rows are padded to a multiple of 32: oneDNN compiles a kernel for each number of
        rows that it meets.
        """
        (N, K), (n_expert, C, _) = experts.shape, w_in.shape
        block = 32 if dtype in (torch.float16, torch.bfloat16) else 1
        load, blocks, order, slot = sort_by_expert(experts, n_expert, block)
        sizes, token = (blocks * block).tolist(), order // K
        n_slot = sum(sizes)
        if n_slot > len(slot):
            last = token[(load.cumsum(0) - 1).clamp_min(0)]  # (E,) a token of each expert
            token = last.repeat_interleave(blocks * block, output_size=n_slot).scatter_(0, slot, token)
        gate = fill_slots(weights.flatten()[order], slot, n_slot).unsqueeze(-1)
        most = PART_BYTES // (C * dtype.itemsize)  # slots per part
        parts, first, begin = [], 0, 0
        for e in range(n_expert):
            end = begin + sum(sizes[first : e + 1])
            if e + 1 == n_expert or end + sizes[e + 1] - begin > most:
                slots = slice(begin, end)
                parts.append(cls(slice(first, e + 1), slots, sizes[first : e + 1], token[slots], gate[slots]))
                first, begin = e + 1, end
        return torch.empty_like(slot).scatter_(0, order, slot).view(N, K), n_slot, parts

    def gather(self, x: Tensor) -> Tensor:
        return x.index_select(0, self.token)

    def multiply(self, rows: Tensor, w: Tensor, out: Tensor | None = None) -> Tensor:
        out = rows.new_empty(len(rows), w.shape[-1]) if out is None else out
        for rows_e, w_e, out_e in zip(rows.split(self.sizes), w.unbind(), out.split(self.sizes), strict=True):
            torch.mm(rows_e, w_e, out=out_e)
        return out

    def weight_grad(self, rows: Tensor, grads: Tensor, out: Tensor) -> None:
        parts = zip(rows.t().split(self.sizes, 1), grads.split(self.sizes), out.unbind(), strict=True)
        for rows_e, grads_e, out_e in parts:
            torch.mm(rows_e, grads_e, out=out_e)  # zeros for an expert without rows

    def add_to_tokens(self, rows: Tensor, out: Tensor) -> None:
        out.index_add_(0, self.token, rows.to(out.dtype))


class ExpertMLP(torch.autograd.Function):
    """The experts' MLP over parts. A part (PaddedBMM, PerExpertMM) has the following members.

    `experts`, `slots` its ranges of them;
    `gate`           (S, 1), 0 in padding slots;
    `gather`         (N, C) -> (S, C), each slot's token;
    `multiply`       (S, in), (E, in, out) -> (S, out), each slot times the weights of its expert;
    `weight_grad`    (S, in), (S, out), out (E, in, out): the sum over an expert's slots of rowᵀ grad;
    `add_to_tokens`  (S, C), out (N, C): adds each slot to its token.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w_in: Tensor, w_out: Tensor, weights: Tensor, experts: Tensor, activation: str
    ) -> Tensor:
        layout = PerExpertMM if experts.device.type == "cpu" else PaddedBMM
        ctx.slot, n_slot, ctx.parts = layout.build(weights, experts, w_in, x.dtype)
        ctx.activation, width = activation, w_out.shape[1]
        hidden = x.new_empty(n_slot, w_in.shape[-1])  # (S, P) pre-activations
        out = torch.zeros_like(x, dtype=weights.dtype)
        for part in ctx.parts:
            rows = part.gather(x)
            act = activate(part.multiply(rows, w_in[part.experts], hidden[part.slots]), width, activation)[0]
            part.add_to_tokens(part.multiply(act.mul_(part.gate), w_out[part.experts]), out)
        ctx.save_for_backward(x, w_in, w_out, hidden)
        return out.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]  # *grads there
        x, w_in, w_out, hidden = ctx.saved_tensors
        d_w_in, d_w_out = torch.empty_like(w_in), torch.empty_like(w_out)
        d_gate = ctx.parts[0].gate.new_empty(len(hidden))  # (S,)
        d_x = torch.zeros_like(x, dtype=d_gate.dtype)
        for part in ctx.parts:
            rows, h = part.gather(d_out), hidden[part.slots]
            d_act = part.multiply(rows, w_out[part.experts].mT)  # (S, H), before the gate
            act, inner = activate(h, w_out.shape[1], ctx.activation)
            torch.sum(act * d_act, -1, dtype=d_gate.dtype, out=d_gate[part.slots])
            part.weight_grad(act.mul_(part.gate), rows, d_w_out[part.experts])
            d_h = activate_backward(d_act.mul_(part.gate), h, inner, ctx.activation)  # (S, P)
            part.weight_grad(part.gather(x), d_h, d_w_in[part.experts])
            part.add_to_tokens(part.multiply(d_h, w_in[part.experts].mT), d_x)
        return d_x.to(x.dtype), d_w_in, d_w_out, d_gate[ctx.slot], None, None


class NarrowExperts(torch.autograd.Function):
    """One (token, hidden unit) pair at a time, by products of two rows and by weighted sums of rows.

    For a matrix product an expert of a few hidden units is too thin: gathering its tokens takes longer. Here nothing is
    gathered, and the time hardly depends on the number of experts. A hidden unit is a row of the weights; each token
    has J = K·H of them, or K·P.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w_in: Tensor, w_out: Tensor, weights: Tensor, experts: Tensor, activation: str
    ) -> Tensor:
        x, units, w_out = x.contiguous(), w_in.mT.flatten(0, 1), w_out.contiguous()
        hidden = dots(x, units, unit_rows(experts, w_in.shape[2])).unflatten(1, (experts.shape[1], -1))  # (N, K, P)
        act = activate(hidden, w_out.shape[1], activation)[0] * weights.to(x.dtype).unsqueeze(-1)
        ctx.activation = activation
        ctx.save_for_backward(x, units, w_out, weights, experts, hidden)
        return weighted_sums(unit_rows(experts, w_out.shape[1]), w_out.flatten(0, 1), act.flatten(1))

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]  # *grads there
        x, units, w_out, weights, experts, hidden = ctx.saved_tensors
        (E, H, _), K, P = w_out.shape, *hidden.shape[1:]
        d_out, gate = d_out.contiguous(), weights.to(x.dtype).unsqueeze(-1)
        d_act = dots(d_out, w_out.flatten(0, 1), unit_rows(experts, H)).unflatten(1, (K, H))  # before the gate
        act, inner = activate(hidden, H, ctx.activation)
        d_gate = (act * d_act).sum(-1, dtype=weights.dtype)
        d_hidden = activate_backward(d_act.mul_(gate), hidden, inner, ctx.activation)  # (N, K, P)
        d_x = weighted_sums(unit_rows(experts, P), units, d_hidden.flatten(1))

        load, _, order, _ = sort_by_expert(experts, E, 1)
        token, first = order // K, load.cumsum(0) - load  # (N·K,), (E,)

        def weight_grad(factors: Tensor, rows: Tensor) -> Tensor:  # (N, K, n), (N, C) -> (n, E, C)
            factors = factors.flatten(0, 1)[order].t()  # (n, N·K) by expert
            bags = first + len(order) * torch.arange(len(factors)).unsqueeze(1)
            sums = weighted_sums(token.repeat(len(factors)), rows, factors.flatten(), bags.flatten())
            return sums.view(len(factors), E, -1)

        d_w_in, d_w_out = weight_grad(d_hidden, x), weight_grad(act.mul_(gate), d_out)
        return d_x, d_w_in.permute(1, 2, 0), d_w_out.transpose(0, 1), d_gate, None, None


def unit_rows(experts: Tensor, width: int) -> Tensor:
    """The rows (N, K·width) of the hidden units of experts (N, K) among those of all experts, `width` of each."""
    return (experts.unsqueeze(-1) * width + torch.arange(width)).flatten(1)


def dots(rows: Tensor, table: Tensor, index: Tensor) -> Tensor:
    """Products (N, J) of each of rows (N, C) with J rows of a table (R, C), those of index (N, J)."""
    N, J = index.shape
    bag, starts = torch.arange(N).repeat_interleave(J), torch.arange(0, N * J, J)
    dot = torch.ops.aten._embedding_bag_per_sample_weights_backward
    return dot(rows, table, index.flatten(), starts, bag, 0).view(N, J)


def weighted_sums(index: Tensor, table: Tensor, factors: Tensor, bags: Tensor | None = None) -> Tensor:
    """Sums (N, C) of rows of a table (R, C), index (N, J), times factors; or index (S,) and where each bag begins."""
    return F.embedding_bag(index, table, bags, mode="sum", per_sample_weights=factors)


@torch.compiler.disable  # the sizes of its products depend on the loads: traced, the graph would break into pieces
def expert_mlp(
    x: Tensor, w_in: Tensor, w_out: Tensor, weights: Tensor, experts: Tensor, activation: str = "gelu"
) -> Tensor:
    """See `kernels.expert_mlp`."""
    narrow = experts.device.type == "cpu" and w_out.shape[1] <= NARROW and x.dtype in (torch.float32, torch.float64)
    return (NarrowExperts if narrow else ExpertMLP).apply(x, w_in, w_out, weights, experts, activation)
