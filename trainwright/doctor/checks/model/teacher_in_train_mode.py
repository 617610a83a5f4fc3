"""See the function."""

from __future__ import annotations

from collections.abc import Iterator

from trainwright.doctor.check import Result, check
from trainwright.doctor.context import RunContext
from trainwright.doctor.facts.modules import ModulesFacts
from trainwright.doctor.finding import listed
from trainwright.runlog.records import Where


@check(stage="forward", confidence=0.85, needs=ModulesFacts)
def teacher_in_train_mode(run: RunContext) -> Iterator[Result]:
    """A frozen module, such as a teacher, runs in train mode, so its dropout is active.

    How it is detected: dropout that is on and is called only without gradients, in training passes of two or more
    steps, inside of a module whose weights no optimizer holds and nothing changes.

    Exceptions: a module that follows the weights (mean teacher, MoCo), where noise is meant.

    Usual cause: `model.train()` also puts the frozen teacher into train mode: its dropout makes the targets noisy.

    Looks like: model.frozen_statistics_drift.

    Fix: `model.teacher.eval()` after each `model.train()`, or override `train()` of the model.

    Sources: yxuansu/TaCL#11, trl PR #5990.
    """
    facts = run.latest(ModulesFacts)
    if facts is not None and facts.noisy:
        yield run.finding(
            run.last_step,
            symptom=f"{listed(facts.noisy)} is frozen, and runs in train mode with dropout on",
            where=Where(module=facts.noisy[0]),
            since_step=1,
            evidence=[("frozen modules with active dropout", list(facts.noisy[:8]), [])],
        )
