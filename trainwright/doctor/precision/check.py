"""Laws of precision, as pure functions of a Case."""

from __future__ import annotations

from collections.abc import Iterator

from trainwright.doctor.case import Case
from trainwright.doctor.finding import ExperimentRequest, finding, in_words
from trainwright.doctor.law import Holds, Law, NotApplicable, Verdict
from trainwright.doctor.precision.facts import BatchesFacts, CastsFacts, Float64Facts
from trainwright.runlog.records import Where

AGAIN = 5
"""So many times the step of the last comparison the next is due."""
HARMS = 0.1
"""Of the gradient: its direction is off by more than 5 degrees."""
TIMES_NOISE = 10
"""What a last digit of the weights changes is the dtype's own; ten times that is lost in between."""
TELLS = 0.05
"""Of a standard deviation: less is what a 16-bit number of usual size loses."""


def same_in_float64(case: Case) -> Iterator[Verdict]:
    """In float64 the gradients of a step are the same, as far as a last digit of the weights lets them be."""
    outcomes = case.outcomes(Float64Facts.experiment)
    if case.watched and (not outcomes or case.last_step > AGAIN * outcomes[-1].step):
        yield ExperimentRequest(Float64Facts.experiment)
    looks = case.every(Float64Facts)
    if not looks:
        if (why := case.blind(Float64Facts)) is not None:
            yield NotApplicable(why)
        return
    off = [(step, facts) for step, facts in looks if facts.error > max(HARMS, TIMES_NOISE * facts.noise)]
    if len(off) < min(2, len(looks)):
        facts = looks[-1][1]
        yield Holds(f"gradients in {facts.dtype}, {facts.error:.1g} away; a last digit moves them by {facts.noise:.1g}")
        return
    step, facts = off[-1]
    worst = facts.worst
    yield finding(
        "law.precision.same_in_float64",
        "warning",
        step,
        symptom=f"the gradients are {facts.error:.0%} away from those of the same step in float64"
        + (f"; most is lost by {worst.op} in {in_words(worst.module)}" if worst else ""),
        cause=f"{facts.dtype} has too few digits somewhere: a difference of large numbers, a long sum, values that "
        "underflow",
        remedy="compute that part in a wider dtype, or another way (subtract what is common first, logsumexp, "
        "a stable variance)",
        sure=0.85,
        stage="forward",
        since_step=off[0][0],
        where=Where(module=worst.module, op=worst.op, dtype=worst.dtype) if worst else Where(dtype=facts.dtype),
        evidence=[
            ("distance of the gradients, relative", facts.error, f"about {facts.noise:.2g}"),
            ("loss", facts.loss, facts.loss_in_float64),
            *([("error of its inputs, and of its result", [worst.error_in, worst.error_out])] if worst else []),
        ],
    )


def stays_in_range(case: Case) -> Iterator[Verdict]:
    """The values inside of a step are at least two doublings away from the end of their dtype."""
    looks = [(step, facts) for step, facts in case.every(Float64Facts) if facts.high is not None]
    if not looks:
        if case.every(Float64Facts):
            yield NotApplicable("nothing is computed in float16")
        return
    near = [(step, facts.high) for step, facts in looks if facts.high and facts.high.value > facts.high.most / 4]
    if not near:
        high = looks[-1][1].high
        assert high is not None
        yield Holds(f"up to {high.value:.3g} of {high.most:.3g} in {high.dtype}")
        return
    step, high = near[-1]
    yield finding(
        "law.precision.stays_in_range",
        "warning",
        step,
        symptom=f"{high.op} in {in_words(high.module)} gives {high.value:.3g}; {high.dtype} ends at {high.most:.3g}",
        cause="the values have nearly outgrown their dtype: the next larger batch or step overflows",
        remedy="bfloat16, or this part in float32; look at what grows",
        sure=0.85,
        stage="forward",
        since_step=near[0][0],
        where=Where(module=high.module, op=high.op, dtype=high.dtype),
        evidence=[("highest value", high.value, f"below {high.most / 4:.3g}")],
    )


def batches_keep_digits(case: Case) -> Iterator[Verdict]:
    """What a loader has returned is used with all of its digits."""
    facts = case.newest(BatchesFacts)
    if facts is None:
        return
    if not facts.narrowed:
        yield Holds(f"the batches of {facts.compared} steps")
        return
    worst = max(facts.narrowed, key=lambda each: each.lost)
    if worst.lost <= TELLS:
        yield Holds(f"the batches of {facts.compared} steps, in {worst.dtype}")
        return
    yield finding(
        "law.precision.batches_keep_digits",
        "warning",
        max(1, facts.since),
        symptom=f"a tensor of the batch is {worst.dtype} before it is used by the {worst.place}, and loses "
        f"{worst.lost:.0%} of its spread",
        cause=f"it is cast to {worst.dtype}, and has {worst.values} different values left",
        remedy="cast to a floating dtype that its values fit in",
        sure=0.95,
        stage="input" if worst.place == "model" else "label",
        since_step=facts.since,
        evidence=[("what the cast takes away, in standard deviations", worst.lost, 0.0)],
    )


def fractions_stay(case: Case) -> Iterator[Verdict]:
    """What is computed with as floats does not become whole numbers on its way."""
    facts = case.newest(CastsFacts)
    if facts is None:
        return
    worst = max(facts.lost, key=lambda each: each.lost, default=None)
    if worst is None or worst.lost <= TELLS:
        yield Holds("one forward pass")
        return
    yield finding(
        "law.precision.fractions_stay",
        "warning",
        case.last_step,
        symptom=f"floats in {in_words(worst.module)} are cast to {worst.dtype} and back, which takes away up to "
        f"{worst.lost:.2g} of their standard deviation",
        cause="a cast that cuts off what follows the point, and has no gradient",
        remedy="leave the cast out; to quantise, round on purpose and pass the gradient on",
        sure=0.85,
        stage="forward",
        since_step=1,
        where=Where(module=worst.module, op=worst.op, dtype=worst.dtype, source=worst.line),
        evidence=[("what the cast takes away, in standard deviations", worst.lost, 0.0)],
    )


LAWS: tuple[Law, ...] = (
    Law(
        "precision.same_in_float64",
        same_in_float64,
        "replay",
        named_by=("prec.*", "num.*", "grad*.*", "model.dead_relu"),
    ),
    Law("precision.stays_in_range", stays_in_range, "replay", named_by=("prec.fp16_overflow", "num.*")),
    Law("precision.fractions_stay", fractions_stay, "replay", named_by=("gradient.graph_cut*",)),
    Law("precision.batches_keep_digits", batches_keep_digits, named_by=("data.constant_input",)),
)
