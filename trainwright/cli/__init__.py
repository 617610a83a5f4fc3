"""The command line: thin verbs, in files by when they are used (before, during and after a run)."""

from __future__ import annotations

import faulthandler
import os
import sys
from contextlib import suppress

from trainwright.cli import running, before, jobs, after, looking  # isort: skip  (in the order of --help)
from trainwright.cli.app import app
from trainwright.cli.torchrun import leave_exit_code
from trainwright.report.failure import EXIT_INTERRUPTED

__all__ = ["after", "app", "before", "jobs", "looking", "main", "running"]


def main() -> None:
    """The entry point. After a second interrupt it does not wait for a checkpoint that a thread is writing."""
    with suppress(RuntimeError, OSError, ValueError):  # standard error may be no file
        faulthandler.enable()  # a crash, of a dataset's library for example, prints where Python was
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # whoever read our output has seen enough: `trainwright plan r.yaml | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter would flush it again
        raise SystemExit(141) from None  # as a program that SIGPIPE ends
    except SystemExit as end:
        leave_exit_code(end.code or 0, os.environ)
        if end.code == EXIT_INTERRUPTED:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(EXIT_INTERRUPTED)
        raise
