"""Line charts without a plotting library: a self-contained SVG, and characters for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Literal

from trainwright.report.svg import INK, PALETTE, TITLE, Axis, root, text

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
    share = axis.share(mark.value)
    if share is None:
        return ""
    place = round(share * (columns - 1))
    if place + len(mark.label) + 2 <= columns:
        return " " * place + f"↑ {mark.label}"
    return f"{mark.label} ↑".rjust(place + 1)


def _axes(
    series: Sequence[Series], marks: Sequence[Mark], log_x: bool, log_y: bool, *, margin: float
) -> tuple[Axis, Axis]:
    """Return axes that cover every point that can be drawn, and every mark."""
    everything = (Axis(0.5, 1.0, log_x), Axis(0.5, 1.0, log_y))
    points = [
        (x, y)
        for one in series
        for x, y in zip(one.x, one.y, strict=True)
        if everything[0].share(x) is not None and everything[1].share(y) is not None
    ]
    xs = [x for x, _ in points] + [mark.value for mark in marks if mark.axis == "x"]
    ys = [y for _, y in points] + [mark.value for mark in marks if mark.axis == "y"]
    return Axis.around(xs, log=log_x), Axis.around(ys, log=log_y, margin=margin)


def _runs(one: Series, x_axis: Axis, y_axis: Axis) -> Iterator[list[Point]]:
    """Yield the parts without a gap, as fractions of the axes."""
    run: list[Point] = []
    for x_value, y_value in zip(one.x, one.y, strict=True):
        x, y = x_axis.share(x_value), y_axis.share(y_value)
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
    """Keep at most the first, lowest, highest and last point of each column of pixels, which draws the same picture."""
    for _, group in groupby(points, key=lambda point: round(point[0])):
        column = list(group)
        kept = {0, len(column) - 1}
        kept |= {pick(range(len(column)), key=lambda i: column[i][1]) for pick in (min, max)}
        yield from (column[i] for i in sorted(kept))


def _grid(x_axis: Axis, y_axis: Axis) -> Iterator[str]:
    line = f'<line x1="{{:.1f}}" y1="{{:.1f}}" x2="{{:.1f}}" y2="{{:.1f}}" stroke="{INK}" stroke-opacity="{{}}"/>'
    for value in x_axis.ticks():
        x, _ = _place((x_axis.share(value) or 0.0, 0.0))
        yield line.format(x, _TOP, x, _BOTTOM, 0.25)
        yield text(x, _BOTTOM + 18, x_axis.label(value), 'text-anchor="middle"')
    for value in y_axis.ticks():
        _, y = _place((0.0, y_axis.share(value) or 0.0))
        yield line.format(_LEFT, y, _RIGHT, y, 0.25)
        yield text(_LEFT - 8, y + 4, y_axis.label(value), 'text-anchor="end"')
    yield line.format(_LEFT, _BOTTOM, _RIGHT, _BOTTOM, 1)
    yield line.format(_LEFT, _TOP, _LEFT, _BOTTOM, 1)


def _mark(mark: Mark, x_axis: Axis, y_axis: Axis) -> Iterator[str]:
    share = (x_axis if mark.axis == "x" else y_axis).share(mark.value)
    if share is None:
        return
    (x1, y1), (x2, y2) = [_place((share, end) if mark.axis == "x" else (end, share)) for end in (0.0, 1.0)]
    yield (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{INK}" stroke-width="1.5" '
        'stroke-dasharray="5 4"/>'
    )
    if mark.axis == "x" and share > 0.8:  # the label goes to the side that has room
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
    """Yield every pixel on the straight lines between consecutive points."""
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
