"""The training loop: ``steps``, a generator of step results that users can drive, and ``run`` around it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal

from trainwright.checkpoint.cursor import StepBatch
from trainwright.checkpoint.optimizer_modes import use_averaged_weights
from trainwright.checkpoint.train_state import TrainState
from trainwright.distributed.group import SOLO, World
from trainwright.engine.observer import Observer, Stop, as_observer, as_stop
from trainwright.engine.periodic import NEVER, Evaluator, SaveOnError, SaveOnOutOfMemory, Saver, each_batch
from trainwright.engine.run_length import Until
from trainwright.engine.step import StepFn, StepResult


class StopRequest(BaseException):
    """Raised while a run waits for its next batch.

    The state is complete, so the run stops at once, as ``stop`` says.
    """

    def __init__(self, stop: Stop) -> None:
        super().__init__(stop.reason)
        self.stop = stop


@dataclass
class Outcome:
    """The end of a run.

    Attributes:
        ending: "finished", "stopped" or "data_exhausted".
        step: Number of completed steps.
        last: Result of the last step; None if no step was run.
        stop: The Stop that ended the run, if any.
    """

    ending: Literal["finished", "stopped", "data_exhausted"]
    step: int
    last: StepResult | None
    stop: Stop | None = None


def steps(
    state: TrainState,
    batches: Iterable[StepBatch],
    advance: StepFn,
    *,
    until: Until,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[StepResult]:
    """Advance ``state`` batch by batch and yield each result, until the run is complete or the data ends.

    Time that the caller spends between two results is not counted.

    Args:
        state: Updated in place.
        batches: The batches of the steps, in order.
        advance: Runs one step, see ``make_step``.
        until: Fraction of the run that is complete, see ``for_steps`` and ``for_seconds``.
        clock: Returns monotonic seconds.

    Yields:
        The result of each step.
    """
    stream = iter(batches)
    while (fraction := until(state)) < 1.0:
        state.fraction = fraction
        begin_s = clock()
        batch = next(stream, None)
        if batch is None:
            return
        ready_s = clock()
        result = advance(state, batch)
        end_s = clock()
        result.wait_s, result.step_s = ready_s - begin_s, end_s - begin_s
        state.elapsed_s += end_s - begin_s
        yield result


def run(
    state: TrainState,
    batches: Iterable[StepBatch],
    advance: StepFn,
    *,
    until: Until,
    observers: Sequence[Observer] = (),
    evaluation: Evaluator = NEVER,
    saving: Saver = NEVER,
    world: World = SOLO,
    complete: Callable[[TrainState], None] = lambda state: None,
) -> Outcome:
    """Train until done, stopped or out of data: advance, evaluate if due, observe, agree, save if due.

    Saves once more at the end unless the Stop says that the state is poisoned. A run that was not stopped is evaluated
    at its end. An exception in an observer or in the evaluation saves too, because the state is complete between two
    steps. An exception inside a step closes everything and saves nothing, except an OutOfMemoryError that leaves the
    state intact.

    ``complete`` finishes the state after the last step, unless a signal stopped the run or the state is poisoned. At
    the end the model has the averaged weights if the optimizer averages them itself, such as ScheduleFree.
    """
    stop, last = None, None
    with ExitStack() as closing:
        observers = [as_observer(each) for each in observers]
        for observer in observers:
            closing.callback(getattr(observer, "close", lambda: None))
        closing.push(saving.__exit__)  # runs first on exit: all saves reach the disk before signal handlers are removed
        closing.enter_context(SaveOnOutOfMemory(state, saving))
        save_on_error = SaveOnError(state, saving)
        try:
            for last in steps(state, each_batch(batches, save_on_error), advance, until=until, clock=world.clock):
                with save_on_error:
                    try:
                        if evaluation.due(state):
                            evaluation(state)
                            last.evaluation = evaluation.last
                    finally:  # the state is saved if evaluation raises, so the step must be logged
                        answers = [each.observe(last, state) for each in observers]
                        stops = [as_stop(each, by) for each, by in zip(answers, observers) if each is not None]
                first = min(stops, key=lambda found: found.save) if stops else None  # a poisoned state takes precedence
                stop = world.agree(first)
                if stop:
                    break
                if saving.due(state):
                    saving(state)
        except StopRequest as request:
            stop = request.stop
        if not stop or (stop.save and not stop.by_signal):
            with save_on_error:
                complete(state)
        if not stop or stop.save:
            saving(state)  # before the evaluation, which may take longer than a signal leaves
        if not stop:
            evaluation.finish(state)
        done = until(state) >= 1.0
    use_averaged_weights(state.optimizer)  # no observer replays a step after this
    return Outcome("stopped" if stop else "finished" if done else "data_exhausted", state.step, last, stop)
