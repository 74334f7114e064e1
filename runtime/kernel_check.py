"""Compare the Triton kernels on this GPU with torch's operators, before a run trains with them.

A new compiler or a new kind of GPU may turn a kernel into one that computes wrong gradients and
says nothing. Each kernel is run at the model's widths, on random numbers, in each backend once.
"""

from collections.abc import Callable
from functools import partial
from importlib.metadata import version

import torch
from torch import Tensor

import kernels
from attention import make_norm
from balance import measure
from configure.schema import Model
from kernels import add_norm, expert_mlp, linear, route
from kernels.cross_entropy import linear_cross_entropy
from model import build_router
from router import find_spec
from runtime.optimizers import AdamW

Draw = Callable[..., Tensor]  # of a shape: normal random numbers, the same for each backend
# of the model, tokens, Draw, and a backend: outputs and gradients
Compute = Callable[[Model, int, Draw, str], list[Tensor]]

ROWS = 256  # of kernels whose tiles do not depend on the number of tokens


def check_kernels(config: Model, n_token: int, device: torch.device, dtype: torch.dtype) -> None:
    """Leave the kernels unused in this process (`kernels.defect`) if one computes wrongly.

    Takes `find_wrong_kernel`'s arguments.
    """
    wrong = find_wrong_kernel(config, n_token, device, dtype)
    if wrong:
        kernels.defect = (
            f"computes wrong values ({wrong}) on {torch.cuda.get_device_name(device)} with Triton "
            f"{version('triton')}: if you changed what it computes, change its kernel alike "
            "(kernels/triton_*.py); else install another release of torch, which brings another "
            "Triton"
        )
    torch.cuda.empty_cache()


def find_wrong_kernel(config: Model, n_token: int, device: torch.device, dtype: torch.dtype) -> str:
    """Name the first kernel whose results differ from torch's; empty if all agree.

    Args:
        config: of the model; its backend is ignored.
        n_token: tokens of a micro-batch.
        device: where the kernels can run.
        dtype: of autocast; float32: without autocast.
    """
    cases: list[tuple[str, Compute, torch.dtype]] = [
        ("norm", compute_norm, dtype),
        ("LM head", compute_head, dtype),
    ]
    if find_spec(config.router) is not None:
        cases.append(("router's product", compute_logits, torch.float32))
        cases.append(("routing", compute_routing, torch.float32))
        cases.append(("experts", compute_experts, dtype))
        if dtype != torch.float32:
            cases.append(("AdamW", compute_adamw, torch.float32))
        # four tiles of rows for each expert: any larger batch takes the same tiles
        n_token = min(n_token, -(-4 * 128 * config.n_expert // config.top_k))
    for name, compute, precision in cases:
        results = []
        for backend in ("triton", "torch"):
            generator = torch.Generator(device).manual_seed(0)
            draw = partial(torch.randn, generator=generator, requires_grad=True)
            autocast = torch.autocast(device.type, dtype, enabled=dtype != torch.float32)
            with device, autocast:
                results.append(compute(config, n_token, draw, backend))
        # 8 roundings; kernels of float32 add up thousands of terms in an order of their own
        bound = max(8 * torch.finfo(precision).eps, 2e-5)
        for actual, expected in zip(*results, strict=True):
            if not is_near(actual, expected, bound):
                return name
    return ""


def is_near(actual: Tensor, expected: Tensor, bound: float) -> bool:
    """True if no row differs by more than `bound` times the longest row; NaN differs."""
    actual, expected = torch.atleast_1d(actual.float()), torch.atleast_1d(expected.float())
    error = torch.linalg.vector_norm(actual - expected, dim=-1).max()
    return bool(error <= bound * torch.linalg.vector_norm(expected, dim=-1).max())


def differentiate(outputs: list[Tensor], inputs: list[Tensor], draw: Draw) -> list[Tensor]:
    """The outputs, and the gradients of a random weighted sum of those that have one."""
    with_gradient = [output for output in outputs if output.requires_grad]
    weights = [draw(output.shape).to(output.dtype) for output in with_gradient]
    gradients = torch.autograd.grad(with_gradient, inputs, weights)
    return [output.detach() for output in outputs] + list(gradients)


def compute_norm(config: Model, n_token: int, draw: Draw, backend: str) -> list[Tensor]:
    """Add a layer's output to the residual stream and normalise the sum."""
    x, y = draw(ROWS, config.n_embd), draw(ROWS, config.n_embd)
    if torch.is_autocast_enabled(x.device.type):
        y = y.to(torch.get_autocast_dtype(x.device.type))  # of the layer before
    norm = make_norm(config, config.n_embd)
    outputs = add_norm(x, y, norm, exact=True, backend=backend)
    return differentiate(
        [out for out in outputs if out is not None], [x, y, *norm.parameters()], draw
    )


def compute_head(config: Model, n_token: int, draw: Draw, backend: str) -> list[Tensor]:
    """Compute the loss of random tokens."""
    C, V = config.n_embd, config.vocab_size
    x = draw(ROWS, C)
    weight = draw(V, C) / C**0.5
    targets = draw(ROWS, V).argmax(-1)
    loss, losses = linear_cross_entropy(x, weight, targets, backend)
    return [losses, *differentiate([loss], [x, weight], draw)]


def compute_logits(config: Model, n_token: int, draw: Draw, backend: str) -> list[Tensor]:
    """Multiply tokens by a router's weight."""
    C, E = config.n_embd, config.n_expert
    x = draw(n_token, C)
    weight = draw(E, C)
    bias = draw(E)
    with torch.autocast(x.device.type, enabled=False):
        logits = linear(x, weight, bias, backend)
        return differentiate([logits], [x, weight, bias], draw)


def compute_routing(config: Model, n_token: int, draw: Draw, backend: str) -> list[Tensor]:
    """Route tokens whose logits are so far apart that no rounding changes a choice."""
    router = build_router(config, layer=config.n_layer)  # beyond all hash layers
    router.fused = partial(route, backend=backend)
    router._logits = lambda x: x
    order = draw(n_token, config.n_expert).argsort(-1)
    logits = torch.linspace(-2, 2, config.n_expert, requires_grad=True)[order]
    routing = router(logits)
    with torch.autocast(logits.device.type, enabled=False):
        stats = measure(routing, 1)
    numbers = [number for number in stats if number is not None]
    return differentiate([routing.weights, routing.experts, *numbers], [logits], draw)


def compute_experts(config: Model, n_token: int, draw: Draw, backend: str) -> list[Tensor]:
    """Compute experts of tokens that choose at random."""
    E, C, H = config.n_expert, config.n_embd, config.expert_hidden
    x = draw(n_token, C)
    w_in = draw(E, C, (1 + config.gated) * H) / C**0.5
    w_out = draw(E, H, C) / H**0.5
    weights = draw(n_token, config.top_k)
    experts = draw(n_token, E).topk(config.top_k).indices
    out = expert_mlp(x, w_in, w_out, weights, experts, backend, config.activation)
    return differentiate([out], [x, w_in, w_out, weights], draw)


def compute_adamw(config: Model, n_token: int, draw: Draw, backend: str) -> list[Tensor]:
    """Take a step of AdamW; the kernel also writes the weight's copy in half precision."""
    weight, gradient = draw(4097).detach(), draw(4097).detach()
    settings = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    if backend == "torch":
        weight.grad = gradient
        optimizer = AdamW([weight], **settings)
        optimizer.step()
        state = optimizer.state[weight]
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        copy = weight.half()
    else:
        mean, square = torch.zeros(4097), torch.zeros(4097)
        copy = torch.empty(4097, dtype=torch.half)
        one, zero = torch.ones(()), torch.zeros(())
        kernels.triton.triton_adamw.adamw_step(
            weight,
            gradient,
            mean,
            square,
            copy,
            one,  # steps taken
            one,  # the gradient's scale
            zero,  # nothing is infinite
            *settings.values(),
        )
    rounding = copy - weight.half()  # 0: the copy is the weight's own
    return [weight, mean, square, rounding]
