"""Serves the newest value of each metric for Prometheus, the OpenTelemetry collector and others.

The address is ``http://127.0.0.1:9464/metrics``, unless TRAINWRIGHT_METRICS=host:port is set.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from trainwright.errors import UsageError, import_optional
from trainwright.monitoring.sinks import BaseSink

if TYPE_CHECKING:
    from prometheus_client import Gauge

VARIABLE = "TRAINWRIGHT_METRICS"
DEFAULT = "127.0.0.1:9464"


class OpenMetrics(BaseSink):
    """A Sink. Each metric is a gauge, ``trainwright_train_loss{run="..."}`` for ``train/loss``, until the run ends."""

    def __init__(self, folder: Path, config: Mapping[str, object], *, from_step: int = 0) -> None:
        super().__init__(folder, config, from_step=from_step)
        self._prometheus = import_optional("prometheus_client", needed_for="the openmetrics sink")
        self._registry = self._prometheus.CollectorRegistry()
        self._gauges: dict[str, Gauge] = {}

    def open(self) -> None:
        host, port = _address(os.environ.get(VARIABLE, DEFAULT))
        try:
            self._server, self._thread = self._prometheus.start_http_server(port, host, self._registry)
        except OSError as error:
            raise UsageError(
                f"cannot listen on {host}:{port}: {error.strerror}", remedy=f"set {VARIABLE}=127.0.0.1:9465"
            ) from None

    @property
    def port(self) -> int:
        return int(self._server.server_port)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in {**values, "step": float(step)}.items():
            self._gauge(name).labels(self._folder.name).set(value)

    def _gauge(self, name: str) -> Gauge:
        safe = f"trainwright_{re.sub(r'[^A-Za-z0-9_]', '_', name)}"
        if safe not in self._gauges:
            self._gauges[safe] = self._prometheus.Gauge(safe, name, ["run"], registry=self._registry)
        return self._gauges[safe]

    def close(self, _exit_code: int) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise UsageError(f"{VARIABLE}={text} is not an address", remedy=f"write {VARIABLE}={DEFAULT}")
    return host.strip("[]"), int(port)
