"""Sends a run to MLflow: to a server, or by default to a database beside the run folders.

No data leaves the machine unless MLFLOW_TRACKING_URI is the address of a server.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path

from trainwright.errors import import_optional
from trainwright.monitoring.sinks import BaseSink
from trainwright.runs.files import UnreadableFile, read_json
from trainwright.runs.media import Histogram, Image, encode, flat_grey

METRICS_PER_CALL = 500
"""Number of metrics that are sent together. MLflow accepts at most 1000 in a call."""
EVERY_S = 5.0
"""Maximum seconds between two calls while metrics arrive."""
MAX_PARAMETERS_PER_CALL = 100
"""A limit of MLflow."""
MAX_VALUE_CHARS = 500
"""A limit of MLflow."""
RUN_ID = "mlflow-run.json"
"""The file in the run folder that lets a resume continue the same run of MLflow."""

NO_SUCH_RUN = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE", "INVALID_STATE")
"""Error codes of MLflow for a run that it does not have, or that was deleted."""


class MLflow(BaseSink):
    """A Sink. ``mlflow ui --backend-store-uri sqlite:///runs/mlflow.db`` shows all runs, with recipes as parameters.

    If a resume repeats steps, MLflow keeps both values of each.
    """

    def __init__(self, folder: Path, config: Mapping[str, object], *, from_step: int = 0) -> None:
        super().__init__(folder, config, from_step=from_step)
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # by default MLflow reports calls to its developers
        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")  # the terminal has the progress line
        os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
        self._make = import_optional("mlflow", needed_for="the mlflow sink").MlflowClient
        self._entities = import_optional("mlflow.entities", needed_for="the mlflow sink")
        self._errors = import_optional("mlflow.exceptions", needed_for="the mlflow sink")

    def open(self) -> None:
        folder = self._folder
        beside = folder.resolve().parent
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        artifacts = None if uri else (beside / "mlflow-artifacts").as_uri()
        self._client = self._make(tracking_uri=uri or f"sqlite:///{beside / 'mlflow.db'}")
        self._waiting: list[object] = []
        self._sent_s = time.monotonic()
        self._run_id = self._resumed(folder) if self._from_step else None
        if self._run_id is None:
            experiment = self._experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", "trainwright"), artifacts)
            run = self._client.create_run(experiment, run_name=folder.name, tags={"trainwright.folder": str(folder)})
            self._run_id = run.info.run_id
            (folder / RUN_ID).write_text(json.dumps({"run_id": self._run_id}) + "\n", "utf-8")
            parameters = (self._entities.Param(name, value[:MAX_VALUE_CHARS]) for name, value in _flat(self._config))
            while some := list(islice(parameters, MAX_PARAMETERS_PER_CALL)):
                self._client.log_batch(self._run_id, params=some)

    def _experiment(self, name: str, artifacts: str | None) -> str:
        found = self._client.get_experiment_by_name(name)
        return str(found.experiment_id if found else self._client.create_experiment(name, artifact_location=artifacts))

    def _resumed(self, folder: Path) -> str | None:
        """Return the id of the run to continue. None if it is unknown, deleted, or on another server."""
        try:
            run_id = str(read_json(folder / RUN_ID)["run_id"])
            self._client.update_run(run_id, status="RUNNING")
        except (UnreadableFile, KeyError, TypeError):
            return None
        except self._errors.MlflowException as error:
            if error.error_code in NO_SUCH_RUN:
                return None
            raise  # the run warns with the reason, and MLflow gets nothing
        return run_id

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        now_ms = time.time_ns() // 10**6
        self._waiting += [self._entities.Metric(name, value, now_ms, step) for name, value in values.items()]
        if len(self._waiting) >= METRICS_PER_CALL or time.monotonic() - self._sent_s > EVERY_S:
            self._send()

    def _send(self) -> None:
        for start in range(0, len(self._waiting), METRICS_PER_CALL):
            self._client.log_batch(self._run_id, metrics=self._waiting[start : start + METRICS_PER_CALL])
        self._waiting = []
        self._sent_s = time.monotonic()

    def text(self, step: int, name: str, text: str) -> None:
        self._client.log_text(self._run_id, text, f"{name}/step-{step:08d}.txt")

    def media(self, step: int, name: str, value: Image | Histogram) -> None:
        key = re.sub(r"[^A-Za-z0-9_./ -]", "_", name)  # MLflow refuses other characters
        if isinstance(value, Image):
            self._client.log_image(self._run_id, flat_grey(value.pixels), key=key, step=step)
        else:
            self._client.log_text(self._run_id, encode(value).decode(), f"{key}/step-{step:08d}.json")

    def close(self, exit_code: int) -> None:
        self._send()
        self._client.set_terminated(self._run_id, status="FAILED" if exit_code else "FINISHED")


def _flat(config: Mapping[str, object], path: str = "") -> Iterator[tuple[str, str]]:
    for key, value in config.items():
        where = f"{path}.{key}" if path else str(key)
        if isinstance(value, Mapping) and value:
            yield from _flat(value, where)
        else:
            yield where, str(value)
