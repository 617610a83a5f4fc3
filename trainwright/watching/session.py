"""Watches a loop that somebody else owns: records its last steps, and looks closely at some of them."""

from __future__ import annotations

import math
import operator
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer

from trainwright.doctor.check import Check
from trainwright.doctor.measure.loss_calls import LossListener
from trainwright.engine.spikes import OnSpike
from trainwright.errors import TrainwrightError
from trainwright.recorder.calls import parts_of
from trainwright.recorder.closing import StepClosing
from trainwright.recorder.foreign import ForeignOptimizer
from trainwright.recorder.gradients import parameters_of
from trainwright.recorder.hooks import listening, listening_to_calls
from trainwright.recorder.light import LightSteps
from trainwright.recorder.noting import NotingRecorder
from trainwright.recorder.numbers import Numbers, lateness
from trainwright.recorder.optimizers import watching
from trainwright.recorder.pausable import without_users_modes
from trainwright.recorder.probes import LoopObjects, Probe, WatchSite, begin_all, end_all, make_probes
from trainwright.recorder.program import RecordedStep, others_of
from trainwright.recorder.program_changes import ProgramChanges
from trainwright.recorder.ranks import what_is_shared
from trainwright.recorder.resting import Resting
from trainwright.recorder.ring import KEEP, LEAST_BYTES, Ring
from trainwright.recorder.veto import OnNonfinite, Veto
from trainwright.report.findings import lines_of
from trainwright.runlog.json_values import Facts
from trainwright.runlog.records import Found, Record
from trainwright.state.snapshot import LiveObjects
from trainwright.watching.budget import ExaminationBudget, Examine
from trainwright.watching.experiments import ExperimentRunner, OwnCheck
from trainwright.watching.families import probes_of_families
from trainwright.watching.findings import ORDINARY, FindingsLog, failures_of, limits_of
from trainwright.watching.incidents import Incidents
from trainwright.watching.schedule import AT_ONCE, ExaminationSchedule, SnapshotSchedule
from trainwright.watching.unexamined import keep_rest
from trainwright.watching.unread import ReadStep, UnreadSteps, is_bad

MANY = 64
"""So many of the steps that wait before the recorder counts them would fill its budget: 16 are little beyond it."""
LIGHT_SNAPSHOTS = 32
"""Steps between two snapshots where most steps are not recorded: the step after each of them is."""
_URGENT = operator.attrgetter("urgent")


def _are_urgent(probes: Sequence[Probe]) -> bool:
    return any(map(_URGENT, probes))


def _why_not_kept(ring: Ring, objects: LiveObjects, step: int) -> str | None:
    """Keeps the state before ``step``; says why it cannot: then the loop is watched without replays."""
    try:
        ring.keep_state(objects, step)
    except Exception as error:  # a kind of tensor that torch cannot copy so
        return f"a state of it cannot be kept: {type(error).__name__}: {str(error)[:200]}"
    return objects.is_closed


@dataclass(frozen=True)
class WatchOptions:
    """What a watch may do to a loop, what its recorder holds, and where bundles of incidents go (None: nowhere).

    ``skip`` are the samples of steps whose update is left out. ``checks`` and ``own_checks`` are those that are
    made (None: all but the packs); ``replays``: whether any step is replayed for them. ``examine``: what the budget
    allows, or everything.
    """

    on_nonfinite: OnNonfinite = "skip"
    on_spike: OnSpike = "warn"
    keep: int = KEEP
    budget_bytes: int = LEAST_BYTES
    bundles: Path | None = None
    skip: frozenset[frozenset[int]] = frozenset()
    checks: tuple[Check, ...] | None = None
    own_checks: tuple[OwnCheck, ...] = ()
    replays: bool = True
    examine: Examine = "budget"


class WatchSession:
    """Records the last steps of a loop, looks closely at those that are due, and asks the doctor.

    ``write`` takes every record that is to be kept, ``say`` a line to print.
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
    ) -> None:
        self._options, self._roots, self._begin_s, self.step = options, list(roots), 0.0, 0
        folder = options.bundles.parent if options.bundles else None
        self._open = ExitStack()
        parameters = parameters_of(roots, optimizers)
        self.budget = ExaminationBudget(parameters[0].device if parameters else torch.device("cpu"), options.examine)
        self._veto = veto = Veto(roots, parameters, options.on_nonfinite, options.on_spike, options.skip)
        self._site = WatchSite(folder, write, say, self.budget.is_lifted)
        self.recording = NotingRecorder(
            roots, optimizers, self._closed, before_update=veto.before_update, after_update=veto.after_update
        )
        self.recording.budget_bytes = options.budget_bytes
        self.ring = Ring(keep=options.keep, budget_bytes=options.budget_bytes)
        self._objects = LiveObjects(roots, optimizers, parameters)
        self.runner = runner = ExperimentRunner(
            self._objects, self.ring, self.budget, options.own_checks, replays=options.replays, say=say
        )
        self._changes = ProgramChanges(parameters)
        of_families = probes_of_families(self._objects, objects, live=True)
        self._probes = [*make_probes(self._objects, objects), *of_families, self._changes]
        self._probes.append(LossListener(self.recording.tape, self._objects))
        self._listeners = {"recording": self.recording, **{probe.name: probe for probe in self._probes}}
        self.findings_log = FindingsLog(runner, self._probes, write, checks=options.checks)
        self._incidents = Incidents(options.bundles, runner, write)
        self._schedule, self._snapshots = ExaminationSchedule(0, self.budget), SnapshotSchedule(options.keep)
        self._went_back, self._pid, self._listens_to_children = -1, os.getpid(), False
        self._unread = UnreadSteps(self._probes, veto, self._note_veto, finds_spikes=options.on_spike == "warn")
        self._late = lateness(self.recording.device)
        resting = [self.recording, *(each for each in self._probes if each.rests or each.closes_late)]
        self._resting = Resting(resting, lambda: self.recording.current.events)
        self._closing = StepClosing(self._probes, self._resting.wake)
        self._group = [self.recording, self._closing, objects.sites, *self._probes]
        self._foreign = [each for each in optimizers if isinstance(each, ForeignOptimizer)]
        reasons = [what_is_shared(roots, parameters), self._objects.is_closed, *(each.reason for each in self._foreign)]
        self._say, self._blind = say, next((each for each in reasons if each), None)  # why no step can be replayed

    def begin(self) -> None:
        """Starts to listen to the loop."""
        self._begin_s, self._pid = time.perf_counter(), os.getpid()
        self.budget.begin()
        with without_users_modes():
            begin_all(self._probes, self._site)
            self._open.enter_context(watching(self._objects.optimizers))
            hooks = self._open.enter_context(listening(self._group, self._roots))
            self._light = LightSteps(self.recording, [hooks], is_off=self.budget.is_lifted)
            for each in self._foreign:
                self._open.enter_context(each.listening())
            self._prepare_next(self.step)

    def listen_to_children(self) -> None:
        """Listens to the direct children of the roots too: a loop may call these and never the root."""
        if not self._listens_to_children:
            self._listens_to_children = True
            parts = [part for root in self._roots for part in parts_of(root)]
            self._light.add(self._open.enter_context(listening_to_calls(self._group, parts)))

    def end(self, error: BaseException | None) -> None:
        """Looks at the last step, and at one that was not finished; then stops listening."""
        with without_users_modes():
            self._end(error)

    def _end(self, error: BaseException | None) -> None:
        self.recording.stop_modes()
        self._light.end()
        self._closing.tell()
        self.ring.add_those()
        end_all(self._probes, error)
        try:
            if error is None or isinstance(error, Exception):
                unfinished = self.recording.current
                if error is not None or unfinished.program or self.step == 0:
                    facts: Facts = {"unfinished": self.runner.unfinished(unfinished, self.recording.tape, error)}
                    facts |= self.runner.abandoned(unfinished, self.recording.tape)
                    self.findings_log.examined(unfinished.step, facts)
                self._judge_oldest(len(self._unread))
                with self.budget.spending():
                    left_s = self.budget.left_at_end_s
                    self.findings_log.look(self.step, "end", limits=self._limits(), allowed_s=left_s, finished=True)
                    keep_rest(self.runner, self.budget, self.step, self._options.bundles, self.findings_log.remember)
        except Exception as failure:  # the loop is over, well or by an exception of its own: that is what comes out
            self.recording.fail(failure)
        finally:
            self._open.close()

    @property
    def limits(self) -> list[str]:
        """What of this loop is not watched."""
        return [each.limits for each in self._foreign]

    @property
    def is_forked(self) -> bool:
        """Whether the watch began in another process, of which this one is a fork."""
        return os.getpid() != self._pid

    def leave(self) -> None:
        """Stops listening, and looks at nothing."""
        self._open.close()

    @property
    def seconds(self) -> float:
        """Wall time since the watch began."""
        return time.perf_counter() - self._begin_s

    @property
    def num_vetoed(self) -> int:
        """Updates that were left out."""
        return self._veto.vetoed

    def _closed(self, step: RecordedStep) -> None:
        self.step = step.step
        self.budget.train()
        self._light.closed(step, self.budget.step_s)
        step.blind = self._blind or step.blind
        self._closing.close(step)
        self.ring.add_later(step)
        self._unread.add(step)
        if self._resting.is_calm and step.step % AT_ONCE and self._may_wait(step, self._closing.at_once):
            self._veto.begin()  # all else that is due between two steps is due after the last of so many
            if step.step % AT_ONCE == 1:  # it was heard whole
                self._resting.prepare_next(step.step)
                self._changes.prepare_next(step.step)
                self._light.prepare_next(step.step, is_needed=False)
            return
        self._closing.tell()
        self.ring.add_those()
        at_once, bad = "vetoed" in step.values, False  # at once: the host knows, for it has waited
        if len(self._unread) >= AT_ONCE or not self._may_wait(step, self._probes):
            bad = self._judge_oldest(len(self._unread) - (0 if at_once else self._late))
        if self.recording.misses_calls:
            self.listen_to_children()
        if at_once:
            self._note_veto(step)
        self._prepare_next(step.step)
        if bad and self._options.on_nonfinite == "stop":
            raise NonFiniteStep(f"step {step.step} is not finite", remedy="\n".join(lines_of(self.findings())))

    def _may_wait(self, step: RecordedStep, hearing: Sequence[Probe]) -> bool:
        in_time = not self._late and self._schedule.may_wait(step.step, step.values["step_s"])
        is_small = step.num_bytes * MANY <= self._options.budget_bytes
        is_plain = in_time and is_small and not _are_urgent(hearing) and step.values.keys() <= ORDINARY
        return is_plain and self._unread.is_newest_finite()

    def _judge_oldest(self, count: int) -> bool:
        """Judges so many of the steps that wait for it. Returns whether one is bad."""
        read = self._unread.read(count)
        if len(read) > 1 and self._are_passed_over(read):
            self.findings_log.note(*read)
            return False
        return max([self._judge(*each) for each in read], default=False)

    def _are_passed_over(self, read: Sequence[ReadStep]) -> bool:
        """Whether none of them has something to tell or is looked at, as it is nearly always: then they are judged."""
        if _are_urgent(self._probes) or not all(step.values.keys() <= ORDINARY for step, _ in read):
            return False
        losses = [numbers.loss for _, numbers in read]
        return math.isfinite(sum(losses)) and self._schedule.pass_over(read[0][0].step, losses)

    def _judge(self, step: RecordedStep, numbers: Numbers) -> bool:
        """Returns whether the step is bad; looks at it closely where that is due or there is reason to."""
        values, bad = step.values, is_bad(step, numbers)
        self.findings_log.note((step, numbers))
        urgent = self.step - step.step <= self._late and _are_urgent(self._probes)  # they heard the newest step
        odd, changed = "spike" in values, "changed" in values
        if bad or urgent or odd or changed:
            self._resting.disturb(step.step)
        if bad and self._light.is_wanted:
            self._light.had_incident(step.step)
            self._went_back = step.step  # the next steps can only be replayed from the state after this one
        if changed:
            self.runner.begin_again()
        if self._schedule.wants(step.step, numbers.loss, bad=bad, urgent=urgent, spiked=odd, changed=changed):
            self._examine(step.step, "incident" if bad else "checkup")
            self._end_replays(self._objects.is_closed)
        if bad:
            with self.budget.spending():
                self._incidents.keep_bundle(step.step, [found.code for found in self.findings()])
        return bad

    def _examine(self, step: int, why: str) -> None:
        allowed_s = self.budget.left_for_incident_s if why == "incident" else self.budget.left_s
        with self.budget.spending():
            overhead_s = self.findings_log.look(
                step, why, limits=self._limits(), allowed_s=allowed_s, repeats=self._schedule.is_repeat_due
            )
        self._schedule.plan_next(overhead_s, self.runner)

    def _note_veto(self, step: RecordedStep) -> None:
        if self._incidents.note_veto(step, self.ring, self._objects):
            self._went_back = step.step

    def _prepare_next(self, step: int) -> None:
        """Takes a snapshot before a step that will be looked at, after a rollback, and every few steps."""
        self._veto.begin()
        self.recording.careful = is_examined = self._schedule.is_next_due(step)
        self._resting.prepare_next(step)
        is_rare = self._light.may_be_light(step)
        is_snapshot_due = step % LIGHT_SNAPSHOTS == 0 if is_rare else self._snapshots.is_due(step)
        is_due = is_examined or is_snapshot_due or self._went_back == step
        self._light.prepare_next(step, is_needed=is_due)
        if self._light.is_light:
            self._resting.rest()
        if is_due and not self.ring.refused_bytes and self._blind is None:
            begin_s = time.perf_counter()
            newest = self.ring.steps[-1].program if self.ring.steps else []
            self._objects.further = {id(each): each for _, each in others_of(newest)}
            with self.budget.spending():
                self._end_replays(_why_not_kept(self.ring, self._objects, step + 1))
            self._snapshots.paid(step, time.perf_counter() - begin_s, self.budget.trained_s / max(1, step))
        self._changes.prepare_next(step)

    def _end_replays(self, why: str | None) -> None:
        """From here on no step is replayed. ``why`` is None where nothing speaks against it."""
        if why is not None and self._blind is None:
            self._blind = why
            self._say(f"watch: no step of this run is replayed: {why}")

    @property
    def failures(self) -> list[str]:
        """Which listeners raised and were stopped, and what they raised."""
        return failures_of(self._listeners)

    def _limits(self) -> Facts:
        return limits_of(self.ring, self._listeners)

    @property
    def held_bytes(self) -> int:
        """What the flight recorder holds of its byte budget."""
        self.ring.add_those()
        return self.ring.num_bytes

    def findings(self) -> list[Found]:
        """The findings so far, the first cause first."""
        return self.findings_log.findings()


class NonFiniteStep(TrainwrightError):
    """A step was not finite and ``on_nonfinite="stop"`` was asked for."""
