"""Writes TensorBoard event files to ``tensorboard/`` in the run folder. ``tensorboard --logdir runs`` shows all."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from trainwright.errors import MissingExtra
from trainwright.monitoring.sinks import BaseSink
from trainwright.runs.media import Histogram, Image


class TensorBoard(BaseSink):
    """A Sink. TensorBoard hides events of an earlier process after ``from_step``: a resume repeats those steps."""

    def __init__(self, folder: Path, config: Mapping[str, object], *, from_step: int = 0) -> None:
        super().__init__(folder, config, from_step=from_step)
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise MissingExtra("tensorboard", needed_for="the tensorboard sink") from error
        self._make = SummaryWriter

    def open(self) -> None:
        purge_step = self._from_step + 1 if self._from_step else None
        self._writer = self._make(str(self._folder / "tensorboard"), purge_step=purge_step, flush_secs=30)
        self._writer.add_text("recipe", _verbatim(json.dumps(self._config, indent=2, default=str)), self._from_step)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def text(self, step: int, name: str, text: str) -> None:
        self._writer.add_text(name, _verbatim(text), step)

    def media(self, step: int, name: str, value: Image | Histogram) -> None:
        if isinstance(value, Image):
            self._writer.add_image(name, value.pixels, step, dataformats="HWC")
            return
        middles, edges, counts = (value.edges[1:] + value.edges[:-1]) / 2, value.edges, value.counts
        self._writer.add_histogram_raw(
            name,
            min=float(edges[0]),
            max=float(edges[-1]),
            num=int(counts.sum()),
            sum=float(middles @ counts),
            sum_squares=float(middles**2 @ counts),
            bucket_limits=edges[1:].tolist(),
            bucket_counts=counts.tolist(),
            global_step=step,
        )

    def close(self, _exit_code: int) -> None:
        self._writer.close()


def _verbatim(text: str) -> str:
    """Return text as an indented block, which TensorBoard, reading Markdown, shows unchanged."""
    return "\n".join(f"    {line}" for line in text.splitlines())
