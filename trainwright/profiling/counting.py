"""Counts what one real step computes and moves, and the lines at which the host waits for a device."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence

import torch
from torch import nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from trainwright.plan.call_trace import Phase, Work
from trainwright.plan.trace.fake_tensors import in_backward
from trainwright.plan.trace.operator_call import OpArgs, OperatorCall, OpKwargs, OpResult, tensors_in
from trainwright.plan.trace.tracker import ModulePaths
from trainwright.plan.trace.work import WorkLog
from trainwright.profiling.facts import HostSync
from trainwright.profiling.stack import place_of

_SYNCHRONIZING = {"_local_scalar_dense": "reads a value", "nonzero": "has a size that the values decide"}
_SYNCHRONIZING |= dict.fromkeys(("masked_select", "_unique2", "unique_consecutive"), _SYNCHRONIZING["nonzero"])
"""Operators whose result the host waits for, because it needs a value."""


class StepCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode around one step. Code outside of passes and update, such as an evaluation, is not counted."""

    is_the_watchs = True  # not a mode of the user, in which the recorder would be inactive

    def __init__(self, roots: Sequence[nn.Module]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._paths = [ModulePaths(root) for root in roots]
        self._work = WorkLog()
        self._syncs = Counter[tuple[str, str, str]]()

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: OpArgs = (), kwargs: OpKwargs | None = None
    ) -> OpResult:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.namespace == "prim":
            return result
        name = func._schema.name.rpartition("::")[2]
        if name in _SYNCHRONIZING or _leaves_device(args, result):
            self._record_sync(name, on_cpu=all(each.device.type == "cpu" for each in tensors_in(args)))
        if not func.is_view and (phase := self._phase()):
            self._work.add(phase, self._module(phase), OperatorCall(func, args, kwargs, result))
        return result

    def _phase(self) -> Phase | None:
        if in_backward():
            return "backward"
        phase = place_of(sys._getframe(2)).phase
        if phase == "loop":  # a custom loop that computes there
            return "forward" if torch.is_grad_enabled() else "update"
        return {"forward": "forward", "backward": "backward", "update": "update"}.get(phase)  # type: ignore[return-value]

    def _module(self, phase: Phase) -> str:
        found = (paths.backward() if phase == "backward" else paths.stack[-1] for paths in self._paths)
        return next(filter(None, found), "")

    def _record_sync(self, name: str, *, on_cpu: bool) -> None:
        place = place_of(sys._getframe(2))
        counts_steps = on_cpu and place.phase == "update"  # torch's optimizers count steps on the host for every device
        if place.site and not counts_steps and place.phase not in ("data", "evaluation", "saving", "looks"):
            self._syncs[name, place.site, place.phase] += 1

    def work(self) -> tuple[Work, ...]:
        """Return what was computed and moved."""
        return self._work.rows()

    def syncs(self) -> tuple[HostSync, ...]:
        """Return the places where the host waited for a device, or would on a GPU."""
        return tuple(HostSync(op, site, phase, calls) for (op, site, phase), calls in self._syncs.most_common())

    def close(self) -> None:
        """Remove the hooks."""
        for paths in self._paths:
            paths.close()


def _leaves_device(args: OpArgs, result: OpResult) -> bool:
    """Return True if a tensor of a GPU was copied to the host, which waits for it."""
    taken, made = next(tensors_in(args), None), next(tensors_in((result,)), None)
    return taken is not None and made is not None and taken.device.type == "cuda" and made.device.type == "cpu"
