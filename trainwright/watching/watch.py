"""Composition for a loop that somebody else owns: ``with tw.watch(model, optimizer):`` around it, and nothing else."""

from __future__ import annotations

import inspect
import os
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any, Self

from rich.console import Console
from torch import nn
from torch.optim import Optimizer

from trainwright.doctor.source import point_at
from trainwright.errors import UsageError, require_choice
from trainwright.recorder.veto import OnNonfinite
from trainwright.report.findings import lines_of
from trainwright.runlog import records
from trainwright.runlog.folder import RunFolder
from trainwright.runlog.reader import read
from trainwright.runlog.records import Found, Record
from trainwright.runlog.writer import LogWriter
from trainwright.version import __version__
from trainwright.watching.session import KEEP, WatchOptions, WatchSession, enough_bytes


class Watch:
    """A context manager around a training loop; made by ``tw.watch``."""

    def __init__(
        self,
        roots: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        given: dict[str, Any],
        terms: WatchOptions,
        *,
        folder: RunFolder | None,
        console: Console | None,
    ) -> None:
        self.folder, self._console = folder, console
        self._open = ExitStack()
        self._log: LogWriter | None = None
        self._source = CallerSource()
        self.attendant = WatchSession(roots, optimizers, given, terms, write=self._write, point_at=self._source.line_of)

    def __enter__(self) -> Self:
        self._source.look_at(sys._getframe(1))
        if self.folder is not None:
            self._log = self._open.enter_context(closing(LogWriter(self.folder.log)))
        self._write(records.Started(time_s=time.time(), step=0, version=__version__, pid=os.getpid()))
        self.attendant.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._open:
            self.attendant.end(error)
            self._write(self._ended(error))
            if self._console is not None:
                for line in lines_of(self.findings(), self.folder.path if self.folder else None):
                    self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _ended(self, error: BaseException | None) -> records.Ended:
        losses = [each.loss for each in self.records if isinstance(each, records.Watched)]
        return records.Ended(
            time_s=time.time(),
            ending="finished" if error is None else "failed",
            reason="" if error is None else f"{type(error).__name__}: {error}",
            step=self.step,
            loss=losses[-1] if losses else None,
            val_loss=None,
            skipped=self.attendant.num_vetoed,
            seconds=self.attendant.seconds,
        )

    @property
    def step(self) -> int:
        """Optimizer steps that were seen."""
        return self.attendant.step

    @property
    def records(self) -> list[Record]:
        """What is remembered: of a long run not every step."""
        return self.attendant.casebook.records

    @property
    def held_bytes(self) -> int:
        """What the flight recorder holds of its byte budget."""
        return self.attendant.held_bytes

    def findings(self) -> list[Found]:
        """What is known by now, the first cause first."""
        return self.attendant.findings()

    def _write(self, record: Record) -> None:
        if self._log is not None:
            self._log.write(record)


class CallerSource:
    """The source of the function that holds the loop: read once, and only when a finding asks for a line."""

    def __init__(self) -> None:
        self._code: CodeType | None = None

    def look_at(self, frame: FrameType) -> None:
        """``frame`` is where the ``with`` stands."""
        self._code = frame.f_code

    def line_of(self, code: str) -> str | None:
        """``file.py:42``; None where the source does not show it, or is not there."""
        if self._code is None:
            return None
        try:
            lines, first = inspect.getsourcelines(self._code)
        except (OSError, TypeError):
            return None
        pointer = point_at(code, "".join(lines), first_line=max(1, first))
        return f"{Path(self._code.co_filename).name}:{pointer.line}" if pointer else None


def watch(
    model: nn.Module | Sequence[nn.Module],
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    loader: Any = None,
    loss: Any = None,
    scaler: Any = None,
    scheduler: Any = None,
    out: str | Path | None = "runs/watch",
    on_nonfinite: OnNonfinite = "skip",
    **more: Any,
) -> Watch:
    """Watches a loop that somebody else owns: ``with tw.watch(model, optimizer, loader=loader):`` around it.

    Reads only: with and without it the training is the same bits, but for an update that is not finite. That one is
    vetoed (``on_nonfinite="skip"``), ends the loop (``"stop"``), or is let through (``"observe"``). Several models and
    optimizers (a GAN) are given as sequences. The run folder is ``out``, numbered if it exists; None writes nothing.
    ``more``: ``on_spike`` says what is done when the gradient norm is 8 times its median: ``"warn"``, ``"skip"`` the
    batch, or ``"rollback"`` to the last snapshot. ``skip`` is the folder of an earlier watch of this training, or
    sample ids step by step: updates that were left out there are left out again. ``accumulation`` declares
    micro-batches for each step. ``keep`` (32 steps) and ``memory_bytes`` (room for three states, at most a quarter of
    the free memory) limit the flight recorder. ``quiet`` prints nothing.

    Raises UsageError for what cannot be watched.
    """
    known = {"accumulation": None, "on_spike": "warn", "keep": KEEP, "memory_bytes": None, "quiet": False, "skip": ()}
    if unknown := more.keys() - known.keys():
        raise UsageError(f"watch has no argument {min(unknown)!r}", remedy=f"it has also {', '.join(known)}")
    chosen = known | more
    require_choice("on_nonfinite", on_nonfinite, ("skip", "stop", "observe"))
    require_choice("on_spike", str(chosen["on_spike"]), ("warn", "skip", "rollback"))
    roots = _several(model, nn.Module, "model")
    if isinstance(loss, nn.Module) and any(True for _ in loss.parameters()):
        roots.append(loss)
    folder = None if out is None else RunFolder.create(Path(out).parent, Path(out).name)
    given = {
        "loaders": _listed(loader),
        "scalers": _listed(scaler),
        "schedulers": _listed(scheduler),
        "accumulation": chosen["accumulation"],
    }
    terms = WatchOptions(
        on_nonfinite,
        chosen["on_spike"],
        int(chosen["keep"]),
        int(chosen["memory_bytes"] or enough_bytes(roots)),
        folder.bundles if folder else None,
        _to_skip(chosen["skip"]),
    )
    return Watch(
        roots,
        _several(optimizer, Optimizer, "optimizer"),
        given,
        terms,
        folder=folder,
        console=None if chosen["quiet"] else Console(stderr=True),
    )


def _several(given: Any, kind: type, what: str) -> list[Any]:
    items = [given] if isinstance(given, kind) else list(given) if isinstance(given, Iterable) else [given]
    for item in items:
        if not isinstance(item, kind):
            raise UsageError(f"watch: the {what} is a {type(item).__name__}", remedy=f"give a torch {kind.__name__}")
    return items


def _to_skip(given: Any) -> frozenset[frozenset[int]]:
    """Sample ids of each step that is to be left out, given as such or as the folder of an earlier watch."""
    if isinstance(given, str | Path):
        told = read(RunFolder.open(given).log).records
        given = [each.sample_ids for each in told if isinstance(each, records.Skipped)]
    return frozenset(frozenset(ids) for ids in given if ids)


def _listed(given: Any) -> tuple[Any, ...]:
    return () if given is None else tuple(given) if isinstance(given, list | tuple) else (given,)
