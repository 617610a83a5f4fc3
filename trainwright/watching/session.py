"""The session of every watched loop: records its steps, examines those that are due, and runs the checks.

The events of a step come from hooks. In a user's loop a step ends with its update. The engine reports the end of its
steps (``EngineSource``).
"""

from __future__ import annotations

import operator
import os
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer

from trainwright.checkpoint.snapshot import LiveObjects
from trainwright.checkpoint.spikes import SpikeDetector
from trainwright.doctor.check import Check
from trainwright.doctor.measure import LISTENERS, LIVE_LOOP_LISTENERS
from trainwright.doctor.measure.loss_calls import LossListener
from trainwright.engine.recover import is_out_of_memory
from trainwright.engine.spikes import OnSpike
from trainwright.errors import OutOfMemoryError, TrainwrightError
from trainwright.recorder.calls import parts_of
from trainwright.recorder.deferred import StepTemplate
from trainwright.recorder.foreign import ForeignOptimizer
from trainwright.recorder.gradients import parameters_of
from trainwright.recorder.hooks import listening, listening_to_calls
from trainwright.recorder.light import LightSteps
from trainwright.recorder.listener import call_each, methods_of, muted
from trainwright.recorder.numbers import Numbers, begin_reading, lateness
from trainwright.recorder.optimizers import watching
from trainwright.recorder.pausable import without_users_modes
from trainwright.recorder.probes import LoopObjects, Probe, WatchedObjects, WatchSite
from trainwright.recorder.program import RecordedStep, others_of
from trainwright.recorder.program_changes import ProgramChanges
from trainwright.recorder.ranks import what_is_shared
from trainwright.recorder.recording import LoopRecorder
from trainwright.recorder.ring import KEEP, LEAST_BYTES, Ring
from trainwright.recorder.veto import OnNonfinite, Veto
from trainwright.replay.replayer import NotReplayable
from trainwright.report.findings import lines_of
from trainwright.runs.json_values import Facts
from trainwright.runs.records import Found, Record
from trainwright.watching.budget import ExaminationBudget, Examine
from trainwright.watching.experiments import ExperimentRunner, UserCheck
from trainwright.watching.findings import ORDINARY, FindingsLog, failures_of, limits_of
from trainwright.watching.incidents import Incidents, keep_rest
from trainwright.watching.places import SourcePlaces
from trainwright.watching.schedule import ExaminationSchedule, SnapshotSchedule

CHECKED_STEPS = 4
"""If none of the first CHECKED_STEPS steps can be replayed, the last of them is checked without a replay."""
CALM_AFTER = 64
"""Steps after the start, a change or an incident until steps are calm, which means that most probes ignore them."""
FULL_EVERY = 16
"""Every FULL_EVERY-th step and the step after it are observed by all probes. The second of them may be examined."""
SHORT_STEP_S, LONG_CALM, RARE_FULL_EVERY = 0.005, 512, 64
"""RARE_FULL_EVERY replaces FULL_EVERY for steps shorter than SHORT_STEP_S, after LONG_CALM further steps.

A step that is not calm takes 2 ms longer.
"""
LONG_STEP_S = 0.1
"""Longer steps are never deferred (recorded later, by running them again): recording them at once is cheaper."""
LIGHT_SNAPSHOTS = 32
"""Steps between snapshots while most steps are light. The step after a snapshot is recorded in full."""
_URGENT = operator.attrgetter("urgent")


@dataclass(frozen=True)
class WatchOptions:
    """Permissions of a session, and how much it may record. ``bundles`` is the folder of bundles (None: none are kept).

    ``skip`` are the samples of steps whose update is skipped. ``checks`` and ``user_checks`` are the checks to run
    (None: all of them). ``examine`` sets the time budget; with "listen", no step is replayed.
    ``keeps_last_steps``: the last steps are written to ``bundles`` if there was no time for an experiment.
    ``is_engine``: the session watches the engine, which skips updates itself and reports the end of steps.
    ``finds_spikes``: spikes of the gradient norm are reported. ``check``: the first step that can be replayed is
    examined without the limits of the budget, and the result is printed before the next step.
    """

    on_nonfinite: OnNonfinite = "skip"
    on_spike: OnSpike = "warn"
    keep: int = KEEP
    budget_bytes: int = LEAST_BYTES
    bundles: Path | None = None
    skip: frozenset[frozenset[int]] = frozenset()
    checks: tuple[Check, ...] | None = None
    user_checks: tuple[UserCheck, ...] = ()
    examine: Examine = "budget"
    keeps_last_steps: bool = True
    is_engine: bool = False
    finds_spikes: bool = True
    check: bool = False


class WatchSession:
    """Records the last steps of a loop, examines those that are due, and runs the checks.

    ``write`` is called with every record, ``say`` with a line to print. ``first_step`` is the number of steps before
    the session.
    """

    def __init__(
        self,
        roots: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        objects: LoopObjects,
        options: WatchOptions,
        *,
        write: Callable[[Record], None],
        say: Callable[[str], None] = lambda line: None,
        first_step: int = 0,
    ) -> None:
        self._options, self._roots, self._say = options, list(roots), say
        self.step = self._first_step = first_step
        self._begin_s, self._pid = 0.0, os.getpid()
        self._open = ExitStack()
        parameters = parameters_of(roots, optimizers)
        self.device = parameters[0].device if parameters else torch.device("cpu")
        self.budget = ExaminationBudget(self.device, options.examine)
        together = optimizers if options.is_engine else ()
        self._veto = veto = Veto(
            roots, parameters, options.on_nonfinite, options.on_spike, options.skip, together=together
        )
        self.recording = LoopRecorder(
            roots,
            optimizers,
            self._closed,
            before_update=veto.before_update,
            after_update=veto.after_update,
            first_step=first_step + 1,
            closes_itself=not options.is_engine,
        )
        self.recording.budget_bytes = options.budget_bytes
        self.ring = Ring(keep=options.keep, budget_bytes=options.budget_bytes)
        self._objects = LiveObjects(roots, optimizers, parameters)
        self.runner = ExperimentRunner(
            self._objects, self.ring, self.budget, options.user_checks, replays=options.examine != "listen", say=say
        )
        self._changes = ProgramChanges(parameters)
        watched = WatchedObjects(subject=self._objects, **vars(objects))
        made = [probe for make in (*LISTENERS, *LIVE_LOOP_LISTENERS) if (probe := make(watched)) is not None]
        loss_calls = LossListener(self.recording.tape, self._objects)
        self._probes: list[Probe] = [*objects.probes, *made, self._changes, loss_calls]
        self._pausable = [each for each in (*made, self._changes, loss_calls) if not each.observes_every_step]
        self._listeners = {"recording": self.recording, **{probe.name: probe for probe in self._probes}}
        self._group = [self.recording, objects.sites, *self._probes]
        self._on_closed = methods_of(self._probes, "on_closed", Probe)
        self._on_read = methods_of(self._probes, "on_read", Probe)
        self._light = LightSteps(self.recording, is_off=self.budget.is_lifted or options.is_engine)
        places = SourcePlaces(roots, optimizers, objects.schedulers, objects.loaders, objects.frames, objects.values)
        self.findings_log = FindingsLog(
            self.runner, self._probes, write, checks=options.checks, place_of=places.place_of
        )
        self._incidents = Incidents(options.bundles, self.runner, write)
        self._site = WatchSite(options.bundles.parent if options.bundles else None, write, say)
        self._schedule = ExaminationSchedule(first_step, self.budget)
        self._snapshots = SnapshotSchedule(options.keep)
        self._late = lateness(self.device)
        self._pending: deque[tuple[RecordedStep, Callable[[], Numbers]]] = deque()  # loss and norms not read yet
        self._detectors: dict[tuple[int, int], SpikeDetector] = defaultdict(SpikeDetector)
        self._went_back, self._listens_to_children = -1, False
        self.is_next_deferred = self._is_calm = False
        self._is_check_due = options.check
        self._foreign = [each for each in optimizers if isinstance(each, ForeignOptimizer)]
        reasons = [what_is_shared(roots, parameters), self._objects.is_closed, *(each.reason for each in self._foreign)]
        self._blind = next((each for each in reasons if each), None)  # the reason why no step can be replayed
        self._template: StepTemplate | None = None
        self._calm_from = first_step + CALM_AFTER

    def begin(self) -> None:
        """Starts listening to the loop."""
        self._begin_s, self._pid = time.perf_counter(), os.getpid()
        self.budget.begin()
        with without_users_modes():
            call_each([(each, each.begin) for each in self._probes], self._site)
            self._open.enter_context(watching(self._objects.optimizers))
            self._call_hooks = self._open.enter_context(listening(self._group, self._roots))
            self._light.add(self._call_hooks)
            for each in self._foreign:
                self._open.enter_context(each.listening())
            self._prepare_next()

    def listen_to_children(self) -> None:
        """Also listens to the direct children of the roots: a loop may call these and never the root."""
        if not self._listens_to_children:
            self._listens_to_children = True
            parts = [part for root in self._roots for part in parts_of(root)]
            self._light.add(self._open.enter_context(listening_to_calls(self._group, parts)))

    def _closed(self, step: RecordedStep) -> None:
        self.step = step.step
        if self._options.is_engine and step.inputs is None:
            self._template = StepTemplate.of(step)
        self.budget.train()
        self._light.closed(step, self.budget.step_s)
        step.blind = self._blind or step.blind
        call_each(self._on_closed, step)
        self.ring.add(step)
        self._pending.append((step, begin_reading(step)))
        if not self._options.is_engine:
            self.settle()

    def settle(self) -> None:
        """Evaluates the pending steps, and prepares for the next one. Raises NonFiniteStep if this is configured."""
        if not self._pending:
            return
        is_bad, step = self.evaluate(), self.step
        self._prepare_next()
        if is_bad and self._options.on_nonfinite == "stop":
            raise NonFiniteStep(f"step {step} is not finite", remedy="\n".join(lines_of(self.findings())))

    def evaluate(self) -> bool:
        """Evaluates the pending steps, on a GPU except the newest ones. Returns True if one is bad."""
        newest = self._pending[-1][0]
        is_vetoed = "vetoed" in newest.values  # decided on the host, so its numbers are known
        is_bad = self._evaluate_all_but(0 if is_vetoed or self._is_check_due else self._late)
        if self.recording.misses_calls:
            self.listen_to_children()
        if is_vetoed:
            self._note_veto(newest)
        if newest.values.get("edited") and "spike" in newest.values:
            self._went_back = newest.step
        return is_bad

    def _evaluate_all_but(self, newest: int) -> bool:
        """Evaluates all pending steps except the ``newest`` last ones. Returns True if one is bad."""
        is_bad = False
        while len(self._pending) > newest:
            step, read = self._pending.popleft()
            is_bad |= self._evaluate_step(step, read())
        return is_bad

    def _evaluate_step(self, step: RecordedStep, numbers: Numbers) -> bool:
        """Evaluates a step, and examines it if that is due or it gives a reason. Returns True if it is bad."""
        if self._veto.was_vetoed_on_device(step, numbers.norm):
            self._note_veto(step)
        call_each(self._on_read, step, numbers)
        values, is_bad = step.values, _is_bad(step, numbers)
        if is_bad and step.inputs is not None:
            self._record_deferred(step)
        if not is_bad and self._options.finds_spikes and self._options.on_spike == "warn":
            self._find_spike(step, numbers)
        self.findings_log.note(step, numbers)
        is_urgent = self.step - step.step <= self._late and any(map(_URGENT, self._probes))
        has_spiked, has_changed = "spike" in values, "changed" in values
        if is_bad or has_changed or not values.keys() <= ORDINARY:
            self._calm_from = self.step + CALM_AFTER
        if is_bad and self._light.is_wanted:
            self._light.had_incident(step.step)
            self._went_back = step.step  # the next steps can only be replayed from the state after this one
        if has_changed:
            self.runner.begin_again()
        wanted = self._schedule.wants(
            step.step, numbers.loss, bad=is_bad, urgent=is_urgent, spiked=has_spiked, changed=has_changed
        )
        why = "incident" if is_bad else "checkup"
        if self._is_check_due and self._can_be_checked(step):
            self._check(step, why)
        elif wanted:
            self._examine(step.step, why)
        if is_bad:
            with self.budget.spending():
                self._incidents.keep_bundle(step.step, [found.code for found in self.findings()])
        return is_bad

    def _record_deferred(self, step: RecordedStep) -> None:
        """Records the program of a deferred step now, because it is needed outside of a replay."""
        with muted(), self.budget.spending(), suppress(NotReplayable):
            self.ring.steps_to(step.step)

    def _rest(self, step: int, *, is_examined: bool) -> None:
        """Decides how the step after ``step`` is observed: by all probes, by few (it is calm), or later (deferred)."""
        is_calm = self._may_be_calm(step) and not (is_examined or self.budget.is_lifted)
        if is_calm != self._is_calm:
            self._is_calm = is_calm
            for each in self._pausable:
                each.is_paused = is_calm
        can_be_deferred = self._template is not None and self._blind is None
        self.is_next_deferred = is_calm and can_be_deferred and 0 < self.budget.step_s < LONG_STEP_S

    def _may_be_calm(self, step: int) -> bool:
        """Returns True if the step after ``step`` need not be observed by all probes."""
        is_rare = step >= self._calm_from + LONG_CALM and self.budget.step_s < SHORT_STEP_S
        return step >= self._calm_from and (step + 1) % (RARE_FULL_EVERY if is_rare else FULL_EVERY) > 1

    def last_deferred(self) -> int:
        """Returns the last of the next steps that are deferred; 0 if the next step is not.

        After this step an examination, a snapshot or a step for all probes is due.
        """
        if not self.is_next_deferred:
            return 0
        step = self.step + 1
        while self._may_be_calm(step) and not (self._schedule.is_candidate(step) or self._snapshots.is_due(step)):
            step += 1
        return step

    def _find_spike(self, step: RecordedStep, numbers: Numbers) -> None:
        """Detects a spike of the norm before clipping. Each player of a GAN has its own norms."""
        norm = numbers.clips[-1] if numbers.clips else numbers.norm
        if isfinite(norm) and (spike := self._detectors[step.trained].detect(step.step, norm)) is not None:
            step.values["spike"] = [spike.grad_norm, spike.usual, spike.initial, "warn"]

    def _examine(self, step: int, why: str) -> None:
        allowed_s = self.budget.left_for_incident_s if why == "incident" else self.budget.left_s
        with self.budget.spending():
            overhead_s = self.findings_log.examine(
                step, why, limits=self._limits(), allowed_s=allowed_s, repeats=self._schedule.is_repeat_due
            )
        wanted_s, repeated_s = self.runner.wanted_s(), self.runner.repeated_s()
        self._schedule.plan_next(overhead_s, wanted_s=wanted_s, repeated_s=repeated_s)
        self._end_replays(self._objects.is_closed)

    def _can_be_checked(self, step: RecordedStep) -> bool:
        """Returns True if the step can be replayed, or if no later step is waited for."""
        is_last = step.step - self._first_step >= CHECKED_STEPS
        return step.not_replayable is None or self._blind is not None or is_last

    def _check(self, step: RecordedStep, why: str) -> None:
        """Examines the step without the limits of the budget, and prints the result before the next step."""
        self._is_check_due = False
        begin_s = time.perf_counter()
        with self.budget.lifted():
            self._examine(step.step, why)
        took_s = time.perf_counter() - begin_s
        examination = self.findings_log.examination()
        reason = step.not_replayable or self._blind
        if step.step in examination.replayed:
            self._say(f"check: step {step.step} was examined in full before the next one, in {took_s:.1f} s")
        else:
            because = f": {reason}" if reason else ""
            self._say(f"check: step {step.step} was examined without a replay{because}")
        for line in (*lines_of(self.findings()), *examination.lines()):
            self._say(line)

    def _note_veto(self, step: RecordedStep) -> None:
        if self._incidents.note_veto(step, self.ring, self._objects):
            self._went_back = step.step

    def _prepare_next(self) -> None:
        """Takes a snapshot before a step that will be examined, after a rollback, and every few steps."""
        step = self.step
        self._veto.begin()
        self.recording.careful = is_examined = self._schedule.is_next_due(step) or self._is_check_due
        may_be_light = self._light.may_be_light(step)
        is_due = is_examined or self._went_back == step
        is_due = is_due or (step % LIGHT_SNAPSHOTS == 0 if may_be_light else self._snapshots.is_due(step))
        self._light.prepare_next(is_light=may_be_light and not is_due)
        if is_due and not self.ring.refused_bytes and self._blind is None:
            begin_s = time.perf_counter()
            newest = self.ring.steps[-1].program if self.ring.steps else []
            if self._template is not None:
                newest = self._template.program
            self._objects.further = {id(each): each for _, each in others_of(newest)}
            with self.budget.spending():
                self._end_replays(self._why_not_kept(step + 1))
            step_s = self.budget.trained_s / max(1, step - self._first_step)
            self._snapshots.paid(time.perf_counter() - begin_s, step_s)
        self._changes.prepare_next(step - self._first_step)
        self._rest(step, is_examined=is_examined)

    def _why_not_kept(self, step: int) -> str | None:
        """Keeps the state before ``step``. Returns the reason if that is impossible; then no step is replayed."""
        try:
            self.ring.keep_state(self._objects, step)
        except Exception as error:  # a kind of tensor that torch cannot copy
            if self._options.is_engine and is_out_of_memory(error):
                self.free_held_memory()
                return None
            return f"a state of it cannot be kept: {type(error).__name__}: {str(error)[:200]}"
        return self._objects.is_closed

    def _end_replays(self, why: str | None) -> None:
        """Ends all replays of the run for the reason ``why``. Does nothing if it is None."""
        if why is not None and self._blind is None:
            self._blind = why
            self._say(f"watch: no step of this run is replayed: {why}")

    def free_held_memory(self) -> bool:
        """Frees memory that is held for replays, and halves its limit. Returns True if any memory was held."""
        self.findings_log.record_all()
        has_session, has_steps = self.runner.forget(), self.ring.clear()
        return has_session or has_steps

    def end(self, error: BaseException | None) -> None:
        """Examines the last step, and an unfinished one, then stops listening."""
        with without_users_modes():
            self._end(error)

    def _end(self, error: BaseException | None) -> None:
        self.recording.stop_modes()
        self._light.end()
        for each in self._pausable:
            each.is_paused = False
        call_each([(each, each.end) for each in self._probes], error)
        try:
            if error is None or isinstance(error, Exception):
                self._examine_end(error)
        except Exception as failure:  # the loop has ended, and its own exception must not be replaced
            self.recording.fail(failure)
        finally:
            self._open.close()

    def _examine_end(self, error: Exception | None) -> None:
        unfinished = self.recording.current
        are_others = any(kind == "other_step" for kind, _ in unfinished.events)
        is_unfinished = (bool(unfinished.program) or are_others) and not isinstance(error, OutOfMemoryError)
        if self._options.is_engine:
            is_unfinished = is_unfinished and error is not None
            if self.step == self._first_step and not is_unfinished:
                return  # there was no step
        else:
            is_unfinished = is_unfinished or error is not None or self.step == 0
        if is_unfinished:
            facts: Facts = {"unfinished": self.runner.unfinished(unfinished, self.recording.tape, error)}
            facts |= self.runner.abandoned(unfinished, self.recording.tape)
            self.findings_log.examined(unfinished.step, facts)
        self._evaluate_all_but(0)
        if self._is_check_due:
            self._say("check: the loop ended before a step that can be replayed")
        folder = self._options.bundles if self._options.keeps_last_steps else None
        with self.budget.spending():
            left_s = self.budget.left_at_end_s
            self.findings_log.examine(self.step, "end", limits=self._limits(), allowed_s=left_s, finished=True)
        keep_rest(self.runner, self.budget, self.step, folder, self.findings_log.remember)

    @property
    def limits(self) -> list[str]:
        """Lines about the optimizers that are not torch's, and what is not watched because of them."""
        return [each.limits for each in self._foreign]

    @property
    def is_forked(self) -> bool:
        """True if this process is a fork of the one in which the watch began."""
        return os.getpid() != self._pid

    def leave(self) -> None:
        """Stops listening without an examination."""
        self._open.close()

    @property
    def wall_s(self) -> float:
        """Seconds of wall time since the watch began."""
        return time.perf_counter() - self._begin_s

    @property
    def num_vetoed(self) -> int:
        """Number of skipped updates."""
        return self._veto.vetoed

    @property
    def failures(self) -> list[str]:
        """The listeners that were stopped, with their exceptions."""
        return failures_of(self._listeners)

    def _limits(self) -> Facts:
        return limits_of(self.ring, self._listeners)

    @property
    def held_bytes(self) -> int:
        """Bytes that the flight recorder holds."""
        return self.ring.num_bytes

    def findings(self) -> list[Found]:
        """Returns the findings so far, root causes first."""
        return self.findings_log.findings()


def _is_bad(step: RecordedStep, numbers: Numbers) -> bool:
    """Returns True if a step is not finite, or its update was skipped for another reason than the list of samples."""
    values = step.values
    return not numbers.are_finite or "nonfinite" in values or values.get("vetoed", "skip list") != "skip list"


class NonFiniteStep(TrainwrightError):
    """A step was not finite and ``on_nonfinite="stop"`` was configured."""
