"""Divisors within a model that pass through 0, and what the first steps learn with them kept away from it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trainwright.doctor.function.facts import WithoutPolesFacts
from trainwright.doctor.function.measure.factors import MOST
from trainwright.recorder.callers import caller
from trainwright.recorder.user_types import Args, Kwargs, TorchFunction
from trainwright.replay.again import FirstSteps
from trainwright.replay.experiments import experiment
from trainwright.replay.functions import function_name
from trainwright.replay.modules import ModuleStack
from trainwright.replay.replayer import Intervention
from trainwright.replay.session import ReplaySession
from trainwright.runlog.json_values import Facts, strict

DIVISOR = {"div": 1, "divide": 1, "truediv": 1, "true_divide": 1, "rtruediv": 0, "rdiv": 0, "reciprocal": 0}
"""By the name of the function, which argument it is."""
MANY, SHARE, NEAR = 32, 0.02, 0.1
"""Elements that show whether 0 is passed: the share of them that has the rarer sign, and how near the nearest comes to
0, relative to their root mean square. Of 32 normal ones it comes to a twentieth, as a rule."""


@dataclass(frozen=True)
class _Pole:
    """A quotient in ``line`` of ``module``."""

    module: str
    line: str | None
    nearest: float


@dataclass
class _Quotients:
    """Follows the quotients of a forward pass."""

    modules: ModuleStack
    found: dict[tuple[str, str | None], _Pole] = field(default_factory=dict)

    def call(self, function: TorchFunction, args: Args, kwargs: Kwargs) -> object:
        place = _place(function, args, kwargs)
        if place is not None and (module := self.modules.innermost) is not None:
            nearest = _nearest(args[place])
            if nearest < NEAR:
                line = caller()
                self.found.setdefault((module, line), _Pole(module, line, nearest))
        return function(*args, **kwargs)


def _place(function: TorchFunction, args: Args, kwargs: Kwargs) -> int | None:
    """Of the divisor among the arguments, if weights make it; None for other functions."""
    place = DIVISOR.get(function_name(function).strip("_"))
    if place is None or kwargs or len(args) <= place:
        return None
    x = args[place]
    return place if isinstance(x, Tensor) and x.requires_grad and x.is_floating_point() and x.numel() >= MANY else None


def _nearest(x: Tensor) -> float:
    """Of elements of both signs; infinite where nearly all have one."""
    values = x.detach().float()
    above = float((values > 0).float().mean())
    size = float(values.square().mean().sqrt())
    return float(values.abs().min()) / size if SHARE <= above <= 1 - SHARE and size else float("inf")


@experiment(WithoutPolesFacts.experiment, when="requested", steps=0.5)
def without_poles(session: ReplaySession) -> Facts:
    """The first steps again, as they were and with such divisors away from 0, and the losses of the batches after."""
    poles = list(_poles_of(session))[:MOST]
    if not poles:
        return dict(strict(vars(WithoutPolesFacts(session.step, session.step))))
    changes = [_away(session, each) for each in poles]
    number, compared = FirstSteps(session).best(zip(changes, changes))
    pole = poles[number]
    return dict(
        strict(vars(WithoutPolesFacts(module=pole.module, line=pole.line, nearest=pole.nearest, **vars(compared))))
    )


def _poles_of(session: ReplaySession) -> Iterator[_Pole]:
    modules = ModuleStack(session.modules)
    following = _Quotients(modules)
    session.run(Intervention(ops=following.call, model=modules.following), upto="forward")
    yield from following.found.values()


def _away(session: ReplaySession, pole: _Pole) -> Intervention:
    """The step with the divisor of such quotients larger by its root mean square, to either side."""
    modules = ModuleStack(session.modules)

    def call(function: TorchFunction, args: Args, kwargs: Kwargs) -> object:
        place = _place(function, args, kwargs)
        if place is not None and modules.innermost == pole.module and caller() == pole.line:
            x = args[place]
            size = x.detach().square().mean().sqrt()
            args = (*args[:place], x + torch.copysign(size, x.detach()), *args[place + 1 :])
        return function(*args, **kwargs)

    return Intervention(ops=call, model=modules.following)
