"""``lr-range RECIPE``: runs the learning rate range test and draws its curve."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from trainwright.assembly.assemble import Parts
from trainwright.engine.lr_range import LrRange, lr_range
from trainwright.errors import UsageError
from trainwright.monitoring.terminal import Console
from trainwright.plan.parallel import in_one_process
from trainwright.recipe import Loaded
from trainwright.report.chart import Mark, Series, line_chart_svg, line_chart_text
from trainwright.runs.storage import write_output
from trainwright.training.custom_objects import require_loss
from trainwright.training.prepare import prepare


def run_lr_range(
    loaded: Loaded, parts: Parts | None = None, *, steps: int, lowest: float, highest: float
) -> tuple[LrRange, float]:
    """Run the test on a new model of the recipe, or on ``parts``, which must not be used afterwards.

    Returns the curve with the suggestion, and the learning rate of the recipe. Raises UsageError for a wrong range.
    """
    if not 0 < lowest < highest < math.inf:
        raise UsageError(f"lowest {lowest:g} must be positive and below highest {highest:g}", remedy="swap them")
    require_loss(parts, "lr_range")
    job = prepare(in_one_process(loaded), parts)
    torch.set_num_threads(job.plan.threads)
    found = lr_range(
        job.state,
        job.batches,
        job.parts.loss,
        lowest=lowest,
        highest=highest,
        num_steps=steps,
        precision=job.precision,
        clip=job.built.clip,
    )
    return found, job.lr


def find_lr(
    loaded: Loaded,
    parts: Parts | None = None,
    *,
    steps: int,
    lowest: float,
    highest: float,
    out: Path,
    console: Console,
) -> dict[str, object]:
    """Run the test and write the picture to ``out`` (SVG).

    Returns the suggestion (None if the loss never fell), the rate at which it diverged, and the curve.
    """
    found, lr = run_lr_range(loaded, parts, steps=steps, lowest=lowest, highest=highest)
    curve = Series("loss (smoothed)", found.lrs, found.losses)
    rates = [("suggestion", found.suggestion), ("recipe", lr)]
    drawn = [(name, value) for name, value in rates if value is not None and lowest <= value <= highest]
    marks = [Mark("x", value, f"{name} {value:.3g}") for name, value in drawn]
    svg = line_chart_svg(
        [curve], title="LR range test", x_label="learning rate", y_label="loss", marks=marks, log_x=True
    )
    write_output(out, svg, "--out")
    chart = line_chart_text([curve], width=72, height=16, marks=marks, log_x=True)
    console.print(chart, markup=False, emoji=False, highlight=False)
    suggestion = f"{found.suggestion:.3g}" if found.suggestion else "none: the loss never fell by 1 %"
    text = f"suggested lr  {suggestion}\nrecipe's lr   {lr:.3g}\npicture       {out}"
    console.print(text, markup=False, emoji=False, highlight=False)
    return {
        "suggestion": found.suggestion,
        "diverged_at": found.stopped_at,
        "picture": str(out),
        "lrs": list(found.lrs),
        "losses": list(found.losses),
        "marks": dict(drawn),
    }
