"""Gradient clipping: by global norm, by value, or by the norm of the weights (AGC)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_value_, clip_grads_with_norm_, get_total_norm

from trainwright.checkpoint.shards import is_divided, local, locals_of
from trainwright.distributed.group import Ranks
from trainwright.errors import UsageError, require_choice

ClipName = Literal["norm", "value", "agc", "none"]
ClipFn = Callable[[Sequence[Tensor], Tensor], None]
"""``clip(parameters, total_norm)``: changes ``.grad`` in place; ``total_norm`` is the 0-d norm of the gradients."""


def make_clip(by: ClipName, at: float = 1.0) -> ClipFn:
    """Return the gradient clipping of that name.

    Args:
        by: norm, value, agc or none.
        at: The threshold: the norm, the absolute value, or AGC's lambda.

    Raises:
        UsageError: Unknown name, or a number that is out of range.
    """
    require_choice("the clip", by, get_args(ClipName))
    if by == "none":
        return no_clip
    if not at > 0:
        raise UsageError(f"a clip is at a number above 0; got {at!r}", remedy="make_clip('none') does not clip")
    return GradientClip(by, at)


@dataclass(frozen=True)
class GradientClip:
    """Gradient clipping by a kind (``by``) at a threshold (``at``)."""

    by: ClipName
    at: float

    def __call__(self, parameters: Sequence[Tensor], total_norm: Tensor) -> None:
        match self.by:
            case "norm":
                _clip_by_norm(self.at, parameters, total_norm)
            case "value":
                _clip_by_value(self.at, parameters)
            case "agc":
                _clip_adaptively(self.at, parameters)


class ModelOrder:
    """Sorts parameters as ``model.parameters()``, for a norm with the bits of ``clip_grad_norm_(model.parameters())``.

    The order is that of the first call. Parameters that the model did not have then come last.
    """

    def __init__(self) -> None:
        self._place: dict[int, int] = {}

    def __call__(self, model: nn.Module, parameters: list[Tensor]) -> list[Tensor]:
        if not self._place:
            self._place = {id(parameter): place for place, parameter in enumerate(model.parameters())}
        return sorted(parameters, key=lambda parameter: self._place.get(id(parameter), len(self._place)))


def global_norm(grads: list[Tensor]) -> Tensor:
    """Return the 0-d norm of the norms, bit-identical to torch.nn.utils.get_total_norm. ``grads`` must not be empty.

    For divided gradients it is the norm of the full gradients, and every rank must call this function.
    """
    if _are_uniform(grads):  # then none is divided
        norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
        return norm.detach() if norm.requires_grad else norm  # cheaper than a no_grad context in each step
    return _norm_of_parts(grads) if any(is_divided(grad) for grad in grads) else get_total_norm(grads)


def norm_on_host(grads: list[Tensor]) -> float:
    """Return the norm as a number, on the CPU added up in float64, which saves two kernels. Waits for a GPU."""
    if False not in [type(grad) is Tensor and grad.is_cpu for grad in grads]:  # dtypes may differ
        return math.hypot(*[norm.item() for norm in torch._foreach_norm(grads)])
    return float(global_norm(grads))


def _are_uniform(grads: Sequence[Tensor]) -> bool:
    """Return True if torch would put all gradients into one group. torch's grouping takes longer than a small norm."""
    device, dtype = grads[0].device, grads[0].dtype
    same = [type(grad) is Tensor and grad.dtype == dtype and grad.device == device for grad in grads]
    return False not in same  # runs in each step, and all() of a generator takes twice the time


@torch.no_grad()
def _norm_of_parts(grads: Sequence[Tensor]) -> Tensor:
    """Compute the norm with one exchange per kind of division, in float64: squares may overflow float32."""
    kinds: dict[object, list[Tensor]] = {}
    for grad in grads:
        kinds.setdefault((grad.device_mesh, grad.placements) if is_divided(grad) else None, []).append(grad)
    squares = []
    for same in kinds.values():
        norms = torch.stack(torch._foreach_norm(locals_of(same)))
        squares.append(summed_over_parts(norms.double().square().sum(), same[0]))
    wide = torch.promote_types(grads[0].dtype, torch.float32)
    return torch.stack(squares).sum().sqrt().to(wide)


def summed_over_parts(number: Tensor, of: Tensor, *, but: int | None = None) -> Tensor:
    """Sum a number, in place, over the ranks that divide the tensor ``of`` along dimensions other than ``but``."""
    if is_divided(of):
        for axis, placement in enumerate(of.placements):
            if not placement.is_replicate() and not placement.is_shard(-1 if but is None else but):
                Ranks(of.device_mesh.get_group(axis)).sum_([number])
    return number


def no_clip(parameters: Sequence[Tensor], total_norm: Tensor) -> None:
    """Leave the gradients unchanged."""


def _clip_by_norm(at: float, parameters: Sequence[Tensor], total_norm: Tensor) -> None:
    """Clip by norm, bit-identical to torch.nn.utils.clip_grad_norm_ (Pascanu et al. 2013)."""
    # torch multiplies by min(1, at * (1 / (norm + 1e-6))), with four roundings in the norm's dtype: together below 2 %
    # in bfloat16. So for norms below 0.9 at, the factor is exactly 1. On a GPU the comparison would cost a host sync.
    if total_norm.device.type == "cpu" and float(total_norm) + 1e-6 < 0.9 * at:
        return
    grads = locals_of(p.grad for p in parameters if p.grad is not None)
    if not _are_uniform(grads):
        clip_grads_with_norm_(parameters, at, total_norm)
        return
    with torch.no_grad():
        torch._foreach_mul_(grads, (total_norm + 1e-6).reciprocal_().mul_(at).clamp_(max=1.0))


@torch.no_grad()
def _clip_by_value(at: float, parameters: Sequence[Tensor]) -> None:
    if not any(is_divided(p) for p in parameters):
        clip_grad_value_(parameters, at)
        return
    for grad in locals_of(p.grad for p in parameters if p.grad is not None):
        grad.clamp_(-at, at)


@torch.no_grad()
def _clip_adaptively(at: float, parameters: Sequence[Tensor]) -> None:
    """Clip adaptively (AGC, Brock et al. 2021, arXiv:2102.06171, equation 3 with eps 1e-3).

    Unit-wise: each row i of a weight (all inputs of one output unit) is scaled so that ||G_i|| <= at * max(||W_i||,
    1e-3); a bias or gain is one unit, as in the paper's code.
    """
    for parameter in parameters:
        assert parameter.grad is not None
        ceiling = _unit_norms(parameter).clamp_(min=1e-3).mul_(at)
        norm = _unit_norms(parameter.grad)
        factor = torch.where(norm > ceiling, ceiling / norm.clamp(min=1e-6), torch.ones_like(norm))
        local(parameter.grad).mul_(factor)


def _unit_norms(weight: Tensor) -> Tensor:
    """Return the norm of each unit (row) of a weight, or of a bias as a whole; only rows on this rank if divided."""
    dims = tuple(range(1, weight.dim())) or None
    norm: Tensor = torch.linalg.vector_norm(local(weight), dim=dims, keepdim=dims is not None)
    if not is_divided(weight):
        return norm
    return summed_over_parts(norm.square(), weight, but=0 if dims else None).sqrt()
