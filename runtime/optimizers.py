"""The optimizers: torch's fused AdamW, AdamW that also writes half-precision copies, and Muon."""

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import kernels
from attention import Attention
from configure.schema import Optim
from kernels import choose_backend
from model import MLP, Experts
from runtime.parallel import find_mesh, local_part, own_rows
from runtime.transfer import find_scale, measure_ratios

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # coefficients of the quintic, by Muon's authors
MOMENTUM = 0.95  # of Muon, with Nesterov's form
NEWTON_SCHULZ_STEPS = 5  # the value of its authors
# Elements that Muon orthogonalizes at once: products of 28 matrices (768, 768) fill a GPU, and what
# they need in bfloat16 stays below 0.3 GB. A parameter of experts is a batch of its own.
BATCH = 2**24

Group = dict[str, Any]  # a parameter group of torch.optim


class Optimizers:
    """Optimizers that step together, each for its own parameters.

    Attributes:
        parts: torch's fused AdamW and, if they have parameters, `CopyingAdamW` and `Muon`.
        parameters: all parameters. The order sets how the norm of the gradients is rounded.
    """

    def __init__(self, parts: list[torch.optim.Optimizer], parameters: list[Tensor]) -> None:
        for part in parts:
            # torch's name for a step that reads these two: clipping, loss scale and skipped steps
            # are in them alone
            reads = hasattr(part, "_step_supports_amp_scaling")
            assert reads, f"{part}: its step must obey grad_scale and found_inf"
        self.parts = parts
        self.parameters = parameters

    @property
    def param_groups(self) -> list[Group]:
        """The parameter groups of all parts."""
        return [group for part in self.parts for group in part.param_groups]

    @property
    def state(self) -> dict[Tensor, dict[str, Tensor]]:
        """{parameter: its step count and moments}."""
        state = {}
        for part in self.parts:
            state.update(part.state)
        return state

    def step(self, grad_scale: Tensor | None = None, found_inf: Tensor | None = None) -> None:
        """Take a step with the gradients in place, decided on the device.

        Args:
            grad_scale: () fp32, divides the gradients: it has the loss scale and the clipping.
                `CopyingAdamW` and `Muon` need it.
            found_inf: () fp32; where it is 1, nothing changes. Needed by the same.
        """
        for part in self.parts:
            fused: Any = part  # torch reads these attributes and does not declare them
            fused.grad_scale = grad_scale
            fused.found_inf = found_inf
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none)


class HalfCopies:
    """Half-precision copies of experts' weights, which all passes of a step share.

    They never move, so a CUDA graph may read them. `CopyingAdamW` writes them in its step, where
    Triton runs; `refresh` writes all others, and those whose weights a checkpoint or an exchange
    with the mean has changed.

    Attributes:
        copies: {weight: copy}.
        by_kernel: `CopyingAdamW` is to write them.
    """

    def __init__(self, layers: Sequence[Experts], dtype: torch.dtype, backend: str) -> None:
        """Allocate copies in `dtype` of the weights of `layers`, which `backend` multiplies."""
        self.layers = layers
        self.copies: dict[Tensor, Tensor] = {}
        # Of each weight when a kernel wrote its copy: an operator in place that raises it makes the
        # copy stale. torch's fused AdamW does not count versions.
        self.versions: dict[Tensor, int] = {}
        for experts in layers:
            for weight in (experts.w_in, experts.w_out):
                self.copies[weight] = torch.empty_like(weight, dtype=dtype)
        self.by_kernel = False
        if layers:
            device = layers[0].w_in.device
            self.by_kernel = choose_backend(backend, device, dtype) == "triton"

    def note(self, weight: Tensor) -> None:
        """Note that a kernel has just written the weight and its copy."""
        self.versions[weight] = weight._version

    def is_valid(self, weight: Tensor) -> bool:
        """True if a kernel wrote the copy and nothing has changed the weight since."""
        return self.versions.get(weight) == weight._version

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the weights whose copies are not valid."""
        for weight, copy in self.copies.items():
            if not self.is_valid(weight):
                copy.copy_(weight)

    @contextmanager
    def in_passes(self) -> Iterator[None]:
        """Within this context passes under autocast read the copies; weights must not change."""
        self.refresh()
        for experts in self.layers:
            experts.copies = (self.copies[experts.w_in], self.copies[experts.w_out])
        try:
            yield
        finally:
            for experts in self.layers:
                experts.copies = None


class Optimizer(torch.optim.Optimizer):
    """torch's without its guards against torch.compile, which import torch._dynamo: a second.

    Nothing compiles a step. Each guard wraps the function that we take.
    """

    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)


class AdamW(Optimizer, torch.optim.AdamW):
    """torch's."""

    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))


class CopyingAdamW(Optimizer):
    """AdamW whose kernel also writes each weight to its half-precision copy.

    Parameters, gradients and moments are contiguous and in fp32. Gradients are divided by
    `grad_scale`, and nothing changes where `found_inf` is 1.
    """

    grad_scale: Tensor
    found_inf: Tensor
    _step_supports_amp_scaling = True

    def __init__(self, groups: list[Group], settings: dict[str, Any], half: HalfCopies) -> None:
        super().__init__(groups, settings)
        self.half = half

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyrefly: ignore[bad-override]  # no loss is returned
        """Take a step with the gradients in place. There is no `closure`."""
        counts = [state["step"] for state in self.state.values()]
        torch._foreach_add_(counts, [1 - self.found_inf] * len(counts))
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                kernels.triton.triton_adamw.adamw_step(
                    p,
                    p.grad,
                    state["exp_avg"],
                    state["exp_avg_sq"],
                    self.half.copies[p],
                    state["step"],
                    self.grad_scale,
                    self.found_inf,
                    group["lr"],
                    group["betas"],
                    group["eps"],
                    group["weight_decay"],
                )
                self.half.note(p)


def build_optimizer(
    model: nn.Module, optim: Optim, half: HalfCopies | None = None, compile: bool = False
) -> Optimizers:
    """AdamW, or Muon with AdamW, with moments allocated; only matrices have weight decay.

    Args:
        model: the model on its device, sharded or not.
        optim: settings. `Updates` multiplies a group's rate by its `lr_ratio`:
            optim.router_lr_ratio for routers (W, b, γ), optim.expert_out_lr_ratio for w_out of the
            routed experts.
        half: copies that AdamW's step may write.
        compile: compile what Muon does before and after it orthogonalizes.
    """
    groups = group_parameters(model, optim)
    ordered = [p for group in groups for p in group["params"]]
    copied: Mapping[Tensor, Tensor] = {}
    if half is not None and half.by_kernel:
        copied = half.copies

    # By optimizer, and by the ranks that parameters are on: torch does not step or clear several
    # meshes at once.
    groups_of_parts: dict[tuple[str, Any], dict[int, Group]] = {}
    for number, group in enumerate(groups):
        for p in group["params"]:
            kind = "torch"
            if "momentum" in group:
                kind = "muon"
            elif p in copied:
                kind = "copying"
            part = groups_of_parts.setdefault((kind, find_mesh(p)), {})
            part.setdefault(number, {**group, "params": []})["params"].append(p)

    settings = {"lr": optim.lr, "betas": (optim.beta1, optim.beta2), "eps": optim.eps}
    parts: list[torch.optim.Optimizer] = []
    for (kind, _), by_number in groups_of_parts.items():
        own_groups = list(by_number.values())
        if kind == "muon":
            parts.append(Muon(own_groups, optim.lr, find_splits(model), compile))
        elif kind == "torch":
            parts.append(AdamW(own_groups, **settings, fused=True))
        else:
            assert half is not None
            parts.append(CopyingAdamW(own_groups, settings, half))
    optimizers = Optimizers(parts, ordered)
    allocate_moments(optimizers)
    return optimizers


def group_parameters(model: nn.Module, optim: Optim) -> list[Group]:
    """Parameter groups, in the order in which their first parameters are in the model.

    A factor of optim.transfer on a rate leaves rate times decay as it is.

    Groups of equal settings stay separate for matrices and for other parameters: a parameter's
    group sets its place in the sum of the gradients' norm.
    """
    groups: dict[tuple, Group] = {}
    ratios = measure_ratios(model, optim)
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        is_matrix = p.dim() >= 2
        settings = {"lr_ratio": 1.0, "weight_decay": optim.weight_decay if is_matrix else 0.0}
        if ".router." in name:
            settings["lr_ratio"] = optim.router_lr_ratio
        elif name.endswith("experts.w_out"):
            settings["lr_ratio"] = optim.expert_out_lr_ratio
        by_muon = is_for_muon(optim, name, p.dim())
        if by_muon:
            settings["momentum"] = MOMENTUM
        rate = find_scale(name, ratios, by_muon).rate
        settings["lr_ratio"] *= rate
        settings["weight_decay"] /= rate
        key = (tuple(settings.items()), is_matrix, find_mesh(p))
        group = groups.setdefault(key, {**settings, "params": []})
        group["params"].append(p)
    return list(groups.values())


def allocate_moments(optimizers: Optimizers) -> None:
    """Allocate moments and step counts: checkpoints have them, and float16 may skip step 1."""
    for part in optimizers.parts:
        names = ("exp_avg",) if isinstance(part, Muon) else ("exp_avg", "exp_avg_sq")
        for group in part.param_groups:
            for p in group["params"]:
                state = {"step": torch.zeros((), device=p.device)}
                for name in names:
                    state[name] = torch.zeros_like(p)
                part.state[p] = state


def is_for_muon(optim: Optim, name: str, dim: int) -> bool:
    """True if Muon trains the parameter of that name: matrices of blocks, except routers'.

    Those of routed experts only with optim.muon_experts.

    Embeddings and the head stay with AdamW, since a token changes one row of them. So do routers,
    since the size of their logits sets the gates. A row for each token or expert is not a linear
    map whose singular values should be equal.
    """
    if optim.name != "muon" or (".experts." in name and not optim.muon_experts):
        return False
    return dim >= 2 and name.startswith("blocks.") and ".router." not in name


class Split(NamedTuple):
    """How to split a parameter into its matrices."""

    sizes: list[int] | int  # of each matrix, or one size for all
    dim: int


def find_splits(model: nn.Module) -> dict[Tensor, Split]:
    """The splits of parameters with several linear maps: q, k, v, and gate and up of gated MLPs.

    A w_in without a gate is in it too, as one matrix.
    """
    splits = {}
    for module in model.modules():
        if isinstance(module, Attention):
            splits[module.qkv.weight] = Split(module.widths, dim=-2)
        elif isinstance(module, MLP):
            splits[module.w_in.weight] = Split(module.hidden, dim=-2)
        elif isinstance(module, Experts):
            splits[module.w_in] = Split(module.w_out.shape[-2], dim=-1)
    return splits


class Muon(Optimizer):
    """Muon for matrices (..., A, B); leading dimensions, such as experts, count separate matrices.

    The gradient g of a matrix W changes its running mean m to μ m + (1 - μ) g, and W by -lr times
    decay · W + 0.2 √max(A, B) · orthogonalize(μ m + (1 - μ) g). That factor gives the step the root
    mean square of AdamW's, so that both use one learning rate and one decay (arXiv 2502.16982).
    Matrices that share a parameter (`splits`) are orthogonalized each, with A and B of their own:
    q (C, C), k and v (nkv·hs, C), gate and up (H, C) of an MLP and (C, H) of each expert.
    Gradients are divided by `grad_scale`, and nothing changes where `found_inf` is 1: the step is
    decided on the device, which torch.optim.Muon cannot do. The iteration runs in bfloat16 on CUDA,
    as its authors', and in the weights' type on a CPU, matrices of one shape in one batch.

    Under FSDP2 each expert is whole on one rank, which computes its step. Of other matrices every
    rank gathers the direction and computes the full step, as under DDP.
    """

    grad_scale: Tensor
    found_inf: Tensor
    _step_supports_amp_scaling = True

    def __init__(
        self, groups: list[Group], lr: float, splits: Mapping[Tensor, Split], compile: bool
    ) -> None:
        """Train groups of `params`, `momentum` (μ), `weight_decay`; splits are of `find_splits`."""
        super().__init__(groups, {"lr": lr})
        self.splits = splits
        # on a GPU their operators move three times the bytes that one kernel each does
        self.move_mean = torch.compile(move_mean) if compile else move_mean
        self.move_weight = torch.compile(move_weight) if compile else move_weight

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyrefly: ignore[bad-override]  # no loss is returned
        """Take a step with the gradients in place. There is no `closure`."""
        taken = (self.found_inf == 0).float()
        for group in self.param_groups:
            rate = group["lr"] * taken  # tensors: a number would be compiled anew each step
            kept = 1 - group["weight_decay"] * rate
            for params in iterate_batches(group["params"]):
                directions = [self._update_mean(p, group["momentum"], taken) for p in params]
                split = [
                    direction.split(*self.splits.get(p, (direction.shape[-1], -1)))
                    for p, direction in zip(params, directions, strict=True)
                ]
                orthogonalize_in_place(chain.from_iterable(split), taken)
                for p, direction, matrices in zip(params, directions, split, strict=True):
                    own = own_rows(direction, p) if p.dim() == 2 else direction
                    size = max(matrices[0].shape[-2:])  # of each: they differ in their smaller side
                    self.move_weight(local_part(p), own, kept, -0.2 * size**0.5 * rate)

    def _update_mean(self, p: Tensor, momentum: float, taken: Tensor) -> Tensor:
        """Update the running mean, if `taken`, () fp32, is 1; returns all of the direction."""
        state = self.state[p]
        state["step"] += taken
        mean = local_part(state["exp_avg"])
        assert p.grad is not None
        dtype = torch.bfloat16 if p.device.type == "cuda" else p.dtype
        direction = self.move_mean(
            mean, local_part(p.grad), self.grad_scale, taken, momentum, dtype
        )
        if isinstance(p, DTensor) and p.dim() == 2:  # else experts, each whole on one rank
            shards = DTensor.from_local(
                direction, p.device_mesh, p.placements, shape=p.shape, stride=p.stride()
            )
            direction = shards.full_tensor()
        return direction


def move_mean(
    mean: Tensor,
    gradient: Tensor,
    grad_scale: Tensor,
    taken: Tensor,
    momentum: float,
    dtype: torch.dtype,
) -> Tensor:
    """Move Muon's running mean to a gradient, if `taken` is 1; returns the direction in `dtype`."""
    gradient = gradient / grad_scale
    gradient.masked_fill_(taken == 0, 0.0)  # it may hold inf
    mean.lerp_(gradient, (1 - momentum) * taken)
    return gradient.lerp(mean, momentum).to(dtype)


def move_weight(weight: Tensor, direction: Tensor, kept: Tensor, factor: Tensor) -> None:
    """Multiply a weight by `kept` () and add `factor` () times a direction, in place."""
    weight.mul_(kept).addcmul_(direction.to(weight.dtype), factor)


def iterate_batches(params: list[Tensor]) -> Iterator[list[Tensor]]:
    """Parameters to be orthogonalized together: one, or several of at most BATCH elements."""
    batch: list[Tensor] = []
    for p in sorted(params, key=Tensor.numel):
        if sum(map(Tensor.numel, [*batch, p])) > BATCH and batch:
            yield batch
            batch = []
        batch.append(p)
    yield batch


def orthogonalize_in_place(matrices: Iterable[Tensor], taken: Tensor) -> None:
    """Replace each x (..., A, B) by `orthogonalize(x, taken)`, those of one A and B at once."""
    by_shape: dict[torch.Size, list[Tensor]] = {}
    for x in matrices:
        by_shape.setdefault(x.shape[-2:], []).append(x)
    for shape, several in by_shape.items():
        stacks = [x.reshape(-1, *shape) for x in several]
        results = orthogonalize(torch.cat(stacks) if stacks[1:] else stacks[0], taken)
        for x, result in zip(several, results.split([len(s) for s in stacks]), strict=True):
            x.copy_(result.view_as(x))


def orthogonalize(x: Tensor, taken: Tensor) -> Tensor:
    """About U Vᵀ for each matrix U S Vᵀ of x (M, A, B): singular values become 0.7 to 1.2.

    Newton-Schulz steps of the quintic a s + b s³ + c s⁵ on the singular values s. If `taken`,
    () fp32, is 0, the result is 0.

    Source: Jordan et al., Muon: An optimizer for hidden layers in neural networks, 2024.
    """
    a, b, c = NEWTON_SCHULZ
    is_wide = x.shape[-2] <= x.shape[-1]
    wide = x if is_wide else x.mT
    norm = torch.linalg.vector_norm(wide, dim=(-2, -1), keepdim=True).clamp_min(1e-7)
    wide = wide * (taken / norm)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = wide @ wide.mT
        quintic = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        wide = torch.baddbmm(wide, quintic, wide, beta=a)
    return wide if is_wide else wide.mT
