"""What the loss gains by which rows of its inputs belong together: with those of one input in another order."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean, stdev
from typing import TypeAlias

import torch
from torch import Tensor

from trainwright.doctor.loss.facts import PairedInput, PairsFacts
from trainwright.doctor.loss.measure.made import other_weights
from trainwright.recorder.program import Call, Operation, RecordedStep, constants_of, mapped, tensors_of
from trainwright.recorder.user_types import Args, Kwargs
from trainwright.replay.experiments import experiment
from trainwright.replay.functions import InputHandler
from trainwright.replay.replayer import Intervention, NotReplayable, batch_size
from trainwright.replay.session import ReplaySession
from trainwright.runlog.json_values import Facts, strict

MAX_STEPS, MIN_STEPS = 8, 3
"""Recorded steps in which the newest weights are tried, and the fewest that tell."""
MOST, LEAST, ROWS = 6, 4, 4
"""Inputs of a step that are tried; rows without which they are not; rows that are tried in place of all."""
Place: TypeAlias = tuple[int, int]
"""The number of a call, and of the tensor among its inputs."""
Change: TypeAlias = Callable[[Tensor, Place], Tensor]


@experiment(PairsFacts.experiment, when="requested", steps=21.0)
def pairs(session: ReplaySession) -> Facts:
    """The losses of the last recorded steps in eval mode, with the newest weights, and with each input permuted."""
    chosen = [each for each in session.recorded_steps if each.blind is None][-MAX_STEPS:]
    places = list(_inputs(chosen[-1]))[:MOST] if len(chosen) >= MIN_STEPS else []
    if len(places) < 2:
        raise NotReplayable("the models are not given two inputs whose rows may belong together")
    if any(map(_has_slopes, chosen)):
        raise NotReplayable("the loss is made of derivatives, at places that may be drawn")
    plain = _Steps(session, chosen)
    bases = plain.losses(_as_it_is)
    inputs = [_paired(plain, bases, partial(_permuted, each), each[0]) for each in places]
    facts = PairsFacts(
        steps=len(chosen),
        loss=fmean(bases),
        constant=min(fmean(plain.losses(partial(_of_one, places, row))) for row in range(ROWS)),
        inputs=tuple(each for each in inputs if each is not None),
        num_optimizers=len(session.optimizers),
    )
    return dict(strict(vars(facts)))


def _as_it_is(x: Tensor, place: Place) -> Tensor:
    return x


def _permuted(chosen: Place, x: Tensor, place: Place) -> Tensor:
    if place != chosen or not x.dim():
        return x
    return x[torch.randperm(len(x), generator=torch.Generator().manual_seed(0), device="cpu").to(x.device)]


def _of_one(chosen: Sequence[Place], row: int, x: Tensor, place: Place) -> Tensor:
    """The same row in place of each."""
    return x[row : row + 1].expand_as(x).clone() if place in chosen and x.dim() and len(x) > row else x


@dataclass
class _Steps:
    """Recorded steps, run again in eval mode. ``squares``: the calls with an output for each pair of rows."""

    session: ReplaySession
    chosen: Sequence[RecordedStep]
    squares: set[int] = field(default_factory=set)

    def losses(
        self, change: Change, weights: Callable[[], AbstractContextManager[object]] | None = None
    ) -> list[float]:
        losses = []
        with self.session.live():
            for recorded in self.chosen:
                changed = Intervention(mode="eval", inputs=_changed(recorded, change), model=weights)
                result = self.session.replayer.run(recorded, changed, upto="forward")
                losses.append(math.nan if result.error is not None else result.loss)
                size = batch_size(recorded) or 0
                for number, output in enumerate(result.outputs):
                    if any(list(each.shape).count(size) > 1 for each in tensors_of(output)):
                        self.squares.add(number)
        return losses

    def relates(self, change: Change) -> float:
        """By what share of the loss it changes with other weights: trained ones may tell nothing of their inputs."""
        last = _Steps(self.session, self.chosen[-1:])
        (base,), (other,) = (last.losses(each, partial(other_weights, self.session)) for each in (_as_it_is, change))
        return abs(other - base) / max(abs(base), 1e-12)


def _changed(recorded: RecordedStep, change: Change) -> InputHandler:
    calls = recorded.calls

    def handler(number: int, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        others = {id(x): change(x, (number, place)) for place, x in enumerate(_tensors(calls[number]))}
        changed: tuple[Args, Kwargs] = mapped((args, kwargs), lambda leaf: others.get(id(leaf), leaf))
        return changed

    return handler


def _inputs(recorded: RecordedStep) -> Iterator[Place]:
    """Those that have as many rows as the first, and not all alike."""
    size = batch_size(recorded) or 0
    for number, call in enumerate(recorded.calls):
        for place, x in enumerate(_tensors(call)):
            if x.dim() and len(x) == size >= LEAST and not x.requires_grad and bool((x != x[:1]).any()):
                yield number, place


def _tensors(call: Call) -> list[Tensor]:
    return [each.tensor for each in constants_of((call.args, call.kwargs))]


def _has_slopes(recorded: RecordedStep) -> bool:
    inputs = [x for call in recorded.calls for x in _tensors(call)]
    names = {each.name for each in recorded.program if isinstance(each, Operation)}
    return "grad" in names or any(x.requires_grad for x in inputs)


def _paired(steps: _Steps, bases: Sequence[float], change: Change, call: int) -> PairedInput | None:
    scale = max(fmean(map(abs, bases)), 1e-12)
    rises = [(other - base) / scale for base, other in zip(bases, steps.losses(change))]
    related = steps.relates(change)
    if not all(map(math.isfinite, (*rises, related))):
        return None
    return PairedInput(fmean(rises), stdev(rises) / math.sqrt(len(rises)), related, call in steps.squares)
