"""Experts in plain torch, for CPU and any GPU: rows sorted by expert, one matrix product per group of rows.

A row is one (token, chosen expert) pair. Rows of an expert lie together and are filled up to a whole number of blocks
with rows of gate 0. A CPU multiplies each expert's slice by that expert's weights: flat in skew, and blocks keep the
number of distinct shapes, and so of oneDNN primitives, small. A GPU does one `bmm` over all blocks, whose number is the
most any routing can need, so the host never waits for the device. docs/LOG.md has the alternatives' times.

For the backward pass only x, the pre-activations and indices are kept: with A = act(H) and dO the output's gradient,
the gate's gradient is <dO W_out^T, A>, so neither the experts' outputs nor the gathered inputs are needed (SonicMoE,
arXiv 2512.14080).
"""

import torch
import torch.nn.functional as F

BLOCK = {"cpu": 32, "cuda": 128}  # rows


class Layout:
    """Where the rows lie among S slots: `slot` (N, K) of each row, `token` (S,) and `gate` (S, 1) of each slot.

    On a CPU `slices` holds each expert's (first, last + 1) slot; on a GPU `block_expert` the expert of each block.
    Slots without a row read zeros (token N, a row that does not exist) and have gate 0.
    """

    def __init__(self, weights, experts, n_expert):
        N, K = experts.shape
        flat = experts.flatten()
        self.block = BLOCK.get(flat.device.type, 128)
        load = torch.zeros(n_expert, dtype=torch.int64, device=flat.device).scatter_add_(0, flat, torch.ones_like(flat))
        blocks = (load + self.block - 1) // self.block
        last_block = blocks.cumsum(0)
        order = flat.argsort(stable=True)  # rows by expert, by token within an expert
        owner = flat[order]
        rank = torch.arange(N * K, device=flat.device) - (load.cumsum(0) - load)[owner]  # a row's place in its expert
        slot = (last_block - blocks)[owner] * self.block + rank
        if flat.device.type == "cpu":
            ends = (last_block * self.block).tolist()
            self.slices = list(zip([0, *ends], ends, strict=False))
            n_slot = ends[-1]
        else:
            n_block = N * K // self.block + n_expert
            index = torch.arange(n_block, device=flat.device)
            self.slices = None
            self.block_expert = torch.searchsorted(last_block, index, right=True).clamp_(max=n_expert - 1)
            n_slot = n_block * self.block
        self.n_expert = n_expert
        self.slot = torch.empty_like(flat).scatter_(0, order, slot).view(N, K)
        self.token = torch.full((n_slot,), N, device=flat.device).scatter_(0, slot, order // K)
        self.gate = torch.zeros(n_slot, dtype=weights.dtype, device=flat.device)
        self.gate = self.gate.scatter_(0, slot, weights.flatten()[order]).unsqueeze(-1)

    def blocks(self, rows):
        return rows.view(-1, self.block, rows.shape[-1])

    def product(self, rows, w):
        """Each row times the weights of its expert: (S, in), (E, in, out) -> (S, out)."""
        if self.slices is None:
            return torch.bmm(self.blocks(rows), w.index_select(0, self.block_expert)).flatten(0, 1)
        out = rows.new_empty(len(rows), w.shape[-1])
        for (first, end), w_e in zip(self.slices, w.unbind(), strict=True):
            if end > first:
                torch.mm(rows[first:end], w_e, out=out[first:end])
        return out

    def weight_grad(self, rows, grads):
        """Σ over an expert's rows of row^T grad: (S, in), (S, out) -> (E, in, out)."""
        if self.slices is None:
            blocks = torch.bmm(self.blocks(rows).mT, self.blocks(grads))
            wide = torch.promote_types(blocks.dtype, torch.float32)  # an expert's blocks are many
            out = torch.zeros(self.n_expert, *blocks.shape[1:], dtype=wide, device=blocks.device)
            return out.index_add_(0, self.block_expert, blocks.to(wide)).to(blocks.dtype)
        out = rows.new_zeros(self.n_expert, rows.shape[1], grads.shape[1])
        for (first, end), out_e in zip(self.slices, out.unbind(), strict=True):
            if end > first:
                torch.mm(rows[first:end].t(), grads[first:end], out=out_e)
        return out

    def gather(self, x):
        """(N, C) -> (S, C): the token of each slot, zeros where it holds no row."""
        return torch.cat([x, x.new_zeros(1, x.shape[1])]).index_select(0, self.token)

    def combine(self, rows):
        """(S, C) -> (N, C): the sum of each token's K rows, no atomics."""
        return F.embedding_bag(self.slot, rows, mode="sum")


class ExpertMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w_in, w_out, weights, experts):
        layout = Layout(weights, experts, len(w_in))
        hidden = layout.product(layout.gather(x), w_in)  # (S, H) pre-activations
        gated = (F.gelu(hidden) * layout.gate).to(x.dtype)
        ctx.layout = layout
        ctx.save_for_backward(x, w_in, w_out, hidden)
        return layout.combine(layout.product(gated, w_out))

    @staticmethod
    def backward(ctx, d_out):
        layout = ctx.layout
        x, w_in, w_out, hidden = ctx.saved_tensors
        rows = layout.gather(d_out)  # (S, C)
        act = F.gelu(hidden)  # (S, H)
        d_act = layout.product(rows, w_out.mT)  # before the gate
        d_gate = (d_act * act).sum(-1, dtype=layout.gate.dtype)[layout.slot]  # (N, K)
        d_hidden = torch.ops.aten.gelu_backward((d_act * layout.gate).to(x.dtype), hidden)
        d_w_out = layout.weight_grad((act * layout.gate).to(x.dtype), rows)
        d_w_in = layout.weight_grad(layout.gather(x), d_hidden)
        d_x = layout.combine(layout.product(d_hidden, w_in.mT))
        return d_x, d_w_in, d_w_out, d_gate, None


def expert_mlp(x, w_in, w_out, weights, experts):
    """See `kernels.expert_mlp`."""
    return ExpertMLP.apply(x, w_in, w_out, weights, experts)
