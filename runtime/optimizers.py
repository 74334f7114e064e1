"""The optimizers: AdamW, which may keep copies in half precision, and Muon for the matrices of the blocks."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from kernels import triton_adamw
from runtime.parallel import local_part

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic that Newton-Schulz repeats
STEPS = 5


class AdamW(torch.optim.AdamW):
    """Fused AdamW.

    Of the weights that `keep_copies` names, a kernel takes the step that also copies them.

    Gradients are divided by `grad_scale`, and nothing moves where `found_inf` is 1.
    """

    grad_scale: Tensor
    found_inf: Tensor

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.copies: dict[Tensor, Tensor] = {}
        self.versions: dict[Tensor, int] = {}  # of weights when they were last copied

    def keep_copies(self, weights: Iterable[Tensor], dtype: torch.dtype) -> None:
        """From the next step on copy these weights to `dtype`; they and their moments are contiguous and in fp32."""
        self.copies = {weight: torch.empty_like(weight, dtype=dtype) for weight in weights}

    def fresh_copies(self) -> Mapping[Tensor, Tensor]:
        """{weight: copy} of those that nothing but this has changed since: not loading, nor an exchange for a mean."""
        return {p: copy for p, copy in self.copies.items() if self.versions.get(p) == p._version}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyrefly: ignore[bad-override]  # no loss is returned
        """Take a step with the gradients in place. There is no `closure`."""
        groups = self.param_groups
        take_fused_step(
            self,
            [{**g, "params": [p for p in g["params"] if p not in self.copies]} for g in groups],
        )
        if not self.copies:
            return
        torch._foreach_add_(
            [self.state[p]["step"] for p in self.copies], [1 - self.found_inf] * len(self.copies)
        )
        settings = {p: group for group in groups for p in group["params"]}
        for p, copy in self.copies.items():
            assert p.grad is not None and triton_adamw, "keep_copies is for where Triton can run"
            m, v, count = (self.state[p][name] for name in ("exp_avg", "exp_avg_sq", "step"))
            tensors = p, p.grad, m, v, copy, count, self.grad_scale, self.found_inf
            lr, betas, eps, decay = (
                settings[p][name] for name in ("lr", "betas", "eps", "weight_decay")
            )
            triton_adamw.adamw_step(*tensors, lr, betas, eps, decay)
            self.versions[p] = p._version


def take_fused_step(optimizer: torch.optim.AdamW, groups: list[dict[str, Any]]) -> None:
    """Take torch's fused step of an optimizer's `groups` alone."""
    every, optimizer.param_groups = optimizer.param_groups, groups
    try:
        torch.optim.AdamW.step(optimizer)
    finally:
        optimizer.param_groups = every


def orthogonalize(x: Tensor) -> Tensor:
    """For each matrix U S Vᵀ of x (..., A, B) about U Vᵀ: its singular values become 0.7 to 1.2.

    In x's type.

    Newton-Schulz steps of the quintic a s + b s³ + c s⁵ on the singular values s, all matrices in
    one batch.

    Source: Jordan et al., Muon: An optimizer for hidden layers in neural networks, 2024.
    """
    a, b, c = COEFFICIENTS
    wide = x if x.shape[-2] <= x.shape[-1] else x.mT
    wide = wide / torch.linalg.vector_norm(wide, dim=(-2, -1), keepdim=True).clamp_min(1e-7)
    for _ in range(STEPS):
        gram = wide @ wide.mT
        wide = a * wide + (b * gram + c * gram @ gram) @ wide
    return wide if x.shape[-2] <= x.shape[-1] else wide.mT


def is_for_muon(name: str, dim: int) -> bool:
    """Whether Muon takes the model's parameter of that name: the blocks' matrices, but routers.

    Embeddings and the head stay with AdamW, since a token moves one row of them, and routers, since
    the size of their logits sets the gates: a row for each token or expert is no linear map whose
    singular values should be alike.
    """
    return dim >= 2 and name.startswith("blocks.") and ".router." not in name


class Muon(AdamW):
    """Muon on groups that have a `momentum`, fused AdamW on the others.

    The gradient g of a matrix W (..., A, B) moves its running mean m to μ m + (1 - μ) g, and W by
    -lr times decay · W + 0.2 √max(A, B) · orthogonalize(μ m + (1 - μ) g). That factor gives the
    step the root mean square of AdamW's, so that both take one learning rate and one decay (arXiv
    2502.16982). Leading dimensions, the experts', are matrices by themselves. As for fused AdamW,
    gradients are divided by `grad_scale`, and nothing moves where `found_inf` is 1: the step is
    decided on the device, which torch.optim.Muon cannot do. The iteration runs in bfloat16 on CUDA,
    as its authors', and in float32 on a CPU.

    Under FSDP2 experts lie whole on a rank, which takes its own; other matrices are gathered for
    the iteration.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyrefly: ignore[bad-override]  # no loss is returned
        """Take a step with the gradients in place. There is no `closure`."""
        take_fused_step(self, [group for group in self.param_groups if "momentum" not in group])
        take = self.found_inf == 0
        for group in self.param_groups:
            for p in group["params"] if "momentum" in group else ():
                state = self.state[p]
                state["step"] += take.to(state["step"].dtype)
                self._move(p, state["exp_avg"], group, take)

    def _move(self, p: Tensor, mean: Tensor, group: dict[str, Any], take: Tensor) -> None:
        """Move a parameter and its running mean of gradients, if `take`, () bool."""
        assert p.grad is not None
        lr, momentum = group["lr"], group["momentum"]
        gradient, weight, before = (local_part(part) for part in (p.grad, p, mean))
        gradient = gradient / self.grad_scale
        after = before.lerp(gradient, 1 - momentum)
        direction = _orthogonalize_sharded(gradient.lerp(after, momentum), p)
        moved = (
            weight * (1 - lr * group["weight_decay"])
            - lr * 0.2 * max(p.shape[-2:]) ** 0.5 * direction
        )
        before.copy_(torch.where(take, after, before))
        weight.copy_(torch.where(take, moved, weight))


def _orthogonalize_sharded(x: Tensor, p: Tensor) -> Tensor:
    """`orthogonalize` of x, this rank's part of a tensor that is sharded like p along its first dimension."""
    dtype = torch.bfloat16 if x.device.type == "cuda" else torch.float32
    if x.dim() > 2 or not isinstance(p, DTensor):
        return orthogonalize(x.to(dtype)).to(x.dtype)
    mesh, replicated = p.device_mesh, [Replicate()] * p.device_mesh.ndim
    sharded = DTensor.from_local(
        x, mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
    )
    full = orthogonalize(sharded.full_tensor().to(dtype)).to(x.dtype)
    return (
        DTensor.from_local(full, mesh, replicated, run_check=False)
        .redistribute(placements=p.placements)
        .to_local()
    )
