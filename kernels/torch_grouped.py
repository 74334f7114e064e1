"""Experts in plain torch, for CPU and any GPU: matrix products over rows, a row being one (token, chosen expert) pair.

Rows lie sorted by expert, in slots. A GPU takes all experts at once (`Blocks`): an expert's rows are filled up to whole
blocks and multiplied by one `bmm` over all blocks, whose number is the most any routing can need, so the host never
waits for the device. A CPU takes a few experts at a time (`Slices`), from the gathered tokens to the sum, while what
they need is in the cache, with one product per expert. Both are flat in skew. Where experts are tiny a CPU is quicker
with all of them on all tokens (`Grid`). docs/performance.md has the times, and those of the alternatives.

For the backward pass only x, the pre-activations and indices are kept: with A = act(H) and dO the output's gradient,
the gate's gradient is <dO W_out^T, A>, so neither the experts' outputs nor the gathered inputs are needed (SonicMoE,
arXiv 2512.14080). The grid keeps those of all experts, N·E·H instead of N·K·H, and reordered weights.
"""

import torch
import torch.nn.functional as F

GRID = 64  # times K: E·H up to which all experts take all tokens, see docs/performance.md
PART_BYTES = 2**23  # of the gathered tokens that a CPU works on at a time


def sort(experts, n_expert, block):
    """Rows by expert, then by token, each expert's filled up to whole blocks.

    Returns `load` and `blocks`, both (E,), `order` (N·K,), the entries of the flattened `experts` in that order, and
    `slot` (N·K,), where each of them lies.
    """
    flat = experts.flatten()
    load = torch.zeros(n_expert, dtype=torch.int64, device=flat.device).scatter_add_(0, flat, torch.ones_like(flat))
    blocks = (load + block - 1) // block
    order = flat.int().argsort(stable=True)  # of int32 in half the time of int64
    owner = flat[order]
    first = (blocks.cumsum(0) - blocks) * block - (load.cumsum(0) - load)
    return load, blocks, order, first[owner] + torch.arange(len(flat), device=flat.device)


def scatter(values, slot, n_slot, fill=0):
    """(R,) values -> (n_slot,) with each at its slot and `fill` elsewhere."""
    return torch.full((n_slot,), fill, dtype=values.dtype, device=values.device).scatter_(0, slot, values)


class Blocks:
    """All experts. Slots without a row read zeros (token N, which does not exist) and have gate 0. On a GPU the
    weights' gradients repeat bit for bit only under train.deterministic: `index_add_` uses atomics."""

    size = 128  # rows

    def __init__(self, slot, token, gate, expert):
        self.slot, self.token, self.gate, self.expert = slot, token, gate, expert  # (N, K), (S,), (S, 1), (blocks,)
        self.experts, self.slots = slice(None), slice(None)

    @classmethod
    def of(cls, weights, experts, w_in, dtype):
        """(slot (N, K) of each row, the number of slots, [Blocks])."""
        (N, K), n_expert = experts.shape, len(w_in)
        _, blocks, order, slot = sort(experts, n_expert, cls.size)
        n_block = N * K // cls.size + n_expert
        index = torch.arange(n_block, device=slot.device)
        expert = torch.searchsorted(blocks.cumsum(0), index, right=True).clamp_(max=n_expert - 1)
        token = scatter(order // K, slot, n_block * cls.size, fill=N)
        gate = scatter(weights.flatten()[order], slot, n_block * cls.size).unsqueeze(-1)
        slots = torch.empty_like(slot).scatter_(0, order, slot).view(N, K)
        return slots, n_block * cls.size, [cls(slots, token, gate, expert)]

    def cut(self, rows):
        return rows.view(-1, self.size, rows.shape[-1])

    def gather(self, x):
        return torch.cat([x, x.new_zeros(1, x.shape[1])]).index_select(0, self.token)

    def product(self, rows, w, out=None):
        product = torch.bmm(self.cut(rows), w.index_select(0, self.expert)).flatten(0, 1)
        return product if out is None else out.copy_(product)

    def weight_grad(self, rows, grads, out):
        blocks = torch.bmm(self.cut(rows).mT, self.cut(grads))
        wide = torch.promote_types(blocks.dtype, torch.float32)  # an expert's blocks are many
        total = torch.zeros(out.shape, dtype=wide, device=out.device)
        out.copy_(total.index_add_(0, self.expert, blocks.to(wide)))

    def add(self, rows, out):
        out += F.embedding_bag(self.slot, rows, mode="sum")  # no atomics


class Slices:
    """Some experts in a row. Slots without a row have gate 0 and a token of the same expert: what is not finite in it
    reaches no other token."""

    def __init__(self, experts, slots, sizes, token, gate):
        self.experts, self.slots, self.sizes, self.token, self.gate = experts, slots, sizes, token, gate

    @classmethod
    def of(cls, weights, experts, w_in, dtype):
        """(slot (N, K) of each row, the number of slots, [Slices]). The host reads the loads.

        In half precision an expert's rows are filled up to a multiple of 32: oneDNN builds a kernel for every number of
        rows that it meets.
        """
        (N, K), (n_expert, C, _) = experts.shape, w_in.shape
        block = 32 if dtype in (torch.float16, torch.bfloat16) else 1
        load, blocks, order, slot = sort(experts, n_expert, block)
        sizes, filler = (blocks * block).tolist(), order // K
        n_slot = sum(sizes)
        token = filler
        if n_slot > len(slot):
            last = filler[(load.cumsum(0) - 1).clamp_min(0)]  # token of each expert
            token = last.repeat_interleave(blocks * block, output_size=n_slot).scatter_(0, slot, filler)
        gate = scatter(weights.flatten()[order], slot, n_slot).unsqueeze(-1)
        most = PART_BYTES // (C * dtype.itemsize)
        parts, first, begin = [], 0, 0
        for e in range(n_expert):
            end = begin + sum(sizes[first : e + 1])
            if e + 1 == n_expert or end + sizes[e + 1] - begin > most:
                slots = slice(begin, end)
                parts.append(cls(slice(first, e + 1), slots, sizes[first : e + 1], token[slots], gate[slots]))
                first, begin = e + 1, end
        return torch.empty_like(slot).scatter_(0, order, slot).view(N, K), n_slot, parts

    def gather(self, x):
        return x.index_select(0, self.token)

    def product(self, rows, w, out=None):
        out = rows.new_empty(len(rows), w.shape[-1]) if out is None else out
        for rows_e, w_e, out_e in zip(rows.split(self.sizes), w.unbind(), out.split(self.sizes), strict=True):
            torch.mm(rows_e, w_e, out=out_e)
        return out

    def weight_grad(self, rows, grads, out):
        parts = zip(rows.t().split(self.sizes, 1), grads.split(self.sizes), out.unbind(), strict=True)
        for rows_e, grads_e, out_e in parts:
            torch.mm(rows_e, grads_e, out=out_e)  # zeros where there are no rows

    def add(self, rows, out):
        out.index_add_(0, self.token, rows.to(out.dtype))


class ExpertMLP(torch.autograd.Function):
    """A part of the experts knows `experts` and `slots`, the slices that are its own, `gate` (S, 1) of its slots, and

    `gather`       (N, C) -> (S, C), each slot's token;
    `product`      (S, in), (E, in, out) -> (S, out), each slot times the weights of its expert;
    `weight_grad`  (S, in), (S, out), out (E, in, out): the sum over an expert's slots of row^T grad;
    `add`          (S, C), out (N, C): adds each slot to its token.
    """

    @staticmethod
    def forward(ctx, x, w_in, w_out, weights, experts):
        layout = Slices if experts.device.type == "cpu" else Blocks
        ctx.slot, n_slot, ctx.parts = layout.of(weights, experts, w_in, x.dtype)
        hidden = x.new_empty(n_slot, w_in.shape[-1])  # pre-activations
        out = torch.zeros_like(x, dtype=weights.dtype)
        for part in ctx.parts:
            rows = part.gather(x)
            h = part.product(rows, w_in[part.experts], hidden[part.slots])
            part.add(part.product(F.gelu(h).mul_(part.gate), w_out[part.experts]), out)
        ctx.save_for_backward(x, w_in, w_out, hidden)
        return out.to(x.dtype)

    @staticmethod
    def backward(ctx, d_out):
        x, w_in, w_out, hidden = ctx.saved_tensors
        d_w_in, d_w_out = torch.empty_like(w_in), torch.empty_like(w_out)
        d_gate = ctx.parts[0].gate.new_empty(len(hidden))
        d_x = torch.zeros_like(x, dtype=d_gate.dtype)
        for part in ctx.parts:
            rows, h = part.gather(d_out), hidden[part.slots]
            d_act = part.product(rows, w_out[part.experts].mT)  # before the gate
            act = F.gelu(h)
            torch.sum(act * d_act, -1, dtype=d_gate.dtype, out=d_gate[part.slots])
            part.weight_grad(act.mul_(part.gate), rows, d_w_out[part.experts])
            d_h = torch.ops.aten.gelu_backward(d_act.mul_(part.gate), h)
            part.weight_grad(part.gather(x), d_h, d_w_in[part.experts])
            part.add(part.product(d_h, w_in[part.experts].mT), d_x)
        return d_x.to(x.dtype), d_w_in, d_w_out, d_gate[ctx.slot], None


class Grid(torch.autograd.Function):
    """All experts on all tokens, with gate 0 where they were not chosen. A token that is not finite reaches all of
    them, an expert that overflows only the tokens that chose it.

    Pre-activations are (N, H, E): what differs by expert lies along the last dimension, where a CPU has its vectors.
    """

    @staticmethod
    def forward(ctx, x, w_in, w_out, weights, experts):
        (E, C, H), N = w_in.shape, len(x)
        gate = weights.new_zeros(N, 1, E).scatter_(2, experts.unsqueeze(1), weights.unsqueeze(1)).to(x.dtype)
        others = experts.new_ones(N, 1, E, dtype=torch.bool).scatter_(2, experts.unsqueeze(1), False)
        w_in, w_out = w_in.permute(1, 2, 0).reshape(C, H * E), w_out.transpose(0, 1).reshape(H * E, C)
        hidden = (x @ w_in).view(N, H, E).masked_fill_(others, 0)  # 0 times what overflows would be NaN
        ctx.gate_dtype = weights.dtype
        ctx.save_for_backward(x, w_in, w_out, hidden, gate, others, experts)
        return F.gelu(hidden).mul_(gate).view(N, H * E) @ w_out

    @staticmethod
    def backward(ctx, d_out):
        x, w_in, w_out, hidden, gate, others, experts = ctx.saved_tensors
        (N, H, E), C = hidden.shape, x.shape[1]
        d_act = (d_out @ w_out.t()).view(N, H, E).masked_fill_(others, 0)  # before the gate
        act = F.gelu(hidden)
        d_gate = (act * d_act).sum(1, dtype=ctx.gate_dtype).gather(1, experts)
        d_w_out = (act.mul_(gate).view(N, H * E).t() @ d_out).view(H, E, C).transpose(0, 1)
        d_hidden = torch.ops.aten.gelu_backward(d_act.mul_(gate), hidden).view(N, H * E)
        d_w_in = (x.t() @ d_hidden).view(C, H, E).permute(2, 0, 1)
        return d_hidden @ w_in.t(), d_w_in, d_w_out, d_gate, None


def pick(w_in, experts):
    """The autograd function that is quickest for them."""
    (E, _, H), K = w_in.shape, experts.shape[1]
    return Grid if experts.device.type == "cpu" and E * H <= GRID * K else ExpertMLP


@torch.compiler.disable  # its slices follow the loads: traced, it would break into pieces
def expert_mlp(x, w_in, w_out, weights, experts):
    """See `kernels.expert_mlp`."""
    return pick(w_in, experts).apply(x, w_in, w_out, weights, experts)
