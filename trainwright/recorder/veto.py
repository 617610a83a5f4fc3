"""Skips updates under ``tw.watch``: those that are not finite, spikes, and those in the user's skip list."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from trainwright.checkpoint.spikes import Spike, SpikeDetector
from trainwright.engine.guard import BufferGuard
from trainwright.engine.spikes import OnSpike, SpikeAction, action_for
from trainwright.recorder.carried import num_gradients
from trainwright.recorder.gradients import owned_by
from trainwright.recorder.program import RecordedStep
from trainwright.recorder.ranks import has_others, local_part

OnNonfinite = Literal["skip", "stop", "observe"]
_LOW = (torch.float16, torch.bfloat16)
ALWAYS, EVERY = 64, 16
"""The gradient norm is measured in each of the first ALWAYS steps, then in every EVERY-th step."""


class Veto:
    """Checks the gradients before each update, and 16-bit weights after it.

    A vetoed optimizer finds no gradients, so it changes nothing. Afterwards the gradients are restored, and so are
    buffers that the forward pass has changed. On a GPU, a fused optimizer takes the veto on the device (``found_inf``,
    the contract of torch's GradScaler), except with 16-bit weights or if ``on_spike`` is not ``warn``. Otherwise the
    host waits for the device at the update. The optimizers ``together`` step as one: the norm is over the gradients of
    all of them. Sharded parameters are never vetoed by one process, because the other processes would continue.
    """

    def __init__(
        self,
        roots: Sequence[nn.Module],
        parameters: Sequence[Tensor],
        how: OnNonfinite,
        on_spike: OnSpike = "warn",
        skip: frozenset[frozenset[int]] = frozenset(),
        together: Sequence[Optimizer] = (),
    ) -> None:
        self._together = [p for each in together for p in owned_by(each)]
        self.roots, self.how, self._on_spike, self._skip = list(roots), how, on_spike, skip
        self._detectors: dict[tuple[int, int], SpikeDetector] = defaultdict(SpikeDetector)
        self.device_type = parameters[0].device.type if parameters else "cpu"
        self._is_partial = has_others() and any(local_part(p) is not p for p in parameters)
        self._low = any(p.dtype in _LOW for p in parameters)
        self._buffers = [BufferGuard() for _ in roots]
        self._hidden: list[tuple[Tensor, Tensor | None]] = []
        self._before: tuple[list[Tensor], Callable[[], None]] | None = None
        self._flag: Tensor | None = None  # the veto, if it is applied on the device
        self._trusted: dict[int, list[int]] = {}  # optimizers whose gradient norm equals the norm after the clip
        self.vetoed: int = 0

    def begin(self) -> None:
        """Must be called before the first forward pass of a step."""
        if self.how != "observe":
            for guard, root in zip(self._buffers, self.roots):
                guard.keep(root)

    def before_update(self, step: RecordedStep, optimizer: Optimizer, left_by_clip: float | None = None) -> None:
        """Decides on an update. ``left_by_clip`` is the norm of the clipped gradients.

        It is None unless a clip by norm was the last event and its norm is on the host.
        """
        norm, counts = self._norm(step.step, optimizer, left_by_clip)
        step.values["grads"], trained = counts, (id(optimizer), counts[0])
        if step.grad_norm is None:
            step.grad_norm, step.trained = norm, trained
        if self._skip and frozenset(i for of_batch in step.ids for i in of_batch or ()) in self._skip:
            self._hide(optimizer)
            step.values["vetoed"] = "skip list"
            return
        is_skipped = left_by_clip is None and step.kinds[-1:] == ["scaler_skipped"]  # no update will come
        if self.how == "observe" or self._is_partial or is_skipped or getattr(optimizer, "found_inf", None) is not None:
            return
        if self.device_type != "cpu" and isinstance(norm, Tensor) and self._takes_it_on_device(norm, optimizer):
            self._flag = ~torch.isfinite(norm)
            optimizer.found_inf, optimizer.grad_scale = self._flag.float(), None  # type: ignore[attr-defined]
            step.values["on_device"] = True
        elif not math.isfinite(norm):
            self._hide(optimizer)
            step.values["vetoed"] = "gradients"
        elif self._on_spike != "warn" and (found := self._spike(step, trained, float(norm))) is not None:
            spike, action = found
            step.values["spike"] = [spike.grad_norm, spike.usual, spike.initial, action]
            if action != "warn":
                self._hide(optimizer)
                step.values["vetoed"] = "spike"
        elif self._low:
            self._before = _state_of(optimizer, owned_by(optimizer))

    def _norm(self, step: int, optimizer: Optimizer, by_clip: float | None) -> tuple[Tensor | float, list[int]]:
        """Returns the norm, with the number of gradients and of parameters.

        It is measured in the first 64 steps and then in every 16th, because these steps may be examined.

        In other steps, the norm after a clip is used if the last measurement agreed with the clip to half of the
        dtype's digits, for the same number of gradients: then the clip covers all gradients. A measurement takes 1 % of
        a step of a small GPT, 5 % of a step of a small MLP.
        """
        known = by_clip if by_clip is not None and math.isfinite(by_clip) else None
        owned = self._together or owned_by(optimizer)
        counts = [num_gradients(owned), len(owned)]
        is_trusted = self._trusted.get(id(optimizer)) == counts
        if known is not None and step > ALWAYS and step % EVERY != 1 and is_trusted:
            return known, counts
        norm = _norm([grad for p in owned if (grad := p.grad) is not None])
        self._trusted.pop(id(optimizer), None)
        if known is not None and math.isclose(norm, known, rel_tol=math.sqrt(torch.finfo(norm.dtype).eps)):
            self._trusted[id(optimizer)] = counts
        return norm, counts

    def _spike(self, step: RecordedStep, trained: tuple[int, int], norm: float) -> tuple[Spike, SpikeAction] | None:
        """Detects a spike. Each player of a GAN, and each stage of training, has its own norms."""
        spike = self._detectors[trained].detect(step.step, _before_clipping(step, norm))
        if spike is None:
            return None
        action = action_for(self._on_spike, spike)
        return spike, "skip" if action == "rollback" and has_others() else action  # each rank's snapshot differs

    def _takes_it_on_device(self, norm: Tensor, optimizer: Optimizer) -> bool:
        is_alone = not self._low and self._on_spike == "warn"
        can = getattr(optimizer, "_step_supports_amp_scaling", False) and not hasattr(optimizer, "grad_scale")
        return norm.device.type == self.device_type and is_alone and bool(can)

    def was_vetoed_on_device(self, step: RecordedStep, norm: float) -> bool:
        """Returns True if the device skipped the update (gradient norm ``norm``), and marks the step as vetoed."""
        if "on_device" not in step.values or math.isfinite(norm):
            return False
        step.values["vetoed"] = "gradients"
        self.vetoed += 1
        return True

    def _hide(self, optimizer: Optimizer) -> None:
        """Hides the gradients: an optimizer without gradients changes nothing."""
        owned = owned_by(optimizer)
        self._hidden = [(p, p.grad) for p in owned]
        for p in owned:
            p.grad = None

    def after_update(self, step: RecordedStep, optimizer: Optimizer) -> None:
        if self._flag is not None:
            del optimizer.found_inf, optimizer.grad_scale  # type: ignore[attr-defined]
            self._restore_buffers(self._flag)
            self._flag = None
        if self._hidden:
            for p, grad in self._hidden:
                p.grad = grad
            self._hidden = []
            self._restore_buffers()
            self.vetoed += 1
        if self._before is not None:
            written, put_back = self._before
            self._before = None
            if not math.isfinite(_norm(written)):
                put_back()
                self._restore_buffers()
                step.values["vetoed"] = "update"
                self.vetoed += 1

    def _restore_buffers(self, flag: Tensor | None = None) -> None:
        for guard in self._buffers:
            guard.restore_if(torch.ones((), dtype=torch.bool, device="cpu") if flag is None else flag)


@torch.no_grad()
def _norm(grads: list[Tensor]) -> Tensor:
    """Returns the norm of all gradients, which is finite if each of their elements is.

    Like ``get_total_norm``, but without its grouping by device and dtype, which takes 20 us. If squares overflow on
    the CPU, the norm is measured again in float64. On a device, the largest element replaces it, without a sync.
    """
    grads = [g.coalesce().values() if g.is_sparse else g for g in grads]
    if not grads:
        return torch.zeros((), device="cpu")
    kinds = {(type(g), g.device, g.dtype) for g in grads}
    if len({kind[:2] for kind in kinds}) > 1 or type(grads[0]) is not Tensor:
        measured = partial(_norm_of_parts, [local_part(g) for g in grads])
    else:
        measured = partial(_norm_of_plain, grads)
    norm = measured(torch.float32 if any(dtype in _LOW for _, _, dtype in kinds) else None)
    if norm.device.type != "cpu":
        return torch.where(norm.isfinite(), norm, measured(None, math.inf).to(norm.dtype))
    return norm if math.isfinite(norm) else measured(torch.float64)


def _norm_of_plain(grads: list[Tensor], dtype: torch.dtype | None, order: float = 2.0) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads, order, dtype=dtype)), order)
    return norm


def _norm_of_parts(grads: list[Tensor], dtype: torch.dtype | None, order: float = 2.0) -> Tensor:
    return get_total_norm(grads if dtype is None else [g.to(dtype) for g in grads], order)


def _before_clipping(step: RecordedStep, norm: float) -> float:
    """Returns the norm that a clip right before the update measured; ``norm`` without one. For spikes only."""
    kind, clip = step.events[-2] if len(step.events) > 1 else ("", {})
    return float(clip["norm"]) if kind == "clip" and clip["norm"] is not None else norm


@torch.no_grad()
def _state_of(optimizer: Optimizer, owned: list[Tensor]) -> tuple[list[Tensor], Callable[[], None]]:
    """Returns the weights, and a function that restores them and the optimizer's state to their current values."""
    weights = [p.detach() for p in owned]
    copies = [w.clone() for w in weights]
    states = {
        p: {k: v.clone() if isinstance(v, Tensor) else v for k, v in optimizer.state[p].items()}
        for p in owned
        if p in optimizer.state
    }

    def put_back() -> None:
        torch._foreach_copy_(weights, copies)
        for p in owned:
            if p not in states:
                optimizer.state.pop(p, None)
                continue
            for key, value in states[p].items():
                live: object = optimizer.state[p].get(key)
                if isinstance(value, Tensor) and isinstance(live, Tensor):
                    live.copy_(value)
                else:
                    optimizer.state[p][key] = value

    return weights, put_back
