"""TensorBoard event files in ``tensorboard/`` of the run folder; ``tensorboard --logdir runs`` shows all runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from trainwright.errors import MissingExtra


class TensorBoard:
    """A Sink. TensorBoard hides what an earlier process wrote after ``from_step``: a resume repeats those steps."""

    def __init__(self, folder: Path, config: Mapping[str, object], *, from_step: int = 0) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise MissingExtra("tensorboard", needed_for="the tensorboard sink") from error
        self._make, self._folder, self._config, self._from_step = SummaryWriter, folder, config, from_step

    def open(self) -> None:
        purge_step = self._from_step + 1 if self._from_step else None
        self._writer = self._make(str(self._folder / "tensorboard"), purge_step=purge_step, flush_secs=30)
        self._writer.add_text("recipe", _as_it_stands(json.dumps(self._config, indent=2, default=str)), self._from_step)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def text(self, step: int, name: str, text: str) -> None:
        self._writer.add_text(name, _as_it_stands(text), step)

    def close(self, exit_code: int) -> None:
        self._writer.close()


def _as_it_stands(text: str) -> str:
    """TensorBoard reads text as Markdown, in which an indented block is shown unchanged."""
    return "\n".join(f"    {line}" for line in text.splitlines())
