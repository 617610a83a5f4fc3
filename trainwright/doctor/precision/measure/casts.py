"""Finds values inside of a step that become whole numbers and are computed with after that."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trainwright.doctor.precision.facts import CastsFacts, LostFractions
from trainwright.recorder.callers import caller
from trainwright.recorder.program import tensors_of
from trainwright.recorder.user_types import Args, Kwargs, TorchFunction
from trainwright.replay.experiments import experiment
from trainwright.replay.functions import function_name
from trainwright.replay.modules import ModuleStack
from trainwright.replay.replayer import Intervention
from trainwright.replay.session import ReplaySession
from trainwright.runlog.json_values import Facts, strict

CASTS = frozenset({"to", "type", "type_as", "long", "int", "short", "float", "double", "half", "bfloat16"})
WHOLE = frozenset({torch.int64, torch.int32, torch.int16})
"""Types that nobody quantises to."""
DRAWS = frozenset({"rand", "rand_like", "uniform_", "randn", "randn_like", "normal", "normal_", "exponential_"})
"""Functions whose results are numbers by chance: to cut them off is a way to draw whole ones."""
MOST = 64


@experiment(CastsFacts.experiment, when="first", steps=0.5)
def casts(session: ReplaySession) -> Facts:
    """Follows every float that is cast to whole numbers, in a forward pass."""
    modules = ModuleStack(session.modules)
    following = _Casts(modules)
    change = Intervention(ops=following.call, model=modules.following)
    with session.live():
        session.replayer.run(session.recorded_step, change, upto="forward")
    return dict(strict(vars(CastsFacts(tuple(following.lost())))))


Uses = list[int]
"""How often a tensor is used: a list of one number."""


@dataclass
class _Casts:
    """Counts how often each tensor is used, by its id while it is alive."""

    modules: ModuleStack
    uses: dict[int, tuple[weakref.ref[Tensor], Uses]] = field(default_factory=dict)
    whole: dict[int, tuple[weakref.ref[Tensor], Uses, LostFractions]] = field(default_factory=dict)
    back: list[tuple[Uses, Uses, LostFractions]] = field(default_factory=list)
    drawn: dict[int, weakref.ref[Tensor]] = field(default_factory=dict)

    def call(self, function: TorchFunction, args: Args, kwargs: Kwargs) -> object:
        result = function(*args, **kwargs)
        given = tensors_of((args, kwargs))
        for each in given if tensors_of(result) else ():  # not for its dtype or shape
            self._uses_of(each)[0] += 1
        if isinstance(result, Tensor) and (
            function_name(function) in DRAWS or (given and all(map(self._is_drawn, given)))
        ):
            self.drawn[id(result)] = weakref.ref(result)
        if function_name(function) in CASTS and isinstance(result, Tensor) and isinstance(args[0], Tensor):
            self._note(function_name(function), args[0], result)
        return result

    def _is_drawn(self, tensor: Tensor) -> bool:
        reference = self.drawn.get(id(tensor))
        return reference is not None and reference() is tensor

    def _uses_of(self, tensor: Tensor) -> Uses:
        reference, uses = self.uses.get(id(tensor), (None, [0]))
        if reference is None or reference() is not tensor:
            uses = [0]
            self.uses[id(tensor)] = (weakref.ref(tensor), uses)
        return uses

    def _note(self, op: str, source: Tensor, result: Tensor) -> None:
        if self._is_drawn(source):
            return
        if source.is_floating_point() and result.dtype in WHOLE and len(self.whole) < MOST:
            lost = _lost(source.detach())
            if lost > 0.0:
                name = str(result.dtype).removeprefix("torch.")
                facts = LostFractions(op, name, self.modules.innermost, lost, caller())
                self.whole[id(result)] = (weakref.ref(result), self._uses_of(source), facts)
        elif result.is_floating_point() and id(source) in self.whole:
            reference, before, facts = self.whole[id(source)]
            self.back += [(before, self._uses_of(source), facts)] if reference() is source else []

    def lost(self) -> Iterator[LostFractions]:
        """Casts to whole numbers and back of what is not used otherwise."""
        return (facts for before, after, facts in self.back if before == [1] and after == [1])


def _lost(source: Tensor) -> float:
    """What a cast to whole numbers takes away, in standard deviations."""
    finite = source[source.isfinite()].double()
    if finite.numel() < 2:
        return 0.0
    return float((finite - finite.trunc()).abs().max() / (finite.std() + 1e-12))
