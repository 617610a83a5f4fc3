"""Handles signals as an observer: a signal ends the run after the step in progress, with a checkpoint."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any

from trainwright.checkpoint.cursor import StepBatch
from trainwright.checkpoint.rng import give_back_to, num_borrowed
from trainwright.checkpoint.train_state import TrainState
from trainwright.distributed.threads import small_stacks
from trainwright.engine.loop import StopRequest
from trainwright.engine.observer import Stop
from trainwright.engine.step import StepResult
from trainwright.errors import UsageError

REPEATED_SIGNAL_S = 5.0
RESEND_AFTER_S = 0.02
IGNORE_SIGNALS_S = 1.0
"""Seconds after the second signal, or after the run that the first one ended, in which further ones are ignored.

They would interrupt the exit, or end a process whose run is saved with another exit code. ``tw.fit`` ends this.
"""
STOPPED_EXIT_CODE = 75
HANGUP = getattr(signal, "SIGHUP", None)  # Windows has none
_DEFAULTS = (signal.SIG_DFL, signal.default_int_handler)
GRACE_VARIABLE = "TRAINWRIGHT_GRACE_S"
WARNING_GRACE_FRACTION = 0.8  # of the grace time: a warning is printed if the step has not ended by then


def grace_s(environ: Mapping[str, str]) -> float | None:
    """Return the seconds between the scheduler's signal and SIGKILL; None if unknown. Raises UsageError."""
    text = environ.get(GRACE_VARIABLE)
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise UsageError(
            f"{GRACE_VARIABLE} is not a positive number of seconds (got {text!r})",
            remedy=f"set it to the seconds that your scheduler waits between signal and kill: {GRACE_VARIABLE}=30; "
            "or unset it",
        )
    return seconds


def forward_signal(name: str, message: str) -> None:
    """Pass a signal that a run has handled to the program, after the run is saved and its handlers are removed.

    Raises KeyboardInterrupt for SIGINT as Python does, even if a shell has made a background process ignore it. For
    another signal without a handler, whose default ends the process, raises SystemExit with the exit code 75, so that
    ``finally`` blocks run and output is flushed.
    """
    number = getattr(signal, name)
    handler = _default_for_late(number, signal.getsignal(number))
    if number == signal.SIGINT and handler in (signal.default_int_handler, signal.SIG_DFL, signal.SIG_IGN, None):
        raise KeyboardInterrupt(message)
    if callable(handler):
        handler(number, sys._getframe())
    elif handler is not signal.SIG_IGN:
        raise SystemExit(STOPPED_EXIT_CODE)


def set_late_handlers(handler: Callable[[int], Any]) -> None:
    """Replace the handlers that a run ended by a signal has left, by those that ``handler`` returns for a signal."""
    if threading.current_thread() is threading.main_thread():
        for number in signal.valid_signals():
            if getattr(signal.getsignal(number), "__func__", None) is Signals._handle_late:
                signal.signal(number, handler(number))


def default_handler(number: int) -> Any:
    """Return Python's handler of a signal."""
    return signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL


def _by_nohup(number: int) -> bool:
    """Return True if the program was started to go on after its terminal is closed."""
    return number == HANGUP and signal.getsignal(number) is signal.SIG_IGN


def _default_for_late(number: int, handler: Any) -> Any:
    """Return the default handler instead of ``_handle_late``, which an earlier run has left installed."""
    return default_handler(number) if getattr(handler, "__func__", None) is Signals._handle_late else handler


class Signals:
    """Handles SIGINT and the signals in ``names`` from ``listen`` to ``close``: the current step is finished first.

    A second signal ends the process at once (KeyboardInterrupt), except a second SIGHUP. Outside the main thread it
    does nothing, because Python delivers no signals there. With ``grace_s``, the seconds from the signal to the kill,
    it reports the remaining time. ``newest`` returns the newest checkpoint and ``saving_s`` the duration of the last
    save (None: unknown). The state after the step is saved, even if the step ends late; a kill during the save leaves
    the newest checkpoint intact.

    If no step is in progress (``at_once``), the signal interrupts the current work. ``repeated``: a launcher passes on
    signals that the process has also received directly, so signals within REPEATED_SIGNAL_S count as one.

    Python drops exceptions that a handler raises in a finalizer or in a callback of ``fork``. The signal is then sent
    again.
    """

    def __init__(
        self,
        say: Callable[[str], None],
        names: Sequence[str] = ("SIGTERM", "SIGUSR1", "SIGHUP"),
        grace_s: float | None = None,
        *,
        repeated: bool = False,
    ) -> None:
        self._say = say
        self._grace_s = grace_s
        self._repeated = repeated
        wanted = dict.fromkeys(("SIGINT", *names))
        self._numbers = [getattr(signal, name) for name in wanted if hasattr(signal, name)]
        self.newest: Callable[[], str] = lambda: "not written yet"
        self.saving_s: Callable[[], float | None] = lambda: None
        self.received: int | None = None
        self._received_s, self._quit_s, self._closed_s = 0.0, -math.inf, -math.inf
        self._on_received: Callable[[], None] = lambda: None
        self._before: dict[int, Any] = {}
        self._pid = -1
        self._at_once = ""
        self._is_sent_again = False
        self._hook: Callable[[sys.UnraisableHookArgs], object] = sys.__unraisablehook__
        # Messages to the thread that prints: "received" (or what is done at once), "reached", "dropped" and "over".
        # A handler may call put(), because it needs no lock that the interrupted thread could hold. An Event, or the
        # start of a thread, needs one.
        self._news: SimpleQueue[str] = SimpleQueue()
        self._speaker: threading.Thread | None = None

    @property
    def on_received(self) -> Callable[[], None]:
        """A function that the handler of the first signal calls. It must be safe to call in a signal handler.

        If a signal was received before this attribute is set, the setter calls the function.
        """
        return self._on_received

    @on_received.setter
    def on_received(self, call: Callable[[], None]) -> None:
        self._on_received = call
        if self.received is not None:
            call()

    def listen(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        self._pid = os.getpid()
        self._speaker = threading.Thread(target=self._report_signal, name="signals", daemon=True)
        with small_stacks():
            self._speaker.start()
        before = {number: signal.signal(number, self._handle) for number in self._numbers if not _by_nohup(number)}
        self._before = {number: _default_for_late(number, handler) for number, handler in before.items()}
        self._hook, sys.unraisablehook = sys.unraisablehook, self._on_dropped

    def _on_dropped(self, dropped: sys.UnraisableHookArgs) -> None:
        if isinstance(dropped.exc_value, StopRequest) or self._is_quit(dropped.exc_value):
            self._news.put("dropped")
        else:
            self._hook(dropped)

    def _is_quit(self, error: BaseException | None) -> bool:
        return isinstance(error, KeyboardInterrupt) and self._quit_s > -math.inf

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        """Handle a signal. Prints nothing, because the interrupted thread may be printing."""
        if os.getpid() != self._pid:
            self._in_child(number)
            return
        if self._is_sent_again:
            self._is_sent_again = False
            if self._quit_s > -math.inf:
                raise KeyboardInterrupt
            if self._at_once:
                raise StopRequest(self._stop(number))
            return
        if self.received is not None:
            if number == self.received == HANGUP:
                return  # if a terminal is closed, both the kernel and the shell send it
            now_s = time.monotonic()
            if (
                self._repeated and now_s - self._received_s < REPEATED_SIGNAL_S
            ) or now_s - self._quit_s < IGNORE_SIGNALS_S:
                return
            self._quit_s = now_s
            raise KeyboardInterrupt
        self.received, self._received_s = number, time.monotonic()
        self._on_received()
        self._news.put(self._at_once or "received")
        if self._at_once:
            raise StopRequest(self._stop(number))

    def _handle_late(self, number: int, _frame: FrameType | None) -> None:
        """Ignore signals within IGNORE_SIGNALS_S. A later signal ends the process, as by default."""
        if time.monotonic() - max(self._quit_s, self._closed_s) >= IGNORE_SIGNALS_S:
            signal.signal(number, default_handler(number))
            signal.raise_signal(number)

    def _in_child(self, number: int) -> None:
        """Ignore signals in a forked child that loads data, except SIGTERM, with which multiprocessing ends it."""
        if number == signal.SIGTERM:
            signal.signal(number, self._before[number])
            signal.raise_signal(number)

    @contextmanager
    def at_once(self, what: str) -> Iterator[None]:
        """Context in which a signal raises StopRequest anywhere, also one received before. ``what`` is printed."""
        try:
            self._interrupt_at_once(what)
            yield
        finally:
            self._at_once = ""

    def _interrupt_at_once(self, what: str) -> None:
        self._at_once = what
        self._require_not_received()

    def batches(self, batches: Iterable[StepBatch]) -> Iterator[StepBatch]:
        """Yield the batches. A signal during the wait for a batch ends the wait by StopRequest."""
        stream, depth = iter(batches), num_borrowed()
        while True:
            try:  # as ``at_once``, without a new context in each step
                self._interrupt_at_once("saving now, while no step is in progress")
                batch = next(stream, None)
                self._require_not_received()
            except (Exception, StopRequest):
                give_back_to(depth)  # the signal may have arrived while a sample's generators were in use
                self._require_not_received()
                raise
            finally:
                self._at_once = ""
            if batch is None:
                return
            yield batch

    def _require_not_received(self) -> None:
        """Raise StopRequest after a signal. A dataset may have caught the first one and returned a wrong sample."""
        if self.received is not None:
            raise StopRequest(self._stop(self.received))

    def _stop(self, number: int) -> Stop:
        return Stop(signal.Signals(number).name, save=True, exit_code=STOPPED_EXIT_CODE, by_signal=True)

    def _report_signal(self) -> None:
        news = self._news.get()
        if news == "over" or self.received is None:
            return
        within = "" if self._grace_s is None else f" ({self._grace_s:g} s are left)"
        what = "saving at the end of this step" if news == "received" else news
        self._say(f"{signal.Signals(self.received).name}: {what}{within}; a second signal quits at once")
        if news == "received" and self._grace_s is not None:
            late_s = WARNING_GRACE_FRACTION * self._grace_s
            try:
                news = self._news.get(timeout=max(0.0, self._received_s + late_s - time.monotonic()))
            except Empty:
                late = f"the step has not ended after {late_s:g} s of {self._grace_s:g} s"
                self._say(f"{late}; {self._kill_notice()}")
        while news != "over":
            if news == "dropped":
                self._resend()
            news = self._news.get()

    def _resend(self) -> None:
        """Send the signal again, because Python has dropped the exception that should end the current work."""
        time.sleep(RESEND_AFTER_S)  # by then the finalizer or callback has ended
        number = self.received
        if number is None:
            return
        self._is_sent_again = True
        if sys.platform == "win32":  # os.kill would end the process
            signal.raise_signal(number)
        else:  # to the process, because a signal to this thread interrupts no system call of the main thread
            os.kill(os.getpid(), number)

    def _kill_notice(self) -> str:
        return f"if the kill comes first, the newest checkpoint is {self.newest()}"

    @property
    def received_name(self) -> str:
        """The name of the received signal; "" for none."""
        return "" if self.received is None else signal.Signals(self.received).name

    def observe(self, result: StepResult, _state: TrainState) -> Stop | None:
        if self.received is None:
            return None
        self._news.put("reached")
        saving_s = self.saving_s()
        if self._grace_s is not None and saving_s is not None:
            left_s = self._grace_s - (time.monotonic() - self._received_s)
            if left_s < saving_s:
                times = f"{max(left_s, 0.0):.1f} s are left and the last save took {saving_s:.1f} s"
                self._say(f"saving step {result.step}: {times}; {self._kill_notice()}")
        return self._stop(self.received)

    def close(self) -> None:
        is_ending = self.received is not None
        if is_ending:
            self._closed_s = time.monotonic()
        for number, handler in self._before.items():
            signal.signal(number, self._handle_late if is_ending and handler in _DEFAULTS else handler)
        if self._before and sys.unraisablehook == self._on_dropped:
            sys.unraisablehook = self._hook
        self._before = {}
        self._news.put("over")
        if self._speaker is not None:
            self._speaker.join()
            self._speaker = None
