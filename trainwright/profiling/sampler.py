"""Samples where a thread is, while it runs at its full speed: some hundred times a second, by another thread."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter

from trainwright.profiling.stack import HostPlace, place_of

EVERY_S = 0.005
"""The mean between samples. They are not evenly apart: a loop may have the same rhythm."""
_GOLDEN = 0.6180339887498949


class HostSampler:
    """Seconds by place since the last ``take``. Each sample counts for the time since the one before it: it comes late
    where code holds the interpreter's lock."""

    def __init__(self, thread: int) -> None:
        self._thread, self._seconds, self._lock = thread, Counter[HostPlace](), threading.Lock()
        self._ends = threading.Event()
        self._sampler = threading.Thread(target=self._sample, name="trainwright profile", daemon=True)

    def start(self) -> None:
        """Begins to sample."""
        self._sampler.start()

    def take(self) -> Counter[HostPlace]:
        """What was seen since the last call."""
        with self._lock:
            seconds, self._seconds = self._seconds, Counter[HostPlace]()
        return seconds

    def close(self) -> None:
        """Ends the thread."""
        self._ends.set()
        self._sampler.join()

    def _sample(self) -> None:
        before_s = time.perf_counter()
        part = 0.0
        while not self._ends.wait(EVERY_S * (0.5 + part)):
            part = (part + _GOLDEN) % 1.0
            place = place_of(sys._current_frames().get(self._thread))
            now_s = time.perf_counter()
            with self._lock:
                self._seconds[place] += now_s - before_s  # type: ignore[assignment]
            before_s = now_s
