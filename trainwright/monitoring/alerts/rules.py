"""Decides which alerts to send, from the records and steps of a run and the time. Nothing here reads a clock."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from trainwright.runs.records import Ended, Found, Record, Step, Watched

SEVERITIES = ("info", "warning", "critical")
Kind = Literal["finding", "loss", "no_step", "disk", "ended"]
DISK_RECOVERY_RATIO = 2
"""Free bytes / ``disk_below`` above which another disk alert may be sent. Values around the limit send only one."""


class Alert(NamedTuple):
    """A message about a run."""

    kind: Kind
    text: str
    step: int


@dataclass(frozen=True)
class AlertRules:
    """The alerts to send. None turns off a kind of alert. ``watched``: read the losses of a loop under ``tw.watch``."""

    finding: Literal["info", "warning", "critical"] | None = "critical"
    loss_above: float | None = None
    no_step_s: float | None = 1800.0
    disk_below: int | None = 2**30
    ended: bool = True
    watched: bool = False


@dataclass
class RuleState:
    """Sends each alert once while its condition lasts. ``now_s`` and ``begin_s`` are times of the same clock."""

    rules: AlertRules
    begin_s: float
    _sent_severities: dict[str, int] = field(default_factory=dict)
    _is_high: bool = False
    _is_full: bool = False
    _is_still: bool = False
    _step: int = 0
    _step_at_s: float = field(init=False)

    def __post_init__(self) -> None:
        self._step_at_s = self.begin_s

    def of_record(self, record: Record) -> Iterator[Alert]:
        """Yield alerts on a record.

        A finding is reported again if it has become more severe; a high loss, if the loss was within the limit since.
        """
        if isinstance(record, Found):
            yield from self._finding_alerts(record)
        elif isinstance(record, Watched if self.rules.watched else Step) and self.rules.loss_above is not None:
            is_high = not record.loss <= self.rules.loss_above
            if is_high and not self._is_high:
                limit = f"above {self.rules.loss_above:.4g}" if math.isfinite(record.loss) else "not finite"
                yield Alert("loss", f"the loss is {record.loss:.4g}, {limit}", record.step)
            self._is_high = is_high
        elif isinstance(record, Ended) and self.rules.ended:
            why = f": {record.reason}" if record.reason else ""
            loss = "" if record.loss is None else f", loss {record.loss:.4g}"
            val = "" if record.val_loss is None else f", validation {record.val_loss:.4g}"
            yield Alert("ended", f"the run ended ({record.ending}){loss}{val}{why}", record.step)

    def _finding_alerts(self, found: Found) -> Iterator[Alert]:
        if self.rules.finding is None or found.severity not in SEVERITIES:
            return
        severity = SEVERITIES.index(found.severity)
        if severity < SEVERITIES.index(self.rules.finding) or severity <= self._sent_severities.get(found.code, -1):
            return
        self._sent_severities[found.code] = severity
        yield Alert("finding", f"{found.severity}: {found.symptom} ({found.code}). Remedy: {found.remedy}", found.step)

    def of_time(self, step: int, free_bytes: int | None, now_s: float) -> Iterator[Alert]:
        """Yield alerts that depend on time. ``step`` is the newest completed step; unknown ``free_bytes`` are None."""
        if step != self._step:
            self._step = step
            self._step_at_s = now_s
            self._is_still = False
        still_s = now_s - self._step_at_s
        if self.rules.no_step_s is not None and still_s >= self.rules.no_step_s and not self._is_still:
            self._is_still = True
            yield Alert("no_step", f"no step was completed for {still_s / 60:.3g} minutes, since step {step}", step)
        if self.rules.disk_below is None or free_bytes is None:
            return
        if free_bytes < self.rules.disk_below and not self._is_full:
            self._is_full = True
            yield Alert("disk", f"only {free_bytes / 2**20:,.0f} MiB are free on the disk of the run folder", step)
        elif free_bytes >= DISK_RECOVERY_RATIO * self.rules.disk_below:
            self._is_full = False


class Batcher:
    """Sends at most one message of a kind per ``every_s`` seconds. Alerts in between join the next message."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._sent_s: dict[Kind, float] = {}
        self._waiting: dict[Kind, list[Alert]] = {}

    def add(self, alert: Alert) -> None:
        self._waiting.setdefault(alert.kind, []).append(alert)

    def due(self, now_s: float, *, all_of_them: bool = False) -> list[Alert]:
        """Return the messages that are due, each once."""
        kinds = [kind for kind in self._waiting if all_of_them or self._may_be_sent(kind, now_s)]
        found = [_joined(self._waiting.pop(kind)) for kind in kinds]
        self._sent_s.update(dict.fromkeys(kinds, now_s))
        return found

    def _may_be_sent(self, kind: Kind, now_s: float) -> bool:
        return kind not in self._sent_s or now_s - self._sent_s[kind] >= self._every_s


MAX_JOINED_ALERTS = 10


def _joined(alerts: list[Alert]) -> Alert:
    lines = [f"step {each.step}: {each.text}" for each in alerts[:MAX_JOINED_ALERTS]]
    if len(alerts) > MAX_JOINED_ALERTS:
        lines.append(f"and {len(alerts) - MAX_JOINED_ALERTS} more")
    return Alert(alerts[-1].kind, "\n".join(lines), alerts[-1].step)
