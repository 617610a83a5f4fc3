"""Gradient clipping: by global norm, by value, by the norm of the weights (AGC), or by earlier gradients."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_value_, clip_grads_with_norm_, get_total_norm

from trainwright.checkpoint.codec import StateDict
from trainwright.checkpoint.shards import is_divided, local, locals_of
from trainwright.distributed.group import Ranks
from trainwright.errors import UsageError, require_choice

ClipName = Literal["norm", "value", "agc", "zclip", "adagc", "none"]
ClipFn = Callable[[Sequence[Tensor], Tensor], None]
"""``clip(parameters, total_norm)``: changes ``.grad`` in place; ``total_norm`` is the 0-d norm of the gradients."""


def make_clip(
    by: ClipName,
    at: float = 1.0,
    *,
    z: float = 2.5,
    ratio: float = 1.05,
    decay: float | None = None,
    warmup: int | None = None,
    parameters: Iterable[tuple[str, Tensor]] = (),
) -> ClipFn:
    """Return the clip of that name.

    Args:
        by: norm, value, agc, zclip (`ZClip`), adagc (`AdaGC`) or none.
        at: The threshold: the norm, the absolute value, AGC's lambda, or the norm in the warm-up of adagc.
        z: For zclip: standard deviations above the mean from which a norm is clipped.
        ratio: For adagc: the largest norm of a tensor, relative to its average.
        decay: For zclip and adagc: decay of the moving averages; None: 0.97 and 0.98.
        warmup: For zclip and adagc: steps before they clip by the averages; None: 25 and 100.
        parameters: For adagc: ``model.named_parameters()``.

    Raises:
        UsageError: Unknown name, or a number that is out of range.
    """
    require_choice("the clip", by, get_args(ClipName))
    if by != "none" and not at > 0:
        raise UsageError(f"a clip is at a number above 0; got {at!r}", remedy="make_clip('none') does not clip")
    if by == "none":
        return no_clip
    if by == "zclip":
        return ZClip(z, 0.97 if decay is None else decay, 25 if warmup is None else warmup)
    if by == "adagc":
        named = list(parameters)
        return AdaGC(named, at, ratio, 0.98 if decay is None else decay, 100 if warmup is None else warmup)
    return GradientClip(by, at)


@dataclass(frozen=True)
class GradientClip:
    """A clip with a known measure (``by``) and threshold (``at``)."""

    by: ClipName
    at: float | Tensor

    def __call__(self, parameters: Sequence[Tensor], total_norm: Tensor) -> None:
        match self.by:
            case "norm":
                _clip_by_norm(self.at, parameters, total_norm)
            case "value":
                _clip_by_value(float(self.at), parameters)
            case "agc":
                _clip_adaptively(float(self.at), parameters)


class AdaptiveClip(ABC):
    """A clip whose threshold follows from the gradients of earlier steps.

    A call reads the statistics and leaves them unchanged, so that a step can start again; ``accept`` adds the step. A
    skipped step is not added. Costs no host sync. The statistics are one float64 tensor on the device of the norm,
    which is replaced and never written to.
    """

    by: ClassVar[ClipName]

    def __init__(self, statistics: Tensor) -> None:
        self.held = {"statistics": statistics, "next": statistics}
        """A plain mapping, which a replay can restore."""

    @property
    def statistics(self) -> Tensor:
        return self.held["statistics"]

    def __call__(self, parameters: Sequence[Tensor], total_norm: Tensor) -> None:
        clip, self.held["next"] = self._decide(parameters, total_norm, self.statistics.to(total_norm.device))
        clip(parameters, total_norm)

    def frozen(self, parameters: Sequence[Tensor], total_norm: Tensor) -> ClipFn:
        """Return the clipping that a call would apply to these gradients; the statistics stay unchanged."""
        return self._decide(parameters, total_norm, self.statistics.to(total_norm.device))[0]

    def accept(self, skipped: Tensor) -> None:
        """Add the gradients of the last call to the statistics, unless ``skipped``."""
        if skipped.device.type != "cpu":
            self._set(torch.where(skipped, self.statistics.to(skipped.device), self.held["next"].to(skipped.device)))
        else:
            self._set(self.statistics if bool(skipped) else self.held["next"])

    def _set(self, statistics: Tensor) -> None:
        self.held["statistics"] = self.held["next"] = statistics

    @abstractmethod
    def _decide(self, parameters: Sequence[Tensor], total_norm: Tensor, statistics: Tensor) -> tuple[ClipFn, Tensor]:
        """Return the clip of this step, and the statistics after it."""

    def state_dict(self) -> StateDict:
        return {"by": self.by, "statistics": self.statistics}

    def load_state_dict(self, saved: Mapping[str, object]) -> None:
        """Load the statistics. Those of another clip are ignored."""
        statistics = saved["statistics"]
        if saved["by"] == self.by and isinstance(statistics, Tensor):
            self._set(statistics.to(self.statistics))


class ZClip(AdaptiveClip):
    """Clips the global norm if its z-score is large (Kumar et al. 2025, arXiv:2504.02507).

    With g the norm of the gradients, mu and sigma the mean and standard deviation before the step, and z = (g - mu) /
    sigma:

        g* = mu + z_thres^2 sigma / z   if z > z_thres, else g
        mu <- decay mu + (1 - decay) g*
        sigma^2 <- decay sigma^2 + (1 - decay) (g* - mu)^2

    mu and sigma^2 start as mean and variance of the norms of the first ``warmup`` steps, which are not clipped.
    """

    by = "zclip"

    def __init__(self, z: float = 2.5, decay: float = 0.97, warmup: int = 25) -> None:
        _require_positive(z=z)
        _require_averages(decay, warmup)
        super().__init__(torch.zeros(3, dtype=torch.float64, device="cpu"))  # steps, mu, sigma^2
        self._z = z
        self._decay = decay
        self._warmup = max(2, warmup)

    @torch.no_grad()
    def _decide(self, _parameters: Sequence[Tensor], total_norm: Tensor, statistics: Tensor) -> tuple[ClipFn, Tensor]:
        count, mean, variance = statistics.unbind()
        norm, deviation = total_norm.double(), variance.sqrt()
        is_warm = count < self._warmup
        score = (norm - mean) / deviation
        is_spike = ~is_warm & (score > self._z) & (deviation > 0)
        limit = torch.where(is_spike, mean + self._z**2 * deviation / score, math.inf)
        clipped = torch.minimum(norm, limit)
        share = torch.where(is_warm, 1 / (count + 1), 1 - self._decay)
        new_mean = mean + share * (clipped - mean)
        distance = torch.where(is_warm, (clipped - mean) * (clipped - new_mean), (clipped - new_mean).square())
        new = torch.stack([count + 1, new_mean, variance + share * (distance - variance)])
        return GradientClip("norm", float(limit) if limit.device.type == "cpu" else limit.to(total_norm.dtype)), new


class AdaGC(AdaptiveClip):
    """Clips each tensor by its earlier norms (Wang et al. 2025, arXiv:2502.11034, algorithm 1).

    With g_i the norm of the gradient of tensor i, g that of all, and gamma_i before the step:

        steps before ``warmup``:  h_i = min(1, at / g),               gamma_i <- min(gamma_i, h_i g_i)
        later steps:              h_i = min(1, ratio gamma_i / g_i),  gamma_i <- decay gamma_i + (1 - decay) h_i g_i

    h_i is the factor on the gradient. A tensor without any nonzero gradient so far has no gamma_i: it starts with the
    first nonzero one.
    """

    by = "adagc"

    def __init__(
        self,
        parameters: Sequence[tuple[str, Tensor]],
        at: float = 1.0,
        ratio: float = 1.05,
        decay: float = 0.98,
        warmup: int = 100,
    ) -> None:
        _require_positive(ratio=ratio)
        _require_averages(decay, warmup)
        if not parameters:
            raise UsageError(
                "adagc clips each tensor separately and got none",
                remedy="make_clip('adagc', parameters=model.named_parameters())",
            )
        norms = torch.full((len(parameters),), math.inf, dtype=torch.float64, device="cpu")
        super().__init__(torch.cat([torch.zeros(1, dtype=torch.float64, device="cpu"), norms]))  # steps, gammas
        self._names = [name for name, _ in parameters]
        self._places = {id(parameter): place for place, (_, parameter) in enumerate(parameters)}
        self._at = at
        self._ratio = ratio
        self._decay = decay
        self._warmup = warmup

    @torch.no_grad()
    def _decide(self, parameters: Sequence[Tensor], total_norm: Tensor, statistics: Tensor) -> tuple[ClipFn, Tensor]:
        grads = [p.grad for p in parameters if p.grad is not None]
        norms, total = norms_of_each(grads).double(), total_norm.double()
        places = torch.tensor([self._places[id(p)] for p in parameters], device=norms.device)
        gammas = statistics[1:][places]
        is_warm = statistics[0] + 1 < self._warmup
        limits = torch.where(is_warm, norms * (self._at / total), self._ratio * gammas)
        factors = torch.where(norms > limits, limits / norms, 1.0)
        clipped = factors * norms
        averages = torch.where(is_warm, torch.minimum(gammas, clipped), gammas.lerp(clipped, 1 - self._decay))
        averages = torch.where(gammas.isinf(), clipped, averages)
        new = statistics.clone()
        new[0] += 1
        new[1 + places] = torch.where(norms > 0, averages, gammas)
        return partial(_scale_each, factors), new

    def state_dict(self) -> StateDict:
        return {**super().state_dict(), "names": self._names}

    def load_state_dict(self, saved: Mapping[str, object]) -> None:
        """Load the averages by parameter name."""
        statistics, names = saved["statistics"], saved.get("names")
        if saved["by"] != self.by or not isinstance(statistics, Tensor) or not isinstance(names, list):
            return
        before, new = dict(zip(names, statistics[1:].tolist(), strict=True)), self.statistics.clone()
        new[0] = statistics[0]
        for place, name in enumerate(self._names):
            new[1 + place] = before.get(name, math.inf)
        self._set(new)


def _scale_each(factors: Tensor, parameters: Sequence[Tensor], _total_norm: Tensor) -> None:
    grads = locals_of(p.grad for p in parameters if p.grad is not None)
    with torch.no_grad():
        for grad, factor in zip(grads, factors.unbind(), strict=True):
            grad.mul_(factor.to(grad.device, grad.dtype))


def _require_positive(**numbers: float) -> None:
    for name, value in numbers.items():
        if not value > 0:
            raise UsageError(f"{name} must be above 0; got {value!r}", remedy="leave it out for the value of the paper")


def _require_averages(decay: float, warmup: int) -> None:
    if not 0 < decay < 1 or warmup < 1:
        raise UsageError(
            f"decay must be between 0 and 1 and warmup at least 1; got {decay!r} and {warmup!r}",
            remedy="leave them out for the values of the paper",
        )


def norms_of_each(grads: Sequence[Tensor]) -> Tensor:
    """Return the norm of each gradient, in at least float32. Divided gradients give the norm of the full tensor."""
    wide = torch.promote_types(grads[0].dtype, torch.float32)
    norms = torch.stack([norm.to(grads[0].device) for norm in torch._foreach_norm(locals_of(grads), dtype=wide)])
    kinds: dict[object, list[int]] = {}
    for place, grad in enumerate(grads):
        if is_divided(grad):
            kinds.setdefault((grad.device_mesh, grad.placements), []).append(place)
    for places in kinds.values():
        norms[places] = summed_over_parts(norms[places].double().square(), grads[places[0]]).sqrt().to(wide)
    return norms


def global_norm(grads: list[Tensor]) -> Tensor:
    """Return the 0-d norm of the norms, bit-identical to torch.nn.utils.get_total_norm. ``grads`` must not be empty.

    For divided gradients it is the norm of the full ones, and every rank must call this.
    """
    if _are_uniform(grads):  # then none is divided
        norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
        return norm.detach() if norm.requires_grad else norm  # cheaper than a context, and rarely needed
    return _norm_of_parts(grads) if any(is_divided(grad) for grad in grads) else get_total_norm(grads)


def norm_on_host(grads: list[Tensor]) -> float:
    """Return the norm as a number, in float64 for gradients on the CPU: two kernels less. Waits for a GPU."""
    if False not in [type(grad) is Tensor and grad.is_cpu for grad in grads]:  # dtypes may differ
        return math.hypot(*[norm.item() for norm in torch._foreach_norm(grads)])
    return float(global_norm(grads))


def _are_uniform(grads: Sequence[Tensor]) -> bool:
    """Return True if torch would put them into one group; its grouping costs more than the norm if they are small."""
    device, dtype = grads[0].device, grads[0].dtype
    same = [type(grad) is Tensor and grad.dtype == dtype and grad.device == device for grad in grads]
    return False not in same  # runs in each step: all() of a generator takes twice the time


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
    """Sum a number over ranks that divide a tensor, in place; not over ranks that divide dimension ``but``."""
    if is_divided(of):
        for axis, placement in enumerate(of.placements):
            if not placement.is_replicate() and not placement.is_shard(-1 if but is None else but):
                Ranks(of.device_mesh.get_group(axis)).sum_([number])
    return number


def no_clip(parameters: Sequence[Tensor], total_norm: Tensor) -> None:
    """Leave the gradients unchanged."""


def _clip_by_norm(at: float | Tensor, parameters: Sequence[Tensor], total_norm: Tensor) -> None:
    """Clip by norm, bit-identical to torch.nn.utils.clip_grad_norm_ (Pascanu et al. 2013)."""
    # torch multiplies by min(1, at * (1 / (norm + 1e-6))), with four roundings in the norm's dtype: together below 2 %
    # in bfloat16. So below 0.9 the factor is exactly 1. On a GPU the comparison would cost a host sync.
    if total_norm.device.type == "cpu" and float(total_norm) + 1e-6 < 0.9 * at:
        return
    grads = locals_of(p.grad for p in parameters if p.grad is not None)
    if not _are_uniform(grads):
        clip_grads_with_norm_(parameters, at, total_norm)  # type: ignore[arg-type]  # a 0-d tensor works as well
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
    """Return the norms of this rank's rows, if ranks divide them."""
    dims = tuple(range(1, weight.dim())) or None
    norm: Tensor = torch.linalg.vector_norm(local(weight), dim=dims, keepdim=dims is not None)
    if not is_divided(weight):
        return norm
    return summed_over_parts(norm.square(), weight, but=0 if dims else None).sqrt()
