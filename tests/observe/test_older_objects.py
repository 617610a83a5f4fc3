"""After its first steps a run leaves older objects to the garbage collector of the end."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch

from tests.observe.small_run import batches, make_state
from trainwright.engine.loop import run
from trainwright.engine.loss import Loss
from trainwright.engine.step import StepResult, make_step
from trainwright.engine.until import for_steps
from trainwright.observe.older_objects import STEPS, OlderObjectsRest, only_newest_collected
from trainwright.state.train_state import TrainState
from trainwright.world.memory import every_object, give_back, older_objects


class Cycle:
    """Is not freed before the garbage collector finds it."""

    def __init__(self) -> None:
        self.me = self


def is_freed(cycle: weakref.ref[Cycle]) -> bool:
    return cycle() is None  # here, for an assert would hold it


def loss(model: torch.nn.Module, batch: tuple[torch.Tensor, ...]) -> Loss:
    return Loss(model(batch[0]).sum(), float(len(batch[0])))


@pytest.fixture(autouse=True)
def as_in_a_new_process() -> Iterator[None]:
    """The suite freezes what it has imported. No collection comes by chance."""
    gc.unfreeze()
    gc.disable()
    yield
    gc.enable()
    gc.freeze()


def frozen_by_step(*, frozen_before: bool) -> tuple[list[bool], bool, bool]:
    """After which steps objects rest; whether a cycle of before and one of a late step were freed at the last.

    To count millions that were frozen before takes 0.1 s: they are counted around the step from which objects rest.
    """
    dead = [weakref.ref(Cycle())]
    if frozen_before:
        gc.freeze()
    resting: list[bool] = []
    freed: list[bool] = []

    def look(result: StepResult, state: TrainState) -> None:
        if not frozen_before or result.step in (1, STEPS - 1, STEPS, STEPS + 2):
            resting.append(gc.get_freeze_count() > 0)
        if result.step == STEPS + 1:
            dead.append(weakref.ref(Cycle()))
        if result.step == STEPS + 2:
            gc.collect(1)
            freed.extend(map(is_freed, dead))

    run(
        make_state(),
        batches(STEPS + 2),
        make_step(loss),
        until=for_steps(STEPS + 2),
        observers=[OlderObjectsRest(), look],  # type: ignore[list-item]
    )
    return resting, *freed  # type: ignore[return-value]


def test_from_some_step_on_only_new_objects_are_looked_through() -> None:
    resting, is_old_freed, is_new_freed = frozen_by_step(frozen_before=False)
    assert resting == [step >= STEPS for step in range(1, STEPS + 3)]
    assert is_new_freed and not is_old_freed and gc.get_freeze_count() == 0


def test_where_memory_is_short_or_all_is_searched_older_objects_do_not_rest() -> None:
    dead, kept = weakref.ref(Cycle()), Cycle()
    older_objects.rest()
    assert any(each is kept for each in every_object()) and gc.get_freeze_count() == 0
    older_objects.rest()
    give_back(torch.device("cpu"))
    assert is_freed(dead) and gc.get_freeze_count() == 0


@pytest.mark.slow
def test_what_somebody_else_froze_stays_frozen() -> None:
    resting, _, is_new_freed = frozen_by_step(frozen_before=True)
    assert resting == [True] * 4 and is_new_freed and gc.get_freeze_count() > 0


def test_what_lives_for_a_while_and_goes_is_not_counted_as_new_and_kept() -> None:
    """Else many objects of a look make a collection of all objects due, in a later step of the loop."""
    before = gc.get_threshold()
    dead: list[weakref.ref[Cycle]] = []
    gc.enable()
    collections = [each["collections"] for each in gc.get_stats()]
    with only_newest_collected():
        for _ in range(20):
            alive = [Cycle() for _ in range(2 * before[0])]
        dead.append(weakref.ref(alive[0]))
        del alive
        newest, young, whole = [each["collections"] for each in gc.get_stats()]
    assert newest >= collections[0] + 20 and [young, whole] == collections[1:]
    assert is_freed(dead[0]) and gc.get_stats()[1]["collections"] == collections[1] + 1
    assert gc.get_threshold() == before


def test_a_collector_that_is_off_stays_off() -> None:
    dead = weakref.ref(Cycle())
    with only_newest_collected():
        assert not gc.isenabled()
    assert not gc.isenabled() and not is_freed(dead)
