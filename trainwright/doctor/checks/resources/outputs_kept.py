"""See the function."""

from __future__ import annotations

from collections.abc import Iterator

from trainwright.doctor.check import Result, check
from trainwright.doctor.context import RunContext
from trainwright.doctor.facts.resources import MemoryFacts

OLD_ENOUGH, MOST = 8, 0.3


@check(stage="loop", confidence=0.95, needs=MemoryFacts, explains=("resources.graphs_kept", "resources.memory_grows"))
def outputs_kept(run: RunContext) -> Iterator[Result]:
    """Outputs of earlier steps are still in memory with their graphs.

    How it is detected: weak references to the outputs of the last 64 steps; eight or more of those that are older than
    three steps are alive and have a graph.

    Exceptions: outputs without a graph, which may be kept on purpose.

    Usual cause: outputs are collected in a list, for a metric, without `detach()`.

    Looks like: resources.graphs_kept, where losses hold the graphs.

    Fix: collect `output.detach().cpu()`, or what is computed from it.

    Sources: PyTorch FAQ, "Don't hold onto tensors and variables you don't need".
    """
    facts = max(
        (each for _, each in run.every(MemoryFacts)), key=lambda each: each.outputs_alive, default=MemoryFacts()
    )
    if facts.outputs_alive >= OLD_ENOUGH and facts.outputs_alive >= MOST * facts.old_outputs:
        yield run.finding(
            run.last_step,
            symptom=f"{facts.outputs_alive} outputs of earlier steps are still in memory with their graphs",
            evidence=[
                ("outputs alive that are more than 3 steps old", facts.outputs_alive, 0),
                ("their bytes", facts.output_bytes, 0),
            ],
        )
