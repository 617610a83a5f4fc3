"""Writes ``ladder.html``: the table of a ladder and its curves, as one self-contained file."""

from __future__ import annotations

from pathlib import Path

from trainwright.commands.ladder.judge import BAND_FACTOR, MIN_BAND
from trainwright.commands.ladder.result import BEST, HEAD, Ladder, RungResult
from trainwright.report.chart import Mark, Series, line_chart_svg
from trainwright.runs.storage import write_atomically


def write_page(path: Path, found: Ladder) -> None:
    """Write the page. Raises StorageError if it cannot be written."""
    from trainwright.report.pages.render import ladder_page  # imports jinja2

    page = ladder_page(
        found, head=HEAD, pictures=pictures(found), best=BEST, differences=BAND_FACTOR, least=f"{MIN_BAND:.0%}"
    )
    write_atomically(path, page, durable=False)


def pictures(found: Ladder) -> list[tuple[str, str]]:
    """Return names and SVGs: the training loss of each rung by samples, and the final losses with the band."""
    trained = [rung for rung in found.rungs if rung.measured]
    drawn = [("Training loss", _curves(found, trained))]
    finals = [(index, rung.measured.loss) for index, rung in enumerate(trained) if rung.measured]
    if found.band and finals:
        base = finals[0][1]
        marks = [
            Mark("y", base + found.band.loss, "baseline + band"),
            Mark("y", base - found.band.loss, "baseline - band"),
        ]
        line = Series("final loss", [index for index, _ in finals], [loss for _, loss in finals])
        label = "rung: " + ", ".join(f"{index} {rung.name}" for index, rung in enumerate(trained))
        svg = line_chart_svg([line], title="Final loss", x_label=label, y_label="loss", marks=marks)
        drawn.append(("Final loss", svg))
    return drawn


def _curves(found: Ladder, trained: list[RungResult]) -> str:
    series = []
    for rung in trained:
        assert rung.measured
        count, samples = len(rung.measured.curve), found.steps * found.batch
        x = [samples * (index + 1) / count for index in range(count)]
        series.append(Series(rung.name, x, rung.measured.curve))
    return line_chart_svg(series, title="Training loss, mean of each window", x_label="samples", y_label="loss")
