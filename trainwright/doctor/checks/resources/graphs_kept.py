from trainwright.doctor import Every, Results, RunContext, check
from trainwright.doctor.facts.resources import MemoryFacts

MIN_STEPS = 8  # Number of steps whose losses or outputs are still alive. A loop may keep the last few.
MIN_FRACTION = 0.3  # Fraction of all old losses or outputs that are still alive


@check(stage="loop", confidence=0.95, explains=("resources.memory_grows",))
def graphs_kept(run: RunContext, exams: Every[MemoryFacts]) -> Results:
    """Graphs of earlier steps are still in memory: a running total, or a list of losses or outputs, keeps them.

    How it is detected: by weak references to the outputs of the last 64 steps and to the graphs behind their losses. Of
    the outputs or graphs that are more than three steps old, at least eight and at least 30 % are alive.

    Exceptions: outputs without a graph; a bounded window, such as truncated backpropagation through time.

    Usual cause: `total += loss`, `losses.append(loss)`, or outputs that are collected for a metric.

    Looks like: resources.graph_grows, where one graph becomes longer.

    Fix: keep `loss.item()` or `loss.detach()`, and `output.detach().cpu()`.

    Sources: PyTorch FAQ, "My model reports cuda runtime error(2): out of memory".
    """
    every = [facts for _, facts in exams]
    for facts in sorted(every, key=lambda each: max(each.graphs_alive, each.outputs_alive))[-1:]:
        if facts.outputs_alive >= MIN_STEPS and facts.outputs_alive >= MIN_FRACTION * facts.old_outputs:
            symptom = f"{facts.outputs_alive} outputs of earlier steps are still in memory with their graphs"
            cause = "outputs are collected without detach()"
        elif facts.graphs_alive >= MIN_STEPS and facts.graphs_alive >= MIN_FRACTION * facts.old_losses:
            symptom = f"the graphs of {facts.graphs_alive} earlier losses are still in memory"
            in_list = facts.losses_alive >= 0.8 * facts.graphs_alive
            cause = f"losses are {'kept in a list' if in_list else 'added up'} with their graphs"
        else:
            return
        yield run.finding(
            symptom=symptom,
            cause=cause,
            evidence=[
                ("outputs alive that are more than 3 steps old", facts.outputs_alive, 0),
                ("graphs alive of losses that are more than 3 steps old", facts.graphs_alive, 0),
                ("bytes of those outputs", facts.output_bytes, 0),
            ],
        )
