"""The command line. Commands are grouped by their use: before, during and after a run."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from contextlib import suppress

from trainwright.cli import running, before, jobs, after, views, agents  # isort: skip  (in the order of --help)
from trainwright.cli.app import app
from trainwright.cli.torchrun import leave_exit_code
from trainwright.report.failure import EXIT_INTERRUPTED

__all__ = ["after", "agents", "app", "before", "jobs", "views", "main", "running"]


def main() -> None:
    """Run the command line. After a second interrupt it does not wait for a checkpoint that a thread is writing."""
    with suppress(RuntimeError, OSError, ValueError):  # standard error may not be a file
        faulthandler.enable()  # a crash, for example in a library of a dataset, prints the Python stack
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # the reader has closed the pipe: `trainwright plan r.yaml | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the interpreter flushes again
        raise SystemExit(141) from None  # the code of a program that SIGPIPE ended
    except SystemExit as end:
        signals = sys.modules.get("trainwright.monitoring.signals")  # it imports torch: --help must not import it
        if signals is not None and end.code == signals.STOPPED_EXIT_CODE:
            # Python removes its own handlers before the process ends
            signals.set_late_handlers(lambda _: signal.SIG_IGN)
        leave_exit_code(end.code or 0, os.environ)
        if end.code == EXIT_INTERRUPTED:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(EXIT_INTERRUPTED)
        raise
