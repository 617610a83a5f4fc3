"""Reads memory and hooks of the process from time to time."""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn

from trainwright.checkpoint.names import named_modules
from trainwright.distributed.memory import unfreed_bytes
from trainwright.doctor.facts.resources import GrowthFacts, HeldResources
from trainwright.recorder.probes import Probe, WatchedObjects
from trainwright.recorder.program import RecordedStep
from trainwright.runs.json_values import Facts, strict

MIN_INTERVAL_STEPS = 16
"""Minimum number of steps between two readings. It doubles when there are more than MAX_READINGS."""
MAX_READINGS = 64
UNLIMITED_STEPS = 192
"""Until this step all readings are taken. Later they take at most MAX_TIME_FRACTION of the time."""
MAX_TIME_FRACTION = 0.004
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Growth(Probe):
    """Records the resources of the process. A reading costs about 50 us, and 2 us for each module."""

    name = GrowthFacts.experiment

    def __init__(self, watched: WatchedObjects) -> None:
        self._modules = dict(named_modules(watched.subject.roots))
        self._parameters = watched.subject.parameters
        self._held: list[HeldResources] = []
        self._every, self._next_s = MIN_INTERVAL_STEPS, 0.0

    def on_closed(self, step: RecordedStep) -> None:
        if step.step % self._every:
            return
        begin_s = time.perf_counter()
        if step.step > UNLIMITED_STEPS and begin_s < self._next_s:
            return
        self._held.append(self._reading(step.step))
        if len(self._held) > MAX_READINGS:
            self._held, self._every = self._held[1::2], 2 * self._every
        end_s = time.perf_counter()
        self._next_s = end_s + (end_s - begin_s) / MAX_TIME_FRACTION

    def values(self) -> Facts | None:
        if not self._held:
            return None
        most = max(self._modules, key=lambda name: _hooks_of(self._modules[name]), default="")
        return dict(strict(vars(GrowthFacts(held=tuple(self._held), most_hooks=most))))

    def _reading(self, step: int) -> HeldResources:
        on_device = any(p.is_cuda for p in self._parameters[:1])
        return HeldResources(
            step=step,
            memory_bytes=unfreed_bytes(),
            device_bytes=torch.cuda.memory_allocated() if on_device else 0,
            hooks=sum(map(_hooks_of, self._modules.values())) + sum(map(_hooks_of_tensor, self._parameters)),
        )


def _hooks_of(module: nn.Module) -> int:
    """Returns the number of hooks on a module, without those of a recorder."""
    tables = [getattr(module, name, None) for name in _HOOKS]
    return sum(not getattr(hook, "is_recorders", False) for table in tables if table for hook in table.values())


def _hooks_of_tensor(parameter: Tensor) -> int:
    tables = [parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None)]
    return sum(not getattr(hook, "is_recorders", False) for table in tables if table for hook in table.values())
