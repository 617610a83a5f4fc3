"""Laws of the gradient, as pure functions of a Case."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trainwright.doctor.case import Case
from trainwright.doctor.finding import ExperimentRequest, Finding, finding, listed
from trainwright.doctor.gradient.facts import DerivativeFacts, Slopes
from trainwright.doctor.gradient.names.accumulation import is_as_recorded
from trainwright.doctor.law import Holds, Law, NotApplicable, Verdict
from trainwright.doctor.shared_standing import is_left_as_it_is, standing
from trainwright.runlog.records import Where

AGAIN = 5
"""So many times the step of the last comparison the next is due: at the first look, and about steps 6, 32, 160."""
STAIRS = 0.01
"""Below this share of the gradient's slope the loss has none: what the gradient is of is not the loss, and is meant."""

FEWER, MOSTLY = 4, 0.75
"""Steps with fewer micro-batches than the watch was told, and their share: the last of an epoch may have fewer."""
UNDONE = 0.1
"""Of a deviation: what is left where a stop-gradient explains it."""


def _requests(case: Case) -> Iterator[Verdict]:
    looks = case.outcomes(DerivativeFacts.experiment)
    if case.watched and (not looks or case.last_step > AGAIN * looks[-1].step):
        yield ExperimentRequest(DerivativeFacts.experiment)


def _looks(case: Case) -> Sequence[tuple[int, DerivativeFacts]]:
    return case.every(DerivativeFacts)


def _unseen(case: Case) -> Iterator[Verdict]:
    if (why := case.blind(DerivativeFacts)) is not None:
        yield NotApplicable(why)


def _last_module(names: Sequence[str]) -> str:
    return names[-1].rpartition(".")[0]


def reaches_all(case: Case) -> Iterator[Verdict]:
    """Every weight of an optimizer that the loss depends on gets a gradient."""
    yield from _requests(case)
    looks = _looks(case)
    if not looks:
        yield from _unseen(case)
        return
    always = [{name for each in facts.unreached for name in each.names} for _, facts in looks]
    names = [name for each in looks[-1][1].unreached for name in each.names if all(name in seen for seen in always)]
    cut = standing(case, names, looks[0][0]) if names else []
    if cut is None:
        return  # the next look tells whether they change all the same
    if not cut:
        yield Holds(f"{looks[-1][1].tensors} tensors at {len(looks)} steps")
    elif len(looks) > 1 or case.finished:  # in a single step a part may have its turn in another
        yield _not_reached(looks, cut, meant=is_left_as_it_is(case, cut))


def _not_reached(looks: Sequence[tuple[int, DerivativeFacts]], names: Sequence[str], *, meant: bool) -> Finding:
    step, facts = looks[-1]
    slopes = next(each for each in facts.unreached if set(each.names) & set(names))
    ends = sorted({f"{how} in {module or 'the model or the loss'}" for how, module in facts.cuts})
    return finding(
        "law.gradient.reaches_all",
        "info" if meant else "critical" if facts.unreached_share > 0.5 else "warning",
        step,
        symptom=f"the loss depends on {len(names)} weights that get no gradient: {listed(names)}",
        cause=f"the graph ends between them and the loss{': ' + listed(ends) if ends else ''}",
        remedy="keep the graph from these weights to the loss, or leave them out of the optimizer, if that is meant",
        sure=0.95,
        stage="backward",
        since_step=looks[0][0],
        where=Where(
            module=_last_module(names), op=facts.cuts[0][0] if len({how for how, _ in facts.cuts}) == 1 else None
        ),
        evidence=[
            (f"slope of its gradient along {slopes.names[0]}", 0.0, slopes.of_loss or slopes.coarse),
            ("share of the trained weights without a gradient", round(facts.unreached_share, 4), 0.0),
        ],
        explains=("model.missing_nonlinearity",),
    )


def is_the_derivative(case: Case) -> Iterator[Verdict]:
    """The gradient of every weight is the derivative of the loss that backward was called on."""
    looks = [(step, facts) for step, facts in _looks(case) if facts.whole]
    if _is_cut(looks):
        yield NotApplicable("weights without a gradient have a law of their own: gradient.reaches_all")
        return
    if not looks:
        yield from _unseen(case)
        return
    off = [(step, facts, rows) for step, facts in looks if (rows := _meant_otherwise(facts))]
    if len(off) < min(2, len(looks)):
        facts = looks[-1][1]
        stops = " but for a stop-gradient" if facts.deviating and facts.cuts else ""
        yield Holds(f"{facts.tensors} tensors at {len(looks)} steps, in {facts.dtype}{stops}: {_by(facts.whole)}")
        return
    step, facts, rows = off[-1]
    yield _not_the_derivative(step, off[0][0], facts, rows)


def _is_cut(looks: Sequence[tuple[int, DerivativeFacts]]) -> bool:
    """Whether what ends the graph, and nothing else, explains that gradients deviate: then others have none."""
    return bool(looks) and all(f.unreached and (f.left_without_cuts or 0.0) < UNDONE for _, f in looks)


def _meant_otherwise(facts: DerivativeFacts) -> list[Slopes]:
    """Without those where the loss itself has no slope: what is rounded has a gradient that somebody gives it.

    None where all is explained by what ends the graph, and leaves another way: with it undone the slopes agree.
    """
    if facts.left_without_cuts is not None and facts.left_without_cuts < UNDONE:
        return []
    return [each for each in facts.deviating if abs(each.of_loss) > STAIRS * abs(each.of_gradient)]


def _by(rows: Sequence[Slopes]) -> str:
    worst = max((abs(1 - 1 / each.factor) if each.factor else 1.0 for each in rows), default=0.0)
    return f"slopes differ by {worst:.1g}"


def _not_the_derivative(step: int, since: int, facts: DerivativeFacts, rows: Sequence[Slopes]) -> Finding:
    names = [name for each in rows for name in each.names]
    worst = max(rows, key=lambda each: abs(each.of_loss - each.of_gradient))
    author = _put_there(facts)
    return finding(
        "law.gradient.is_the_derivative",
        "info" if author else "warning",
        step,
        symptom=f"the gradients of {len(names)} weights are not the derivative of the loss: along {listed(worst.names)}"
        f" it falls {worst.factor:.3g} times as fast as they say",
        cause=f"{author} is in the backward pass: meant, unless it is in the wrong place"
        if author
        else "the backward pass does not fit the forward pass: values that it needs were overwritten (.data), "
        "recomputed otherwise, or come from outside of the graph",
        remedy="look at what lies between these weights and the loss",
        sure=0.6 if author else 0.9,
        stage="backward",
        since_step=since,
        where=Where(module=_last_module(names)),
        evidence=[
            ("slope of the loss / slope of the gradient", worst.factor, 1.0),
            ("distance of two quotients of other step sizes", worst.error / max(abs(worst.of_loss), 1e-300), 0.0),
        ],
    )


def _put_there(facts: DerivativeFacts) -> str:
    """What of the user's own changes the backward pass on purpose, in words; "" where nothing does."""
    if facts.functions:
        return f"the autograd function {listed(facts.functions)}"
    if facts.hooks:
        return "a hook on a gradient"
    if facts.estimators:
        return f"a straight-through estimator ({listed(facts.estimators)})"
    return f"a stop-gradient ({listed(sorted({how for how, _ in facts.cuts}))})" if facts.cuts else ""


def adds_up(case: Case) -> Iterator[Verdict]:
    """The micro-batches of a step weigh 1 in all: it makes the gradient of the mean over all of them."""
    if (fewer := _fewer_than_told(case)) is not None:
        yield fewer
        return
    by_hand = {each.step for each in case.watched if each.values.get("edited")}
    windows = [
        e for e in case.outcomes("accumulation")
        if e.values.get("distinct") and e.values.get("same_functions")
        and not e.values.get("discarded") and e.step not in by_hand
    ]  # fmt: skip
    weighed = [(e.step, e.values["weights"]) for e in windows if e.values.get("weights") and is_as_recorded(e.values)]
    known = [(step, sum(weights)) for step, weights in weighed if None not in weights]
    if not known:
        yield NotApplicable("no step of several micro-batches whose losses are means was looked at")
        return
    off = [(step, weight) for step, weight in known if not 0.9 < weight < 1.1]
    if not off:
        yield Holds(f"{len(known)} steps of up to {max(len(weights) for _, weights in weighed)} micro-batches")
        return
    step, weight = off[-1]
    yield finding(
        "law.gradient.adds_up",
        "info" if len(off) < len(known) else "warning",
        step,
        symptom=f"the micro-batches of a step weigh {weight:.3g} in all",
        cause="their losses are divided by another number than there are: a short last window, or a wrong count",
        remedy="divide by the number of micro-batches that the step has",
        sure=0.85,
        stage="loss",
        since_step=off[0][0],
        evidence=[
            ("sum of the weights", weight, 1.0),
            ("steps like this", f"{len(off)} of {len(known)} that were looked at", 0),
        ],
    )


def _fewer_than_told(case: Case) -> Finding | None:
    """Where the watch was told how many micro-batches a step has, and nearly all steps have fewer."""
    told = case.facts("contract").get("accumulation") or 1
    seen = [each for each in case.watched if "blind" not in each.values]
    counts = [n for each in seen if (n := sum(kind == "backward" for kind, _ in each.events))]
    fewer = [n for n in counts if n < told]
    if len(fewer) < FEWER or len(fewer) < MOSTLY * len(counts):
        return None
    return finding(
        "law.gradient.adds_up",
        "warning",
        case.last_step,
        symptom=f"the watch was told that a step has {told} micro-batches; {len(fewer)} of {len(counts)} steps have "
        f"{fewer[-1]}",
        cause="the loop over micro-batches is shorter than their number: a range that begins at 1, a round too few, a "
        "step or a break within it",
        remedy=f"make {told} backward passes before each step, or tell the watch how many there are "
        f"(accumulation={fewer[-1]}); where the loss is divided by {told}, its gradients are too small",
        sure=0.85,
        stage="backward",
        since_step=1,
        evidence=[("backward passes of a step", fewer[-1], told)],
    )


LAWS: tuple[Law, ...] = (
    Law(
        "gradient.reaches_all",
        reaches_all,
        "replay",
        named_by=("grad.*", "optim.nothing_trainable", "model.dead_relu", "num.*"),
    ),
    Law(
        "gradient.is_the_derivative",
        is_the_derivative,
        "replay",
        named_by=(
            "gradient.wrong_backward",
            "gradient.saved_tensor_modified",
            "gradient.recompute_mismatch",
            "hw.*",
            "num.*",
        ),
    ),
    Law("gradient.adds_up", adds_up, "replay", named_by=("accum.*", "loss.*")),
)
