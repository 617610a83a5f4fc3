"""The loop: a generator of step results that the user may own, and the thin ``run`` around it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal

from trainwright.checkpoint.cursor import StepBatch
from trainwright.checkpoint.modes import use_averaged_weights
from trainwright.checkpoint.train_state import TrainState
from trainwright.distributed.group import SOLO, World
from trainwright.engine.between import NEVER, Evaluator, LastGood, Saver, Whole, each_batch
from trainwright.engine.observer import Observer, Stop, as_observer, as_stop
from trainwright.engine.step import StepFn, StepResult
from trainwright.engine.until import Until


class StopRequest(BaseException):
    """Raised where a run waits for its next batch, and the state is whole: it stops at once, as ``stop`` says."""

    def __init__(self, stop: Stop) -> None:
        super().__init__(stop.reason)
        self.stop = stop


@dataclass
class Outcome:
    """How a run ended. ``last`` is the result of its last step, None when no step was taken."""

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
    """Advances ``state`` batch by batch and yields each result, until the run is used up or the data ends.

    ``clock`` gives monotonic seconds. The time that the caller spends between two results is not counted.
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
    """Trains until done, stopped or out of data: advance, evaluate if due, observe, agree, save if due.

    At the end the model has the averaged weights of an optimizer that averages them itself, such as ScheduleFree.

    ``complete`` finishes the state after the last step, unless a signal stopped the run or the state is poisoned.

    Saves once more at the end unless the Stop says that the state is poisoned; a run that was not stopped
    is evaluated at its end. An exception of an observer or of the evaluation saves too: between two steps the
    state is whole. One from within a step closes all and saves nothing, but for an OutOfMemoryError that leaves it
    whole.
    """
    stop, last = None, None
    with ExitStack() as closing:
        observers = [as_observer(each) for each in observers]
        for observer in observers:
            closing.callback(getattr(observer, "close", lambda: None))
        closing.push(saving.__exit__)  # left first: all is on disk before signals are let go
        closing.enter_context(LastGood(state, saving))
        whole = Whole(state, saving)
        try:
            for last in steps(state, each_batch(batches, whole), advance, until=until, clock=world.clock):
                with whole:
                    try:
                        if evaluation.due(state):
                            evaluation(state)
                            last.evaluation = evaluation.last
                    finally:  # the state is saved where it raises, so the step belongs into the log
                        answers = [each.observe(last, state) for each in observers]
                        stops = [as_stop(each, by) for each, by in zip(answers, observers) if each is not None]
                first = min(stops, key=lambda found: found.save) if stops else None  # a poisoned state comes first
                stop = world.agree(first)
                if stop:
                    break
                if saving.due(state):
                    saving(state)
        except StopRequest as request:
            stop = request.stop
        if not stop or (stop.save and not stop.by_signal):
            with whole:
                complete(state)
        if not stop or stop.save:
            saving(state)  # before the evaluation, which may take longer than a signal leaves
        if not stop:
            evaluation.finish(state)
        done = until(state) >= 1.0
    use_averaged_weights(state.optimizer)  # when no observer replays a step any more
    return Outcome("stopped" if stop else "finished" if done else "data_exhausted", state.step, last, stop)
