"""Sinks write real files that their own readers read; one that fails is said once and then left alone."""

from __future__ import annotations

import json
import math
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests import forked
from trainwright.build.resolve import sink_factories
from trainwright.errors import MissingExtra, UsageError
from trainwright.observe.sinks import Guarded, Sink, open_sinks
from trainwright.observe.sinks.tensorboard import TensorBoard


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


def test_tensorboard_reads_back_what_was_written(tmp_path: Path) -> None:
    (sink,) = open_sinks(sink_factories(["tensorboard"]), tmp_path, {"lr": 0.1, "name": "x"}, never)
    sink.scalars(1, {"loss": 2.0, "val/accuracy": 0.25})
    sink.scalars(2, {"loss": math.inf})
    sink.text(2, "sample", "# not a title\n<b>")
    sink.close(0)
    assert scalars_of(tmp_path, "loss") == [(1, 2.0), (2, math.inf)]
    assert scalars_of(tmp_path, "val/accuracy") == [(1, 0.25)]
    (text,) = read_events(tmp_path).Tensors("sample/text_summary")
    assert text.tensor_proto.string_val[0].decode() == "    # not a title\n    <b>"
    (recipe,) = read_events(tmp_path).Tensors("recipe/text_summary")
    assert '"lr": 0.1' in recipe.tensor_proto.string_val[0].decode()


def test_tensorboard_hides_the_steps_that_a_resume_repeats(tmp_path: Path) -> None:
    first = TensorBoard(tmp_path, {})
    for step in (1, 2, 3):
        first.scalars(step, {"loss": 1.0})
    first.close(1)
    second = TensorBoard(tmp_path, {}, from_step=1)
    second.scalars(2, {"loss": 9.0})
    second.close(0)
    assert scalars_of(tmp_path, "loss") == [(1, 1.0), (2, 9.0)]


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("may not mount a file system here")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


# TensorBoard's writer thread raises besides handing the error on: that it does so is not ours to change.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_tensorboard_on_a_full_disk_warns_once_and_training_goes_on(tiny_disk: Path) -> None:
    said = Warnings()
    (sink,) = open_sinks(sink_factories(["tensorboard"]), tiny_disk, {}, said)
    for step in range(200):
        sink.text(step, "sample", "x" * 2000)
    sink.close(0)
    for thread in threading.enumerate():
        if type(thread).__name__ == "_AsyncWriterThread":
            thread.join()  # so that what it raises belongs to this test
    assert len(said) == 1
    assert "tensorboard gets nothing more of this run" in said[0]
    assert "No space left" in said[0]


class Broken:
    """A sink whose server is gone."""

    calls = 0

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self.calls += 1
        raise ConnectionError("server\n gone")

    def text(self, step: int, name: str, text: str) -> None:
        self.calls += 1

    def close(self, exit_code: int) -> None:
        self.calls += 1


def test_a_sink_that_fails_is_said_once_and_left_alone() -> None:
    broken, said = Broken(), Warnings()
    sink: Sink = Guarded("wandb", broken, said)
    sink.scalars(1, {})
    sink.scalars(2, {})
    sink.text(2, "a", "b")
    sink.close(0)
    assert broken.calls == 1
    assert said == ["wandb gets nothing more of this run, log.jsonl has it all: ConnectionError: server gone"]


def test_a_stop_by_the_user_is_not_swallowed() -> None:
    class Interrupted(Broken):
        def text(self, step: int, name: str, text: str) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Guarded("x", Interrupted(), never).text(1, "a", "b")


def test_no_names_no_sinks_and_a_name_twice_is_one(tmp_path: Path) -> None:
    assert open_sinks(sink_factories([]), tmp_path, {}, never) == []
    sinks = open_sinks(sink_factories(["tensorboard", "tensorboard"]), tmp_path, {}, never)
    assert len(sinks) == 1
    sinks[0].close(0)


@pytest.mark.process
@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_package_that_is_not_installed(name: str) -> None:
    code = (
        f"import sys; sys.modules[{name!r}] = None\n"  # Python's own way to make an import fail
        "from trainwright.build.resolve import sink_factories; from trainwright.errors import MissingExtra\n"
        f"try: sink_factories([{name!r}])\n"
        "except MissingExtra as error: print(error)"
    )
    said = forked.run(code)
    assert f"needs the package '{name}'" in said.stdout
    assert f'pip install "trainwright[{name}]"' in said.stdout
    assert issubclass(MissingExtra, UsageError)


def test_a_sink_that_cannot_open_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").touch()  # a file where its folder should be
    said = Warnings()
    assert open_sinks(sink_factories(["tensorboard"]), tmp_path, {}, said) == []
    assert len(said) == 1
    assert said[0].startswith("tensorboard gets nothing more of this run")


# In a process of its own: wandb leaves a service and exit hooks behind.
WANDB_RUN = """
import sys
from pathlib import Path
from trainwright.build.resolve import sink_factories
from trainwright.observe.sinks import open_sinks
(sink,) = open_sinks(sink_factories(["wandb"]), Path(sys.argv[1]), {"lr": 0.1, "model": {"size": "tiny"}}, sys.exit)
sink.scalars(1, {"loss": 2.5, "grad_norm": float("inf")})
sink.text(1, "sample", "<i>once</i>")
sink.scalars(2, {"loss": 1.5})
sink.close(0)
"""


@pytest.mark.slow
def test_wandb_writes_an_offline_run_into_the_run_folder(tmp_path: Path) -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    folder = tmp_path / "run"
    folder.mkdir()
    said = subprocess.run(
        [sys.executable, "-c", WANDB_RUN, str(folder)], env=clean, capture_output=True, text=True, cwd=Path.cwd()
    )
    assert said.returncode == 0, said.stderr
    assert said.stdout == ""  # the terminal is ours
    (offline,) = (folder / "wandb").glob("offline-run-*")
    (run,) = offline.glob("run-*.wandb")
    assert history_of(run) == [{"loss": 2.5, "_step": 1}, {"loss": 1.5, "_step": 2}]
    (html,) = offline.glob("files/media/html/*.html")
    assert "&lt;i&gt;once&lt;/i&gt;" in html.read_text()


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
