"""The line of the user's source that made the call a finding is about, where the recorder saw that call being made.

A watched step may carry ``values["lines"]``: its calls in their order, each with the place in the user's code that made
it, as ``[["zero_grad", "train.py:40"], ["backward", "train.py:44"], ["step", "train.py:46"]]``. The kinds are those of
its events. The recorder writes them only for steps that are looked at, and only where they differ from those of the
last record that has them, so a step without lines has those of the step before. The same list may come with the
outcome ``unfinished``, for a loop in which no step was ever finished. The torch functions that were called outside of
the models come last, as ``["op:cross_entropy", "train.py:43"]``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from trainwright.doctor.case import Case
from trainwright.runlog.records import Where

CallLine = Sequence[str]
"""The kind of a call, and where it was made: ``["backward", "train.py:44"]``."""


def line_for(code: str, calls: Sequence[CallLine]) -> str | None:
    """The one line of ``calls`` that ``code`` is about, as ``file.py:44``; None where there is none, or several."""
    return _only(CALLS[code](calls)) if code in CALLS else None


def line_of_op(where: Where, calls: Sequence[CallLine]) -> str | None:
    """The one line of ``calls`` where the torch function of ``where`` is called outside of the models; else None."""
    return None if where.op is None or where.module is not None else _only(_all(f"op:{where.op}")(calls))


def _only(lines: Iterable[str]) -> str | None:
    several = set(lines)
    return several.pop() if len(several) == 1 else None


def calls_at(case: Case, step: int) -> Sequence[CallLine]:
    """The calls of ``step`` as far as they were recorded: of that step or the nearest before it, else after it."""
    recorded = [(each.step, each.values["lines"]) for each in case.watched if each.values.get("lines")]
    before = [lines for at, lines in recorded if at <= step]
    nearest = before[-1:] or [lines for _, lines in recorded[:1]] or [case.facts("unfinished").get("lines") or ()]
    calls: Sequence[CallLine] = nearest[0]
    return calls


def _all(kind: str) -> Callable[[Sequence[CallLine]], Iterable[str]]:
    """Selects every call of one kind."""
    return lambda calls: (line for each, line in calls if each == kind)


def _dropped_before(kind: str) -> Callable[[Sequence[CallLine]], Iterable[str]]:
    """Selects each zero_grad that comes after a backward pass and before a call of ``kind``, the next of the two."""

    def select(calls: Sequence[CallLine]) -> Iterable[str]:
        had_backward = False
        dropped: list[str] = []
        for each, line in calls:
            if each == kind:
                yield from dropped
            if each in ("backward", "step"):
                had_backward, dropped = each == "backward", []
            elif each == "zero_grad" and had_backward:
                dropped.append(line)

    return select


CALLS: Mapping[str, Callable[[Sequence[CallLine]], Iterable[str]]] = {
    "optim.missing_zero_grad": _all("backward"),
    "optim.zero_grad_before_step": _dropped_before("step"),
    "optim.step_never_called": _all("backward"),
    "optim.stepped_twice": _all("step"),
    "gradient.clip_before_unscale": _all("clip"),
    "gradient.clip_no_effect": _all("clip"),
    "gradient.clip_always_active": _all("clip"),
    "gradient.clip_spreads_nan": _all("clip"),
    "gradient.accumulation_not_normalised": _all("backward"),
    "gradient.accumulation_discarded": _dropped_before("backward"),
    "schedule.unit_mismatch": _all("schedule"),
    "schedule.cosine_climbs": _all("schedule"),
    "schedule.plateau_mode": _all("schedule"),
}
"""By the code of a finding: selects the lines of the calls that it is about."""
