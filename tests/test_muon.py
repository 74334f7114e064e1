"""Muon: the iteration against singular values, steps against an SVD in float64 and against torch's own."""

import pytest
import torch
from numerics import Operators, assert_near, seeded, tolerance
from test_updates import HOST_READS

from configure.schema import Config, Model, Optim
from model import GPT
from runtime.muon import COEFFICIENTS, Muon
from runtime.state import build_optimizer
from runtime.updates import Updates

SHAPES = {"wide": (5, 12), "tall": (12, 5), "square": (6, 6), "experts": (9, 4, 7), "tall experts": (3, 7, 4)}


def exact(x):
    """U p(S) Vᵀ by an SVD, where p repeats the quintic on singular values over their norm."""
    u, s, vt = torch.linalg.svd(x.double(), full_matrices=False)
    s = s / torch.linalg.vector_norm(s, dim=-1, keepdim=True).clamp_min(1e-30)
    for _ in range(5):
        s = COEFFICIENTS[0] * s + COEFFICIENTS[1] * s**3 + COEFFICIENTS[2] * s**5
    return u * s.unsqueeze(-2) @ vt


@pytest.mark.numerics
@pytest.mark.parametrize("scaled", [False, True])
def test_steps_equal_an_svd_in_float64(scaled):
    """Momentum, Nesterov's form, decay, clipping, a step that is skipped; a bias beside them follows AdamW."""
    start = [torch.randn(shape, generator=seeded(i)) for i, shape in enumerate(SHAPES.values())]
    mine, bias = [torch.nn.Parameter(p.clone()) for p in start], torch.nn.Parameter(torch.ones(3))
    twin = torch.nn.Parameter(bias.detach().clone())
    groups = [{"params": mine, "weight_decay": 0.1, "momentum": 0.9}, {"params": [bias], "weight_decay": 0.0}]
    optimizer = Muon(groups, lr=1.0, fused=True)
    for p in (*mine, bias):
        names = ("exp_avg", "exp_avg_sq") if p is bias else ("exp_avg",)
        optimizer.state[p] = {"step": torch.zeros(()), **{name: torch.zeros_like(p) for name in names}}
    updates = Updates(optimizer, Config(optim=Optim(grad_clip=0.5)), scaled)
    adamw = torch.optim.AdamW([twin], weight_decay=0)
    weights, means = [p.double() for p in start], [torch.zeros_like(p, dtype=torch.float64) for p in start]
    for step in range(6):
        drawn = [torch.randn(p.shape, generator=seeded(100 * step + i)) for i, p in enumerate((*mine, bias))]
        drawn[3][2] = 0  # an expert that is idle
        if step == 3:
            drawn[1][0, 0] = torch.inf
        for p, gradient in zip((*mine, bias), drawn, strict=True):
            p.grad = gradient * updates.scale
        lr = 0.02 * (step + 1)
        with Operators() as host:
            taken = updates.step(step, lr, torch.tensor(1.0, dtype=torch.float64))
        assert not HOST_READS & {*host.names} and taken == (step != 3)
        if step == 3:
            continue
        norm = torch.cat([gradient.flatten() for gradient in drawn]).norm().double()
        for i, gradient in enumerate(drawn[:-1]):
            gradient = gradient.double() * min(1.0, 0.5 / (norm + 1e-6))
            means[i] = 0.9 * means[i] + 0.1 * gradient
            ahead = exact(0.9 * means[i] + 0.1 * gradient)
            weights[i] = weights[i] * (1 - 0.1 * lr) - lr * 0.2 * max(gradient.shape[-2:]) ** 0.5 * ahead
        twin.grad, adamw.param_groups[0]["lr"] = drawn[-1] * min(1.0, 0.5 / (norm + 1e-6)).float(), lr
        adamw.step()
    for p, weight, mean in zip(mine, weights, means, strict=True):
        assert_near(p, weight, tolerance(torch.float32, 60, roundings=60), "weights")
        assert_near(optimizer.state[p]["exp_avg"], mean, tolerance(torch.float32, 60, roundings=20), "means")
        assert optimizer.state[p]["step"] == 5
    assert_near(bias, twin, tolerance(torch.float32, 60, roundings=20), "bias")


def test_which_parameters_muon_takes():
    shape = Model(n_layer=1, n_head=2, n_embd=8, vocab_size=16, n_expert=4, top_k=2, bias=True, tie_embeddings=False)
    model = GPT(shape)
    optimizer = build_optimizer(model, Optim(name="muon", router_lr_ratio=0.5))
    names = {p: name for name, p in model.named_parameters()}
    groups = {frozenset(names[p] for p in group["params"]): group for group in optimizer.param_groups}
    matrices = {f"blocks.0.attn.{name}.weight" for name in ("qkv", "proj")}
    matrices |= {f"blocks.0.mlp.experts.{name}" for name in ("w_in", "w_out")}
    assert [names for names, group in groups.items() if "momentum" in group] == [matrices]
    routers = frozenset(name for name in names.values() if ".router." in name)
    assert {name for of, group in groups.items() if group["lr_ratio"] == 0.5 for name in of} == routers
    decayed = {name for of, group in groups.items() if group["weight_decay"] for name in of}
    assert decayed == {*matrices, "wte.weight", "wpe.weight", "lm_head.weight", "blocks.0.mlp.router.weight"}
    assert {len(optimizer.state[p]) for p, name in names.items() if name in matrices} == {2}  # steps and one mean
