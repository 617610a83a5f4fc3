"""Sends the alerts of a run from a thread of its process, so that a step that hangs is reported too."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from trainwright.checkpoint.train_state import TrainState
from trainwright.engine.step import StepResult
from trainwright.monitoring.alerts.channels import Apprise, Channel, Command, NotDeliveredError, Webhook, desktop
from trainwright.monitoring.alerts.rules import Alert, AlertRules, Batcher, RuleState
from trainwright.recipe.formatting import parse_bytes
from trainwright.recipe.schema import Alerts
from trainwright.runs.files import UnreadableFile, lines_of, open_file
from trainwright.runs.folder import RunFolder
from trainwright.runs.reader import decode_lines
from trainwright.runs.records import Record

POLL_S = 1.0
RETRY_S = (1.0, 4.0, 15.0, 60.0)
"""Seconds between the attempts of a channel that fails. After them it is given up."""
CLOSING_S = 10.0
"""Maximum seconds that the end of a run waits for undelivered alerts, enough for two more attempts."""


@dataclass
class _Delivery:
    """An alert for one channel, and the reason if it is not delivered yet."""

    alert: Alert
    channel: Channel
    tries: int = 0
    due_s: float = 0.0
    why_not: str = "did not answer in time"


class AlertWatch:
    """An observer and a context: reads new records of the log while it is entered, and sends alerts on them.

    ``observe`` only stores the number of the step. A channel that fails is reported by ``warn``, once.
    """

    def __init__(
        self,
        folder: RunFolder,
        rules: AlertRules,
        channels: Sequence[Channel],
        *,
        every_s: float,
        warn: Callable[[str], None],
        poll_s: float = POLL_S,
        retry_s: Sequence[float] = RETRY_S,
    ) -> None:
        self._folder = folder
        self._channels = channels
        self._warn = warn
        self._poll_s, self._retry_s = poll_s, retry_s
        self._log = NewRecords(folder.log)
        self._rules = RuleState(rules, time.monotonic())
        self._batcher = Batcher(every_s)
        self._deliveries: list[_Delivery] = []
        self._failed: set[str] = set()
        self._step, self._closing = 0, threading.Event()
        self._thread = threading.Thread(target=self._run, name="trainwright-alerts", daemon=True)

    def __enter__(self) -> AlertWatch:
        self._thread.start()
        return self

    def observe(self, result: StepResult, _state: TrainState) -> None:
        self.note(result.step)

    def note(self, step: int) -> None:
        """Record that a step has ended."""
        self._step = step

    def close(self) -> None:
        """Do nothing: alerts are sent until the log is closed, which is later."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.set()
        self._thread.join(CLOSING_S)
        if late := {each.channel.name: each.why_not for each in self._deliveries}:
            channels = "; ".join(f"the {name}: {why}" for name, why in late.items())
            self._warn(f"not all alerts were delivered before the end ({channels})")

    def _run(self) -> None:
        try:
            while not self._closing.wait(self._poll_s):
                self._read_records()
                self._deliver()
            self._read_records(is_last=True)
            give_up_s = time.monotonic() + CLOSING_S
            for delivery in self._deliveries:
                delivery.due_s = 0.0  # each has one more attempt
            self._deliver()
            while self._deliveries and (due_s := min(each.due_s for each in self._deliveries)) < give_up_s:
                time.sleep(max(0.0, due_s - time.monotonic()))
                self._deliver()
        except Exception as error:  # an error here must not stop the training
            self._warn(f"no more alerts: {type(error).__name__}")

    def _read_records(self, *, is_last: bool = False) -> None:
        now_s = time.monotonic()
        alerts = [each for record in self._log.read() for each in self._rules.of_record(record)]
        if not is_last:
            alerts += self._rules.of_time(self._step, _free_bytes(self._folder.path), now_s)
        for each in alerts:
            self._batcher.add(each)
        for each in self._batcher.due(now_s, all_of_them=is_last):
            self._deliveries += [_Delivery(each, channel) for channel in self._channels]

    def _deliver(self) -> None:
        now_s = time.monotonic()
        for delivery in [each for each in self._deliveries if each.due_s <= now_s]:
            try:
                delivery.channel.send(self._folder.path.name, delivery.alert)
            except NotDeliveredError as error:
                self._retry_or_give_up(delivery, error)
            else:
                self._deliveries.remove(delivery)

    def _retry_or_give_up(self, delivery: _Delivery, error: NotDeliveredError) -> None:
        is_over = (
            self._closing.is_set() and delivery.channel.name in self._failed
        )  # the end of the run does not wait for it again
        if delivery.tries < len(self._retry_s) and not is_over:
            delivery.due_s, delivery.tries = time.monotonic() + self._retry_s[delivery.tries], delivery.tries + 1
            delivery.why_not = error.message
            return
        self._deliveries.remove(delivery)
        if delivery.channel.name not in self._failed:
            self._failed.add(delivery.channel.name)
            self._warn(
                f"alerts: the {delivery.channel.name} failed in all {delivery.tries + 1} attempts: {error.message}"
            )


class NewRecords:
    """Reads the records that are added to a log from now on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = path.stat().st_size if path.is_file() else 0

    def read(self) -> Iterator[Record]:
        lines: list[bytes] = []
        with (
            suppress(OSError, UnreadableFile),
            open_file(self._path) as file,
        ):  # not written yet, or temporarily unreadable
            file.seek(self._at)
            for line in lines_of(file):
                if not line.endswith(b"\n"):
                    break  # read again when it is complete
                lines.append(line)
                self._at += len(line)
        yield from decode_lines(lines).records


def _free_bytes(path: Path) -> int | None:
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return None


def require_channels(ask: Alerts | None) -> None:
    """Raise UsageError before the run for anything that an alert needs and is missing."""
    if ask is not None:
        list(_channels(ask, os.environ))


def _channels(ask: Alerts, environ: Mapping[str, str]) -> Iterator[Channel]:
    if ask.webhook is not None:
        yield Webhook.of_variable(ask.webhook, environ)
    if ask.apprise is not None:
        yield Apprise.of_variable(ask.apprise, environ)
    if ask.command:
        yield Command.of(ask.command)
    if ask.desktop:
        yield desktop()


@contextmanager
def alerting(
    ask: Alerts | None, folder: RunFolder, warn: Callable[[str], None], *, watched: bool = False
) -> Iterator[tuple[AlertWatch, ...]]:
    """Send the alerts of a recipe section within the block. Provides the observers for the steps: none, or one watch.

    The block must end after the last record is in the log. ``watched``: the log is that of a loop under ``tw.watch``.
    """
    if ask is None:
        yield ()
        return
    rules = AlertRules(
        finding=ask.finding,
        loss_above=ask.loss_above,
        no_step_s=ask.no_step_for.value if ask.no_step_for else None,
        disk_below=parse_bytes(ask.disk_below) if ask.disk_below else None,
        ended=ask.ended,
        watched=watched,
    )
    to = [*_channels(ask, os.environ)]
    with AlertWatch(folder, rules, to, every_s=ask.every.value, warn=warn) as watch:
        yield (watch,)
