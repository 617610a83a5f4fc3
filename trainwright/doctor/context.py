"""A typed, read-only view of the measurements of a run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Protocol, TypeAlias, TypeVar, Unpack

from trainwright.doctor.finding import Calls, Details, Finding, make_finding
from trainwright.runs.findings import Severity
from trainwright.runs.records import Examined, Record, Watched, Where, construct

if TYPE_CHECKING:
    from trainwright.doctor.check import Check


class Measurement(Protocol):
    """A dataclass of ``doctor/facts``. ``experiment`` is the name of its records in the log."""

    experiment: ClassVar[str]


M = TypeVar("M", bound=Measurement)
Decoded: TypeAlias = tuple[int, type]
"""The identity of a record, and the class that it was decoded as."""
Every: TypeAlias = Sequence[tuple[int, M]]
"""A parameter of a check: all measurements of a kind with their steps, oldest first."""


class RunContext:
    """The records of one run, oldest first.

    Args:
        records: The records. A long run does not have one for every step.
        finished: No more records will come, so a check may report events that never happened.
        decoded: The measurements that earlier contexts with these records have decoded.
    """

    def __init__(
        self, records: Sequence[Record], *, finished: bool = False, decoded: dict[Decoded, object] | None = None
    ) -> None:
        self.records, self.finished = records, finished
        self.steps: list[Watched] = [record for record in records if isinstance(record, Watched)]  # oldest first
        self._outcomes = by_experiment(records)
        self._decoded = {} if decoded is None else decoded
        self._check: Check | None = None

    def for_check(self, check: Check) -> RunContext:
        """Returns a view for one check. It supplies the defaults of the check's findings."""
        view = object.__new__(RunContext)  # copy.copy takes ten times as long
        view.__dict__ |= self.__dict__ | {"_check": check}
        return view

    @property
    def last_step(self) -> int:
        """The newest step with a record; 0 without one."""
        newest = [outcomes[-1].step for outcomes in self._outcomes.values()]
        return max([record.step for record in self.steps[-1:]] + newest, default=0)

    def latest(self, kind: type[M]) -> M | None:
        """Returns the newest measurement of a kind; None without one."""
        return next((self._measured(each, kind) for each in reversed(self._seen(kind))), None)

    def measured(self, kind: type[M]) -> M:
        """Returns the newest measurement of a kind. There must be one."""
        measurement = self.latest(kind)
        assert measurement is not None, kind.__name__
        return measurement

    def every(self, kind: type[M]) -> Every[M]:
        """Returns all measurements of a kind with their steps, oldest first."""
        return [(each.step, self._measured(each, kind)) for each in self._seen(kind)]

    def not_measured(self, kind: type[Measurement]) -> str | None:
        """Returns the reason why there is no measurement of a kind; None if there is one."""
        if self._seen(kind):
            return None
        outcomes = self._outcomes.get(kind.experiment, [])
        return str(outcomes[-1].values["blind"]) if outcomes else "it was not measured"

    def was_tried(self, kind: type[Measurement]) -> bool:
        """Returns True if the measurement was made or attempted."""
        return kind.experiment in self._outcomes

    def calls_at(self, step: int) -> Calls:
        """Returns the recorded calls of a step in order, with their lines in the user's source.

        Example: ``(("zero_grad", "train.py:40"), ("backward", "train.py:44"))``. The kinds are those of the step's
        events. Torch functions outside of the models come last, as ``("op:cross_entropy", "train.py:43")``. Lines are
        recorded only in steps whose lines differ from the previous step. A loop without a finished step has its lines
        in the outcome ``unfinished``.
        """
        recorded = [(each.step, each.values["lines"]) for each in self.steps if each.values.get("lines")]
        before = [lines for at, lines in recorded if at <= step]
        unfinished = [each.values.get("lines") for each in self._outcomes.get("unfinished", [])[-1:]]
        nearest = [*before[-1:], *(lines for _, lines in recorded[:1]), *unfinished]
        return tuple((str(kind), str(line)) for kind, line in next((lines for lines in nearest if lines), ()))

    def line_of(self, kind: str, step: int) -> str | None:
        """Returns the line of the calls of a kind, such as ``train.py:44``; None unless exactly one is known."""
        lines = {line for each, line in self.calls_at(step) if each == kind}
        return lines.pop() if len(lines) == 1 else None

    def finding(
        self,
        step: int | None = None,
        *,
        symptom: str = "",
        cause: str = "",
        remedy: str = "",
        severity: Severity | None = None,
        sure: float | None = None,
        **details: Unpack[Details],
    ) -> Finding:
        """Returns a finding of the current check. Defaults come from the check and its docstring.

        Args:
            step: The step that shows it. Default: the step of the newest measurement of the first kind that the check
                needs, or the last step.
            symptom: What is wrong, with numbers. Default: the first sentence of the docstring.
            cause: The usual cause. Default: that section of the docstring.
            remedy: The fix. Default: that section of the docstring.
            severity: Default: the severity of the check.
            sure: Probability that the finding is right. Default: the confidence of the check.
            details: ``where``, ``evidence``, ``since_step``, ``trial``, ``explains``, ``stage`` and ``names_cause``.
        """
        check = self._check
        assert check is not None, "findings are made by checks"
        if step is None:
            step = max(1, self._seen(check.needs[0])[-1].step if check.needs else self.last_step)
        details.setdefault("stage", check.stage)
        details.setdefault("names_cause", check.names_cause)
        details.setdefault("since_step", check.since_step)
        where = details.get("where", Where())
        calls = check.points_at or ((f"op:{where.op}",) if where.op and where.module is None else ())
        if calls and where.source is None and where.shown_at is None:
            lines = (self.line_of(each, step) for each in calls)
            details["where"] = replace(where, source=next((line for line in lines if line), None))
        details["explains"] = (*check.explains, *details.get("explains", ()))
        return make_finding(
            check.code,
            severity or check.severity,
            step,
            symptom=symptom or check.page.title.rstrip("."),
            cause=cause or check.page.words("Usual cause"),
            remedy=remedy or check.page.words("Fix"),
            sure=check.confidence if sure is None else sure,
            **details,
        )

    def _seen(self, kind: type[Measurement]) -> list[Examined]:
        return [each for each in self._outcomes.get(kind.experiment, []) if "blind" not in each.values]

    def _measured(self, outcome: Examined, kind: type[M]) -> M:
        """Decodes a measurement once, because several checks use it."""
        known = self._decoded.get((id(outcome), kind))
        if not isinstance(known, kind):
            known = self._decoded[id(outcome), kind] = construct(kind, outcome.values)
        return known


def by_experiment(records: Iterable[Record]) -> dict[str, list[Examined]]:
    """Returns the outcomes of each experiment, oldest first."""
    found: dict[str, list[Examined]] = {}
    for record in records:
        if isinstance(record, Examined):
            found.setdefault(record.experiment, []).append(record)
    return found
