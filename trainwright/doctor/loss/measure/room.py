"""Measures what a comparison with targets would learn without the other terms of its loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from trainwright.doctor.loss.facts import RoomFacts
from trainwright.doctor.loss.measure.comparing import CLASSES, DISTANCES
from trainwright.doctor.loss.measure.terms import adds_to
from trainwright.recorder.program import Backward, Constant, Instruction, Operation, RecordedStep
from trainwright.replay.again import losses_after, mean_of, surely, way_from
from trainwright.replay.experiments import experiment
from trainwright.replay.replayer import NotReplayable
from trainwright.replay.session import ReplaySession
from trainwright.replay.terms import Term, terms_of
from trainwright.runlog.json_values import Facts, strict

COMPARISONS = CLASSES | DISTANCES | {"binary_cross_entropy", "binary_cross_entropy_with_logits"}
PLAIN, FAR = 2.0, 7.9
"""The largest weight of a comparison that is there to be learned, and the least that may outweigh it."""
BEGIN, LEAST, BATCHES = 4, 12, 8
"""The latest step that is the begin of a run; the fewest steps that are made again; the last recorded batches, which
these have not seen."""


@experiment(RoomFacts.experiment, when="requested", steps=73.0)
def room(session: ReplaySession) -> Facts:
    """The first steps again, with all terms and with the comparison alone, and its loss on the batches after."""
    term, other = _outweighed(session.recorded_step)
    begin = next((each for each in session.earlier if each.step <= BEGIN), None)
    steps = None if begin is None else way_from(session, begin, LEAST + BATCHES)
    if begin is None or steps is None or len(session.optimizers) > 1:
        raise NotReplayable("the begin of the run is not held any more, or there are several optimizers")
    alone = [_with_one_term(each, term.name) for each in steps]
    before, after, without = (
        losses_after(session, begin, way, alone[-BATCHES:]) for way in ([], steps[:-BATCHES], alone[:-BATCHES])
    )
    facts = RoomFacts(
        begin.step, session.step, term.name, other.name, other.own,
        before=mean_of(before), after=mean_of(after), alone=mean_of(without),
        surely=surely([a - b for a, b in zip(after, without)]),
    )  # fmt: skip
    return dict(strict(vars(facts)))


def _outweighed(recorded: RecordedStep) -> tuple[Term, Term]:
    """A comparison with targets of several values, and the term beside it that has the largest weight."""
    parts = terms_of(recorded)
    other = max(parts, key=lambda each: abs(each.own), default=None)
    compared = [each for each in parts if 1 / PLAIN <= each.own <= PLAIN and _has_targets(recorded, each)]
    if other is None or abs(other.own) < FAR or len(compared) != 1:
        raise NotReplayable("no term with a large weight stands beside a comparison with targets")
    return compared[0], other


def _has_targets(recorded: RecordedStep, term: Term) -> bool:
    made = next(each for each in recorded.program if isinstance(each, Operation) and term.slot in each.outputs)
    given = [*made.args[1:2], made.kwargs.get("target")]
    targets = [each.tensor for each in given if isinstance(each, Constant) and not each.was_cut]
    return term.name in COMPARISONS and any(map(_varies, targets))


def _varies(tensor: Tensor) -> bool:
    flat = tensor.detach().flatten()
    return flat.numel() > 1 and bool((flat != flat[0]).any())


def _with_one_term(recorded: RecordedStep, name: str) -> RecordedStep:
    """The step with its update, of the gradient of one term."""
    chosen = [each for each in terms_of(recorded) if each.name == name]
    backward = [each for each in recorded.program if isinstance(each, Backward)]
    if len(chosen) != 1 or len(backward) != 1 or backward[0].scale_at != 1.0:
        raise NotReplayable("the loss of some steps is made of other terms, or of several passes")
    return replace(recorded, program=_program(recorded.program, chosen[0]))


def _program(program: Sequence[Instruction], term: Term) -> list[Instruction]:
    kept = [each for each in program if not adds_to(each, term)]
    return [replace(each, slot=term.slot) if isinstance(each, Backward) else each for each in kept]
