"""Measures whether a divergence from a normal distribution is that of the sample that a model draws: of m + s e, with
normal noise e, where the model returns m and s, or what s is made of.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from trainwright.doctor.loss.facts import DivergenceFacts
from trainwright.doctor.loss.measure.terms import alone
from trainwright.recorder.program import Call, Operation, RecordedStep, Slot, constants_of
from trainwright.recorder.user_types import Args, Kwargs, TorchFunction
from trainwright.replay.experiments import experiment
from trainwright.replay.functions import function_name
from trainwright.replay.replayer import Intervention, NotReplayable
from trainwright.replay.session import ReplaySession
from trainwright.replay.substituted import noted, to_first_loss, with_values
from trainwright.replay.terms import Term, made_of, terms_of
from trainwright.runlog.json_values import Facts, strict

NOISE = frozenset({"randn_like", "randn", "normal"})
PRODUCTS, SUMS = frozenset({"mul", "rmul", "multiply"}), frozenset({"add", "radd"})
POWERS = (2.0, 1.0, 4.0)
"""Of the deviation, which a divergence may take for its square."""
MEANS = (-1.5, -1.0, -0.5, 0.5, 1.0, 1.5)
LOGS = (-1.0, -0.6, -0.2, 0.2, 0.6, 1.0)
"""Of deviations."""
EXACT = 1e-6
"""Relative: a function is of a form."""
From = Callable[[float], float]
"""What the model returns of the logarithm of a deviation."""


@dataclass
class _Samples:
    """Finds m + s e among the torch functions of a step, also in the models."""

    found: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    _noise: dict[int, Tensor] = field(default_factory=dict)
    _scaled: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def call(self, function: TorchFunction, args: Args, kwargs: Kwargs) -> object:
        result = function(*args, **kwargs)
        name, given = function_name(function).strip("_"), [each for each in args[:2] if isinstance(each, Tensor)]
        if not isinstance(result, Tensor) or (name not in NOISE and len(given) != 2):
            return result
        if name in NOISE:
            self._noise[id(result)] = result
        elif name in PRODUCTS and (deviation := _other(given, self._noise)) is not None:
            self._scaled[id(result)] = result, deviation
        elif name in SUMS and (mean := _other(given, self._scaled)) is not None:
            scaled = next(self._scaled[id(each)] for each in given if id(each) in self._scaled)
            self.found.append((mean.detach(), scaled[1]))
        return result


def _other(given: list[Tensor], known: dict[int, Tensor] | dict[int, tuple[Tensor, Tensor]]) -> Tensor | None:
    """The one of two tensors that is not known, where the other is."""
    rest = [each for each in given if id(each) not in known]
    return rest[0] if len(rest) == 1 and rest[0].shape == given[0].shape else None


@experiment(DivergenceFacts.experiment, when="first")
def divergence(session: ReplaySession) -> Facts:
    """The form of a term of the loss that is made of the mean and of the deviation of a sample alone."""
    recorded = session.recorded_step
    terms, slots = terms_of(recorded), _slots(recorded)
    if not 2 <= len(terms) <= 8 or len(slots) < 2:
        raise NotReplayable("no term of the loss may be a divergence")
    samples, values = _Samples(), dict[int, Tensor]()
    with session.live():
        session.replayer.run(noted(recorded, slots, values.__setitem__), Intervention(ops=samples.call), upto="forward")
    for mean, deviation in samples.found:
        of_mean = [slot for slot, each in values.items() if _are_equal(each, mean)]
        of_deviation = [
            (slot, made) for slot, each in values.items() if (made := _made_of(deviation, each)) is not None
        ]
        for m in of_mean:
            for s, made in of_deviation:
                term = next((each for each in terms if _is_of_both_alone(recorded, each, m, s, slots)), None)
                if term is not None and m != s:
                    facts = _form(session, term, (m, values[m]), (s, values[s], made))
                    learns = deviation.requires_grad or not values[s].requires_grad
                    return dict(strict(vars(DivergenceFacts(term.name, *facts, deviation_learns=learns))))
    raise NotReplayable("no term is made of the mean and the deviation of a sample alone")


def _slots(recorded: RecordedStep) -> list[int]:
    """Of the outputs of the models, and of their parts."""
    outputs = [n for call in to_first_loss(recorded).calls for n in call.outputs]
    parts = [
        n
        for each in to_first_loss(recorded).program
        if isinstance(each, Operation) and each.name in ("chunk", "split", "__getitem__", "unbind")
        for n in each.outputs
    ]
    return outputs + parts


def _are_equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.numel() > 1 and bool((one.detach() == other.detach()).all())


def _made_of(deviation: Tensor, value: Tensor) -> From | None:
    """How a value follows from the logarithm of the deviation that is made of it; None where it is not."""
    if value.shape != deviation.shape or not value.is_floating_point() or value.numel() < 2:
        return None
    s, v = deviation.detach().double(), value.detach().double()
    if not bool((s > 0).all()):
        return None
    if torch.allclose(s, v, rtol=1e-4):
        return lambda log: torch.tensor(log, device="cpu").double().exp().item()
    if torch.allclose(s, F.softplus(v), rtol=1e-4):
        return lambda log: torch.tensor(log, device="cpu").double().exp().expm1().log().item()
    share = float((s.log() * v).sum() / v.square().sum().clamp(min=1e-12))
    if abs(share) < 0.1 or not torch.allclose(s.log(), share * v, rtol=1e-3, atol=1e-5):
        return None
    return lambda log: log / share


def _is_of_both_alone(recorded: RecordedStep, term: Term, mean: int, deviation: int, slots: list[int]) -> bool:
    """Whether a term is made of these, and of nothing else that the models return or that differs from row to row."""
    operations = made_of(recorded, term.slot)
    used = {each.number for op in operations for each in op.args if isinstance(each, Slot)} | {term.slot}
    constants = [c.tensor for op in operations for c in constants_of((op.args, op.kwargs))]
    return used & set(slots) == {mean, deviation} and all(map(_is_the_same_for_all, constants))


def _is_the_same_for_all(constant: Tensor) -> bool:
    return constant.numel() == 1 or bool((constant == constant[:1]).all())


def _form(
    session: ReplaySession, term: Term, mean: tuple[int, Tensor], deviation: tuple[int, Tensor, From]
) -> tuple[bool, float, float, float, float]:
    """Whether the term is a sum of a function of each; the weights of half the square of the mean and of half a power
    of the deviation, which power, and the weight of minus the logarithm. NaN where it is of no such form.
    """
    recorded = alone(session.recorded_step, term)

    def value(m: float, log: float) -> float:
        filled = {
            mean[0]: torch.full_like(mean[1].detach(), m, dtype=torch.float64),
            deviation[0]: torch.full_like(deviation[1].detach(), deviation[2](log), dtype=torch.float64),
        }
        changed = with_values(recorded, filled)
        if any(isinstance(each, Call) for each in changed.program):
            raise NotReplayable("the divergence is made of another output, too")
        with session.live():
            result = session.replayer.run(changed, Intervention(dtype="fp64"), upto="forward")
        if result.error is not None:
            raise NotReplayable("the divergence cannot be computed again")
        return result.loss * (1.0 if term.weight >= 0 else -1.0)

    of_means = torch.tensor([value(m, 0.0) for m in MEANS], device="cpu").double()
    of_logs = torch.tensor([value(0.0, log) for log in LOGS], device="cpu").double()
    both = value(MEANS[0], LOGS[0]) - value(0.0, LOGS[0]) - value(MEANS[0], 0.0) + value(0.0, 0.0)
    m, log = torch.tensor(MEANS, device="cpu").double(), torch.tensor(LOGS, device="cpu").double()
    squares = _fitted(of_means, [m.square() / 2, m])
    forms = [(power, _fitted(of_logs, [(power * log).exp() / 2, -log])) for power in POWERS]
    power, parts = next(((power, each) for power, each in forms if each is not None), (0.0, None))
    apart = abs(both) <= EXACT * float(of_means.abs().max() + of_logs.abs().max())
    of_power, of_log = parts[:2] if parts else (math.nan, math.nan)
    return apart, squares[0] if squares else math.nan, of_power, power, of_log


def _fitted(values: Tensor, functions: list[Tensor]) -> list[float] | None:
    """The factors of functions, and a constant, of which values are the sum; None where they are not."""
    matrix = torch.stack([*functions, torch.ones_like(values)], 1)
    factors = torch.linalg.lstsq(matrix, values.unsqueeze(1)).solution
    off = (matrix @ factors).squeeze(1) - values
    return factors.flatten().tolist() if float(off.abs().max()) <= EXACT * float(values.abs().max()) else None
