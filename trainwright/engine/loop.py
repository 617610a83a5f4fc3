"""The training loop: ``steps``, a generator of step results that users can drive, and ``run`` around it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Literal, Protocol

from trainwright.checkpoint.cursor import StepBatch
from trainwright.checkpoint.optimizer_modes import use_averaged_weights
from trainwright.checkpoint.train_state import TrainState
from trainwright.distributed.group import SOLO, World
from trainwright.engine.evaluate import EvaluationResult
from trainwright.engine.observer import Observer, Stop, as_observer, as_stop
from trainwright.engine.step import StepFn, StepResult
from trainwright.errors import RankError, UsageError


class Periodic(Protocol):
    """An action that runs when it is due, such as evaluation or saving."""

    def due(self, state: TrainState) -> bool: ...
    def __call__(self, state: TrainState) -> None: ...


class Evaluator(Periodic, Protocol):
    """Evaluates during a run and once at its end. A step that was evaluated already is not evaluated again."""

    @property
    def last(self) -> EvaluationResult | None: ...
    def finish(self, state: TrainState) -> None: ...


class Saver(Periodic, Protocol):
    """Saves the state. A step that was saved already is not saved again. On exit all saves have reached the disk.

    ``rescue`` saves after an exception, if one rank can do that alone.
    """

    def rescue(self, state: TrainState) -> None: ...
    def __exit__(self, *error: object) -> None: ...


class _Never:
    last: EvaluationResult | None = None

    def due(self, _state: TrainState) -> bool:
        return False

    def __call__(self, state: TrainState) -> None: ...
    def finish(self, state: TrainState) -> None: ...
    def rescue(self, state: TrainState) -> None: ...
    def __exit__(self, *error: object) -> None: ...


NEVER = _Never()


@contextmanager
def _saved_after_error(state: TrainState, saving: Saver) -> Iterator[None]:
    """Save the state after an error between two steps, where it is complete, unless another rank is lost.

    After a lost rank, a run that resumed from this state would lack the evaluation and the record of the last step. A
    run that resumes from the previous checkpoint repeats both.
    """
    try:
        yield
    except RankError:
        raise
    except Exception:
        saving.rescue(state)
        raise


@contextmanager
def _saved_if_intact(state: TrainState, saving: Saver) -> Iterator[None]:
    """Save the last good step if the next step raises an error that leaves the state intact (``error.whole``)."""
    try:
        yield
    except BaseException as error:
        if getattr(error, "whole", False) and state.step:
            saving.rescue(state)
        raise


def _each_batch(batches: Iterable[StepBatch], state: TrainState, saving: Saver) -> Iterator[StepBatch]:
    stream = iter(batches)
    while True:
        with _saved_after_error(state, saving):
            batch = next(stream, None)
        if batch is None:
            return
        yield batch


Until = Callable[[TrainState], float]
"""Returns the completed fraction of the run: 0 at its start, 1 at its end."""


def for_steps(count: int) -> Until:
    """Return the ``until`` of a run of ``count`` optimizer steps."""
    return _until(count, lambda state: state.step / count)


def for_seconds(budget_s: float) -> Until:
    """Return the ``until`` of a run of ``budget_s`` seconds of training; evaluation and saving are not counted."""
    return _until(budget_s, lambda state: state.elapsed_s / budget_s)


class ByTheClock:
    """Ends a run within ``within_s`` seconds from now by ``clock``, including all work after its last step.

    Work between the steps (evaluation, examinations, samples) reduces the time for training. ``after_s`` is the known
    duration of the work after the last step. In addition, time is reserved for the longest pause so far and the pause
    before the first step. Trains for at least ``MIN_TRAINING_S``.
    """

    MIN_TRAINING_S = 1.0

    def __init__(self, within_s: float, after_s: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self._after_s, self._clock = after_s, clock
        self._now_s = self._begin_s = clock()
        self._end_s = self._begin_s + within_s
        self._elapsed_s: float | None = None
        self._first_s = self._longest_s = self._begins_at_s = self._used = 0.0

    @property
    def left_s(self) -> float:
        """Seconds by the clock until the run must be over."""
        return max(0.0, self._end_s - self._clock())

    def __call__(self, state: TrainState) -> float:
        now_s = self._clock()
        if self._elapsed_s is None:
            self._begins_at_s, self._first_s = state.elapsed_s, now_s - self._begin_s
        else:
            self._longest_s = max(self._longest_s, now_s - self._now_s - (state.elapsed_s - self._elapsed_s))
        self._now_s, self._elapsed_s = now_s, state.elapsed_s
        left_s = self._end_s - self._after_s - self._first_s - self._longest_s - now_s
        left_s = max(left_s, self._begins_at_s + self.MIN_TRAINING_S - state.elapsed_s, 0.0)
        # the fraction never decreases
        self._used = max(self._used, state.elapsed_s / max(state.elapsed_s + left_s, 1e-9))
        return self._used


def _until(amount: float, until: Until) -> Until:
    if not amount > 0:
        raise UsageError(f"a run lasts longer than {amount!r}", remedy="write for_steps(1000) or for_seconds(60)")
    return until


class StopRequest(BaseException):
    """Raised while a run waits for its next batch.

    The state is complete between two steps, so the run stops at once. Its Outcome has this ``stop``.
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

    Time that the caller spends between two results is not added to ``state.elapsed_s``.

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


def _first_stop(answers: Sequence[Stop | None], observers: Sequence[Observer]) -> Stop | None:
    """Return the Stop of the observers. If there are several, prefer one that forbids saving the state."""
    stops = [as_stop(answer, observer) for answer, observer in zip(answers, observers) if answer is not None]
    return min(stops, key=lambda stop: stop.save) if stops else None


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
    complete: Callable[[TrainState], None] = lambda _state: None,
) -> Outcome:
    """Train until done, stopped or out of data: advance, evaluate if due, observe, agree on a stop, save if due.

    Saves once more at the end, unless the Stop has ``save=False``. A run that was not stopped is evaluated at its end.
    After an exception in an observer or in the evaluation the state is saved, too, because it is complete between two
    steps. After an exception inside a step it is saved only if it is intact: after one in the forward or backward pass
    of a single rank.

    ``complete`` finishes the state after the last step, unless a signal stopped the run or the Stop has ``save=False``.
    At the end the model has the averaged weights if the optimizer averages them itself, such as ScheduleFree.
    """
    stop, last = None, None
    with ExitStack() as closing:
        observers = [as_observer(each) for each in observers]
        for observer in observers:
            closing.callback(getattr(observer, "close", lambda: None))
        closing.push(saving.__exit__)  # runs first on exit, so that saves reach the disk before signal handlers go
        closing.enter_context(_saved_if_intact(state, saving))
        try:
            for last in steps(state, _each_batch(batches, state, saving), advance, until=until, clock=world.clock):
                with _saved_after_error(state, saving):
                    try:
                        if evaluation.due(state):
                            evaluation(state)
                            last.evaluation = evaluation.last
                    finally:  # the state is saved if evaluation raises, so the step must be logged
                        answers = [observer.observe(last, state) for observer in observers]
                    first = _first_stop(answers, observers)
                stop = world.agree(first)
                if stop:
                    break
                if saving.due(state):
                    saving(state)
        except StopRequest as request:
            stop = request.stop
        if not stop or (stop.save and not stop.by_signal):
            with _saved_after_error(state, saving):
                complete(state)
        if not stop or stop.save:
            saving(state)  # before the last evaluation: a signal during it may leave no time to save
        if not stop:
            evaluation.finish(state)
        done = until(state) >= 1.0
    use_averaged_weights(state.optimizer)  # no observer replays a step after this
    return Outcome("stopped" if stop else "finished" if done else "data_exhausted", state.step, last, stop)
