"""The loop: a generator of step results that the user may own, and the thin ``run`` around it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from trainwright.engine.between import NEVER, Evaluator, LastGood, Saver, Whole, each_batch
from trainwright.engine.step import StepFn, StepResult
from trainwright.engine.until import Until
from trainwright.errors import UsageError
from trainwright.state.cursor import StepBatch
from trainwright.state.train_state import TrainState
from trainwright.world.group import SOLO, World


class Stop(NamedTuple):
    """Why an observer ends the run. ``save`` is False when the state is poisoned."""

    reason: str
    save: bool = True
    exit_code: int = 0


class StopRequest(BaseException):
    """Raised where a run waits for its next batch, and the state is whole: it stops at once, as ``stop`` says."""

    def __init__(self, stop: Stop) -> None:
        super().__init__(stop.reason)
        self.stop = stop


class Observer(Protocol):
    """Looks at each step after it is done. Reads only. ``close`` is called at the end, where there is one."""

    def observe(self, result: StepResult, state: TrainState) -> Stop | None: ...
    def close(self) -> None: ...


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
) -> Outcome:
    """Trains until done, stopped or out of data: advance, evaluate if due, observe, agree, save if due.

    Saves once more at the end unless the Stop says that the state is poisoned; a run that was not stopped
    is evaluated at its end. An exception of an observer or of the evaluation saves too: between two steps the
    state is whole. One from within a step closes all and saves nothing, but for an OutOfMemoryError that leaves it
    whole.
    """
    stop, last = None, None
    with ExitStack() as closing:
        for observer in observers:
            require_observer(observer)
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
                    finally:  # the state is saved where it raises, so the step belongs into the log
                        stops = [found for each in observers if (found := _asked(each, last, state)) is not None]
                stop = world.agree(min(stops, key=lambda found: found.save, default=None))  # a poisoned state first
                if stop:
                    break
                if saving.due(state):
                    saving(state)
        except StopRequest as asked:
            stop = asked.stop
        if not stop or stop.save:
            saving(state)  # before the evaluation, which may take longer than a signal leaves
        if not stop:
            evaluation.finish(state)
        done = until(state) >= 1.0
        return Outcome("stopped" if stop else "finished" if done else "data_exhausted", state.step, last, stop)


def require_observer(observer: object) -> None:
    """Raises UsageError for what cannot be called after a step: a function, a class, an object without ``observe``."""
    if isinstance(observer, type) or not callable(getattr(observer, "observe", None)):
        name = getattr(observer, "__name__", type(observer).__name__)
        what = "a class" if isinstance(observer, type) else "no object with a method observe(result, state)"
        raise UsageError(f"the observer {name} is {what}", remedy="give an object of a class that has this method")


def _asked(observer: Observer, result: StepResult, state: TrainState) -> Stop | None:
    found: object = observer.observe(result, state)
    if found is None or isinstance(found, Stop):
        return found
    raise UsageError(f"{type(observer).__name__}.observe returned {found!r}", remedy="return None or a tw.Stop(why)")
