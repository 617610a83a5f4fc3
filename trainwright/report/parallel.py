"""Parallel coordinates and bars as SVG: one vertical axis for each parameter, one line for each trial."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from trainwright.report.svg import INK, TITLE, Axis, root, text

_APART = 170
_TOP = 60
_BOTTOM = 340
_LEFT = 90
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
    ]  # the best on top
    parts = [
        root(_LEFT * 2 + _APART * (len(axes) - 1), 400, f"parallel coordinates of {metric}"),
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
        parts.append(f'<line x1="{x}" y1="{_TOP}" x2="{x}" y2="{_BOTTOM}" stroke="{INK}"/>')
        parts.append(text(x, _TOP - 14, each.name, 'text-anchor="middle"'))
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
    return _LEFT + _APART * at


def _y(fraction: float) -> float:
    return _BOTTOM - fraction * (_BOTTOM - _TOP)


def _positions(each: Coordinate) -> tuple[list[float], list[tuple[float, str]]]:
    """Return the height of each value, and the labels of the axis."""
    if each.choices:
        last = max(1, len(each.choices) - 1)
        heights = {name: _y(n / last if len(each.choices) > 1 else 0.5) for n, name in enumerate(each.choices)}
        return [heights[str(value)] for value in each.values], [(y, name[:24]) for name, y in heights.items()]
    numbers = [float(value) if isinstance(value, int | float) else math.nan for value in each.values]
    axis = Axis.around(numbers, log=each.is_log)
    heights_of = [_y(axis.share(number) or 0.0) for number in numbers]
    return heights_of, list(_ticks(axis))


def _ticks(axis: Axis) -> Iterator[tuple[float, str]]:
    for value in axis.ticks(6):
        yield _y(axis.share(value) or 0.0), axis.label(value, 3)


def _color(fraction: float) -> str:
    mixed = (round(worst + fraction * (best - worst)) for best, worst in zip(_BEST, _WORST, strict=True))
    return "#{:02x}{:02x}{:02x}".format(*mixed)
