"""The loop: what comes after what, how it ends, and that the user may own it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.optim import SGD

from tests.engine.plain import cut
from trainwright.checkpoint.cursor import BadSample, Cursor, StepBatch
from trainwright.checkpoint.train_state import TrainState
from trainwright.distributed.group import Solo
from trainwright.engine.loop import Outcome, for_seconds, for_steps, run, steps
from trainwright.engine.observer import Stop
from trainwright.engine.step import StepFn, StepResult, make_step
from trainwright.errors import RankError, UsageError

Journal = list[tuple[str, int]]


def fresh() -> TrainState:
    model = nn.Linear(1, 1)
    return TrainState(model, SGD(model.parameters(), lr=0.01))


def stream(count: int | None = None) -> Iterator[StepBatch]:
    number = 0
    while count is None or number < count:
        yield cut((torch.ones(2, 1), torch.ones(2)), 2, first_id=2 * number)
        number += 1


def advancing(journal: Journal) -> StepFn:
    advance = make_step(lambda model, pair: model(pair[0]).mean())

    def noted(state: TrainState, batch: StepBatch) -> StepResult:
        result = advance(state, batch)
        journal.append(("advance", state.step))
        return result

    return noted


class Watcher:
    """Notes each step; stops at ``stop_at``, fails at ``fail_at``."""

    def __init__(
        self, journal: Journal, name: str = "observe", *, stop_at: int = 0, stop: Stop | None = None, fail_at: int = 0
    ) -> None:
        self.journal, self.name, self.stop_at, self.stop, self.fail_at = journal, name, stop_at, stop, fail_at

    def observe(self, result: StepResult, state: TrainState) -> Stop | None:
        assert result.step == state.step
        self.journal.append((self.name, state.step))
        if state.step == self.fail_at:
            raise ZeroDivisionError
        return self.stop if state.step == self.stop_at else None

    def close(self) -> None:
        self.journal.append((f"close {self.name}", -1))


class Every:
    last = None

    def __init__(self, journal: Journal, name: str, interval: int) -> None:
        self.journal, self.name, self.interval = journal, name, interval

    def due(self, state: TrainState) -> bool:
        return state.step % self.interval == 0

    def __call__(self, state: TrainState) -> None:
        if self.journal.count((self.name, state.step)) == 0:  # a Saver's part of the contract
            self.journal.append((self.name, state.step))

    rescue = __call__

    def finish(self, state: TrainState) -> None:
        self(state)

    def __exit__(self, *error: object) -> None:
        self.journal.append((f"close {self.name}", -1))


class Agreeing(Solo):
    def __init__(self, journal: Journal) -> None:
        self.journal = journal

    def agree(self, value):  # type: ignore[no-untyped-def]
        self.journal.append(("agree", -1))
        return value


def go(journal: Journal, *watchers: Watcher, until: int = 4, count: int | None = None) -> Outcome:
    return run(
        fresh(),
        stream(count),
        advancing(journal),
        until=for_steps(until),
        observers=watchers,
        evaluation=Every(journal, "evaluate", 2),
        saving=Every(journal, "save", 2),
        world=Agreeing(journal),
    )


def without_agree(journal: Journal) -> Journal:
    return [event for event in journal if event[0] != "agree"]


def test_the_order_of_events() -> None:
    journal: Journal = []
    outcome = go(journal, Watcher(journal, "a"), Watcher(journal, "b"), until=3)
    assert journal == [
        *[("advance", 1), ("a", 1), ("b", 1), ("agree", -1)],
        *[("advance", 2), ("evaluate", 2), ("a", 2), ("b", 2), ("agree", -1), ("save", 2)],
        *[("advance", 3), ("a", 3), ("b", 3), ("agree", -1)],
        *[("save", 3), ("evaluate", 3), ("close save", -1), ("close b", -1), ("close a", -1)],
    ]
    assert (outcome.ending, outcome.step, outcome.stop) == ("finished", 3, None)
    assert outcome.last is not None
    assert outcome.last.step == 3


def test_what_was_just_done_is_not_done_again_at_the_end() -> None:
    journal: Journal = []
    go(journal, until=4)
    assert journal.count(("save", 4)) == journal.count(("evaluate", 4)) == 1


def test_a_stop_saves_and_does_not_evaluate() -> None:
    journal: Journal = []
    stop = Stop("asked to", exit_code=75)
    outcome = go(journal, Watcher(journal, stop_at=3, stop=stop))
    assert (outcome.ending, outcome.step, outcome.stop) == ("stopped", 3, stop)
    assert without_agree(journal)[-4:] == [("observe", 3), ("save", 3), ("close save", -1), ("close observe", -1)]


def test_a_poisoned_state_is_not_saved_even_when_due() -> None:
    journal: Journal = []
    go(journal, Watcher(journal, stop_at=4, stop=Stop("NaN weights", save=False)))
    assert without_agree(journal)[-4:] == [("evaluate", 4), ("observe", 4), ("close save", -1), ("close observe", -1)]
    assert ("save", 4) not in journal


def test_of_two_stops_the_one_that_must_not_save_wins() -> None:
    journal: Journal = []
    polite, poisoned = Stop("asked to"), Stop("weights are NaN", save=False)
    outcome = go(
        journal, Watcher(journal, "a", stop_at=3, stop=polite), Watcher(journal, "b", stop_at=3, stop=poisoned)
    )
    assert outcome.stop == poisoned
    assert ("save", 3) not in journal
    assert ("b", 3) in journal  # every observer sees the last step


def test_an_observer_that_fails_costs_no_step() -> None:
    journal: Journal = []
    with pytest.raises(ZeroDivisionError):
        go(journal, Watcher(journal, "a"), Watcher(journal, "b", fail_at=3))
    closed = [("close save", -1), ("close b", -1), ("close a", -1)]
    assert without_agree(journal)[-7:] == [("advance", 3), ("a", 3), ("b", 3), ("save", 3), *closed]


class Failing(Every):
    error: Exception = ZeroDivisionError()

    def __call__(self, state: TrainState) -> None:
        super().__call__(state)
        raise self.error


def test_a_step_in_which_another_rank_was_lost_is_not_saved() -> None:
    """Its evaluation and, if observers communicate, its record are missing. A resumed run repeats it."""
    journal: Journal = []
    failing = Failing(journal, "evaluate", 2)
    failing.error = RankError("the ranks could not agree on a number", remedy="resume the run")
    with pytest.raises(RankError):
        run(
            fresh(),
            stream(),
            advancing(journal),
            until=for_steps(4),
            evaluation=failing,
            saving=Every(journal, "save", 9),
        )
    assert journal[-3:] == [("advance", 2), ("evaluate", 2), ("close save", -1)]


def test_an_evaluation_that_fails_costs_no_step_and_the_observers_see_it() -> None:
    """The log contains every saved step, because a resumed run continues after it."""
    journal: Journal = []
    failing, saving = Failing(journal, "evaluate", 2), Every(journal, "save", 9)
    with pytest.raises(ZeroDivisionError):
        run(
            fresh(),
            stream(),
            advancing(journal),
            until=for_steps(4),
            observers=[Watcher(journal, "a")],
            evaluation=failing,
            saving=saving,
        )
    closed = [("close save", -1), ("close a", -1)]
    assert journal[-6:] == [("advance", 2), ("evaluate", 2), ("a", 2), ("save", 2), *closed]


def test_a_batch_that_cannot_be_read_costs_no_step() -> None:
    journal: Journal = []

    def torn() -> Iterator[StepBatch]:
        yield from stream(2)
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="gone"):
        run(fresh(), torn(), advancing(journal), until=for_steps(5), saving=Every(journal, "save", 100))
    assert journal == [("advance", 1), ("advance", 2), ("save", 2), ("close save", -1)]


def test_a_step_that_fails_saves_nothing() -> None:
    journal: Journal = []
    advance = advancing(journal)

    def failing(state: TrainState, batch: StepBatch) -> StepResult:
        if state.step == 2:
            raise ZeroDivisionError  # the weights may be half updated
        return advance(state, batch)

    saving = Every(journal, "save", 100)
    with pytest.raises(ZeroDivisionError):
        run(fresh(), stream(), failing, until=for_steps(5), saving=saving)
    assert journal == [("advance", 1), ("advance", 2), ("close save", -1)]


def test_an_interrupt_saves_nothing() -> None:
    journal: Journal = []

    class Interrupted(Watcher):
        def observe(self, result: StepResult, state: TrainState) -> Stop | None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        go(journal, Interrupted(journal, "a"))
    assert [name for name, _ in journal if name == "save"] == []


def test_data_that_ends() -> None:
    journal: Journal = []
    outcome = go(journal, until=100, count=3)
    assert (outcome.ending, outcome.step) == ("data_exhausted", 3)
    assert journal[-3:] == [("save", 3), ("evaluate", 3), ("close save", -1)]


class FakeClock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_seconds_count_training_alone_by_the_clock_that_is_passed_in() -> None:
    clock, state, advance = FakeClock(), fresh(), advancing([])

    def slow_stream() -> Iterator[StepBatch]:
        for batch in stream():
            clock.now_s += 0.25  # waiting for data
            yield batch

    def slow_advance(state: TrainState, batch: StepBatch) -> StepResult:
        clock.now_s += 0.75
        return advance(state, batch)

    fractions = []
    for result in steps(state, slow_stream(), slow_advance, until=for_seconds(5.0), clock=clock):
        assert (result.wait_s, result.step_s) == (0.25, 1.0)
        fractions.append(state.fraction)
        clock.now_s += 100.0  # evaluation, saving, or a user at lunch
    assert state.step == 5
    assert state.elapsed_s == 5.0
    assert fractions == [0.0, 0.2, 0.4, 0.6, 0.8]


def test_the_user_may_own_the_loop_and_come_back() -> None:
    state, advance = fresh(), advancing([])
    weights = []
    for result in steps(state, stream(), advance, until=for_steps(10)):
        weights.append(state.model.weight.item())  # type: ignore[union-attr, operator]
        if result.step == 4:
            break
    assert state.step == 4
    assert state.data == Cursor(0, 8)
    assert len(set(weights)) == 4
    again = [result.step for result in steps(state, stream(), advance, until=for_steps(10))]
    assert again == [5, 6, 7, 8, 9, 10]
    assert list(steps(state, stream(), advance, until=for_steps(10))) == []


def test_the_schedule_sees_completed_steps_and_the_share_of_the_run() -> None:
    seen: list[tuple[int, float]] = []

    def schedule(step: int, fraction: float) -> float:
        seen.append((step, fraction))
        return 1.0

    state = fresh()
    advance = make_step(lambda model, pair: model(pair[0]).mean(), schedule=schedule)
    run(state, stream(), advance, until=for_steps(4))
    assert seen == [(0, 0.0), (1, 0.25), (2, 0.5), (3, 0.75)]


def test_runs_of_nothing() -> None:
    for make in (for_steps, for_seconds):
        for nothing in (0, -1):
            with pytest.raises(UsageError, match="remedy"):
                make(nothing)


def test_an_observer_that_returns_no_stop() -> None:
    class Chatty(Watcher):
        def observe(self, result: StepResult, state: TrainState):  # type: ignore[no-untyped-def]
            return 0

    journal: Journal = []
    with pytest.raises(UsageError, match=r"Chatty\.observe returned 0(.|\n)*tw.Stop"):
        go(journal, Chatty(journal))
    assert journal[-1] == ("close observe", -1)


def test_an_observer_needs_no_close() -> None:
    class Counts:
        count = 0

        def observe(self, result: StepResult, state: TrainState) -> None:
            self.count += 1

    counts = Counts()
    assert go([], counts).ending == "finished"  # type: ignore[arg-type]
    assert counts.count > 0


def test_a_bad_sample_is_in_quarantine_once_its_step_is_trained_on() -> None:
    state, advance = fresh(), make_step(lambda model, pair: model(pair[0]).mean())
    batches = list(stream(3))
    batches[1] = replace(batches[1], bad=(BadSample(7, "OSError"), BadSample(9, "OSError")))
    seen = [set(state.quarantine) for _ in steps(state, batches, advance, until=for_steps(3))]
    assert seen == [set(), {7, 9}, {7, 9}]
