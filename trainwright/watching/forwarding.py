"""Forwards the records of a watch to sinks and alerts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from trainwright.errors import UsageError
from trainwright.monitoring.layer_stats import scalars_of
from trainwright.recorder.probes import Probe
from trainwright.recorder.program import RecordedStep
from trainwright.runs.folder import RunFolder
from trainwright.runs.records import Layers, Logged, Record, Watched

if TYPE_CHECKING:
    from trainwright.monitoring.sinks import Sink, SinkFactory
    from trainwright.recipe.schema import Alerts

ANY_RECIPE = {"model": {"use": "mlp", "args": {"sizes": [1, 1]}}, "data": {"train": "digits"}}
"""Completes the settings of sinks and alerts to a recipe, so that they are validated like those of a recipe."""


class ForwardingProbe(Probe):
    """Passes records to sinks, and step numbers to alerts, without waiting for either.

    Raises the errors of a recipe for invalid names of sinks or an invalid section ``alerts``.
    """

    name = "forwarding"

    def __init__(self, sinks: object, alerts: object) -> None:
        names = list(sinks) if isinstance(sinks, tuple | set) else [sinks] if isinstance(sinks, str) else sinks
        self._factories: Mapping[str, SinkFactory] = {}
        self._alerts: Alerts | None = None
        if names or alerts is not None:
            self._read({**ANY_RECIPE, "log": {"sinks": names}, "alerts": alerts})
        self.sinks: Sequence[Sink] = ()
        self._layers: tuple[str, ...] = ()
        self._note: Callable[[int], None] = lambda step: None

    def _read(self, mapping: Mapping[str, object]) -> None:
        """Reads the settings as a recipe would be read."""
        from trainwright.monitoring.alerts import require_channels
        from trainwright.monitoring.sinks import sink_factories
        from trainwright.recipe import from_mapping  # takes 0.2 s

        recipe = from_mapping(mapping, name="tw.watch").recipe
        self._factories, self._alerts = sink_factories(recipe.log.sinks), recipe.alerts
        require_channels(self._alerts)

    @property
    def is_needed(self) -> bool:
        """True if there are sinks or alerts."""
        return bool(self._factories) or self._alerts is not None

    def require_out(self, out: object) -> None:
        """Raises UsageError if there are sinks or alerts and no run folder."""
        if out is None and self.is_needed:
            raise UsageError("watch: sinks and alerts need a run folder, and out is None", remedy="set out to a folder")

    @contextmanager
    def opened(self, folder: RunFolder, config: Mapping[str, object], say: Callable[[str], None]) -> Iterator[None]:
        """Context in which records are forwarded. Leave it after the last record was written."""
        if not self.is_needed:
            yield
            return
        from trainwright.monitoring.alerts import alerting
        from trainwright.monitoring.sinks import close_sinks, open_sinks

        process = os.getpid()
        with alerting(self._alerts, folder, say, watched=True) as watching:
            for each in watching:
                self._note = each.note
            opened = self.sinks = open_sinks(self._factories, folder.path, config, say)
            try:
                yield
            finally:
                if os.getpid() == process:
                    close_sinks(opened, 0)

    def on_closed(self, step: RecordedStep) -> None:
        self._note(step.step)

    def record(self, record: Record) -> None:
        """Forwards a record of the log."""
        if self.sinks and isinstance(record, Watched | Logged | Layers):
            values = self._scalars(record)
            for sink in self.sinks:
                sink.scalars(record.step, values)

    def _scalars(self, record: Watched | Logged | Layers) -> Mapping[str, float]:
        if isinstance(record, Logged):
            return record.figures
        if isinstance(record, Layers):
            self._layers = record.layers or self._layers
            return scalars_of(record, self._layers)
        values = {"loss": record.loss, "grad_norm": record.grad_norm, "lr": record.lr}
        values |= {name: record.values[name] for name in ("step_s", "wait_s") if name in record.values}
        return {f"train/{name}": value for name, value in values.items()}
