"""See the function."""

from __future__ import annotations

from collections.abc import Iterator

from trainwright.doctor.check import Result, check
from trainwright.doctor.context import RunContext
from trainwright.doctor.facts.modules import ModulesFacts
from trainwright.doctor.finding import listed
from trainwright.runlog.records import Where


@check(stage="buffers", confidence=0.7, needs=ModulesFacts)
def frozen_statistics_drift(run: RunContext) -> Iterator[Result]:
    """The weights of a module are frozen, but its running statistics are updated.

    How it is detected: BatchNorm in train mode in two or more steps, inside of a module whose weights no optimizer
    holds and nothing changes.

    Usual cause: `requires_grad_(False)` freezes weights only; `model.train()` leaves BatchNorm in train mode.

    Looks like: model.teacher_in_train_mode.

    Fix: `backbone.eval()` after each `model.train()`.
    """
    facts = run.latest(ModulesFacts)
    if facts is not None and facts.drifting:
        yield run.finding(
            run.last_step,
            symptom=f"{listed(facts.drifting)} is frozen, and its BatchNorm layers run in train mode",
            where=Where(module=facts.drifting[0]),
            since_step=1,
            evidence=[("frozen modules whose statistics move", list(facts.drifting[:8]), [])],
        )
