"""What blocks compute besides plain products, by several backends that agree in all values.

To add a backend, add a line to BACKENDS. `reference` is the slow, obvious oracle that the others
are tested against.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels import reference, torch_grouped

BACKENDS: dict[str, Callable[..., Tensor]] = {
    "reference": reference.expert_mlp,
    "torch": torch_grouped.expert_mlp,
    "triton": lambda *arguments: triton.triton_experts.expert_mlp(*arguments),
}
# kernels/triton_kernels.py, once `find_triton_problem` has imported it: only devices that need the
# kernels wait for Triton's import
triton: Any = None
# why the kernels are not to be trusted on this device; set by runtime/kernel_check.py
defect = ""


def expert_mlp(
    x: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    weights: Tensor,
    experts: Tensor,
    backend: str = "auto",
    activation: str = "gelu",
    half_weights: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """out[n] = Σ_k weights[n, k] · act(x[n] @ w_in[e]) @ w_out[e], with e = experts[n, k].

    Dropless at any imbalance.

    Gated experts compute act(a) · b with a, b = the two halves of x[n] @ w_in[e].

    Args:
        x: (N, C) tokens.
        w_in: (E, C, H) up-projections of all experts; gated: (E, C, 2H), the gate's before the
            up-projections.
        w_out: (E, H, C) down-projections of all experts.
        weights: (N, K) gates, fp32 (fp64 with fp64 inputs).
        experts: (N, K) int64 in [0, E), the K experts of a token distinct.
        backend: a key of BACKENDS, or "auto": triton where it can run, else torch.
        activation: "gelu" or "silu"; "gelu" is the exact (erf) one.
        half_weights: under autocast, w_in and w_out in its dtype, for several calls to share.
            Gradients go to w_in and w_out.

    Returns:
        (N, C) in x's dtype; under autocast, in the autocast dtype like any matrix product.

    Raises:
        ValueError: unknown backend, or triton where it cannot run.
    """
    device = x.device.type
    if not torch.is_autocast_enabled(device):
        half_weights = None
    else:
        dtype = torch.get_autocast_dtype(device)
        x = x.to(dtype)
        if half_weights is None:
            half_weights = (w_in.detach().to(dtype), w_out.detach().to(dtype))
    name = choose_backend(backend, x.device, x.dtype)
    if name == "triton":
        return BACKENDS[name](x, w_in, w_out, weights, experts, activation, half_weights)
    if half_weights is not None:
        w_in = CastWithGrad.apply(w_in, half_weights[0])
        w_out = CastWithGrad.apply(w_out, half_weights[1])
    return BACKENDS[name](x, w_in, w_out, weights, experts, activation)


def route(
    logits: Tensor,
    selection_bias: Tensor,
    c: Tensor,
    gamma: Tensor | None,
    formula: tuple[str, str, str],
    top_k: int,
    n_sequence: int,
    backend: str = "auto",
) -> tuple[Tensor, ...] | None:
    """Compute what `router.Router` decides, and its statistics, from logits in one Triton kernel.

    Args:
        logits: (N, E), of `n_sequence` sequences of equally many tokens. Carries the gradient.
        selection_bias: (E,) β.
        c: (1,) constant.
        gamma: (1,) γ, if the router has one. Carries the gradient.
        formula: φ, pre and post of `router.RouterSpec`.
        top_k: K.
        n_sequence: B.
        backend: as in `expert_mlp`.

    Returns:
        `Routing`'s weights, experts and scores, the last two without gradient, then the fields of
        `balance.Stats` in order. None, which asks for torch operators, if the backend is not
        triton, φ is new to the kernel, or experts are too many for it.
    """
    if choose_backend(backend, logits.device, logits.dtype) != "triton":
        return None
    kernel = triton.triton_router
    if formula[0] not in kernel.PHIS or logits.shape[1] > kernel.LARGEST:
        return None
    selection_bias, c = selection_bias.to(logits.dtype), c.to(logits.dtype)
    gamma = None if gamma is None else gamma.to(logits.dtype)
    weights, experts, scores, loads, probability, scalars, z_loss = kernel.compute_routing(
        logits.contiguous(), selection_bias, c, gamma, *formula, top_k, n_sequence
    )
    return (
        weights,
        experts,
        scores.detach(),
        loads,
        probability,
        z_loss,
        *scalars.detach()[1:].unbind(),
    )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, backend: str = "auto") -> Tensor:
    """Compute a router's logits (N, E) in float32, by tensor cores where the backend is triton.

    Args:
        x: (N, C) tokens.
        weight: (E, C).
        bias: (E,), or None.
        backend: as in `expert_mlp`.

    Returns:
        x weightᵀ + bias in x's dtype, float32 or float64.
    """
    chosen = choose_backend(backend, x.device, x.dtype)
    if chosen != "triton" or x.dtype != torch.float32:
        return F.linear(x, weight, bias)
    kernel = triton.triton_linear
    fits = triton.triton_experts.major(x.device) == kernel.CAPABILITY
    if not fits or len(weight) > kernel.LARGEST:
        return F.linear(x, weight, bias)
    return kernel.multiply_by_weight(x.contiguous(), weight.contiguous(), bias)


def add_norm(
    x: Tensor,
    y: Tensor | None,
    norm: nn.LayerNorm | nn.RMSNorm,
    exact: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Add a layer's output to the residual stream and normalise the sum for the next layer.

    In Triton it is one pass.

    Args:
        x: (..., C) residual stream.
        y: output of the layer before, as many elements, also in half precision; None adds nothing.
        norm: the next layer's, over C.
        exact: whether the norm is wanted in x's dtype, too. Under autocast matrix products take it
            rounded.
        backend: as in `expert_mlp`.

    Returns:
        x + y in x's dtype; its norm, in autocast's dtype or one that autocast casts to it; that in
        x's dtype, or None if it is not wanted or the same.
    """
    device = x.device.type
    dtype = x.dtype
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    chosen = choose_backend(backend, x.device, x.dtype)
    if chosen == "triton" and x.shape[-1] <= triton.triton_norm.LARGEST:
        wants_both = exact and dtype != x.dtype
        total, normed, full = triton.triton_norm.normalize_sum(
            x.contiguous(),
            None if y is None else y.view_as(x).contiguous(),
            norm.weight,
            getattr(norm, "bias", None),
            norm.eps,
            isinstance(norm, nn.RMSNorm),
            dtype,
            wants_both,
        )
        return total, normed, full if wants_both else None
    total = add(x, y)
    full = norm(total)
    if exact and dtype != full.dtype:
        return total, full.to(dtype), full
    return total, full, None


def add(x: Tensor, y: Tensor | None) -> Tensor:
    """Return x + y in the shape of x; y has as many elements, and None adds nothing."""
    return x if y is None else x + y.view_as(x)


class CastWithGrad(torch.autograd.Function):
    """A copy of a tensor in another dtype; the gradient goes to the tensor in its own dtype."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, copy: Tensor) -> Tensor:
        ctx.dtype = tensor.dtype
        return copy.view_as(copy)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyrefly: ignore[bad-override]  # *grads there
        return grad.to(ctx.dtype), None


def prepare_compile() -> None:
    """Tell torch.compile what not to trace; decorators would import torch._dynamo in every run."""
    # the sizes of its products depend on the loads: traced, the graph would break into pieces
    BACKENDS["torch"] = torch.compiler.disable(torch_grouped.expert_mlp)
    torch.compiler.assume_constant_result(find_triton_problem)


def choose_backend(backend: str, device: torch.device, dtype: torch.dtype) -> str:
    """Resolve "auto" to triton where it can compute, else to torch; check any other name.

    Raises:
        ValueError: unknown backend, or triton where it cannot run.
    """
    if backend not in ("auto", *BACKENDS):
        raise ValueError(f"backend {backend!r} is not one of auto, {', '.join(BACKENDS)}")
    if backend == "auto":
        runs = device.type == "cuda" and not find_triton_problem(device, dtype)
        return "triton" if runs else "torch"
    if backend == "triton":
        problem = find_triton_problem(device, dtype)
        if problem:
            raise ValueError(f"backend 'triton' {problem}, or set the backend to 'auto'")
    return backend


def find_triton_problem(device: torch.device, dtype: torch.dtype) -> str:
    """Say why the triton backend cannot compute here, and the remedy; empty if it can."""
    global triton
    if triton is None:
        try:
            triton = import_module("kernels.triton_kernels")
        except ImportError:
            return "needs Triton: on Linux, pip install triton"
    if dtype not in triton.triton_experts.DTYPES:
        return f"does not compute in {dtype}: use float16, bfloat16 or float32"
    if defect:
        return defect
    if triton.triton_experts.INTERPRETED:
        return ""
    if device.type != "cuda" or torch.version.hip:
        remedy = "use a CUDA device, or set TRITON_INTERPRET=1 to try it slowly on a CPU"
        return f"does not run on {device.type}: {remedy}"
    if torch.cuda.get_device_capability(device) < (8, 0):
        name = torch.cuda.get_device_name(device)
        return f"does not run on {name}: use a GPU of compute capability 8.0 or later"
    return triton.find_launch_problem(device)
