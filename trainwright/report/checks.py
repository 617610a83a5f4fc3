"""The list of checks, or their results in a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from trainwright.doctor.check import CheckState
from trainwright.doctor.discovery import all_checks
from trainwright.runs.json_values import JsonValue

_MARKS = {"found": "FOUND", "passed": "passed", "not applicable": "-", "not examined": "?"}


@dataclass(frozen=True)
class CheckList:
    """``states`` are the results of a run; None for the checks alone."""

    states: Sequence[CheckState] | None = None

    exit_code = 0

    def lines(self) -> list[str]:
        """Return each check with its title, or with its result and reason, as text."""
        if self.states is None:
            checks = all_checks()
            width = max(len(each.code) for each in checks)
            return [f"{each.code:{width}}  {each.page.title}" for each in checks]
        width = max((len(each.code) for each in self.states), default=0)
        lines = [f"{each.code:{width}}  {_MARKS[each.state]:6}  {each.why}" for each in self.states]
        counts: Counter[str] = Counter(each.state for each in self.states)
        return [*lines, ", ".join(f"{counts[state]} {state}" for state in _MARKS)]

    def to_json(self) -> dict[str, JsonValue]:
        """Return the output of ``--json``: by code, what each check finds, or its result in the run."""
        if self.states is None:
            return {
                "checks": {
                    each.code: {
                        "finds": each.page.title,
                        "severity": each.severity,
                        "stage": each.stage,
                    }
                    for each in all_checks()
                }
            }
        return {"checks": {each.code: {"state": each.state, "why": each.why} for each in self.states}}
