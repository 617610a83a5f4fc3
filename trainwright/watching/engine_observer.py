"""The doctor beside our own engine: an Observer that closes each step for whoever attends it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from trainwright.errors import TrainwrightError
from trainwright.observe.journal import Journal
from trainwright.report.findings import lines_of
from trainwright.runlog.writer import LogWriter
from trainwright.watching.session import WatchOptions, WatchSession, enough_bytes

if TYPE_CHECKING:
    from trainwright.engine.step import StepResult
    from trainwright.observe.progress import Progress
    from trainwright.runlog.folder import RunFolder
    from trainwright.state.train_state import TrainState
    from trainwright.training.job import Job


class EngineObserver:
    """An Observer that attends a run of our own engine and tells its findings at the end."""

    def __init__(self, job: Job, folder: RunFolder, progress: Progress) -> None:
        self._folder, self._say = folder.path, progress.say
        self._journal = Journal(LogWriter(folder.log), progress.say)
        state = job.state
        given = {"loaders": (), "scalers": (), "schedulers": (), "accumulation": job.plan.batch.accumulation}
        self.attendant = WatchSession(
            [state.model, *([state.loss] if state.loss is not None else [])],
            [state.optimizer],
            given,
            WatchOptions(
                "observe", budget_bytes=enough_bytes([state.model]), bundles=folder.bundles
            ),  # the engine has a guard of its own
            write=self._journal.write,
            own_loop_at=state.step,
        )
        self.attendant.begin()

    def observe(self, result: StepResult, state: TrainState) -> None:
        recording = self.attendant.recording
        if recording.failed is not None:  # a mistake of ours is not the run's: it goes on, and the findings say so
            return
        segment = recording.segment
        segment.ids = [tuple(micro.ids.tolist()) for micro in result.batch.micro]
        segment.loss, segment.lr = result.loss, result.lr
        segment.grad_norm = (
            result.grad_norm if segment.grad_norm is None else segment.grad_norm
        )  # a step that is skipped
        try:
            recording.close()
        except TrainwrightError:
            raise
        except Exception as error:
            recording.fail(error)

    def close(self) -> None:
        self.attendant.end(sys.exc_info()[1])
        findings = self.attendant.findings()
        for line in lines_of(findings, self._folder) if findings else ():
            self._say(line)
        self._journal.close()
