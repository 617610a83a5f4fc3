"""A check: a property of every correct run, or a known fault. Its docstring is the page that is shown to users.

Each check is in a file ``checks/<topic>/<name>.py``. The function has the name of the file, and the code of its
findings is ``<topic>.<name>``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias, get_args, get_origin

from trainwright.doctor.context import Measurement, RunContext
from trainwright.doctor.docstring import Page, parse_page
from trainwright.doctor.finding import ExperimentRequest, Finding
from trainwright.runs.findings import Severity, Stage

State: TypeAlias = Literal["passed", "found", "not applicable", "not examined"]


@dataclass(frozen=True)
class NotApplicable:
    """The reason why the check does not apply to this run, or could not be evaluated."""

    why: str


Result: TypeAlias = Finding | ExperimentRequest | NotApplicable  # A check that yields none has passed.
Results: TypeAlias = Iterator[Result]
Judge: TypeAlias = Callable[..., Results]


@dataclass(frozen=True)
class Check:
    """A check and its metadata."""

    code: str  # ``topic.name``, the code of its findings
    judge: Judge  # Its function. Each parameter after the first is a required measurement.
    stage: Stage  # The part of a training step that its findings are about. Findings may override it.
    severity: Severity = "warning"  # The default severity of its findings
    confidence: float = 0.9  # The default probability that a finding is right
    # Codes of checks, or topics such as ``loss.*``, whose findings follow from a finding of this check
    explains: tuple[str, ...] = ()
    names_cause: bool = True  # False for a symptom: any cause that is at least as severe explains it
    # What its findings point at in the user's source, the best first: a kind of recorded call, such as ``backward``, or
    # an object: optimizer, scheduler, dataset, validation (its dataset), loader, sampler, split, seed, load,
    # optimizer_load, criterion, initialization, construction (of a module)
    points_at: tuple[str, ...] = ()
    since_step: int | None = None  # The first step that shows the fault, if that is always the same

    def results(self, run: RunContext) -> Results:
        """Yields the results of the check, up to its first finding. All measurements that it needs must exist."""
        wanted = (run.every(kind) if is_every else run.measured(kind) for kind, is_every in self._parameters)
        for result in self.judge(run.for_check(self), *wanted):
            yield result
            if isinstance(result, Finding):
                return

    @property
    def needs(self) -> tuple[type[Measurement], ...]:
        """The measurements that the check requires."""
        return tuple(kind for kind, _ in self._parameters)

    @cached_property
    def _parameters(self) -> list[tuple[type[Measurement], bool]]:
        """(kind of measurement, whether it is annotated ``Every``) of each parameter of ``judge`` after the first."""
        wanted = [each.annotation for each in inspect.signature(self.judge).parameters.values()][1:]
        return [(get_args(get_args(each)[0])[1], True) if get_origin(each) else (each, False) for each in wanted]

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
    """The result of one check in one run. ``why`` is the symptom or the reason for no result; "" if it passed."""

    code: str
    state: State
    why: str


def check(
    *,
    stage: Stage,
    severity: Severity = "warning",
    confidence: float = 0.9,
    explains: tuple[str, ...] = (),
    names_cause: bool = True,
    points_at: str | tuple[str, ...] = (),
    since_step: int | None = None,
) -> Callable[[Judge], Check]:
    """Decorator that makes a Check from a function. The module must have the name of the function."""

    def decorated(judge: Judge) -> Check:
        *_, topic, name = judge.__module__.split(".")
        assert name == judge.__name__, judge.__module__
        code = f"{topic}.{name}"
        places = (points_at,) if isinstance(points_at, str) else points_at
        return Check(code, judge, stage, severity, confidence, explains, names_cause, places, since_step)

    return decorated
