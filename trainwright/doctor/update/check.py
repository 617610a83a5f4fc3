"""Laws of the update, as pure functions of a Case."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from trainwright.doctor.case import Case
from trainwright.doctor.finding import ExperimentRequest, Finding, Severity, finding, listed
from trainwright.doctor.law import Holds, Law, NotApplicable, Verdict
from trainwright.doctor.shared_standing import is_left_as_it_is
from trainwright.doctor.update.directions import descends, gradients_are_those_made, unseen
from trainwright.doctor.update.drawn_anew import drawn_anew, is_drawn_anew, is_whole
from trainwright.doctor.update.facts import FirstSums, ShrunkFacts, UpdateFacts, WritesFacts, common_factor, module_of
from trainwright.doctor.update.names.rates import last_quarter
from trainwright.runlog.records import Where

LOOKS_SHRUNK = 3
"""At most so many looks are made again without what shrinks the weights."""
SHRUNK_SINCE = 12
"""Steps without which too few can be made again."""
NEAR_ITS_TOP = 0.5
"""Of the highest rate so far. Where a schedule has brought the rate down, an update may well be lost in rounding."""

USUAL = 3
"""So many times as far as the loss usually moves from a step to the next is no chance."""
PINNED = 5
"""Looks at which a weight that is written to has the same values: a clamp that one reaches now and then is fewer."""


def nothing_else_writes(case: Case) -> Iterator[Verdict]:
    """Between the end of an update and the begin of the next nothing writes to the weights that it trains."""
    every = case.every(UpdateFacts)
    looks = [(step, facts) for step, facts in every if step > 1]  # before the first anything may be loaded
    heard = case.newest(WritesFacts)
    restarts = set(heard.restarts if heard else ())
    seen = {step: facts for step, facts in looks if facts.written and step not in restarts}
    steps = sorted({*seen, *(heard.steps if heard else ())} - restarts)
    if not steps and restarts:
        yield _restarted(sorted(restarts))
        return
    if not steps:
        compared = len([facts for _, facts in looks if facts.is_compared])
        whole = f"all weights at {compared} steps, " if compared else ""
        yield Holds(f"{whole}a sample of them at {heard.compared}") if heard else NotApplicable("no live loop")
        return
    begin = next((facts.begin for _, facts in every), {})
    if pinned := _pinned([facts for _, facts in looks if facts.is_compared], begin):
        yield _undone(case, pinned)
        return
    if (harmful := _harmful(case)) is not None:
        yield _shrinks(case, harmful, steps[0])
        return
    shrunk = [step for step, facts in seen.items() if common_factor(facts.written) and step > SHRUNK_SINCE]
    yield from [ExperimentRequest(ShrunkFacts.experiment, step) for step in shrunk[:LOOKS_SHRUNK]]
    if seen and all(is_drawn_anew(facts, begin) for facts in seen.values()):
        yield drawn_anew(max(seen), [each.name for each in seen[max(seen)].written], steps)
        return
    newest = max((step for step in seen), default=steps[-1])
    names = [each.name for each in seen[newest].written] if seen else []
    effects = {step: facts.loss - facts.replayed_loss for step, facts in looks if step in steps}
    worst = max(effects, key=lambda step: effects[step], default=None)
    compared = max(heard.compared if heard else 0, len(looks))
    left_in = heard is not None and worst in heard.evaluated and is_whole(seen.get(worst or 0))
    harms = left_in and max(effects.values()) > _spread(case) and 2 * len(steps) <= compared
    losses = next(((f.loss, f.replayed_loss) for step, f in looks if step == worst), None)
    yield finding(
        "law.update.nothing_else_writes",
        "warning" if harms else "info",
        newest,
        symptom=f"before step {newest} the weights were not what the update before had left"
        + (f": {listed(names)}" if names else "")
        + (f"; the loss of a batch is {losses[0]:.4g} for it, and {losses[1]:.4g} without" if harms and losses else ""),
        cause="something else writes to them: weights of an average or a checkpoint that stay in the model, a clamp, "
        "a second optimizer that the watch was not given, a tie that is made by copies",
        remedy="look at what comes between step() and the next forward pass: whatever puts other weights in for an "
        "evaluation must put these back",
        sure=0.9 if harms else 0.7,
        stage="update",
        since_step=steps[0],
        where=module_of(names),
        evidence=[
            ("steps that began with other weights", f"{len(steps)} of {compared} that were compared", 0),
            ("loss of the batch with the written weights, and without", list(losses) if losses else None),
        ],
        explains=("hw.not_reproducible",),
    )


def _restarted(steps: Sequence[int]) -> Finding:
    return finding(
        "law.update.nothing_else_writes",
        "info",
        steps[-1],
        symptom=f"before step {steps[-1]} the loop began again, or went back: other weights, and with them another "
        "state of the optimizer, or the weights of the begin and an optimizer that keeps no state",
        cause="a rewind (after pruning), a restart, a return to a checkpoint, weights and state of another run",
        remedy="nothing, where it is meant; else look at what loads weights between two steps",
        sure=0.7,
        stage="update",
        since_step=steps[0],
        evidence=[("steps that began so", len(steps), 0)],
    )


def _pinned(looks: Sequence[UpdateFacts], begin: Mapping[str, FirstSums]) -> list[str]:
    """Weights that began every step that was looked at with the same values, though the update had left others.

    A number that has stood at a bound from the begin on (a multiplier of a constraint that holds) is none.
    """
    held = [{(each.name, each.live_norm, each.live_sum) for each in facts.written} for facts in looks]
    always = set.intersection(*held) if len(held) >= PINNED else set()
    at_bound = {name for name, norm, total in always if _is_at_first_bound(norm, total, begin.get(name))}
    return sorted({name for name, _, _ in always} - at_bound)


def _is_at_first_bound(norm: float, total: float, first: FirstSums | None) -> bool:
    """Whether all elements have one value, which they had at the begin."""
    if first is None or not (math.isclose(norm, first.norm) and math.isclose(total, first.sum)):
        return False
    return math.isclose(abs(total), norm * math.sqrt(first.elements), rel_tol=1e-5)


def _undone(case: Case, names: Sequence[str]) -> Finding:
    return finding(
        "law.update.nothing_else_writes",
        "warning",
        case.last_step,
        symptom=f"every update of {listed(names)} is undone: it has the same values at the begin of each step",
        cause="a clamp whose bounds are equal or do not hold the first value, or a copy that is put back each time",
        remedy="look at what writes to it between step() and the next forward pass, and at the bounds of a clamp",
        sure=0.85,
        stage="update",
        since_step=2,
        where=module_of(names),
        evidence=[("weights that are put back", listed(names), "none")],
    )


def _harmful(case: Case) -> ShrunkFacts | None:
    """What takes half of all that is learned without it, and a twenty-fifth of the first loss."""
    first = case.watched[0].loss if case.watched else -math.inf
    for _, facts in case.every(ShrunkFacts):
        was, without = facts.shrunk, facts.without
        if len(was) < SHRUNK_SINCE or len(was) != len(without) or not all(map(math.isfinite, (*was, *without))):
            continue
        start, lost = max(first, was[0]), last_quarter(was) - last_quarter(without)
        if lost > max(0.5 * (start - last_quarter(without)), 0.04 * abs(start)):
            return facts
    return None


def _shrinks(case: Case, facts: ShrunkFacts, since: int) -> Finding:
    was, without = facts.shrunk, facts.without
    return finding(
        "law.update.nothing_else_writes",
        "warning",
        case.last_step,
        symptom=f"after each update the weights are multiplied by {facts.factor:.4g}: {len(was)} steps take the "
        f"loss from {was[0]:.4g} to {last_quarter(was):.4g}, and the same steps to {last_quarter(without):.4g} without",
        cause="a weight decay by hand, or a factor in the loop, that is far too strong",
        remedy="leave it out, and give the optimizer a weight_decay",
        sure=0.9,
        stage="update",
        since_step=since,
        evidence=[
            ("factor of the weights between two steps", facts.factor, 1),
            ("share of the weights", round(facts.share, 3), 0),
            ("loss after the same steps, with the factor and without", [last_quarter(was), last_quarter(without)]),
        ],
        explains=("hw.not_reproducible",),
    )


def _spread(case: Case) -> float:
    """How far the loss usually moves from a step to the next."""
    losses = [each.loss for each in case.watched if math.isfinite(each.loss)][-64:]
    moves = [abs(b - a) for a, b in pairwise(losses)]
    return USUAL * statistics.median(moves) if moves else math.inf


def follows_its_rule(case: Case) -> Iterator[Verdict]:
    """What an update adds to the weights is what the class of the optimizer adds in float64."""
    rules = [(step, facts, rule) for step, facts in case.every(UpdateFacts) for rule in facts.rules]
    if not rules:
        names = sorted({name for _, facts in case.every(UpdateFacts) for name in facts.optimizers})
        yield from [NotApplicable(f"the rule of {listed(names)} is not known")] if names else unseen(case)
        return
    off = [(step, rule) for step, _, rule in rules if rule.off]
    if not off:
        yield Holds(f"{rules[-1][2].tensors} tensors of {rules[-1][2].optimizer} at {len(rules)} updates")
        return
    step, rule = off[-1]
    worst = max(rule.off, key=lambda name: rule.off[name])
    yield finding(
        "law.update.follows_its_rule",
        "info" if rule.is_hooked else "warning",
        step,
        symptom=f"the update of {len(rule.off)} tensors is not what {rule.optimizer} makes of their gradients: that of "
        f"{worst} is {rule.off[worst]:.1%} off",
        cause="a hook of the optimizer writes to them"
        if rule.is_hooked
        else "its state is too coarse, or its kernel computes wrongly",
        remedy="compare with foreach=False and fused=False, without hooks on the optimizer, and in float32",
        sure=0.85,
        stage="update",
        since_step=off[0][0],
        where=module_of([worst]),
        evidence=[("distance from the update in float64", rule.off[worst], f"rounding of {rule.dtype}")],
    )


def is_kept(case: Case) -> Iterator[Verdict]:
    """The weights take on the update: it is not lost in their rounding."""
    rates = {each.step: each.lr for each in case.watched}
    top = max(rates.values(), default=0.0)
    rules = [
        (step, r) for step, f in case.every(UpdateFacts) for r in f.rules if rates.get(step, top) >= NEAR_ITS_TOP * top
    ]
    if not rules:
        yield from unseen(case)
        return
    lost = [(step, rule) for step, rule in rules if rule.kept < 0.5]
    if len(lost) < min(3, len(rules)) or not lost:
        yield Holds(f"{rules[-1][1].kept:.3f} of the update at {len(rules)} updates")
        return
    step, rule = lost[-1]
    yield finding(
        "law.update.is_kept",
        "warning",
        step,
        symptom=f"the weights take on {rule.kept:.0%} of the update",
        cause=f"it is smaller than the last digit of {rule.dtype}",
        remedy="keep the weights in float32, round stochastically, or raise the learning rate",
        sure=0.9,
        stage="update",
        since_step=lost[0][0],
        where=Where(module=module_of(rule.lost_in).module, dtype=rule.dtype),
        evidence=[("share of the update along itself that the weights took on", rule.kept, 1.0)],
    )


def once_for_each(case: Case) -> Iterator[Verdict]:
    """A step updates every parameter that has a gradient, once."""
    exam = case.newest("contract")
    if exam is None or not case.watched:
        return
    doubles, again, missing = exam.values["doubles"], exam.values["again"], exam.values["missing"]
    twice = max(doubles, again)
    if twice < 2 and not missing:
        yield Holds(f"{len(exam.values['optimizers'])} optimizers up to step {exam.step}")
        return
    is_fixed = exam.values["missing_share"] == 1.0 and not any(each["stale"] for each in exam.values["optimizers"])
    is_meant = twice < 2 and (is_fixed or is_left_as_it_is(case, missing))
    yield _not_once(exam.step, twice, missing, "info" if is_meant else "warning")


def _not_once(step: int, twice: int, missing: Sequence[str], severity: Severity) -> Finding:
    return finding(
        "law.update.once_for_each",
        severity,
        step,
        symptom=f"{twice} updates were made with gradients that had been applied before"
        if twice >= 2
        else f"{len(missing)} parameters with a gradient are in no update: {listed(missing)}",
        cause="step() is called twice, or two optimizers hold the same parameters"
        if twice >= 2
        else "no optimizer holds them",
        remedy="give every parameter to one optimizer, and call its step() once for each backward pass",
        sure=0.9,
        stage="update",
        where=module_of(missing),
        evidence=[("updates with the same gradients", twice, 0), ("parameters without an update", len(missing), 0)],
    )


LAWS: tuple[Law, ...] = (
    Law("update.once_for_each", once_for_each, named_by=("opt.*", "prec.autocast_stale_cache")),
    Law("update.nothing_else_writes", nothing_else_writes, "replay", named_by=("ckpt.*", "prec.autocast_stale_cache")),
    Law(
        "update.gradients_are_those_made",
        gradients_are_those_made,
        "replay",
        named_by=("opt.missing_zero_grad", "grad.*", "prec.autocast_stale_cache"),
    ),
    Law("update.follows_its_rule", follows_its_rule, "replay", named_by=("prec.*", "num.*")),
    Law("update.is_kept", is_kept, "replay", named_by=("prec.*", "opt.lr_too_low")),
    Law("update.descends", descends, "replay", named_by=("loss.wrong_sign", "opt.weight_decay_too_high")),
)
