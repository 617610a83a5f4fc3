"""Checks of memory that is not released: old graphs, outputs, copies of the model, the data again in each worker."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from trainwright.doctor.case import Case
from trainwright.doctor.finding import ExperimentRequest, Finding, OldCheck, finding
from trainwright.runlog.json_values import Facts

OLD_ENOUGH = 8
"""Steps whose losses or outputs must still be there; a loop may keep the last few."""

SMALL_BYTES = 8 * 2**20
"""Of all copies of a model together."""


def graphs_kept(case: Case) -> Iterator[Finding | ExperimentRequest]:
    """The graphs of old losses are alive long after their backward pass: losses are summed or listed with their graph.

    Where the models' outputs are alive too, these hold the graphs.
    """
    facts = _at_most(case, "graphs_alive")
    if not _mostly(facts, "graphs_alive", "old_losses") or _mostly(facts, "outputs_alive", "old_outputs"):
        return
    count = facts["graphs_alive"]
    listed = facts["losses_alive"] >= 0.8 * count
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
            ("those losses themselves", facts["losses_alive"], 0),
        ],
        explains=("mem.graph_grows",),
    )


def outputs_kept(case: Case) -> Iterator[Finding | ExperimentRequest]:
    """The models' outputs of old steps are alive and have a graph. To keep detached ones is a choice."""
    facts = _at_most(case, "outputs_alive")
    if not _mostly(facts, "outputs_alive", "old_outputs"):
        return
    yield finding(
        "mem.outputs_accumulated",
        "warning",
        case.last_step,
        symptom=f"{facts['outputs_alive']} outputs of earlier steps are still in memory with their graphs",
        cause="outputs are collected in a list without detach()",
        remedy="collect output.detach().cpu(), or what is computed from it",
        sure=0.95,
        evidence=[
            ("outputs alive that are more than 3 steps old", facts["outputs_alive"], 0),
            ("their bytes", facts["output_bytes"], 0),
        ],
    )


def _at_most(case: Case, count: str) -> Facts:
    """The values of the outcome with the highest ``count``: a list may be emptied after each epoch."""
    exams = [exam.values for exam in case.outcomes("memory")]
    return max(exams, key=lambda facts: int(facts.get(count, 0)), default={})


def _mostly(facts: Facts, alive: str, old: str) -> bool:
    return bool(facts.get(old, 0) >= OLD_ENOUGH <= facts[alive] >= 0.3 * facts[old])


def graph_grows(case: Case) -> Iterator[Finding | ExperimentRequest]:
    """The graph of the loss grows by about the same number of nodes in every step: it includes all steps before.

    Graphs of sequences of varying length grow and shrink.
    """
    rows: list[list[int]] = case.facts("memory").get("nodes", [])
    if len(rows) < 5 or any(b[1] <= a[1] for a, b in pairwise(rows)):
        return
    rates = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairwise(rows)]
    is_steady = max(rates) <= 2 * min(rates)
    is_this_step = len(rows[-1]) > 3 and not rows[-1][3]  # a rollout or a sequence that becomes longer
    if not is_steady or is_this_step or rows[-1][1] < 2 * rows[0][1]:
        return
    retained = any(row[2] for row in rows)
    yield finding(
        "mem.graph_grows",
        "critical" if retained else "warning",
        case.last_step,
        symptom=f"the graph of the loss grows by {rates[-1]:.0f} nodes in each step: {rows[0][1]} -> {rows[-1][1]}",
        cause="a state that is carried from step to step is not detached"
        + (", and retain_graph=True hides the error that would say so" if retained else ""),
        remedy="detach() the state before the next step, and drop retain_graph=True",
        sure=0.95,
        evidence=[("nodes in the graph of the loss, by step", [row[:2] for row in rows], "constant")],
        explains=("mem.graph_retained_by_scalar", "mem.outputs_accumulated"),
    )


def model_copies(case: Case) -> Iterator[Finding | ExperimentRequest]:
    """There are more and more copies of the watched model.

    A few copies are usual (an average, a target network, the best so far), and their number is constant. Snapshots for
    an ensemble and earlier selves to play against become more on purpose: while all are small, it is an info.
    """
    rows: list[list[int]] = case.facts("memory").get("copies", [])
    counts = [row[1] for row in rows]
    stairs = sum(b > a for a, b in pairwise(counts))
    has_more = len(counts) > 2 and counts[-1] > counts[len(counts) // 2]
    if stairs < 3 or not has_more or counts[-1] < 4 or any(b < a for a, b in pairwise(counts)):
        return
    yield finding(
        "mem.model_copies",
        "warning" if counts[-1] * rows[-1][2] > SMALL_BYTES else "info",
        case.last_step,
        symptom=f"there are {counts[-1]} copies of the model in memory, and their number rises",
        cause="a copy of the model is kept now and then and none is released",
        remedy="keep one copy, or write them to disk",
        sure=0.9,
        evidence=[
            ("copies, by step", [row[:2] for row in rows][-8:], "constant"),
            ("their bytes", counts[-1] * rows[-1][2], rows[-1][2]),
        ],
    )


def copied_on_write(case: Case) -> Iterator[Finding | ExperimentRequest]:
    """A dataset holds very many Python objects, and the private memory of its workers grows by a good part of them.

    Forked workers share memory pages until they write to them, and reading a Python object writes its reference count.
    """
    facts = case.facts("memory")
    rows, held = facts.get("private", []), facts.get("held")
    if held is None or held[0] < 100_000 or len(rows) < 2:
        return
    grown = rows[-1][1] - rows[0][1]
    if grown < max(0.15 * held[1], 2**20):
        return
    yield finding(
        "mem.worker_copy_on_write",
        "warning",
        case.last_step,
        symptom=f"each worker has {grown / 2**20:.0f} MiB more private memory than at step {rows[0][0]:.0f}",
        cause=f"the dataset holds {held[0]} Python objects; reading one in a forked worker copies its memory page",
        remedy="hold the data in numpy arrays, tensors or Arrow tables",
        sure=0.9,
        stage="input",
        evidence=[
            ("growth of a worker's private memory, bytes", grown, 0),
            ("bytes of Python objects in the dataset", held[1], 0),
        ],
    )


NAMES: tuple[OldCheck, ...] = (
    graphs_kept,
    outputs_kept,
    graph_grows,
    model_copies,
    copied_on_write,
)
