"""Copies of checkpoints in another storage: complete or not used, whatever fails; fetched on another machine."""

from __future__ import annotations

import json
import os
import random
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from threading import enumerate as threads
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem

from tests.checkpoint.written import checkpoint
from trainwright.checkpoint import remote
from trainwright.checkpoint.manifest import _sum, name_of, verify, write_manifest
from trainwright.checkpoint.remote import CheckpointCopies, fetch_run, require_writable
from trainwright.checkpoint.store import Best, Retention, newest_valid, prune, write_best
from trainwright.errors import CheckpointError, StorageError, UsageError
from trainwright.runs.folder import RunFolder, write_identity

RUN = "0123456789abcdef"


class Faulty(LocalFileSystem):  # type: ignore[misc]
    """A local file system of which each call may fail before, in the middle of, or after its work."""

    protocol = "faulty"
    chance = 0.0
    chosen = random.Random(0)
    faults = 0
    answers = Event()
    answers.set()

    def _strike(self) -> str:
        if self.chosen.random() >= self.chance:
            return ""
        type(self).faults += 1
        return self.chosen.choice(["before", "torn", "after"])

    def put_file(self, lpath: str, rpath: str, **kwargs: Any) -> None:
        self.answers.wait()
        fault = self._strike()
        if fault == "before":
            raise ConnectionError("refused")
        super().put_file(lpath, rpath, **kwargs)
        if fault == "torn":
            os.truncate(self._strip_protocol(rpath), Path(lpath).stat().st_size // 2)
        if fault:
            raise ConnectionError("reset by peer")

    def pipe_file(self, path: str, value: bytes, **kwargs: Any) -> None:
        if self._strike():
            raise ConnectionError("refused")
        super().pipe_file(path, value, **kwargs)

    def rm_file(self, path: str) -> None:
        if self._strike():
            raise ConnectionError("refused")
        super().rm_file(path)


fsspec.register_implementation("faulty", Faulty, clobber=True)


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(remote, "RETRY_AFTER_S", (0.0, 0.0))
    yield
    Faulty.chance = 0.0
    Faulty.answers.set()


def folder_of_run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "runs" / "gpt")
    folder.path.mkdir(parents=True)
    write_identity(folder, RUN)
    folder.recipe.write_text("model: {use: mlp}\n")
    folder.log.write_text("{}\n")
    return folder


def saved(folder: RunFolder, step: int, best: Best | None = None) -> Path:
    path = checkpoint(folder.checkpoints, step)
    (path / "manifest.json").unlink()
    write_manifest(path, step, None if best is None else vars(best), RUN)
    return path


def copied(folder: RunFolder, url: str, steps: list[int], keep: int = 2) -> tuple[list[str], str]:
    """Save, copy and prune as a run does, each copy before the next save. Returns messages and the URL of the run."""
    copies = CheckpointCopies(folder, url, run=RUN, retention=Retention(keep))
    messages = []
    for step in steps:
        path = saved(folder, step)
        copies.take(path)
        assert copies._work is not None
        copies._work.result()
        prune(folder.checkpoints, path, Retention(keep), RUN)
        messages += copies.messages()
    return messages + copies.close(), copies.place.url


def test_a_copy_is_fetched_on_another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of_run(tmp_path)
    with folder.log.open("a") as log:  # larger than what is read at once
        log.write(f"{json.dumps({'text': 'x' * 2**20})}\n" * 3)
    monkeypatch.setattr(remote, "MAX_SMALL_FILE_BYTES", 2**20)
    messages, url = copied(folder, f"file://{tmp_path}/bucket", [5, 10, 15])
    assert url == f"file://{tmp_path}/bucket/gpt-01234567"
    assert [message.split(" to ")[0] for message in messages] == [f"copied step {step}" for step in (5, 10, 15)]
    assert sorted(path.name for path in (tmp_path / "bucket/gpt-01234567/checkpoints").iterdir()) == [
        name_of(10),
        name_of(15),
    ]
    said: list[str] = []
    fetched = RunFolder(fetch_run(url, tmp_path / "other", said.append))
    assert said == [f"fetched {url}/checkpoints/step-00000015"]
    assert newest_valid(fetched.checkpoints, run=RUN) == (fetched.checkpoints / name_of(15), [])
    assert fetched.recipe.read_text() == folder.recipe.read_text()
    assert fetched.log.read_text() == folder.log.read_text()
    assert fetch_run(url, tmp_path / "other", said.append) == fetched.path, "a second call fetches nothing"
    assert len(said) == 1


def test_the_best_checkpoint_is_kept_and_fetched(tmp_path: Path) -> None:
    folder = folder_of_run(tmp_path)
    path = saved(folder, 5)
    write_best(folder.checkpoints, Best(5, "loss", 0.1), RUN)
    copies = CheckpointCopies(folder, str(tmp_path / "disk"), run=RUN, retention=Retention(1))
    copies.take(path)
    copies.close()
    _, url = copied(folder, str(tmp_path / "disk"), [10, 15], keep=1)
    fetched = RunFolder(fetch_run(url, tmp_path / "other", print))
    assert sorted(path.name for path in fetched.checkpoints.glob("step-*")) == [name_of(5), name_of(15)]


def test_storage_that_hangs_does_not_keep_a_run_from_ending(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "COPY_LIMIT_S", 0.2)
    folder = folder_of_run(tmp_path)
    copies = CheckpointCopies(folder, f"faulty://{tmp_path}/bucket", run=RUN, retention=Retention())
    Faulty.answers.clear()
    copies.take(saved(folder, 5))
    (message,) = copies.close()
    assert message.startswith(f"step 5 is saved, but not copied to {copies.place.url} within ")
    assert "checkpoint.copy_to=null" in message
    uploads = [thread for thread in threads() if thread.name == "upload"]
    assert len(uploads) == 1 and uploads[0].daemon, "Python waits for other threads at its end"
    Faulty.answers.set()
    uploads[0].join()
    monkeypatch.undo()
    assert copied(folder, f"faulty://{tmp_path}/bucket", [10])[0][0].startswith("copied step 10")


def test_a_checkpoint_may_be_deleted_while_it_is_copied(tmp_path: Path) -> None:
    folder = folder_of_run(tmp_path)
    copies = CheckpointCopies(folder, str(tmp_path / "disk"), run=RUN, retention=Retention())
    path = saved(folder, 5)
    copies.take(path)
    shutil.rmtree(path)
    (message,) = copies.close()
    assert message.startswith("copied step 5")
    assert not list(folder.checkpoints.iterdir()), "no links are left"


def test_only_the_newest_waits_while_a_copy_is_in_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of_run(tmp_path)
    copies = CheckpointCopies(folder, str(tmp_path / "disk"), run=RUN, retention=Retention(5))
    copy, begun, go_on = copies._copy, threading.Lock(), threading.Lock()
    begun.acquire(), go_on.acquire()

    def slow(linked: Path, step: int) -> None:
        if step == 5:
            begun.release()
            go_on.acquire()
        copy(linked, step)

    monkeypatch.setattr(copies, "_copy", slow)
    copies.take(saved(folder, 5))
    begun.acquire()
    for step in (10, 15):
        copies.take(saved(folder, step))
    go_on.release()
    assert [message.split(" to ")[0] for message in copies.close()] == ["copied step 5", "copied step 15"]


def test_whatever_fails_the_newest_complete_copy_loads(tmp_path: Path) -> None:
    folder = folder_of_run(tmp_path)
    Faulty.chosen, Faulty.faults = random.Random(1), 0
    complete, failed = 0, 0
    for step in range(1, 41):
        Faulty.chance = 0.3
        messages, url = copied(folder, f"faulty://{tmp_path}/bucket", [step])
        Faulty.chance = 0.0
        if any(message.startswith(f"copied step {step} ") for message in messages):
            complete = step
        else:
            failed += 1
            assert f"step {step} is saved, but not copied" in messages[-1]
        other = tmp_path / "other"
        if complete:
            found, _ = newest_valid(RunFolder(fetch_run(url, other, print)).checkpoints, run=RUN)
            assert found is not None
            assert int(found.name[5:]) >= complete
            shutil.rmtree(other)
    assert Faulty.faults > 80
    assert failed > 1


def test_a_damaged_copy_is_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = folder_of_run(tmp_path)
    _, url = copied(folder, str(tmp_path / "disk"), [5, 10])
    copy = Path(url) / "checkpoints"
    (copy / name_of(10) / "model.safetensors").write_bytes(b"rotten")
    fetched = RunFolder(fetch_run(f"file://{url}", tmp_path / "other", print))
    assert newest_valid(fetched.checkpoints, run=RUN)[0] == fetched.checkpoints / name_of(5)
    assert "copy skipped:" in capsys.readouterr().out
    (copy / name_of(5) / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        fetch_run(f"file://{url}", tmp_path / "third", print)


def test_names_in_a_foreign_manifest_stay_in_the_folder(tmp_path: Path) -> None:
    folder = folder_of_run(tmp_path)
    _, url = copied(folder, str(tmp_path / "disk"), [5])
    manifest = Path(url) / "checkpoints" / name_of(5) / "manifest.json"
    body = json.loads(manifest.read_text())
    body["files"]["../../../evil"] = {"bytes": 1, "sha256": ""}
    body.pop("sha256")
    manifest.write_text(json.dumps({**body, "sha256": _sum(body)}))
    with pytest.raises(CheckpointError, match="no name of a file"):
        fetch_run(url, tmp_path / "other", print)


def test_mistakes_name_their_remedy(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"s3fs|Protocol not known"):
        require_writable("nosuch://bucket")
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot write to"):
        require_writable(str(tmp_path / "file"))
    require_writable(str(tmp_path / "new" / "folder"))
    with pytest.raises(UsageError, match="names no folder of a run"):
        fetch_run("memory://bucket/..", tmp_path, print)
    with pytest.raises(UsageError, match="holds no copy of a run"):
        fetch_run(f"file://{tmp_path}", tmp_path, print)
    folder = folder_of_run(tmp_path)
    _, url = copied(folder, str(tmp_path / "disk"), [5])
    other = RunFolder(tmp_path / "other" / "gpt-01234567")
    other.path.mkdir(parents=True)
    write_identity(other, "f" * 16)
    with pytest.raises(UsageError, match="is another run"):
        fetch_run(url, tmp_path / "other", print)


def test_a_run_is_resumed_from_its_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import trainwright as tw

    monkeypatch.chdir(tmp_path)
    data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 1))

    def train(until: str, folder: str, **more: Any) -> Any:
        torch.manual_seed(0)
        settings = {"checkpoint": {"copy_to": f"file://{tmp_path}/bucket"}}
        model = torch.nn.Linear(4, 1)
        run = tw.fit(model, data, loss="mse", until=until, batch=8, settings=settings, name=folder, quiet=True, **more)
        return run, model

    run, _ = train("10steps", "here")
    (url,) = [str(path) for path in (tmp_path / "bucket").iterdir()]
    shutil.rmtree(run.run)
    resumed, model = train("20steps", "here", resume=f"file://{url}")
    assert resumed.run == Path("runs") / Path(url).name
    _, whole = train("20steps", "there")
    assert torch.equal(model.weight, whole.weight)
    verify(Path(url) / "checkpoints" / name_of(20))
