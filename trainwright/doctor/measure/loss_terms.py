"""Measures the gradient of each term of a loss that is a sum."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeAlias

import torch
from torch import Tensor

from trainwright.doctor.facts.loss import TermFacts, TermsFacts
from trainwright.recorder.program import Backward, Instruction, Operation, RecordedStep, Slot
from trainwright.replay.experiments import replay
from trainwright.replay.replayer import Intervention, NotReplayable
from trainwright.replay.session import ReplaySession
from trainwright.replay.terms import Term, terms_of

Grads: TypeAlias = dict[str, Tensor | None]
MAX_TERMS = 8


@replay(TermsFacts, when="requested")
def loss_terms(session: ReplaySession) -> TermsFacts:
    """Returns the terms of the loss in float32, so that terms that are small without the loss scale do not vanish."""
    return terms_facts(session)


def terms_facts(session: ReplaySession) -> TermsFacts:
    """Returns the terms of the loss of the recorded step. Raises NotReplayable unless it is a sum of a few terms."""
    parts = terms_of(session.recorded_step)
    if not 2 <= len(parts) <= MAX_TERMS:
        raise NotReplayable("the loss is not a sum of a few terms")
    with session.live():
        grads = [_gradients(session, term) for term in parts]
    reached = [{n for n, g in each.items() if g is not None and bool((g != 0).any())} for each in grads]
    common = set.intersection(*reached)
    facts = [
        TermFacts(term.name, term.slot, term.weight, term.own, shared=abs(term.weight) * _norm(each, common))
        for term, each in zip(parts, grads)
    ]
    return TermsFacts(tuple(facts), len(common))


def _gradients(session: ReplaySession, term: Term) -> Grads:
    change = Intervention(dtype="fp32")
    result = session.replayer.run(alone(session.recorded_step, term), change, upto="backward")
    for parameter in session.replayer.subject.parameters:
        parameter.grad = None
    if result.error is not None:
        raise result.error
    return result.grads


def alone(recorded: RecordedStep, term: Term) -> RecordedStep:
    """Returns the step up to its first backward pass, with one term as its loss."""
    end = next(n for n, each in enumerate(recorded.program) if isinstance(each, Backward))
    backward = recorded.program[end]
    assert isinstance(backward, Backward)
    kept = [each for each in recorded.program[:end] if not _adds_to(each, term)]
    program = [*kept, replace(backward, slot=term.slot, scale_at=1.0, gradient=None)]
    return replace(recorded, program=program, values={k: v for k, v in recorded.values.items() if k != "carried"})


def _adds_to(instruction: Instruction, term: Term) -> bool:
    """Returns True if this is ``loss += other``, which adds other terms in place to this one."""
    return isinstance(instruction, Operation) and instruction.in_place and instruction.args[0] == Slot(term.slot)


def _norm(grads: Grads, names: set[str]) -> float:
    chosen = [g.double().square().sum() for n, g in grads.items() if g is not None and n in names]
    return float(torch.stack(chosen).sum().sqrt()) if chosen else 0.0
