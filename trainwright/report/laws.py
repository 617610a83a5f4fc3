"""The laws as a list: what each says, or what became of it in a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainwright.doctor import FAMILIES
from trainwright.doctor.law import OF_LAWS, LawState
from trainwright.doctor.own_laws import OWN
from trainwright.doctor.pages import title
from trainwright.runlog.json_values import JsonValue

_MARKS = {"held": "held", "broken": "BROKEN", "not applicable": "-", "not looked at": "?"}


@dataclass(frozen=True)
class LawList:
    """``states`` are those of a run; None for the laws alone."""

    states: Sequence[LawState] | None = None

    exit_code = 0

    def lines(self) -> list[str]:
        """For a person: by family, each with what it says or with what was seen."""
        names = [law.name for family in FAMILIES for law in family.laws]
        states = {each.name: each for each in self.states or ()}
        width = max(map(len, [*names, *states]))
        if self.states is None:
            return [f"{name:{width}}  {title(OF_LAWS + name)}" for name in names]
        own = [name for name in states if name.startswith(OWN)]
        lines = [f"{name:{width}}  {_MARKS[states[name].state]:6}  {states[name].why}" for name in (*names, *own)]
        counts = [sum(each.state == state for each in self.states) for state in _MARKS]
        return [*lines, ", ".join(f"{count} {state}" for count, state in zip(counts, _MARKS))]

    def to_json(self) -> dict[str, JsonValue]:
        """What ``--json`` prints: by name, what each says, and its state in the run."""
        laws: dict[str, JsonValue] = {}
        states = {each.name: each for each in self.states or ()}
        for law in (law for family in FAMILIES for law in family.laws):
            state = states.get(law.name)
            facts: dict[str, JsonValue] = {"statement": title(law.code), "effort": law.effort}
            laws[law.name] = facts if state is None else {**facts, "state": state.state, "why": state.why}
        own = [each for each in states.values() if each.name.startswith(OWN)]
        return {"laws": {**laws, **{each.name: {"state": each.state, "why": each.why} for each in own}}}
