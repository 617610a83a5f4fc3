"""The loss of a run as a line of the size of a word."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from markupsafe import Markup

from trainwright.pages.rows import Rows, column

WIDTH, HEIGHT, POINTS = 96, 22, 48


def sparkline(rows: Rows) -> Markup:
    """An <svg> of the medians of POINTS equal spans of the steps, on a log axis where all are positive.

    "" where fewer than two spans have a finite loss.
    """
    steps, losses = column(rows, "step"), column(rows, "loss")
    finite = np.isfinite(losses)
    steps, losses = steps[finite], losses[finite]
    if len(losses) < 2 or steps[0] == steps[-1]:
        return Markup("")
    edges = np.searchsorted(steps, np.linspace(steps[0], steps[-1] + 1, POINTS + 1))
    spans = [(index, np.median(losses[a:b])) for index, (a, b) in enumerate(pairwise(edges.tolist())) if a < b]
    values = np.array([value for _, value in spans])
    values = np.log(values) if (values > 0).all() else values
    low, room = values.min(), (values.max() - values.min()) or 1.0
    points = " ".join(
        f"{2 + index * (WIDTH - 4) / (POINTS - 1):.0f},{HEIGHT - 2 - (value - low) / room * (HEIGHT - 4):.1f}"
        for (index, _), value in zip(spans, values)
    )
    return Markup(
        f'<svg class="spark" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" aria-hidden="true">'
        f'<polyline points="{points}" fill="none" stroke="currentColor" stroke-width="1.5"/></svg>'
    )
