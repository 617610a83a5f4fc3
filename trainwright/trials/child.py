"""Ends the process of a trial when the process that started it is gone, for any reason."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

EXIT_STOPPED = 75
POLL_S = 1.0
_PR_SET_PDEATHSIG = 1


def end_with(parent: int) -> None:
    """Send SIGTERM to this process when its ``parent`` ends. A run that trains then saves and stops.

    Call it first in the child. On Linux the kernel sends the signal, elsewhere a thread that polls.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    else:
        threading.Thread(target=_poll, args=(parent,), daemon=True).start()
    if os.getppid() != parent:  # it ended before the signal was requested
        raise SystemExit(EXIT_STOPPED)


def _poll(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(POLL_S)
    os.kill(os.getpid(), signal.SIGTERM)
