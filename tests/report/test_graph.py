"""Tables and drawings of a folded graph: everything is there, nothing lies on anything else."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from itertools import combinations

import pytest

from trainwright.plan.profile import LOSS, Folded, GraphProfile, ModuleProfile, Node, NodeRun, SavedTensor, fold
from trainwright.report.chart import INK, PALETTE
from trainwright.report.graph import (
    CHARACTER,
    SIZE,
    Headline,
    graph_svg,
    graph_text,
    human_count,
    lanes_of,
    ops_text,
    size_text,
)

SVG = "{http://www.w3.org/2000/svg}"
HEADLINE = Headline("small", "Net", 4, "fp32", 1234, 20, 30, notes=("a < b & <script>",))
Box = tuple[float, float, float, float]


def chain_of_blocks(blocks: int, *, bytes_of_last: int = 4000) -> GraphProfile:
    """A chain of equal residual blocks, the last of which may keep more or less."""
    modules = [
        ModuleProfile("", "Net", 0, 0, calls=1),
        ModuleProfile("stem", "Linear", 10, 10, calls=1),
        ModuleProfile("blocks", "ModuleList", 0, 0),
    ]
    nodes = [Node("AddmmBackward0", "stem", (), ())]
    for index in range(blocks):
        path, entry = f"blocks.{index}", len(nodes) - 1
        size = bytes_of_last if index == blocks - 1 else 4000
        inputs = (SavedTensor("", 10 * entry, 4000, "activations"),)
        modules += [
            ModuleProfile(path, "Block", 0, 0, calls=1, inputs=inputs),
            ModuleProfile(f"{path}.inner", "Linear", 100, 90, calls=1),
        ]
        nodes += [
            Node("AddmmBackward0", f"{path}.inner", (SavedTensor("mat1", 10 * entry, size, "activations"),), (entry,)),
            Node("GeluBackward0", path, (SavedTensor("self", 10 * entry + 1, 500, "activations"),), (len(nodes),)),
            Node("AddBackward0", path, (), (entry, len(nodes) + 1)),
        ]
    modules.append(ModuleProfile(LOSS, "", 0, 0))
    nodes.append(Node("NllLossBackward0", LOSS, (SavedTensor("self", -1, 8, "activations"),), (len(nodes) - 1,)))
    return GraphProfile(tuple(modules), tuple(nodes))


def drawing(folded: Folded) -> ET.Element:
    return ET.fromstring(graph_svg(HEADLINE, folded))


def texts(root: ET.Element) -> list[tuple[str, Box]]:
    """Every text with the box that it takes in a monospaced face."""
    found = []
    for element in root.iter(f"{SVG}text"):
        said = element.text or ""
        x, y, width = float(element.attrib["x"]), float(element.attrib["y"]), len(said) * 0.602 * SIZE
        left = x - width if element.attrib.get("text-anchor") == "end" else x
        found.append((said, (left, y - 0.8 * SIZE, left + width, y + 0.2 * SIZE)))
    return found


def bars(root: ET.Element) -> list[Box]:
    found = []
    for element in root.iter(f"{SVG}rect"):
        if element.attrib["fill"] != "none":
            x, y, width, height = (float(element.attrib[name]) for name in ("x", "y", "width", "height"))
            found.append((x, y, x + width, y + height))
    return found


def overlap(one: Box, two: Box) -> bool:
    return one[0] < two[2] and two[0] < one[2] and one[1] < two[3] and two[1] < one[3]


def test_equal_blocks_are_one_row_with_the_sums_of_all() -> None:
    tree = fold(chain_of_blocks(12))
    rows = {row.path: row for row in tree.rows}
    block = rows["blocks.0-11"]
    assert block.count == 12
    assert block.parameters == 1200 and block.trainable == 1080
    assert block.saved_bytes == 12 * 4500
    assert block.freed_bytes == 12 * 500  # what it was called with stays
    assert rows[""].saved_bytes == 12 * 4500 + 8
    assert [run.path for run in tree.runs] == ["stem", "blocks.0-11.inner", "blocks.0-11", LOSS]
    assert tree.runs[1].inputs == (0, 2)  # from the stem, and from the block before
    assert tree.runs[3].inputs == (2,)


def test_a_block_that_differs_stands_alone() -> None:
    rows = {row.path: row for row in fold(chain_of_blocks(4, bytes_of_last=5000)).rows}
    assert rows["blocks.0-2"].count == 3
    assert rows["blocks.3"].saved_bytes == 5500
    assert "blocks.0-3" not in rows


def test_depth_cuts_the_tree_and_joins_nodes() -> None:
    tree = fold(chain_of_blocks(3), depth=1)
    assert [row.path for row in tree.rows] == ["", "stem", "blocks", LOSS]
    assert [run.path for run in tree.runs] == ["stem", "blocks", LOSS]
    assert fold(chain_of_blocks(3), depth=9).depth == 3


def test_the_default_depth_fits_on_a_screen() -> None:
    many = chain_of_blocks(1)
    modules = [ModuleProfile("a", "List", 0, 0)] + [
        ModuleProfile(f"a.layer{i}", "Linear", i, i, calls=1) for i in range(100)
    ]
    wide = replace(many, modules=(*many.modules, *modules))
    assert fold(wide).depth == 1
    assert len(fold(wide, depth=2).rows) > 100


def test_the_text_has_a_line_for_each_row() -> None:
    lines = graph_text(HEADLINE, fold(chain_of_blocks(12)))
    assert lines[0] == "small: Net, 1.23 K parameters; one micro-batch of 4 samples, fp32, traced as on a CPU"
    (block,) = [line for line in lines if "Block " in line]
    assert block.split()[3:] == ["Block", "1.2", "K", "1.08", "K", "52.7", "KiB", "5.86", "KiB"]
    assert any(line.split()[:3] == ["2", "1,3", "blocks.0-11.inner"] for line in lines)


@pytest.mark.parametrize("count", [1, 2, 12])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_nothing_in_the_drawing_lies_on_anything_else(count: int, depth: int) -> None:
    root = drawing(fold(chain_of_blocks(count), depth))
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    words = texts(root)
    for (one, box), (two, other) in combinations(words, 2):
        assert not overlap(box, other), f"{one!r} and {two!r}"
    for said, box in words:
        assert box[0] >= 0 and box[1] >= 0 and box[2] <= width and box[3] <= height, said
        assert not any(overlap(box, bar) for bar in bars(root)), said
    assert CHARACTER >= 0.602 * SIZE


def test_edges_of_one_lane_never_run_side_by_side() -> None:
    runs = [NodeRun(str(i), 1, 1, (), 0, 0, tuple({max(0, i - 1), i // 2, i // 3, min(19, i + 2)})) for i in range(20)]
    edges = lanes_of(runs)
    assert {(edge.start, edge.end) for edge in edges} == {(j, i) for i, run in enumerate(runs) for j in run.inputs}
    for one, two in combinations([edge for edge in edges if edge.lane], 2):
        if one.lane == two.lane:
            low, high = sorted((one.start, one.end))
            assert high < min(two.start, two.end) or max(two.start, two.end) < low
    assert all(edge.end == edge.start + 1 for edge in edges if not edge.lane)


def test_the_drawing_is_complete_in_itself_and_readable_on_light_and_dark() -> None:
    svg = graph_svg(HEADLINE, fold(chain_of_blocks(3)))
    for foreign in ("<script", "href", "url(", "<style", "<image", "foreignObject", " on"):
        assert foreign not in re.sub(r">[^<]*<|aria-label=\"[^\"]*\"", "><", svg), foreign
    assert "a < b & <script>" in " ".join(said for said, _ in texts(ET.fromstring(svg)))
    colours = set(re.findall(r"#[0-9a-f]{6}", svg))
    assert colours <= {INK, *PALETTE}  # tests/report/test_chart.py computes their contrast


def test_numbers_as_people_read_them() -> None:
    assert [human_count(n) for n in (7, 999, 999.6, 1234, 6.7e9, 3e20)] == [
        "7",
        "999",
        "1 K",
        "1.23 K",
        "6.7 G",
        "300 E",
    ]
    assert [size_text(n) for n in (None, 0, 2048, -2048)] == ["", "", "2 KiB", "-2 KiB"]


def test_operators_are_cut_and_views_left_out() -> None:
    run = NodeRun("", 1, 5, (("View", 2), ("Addmm", 1), ("Mul", 3)), 0, 0, ())
    assert ops_text(run) == "Addmm, Mul x 3"
    assert ops_text(replace(run, ops=(("View", 2),))) == "View x 2"
    long = ops_text(replace(run, ops=tuple((f"Operator{i}", 1) for i in range(9))))
    assert len(long) <= 44 and long.endswith(", +6")
