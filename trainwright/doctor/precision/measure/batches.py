"""Compares the tensors that a step uses with those that its loader has returned: whether a cast has cost digits."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from trainwright.doctor.precision.facts import BatchesFacts, Narrowed
from trainwright.recorder.probes import Probe, WatchedObjects
from trainwright.recorder.program import Call, Operation, RecordedStep, constants_of, tensors_of
from trainwright.runlog.json_values import Facts, strict

COMPARED = 4
"""The first steps, of which batches are compared."""
MOST_ELEMENTS = 1 << 20
FOLLOWS = 0.5
"""A correlation above it, over a whole batch, is no chance."""
TWO = 2
"""Different values: those of a mask, a sign, a comparison."""
NARROW = (torch.int64, torch.uint8, torch.float16, torch.bfloat16)
"""The coarsest first: what is whole in int64 may well be kept by the others."""


class BatchesProbe(Probe):
    """Keeps the batches of the first steps until these are over."""

    name = BatchesFacts.experiment
    rests = frozenset({"on_closed"})

    def __init__(self, watched: WatchedObjects) -> None:
        self._looks_up = any(isinstance(m, nn.Embedding) for root in watched.subject.roots for m in root.modules())
        self._fetched: list[Tensor] = []
        self._compared = self._since = 0
        self._narrowed: list[Narrowed] = []
        self._is_new = False

    def on_batch(self, iterator: object, ids: object, batch: object, wait_s: float) -> None:
        if self._compared < COMPARED:
            self._fetched = [*self._fetched, *tensors_of(batch)][-16:]

    def on_closed(self, step: RecordedStep) -> None:
        fetched, self._fetched = self._fetched, []
        if not fetched or self._compared >= COMPARED:
            return
        self._compared += 1
        self._is_new = True
        used = [(place, t) for place, t in _used(step) if not any(_is_same(t, each) for each in fetched)]
        known = [t for t in fetched if t.is_floating_point()]
        if self._looks_up:  # whole numbers may be rows of a table
            used = [(place, t) for place, t in used if place != "model" or t.dtype != torch.int64]
        found = [n for place, t in used for each in known if (n := _narrowed(place, each, t)) is not None]
        self._since = self._since or (step.step if found else 0)
        self._narrowed = found or self._narrowed

    def values(self) -> Facts | None:
        if not self._is_new:
            return None
        self._is_new = False
        values: Facts = strict(vars(BatchesFacts(self._compared, self._since, tuple(self._narrowed[:4]))))
        return values


def _used(step: RecordedStep) -> Iterator[tuple[str, Tensor]]:
    for each in step.program:
        if isinstance(each, Call | Operation):
            place = "model" if isinstance(each, Call) else "loss"
            yield from ((place, c.tensor) for c in constants_of((each.args, each.kwargs)) if c.is_unchanged)


def _is_same(used: Tensor, fetched: Tensor) -> bool:
    return used.shape == fetched.shape and torch.equal(used.detach().cpu().double(), fetched.detach().cpu().double())


@torch.no_grad()
def _narrowed(place: str, fetched: Tensor, used: Tensor) -> Narrowed | None:
    """What ``used`` has lost of ``fetched``, where it is the same but for a cast; else None."""
    if used.shape != fetched.shape or not 1 < used.numel() <= MOST_ELEMENTS or used.is_complex():
        return None
    now, then = used.detach().to("cpu", torch.float64), fetched.detach().to("cpu", torch.float64)
    if torch.equal(now, then) or not bool(torch.isfinite(then).all()):
        return None
    for dtype in NARROW:
        if torch.equal(fetched.detach().cpu().to(dtype).to(torch.float64), now):
            spread = float(then.std())
            lost = float((now - then).nan_to_num(posinf=spread).square().mean().sqrt()) / max(spread, 1e-300)
            values = int(torch.unique(now).numel())
            is_mask = values <= TWO and not dtype.is_floating_point
            return None if is_mask else Narrowed(place, str(dtype).removeprefix("torch."), lost, values)
    return _made_whole(place, then, now)


def _made_whole(place: str, then: Tensor, now: Tensor) -> Narrowed | None:
    """A tensor of whole numbers that follows one with fractions was cut to integers, after whatever else was done."""
    values = int(torch.unique(now).numel())
    if values <= TWO or not bool((now == now.round()).all()) or bool((then == then.round()).all()):
        return None
    both = torch.stack([then.flatten(), now.flatten()])
    follows = float(torch.corrcoef(both)[0, 1])
    if not follows > FOLLOWS:
        return None
    return Narrowed(place, "int64", math.sqrt(max(0.0, 1 - follows**2)), values)
