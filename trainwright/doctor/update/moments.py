"""The law of how long the moments of an optimizer are averaged."""

from __future__ import annotations

from collections.abc import Iterator

from trainwright.doctor.case import Case
from trainwright.doctor.finding import finding
from trainwright.doctor.law import Holds, NotApplicable, Verdict

KINDS = ("Adam", "AdamW", "NAdam", "RAdam")
"""Optimizers that divide an average of gradients by the root of one of their squares."""


def squares_are_averaged_longer(case: Case) -> Iterator[Verdict]:
    """The average of the squares, which divides, is over at least as many steps as that of the gradients."""
    optimizers = case.facts("contract").get("optimizers") or ()
    groups = [(o["kind"], g) for o in optimizers if o["kind"] in KINDS for g in o["groups"] if "second_decay" in g]
    if not groups:
        if optimizers:
            yield NotApplicable("no optimizer divides one average by another")
        return
    wrong = [(kind, group) for kind, group in groups if group["second_decay"] < group["first_decay"]]
    if not wrong:
        kind, group = groups[0]
        yield Holds(f"{kind}, betas of {group['first_decay']:g} and {group['second_decay']:g}")
        return
    kind, group = wrong[0]
    first, second = group["first_decay"], group["second_decay"]
    yield finding(
        "law.update.squares_are_averaged_longer",
        "warning",
        case.last_step,
        symptom=f"{kind} averages gradients over about {1 / (1 - first):.3g} steps and their squares, which divide, "
        f"over {1 / (1 - second):.3g}",
        cause="the two betas are exchanged, or one of them has a factor too much",
        remedy="betas=(0.9, 0.999), or another pair whose second is the larger",
        sure=0.8,
        stage="update",
        since_step=1,
        evidence=[("decays of the two averages", [first, second])],
    )
