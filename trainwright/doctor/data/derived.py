"""Shares that a loop makes of several counts, as F1, Dice and intersection over union, recognised by their value."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from trainwright.doctor.data.facts import EvaluationFacts
from trainwright.doctor.data.share_names import is_named_share

BY_CHANCE = (0.5, 1.0)
"""Values that many figures have: by these alone it is not known which of them a name stands for."""
ROUNDED = 1e-5
"""Of a mean over a batch in float32."""
EXACT = 1e-9
"""Relative: what Python makes of whole numbers is recognised."""
MOST = 6
"""Counts of an evaluation: of more, some are equal to anything by chance."""
Count = tuple[float, float, float]
"""As it is, for perfect and for wrong predictions."""


@dataclass(frozen=True)
class Share:
    """A figure of decisions about single elements: as it was told, and for perfect and for wrong predictions.

    ``best``: 1 or 0 by its name, else None. ``is_exact``: it is 0 or 1 for perfect ones, to the last bit but rounding.
    """

    name: str
    line: str | None
    told: float
    perfect: float
    wrong: float
    best: float | None
    is_exact: bool

    @property
    def is_broken(self) -> bool:
        """Whether perfect predictions are not better than others, or do not give the best of an exact figure."""
        if self.best is None:
            stands = self.perfect == self.wrong == self.told
            return stands or (self.is_exact and min(abs(self.perfect), abs(self.perfect - 1.0)) > ROUNDED)
        sign = 1.0 if self.best else -1.0
        is_less = sign * (self.perfect - self.told) < -ROUNDED or sign * (self.perfect - self.wrong) <= ROUNDED
        return is_less or (self.is_exact and abs(self.perfect - self.best) > ROUNDED)


def derived_shares(facts: EvaluationFacts) -> Iterator[Share]:
    """Of the names of shares that are not known to be made of one count. It counts as right where it is not recognised,
    or may be made so that it is 1 for perfect predictions.
    """
    decided = [each for each in facts.decided if not each.is_mean and each.told == int(each.told)]
    counts = [(each.told, each.perfect, each.wrong) for each in decided] + [(n, n, n) for n in facts.counted]
    if not decided or len(counts) > MOST:
        return
    known = {each.name for each in facts.numbers}
    for name, value in facts.shares.items():
        if name not in known and value not in BY_CHANCE and is_named_share(name):
            forms = [each for each in _forms(counts) if math.isclose(each[0], value, rel_tol=EXACT)]
            is_right = not forms or any(abs(perfect - 1.0) <= ROUNDED for _, perfect, _ in forms)
            told, perfect, wrong = (value, 1.0, 0.0) if is_right else forms[0]
            yield Share(name, decided[0].line, told, perfect, wrong, 1.0, is_exact=True)


def _forms(counts: Sequence[Count]) -> Iterator[Count]:
    """Once or twice a count, over another one, over the sum of two, or over what these two have together."""
    for above in counts:
        others = [each for each in counts if each is not above]
        unions = [_added(one, other) for one, other in combinations(others, 2)]
        for below in (*others, *unions, *(_added(each, above, -1.0) for each in unions)):
            if min(below) > 0:
                yield from (_over(above, below, factor) for factor in (1.0, 2.0))


def _added(one: Count, other: Count, sign: float = 1.0) -> Count:
    return one[0] + sign * other[0], one[1] + sign * other[1], one[2] + sign * other[2]


def _over(above: Count, below: Count, factor: float) -> Count:
    return factor * above[0] / below[0], factor * above[1] / below[1], factor * above[2] / below[2]
