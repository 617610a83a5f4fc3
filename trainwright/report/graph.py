"""Formats the module tree and the autograd graph of a step as text; equal blocks are folded to fit on a screen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from trainwright.plan.amounts import human_bytes
from trainwright.plan.profile import Folded, ModuleRow, NodeRun
from trainwright.report.chart import INK, PALETTE, root, text

_VIEWS = {"T", "View", "UnsafeView", "Transpose", "Permute", "Expand", "ReshapeAlias", "Alias", "Squeeze", "Unsqueeze"}
_VIEWS |= {"Slice", "Select", "Split", "SplitWithSizes", "AsStrided", "Unbind", "Detach"}
_OPS_WIDTH = 44
MODULE_COLUMNS = ("module", "class", "parameters", "trained", "FLOPs fwd", "FLOPs bwd", "kept", "frees", "output")
RUN_COLUMNS = ("#", "from", "module", "operators", "kept")


@dataclass(frozen=True)
class Headline:
    """The title of a graph. ``notes`` list differences from the recipe."""

    name: str
    model: str
    samples: int
    precision: str
    parameters: int
    nodes: int
    edges: int
    notes: tuple[str, ...] = ()


def graph_text(headline: Headline, folded: Folded) -> list[str]:
    """Return two tables: the modules, and the autograd nodes with their saved bytes."""
    return [
        headline_text(headline),
        *(f"note: {note}" for note in headline.notes),
        "",
        *_table(MODULE_COLUMNS, module_cells(folded), left=(0, 1, 8)),
        "  kept: activations saved for the backward pass.  frees: what activation checkpointing of that module frees",
        *_rest(folded.rows),
        "",
        f"autograd graph, in the order of the forward pass: {headline.nodes:,} nodes, {headline.edges:,} edges",
        *_table(RUN_COLUMNS, run_cells(folded), left=(2, 3)),
        "  from: the rows that a row is computed from, and passes its gradients to.  Leaves (parameters) are left out",
    ]


def _rest(rows: Sequence[ModuleRow]) -> Iterator[str]:
    """Yield a line on the root's FLOPs that are in no row below it, if the table does not add up."""
    top, below = rows[0], [row for row in rows if row.depth == 1]
    forward = top.forward_flops - sum(row.forward_flops for row in below)
    backward = top.backward_flops - sum(row.backward_flops for row in below)
    if below and forward + backward > 0.005 * (top.forward_flops + top.backward_flops):
        flops = f"{human_count(forward)} forward, {human_count(backward)} backward"
        yield f"  FLOPs of {top.kind} in no row below it, as those of the loss: {flops}"


def headline_text(headline: Headline) -> str:
    """Return the title in one line."""
    samples = f"{headline.samples} sample{'s' if headline.samples != 1 else ''}"
    model = f"{headline.model}, {human_count(headline.parameters)} parameters"
    return f"{headline.name}: {model}; one micro-batch of {samples}, {headline.precision}, traced as on a CPU"


def human_count(count: float) -> str:
    """Return a count as text, such as `1.2 G`; numbers below 1,000 have no suffix."""
    for unit in ("", " K", " M", " G", " T", " P"):
        if abs(count) < 999.5:
            return f"{count:.3g}{unit}"
        count /= 1000
    return f"{count:.3g} E"


def label(row: ModuleRow) -> str:
    """Return the name of a row, `0-11 x 12` for several equal modules; for the root the class of the model."""
    alone = row.count if "-" in row.name and row.name.replace("-", "").isdigit() else 1
    if not row.path:
        return row.kind
    first, _, last = row.name.partition("-")
    return f"{row.name} x {int(last) - int(first) + 1}" if alone > 1 else row.name


def size_text(size: int | None) -> str:
    """Return bytes as text; "" for 0 or None."""
    if not size:
        return ""
    return f"-{human_bytes(-size)}" if size < 0 else human_bytes(size)


def ops_text(run: NodeRun, width: int = _OPS_WIDTH) -> str:
    """Return the operators of a run as text, `Addmm, Mul x 2`, without views unless there are only views."""
    shown = [(op, count) for op, count in run.ops if op not in _VIEWS] or list(run.ops)
    words = [op if count == 1 else f"{op} x {count}" for op, count in shown]
    text = ""
    for number, word in enumerate(words):
        longer = f"{text}, {word}" if text else word
        rest = len(words) - number
        if len(longer) > width - (5 if rest > 1 else 0):
            return f"{text}, +{rest}" if text else f"{word[: width - 1]}…"
        text = longer
    return text


def module_cells(folded: Folded) -> list[tuple[str, ...]]:
    """Return ``MODULE_COLUMNS`` of each row. Trained parameters are shown only if some are frozen."""
    frozen = any(row.trainable != row.parameters for row in folded.rows)
    return [_cells(row, frozen) for row in folded.rows]


def _cells(row: ModuleRow, frozen: bool) -> tuple[str, ...]:
    tied = f"= {row.tied[0]}" if row.tied and not row.parameters else ""
    return (
        "  " * row.depth + label(row),
        row.kind,
        human_count(row.parameters) if row.parameters else tied,
        human_count(row.trainable) if row.trainable and frozen else "",
        human_count(row.forward_flops) if row.forward_flops else "",
        human_count(row.backward_flops) if row.backward_flops else "",
        size_text(row.saved_bytes),
        size_text(row.freed_bytes),
        "x".join(map(str, row.output or ())),
    )


def run_cells(folded: Folded) -> list[tuple[str, ...]]:
    """Return ``RUN_COLUMNS`` of each run."""
    cells: list[tuple[str, ...]] = []
    for number, run in enumerate(folded.runs, 1):
        behind = ",".join(str(i + 1) for i in run.inputs)
        place = (run.path or folded.rows[0].kind) + (f" x {run.count}" if run.count > 1 else "")
        cells.append((str(number), behind, place, ops_text(run), size_text(run.saved_bytes)))
    return cells


def _table(head: Sequence[str], rows: Sequence[tuple[str, ...]], left: Sequence[int]) -> Iterator[str]:
    """Yield the lines of a table without its empty columns; columns in ``left`` are aligned to the left."""
    used = [column for column in range(len(head)) if any(row[column] for row in rows)]
    table = [tuple(head), *rows]
    widths = {column: max(len(row[column]) for row in table) for column in used}
    for row in table:
        cells = [row[c].ljust(widths[c]) if c in left else row[c].rjust(widths[c]) for c in used]
        yield "  ".join(cells).rstrip()


SIZE = 12
CHARACTER = 0.602 * SIZE + 0.05
"""The width of a character in SVG units: all text is in a monospaced font, so that nothing can overlap."""
MONO = "ui-monospace, Menlo, Consolas, DejaVu Sans Mono, monospace"
_BOLD = 'font-weight="600"'
_LINE = 20
_GAP = 18
_EDGE = 20
_LANE = 10
_BAR = 150
_KEPT = PALETTE[0]
_FREED = PALETTE[2]
_FLOW = PALETTE[1]
_BOX = PALETTE[3]


@dataclass(frozen=True)
class _Edge:
    """An edge from a row to one that uses its output; ``lane`` 0 is the straight line to the next row."""

    start: int
    end: int
    lane: int = 0


def graph_svg(headline: Headline, folded: Folded) -> str:
    """Return one <svg> element: the modules with bars for the bytes that they keep, and the graph below them."""
    title, notes = headline_text(headline), [f"note: {note}" for note in headline.notes]
    top = _EDGE + _LINE * (2 + len(notes))
    tree, tree_width = _tree(folded, top)
    below = top + _LINE * (len(folded.rows) + 3)
    graph, graph_width = _graph(headline, folded, below)
    words = max(len(line) for line in (title, *notes)) * CHARACTER
    width = round(max(tree_width, graph_width, words + 2 * _EDGE))
    height = below + _LINE * (len(folded.runs) + 2) + _EDGE
    parts = [
        root(width, height, title, font=MONO, size=SIZE, fixed=True),
        text(_EDGE, _EDGE + 6, title, _BOLD),
        *(text(_EDGE, _EDGE + 6 + _LINE * (i + 1), note) for i, note in enumerate(notes)),
        *tree,
        *graph,
    ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _tree(folded: Folded, top: float) -> tuple[list[str], float]:
    cells = module_cells(folded)
    lines, right = _cells_of_svg(MODULE_COLUMNS, cells, _EDGE, top, left=(0, 1, 8))
    most = max((row.saved_bytes for row in folded.rows), default=0)
    bars = [mark for i, row in enumerate(folded.rows) for mark in _bar(row, right, top + _LINE * (i + 1), most)]
    guides = [_guide(folded.rows, i, top) for i in range(len(folded.rows))]
    legend_y = top - 1
    legend = [
        _rect(right, legend_y - 9, 10, 10, _KEPT),
        text(right + 14, legend_y, "kept"),
        _rect(right + 56, legend_y - 9, 10, 10, _FREED),
        text(right + 70, legend_y, "a checkpoint frees"),
    ]
    return [*lines, *filter(None, guides), *bars, *legend], right + max(_BAR, 70 + 18 * CHARACTER) + _EDGE


def _guide(rows: Sequence[ModuleRow], index: int, top: float) -> str:
    """Return the line from a module down to the last of its children."""
    children = [i for i, row in enumerate(rows) if row.depth == rows[index].depth + 1 and _parent(rows, i) == index]
    if not children:
        return ""
    x = _EDGE + (2 * rows[index].depth + 0.6) * CHARACTER
    start, end = (top + _LINE * (i + 1) for i in (index, children[-1]))
    ticks = "".join(f"M{x:.1f} {top + _LINE * (i + 1) - 4:.1f}h{CHARACTER:.1f}" for i in children)
    return f'<path d="M{x:.1f} {start + 4:.1f}V{end - 4:.1f}{ticks}" stroke="{INK}" stroke-opacity="0.45" fill="none"/>'


def _parent(rows: Sequence[ModuleRow], index: int) -> int:
    return next((i for i in range(index - 1, -1, -1) if rows[i].depth < rows[index].depth), -1)


def _bar(row: ModuleRow, x: float, y: float, most: int) -> Iterator[str]:
    if not most or not row.saved_bytes:
        return
    length = max(1.0, _BAR * row.saved_bytes / most)
    yield _rect(x, y - 10, length, 12, _KEPT)
    if row.freed_bytes and row.freed_bytes > 0:
        yield _rect(x, y - 10, length * row.freed_bytes / row.saved_bytes, 12, _FREED)


def _graph(headline: Headline, folded: Folded, top: float) -> tuple[list[str], float]:
    edges = lanes_of(folded.runs)
    dots = _EDGE + _LANE * (max((edge.lane for edge in edges), default=0) + 1)
    caption = f"autograd graph, in the order of the forward pass: {headline.nodes:,} nodes, {headline.edges:,} edges"
    first = top + _LINE
    cells = [(row[0], "", row[2].partition(" x ")[0], *row[3:]) for row in run_cells(folded)]
    lines, right = _cells_of_svg(RUN_COLUMNS, cells, dots + 16, first, left=(2, 3))
    most = max((run.saved_bytes for run in folded.runs), default=0)
    ys = [first + _LINE * (i + 1) for i in range(len(folded.runs))]
    marks = [
        _rect(right, y - 10, max(1.0, _BAR * run.saved_bytes / most), 12, _KEPT)
        for run, y in zip(folded.runs, ys, strict=True)
        if most and run.saved_bytes
    ]
    circles = [f'<circle cx="{dots}" cy="{y - 4:.1f}" r="3.5" fill="{_FLOW}"/>' for y in ys]
    boxes, wider = _boxes(folded.runs, dots + 8, right + _BAR, ys)
    drawn = [_edge(edge, dots, ys) for edge in edges]
    return [text(_EDGE, top, caption, _BOLD), *boxes, *drawn, *circles, *lines, *marks], wider + _EDGE


def lanes_of(runs: Sequence[NodeRun]) -> list[_Edge]:
    """Return the edges between rows; an edge that passes other rows gets a lane that no overlapping edge has."""
    wanted = {(behind, here) for here, run in enumerate(runs) for behind in run.inputs}
    found: list[_Edge] = []
    for start, end in sorted(wanted, key=lambda edge: (abs(edge[1] - edge[0]), edge)):
        if end == start + 1:
            found.append(_Edge(start, end))
            continue
        low, high = sorted((start, end))
        taken = {e.lane for e in found if e.lane and min(e.start, e.end) <= high and low <= max(e.start, e.end)}
        found.append(_Edge(start, end, next(lane for lane in range(1, len(wanted) + 2) if lane not in taken)))
    return found


def _edge(edge: _Edge, x: float, ys: Sequence[float]) -> str:
    """Return an arrow downwards, or upwards and dashed for the edge from a block to the next equal one."""
    y1, y2 = ys[edge.start] - 4, ys[edge.end] - 4
    if not edge.lane:
        return f'<path d="M{x} {y1 + 4:.1f}V{y2 - 4:.1f}" stroke="{_FLOW}" fill="none"/>'
    lane = x - _LANE * edge.lane
    y1, y2, turn = (y1 + 2, y2 - 2, 4) if edge.end > edge.start else (y1 - 2, y2 + 2, -4)
    if edge.start == edge.end:
        y1 = ys[edge.start] - 7
        y2 = ys[edge.start] - 1
        turn = 2
    path = f"M{x - 3} {y1:.1f}H{lane + 4}Q{lane} {y1:.1f} {lane} {y1 + turn:.1f}V{y2 - turn:.1f}"
    path += f"Q{lane} {y2:.1f} {lane + 4} {y2:.1f}H{x - 4}m-3 -2.5l3 2.5l-3 2.5"
    dashes = ' stroke-dasharray="4 2"' if edge.end <= edge.start else ""
    return f'<path d="{path}" stroke="{_FLOW}" fill="none"{dashes}/>'


def _boxes(runs: Sequence[NodeRun], x: float, right: float, ys: Sequence[float]) -> tuple[list[str], float]:
    """Return a frame around each group of rows that represents several equal blocks, with their number."""
    found, wider = [], right
    for name, group in groupby(range(len(runs)), key=lambda i: _block(runs[i])):
        rows = list(group)
        if not name:
            continue
        title = f"x {max(runs[i].count for i in rows)}"
        y, end = ys[rows[0]] - 15, ys[rows[-1]] + 5
        width = right + 8 + (len(title) + 1) * CHARACTER - x
        found.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{end - y:.1f}" rx="6" fill="none" '
            f'stroke="{_BOX}" stroke-opacity="0.8"/>'
        )
        found.append(text(right + 8, (y + end) / 2 + 4, title, _BOLD, color=_BOX))
        wider = max(wider, x + width)
    return found, wider


def _block(run: NodeRun) -> str:
    """Return the path up to the first name that represents several modules, as ``blocks.0-11``; "" if none does."""
    names = run.path.split(".")
    folded = [i for i, name in enumerate(names) if "-" in name and name.replace("-", "").isdigit()]
    return ".".join(names[: folded[0] + 1]) if folded and run.count > 1 else ""


def _cells_of_svg(
    head: Sequence[str], rows: Sequence[tuple[str, ...]], x: float, y: float, left: Sequence[int]
) -> tuple[list[str], float]:
    """Return a table without its empty columns, with its first line at ``y``, and the x coordinate right of it."""
    lines = []
    for column in range(len(head)):
        if not any(row[column] for row in rows):
            continue
        width = max(len(row[column]) for row in [tuple(head), *rows]) * CHARACTER
        begins = column in left
        at, anchor = (x, 'text-anchor="start"') if begins else (x + width, 'text-anchor="end"')
        lines.append(text(at, y, head[column], f"{_BOLD} {anchor}"))
        for number, row in enumerate(rows, 1):
            indent = len(row[column]) - len(row[column].lstrip()) if begins else 0
            if row[column].strip():
                lines.append(text(at + indent * CHARACTER, y + _LINE * number, row[column].strip(), anchor))
        x += width + _GAP
    return lines, x


def _rect(x: float, y: float, width: float, height: float, color: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height}" rx="2" fill="{color}"/>'
