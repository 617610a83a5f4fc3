"""Sends messages about a run to people: rules that decide when, and channels that deliver.

A thread of the run's process sends them, so that a step that hangs is reported too.
"""

from __future__ import annotations

import html
import json
import logging
import math
import os
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, NamedTuple, Protocol
from urllib.error import HTTPError, URLError

from trainwright.checkpoint.train_state import TrainState
from trainwright.engine.step import StepResult
from trainwright.errors import TrainwrightError, UsageError, import_optional
from trainwright.recipe.formatting import parse_bytes
from trainwright.recipe.schema import Alerts
from trainwright.runs.files import UnreadableFile, lines_of, open_file
from trainwright.runs.folder import RunFolder
from trainwright.runs.reader import decode_lines
from trainwright.runs.records import Ended, Found, Record, Step, Watched

TIMEOUT_S = 10.0


class NotDeliveredError(TrainwrightError):
    """A channel did not accept an alert. The message contains no address and no header."""


class Channel(Protocol):
    """Delivers an alert of the run called ``run``. Raises NotDeliveredError."""

    @property
    def name(self) -> str: ...

    def send(self, run: str, alert: Alert) -> None: ...


@dataclass(frozen=True, repr=False)
class Webhook:
    """POSTs ``{"text": ...}``, the format of Slack and Mattermost, to the address in an environment variable."""

    url: str
    name: str = "webhook"

    @classmethod
    def of_variable(cls, variable: str) -> Webhook:
        """Return the webhook of an environment variable. Raises UsageError, without its value, if it has no address."""
        url = _value_of("alerts.webhook", variable, example="https://...")
        if not url.startswith(("https://", "http://")):
            raise UsageError(
                f"alerts.webhook: {variable} is not an address", remedy="it must begin with https:// or http://"
            )
        return cls(url)

    def send(self, run: str, alert: Alert) -> None:
        text = html.escape(f"{run}: {alert.text}", quote=False)  # required by Slack
        body = json.dumps({"text": text}).encode()
        try:
            request = urllib.request.Request(self.url, body, {"Content-Type": "application/json"}, method="POST")
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                answer.read(1024)
        except HTTPError as error:
            error.close()
            raise NotDeliveredError(f"the server answered {error.code}") from None
        except URLError as error:
            reason = error.reason
            why = reason.strerror if isinstance(reason, OSError) and reason.strerror else type(reason).__name__
            raise NotDeliveredError(f"cannot be reached: {why}") from None
        except Exception as error:  # http.client and ssl raise many kinds, some with the address in their text
            raise NotDeliveredError(f"failed: {type(error).__name__}") from None


class Apprise:
    """Sends through the package apprise to the addresses in an environment variable: Telegram, e-mail and others."""

    name = "apprise"

    def __init__(self, addresses: Sequence[str]) -> None:
        """Raises MissingExtra, or UsageError, without the address, if apprise does not support one."""
        apprise = import_optional("apprise", needed_for="alerts.apprise")
        logging.getLogger("apprise").setLevel(logging.CRITICAL + 1)  # its messages contain addresses
        self._sender = apprise.Apprise()
        for number, each in enumerate(addresses, 1):
            if not self._sender.add(each):
                raise UsageError(
                    f"alerts.apprise: address {number} of {len(addresses)} is not one that apprise supports",
                    remedy="see the table of services in the documentation of apprise",
                )

    @classmethod
    def of_variable(cls, variable: str) -> Apprise:
        """Return the channel of an environment variable. Raises UsageError, without its value, if it is empty."""
        return cls(_value_of("alerts.apprise", variable, example="'tgram://TOKEN/CHAT'").split())

    def send(self, run: str, alert: Alert) -> None:
        try:
            is_sent = self._sender.notify(title=f"{run}: {alert.kind}", body=alert.text)
        except Exception as error:  # services raise many kinds, some with the address in their text
            raise NotDeliveredError(f"failed: {type(error).__name__}") from None
        if not is_sent:
            raise NotDeliveredError(f"at least one of {len(self._sender)} addresses did not accept it")


def _value_of(key: str, variable: str, *, example: str) -> str:
    """Return the value of an environment variable that the recipe names at ``key``."""
    if value := os.environ.get(variable, "").strip():
        return value
    raise UsageError(
        f"{key}: the environment variable {variable} is not set",
        remedy=f"export {variable}={example}, or leave alerts out: --set alerts=null",
    )


@dataclass(frozen=True)
class Command:
    """Runs a program without a shell, with ``{"run", "kind", "step", "text"}`` on its standard input."""

    argv: tuple[str, ...]
    name: str = "command"

    @classmethod
    def of(cls, argv: Sequence[str]) -> Command:
        """Return the command. Raises UsageError if there is no such program."""
        if shutil.which(argv[0]) is None:
            raise UsageError(
                f"alerts.command: there is no program {argv[0]}",
                remedy="give its path, and make it executable: chmod +x",
            )
        return cls(tuple(argv))

    def send(self, run: str, alert: Alert) -> None:
        _run(self.argv, json.dumps({"run": run, **alert._asdict()}))


def desktop(platform: str = sys.platform) -> Channel:
    """Return the channel for desktop notifications of this machine. Raises UsageError if it has no program for them."""
    program = "osascript" if platform == "darwin" else "notify-send"
    found = shutil.which(program)
    if found is None:
        raise UsageError(
            f"alerts.desktop: there is no program {program} on this machine",
            remedy="install libnotify-bin, or use a webhook or a command instead",
        )
    if platform == "darwin":  # the texts are passed as arguments, so they are not executed as a script
        script = "on run argv\ndisplay notification (item 2 of argv) with title (item 1 of argv)\nend run"
        return _Desktop((found, "-e", script))
    return _Desktop((found, "--app-name=Trainwright", "--"))


@dataclass(frozen=True)
class _Desktop:
    """Runs a program with the title and the text of a notification as its last two arguments."""

    argv: tuple[str, ...]
    name: str = "desktop"

    def send(self, run: str, alert: Alert) -> None:
        _run([*self.argv, f"{run}: {alert.kind}", alert.text])


def _run(argv: Sequence[str], message: str = "") -> None:
    """Run a program with ``message`` on its standard input. Raises NotDeliveredError if it fails."""
    output = subprocess.DEVNULL
    try:
        done = subprocess.run(
            argv, input=message.encode(), stdout=output, stderr=output, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise NotDeliveredError(f"it ran for more than {TIMEOUT_S:g} s") from None
    except OSError as error:
        raise NotDeliveredError(f"it could not be run: {error.strerror}") from None
    if done.returncode:
        raise NotDeliveredError(f"it ended with {done.returncode}")


SEVERITIES = ("info", "warning", "critical")
Kind = Literal["finding", "loss", "no_step", "disk", "ended"]
DISK_RECOVERY_RATIO = 2
"""Free bytes / ``disk_below`` above which another disk alert may be sent, so that small changes send only one."""


class Alert(NamedTuple):
    """A message about a run."""

    kind: Kind
    text: str
    step: int


class AlertRules:
    """Decides which alerts are due, by the section of a recipe. Each is due once while its condition lasts.

    ``now_s`` and ``begin_s`` are times of the same clock. ``watched``: the log is that of a loop under ``tw.watch``,
    whose losses are in its Watched records.
    """

    def __init__(self, section: Alerts, begin_s: float, *, watched: bool = False) -> None:
        self._section = section
        self._step_kind = Watched if watched else Step
        self._no_step_s = section.no_step_for.value if section.no_step_for else math.inf
        self._disk_below_bytes = parse_bytes(section.disk_below) if section.disk_below else 0
        self._sent_severities: dict[str, int] = {}
        self._is_high = False
        self._is_full = False
        self._is_stuck = False
        self._step = 0
        self._step_at_s = begin_s

    def of_record(self, record: Record) -> Iterator[Alert]:
        """Yield alerts on a record.

        A finding is reported again if it has become more severe; a high loss, if the loss was within the limit since.
        """
        limit = self._section.loss_above
        if isinstance(record, Found):
            yield from self._finding_alerts(record)
        elif isinstance(record, self._step_kind) and limit is not None:
            is_high = not record.loss <= limit
            if is_high and not self._is_high:
                why = f"above {limit:.4g}" if math.isfinite(record.loss) else "not finite"
                yield Alert("loss", f"the loss is {record.loss:.4g}, {why}", record.step)
            self._is_high = is_high
        elif isinstance(record, Ended) and self._section.ended:
            why = f": {record.reason}" if record.reason else ""
            loss = "" if record.loss is None else f", loss {record.loss:.4g}"
            val = "" if record.val_loss is None else f", validation {record.val_loss:.4g}"
            yield Alert("ended", f"the run ended ({record.ending}){loss}{val}{why}", record.step)

    def _finding_alerts(self, found: Found) -> Iterator[Alert]:
        lowest = self._section.finding
        if lowest is None or found.severity not in SEVERITIES:
            return
        severity = SEVERITIES.index(found.severity)
        if severity < SEVERITIES.index(lowest) or severity <= self._sent_severities.get(found.code, -1):
            return
        self._sent_severities[found.code] = severity
        yield Alert("finding", f"{found.severity}: {found.symptom} ({found.code}). Remedy: {found.remedy}", found.step)

    def of_time(self, step: int, free_bytes: int | None, now_s: float) -> Iterator[Alert]:
        """Yield alerts that depend on time. ``step`` is the newest completed step; unknown ``free_bytes`` are None."""
        if step != self._step:
            self._step = step
            self._step_at_s = now_s
            self._is_stuck = False
        waited_s = now_s - self._step_at_s
        if waited_s >= self._no_step_s and not self._is_stuck:
            self._is_stuck = True
            yield Alert("no_step", f"no step was completed for {waited_s / 60:.3g} minutes, since step {step}", step)
        if free_bytes is None:
            return
        if free_bytes < self._disk_below_bytes and not self._is_full:
            self._is_full = True
            yield Alert("disk", f"only {free_bytes / 2**20:,.0f} MiB are free on the disk of the run folder", step)
        elif free_bytes >= DISK_RECOVERY_RATIO * self._disk_below_bytes:
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


POLL_S = 1.0
RETRY_S = (1.0, 4.0, 15.0, 60.0)
"""Seconds between attempts to send an alert. After the last attempt the alert is dropped."""
CLOSING_S = 10.0
"""Maximum seconds that the end of a run waits for undelivered alerts, enough for two more attempts."""


@dataclass
class _Delivery:
    """An alert for one channel, and the problem of the last attempt."""

    alert: Alert
    channel: Channel
    tries: int = 0
    due_s: float = 0.0
    problem: str = "did not answer in time"


class AlertWatch:
    """An observer and a context manager: inside the context, reads new records of the log and sends alerts on them.

    ``observe`` only stores the number of the step. ``warn`` is called once for a channel that fails.
    """

    def __init__(
        self,
        folder: RunFolder,
        section: Alerts,
        channels: Sequence[Channel],
        *,
        warn: Callable[[str], None],
        watched: bool = False,
        poll_s: float = POLL_S,
        retry_s: Sequence[float] = RETRY_S,
    ) -> None:
        self._folder = folder
        self._channels = channels
        self._warn = warn
        self._poll_s, self._retry_s = poll_s, retry_s
        self._log = NewRecords(folder.log)
        self._rules = AlertRules(section, time.monotonic(), watched=watched)
        self._batcher = Batcher(section.every.value)
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
        self._step = step

    def close(self) -> None:
        """Do nothing: alerts are sent until the log is closed, which is later."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.set()
        self._thread.join(CLOSING_S)
        if late := {each.channel.name: each.problem for each in self._deliveries}:
            channels = "; ".join(f"the {name}: {problem}" for name, problem in late.items())
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
        )  # the end of the run does not wait again for a channel that failed before
        if delivery.tries < len(self._retry_s) and not is_over:
            delivery.due_s, delivery.tries = time.monotonic() + self._retry_s[delivery.tries], delivery.tries + 1
            delivery.problem = error.message
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


def require_channels(section: Alerts | None) -> None:
    """Raise UsageError before the run for anything that an alert needs and is missing."""
    if section is not None:
        list(_channels(section))


def _channels(section: Alerts) -> Iterator[Channel]:
    if section.webhook is not None:
        yield Webhook.of_variable(section.webhook)
    if section.apprise is not None:
        yield Apprise.of_variable(section.apprise)
    if section.command:
        yield Command.of(section.command)
    if section.desktop:
        yield desktop()


@contextmanager
def alerting(
    section: Alerts | None, folder: RunFolder, warn: Callable[[str], None], *, watched: bool = False
) -> Iterator[tuple[AlertWatch, ...]]:
    """Send the alerts of a recipe section inside the context. Yields the observers of steps: none, or an AlertWatch.

    Leave it after the last record is in the log. ``watched``: the log is that of a loop under ``tw.watch``.
    """
    if section is None:
        yield ()
        return
    with AlertWatch(folder, section, [*_channels(section)], warn=warn, watched=watched) as watch:
        yield (watch,)
