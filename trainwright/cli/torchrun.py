"""Runs torchrun and exits with the exit code of the ranks. torchrun itself always exits with 1 if a rank fails.

Accepts the options of ``python -m torch.distributed.run``. Schedulers use the code: 75 means that the run was stopped
and saved, so the job may be restarted.

On Linux, ranks are forked from an idle server that has imported torch and Trainwright, so a restart does not import
them again. If torchrun is killed, its ranks save and stop, so that another torchrun can continue the run. Ranks that
have not stopped after 10 minutes are killed.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from trainwright.cli.app import importing_torch

EXIT_CODES = "TRAINWRIGHT_EXIT_CODES"
"""The environment variable with the folder for the exit codes of ranks, which torchrun loses after a signal."""
CAN_FORK = sys.platform == "linux"
"""True if a process may be forked after its imports. System libraries of macOS do not support it."""
ORPHAN_GRACE_S = 600.0
"""Seconds that ranks have to save and stop after torchrun was killed. Then they are killed: one may wait for another.
"""
_KILLED = """\
error: rank {rank} was ended by {signal}, and torchrun has ended the others
  remedy: after SIGKILL see if the machine ran out of memory (dmesg). Then trainwright resume RUN -- ... continues it"""
AS_MODULE = ("-u", "-m", "trainwright")
"""The first arguments of Python in the command of a rank."""


def leave_exit_code(code: object, environ: Mapping[str, str]) -> None:
    """Write the exit code of this rank for ``main``. Does nothing if ``main`` did not start it."""
    folder = environ.get(EXIT_CODES)
    rank = environ.get("LOCAL_RANK")
    if folder and rank and isinstance(code, int) and Path(folder).is_dir():
        Path(folder, rank).write_text(str(code), "utf-8")


def common_exit_code(folder: Path) -> int:
    """Return the exit code if all ranks of this machine wrote the same one; else 1."""
    codes = {path.read_text("utf-8") for path in folder.iterdir()}
    return int(codes.pop()) if len(codes) == 1 else 1


def main() -> None:
    """Run torchrun in this process."""
    with tempfile.TemporaryDirectory(prefix="trainwright-ranks-") as folder:
        os.environ[EXIT_CODES] = folder
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # records the last collectives of a rank that hangs
        if CAN_FORK:  # the server imports at the same time as this process
            os.environ.setdefault("PYTHONUNBUFFERED", "1")
            forkserver.set_forkserver_preload(["trainwright.cli.rank_imports"])
            forkserver.ensure_running()
        with importing_torch():
            from torch.distributed import run
            from torch.distributed.elastic.multiprocessing.api import SignalException
            from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

        if CAN_FORK:
            logging.getLogger("torch.distributed.elastic.multiprocessing.api").addFilter(_without_traceback)
            vars(run)["elastic_launch"] = _forked
        try:
            run.main(sys.argv[1:])
        except ChildFailedError as failed:  # a rank that ended itself has printed the reason
            rank, failure = failed.get_first_failure()
            if failure.exitcode < 0:
                print(_KILLED.format(rank=rank, signal=failure.signal_name()), file=sys.stderr)
            sys.exit(failure.exitcode if failure.exitcode > 0 else 1)
        except SignalException:
            sys.exit(common_exit_code(Path(folder)))


def run_rank(*command: str) -> None:
    """Run the command line in a forked rank, as ``python -m trainwright`` does in a new process."""
    import trainwright
    from trainwright.cli import main as run_command

    os.setsid()  # as torchrun does for new processes: a rank gets Ctrl-C once, from torchrun
    threading.Thread(target=_stop_after_parent, daemon=True).start()
    sys.argv = [str(Path(trainwright.__file__).with_name("__main__.py")), *command]
    run_command()


def _stop_after_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(ORPHAN_GRACE_S)
    os.kill(os.getpid(), signal.SIGKILL)


def _forked(config: Any, entrypoint: str) -> Callable[..., object]:
    """Return a launcher like torch's ``elastic_launch`` whose ranks are started by the fork server."""
    from torch.distributed.launcher.api import elastic_launch

    def launch(*words: str) -> object:
        if words[:3] != AS_MODULE:
            return elastic_launch(config, entrypoint)(*words)
        config.start_method = "forkserver"
        return elastic_launch(config, run_rank)(*words[3:])

    return launch


def _without_traceback(record: logging.LogRecord) -> bool:
    """Remove the traceback of torchrun itself. The traceback of a rank is in the output of the rank."""
    record.exc_info = None
    return True
