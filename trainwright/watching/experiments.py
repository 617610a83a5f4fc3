"""Runs the experiments that are due or that the doctor requests, and tries remedies on a replayed step."""

from __future__ import annotations

import inspect
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from torch import Tensor

from trainwright.doctor.finding import ExperimentRequest, RemedyTrial
from trainwright.doctor.own_laws import OWN, OwnLawFacts
from trainwright.errors import text_of
from trainwright.recorder.program import Backward, Constant, RecordedStep, mapped
from trainwright.recorder.ranks import own_part
from trainwright.recorder.ring import Ring
from trainwright.recorder.tape import Tape
from trainwright.replay import bundle, trials
from trainwright.replay.experiments import EXPERIMENTS, Experiment
from trainwright.replay.memory import NO_ROOM, ReplayMemory, free_what_it_holds
from trainwright.replay.replayer import NotReplayable, Replayer
from trainwright.replay.session import ReplaySession
from trainwright.replay.trials import NotTried
from trainwright.runlog.json_values import Facts
from trainwright.runlog.records import Tried
from trainwright.state.names import named_parameters
from trainwright.state.snapshot import LiveObjects
from trainwright.watching import families as _families  # noqa: F401  registers experiments and trials

OwnLaw: TypeAlias = Callable[[ReplaySession], str | None]
"""A law of the user's own: returns in words how a step breaks it, None where it holds. Its docstring states it."""


class ExperimentRunner:
    """Runs experiments on the steps that a ring holds, each once per step.

    ``own`` are laws of the user's own, looked at in every checkup. ``replays``: whether any step is run again.
    A look that may not take long leaves out experiments, and a later one begins with these.
    """

    def __init__(self, subject: LiveObjects, ring: Ring, own: Sequence[OwnLaw] = (), *, replays: bool = True) -> None:
        self._ring, self._own, self._replays = ring, own, replays
        self.replayer = Replayer(subject, names_of(subject))
        self._memory = ReplayMemory()
        self._done: set[tuple[str, int]] = set()
        self._runs: Counter[str] = Counter()
        self._cost_s: dict[str, float] = {}  # processor seconds, of the last time
        self._left_s = math.inf  # of the look
        self._left_out: dict[str, None] = {}  # what the doctor had requested
        self._standing: dict[str, None] = {}  # what the doctor had requested for no step of its own
        self._session: ReplaySession | None = None

    def _session_of(self, step: int) -> ReplaySession:
        if self._session is None or self._session.step != step:
            self._session = ReplaySession(self.replayer, self._ring, step)
        return self._session

    def forget(self) -> bool:
        """Drops what is kept of the step that was looked at last; returns whether there was anything."""
        session, self._session = self._session, None
        return session is not None

    def allow(self, seconds: float) -> None:
        """The experiments of the next look may take so many ``seconds`` of the processor, the last of them more."""
        self._left_s = seconds

    def look(self, step: int, why: str) -> Facts:
        """Runs the experiments that are due for the reason ``why``; returns their facts by name."""
        if not self._replays:
            return {}
        if why == "incident":
            return self._run([e.name for e in EXPERIMENTS.values() if e.when == "incident"], step)
        return self._run(self._due(), step) | self._look_at_own(step)

    def begin_again(self) -> None:
        """The loop does something else now: what was run once is due again, also what the doctor had requested."""
        self._left_out |= dict.fromkeys(name for name in self._runs if EXPERIMENTS[name].when == "first")
        self._left_out |= dict.fromkeys(self._standing)

    @property
    def not_run(self) -> list[str]:
        """Experiments that are due at each examination, or were requested, and have not run yet."""
        due = [e.name for e in EXPERIMENTS.values() if e.when in ("first", "checkup") and self._replays]
        return [name for name in dict.fromkeys([*due, *self._left_out]) if not self._runs[name]]

    def _due(self) -> list[str]:
        """What is run once and has not been, what was left out, and then what was run least often."""
        first = [e.name for e in EXPERIMENTS.values() if e.when == "first" and not self._runs[e.name]]
        checkups = [e.name for e in EXPERIMENTS.values() if e.when == "checkup"]
        return [*first, *self._left_out, *sorted(checkups, key=self._runs.__getitem__)]

    def _look_at_own(self, step: int) -> Facts:
        """What the laws of the user's own say of a step."""
        facts: Facts = {}
        for law in self._own if step else ():
            try:
                broken = law(self._session_of(step))
                own = OwnLawFacts(statement=inspect.getdoc(law) or "", broken=None if broken is None else str(broken))
                facts[OWN + name_of_law(law)] = {**vars(own), "step": step}
            except Exception as error:
                facts[OWN + name_of_law(law)] = {"blind": self._without_what_it_held(error), "step": step}
        return facts

    def run_requested(self, step: int, requests: Iterable[ExperimentRequest]) -> Facts:
        """Runs what the doctor requests, unless it was run on that step before; returns the facts by name."""
        facts: Facts = {}
        for request in requests if self._replays else ():
            facts |= self._run([request.experiment], request.step or step)
            if request.step is None:
                self._standing[request.experiment] = None
            if not self._runs[request.experiment] and request.experiment in EXPERIMENTS:
                self._left_out[request.experiment] = None
        return facts

    def _run(self, names: Iterable[str], step: int) -> Facts:
        facts: Facts = {}
        for name in names:
            if step == 0 or (name, step) in self._done or name not in EXPERIMENTS or not self._is_time_for(name):
                continue
            self._done.add((name, step))
            self._left_out.pop(name, None)
            experiment, begin_s = EXPERIMENTS[name], time.thread_time()
            try:
                facts[name] = {**self._run_within_memory(experiment, self._session_of(step)), "step": step}
            except NotReplayable as error:
                facts[name] = {"blind": str(error), "step": step}
            except Exception as error:  # an experiment on a stranger's model must never end his run
                facts[name] = {"blind": self._without_what_it_held(error), "step": step}
            self._runs[name] += 1
            self._cost_s[name] = time.thread_time() - begin_s
            self._left_s -= self._cost_s[name]
        return facts

    def _is_time_for(self, name: str) -> bool:
        return self._left_s > 0 and self._cost_s.get(name, 0.0) <= self._left_s

    def _run_within_memory(self, experiment: Experiment, session: ReplaySession) -> Facts:
        rows = self._memory.rows_for(session, experiment.memory, can_be_fewer=experiment.by_samples)
        with self.replayer.only(rows):
            return experiment.run(session)

    def _without_what_it_held(self, error: Exception) -> str:
        """Frees the tensors of an experiment that raised; returns why it did."""
        has_run_out = free_what_it_holds(error, self.replayer.device)
        return f"{NO_ROOM}: {text_of(error)[:160]}" if has_run_out else text_of(error)[:200]

    def try_remedy(self, step: int, trial: RemedyTrial | None) -> tuple[Tried, ...]:
        """Tries the remedy of a finding on the replay; returns the result, or nothing if it cannot be tried."""
        if trial is None or step == 0:
            return ()
        try:
            result = trials.attempt(trial.name, self._session_of(step), trial.args)
        except (NotReplayable, NotTried):
            return ()
        except Exception as error:
            result = f"the trial itself failed: {self._without_what_it_held(error)}"
        return (Tried(remedy=trial.name.replace("_", " "), result=result),)

    def keep(self, folder: Path, step: int, about: Mapping[str, object]) -> Path | None:
        """Writes a bundle of ``step``; None when the recorder does not hold it any more. Raises StorageError."""
        return bundle.keep(folder, self.replayer, self._ring, step, about)

    def unfinished(self, recorded: RecordedStep, tape: Tape, error: BaseException | None) -> Facts:
        """Returns the facts of a step that did not end: it raised ``error``, or the loop was left."""
        facts: Facts = {
            "error": None if error is None else text_of(error),
            "events": [kind for kind, _ in recorded.events],
            "ids": [list(ids) if ids else None for ids in recorded.ids],
            "lines": recorded.values.get("lines", []),
        }
        if tape.failed is not None:
            name, written, line = tape.failed
            arguments: list[object] = []
            mapped(written, lambda leaf: arguments.append(leaf.tensor if isinstance(leaf, Constant) else leaf))
            facts["failed"] = {"op": name, "arguments": [_described(each) for each in arguments], "line": line}
        return facts

    def abandoned(self, recorded: RecordedStep, tape: Tape) -> Facts:
        """Traces a loss that is not finite, where the loop was left before its backward pass."""
        loss = tape.last_scalar()
        if loss is None or math.isfinite(loss.detach()) or (slot := tape.slot_of(loss)) is None:
            return {}
        recorded.program += [*tape.operations, Backward(slot, loss.detach())]
        recorded.losses.append(loss.detach())
        self._ring.add(recorded)
        return self._run(["trace"], recorded.step)


def name_of_law(law: OwnLaw) -> str:
    """The name of its function."""
    return str(getattr(law, "__name__", type(law).__name__))


def _described(value: object) -> object:
    """A tensor as its shape, dtype and extremes, a short vector of integers whole; a plain value as it is."""
    if not isinstance(value, Tensor):
        return value if isinstance(value, int | float | str | bool | None) else str(type(value).__name__)
    facts: Facts = {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
    value = own_part(value.detach())
    if value.numel() and not value.is_complex():
        facts |= {"min": float(value.min()), "max": float(value.max())}
    if not value.is_floating_point() and value.dim() == 1 and value.numel() <= 65536:
        facts["values"] = value.tolist()
    return facts


def names_of(subject: LiveObjects) -> list[str]:
    """Returns the name of each parameter: its path in its root, or that only an optimizer has it."""
    names: dict[int, str] = {}
    for name, parameter in named_parameters(subject.roots):
        names.setdefault(id(parameter), name)
    return [names.get(id(p), f"<not in the model {n}>") for n, p in enumerate(subject.parameters)]
