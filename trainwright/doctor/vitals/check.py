"""Laws of the vital signs: what must move, moves; what must vary, varies; what must stay, stays."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence

from trainwright.doctor.case import Case
from trainwright.doctor.finding import ExperimentRequest, Finding, RemedyTrial, finding, listed
from trainwright.doctor.law import Holds, Law, NotApplicable, Verdict
from trainwright.doctor.vitals.facts import Drift, OtherRatesFacts, SteadyFacts, StillnessFacts, VitalsFacts
from trainwright.doctor.vitals.reach import higher_rates_gain_little, way_is_used
from trainwright.doctor.vitals.standing import is_left_as_it_is
from trainwright.runlog.records import Watched, Where

FIRST, ENOUGH, LATE = 4, 12, 40
"""Updates after which something has moved, every part has, and even a rarely used part."""
STILL_LOSSES = 8
"""Equal losses in a row that are no chance in float32."""
FALLS, STANDS = 0.2, 0.001
"""Shares of the loss: what a useful rate takes off it in a few updates on one batch, and what is next to nothing."""
FEW_LOSSES = 8
"""At the begin and at the end, that tell whether the loss has fallen."""
REPEATS = 4
"""Steps that must begin in a random state that was there before; a resumed or repeated step is one."""


def weights_move(case: Case) -> Iterator[Verdict]:
    """What an optimizer holds with a rate above 0 changes, if the loss depends on it."""
    facts = case.newest(VitalsFacts)
    if facts is None or not facts.tensors:
        if facts is not None:
            yield NotApplicable("no trainable tensor belongs to a watched optimizer with a rate above 0")
        return
    if facts.updates >= FIRST and not facts.moved and (facts.has_gradient or facts.updates >= ENOUGH):
        yield _nothing_moves(facts)
    elif facts.updates >= ENOUGH and facts.moved and facts.still:
        yield from _parts_that_stand(case, facts)
    elif facts.updates >= FIRST:
        yield Holds(f"{facts.moved} of {facts.tensors} tensors over {facts.updates} updates")


def _nothing_moves(facts: VitalsFacts) -> Finding:
    return finding(
        "law.vitals.weights_move",
        "critical" if facts.has_gradient else "warning",
        facts.steps,
        symptom=f"no weight has changed in {facts.updates} updates"
        + ("" if facts.has_gradient else ": no gradient reaches any"),
        cause="the updates go to other tensors than those of the model, are undone, or are too small to change a bit"
        if facts.has_gradient
        else "the loss does not depend on the weights, or the gradients are dropped before the update",
        remedy="compare a weight before and after optimizer.step(); look at what happens to it and to its gradient",
        sure=0.95,
        stage="update",
        since_step=1,
        evidence=[("tensors that moved", 0, facts.tensors), ("updates at a rate above 0", facts.updates)],
    )


def _parts_that_stand(case: Case, facts: VitalsFacts) -> Iterator[Verdict]:
    measured = case.every(StillnessFacts)
    due = not measured or (facts.updates >= LATE > measured[-1][0])
    if due and case.blind(StillnessFacts) is None:
        yield ExperimentRequest(StillnessFacts.experiment)
    effects = {each.name: each for _, known in measured for each in known.tensors}
    still = [effects[name] for name in facts.still if name in effects]
    needed = [each for each in still if each.effect]
    unused = [each.name for each in still if not each.effect]
    cancels = all(each.cancels for each in still if not each.effect)
    if needed:
        names = [each.name for each in needed]
        yield finding(
            "law.vitals.weights_move",
            "info" if is_left_as_it_is(case, names) else "warning",
            facts.steps,
            symptom=f"{listed(names)} learned nothing in {facts.updates} updates, though the loss depends on "
            + ("it" if len(names) == 1 else "them"),
            cause="the gradient there is 0: what it passes through is flat"
            if needed[0].reached
            else "no gradient comes there: the way from the loss is cut",
            remedy="look for detach(), .data, item(), no_grad(), argmax or rounding behind it"
            if not needed[0].reached
            else "look for saturated or dead units, a factor of 0, or a clamp behind it",
            sure=0.9,
            stage="backward",
            where=Where(module=names[0].rpartition(".")[0]),
            since_step=1,
            evidence=[
                (f"change of the loss where {names[0]} changes, relative", needed[0].effect, 0.0),
                ("tensors that never moved, or only by decay", facts.num_still, 0),
            ],
        )
    elif unused:
        yield finding(
            "law.vitals.weights_move",
            "warning" if (facts.updates >= LATE and not cancels) or len(unused) == facts.tensors else "info",
            facts.steps,
            symptom=f"{listed(unused)} learned nothing in {facts.updates} updates: the loss does not depend on "
            + ("it" if len(unused) == 1 else "them"),
            cause="the loss is made of differences or slopes, in which a bias cancels out"
            if cancels
            else "the forward pass does not use it, or what it gives is dropped or multiplied by 0",
            remedy="use it in forward(), or leave it out of the model",
            sure=0.6,
            stage="forward",
            where=Where(module=unused[0].rpartition(".")[0]),
            since_step=1,
            evidence=[("tensors that never moved, or only by decay", facts.num_still, 0)],
        )
    else:
        yield Holds(f"{facts.moved} of {facts.tensors} tensors over {facts.updates} updates")


def loss_moves(case: Case) -> Iterator[Verdict]:
    """While weights move, the loss does not stand at the same bits."""
    facts, steps = case.newest(VitalsFacts), [each for each in case.watched if not math.isnan(each.loss)]
    if facts is None or len(steps) < STILL_LOSSES:
        return
    last = _equal_at_the_end(steps)
    moves = facts.moved and facts.stands_since >= last[0].step + STILL_LOSSES // 2
    loss = last[-1].loss
    was_lower = loss == 0.0 and len(last) < len(steps)  # what is learned may be without loss
    is_coarse = math.frexp(loss)[0] * 2**11 % 1 == 0.0  # it fits in 16 bits, where a small change is rounded away
    if not moves or was_lower or len(last) < (3 if is_coarse and loss else 1) * STILL_LOSSES:
        yield Holds(f"{len(steps)} steps")
        return
    has_gradient = statistics.median(each.grad_norm for each in last) > 0.0
    yield finding(
        "law.vitals.loss_moves",
        "info" if has_gradient else "warning",
        last[-1].step,
        symptom=f"the loss is {loss:.6g} in {len(last)} steps in a row, to the last bit, while weights change",
        cause="the loss does not depend on the weights that are trained, or is computed from what does not change",
        remedy="print the output of the model and the loss of two steps; look for a stale copy, a clamp or a constant",
        sure=0.85,
        stage="loss",
        since_step=last[0].step,
        evidence=[("equal losses in a row", len(last), 1)],
    )


def _equal_at_the_end(steps: Sequence[Watched]) -> Sequence[Watched]:
    """The last steps with the same loss. Their numbers may have gaps: not every step of a long run is recorded."""
    first = len(steps) - 1
    while first and steps[first - 1].loss == steps[-1].loss:
        first -= 1
    return steps[first:]


def rate_is_useful(case: Case) -> Iterator[Verdict]:
    """Updates on one batch lower its loss by more than next to nothing, where larger ones do so by much."""
    losses = [each.loss for each in case.watched if math.isfinite(each.loss)]
    last = case.newest(VitalsFacts)
    if last is None or (last.updates < LATE and not (case.finished and last.updates >= 2 * ENOUGH)):
        return
    if len({each["optimizer"] for kind, each in case.watched[-1].events if kind == "step"}) != 1:
        yield NotApplicable("several optimizers play a game, in which no loss has to fall")
        return
    rates = [each.lr for each in case.watched]
    if rates[-1] > 1.01 * rates[0] or rates[-1] < 0.3 * max(rates):
        yield NotApplicable("the learning rate rises, or is at the end of its schedule")
        return
    first, now = sum(losses[:4]) / 4, sum(losses[-8:]) / 8
    if first - now > 0.1 * abs(first):
        yield Holds(f"the loss fell from {first:.4g} to {now:.4g}")
        return
    facts = case.newest(OtherRatesFacts)
    if facts is None:
        if (why := case.blind(OtherRatesFacts)) is not None:
            yield NotApplicable(why)
        else:
            yield ExperimentRequest(OtherRatesFacts.experiment)
        return
    yield from _judged(case, facts)


def _judged(case: Case, facts: OtherRatesFacts) -> Iterator[Verdict]:
    was = facts.losses[0]
    better = [(f, each) for f, each in zip(facts.factors, facts.losses) if _fall(each) > FALLS]
    if _fall(was) > STANDS or not better or better[0][0] < 100.0:
        yield Holds(f"{len(was)} updates on one batch: loss {was[0]:.4g} -> {was[-1]:.4g}")
        return
    factor, losses = better[0]
    yield finding(
        "law.vitals.rate_is_useful",
        "warning",
        case.last_step,
        symptom=f"{len(was)} updates on one batch take its loss from {was[0]:.4g} to {was[-1]:.4g}; at {factor:g} "
        f"times the learning rate, to {losses[-1]:.4g}",
        cause=f"the learning rate of {facts.lr:g}, or what scales loss or gradients, is off by orders of magnitude",
        remedy=f"a learning rate near {facts.lr * factor / 10:g}; look at factors between the loss and the update",
        sure=0.85,
        stage="update",
        since_step=1,
        evidence=[("share that these updates take off the loss", _fall(was), f"{_fall(losses):.3g}")],
        trial=RemedyTrial("other_lr", {"factor": factor}),
    )


def _fall(losses: Sequence[float]) -> float:
    """The share of the loss that is gone at the end; 0 where it is not finite, or was higher than at the begin."""
    if not all(map(math.isfinite, losses)) or not losses[0] or max(losses) > losses[0] + 0.1 * abs(losses[0]):
        return 0.0
    return (losses[0] - losses[-1]) / abs(losses[0])


def scales_hold(case: Case) -> Iterator[Verdict]:
    """No weight grows or shrinks steadily by orders of magnitude within 48 steps, or while the steps double."""
    known = case.every(VitalsFacts)
    if not known:
        return
    step, facts = known[-1]
    steady = [each for each in facts.drifts if each.steady]
    if not steady:
        yield Holds(f"{facts.tensors} tensors over {facts.steps} steps")
        return
    worst = max(steady, key=_factor)
    grows = worst.now > worst.before
    losses = [each.loss for each in case.watched]
    has_learned = statistics.median(losses[-FEW_LOSSES:]) < statistics.median(losses[:FEW_LOSSES])
    yield finding(
        "law.vitals.scales_hold",
        "info" if has_learned else "warning",
        step,
        symptom=f"{worst.name} {'grows' if grows else 'shrinks'} steadily: root mean square {worst.before:.3g} at step "
        f"{worst.since}, {worst.now:.3g} at step {step}",
        cause="its updates all point the same way: a loss without a lower bound, or a rate that is far too high"
        if grows
        else "it is multiplied by less than 1 at each step: weight decay, or a factor in the loop",
        remedy="look at the gradient of this weight, its learning rate and its weight decay",
        sure=0.7,
        stage="update",
        where=Where(module=worst.name.rpartition(".")[0]),
        since_step=worst.since,
        evidence=[
            ("root mean square", worst.now, worst.before),
            ("that of a fresh weight of this shape", worst.usual),
            ("tensors that drift so", listed([each.name for each in steady]), "none"),
        ],
    )


def _factor(drift: Drift) -> float:
    return abs(math.log(max(drift.now, 1e-30) / max(drift.before, 1e-30)))


def frozen_stays(case: Case) -> Iterator[Verdict]:
    """What has no gradient is not changed by the optimizer that holds it."""
    facts = case.newest(VitalsFacts)
    if facts is None:
        return
    if not facts.frozen:
        yield NotApplicable("no optimizer holds a frozen tensor")
    elif not facts.frozen_moved:
        yield Holds(f"{facts.frozen} frozen tensors over {facts.steps} steps")
    else:
        names = facts.frozen_moved
        yield finding(
            "law.vitals.frozen_stays",
            "warning",
            facts.steps,
            symptom=f"{listed(names)} cannot be trained (requires_grad is False) and changes all the same",
            cause="its last gradient is still there, or the optimizer goes on with its momentum or weight decay",
            remedy="set p.grad = None when it is frozen, or make the optimizer of those that are trained",
            sure=0.8,
            stage="update",
            where=Where(module=names[0].rpartition(".")[0]),
            evidence=[("frozen tensors that changed", len(names), 0)],
        )


def noise_is_new(case: Case) -> Iterator[Verdict]:
    """No step begins in a random state in which an earlier one began."""
    facts = case.newest(SteadyFacts)
    if facts is None or not facts.steps:
        return
    if not facts.draws:
        yield NotApplicable("no random numbers are drawn while a step runs")
    elif facts.repeats < REPEATS:
        yield Holds(f"{facts.steps} steps")
    else:
        yield finding(
            "law.vitals.noise_is_new",
            "warning",
            facts.steps,
            symptom=f"{facts.repeats} steps began in a random state in which an earlier one began: step "
            f"{facts.since_repeat} in that of step {facts.repeats_step}",
            cause="the generator is seeded again, or its state is set back, within the loop: dropout masks and noise "
            "come again",
            remedy="seed once, before the loop; give a generator of its own to what must repeat (evaluation, sampling)",
            sure=0.9,
            stage="loop",
            since_step=facts.since_repeat,
            evidence=[("steps whose random state was there before", facts.repeats, 0)],
        )


def data_stay(case: Case) -> Iterator[Verdict]:
    """What the model is given is not written to, and comes again as it was."""
    facts = case.newest(SteadyFacts)
    if facts is None or not facts.steps:
        return
    if facts.changed >= REPEATS:
        yield finding(
            "law.vitals.data_stay",
            "warning",
            facts.steps,
            symptom=f"the data are changed in place: {facts.changed} of {facts.came_again} parts that came again had "
            "other values",
            cause="the loop or the model writes into what it was given, which is a view of the data set",
            remedy="work out of place (x = x * 2 in place of x.mul_(2) or x *= 2), or on x.clone()",
            sure=0.9,
            stage="input",
            since_step=facts.since_changed,
            evidence=[("parts of the data that had other values when they came again", facts.changed, 0)],
        )
    elif facts.written_views >= REPEATS or facts.written >= REPEATS:
        yield finding(
            "law.vitals.data_stay",
            "warning" if facts.written_views >= REPEATS else "info",
            facts.steps,
            symptom=f"in {facts.written} steps the model's input is written to, in place",
            cause="the model or the loop changes what it was given"
            + (": a view of a larger tensor, which changes too" if facts.written_views else ""),
            remedy="work out of place (x = x * 2 in place of x.mul_(2) or x *= 2), or on x.clone()",
            sure=0.6,
            stage="input",
            since_step=facts.since_written,
            evidence=[("steps that wrote to their input", facts.written, 0)],
        )
    else:
        yield Holds(f"{facts.steps} steps" + (f", {facts.came_again} parts came again" if facts.came_again else ""))


_STANDING = (
    "optim.params_missing", "opt.params_not_registered", "optim.stale_params", "optim.zero_grad_before_step",
    "optim.step_never_called", "optim.group_lr_zero", "opt.nothing_trainable", "optim.lr_too_low",
    "schedule.never_stepped",
    "schedule.unit_mismatch", "grad.graph_cut", "grad.graph_cut_at_loss", "grad.vanishing",
    "gradient.clip_always_active",
    "prec.lost_updates", "prec.fp16_underflow", "prec.scaler_collapse", "prec.autocast_stale_cache",
    "model.dead_relu", "model.router_collapse", "loss.no_valid_target", "data.constant_input",
    "mode.*", "num.*",
)  # fmt: skip
_SLOW = (*_STANDING, "optim.weight_decay_too_high", "data.double_normalised", "init.symmetric")
_RUNAWAY = (
    "optim.lr_too_high", "optim.weight_decay_too_high", "optim.missing_zero_grad", "optim.params_in_two_optimizers",
    "loss.wrong_sign",
    "loss.term_dominates", "loss.nll_on_probs", "gradient.exploding", "grad.wrong_backward", "init.*",
    "model.attention_logit_growth", "data.unnormalised_input", "num.*",
)  # fmt: skip

LAWS: tuple[Law, ...] = (
    Law("vitals.weights_move", weights_move, named_by=_STANDING),
    Law("vitals.loss_moves", loss_moves, named_by=_STANDING),
    Law("vitals.rate_is_useful", rate_is_useful, effort="replay", named_by=_SLOW),
    Law("vitals.way_is_used", way_is_used, effort="replay", named_by=(*_SLOW, "law.vitals.rate_is_useful")),
    Law(
        "vitals.higher_rates_gain_little",
        higher_rates_gain_little,
        effort="replay",
        named_by=(*_SLOW, "law.vitals.rate_is_useful", "law.vitals.way_is_used"),
    ),
    Law("vitals.scales_hold", scales_hold, named_by=_RUNAWAY),
    Law("vitals.frozen_stays", frozen_stays),
    Law("vitals.noise_is_new", noise_is_new),
    Law("vitals.data_stay", data_stay, named_by=("grad.saved_tensor_modified",)),
)
