"""Images, texts and histograms on their way from the user's code to the run folder, the log and the sinks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import trainwright as tw
from tests.disks import small_disk
from trainwright.monitoring import media
from trainwright.monitoring.media import MediaWriter
from trainwright.runs.media import Loggable
from trainwright.runs.reader import read
from trainwright.runs.records import Media, Record

BLACK = tw.Image(np.zeros((4, 4)))
MODEL = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
DATA = (torch.rand(32, 1, 2, 2), torch.arange(32) % 2)


class Sent(list[tuple[int, str, object]]):
    """A sink that keeps what it receives."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None: ...

    def text(self, step: int, name: str, text: str) -> None:
        self.append((step, name, text))

    def media(self, step: int, name: str, value: object) -> None:
        self.append((step, name, value))

    def close(self, exit_code: int) -> None: ...


class Written:
    def __init__(self, folder: Path) -> None:
        self.records, self.sent, self.said = list[Record](), Sent(), list[str]()
        self.writer = MediaWriter(folder, self.records.append, [self.sent], self.said.append)

    def write(self, step: int, **values: Loggable) -> None:
        self.writer.write(step, values)


def logged(folder: Path) -> list[tuple[int, str]]:
    return [(each.step, each.name) for each in read(folder / "log.jsonl").records if isinstance(each, Media)]


def fit(root: Path, **options: Any) -> Path:
    settings = {"folder": str(root), "log.every": "2steps"}
    options = {"loss": nn.CrossEntropyLoss(), **options}
    tw.fit(MODEL, DATA, batch=8, steps=4, name="run", settings=settings, quiet=True, **options)
    return root / "run"


def test_a_loss_logs_them_for_training_and_validation(tmp_path: Path) -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        outputs = model(batch[0])
        tw.log(inputs=tw.Image(batch[0]), answer=f"{len(outputs)} outputs", outputs=tw.Histogram(outputs))
        return nn.functional.cross_entropy(outputs, batch[1])

    run = fit(tmp_path, loss=loss, val=DATA)
    names = ["inputs", "answer", "outputs"]
    found = logged(run)
    assert [each for each in found if "/" not in each[1]] == [(step, name) for step in (1, 2, 4) for name in names]
    assert {name for _, name in found if "/" in name} == {f"validation/{name}" for name in names}
    assert (run / "media" / "answer" / "step-00000004.txt").read_text() == "8 outputs"
    assert json.loads((run / "media" / "outputs" / "step-00000004.json").read_text())["not_finite"] == 0


def test_an_observer_logs_into_the_next_record_and_the_end_loses_none(tmp_path: Path) -> None:
    class Observer:
        def observe(self, result: tw.StepResult, state: tw.TrainState) -> None:
            tw.log(seen=f"after step {result.step}")

        def close(self) -> None: ...

    run = fit(tmp_path, observers=[Observer()])
    assert logged(run) == [(2, "seen"), (4, "seen"), (4, "seen")]
    assert (run / "media" / "seen" / "step-00000002.txt").read_text() == "after step 1"
    assert (run / "media" / "seen" / "step-00000004.txt").read_text() == "after step 4"


def test_a_step_of_the_user_logs_them(tmp_path: Path) -> None:
    model = nn.Linear(4, 2)

    def advance(state: tw.TrainState, batch: tw.StepBatch) -> torch.Tensor:
        (micro,) = batch.micro
        inputs, targets = micro.data
        loss = nn.functional.cross_entropy(state.model(inputs), targets)
        tw.log(weights=tw.Histogram(model.weight))
        state.optimizer.zero_grad()
        loss.backward()
        state.optimizer.step()
        return loss.detach()

    settings = {"folder": str(tmp_path), "log.every": "2steps"}
    data = (DATA[0].flatten(1), DATA[1])
    tw.fit(model, data, advance=advance, batch=8, steps=4, name="run", settings=settings, quiet=True)
    assert logged(tmp_path / "run") == [(step, "weights") for step in (1, 2, 4)]


def test_a_watched_loop_logs_them(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD(MODEL.parameters(), lr=0.1)
    with tw.watch(MODEL, optimizer, out=tmp_path / "run", quiet=True, sinks=["tensorboard"]) as watch:
        for _ in range(3):
            optimizer.zero_grad()
            nn.functional.cross_entropy(MODEL(DATA[0]), DATA[1]).backward()
            optimizer.step()
            watch.log(accuracy=0.5, inputs=tw.Image(DATA[0][0]), says="text")
        watch.log(7, says="at a step of its own")
    assert logged(tmp_path / "run") == [*((s, n) for s in (1, 2, 3) for n in ("inputs", "says")), (7, "says")]
    page = (tmp_path / "run" / "report.html").read_text()
    assert "data:image/png;base64," in page and "at a step of its own" in page
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert [each.step for each in events.Images("inputs")] == [1, 2, 3]


def test_a_watch_without_a_folder_drops_them(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD(MODEL.parameters(), lr=0.1)
    with tw.watch(MODEL, optimizer, out=None, quiet=True) as watch:
        MODEL(DATA[0]).sum().backward()
        optimizer.step()
        watch.log(says="text")
    assert not list(tmp_path.iterdir())


def test_sinks_get_values_and_the_log_a_file(tmp_path: Path) -> None:
    to = Written(tmp_path)
    to.write(3, drawn=BLACK, said="hello")
    assert to.sent == [(3, "drawn", BLACK), (3, "said", "hello")]
    assert [vars(each)["file"] for each in to.records] == [
        "media/drawn/step-00000003.png",
        "media/said/step-00000003.txt",
    ]
    assert to.said == []


def test_secrets_are_masked(tmp_path: Path) -> None:
    to = Written(tmp_path)
    to.write(1, said="api_key=abcdefghijklmnop", drawn=tw.Image(np.zeros((2, 2)), caption="api_key=abcdefghijklmnop"))
    kept = [path.read_bytes() for path in (tmp_path / "media").rglob("*.*")]
    assert not any(b"abcdefgh" in each for each in kept) and "abcdefgh" not in repr(to.records + list(to.sent[:1]))


def test_after_many_values_of_a_name_fewer_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media, "MAX_FILES_PER_NAME", 4)
    to = Written(tmp_path)
    for step in range(40):
        to.write(step, said="x")
    steps = [vars(each)["step"] for each in to.records]
    assert steps[:4] == [0, 1, 2, 3] and steps[4:] == [4, 6, 8, 10, 12, 16, 20, 24, 32]
    assert to.said == ["said: after 4 values only every second is kept, later fewer"]


LIMITS: dict[str, tuple[str, int, dict[str, Loggable], str]] = {
    "pixels": ("MAX_PIXELS", 15, {"drawn": BLACK}, "16 pixels, at most 15"),
    "names": ("MAX_NAMES", 0, {"drawn": BLACK}, "at most 0 names"),
    "bytes": ("MAX_RUN_BYTES", -1, {"drawn": BLACK}, "log them more rarely"),
    "a name": ("MAX_NAME_CHARS", 4, {"drawn": BLACK}, "at most 4 characters"),
}


@pytest.mark.parametrize("row", LIMITS)
def test_what_exceeds_a_limit_is_said_once_and_left_out(
    row: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, limit, values, message = LIMITS[row]
    monkeypatch.setattr(media, name, limit)
    to = Written(tmp_path)
    for step in range(3):
        to.writer.write(step, values)
    assert len(to.said) == 1 and message in to.said[0]
    assert to.records == [] and to.sent == [] and not list(tmp_path.rglob("*.png"))


def test_files_of_an_earlier_process_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Written(tmp_path).write(1, drawn=BLACK)
    monkeypatch.setattr(media, "MAX_RUN_BYTES", 10)
    to = Written(tmp_path)
    to.write(2, drawn=BLACK)
    assert to.records == [] and "log them more rarely" in to.said[0]


def test_a_full_disk_costs_an_image_and_not_the_run(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "size=16k") as disk:
        to = Written(disk)
        for step in range(3):
            to.write(step, drawn=tw.Image(np.random.default_rng(0).random((200, 200))))
        assert len(to.said) == 1 and "not kept" in to.said[0] and to.records == []


def test_a_link_in_the_run_folder_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "else").mkdir()
    (tmp_path / "run" / "media").symlink_to(tmp_path / "else")
    to = Written(tmp_path / "run")
    to.write(1, drawn=BLACK)
    assert to.records == [] and "symbolic link" in to.said[0] and not list((tmp_path / "else").iterdir())
