"""The paper's GPT: decoder-only, pre-norm, a dense MLP or a mixture of experts in every block.

The paper leaves most of the architecture open; docs/choices.md lists each choice made here.

Shapes in comments: B sequences, T positions, C = n_embd, nh heads of size hs, N = B·T tokens, E
experts, K = top_k, H = expert_hidden, V = vocab_size, L = n_layer.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from attention import Attention, Documents, KVCache, find_documents, make_norm
from balance import MEASURED_FIELDS, Stats, count_margins, measure
from configure.schema import Model as ModelConfig
from gate_norm import gate_scale
from kernels import add, add_norm, expert_mlp, linear, route
from kernels.cross_entropy import linear_cross_entropy
from kernels.torch_grouped import activate
from router import Router, Routing, find_spec, hash_table


class Output(NamedTuple):
    """Output of GPT.forward."""

    logits: Tensor | None  # (B, 1, V) at the last position; None with targets
    loss: Tensor | None  # () cross-entropy alone, nats per token; None without targets
    stats: Stats
    losses: Tensor | None  # (B,) mean cross-entropy of each sequence, no gradient; None as `loss`


class MLP(nn.Module):
    """A dense MLP as wide as n experts.

    With n = K + shared experts it has as many active parameters as an MoE.
    """

    def __init__(self, config: ModelConfig, n: int, bias: bool) -> None:
        super().__init__()
        self.hidden = n * config.expert_hidden
        self.activation = config.activation
        self.w_in = nn.Linear(config.n_embd, (1 + config.gated) * self.hidden, bias=bias)
        self.w_out = nn.Linear(self.hidden, config.n_embd, bias=bias)

    def forward(self, x: Tensor, *_: Any) -> tuple[Tensor, None]:
        hidden = activate(self.w_in(x), self.hidden, self.activation)[0]
        return self.w_out(hidden), None


class Experts(nn.Module):
    """E MLPs as two stacked tensors.

    Were they separate parameters, an idle expert's would get no gradient and stall DDP.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        E, C, H = config.n_expert, config.n_embd, config.expert_hidden
        self.w_in = nn.Parameter(torch.empty(E, C, (1 + config.gated) * H))
        self.w_out = nn.Parameter(torch.empty(E, H, C))
        self.backend = config.backend
        self.activation = config.activation
        # w_in and w_out in autocast's type, for several passes to share
        self.copies: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        w_in, w_out = self.w_in, self.w_out
        if isinstance(w_in, DTensor) and isinstance(w_out, DTensor):  # train.expert_parallel
            w_in, w_out = w_in.to_local(), w_out.to_local()
        return expert_mlp(
            x, w_in, w_out, weights, experts, self.backend, self.activation, self.copies
        )


def build_router(config: ModelConfig, layer: int) -> Router:
    """The router of a layer with experts; in a hash layer with a table."""
    spec = find_spec(config.router)
    assert spec is not None, "a dense model has no router"
    E, K = config.n_expert, config.top_k
    by_table = layer < config.n_hash_layer
    table = hash_table(config.vocab_size, E, K, seed=layer) if by_table else None
    groups = (config.router_groups, config.router_group_k)
    return Router(config.n_embd, E, K, spec, gate_scale(config, by_table), table, *groups)


class MoE(nn.Module):
    """Mixture of experts, paper eq. 5: Σ_m g_m(x) E_m(x) over the K experts the router chose.

    No token is dropped. Shared experts add their output to every token's, without a gate
    (DeepSeekMoE, arXiv 2401.06066). In a hash layer the token's id chooses the experts.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.router = build_router(config, layer)
        self.router.fused = partial(route, backend=config.backend)
        self.router.linear = partial(linear, backend=config.backend)
        self.counts_margins = False  # in training, for train.bias_update = "quantile"
        self.experts = Experts(config)
        # runtime.parallel.start_journey: starts to send tokens (N, C), gates and experts (N, K)
        self.exchange: Callable[[Tensor, Tensor, Tensor], Any] | None = None
        self.shared = None
        if config.n_shared_expert:
            self.shared = MLP(config, config.n_shared_expert, bias=False)

    def forward(self, x: Tensor, exact: Tensor | None, idx: Tensor) -> tuple[Tensor, Stats]:
        """Compute the layer's output, and its Stats without their dimension L.

        Args:
            x: (B, T, C) input.
            exact: x in float32 if autocast has rounded it, else None.
            idx: (B, T) int64 token ids.

        Returns:
            The output (N, C), and Stats.
        """
        tokens = x.flatten(0, 1)  # (N, C)
        unrounded = tokens if exact is None else exact.flatten(0, 1)
        routing = self.router(unrounded, n_sequence=len(x), ids=idx)
        stats = self._measure(routing, len(x))
        if self.exchange is None:
            y = self.experts(tokens, routing.weights, routing.experts)  # (N, C)
            if self.shared is not None:
                y = y + self.shared(unrounded)[0]
            return y, stats  # FSDP2 warns of views that leave a block
        journey = self.exchange(tokens, routing.weights, routing.experts)
        shared = None
        if self.shared is not None:
            shared = self.shared(unrounded)[0]  # computed while rows travel
        y = journey.return_to_tokens(self.experts(*journey.arrive()))  # (N, C)
        return y if shared is None else y + shared, stats

    def _measure(self, routing: Routing, n_sequence: int) -> Stats:
        """Compute the layer's Stats in fp32, as the router does."""
        with torch.autocast(routing.logits.device.type, enabled=False):
            stats = measure(routing, n_sequence)
            if not (self.counts_margins and self.training):
                return stats
            router = self.router
            bounds = router.spec.score_range
            margins = count_margins(routing.scores, routing.experts, router.selection_bias, bounds)
            return stats._replace(margins=margins)


class Block(nn.Module):
    """One transformer layer: x + attention(norm(x)), then x + MLP(norm(x)) or x + MoE(norm(x)).

    Each residual sum is fused with the next norm, which then reads x once. So a block returns
    (x, y), and the next block computes x + y.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.dense = find_spec(config.router) is None
        self.backend = config.backend
        self.ln_1 = make_norm(config, config.n_embd)
        self.attn = Attention(config)
        self.ln_2 = make_norm(config, config.n_embd)
        n_active = config.top_k + config.n_shared_expert
        self.mlp = MLP(config, n_active, config.bias) if self.dense else MoE(config, layer)
        self.dropout = config.dropout
        # activation checkpointing: keep only x, recompute the block in the backward pass
        self.checkpointing = False

    def forward(
        self,
        x: Tensor,
        y: Tensor | None,
        idx: Tensor,
        past: KVCache | None = None,
        documents: Documents | None = None,
    ) -> tuple[Tensor, Tensor, Stats | None]:
        if self.checkpointing and torch.is_grad_enabled():
            x = add(x, y)
            return checkpoint(self._forward, x, None, idx, None, documents, use_reentrant=False)
        return self._forward(x, y, idx, past, documents)

    def _forward(
        self,
        x: Tensor,
        y: Tensor | None,
        idx: Tensor,
        past: KVCache | None,
        documents: Documents | None,
    ) -> tuple[Tensor, Tensor, Stats | None]:
        x, h, _ = add_norm(x, y, self.ln_1, backend=self.backend)
        y = self.attn(h, past, documents)
        x, h, exact = add_norm(x, y, self.ln_2, exact=not self.dense, backend=self.backend)
        y, stats = self.mlp(h, exact, idx)
        return x, F.dropout(y, self.dropout, self.training), stats


class GPT(nn.Module):
    """The language model.

    `config` may be any object with the attributes of `configure.schema.Model`.

    Attributes:
        document_token: the id that starts a document; None: attention crosses
            documents.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.document_token: int | None = None
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = None
        if config.pos == "learned":
            self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.blocks = nn.ModuleList(Block(config, i) for i in range(config.n_layer))
        self.ln_f = make_norm(config, config.n_embd)
        self.lm_head = None
        if not config.tie_embeddings:
            self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if not self.wte.weight.is_meta:
            self.init_weights()

    @torch.no_grad()
    def init_weights(
        self, draw: Callable[[Tensor, float, float], object] = nn.init.normal_
    ) -> None:
        """As GPT-2: N(0, init_std²), residual projections divided by √(2L).

        Norms and γ are 1, biases 0. `draw` fills a parameter with numbers of a mean and a standard
        deviation.
        """
        for name, p in self.named_parameters():
            if p.dim() > 1:
                std = self.config.init_std
                if name.endswith(("attn.proj.weight", "w_out", "w_out.weight")):
                    std /= math.sqrt(2 * self.config.n_layer)
                elif name.endswith("router.weight"):
                    std *= self.config.router_init_ratio
                draw(p, 0.0, std)
            elif name.endswith("bias"):
                p.fill_(0)
            elif name.endswith(("weight", "gamma")):
                p.fill_(1)
            else:
                raise ValueError(f"GPT.init_weights knows no initial value of {name}")

    def forward(
        self, idx: Tensor, targets: Tensor | None = None, past: KVCache | None = None
    ) -> Output:
        """Compute the loss of the targets, or the logits of the next token.

        Args:
            idx: (B, T) int64 token ids.
            targets: (B, T) int64, the token after each of idx.
            past: cache of the tokens before idx, with capacity for T more; idx is appended.

        Raises:
            ValueError: T is more than block_size.
        """
        x, layers = self.hidden(idx, past)
        logits = loss = losses = None
        if targets is None:
            logits = self.logits(x[:, [-1]])  # (B, 1, V)
        else:
            x = self.ln_f(x).flatten(0, 1)  # (N, C)
            targets = targets.flatten()  # (N,)
            loss, losses = linear_cross_entropy(x, self.head, targets, self.config.backend)
            losses = losses.view(idx.shape).mean(1)
        return Output(logits, loss, stack_stats(layers, idx.device), losses)

    def hidden(self, idx: Tensor, past: KVCache | None = None) -> tuple[Tensor, list[Stats | None]]:
        """The residual stream (B, T, C) before ln_f, and the Stats of each block."""
        T = idx.shape[1]
        if T > self.config.block_size:
            raise ValueError(
                f"{T} tokens are more than the model's block_size of {self.config.block_size}"
            )
        if past is None:
            documents = self.find_documents(idx)
            seen = documents
        else:
            past.prepare(idx, self.document_token)
            documents = None
            seen = past
        x = self.wte(idx)  # (B, T, C)
        if self.wpe is not None:
            positions = torch.arange(T, device=idx.device) if seen is None else seen.positions
            x = x + self.wpe(positions)
        x = F.dropout(x, self.config.dropout, self.training)
        y = None
        layers = []
        for block in self.blocks:
            x, y, stats = block(x, y, idx, past, documents)
            layers.append(stats)
        return add(x, y), layers

    def find_documents(self, idx: Tensor) -> Documents | None:
        """The documents of windows (B, T); None if attention crosses them."""
        if self.document_token is None:
            return None
        device = idx.device.type
        dtype = self.wte.weight.dtype
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        return find_documents(idx, self.document_token, dtype)

    @property
    def head(self) -> Tensor:
        """(V, C) weight of the LM head."""
        return self.wte.weight if self.lm_head is None else self.lm_head.weight

    def logits(self, x: Tensor) -> Tensor:
        """Logits (..., V) of the residual stream x (..., C) after the last block."""
        return F.linear(self.ln_f(x), self.head)


def stack_stats(layers: list[Stats | None], device: torch.device) -> Stats:
    """The Stats of the layers with experts, stacked to one row a layer; no rows without experts."""
    rows = [stats for stats in layers if stats is not None]
    if not rows:
        loads = torch.zeros(0, 0, 0, dtype=torch.int64, device=device)
        empty = torch.zeros(0, device=device)
        metrics: dict[str, Any] = dict.fromkeys(MEASURED_FIELDS, empty)
        return Stats(loads, loads.float(), z_loss=empty, **metrics)
    fields: dict[str, Any] = {}
    for name in Stats._fields:
        values = [getattr(stats, name) for stats in rows]
        fields[name] = None if values[0] is None else torch.stack(values)
    return Stats(**fields)
