"""Laws of the resources: what a run holds does not grow from step to step, and its time goes into the work."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from trainwright.doctor.case import Case
from trainwright.doctor.finding import finding
from trainwright.doctor.law import Holds, Law, NotApplicable, Verdict
from trainwright.doctor.resources.facts import GrowthFacts, HeldResources
from trainwright.runlog.records import Watched, Where

SETTLED = 64
"""Steps after which the flight recorder holds as much as it will, and caches have been filled."""
READINGS = 4
"""That must rise one after the other: a pool that is filled, or noise, does not do that."""
MEMORY_BYTES, MEMORY_SHARE = 64 * 2**20, 0.1
"""Growth that is told of, and this share of what was held."""
OCTILES = 8
SLOWER = 2.0
"""By so much the last steps take longer than the first."""
WAIT_SHARE, WAIT_S = 0.5, 0.01
"""Of a step that is waited for data: half of it, and more than a batch of small samples takes to collate."""


@dataclass(frozen=True)
class _Kind:
    """Something that is counted: its name, how to read it, and how many more are told of."""

    name: str
    of: Callable[[HeldResources], int]
    enough: int
    cause: str
    remedy: str


_HOOKS = _Kind(
    "hooks",
    lambda held: held.hooks,
    4,
    "hooks are registered in the loop, and the handles are not removed: each call runs all of them",
    "register once before the loop, or handle.remove() after use",
)
_FILES = _Kind(
    "open files",
    lambda held: held.files,
    16,
    "files, sockets or pipes are opened in the loop and not closed; workers that are started anew for each epoch",
    "open with a with statement; persistent_workers=True for a loader that is made once",
)
_THREADS = _Kind(
    "threads",
    lambda held: held.threads,
    4,
    "threads or executors are started in the loop and do not end",
    "one executor for the whole run, or join each thread",
)


def hooks_do_not_grow(case: Case) -> Iterator[Verdict]:
    """The hooks of the model do not become more from step to step."""
    yield from _grows(case, _HOOKS)


def files_and_threads_do_not_grow(case: Case) -> Iterator[Verdict]:
    """The open files and the threads of the process do not become more from step to step."""
    verdicts = [*_grows(case, _FILES), *_grows(case, _THREADS)]
    yield from [each for each in verdicts if not isinstance(each, Holds)] or verdicts[:1]


def _grows(case: Case, kind: _Kind) -> Iterator[Verdict]:
    facts = case.newest(GrowthFacts)
    if facts is None or len(facts.held) < READINGS:
        return
    counts = [kind.of(each) for each in facts.held]
    last = counts[-READINGS:]
    was_there = max(counts[:-READINGS], default=0) >= last[-1]  # in an earlier epoch
    if was_there or not _rises(last) or last[-1] - last[0] < kind.enough:
        yield Holds(f"{counts[-1]} {kind.name} after step {facts.held[-1].step}")
        return
    begin, end = facts.held[-READINGS], facts.held[-1]
    where = Where(module=facts.most_hooks) if kind is _HOOKS else Where()
    values = [[each.step, kind.of(each)] for each in facts.held][-8:]
    yield (
        finding(
            "law.resources.hooks_do_not_grow",
            "warning",
            end.step,
            symptom=f"the hooks of the model become more and more: {last[0]} after step {begin.step}, {last[-1]} "
            f"after step {end.step}",
            cause=kind.cause,
            remedy=kind.remedy,
            sure=0.95,
            where=where,
            evidence=[("hooks, by step", values, "constant")],
        )
        if kind is _HOOKS
        else finding(
            "law.resources.files_and_threads_do_not_grow",
            "warning",
            end.step,
            symptom=f"{kind.name} become more and more: {last[0]} after step {begin.step}, {last[-1]} after step "
            f"{end.step}",
            cause=kind.cause,
            remedy=kind.remedy,
            sure=0.85,
            evidence=[(f"{kind.name}, by step", values, "constant")],
        )
    )


def _rises(values: Sequence[float]) -> bool:
    return all(b > a for a, b in pairwise(values))


def graphs_are_released(case: Case) -> Iterator[Verdict]:
    """Tensors with a graph do not become more from step to step, nor does the graph behind the loss become longer."""
    facts = case.facts("memory")
    counts, nodes = facts.get("with_graph", []), facts.get("nodes", [])
    if len(counts) < READINGS and len(nodes) < READINGS:
        return
    grown = _steady(counts[-READINGS:], least=0.25)
    longer = _steady([row[:2] for row in nodes[-READINGS:]], least=0.5) and goes_back(nodes[-1])
    if not grown and not longer:
        yield Holds(f"{counts[-1][1] if counts else 0} tensors with a graph, {nodes[-1][1] if nodes else 0} nodes")
        return
    rows = counts if grown else [row[:2] for row in nodes]
    what = "tensors with a graph are held" if grown else "nodes are in the graph of the loss"
    yield finding(
        "law.resources.graphs_are_released",
        "warning",
        case.last_step,
        symptom=f"more and more {what}: {rows[-READINGS][1]} at step {rows[-READINGS][0]}, {rows[-1][1]} at step "
        f"{rows[-1][0]}",
        cause="outputs, losses or states of earlier steps are kept with the graph that made them",
        remedy="detach() what is kept beyond its step",
        sure=0.85,
        evidence=[("by step", rows[-8:], "constant")],
    )


def goes_back(row: Sequence[int]) -> bool:
    """Whether the graph of this step holds nodes of earlier ones. Without them the step itself has become longer."""
    return len(row) < 4 or bool(row[3])


def _steady(rows: Sequence[Sequence[int]], *, least: float) -> bool:
    """Whether a count rises by at least so many a step between all of its readings, as fast at the end as before."""
    if len(rows) < READINGS:
        return False
    rates = [(b[1] - a[1]) / max(1, b[0] - a[0]) for a, b in pairwise(rows)]
    return min(rates) >= least and max(rates) <= 4 * min(rates) and rows[-1][1] - rows[0][1] >= 8


def memory_does_not_grow(case: Case) -> Iterator[Verdict]:
    """What the process holds does not grow from step to step, once caches are filled."""
    facts = case.newest(GrowthFacts)
    held = [each for each in facts.held if each.step >= SETTLED] if facts else []
    if len(held) < 2 * READINGS:
        return
    for name, sizes in (
        ("GPU memory", [each.device_bytes for each in held]),
        ("memory", [each.memory_bytes for each in held]),
    ):
        late = sizes[len(sizes) // 2 :]
        rising = sum(b > a for a, b in pairwise(sizes)) >= 0.75 * (len(sizes) - 1)
        grown, lately = sizes[-1] - sizes[0], late[-1] - late[0]
        if rising and grown > max(MEMORY_BYTES, MEMORY_SHARE * sizes[0]) and lately > 0.25 * grown:
            yield finding(
                "law.resources.memory_does_not_grow",
                "warning",
                case.last_step,
                symptom=f"{name} grows by {grown / 2**20 / (held[-1].step - held[0].step):.3g} MiB a step: "
                f"{sizes[0] / 2**20:.0f} MiB after step {held[0].step}, {sizes[-1] / 2**20:.0f} after step "
                f"{held[-1].step}",
                cause="something is kept of every step: outputs, batches, histories, caches without a bound",
                remedy="look for lists and dicts that the loop appends to; keep numbers, not tensors",
                sure=0.75,
                since_step=held[0].step,
                evidence=[("MiB, by step", [[h.step, s // 2**20] for h, s in zip(held, sizes)][-8:], "constant")],
            )
            return
    yield Holds(f"{held[-1].memory_bytes / 2**20:.0f} MiB after step {held[-1].step}")


def steps_keep_their_time(case: Case) -> Iterator[Verdict]:
    """Steps do not become slower and slower. Of each eighth of them the fastest are compared: load of others is not."""
    times = [each.values["step_s"] - each.values.get("wait_s", 0.0) for each in _plain(case)]
    if len(times) < 8 * OCTILES:
        return
    size = len(times) // OCTILES
    least = [min(times[size * n : size * (n + 1)]) for n in range(OCTILES)]
    if not _rises(least) or least[-1] < SLOWER * least[0]:
        yield Holds(f"{1000 * least[0]:.3g} ms at first, {1000 * least[-1]:.3g} ms at last")
        return
    yield finding(
        "law.resources.steps_keep_their_time",
        "info",
        case.last_step,
        symptom=f"steps become slower and slower: {1000 * least[0]:.3g} ms at first, {1000 * least[-1]:.3g} ms at last",
        cause="each step does more than the one before: over a list that grows, with hooks or graphs that are added",
        remedy="profile a late step; look for what is looped over or concatenated",
        sure=0.7,
        evidence=[("fastest step of each eighth, ms", [round(1000 * each, 3) for each in least], "constant")],
    )


def data_are_there_in_time(case: Case) -> Iterator[Verdict]:
    """Less than half of a step is waited for its data."""
    steps = _plain(case)[-64:]
    waits = [each.values["wait_s"] for each in steps if each.values.get("wait_s")]
    if len(steps) < 16:
        return
    if len(waits) < len(steps) // 2:
        yield NotApplicable("no DataLoader was waited for")
        return
    wait, step = statistics.median(waits), statistics.median(each.values["step_s"] for each in steps)
    if wait < WAIT_SHARE * step or wait < WAIT_S:
        yield Holds(f"{1000 * wait:.3g} of {1000 * step:.3g} ms of a step are waited for data")
        return
    yield finding(
        "law.resources.data_are_there_in_time",
        "warning",
        case.last_step,
        symptom=f"{1000 * wait:.3g} of {1000 * step:.3g} ms of a step are waited for data",
        cause="the loader reads or prepares slower than the model computes",
        remedy="time a loop over the loader alone, with num_workers=0 and with more: where a sample is read fast, "
        "handing batches over from workers costs more than it saves; where it is slow, add workers or prepare the data",
        sure=0.9,
        stage="input",
        evidence=[("share of a step that is waited", round(wait / step, 2), f"below {WAIT_SHARE:g}")],
    )


def _plain(case: Case) -> list[Watched]:
    """Recorded steps with their time, without the first ones and those that were recorded with care."""
    return [each for each in case.watched if each.step > 8 and "step_s" in each.values and "lines" not in each.values]


LAWS: tuple[Law, ...] = (
    Law("resources.hooks_do_not_grow", hooks_do_not_grow),
    Law("resources.files_and_threads_do_not_grow", files_and_threads_do_not_grow),
    Law(
        "resources.graphs_are_released",
        graphs_are_released,
        named_by=("mem.graph_retained_by_scalar", "mem.outputs_accumulated", "mem.graph_grows"),
    ),
    Law("resources.memory_does_not_grow", memory_does_not_grow, named_by=("mem.*",)),
    Law("resources.steps_keep_their_time", steps_keep_their_time, named_by=("mem.*",)),
    Law("resources.data_are_there_in_time", data_are_there_in_time, named_by=("perf.data_bound",)),
)
