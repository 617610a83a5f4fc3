from itertools import pairwise

from trainwright.doctor import Results, RunContext, check
from trainwright.doctor.facts.resources import MemoryFacts


@check(stage="loop", confidence=0.95, explains=("resources.graphs_kept", "resources.memory_grows"))
def graph_grows(run: RunContext, facts: MemoryFacts) -> Results:
    """The graph of a step reaches back into earlier steps, and is longer in each.

    How it is detected: the nodes of the graph behind the loss are counted in at least five steps. Their number rises
    steadily and doubles, and some of them belong to earlier steps.

    Usual cause: a state that is carried from step to step is not detached. `retain_graph=True` hides the error that
    would report it.

    Looks like: resources.graphs_kept, where old graphs are kept, but backward does not traverse them.

    Fix: `hidden = hidden.detach()` between steps, for an LSTM `tuple(h.detach() for h in hidden)`; remove
    `retain_graph=True`.

    Sources: pytorch/examples (`repackage_hidden` of the word language model).
    """
    rows = facts.graphs
    rates = [(b.nodes - a.nodes) / (b.step - a.step) for a, b in pairwise(rows)]
    if len(rows) < 5 or min(rates) <= 0 or max(rates) > 2 * min(rates):
        return
    if not rows[-1].goes_back or rows[-1].nodes < 2 * rows[0].nodes:
        return
    yield run.finding(
        symptom=f"the graph of the loss grows by {rates[-1]:.0f} nodes in each step: {rows[0].nodes} -> "
        f"{rows[-1].nodes}",
        severity="critical" if any(each.retained for each in rows) else None,
        evidence=[("nodes in the graph of the loss, by step", [[each.step, each.nodes] for each in rows], "constant")],
    )
