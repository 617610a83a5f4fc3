"""A check: a property of every correct run, or a known fault. Its docstring is its page.

Each check is in a file ``checks/<topic>/<name>.py``, or ``contrib/<pack>/<name>.py`` if it serves one domain. The
function has the name of the file, and the code of its findings is ``<topic>.<name>``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias

from trainwright.doctor.context import Measurement, RunContext
from trainwright.doctor.docstring import Page, parse_page
from trainwright.doctor.finding import ExperimentRequest, Finding
from trainwright.runs.findings import Severity, Stage

State: TypeAlias = Literal["passed", "found", "not applicable", "not examined"]


@dataclass(frozen=True)
class Passed:
    """The comparison that succeeded, such as ``12 parameters over 40 steps``. A
    check that yields nothing also passed.
    """

    what: str


@dataclass(frozen=True)
class NotApplicable:
    """The reason why the check does not apply to this run or could not be made."""

    why: str


Result: TypeAlias = Finding | ExperimentRequest | Passed | NotApplicable
Results: TypeAlias = Iterator[Result]
Judge: TypeAlias = Callable[[RunContext], Results]


@dataclass(frozen=True)
class Check:
    """A check and its metadata.

    Attributes:
        code: ``topic.name``, the code of its findings.
        judge: A function of a RunContext that yields findings and requests for further experiments.
        stage: The part of a training step that its findings are about. Findings may override it.
        severity: The default severity of its findings.
        confidence: The default probability that a finding is right.
        needs: Measurements that the check requires, all of them.
        explains: Codes of checks, or topics such as ``loss.*``, whose findings follow from a finding of this check.
            They are folded into it.
        names_cause: False for a check that detects a symptom without its cause. Causes are ranked first.
        points_at: The kind of call whose line in the user's source its findings show by default.
        pack: Its pack in ``contrib``; None for a check that is always made.
    """

    code: str
    judge: Judge
    stage: Stage
    severity: Severity
    confidence: float
    needs: tuple[type[Measurement], ...] = ()
    explains: tuple[str, ...] = ()
    names_cause: bool = True
    points_at: str | None = None
    pack: str | None = None

    @property
    def topic(self) -> str:
        """The part of the code before the dot."""
        return self.code.partition(".")[0]

    @cached_property
    def page(self) -> Page:
        """The sections of the docstring."""
        return parse_page(self.judge.__doc__ or "")


@dataclass(frozen=True)
class CheckState:
    """The result of one check in one run, with the comparison, the finding, or the reason why there is none."""

    code: str
    state: State
    why: str


def check(
    *,
    stage: Stage,
    severity: Severity = "warning",
    confidence: float = 0.9,
    needs: type[Measurement] | tuple[type[Measurement], ...] = (),
    explains: tuple[str, ...] = (),
    names_cause: bool = True,
    points_at: str | None = None,
) -> Callable[[Judge], Check]:
    """Decorates a function in a file of its name in ``checks`` or ``contrib`` and makes a Check of it."""

    def decorated(judge: Judge) -> Check:
        *_, kind, topic, name = judge.__module__.split(".")
        assert name == judge.__name__ and kind in ("checks", "contrib"), judge.__module__
        kinds = needs if isinstance(needs, tuple) else (needs,)
        pack = topic if kind == "contrib" else None
        code = f"{topic}.{name}"
        return Check(code, judge, stage, severity, confidence, kinds, explains, names_cause, points_at, pack)

    return decorated
