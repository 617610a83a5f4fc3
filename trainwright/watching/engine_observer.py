"""The doctor beside the engine: keeps the inputs of each step, and examines a step by replaying it."""

from __future__ import annotations

import dataclasses
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path

from trainwright.doctor.measure.loss_calls import LossListener
from trainwright.engine.oom_report import is_out_of_memory
from trainwright.engine.step import StepResult
from trainwright.engine.witness import SILENT, StepWitness
from trainwright.errors import OutOfMemoryError, TrainwrightError, text_of
from trainwright.observe.journal import Journal
from trainwright.recorder.engine_changes import EngineChanges
from trainwright.recorder.inputs import InputRecorder, InputRing
from trainwright.recorder.numbers import Numbers, late, lateness
from trainwright.recorder.probes import LoopObjects, Probe, WatchSite, begin_all, make_probes
from trainwright.recorder.program import RecordedStep
from trainwright.recorder.ring import KEEP, enough_bytes
from trainwright.replay.deadline import TimeIsUp
from trainwright.replay.engine_bench import EngineBench, MakeStep, complete
from trainwright.replay.memory import free_what_it_holds
from trainwright.report.findings import lines_of
from trainwright.runlog.folder import RunFolder
from trainwright.runlog.json_values import Facts
from trainwright.runlog.records import Found, Record
from trainwright.runlog.writer import LogWriter
from trainwright.state.train_state import TrainState
from trainwright.watching.budget import ExaminationBudget, Examine
from trainwright.watching.experiments import ExperimentRunner
from trainwright.watching.families import probes_of_families
from trainwright.watching.findings import FindingsLog, failures_of, limits_of
from trainwright.watching.incidents import Incidents
from trainwright.watching.schedule import AT_ONCE, SHORT_S, ExaminationSchedule, SnapshotSchedule
from trainwright.watching.unexamined import keep_rest
from trainwright.watching.unjudged import PlainNumbers, Unjudged, are_calm, warned_of_spikes

NEEDS_A_LIVE_LOOP = {"loaded"}
"""Probes of what happens outside of the steps: the engine loads weights itself."""


class EngineSession:
    """Records the inputs of each step of the engine, examines some steps, and asks the doctor.

    Pass ``witness`` to the step function that trains. ``make_step`` makes the same step function with another witness;
    it replays a step, with hooks and tape on. ``write`` is called with every record, ``say`` with a line to print.
    ``examine``: what the budget allows, or everything. ``keeps_last_steps``: at the end they are written to ``bundles``
    where something found no time. ``warns_of_spikes`` is true where the step function has no SpikeGuard. ``datasets``
    are those of training and validation, if there is one, ``quarantine`` the training samples that must not be read;
    ``functions`` are those of the user that a step calls, and objects with a state of the step.
    """

    def __init__(
        self,
        state: TrainState,
        make_step: MakeStep,
        *,
        write: Callable[[Record], None],
        say: Callable[[str], None] = lambda line: None,
        examine: Examine = "budget",
        accumulation: int | None = None,
        bundles: Path | None = None,
        keeps_last_steps: bool = True,
        warns_of_spikes: bool = True,
        datasets: tuple[object, object] | None = None,
        quarantine: frozenset[int] = frozenset(),
        functions: Sequence[object] = (),
    ) -> None:
        self._state, self.step, self._say = state, state.step, say
        self._bench = EngineBench(state, make_step)
        self._bench.objects.further = {id(each): each for each in functions}
        objects = self._bench.objects
        self.device = objects.parameters[0].device
        self.budget = ExaminationBudget(self.device, examine)
        self.witness: StepWitness
        self._changes = EngineChanges([m for root in objects.roots for m in root.modules()], objects.parameters)
        self.witness = self._inputs = InputRecorder(self.let_go, self._changes)
        self.ring = InputRing(keep=KEEP, budget_bytes=enough_bytes(objects.roots), record=self._bench.record)
        self.runner = ExperimentRunner(objects, self.ring, self.budget, say=say)
        self._bench.deadline = self.runner.replayer.deadline
        loop = LoopObjects(accumulation=accumulation)
        made = [each for each in make_probes(objects, loop) if each.name not in NEEDS_A_LIVE_LOOP]
        self._probes: list[Probe] = [*made, *probes_of_families(objects, loop, live=False)]
        self._probes.append(LossListener(self._bench.tape, objects))
        self._bench.probes = self._probes
        site = WatchSite(bundles.parent if bundles else None, write, lambda line: None, self.budget.is_lifted)
        begin_all(self._probes, site)
        self.log = FindingsLog(self.runner, self._probes, write, complete=self.ring.name_samples)
        self._incidents = Incidents(bundles, self.runner, write)
        self._schedule, self._snapshots = ExaminationSchedule(self.step, self.budget), SnapshotSchedule(KEEP)
        self._recorded_live: dict[int, RecordedStep] = {}  # until they are examined
        self._late = lateness(self.device)
        self._unjudged: deque[Unjudged] = deque()
        self._warns, self._went_back = warns_of_spikes, -1
        self._last_steps = bundles if keeps_last_steps else None
        self._newest_replayed = 0  # the newest step whose program the probes have received
        self._blind = objects.is_closed  # why no step can be run again
        self._first_step = self.step
        self._busy_at = 0  # until this step a calm one has nothing to do but to wait to be judged
        self._prepare_next(self.step)

    def let_go(self) -> bool:
        """Frees what was kept to run steps again, where the step in progress has run out of memory."""
        has_session, has_unjudged = self.runner.forget(), bool(self._unjudged)
        self._recorded_live.clear()
        while self._unjudged:
            self._take([self._unjudged[0].with_numbers()], tells=True)
        self.log.record_all()  # now, while their samples are known
        return self.ring.let_go() or has_session or has_unjudged

    def note(self, result: StepResult) -> None:
        """Records a step that is over."""
        inputs = self._inputs.newest
        assert inputs is not None and inputs.step == result.step
        self.step = result.step
        self.budget.train()
        if self._inputs.live is not SILENT:
            self._take_live(result.step)
        loss, norm = (math.nan, math.nan) if self._late else (result.loss.item(), result.grad_norm.item())
        numbers = PlainNumbers(result.step, loss, norm, result.lr, result.step_s, result.wait_s, time.time(), self.ring)
        is_plain = result.spike is None and result.batch is inputs.batch and math.isfinite(loss + norm)
        if is_plain and result.step < self._busy_at and result.step_s <= SHORT_S:  # it waits to be judged with others
            self._unjudged.append(Unjudged(numbers, inputs))
            return
        if result.batch is not inputs.batch or result.spike is not None:  # memory ran out, or its update was left out
            reason = "" if result.spike is None else result.spike.reason
            inputs = dataclasses.replace(inputs, batch=result.batch, left_out=reason)
        if result.spike is not None and result.spike.action == "rollback":
            self._went_back = result.step  # the state after it is another
        is_new = _is_applied(result) and self._changes.is_new(result.step - self._first_step, result.lr)
        read = late([result.loss, result.grad_norm]) if self._late else None
        self._unjudged.append(Unjudged(numbers, inputs, result.spike, is_new, read))
        may_wait = not self._late and self._schedule.may_wait(result.step, result.step_s) and numbers.are_finite
        if is_new or result.step % AT_ONCE == 0 or not may_wait:
            self._judge_all_but(self._late)
        self._prepare_next(result.step)

    def _judge_all_but(self, newest: int) -> None:
        """Of nearly every step nothing but two numbers is looked at, and no record of it is made."""
        judged = [each.with_numbers() for each in islice(self._unjudged, max(0, len(self._unjudged) - newest))]
        judged = warned_of_spikes(judged, self._state.spikes) if self._warns else judged
        plain = judged if self._blind is None and are_calm(judged, self._schedule) else []
        for each in judged[len(plain) :]:
            number, bad, spiked = each.numbers.number, not each.numbers.are_finite, each.spike is not None
            tells = bad or spiked or each.is_new or self._blind is not None
            wanted = self._schedule.wants(number, each.numbers.loss, bad=bad, spiked=spiked, changed=each.is_new)
            plain.append(each)
            if tells or wanted:
                self._take(plain, tells=tells)
                if wanted:
                    self._examine(each.held_by(self.ring, self._blind), each.numbers.as_read)
                if bad:
                    with self.budget.spending():
                        self._incidents.keep_bundle(number, [found.code for found in self.log.findings()])
                plain = []
        self._take(plain)

    def _take(self, steps: list[Unjudged], *, tells: bool = False) -> None:
        """Puts the oldest steps into ring and log. ``tells``: the last of them has something to tell."""
        for _ in steps:
            self._unjudged.popleft()
        self.ring.add_inputs([each.inputs for each in steps], [each.recorded for each in steps])
        odd = steps.pop() if tells else None
        self.log.note(*[each.numbers for each in steps])
        if odd is not None:
            self.log.note((odd.held_by(self.ring, self._blind), odd.numbers.as_read))
            if odd.is_new:
                self.runner.begin_again()

    def _examine(self, step: RecordedStep, numbers: Numbers) -> None:
        bad, begin_s = not numbers.are_finite, self.budget.clock()
        allowed_s = self.budget.left_for_incident_s if bad else self.budget.left_s
        with self.budget.spending():
            made_s = self._make_program(step, numbers, allowed_s, is_incident=bad)
            overhead_s = self.log.look(
                step.step,
                "incident" if bad else "checkup",
                limits=self._limits(),
                allowed_s=allowed_s - (self.budget.clock() - begin_s),
                repeats=self._schedule.is_repeat_due,
            )
        self._schedule.plan_next(made_s + overhead_s, self.runner)
        self._end_replays()

    def _take_live(self, step: int) -> None:
        """Keep the program of a step that was recorded while it trained, until it is examined."""
        self._inputs.live = SILENT
        try:
            self._recorded_live[step] = self._bench.take_live()
        except Exception as error:  # it can be replayed instead
            free_what_it_holds(error, self.device)

    def _make_program(self, step: RecordedStep, numbers: Numbers, allowed_s: float, *, is_incident: bool) -> float:
        """Write the program of ``step``, or of one near it, where it was not recorded and there is time to replay it.

        The probes receive its events. Returns the seconds that it took.
        """
        begin_s = self.budget.clock()
        self.runner.allow(allowed_s)
        if (live := self._recorded_live.pop(step.step, None)) is not None:
            complete(step, live)
        else:
            self._replay_to(step if is_incident else self._nearest(step), allowed_s)
        self._recorded_live.clear()  # older ones were not examined
        for each in self.ring.steps:
            if self._newest_replayed < each.step <= step.step and each.program:
                self._newest_replayed = each.step
                for probe in self._probes:
                    _tell(probe, lambda probe=probe, each=each: probe.on_closed(each))  # type: ignore[misc]
        for probe in self._probes:
            _tell(probe, lambda probe=probe: probe.on_read(step, numbers))  # type: ignore[misc]
        return self.budget.clock() - begin_s

    def _nearest(self, step: RecordedStep) -> RecordedStep:
        at = self.runner.nearest(step.step)
        return self.ring.made(at) if self.ring.holds(at) else step

    def _replay_to(self, step: RecordedStep, allowed_s: float) -> None:
        snapshot = next((each for each in reversed(self.ring.snapshots) if each.step <= step.step), None)
        steps = 0 if snapshot is None else step.step - snapshot.step + 1
        if steps * self.budget.step_s > allowed_s:
            return
        try:
            with self._bench.deadline.within(allowed_s):
                self.ring.steps_to(step.step)
        except TimeIsUp:
            return
        except Exception as error:  # a mistake of ours, or of a stranger's model: the run goes on
            step.blind = text_of(error)[:200]
            free_what_it_holds(error, self.device)

    def _prepare_next(self, step: int) -> None:
        """Takes a snapshot before a step that will be looked at, after a rollback, and every few steps."""
        is_examined = self._schedule.is_next_due(step)
        is_due = is_examined or self._snapshots.is_due(step) or self._went_back == step
        if is_due and not self.ring.refused_bytes and self._blind is None:
            begin_s = self.budget.clock()
            with self.budget.spending():
                self._keep_state(step + 1)
            step_s = self.budget.trained_s / max(1, step - self._first_step)
            self._snapshots.paid(step, self.budget.clock() - begin_s, step_s)
        if is_examined and self._blind is None and self._bench.can_record_live:
            self._inputs.live = self._bench.live
        taken = step - self._first_step
        is_compared = self._changes.prepare_next(taken)
        compared_at = self._first_step + self._changes.next_at(taken)
        busy_at = min(self._schedule.next_at(step), self._snapshots.next_at(step), compared_at)
        self._busy_at = step + 1 if self._late or is_examined or is_compared else busy_at

    def _keep_state(self, step: int) -> None:
        try:
            self.ring.keep_state(self._bench.objects, step)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self.let_go()
        self._end_replays()

    def _end_replays(self) -> None:
        """From here on no step is replayed, if something cannot be put back."""
        if self._blind is None and self._bench.objects.is_closed is not None:
            self._blind = self._bench.objects.is_closed
            self._say(f"doctor: no step of this run is replayed: {self._blind}")

    def end(self, error: BaseException | None) -> None:
        """Looks at the last step; at the one that raised ``error`` too."""
        self._bench.stop_live()
        self._inputs.live = SILENT
        if error is not None and not isinstance(error, Exception):
            return
        self._judge_all_but(0)
        examined = error is not None and not isinstance(error, OutOfMemoryError) and self._examine_unfinished(error)
        if self.step == self._first_step and not examined:
            return  # no step: there is nothing to say
        allowed_s, begin_s = self.budget.left_at_end_s, self.budget.clock()
        with self.budget.spending():
            if self.ring.steps:
                newest = self.ring.steps[-1]
                assert newest.loss is not None and newest.grad_norm is not None  # the engine measures both
                loss, norm = float(newest.loss), float(newest.grad_norm)
                self._make_program(newest, Numbers.of((loss,), loss, norm), allowed_s, is_incident=False)
            allowed_s -= self.budget.clock() - begin_s
            self.log.look(self.step, "end", limits=self._limits(), allowed_s=allowed_s, finished=True)
            keep_rest(self.runner, self.budget, self.step, self._last_steps, self.log.remember)

    def _examine_unfinished(self, error: Exception) -> bool:
        """Finds the operation that raised, by running the step again with hooks and tape on. False: it cannot."""
        inputs = self._inputs.newest
        if inputs is None or inputs.step != self.step + 1:  # it was no step that raised
            return False
        found = self.ring.steps_to_unfinished(inputs)
        if found is None:
            return False
        try:
            unfinished, again = self._bench.record_unfinished(*found)
        except Exception:  # what came before it cannot be run again: the last look is still worth it
            return False
        facts: Facts = {"unfinished": self.runner.unfinished(unfinished, self._bench.tape, again or error)}
        self._bench.tape.forget()
        self.log.examined(inputs.step, facts)
        return True

    @property
    def failures(self) -> list[str]:
        """Which listeners raised and were stopped, and what they raised."""
        return failures_of({probe.name: probe for probe in self._probes})

    def _limits(self) -> Facts:
        return limits_of(self.ring, {probe.name: probe for probe in self._probes})


class EngineObserver:
    """An Observer that keeps an EngineSession, logs into the folder of the run, and prints the findings at the end."""

    def __init__(
        self,
        state: TrainState,
        make_step: MakeStep,
        *,
        folder: RunFolder,
        say: Callable[[str], None],
        examine: Examine = "budget",
        accumulation: int | None = None,
        keeps_last_steps: bool = True,
        warns_of_spikes: bool = True,
        datasets: tuple[object, object] | None = None,
        quarantine: frozenset[int] = frozenset(),
        functions: Sequence[object] = (),
    ) -> None:
        self._folder, self._say = folder.path, say
        self._journal = Journal(LogWriter(folder.log), say)
        self._failed: Exception | None = None
        self._is_closed = False
        self.seconds = 0.0
        """What the doctor has taken so far, by the clock."""
        self.session = EngineSession(
            state,
            make_step,
            write=self._journal.write,
            say=say,
            examine=examine,
            accumulation=accumulation,
            bundles=folder.bundles,
            keeps_last_steps=keeps_last_steps,
            warns_of_spikes=warns_of_spikes,
            datasets=datasets,
            quarantine=quarantine,
            functions=functions,
        )

    @property
    def witness(self) -> StepWitness:
        return self.session.witness

    def observe(self, result: StepResult, state: TrainState) -> None:
        """Records the step. Where that raises, the run goes on and is not watched any more.

        Where memory runs out, what was kept is dropped, and the next step is watched.
        """
        if self._failed is None:
            begin_s = time.perf_counter()
            try:
                self.session.note(result)
            except Exception as error:
                self._give_up(error)
            self.seconds += time.perf_counter() - begin_s

    def findings(self) -> list[Found]:
        """The findings so far, the first cause first."""
        return self.session.log.findings()

    def close(self) -> None:
        """Looks at the last step and prints the findings; the second time it does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        error = sys.exc_info()[1]
        if self._failed is None:
            try:
                self.session.end(error)
            except Exception as failure:
                self._give_up(failure)
        if self._failed is not None:
            kind = type(self._failed).__name__
            self._say(f"the doctor stopped watching at step {self.session.step}: {kind}: {str(self._failed)[:200]}")
        findings, examination = self.findings(), self.session.log.examination()
        if findings or examination.steps:
            for line in (*lines_of(findings, self._folder), *examination.lines(self._folder)):
                self._say(line)
        self._journal.close()

    def _give_up(self, error: Exception) -> None:
        """Drops what was kept, and watches no more, unless it was memory that ran out. Raises what was raised so."""
        if isinstance(error, TrainwrightError):
            raise error
        self.session.let_go()
        if not free_what_it_holds(error, self.session.device):
            self._failed = error


def _is_applied(result: StepResult) -> bool:
    """Whether its update was; of a GPU it is not asked: there an update that is left out writes as often."""
    return result.spike is None and not (result.skipped.device.type == "cpu" and bool(result.skipped))


def _tell(probe: Probe, action: Callable[[], None]) -> None:
    if probe.failed is None:
        try:
            action()
        except Exception as error:
            probe.fail(error)
