"""Observes loads of states, and the optimizer state before the next update."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from trainwright.checkpoint.names import named_parameters
from trainwright.doctor.facts.checkpoint import LoadFacts, OverwrittenFacts, ResumeFacts
from trainwright.doctor.facts.updates import LoadedMomentsFacts
from trainwright.doctor.measure.tensors import sampled
from trainwright.recorder.calls import Hook
from trainwright.recorder.gradients import owned_by
from trainwright.recorder.probes import Probe, WatchedObjects
from trainwright.recorder.program import RecordedStep
from trainwright.recorder.user_types import Args, Kwargs


class Moments(Probe):
    """Compares second moments that exist before the first update with the squared gradients of that update."""

    name = LoadedMomentsFacts.experiment

    def __init__(self, watched: WatchedObjects) -> None:
        self._names = {id(p): name for name, p in named_parameters(watched.subject.roots)}
        self._unseen = {id(each): each for each in watched.subject.optimizers}
        self._facts: LoadedMomentsFacts | None = None

    def on_step(self, optimizer: Optimizer, args: Args) -> None:
        if self._unseen and self._unseen.pop(id(optimizer), None) is not None:
            self._facts = _loaded_moments(optimizer, self._names) or self._facts
            self.urgent = self._facts is not None

    def facts(self) -> LoadedMomentsFacts | None:
        facts, self._facts, self.urgent = self._facts, None, False
        return facts


@torch.no_grad()
def _loaded_moments(optimizer: Optimizer, names: dict[int, str]) -> LoadedMomentsFacts | None:
    by_shape: defaultdict[torch.Size, list[tuple[str, float, float]]] = defaultdict(list)
    for p in owned_by(optimizer):
        second = optimizer.state.get(p, {}).get("exp_avg_sq")
        if not isinstance(second, Tensor) or second.shape != p.shape or p.grad is None or p.grad.is_sparse:
            continue
        moment, squared = float(second.float().mean()), float(p.grad.float().square().mean())
        if moment > 0.0 and squared > 0.0 and math.isfinite(moment) and math.isfinite(squared):
            by_shape[p.shape].append((names.get(id(p), "a weight"), math.log10(moment), math.log10(squared)))
    rows = [row for each in by_shape.values() if len(each) > 1 for row in each]
    if not rows:
        return None
    matched = [
        abs(moment - squared)
        for each in by_shape.values()
        if len(each) > 1
        for moment, squared in zip(sorted(row[1] for row in each), sorted(row[2] for row in each))
    ]
    rows.sort(key=lambda row: -abs(row[1] - row[2]))
    return LoadedMomentsFacts(
        kind=type(optimizer).__name__,
        names=tuple(row[0] for row in rows[:64]),
        gaps=tuple(abs(row[1] - row[2]) for row in rows[:64]),
        matched=sum(matched) / len(matched),
    )


MAX_ELEMENTS_COMPARED = 512  # Elements of each weight that are compared between a load and the first forward call


class ResumeProbe(Probe):
    """Observes loads of the models."""

    name = ResumeFacts.experiment

    def __init__(self, watched: WatchedObjects) -> None:
        self._watched = watched.subject
        self._loads: list[LoadFacts] = []
        self._loaded: dict[str, Tensor] = {}
        self._has_begun = False
        self._overwritten: OverwrittenFacts | None = None
        self._updates, self._changed = 0, True
        self._handles: list[RemovableHandle] = [
            root.register_load_state_dict_post_hook(Hook(root, self._on_loaded))  # type: ignore[no-untyped-call]
            for root in self._watched.roots
        ]

    def end(self, error: BaseException | None) -> None:
        for handle in self._handles:
            handle.remove()

    def _on_loaded(self, module: nn.Module, keys: Any) -> None:
        missing, unexpected = tuple(keys.missing_keys), tuple(keys.unexpected_keys)
        if not unexpected:  # the state of an adapter leaves out the frozen weights
            frozen = {name for name, p in module.named_parameters() if not p.requires_grad}
            missing = tuple(name for name in missing if name not in frozen)
        tensors = sum(1 for _ in module.parameters()) + sum(1 for _ in module.buffers())
        prefix = _prefix_between(missing, unexpected)
        found = LoadFacts(step=self._updates, tensors=tensors, missing=missing, unexpected=unexpected, prefix=prefix)
        self._loads, self._changed = [*self._loads[-7:], found], True
        if not self._has_begun:
            matrices = ((name, p) for name, p in module.named_parameters() if p.dim() > 1)
            self._loaded |= {name: sampled(p, MAX_ELEMENTS_COMPARED).float() for name, p in matrices}

    def on_forward(self, root: nn.Module, args: Args, kwargs: Kwargs) -> None:
        loaded, self._loaded, self._has_begun = self._loaded, {}, True
        if not loaded:
            return
        now = {name: p for each in self._watched.roots for name, p in each.named_parameters()}
        known = [(name, was, now[name]) for name, was in loaded.items() if name in now]
        gone = [(name, p) for name, was, p in known if not _is_similar(was, sampled(p, MAX_ELEMENTS_COMPARED).float())]
        fraction = sum(p.numel() for _, p in gone) / max(1, sum(p.numel() for _, _, p in known))
        self._overwritten = OverwrittenFacts(weights=len(known), gone=len(gone), fraction=fraction)
        self._changed = True

    def on_closed(self, step: RecordedStep) -> None:
        self._updates += 1

    def facts(self) -> ResumeFacts | None:
        if not self._changed:
            return None
        self._changed = False
        return ResumeFacts(loads=tuple(self._loads), overwritten=self._overwritten)


def _prefix_between(missing: tuple[str, ...], unexpected: tuple[str, ...]) -> str | None:
    """Returns the prefix that is the only difference between the names; None if they differ otherwise."""
    for longer, shorter in ((missing, unexpected), (unexpected, missing)):
        if not longer or len(longer) != len(shorter):
            continue
        first = next((name for name in longer if name.endswith(f".{shorter[0]}")), None)
        prefix = "" if first is None else first.removesuffix(shorter[0])
        if prefix and {prefix + name for name in shorter} == set(longer):
            return prefix
    return None


def _is_similar(was: Tensor, now: Tensor) -> bool:
    """Returns True if values are equal up to a factor or rounding: casts and scaling keep learned weights."""
    if was.shape != now.shape or bool((was == now).all()):
        return was.shape == now.shape
    return bool(torch.nn.functional.cosine_similarity(was, now, dim=0) > 0.5)
