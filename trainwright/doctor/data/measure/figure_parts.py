"""The numbers that left torch in an evaluation as parts of figures: sums over rows, divided by the number of rows."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import CodeType

from trainwright.recorder.escapes import Escape, Reduction


@dataclass(frozen=True)
class EscapeLine:
    """A line from which numbers left torch during a pass, and what they are of."""

    line: str | None
    function: str
    reduction: Reduction | None
    decided: bool
    over: int

    @property
    def is_count(self) -> bool:
        """Whether nothing of a model is in it, or decisions alone."""
        return self.reduction is None

    @property
    def words(self) -> str:
        return f"{self.function or 'what leaves torch'} at {self.line}"


EscapeLines = Mapping[EscapeLine, Sequence[Escape]]


def place_of(escape: Escape) -> EscapeLine:
    of = escape.origin
    if of is None:
        return EscapeLine(escape.line, "", None, False, escape.over)
    return EscapeLine(escape.line, of.function, of.reduction, of.decided, escape.over)


def by_place(escapes: Sequence[Escape]) -> EscapeLines:
    places: dict[EscapeLine, list[Escape]] = {}
    for each in escapes:
        places.setdefault(place_of(each), []).append(each)
    return places


def rows_of(escapes: Sequence[Escape], rows: Sequence[int]) -> list[int]:
    """The rows that the outputs are of which each number was made of; of no output, of the call before it."""
    return [
        sum(rows[call] for call in each.origin.calls) if each.origin is not None else rows[max(0, each.call - 1)]
        for each in escapes
    ]


@dataclass(frozen=True)
class FigureParts:
    """Numbers of a place as parts of a figure: it is the sum of ``terms`` over the sum of ``counts``.

    ``counted`` says what the counts are; where these left torch, ``divisor`` says from where. ``told``: the numbers as
    they left torch, made of so many ``elements``. ``of_batches``: they are not all of the same outputs, as those of
    several classes are.
    """

    place: EscapeLine
    counted: str
    told: tuple[float, ...]
    terms: tuple[float, ...]
    counts: tuple[float, ...]
    elements: int = 0
    divisor: str | None = None
    of_batches: bool = True

    @cached_property
    def figure(self) -> float:
        return math.fsum(self.terms) / math.fsum(self.counts)

    @cached_property
    def noise(self) -> float:
        """The standard error of the figure: of a ratio of sums over parts, or of a share."""
        whole, parts = math.fsum(self.counts), len(self.terms)
        between = math.fsum((t - self.figure * c) ** 2 for t, c in zip(self.terms, self.counts))
        error = math.sqrt(between * parts / max(1, parts - 1)) / whole
        if self.place.decided and 0.0 < self.figure < 1.0:
            return max(error, math.sqrt(self.figure * (1 - self.figure) / whole))
        return error


def readings(places: EscapeLines, place: EscapeLine, rows: Sequence[int]) -> Iterator[FigureParts]:
    """What the numbers of a place may be parts of: means are weighted, sums are divided, by each known count."""
    escapes = places[place]
    told = tuple(each.value for each in escapes)
    elements = sum(each.origin.count for each in escapes if each.origin is not None)
    of_batches = len({each.origin.calls for each in escapes if each.origin is not None}) > 1
    for counted, counts, divisor in _counts(places, place, rows):
        if min(counts) > 0 and all(map(math.isfinite, (*told, *counts))):
            if place.reduction != "mean":
                yield FigureParts(place, counted, told, told, counts, elements, divisor, of_batches)
            if place.reduction != "sum":
                terms = tuple(map(operator.mul, told, counts))
                yield FigureParts(place, counted, told, terms, counts, elements, divisor, of_batches)


def _counts(
    places: EscapeLines, place: EscapeLine, rows: Sequence[int]
) -> Iterator[tuple[str, tuple[float, ...], str | None]]:
    """What they are, and from where they left torch, if they did."""
    escapes = places[place]
    yield "rows", tuple(map(float, rows_of(escapes, rows))), None
    elements = tuple(float(each.origin.count) for each in escapes if each.origin is not None)
    if len(elements) == len(escapes):
        yield "elements", elements, None
    for other, values in places.items():
        if other is not place and other.over == place.over and len(values) == len(escapes):
            counts = tuple(each.value for each in values)
            if (other.is_count or other.decided) and all(each > 0 and each == int(each) for each in counts):
                yield f"what leaves at {other.line}", counts, other.words


def all_readings(places: EscapeLines, rows: Sequence[int]) -> list[FigureParts]:
    return [each for place in places if not place.is_count for each in readings(places, place, rows)]


def away_from(loop: CodeType | None, places: EscapeLines) -> set[EscapeLine]:
    """The lines that are not in the function ``loop``."""
    return {place for place, each in places.items() if all(one.code is not loop for one in each)}
