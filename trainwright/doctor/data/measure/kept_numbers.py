"""How a number that a loop has after an evaluation was made of the numbers that left torch in it.

A figure is a sum over rows divided by the number of rows. Python computes with float64, so a number is recognised by
its value: as such a figure, or as one of which a part is another.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from trainwright.doctor.data.facts import KeptNumber
from trainwright.doctor.data.measure.figure_parts import EscapeLine, FigureParts

EXACT = 1e-9
"""Relative: what was made of some numbers is recognised."""
LOGGED = "log."
"""What the names of those numbers begin with that the loop has told on purpose."""
Key = tuple[str | None, int]
"""A line, and a pass over data."""
SHARED = ("loss", "acc")
"""A number with such a name is meant as an average, and has no factor of its own."""


@dataclass(frozen=True)
class Form:
    """A value that a loop may make of a reading. ``wrong`` says what is; empty: nothing.

    ``is_plain``: one of the numbers that left torch, or their sum: it may be on its way to a figure. ``is_factor``: a
    figure times a number that may be meant. ``is_negated``: a figure with the other sign. ``is_sum``: the sum over all
    rows. ``rest``: the figure of the rows that are not in it; where that is kept as well, there were two evaluations.
    """

    reading: FigureParts
    value: float
    wrong: str = ""
    is_plain: bool = False
    is_factor: bool = False
    is_negated: bool = False
    is_sum: bool = False
    rest: float = 0.0


def _right(reading: FigureParts) -> Iterator[Form]:
    figure = reading.figure
    yield Form(reading, figure)
    yield Form(reading, 100 * figure)
    yield Form(reading, -figure, is_negated=True)
    yield Form(reading, 1.0 - figure)
    if reading.place.decided:
        yield Form(reading, 100 * (1.0 - figure))
        return
    yield Form(reading, figure / math.log(2))
    yield Form(reading, math.sqrt(abs(figure)))
    if figure < 100:
        yield Form(reading, math.exp(figure))
    if reading.place.reduction != "sum" and _are_alike(reading.counts):
        yield Form(reading, math.fsum(reading.told) / len(reading.told))


def _are_alike(counts: Sequence[float]) -> bool:
    return min(counts) == max(counts)


def _plain(reading: FigureParts) -> Iterator[Form]:
    more = len(reading.told) > 1
    total = math.fsum(reading.told)
    wrong = "the sum over the batches, divided by nothing" if more and reading.place.reduction == "mean" else ""
    yield Form(reading, total, wrong, is_plain=True, is_sum=reading.place.reduction == "sum")
    of_rows = "the sum over its rows, divided by nothing" if more and reading.place.reduction == "mean" else ""
    yield Form(reading, math.fsum(reading.terms), of_rows, is_plain=True)
    for place, value in enumerate(reading.told):
        is_mean, is_last = more and reading.place.reduction == "mean", place == len(reading.told) - 1
        yield Form(reading, value, _LAST if is_mean and is_last else "", is_plain=True)
    for value in reading.terms:
        yield Form(reading, value, is_plain=True)


def _wrong(reading: FigureParts) -> Iterator[Form]:
    """Sums of which a batch is left out or there twice, over each number that is no number of rows; and the like."""
    if not reading.of_batches and len(reading.told) > 1:
        return
    terms, counts, told = reading.terms, reading.counts, reading.told
    whole, batches = math.fsum(counts), float(len(told))
    total = math.fsum(terms)
    if batches > 1:
        yield Form(reading, math.fsum(t / c for t, c in zip(terms, counts)) / batches, _MEANS)
        for which, place in (("last", -1), ("first", 0)):
            alone = terms[place] / counts[place]
            others = (total - terms[place]) / (whole - counts[place])
            yield Form(reading, alone, _LAST if which == "last" else "of the first batch alone", rest=others)
            yield Form(reading, others, f"without its {which} batch", rest=alone)
    sums = {"the sum over its rows": total, "the sum over its batches": math.fsum(told)}
    if batches > 1:
        sums |= {"what its last batch adds": terms[-1], "what its first batch adds": terms[0]}
        sums |= {"the number of its last batch": told[-1], "the number of its first batch": told[0]}
        sums |= {"the sum without its last batch": total - terms[-1], "that without its first": total - terms[0]}
    over = {f"its {reading.counted}, {whole:g}": whole, f"its batches, {batches:g}": batches}
    over |= {f"its {reading.counted} times its batches, {whole * batches:g}": whole * batches}
    over |= {f"{whole + more:g}, {more:+d} than its {reading.counted}": whole + more for more in (-1, 1)}
    over |= {f"{batches + more:g}, {more:+d} than its batches": batches + more for more in (-1, 1)}
    if batches > 1:
        over |= {f"the {reading.counted} of its last batch, {counts[-1]:g}": counts[-1]}
        over |= {f"the {reading.counted} of its first batch, {counts[0]:g}": counts[0]}
        over |= {f"its {reading.counted} without the last batch, {whole - counts[-1]:g}": whole - counts[-1]}
        over |= {f"full batches, {batches * max(counts):g}": batches * max(counts)}
    for what, value in sums.items():
        for by, divisor in over.items():
            if divisor > 0:
                yield Form(reading, value / divisor, f"{what} over {by}")
    yield Form(reading, 2 * reading.figure, "twice the mean over its rows", is_factor=True)
    yield Form(reading, reading.figure / 2, "half of the mean over its rows", is_factor=True)


_SUM = "the sum over its rows"
_LAST = "of the last batch alone"
_MEANS = "a mean of batches that are not alike, each of the same weight"


@dataclass
class Course:
    """How a number has stood to a reading in the evaluations so far: its ratio, and what is added to its sum."""

    figures: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    added: list[float] = field(default_factory=list)

    def note(self, value: float, reading: FigureParts) -> str:
        """Returns what is wrong where the ratio or the addend has stood still while the figure changed."""
        whole, before = math.fsum(reading.counts), len(self.figures)
        figure = reading.figure
        self.figures.append(figure)
        self.ratios.append(value / figure if figure else math.nan)
        self.added.append(value * whole - figure * whole)
        seen = 3 if reading.place.decided else 2
        if before < seen - 1 or len(set(self.figures[-seen:])) < 2:
            return ""
        if _stand(self.ratios[-seen:], 1.0):
            return f"{self.ratios[-1]:.6g} times the mean over its {reading.counted}"
        if _stand(self.added[-seen:], abs(figure) * whole) and not reading.place.decided:
            return f"{self.added[-1]:.6g} is added to its sum"
        return ""


def _stand(values: Sequence[float], scale: float) -> bool:
    return all(math.isfinite(each) and abs(each - values[0]) <= 1e-8 * max(scale, 1e-30) for each in values)


class Forms:
    """Forms in the order in which they are preferred, to be found by their value."""

    def __init__(self, forms: Sequence[Form]) -> None:
        self._forms = forms
        self._order = sorted(range(len(forms)), key=lambda place: forms[place].value)
        self._values = [forms[place].value for place in self._order]

    def like(self, value: float) -> Form | None:
        """The first that has this value."""
        room = EXACT * abs(value)
        found = self._order[bisect_left(self._values, value - room) : bisect_right(self._values, value + room)]
        return self._forms[min(found)] if found else None


class KeptNumbers:
    """Reads one evaluation after the other, and remembers what was seen of each number."""

    def __init__(self) -> None:
        self._courses: dict[tuple[str, str | None, str], Course] = {}
        self._sums: dict[tuple[str | None, str], tuple[float, float]] = {}
        self._words: dict[str, str] = {}
        self._right: dict[str, str | None] = {}

    def read(
        self,
        numbers: Mapping[str, float],
        before: Mapping[str, float],
        known: Sequence[FigureParts],
        away: Set[EscapeLine] = frozenset(),
        *,
        is_over: bool = True,
    ) -> list[KeptNumber]:
        """What each number is. ``away`` are lines in other functions than the one that has the numbers.

        Where the evaluation is not over, more of them may come.
        """
        groups = [
            Forms([form for each in known for form in _right(each)]),
            Forms([form for each in known for form in _plain(each)]),
            Forms([form for each in known for form in (*_wrong(each), *self._carried(each))]),
        ]
        new = [name for name, value in numbers.items() if before.get(name) != value and value and math.isfinite(value)]
        forms = {name: self._form(name, numbers[name], groups, away) for name in new}
        settled = {_key(form) for form in forms.values() if form is not None and not (form.wrong or form.is_plain)}
        whole = {value for value in numbers.values() if type(value) is int}
        values = [numbers[name] for name in forms]
        kept = []
        for name in new:
            form = forms.get(name)
            if form is None and is_over and type(numbers[name]) is float:
                may_be = known if is_meant(name) else [each for each in known if _is_returned(name, each, away)]
                form = self._course(name, numbers[name], may_be, settled)
            if form is not None and form.is_plain and not name.startswith(LOGGED):
                is_on_its_way = form.reading.place not in away or _divisors(form) & whole
                form = replace(form, wrong="") if is_on_its_way else form
            if form is not None and form.is_sum:
                is_counted = form.reading.elements in _counts_beside(name, numbers)
                form = replace(form, is_sum=form.reading.place in away and not is_counted)
            if form is not None and form.rest and any(math.isclose(form.rest, each, rel_tol=EXACT) for each in values):
                form = replace(form, wrong="")
            if form is not None and _key(form) in settled:
                form = replace(form, wrong="")
            if form is not None and self._is_sure(name, form):
                kept.append(_kept(name, numbers[name], form))
        if is_over:
            heard = {_key(form)[0] for form in forms.values() if form is not None}
            kept += self._left_behind(numbers, known, heard)
            self.add_up(known)
        self._right |= {
            name: _key(form)[0] for name, form in forms.items() if form is not None and _key(form) in settled
        }
        return kept

    def _left_behind(
        self, numbers: Mapping[str, float], known: Sequence[FigureParts], heard: set[str | None]
    ) -> Iterator[KeptNumber]:
        """Figures of the evaluation before, where nothing is kept of what the same line has computed in this one."""
        for name, line in self._right.items():
            parts = [each for each in known if each.place.line == line]
            value = numbers.get(name, 0.0)
            if (
                value
                and parts
                and line not in heard
                and Forms([f for p in parts for f in _right(p)]).like(value) is None
            ):
                yield _kept(name, value, Form(parts[0], value, "as an evaluation before has left it"))

    def _form(self, name: str, value: float, groups: Sequence[Forms], away: Set[EscapeLine]) -> Form | None:
        found = next((each for group in groups if (each := group.like(value)) is not None), None)
        if type(value) is int:  # many are equal by chance: a sum of decisions is none where it comes again
            return found if found is not None and found.is_sum and found.reading.place.decided else None
        if found is None or not found.is_factor or is_meant(name) or _is_returned(name, found.reading, away):
            return found
        return None

    def _course(self, name: str, value: float, known: Sequence[FigureParts], settled: set[Key]) -> Form | None:
        """What of it has stood still over several evaluations."""
        alike = [replace(each, counted="batches", terms=each.told, counts=(1.0,) * len(each.told)) for each in known]
        for each in (*known, *alike):
            course = self._courses.setdefault((name, each.place.line, each.counted), Course())
            wrong = course.note(value, each)
            if wrong and (each.place.line, each.place.over) not in settled:
                return Form(each, value, wrong, is_factor=not each.place.decided)
        return None

    def _is_sure(self, name: str, form: Form) -> bool:
        """Of small whole numbers others may be made by chance, but not twice in the same way."""
        words = re.sub(r"[0-9.]+", "", form.wrong or _SUM * form.is_sum)
        seen, self._words[name] = self._words.get(name, ""), words
        return not words or seen == words or not form.reading.place.decided

    # sums that are not begun anew

    def _carried(self, reading: FigureParts) -> Iterator[Form]:
        terms, counts = self._sums.get((reading.place.line, reading.counted), (0.0, 0.0))
        if terms:
            total, whole = terms + math.fsum(reading.terms), math.fsum(reading.counts)
            yield Form(reading, total / whole, _CARRIED)
            yield Form(reading, total / (whole + counts), _CARRIED)

    def add_up(self, known: Sequence[FigureParts]) -> None:
        """What is begun next may go on with these sums."""
        for each in known:
            key = each.place.line, each.counted
            terms, counts = self._sums.get(key, (0.0, 0.0))
            self._sums[key] = terms + math.fsum(each.terms), counts + math.fsum(each.counts)


_CARRIED = "with what the evaluations before it have summed up"


def is_meant(name: str) -> bool:
    """Whether it is named as a loss or an accuracy."""
    return any(word in name.lower() for word in SHARED)


def _is_returned(name: str, reading: FigureParts, away: Set[EscapeLine]) -> bool:
    """Whether another function has averaged a loss: what it returns is a figure under any name, but not what it has put
    into a list of an object, where factors are its own.
    """
    return (
        not re.search(r"\..*\[", name)
        and reading.place in away
        and reading.place.reduction == "mean"
        and not reading.place.decided
    )


def _key(form: Form) -> Key:
    return form.reading.place.line, form.reading.place.over


def _counts_beside(name: str, numbers: Mapping[str, float]) -> set[float]:
    """The whole numbers in variables of their own, and those in what holds the number: no sizes of other objects."""
    root = name.partition(".")[0]
    return {n for other, n in numbers.items() if type(n) is int and other.partition(".")[0] in (root, other)}


def _divisors(form: Form) -> set[float]:
    return {float(len(form.reading.told)), math.fsum(form.reading.counts)}


def _kept(name: str, value: float, form: Form) -> KeptNumber:
    reading = form.reading
    return KeptNumber(
        name=name,
        value=value,
        of=reading.place.words,
        line=reading.place.line,
        is_plain=form.is_plain,
        wrong=form.wrong,
        decided=reading.place.decided,
        is_factor=form.is_factor,
        is_negated=form.is_negated,
        is_sum=form.is_sum,
        elements=reading.elements,
        right=reading.figure,
        whole=math.fsum(reading.counts),
        noise=reading.noise,
        divisor=reading.divisor,
        over=reading.place.over,
    )
