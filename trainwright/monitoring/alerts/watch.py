"""Sends the alerts of a run from a thread of its process, so that a step which hangs is told, too."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from trainwright.checkpoint.train_state import TrainState
from trainwright.engine.step import StepResult
from trainwright.monitoring.alerts.channels import Channel, NotDeliveredError
from trainwright.monitoring.alerts.rules import Alert, AlertRules, Batcher, RuleState
from trainwright.runs.files import UnreadableFile, lines_of, open_file
from trainwright.runs.folder import RunFolder
from trainwright.runs.reader import decode_lines
from trainwright.runs.records import Record

POLL_S = 1.0
RETRY_S = (1.0, 4.0, 15.0, 60.0)
"""Waits between the tries of a channel that does not take an alert; then it is given up."""
CLOSING_S = 10.0
"""How long the end of a run waits at most for alerts that are not delivered yet; two more tries fit in."""


@dataclass
class _Letter:
    """An alert on its way to one channel, and why that has not taken it."""

    alert: Alert
    channel: Channel
    tries: int = 0
    due_s: float = 0.0
    why_not: str = "did not answer in time"


class AlertWatch:
    """An Observer and a context: reads what the log of the run gets while it is entered, and tells it.

    ``observe`` only keeps the number of the step. A channel that fails is told by ``warn``, once.
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
        self._folder, self._channels, self._warn = folder, channels, warn
        self._poll_s, self._retry_s = poll_s, retry_s
        self._log = NewRecords(folder.log)
        self._rules = RuleState(rules, time.monotonic())
        self._batcher = Batcher(every_s)
        self._letters: list[_Letter] = []
        self._failed: set[str] = set()
        self._step, self._closing = 0, threading.Event()
        self._thread = threading.Thread(target=self._run, name="trainwright-alerts", daemon=True)

    def __enter__(self) -> AlertWatch:
        self._thread.start()
        return self

    def observe(self, result: StepResult, state: TrainState) -> None:
        self.note(result.step)

    def note(self, step: int) -> None:
        """A step is over."""
        self._step = step

    def close(self) -> None:
        """Alerts are told until the log is closed, which is later."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.set()
        self._thread.join(CLOSING_S)
        if late := {each.channel.name: each.why_not for each in self._letters}:
            channels = "; ".join(f"the {name}: {why}" for name, why in late.items())
            self._warn(f"not all alerts were delivered before the end ({channels})")

    def _run(self) -> None:
        try:
            while not self._closing.wait(self._poll_s):
                self._look()
                self._deliver()
            self._look(is_last=True)
            give_up_s = time.monotonic() + CLOSING_S
            for letter in self._letters:
                letter.due_s = 0.0  # each has one more try
            self._deliver()
            while self._letters and (due_s := min(each.due_s for each in self._letters)) < give_up_s:
                time.sleep(max(0.0, due_s - time.monotonic()))
                self._deliver()
        except Exception as error:  # training goes on, whatever is wrong here
            self._warn(f"no more alerts: {type(error).__name__}")

    def _look(self, *, is_last: bool = False) -> None:
        now_s = time.monotonic()
        alerts = [each for record in self._log.read() for each in self._rules.of_record(record)]
        if not is_last:
            alerts += self._rules.of_time(self._step, _free_bytes(self._folder.path), now_s)
        for each in alerts:
            self._batcher.add(each)
        for each in self._batcher.due(now_s, all_of_them=is_last):
            self._letters += [_Letter(each, channel) for channel in self._channels]

    def _deliver(self) -> None:
        now_s = time.monotonic()
        for letter in [each for each in self._letters if each.due_s <= now_s]:
            try:
                letter.channel.send(self._folder.path.name, letter.alert)
            except NotDeliveredError as error:
                self._again_or_not(letter, error)
            else:
                self._letters.remove(letter)

    def _again_or_not(self, letter: _Letter, error: NotDeliveredError) -> None:
        is_over = self._closing.is_set() and letter.channel.name in self._failed  # nobody waits for it once more
        if letter.tries < len(self._retry_s) and not is_over:
            letter.due_s, letter.tries = time.monotonic() + self._retry_s[letter.tries], letter.tries + 1
            letter.why_not = error.message
            return
        self._letters.remove(letter)
        if letter.channel.name not in self._failed:
            self._failed.add(letter.channel.name)
            self._warn(f"alerts: the {letter.channel.name} took none of {letter.tries + 1} tries: {error.message}")


class NewRecords:
    """The records that a log gets from now on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = path.stat().st_size if path.is_file() else 0

    def read(self) -> Iterator[Record]:
        lines: list[bytes] = []
        with suppress(OSError, UnreadableFile), open_file(self._path) as file:  # not there yet, or not readable for now
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
