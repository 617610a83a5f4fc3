"""Runs one part of ``verify resume``, with a clock that counts its calls, and an end at a requested step."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trainwright.checkpoint.rng import seed_all
from trainwright.checkpoint.train_state import TrainState
from trainwright.distributed.group import Solo
from trainwright.engine.observer import Stop
from trainwright.engine.step import StepResult
from trainwright.errors import StorageError
from trainwright.monitoring.terminal import Console
from trainwright.recipe import load
from trainwright.report.failure import describe
from trainwright.runs.folder import RunFolder
from trainwright.training.run import train
from trainwright.training.subject import Build, named

STEP_S = 1 / 32  # in counted time; a power of two, so that sums are exact in any order
COMMIT_WITHIN_S = 600.0
OTHER_DISK = "make room, or set TMPDIR to a folder on another disk"


@dataclass(frozen=True)
class TrialPart:
    """One training: of a recipe, of the objects that a function makes, or the rest of the run ``resume``.

    It runs to its end or to the step ``end_at``. There it ends by SIGKILL once the checkpoint ``committed`` is on disk,
    or by an orderly stop if that is None. The result is written to the file ``outcome``: ``Result.to_json()``, or an
    error and its exit code.
    """

    recipe: str
    settings: Sequence[str]
    outcome: str
    resume: str | None = None
    end_at: int | None = None
    committed: str | None = None


class CountedTime(Solo):
    """A world whose clock counts its calls, so that every process sees the same seconds.

    The loop calls it three times per step, and a step lasts from the first call to the third.
    """

    def __init__(self) -> None:
        self._calls = 0

    def clock(self) -> float:
        self._calls += 1
        return self._calls * STEP_S / 2


class _End:
    """Ends the run at a step: by SIGKILL once a checkpoint is on disk, or by a Stop without one to wait for."""

    def __init__(self, part: TrialPart) -> None:
        self._at, self._committed = part.end_at or 0, part.committed

    def observe(self, _result: StepResult, state: TrainState) -> Stop | None:
        if state.step < self._at:
            return None
        if self._committed is None:
            return Stop("verify resume")
        end_s = time.monotonic() + COMMIT_WITHIN_S
        while time.monotonic() < end_s:
            if Path(self._committed).is_dir():
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.01)
        raise StorageError(f"{self._committed} was not written in {COMMIT_WITHIN_S:.0f} s", remedy=OTHER_DISK)

    def close(self) -> None: ...


def outcome_of(part: TrialPart, build: Build, console: Console) -> dict[str, object]:
    """Train what ``build`` makes. Returns ``Result.to_json()``, or the error that it raised and its exit code."""
    try:
        folder = RunFolder.open(part.resume) if part.resume else None
        loaded, parts = build(() if folder else part.settings)
        if folder:
            loaded = load(folder.recipe, overrides=part.settings, environ={})
        result = train(
            loaded,
            # one of the observers may end the trial
            parts=None if parts is None else replace(parts, custom=replace(parts.custom, observers=())),
            resume=folder,
            console=console,
            extras=[lambda *_: _End(part)] if part.end_at else [],
            world=CountedTime(),
        )
    except Exception as error:
        text, code = describe(error)
        return {"error": text, "exit": code}
    return result.to_json()


def main() -> None:
    """Run the TrialPart that the first argument contains as JSON, and write its outcome."""
    part = TrialPart(**json.loads(sys.argv[1]))
    seed_all(0)  # a function that makes the objects draws the same numbers in each process
    outcome = outcome_of(part, lambda settings: named(part.recipe, settings).build(()), Console(stderr=True))
    Path(part.outcome).write_text(json.dumps(outcome))


if __name__ == "__main__":
    main()
