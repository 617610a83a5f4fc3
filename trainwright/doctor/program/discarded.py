"""Of several optimizers: backward passes whose gradients are dropped before any of these has used them."""

from __future__ import annotations

from collections.abc import Sequence

from trainwright.doctor.case import Case
from trainwright.doctor.finding import Finding, finding
from trainwright.runlog.records import Watched


def unused_backwards(record: Watched, optimizers: Sequence[int]) -> tuple[int, int]:
    """Of the backward passes of a step: how many were used by no update before every optimizer had dropped them; all.

    One that is not dropped yet counts as used.
    """
    live: list[set[int]] = []
    unused = backwards = 0
    for kind, value in record.events:
        if kind == "backward":
            live.append(set(optimizers))
            backwards += 1
        elif kind == "step" and isinstance(value, dict):
            live = [each for each in live if value["optimizer"] not in each]
        elif kind == "scaler_skipped":
            live = []
        elif kind == "zero_grad":
            live = [each - (set(optimizers) if value == -1 else {value}) for each in live]
            unused += live.count(set())
            live = [each for each in live if each]
    return unused, backwards


def dropped_by_all(case: Case, steps: Sequence[Watched], optimizers: Sequence[int]) -> Finding | None:
    """In half of the steps some backward pass is for nothing."""
    if len(optimizers) < 2:
        return None
    counts = [(step, *unused_backwards(step, optimizers)) for step in steps if not step.values.get("used_by_hand")]
    wrong = [each for each in counts if each[1]]
    if len(wrong) < 2 or 2 * len(wrong) < len(counts):
        return None
    last, unused, backwards = wrong[-1]
    return finding(
        "law.program.calls_come_in_order",
        "warning",
        last.step,
        symptom=f"the gradients of {unused} of {backwards} backward passes of a step are dropped before an update",
        cause="an optimizer steps more seldom than its loss is differentiated: its step() stands behind a loop",
        remedy="call step() of an optimizer after each backward() that is meant for it",
        sure=0.85,
        stage="update",
        since_step=wrong[0][0].step,
        evidence=[("backward passes that no update uses", unused, 0), ("steps like this", len(wrong), 0)],
    )
