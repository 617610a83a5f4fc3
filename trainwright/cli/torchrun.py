"""torchrun that ends with the exit code of the ranks; by itself it ends with 1, whatever theirs were.

Takes the options of ``python -m torch.distributed.run``. Schedulers go by the code: 75 says that the run was stopped
and is saved, so that the job may be started again.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

EXIT_CODES = "TRAINWRIGHT_EXIT_CODES"
"""The variable with the folder where each rank leaves its exit code: after a signal torchrun does not tell it."""


def leave_exit_code(code: object, environ: Mapping[str, str]) -> None:
    """Writes the exit code of this rank for ``main``; does nothing where no ``main`` has started it."""
    folder, rank = environ.get(EXIT_CODES), environ.get("LOCAL_RANK")
    if folder and rank and isinstance(code, int) and Path(folder).is_dir():
        Path(folder, rank).write_text(str(code))


def common_exit_code(folder: Path) -> int:
    """The code that every rank of this machine left, or 1."""
    codes = {path.read_text() for path in folder.iterdir()}
    return int(codes.pop()) if len(codes) == 1 else 1


def main() -> None:
    """Runs torchrun in this process."""
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
