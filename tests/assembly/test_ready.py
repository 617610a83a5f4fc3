"""Ready batches: any iterable is run as it is, and what is known of it is said."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from trainwright.checkpoint.cursor import Cursor, StepBatch, count_rows
from trainwright.checkpoint.rng import RngBag, seed_all
from trainwright.data.loading import EvaluationBatches, Loading, StepBatches
from trainwright.data.ready_batches import ReadyBatches, ReadyStream, silent
from trainwright.data.unwrap import length_of, unwrap
from trainwright.errors import DataError, RecipeError, UsageError
from trainwright.plan.batch import UserBatches, batch_of, require_fits
from trainwright.recipe import from_mapping

LOADING = Loading(1, 1, seed=3)
X = torch.ones(7, 3)


def batches(count: int = 5) -> Iterator[tuple[Tensor, Tensor]]:
    """Draws from all global generators."""
    for number in range(count):
        noise = random.random() + np.random.rand()
        yield torch.randn(2 + number, 3) + noise, torch.full((2 + number,), number)


def take(source: Any, count: int, cursor: Cursor | None = None, **settings: Any) -> list[StepBatch]:
    loading = Loading(1, 1, seed=3, **settings)
    return list(islice(StepBatches(unwrap(source).dataset, loading, cursor=cursor), count))


def values(found: list[StepBatch]) -> list[Any]:
    return [[micro.data[0].tolist() for micro in step.micro] for step in found]


def test_a_pass_is_an_epoch_and_ids_are_rows_of_it() -> None:
    found = take(lambda: batches(2), 3)
    assert [step.ids.tolist() for step in found] == [[0, 1], [2, 3, 4], [0, 1]]
    assert [step.cursor for step in found] == [Cursor(0, 2), Cursor(0, 5), Cursor(1, 2)]
    assert values(found[:1]) != values(found[2:])  # each epoch draws other numbers


def test_several_are_joined_to_a_step() -> None:
    found = take(lambda: batches(5), 4, joined=2)
    assert [len(step.micro) for step in found] == [2, 2, 1, 2]


def test_it_draws_from_generators_of_its_own_and_leaves_those_of_the_process_alone() -> None:
    seed_all(1)
    before = RngBag.capture()
    found = take(lambda: batches(), 7)
    after = RngBag.capture()
    assert before.python == after.python and torch.equal(before.torch_cpu, after.torch_cpu)
    assert np.array_equal(before.numpy["state"]["key"], after.numpy["state"]["key"])
    seed_all(2)
    assert values(take(lambda: batches(), 7)) == values(found)


@pytest.mark.parametrize("at", [0, 4, 6])
def test_it_is_read_again_up_to_a_cursor(at: int) -> None:
    whole = take(lambda: batches(), 8)
    stream = StepBatches(unwrap(lambda: batches()).dataset, LOADING, cursor=whole[at].cursor)
    assert values(list(islice(stream, 1))) == values(whole[at + 1 : at + 2])
    assert "and they are the same as before" in stream.resumed


@pytest.mark.parametrize("changed", [3, 15, 31])
def test_of_many_batches_the_first_16_and_each_16th_are_compared(changed: int) -> None:
    fixed = list(torch.randn(40, 2, 3))
    cursor = take(lambda: iter(fixed), 35)[34].cursor
    for other, word in ((torch.zeros(2, 3), "NOT the same"), (fixed[changed], "are the same")):
        second = [*fixed[:changed], other, *fixed[changed + 1 :]]
        stream = StepBatches(unwrap(lambda second=second: iter(second)).dataset, LOADING, cursor=cursor)
        assert next(iter(stream)).cursor.position == 72 and word in stream.resumed


@pytest.mark.parametrize("at", [1, 16, 33])
def test_the_same_batches_again_are_the_same_wherever_a_run_stopped(at: int) -> None:
    fixed = list(torch.randn(40, 2, 3))
    source = unwrap(lambda: iter(fixed)).dataset
    stream = StepBatches(source, LOADING, cursor=take(lambda: iter(fixed), at)[-1].cursor)
    assert next(iter(stream)).cursor.position == 2 * (at + 1) and "they are the same as before" in stream.resumed


def test_the_digest_of_every_batch_that_an_older_checkpoint_has_is_compared_as_it_was_made() -> None:
    fixed = list(torch.randn(40, 2, 3))
    source = unwrap(lambda: iter(fixed)).dataset
    of_all = ReadyStream(source, Cursor(), replace(LOADING, ranks=2), silent)
    cursor = list(islice(of_all.steps(), 35))[-1][1]
    assert cursor.digest != take(lambda: iter(fixed), 35)[34].cursor.digest
    stream = StepBatches(source, LOADING, cursor=cursor)
    later = list(islice(stream, 3))[-1].cursor
    assert "they are the same" in stream.resumed
    assert later.digest == list(islice(of_all.steps(), 38))[-1][1].digest  # and goes on so


class Counting:
    """Says how many of its batches it has given."""

    def __init__(self, fixed: list[Tensor]) -> None:
        self.fixed, self.given = fixed, 0

    def __iter__(self) -> Iterator[Tensor]:
        for batch in self.fixed[self.given :]:
            self.given += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given = state["given"]


@pytest.mark.parametrize("at", [1, 16, 33])
def test_a_digest_goes_on_where_the_loader_goes_on_from_its_own_state(at: int) -> None:
    fixed = list(torch.randn(40, 2, 3))
    cursors = [each.cursor for each in take(Counting(fixed), 40)]
    start = Cursor.from_state_dict(cursors[at - 1].state_dict())
    stream = StepBatches(unwrap(Counting(fixed)).dataset, LOADING, cursor=start)
    last = list(islice(stream, 39 - at))[-1].cursor
    again = StepBatches(unwrap(lambda: iter(fixed)).dataset, LOADING, cursor=Cursor(0, last.position, last.digest))
    assert next(iter(again)).cursor.position == 80 and "they are the same as before" in again.resumed
    assert "from its own state" in stream.resumed and last.position == 78


def test_a_shorter_second_pass_is_told() -> None:
    cursor = take(lambda: batches(5), 4)[3].cursor
    stream = StepBatches(unwrap(lambda: batches(2)).dataset, LOADING, cursor=cursor)
    assert next(iter(stream)).cursor.epoch == 1
    assert "NOT the same as before: there were only 5, and some samples" in stream.resumed


@pytest.mark.parametrize("shuffled", [False, True])
def test_of_a_list_several_are_read_at_once_and_come_as_one_by_one(shuffled: bool) -> None:
    listed, own_loader = list(batches(40)), type("OwnLoader", (DataLoader,), {})
    found, one_by_one = (
        take(make(listed, batch_size=None, shuffle=shuffled), 100) for make in (DataLoader, own_loader)
    )
    assert values(found) == values(one_by_one)
    assert [vars(step.cursor) for step in found] == [vars(step.cursor) for step in one_by_one]
    for at in (0, 31, 32, 70):
        again = take(DataLoader(listed, batch_size=None, shuffle=shuffled), 5, found[at].cursor)
        assert values(again) == values(found[at + 1 : at + 6])


class OfSteps(IterableDataset[Any]):
    """Looks at how many steps were taken."""

    taken = 0

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield torch.full((2, 1), self.taken)


def test_what_may_look_at_training_is_read_one_by_one() -> None:
    data, seen = OfSteps(), []
    for step in islice(StepBatches(unwrap(DataLoader(data, batch_size=None)).dataset, LOADING), 3):
        seen.append(int(step.data[0]))
        data.taken += 1
    assert seen == [0, 1, 2]
    ways: list[dict[str, Any]] = [{}, {"collate_fn": lambda batch: batch}, {"sampler": [1, 0]}, {"num_workers": 1}]
    loaders = [DataLoader([X, X], batch_size=None, **how) for how in ways]  # type: ignore[var-annotated]
    assert [ReadyBatches(each).are_in_memory for each in loaders] == [True, False, False, False]


def test_an_iterator_ends_after_its_pass_and_the_remedy_is_told() -> None:
    said: list[str] = []
    stream = StepBatches(unwrap(batches(3)).dataset, LOADING, say=said.append)
    assert len(list(stream)) == 3
    assert said == [
        "the data can be iterated once, and gave 3 batches; to go on, give a list, a loader, or a function without "
        "arguments that makes the iterator"
    ]


def test_an_empty_epoch_ends_it() -> None:
    assert take(lambda: batches(0), 3) == []


class Broken:
    def __init__(self, when: str) -> None:
        self.when = when

    def __iter__(self) -> Iterator[Any]:
        if self.when == "begin":
            raise OSError("no such shard")
        return self.items()

    def items(self) -> Iterator[Any]:
        yield torch.ones(2, 2), torch.ones(2)
        raise OSError("no such shard")


@pytest.mark.parametrize(("when", "after"), [("begin", 0), ("later", 1)])
def test_what_it_raises_names_the_batch(when: str, after: int) -> None:
    with pytest.raises(DataError, match=f"OSError: no such shard after {after} batches of epoch 0"):
        take(Broken(when), 3)


def test_arrays_become_tensors() -> None:
    (step,) = take(lambda: iter([{"x": np.ones((2, 3), np.float32), "names": ["a", "b"], "n": [np.arange(2)]}]), 1)
    data = step.micro[0].data
    assert isinstance(data["x"], Tensor) and isinstance(data["n"][0], Tensor) and data["names"] == ["a", "b"]


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(4, 4),
        lambda: torch.randn(4, 4).bfloat16()[:, 1],
        lambda: torch.randn(2000, 3).to(torch.float8_e4m3fn),
        lambda: torch.randn(4, dtype=torch.complex64).conj(),
        lambda: torch.randn(()),
        lambda: [{"a": torch.randn(3).numpy()}, str(random.random())],
        lambda: Graphs(3, torch.randn(7, 3)),
    ],
)
def test_another_value_is_seen_when_it_is_read_again(make: Any) -> None:
    seed_all(1)
    fixed = [make() for _ in range(3)]

    def resumed(second: list[Any]) -> str:
        cursor = take(lambda: iter(fixed), 2)[1].cursor
        stream = StepBatches(unwrap(lambda: iter(second)).dataset, LOADING, cursor=cursor)
        list(islice(stream, 1))
        return stream.resumed

    assert "they are the same" in resumed(fixed)
    assert "NOT the same" in resumed([fixed[0], make(), fixed[2]])


class Graphs:
    def __init__(self, count: int | None, x: Tensor = X) -> None:
        self.x, self.edges = x, torch.ones(2, 9)
        if count is not None:
            self.num_graphs = count


@pytest.mark.parametrize(
    ("batch", "rows"),
    [
        ((torch.ones(4, 2), torch.ones(4)), 4),
        ({"x": torch.ones(4, 2), "scale": torch.tensor(2.0)}, 4),
        ((torch.ones(4, 2), torch.ones(3)), None),
        (torch.tensor(1.0), None),
        (["text"], None),
        (Graphs(None), None),
        (Graphs(3), 3),
    ],
)
def test_rows_are_counted_where_all_tensors_agree(batch: Any, rows: int | None) -> None:
    assert count_rows(batch) == rows
    (step,) = take(lambda: iter([batch]), 1)
    assert step.size == (rows or 1)


def test_evaluation_passes_over_it_each_time() -> None:
    found = EvaluationBatches(unwrap(lambda: batches(3)).dataset, LOADING)
    passes = [[micro.data[0].tolist() for micro in found] for _ in range(2)]
    assert passes[0] == passes[1] and len(passes[0]) == 3
    assert found.count is None and len(list(found.part(2))) == 2
    of_loader = unwrap(DataLoader(list(batches(4)), batch_size=None)).dataset
    assert EvaluationBatches(of_loader, LOADING).count == 4


class Samples(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([(torch.ones(2), 0)] * 8)


def test_what_is_taken_for_ready_batches() -> None:
    taken = [
        DataLoader([1, 2], batch_size=None),
        DataLoader(Samples(), batch_size=None),
        DataLoader(Samples(), batch_size=4, num_workers=2),
        batches(),
        lambda: batches(),
        {1, 2},
    ]
    assert all(isinstance(unwrap(each).dataset, ReadyBatches) for each in taken)
    for not_ready in (Samples(), DataLoader(Samples(), batch_size=4), DataLoader([1, 2], 2), [1, 2], range(3)):
        assert not isinstance(unwrap(not_ready).dataset, ReadyBatches)


def test_what_is_known_of_its_batches() -> None:
    several = unwrap(DataLoader(Samples(), batch_size=4, num_workers=2))
    assert several.own_batches == UserBatches(4, None, ready=True) and several.samples is None
    assert unwrap(DataLoader(list(batches()), batch_size=None)).own_batches == UserBatches(None, 5, ready=True)
    of_sampler = unwrap(DataLoader([1, 2, 3], batch_sampler=[[0], [1, 2]]))
    assert of_sampler.own_batches == UserBatches(None, 2) and length_of(of_sampler.dataset) == 3
    with pytest.raises(UsageError, match="the dataset is empty"):
        unwrap(DataLoader([1, 2, 3], batch_sampler=[]))


def test_one_row_for_a_plan_does_not_use_up_an_iterator() -> None:
    source = unwrap(batches(3)).dataset
    row = source.first_row()
    assert row[0].shape == (3,) and row[1].shape == ()
    assert len(list(StepBatches(source, LOADING))) == 3
    with pytest.raises(DataError, match="rows in common"):
        unwrap(lambda: iter([Graphs(None)])).dataset.first_row()
    with pytest.raises(DataError, match="gave no batch"):
        unwrap(lambda: iter([])).dataset.first_row()


def recipe(**sections: Any) -> Any:
    return from_mapping({"model": {"use": "mlp", "args": {"sizes": [4, 2]}}, "data": {"train": "digits"}, **sections})


@pytest.mark.parametrize(
    ("sections", "ranks", "said"),
    [
        ({"parallel": {"exact": True}, "batch": {"size": 8}}, 2, "cannot be true for ready batches"),
        ({"parallel": {"pipeline": 2}}, 2, "was not shown to work with ready batches"),
        ({"batch": {"size": 8, "micro": 4}}, 1, "batch.micro.*cannot be chosen for ready batches"),
        ({"data": {"train": "digits", "quarantine": [3]}}, 1, "samples are not left out of them"),
        ({"optimizer": {"lr_rule": {"rule": "linear", "base_batch": 8}}}, 1, "is not known"),
    ],
)
def test_what_such_data_cannot_give_is_refused(sections: dict[str, Any], ranks: int, said: str) -> None:
    with pytest.raises(RecipeError, match=said) as caught:
        require_fits(recipe(**sections).recipe, UserBatches(None, None, ready=True), ranks)
    assert all(problem.remedy for problem in caught.value.problems)
    require_fits(recipe().recipe, UserBatches(None, None, ready=True), ranks)


def test_the_batch_of_such_data() -> None:
    joined = recipe(batch={"size": 32, "accumulation": 4}).recipe.batch
    plan = batch_of(joined, UserBatches(8, 10))
    assert (plan.size, plan.micro, plan.accumulation) == (32, 8, 4)
    cut = batch_of(recipe(batch={"size": 8, "micro": 4}).recipe.batch, UserBatches(8, 10))
    assert (cut.size, cut.micro, cut.accumulation) == (8, 4, 2)
