"""See the function."""

from __future__ import annotations

from collections.abc import Iterator

from trainwright.doctor.check import Result, check
from trainwright.doctor.context import RunContext
from trainwright.doctor.facts.weights import WeightsFacts
from trainwright.doctor.finding import listed
from trainwright.runlog.records import Where


@check(stage="forward", confidence=0.75, needs=WeightsFacts)
def layers_start_equal(run: RunContext) -> Iterator[Result]:
    """Layers start as copies of one another: their random weights are equal.

    Why it matters: the layers begin with the same function and stay alike for long; training is slower.

    How it is detected: the bits of weights at the same place of two modules in one list, before the first step.

    Exceptions: constant weights, and weights that were trained before.

    Usual cause: one initialised layer is deep-copied (`copy.deepcopy`, `nn.TransformerEncoder`), so the copies are
    identical at the start.

    Looks like: model.layers_share_weights, where they are one module.

    Fix: initialise again after copying: `for p in encoder.parameters(): if p.dim() > 1: nn.init.xavier_uniform_(p)`.

    Sources: pytorch/pytorch#72253, #86274.
    """
    facts = run.latest(WeightsFacts)
    if facts is not None and facts.equal:
        names = facts.equal[0]
        yield run.finding(
            max(1, facts.steps),
            symptom=f"{listed(names)} start with equal values",
            since_step=1,
            where=Where(module=names[0].rpartition(".")[0]),
            evidence=[("groups of equal weights", len(facts.equal), 0)],
        )
