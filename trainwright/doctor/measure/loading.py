"""Observes loads of states, results of ``state_dict()``, and the optimizer state before the next update."""

from __future__ import annotations

import math
import weakref
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from trainwright.checkpoint.names import named_parameters
from trainwright.doctor.facts.calls import KeptFacts, KeptState, LoadFacts, OverwrittenFacts, ResumeFacts
from trainwright.doctor.facts.weights import LoadedMomentsFacts, PretrainedFacts
from trainwright.doctor.measure.tensors import sampled
from trainwright.doctor.measure.weights import frozen_layers, was_trained
from trainwright.recorder.callers import caller
from trainwright.recorder.calls import Hook
from trainwright.recorder.gradients import owned_by
from trainwright.recorder.probes import Probe, WatchedObjects, WatchSite
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
        self._objects, self._watched = watched, watched.subject
        self._loads: list[LoadFacts] = []
        self._loaded: dict[str, Tensor] = {}
        self._has_begun = False
        self._overwritten: OverwrittenFacts | None = None
        self._updates, self._changed = 0, True
        self._handles: list[RemovableHandle] = [
            root.register_load_state_dict_post_hook(Hook(root, self._on_loaded))  # type: ignore[no-untyped-call]
            for root in self._watched.roots
        ]

    def begin(self, site: WatchSite) -> None:
        """Finds states among the variables that fit a model except for a prefix, and were not loaded anywhere."""
        values = self._objects.values()
        inner = (each for value in values if isinstance(value, dict) for each in (value, *value.values()))
        states = [each for each in inner if isinstance(each, dict) and len(each) > 1 and _is_state(each)]
        for state in states[:MAX_LOADS]:
            for root in self._watched.roots:
                named = dict(root.named_parameters())
                prefix = _prefix_of(state, named)
                modules = [*self._watched.roots, *self._objects.modules()]
                if prefix is not None and not any(_has_values_of(module, state) for module in modules):
                    self._loads.append(
                        LoadFacts(
                            step=0, tensors=len(named), missing=tuple(named), unexpected=tuple(state), prefix=prefix
                        )
                    )

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


def _is_state(value: dict[object, object]) -> bool:
    return all(isinstance(name, str) and isinstance(each, Tensor) for name, each in value.items())


def _prefix_of(state: dict[str, Tensor], named: Mapping[str, Tensor]) -> str | None:
    """Returns the prefix that each name of a state lacks, or has in addition; None if they differ otherwise.

    The shapes must be equal, and the weights must not have been trained since.
    """
    matrices = {name: each for name, each in state.items() if each.dim() > 1}
    for longer, shorter in ((named, matrices), (matrices, named)):
        first = next(iter(shorter), "")
        ends = [name for name in longer if name.endswith(f".{first}")]
        prefix = ends[0].removesuffix(first) if len(ends) == 1 and first not in longer else ""
        pairs = [(longer.get(prefix + name), each) for name, each in shorter.items() if each.dim() > 1]
        if prefix and all(a is not None and a.shape == b.shape for a, b in pairs):
            return None if any(map(was_trained, named.values())) else prefix
    return None


def _has_values_of(module: nn.Module, state: dict[str, Tensor]) -> bool:
    """Returns True if an untrained weight of the module is similar to the first matrix of the state: it was loaded."""
    matrix = next(each for each in state.values() if each.dim() > 1)
    alike = (p for p in module.parameters() if p.shape == matrix.shape and not was_trained(p))
    one, *others = (sampled(each, MAX_ELEMENTS_COMPARED).float().cpu() for each in (matrix, *alike))
    return any(_is_similar(one, each) for each in others)


def _is_similar(was: Tensor, now: Tensor) -> bool:
    """Returns True if values are equal up to a factor or rounding: casts and scaling keep learned weights."""
    if was.shape != now.shape or bool((was == now).all()):
        return was.shape == now.shape
    return bool(torch.nn.functional.cosine_similarity(was, now, dim=0) > 0.5)


MAX_STATES = 64
MAX_LOADS = 8  # Number of loads, and of changed states, that are kept
TENSORS_COMPARED = 4  # Number of tensors that are compared. An update changes all of them.
MIN_AGE_STEPS = 20
"""Minimum age in steps of a state held to the end if it is the only state. A newer one may be a leftover variable."""


@dataclass
class _ReturnedState:
    """A dictionary of live tensors. ``is_done``: it was copied with its original values, or loaded or saved.

    A shallow copy of the dictionary has the same ``values``, which share the version counters of the ``weights``.
    """

    state: weakref.ref[dict[str, object]]
    values: tuple[weakref.ref[Tensor], ...]
    weights: tuple[Tensor, ...]
    versions: int
    step: int
    source: str | None
    is_done: bool = False

    @property
    def has_changed(self) -> bool:
        return sum(each._version for each in self.weights) != self.versions

    @property
    def is_held(self) -> bool:
        """True if the dictionary or a shallow copy of it exists."""
        return all(each() is not None for each in self.values)

    def has(self, tensor: object) -> bool:
        """Returns True if the tensor is one of the compared values."""
        return any(each() is tensor for each in self.values)


class KeptStates(Probe):
    """Records the dictionaries that ``state_dict`` of a watched model returned, and their use."""

    name = KeptFacts.experiment
    observes_every_step = True

    def __init__(self, watched: WatchedObjects) -> None:
        self._roots, self._steps = watched.subject.roots, 0
        self._returned: list[_ReturnedState] = []
        self._newest: _ReturnedState | None = None
        self._found = KeptFacts()

    def on_closed(self, step: RecordedStep) -> None:
        self._steps = step.step

    def on_state_dict(self, module: nn.Module, state: object) -> None:
        if not isinstance(state, dict) or type(state) is dict or not any(module is root for root in self._roots):
            return
        live = {p.data_ptr(): p for p in module.parameters()}
        tensors = [each for each in state.values() if isinstance(each, Tensor) and each.data_ptr() in live]
        if held := tensors[:TENSORS_COMPARED]:
            self._found.taken += 1
            self._returned = [each for each in self._returned if each.is_held][-MAX_STATES:]
            weights = tuple(live[each.data_ptr()] for each in held)
            versions = sum(each._version for each in weights)
            values = tuple(map(weakref.ref, held))
            self._newest = _ReturnedState(weakref.ref(state), values, weights, versions, self._steps, caller())
            self._returned.append(self._newest)

    def on_copied(self, tensor: Tensor) -> None:
        for each in self._returned:
            each.is_done |= each.has(tensor) and not each.has_changed

    def on_saved(self, value: object) -> None:
        self._use(value, "save")

    def on_loaded(self, module: nn.Module, state: object) -> None:
        self._use(state, "load")
        found = self._found
        if self._steps and len(found.from_itself) < MAX_LOADS and _is_from(module, state):
            names = {id(each): name for root in self._roots for name, each in root.named_modules()}
            found.loaded_module = names.get(id(module)) or type(module).__name__
            found.from_itself = (*found.from_itself, self._steps)
            found.loaded_at = found.loaded_at or caller()
            self.urgent = self.urgent or len(found.from_itself) == 2
            if self._newest is not None and not found.changed and any(module is root for root in self._roots):
                self._record_use(self._newest, "load")  # its tensors are other objects, such as ``value.detach()``

    def _use(self, value: object, how: str, depth: int = 3) -> None:
        first = (
            next((each for each in value.values() if isinstance(each, Tensor)), None)
            if isinstance(value, Mapping)
            else None
        )
        for each in self._returned:
            if each.state() is value or (first is not None and each.has(first)):
                self._record_use(each, how)
                each.is_done = True
                return
        inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
        for one in list(inner)[:MAX_STATES] if depth else ():
            self._use(one, how, depth - 1)

    def _record_use(self, taken: _ReturnedState, how: str) -> None:
        if self._steps > taken.step and taken.has_changed and not taken.is_done:
            kept = KeptState(taken.step, self._steps, how, taken.source)
            self._found.changed = (*self._found.changed, kept)[:MAX_LOADS]
            self.urgent = True

    def end(self, error: BaseException | None) -> None:
        """Records states that still exist as kept for use after the loop.

        States are left out if they are newer than 1.5 times the mean interval between states.
        """
        steps = [each.step for each in self._returned]
        usual = (steps[-1] - steps[0]) / (len(steps) - 1) if len(steps) > 1 else MIN_AGE_STEPS / 1.5
        for each in self._returned:
            if each.state() is not None and self._steps - each.step > 1.5 * max(usual, 1):
                self._record_use(each, "")
        self._returned, self._newest = [], None

    def facts(self) -> KeptFacts | None:
        self.urgent = False
        return self._found if self._steps else None


def _is_from(module: nn.Module, state: object) -> bool:
    """Returns True if all tensors of ``state`` are those of the module, so that loading it changes nothing."""
    tensors = list(state.values())[:64] if isinstance(state, Mapping) else []
    own = {each.data_ptr() for each in (*module.parameters(), *module.buffers()) if each.numel()}
    return bool(own and tensors) and all(
        isinstance(t, Tensor) and (t.data_ptr() in own or not t.numel()) for t in tensors[:64]
    )


class PretrainedProbe(Probe):
    """Reads once what the loader of a pretrained model has recorded, and counts the adapters."""

    name = PretrainedFacts.experiment
    only_changes = True

    def __init__(self, watched: WatchedObjects) -> None:
        modules = [module for root in watched.subject.roots for module in root.modules()]
        origin = next((found for each in modules if (found := vars(each).get("pretrained"))), None)
        facts = PretrainedFacts(
            missing=() if origin is None else tuple(origin.new_in_base),
            is_random=any(vars(each).get("newly_initialized", False) for each in modules),
            adapters=sum("lora_A" in each._modules for each in modules),
        )
        layers, frozen, fresh = frozen_layers(watched.subject.roots)
        trained = tuple(f".{name}" for name, m in layers if m.weight.requires_grad)
        if any(f".{name}".endswith(trained) for name, _ in fresh):
            fresh = []  # the reference of a DPO loss or a teacher: a copy of the trained model at its start
        sizes = [sum(m.weight.numel() for _, m in layers) for layers in (frozen, fresh)]
        if len(fresh) > 1 and 2 * sizes[1] >= sizes[0]:
            facts = replace(facts, frozen=len(frozen), fresh=tuple(name for name, _ in fresh))
        self._facts = facts if facts != PretrainedFacts() else None

    def facts(self) -> PretrainedFacts | None:
        return self._facts
