"""The law of constants: decays, slopes and shares lie where their definition and their use put them."""

from __future__ import annotations

from collections.abc import Iterator

from trainwright.doctor.case import Case
from trainwright.doctor.finding import finding
from trainwright.doctor.law import Holds, Verdict
from trainwright.doctor.program.facts import ConstantsFacts
from trainwright.runlog.records import Where


def constants_are_usual(case: Case) -> Iterator[Verdict]:
    """The constants of optimizers and of torch's modules lie in the range that they are made for."""
    facts = case.newest(ConstantsFacts)
    if facts is None:
        return
    if not facts.odd:
        yield Holds(f"{facts.looked_at} objects")
        return
    first = facts.odd[0]
    yield finding(
        "law.program.constants_are_usual",
        "warning",
        max(1, case.last_step),
        symptom=f"{first.name} of {first.owner} is {first.value:.6g}; where it is of use it lies between {first.low:g} "
        f"and {first.high:g}",
        cause="a digit too much or too few, the complement of the value, or two arguments in each other's place",
        remedy=f"{first.owner} has a default that fits most models: leave the argument out, or go back to that value",
        sure=0.75,
        stage="update" if first.module is None else "forward",
        where=Where(module=first.module),
        evidence=[(f"{each.owner}.{each.name}", each.value, [each.low, each.high]) for each in facts.odd],
    )
