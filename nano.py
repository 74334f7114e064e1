"""nanoKERN in one file: a GPT with KERN's mixture of experts, its data and its training loop.

Start reading here. `python nano.py` trains on the source of Python's standard library and prints
losses and a sample. It took 4 minutes of one AMD EPYC core (2026-11-26) to a validation loss of
1.48. Equal weights and batches give the losses of train.py (tests/test_nano.py).
"""

import argparse
import math
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Settings, named and set as in config/quickstart.toml, and the letters of their dimensions
n_layer = 2
n_head = 2  # nh, each of hs = C / nh channels
n_embd = 128  # C
block_size = 256  # T, the tokens that the model sees at once
vocab_size = 257  # V, 256 bytes and end-of-text
end_of_text = 256  # the token after each document
n_expert = 64  # E
top_k = 8  # K, experts that compute a token
expert_hidden = 8  # H, hidden units of an expert
rope_base = 1e4
init_std = 0.06
batch_size = 8  # B, sequences per step: N = B · T tokens
max_steps = 1000
warmup_steps = 200
lr = 3e-3  # after the warm-up
min_lr = 3e-4  # in the end
weight_decay = 0.1  # of matrices alone
grad_clip = 1.0
balance_loss_coef = 0.01
temperature = 0.8  # of the sample
skips = {"test", "tests", "idle_test", "encodings", "pydoc_data", "site-packages", "dist-packages"}


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(n_embd, bias=False)
        self.qkv = nn.Linear(n_embd, 3 * n_embd, bias=False)
        self.proj = nn.Linear(n_embd, n_embd, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm(x)).unflatten(-1, (3, n_head, -1))  # (B, T, 3, nh, hs)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (B, nh, T, hs) each
        q = rotate(q)
        k = rotate(k)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, nh, T, hs)
        y = y.transpose(1, 2).flatten(2)  # (B, T, C), heads side by side
        return self.proj(y)


def rotate(x: Tensor) -> Tensor:
    """Turn pairs of channels of x (B, nh, T, hs) in proportion to position (arXiv 2104.09864)."""
    T, hs = x.shape[2:]
    frequency = rope_base ** (-torch.arange(0, hs, 2) / hs)  # (hs/2,) radians per position
    angle = torch.outer(torch.arange(T), frequency)  # (T, hs/2)
    a, b = x.chunk(2, dim=-1)  # (B, nh, T, hs/2) each
    turned = torch.complex(a, b) * torch.exp(1j * angle)
    return torch.cat((turned.real, turned.imag), dim=-1)


class MoE(nn.Module):
    """Mixture of experts: Σ_e g_e · MLP_e(x) over the K of E small MLPs that the router chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(n_embd, bias=False)
        self.router = nn.Linear(n_embd, n_expert)  # W and b
        nn.init.zeros_(self.router.bias)
        self.gamma = nn.Parameter(torch.ones(1))
        self.w_in = nn.Parameter(torch.empty(n_expert, n_embd, expert_hidden))
        self.w_out = nn.Parameter(torch.empty(n_expert, expert_hidden, n_embd))

    def route(self, x: Tensor) -> Tensor:
        """KERN's gates (N, E), c · γ · ReLU(s / (‖s‖ + ε)) · 1[top K], c = 1 (arXiv 2509.25913)."""
        logits = self.router(x)  # (N, E), s = W x + b
        norm = torch.linalg.vector_norm(logits, dim=-1, keepdim=True)  # (N, 1)
        scores = F.relu(logits / (norm + 1e-8))  # (N, E); a softmax router has logits.softmax(-1)
        ranking = scores.argsort(dim=-1, descending=True, stable=True)  # ties: lower index first
        chosen = torch.zeros_like(scores).scatter(1, ranking[:, :top_k], 1.0)  # (N, E), 1 or 0
        load = chosen.mean(0) / top_k  # (E,) share of the choices, 1/E if all are equal
        share = F.normalize(scores, p=1, dim=-1).mean(0)  # (E,) share of the scores, has a gradient
        self.balance_loss = n_expert * (load @ share)  # for train(); arXiv 2101.03961
        return self.gamma * scores * chosen

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(x).flatten(0, 1)  # (N, C)
        gates = self.route(tokens)
        y = torch.zeros_like(tokens)
        for gate, w_in, w_out in zip(gates.unbind(1), self.w_in, self.w_out, strict=True):
            own = gate.nonzero().squeeze(1)  # (n,) tokens of this expert
            hidden = F.gelu(tokens[own] @ w_in)  # (n, H)
            out = hidden @ w_out  # (n, C)
            y.index_add_(0, own, gate[own, None] * out)
        return y.view_as(x)


class GPT(nn.Module):
    """Token embedding, layers of attention and experts, LM head."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocab_size, n_embd)
        self.layers = nn.ModuleList()
        for _ in range(n_layer):
            self.layers.append(Attention())
            self.layers.append(MoE())
        self.norm = nn.LayerNorm(n_embd, bias=False)
        for name, p in self.named_parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=init_std)
            if name.endswith(("proj.weight", "w_out")):  # outputs of layers
                p.data /= math.sqrt(2 * n_layer)

    def logits(self, idx: Tensor) -> Tensor:
        """Return logits (B, T, V) for the token after each of idx (B, T)."""
        x = self.wte(idx)  # (B, T, C)
        for layer in self.layers:
            x = x + layer(x)  # the residual stream
        return F.linear(self.norm(x), self.wte.weight)  # the embedding is also the LM head

    def forward(self, windows: Tensor) -> Tensor:
        """Return the cross-entropy () of windows (B, T + 1), in nats per token."""
        logits = self.logits(windows[:, :-1])
        return F.cross_entropy(logits.mT, windows[:, 1:])


def read_text() -> Tensor:
    """Read Python's standard library, one token per byte: (n,) int64."""
    root = Path(sysconfig.get_path("stdlib"))
    tokens = []
    for path in sorted(root.rglob("*.py")):
        text = path.read_bytes()
        folders = path.relative_to(root).parts
        if text.strip() and skips.isdisjoint(folders):
            tokens.extend(text)
            tokens.append(end_of_text)
    return torch.tensor(tokens)


def train(model: GPT, batches: Iterable[Tensor]) -> Iterator[float]:
    """Take a step for each batch of windows (B, T + 1), and yield its loss before the step."""
    groups = []
    for p in model.parameters():
        decay = weight_decay if p.dim() > 1 else 0.0
        groups.append({"params": p, "weight_decay": decay})
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    for step, windows in enumerate(batches):
        loss = model(windows)
        total = loss
        for layer in model.layers:
            if isinstance(layer, MoE):
                total = total + balance_loss_coef / n_layer * layer.balance_loss
        total.backward()
        nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
        if step < warmup_steps:
            rate = lr * (step + 1) / warmup_steps
        else:  # a cosine from lr to min_lr
            progress = (step - warmup_steps) / (max_steps - warmup_steps)
            height = (1 + math.cos(math.pi * progress)) / 2  # 1 to 0
            rate = min_lr + height * (lr - min_lr)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=max_steps)
    max_steps = parser.parse_args().steps
    torch.manual_seed(0)
    windows = read_text().unfold(0, block_size + 1, block_size)  # (n, T + 1)
    train_windows = windows[:-2000]
    val_windows = windows[-2000::16]
    rows = torch.randint(len(train_windows), (max_steps, batch_size))
    batches = (train_windows[row] for row in rows)
    model = GPT()
    for step, loss in enumerate(train(model, batches), start=1):
        if step % 100 == 0 or step == 1:
            with torch.no_grad():
                val_loss = model(val_windows)
            print(f"step {step}: loss {loss:.4f}, validation loss {val_loss:.4f}")
    text = list(b"class Stack:\n    def ")
    torch.set_grad_enabled(False)
    for _ in range(500):
        logits = model.logits(torch.tensor([text[-block_size:]]))  # (1, T, V)
        probabilities = (logits[0, -1, :end_of_text] / temperature).softmax(0)  # (256,)
        text.append(int(torch.multinomial(probabilities, 1)))
    print(bytes(text).decode(errors="replace"))
