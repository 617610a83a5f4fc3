"""Measures where a loss that compares one prediction with its targets in several terms is least: with predictions of
one's own in place of the model's, which are as right as can be, wrong, or know nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from trainwright.doctor.loss.facts import AtTargetsFacts
from trainwright.doctor.loss.measure.comparing import BINARY, CLASSES, DISTANCES
from trainwright.doctor.loss.measure.terms import alone
from trainwright.recorder.program import Call, Constant, Operation, RecordedStep, Slot, constants_of
from trainwright.replay.experiments import experiment
from trainwright.replay.replayer import Intervention, NotReplayable
from trainwright.replay.session import ReplaySession
from trainwright.replay.substituted import noted, with_values
from trainwright.replay.terms import Term, made_of, terms_of
from trainwright.runlog.json_values import Facts, strict

MAX_ELEMENTS = 2**20
SIZES = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Logits of predictions that are more and more sure: a term may want them not to be."""

LEAST = 1e-4
"""Share of a class that targets are taken to give it at least: its logarithm is a number."""


@experiment(AtTargetsFacts.experiment, when="first", steps=1.0)
def at_targets(session: ReplaySession) -> Facts:
    """The terms that compare the same prediction with the same targets, together: their least value where it is right,
    and their least value elsewhere.
    """
    recorded = session.recorded_step
    if len(session.roots) > 1 or len(session.optimizers) > 1:
        raise NotReplayable("one model may want the loss of the other to rise")
    comparison = next(_comparisons(recorded), None)
    if comparison is None:
        raise NotReplayable("no prediction is compared with its targets in several terms")
    op, slot, target, terms = comparison
    x = _value_of(session, recorded, slot)
    if x.numel() > MAX_ELEMENTS or (op.name in CLASSES and x.dim() < 2):
        raise NotReplayable("the prediction is large, or no batch")
    right = [_value(session, recorded, terms, slot, each) for each in _right(op.name, x, target)]
    others = {
        what: _value(session, recorded, terms, slot, each) for what, each in _elsewhere(op.name, x, target).items()
    }
    least = min(others, key=lambda what: others[what])
    names = tuple(each.name for each in terms)
    facts = AtTargetsFacts(op.name, names, min(right), others[least], least, max(others.values()))
    return dict(strict(vars(facts)))


def _comparisons(recorded: RecordedStep) -> Iterator[tuple[Operation, int, Tensor, list[Term]]]:
    """Each call of a loss function on a prediction that two terms or more compare with the same targets."""
    terms = terms_of(recorded)
    operations = [each for each in recorded.program if isinstance(each, Operation)]
    for each in operations if 2 <= len(terms) <= 8 else ():
        given: dict[str, object] = dict(zip(("input", "target"), each.args)) | each.kwargs
        x, target = given.get("input"), given.get("target")
        if each.name not in CLASSES | BINARY | DISTANCES or not isinstance(x, Slot) or not isinstance(target, Constant):
            continue
        shared = [term for term in terms if _compares(recorded, term, x.number, target.tensor)]
        if len(shared) > 1 and target.is_unchanged and target.tensor.dim():
            yield each, x.number, target.tensor, shared


def _compares(recorded: RecordedStep, term: Term, slot: int, target: Tensor) -> bool:
    """Whether a term is made of a prediction and of its targets."""
    operations = made_of(recorded, term.slot)
    slots = {each.number for op in operations for each in op.args if isinstance(each, Slot)} | {term.slot}
    constants = [c.tensor for op in operations for c in constants_of((op.args, op.kwargs))]
    return slot in slots and any(_is_same(each, target) for each in constants)


def _is_same(constant: Tensor, target: Tensor) -> bool:
    """Whether a constant holds the targets, in whatever shape, or as shares of classes."""
    if constant.numel() == target.numel():
        return bool((constant.detach().flatten().double() == target.detach().flatten().double()).all())
    if target.is_floating_point() or constant.dim() != target.dim() + 1 or constant.shape[0] != target.shape[0]:
        return False
    shares = constant.detach().double()
    return any(
        shares.sum(dim).shape == target.shape
        and bool((shares.sum(dim) == 1).all())
        and bool((shares.argmax(dim) == target).all())
        for dim in {1, constant.dim() - 1}
    )


def _value_of(session: ReplaySession, recorded: RecordedStep, slot: int) -> Tensor:
    found: list[Tensor] = []
    with session.live():
        result = session.replayer.run(
            noted(recorded, [slot], lambda _, tensor: found.append(tensor.detach())), upto="forward"
        )
    if result.error is not None or not found:
        raise NotReplayable("the loss cannot be computed again")
    return found[0]


def _value(session: ReplaySession, recorded: RecordedStep, terms: list[Term], slot: int, x: Tensor) -> float:
    """Of these terms with a prediction in its place, each with its weight."""
    total = 0.0
    for term in terms:
        changed = with_values(alone(recorded, term), {slot: x})
        if any(isinstance(each, Call) for each in changed.program):
            raise NotReplayable("a term compares another output, too")
        with session.live():
            result = session.replayer.run(changed, Intervention(dtype="fp64"), upto="forward")
        if result.error is not None or not math.isfinite(result.loss):
            raise NotReplayable("a term has no value with another prediction")
        total += term.weight * result.loss
    return total


def _right(name: str, x: Tensor, target: Tensor) -> list[Tensor]:
    """Predictions that are right, from hardly to very sure."""
    found = [_prediction(name, x, target, size) for size in SIZES]
    if target.is_floating_point() and name in BINARY:
        found.append(_binary(name, target.double().clamp(LEAST, 1 - LEAST).logit()))
    elif target.is_floating_point() and name in CLASSES:
        found.append(target.double().clamp(min=LEAST).log().log_softmax(1))
    return found


def _elsewhere(name: str, x: Tensor, target: Tensor) -> Mapping[str, Tensor]:
    """Predictions that know nothing, and those that are right for other samples."""
    found: dict[str, Tensor] = {}
    if name in CLASSES:
        found["equal shares of all classes"] = torch.zeros_like(x, dtype=torch.float64)
    elif name in BINARY:
        for size in SIZES:
            found[f"a logit of {size:g} everywhere"] = _binary(name, torch.full_like(x, size).double())
            found[f"a logit of -{size:g} everywhere"] = _binary(name, torch.full_like(x, -size).double())
        found["outputs of 0"] = _binary(name, torch.zeros_like(x).double())
    else:
        found["the mean of the targets"] = target.double().mean().expand_as(x).clone()
        for share in (-3.0, -1.0, -0.3, 0.3, 1.0, 3.0):
            more = share * target.double().std(correction=0)
            found[f"targets and {share:g} of their deviations"] = target.double() + more
    for size in SIZES[:: 2 if name not in DISTANCES else len(SIZES)]:
        found[f"the targets of other samples, by {size:g}"] = _prediction(name, x, target.roll(1, 0), size)
    return {what: each.log_softmax(1) if name == "nll_loss" else each for what, each in found.items()}


def _prediction(name: str, x: Tensor, target: Tensor, size: float) -> Tensor:
    """What would be right for these targets; of classes and shares with a logit of this size."""
    if name in DISTANCES:
        return target.double().expand_as(x).clone()
    if name in BINARY:
        return _binary(name, (2 * target.double() - 1) * size)
    if target.is_floating_point():
        shares = target.double()
    else:
        hard = F.one_hot(target.clamp(0, x.shape[1] - 1).long(), x.shape[1])
        shares = hard.movedim(-1, 1).double()
    return (shares * size).log_softmax(1) if name == "nll_loss" else shares * size


def _binary(name: str, logits: Tensor) -> Tensor:
    return logits if name.endswith("logits") else logits.sigmoid()
