"""When somebody is told: pure functions of the records of a run, of its steps, and of the clock."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from trainwright.runs.records import Ended, Found, Record, Step, Watched

SEVERITIES = ("info", "warning", "critical")
Kind = Literal["finding", "loss", "no_step", "disk", "ended"]
ENOUGH = 2
"""Times ``disk_below`` that must be free before its next alert: what hovers at the bound is told once."""


class Alert(NamedTuple):
    """Something that somebody wants to know."""

    kind: Kind
    text: str
    step: int


@dataclass(frozen=True)
class AlertRules:
    """Which alerts there are; None: none of this kind. ``watched``: losses are those of a loop under ``tw.watch``."""

    finding: Literal["info", "warning", "critical"] | None = "critical"
    loss_above: float | None = None
    no_step_s: float | None = 1800.0
    disk_below: int | None = 2**30
    ended: bool = True
    watched: bool = False


@dataclass
class RuleState:
    """What was told already, so that each thing is told once. ``now_s`` is a time of one clock, by ``begin_s`` on."""

    rules: AlertRules
    begin_s: float
    _told: dict[str, int] = field(default_factory=dict)
    _is_high: bool = False
    _is_full: bool = False
    _is_still: bool = False
    _step: int = 0
    _step_at_s: float = field(init=False)

    def __post_init__(self) -> None:
        self._step_at_s = self.begin_s

    def of_record(self, record: Record) -> Iterator[Alert]:
        """A finding again only where it has become more severe; a loss again once it was in bounds."""
        if isinstance(record, Found):
            yield from self._of_finding(record)
        elif isinstance(record, Watched if self.rules.watched else Step) and self.rules.loss_above is not None:
            is_high = not record.loss <= self.rules.loss_above
            if is_high and not self._is_high:
                yield Alert("loss", f"the loss is {record.loss:.4g}, above {self.rules.loss_above:.4g}", record.step)
            self._is_high = is_high
        elif isinstance(record, Ended) and self.rules.ended:
            why = f": {record.reason}" if record.reason else ""
            loss = "" if record.loss is None else f", loss {record.loss:.4g}"
            val = "" if record.val_loss is None else f", validation {record.val_loss:.4g}"
            yield Alert("ended", f"the run ended ({record.ending}){loss}{val}{why}", record.step)

    def _of_finding(self, found: Found) -> Iterator[Alert]:
        if self.rules.finding is None or found.severity not in SEVERITIES:
            return
        severity = SEVERITIES.index(found.severity)
        if severity < SEVERITIES.index(self.rules.finding) or severity <= self._told.get(found.code, -1):
            return
        self._told[found.code] = severity
        yield Alert("finding", f"{found.severity}: {found.symptom} ({found.code}). Remedy: {found.remedy}", found.step)

    def of_time(self, step: int, free_bytes: int | None, now_s: float) -> Iterator[Alert]:
        """``step`` is the newest that was completed; ``free_bytes`` None: not known."""
        if step != self._step:
            self._step, self._step_at_s, self._is_still = step, now_s, False
        still_s = now_s - self._step_at_s
        if self.rules.no_step_s is not None and still_s >= self.rules.no_step_s and not self._is_still:
            self._is_still = True
            yield Alert("no_step", f"no step was completed for {still_s / 60:.3g} minutes, since step {step}", step)
        if self.rules.disk_below is None or free_bytes is None:
            return
        if free_bytes < self.rules.disk_below and not self._is_full:
            self._is_full = True
            yield Alert("disk", f"only {free_bytes / 2**20:,.0f} MiB are free where the run folder lies", step)
        elif free_bytes >= ENOUGH * self.rules.disk_below:
            self._is_full = False


class Batcher:
    """At most one message of a kind within ``every_s``: what comes meanwhile joins the next one."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._sent_s: dict[Kind, float] = {}
        self._waiting: dict[Kind, list[Alert]] = {}

    def add(self, alert: Alert) -> None:
        self._waiting.setdefault(alert.kind, []).append(alert)

    def due(self, now_s: float, *, all_of_them: bool = False) -> list[Alert]:
        """The messages whose time has come; each is taken once."""
        kinds = [kind for kind in self._waiting if all_of_them or self._may_be_sent(kind, now_s)]
        found = [_joined(self._waiting.pop(kind)) for kind in kinds]
        self._sent_s.update(dict.fromkeys(kinds, now_s))
        return found

    def _may_be_sent(self, kind: Kind, now_s: float) -> bool:
        return kind not in self._sent_s or now_s - self._sent_s[kind] >= self._every_s


MOST_JOINED = 10


def _joined(alerts: list[Alert]) -> Alert:
    lines = [f"step {each.step}: {each.text}" for each in alerts[:MOST_JOINED]]
    if len(alerts) > MOST_JOINED:
        lines.append(f"and {len(alerts) - MOST_JOINED} more")
    return Alert(alerts[-1].kind, "\n".join(lines), alerts[-1].step)
