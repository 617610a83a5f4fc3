"""The page of a sweep: its table, parallel coordinates, the importance of each parameter, and the best recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainwright.report.chart import Coordinate, bars_svg, parallel_coordinates_svg
from trainwright.report.pages.render import page_values, templates
from trainwright.runs.printing import readable


@dataclass(frozen=True)
class SweepRow:
    """One trial: the cells of the table, and its run folder relative to the page, "" if it has no page."""

    cells: Sequence[str]
    folder: str = ""


def sweep_page(
    name: str,
    head: Sequence[str],
    rows: Sequence[SweepRow],
    *,
    coordinates: Sequence[Coordinate],
    values: Sequence[float],
    metric: str,
    is_smaller_better: bool,
    importance: Mapping[str, float],
    best_recipe: str,
    note: str = "",
) -> str:
    """Return the self-contained page. ``values`` and the values of each coordinate have one entry per trial."""
    parallel = (
        parallel_coordinates_svg(coordinates, values, metric=metric, is_smaller_better=is_smaller_better)
        if len(values) > 1
        else ""
    )
    bars = bars_svg(importance, title=f"Importance for {metric} (PED-ANOVA)") if importance else ""
    page = (
        templates()
        .get_template("sweep.html")
        .render(
            page_values("file"),
            title=name,
            head=head,
            rows=rows,
            parallel=parallel,
            bars=bars,
            best_recipe=best_recipe,
            note=note,
            data={},
            live=False,
        )
    )
    return readable(page)
