"""Listens to what is loaded, and looks at the state of the optimizers before their next update."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from trainwright.doctor.facts.checkpoint import AverageFacts, LoadFacts, MomentsFacts, ResumeFacts, ScheduleFacts
from trainwright.recorder.calls import Hook
from trainwright.recorder.gradients import owned_by
from trainwright.recorder.probes import Probe, WatchedObjects, WatchSite
from trainwright.recorder.program import RecordedStep
from trainwright.recorder.ranks import own_part
from trainwright.recorder.user_types import Args
from trainwright.runlog.json_values import Facts, strict
from trainwright.state.names import named_parameters

FOLLOWED = 4
"""Updates for which an average is followed."""
MAX_AVERAGES, SAMPLED_TENSORS, SAMPLED = 8, 8, 256


class ResumeProbe(Probe):
    """Costs a look-up an update, but for the first update after a state was loaded."""

    name = ResumeFacts.experiment

    def __init__(self, watched: WatchedObjects) -> None:
        self._names = {id(p): name for name, p in named_parameters(watched.subject.roots)}
        self._unseen = {id(each) for each in watched.subject.optimizers}  # since the begin, or since it was loaded
        self._optimizers: dict[int, MomentsFacts] = {}
        self._schedules = [_Schedule(each) for each in watched.schedulers]
        self._loads: list[LoadFacts] = []
        self._updates = 0
        self._changed = False
        self._watched = watched.subject
        self._handles: list[RemovableHandle] = []
        self._averages: list[_Average] = []
        self._found: tuple[AverageFacts, ...] = ()

    def begin(self, site: WatchSite) -> None:
        self._handles = [
            root.register_load_state_dict_post_hook(Hook(root, self._on_loaded))  # type: ignore[no-untyped-call]
            for root in self._watched.roots
        ] + [each.register_load_state_dict_post_hook(self._on_moments_loaded) for each in self._watched.optimizers]

    def end(self, error: BaseException | None) -> None:
        for handle in self._handles:
            handle.remove()

    def _on_loaded(self, module: nn.Module, keys: Any) -> None:
        missing, unexpected = tuple(keys.missing_keys), tuple(keys.unexpected_keys)
        if not unexpected:  # an adapter's own state leaves out the frozen weights that it was trained beside
            frozen = {name for name, p in module.named_parameters() if not p.requires_grad}
            missing = tuple(name for name in missing if name not in frozen)
        tensors = sum(1 for _ in module.parameters()) + sum(1 for _ in module.buffers())
        prefix = _prefix_between(missing, unexpected)
        found = LoadFacts(step=self._updates, tensors=tensors, missing=missing, unexpected=unexpected, prefix=prefix)
        self._loads, self._changed = [*self._loads[-7:], found], True

    def _on_moments_loaded(self, optimizer: Optimizer) -> None:
        self._unseen.add(id(optimizer))

    def on_step(self, optimizer: Optimizer, args: Args) -> None:
        if id(optimizer) in self._unseen:
            self._unseen.discard(id(optimizer))
            self._optimizers[id(optimizer)] = self._moments_of(optimizer)
            self._changed = True
            if self._optimizers[id(optimizer)].with_state:
                self._look_for_averages()
            for each in self._schedules:  # a state was loaded, or the watch began
                each.begin()

    def _look_for_averages(self) -> None:
        root = self._watched.roots[0]
        owned = {id(p) for optimizer in self._watched.optimizers for p in owned_by(optimizer)}
        found = itertools.islice(_like(root, owned), MAX_AVERAGES)
        self._averages = [_Average(weakref.ref(each), _sampled(each), _sampled(root)) for each in found]

    def on_schedule(self, scheduler: object) -> None:
        known = next((each for each in self._schedules if each.scheduler is scheduler), None)
        if known is None:
            known = _Schedule(scheduler)
            known.before -= 1
            self._schedules.append(known)
        known.calls += 1

    def on_closed(self, step: RecordedStep) -> None:
        self._updates += 1
        if self._averages and self._updates >= FOLLOWED:
            self._found = tuple(facts for each in self._averages if (facts := each.facts()) is not None)
            self._averages, self._changed, self.urgent = [], True, bool(self._found)
        for each in self._schedules:
            each.updates += 1
        self._changed |= self._updates == 16  # by now it is known what a schedule counts

    def _moments_of(self, optimizer: Optimizer) -> MomentsFacts:
        trained = [p for p in owned_by(optimizer) if p.grad is not None]
        states = {id(p): optimizer.state[p] for p in trained if optimizer.state.get(p)}
        steps = [_number(each.get("step")) for each in states.values()]
        counts = [each for each in steps if each is not None]
        return MomentsFacts(
            kind=type(optimizer).__name__,
            parameters=len(trained),
            with_state=len(states),
            least_steps=min(counts, default=0),
            most_steps=max(counts, default=0),
        )

    def values(self) -> Facts | None:
        self.urgent = False
        if not self._changed:
            return None
        self._changed = False
        schedules = tuple(each.facts() for each in self._schedules if each.counts)
        optimizers, loads = tuple(self._optimizers.values()), tuple(self._loads)
        found: Facts = strict(
            vars(ResumeFacts(optimizers=optimizers, schedules=schedules, loads=loads, averages=self._found))
        )
        return found


class _Schedule:
    """How often a scheduler was stepped before the first update that counts, and since."""

    def __init__(self, scheduler: object) -> None:
        self.scheduler, self.counts = scheduler, isinstance(getattr(scheduler, "last_epoch", None), int)
        self.begin()

    def begin(self) -> None:
        self.before = int(getattr(self.scheduler, "last_epoch", 0) or 0)
        self.calls = self.updates = 0

    def facts(self) -> ScheduleFacts:
        return ScheduleFacts(before=self.before, calls=self.calls, updates=self.updates)


def _prefix_between(missing: tuple[str, ...], unexpected: tuple[str, ...]) -> str | None:
    """What the names of one have before those of the other, where that is all they differ by."""
    for longer, shorter in ((missing, unexpected), (unexpected, missing)):
        if not longer or len(longer) != len(shorter):
            continue
        first = next((name for name in longer if name.endswith(f".{shorter[0]}")), None)
        prefix = "" if first is None else first.removesuffix(shorter[0])
        if prefix and {prefix + name for name in shorter} == set(longer):
            return prefix
    return None


def _number(value: object) -> int | None:
    if isinstance(value, Tensor) and value.numel() == 1:
        return int(value)
    return int(value) if isinstance(value, int | float) else None


def _like(root: nn.Module, owned: set[int]) -> Iterator[nn.Module]:
    """Modules with the class and the shapes of the model that no optimizer trains."""
    shapes = [p.shape for p in root.parameters()]
    for each in gc.get_referrers(type(root)):
        if type(each) is type(root) and each is not root and "_parameters" in vars(each):
            own = list(each.parameters())
            if shapes == [p.shape for p in own] and not any(id(p) in owned for p in own):
                yield each


def _sampled(module: nn.Module) -> Tensor:
    first = [own_part(p.detach()).flatten()[:SAMPLED].float() for p in module.parameters()][:SAMPLED_TENSORS]
    return torch.cat(first).cpu()


@dataclass
class _Average:
    """A module that may be an average of the weights, and where both were at the first update."""

    module: weakref.ref[nn.Module]
    begin: Tensor
    weights: Tensor

    def facts(self) -> AverageFacts | None:
        module, towards = self.module(), self.weights - self.begin
        if module is None or not float(self.weights.norm()):
            return None
        moved = _sampled(module) - self.begin
        size = float(moved.norm() * towards.norm())
        follows = float(moved @ towards) / size if size > 0 else 0.0
        return AverageFacts(distance=float(towards.norm() / self.weights.norm()), follows=follows)
