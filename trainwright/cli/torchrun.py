"""Runs torchrun and ends with the exit code of the ranks. torchrun alone ends with 1, whatever their codes are.

Accepts the options of ``python -m torch.distributed.run``. Schedulers use the code: 75 means that the run was stopped
and is saved, so that the job may be restarted.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

EXIT_CODES = "TRAINWRIGHT_EXIT_CODES"
"""The environment variable with the folder in which each rank leaves its exit code. torchrun drops it after a signal.
"""


def leave_exit_code(code: object, environ: Mapping[str, str]) -> None:
    """Write the exit code of this rank for ``main``. Does nothing if ``main`` did not start it."""
    folder, rank = environ.get(EXIT_CODES), environ.get("LOCAL_RANK")
    if folder and rank and isinstance(code, int) and Path(folder).is_dir():
        Path(folder, rank).write_text(str(code), "utf-8")


def common_exit_code(folder: Path) -> int:
    """Return the code that every rank of this machine left, or 1."""
    codes = {path.read_text("utf-8") for path in folder.iterdir()}
    return int(codes.pop()) if len(codes) == 1 else 1


def main() -> None:
    """Run torchrun in this process."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    with tempfile.TemporaryDirectory(prefix="trainwright-ranks-") as folder:
        os.environ[EXIT_CODES] = folder
        try:
            run.main(sys.argv[1:])
        except ChildFailedError as failed:  # torchrun has printed which rank it was
            code = failed.get_first_failure()[1].exitcode
            sys.exit(code if code > 0 else 1)
        except SignalException:
            sys.exit(common_exit_code(Path(folder)))
