"""Charts are well-formed, show what they were given and survive numbers that cannot be drawn."""

from __future__ import annotations

import math
import random
import xml.etree.ElementTree as ET
from typing import Any

import pytest

from trainwright.report.chart import INK, PALETTE, Axis, Mark, Series, line_chart_svg, line_chart_text

SVG = "{http://www.w3.org/2000/svg}"
LABELS: dict[str, Any] = {"title": "t", "x_label": "x", "y_label": "y"}


def parse(svg: str) -> ET.Element:
    root = ET.fromstring(svg)
    assert root.tag == f"{SVG}svg"
    return root


def words(svg: str) -> list[str]:
    return [element.text or "" for element in parse(svg).iter(f"{SVG}text")]


def lines(svg: str) -> list[list[tuple[float, float]]]:
    """The points of every polyline."""
    return [
        [(float(x), float(y)) for x, y in (point.split(",") for point in element.attrib["points"].split())]
        for element in parse(svg).iter(f"{SVG}polyline")
    ]


def test_a_line_runs_where_its_numbers_are() -> None:
    ((a, b, c),) = lines(line_chart_svg([Series("s", [0, 5, 10], [0, 1, 0])], **LABELS))
    assert a[0] < b[0] < c[0]
    assert b[0] == pytest.approx((a[0] + c[0]) / 2, abs=0.1)
    assert a[1] == c[1] > b[1]  # SVG counts downwards


def test_log_x_puts_decades_at_equal_distances() -> None:
    ((a, b, c),) = lines(line_chart_svg([Series("s", [1e-4, 1e-3, 1e-2], [1, 1, 1])], **LABELS, log_x=True))
    assert b[0] - a[0] == pytest.approx(c[0] - b[0], abs=0.11)
    assert a[1] == b[1] == c[1]


def test_all_words_are_there_and_escaped() -> None:
    nasty = "a < b & \"c\" 'd' </svg> ü \x00\x1b\ud800 x"
    clean = "a < b & \"c\" 'd' </svg> ü     x"
    svg = line_chart_svg(
        [Series(nasty, [1, 2], [1, 2]), Series("other", [1, 2], [2, 1])],
        title=nasty,
        x_label=nasty,
        y_label=nasty,
        marks=[Mark("x", 1.5, nasty), Mark("y", 1.5, "here")],
    )
    said = words(svg)
    assert said.count(clean) == 5  # title, two axes, legend, mark
    assert {"other", "here"} <= set(said)
    assert parse(svg).attrib["aria-label"] == clean


def test_one_series_needs_no_legend() -> None:
    assert "only" not in words(line_chart_svg([Series("only", [1, 2], [1, 2])], **LABELS))


def test_what_cannot_be_drawn_breaks_the_line() -> None:
    y = [1.0, 2.0, math.nan, 2.0, 1.0, math.inf, 3.0, -math.inf, 2.0, 1.0]
    svg = line_chart_svg([Series("s", range(10), y)], **LABELS)
    assert [len(line) for line in lines(svg)] == [2, 2, 2]
    assert len(list(parse(svg).iter(f"{SVG}circle"))) == 1  # the 3.0 stands alone
    assert [len(line) for line in lines(line_chart_svg([Series("s", [0, 1, 2], [1, 1, 1])], **LABELS, log_x=True))] == [
        2
    ]


@pytest.mark.parametrize("series", [[], [Series("s", [], [])], [Series("s", [1, 2], [math.nan, math.inf])]])
def test_nothing_to_draw_says_so(series: list[Series]) -> None:
    assert "no finite values" in words(line_chart_svg(series, **LABELS))
    assert line_chart_text(series).count("\n") == 16


def test_a_mark_outside_the_data_widens_the_chart_and_an_impossible_one_is_left_out() -> None:
    series = [Series("s", [1, 2], [1, 2])]
    ((a, b),) = lines(line_chart_svg(series, **LABELS, marks=[Mark("x", 11.0)]))
    assert b[0] - a[0] < 100
    assert "never" not in words(line_chart_svg(series, **LABELS, marks=[Mark("y", math.nan, "never")]))


def test_a_mark_in_a_terminal_is_an_arrow_below_its_place() -> None:
    series = [Series("s", [1e-5, 1e-4, 1e-3, 1e-2, 1e-1], [3, 2, 1, 2, 3])]
    marks = [Mark("x", 1e-3, "suggestion 0.001"), Mark("x", 1e-1, "recipe 0.1")]
    lines = line_chart_text(series, 72, 16, marks=marks, log_x=True).splitlines()
    assert len(lines) == 16
    begin = lines[-4].index("└") + 1
    middle, end = lines[-2].index("↑"), lines[-1].index("↑")
    assert lines[-2].endswith("↑ suggestion 0.001") and lines[-1].endswith("recipe 0.1 ↑")
    assert middle - begin == pytest.approx((end - begin) / 2, abs=0.6), "the axis is logarithmic"
    assert line_chart_text([], 72, 16, marks=[Mark("x", math.nan, "never")]).count("\n") == 16


def test_a_long_run_stays_a_small_file_and_keeps_its_spikes() -> None:
    n = 50_000
    y = [1.0] * n
    y[31_337] = 7.0
    svg = line_chart_svg([Series("s", range(n), y)], **LABELS)
    assert len(svg) < 100_000
    (line,) = lines(svg)
    assert min(point[1] for point in line) < line[0][1] - 200


def test_lengths_that_differ_are_a_bug() -> None:
    with pytest.raises(ValueError):
        line_chart_svg([Series("s", [1, 2], [1])], **LABELS)


def test_any_numbers_at_all() -> None:
    dice = random.Random(0)
    extreme = [0.0, -0.0, 1.0, -1.0, 5e-324, 1e-310, 1e-250, 1e249, 1e308, -1e308, math.nan, math.inf, 1 + 1e-12]
    for _ in range(400):
        x, y = ([dice.choice(extreme) * dice.choice([1, 1, 3]) for _ in range(4)] for _ in range(2))
        log_x, log_y = dice.random() < 0.5, dice.random() < 0.5
        mark = Mark("y", dice.choice(extreme), "m")
        svg = line_chart_svg([Series("s", x, y)], **LABELS, marks=[mark], log_x=log_x, log_y=log_y)
        parse(svg)
        assert "nan" not in svg
        assert '"inf' not in svg
        assert line_chart_text([Series("s", x, y)], 40, 10, log_x=log_x, log_y=log_y).count("\n") == 10


@pytest.mark.parametrize(
    ("axis", "ticks"),
    [
        (Axis(0.0, 1.0), [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (Axis(-3.0, 12.0), [-2.0, 0.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0]),
        (Axis(0.0012, 0.0019), [0.0012, 0.0013, 0.0014, 0.0015, 0.0016, 0.0017, 0.0018, 0.0019]),
        (Axis(0.0, 30_000.0), [0.0, 5000.0, 10000.0, 15000.0, 20000.0, 25000.0, 30000.0]),
        (Axis(1e-6, 1.0, log=True), [1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0]),
        (Axis(2.0, 30.0, log=True), [2.0, 5.0, 10.0, 20.0]),
        (Axis(2.1, 2.9, log=True), [2.1, 2.2, 2.3, 2.4, 2.5, 2.6, 2.7, 2.8, 2.9]),
    ],
)
def test_ticks_are_round_numbers(axis: Axis, ticks: list[float]) -> None:
    assert axis.ticks() == pytest.approx(ticks)


def test_labels_tell_the_ends_of_a_narrow_range_apart() -> None:
    axis = Axis.around([1_000_000.25, 1_000_000.5])
    assert axis.label(axis.low, 3) != axis.label(axis.high, 3)
    assert [Axis(0.0, 1.0).label(value) for value in (0.0, 0.2, 1e-5)] == ["0", "0.2", "1e-05"]


def contrast(colour: str, background: str) -> float:
    """WCAG 2.2 contrast ratio, from relative luminance."""

    def luminance(hexed: str) -> float:
        channels = [int(hexed[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    dark, light = sorted((luminance(colour), luminance(background)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("background", ["#ffffff", "#000000"])
def test_colours_are_readable_on_light_and_dark(background: str) -> None:
    assert contrast(INK, background) >= 4.5
    assert min(contrast(colour, background) for colour in PALETTE) >= 3


def test_text_chart() -> None:
    chart = line_chart_text([Series("s", [0, 1], [0, 1])], width=14, height=5)
    assert chart == (
        "1 │       ⢀⡠⠔⠊\n"
        "  │   ⢀⡠⠔⠊⠁\n"
        "0 │⡠⠔⠊⠁\n"
        "  └───────────\n"
        "   0         1\n"
    )  # fmt: skip


def test_text_chart_keeps_its_size() -> None:
    rows = line_chart_text([Series("a", range(9), range(9)), Series("b", range(9), [4] * 9)], 60, 12).split("\n")
    assert len(rows) == 13
    assert max(map(len, rows)) == 60
