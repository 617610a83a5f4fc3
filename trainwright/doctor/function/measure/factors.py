"""Constant factors inside of a model that are far from 1, and what the first steps learn without them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from torch import Tensor

from trainwright.doctor.function.facts import FactorsFacts, OddFactor, WithoutFactorFacts
from trainwright.recorder.callers import caller
from trainwright.recorder.program import tensors_of
from trainwright.recorder.user_types import Args, Kwargs, TorchFunction
from trainwright.replay.again import FirstSteps
from trainwright.replay.experiments import experiment
from trainwright.replay.functions import function_name
from trainwright.replay.modules import ModuleStack
from trainwright.replay.replayer import AS_IT_WAS, Intervention, NotReplayable
from trainwright.replay.session import ReplaySession
from trainwright.runlog.json_values import Facts, strict

PRODUCTS = frozenset({"mul", "multiply", "rmul", "imul"})
QUOTIENTS = frozenset({"div", "divide", "truediv", "true_divide", "itruediv"})
FAR = 7.9
"""Times, or parts of, 1: eight heads, eight bits or an eighth of a residual are the least that may be meant as much."""
EXACT = 1e-3
MOST = 4


@dataclass(frozen=True)
class _Product:
    """A tensor times a number."""

    x: Tensor
    factor: float


def _product(name: str, args: Args, kwargs: Kwargs) -> _Product | None:
    """Of what is made by weights, in a call with two arguments of which one is a number."""
    if kwargs or len(args) != 2 or name not in PRODUCTS | QUOTIENTS:
        return None
    pair = args if isinstance(args[0], Tensor) and args[0].requires_grad else args[::-1]
    x, number = pair[0], _number(pair[1])
    is_over = name in QUOTIENTS and pair is not args
    if not isinstance(x, Tensor) or not x.requires_grad or x.numel() < 2 or not number or is_over:
        return None
    return _Product(x, 1.0 / number if name in QUOTIENTS else number)


def _number(value: object) -> float:
    """0 for what is none."""
    if isinstance(value, Tensor):
        is_one = value.numel() == 1 and not value.requires_grad and value.is_floating_point()
        return float(value) if is_one else 0.0
    return float(value) if isinstance(value, int | float) else 0.0


def _is_odd(factor: float) -> bool:
    return math.isfinite(factor) and not 1.0 / FAR < abs(factor) < FAR


@dataclass
class _Factors:
    """Follows the products of a forward pass. ``sizes`` are those of all tensors: a root of one of them is usual.

    ``detached``: x * 0.1 + x.detach() * 0.9 is x, with a tenth of its gradient.
    """

    modules: ModuleStack
    sizes: set[int] = field(default_factory=set)
    found: dict[tuple[str | None, float], tuple[Tensor, str | None]] = field(default_factory=dict)
    detached: list[Tensor] = field(default_factory=list)

    def call(self, function: TorchFunction, args: Args, kwargs: Kwargs) -> object:
        self.sizes.update(size for each in tensors_of(args, 2) for size in each.shape)
        name, module = function_name(function).strip("_"), self.modules.innermost
        product = _product(name, args, kwargs)
        if name == "detach" and isinstance(args[0], Tensor):
            self.detached.append(args[0])
        if product is not None and _is_odd(product.factor) and not _is_of_own_size(product):
            line = caller() if module is not None else None
            self.found.setdefault((module, product.factor), (product.x, line))
        return function(*args, **kwargs)

    def odd(self) -> list[OddFactor]:
        return [
            OddFactor(module, factor, line)
            for (module, factor), (x, line) in self.found.items()
            if not any(x is each for each in self.detached)
            and not any(_is_near(abs(factor) ** power, size) for power in (-2, 2) for size in self.sizes)
        ]


def _is_of_own_size(product: _Product) -> bool:
    """Whether it is a mean or a sum over a dimension that the tensor has."""
    return any(_is_near(abs(product.factor) ** power, size) for power in (-1, 1) for size in product.x.shape)


def _is_near(number: float, size: int) -> bool:
    return abs(number - size) <= EXACT * size


@experiment(FactorsFacts.experiment, when="first", steps=0.5)
def factors(session: ReplaySession) -> Facts:
    """The odd factors of a forward pass and of what the loop makes of its outputs."""
    return dict(strict(vars(FactorsFacts(tuple(_odd_of(session))))))


@experiment(WithoutFactorFacts.experiment, when="requested", steps=60.0)
def without_factors(session: ReplaySession) -> Facts:
    """The first steps again, as they were and with each odd factor left out, and the losses of the batches after."""
    first, chosen = FirstSteps(session), _odd_of(session)
    if not chosen:
        raise NotReplayable("no factor is left")
    is_a_loss = _is_a_loss(session)
    changes = [_without(session, each) for each in chosen]
    outside = [each.module is None or is_a_loss for each in chosen]
    number, compared = first.best((change, AS_IT_WAS if out else change) for change, out in zip(changes, outside))
    each = chosen[number]
    facts = WithoutFactorFacts(module=each.module, factor=each.factor, line=each.line, **vars(compared))
    return dict(strict(vars(facts)))


def _is_a_loss(session: ReplaySession) -> bool:
    """Whether all that the models return are single numbers. A factor in a loss changes what is measured, so that is
    the loss as it was.
    """
    outputs = tensors_of(session.run(upto="forward").outputs)
    return bool(outputs) and all(each.numel() == 1 for each in outputs)


def _odd_of(session: ReplaySession) -> list[OddFactor]:
    modules = ModuleStack(session.modules)
    following = _Factors(modules)
    session.run(Intervention(ops=following.call, model=modules.following), upto="forward")
    return following.odd()[:MOST]


def _without(session: ReplaySession, odd: OddFactor) -> Intervention:
    """Leaves out the products with this factor in this module."""
    modules = ModuleStack(session.modules)

    def call(function: TorchFunction, args: Args, kwargs: Kwargs) -> object:
        product = _product(function_name(function).strip("_"), args, kwargs)
        if product is not None and product.factor == odd.factor and modules.innermost == odd.module:
            return product.x
        return function(*args, **kwargs)

    return Intervention(ops=call, model=modules.following)
