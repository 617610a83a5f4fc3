"""Sinks write real files that their own readers read; one that fails is said once and then left alone."""

from __future__ import annotations

import contextlib
import csv
import json
import math
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import tracemalloc
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import trainwright as tw
from tests import forked
from tests.disks import small_disk
from trainwright.errors import MissingExtra, StorageError, UsageError
from trainwright.monitoring import sinks as sinks_room
from trainwright.monitoring.sinks import QueuedSink, close_sinks, open_sinks, sink_factories
from trainwright.monitoring.sinks.csv_file import CsvFile
from trainwright.monitoring.sinks.tensorboard import TensorBoard
from trainwright.recipe import SINKS, SinkRow


class Warnings(list[str]):
    def __call__(self, text: str) -> None:
        self.append(text)


def never(text: str) -> None:
    raise AssertionError(text)


def read_events(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-untyped]
        EventAccumulator,
    )

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return events


def scalars_of(folder: Path, name: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in read_events(folder).Scalars(name)]


@pytest.mark.slow
def test_tensorboard_reads_back_what_was_written(tmp_path: Path) -> None:
    (sink,) = open_sinks(sink_factories(["tensorboard"]), tmp_path, {"lr": 0.1, "name": "x"}, never)
    sink.scalars(1, {"loss": 2.0, "val/accuracy": 0.25})
    sink.scalars(2, {"loss": math.inf})
    sink.text(2, "sample", "# not a title\n<b>")
    sink.media(2, "drawn", tw.Image(torch.tensor([[[0.0, 1.0]]])))
    sink.media(2, "weights", tw.Histogram(torch.tensor([0.0, 0.0, 1.0]), bins=2))
    close_sinks([sink], 0)
    (drawn,) = read_events(tmp_path).Images("drawn")
    assert (drawn.step, drawn.width, drawn.height) == (2, 2, 1) and drawn.encoded_image_string[:4] == b"\x89PNG"
    (weights,) = read_events(tmp_path).Histograms("weights")
    value = weights.histogram_value
    assert (value.bucket_limit[-2:], value.bucket, value.num, value.max) == ([0.5, 1.0], [2.0, 1.0], 3.0, 1.0)
    assert scalars_of(tmp_path, "loss") == [(1, 2.0), (2, math.inf)]
    assert scalars_of(tmp_path, "val/accuracy") == [(1, 0.25)]
    (text,) = read_events(tmp_path).Tensors("sample/text_summary")
    assert text.tensor_proto.string_val[0].decode() == "    # not a title\n    <b>"
    (recipe,) = read_events(tmp_path).Tensors("recipe/text_summary")
    assert '"lr": 0.1' in recipe.tensor_proto.string_val[0].decode()


def test_tensorboard_hides_the_steps_that_a_resume_repeats(tmp_path: Path) -> None:
    first = TensorBoard(tmp_path, {})
    first.open()
    for step in (1, 2, 3):
        first.scalars(step, {"loss": 1.0})
    first.close(1)
    second = TensorBoard(tmp_path, {}, from_step=1)
    second.open()
    second.scalars(2, {"loss": 9.0})
    second.close(0)
    assert scalars_of(tmp_path, "loss") == [(1, 1.0), (2, 9.0)]


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", "size=64k") as disk:
        yield disk


# TensorBoard's writer thread raises besides handing the error on: that it does so is not ours to change.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_tensorboard_on_a_full_disk_warns_once_and_training_goes_on(tiny_disk: Path) -> None:
    said = Warnings()
    (sink,) = open_sinks(sink_factories(["tensorboard"]), tiny_disk, {}, said)
    for step in range(200):
        sink.text(step, "sample", "x" * 2000)
    close_sinks([sink], 0)
    for thread in threading.enumerate():
        if type(thread).__name__ == "_AsyncWriterThread":
            thread.join()  # so that what it raises belongs to this test
    assert len(said) == 1
    assert "tensorboard receives no more of this run" in said[0]
    assert "No space left" in said[0]


class Broken:
    """A sink whose server is gone."""

    calls = 0

    def open(self) -> None:
        """It is there."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self.calls += 1
        raise ConnectionError("server\n gone")

    def text(self, step: int, name: str, text: str) -> None:
        self.calls += 1

    def media(self, step: int, name: str, value: object) -> None:
        self.calls += 1

    def close(self, exit_code: int) -> None:
        self.calls += 1


def test_a_sink_that_fails_is_said_once_and_left_alone() -> None:
    broken, said = Broken(), Warnings()
    sink = QueuedSink("wandb", broken, said)
    sink.scalars(1, {})
    sink.scalars(2, {})
    sink.text(2, "a", "b")
    close_sinks([sink], 0)
    assert broken.calls == 1
    assert said == ["wandb receives no more of this run, log.jsonl is complete: ConnectionError: server gone"]


class Hanging(Broken):
    """A sink whose server takes the connection and does not answer, until it is freed."""

    def __init__(self, when: str = "written to") -> None:
        self.freed, self.seen, self.when = threading.Event(), list[int](), when

    def open(self) -> None:
        if self.when == "opened":
            self.freed.wait()

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self.freed.wait()
        self.seen.append(step)


@pytest.mark.parametrize("when", ["opened", "written to"])
def test_a_sink_that_hangs_holds_up_nobody(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hanging, other, said = Hanging(when), Hanging(), Warnings()
    other.freed.set()
    sinks = [QueuedSink("hanging", hanging, said), QueuedSink("other", other, never)]
    for sink in sinks:
        for step in range(3):
            sink.scalars(step, {})
    close_sinks(sinks[1:], 0)
    monkeypatch.setattr(sinks_room, "CLOSING_S", 0.05)
    close_sinks(sinks[:1], 0)
    assert said == ["hanging did not finish in time at the end of this run; log.jsonl is complete"]
    assert other.seen == [0, 1, 2] and other.calls == 1 and hanging.seen == []
    hanging.freed.set()
    assert sinks[0]._is_done.wait(60) and hanging.seen == [0, 1, 2], "what was late is written, if there is time"


class Stuck(Broken):
    """Neither opens nor ends."""

    freed = threading.Event()

    def __init__(self, folder: Path, config: Mapping[str, object], *, from_step: int) -> None:
        """As a sink is made."""

    def open(self) -> None:
        self.freed.wait()


@pytest.mark.process
def test_a_run_ends_though_its_sink_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sinks_room, "CLOSING_S", 0.05)
    monkeypatch.setitem(SINKS, "stuck", SinkRow("stuck", f"{__name__}:Stuck", "Hangs."))
    data, settings = (torch.randn(32, 4), torch.arange(32) % 2), {"log.sinks": ["stuck"], "log.every": "1steps"}
    result = tw.fit(nn.Linear(4, 2), data, nn.CrossEntropyLoss(), steps=5, settings=settings)
    assert (result.ending, result.step) == ("finished", 5)
    assert "stuck did not finish in time at the end of this run" in " ".join(capsys.readouterr().out.split())
    Stuck.freed.set()


def test_what_comes_too_fast_is_left_out_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks_room, "MAX_QUEUED_CALLS", 3)
    hanging, said = Hanging(), Warnings()
    sink = QueuedSink("slow", hanging, said)
    for step in range(20):
        sink.scalars(step, {})
    hanging.freed.set()
    close_sinks([sink], 0)
    assert 3 <= len(hanging.seen) <= 4 and hanging.seen == [*range(len(hanging.seen))]
    assert said == [f"slow lacks {20 - len(hanging.seen)} records that arrived too fast; log.jsonl has them"]


def test_no_names_no_sinks_and_a_name_twice_is_one(tmp_path: Path) -> None:
    assert open_sinks(sink_factories([]), tmp_path, {}, never) == []
    sinks = open_sinks(sink_factories(["tensorboard", "tensorboard"]), tmp_path, {}, never)
    assert len(sinks) == 1
    close_sinks(sinks, 0)


@pytest.mark.process
@pytest.mark.parametrize("name", ["tensorboard", "mlflow", "openmetrics"])
def test_a_package_that_is_not_installed(name: str) -> None:
    module = {"openmetrics": "prometheus_client"}.get(name, name)
    code = (
        f"import sys; sys.modules[{module!r}] = None\n"  # Python's own way to make an import fail
        "from trainwright.monitoring.sinks import sink_factories\n"
        "from trainwright.errors import MissingExtra\n"
        f"try: sink_factories([{name!r}])\n"
        "except MissingExtra as error: print(error)"
    )
    said = forked.run(code)
    assert f"needs the package '{module}'" in said.stdout
    assert re.search(rf'pip install "{module}>=', said.stdout)
    assert issubclass(MissingExtra, UsageError)


def test_a_sink_that_cannot_open_is_said(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").touch()  # a file where its folder should be
    said = Warnings()
    (sink,) = open_sinks(sink_factories(["tensorboard"]), tmp_path, {}, said)
    sink.scalars(1, {"loss": 1.0})
    close_sinks([sink], 0)
    assert len(said) == 1
    assert said[0].startswith("tensorboard receives no more of this run")


def rows(folder: Path) -> list[list[str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.reader(file))


def test_a_table_goes_on_where_the_run_does(tmp_path: Path) -> None:
    first = CsvFile(tmp_path, {})
    first.open()
    for step in (1, 2, 3):
        first.scalars(step, {"loss": 1.0 / step, 'a "name", with all': math.inf})
    first._file.write("3,lo")  # a kill
    first.close(1)
    second = CsvFile(tmp_path, {}, from_step=2)
    second.open()
    second.scalars(3, {"loss": math.nan})
    second.close(0)
    assert rows(tmp_path)[:3] == [["step", "name", "value"], ["1", "loss", "1.0"], ["1", 'a "name", with all', "inf"]]
    assert rows(tmp_path)[3:] == [["2", "loss", "0.5"], ["2", 'a "name", with all', "inf"], ["3", "loss", "nan"]]
    third = CsvFile(tmp_path, {})
    third.open()
    third.close(0)
    assert rows(tmp_path) == [["step", "name", "value"]]


def test_a_table_is_read_line_by_line_through_no_link(tmp_path: Path) -> None:
    """It may be damaged: a file with holes takes no space on the disk, and a line of it would take all memory."""
    path = tmp_path / "metrics.csv"
    with path.open("wb") as file:
        file.truncate(2**36)
    tracemalloc.start()
    with pytest.raises(csv.Error):
        CsvFile(tmp_path, {}, from_step=2).open()
    assert tracemalloc.get_traced_memory()[1] < 2**28
    tracemalloc.stop()
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").write_text("step,name,value\n1,loss,1.0\n")
    with pytest.raises(StorageError, match="it is a symbolic link"):
        CsvFile(tmp_path, {}, from_step=2).open()


@pytest.mark.process
def test_every_metric_of_a_run_is_in_its_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = (torch.randn(32, 4), torch.arange(32) % 2)
    settings = {"log.sinks": ["csv"], "log.every": "1steps"}
    result = tw.fit(nn.Linear(4, 2), data, nn.CrossEntropyLoss(), val=data, steps=5, quiet=True, settings=settings)
    table = {(int(step), name): float(value) for step, name, value in rows(result.run)[1:]}
    assert [step for step, name in table if name == "train/loss"] == [1, 2, 3, 4, 5]
    assert table[5, "val/loss"] == result.val_loss and table[5, "train/loss"] == result.loss


def endpoint(port: int, accept: str) -> tuple[str, str]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.headers["Content-Type"], answer.read().decode()


@pytest.mark.slow
def test_an_endpoint_is_read_by_the_parsers_of_prometheus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("prometheus_client")
    from prometheus_client.openmetrics.parser import text_string_to_metric_families as of_open_metrics
    from prometheus_client.parser import text_string_to_metric_families as of_text

    from trainwright.monitoring.sinks.openmetrics import OpenMetrics

    monkeypatch.setenv("TRAINWRIGHT_METRICS", "127.0.0.1:0")
    folder = tmp_path / 'my "run"'
    sink = OpenMetrics(folder, {})
    sink.open()
    sink.scalars(1, {"train/loss": 3.0})
    sink.scalars(2, {"train/loss": 2.5, "val/acc-1": math.nan})
    for parser, accept, kind in ((of_text, "text/plain", "text/plain"), (of_open_metrics, OPEN, "openmetrics-text")):
        content, text = endpoint(sink.port, accept)
        assert kind in content
        found = {sample.name: sample for family in parser(text) for sample in family.samples}
        assert found["trainwright_train_loss"].value == 2.5 and found["trainwright_step"].value == 2.0
        assert found["trainwright_train_loss"].labels == {"run": 'my "run"'}
        assert math.isnan(found["trainwright_val_acc_1"].value)
    monkeypatch.setenv("TRAINWRIGHT_METRICS", f"127.0.0.1:{sink.port}")
    with pytest.raises(UsageError, match="TRAINWRIGHT_METRICS"):
        OpenMetrics(folder, {}).open()
    sink.close(0)
    again = OpenMetrics(folder, {})
    again.open()  # the port is free again
    again.close(0)
    monkeypatch.setenv("TRAINWRIGHT_METRICS", "everywhere")
    with pytest.raises(UsageError, match="is not an address"):
        OpenMetrics(folder, {}).open()


OPEN = "application/openmetrics-text; version=1.0.0"
LOCAL_ONLY = """
import sys

def refuse(event, args):
    host = args[0] if event == "socket.getaddrinfo" else None
    if event == "socket.connect" and isinstance(args[1], tuple):
        host = args[1][0]
    if host not in (None, "localhost", "127.0.0.1", "::1", "0.0.0.0", ""):
        print("ASKED", event, host, file=sys.stderr)
        raise OSError("no network here")

sys.addaudithook(refuse)
"""
"""Nothing but the loopback can be reached, and whoever tries is named."""
WRITE = """
import torch
import trainwright as tw
from pathlib import Path
from trainwright.monitoring.sinks import close_sinks, open_sinks, sink_factories

def warn(text):
    print("WARNED", text)

folder = Path(sys.argv[2])
for from_step, loss in ((0, 2.5), (2, 1.5)):
    config = {"lr": 0.1, "model": {"size": "tiny"}}
    (sink,) = open_sinks(sink_factories([sys.argv[1]]), folder, config, warn, from_step=from_step)
    sink.scalars(from_step + 1, {"train/loss": loss, "grad_norm": float("inf")})
    sink.text(from_step + 1, "sample", "<i>once</i>")
    sink.media(from_step + 1, "validation/drawn", tw.Image(torch.rand(1, 2, 3)))
    sink.media(from_step + 1, "weights (all)", tw.Histogram(torch.rand(10), bins=4))
    sink.scalars(from_step + 2, {"train/loss": loss - 0.5})
    close_sinks([sink], 1 if not from_step else 0)
"""


def write_to(name: str, folder: Path, **variables: str) -> None:
    """Two processes of one run, as a resume makes them, in one of their own, in which only the loopback is reached."""
    folder.mkdir()
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("MLFLOW_", "TRACKIO_"))}
    for_mlflow_to_be_like_at_home = {"CI": "", "PYTEST_CURRENT_TEST": ""}
    env = {key: value for key, value in (clean | for_mlflow_to_be_like_at_home | variables).items() if value}
    said = subprocess.run(
        [sys.executable, "-c", LOCAL_ONLY + WRITE, name, str(folder)],
        env=env,
        capture_output=True,
        text=True,
        cwd=Path.cwd(),
        timeout=280,
        check=False,
    )
    assert said.returncode == 0, said.stderr
    assert "ASKED" not in said.stderr, said.stderr
    assert said.stdout == "", "the terminal is ours"


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of what MLflow is made of
def test_mlflow_has_the_run_in_a_database_beside_the_runs(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    write_to("mlflow", tmp_path / "mine")
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    check_mlflow(client)


def check_mlflow(client: Any) -> None:
    experiment = client.get_experiment_by_name("trainwright")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("mine", "FINISHED")
    assert run.data.params == {"lr": "0.1", "model.size": "tiny"}
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert [(each.step, each.value) for each in history] == [(1, 2.5), (2, 2.0), (3, 1.5), (4, 1.0)]
    texts = [each.path for each in client.list_artifacts(run.info.run_id, "sample")]
    assert texts == ["sample/step-00000001.txt", "sample/step-00000003.txt"]
    images = [each.path for each in client.list_artifacts(run.info.run_id, "images")]
    assert len(images) == 2 * 2 and all("drawn" in each for each in images), "an image and its thumbnail, of two steps"
    histograms = [each.path for each in client.list_artifacts(run.info.run_id, "weights _all_")]
    assert histograms == ["weights _all_/step-00000001.json", "weights _all_/step-00000003.json"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of what MLflow is made of
def test_mlflow_resumes_a_run_that_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    exceptions = pytest.importorskip("mlflow.exceptions")
    from trainwright.monitoring.sinks.mlflow import RUN_ID, MLflow

    folder = tmp_path / "mine"
    folder.mkdir()

    def opened(from_step: int) -> str:
        MLflow(folder, {}, from_step=from_step).open()
        return str(json.loads((folder / RUN_ID).read_text())["run_id"])

    first = opened(0)
    assert opened(2) == first
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    client.delete_run(first)
    second = opened(2)
    (folder / RUN_ID).write_text('{"run_id": "0123456789abcdef0123456789abcdef"}')
    assert len({first, second, opened(2)}) == 3

    def refuse(*args: object, **settings: object) -> None:
        raise exceptions.MlflowException("no permission", error_code=7)  # PERMISSION_DENIED

    monkeypatch.setattr(mlflow.MlflowClient, "update_run", refuse)
    with pytest.raises(exceptions.MlflowException, match="no permission"):
        opened(2)


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of what MLflow is made of
def test_mlflow_has_the_run_on_its_server(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["server", "--port", str(port), "--backend-store-uri", f"sqlite:///{tmp_path / 'server.db'}"]
    words += ["--artifacts-destination", str(tmp_path / "artifacts"), "--workers", "1"]
    server = subprocess.Popen(
        [sys.executable, "-m", "mlflow", *words],
        cwd=tmp_path,
        env=os.environ | {"MLFLOW_DISABLE_TELEMETRY": "true"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        for _ in range(600):
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                break
            time.sleep(0.2)
        write_to("mlflow", tmp_path / "mine", MLFLOW_TRACKING_URI=f"http://127.0.0.1:{port}")
        check_mlflow(mlflow.MlflowClient(tracking_uri=f"http://127.0.0.1:{port}"))
        assert not (tmp_path / "mlflow.db").exists()
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(60)


READ_TRACKIO = """
import json
from trackio.sqlite_storage import SQLiteStorage
(run,) = SQLiteStorage.get_runs("trainwright")
logs = SQLiteStorage.get_logs("trainwright", run)
config = SQLiteStorage.get_run_config("trainwright", run)
losses = [[each["step"], each["train/loss"]] for each in logs if "train/loss" in each]
kinds = [each[name]["_type"] for each in logs for name in ("validation/drawn", "weights (all)") if name in each]
print(json.dumps([run, config["lr"], losses, kinds]))
"""


@pytest.mark.process
@pytest.mark.slow
def test_trackio_has_the_run_beside_the_runs(tmp_path: Path) -> None:
    pytest.importorskip("trackio")
    write_to("trackio", tmp_path / "mine")
    env = os.environ | {"TRACKIO_DIR": str(tmp_path / "trackio")}
    read = subprocess.run([sys.executable, "-c", READ_TRACKIO], env=env, capture_output=True, text=True, check=True)
    run, lr, losses, kinds = json.loads(read.stdout.splitlines()[-1])
    assert (run, lr, losses) == ("mine", 0.1, [[1, 2.5], [2, 2.0], [3, 1.5], [4, 1.0]])
    assert kinds == ["trackio.image", "trackio.histogram"] * 2


# In a process of its own: wandb leaves a service and exit hooks behind.
WANDB_RUN = """
import sys
import torch
import trainwright as tw
from pathlib import Path
from trainwright.monitoring import sinks
sinks.CLOSING_S = 200.0  # on a busy machine its service takes long to start
config = {"lr": 0.1, "model": {"size": "tiny"}}
(sink,) = sinks.open_sinks(sinks.sink_factories(["wandb"]), Path(sys.argv[1]), config, sys.exit)
sink.scalars(1, {"loss": 2.5, "grad_norm": float("inf")})
sink.text(1, "sample", "<i>once</i>")
sink.media(1, "drawn", tw.Image(torch.rand(1, 2, 3)))
sink.media(1, "weights", tw.Histogram(torch.rand(10), bins=4))
sink.scalars(2, {"loss": 1.5})
sinks.close_sinks([sink], 0)
"""


@pytest.mark.slow
def test_wandb_writes_an_offline_run_into_the_run_folder(tmp_path: Path) -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    folder = tmp_path / "run"
    folder.mkdir()
    said = subprocess.run(
        [sys.executable, "-c", WANDB_RUN, str(folder)],
        env=clean,
        capture_output=True,
        text=True,
        cwd=Path.cwd(),
        check=False,
    )
    assert said.returncode == 0, said.stderr
    assert said.stdout == ""  # the terminal is ours
    (offline,) = (folder / "wandb").glob("offline-run-*")
    (run,) = offline.glob("run-*.wandb")
    assert history_of(run) == [{"loss": 2.5, "_step": 1}, {"loss": 1.5, "_step": 2}]
    (html,) = offline.glob("files/media/html/*.html")
    assert "&lt;i&gt;once&lt;/i&gt;" in html.read_text()
    (drawn,) = offline.glob("files/media/images/drawn_*.png")
    assert drawn.read_bytes()[:4] == b"\x89PNG"
    assert b"histogram" in run.read_bytes()


def history_of(run: Path) -> list[dict[str, Any]]:
    """Loss and step of every row of a .wandb file."""
    from wandb.proto import wandb_internal_pb2

    rows = []
    for data in leveldb_records(run.read_bytes()[7:], first_block_bytes=32768 - 7):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.HasField("history"):
            items = {item.key or item.nested_key[0]: item.value_json for item in record.history.item}
            rows.append({key: json.loads(items[key]) for key in ("loss", "_step") if key in items})
    return rows


def leveldb_records(log: bytes, *, first_block_bytes: int) -> Iterator[bytes]:
    """The format below a .wandb file's 7 bytes of header: blocks of (checksum, length, type, payload), type 1 whole,
    2 to 4 first, middle and last part (github.com/google/leveldb: doc/log_format.md)."""
    position, block_end, whole = 0, first_block_bytes, b""
    while position + 7 <= len(log):
        if block_end - position < 7:  # too little for another header: padding
            position, block_end = block_end, block_end + 32768
            continue
        length, kind = struct.unpack_from("<HB", log, position + 4)
        whole += log[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):
            yield whole
            whole = b""
