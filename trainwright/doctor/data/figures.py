"""Laws of the figures of an evaluation: what the loop keeps is an average of what was computed."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence

from trainwright.doctor.case import Case
from trainwright.doctor.data.facts import (
    BEST_SHARES,
    Computed,
    DistanceFigure,
    EvaluationFacts,
    KeptNumber,
    LoopFiguresFacts,
    TrainingAveragesFacts,
    TurnedFigure,
)
from trainwright.doctor.data.share_names import is_named_share
from trainwright.doctor.finding import Finding, finding
from trainwright.doctor.law import Holds, NotApplicable, Verdict
from trainwright.runlog.records import Where

ROOM = 1.25
"""Times the range of the averages over batches: for a divisor that is not quite the number of rows."""
LEAST = 0.02
"""Of a share: smaller ones differ by more than that factor where a few rows do."""
LOSSES = ("cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy")
"""Functions whose mean is no accuracy."""
ROUNDED = 1e-5
"""Of a mean over a batch in float32."""
MORE_IS_BETTER = ("neg", "score", "reward", "fit", "util", "objective", "gain", "elbo", "like", "ll", "quality")
"""What a part of the name of a loss begins with that is told with the other sign."""
NEARLY, BIAS = 0.1, 8.0
"""Of the distance of outputs that know nothing. An estimate without bias is off by a few parts in the number of rows
for two samples that are the same."""
TURNED = 0.5
"""Of a distance: what is learned is nearer to its reference than to the opposite."""
NOISE = 2.0
"""Standard errors of a mean over the rows: what is less than these off, other rows would give as well."""
OF_OTHERS = ("best", "min", "max", "prev", "last", "old", "first", "init", "base", "ema", "smooth", "avg", "target")
SUMS, PERCENT = ("acc", "num", "count", "counts", "n"), 100.001
"""Parts of names of what is counted, and the largest share."""
MADE_OF_A_LOSS = (
    ("cross_entropy", re.compile(r"perplexity|(?<![a-z])ppl(?![a-z])")),
    ("nll_loss", re.compile(r"perplexity|(?<![a-z])ppl(?![a-z])")),
    ("mse_loss", re.compile(r"(?<![a-z])rmse(?![a-z])")),
)
"""Functions, and the names of what is made of their mean."""
NO_AVERAGES = (*OF_OTHERS, "scale", "weight", "coef", "total", "sum", "run", "batch", "step", "cur", "item")
"""What a part of a name begins with: of another evaluation, of several, of one batch, or no average at all."""


def figures_are_averages(case: Case) -> Iterator[Verdict]:
    """A figure that the loop has of an evaluation is the sum over its rows, divided by their number."""
    facts, told = case.newest(EvaluationFacts), case.newest(LoopFiguresFacts)
    if facts is None:
        return
    known = [each for each in facts.numbers if _is_average(each.name)]
    wrong = [each for each in known if each.wrong and (not each.is_factor or _is_off_beside_training(each, case))]
    swapped = [each for each in known if not each.wrong and not each.is_plain and _is_named_otherwise(each, facts)]
    unmade = [each for each in known if not each.wrong and _is_unmade(each)]
    negated = [each for each in known if not each.wrong and each.is_negated and _is_meant_positive(each, case)]
    right = [each.name for each in known if not each.wrong and not each.is_plain]
    others = {} if told is None else {name: facts.figures[name] for name in told.names if name in facts.figures}
    judged = _not_recognised(others, facts)
    off = [(name, value, ranges[0]) for name, value, ranges in judged if ranges and not _is_in_any(value, ranges)]
    if wrong:
        yield _wrong(facts, max(wrong, key=_deviation))
    elif swapped:
        yield _swapped(facts, swapped[0])
    elif unmade:
        yield _unmade(facts, unmade[0])
    elif negated:
        yield _negated(facts, negated[0])
    elif off:
        yield _off(facts, *off[0])
    elif (beyond := next((name for name in facts.shares if _is_beyond(name, facts)), None)) is not None:
        yield _beyond(facts, beyond, facts.shares[beyond])
    elif right or any(ranges for _, _, ranges in judged):
        names = dict.fromkeys([*right, *(name for name, _, ranges in judged if ranges)])
        values = {each.name: each.value for each in facts.numbers} | facts.figures
        yield Holds(", ".join(f"{name} {values[name]:.4g}" for name in list(names)[:4]))
    else:
        yield NotApplicable("no number of the loop can be compared with what its evaluation computed")


def _is_beyond(name: str, facts: EvaluationFacts) -> bool:
    """``acc`` alone may be what is accumulated. A number that is known as a sum is on its way to a figure."""
    is_known = any(each.name == name and not each.wrong and each.is_plain for each in facts.numbers)
    is_sum = not _is_average(name) or any(part in SUMS for part in re.split("[^a-z]+", name.lower()))
    return not is_known and not is_sum and not 0.0 <= facts.shares[name] <= PERCENT


def _is_named_otherwise(number: KeptNumber, facts: EvaluationFacts) -> bool:
    """A loss that is a share of decisions, or an accuracy that is the mean of a loss function.

    So is any share by its name, where decisions are counted, that has the very value of what is named a loss.
    """
    is_loss, is_share = ("loss" in number.name.lower(), "acc" in number.name.lower())
    if is_named_share(number.name) and not number.decided and any(each.decided for each in facts.computed):
        same = [each for each in facts.numbers if each.value == number.value and each.line == number.line]
        if any("loss" in each.name.lower() for each in same):
            return True
    return is_loss != is_share and ((is_loss and number.decided) or (is_share and number.of.startswith(LOSSES)))


def _is_unmade(number: KeptNumber) -> bool:
    """Whether it is the mean of a loss, and has the name of what is made of it: its exponential, or its root."""
    name = number.name.lower()
    is_itself = not number.is_plain and math.isclose(number.value, number.right, rel_tol=ROUNDED)
    is_meant = is_itself and "loss" not in name and re.search("log_?p", name) is None
    return is_meant and any(number.of.startswith(of) and made.search(name) for of, made in MADE_OF_A_LOSS)


def _is_meant_positive(number: KeptNumber, case: Case) -> bool:
    """A share is; a loss is where those of training are, unless its name says that more of it is better."""
    if any(part.startswith(MORE_IS_BETTER) for part in re.split("[^a-z]+", number.name.lower())):
        return False
    losses = [each.loss for each in case.watched[-16:] if math.isfinite(each.loss)]
    return number.decided or (number.of.startswith(LOSSES) and bool(losses) and min(losses) > 0.0)


def _not_recognised(others: dict[str, float], facts: EvaluationFacts) -> list[tuple[str, float, list[Computed]]]:
    """Losses and accuracies of which it is not known how they were made, with what they may be averages of."""
    recognised = {each.name for each in facts.numbers}
    return [
        (name, value, _ranges_of(name, facts))
        for name, value in others.items()
        if name not in recognised and _is_average(name)
    ]


def _deviation(number: KeptNumber) -> float:
    """In standard errors."""
    return abs(number.value - number.right) / max(number.noise, 1e-12)


def _is_off_beside_training(number: KeptNumber, case: Case) -> bool:
    """A factor may be meant. It is not where the losses of training lie nearer to the mean without it."""
    losses = [each.loss for each in case.watched[-16:] if math.isfinite(each.loss)]
    if "acc" in number.name.lower():
        return True
    if not losses or min(losses) <= 0 or number.value <= 0 or number.right <= 0:
        return False
    usual = math.log(sum(losses) / len(losses))
    return abs(math.log(number.right) - usual) < abs(math.log(number.value) - usual)


def training_averages_are_averages(case: Case) -> Iterator[Verdict]:
    """An average of the losses of an epoch that the loop has is their sum, divided by their number."""
    facts = case.newest(TrainingAveragesFacts)
    if facts is None:
        return
    known = [each for each in facts.numbers if _is_average(each.name) and not each.is_plain]
    wrong = [each for each in known if each.wrong and "loss" in each.name.lower() and not each.is_factor]
    if wrong:
        yield _wrong_average(facts, max(wrong, key=_deviation), case.last_step)
    elif any(not each.wrong for each in known):
        yield Holds(", ".join(f"{each.name} over {facts.steps} steps" for each in known[:3] if not each.wrong))
    else:
        yield NotApplicable("no number of the loop is known as made of the losses of its steps")


def _swapped(facts: EvaluationFacts, number: KeptNumber) -> Finding:
    return finding(
        "law.data.figures_are_averages",
        "warning",
        max(1, facts.after),
        symptom=f"{number.name} is {number.value:.4g}, the mean of {number.of} over the rows of the evaluation",
        cause="a loss and a share of decisions have each other's name: they are returned or taken in another order",
        remedy="take what the evaluation returns in its order, or by name",
        sure=0.8,
        stage="loop",
        where=Where(source=number.line),
        evidence=[(number.name, number.value, "a share" if "acc" in number.name.lower() else "a loss")],
    )


def _unmade(facts: EvaluationFacts, number: KeptNumber) -> Finding:
    made = math.exp(number.right) if number.right < 100 and "mse_loss" not in number.of else math.sqrt(number.right)
    return finding(
        "law.data.figures_are_averages",
        "warning",
        max(1, facts.after),
        symptom=f"{number.name} is {number.value:.4g}, the mean of {number.of} itself; what has this name is made of "
        f"it: {made:.4g}",
        cause="the exponential, or the root, is left out, or the loss is taken in its place",
        remedy="perplexity = math.exp(mean loss), rmse = math.sqrt(mean squared error)",
        sure=0.85,
        stage="loop",
        where=Where(source=number.line),
        evidence=[(number.name, number.value, made)],
    )


def _negated(facts: EvaluationFacts, number: KeptNumber) -> Finding:
    return finding(
        "law.data.figures_are_averages",
        "warning",
        max(1, facts.after),
        symptom=f"{number.name} is {number.value:.4g}, the mean of {number.of} over the rows of the evaluation with "
        "the other sign",
        cause="a sign too much: a difference for a sum, a minus before one of the parts",
        remedy="tell the mean itself; call what is negated on purpose a score",
        sure=0.8,
        stage="loop",
        where=Where(source=number.line),
        evidence=[(number.name, number.value, number.right)],
    )


def _beyond(facts: EvaluationFacts, name: str, value: float) -> Finding:
    return finding(
        "law.data.figures_are_averages",
        "warning",
        max(1, facts.after),
        symptom=f"{name} is {value:.4g} after an evaluation of {facts.rows} rows: by its name it is a share of "
        "decisions, which lies between 0 and 1, or 0 and 100 in percent",
        cause=_CAUSE,
        remedy=_REMEDY,
        sure=0.8,
        stage="loop",
        evidence=[(name, value, [0.0, PERCENT])],
    )


def _wrong_average(facts: TrainingAveragesFacts, number: KeptNumber, step: int) -> Finding:
    """Losses that are sums over their rows are rightly divided by the rows of all: nothing tells these from means."""
    may_be_of_sums = number.wrong.startswith("the sum over its batches over its rows")
    return finding(
        "law.data.training_averages_are_averages",
        "warning" if _deviation(number) > NOISE and not may_be_of_sums else "info",
        max(1, step),
        symptom=f"{number.name} is {number.value:.4g}, {number.wrong}; the mean of {number.of} over the {facts.steps} "
        f"steps of the epoch is {number.right:.4g} ± {number.noise:.2g}",
        cause=_CAUSE + "; or the sum does not begin anew with an epoch",
        remedy=_REMEDY,
        sure=0.8,
        stage="loop",
        evidence=[(number.name, number.value, number.right), ("standard error over the steps", number.noise)],
    )


def distances_vanish(case: Case) -> Iterator[Verdict]:
    """A distance between outputs and a reference is 0 where they are equal."""
    facts = case.newest(EvaluationFacts)
    if facts is None:
        return
    off = [each for each in facts.distances if not _vanishes(each)]
    turned = [each for each in facts.turned if case.finished and abs(each.turned) < TURNED * abs(each.told)]
    if turned:
        yield _with_the_other_sign(facts, turned[0])
    elif off:
        yield _not_nought(facts, off[0])
    elif facts.distances:
        yield Holds(", ".join(f"{each.equal:.3g} for equal outputs, {each.line}" for each in facts.distances[:2]))
    else:
        yield NotApplicable("no evaluation compares outputs with a reference of their shape by distances alone")


def _vanishes(figure: DistanceFigure) -> bool:
    """Of a share that is explained the best is another."""
    room = max(NEARLY, BIAS / figure.rows) * max(abs(figure.apart), abs(figure.told))
    return abs(figure.equal) <= room or any(abs(figure.equal - best) <= ROUNDED * best for best in BEST_SHARES)


def _not_nought(facts: EvaluationFacts, figure: DistanceFigure) -> Finding:
    name = next((each.name for each in facts.numbers if each.line == figure.line), "what leaves torch here")
    return finding(
        "law.data.distances_vanish",
        "warning",
        max(1, facts.after),
        symptom=f"{name} would be {figure.equal:.4g} if the outputs were equal to what they are compared with; it is "
        f"{figure.told:.4g}, and {figure.apart:.4g} for the same output in each row",
        cause="a term of the distance is missing, has another sign or factor, or is a sum beside means",
        remedy="compute the figure of the reference against itself: it must be 0",
        sure=0.75,
        stage="loop",
        where=Where(source=figure.line),
        evidence=[("distance of equal outputs", figure.equal, 0.0), ("as it is told", figure.told)],
    )


def _with_the_other_sign(facts: EvaluationFacts, figure: TurnedFigure) -> Finding:
    name = next((each.name for each in facts.numbers if each.line == figure.line), "what leaves torch here")
    return finding(
        "law.data.distances_vanish",
        "warning",
        max(1, facts.after),
        symptom=f"{name} is {figure.told:.4g}, and would be {figure.turned:.4g} with the other sign of the outputs",
        cause="a sum of outputs and reference stands in place of their difference, or one of them has a sign too many",
        remedy="take the difference of what the model is trained to make alike",
        sure=0.85,
        stage="loop",
        where=Where(source=figure.line),
        evidence=[("distance as it is told", figure.told), ("with the other sign of the outputs", figure.turned)],
    )


def _is_average(name: str) -> bool:
    return not any(part.startswith(NO_AVERAGES) for part in re.split("[^a-z]+", name.lower()))


def _ranges_of(name: str, facts: EvaluationFacts) -> list[Computed]:
    """The averages over batches that it may be an average of; none where that cannot be told.

    A loss may be the sum of several losses.
    """
    name = name.lower()
    is_share = "acc" in name
    computed = [each for each in facts.computed if each.decided == is_share]
    if facts.arrays or not (is_share or "loss" in name):
        return []
    if is_share:
        return [each for each in computed if each.low >= 0 and each.high <= 1]
    by_line: dict[str | None, list[tuple[float, float]]] = {}
    for each in computed:
        by_line.setdefault(each.line, []).append((each.low, each.high))
    return computed if len(set(map(tuple, by_line.values()))) == 1 else []


def _is_in_any(value: float, computed: Sequence[Computed]) -> bool:
    return any(_is_in(number, each) for each in computed for number in (value, value / 100 if each.decided else value))


def _is_in(value: float, computed: Computed) -> bool:
    low, high = computed.low, computed.high
    least = LEAST if computed.decided else 0.0
    low, high = min(low / ROOM, low * ROOM) - least, max(high / ROOM, high * ROOM) + least
    return low <= value <= high


_CAUSE = "it is counted twice, divided by another number than was summed up, or has a factor or a sign too much"
_REMEDY = "set the sum to 0 once, add up losses times their number of rows, and divide by the number of all rows once"


def _off(facts: EvaluationFacts, name: str, value: float, nearest: Computed) -> Finding:
    what = "accuracy" if nearest.decided else "loss"
    return finding(
        "law.data.figures_are_averages",
        "warning",
        max(1, facts.after),
        symptom=f"{name} is {value:.4g} after an evaluation whose batches have a {what} of "
        f"{nearest.low:.4g} to {nearest.high:.4g}",
        cause=_CAUSE,
        remedy=_REMEDY,
        sure=0.8,
        stage="loop",
        where=Where(source=nearest.line),
        evidence=[(name, value, [nearest.low, nearest.high])],
    )


def _wrong(facts: EvaluationFacts, number: KeptNumber) -> Finding:
    """A warning where it is further off than the choice of the rows explains."""
    misleads = _deviation(number) > NOISE
    return finding(
        "law.data.figures_are_averages",
        "warning" if misleads else "info",
        max(1, facts.after),
        symptom=f"{number.name} is {number.value:.4g}, {number.wrong}; the mean of {number.of} over the rows of the "
        f"evaluation is {number.right:.4g} ± {number.noise:.2g}",
        cause=_CAUSE + "; or rows are left out, or the sum does not begin anew",
        remedy=_REMEDY,
        sure=0.85,
        stage="loop",
        where=Where(source=number.line),
        evidence=[(number.name, number.value, number.right), ("standard error over the rows", number.noise)],
    )
