"""Logs to Trackio. By default the database is ``trackio`` in the parent of the run folder (see TRACKIO_DIR)."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from pathlib import Path

from trainwright.errors import import_optional
from trainwright.monitoring.sinks import BaseSink
from trainwright.runs.media import Histogram, Image, flat_grey


class Trackio(BaseSink):
    """A sink for Trackio. ``TRACKIO_DIR=runs/trackio trackio show`` shows all runs. A resume continues its run."""

    def __init__(self, folder: Path, config: Mapping[str, object], *, from_step: int = 0) -> None:
        super().__init__(folder, config, from_step=from_step)
        os.environ.setdefault("TRACKIO_DIR", str(folder.resolve().parent / "trackio"))
        self._trackio = import_optional("trackio", needed_for="the trackio sink")
        for module in ("trackio", "trackio.run", "trackio.utils"):  # what it prints would break the progress line
            vars(importlib.import_module(module))["print"] = _silent

    def open(self) -> None:
        self._run = self._trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", "trainwright"),
            name=self._folder.name,
            config=dict(self._config),
            resume="allow" if self._from_step else "never",
            embed=False,
            auto_log_gpu=False,  # monitoring/logbook.py already logs the sensors of the machine
            auto_log_cpu=False,
        )

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def text(self, step: int, name: str, text: str) -> None:
        self._run.log({name: self._trackio.Markdown(f"```\n{text}\n```")}, step=step)

    def media(self, step: int, name: str, value: Image | Histogram) -> None:
        if isinstance(value, Image):
            shown = self._trackio.Image(flat_grey(value.pixels), caption=value.caption or None)
        else:
            shown = self._trackio.Histogram(np_histogram=(value.counts, value.edges))
        self._run.log({name: shown}, step=step)

    def close(self, _exit_code: int) -> None:
        self._run.finish()


def _silent(*args: object, **kwargs: object) -> None:
    """Print nothing."""
