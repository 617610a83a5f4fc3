"""Data that a model rounds or cuts off before its weights have seen them, and what the first steps learn without."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from trainwright.doctor.function.facts import WithoutCutFacts
from trainwright.doctor.function.measure.factors import MOST
from trainwright.recorder.callers import caller
from trainwright.recorder.program import tensors_of
from trainwright.recorder.user_types import Args, Kwargs, TorchFunction
from trainwright.replay.again import FirstSteps
from trainwright.replay.experiments import experiment
from trainwright.replay.functions import function_name
from trainwright.replay.modules import ModuleStack
from trainwright.replay.replayer import Intervention
from trainwright.replay.session import ReplaySession
from trainwright.runlog.json_values import Facts, strict

CUTS = frozenset({"relu", "relu6", "clamp", "clip", "clamp_min", "clamp_max", "hardtanh", "threshold", "abs", "sign"})
ROUNDINGS = frozenset({"round", "floor", "ceil", "trunc", "to", "type", "long", "int", "short"})
CHANGED = 0.1
"""Standard deviations of the data: the root mean square of what is cut off of them, at the least."""


@dataclass(frozen=True)
class _Cut:
    """Of the data ``x`` other numbers are left by the function ``name``, which ``module`` calls in ``line``. ``scope``
    is the innermost module around it that has others within.
    """

    module: str
    scope: str | None
    name: str
    line: str | None
    x: Tensor


@dataclass
class _Data:
    """Follows what a forward pass makes of data alone. ``made`` are tensors that weights have a part in.

    ``uses`` are of data, where as much is made of them as there is: the scope and what is made. ``origin``: of what.
    """

    modules: ModuleStack
    containers: frozenset[str]
    made: dict[int, Tensor] = field(default_factory=dict)
    uses: list[tuple[Tensor, str | None, Tensor]] = field(default_factory=list)
    origin: dict[int, Tensor] = field(default_factory=dict)
    cuts: list[_Cut] = field(default_factory=list)

    def call(self, function: TorchFunction, args: Args, kwargs: Kwargs) -> object:
        name, result = function_name(function), function(*args, **kwargs)
        given = tensors_of((*args, *kwargs.values()), 2)
        if any(isinstance(each, nn.Parameter) or id(each) in self.made for each in given):
            self.made.update((id(each), each) for each in tensors_of(result, 2))
        elif (module := self.modules.innermost) is not None and isinstance(result, Tensor):
            scope = next((path for path in reversed(self.modules.paths) if path in self.containers), None)
            self.uses += [(each, scope, result) for each in given if result.numel() >= each.numel()]
            if given and result is not given[0]:
                self.origin.setdefault(id(result), given[0])
            if given and _may_cut(name, given[0]) and _has_cut(given[0], result):
                self.cuts.append(_Cut(module, scope, name, caller(), given[0]))
        return result

    def lost(self) -> Iterator[_Cut]:
        """What is not used whole beside: a part above 0 and a part below, a floor and what lies above it."""
        for each in self.cuts:
            x: Tensor | None = each.x
            while x is not None and sum(one is x and scope == each.scope for one, scope, _ in self.uses) <= 1:
                x = self.origin.get(id(x))
            if x is None:
                yield each


def _may_cut(name: str, x: Tensor) -> bool:
    return name.rstrip("_") in CUTS | ROUNDINGS and x.is_floating_point() and x.numel() > 1


def _has_cut(x: Tensor, result: Tensor) -> bool:
    """Whether other numbers are left of the data; truth values are a question that is asked of them."""
    if result is x or result.shape != x.shape or result.dtype is torch.bool or result.device != x.device:
        return False
    wide = x.detach().double()
    return bool((result.detach().double() - wide).square().mean().sqrt() > CHANGED * wide.std() > 0)


@experiment(WithoutCutFacts.experiment, when="requested", steps=0.5)
def without_cuts(session: ReplaySession) -> Facts:
    """The first steps again, as they were and with the data whole, and the losses of the batches after."""
    cuts = list(_cuts_of(session))[:MOST]
    if not cuts:
        return dict(strict(vars(WithoutCutFacts(session.step, session.step))))
    changes = [_whole(session, each) for each in cuts]
    number, compared = FirstSteps(session).best(zip(changes, changes))
    cut = cuts[number]
    return dict(strict(vars(WithoutCutFacts(module=cut.module, op=cut.name, line=cut.line, **vars(compared)))))


def _cuts_of(session: ReplaySession) -> Iterator[_Cut]:
    modules = ModuleStack(session.modules)
    containers = frozenset(path for path, each in session.modules.items() if next(each.children(), None) is not None)
    following = _Data(modules, containers)
    session.run(Intervention(ops=following.call, model=modules.following), upto="forward")
    return following.lost()


def _whole(session: ReplaySession, cut: _Cut) -> Intervention:
    """The step with what such a call was given in place of what it makes of it."""
    modules = ModuleStack(session.modules)

    def call(function: TorchFunction, args: Args, kwargs: Kwargs) -> object:
        if function_name(function) == cut.name and modules.innermost == cut.module and caller() == cut.line:
            given = tensors_of((*args, *kwargs.values()), 2)
            if given and _may_cut(cut.name, given[0]) and not given[0].requires_grad:
                return given[0]
        return function(*args, **kwargs)

    return Intervention(ops=call, model=modules.following)
