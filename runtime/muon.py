"""Muon for the matrices of the blocks, and AdamW for all else, as one optimizer."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from runtime.adamw import AdamW, take_fused_step
from runtime.parallel import local_part

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic that Newton-Schulz repeats
STEPS = 5


def orthogonalize(x: Tensor) -> Tensor:
    """For each matrix U S Vᵀ of x (..., A, B) about U Vᵀ: its singular values become 0.7 to 1.2. In x's type.

    Newton-Schulz steps of the quintic a s + b s³ + c s⁵ on the singular values s, all matrices in one batch.

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

    Embeddings and the head stay with AdamW, since a token moves one row of them, and routers, since the size of their
    logits sets the gates: a row for each token or expert is no linear map whose singular values should be alike.
    """
    return dim >= 2 and name.startswith("blocks.") and ".router." not in name


class Muon(AdamW):
    """Muon on groups that have a `momentum`, fused AdamW on the others.

    The gradient g of a matrix W (..., A, B) moves its running mean m to μ m + (1 - μ) g, and W by -lr times
    decay · W + 0.2 √max(A, B) · orthogonalize(μ m + (1 - μ) g). That factor gives the step the root mean square of
    AdamW's, so that both take one learning rate and one decay (arXiv 2502.16982). Leading dimensions, the experts', are
    matrices by themselves. As for fused AdamW, gradients are divided by `grad_scale`, and nothing moves where
    `found_inf` is 1: the step is decided on the device, which torch.optim.Muon cannot do. The iteration runs in
    bfloat16 on CUDA, as its authors', and in float32 on a CPU.

    Under FSDP2 experts lie whole on a rank, which takes its own; other matrices are gathered for the iteration.
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
        moved = weight * (1 - lr * group["weight_decay"]) - lr * 0.2 * max(p.shape[-2:]) ** 0.5 * direction
        before.copy_(torch.where(take, after, before))
        weight.copy_(torch.where(take, moved, weight))


def _orthogonalize_sharded(x: Tensor, p: Tensor) -> Tensor:
    """`orthogonalize` of x, this rank's part of a tensor that is sharded like p along its first dimension."""
    dtype = torch.bfloat16 if x.device.type == "cuda" else torch.float32
    if x.dim() > 2 or not isinstance(p, DTensor):
        return orthogonalize(x.to(dtype)).to(x.dtype)
    mesh, replicated = p.device_mesh, [Replicate()] * p.device_mesh.ndim
    sharded = DTensor.from_local(x, mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())
    full = orthogonalize(sharded.full_tensor().to(dtype)).to(x.dtype)
    return DTensor.from_local(full, mesh, replicated, run_check=False).redistribute(placements=p.placements).to_local()
