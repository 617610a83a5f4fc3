"""Measures the loss of a step with outputs that are far larger than those of the models."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from trainwright.doctor.loss.facts import LargerOutputsFacts
from trainwright.recorder.program import Operation, RecordedStep, Slot, constants_of
from trainwright.replay.experiments import experiment
from trainwright.replay.replayer import Intervention, NotReplayable
from trainwright.replay.session import ReplaySession
from trainwright.replay.substituted import noted, to_first_loss, with_values
from trainwright.replay.terms import made_of, terms_of
from trainwright.runlog.json_values import Facts, strict

TIMES = (1.0, 1e2, 1e4, 1e6)
PRODUCTS = frozenset({"mul", "rmul", "imul", "multiply", "div", "divide", "truediv", "matmul", "einsum", "dot", "bmm"})
AGAINST = frozenset({"sub", "rsub", "subtract", "div", "divide", "truediv"})
PARTS = frozenset({"chunk", "split", "__getitem__", "unbind"})
MOST_TERMS = 8


@experiment(LargerOutputsFacts.experiment, when="first", steps=4.0)
def larger_outputs(session: ReplaySession) -> Facts:
    """The loss with outputs that are larger, of either sign. The models run once, for the outputs."""
    recorded = session.recorded_step
    if len(session.roots) > 1 or len(session.optimizers) > 1:
        raise NotReplayable("one model may want the loss of the other to rise")
    if len(to_first_loss(recorded).calls) > 1:
        raise NotReplayable("what a model says of one thing may be set against what it says of another")
    if not 1 <= len(terms_of(recorded)) <= MOST_TERMS:
        raise NotReplayable("the loss is made of many terms, or of none that is known")
    operations = [each for term in terms_of(recorded) for each in made_of(recorded, term.slot)]
    if any(each.name == "detach" for each in operations):
        raise NotReplayable("a part of the loss is detached: it weighs what was drawn, or is a target")
    if _are_set_against_each_other(recorded, operations):
        raise NotReplayable("outputs are set against each other: one may be made of another, as a sample of its mean")
    if is_weighed_both_ways(operations):
        raise NotReplayable("numbers below 0 weigh the samples: some of them are to become unlikely")
    outputs: dict[int, Tensor] = {}
    slots = [n for call in to_first_loss(recorded).calls for n in call.outputs]
    with session.live():
        session.replayer.run(noted(recorded, slots, outputs.__setitem__), upto="forward")
    rows = [tuple(_loss(session, recorded, outputs, sign * each) for each in TIMES) for sign in (1.0, -1.0)]
    return dict(strict(vars(LargerOutputsFacts(TIMES, *rows))))


def _are_set_against_each_other(recorded: RecordedStep, operations: Sequence[Operation]) -> bool:
    """Whether the difference or the quotient of two outputs, or of parts of them, is taken."""
    outputs = {n for call in to_first_loss(recorded).calls for n in call.outputs}
    outputs |= {n for each in operations if each.name in PARTS for n in each.outputs}
    given = [
        [n for arg in each.args[:2] if isinstance(arg, Slot) and (n := arg.number) in outputs]
        for each in operations
        if each.name.strip("_") in AGAINST
    ]
    return any(len(each) > 1 for each in given)


def is_weighed_both_ways(operations: Sequence[Operation]) -> bool:
    """Whether a tensor with elements below 0 is multiplied by on the way to the loss, as an advantage is."""
    return any(bool((each < 0).any()) for each in weights_in(operations))


def weights_in(operations: Sequence[Operation]) -> list[Tensor]:
    """The tensors of several elements that are multiplied by and that no model has made."""
    given = [c.tensor for each in operations if _is_product(each) for c in constants_of((each.args, each.kwargs))]
    return [each.detach() for each in given if each.numel() > 1]


def _is_product(operation: Operation) -> bool:
    return operation.name.strip("_") in PRODUCTS


def _loss(session: ReplaySession, recorded: RecordedStep, outputs: dict[int, Tensor], factor: float) -> float:
    values = {
        slot: each.detach().double() * factor if each.is_floating_point() else each for slot, each in outputs.items()
    }
    with session.live():
        result = session.replayer.run(with_values(recorded, values), Intervention(dtype="fp64"), upto="forward")
    if result.error is not None:
        raise NotReplayable("the loss of such outputs cannot be computed")
    return result.loss
