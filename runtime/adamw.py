"""AdamW: torch's fused one, and for experts' weights on a GPU one that keeps their copies in half precision, too."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from kernels import triton_adamw


class AdamW(torch.optim.AdamW):
    """Fused AdamW. Of the weights that `keep_copies` names, a kernel takes the step that also copies them.

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
        take_fused_step(self, [{**g, "params": [p for p in g["params"] if p not in self.copies]} for g in groups])
        if not self.copies:
            return
        torch._foreach_add_([self.state[p]["step"] for p in self.copies], [1 - self.found_inf] * len(self.copies))
        settings = {p: group for group in groups for p in group["params"]}
        for p, copy in self.copies.items():
            assert p.grad is not None and triton_adamw, "keep_copies is for where Triton can run"
            m, v, count = (self.state[p][name] for name in ("exp_avg", "exp_avg_sq", "step"))
            tensors = p, p.grad, m, v, copy, count, self.grad_scale, self.found_inf
            lr, betas, eps, decay = (settings[p][name] for name in ("lr", "betas", "eps", "weight_decay"))
            triton_adamw.adamw_step(*tensors, lr, betas, eps, decay)
            self.versions[p] = p._version


def take_fused_step(optimizer: torch.optim.AdamW, groups: list[dict[str, Any]]) -> None:
    """Take torch's fused step of an optimizer's `groups` alone."""
    every, optimizer.param_groups = optimizer.param_groups, groups
    try:
        torch.optim.AdamW.step(optimizer)
    finally:
        optimizer.param_groups = every
