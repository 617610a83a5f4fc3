"""The common parts of every SVG of a report: its colours, its root element, and text."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
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

    def share(self, value: float) -> float | None:
        """Return the position of ``value``: 0 at ``low``, 1 at ``high``; None if it has no position (NaN, log of 0)."""
        if not _can_be_shown(value, self.log):
            return None
        if self.log:
            low = math.log(self.low)
            return (math.log(value) - low) / (math.log(self.high) - low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self, about: int = 8) -> list[float]:
        """Return about ``about`` round numbers within the range, rising."""
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
        """Format ``value`` with ``digits`` significant digits, more if the range is too narrow to distinguish
        its ends.
        """
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
