"""Measures losses that are made of derivatives by inputs, with larger ones in their place."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from trainwright.doctor.loss.facts import SlopesFacts
from trainwright.recorder.program import Operation, mapped, tensors_of
from trainwright.recorder.user_types import Args, Kwargs, TorchFunction
from trainwright.replay.experiments import experiment
from trainwright.replay.functions import argument, function_name
from trainwright.replay.replayer import Intervention, NotReplayable
from trainwright.replay.session import ReplaySession
from trainwright.runlog.json_values import Facts, strict

TIMES = 1000.0


@experiment(SlopesFacts.experiment, when="first")
def larger_slopes(session: ReplaySession) -> Facts:
    """The losses as they were, and with all derivatives by inputs of the models so many times as large, of either
    sign.
    """
    program = session.recorded_step.program
    if not any(isinstance(each, Operation) and _is_kept(each.name, each.kwargs) for each in program):
        raise NotReplayable("no derivative is a part of the loss")
    losses = []
    for times in (1.0, TIMES, -TIMES):
        larger = _Larger(times)
        result = session.run(Intervention(inputs=larger.note, ops=larger.call), upto="forward")
        if result.error is not None:
            raise result.error
        losses.append(tuple(float(each) for each in result.losses))
    if not larger.found:
        raise NotReplayable("no derivative by an input is a part of the loss")
    return dict(strict(vars(SlopesFacts(TIMES, *losses))))


def _is_kept(name: str, kwargs: Kwargs) -> bool:
    """Whether it is ``torch.autograd.grad`` of which a graph is kept."""
    return name == "grad" and bool(kwargs.get("create_graph"))


@dataclass
class _Larger:
    """Makes derivatives by what models are given larger; those by weights, as of an inner loop, stay as they are."""

    times: float
    found: bool = False
    _inputs: list[Tensor] = field(default_factory=list)

    def note(self, number: int, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        self._inputs += tensors_of((args, kwargs))
        return args, kwargs

    def call(self, function: TorchFunction, args: Args, kwargs: Kwargs) -> object:
        result = function(*args, **kwargs)
        if not _is_kept(function_name(function), kwargs):
            return result
        by = tensors_of(argument(args, kwargs, 1, "inputs", ()))
        if not by or not all(any(one is each for each in self._inputs) for one in by):
            return result
        self.found = True
        return mapped(result, lambda leaf: leaf * self.times if isinstance(leaf, Tensor) else leaf)
