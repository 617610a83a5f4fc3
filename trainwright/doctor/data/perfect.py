"""The law of perfect predictions: what counts right decisions is at its best for those that the loss calls perfect."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence

from trainwright.doctor.case import Case
from trainwright.doctor.data.derived import BY_CHANCE, ROUNDED, Share, derived_shares
from trainwright.doctor.data.facts import DecidedFigure, EvaluationFacts, KeptNumber
from trainwright.doctor.data.share_names import is_named_share
from trainwright.doctor.finding import Finding, finding
from trainwright.doctor.law import Holds, NotApplicable, Verdict
from trainwright.runlog.records import Where

TWICE = 2
"""Evaluations: what is made of small whole numbers may be equal to something else in one of them."""
SMOOTH = 1e-3
"""Of a share whose divisor has a constant, as eps, in it."""
RIGHT, WRONG = ("right", "correct", "hit", "acc", "match"), ("wrong", "incorrect", "err", "miss", "mistake")
"""What a part of the name begins with that counts what is right, and what is wrong."""


def perfect_predictions_are_right(case: Case) -> Iterator[Verdict]:
    """An accuracy is 1 for the predictions that the loss of the same evaluation calls perfect."""
    every = [facts for _, facts in reversed(case.every(EvaluationFacts))]
    if not every:
        return
    facts, known = next(((each, of) for each in every if (of := _of_perfect(each))), (every[0], []))
    off = [each for each in known if not _is_best(*each)]
    shares = [each for one in every for each in _shares(one)]
    made = [each for one in every for each in derived_shares(one)]
    bad = _always_broken(shares) or (_always_broken(made) if len({each.told for each in made}) >= TWICE else None)
    counted = [each for one in every for each in one.decided if _counts_right(each)]
    elsewhere = next((each for each in counted if each.is_elsewhere), None)
    unseen = next((each for each in counted if _knows_no_target(each)), None)
    if off:
        yield _not_best(facts, *off[0])
    elif bad is not None:
        yield _not_best_share(facts, bad)
    elif elsewhere is not None:
        yield _elsewhere(facts, elsewhere)
    elif unseen is not None:
        yield _unseen(facts, unseen)
    elif known:
        yield Holds(", ".join(f"{number.name} of perfect predictions is {best:g}" for number, _, best in known[:2]))
    elif shares:
        yield Holds(", ".join(f"{each.name} of perfect predictions is {each.perfect:.4g}" for each in shares[:2]))
    else:
        yield NotApplicable("no evaluation computes both a figure of decisions that the loop has, and their loss")


def _of_perfect(facts: EvaluationFacts) -> list[tuple[KeptNumber, DecidedFigure, float]]:
    """The accuracies of an evaluation, and what each would be. One of 0 is not recognised among the loop's numbers."""
    kept = {(each.of, each.over): each for each in facts.numbers if each.decided and not each.wrong and each.whole}
    judged = [(kept[each.of, each.over], each) for each in facts.decided if (each.of, each.over) in kept]
    return [
        (number, each, _averaged(each.perfect, each, number))
        for number, each in judged
        if not each.asks
        and ("acc" in number.name.lower() or each.compared or _counts_right(each) is not None or _is_share(number))
        and (each.perfect != each.told or each.wrong != each.told)
    ]


def _averaged(value: float, decided: DecidedFigure, number: KeptNumber) -> float:
    """A sum over the rows, or over the numbers that left torch where these were shares already."""
    as_shares, as_sums = (abs(decided.told / by - number.right) for by in (decided.times, number.whole))
    return value / (decided.times if decided.is_mean or as_shares < as_sums else number.whole)


def _is_share(number: KeptNumber) -> bool:
    """Whether it is named as a share of its own kind (F1, IoU, recall), of which a plain sum may be on its way."""
    is_told = number.is_sum or (not number.is_plain and _is_straight(number))
    return is_told and is_named_share(number.name)


def _counts_right(decided: DecidedFigure) -> bool | None:
    """Whether decisions are added to a variable that is named for what is right, or for what is wrong; else None."""
    return counts_right(decided.sum_name)


def counts_right(name: str) -> bool | None:
    """Whether a variable is named for what is right, or for what is wrong; else None."""
    parts = re.split("[^a-z]+", name.lower())
    is_right, is_wrong = (any(part.startswith(words) for part in parts if part) for words in (RIGHT, WRONG))
    return is_right if is_right != is_wrong else None


def _knows_no_target(decided: DecidedFigure) -> bool:
    """Whether no target has a rank that counts, with the largest score of all either."""
    return decided.asks == "rank" and decided.told == decided.perfect == decided.wrong == 0.0


def _is_best(number: KeptNumber, decided: DecidedFigure, best: float) -> bool:
    """Where no name says so it is not known whether it counts what is right or what is wrong."""
    counts_right = True if "acc" in number.name.lower() else _counts_right(decided)
    is_of_classes = decided.is_mean and number.elements < number.whole  # as a balanced accuracy
    if counts_right is not None and not (counts_right and is_of_classes):
        return abs(best - counts_right) <= ROUNDED
    if is_of_classes or _is_share(number):
        return _is_best_share(number, decided)
    worst = _averaged(decided.wrong, decided, number)
    return any(abs(best - each) <= ROUNDED and abs(worst - 1.0 + each) <= ROUNDED for each in (0.0, 1.0))


def _is_best_share(number: KeptNumber, decided: DecidedFigure) -> bool:
    """Whether perfect predictions have the largest share there is, in each class that is there.

    A mean over classes counts one without samples as 0, and a constant in a divisor makes it a little less.
    """
    told, best = decided.told, decided.perfect
    if not number.is_sum:
        told, best = _averaged(told, decided, number), _averaged(best, decided, number)
    parts = max(1, number.elements if decided.is_mean else 1)
    present = best * parts / (1.0 if best <= 1.0 + SMOOTH else 100.0)
    is_whole = abs(present - round(present)) <= SMOOTH * parts
    return is_whole and 0.0 < present <= parts * (1.0 + SMOOTH) and told <= best * (1.0 + SMOOTH)


def _not_best(facts: EvaluationFacts, number: KeptNumber, decided: DecidedFigure, best: float) -> Finding:
    worst = _averaged(decided.wrong, decided, number)
    return finding(
        "law.data.perfect_predictions_are_right",
        "warning",
        max(1, facts.after),
        symptom=f"{number.name} would be {best:.4g} if every prediction were perfect by the loss of the same "
        f"evaluation, and {worst:.4g} if every one were wrong",
        cause="the decisions are taken along another axis than that of the classes, or compared with other targets "
        "than the loss is; or what the loss leaves out (padding) is counted",
        remedy="outputs.argmax(over the classes) == targets, with the targets and the mask of the loss",
        sure=0.85,
        stage="loop",
        where=Where(source=decided.line),
        evidence=[("accuracy of perfect predictions", best, 1.0), ("accuracy of wrong ones", worst, 0.0)],
    )


def _always_broken(shares: Sequence[Share]) -> Share | None:
    """Another figure may be equal to one by chance, but not in each evaluation."""
    by_name: dict[str, list[Share]] = {}
    for each in shares:
        by_name.setdefault(each.name, []).append(each)
    return next((of[0] for of in by_name.values() if all(each.is_broken for each in of)), None)


def _shares(facts: EvaluationFacts) -> Iterator[Share]:
    """Those that compare decisions with targets, as sums over what they are divided by."""
    decided = {(each.of, each.over): each for each in facts.decided if each.asks}
    for number in facts.numbers:
        each, divisor = decided.get((number.of, number.over)), decided.get((number.divisor or "", number.over))
        if each is None or each.asks == "none" or number.wrong or not (number.decided and number.whole):
            continue
        tried = [_divided(of, each, divisor, number) for of in ("told", "perfect", "wrong")]
        named = is_named_share(number.name)
        if not all(map(math.isfinite, tried)) or (divisor is None and each.asks == "overlap" and not named):
            continue
        best = 1.0 if named and _is_straight(number) and number.right not in BY_CHANCE else None
        if best is None and each.asks != "overlap" and (counts_right := _counts_right(each)) is not None:
            best = float(counts_right)
        if best is None and each.asks == "rank":
            continue
        is_exact = each.is_exact and (divisor is None or divisor.is_exact)
        yield Share(number.name, each.line, tried[0], tried[1], tried[2], best, is_exact)


def _divided(of: str, each: DecidedFigure, divisor: DecidedFigure | None, number: KeptNumber) -> float:
    """The sum over what divides it, or the mean of numbers that were shares when they left torch."""
    value: float = getattr(each, of)
    told_by, by = (number.whole, number.whole) if divisor is None else (divisor.told, getattr(divisor, of))
    if each.is_mean or not math.isclose(each.told, told_by * number.right, rel_tol=1e-6):
        by = each.times
    return value / by if by else math.nan


def _is_straight(number: KeptNumber) -> bool:
    """Whether it is the share itself, or that in percent, and not what is left of 1."""
    return any(math.isclose(number.value, factor * number.right, rel_tol=1e-6) for factor in (1.0, 100.0))


def _not_best_share(facts: EvaluationFacts, share: Share) -> Finding:
    return finding(
        "law.data.perfect_predictions_are_right",
        "warning",
        max(1, facts.after),
        symptom=f"{share.name} is {share.told:.4g}; it would be {share.perfect:.4g} if every prediction were perfect "
        f"by the loss of the same evaluation, and {share.wrong:.4g} if every one were wrong",
        cause="a threshold, a comparison or a mask is turned round in it, or one of its sums is of other elements",
        remedy="compute the figure of the targets themselves in place of the decisions: it must be 1",
        sure=0.85,
        stage="loop",
        where=Where(source=share.line),
        evidence=[("figure of perfect predictions", share.perfect, 1.0), ("of wrong ones", share.wrong, 0.0)],
    )


def _elsewhere(facts: EvaluationFacts, decided: DecidedFigure) -> Finding:
    return finding(
        "law.data.perfect_predictions_are_right",
        "warning",
        max(1, facts.after),
        symptom=f"what is added to {decided.sum_name} is 0, and would be so for perfect and for wrong predictions "
        "where the loss counts them",
        cause="decisions are counted where the loss leaves them out (padding): a mask or a condition is turned round",
        remedy="count decisions where targets are other than the ignore_index of the loss",
        sure=0.85,
        stage="loop",
        where=Where(source=decided.line),
        evidence=[("decisions that are counted as right", 0.0, None)],
    )


def _unseen(facts: EvaluationFacts, decided: DecidedFigure) -> Finding:
    return finding(
        "law.data.perfect_predictions_are_right",
        "warning",
        max(1, facts.after),
        symptom=f"what is added to {decided.sum_name} is 0, and would be if each target had the largest score of all",
        cause="the targets are among the candidates that are put away (what was seen in training), or their rank is "
        "compared with a bound that none can reach",
        remedy="leave the target of each row among its candidates; look at the score that is read for it",
        sure=0.85,
        stage="loop",
        where=Where(source=decided.line),
        evidence=[("targets that count with the largest scores", decided.perfect, None)],
    )
