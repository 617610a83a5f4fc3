"""Composition of replay and doctor: makes the experiments that are due or wished for, and tries remedies."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from trainwright.doctor.finding import ExperimentRequest, RemedyTrial
from trainwright.recorder.program import Backward, Constant, RecordedStep, mapped
from trainwright.recorder.ring import Ring
from trainwright.recorder.tape import Tape
from trainwright.replay import bundle, experiments, trials
from trainwright.replay.experiments import EXPERIMENTS
from trainwright.replay.replayer import NotReplayable, Replayer
from trainwright.replay.session import ReplaySession
from trainwright.replay.trials import NotTried
from trainwright.runlog.records import Tried
from trainwright.state.snapshot import LiveObjects


class ExperimentRunner:
    """Looks closely at the steps of a ring."""

    def __init__(self, subject: LiveObjects, ring: Ring) -> None:
        experiments.load_all()
        trials.load_all()
        self._ring = ring
        self.replayer = Replayer(subject, names_of(subject))
        self._made: set[tuple[str, int]] = set()
        self._first = True
        self._bench: ReplaySession | None = None

    def _bench_of(self, step: int) -> ReplaySession:
        if self._bench is None or self._bench.step != step:
            self._bench = ReplaySession(self.replayer, self._ring, step)
        return self._bench

    def look(self, step: int, why: str) -> dict[str, Any]:
        """What the experiments that are due at a checkup, an incident or the end give, by name."""
        due: tuple[str, ...] = ("incident",) if why == "incident" else ("checkup",)
        if self._first and why != "incident":
            due, self._first = (*due, "first"), False
        return self._make([e.name for e in EXPERIMENTS.values() if e.when in due], step)

    def grant(self, step: int, wishes: Iterable[ExperimentRequest]) -> dict[str, Any]:
        """What the doctor wished for and was not made yet."""
        told: dict[str, Any] = {}
        for wish in wishes:
            told |= self._make([wish.experiment], wish.step or step)
        return told

    def _make(self, names: Iterable[str], step: int) -> dict[str, Any]:
        told: dict[str, Any] = {}
        for name in names:
            if step == 0 or (name, step) in self._made or name not in EXPERIMENTS:
                continue
            self._made.add((name, step))
            try:
                told[name] = {**EXPERIMENTS[name].run(self._bench_of(step)), "step": step}
            except NotReplayable as error:
                told[name] = {"blind": str(error), "step": step}
            except Exception as error:  # an experiment on a stranger's model must never end his run
                told[name] = {"blind": f"{type(error).__name__}: {str(error)[:200]}", "step": step}
        return told

    def attempt(self, step: int, trial: RemedyTrial | None) -> tuple[Tried, ...]:
        """Tries the remedy of a finding."""
        if trial is None or step == 0:
            return ()
        try:
            result = trials.attempt(trial.name, self._bench_of(step), trial.args)
        except (NotReplayable, NotTried):
            return ()
        except Exception as error:
            result = f"the trial itself failed: {type(error).__name__}: {error}"
        return (Tried(remedy=trial.name.replace("_", " "), result=result),)

    def keep(self, folder: Path, step: int, about: Mapping[str, Any]) -> Path | None:
        """Writes a bundle of ``step``; None when the recorder does not hold it any more. Raises StorageError."""
        return bundle.keep(folder, self.replayer, self._ring, step, about)

    def unfinished(self, segment: RecordedStep, tape: Tape, error: BaseException | None) -> dict[str, Any]:
        """What is known of a step that did not end: an exception came, or the loop was over."""
        told: dict[str, Any] = {
            "error": None if error is None else f"{type(error).__name__}: {error}",
            "events": [kind for kind, _ in segment.events],
            "ids": [list(ids) if ids else None for ids in segment.ids],
            "lines": segment.values.get("lines", []),
        }
        if tape.failed is not None:
            name, written = tape.failed
            found: list[Any] = []
            mapped(written, lambda leaf: found.append(leaf.tensor if isinstance(leaf, Constant) else leaf))
            told["failed"] = {"op": name, "arguments": [_described(each) for each in found]}
        return told

    def abandoned(self, segment: RecordedStep, tape: Tape) -> dict[str, Any]:
        """Where the loop was left at a loss that is not finite, before its backward pass: which op made it so."""
        loss = tape.last_scalar()
        if loss is None or math.isfinite(loss.detach()) or (slot := tape.slot_of(loss)) is None:
            return {}
        segment.program += [*tape.operations, Backward(slot, loss.detach())]
        segment.losses.append(loss.detach())
        self._ring.add(segment)
        return self._make(["trace"], segment.step)


def _described(value: Any) -> Any:
    """Of a tensor its shape, type and extremes; small integer tensors whole."""
    if not hasattr(value, "dtype") or not hasattr(value, "shape"):
        return value if isinstance(value, int | float | str | bool | None) else str(type(value).__name__)
    told: dict[str, Any] = {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
    value = value.detach()
    if value.numel() and not value.is_complex():
        told |= {"min": float(value.min()), "max": float(value.max())}
    if not value.is_floating_point() and value.dim() == 1 and value.numel() <= 65536:
        told["values"] = value.tolist()
    return told


def names_of(subject: LiveObjects) -> list[str]:
    """A name for each parameter: its path in its root, or that only an optimizer has it."""
    names: dict[int, str] = {}
    for number, root in enumerate(subject.roots):
        start = "" if len(subject.roots) == 1 else f"{number}."
        for name, parameter in root.named_parameters():
            names.setdefault(id(parameter), start + name)
    return [names.get(id(p), f"<not in the model {n}>") for n, p in enumerate(subject.parameters)]
