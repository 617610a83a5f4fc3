"""See the function."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from trainwright.doctor.check import Result, check
from trainwright.doctor.context import RunContext
from trainwright.doctor.facts.resources import MemoryFacts
from trainwright.doctor.shared_growth import READINGS

OLD_ENOUGH, MOST = 8, 0.3
"""Steps whose losses must still be there, and the fraction of all old ones; a loop may keep the last few."""


@check(stage="loop", confidence=0.95, needs=MemoryFacts, explains=("resources.memory_grows",))
def graphs_kept(run: RunContext) -> Iterator[Result]:
    """Graphs of earlier steps are still in memory: a running total or a list of losses keeps them.

    How it is detected: weak references to the graphs behind the losses of the last 64 steps; eight or more of those
    that are older than three steps are alive, or all tensors with a graph rise at a steady rate over four counts.

    Exceptions: a bounded window, such as truncated backpropagation through time, which is filled and then constant.

    Usual cause: `total += loss`, or `losses.append(loss)`.

    Looks like: resources.outputs_kept, where the outputs hold the graphs; resources.graph_grows.

    Fix: keep `loss.detach()` or `loss.item()`.

    Sources: PyTorch FAQ, "Don't accumulate history across your training loop".
    """
    facts = max((each for _, each in run.every(MemoryFacts)), key=lambda each: each.graphs_alive, default=MemoryFacts())
    count, latest = facts.graphs_alive, run.latest(MemoryFacts)
    has_outputs = facts.outputs_alive >= OLD_ENOUGH and facts.outputs_alive >= MOST * facts.old_outputs
    if count >= OLD_ENOUGH and count >= MOST * facts.old_losses and not has_outputs:
        listed = facts.losses_alive >= 0.8 * count
        yield run.finding(
            run.last_step,
            symptom=f"the graphs of {count} earlier losses are still in memory, one more with each step",
            cause="losses are kept in a list with their graphs" if listed else "losses are added up with their graphs",
            evidence=[
                ("graphs alive of losses more than 3 steps old", count, 0),
                ("those losses themselves", facts.losses_alive, 0),
            ],
        )
        return
    rows = latest.with_graph[-READINGS:] if latest and not has_outputs else ()
    rates = [(b.count - a.count) / max(1, b.step - a.step) for a, b in pairwise(rows)]
    if (
        len(rows) == READINGS
        and min(rates) >= 0.25
        and max(rates) <= 4 * min(rates)
        and rows[-1].count - rows[0].count >= 8
    ):
        yield run.finding(
            run.last_step,
            symptom=f"more and more tensors with a graph are held: {rows[0].count} at step {rows[0].step}, "
            f"{rows[-1].count} at step {rows[-1].step}",
            cause="outputs, losses or states of earlier steps are kept with the graph that made them",
            remedy="detach() what is kept beyond its step",
            sure=0.85,
            evidence=[("by step", [[each.step, each.count] for each in rows], "constant")],
        )
