"""Signals as an Observer: a signal to stop ends the run after the step in progress, with a checkpoint."""

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

REPEATED_S, AGAIN_S = 5.0, 0.02
QUITTING_S = 1.0
"""After the second signal further ones are ignored for so long: they would cut short what ends the process."""
PREEMPTED = 75
_DEFAULTS = (signal.SIG_DFL, signal.default_int_handler)
GRACE = "TRAINWRIGHT_GRACE_S"
WARN_AT = 0.8  # of the grace


def grace_s(environ: Mapping[str, str]) -> float | None:
    """How long the scheduler waits between its signal and SIGKILL, None when nobody says. Raises UsageError."""
    text = environ.get(GRACE)
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise UsageError(
            f"{GRACE} is not a positive number of seconds (got {text!r})",
            remedy=f"say how long your scheduler waits between the signal and the kill: {GRACE}=30; or unset it",
        )
    return seconds


def hand_over(name: str, message: str) -> None:
    """Give the program a signal that a run has taken, now that the run is saved and the handlers are the program's own.

    Raises KeyboardInterrupt for SIGINT as Python does, also where a shell has made a background process ignore it. For
    another signal that nobody handles, whose default is to end the process, raises SystemExit with the exit code 75:
    ``finally`` blocks run and output is flushed.
    """
    number = getattr(signal, name)
    handler = _without_late(number, signal.getsignal(number))
    if number == signal.SIGINT and handler in (signal.default_int_handler, signal.SIG_DFL, signal.SIG_IGN, None):
        raise KeyboardInterrupt(message)
    if callable(handler):
        handler(number, sys._getframe())
    elif handler is not signal.SIG_IGN:
        raise SystemExit(PREEMPTED)


def _default(number: int) -> Any:
    return signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL


def _without_late(number: int, handler: Any) -> Any:
    """The default in place of the handler that an earlier run left for a second."""
    return _default(number) if getattr(handler, "__func__", None) is Signals._late else handler


class Signals:
    """From ``listen`` to ``close``: SIGINT and those in ``names`` set a flag; the current step is finished first.

    A second one of them ends the process at once (KeyboardInterrupt). Outside the main thread it does nothing, for
    Python delivers no signals there. With ``grace_s``, the seconds from the signal to the kill, it says how the time
    is going; ``newest`` names the newest checkpoint and ``saving_s`` how long the last one took (None: not known).
    The end of the step is saved however late it is: what a kill cuts short leaves the newest checkpoint as it was.
    Where no step is in progress (``at_once``) the signal interrupts what is being done. With ``repeated``, a launcher
    passes signals on that the process got as well: what follows within REPEATED_S is the same one.

    Python drops what a handler raises in a finalizer or in a callback of ``fork``. Then the signal is sent once more.
    """

    def __init__(
        self,
        say: Callable[[str], None],
        names: Sequence[str] = ("SIGTERM", "SIGUSR1"),
        grace_s: float | None = None,
        *,
        repeated: bool = False,
    ) -> None:
        self._say, self._grace_s, self._repeated = say, grace_s, repeated
        wanted = dict.fromkeys(("SIGINT", *names))
        self._numbers = [getattr(signal, name) for name in wanted if hasattr(signal, name)]
        self.newest: Callable[[], str] = lambda: "not there yet"
        self.saving_s: Callable[[], float | None] = lambda: None
        self.received: int | None = None
        self._received_s, self._quit_s = 0.0, -math.inf
        self._on_received: Callable[[], None] = lambda: None
        self._before: dict[int, Any] = {}
        self._pid = -1
        self._at_once = ""
        self._is_sent_again = False
        self._hook: Callable[[sys.UnraisableHookArgs], object] = sys.__unraisablehook__
        # To the thread that prints: "received", then "reached"; or what is done at once. Its put() takes no lock that
        # the interrupted thread could hold, unlike an Event or the start of a thread, so a handler may call it.
        self._news: SimpleQueue[str] = SimpleQueue()
        self._speaker: threading.Thread | None = None

    @property
    def on_received(self) -> Callable[[], None]:
        """A function that the handler of the first signal calls, so it must be safe there.

        If a signal was received already, it is called when it is set.
        """
        return self._on_received

    @on_received.setter
    def on_received(self, call: Callable[[], None]) -> None:
        self._on_received = call
        if self.received is not None:
            call()

    def listen(self) -> None:
        """Takes the signals over."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._pid = os.getpid()
        self._speaker = threading.Thread(target=self._speak, name="signals", daemon=True)
        with small_stacks():
            self._speaker.start()
        before = {number: signal.signal(number, self._note) for number in self._numbers}
        self._before = {number: _without_late(number, handler) for number, handler in before.items()}
        self._hook, sys.unraisablehook = sys.unraisablehook, self._on_dropped

    def _on_dropped(self, dropped: sys.UnraisableHookArgs) -> None:
        """Python has dropped an exception."""
        if isinstance(dropped.exc_value, StopRequest):
            self._news.put("dropped")
        else:
            self._hook(dropped)

    def _note(self, number: int, frame: FrameType | None) -> None:
        """The handler. It prints nothing: the thread that it interrupts may be printing."""
        if os.getpid() != self._pid:
            self._in_child(number)
            return
        if self._is_sent_again:
            self._is_sent_again = False
            if self._at_once:
                raise StopRequest(self._stop(number))
            return
        if self.received is not None:
            now_s = time.monotonic()
            if (self._repeated and now_s - self._received_s < REPEATED_S) or now_s - self._quit_s < QUITTING_S:
                return
            self._quit_s = now_s
            raise KeyboardInterrupt
        self.received, self._received_s = number, time.monotonic()
        self._on_received()
        self._news.put(self._at_once or "received")
        if self._at_once:
            raise StopRequest(self._stop(number))

    def _late(self, number: int, frame: FrameType | None) -> None:
        """The handler of a signal that ends the process by default, while it ends anyway: only a later one does so."""
        if time.monotonic() - self._quit_s >= QUITTING_S:
            signal.signal(number, _default(number))
            os.kill(os.getpid(), number)

    def _in_child(self, number: int) -> None:
        """A forked child that loads data ignores our signals, but for SIGTERM, by which multiprocessing ends it."""
        if number == signal.SIGTERM:
            signal.signal(number, self._before[number])
            os.kill(os.getpid(), number)

    @contextmanager
    def at_once(self, what: str) -> Iterator[None]:
        """Inside, a signal raises StopRequest wherever that is, and ``what`` is said; so does one that came before."""
        try:
            self._from_now_at_once(what)
            yield
        finally:
            self._at_once = ""

    def _from_now_at_once(self, what: str) -> None:
        self._at_once = what
        self._require_not_received()

    def batches(self, batches: Iterable[StepBatch]) -> Iterator[StepBatch]:
        """Yields the batches; a signal that comes while the run waits for one ends the wait by StopRequest."""
        stream, depth = iter(batches), num_borrowed()
        while True:
            try:  # as ``at_once``, without a context of its own in each step
                self._from_now_at_once("saving now, while no step is in progress")
                batch = next(stream, None)
                self._require_not_received()
            except (Exception, StopRequest):
                give_back_to(depth)  # the signal may have come while a sample's generators were in use
                self._require_not_received()
                raise
            finally:
                self._at_once = ""
            if batch is None:
                return
            yield batch

    def _require_not_received(self) -> None:
        """Raises StopRequest after a signal: a dataset may have caught the first one, and given what was not asked."""
        if self.received is not None:
            raise StopRequest(self._stop(self.received))

    def _stop(self, number: int) -> Stop:
        return Stop(signal.Signals(number).name, save=True, exit_code=PREEMPTED, by_signal=True)

    def _speak(self) -> None:
        news = self._news.get()
        if news == "over" or self.received is None:
            return
        within = "" if self._grace_s is None else f" ({self._grace_s:g} s are left)"
        what = "saving at the end of this step" if news == "received" else news
        self._say(f"{signal.Signals(self.received).name}: {what}{within}; once more quits at once")
        if news != "received":
            self._send_again()
        if self._grace_s is None or news != "received":
            return
        late_s = WARN_AT * self._grace_s
        try:
            self._news.get(timeout=max(0.0, self._received_s + late_s - time.monotonic()))
        except Empty:
            late = f"the step has not ended after {late_s:g} s of {self._grace_s:g} s"
            self._say(f"{late}; {self._should_it_be_killed()}")

    def _send_again(self) -> None:
        """Whenever Python has dropped the exception that should end what is done."""
        while self._news.get() == "dropped" and self.received is not None:
            time.sleep(AGAIN_S)  # by then the finalizer or callback is over
            self._is_sent_again = True
            os.kill(os.getpid(), self.received)

    def _should_it_be_killed(self) -> str:
        return f"should the kill come first, the newest checkpoint is {self.newest()}"

    @property
    def received_name(self) -> str:
        """The name of the signal that came, "" for none."""
        return "" if self.received is None else signal.Signals(self.received).name

    def observe(self, result: StepResult, state: TrainState) -> Stop | None:
        if self.received is None:
            return None
        self._news.put("reached")
        saving_s = self.saving_s()
        if self._grace_s is not None and saving_s is not None:
            left_s = self._grace_s - (time.monotonic() - self._received_s)
            if left_s < saving_s:
                times = f"{max(left_s, 0.0):.1f} s are left and the last save took {saving_s:.1f} s"
                self._say(f"saving step {result.step}: {times}; {self._should_it_be_killed()}")
        return self._stop(self.received)

    def close(self) -> None:
        is_quitting = time.monotonic() - self._quit_s < QUITTING_S
        for number, handler in self._before.items():
            signal.signal(number, self._late if is_quitting and handler in _DEFAULTS else handler)
        if self._before and sys.unraisablehook == self._on_dropped:
            sys.unraisablehook = self._hook
        self._before = {}
        self._news.put("over")
        if self._speaker is not None:
            self._speaker.join()
            self._speaker = None
