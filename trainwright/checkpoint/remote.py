"""Copies the checkpoints of a run to other storage during training, and fetches them on another machine.

The storage is a URL that fsspec opens: ``s3://bucket/runs``, ``gs://...``, or a folder of another disk. Below it, each
run has a folder with its small files and its checkpoints, in the layout of the run folder. The manifest of a checkpoint
is written last, so a copy that was interrupted has none and is not used.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from threading import Lock, Thread
from typing import TYPE_CHECKING

from trainwright.checkpoint.manifest import NAME as MANIFEST
from trainwright.checkpoint.manifest import name_of, read_manifest, step_of, verify
from trainwright.checkpoint.store import BEST_FILE, Retention, checkpoints, pointed_to, read_best, retained
from trainwright.errors import CheckpointError, StorageError, TrainwrightError, UsageError, text_of
from trainwright.runs.folder import NAME as RUN_ID
from trainwright.runs.folder import RunFolder, identity_of
from trainwright.runs.storage import draft_of, remove
from trainwright.runs.system_calls import fsync

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

CHECKPOINTS = "checkpoints"
RUN_FILES = ("recipe.yaml", "run-id", "plan.json", "provenance.json", "model.json", "supervision.json")
"""The files of a run folder that a resume or a reader needs, besides its checkpoints, its log and ``hub``."""
LOG = "log.jsonl"
RETRY_AFTER_S = (1.0, 5.0)
"""Seconds before each further attempt to copy a checkpoint."""
COPY_LIMIT_S = 300.0
MIN_COPY_BYTES_PER_S = 2**18
"""Minimum speed of a copy. A copy fails after ``COPY_LIMIT_S`` plus the time for its bytes at this speed, so a run ends
even if the storage hangs. Slower storage would need more than an hour for each GB.
"""
MAX_SMALL_FILE_BYTES = 2**28  # a larger file is not read into memory


@dataclass(frozen=True)
class StoredFolder:
    """A folder in a storage. ``path`` is its path in the file system, ``url`` is shown to the user."""

    url: str
    fs: AbstractFileSystem
    path: str

    @classmethod
    def open(cls, url: str) -> StoredFolder:
        """Return the folder of a URL, which need not exist.

        Raises:
            UsageError: fsspec does not know the protocol, or the package for it is not installed.
        """
        from fsspec.core import url_to_fs  # imported here, because most runs do not need it

        try:
            # without a cache of listings: another process may write to the same folder
            fs, path = url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)
        except (ImportError, ValueError) as error:
            remedy = "give a folder, or a URL whose package is installed: pip install s3fs (s3://), gcsfs (gs://)"
            raise UsageError(f"{url} cannot be opened: {text_of(error, lines=1)}", remedy=remedy) from None
        return cls(url.rstrip("/"), fs, path.rstrip("/"))

    def __truediv__(self, name: str) -> StoredFolder:
        return StoredFolder(f"{self.url}/{name}", self.fs, f"{self.path}/{name}")

    def put(self, source: Path) -> None:
        """Copy a file to this place. Raises OSError if its size differs afterwards."""
        self.fs.put_file(str(source), self.path)
        expected, found = source.stat().st_size, self.fs.info(self.path)["size"]
        if expected != found:
            raise OSError(f"{self.url} has {found} bytes instead of {expected}")

    def names(self) -> list[str]:
        """Return the names in this folder; none if it does not exist."""
        with suppress(FileNotFoundError):
            return [str(path).rstrip("/").rsplit("/", 1)[-1] for path in self.fs.ls(self.path, detail=False)]
        return []

    def steps(self) -> list[str]:
        """Return the names of the checkpoints in this folder that have a manifest, newest first."""
        found = [name for name in self.names() if step_of(Path(name)) is not None and not Path(name).suffix]
        return sorted((name for name in found if self.fs.exists(f"{self.path}/{name}/{MANIFEST}")), reverse=True)


def require_writable(url: str) -> None:
    """Write a small file below ``url`` and delete it, so that an invalid bucket is found before the first step.

    Raises:
        UsageError: The URL cannot be opened.
        StorageError: It cannot be written.
    """
    probe = StoredFolder.open(url) / f".trainwright-{os.getpid()}"
    try:
        probe.fs.makedirs(probe.path.rsplit("/", 1)[0], exist_ok=True)
        probe.fs.pipe_file(probe.path, b"may be deleted")
        probe.fs.rm_file(probe.path)
    except Exception as error:  # of any storage library
        found = _storage_error(f"cannot write to {url}", error)
        remedy = f"{found.remedy}; --set checkpoint.copy_to=null trains without copies"
        raise StorageError(found.message, remedy=remedy) from None


def _storage_error(doing: str, error: Exception) -> StorageError:
    remedy = "check the address, the credentials and the network"
    return StorageError(f"{doing}: {' '.join(text_of(error).split())[:300] or type(error).__name__}", remedy=remedy)


class CheckpointCopies:
    """Copies each committed checkpoint of a run to a storage in a separate thread.

    Training waits only for the last copy, at its end, and not longer than a copy may take. While a copy is in progress,
    only the newest of the later checkpoints waits for the next copy. A failed copy is reported, and the next checkpoint
    is copied as usual.

    Args:
        folder: The run folder.
        url: The folder in the storage below which the run gets a folder.
        run: The identity of the run.
        retention: The checkpoints to keep in the storage.
    """

    def __init__(self, folder: RunFolder, url: str, *, run: str, retention: Retention) -> None:
        self.place = StoredFolder.open(url) / f"{folder.name.removesuffix(f'-{run[:8]}')}-{run[:8]}"
        self._folder, self._run, self._retention = folder, run, retention
        self._thread = ThreadPoolExecutor(1, "copy")
        self._lock = Lock()
        self._waiting: Path | None = None
        self._work: Future[None] | None = None
        self._messages: SimpleQueue[str] = SimpleQueue()

    def take(self, checkpoint: Path) -> None:
        """Copy a checkpoint later. Its files are linked now (else copied), so the original may be deleted meanwhile."""
        linked = draft_of(checkpoint.with_name(f"{checkpoint.name}.copy"))
        try:
            remove(linked)
            shutil.copytree(checkpoint, linked, copy_function=os.link)
        except OSError:  # a file system without hard links
            shutil.copytree(checkpoint, linked, dirs_exist_ok=True)
        earlier = self._exchange(linked)
        if earlier is not None:
            remove(earlier)
        self._work = self._thread.submit(self._copy_waiting)

    def _exchange(self, linked: Path | None) -> Path | None:
        """Replace the checkpoint that waits to be copied, and return the previous one."""
        with self._lock:
            earlier, self._waiting = self._waiting, linked
        return earlier

    def messages(self) -> list[str]:
        """Return the messages since the last call."""
        return [self._messages.get() for _ in range(self._messages.qsize())]

    @property
    def in_progress(self) -> bool:
        """True while a checkpoint is being copied or waits for it."""
        return self._work is not None and not self._work.done()

    def close(self, *, waits: bool = True) -> list[str]:
        """End the copying, after the last copy if ``waits``. Returns the messages since the last call."""
        if waits and self._work is not None:
            wait([self._work])
        self._thread.shutdown(wait=waits, cancel_futures=True)
        waiting = self._exchange(None)
        if waiting is not None:
            remove(waiting)
        return self.messages()

    def _copy_waiting(self) -> None:
        linked = self._exchange(None)
        if linked is None:  # an earlier call copied it
            return
        step = int(json.loads((linked / MANIFEST).read_text("utf-8"))["step"])
        num_bytes = sum(path.stat().st_size for path in [*linked.iterdir(), self._folder.log] if path.exists())
        limit_s = COPY_LIMIT_S + num_bytes / MIN_COPY_BYTES_PER_S
        # A daemon: nothing can end a call of a storage library that hangs, and the process must be able to end.
        copying = Thread(target=self._copy_and_prune, args=(linked, step), name="upload", daemon=True)
        copying.start()
        copying.join(limit_s)
        if copying.is_alive():
            self._messages.put(
                f"step {step} is saved, but not copied to {self.place.url} within {limit_s:.0f} s (check the network; "
                f"--set checkpoint.copy_to=null trains without copies)"
            )
        remove(linked)

    def _copy_and_prune(self, linked: Path, step: int) -> None:
        for pause_s in (*RETRY_AFTER_S, None):
            try:
                self._copy(linked, step)
                break
            except Exception as error:  # of any storage library
                if pause_s is None:
                    known = _storage_error(f"step {step} is saved, but not copied to {self.place.url}", error)
                    self._messages.put(f"{known.message} ({known.remedy})")
                    return
                time.sleep(pause_s)
        with suppress(Exception):  # of any storage library: the next copy tries again
            self._prune(self.place / CHECKPOINTS, step)

    def _copy(self, linked: Path, step: int) -> None:
        begin_s = time.perf_counter()
        copies = self.place / CHECKPOINTS
        target = copies / name_of(step)
        self.place.fs.makedirs(target.path, exist_ok=True)
        if self.place.fs.exists((target / MANIFEST).path):  # of an earlier copy; it would mark this one as complete
            self.place.fs.rm_file((target / MANIFEST).path)
        self._copy_small_files()
        for path in sorted(linked.iterdir()):
            if path.name != MANIFEST:
                (target / path.name).put(path)
        (target / MANIFEST).put(linked / MANIFEST)
        num_bytes = sum(path.stat().st_size for path in linked.iterdir())
        seconds = time.perf_counter() - begin_s
        self._messages.put(f"copied step {step} to {self.place.url} ({num_bytes / 1e6:.3g} MB in {seconds:.3g} s)")

    def _copy_small_files(self) -> None:
        local = [(self._folder.path / name, self.place / name) for name in RUN_FILES]
        if self._folder.hub.is_dir():
            self.place.fs.makedirs((self.place / "hub").path, exist_ok=True)
            local += [(path, self.place / "hub" / path.name) for path in self._folder.hub.iterdir()]
        local.append((self._folder.checkpoints / BEST_FILE, self.place / CHECKPOINTS / BEST_FILE))
        for path, copy in local:
            if path.is_file():
                copy.fs.pipe_file(copy.path, path.read_bytes())
        log = self._folder.log
        if log.is_file():  # it grows while it is copied
            draft = draft_of(log)
            try:
                shutil.copyfile(log, draft)
                (self.place / LOG).put(draft)
            finally:
                remove(draft)

    def _prune(self, copies: StoredFolder, step: int) -> None:
        """Delete the copies up to ``step`` that the retention does not keep. The manifest goes first."""
        names = [name for name in copies.steps() if (step_of(Path(name)) or 0) <= step]
        best = read_best(self._folder.checkpoints, self._run)
        for name in set(names) - retained(names, self._retention, best):
            doomed = copies / name
            copies.fs.rm_file((doomed / MANIFEST).path)
            copies.fs.rm(doomed.path, recursive=True)


def fetch_run(url: str, root: Path, say: Callable[[str], object]) -> Path:
    """Fetch the newest complete checkpoint of a run, its best one and its small files. Returns the run folder.

    Files that exist in the local folder are neither fetched again nor overwritten.

    Args:
        url: The folder of a run in a storage, as printed by the run.
        root: The folder in which the run folder is made.
        say: Receives a line for each checkpoint that is fetched or damaged.

    Raises:
        UsageError: There is no run at the URL, or another run has the local folder.
        StorageError: The storage cannot be read.
        CheckpointError: None of the copies is intact.
    """
    place = StoredFolder.open(url)
    name = place.url.rsplit("/", 1)[-1]
    if not _is_plain(name):
        raise UsageError(f"{url} names no folder of a run", remedy="give the address that the run printed")
    local = RunFolder(root / name)
    try:
        there = place.names()
        if RUN_ID not in there:
            raise UsageError(f"{url} holds no copy of a run", remedy=f"give the folder of a run{_runs_at(place)}")
        identity = _small_file(place / RUN_ID).decode("utf-8", "replace").strip()
        if local.path.exists() and identity_of(local) not in ("", identity):
            raise UsageError(f"{local.path} is another run than {url}", remedy="rename it, or call from elsewhere")
        _fetch_small_files(place, local, there)
        _fetch_checkpoints(place / CHECKPOINTS, local.checkpoints, identity, say)
    except TrainwrightError:
        raise
    except Exception as error:  # of any storage library
        raise _storage_error(f"cannot read {url}", error) from None
    return local.path


def _runs_at(place: StoredFolder) -> str:
    runs = [name for name in place.names() if (place / name / RUN_ID).fs.exists((place / name / RUN_ID).path)]
    return "".join(f": {place.url}/{name}" for name in runs[:1])


def _small_file(place: StoredFolder) -> bytes:
    if place.fs.info(place.path)["size"] > MAX_SMALL_FILE_BYTES:
        raise StorageError(f"{place.url} has more than {MAX_SMALL_FILE_BYTES >> 20} MiB", remedy="check the address")
    found: bytes = place.fs.cat_file(place.path)
    return found


def _fetch_small_files(place: StoredFolder, local: RunFolder, there: list[str]) -> None:
    local.path.mkdir(parents=True, exist_ok=True)
    wanted = [(place / name, local.path / name) for name in RUN_FILES if name in there]
    if "hub" in there:
        local.hub.mkdir(exist_ok=True)
        wanted += [(place / "hub" / name, local.hub / name) for name in (place / "hub").names() if _is_plain(name)]
    for source, path in wanted:
        if not os.path.lexists(path):
            draft = draft_of(path)
            draft.write_bytes(_small_file(source))
            draft.replace(path)
    if LOG in there and not os.path.lexists(local.log):
        draft = draft_of(local.log)
        place.fs.get_file((place / LOG).path, str(draft))
        draft.replace(local.log)


def _is_plain(name: str) -> bool:
    return Path(name).name == name and name not in ("", ".", "..")


def _fetch_checkpoints(copies: StoredFolder, folder: Path, run: str, say: Callable[[str], object]) -> None:
    """Fetch the newest copy that verifies, unless the folder has a newer checkpoint; then fetch the best one."""
    folder.mkdir(exist_ok=True)
    own = {path.name for path in checkpoints(folder, run)}
    broken: list[str] = []
    for name in copies.steps():
        if name <= max(own, default=""):
            break
        try:
            _fetch_checkpoint(copies / name, folder, run)
        except CheckpointError as error:
            broken.append(error.message)
            say(f"copy skipped: {error.message}")
            continue
        say(f"fetched {copies.url}/{name}")
        break
    else:
        if not own:
            what = "\n".join(broken) or f"{copies.url} has no complete checkpoint"
            recipe = folder.parent / "recipe.yaml"
            raise CheckpointError(what, remedy=f"train it from step 0: trainwright train {recipe}")
    best = copies / BEST_FILE
    if not (folder / BEST_FILE).exists() and copies.fs.exists(best.path):
        (folder / BEST_FILE).write_bytes(_small_file(best))
        found = pointed_to(folder)
        name = name_of(found.step) if found else ""
        if name in copies.steps() and not (folder / name).exists():
            with suppress(CheckpointError):  # the run goes on without it
                _fetch_checkpoint(copies / name, folder, run)


def _fetch_checkpoint(copy: StoredFolder, folder: Path, run: str) -> None:
    """Fetch one checkpoint. It gets its name only once all its files have the right size and hash."""
    name = copy.url.rsplit("/", 1)[-1]
    draft = draft_of(folder / name)
    remove(draft)
    draft.mkdir()
    try:
        (draft / MANIFEST).write_bytes(_small_file(copy / MANIFEST))
        manifest = read_manifest(draft)
        if manifest.get("run") != run:
            raise CheckpointError(f"{copy.url} is of another run", remedy="fetch an older one")
        for each in manifest["files"]:
            if not _is_plain(each):
                raise CheckpointError(f"{copy.url}: {each!r} is no name of a file", remedy="fetch an older one")
            with suppress(FileNotFoundError):  # which ``verify`` reports
                copy.fs.get_file((copy / each).path, str(draft / each))
        verify(draft)
        for path in draft.iterdir():
            fsync(path)
        draft.rename(folder / name)
        fsync(folder)
    finally:
        remove(draft)
