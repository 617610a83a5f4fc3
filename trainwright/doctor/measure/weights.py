"""Compares the weights at each examination with the first ones and with the last ones: by their bits and their size."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise

import torch
from torch import Tensor

from trainwright.doctor.facts.weights import MAX_NAMES, Drift, WeightsFacts
from trainwright.recorder.probes import Probe, WatchedObjects, WatchSite
from trainwright.recorder.program import RecordedStep
from trainwright.recorder.ranks import own_part
from trainwright.runlog.json_values import Facts, strict
from trainwright.state.checksums import start_checksums
from trainwright.state.names import named_parameters

MIN_ELEMENTS = 16
"""A tensor with fewer elements has no size that means anything."""
DRIFT_FACTOR, DRIFT_STEPS = 30.0, 48
"""Initialisations differ by about that factor; the fewest steps over which a weight is compared."""
WRITES_OF_TRAINING = 16
"""Writes to a weight before the first step: to make, initialise and load one takes fewer."""
STOPPED_UPDATES = 40
"""Updates without a change after which a weight that has moved before stands still."""


class MovingWeights(Probe):
    """Reads all weights at an examination: one pass over their memory. In between it counts updates."""

    name = WeightsFacts.experiment

    def __init__(self, watched: WatchedObjects) -> None:
        subject = watched.subject
        names = {id(p): name for name, p in named_parameters(subject.roots)}
        self._optimizers = subject.optimizers
        self._parameters = [
            p for p in subject.parameters if p.is_floating_point() and p.layout is torch.strided and not p.is_meta
        ]
        self._names = [names.get(id(p), "a parameter outside of the model") for p in self._parameters]
        self._last: list[int] = []
        self._worked_on: set[int] = set()
        self._equal: tuple[tuple[str, ...], ...] = ()
        self._changed_at: dict[int, int] = {}  # updates made when the tensor was last seen to have changed
        self._frozen_moved: set[int] = set()
        self._was_frozen: set[int] = set()
        self._held_ever: set[int] = set()
        self._with_gradient: set[int] = set()
        self._sizes: list[tuple[int, list[float]]] = []
        self._steps = self._updates = self._stands_since = self._updates_then = 0
        self._lowest_at = self._looked_at = self._at_0_since = 0
        self._lowest = self._highest = self._rate = self._rate_before_0 = 0.0

    def begin(self, site: WatchSite) -> None:
        self._last = self._checksums()
        self._worked_on = {n for n, p in enumerate(self._parameters) if was_trained(p)}
        self._sizes = [(0, self._rms())]
        self._was_frozen = self._frozen()
        self._equal = self._equal_at_the_start()
        self._held()

    def on_closed(self, step: RecordedStep) -> None:
        self._steps = step.step
        rates = [_rate(group) for each in step.updates for group in each.groups]
        if not rates or "vetoed" in step.values:  # a scaler may have left the update out
            return
        highest = max(rates)
        self._updates += highest > 0.0
        self._highest = max(self._highest, highest)
        if highest != 0.0:
            self._at_0_since = 0
        elif not self._at_0_since:
            self._at_0_since, self._rate_before_0 = self._steps, self._rate
        self._rate = highest
        if min(rates) < self._lowest:
            self._lowest, self._lowest_at = min(rates), self._steps

    def values(self) -> Facts | None:
        if not self._sizes:
            return None
        now, everything = self._checksums(), range(len(self._parameters))
        changed = {n for n, (was, one) in enumerate(zip(self._last, now)) if was != one}
        frozen, held = self._frozen(), self._held()
        # an optimizer leaves a tensor without a gradient alone: something else moves it
        with_any = {n for n, p in enumerate(self._parameters) if p.grad is not None}
        self._frozen_moved |= changed & frozen & self._was_frozen & held & with_any
        self._last, self._was_frozen = now, frozen
        if changed:
            self._stands_since, self._updates_then = self._steps, self._updates
        self._changed_at |= dict.fromkeys(changed, self._updates)
        zero_now = self._note_gradients()
        trainable, moved = held - frozen, set(self._changed_at)
        with_zeros = (zero_now - self._with_gradient) & trainable
        stopped = {n for n, at in self._changed_at.items() if self._updates - at >= STOPPED_UPDATES}
        still = (trainable - moved) | (trainable & stopped) | with_zeros
        was_zero = {n for n in everything if not self._sizes[0][1][n] and self._parameters[n].dim() > 1}
        since, self._looked_at = self._looked_at, self._steps
        facts = WeightsFacts(
            steps=self._steps,
            updates=self._updates,
            tensors=len(trainable),
            moved=len(trainable & moved),
            still=self._named(still),
            num_still=len(still),
            zero_gradients=self._named(with_zeros),
            zero_weights=self._named((was_zero & trainable) - moved),
            has_gradient=bool(self._with_gradient & trainable),
            stands_since=self._stands_since,
            updates_since=self._updates - self._updates_then,
            frozen=len(frozen & held),
            frozen_moved=self._named(self._frozen_moved),
            frozen_still=sum(self._parameters[n].dim() > 1 for n in frozen - moved),
            worked_on=tuple(self._names[n] for n in sorted(self._worked_on)),
            since=since,
            unchanged=self._named(trainable - changed | trainable & zero_now),
            equal=self._equal,
            drifts=tuple(self._drifts()),
            lowest_rate=self._lowest,
            lowest_at=self._lowest_at,
            at_0_since=self._at_0_since,
            rate_before_0=self._rate_before_0 if self._at_0_since else 0.0,
            highest_rate=self._highest,
        )
        return dict(strict(vars(facts)))

    def _note_gradients(self) -> set[int]:
        """What has a gradient of zeros now. A tensor that never had another one, and changes, only decays."""
        known = [n for n, p in enumerate(self._parameters) if p.grad is not None]
        grads = [own_part(grad) for n in known if (grad := self._parameters[n].grad) is not None]
        is_any = torch.stack([grad.detach().abs().sum() > 0 for grad in grads]).tolist() if grads else []
        self._with_gradient |= {n for n, found in zip(known, is_any) if found}
        return {n for n, found in zip(known, is_any) if not found}

    def _equal_at_the_start(self) -> tuple[tuple[str, ...], ...]:
        """Weights at the same place of two modules in one list, with equal bits that are no constant."""
        groups: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
        for n, (name, p) in enumerate(zip(self._names, self._parameters)):
            is_random = p.dim() > 1 and p.numel() >= MIN_ELEMENTS and n not in self._worked_on
            if is_random and p.requires_grad and (place := re.sub(r"(^|\.)\d+\.", r"\1*.", name)) != name:
                groups[place, self._last[n]].append(n)
        several = [[self._parameters[n] for n in group] for group in groups.values() if len(group) > 1]
        names = {id(p): name for name, p in zip(self._names, self._parameters)}
        equal = [[p for p in group if torch.equal(own_part(p), own_part(group[0]))] for group in several]
        varies = [group for group in equal if len(group) > 1 and bool((group[0] != group[0].flatten()[0]).any())]
        return tuple(tuple(names[id(p)] for p in group[:MAX_NAMES]) for group in varies[:MAX_NAMES])

    def _named(self, numbers: Iterable[int]) -> tuple[str, ...]:
        return tuple(self._names[n] for n in sorted(numbers)[:MAX_NAMES])

    def _held(self) -> set[int]:
        """What belongs to an optimizer in a group whose rate is, or was at an examination, above 0."""
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups if _rate(group) > 0.0]
        held = {id(p) for group in groups for p in group["params"]}
        self._held_ever |= {n for n, p in enumerate(self._parameters) if id(p) in held}
        return self._held_ever

    def _frozen(self) -> set[int]:
        return {n for n, p in enumerate(self._parameters) if not p.requires_grad}

    def _checksums(self) -> list[int]:
        return start_checksums([own_part(p.detach()) for p in self._parameters])()

    @torch.no_grad()
    def _rms(self) -> list[float]:
        parts = [own_part(p.detach()) for p in self._parameters]
        wide = torch.float32  # of half precision; of double its own
        norms: list[Tensor] = [part.norm(dtype=torch.promote_types(part.dtype, wide)).to(wide) for part in parts]
        sizes = torch.stack(norms).tolist() if norms else []
        return [size / math.sqrt(max(1, part.numel())) for size, part in zip(sizes, parts)]

    def _drifts(self) -> list[Drift]:
        """Compares with the last examination at half as many steps or fewer: slow growth over a long run is none."""
        now, before_s = self._rms(), min(self._steps // 2, max(0, self._steps - DRIFT_STEPS))
        step, sizes = [each for each in self._sizes if each[0] <= before_s][-1]
        found = []
        for n, (before, size) in enumerate(zip(sizes, now)):
            usual = _usual(self._parameters[n])
            if self._parameters[n].numel() < MIN_ELEMENTS or not before or not _is_far(before, size, usual):
                continue
            course = [each[n] for at, each in self._sizes if at >= step] + [size]
            rises = size > before
            steady = len(course) > 2 and all(b >= a if rises else b <= a for a, b in pairwise(course))
            found.append(Drift(name=self._names[n], since=step, before=before, now=size, usual=usual, steady=steady))
        self._sizes.append((self._steps, now))
        if len(self._sizes) > 64:
            del self._sizes[1::2]
        return found[:MAX_NAMES]


def was_trained(parameter: Tensor) -> bool:
    """Return whether it was written to too often for weights that were only made."""
    return not parameter.is_inference() and parameter._version > WRITES_OF_TRAINING


def _is_far(before: float, now: float, usual: float) -> bool:
    if not math.isfinite(now):
        return False  # other checks find it
    return now > DRIFT_FACTOR * max(before, usual) or now * DRIFT_FACTOR < min(before, usual)


def _usual(parameter: Tensor) -> float:
    """The deviation that torch gives a weight of this shape; of a vector, 1."""
    return 1.0 if parameter.dim() < 2 else 1.0 / math.sqrt(max(1, parameter.numel() // parameter.shape[0]))


def _rate(group: Facts) -> float:
    """1 for an optimizer without a learning rate."""
    rate = group.get("lr", 1.0)
    return float(rate) if isinstance(rate, int | float | Tensor) else 1.0
