"""Runs the experiments that are due or that the doctor requests, and tries remedies on a replayed step."""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeAlias

from torch import Tensor

from trainwright.checkpoint.names import named_parameters
from trainwright.checkpoint.snapshot import LiveObjects
from trainwright.doctor.diagnose import USER_CHECK_PREFIX, UserCheckFacts
from trainwright.doctor.finding import ExperimentRequest, RemedyTrial
from trainwright.doctor.measure import REPLAYS
from trainwright.doctor.remedies import TRIALS, NotTried
from trainwright.errors import DataError, text_of
from trainwright.recorder.program import Backward, Constant, RecordedStep, mapped
from trainwright.recorder.ranks import local_part
from trainwright.recorder.ring import Ring
from trainwright.recorder.tape import Tape
from trainwright.replay import bundle
from trainwright.replay.deadline import Deadline, ReplayTimeout
from trainwright.replay.experiments import DEFAULT_STEPS, Experiment
from trainwright.replay.memory import NOT_ENOUGH_MEMORY, ReplayMemory, free_what_it_holds
from trainwright.replay.replayer import NotReplayable, Replayer
from trainwright.replay.session import ReplaySession
from trainwright.runs.json_values import Facts
from trainwright.runs.records import Tried
from trainwright.watching.budget import ExaminationBudget

UserCheck: TypeAlias = Callable[[ReplaySession], str | None]
"""A user-defined check: returns what is wrong with a step, or None. Its docstring states the expectation."""
LEAST_S = 0.002
"""Predicted seconds of an experiment, without its replays. On a small MLP most experiments take 1 to 5 ms."""
MEASURING_STEPS = 0.5
"""Time to measure the memory of a replay, in durations of a training step. Measured once for each input size."""
NEAR = 0.2
"""Fraction of an examination's time that replays of earlier steps may take."""
FOR_REQUESTS = 0.5
"""Fraction of an examination's time that is reserved for requested experiments and remedies.

Less is reserved if the next pending experiment would not fit into the rest.
"""
ANNOUNCED_S = 1.0
"""Examinations that are expected to take more seconds are announced."""


class ExperimentRunner:
    """Runs experiments on the steps in a ring, each once per step, within the time of a budget.

    ``own`` are user-defined checks, made in every examination. ``replays``: steps may be replayed. ``say`` announces an
    examination of more than a second.

    An experiment is not started if its predicted time exceeds the remaining time, and is stopped if its actual time
    does. It runs in a later examination.
    """

    def __init__(
        self,
        subject: LiveObjects,
        ring: Ring,
        budget: ExaminationBudget,
        own: Sequence[UserCheck] = (),
        *,
        replays: bool = True,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._experiments = {each.name: each for each in REPLAYS}
        self._ring, self._budget, self._own, self._replays, self._say = ring, budget, own, replays, say
        self.now_s = budget.clock
        self.replayer = Replayer(subject, names_of(subject))
        self.replayer.deadline = Deadline(budget.clock)
        self.replayer.deadline.extended = self._extended
        self._memory = ReplayMemory()
        self._done: set[tuple[str, int]] = set()
        self._stopped: set[str] = set()  # experiments that were stopped by the time limit
        self._runs: Counter[str] = Counter()
        self._cost_s: dict[str, float] = {}  # seconds of the last run
        self._begin_s = self.now_s()  # start of the examination
        self._until_s = self._stop_s = math.inf
        self.replayed_s = 0.0  # duration of the experiments and trials of this examination
        self._is_announced = False
        self._step, self._is_last = 0, False  # the last examined step; True in the examination at the end
        self._left_out: dict[str, None] = {}  # pending experiments: requested, stopped, or due after a change
        self._standing: dict[str, None] = {}  # experiments requested without a specific step
        self._trials: set[str] = set()  # remedies that there was no time to try
        self._session: ReplaySession | None = None

    def _session_of(self, step: int) -> ReplaySession:
        if self._session is None or self._session.step != step:
            self._session = ReplaySession(self.replayer, self._ring, step)
        return self._session

    def forget(self) -> bool:
        """Drops the replays of the last examined step. Returns True if there were any."""
        session, self._session = self._session, None
        return session is not None

    def allow(self, seconds: float) -> None:
        """Begins an examination that may take ``seconds`` from now on."""
        self._begin_s = self.now_s()
        self._until_s = self._stop_s = self._begin_s + seconds
        self.replayed_s, self._is_announced = 0.0, False

    @property
    def _left_s(self) -> float:
        return self._until_s - self.now_s()

    def nearest(self, step: int) -> int:
        """Returns the step to examine: ``step``, or that right after the newest snapshot.

        The latter if steps between them were not recorded in full, or would take too long to replay.
        """
        snapshot = next((each for each in reversed(self._ring.snapshots) if each.step <= step), None)
        if snapshot is None:
            return step
        is_whole = not any(each.is_light for each in self._ring.steps if snapshot.step <= each.step <= step)
        if is_whole and (step - snapshot.step) * self._budget.step_s <= NEAR * self._left_s:
            return step
        return snapshot.step

    def run_due(self, step: int, why: str, *, repeats: bool = True) -> Facts:
        """Runs the experiments that are due for the reason ``why``. Returns their facts by name.

        ``repeats``: repeated experiments are due, too.
        """
        if not self._replays:
            return {}
        if why == "incident":
            facts = self._run([e.name for e in self._experiments.values() if e.when == "incident"], step)
            self._budget.has_replayed_incident |= any("blind" not in each for each in facts.values())
            return facts
        until_s, self._step, self._is_last = self._until_s, step, why == "end"
        if until_s != math.inf:
            self._until_s -= max(0.0, min(FOR_REQUESTS * self._left_s, self._left_s - self.wanted_s()))
        try:
            return self._run(self._due(repeats), step) | (self._run_user_checks(step) if repeats else {})
        finally:
            self._until_s = until_s

    def is_measured(self, name: str, step: int) -> None:
        """Records that a probe has measured at ``step`` what the experiment ``name`` measures."""
        if name in self._experiments:
            self._done.add((name, step))
            self._runs[name] += 1

    def begin_again(self) -> None:
        """Makes experiments due again after the program of the loop changed, including requested ones."""
        first = [e.name for e in self._experiments.values() if e.when == "first" and self._runs[e.name]]
        self._left_out |= dict.fromkeys(first)
        self._left_out |= dict.fromkeys(self._standing)

    def _due(self, repeats: bool) -> list[str]:
        """Returns pending experiments in the order of ``_waiting``, then repeated ones, with the fewest runs first."""
        waiting = self._waiting()
        checkups = [e.name for e in self._checkups() if e.name not in waiting]
        again = sorted(checkups, key=self._runs.__getitem__) if repeats else []
        return [*waiting, *again]

    def _waiting(self) -> list[str]:
        """Returns pending experiments that may still run, including requested ones, in the order of ``_rank``."""
        waiting = [name for name in self._left() if self._experiments[name].latest >= self._step]
        return sorted(waiting, key=self._rank)

    def _rank(self, name: str) -> float:
        """Returns the sort key: cost / value. The cost of a stopped experiment is doubled, so others come first."""
        each, step_s = self._experiments[name], self._budget.step_s
        return self._cost_s[name] / step_s / each.value if name in self._stopped and step_s else each.rank

    def _left(self) -> list[str]:
        first = [e for e in self._experiments.values() if e.when == "first"]
        of_itself = [e.name for e in (*first, *self._checkups()) if not self._runs[e.name]]
        return list(dict.fromkeys([*of_itself, *self._left_out])) if self._replays else []

    def _checkups(self) -> list[Experiment]:
        """Returns the experiments of every examination; if there is no time limit, also the "unlimited" ones."""
        whens = ("checkup", "unlimited") if self._until_s == math.inf else ("checkup",)
        return [e for e in self._experiments.values() if e.when in whens]

    def wanted_s(self) -> float:
        """Returns the predicted seconds of the next pending experiment; infinity without one."""
        following = next(iter(self._waiting()), None)
        return math.inf if following is None else self._predicted_s(following)

    def repeated_s(self) -> float:
        """Returns the predicted seconds of the repeated experiments."""
        return sum(self._predicted_s(e.name) for e in self._checkups() if self._runs[e.name])

    def not_run(self, *, is_later: bool = False) -> list[str]:
        """Returns the names of experiments and remedies for which there was no time in the run.

        ``is_later``: without experiments that only concern the first steps, if these are over.
        """
        left = self._waiting() if is_later else self._left()
        return [name for name in left if not self._runs[name]] + sorted(self._trials)

    def _run_user_checks(self, step: int) -> Facts:
        facts: Facts = {}
        for own in self._own if step else ():
            name = USER_CHECK_PREFIX + name_of_check(own)
            if self._is_time_for(self._predicted_s(name)):
                facts |= self._measured(name, step, partial(_user_check_facts, own))
        return facts

    def run_requested(self, step: int, requests: Iterable[ExperimentRequest]) -> Facts:
        """Runs requested experiments unless they ran on that step before. Returns the facts by name.

        Requests for a given step are run first. The others are queued with all pending experiments.
        """
        facts: Facts = {}
        known = [each for each in requests if each.experiment in self._experiments] if self._replays else []
        for request in sorted(known, key=lambda each: self._experiments[each.experiment].rank):
            name = request.experiment
            if name in facts:
                continue  # facts hold one step for each name; the check requests the others again in the next round
            if request.step is not None:
                with self._spending_on_evidence():
                    facts |= self._run([name], request.step)
            else:
                self._standing[name] = None
            if not self._runs[name] or (request.step is None and (name, step) not in self._done):
                self._left_out[name] = None
        return facts | self._run(self._due(repeats=False), step)

    def _run(self, names: Iterable[str], step: int) -> Facts:
        """Runs experiments until there is no time for the next one; at the end, all that there is time for.

        Returns their facts by name.
        """
        facts: Facts = {}
        for name in names:
            if step == 0 or (name, step) in self._done or name not in self._experiments:
                continue
            if not self._is_time_for(self._predicted_s(name)):
                if self._is_last:
                    continue
                break
            self._done.add((name, step))
            self._left_out.pop(name, None)
            facts |= self._measured(name, step, partial(self._run_within_memory, self._experiments[name]))
        return facts

    def _measured(self, name: str, step: int, run: Callable[[ReplaySession], Facts]) -> Facts:
        """Returns the facts of one experiment by its name; nothing if it exceeded its time.

        It may use the time that is reserved for requests: all the time of an experiment that is stopped is lost.
        """
        begin_s, facts, is_whole = self.now_s(), Facts(), True
        try:
            with self.replayer.deadline.within(max(self._until_s, self._stop_s) - begin_s):
                facts[name] = {**run(self._session_of(step)), "step": step}
        except ReplayTimeout:
            is_whole = False
        except NotReplayable as error:
            facts[name] = {"blind": str(error), "step": step}
        except Exception as error:  # an experiment must never end the user's run
            facts[name] = {"blind": self._without_what_it_held(error), "step": step}
        took_s = self.now_s() - begin_s
        self.replayed_s += took_s
        self._cost_s[name] = took_s if is_whole else 2 * took_s
        if is_whole:
            self._runs[name] += 1
        else:
            self._stopped.add(name)
            self._done.discard((name, step))
            if name in self._experiments:
                self._left_out[name] = None
        return facts

    def _predicted_s(self, name: str) -> float:
        """Returns the seconds of the last run. Without one, predicts them from the number of steps it declares."""
        if name in self._cost_s:
            return self._cost_s[name]
        steps = self._experiments[name].steps if name in self._experiments else DEFAULT_STEPS
        if steps and not self._memory.is_measured:
            steps += MEASURING_STEPS
        return LEAST_S + steps * self._budget.step_s

    def _is_time_for(self, predicted_s: float) -> bool:
        """Returns True if ``predicted_s`` seconds are left. Announces an examination that will take long."""
        now_s = self.now_s()
        if predicted_s > self._until_s - now_s:
            return False
        if now_s - self._begin_s + predicted_s > ANNOUNCED_S and not self._is_announced:
            self._is_announced = True
            limit = "" if self._until_s == math.inf else f", at most {self._until_s - self._begin_s:.1f} s"
            self._say(f"examining a step: it is replayed for more than {ANNOUNCED_S:.0f} s{limit}")
        return True

    def _run_within_memory(self, experiment: Experiment, session: ReplaySession) -> Facts:
        if experiment.steps:  # else it replays nothing
            self._memory.require(session, experiment.memory, is_capped=not self._budget.is_lifted)
        return experiment.run(session)

    def _without_what_it_held(self, error: Exception) -> str:
        """Frees the tensors of an experiment that raised. Returns the reason."""
        has_run_out = free_what_it_holds(error, self.replayer.device)
        return f"{NOT_ENOUGH_MEMORY}: {text_of(error)[:160]}" if has_run_out else text_of(error)[:200]

    def try_remedy(self, step: int, trial: RemedyTrial | None) -> tuple[Tried, ...] | None:
        """Tries the remedy of a finding in a replay. Returns the result, or () if it cannot be tried.

        Returns None if there is no time for it now.
        """
        if trial is None or step == 0 or trial.name not in TRIALS:
            return ()
        with self._spending_on_evidence():
            result = self._tried(step, trial)
        (self._trials.add if result is None else self._trials.discard)(trial.name)
        if result is None:
            return None
        return (Tried(remedy=trial.name.replace("_", " "), result=result),) if result else ()

    def _tried(self, step: int, trial: RemedyTrial) -> str | None:
        """Returns the outcome as text, "" if the remedy cannot be tried; None if there is no time for it."""
        remedy, begin_s = TRIALS[trial.name], self.now_s()
        if not self._is_time_for(LEAST_S + remedy.steps * self._budget.step_s):
            return None
        try:
            with self.replayer.deadline.within(self._left_s):
                return remedy.run(self._session_of(step), **trial.args)
        except ReplayTimeout:
            return None
        except (NotReplayable, NotTried):
            return ""
        except Exception as error:
            return f"the trial itself failed: {self._without_what_it_held(error)}"
        finally:
            self.replayed_s += self.now_s() - begin_s

    @contextmanager
    def _spending_on_evidence(self) -> Iterator[None]:
        """Context with additional time, because something was detected."""
        until_s, begin_s = self._until_s, self.now_s()
        self._until_s = max(until_s, begin_s + self._budget.left_for_evidence_s)
        try:
            yield
        finally:
            self._until_s = until_s
            self._budget.spent_on_evidence_s += self.now_s() - begin_s

    @contextmanager
    def _extended(self) -> Iterator[None]:
        with self._spending_on_evidence(), self.replayer.deadline.within(self._left_s):
            yield

    def keep(self, folder: Path, step: int, about: Mapping[str, object]) -> Path | None:
        """Writes a bundle of ``step``; None if the recorder does not hold it any more. Raises StorageError."""
        return bundle.keep(folder, self.replayer, self._ring, step, about)

    def keep_last(self, folder: Path, step: int, max_bytes: int) -> Path | None:
        """Writes a bundle of the steps from the newest snapshot to ``step``; if it is too large, only of the first one.

        Returns None if both are larger than ``max_bytes`` or would have to be replayed first. Raises StorageError.
        """
        ring = self._ring
        snapshot = next((each for each in reversed(ring.snapshots) if each.step <= step), None)
        if snapshot is None:
            return None
        for last in (step, snapshot.step):
            steps = [each for each in ring.steps if snapshot.step <= each.step <= last]
            num_bytes = snapshot.num_bytes + sum(each.num_bytes for each in steps)
            if (
                steps
                and all(each.program and not (each.blind or each.is_light) for each in steps)
                and num_bytes <= max_bytes
            ):
                path = self.keep(folder, last, {"findings": []})
                bundle.prune(folder)
                return path
        return None

    def unfinished(self, recorded: RecordedStep, tape: Tape, error: BaseException | None) -> Facts:
        """Returns the facts of an unfinished step: it raised ``error``, or the loop was left."""
        facts: Facts = {
            "error": None if error is None else text_of(error),
            "events": [kind for kind, _ in recorded.events],
            "other_steps": sum(kind == "other_step" and value > 0 for kind, value in recorded.events),
            "ids": [list(ids) if ids else None for ids in recorded.ids],
            "lines": recorded.values.get("lines", []),
            "samples": list(error.sample_ids) if isinstance(error, DataError) else [],
        }
        if tape.failed is not None:
            name, written, line = tape.failed
            arguments: list[object] = []
            mapped(written, lambda leaf: arguments.append(leaf.tensor if isinstance(leaf, Constant) else leaf))
            facts["failed"] = {"op": name, "arguments": [_described(each) for each in arguments], "line": line}
        return facts

    def abandoned(self, recorded: RecordedStep, tape: Tape) -> Facts:
        """Traces a non-finite loss if the loop was left before its backward pass."""
        loss = tape.last_scalar()
        if loss is None or math.isfinite(loss.detach()) or (slot := tape.slot_of(loss)) is None:
            return {}
        recorded.program += [*tape.operations, Backward(slot, loss.detach())]
        recorded.losses.append(loss.detach())
        self._ring.add(recorded)
        return self._run(["trace"], recorded.step)


def _user_check_facts(check: UserCheck, session: ReplaySession) -> Facts:
    broken = check(session)
    return vars(UserCheckFacts(statement=inspect.getdoc(check) or "", broken=None if broken is None else str(broken)))


def name_of_check(check: UserCheck) -> str:
    """Returns the name of the check's function."""
    return str(getattr(check, "__name__", type(check).__name__))


def _described(value: object) -> object:
    """Describes a tensor by shape, dtype and extremes (and the values of an integer vector), or any other value."""
    if not isinstance(value, Tensor):
        return value if isinstance(value, int | float | str | bool | None) else str(type(value).__name__)
    facts: Facts = {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
    value = local_part(value.detach())
    if value.numel() and not value.is_complex():
        facts |= {"min": float(value.min()), "max": float(value.max())}
    if not value.is_floating_point() and value.dim() == 1 and value.numel() <= 65536:
        facts["values"] = value.tolist()
    return facts


def names_of(subject: LiveObjects) -> list[str]:
    """Returns the name of each parameter: its path in its root, or a placeholder if only an optimizer has it."""
    names: dict[int, str] = {}
    for name, parameter in named_parameters(subject.roots):
        names.setdefault(id(parameter), name)
    return [names.get(id(p), f"<not in the model {n}>") for n, p in enumerate(subject.parameters)]
