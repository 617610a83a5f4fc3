"""Measures the terms that a loss is the sum of: the gradient of each, and why one has none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from trainwright.recorder.program import Backward, Instruction, Operation, RecordedStep, Slot
from trainwright.recorder.user_types import Args, Kwargs, TorchFunction
from trainwright.replay.experiments import experiment
from trainwright.replay.functions import OpHandler, function_name
from trainwright.replay.replayer import Intervention, NotReplayable, ReplayResult
from trainwright.replay.scaled import OTHER_OUTPUTS, as_if_trained, scaled_outputs, without_zeros
from trainwright.replay.session import ReplaySession
from trainwright.replay.terms import Term, is_of_shared_values, terms_of
from trainwright.runlog.json_values import Facts

Grads: TypeAlias = dict[str, Tensor | None]
ALIKE = 0.9
"""The cosine of gradients that go the same way."""


@experiment("terms", when="requested")
def terms(session: ReplaySession) -> Facts:
    """The terms that the loss is the sum of: the weight of each, and the norm of its gradient with that weight.

    ``shared`` is the norm over the parameters that every term reaches. ``idle``: why one has no gradient, see
    ``_why_idle``; ``zero``: its value is 0. ``grafted``: a part of the loss is made of what a model computes and does
    not return, whose graph a replay does not have. Runs in float32, so that a term that is small without the loss scale
    does not vanish.
    """
    parts = terms_of(session.recorded_step)
    if not 2 <= len(parts) <= 8:
        raise NotReplayable("the loss is not a sum of a few terms")
    with session.live():
        results = [_result(session, term) for term in parts]
        grads = [each.grads for each in results]
        learned = [n for n, each in enumerate(grads) if _norm(each, set(each))]
        idle = {n: _why_idle(session, parts, grads, n, learned) for n in range(len(parts)) if n not in learned}
    reached = [{n for n, g in each.items() if g is not None and bool((g != 0).any())} for each in grads]
    common = set.intersection(*reached)
    facts = [
        {
            "name": term.name, "weight": term.weight, "own": term.own, "slot": term.slot,
            "norm": abs(term.weight) * _norm(each, set(each)), "shared": abs(term.weight) * _norm(each, common),
            "idle": idle.get(n, ""), "zero": results[n].loss == 0.0,
        }
        for n, (term, each) in enumerate(zip(parts, grads))
    ]  # fmt: skip
    return {"terms": facts, "shared": len(common), "grafted": bool(session.recorded_step.values.get("grafted"))}


def _why_idle(
    session: ReplaySession, parts: Sequence[Term], grads: Sequence[Grads], place: int, learned: Sequence[int]
) -> str:
    """Of a term without a gradient.

    ``chosen``: it would have one with larger, smaller or opposite outputs, which a threshold of them then lets in.
    ``switched``: if a tensor from outside were not all zeros, such as weights that a schedule raises. ``frozen``: if
    frozen parameters were trained, as in a later stage. ``valued``: all that it is made of was detached, and another
    term with a gradient is made of the same. ``doubled``: without ``detach`` its gradient is that which the others
    have, as of two halves of a distance of which each has the gradient of both. "" for any other.
    """
    recorded, term, every = session.recorded_step, parts[place], session.replayer.subject.parameters
    if term.weight and any(_has_any(_result(session, term, other).grads) for other in OTHER_OUTPUTS):
        return "chosen"
    if _has_any(_result(session, term, constants=without_zeros).grads):
        return "switched"
    trained = as_if_trained(recorded, every, [p for p in every if p.is_floating_point()])
    if _has_any(_result(session, term, recorded=trained).grads):
        return "frozen"
    if is_of_shared_values(recorded, term.slot, [parts[n].slot for n in learned]):
        return "valued"
    whole = _result(session, term, ops=_without_detach).grads
    rest = [{name: _times(g, parts[n].weight) for name, g in grads[n].items()} for n in learned]
    return "doubled" if _are_alike({name: _times(g, term.weight) for name, g in whole.items()}, rest) else ""


def _times(gradient: Tensor | None, weight: float) -> Tensor | None:
    return None if gradient is None or gradient.is_sparse else gradient.double() * weight


def _without_detach(function: TorchFunction, args: Args, kwargs: Kwargs) -> object:
    return args[0] if function_name(function) == "detach" else function(*args, **kwargs)


def _are_alike(one: Grads, others: Sequence[Grads]) -> bool:
    """Whether a gradient goes the way of the sum of others."""
    rows = [(one.get(name), [g for each in others if (g := each.get(name)) is not None]) for name in one]
    pairs = [(a.flatten(), torch.stack(b).sum(0).flatten()) for a, b in rows if a is not None and b]
    if not pairs:
        return False
    a, b = (torch.cat(each) for each in zip(*pairs))
    return float(torch.nn.functional.cosine_similarity(a, b, dim=0)) > ALIKE


def _result(
    session: ReplaySession,
    term: Term,
    other: tuple[float, float] = (1.0, 0.0),
    constants: Callable[[Tensor], Tensor] | None = None,
    recorded: RecordedStep | None = None,
    ops: OpHandler | None = None,
) -> ReplayResult:
    """Of one term alone, with other outputs, with others in place of what comes from outside, of another step, with
    other functions."""
    change = Intervention(dtype="fp32", model=partial(scaled_outputs, session, *other), constants=constants, ops=ops)
    result = session.replayer.run(alone(recorded or session.recorded_step, term), change, upto="backward")
    for parameter in session.replayer.subject.parameters:
        parameter.grad = None
    if result.error is not None:
        raise result.error
    return result


def size_of_gradient(session: ReplaySession, term: Term, recorded: RecordedStep) -> float:
    """The norm of the gradient of a term with its own weight. Must be called within ``session.live()``."""
    grads = _result(session, term, recorded=recorded).grads
    return abs(term.own) * _norm(grads, set(grads))


def _has_any(grads: Grads) -> bool:
    return any(each is not None and bool(each.nan_to_num(0.0).any()) for each in grads.values())


def alone(recorded: RecordedStep, term: Term) -> RecordedStep:
    """The step up to its first backward pass, with one term as its loss."""
    end = next(n for n, each in enumerate(recorded.program) if isinstance(each, Backward))
    backward = recorded.program[end]
    assert isinstance(backward, Backward)
    kept = [each for each in recorded.program[:end] if not adds_to(each, term)]
    program = [*kept, replace(backward, slot=term.slot, scale_at=1.0, gradient=None)]
    return replace(recorded, program=program, values={k: v for k, v in recorded.values.items() if k != "carried"})


def adds_to(instruction: Instruction, term: Term) -> bool:
    """Whether this is ``loss += other``, which adds other terms in place to this one."""
    return isinstance(instruction, Operation) and instruction.in_place and instruction.args[0] == Slot(term.slot)


def _norm(grads: Grads, names: set[str]) -> float:
    chosen = [g.double().square().sum() for n, g in grads.items() if g is not None and n in names]
    return float(torch.stack(chosen).sum().sqrt()) if chosen else 0.0
