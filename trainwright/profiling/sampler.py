"""Samples the position of a thread while it runs at full speed: some hundred times per second, from another thread."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter

from trainwright.profiling.stack import HostPlace, place_of

SAMPLE_INTERVAL_S = 0.005
"""Mean seconds between samples. The intervals vary, because a loop may have the same period."""
_GOLDEN = 0.6180339887498949


class HostSampler:
    """Seconds by place since the last ``take``.

    A sample counts for the time since the one before, because it is late while code holds the interpreter's lock.
    """

    def __init__(self, thread: int) -> None:
        self._thread = thread
        self._seconds = Counter[HostPlace]()
        self._lock = threading.Lock()
        self._ends = threading.Event()
        self._sampler = threading.Thread(target=self._sample, name="trainwright profile", daemon=True)

    def start(self) -> None:
        """Start to sample."""
        self._sampler.start()

    def take(self) -> Counter[HostPlace]:
        """Return the seconds by place since the last call."""
        with self._lock:
            seconds, self._seconds = self._seconds, Counter[HostPlace]()
        return seconds

    def close(self) -> None:
        """End the thread."""
        self._ends.set()
        self._sampler.join()

    def _sample(self) -> None:
        before_s = time.perf_counter()
        part = 0.0
        while not self._ends.wait(SAMPLE_INTERVAL_S * (0.5 + part)):
            part = (part + _GOLDEN) % 1.0
            place = place_of(sys._current_frames().get(self._thread))
            now_s = time.perf_counter()
            with self._lock:
                self._seconds[place] += now_s - before_s  # type: ignore[assignment]
            before_s = now_s
