"""What a run holds on to: old graphs, outputs, copies of the model, and its data once more in each worker."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from trainwright.doctor.case import Case
from trainwright.doctor.finding import ExperimentRequest, Finding, check, finding

OLD_ENOUGH = 8
"""Steps whose losses or outputs must still be there; a loop may keep the last few."""


@check
def graphs_kept(case: Case) -> Iterator[Finding | ExperimentRequest]:
    """The graphs of old losses are alive long after their backward pass: something sums up losses, or lists them,
    with their history. Where the models' outputs are alive too, these hold the graphs.
    """
    told = _at_most(case, "graphs_alive")
    if not _mostly(told, "graphs_alive", "old_losses") or _mostly(told, "outputs_alive", "old_outputs"):
        return
    count = told["graphs_alive"]
    listed = told["losses_alive"] >= 0.8 * count
    yield finding(
        "mem.graph_retained_by_scalar",
        "warning",
        case.last_step,
        symptom=f"the graphs of {count} earlier losses are still in memory, one more with each step",
        cause="losses are kept in a list with their graphs" if listed else "losses are added up with their graphs",
        remedy="keep loss.detach() or loss.item()",
        sure=0.95,
        evidence=[
            ("graphs alive of losses more than 3 steps old", count, 0),
            ("those losses themselves", told["losses_alive"], 0),
        ],
        explains=("mem.graph_grows",),
    )


@check
def outputs_kept(case: Case) -> Iterator[Finding | ExperimentRequest]:
    """The models' outputs of old steps are alive, and have a graph. Detached ones are a choice."""
    told = _at_most(case, "outputs_alive")
    if not _mostly(told, "outputs_alive", "old_outputs"):
        return
    yield finding(
        "mem.outputs_accumulated",
        "warning",
        case.last_step,
        symptom=f"{told['outputs_alive']} outputs of earlier steps are still in memory with their graphs",
        cause="outputs are collected in a list without detach()",
        remedy="collect output.detach().cpu(), or what is computed from it",
        sure=0.95,
        evidence=[
            ("outputs alive that are more than 3 steps old", told["outputs_alive"], 0),
            ("their bytes", told["output_bytes"], 0),
        ],
    )


def _at_most(case: Case, count: str) -> dict[str, Any]:
    """When most of them were alive: a list may be emptied after each epoch."""
    exams = [exam.values for exam in case.exams("memory")]
    return max(exams, key=lambda told: int(told.get(count, 0)), default={})


def _mostly(told: dict[str, Any], alive: str, old: str) -> bool:
    return bool(told.get(old, 0) >= OLD_ENOUGH <= told[alive] >= 0.3 * told[old])


@check
def graph_grows(case: Case) -> Iterator[Finding | ExperimentRequest]:
    """The graph behind the loss has more nodes with every step, by about the same number for each: it goes back through
    all the steps before. Graphs of sequences of any length grow and shrink.
    """
    rows: list[list[int]] = case.about("memory").get("nodes", [])
    if len(rows) < 5 or any(b[1] <= a[1] for a, b in pairwise(rows)):
        return
    rates = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairwise(rows)]
    is_steady = max(rates) <= 2 * min(rates)
    if not is_steady or rows[-1][1] < 2 * rows[0][1]:
        return
    retained = any(row[2] for row in rows)
    yield finding(
        "mem.graph_grows",
        "critical" if retained else "warning",
        case.last_step,
        symptom=f"the graph behind the loss grows by {rates[-1]:.0f} nodes in each step: {rows[0][1]} -> {rows[-1][1]}",
        cause="a state that is carried from step to step is not detached"
        + (", and retain_graph=True hides the error that would say so" if retained else ""),
        remedy="detach() the state before the next step, and drop retain_graph=True",
        sure=0.95,
        evidence=[("nodes behind the loss, by step", [row[:2] for row in rows], "constant")],
        explains=("mem.graph_retained_by_scalar", "mem.outputs_accumulated"),
    )


@check
def model_copies(case: Case) -> Iterator[Finding | ExperimentRequest]:
    """There are more and more models like the watched one. A few copies are usual (an average, a target, the best so
    far), and their number stays.
    """
    rows: list[list[int]] = case.about("memory").get("copies", [])
    counts = [row[1] for row in rows]
    stairs = sum(b > a for a, b in pairwise(counts))
    has_more = len(counts) > 2 and counts[-1] > counts[len(counts) // 2]
    if stairs < 3 or not has_more or counts[-1] < 4 or any(b < a for a, b in pairwise(counts)):
        return
    yield finding(
        "mem.model_copies",
        "warning",
        case.last_step,
        symptom=f"there are {counts[-1]} copies of the model in memory, and their number rises",
        cause="a copy of the model is kept now and then and none is let go",
        remedy="keep one copy, or write them to disk",
        sure=0.9,
        evidence=[
            ("copies, by step", [row[:2] for row in rows][-8:], "constant"),
            ("their bytes", counts[-1] * rows[-1][2], rows[-1][2]),
        ],
    )


@check
def copied_on_write(case: Case) -> Iterator[Finding | ExperimentRequest]:
    """Forked workers share the data until they touch it; to read a Python object is to write its reference count. So
    two things together: a dataset of very many Python objects, and workers whose own memory grows by a good part of it.
    """
    told = case.about("memory")
    rows, held = told.get("private", []), told.get("held")
    if held is None or held[0] < 100_000 or len(rows) < 2:
        return
    grown = rows[-1][1] - rows[0][1]
    if grown < max(0.15 * held[1], 2**20):
        return
    yield finding(
        "mem.worker_copy_on_write",
        "warning",
        case.last_step,
        symptom=f"each worker has {grown / 2**20:.0f} MiB more of its own than at step {rows[0][0]:.0f}",
        cause=f"the dataset holds {held[0]} Python objects; reading one in a forked worker copies its memory page",
        remedy="hold the data in numpy arrays, tensors or Arrow tables",
        sure=0.9,
        stage="input",
        evidence=[
            ("growth of a worker's own memory, bytes", grown, 0),
            ("bytes of Python objects in the dataset", held[1], 0),
        ],
    )
