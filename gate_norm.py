"""The initial norm √E‖g‖² of a router's gates, and the factor that sets it (model.gate_norm).

A router's form sets the size of its gates at initialisation, over a 20-fold range, and with it the
size of the MoE's output. With model.gate_norm all routers start at one norm.

Logits of a fresh router are N(0, τ²) and independent over draws of W, with τ = init_std ·
router_init_ratio · √n_embd: LayerNorm or RMSNorm leaves inputs of squared length n_embd (where
model.norm_eps is small relative to the variance before it). E Σ g² is the mean over seeded samples.
"""

import math
from dataclasses import replace
from functools import cache

import torch

from configure.schema import Model as ModelConfig
from router import Router, RouterSpec, find_spec, monte_carlo_scale

PRECISION = 1e-3  # of a sampled E Σ g²: half of that in the norm, below a draw of W; not measured


def gate_scale(config: ModelConfig, by_table: bool = False) -> float:
    """The factor on the gates of `config`'s routers, in hash layers (`by_table`) or in others.

    It is model.gate_scale or, with model.gate_norm, the factor that sets √E‖g‖² to it, in seven
    digits: processors that round differently get the same.
    """
    spec = find_spec(config.router)
    if spec is None or not config.gate_norm:
        return config.gate_scale
    if torch.get_default_device().type == "meta":
        return math.nan  # only shapes are asked for
    return float(f"{config.gate_norm / own_gate_norm(config, config.n_embd, by_table):.7g}")


def own_gate_norm(config: ModelConfig, width: int, by_table: bool = False) -> float:
    """√E‖g‖² of fresh routers by themselves, without model.gate_norm and gate_scale; 1 if dense.

    Args:
        config: the model.
        width: C, which together with the std of the routers' weights sets the size of logits.
        by_table: of hash layers.
    """
    spec = find_spec(config.router)
    if spec is None:
        return 1.0
    c = monte_carlo_scale(config.n_expert, config.top_k) if spec.c == "monte_carlo" else spec.c
    tau = config.init_std * config.router_init_ratio * math.sqrt(width)
    form = replace(spec, c=1.0, gamma=False, bias=False)  # γ is initialised at 1, b at 0
    groups = (config.router_groups, config.router_group_k)
    return c * math.sqrt(sample_square(form, config.n_expert, config.top_k, tau, groups, by_table))


@cache
@torch.no_grad()
def sample_square(
    spec: RouterSpec,
    n_expert: int,
    top_k: int,
    tau: float,
    groups: tuple[int, int] = (1, 1),
    by_table: bool = False,
) -> float:
    """Estimate E Σ g² of `spec` for logits N(0, τ²). Seeded: each call gives the same.

    The standard error is PRECISION times the mean, so half of that in the norm. With `by_table`
    the experts are chosen without a look at the logits.
    """
    # building a router must not change the random numbers that the model's weights get
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        n_group, group_k = groups
        router = Router(n_expert, n_expert, top_k, spec, n_group=n_group, group_k=group_k)
    generator = torch.Generator().manual_seed(0)
    n_token = 2**20 // n_expert + 1  # per round, to bound the memory
    # which ones makes no difference: all logits are drawn alike
    experts = torch.arange(top_k).expand(n_token, -1) if by_table else None
    count = 0
    total = 0.0
    total_of_squares = 0.0
    while True:
        z = torch.randn(n_token, n_expert, generator=generator, device="cpu")
        gates = router.choose(tau * z, experts).weights.double()  # (n_token, K)
        squares = gates.square().sum(-1)
        count += n_token
        total += squares.sum().item()
        total_of_squares += squares.square().sum().item()
        mean = total / count
        variance = max(total_of_squares / count - mean**2, 0)
        if math.sqrt(variance / count) <= PRECISION * mean:
            return mean
