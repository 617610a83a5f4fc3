"""The law of what a figure of an evaluation can be, beside the losses of training."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trainwright.doctor.case import Case
from trainwright.doctor.data.facts import Computed, EvaluationFacts, LoopFiguresFacts, RowsFacts, TrainingAveragesFacts
from trainwright.doctor.finding import Finding, finding
from trainwright.doctor.law import Holds, NotApplicable, Verdict

KNOWS, KNOWS_MUCH, MANY = 0.8, 0.5, 64
"""Of the loss at chance: a model with less knows something, or much, of the classes; rows that tell chance from it."""
ENOUGH = 16
"""Losses of training to compare with."""
CERTAIN = 2.5
"""Standard errors that an accuracy is below chance."""
TWICE, BY_HEART = 2, 8
"""Passes over the data after which a model may be sure of its samples, and may know each by heart."""
BY_CHANCE = 1.25
"""Times the loss at chance: a first loss of a fresh model is less far from it."""
TOO_LARGE, TOO_SMALL = 20.0, 0.02
"""Times the losses of training: a model that is sure and wrong comes to several times chance; dropout, smoothing and
augmentation make training losses several times as large as those of an evaluation."""


def evaluation_is_possible(case: Case) -> Iterator[Verdict]:
    """What a loop calls a loss or an accuracy, and changes with its evaluations only, can be true beside the losses of
    training.
    """
    facts = case.newest(LoopFiguresFacts)
    losses = [each.loss for each in case.watched if math.isfinite(each.loss)]
    if facts is None or len(losses) < ENOUGH:
        return
    told = [(n, v) for n, v in zip(facts.names, facts.values) if math.isfinite(v)]
    of_losses = [each for each in told if _is_of_a_loss(each[0])] if min(losses) > 0.0 else []
    of_accuracies = [each for each in told if _is_of_an_accuracy(each[0])]
    beside = _beside(case, losses)
    wrong = [(*each, why) for each in of_losses if (why := _wrong_loss(*each, beside))]
    wrong += [(*each, "no share") for each in of_accuracies if not 0.0 <= each[1] <= 100.0]
    unlearned = [(*each, why) for each in of_losses if (why := _misled(each[1], beside))]
    unlearned += [
        (*each, why) for each in of_accuracies if (why := _wrong_accuracy(each[1], beside) or _blind(each[1], beside))
    ]
    if wrong or unlearned:
        yield _impossible(case, *(wrong or unlearned)[0], beside, is_sure=bool(wrong) or not _may_be_overfitted(beside))
    elif of_losses or of_accuracies:
        yield Holds(", ".join(f"{name} {value:.4g}" for name, value in (*of_losses, *of_accuracies)[:4]))
    else:
        yield NotApplicable("no local name of the loop holds a loss or an accuracy that changes with its evaluations")


@dataclass(frozen=True)
class Beside:
    """What a figure is judged by: the ``first`` losses of training and those of ``now``, and the ``classes`` of the
    loss (0: none).

    The evaluation reads so many ``rows``; ``recognised`` are the names of numbers that are known as means over them,
    ``share`` the mean of its decisions that are right (None: not known). Each row was trained on in ``passes``.
    """

    first: float
    now: float
    classes: int = 0
    rows: int = 0
    recognised: frozenset[str] = frozenset()
    share: float | None = None
    passes: float = 0.0

    @property
    def above_chance(self) -> float:
        """A share that is two standard errors better than chance."""
        chance = 1 / self.classes
        return chance + 2 * math.sqrt(chance * (1 - chance) / max(1, self.rows))


def _beside(case: Case, losses: Sequence[float]) -> Beside:
    evaluated, rows = case.newest(EvaluationFacts), case.newest(RowsFacts)
    training = case.newest(TrainingAveragesFacts)
    numbers = () if evaluated is None else evaluated.numbers
    of_training = () if training is None else training.numbers
    shares = [] if evaluated is None else [each for each in evaluated.computed if is_a_share(each)]
    return Beside(
        first=sum(losses[:4]) / 4,
        now=sum(losses[-16:]) / len(losses[-16:]),
        classes=_classes(case),
        rows=0 if evaluated is None else evaluated.rows,
        recognised=frozenset(
            [each.name for each in numbers if not each.wrong and not each.is_plain]
            + [each.name for each in of_training]
        ),
        share=(shares[0].low + shares[0].high) / 2 if shares else None,
        passes=rows.rows / max(1, rows.distinct) if rows is not None and rows.new_lately == 0.0 else 0.0,
    )


def is_a_share(computed: Computed) -> bool:
    """Whether it is of decisions that are right or wrong."""
    return computed.decided and computed.low >= 0.0 and computed.high <= 1.0


def _impossible(case: Case, name: str, value: float, why: str, beside: Beside, *, is_sure: bool) -> Finding:
    first, now = beside.first, beside.now
    return finding(
        "law.data.evaluation_is_possible",
        "warning" if is_sure else "info",
        case.last_step,
        symptom=f"{name} is {value:.4g} after an evaluation, which is {why} beside the losses of training: "
        f"{first:.4g} at first, {now:.4g} now",
        cause="the evaluation adds up or divides wrongly (a sum for a mean, a count twice or not at all, a sign), or "
        "prepares its data otherwise than training"
        if is_sure
        else "the model knows by heart what it was trained on, or the evaluation prepares its data otherwise",
        remedy="add up losses times their number of rows, and divide by the number of all rows once",
        sure=0.75 if is_sure else 0.5,
        stage="loop",
        evidence=[(name, value, [round(first, 4), round(now, 4)])],
    )


def _wrong_loss(name: str, value: float, beside: Beside) -> str:
    """What is wrong with a loss of an evaluation; "" for nothing. One that is known as a mean may lie elsewhere than
    those of training, which may be sums.
    """
    if value < 0.0:
        return "negative"
    if name in beside.recognised:
        return ""
    if value > TOO_LARGE * max(beside.first, beside.now):
        return "too large"
    return "too small" if value < TOO_SMALL * min(beside.first, beside.now) else ""


def _misled(value: float, beside: Beside) -> str:
    """Whether knowing nothing would be better, of a model that knows much of what it is trained on."""
    chance = math.log(beside.classes) if beside.classes > 1 else math.inf
    is_over_classes = chance / BY_CHANCE < beside.first < BY_CHANCE * chance
    is_misled = is_over_classes and beside.now < KNOWS_MUCH * chance and value > BY_CHANCE * chance
    return f"more than that of knowing nothing, {chance:.3g}," if is_misled else ""


def _may_be_overfitted(beside: Beside) -> bool:
    """Of samples that came again a model may be sure too early: its loss is large, and it still decides better than
    chance. If they came many times it may know these alone.
    """
    is_right = beside.share is not None and beside.classes > 1 and beside.share > beside.above_chance
    return (is_right and beside.passes >= TWICE) or beside.passes > BY_HEART


def _wrong_accuracy(value: float, beside: Beside) -> str:
    """A model that is surer than chance is not right more seldom than by chance. Above 1 an accuracy is in percent."""
    if beside.classes < 2 or beside.now >= KNOWS * math.log(beside.classes):
        return ""
    chance = 1 / beside.classes
    noise = math.sqrt(chance * (1 - chance) / beside.rows) if beside.rows else 0.0
    is_less = _share(value) < min(0.5 * chance, chance - CERTAIN * noise)
    return f"less than half of chance, {chance:.3g}," if is_less else ""


def _blind(value: float, beside: Beside) -> str:
    """An accuracy of a model that knows much of what it is trained on is better than chance."""
    if beside.classes < 2 or beside.rows < MANY or beside.now >= KNOWS_MUCH * math.log(beside.classes):
        return ""
    is_blind = _share(value) < beside.above_chance
    return f"no better than chance, {1 / beside.classes:.3g}," if is_blind else ""


def _share(accuracy: float) -> float:
    return accuracy if accuracy <= 1.0 else accuracy / 100.0


def _classes(case: Case) -> int:
    """The number of classes of the loss; 0 where there is no such number."""
    return next((int(each.values["classes"]) for each in case.outcomes("batch") if each.values.get("classes")), 0)


def _is_of_a_loss(name: str) -> bool:
    words = name.lower()
    return "loss" in words and not any(other in words for other in ("scale", "weight", "coef", "total", "sum", "best"))


def _is_of_an_accuracy(name: str) -> bool:
    """``val_acc``, ``accuracy``, ``top1_acc``, and none that accumulates or accepts something."""
    parts = re.split("[^a-z]+", name.lower())
    return "loss" not in name.lower() and any(part.startswith("accura") or part.endswith("acc") for part in parts)
