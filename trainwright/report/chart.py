"""Charts without a plotting library: self-contained SVG of lines, bars and parallel axes, and line charts as text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Literal
from xml.sax.saxutils import escape, quoteattr

# The background is transparent, so every colour must be readable on white and on black: a contrast of at least 3
# (4.5 for text) on either. tests/report/test_chart.py computes it.
INK = "#767676"
PALETTE = ("#1f7fd0", "#cf5f1a", "#1f8f4e", "#9a5fd6", "#d0455f", "#0f8a94")
SANS = "system-ui, sans-serif"
TITLE = 'font-size="15" font-weight="600"'


def root(width: float, height: float, title: str, *, font: str = SANS, size: int = 12, fixed: bool = False) -> str:
    """Return the opening tag of a stand-alone <svg> element. ``fixed``: shown at its size, not scaled to the page."""
    pixels = f' width="{width}" height="{height}"' if fixed else ""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"{pixels} role="img" '
        f'font-family="{font}" font-size="{size}" aria-label={quoteattr(printable(title))}>'
    )


def text(x: float, y: float, words: str, attributes: str = "", *, color: str = INK) -> str:
    """Return a <text> element at (x, y), with further ``attributes``."""
    more = f" {attributes}" if attributes else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{color}"{more}>{escape(printable(words))}</text>'


def printable(words: str) -> str:
    """Replace control characters and lone surrogates, which XML does not allow even when escaped."""
    return "".join(c if c.isprintable() else " " for c in words)


_MAX_ABS = 1e250  # beyond this (or, on a log axis, below its inverse) a range plus its margin may overflow


@dataclass(frozen=True)
class Axis:
    """The range of one axis: ``low < high``; both above 0 when ``log``."""

    low: float
    high: float
    log: bool = False

    @classmethod
    def around(cls, values: Iterable[float], *, log: bool = False, margin: float = 0.0) -> Axis:
        """Return the axis that covers all finite ``values``, with ``margin`` (a fraction of the range) at both ends."""
        shown = [value for value in values if _can_be_shown(value, log)]
        if not shown:
            return cls(0.1, 10.0, True) if log else cls(0.0, 1.0)
        low, high = min(shown), max(shown)
        if log:
            decades = math.log10(high) - math.log10(low)
            room = decades * margin if decades > 1e-3 else 0.5
            return cls(low * 10**-room, high * 10**room, True)
        if high - low > max(1e-9 * max(abs(low), abs(high)), 1 / _MAX_ABS):
            room = (high - low) * margin
        else:  # flat: the line runs through the middle
            room = abs(high) * 0.1 if abs(high) > 1e-240 else 1.0
        return cls(low - room, high + room)

    def position(self, value: float) -> float | None:
        """Return the position of ``value``: 0 at ``low``, 1 at ``high``; None if it has no position (NaN, log of 0)."""
        if not _can_be_shown(value, self.log):
            return None
        if self.log:
            low = math.log(self.low)
            return (math.log(value) - low) / (math.log(self.high) - low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self, about: int = 8) -> list[float]:
        if not self.log:
            return _round_numbers(self.low, self.high, about)
        first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
        if last - first >= 2:
            every = math.ceil((last - first + 1) / about)
            return [10.0**exponent for exponent in range(first, last + 1, every)]
        near = [m * 10.0**e for e in range(first - 1, last + 1) for m in (1, 2, 5)]
        inside = [value for value in near if self.low <= value <= self.high]
        return inside if len(inside) >= 2 else _round_numbers(self.low, self.high, about)

    def label(self, value: float, digits: int = 6) -> str:
        """Format ``value`` with ``digits`` significant digits, or more if the ends of the axis would look equal."""
        if not self.log:
            largest = max(abs(self.low), abs(self.high))
            digits = min(max(digits, math.ceil(math.log10(largest / (self.high - self.low))) + 2), 15)
        return f"{value:.{digits}g}"


def _can_be_shown(value: float, log: bool) -> bool:
    return abs(value) < _MAX_ABS and (value > 1 / _MAX_ABS or not log)  # NaN compares as false


def _round_numbers(low: float, high: float, about: int) -> list[float]:
    """Return multiples of 1, 2 or 5 times a power of ten (P. Heckbert, Nice numbers for graph labels, 1990)."""
    power = 10.0 ** math.floor(math.log10((high - low) / about))
    step = next(power * m for m in (1, 2, 5, 10) if (high - low) / (power * m) <= about)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{number * step:.12g}") for number in range(first, last + 1)]


_WIDTH, _HEIGHT = 720, 400
# plot area, in SVG units
_LEFT = 76
_RIGHT = 704
_TOP = 44
_BOTTOM = 340
_DASHES = ("", "7 3", "2 3")  # a seventh series gets the first colour again, dashed


@dataclass(frozen=True)
class Series:
    """One line. NaN, infinity and non-positive values on a log axis leave a gap. ``x`` and ``y`` have equal length."""

    name: str
    x: Sequence[float]
    y: Sequence[float]


@dataclass(frozen=True)
class Mark:
    """A straight line across the chart, at ``value`` of ``axis``, with a label."""

    axis: Literal["x", "y"]
    value: float
    label: str = ""


Point = tuple[float, float]


def line_chart_svg(
    series: Sequence[Series],
    *,
    title: str,
    x_label: str,
    y_label: str,
    marks: Sequence[Mark] = (),
    log_x: bool = False,
    log_y: bool = False,
) -> str:
    """Return a chart as one <svg> element, for a file or a page, light or dark."""
    x_axis, y_axis = _axes(series, marks, log_x, log_y, margin=0.05)
    parts = [
        root(_WIDTH, _HEIGHT, title),
        text(_LEFT, 20, title, TITLE),
        *_grid(x_axis, y_axis),
        text((_LEFT + _RIGHT) / 2, _HEIGHT - 24, x_label, 'text-anchor="middle"'),
        text(
            16, (_TOP + _BOTTOM) / 2, y_label, f'text-anchor="middle" transform="rotate(-90 16 {(_TOP + _BOTTOM) / 2})"'
        ),
        *(line for mark in marks for line in _mark(mark, x_axis, y_axis)),
        *(line for number, one in enumerate(series) for line in _line(one, number, x_axis, y_axis)),
        *(_legend(series) if len(series) > 1 else ()),
    ]
    if not any(list(_runs(one, x_axis, y_axis)) for one in series):
        parts.append(text((_LEFT + _RIGHT) / 2, (_TOP + _BOTTOM) / 2, "no finite values", 'text-anchor="middle"'))
    return "\n".join([*parts, "</svg>"]) + "\n"


def line_chart_text(
    series: Sequence[Series],
    width: int = 72,
    height: int = 16,
    *,
    marks: Sequence[Mark] = (),
    log_x: bool = False,
    log_y: bool = False,
) -> str:
    """Return a chart for a terminal, ``width`` x ``height`` characters in total, in Braille: 2 x 4 dots per character.

    All lines look alike, so only the first series is drawn as a line, and the others as points. ``marks`` must be on
    the x axis. Each mark is an arrow in its own row below the chart.
    """
    x_axis, y_axis = _axes(series, marks, log_x, log_y, margin=0.0)
    rows = max(height - 2 - len(marks), 2)
    labels = {rows - 1: y_axis.label(y_axis.low, 3), 0: y_axis.label(y_axis.high, 3)}
    margin = max(map(len, labels.values()))
    columns = max(width - margin - 2, 8)
    dots: set[tuple[int, int]] = set()
    for number, one in enumerate(series):
        for run in _runs(one, x_axis, y_axis):
            pixels = [(round(x * (columns * 2 - 1)), round((1 - y) * (rows * 4 - 1))) for x, y in run]
            dots.update(pixels if number else _connect(pixels))
    lines = [f"{labels.get(row, ''):>{margin}} │{_braille(dots, row, columns)}" for row in range(rows)]
    left, right = x_axis.label(x_axis.low, 3), x_axis.label(x_axis.high, 3)
    lines.append(" " * margin + " └" + "─" * columns)
    lines.append(" " * (margin + 2) + left + right.rjust(columns - len(left)))
    lines += [" " * (margin + 2) + _arrow(mark, x_axis, columns) for mark in marks]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _arrow(mark: Mark, axis: Axis, columns: int) -> str:
    """Return an arrow at the position of ``mark`` with its label, on the side that has room."""
    at = axis.position(mark.value)
    if at is None:
        return ""
    place = round(at * (columns - 1))
    if place + len(mark.label) + 2 <= columns:
        return " " * place + f"↑ {mark.label}"
    return f"{mark.label} ↑".rjust(place + 1)


def _axes(
    series: Sequence[Series], marks: Sequence[Mark], log_x: bool, log_y: bool, *, margin: float
) -> tuple[Axis, Axis]:
    everything = (Axis(0.5, 1.0, log_x), Axis(0.5, 1.0, log_y))
    points = [
        (x, y)
        for one in series
        for x, y in zip(one.x, one.y, strict=True)
        if everything[0].position(x) is not None and everything[1].position(y) is not None
    ]
    xs = [x for x, _ in points] + [mark.value for mark in marks if mark.axis == "x"]
    ys = [y for _, y in points] + [mark.value for mark in marks if mark.axis == "y"]
    return Axis.around(xs, log=log_x), Axis.around(ys, log=log_y, margin=margin)


def _runs(one: Series, x_axis: Axis, y_axis: Axis) -> Iterator[list[Point]]:
    """Yield the parts of a series between gaps. Coordinates are fractions of the axes."""
    run: list[Point] = []
    for x_value, y_value in zip(one.x, one.y, strict=True):
        x, y = x_axis.position(x_value), y_axis.position(y_value)
        if x is not None and y is not None:
            run.append((x, y))
        elif run:
            yield run
            run = []
    if run:
        yield run


def _place(point: Point) -> Point:
    return _LEFT + point[0] * (_RIGHT - _LEFT), _BOTTOM - point[1] * (_BOTTOM - _TOP)


def _thin(points: Iterable[Point]) -> Iterator[Point]:
    """Keep only the first, lowest, highest and last point of each column of pixels. The picture is the same."""
    for _, group in groupby(points, key=lambda point: round(point[0])):
        column = list(group)
        kept = {0, len(column) - 1}
        kept |= {pick(range(len(column)), key=lambda i: column[i][1]) for pick in (min, max)}
        yield from (column[i] for i in sorted(kept))


def _grid(x_axis: Axis, y_axis: Axis) -> Iterator[str]:
    line = f'<line x1="{{:.1f}}" y1="{{:.1f}}" x2="{{:.1f}}" y2="{{:.1f}}" stroke="{INK}" stroke-opacity="{{}}"/>'
    for value in x_axis.ticks():
        x, _ = _place((x_axis.position(value) or 0.0, 0.0))
        yield line.format(x, _TOP, x, _BOTTOM, 0.25)
        yield text(x, _BOTTOM + 18, x_axis.label(value), 'text-anchor="middle"')
    for value in y_axis.ticks():
        _, y = _place((0.0, y_axis.position(value) or 0.0))
        yield line.format(_LEFT, y, _RIGHT, y, 0.25)
        yield text(_LEFT - 8, y + 4, y_axis.label(value), 'text-anchor="end"')
    yield line.format(_LEFT, _BOTTOM, _RIGHT, _BOTTOM, 1)
    yield line.format(_LEFT, _TOP, _LEFT, _BOTTOM, 1)


def _mark(mark: Mark, x_axis: Axis, y_axis: Axis) -> Iterator[str]:
    at = (x_axis if mark.axis == "x" else y_axis).position(mark.value)
    if at is None:
        return
    (x1, y1), (x2, y2) = [_place((at, end) if mark.axis == "x" else (end, at)) for end in (0.0, 1.0)]
    yield (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{INK}" stroke-width="1.5" '
        'stroke-dasharray="5 4"/>'
    )
    if mark.axis == "x" and at > 0.8:  # the label goes to the side that has room
        yield text(x2 - 5, y2 + 12, mark.label, 'text-anchor="end"')
    elif mark.axis == "x":
        yield text(x2 + 5, y2 + 12, mark.label)
    else:
        yield text(x2 - 4, y2 - 5, mark.label, 'text-anchor="end"')


def _style(number: int) -> str:
    dashes = _DASHES[number // len(PALETTE) % len(_DASHES)]
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    return f'stroke="{PALETTE[number % len(PALETTE)]}" stroke-width="1.8" fill="none" stroke-linejoin="round"{dashed}'


def _line(one: Series, number: int, x_axis: Axis, y_axis: Axis) -> Iterator[str]:
    for run in _runs(one, x_axis, y_axis):
        points = list(_thin(map(_place, run)))
        if len(points) == 1:  # a single point between gaps: a line of length 0 would not be visible
            yield f'<circle cx="{points[0][0]:.1f}" cy="{points[0][1]:.1f}" r="2" {_style(number)}/>'
        else:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            yield f'<polyline points="{path}" {_style(number)}/>'


def _legend(series: Sequence[Series]) -> Iterator[str]:
    room = (_RIGHT - _LEFT) / len(series)
    for number, one in enumerate(series):
        x = _LEFT + number * room
        yield f'<line x1="{x:.1f}" y1="{_HEIGHT - 8}" x2="{x + 18:.1f}" y2="{_HEIGHT - 8}" {_style(number)}/>'
        yield text(x + 23, _HEIGHT - 4, one.name)


def _connect(pixels: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    yield from pixels[:1]
    for (x1, y1), (x2, y2) in pairwise(pixels):
        length = max(abs(x2 - x1), abs(y2 - y1), 1)
        for i in range(1, length + 1):
            yield x1 + round((x2 - x1) * i / length), y1 + round((y2 - y1) * i / length)


# The bit of each dot of a Braille character by (column, row): Unicode 16.0, 21.1 (block U+2800)
_BITS = {(0, 0): 1, (0, 1): 2, (0, 2): 4, (1, 0): 8, (1, 1): 16, (1, 2): 32, (0, 3): 64, (1, 3): 128}


def _braille(dots: set[tuple[int, int]], row: int, columns: int) -> str:
    cells = (
        sum(bit for (dx, dy), bit in _BITS.items() if (2 * column + dx, 4 * row + dy) in dots)
        for column in range(columns)
    )
    return "".join(chr(0x2800 + cell) if cell else " " for cell in cells)


_APART = 170
_AXES_TOP = 60
_AXES_BOTTOM = 340
_AXES_LEFT = 90
_BEST, _WORST = (31, 143, 78), (208, 69, 95)
MAX_LINES = 1000


@dataclass(frozen=True)
class Coordinate:
    """One axis: a value for each line. With ``choices``, values are names, and the axis has the names in this order."""

    name: str
    values: Sequence[object]
    choices: Sequence[str] = ()
    is_log: bool = False


def parallel_coordinates_svg(
    coordinates: Sequence[Coordinate], values: Sequence[float], *, metric: str, is_smaller_better: bool
) -> str:
    """Return a chart as one <svg> element. The last axis is the ``metric``; green lines are the best, by rank."""
    axes = [*coordinates, Coordinate(metric, values)]
    placed = [_positions(each) for each in axes]
    order = sorted(range(len(values)), key=lambda n: values[n], reverse=is_smaller_better)[
        -MAX_LINES:
    ]  # the best are drawn last, on top
    parts = [
        root(_AXES_LEFT * 2 + _APART * (len(axes) - 1), 400, f"parallel coordinates of {metric}"),
        text(16, 20, "Parallel coordinates", TITLE),
    ]
    for rank, number in enumerate(order):
        fraction = rank / max(1, len(order) - 1)
        points = " ".join(f"{_x(at)},{ys[number]:.1f}" for at, (ys, _) in enumerate(placed))
        width, opacity = 1 + 1.5 * fraction**4, 0.35 + 0.6 * fraction
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{_color(fraction)}" stroke-width="{width:.1f}" '
            f'stroke-opacity="{opacity:.2f}"/>'
        )
    for at, (each, (_, ticks)) in enumerate(zip(axes, placed, strict=True)):
        x = _x(at)
        parts.append(f'<line x1="{x}" y1="{_AXES_TOP}" x2="{x}" y2="{_AXES_BOTTOM}" stroke="{INK}"/>')
        parts.append(text(x, _AXES_TOP - 14, each.name, 'text-anchor="middle"'))
        parts += [text(x - 6, y + 4, words, 'text-anchor="end"') for y, words in ticks]
    return "\n".join([*parts, "</svg>"]) + "\n"


def bars_svg(fractions: Mapping[str, float], *, title: str) -> str:
    """Return horizontal bars, one for each name; ``fractions`` are between 0 and 1."""
    height = 44 + 26 * len(fractions)
    parts = [root(720, height, title), text(16, 20, title, TITLE)]
    for at, (name, fraction) in enumerate(sorted(fractions.items(), key=lambda item: -item[1])):
        y = 36 + 26 * at
        parts.append(text(230, y + 14, name, 'text-anchor="end"'))
        parts.append(f'<rect x="240" y="{y}" width="{400 * fraction:.1f}" height="18" fill="{_color(1.0)}"/>')
        parts.append(text(248 + 400 * fraction, y + 14, f"{fraction:.0%}"))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _x(at: int) -> int:
    return _AXES_LEFT + _APART * at


def _y(fraction: float) -> float:
    return _AXES_BOTTOM - fraction * (_AXES_BOTTOM - _AXES_TOP)


def _positions(each: Coordinate) -> tuple[list[float], list[tuple[float, str]]]:
    """Return the height of each value, and the labels of the axis."""
    if each.choices:
        last = max(1, len(each.choices) - 1)
        heights = {name: _y(n / last if len(each.choices) > 1 else 0.5) for n, name in enumerate(each.choices)}
        return [heights[str(value)] for value in each.values], [(y, name[:24]) for name, y in heights.items()]
    numbers = [float(value) if isinstance(value, int | float) else math.nan for value in each.values]
    axis = Axis.around(numbers, log=each.is_log)
    heights_of = [_y(axis.position(number) or 0.0) for number in numbers]
    return heights_of, list(_ticks(axis))


def _ticks(axis: Axis) -> Iterator[tuple[float, str]]:
    for value in axis.ticks(6):
        yield _y(axis.position(value) or 0.0), axis.label(value, 3)


def _color(fraction: float) -> str:
    mixed = (round(worst + fraction * (best - worst)) for best, worst in zip(_BEST, _WORST, strict=True))
    return "#{:02x}{:02x}{:02x}".format(*mixed)
