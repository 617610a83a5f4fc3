"""Prints text that a language model generates at a few points of its run."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from trainwright.checkpoint.train_state import TrainState
from trainwright.engine.step import StepResult
from trainwright.errors import StorageError
from trainwright.runs.storage import make_subfolder, open_for_writing


class TextSamples:
    """An observer that calls ``write`` at given fractions of the run.

    ``write()`` returns the sample, or "" to omit it. It must not change the mode of the model or the random generators.
    """

    def __init__(
        self,
        write: Callable[[], str],
        *,
        folder: Path,
        say: Callable[[str], None],
        at: Sequence[float] = (0.25, 0.5),
    ) -> None:
        self._write = write
        self._folder = folder
        self._say = say
        self._left = sorted(at)

    def observe(self, _result: StepResult, state: TrainState) -> None:
        fraction = state.fraction
        if self._left and fraction >= self._left[0]:
            self._left = [each for each in self._left if each > fraction]
            self.show(f"{fraction:.0%} of the run")

    def show(self, title: str) -> None:
        """Print one sample now and keep it in the folder."""
        text = self._write()
        if not text:
            return
        self._say(f"sample at {title}:\n" + "\n".join(f"    {line}" for line in text.splitlines()))
        try:
            make_subfolder(self._folder)
            fd = open_for_writing(self._folder / "samples.txt", os.O_WRONLY | os.O_APPEND)
            with os.fdopen(fd, "a", encoding="utf-8") as file:
                file.write(f"--- {title}\n{text}\n")
        except (OSError, StorageError) as error:
            self._say(f"the sample is not kept: {error}")

    def close(self) -> None: ...
