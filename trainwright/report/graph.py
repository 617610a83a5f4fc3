"""Formats the module tree and the autograd graph of a step as text; equal blocks are folded to fit on a screen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trainwright.plan.explain import human_bytes
from trainwright.plan.fold import Folded, ModuleRow, NodeRun

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
    """Return such as `1.2 G`; numbers below 1,000 have no suffix."""
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
    """Return such as `Addmm, Mul x 2`: the operators of a run, without views unless there are only views."""
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
