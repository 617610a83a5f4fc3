"""A check: a property of every correct run, or a known fault. Its docstring is its page.

A check lies alone in ``checks/<topic>/<name>.py``, or in ``contrib/<pack>/<name>.py`` where it serves one domain. The
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
    """What was compared and found right: ``12 parameters over 40 steps``. A check that yields nothing passed, too."""

    what: str


@dataclass(frozen=True)
class NotApplicable:
    """Why the check says nothing about this run, or could not be made."""

    why: str


Result: TypeAlias = Finding | ExperimentRequest | Passed | NotApplicable
Judge: TypeAlias = Callable[[RunContext], Iterator[Result]]


@dataclass(frozen=True)
class Check:
    """A check with what it declares.

    Attributes:
        code: ``topic.name``, the code of its findings.
        judge: A function of a RunContext that yields findings, and requests for experiments that would tell more.
        stage: The part of a training step that its findings are about, unless they say otherwise.
        severity: The severity of its findings, unless they say otherwise.
        confidence: The probability that a finding is right, unless it says otherwise.
        needs: Measurements without which the check is not made; of several all.
        explains: Codes of checks, or of topics as ``loss.*``, whose findings follow from this one's: they are folded
            into it.
        names_cause: False for a check that sees what is wrong and cannot tell why. Causes are ranked before it.
        points_at: The kind of call whose line in the user's source its findings show, where they show no other.
        pack: The pack of ``contrib`` that it belongs to; None for a check that is always made.
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
        """The part of its code before the dot."""
        return self.code.partition(".")[0]

    @cached_property
    def page(self) -> Page:
        """The sections of its docstring."""
        return parse_page(self.judge.__doc__ or "")


@dataclass(frozen=True)
class CheckState:
    """The result of a check in a run, with what was compared, what was found, or why nothing could be."""

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
    """Make a Check of a function that lies in a file of its name in ``checks`` or ``contrib``."""

    def decorated(judge: Judge) -> Check:
        *_, kind, topic, name = judge.__module__.split(".")
        assert name == judge.__name__ and kind in ("checks", "contrib"), judge.__module__
        kinds = needs if isinstance(needs, tuple) else (needs,)
        pack = topic if kind == "contrib" else None
        code = f"{topic}.{name}"
        return Check(code, judge, stage, severity, confidence, kinds, explains, names_cause, points_at, pack)

    return decorated
