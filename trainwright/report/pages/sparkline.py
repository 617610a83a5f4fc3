"""The loss of a run as a word-sized line."""

from __future__ import annotations

import numpy as np
from markupsafe import Markup

from trainwright.report.pages.means import SpanMeans

WIDTH, HEIGHT = 96, 22


def sparkline(means: SpanMeans) -> Markup:
    """Return an <svg> of the mean losses, on a log axis if all are positive; "" if fewer than two are finite."""
    columns = means.columns()
    finite = np.isfinite(columns["loss"])
    steps, losses = columns["step"][finite], columns["loss"][finite]
    if len(losses) < 2:
        return Markup("")
    losses = np.log(losses) if (losses > 0).all() else losses
    across = (steps - steps[0]) / (steps[-1] - steps[0]) * (WIDTH - 4)
    down = (losses.max() - losses) / ((losses.max() - losses.min()) or 1.0) * (HEIGHT - 4)
    points = " ".join(f"{2 + x:.0f},{2 + y:.1f}" for x, y in zip(across, down))
    return Markup(
        f'<svg class="spark" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" aria-hidden="true">'
        f'<polyline points="{points}" fill="none" stroke="currentColor" stroke-width="1.5"/></svg>'
    )
