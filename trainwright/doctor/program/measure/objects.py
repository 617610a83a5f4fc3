"""Which scheduler, scaler and evaluated model a loop uses with which optimizer and model."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from trainwright.doctor.program.facts import EvaluatedCopy, ObjectsFacts, StrayScheduler
from trainwright.recorder.calls import Hook
from trainwright.recorder.comparisons import Site
from trainwright.recorder.copies import is_a_copy
from trainwright.recorder.gradients import owned_by
from trainwright.recorder.optimizers import same_optimizer
from trainwright.recorder.probes import Probe, WatchedObjects
from trainwright.recorder.program import RecordedStep
from trainwright.recorder.user_types import Args, Kwargs
from trainwright.runlog.json_values import Facts, strict

MOST_CALLS = 1024
"""Calls without gradients that are remembered."""
PATIENCE = 20
"""Steps after which a scheduler's optimizer that never stepped is not one that steps seldom."""


@dataclass
class _Schedule:
    """A scheduler that is stepped, and the optimizer that it was made with."""

    kind: str
    optimizer: Optimizer
    since: int
    calls: int = 0


@dataclass
class _Copy:
    """A module of the shapes of a root, and its calls without gradients: step, site, version of its weights."""

    module: nn.Module
    calls: dict[tuple[int, Site], int] = field(default_factory=dict)

    def called(self, step: int, site: Site) -> None:
        if (step, site) not in self.calls and len(self.calls) < MOST_CALLS:
            self.calls[step, site] = sum(p._version for p in self.module.parameters())


class ObjectsProbe(Probe):
    """Hears what is scaled, unscaled, stepped, scheduled and put into eval mode."""

    name = ObjectsFacts.experiment
    closes_late = hears_last = True
    rests = frozenset({"on_step"})

    def __init__(self, watched: WatchedObjects) -> None:
        self._roots, self._sites = watched.subject.roots, watched.sites
        self._steps = 0
        self._stepped: set[int] = set()
        self._schedules: dict[int, _Schedule] = {}
        self._scaled_by: GradScaler | None = None  # of the losses whose gradients the next update uses
        self._unscaled: set[int] = set()
        self._is_raw = False
        self._counts: Counter[str] = Counter()
        self._scaled_since = 0
        self._copies: dict[int, _Copy] = {}
        self._handles: list[RemovableHandle] = []
        self._called: set[tuple[int, Site]] = set()  # without gradients

    # the scaler

    def on_scaled(self, scaler: object, loss: object, scaled: object) -> None:
        if isinstance(scaler, GradScaler) and scaled is not loss:
            self._scaled_by = scaler

    def on_unscale(self, scaler: GradScaler, optimizer: Optimizer) -> None:
        self._unscaled.add(id(optimizer))
        self._counts["other"] += self._scaled_by is not None and scaler is not self._scaled_by

    def on_step(self, optimizer: Optimizer, args: Args) -> None:
        self._stepped.add(id(optimizer))
        is_raw = self._scaled_by is not None and id(optimizer) not in self._unscaled
        self._is_raw |= is_raw and getattr(optimizer, "grad_scale", None) is None

    def on_scaler_step(self, scaler: GradScaler, optimizer: Optimizer, stepped: bool) -> None:
        self._counts["steps"] += scaler.is_enabled()
        self._stepped.add(id(optimizer))
        self._unscaled.discard(id(optimizer))

    def on_scaler_update(self, scaler: GradScaler) -> None:
        self._counts["updates"] += 1
        self._scaled_by = None

    # the scheduler

    def on_schedule(self, scheduler: object) -> None:
        optimizer = same_optimizer(getattr(scheduler, "optimizer", None))
        if isinstance(optimizer, Optimizer):
            known = _Schedule(type(scheduler).__name__, optimizer, self._steps + 1)
            self._schedules.setdefault(id(scheduler), known).calls += 1

    # what is evaluated

    def on_mode(self, module: nn.Module, training: bool) -> None:
        if training or id(module) in self._copies or not is_a_copy(module, self._roots):
            return
        copy = self._copies[id(module)] = _Copy(module)
        hook = Hook(module, lambda *called: self._on_copy(copy))
        self._handles.append(module.register_forward_pre_hook(hook))

    def _on_copy(self, copy: _Copy) -> None:
        if not torch.is_grad_enabled():
            copy.called(self._steps, self._sites.here())

    def on_forward_without_grad(self, root: nn.Module, args: Args, kwargs: Kwargs) -> None:
        if len(self._called) < MOST_CALLS:
            self._called.add((self._steps, self._sites.current))

    def on_closed(self, step: RecordedStep) -> None:
        self._steps = step.step
        if self._is_raw and "edited" not in step.values and "vetoed" not in step.values:
            self._counts["raw"] += 1
            self._scaled_since = self._scaled_since or step.step
        self._is_raw = False
        if not self._counts["updates"]:
            self._scaled_by = None
        self._unscaled.clear()

    def end(self, error: BaseException | None) -> None:
        for handle in self._handles:
            handle.remove()

    # the facts

    def values(self) -> Facts | None:
        if not self._steps:
            return None
        facts = ObjectsFacts(
            steps=self._steps,
            stray_schedulers=tuple(each for key in self._schedules if (each := self._stray(key)) is not None),
            scaled_updates=self._counts["raw"],
            scaled_since=self._scaled_since,
            scaler_steps=self._counts["steps"],
            scaler_updates=self._counts["updates"],
            other_scaler=self._counts["other"],
            copies=tuple(known for each in self._copies.values() if (known := self._copy(each)) is not None),
            evaluations=len({step for step, site in self._called if site in self._sites}),
        )
        return dict(strict(vars(facts)))

    def _stray(self, key: int) -> StrayScheduler | None:
        schedule = self._schedules[key]
        if id(schedule.optimizer) in self._stepped:
            return None
        trained = {id(p) for root in self._roots for p in root.parameters()}
        shares = any(id(p) in trained for p in owned_by(schedule.optimizer))
        if self._steps < (2 if shares else PATIENCE) or schedule.calls < 2:
            return None
        return StrayScheduler(schedule.kind, schedule.calls, schedule.since, shares)

    def _copy(self, copy: _Copy) -> EvaluatedCopy | None:
        """The evaluations of a copy; None where it is only used otherwise, as a teacher is."""
        evaluations = {step: version for (step, site), version in copy.calls.items() if site in self._sites}
        if not evaluations:
            return None
        return EvaluatedCopy(
            kind=type(copy.module).__name__,
            evaluations=len(evaluations),
            first=min(evaluations),
            last=max(evaluations),
            moved=len(set(evaluations.values())) > 1,
        )
