"""Weights & Biases in the run folder, offline unless WANDB_MODE is set.

With the defaults here nothing leaves the machine, not even a name look-up (checked with strace, wandb 0.31).
"""

from __future__ import annotations

import base64
import html
import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from trainwright.errors import import_optional
from trainwright.monitoring.sinks import BaseSink
from trainwright.runs.media import Histogram, Image, encode, flat_grey


class WeightsAndBiases(BaseSink):
    """A Sink. ``wandb sync <run folder>/wandb/offline-run-*`` uploads an offline run later."""

    def __init__(self, folder: Path, config: Mapping[str, object], *, from_step: int = 0) -> None:
        super().__init__(folder, config, from_step=from_step)
        self._wandb = import_optional("wandb", needed_for="the wandb sink")

    def open(self) -> None:
        wandb = self._wandb
        # Offline or not, wandb reports its errors to its makers unless that is disabled before its service starts
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "trainwright"),
            name=self._folder.name,
            dir=str(self._folder),
            config=dict(self._config),
            mode=None if "WANDB_MODE" in os.environ else "offline",  # None: wandb reads the variable
            settings=wandb.Settings(
                console="off",  # the terminal has the progress line
                silent=True,
                x_disable_stats=True,  # monitoring/logbook.py reads the machine already
                x_disable_meta=True,  # provenance.json has it, without all details of the host
                disable_git=True,
                disable_code=True,
                disable_job_creation=True,
            ),
        )

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def text(self, step: int, name: str, text: str) -> None:
        self._run.log({name: self._wandb.Html(f"<pre>{html.escape(text)}</pre>")}, step=step)

    def media(self, step: int, name: str, value: Image | Histogram) -> None:
        if isinstance(value, Histogram):
            shown = self._wandb.Histogram(np_histogram=(value.counts, value.edges))
        elif find_spec("PIL") is not None:
            shown = self._wandb.Image(flat_grey(value.pixels), caption=value.caption or None)
        else:  # wandb draws images with pillow, and does not require it
            png = base64.b64encode(encode(value)).decode()
            shown = self._wandb.Html(f'<img src="data:image/png;base64,{png}"><p>{html.escape(value.caption)}</p>')
        self._run.log({name: shown}, step=step)

    def close(self, exit_code: int) -> None:
        self._run.finish(exit_code=exit_code)
