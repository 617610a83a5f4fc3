"""The session that watches a run of the engine, as one of its Observers."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn

from trainwright.checkpoint.chained_optimizer import parts_of
from trainwright.checkpoint.cursor import StepBatch
from trainwright.checkpoint.snapshot import Snapshot
from trainwright.checkpoint.train_state import TrainState
from trainwright.engine.guard import APPLIED
from trainwright.engine.step import StepFn, StepResult
from trainwright.engine.user_log import collecting
from trainwright.errors import OutOfMemoryError, TrainwrightError
from trainwright.monitoring.journal import Journal
from trainwright.recorder.callers import calling_frames
from trainwright.recorder.deferred import DeferredRecorder, DeferredStep, StepInputs, repeat
from trainwright.recorder.engine_source import EngineSource, called_roots
from trainwright.recorder.listener import inside
from trainwright.recorder.probes import LoopObjects
from trainwright.recorder.program import RecordedStep
from trainwright.recorder.ring import enough_bytes
from trainwright.replay.memory import free_what_it_holds
from trainwright.report.findings import lines_of
from trainwright.runs.folder import RunFolder
from trainwright.runs.records import Record
from trainwright.runs.writer import LogWriter
from trainwright.watching.budget import Examine
from trainwright.watching.caller_source import modules_of
from trainwright.watching.session import WatchOptions, WatchSession


class EngineSession(WatchSession):
    """An Observer that watches the engine. Pass ``witness`` to the step function, and train with ``around(step_fn)``.

    ``write`` is called with every record; None: they are logged into ``folder``. ``accumulation`` is the declared
    number of micro-batches. ``finds_spikes`` is True if the step function has no SpikeGuard. ``dataset`` is the
    training dataset, if known.
    """

    def __init__(
        self,
        state: TrainState,
        *,
        write: Callable[[Record], None] | None = None,
        say: Callable[[str], None] = lambda line: None,
        examine: Examine = "budget",
        accumulation: int | None = None,
        folder: RunFolder | None = None,
        keeps_last_steps: bool = True,
        finds_spikes: bool = True,
        dataset: object = None,
    ) -> None:
        roots, bundles = called_roots(state), folder.bundles if folder else None
        self._journal = Journal(LogWriter(folder.log), say) if write is None and folder is not None else None
        super().__init__(
            roots,
            parts_of(state.optimizer),
            LoopObjects(accumulation=accumulation, frames=calling_frames, modules=_modules_of_caller),
            WatchOptions(
                on_nonfinite="observe",
                budget_bytes=enough_bytes(roots),
                bundles=bundles,
                examine=examine,
                keeps_last_steps=keeps_last_steps,
                is_engine=True,
                finds_spikes=finds_spikes,
            ),
            write=write or (self._journal.write if self._journal is not None else lambda record: None),
            say=say,
            first_step=state.step,
        )
        self._folder = folder.path if folder else None
        self.seconds = 0.0
        """Total seconds in ``observe``, between steps."""
        self._is_closed = False
        self._waiting: list[DeferredStep] = []  # not reported yet
        self._report_at = 0  # the step at whose end the deferred steps are reported
        self.witness = _Witness(self, dataset)
        self._deferred: DeferredRecorder | None = None
        self.ring.record = self._record
        self._has_begun = False
        self._failed: Exception | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Context around the run in which the session listens. Without it, listening starts with the first step."""
        self.begin()
        try:
            yield
        finally:
            self.leave()

    def around(self, advance: StepFn) -> StepFn:
        """Returns the step function that trains while its steps are recorded."""

        def recorded(state: TrainState, batch: StepBatch) -> StepResult:
            if not self._has_begun:
                self.begin()
            witness = self.witness
            is_deferred = self.is_next_deferred and witness.passes is not None and len(batch.micro) == 1
            witness.template = self._template if is_deferred else None
            if is_deferred:
                self._call_hooks.pause()
            try:
                result = advance(state, batch)
            except BaseException as error:  # also Ctrl-C: else later runs of this thread would have no events
                if is_deferred:
                    self._call_hooks.resume()
                inputs = witness.take_inputs()
                self.catch_up()
                is_repeated = isinstance(error, Exception) and not isinstance(error, OutOfMemoryError)
                if inputs is not None and is_repeated:
                    self._record_failed(inputs)
                raise
            if is_deferred:
                self._call_hooks.resume()
            inputs = witness.take_inputs()
            if self._failed is not None or self.recording.failed is not None:
                return result
            if inputs is None:
                self._guarded(lambda: witness.end_step(result))
            else:
                groups = [[{**g, "params": None} for g in each.param_groups] for each in self._objects.optimizers]
                if not self._waiting:
                    inside.before_next_event(self.catch_up)
                self._waiting.append(DeferredStep(inputs, result, groups))
            return result

        return recorded

    def _record(self, snapshot: Snapshot, steps: list[RecordedStep]) -> None:
        if self.witness.passes is None:
            return
        if self._deferred is None:
            self._deferred = DeferredRecorder(self._roots, self._objects.optimizers, self.witness.passes)
        replayer = self.runner.replayer
        with replayer.stage(snapshot):
            self._deferred.record(steps, replayer.deadline.check)

    def _record_failed(self, inputs: StepInputs) -> None:
        """Repeats a deferred step that raised, so that its program up to the error is known."""
        if self.witness.passes is None:
            return
        try:
            with self.runner.replayer.stage(self._objects.snapshot(self.step)):
                repeat(self.recording, self.witness.passes, inputs)
        except Exception:
            return  # the caller raises the error of the step

    def begin(self) -> None:
        """Starts listening. Further calls do nothing."""
        if not self._has_begun:
            self._has_begun = True
            self._guarded(super().begin)

    def catch_up(self) -> None:
        """Reports the deferred steps that wait. Called before any other event, so that the order of events is kept."""
        inside.before_next_event(None)
        if self._waiting:
            self._guarded(self._report)

    def _report(self) -> None:
        """Reports the waiting steps and evaluates them, except the newest, which ``note`` evaluates."""
        waiting, self._waiting = self._waiting, []
        for step in waiting:
            if step is not waiting[0]:
                self.evaluate()
            self.witness.end_deferred(step)
            self._set_times(step.result)

    def _set_times(self, result: StepResult) -> None:
        values = self._pending[-1][0].values
        values["step_s"], values["wait_s"] = result.step_s or values["step_s"], result.wait_s

    def note(self, result: StepResult) -> None:
        """Runs due examinations after a step of the engine."""
        self.catch_up()
        if self._failed is None and self._pending:
            if self._pending[-1][0].step == result.step:
                self._set_times(result)
            self._guarded(self.settle)
            self._report_at = self.last_deferred()

    def observe(self, result: StepResult, state: TrainState) -> None:
        """Runs due examinations after a step. If one raises, the run continues and is no longer watched.

        Deferred steps are reported together, unless something happened in this one.
        """
        if self._waiting and result.step < self._report_at and _is_usual(result):
            return
        begin_s = time.perf_counter()
        self.note(result)
        self.seconds += time.perf_counter() - begin_s

    def end(self, error: BaseException | None) -> None:
        if not self._has_begun:
            return
        self.catch_up()
        if self._failed is None:
            self._guarded(lambda: super(EngineSession, self).end(error))
        self.leave()

    def close(self) -> None:
        """Examines the last step and prints the findings. Further calls do nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self.end(sys.exc_info()[1])
        if self._failed is not None:
            kind = type(self._failed).__name__
            self._say(f"the doctor stopped watching at step {self.step}: {kind}: {str(self._failed)[:200]}")
        findings, examination = self.findings(), self.findings_log.examination()
        if findings or examination.steps:
            for line in (*lines_of(findings, self._folder), *examination.lines(self._folder)):
                self._say(line)
        if self._journal is not None:
            self._journal.close()

    def _guarded(self, action: Callable[[], None]) -> None:
        """Runs an action, in which ``tw.log`` does nothing. If it raises, the run continues without the session.

        If memory runs out, the session stays, and holds less memory from then on.
        """
        try:
            with collecting(None):
                action()
        except TrainwrightError:
            raise
        except Exception as error:
            self.free_held_memory()
            if not free_what_it_holds(error, self.device):
                self._failed = error
                self.leave()


def _modules_of_caller() -> list[nn.Module]:
    """Returns the modules in the variables of the user's function that called ``tw.fit``."""
    return modules_of(next(iter(calling_frames()), None))


def _is_usual(result: StepResult) -> bool:
    """Returns True unless a step is known to be unusual. On a GPU its numbers may be pending."""
    if result.spike is not None:
        return False
    return not result.loss.is_cpu or (result.skipped is APPLIED and math.isfinite(result.loss.item()))


class _Witness(EngineSource):
    """An EngineSource that also frees memory of the session if memory runs out in a step."""

    def __init__(self, session: EngineSession, dataset: object = None) -> None:
        super().__init__(session.recording, dataset, session.catch_up)
        self._session = session

    def memory_ran_out(self) -> bool:
        self._session.catch_up()
        return self._session.free_held_memory()
