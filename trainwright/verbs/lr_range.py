"""``lr-range RECIPE``: the learning rate range test, with its picture."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from rich.console import Console

from trainwright.engine.clip import make_clip
from trainwright.engine.lr_range import lr_range
from trainwright.errors import StorageError, UsageError
from trainwright.plan.parallel import in_one_process
from trainwright.recipe import Loaded
from trainwright.report.chart import Mark, Series, line_chart_svg, line_chart_text
from trainwright.training.job import prepare


def find_lr(
    loaded: Loaded, *, steps: int, lowest: float, highest: float, out: Path, console: Console
) -> dict[str, object]:
    """Runs the test on a new model of the recipe and writes the picture to ``out`` (SVG).

    Returns the suggestion (None when the loss never fell), the rate where it diverged, and the curve.
    """
    if not 0 < lowest < highest < math.inf:
        raise UsageError(f"--lowest {lowest:g} must be positive and below --highest {highest:g}", remedy="swap them")
    job = prepare(in_one_process(loaded))
    torch.set_num_threads(job.plan.threads)
    clip = job.recipe.optimizer.clip
    found = lr_range(
        job.state,
        job.batches,
        job.parts.loss,
        lowest=lowest,
        highest=highest,
        num_steps=steps,
        precision=job.precision,
        clip=make_clip(clip.by, clip.at),
    )
    curve = Series("loss (smoothed)", found.lrs, found.losses)
    rates = [("suggestion", found.suggestion), ("recipe", job.lr)]
    drawn = [(name, value) for name, value in rates if value is not None and lowest <= value <= highest]
    marks = [Mark("x", value, f"{name} {value:.3g}") for name, value in drawn]
    svg = line_chart_svg(
        [curve], title="LR range test", x_label="learning rate", y_label="loss", marks=marks, log_x=True
    )
    try:
        out.write_text(svg, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{out} cannot be written: {error}", remedy="give another --out") from None
    console.print(line_chart_text([curve], width=72, height=16, marks=marks, log_x=True), markup=False, highlight=False)
    suggestion = f"{found.suggestion:.3g}" if found.suggestion else "none: the loss never fell by 1 %"
    console.print(f"suggested lr  {suggestion}\nrecipe's lr   {job.lr:.3g}\npicture       {out}", highlight=False)
    return {
        "suggestion": found.suggestion,
        "diverged_at": found.stopped_at,
        "picture": str(out),
        "lrs": list(found.lrs),
        "losses": list(found.losses),
        "marks": dict(drawn),
    }
