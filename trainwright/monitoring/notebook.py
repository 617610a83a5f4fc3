"""Shows progress in a notebook: one cell with the newest line and the curve of the loss."""

from __future__ import annotations

import html
import importlib
import math
from typing import Any

WIDTH, HEIGHT = 480, 90
MAX_POINTS = 240
"""Points of the curve. Beyond them every second point is removed, and half as many are added from then on."""


class NotebookCell:
    """The output of a running cell. Needs IPython, whose kernel makes it."""

    def __init__(self) -> None:
        display: Any = importlib.import_module("IPython.display")
        self._html = display.HTML
        self._handle = display.display(self._html(""), display_id=True)
        self._points: list[tuple[int, float]] = []
        self._apart = 1

    def update(self, line: str, step: int, loss: float) -> None:
        """Show ``line`` below the curve, which ends with this loss."""
        if not self._points or step - self._points[-1][0] >= self._apart:
            self._points.append((step, loss))
        if len(self._points) > MAX_POINTS:
            self._points = self._points[::2]
            self._apart = self._points[1][0] - self._points[0][0]
        self._handle.update(self._html(f"{curve(self._points)}<pre>{html.escape(line)}</pre>"))


def curve(points: list[tuple[int, float]]) -> str:
    """Return an SVG of values over steps. A non-finite value is a gap. Empty for fewer than two values."""
    finite = [value for _, value in points if math.isfinite(value)]
    if len(finite) < 2:
        return ""
    low, high = min(finite), max(finite)
    first, last = points[0][0], points[-1][0]
    parts: list[list[str]] = [[]]
    for step, value in points:
        if not math.isfinite(value):
            parts.append([])
            continue
        x = WIDTH * (step - first) / max(1, last - first)
        y = HEIGHT * (1 - (value - low) / ((high - low) or 1.0))
        parts[-1].append(f"{x:.1f},{y:.1f}")
    lines = "".join(
        f'<polyline points="{" ".join(part)}" fill="none" stroke="currentColor"/>' for part in parts if part
    )
    label = f"loss from step {first} to {last}: {low:.4g} to {high:.4g}"
    return (
        f'<svg viewBox="-2 -2 {WIDTH + 4} {HEIGHT + 4}" width="{WIDTH}" height="{HEIGHT}" role="img">'
        f"<title>{label}</title>{lines}</svg>"
    )
