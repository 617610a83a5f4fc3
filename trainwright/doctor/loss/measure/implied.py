"""Measures terms of a loss that are made of the probability of a score, with targets that stand in the formula: the
logarithms of sigmoids.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trainwright.doctor.loss.facts import ImpliedFacts
from trainwright.doctor.loss.measure.terms import alone
from trainwright.recorder.program import RecordedStep
from trainwright.recorder.user_types import Args, Kwargs, TorchFunction
from trainwright.replay.functions import function_name
from trainwright.replay.replayer import Intervention
from trainwright.replay.session import ReplaySession
from trainwright.replay.substituted import noted, to_first_loss, with_values
from trainwright.replay.terms import Term, made_of, terms_of

OF_SCORES = frozenset({"log_sigmoid", "logsigmoid", "softplus"})


def implied(session: ReplaySession) -> tuple[ImpliedFacts, ...]:
    """Each such term whose scores are linear functions of outputs: its value, and that of outputs of 0.

    Scores with a margin, distances and products of outputs have a size of their own.
    """
    recorded = session.recorded_step
    terms = [(each, op) for each in terms_of(recorded) if (op := _op(recorded, each)) is not None and each.weight]
    if not terms or len(session.roots) > 1 or len(session.optimizers) > 1:
        return ()
    outputs: dict[int, Tensor] = {}
    with session.live():
        slots = [n for call in to_first_loss(recorded).calls for n in call.outputs]
        session.replayer.run(noted(recorded, slots, outputs.__setitem__), upto="forward")
    found = []
    for term, op in terms:
        own, none, twice = (_value(session, alone(recorded, term), outputs, factor) for factor in (1.0, 0.0, 2.0))
        sign = 1.0 if term.weight > 0 else -1.0
        are_linear = all(
            not zero.any() and torch.allclose(two, 2 * one) for one, zero, two in zip(own[1], none[1], twice[1])
        )
        if math.isfinite(own[0]) and sign * none[0] > 0 and own[1] and are_linear:
            found.append(ImpliedFacts(op, sign * own[0], sign * none[0]))
    return tuple(found)


def _op(recorded: RecordedStep, term: Term) -> str | None:
    return next((each.name for each in made_of(recorded, term.slot) if each.name in OF_SCORES), None)


def _value(
    session: ReplaySession, recorded: RecordedStep, outputs: dict[int, Tensor], factor: float
) -> tuple[float, list[Tensor]]:
    """Of a term with outputs so many times as large; and the scores that it is made of."""
    values = {n: each.detach() * factor if each.is_floating_point() else each for n, each in outputs.items()}
    scores: list[Tensor] = []

    def collect(function: TorchFunction, args: Args, kwargs: Kwargs) -> object:
        if function_name(function) in OF_SCORES and args and isinstance(args[0], Tensor):
            scores.append(args[0].detach())
        return function(*args, **kwargs)

    with session.live():
        result = session.replayer.run(with_values(recorded, values), Intervention(ops=collect), upto="forward")
    return math.nan if result.error is not None else result.loss, scores
