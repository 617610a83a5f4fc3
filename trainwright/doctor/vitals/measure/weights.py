"""Compares the weights at each look with those at the begin and at the look before: by the bits, and by their size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from trainwright.doctor.vitals.facts import MOST_NAMES, Drift, VitalsFacts
from trainwright.recorder.probes import Probe, WatchedObjects, WatchSite
from trainwright.recorder.program import RecordedStep
from trainwright.recorder.ranks import own_part
from trainwright.runlog.json_values import Facts, strict
from trainwright.state.checksums import start_checksums
from trainwright.state.names import named_parameters

FEW = 16
"""A tensor with fewer elements than this has no size that means anything."""
FACTOR = 30.0
"""By so much a weight must have grown or shrunk to be told of: about the range in which initialisations differ."""

WORKED_ON = 16
"""Writes to a weight before the first step: to make one, to initialise and to load it are fewer."""
WINDOW = 48
"""Steps over which a weight is compared at the least."""


class MovingWeights(Probe):
    """Reads all weights at a look: one pass over their memory. Between looks it only counts updates."""

    name = VitalsFacts.experiment
    closes_late = True

    def __init__(self, watched: WatchedObjects) -> None:
        subject = watched.subject
        names = {id(p): name for name, p in named_parameters(subject.roots)}
        self._optimizers = subject.optimizers
        self._parameters = [
            p for p in subject.parameters if p.is_floating_point() and p.layout is torch.strided and not p.is_meta
        ]
        self._names = [names.get(id(p), "a parameter outside of the model") for p in self._parameters]
        self._begin: list[int] = []
        self._worked_on: set[int] = set()
        self._last: list[int] = []
        self._moved: set[int] = set()
        self._frozen_moved: set[int] = set()
        self._was_frozen: set[int] = set()
        self._updated: set[int] = set()
        self._with_gradient: set[int] = set()
        self._sizes: list[tuple[int, list[float]]] = []
        self._steps = self._updates = self._stands_since = self._lowest_at = self._looked_at = 0
        self._lowest = self._highest = self._rate = self._rate_before_0 = 0.0
        self._at_0_since = 0

    def begin(self, site: WatchSite) -> None:
        self._begin = self._last = self._checksums()
        self._worked_on = {n for n, p in enumerate(self._parameters) if was_trained(p)}
        self._sizes = [(0, self._rms())]
        self._was_frozen = self._frozen()
        self._held()

    def on_closed(self, step: RecordedStep) -> None:
        self._steps = step.step
        rates = [_rate(group) for each in step.updates for group in each.groups]
        if not rates or "vetoed" in step.values:  # a scaler may have left the update out
            return
        self._note_rate(max(rates))
        if min(rates) < self._lowest:
            self._lowest, self._lowest_at = min(rates), self._steps

    def _note_rate(self, rate: float) -> None:
        """``rate`` is the highest of all groups in an update."""
        self._updates += rate > 0.0
        self._highest = max(self._highest, rate)
        if rate != 0.0:
            self._at_0_since = 0
        elif not self._at_0_since:
            self._at_0_since, self._rate_before_0 = self._steps, self._rate
        self._rate = rate

    def values(self) -> Facts | None:
        if not self._begin:
            return None
        now = self._checksums()
        changed = {n for n, (was, one) in enumerate(zip(self._last, now)) if was != one}
        frozen, held = self._frozen(), self._held()
        # one without a gradient is left alone by an optimizer: something else moves it
        with_any = {n for n, p in enumerate(self._parameters) if p.grad is not None}
        self._frozen_moved |= changed & frozen & self._was_frozen & held & with_any
        self._last, self._was_frozen = now, frozen
        if changed:
            self._stands_since = self._steps
        self._moved |= changed
        with_zeros, zero_now = self._note_gradients()
        trainable = held - frozen
        since, self._looked_at = self._looked_at, self._steps
        still = sorted(trainable - self._moved | trainable & with_zeros)
        facts = VitalsFacts(
            steps=self._steps,
            updates=self._updates,
            tensors=len(trainable),
            moved=len(trainable & self._moved),
            only_decayed=len(trainable & with_zeros & self._moved),
            still=self._named(still),
            num_still=len(still),
            has_gradient=bool(self._with_gradient & trainable),
            stands_since=self._stands_since,
            frozen=len(frozen & held),
            frozen_still=sum(self._parameters[n].dim() > 1 for n in frozen - self._moved),
            worked_on=tuple(self._names[n] for n in sorted(self._worked_on)),
            frozen_moved=self._named(sorted(self._frozen_moved)),
            since=since,
            unchanged=self._named(sorted(trainable - changed | trainable & zero_now)),
            drifts=tuple(self._drifts()),
            lowest_rate=self._lowest,
            lowest_at=self._lowest_at,
            at_0_since=self._at_0_since,
            rate_before_0=self._rate_before_0 if self._at_0_since else 0.0,
            highest_rate=self._highest,
        )
        return dict(strict(vars(facts)))

    def _note_gradients(self) -> tuple[set[int], set[int]]:
        """What has a gradient of zeros now and never had another at a look: if it changes, then by decay. And all that
        has one now.
        """
        known = [n for n, p in enumerate(self._parameters) if p.grad is not None]
        grads = [own_part(grad) for n in known if (grad := self._parameters[n].grad) is not None]
        is_any = torch.stack([grad.detach().abs().sum() > 0 for grad in grads]).tolist() if grads else []
        self._with_gradient |= {n for n, found in zip(known, is_any) if found}
        zero_now = {n for n, found in zip(known, is_any) if not found}
        return zero_now - self._with_gradient, zero_now

    def _named(self, numbers: Sequence[int]) -> tuple[str, ...]:
        return tuple(self._names[n] for n in numbers[:MOST_NAMES])

    def _held(self) -> set[int]:
        """What belongs to an optimizer in a group whose rate is, or was at a look, above 0."""
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups if _rate(group) > 0.0]
        held = {id(p) for group in groups for p in group["params"]}
        self._updated |= {n for n, p in enumerate(self._parameters) if id(p) in held}
        return self._updated

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
        """Compares with the newest look at half as many steps or less, so that slow growth over a long run is none.

        Until WINDOW steps, with the begin.
        """
        now = self._rms()
        older = [each for each in self._sizes if 2 * each[0] <= self._steps and each[0] <= max(0, self._steps - WINDOW)]
        found = []
        for n, size in enumerate(now):
            step, before = older[-1][0], older[-1][1][n]
            usual = _usual(self._parameters[n])
            if self._parameters[n].numel() < FEW or not before or not _is_far(before, size, usual):
                continue
            course = [sizes[n] for at, sizes in self._sizes if at >= step] + [size]
            rises = size > before
            steady = len(course) > 2 and all(b >= a if rises else b <= a for a, b in pairwise(course))
            found.append(Drift(name=self._names[n], since=step, before=before, now=size, usual=usual, steady=steady))
        self._sizes.append((self._steps, now))
        if len(self._sizes) > 64:
            del self._sizes[1::2]
        return found[:MOST_NAMES]


def was_trained(parameter: Tensor) -> bool:
    """Whether it was written to too often for weights that were only made."""
    return not parameter.is_inference() and parameter._version > WORKED_ON


def _is_far(before: float, now: float, usual: float) -> bool:
    if not math.isfinite(now):
        return False  # that has a name
    return now > FACTOR * max(before, usual) or now * FACTOR < min(before, usual)


def _usual(parameter: Tensor) -> float:
    """The deviation that torch gives a weight of this shape; of a vector, 1."""
    if parameter.dim() < 2:
        return 1.0
    return 1.0 / math.sqrt(max(1, parameter.numel() // parameter.shape[0]))


def _rate(group: Facts) -> float:
    """1 for an optimizer without a learning rate."""
    rate = group.get("lr", 1.0)
    return float(rate) if isinstance(rate, int | float | Tensor) else 1.0
