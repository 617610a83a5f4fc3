"""Listens to 16-bit weights, loss scales and autocast: updates that are lost, unscaled or made from old weights."""

from __future__ import annotations

import statistics

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from trainwright.doctor.facts.precision import MixedPrecisionFacts
from trainwright.recorder.gradients import owned_by
from trainwright.recorder.probes import Probe, WatchedObjects
from trainwright.recorder.program import Backward, Multiply, OptimizerStep, RecordedStep
from trainwright.recorder.user_types import Args, Kwargs
from trainwright.replay.mechanism import HALF_DTYPES
from trainwright.runlog.json_values import Facts, strict

SAMPLED_TENSORS, SAMPLED_ELEMENTS = 8, 256
LOOKED_AT = 64
"""Updates that are looked at one after the other; later every 16th."""
KEPT = 64
MIN_STILL_SCALED = 4
MOMENTS = frozenset(
    {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg", "acc_delta"}
    | {"sum", "step", "mu", "eta", "ax", "prev", "step_size"}
)
"""Keys of optimizer state that is neither a float32 copy of the weights nor their rounding error."""


class MixedPrecision(Probe):
    """Costs nothing but a comparison for a loop in float32."""

    name = MixedPrecisionFacts.experiment

    def __init__(self, watched: WatchedObjects) -> None:
        self._optimizers = watched.subject.optimizers
        self._device = next((p.device for p in watched.subject.parameters), torch.device("cpu"))
        self._steps = 0
        self._before: list[tuple[Tensor, Tensor, Tensor]] = []  # a weight, and its samples: of it, of its gradient
        self._rng = torch.empty(0)
        self._highest_lr = 0.0
        self._still: list[tuple[float, float]] = []  # the learning rate, and the fraction that stood still
        self._kept_elsewhere = False
        self._is_unscaled = False
        self._still_scaled, self._scale = 0, 1.0
        self._sentinel: Tensor | None = None
        self._stale_since: int | None = None
        self._told: MixedPrecisionFacts | None = None

    @property
    def _is_looked_at(self) -> bool:
        return self._steps < LOOKED_AT or self._steps % 16 == 0

    # lost updates

    def on_step(self, optimizer: Optimizer, args: Args) -> None:
        if not self._is_looked_at or optimizer not in self._optimizers:
            return
        self._look_into_autocast()
        halves = [p for p in owned_by(optimizer) if p.dtype in HALF_DTYPES and p.grad is not None]
        halves = [p for p in halves if p.numel() and not p.is_cuda and not p.grad.is_sparse]  # type: ignore[union-attr]
        self._before = [(p, _sample(p), _sample(p.grad)) for p in halves[:SAMPLED_TENSORS] if p.grad is not None]
        if self._before:
            self._rng = torch.get_rng_state()

    def on_stepped(self, optimizer: Optimizer) -> None:
        before, self._before = self._before, []
        if not before:
            return
        lr = float(optimizer.param_groups[0].get("lr", 0.0))
        has_grad = torch.cat([grad != 0 for _, _, grad in before])
        same = torch.cat([weight == _sample(p) for p, weight, _ in before])
        self._kept_elsewhere |= not torch.equal(self._rng, torch.get_rng_state())
        self._kept_elsewhere |= any(_keeps_copies(optimizer, p) for p, _, _ in before)
        if bool(has_grad.any()):
            self._highest_lr = max(self._highest_lr, lr)
            self._still = [*self._still[-KEPT:], (lr, float(same[has_grad].float().mean()))]

    # loss scales

    def on_unscale(self, scaler: GradScaler, optimizer: Optimizer) -> None:
        self._is_unscaled = True

    def on_scaler_step(self, scaler: GradScaler, optimizer: Optimizer, stepped: bool) -> None:
        self._is_unscaled = True

    def on_closed(self, step: RecordedStep) -> None:
        is_unscaled, self._is_unscaled = self._is_unscaled, False
        if self._is_looked_at and not is_unscaled and not step.values.get("edited"):
            scales = [each.scale_at for each in step.program if isinstance(each, Backward)]
            updates = [each for each in step.program if isinstance(each, OptimizerStep) and each.grad_scale is None]
            is_scaled = any(isinstance(each, Tensor) or each != 1.0 for each in scales)
            if updates and is_scaled and not any(isinstance(each, Multiply) for each in step.program):
                self._still_scaled, self._scale = self._still_scaled + 1, float(scales[-1])
        self._steps = step.step

    # autocast

    def _look_into_autocast(self) -> None:
        """Cast a weight of our own within autocast and change it: a cache that is still there has its old value."""
        kind = self._device.type
        if not torch.is_autocast_enabled(kind) or not torch.is_autocast_cache_enabled():
            self._sentinel = None
            return
        sentinel = self._sentinel
        if sentinel is not None and self._stale_since is None and float(_cast(sentinel)) != float(sentinel.detach()):
            self._stale_since = self._steps + 1
        self._sentinel = torch.ones(1, 1, device=self._device, requires_grad=True)
        _cast(self._sentinel)
        self._sentinel.data.fill_(2.0)

    def values(self) -> Facts | None:
        at_full_rate = [still for lr, still in self._still if lr >= 0.5 * self._highest_lr > 0]
        facts = MixedPrecisionFacts(
            still=statistics.median(at_full_rate) if at_full_rate else 0.0,
            updates=len(at_full_rate),
            kept_elsewhere=self._kept_elsewhere,
            still_scaled=self._still_scaled if self._still_scaled >= MIN_STILL_SCALED else 0,
            scale=self._scale,
            stale_since=self._stale_since,
        )
        if facts == self._told:
            return None
        self._told = facts
        return dict(strict(vars(facts)))


def _sample(tensor: Tensor) -> Tensor:
    flat = tensor.detach().flatten()
    return flat[:: max(1, flat.numel() // SAMPLED_ELEMENTS)].clone()


def _keeps_copies(optimizer: Optimizer, parameter: Tensor) -> bool:
    """Whether the optimizer keeps something in the shape of a parameter that may be master weights."""
    state: Kwargs = optimizer.state.get(parameter, {})
    return not type(optimizer).__module__.startswith("trainwright.") and any(
        isinstance(value, Tensor) and value.shape == parameter.shape and parameter.dim() > 0 and key not in MOMENTS
        for key, value in state.items()
    )


def _cast(sentinel: Tensor) -> Tensor:
    with torch.enable_grad():
        return torch.mm(sentinel, torch.ones_like(sentinel, requires_grad=False)).detach()
