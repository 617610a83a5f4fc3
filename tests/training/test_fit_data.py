"""tw.fit with the loaders that people have: what they chose is kept, and what cannot be is said."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

import trainwright as tw
from trainwright.assembly.assemble import Parts
from trainwright.commands.check.samples import read
from trainwright.data.unwrap import unwrap
from trainwright.errors import RecipeError, UsageError
from trainwright.plan.trace.blueprint import make_blueprint
from trainwright.recipe import from_mapping

X = torch.randn(120, 4, generator=torch.Generator().manual_seed(0))
Y = (torch.arange(120) % 12 == 0).long()
ROWS = TensorDataset(X, Y)
QUICK = {"log.doctor": False, "precision": "fp32"}


@pytest.mark.parametrize(
    ("data", "remedy"),
    [
        ((X, Y.tolist()), "torch.tensor(y)"),
        ((X.tolist(), Y.tolist()), "torch.tensor(y)"),
        ((ROWS, ROWS), "val="),
        ({"x": X.tolist(), "y": Y.tolist()}, "a list with one dict for each sample"),
    ],
    ids=["tensor and list", "lists", "datasets", "dict of lists"],
)
def test_a_tuple_of_columns_is_not_taken_for_samples(data: object, remedy: str) -> None:
    with pytest.raises(UsageError) as caught:
        unwrap(data)
    assert remedy in caught.value.remedy


def test_a_tuple_of_a_frame_and_a_series_needs_a_table() -> None:
    pandas = pytest.importorskip("pandas")
    with pytest.raises(UsageError) as caught:
        unwrap((pandas.DataFrame(X.numpy()), pandas.Series(Y.numpy())))
    assert "tw.table" in caught.value.remedy


def test_samples_that_are_tuples_stay_samples() -> None:
    assert unwrap(((X[0], 1), (X[1], 0))).samples == 2


def test_an_observer_may_be_named_as_in_a_recipe() -> None:
    early = {"use": "early_stopping", "args": {"patience": 1, "min_delta": 1e9}}
    options: dict[str, Any] = {"val": (X, Y), "until": "9ep", "batch": 60, "quiet": True, "settings": QUICK}
    results = [
        tw.fit(nn.Linear(4, 2), (X, Y), nn.CrossEntropyLoss(), observers=each, **options) for each in (early, [early])
    ]
    assert [result.step for result in results] == [4, 4]


class Seen(tw.Observer):
    """Records the batches of the steps."""

    def __init__(self) -> None:
        self.results: list[tw.StepResult] = []

    def observe(self, result: tw.StepResult, state: tw.TrainState) -> None:
        self.results.append(result)

    def close(self) -> None: ...

    @property
    def ids(self) -> list[int]:
        return [int(i) for result in self.results for i in result.batch.ids]


def fit(data: Any, **arguments: Any) -> tuple[tw.Result, Seen]:
    seen = Seen()
    arguments = {"until": "6steps", "settings": QUICK, "quiet": True, **arguments}
    torch.manual_seed(0)
    return tw.fit(nn.Linear(4, 2), data, loss, observers=[seen], **arguments), seen


def loss(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch.values() if isinstance(batch, dict) else batch
    return nn.functional.cross_entropy(model(x), y)


def notes(result: tw.Result) -> dict[str, str]:
    return {note["topic"]: note["choice"] for note in json.loads((result.run / "plan.json").read_text())["notes"]}


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    return iter(list(zip(X.split(20), Y.split(20), strict=True)))


def test_the_weights_of_the_classes_are_kept() -> None:
    sampler = WeightedRandomSampler((1.0 / Y.bincount())[Y], 600)
    result, seen = fit(DataLoader(ROWS, 50, sampler=sampler), until="1ep")
    assert result.step == 12
    assert 0.4 < Y[seen.ids].float().mean() < 0.6  # 1 in 12 of the data
    assert notes(result)["order"] == "that of the WeightedRandomSampler"


def test_another_batch_size_takes_the_same_samples() -> None:
    def loader() -> DataLoader[Any]:
        return DataLoader(ROWS, 50, sampler=WeightedRandomSampler([1.0] * 120, 120))

    (_, one), (_, other) = fit(loader(), until="1ep"), fit(loader(), until="1ep", batch=10)
    assert one.ids == other.ids and len(other.results) == 12


def test_batches_of_their_own_are_joined_by_accumulation() -> None:
    loader = DataLoader(ROWS, batch_sampler=[[0, 1, 2], [3], [4, 5]])
    result, seen = fit(loader, accumulation=2, until="2ep")
    assert [[len(micro.ids) for micro in each.batch.micro] for each in seen.results] == [[3, 1], [2]] * 2
    assert notes(result)["batch"] == "as the data come, of the size that they have"
    _, seen = fit(lambda: batches(), accumulation=4)
    assert [len(each.batch.micro) for each in seen.results[:2]] == [4, 2]


def test_a_batch_size_that_the_data_do_not_leave_open_is_refused() -> None:
    for data in (DataLoader(ROWS, batch_sampler=[[0], [1]]), batches()):
        with pytest.raises(UsageError, match="batch=8 contradicts") as caught:
            fit(data, batch=8)
        assert "accumulation" in caught.value.remedy
    with pytest.raises(RecipeError, match=r"batch\.micro"):
        fit(lambda: batches(), settings={"batch.micro": 4})


@pytest.mark.slow
def test_a_validation_set_is_evaluated_more_than_once() -> None:
    with pytest.raises(UsageError, match="val: a list_iterator can be iterated only once"):
        fit(ROWS, val=batches())
    result, _ = fit(ROWS, val=batches)
    whole, _ = fit(ROWS, val=DataLoader(ROWS, batch_sampler=torch.arange(120).split(40)), name="whole")
    assert result.val_loss == pytest.approx(whole.val_loss)


@pytest.mark.slow
def test_a_dict_of_datasets_is_trained_and_validated_on() -> None:
    result, _ = fit({"train": ROWS, "validation": ROWS, "test": ROWS})
    assert result.val_loss is not None
    columns, seen = fit({"x": X, "y": Y.numpy()}, name="columns", settings=QUICK | {"batch.size": 16})
    assert columns.val_loss is None and seen.results[0].batch.micro[0].data["x"].shape == (16, 4)


def test_a_generator_ends_the_run_after_its_pass() -> None:
    result, seen = fit(batches(), until="20steps")
    assert (result.ending, result.step, len(set(seen.ids))) == ("data_exhausted", 6, 120)


def test_a_plan_and_a_check_look_at_ready_batches() -> None:
    data = unwrap(batches)
    recipe = from_mapping({"model": "live:Linear", "data": {"train": "live:batches"}})
    sample: Any = make_blueprint(recipe, Parts(nn.Linear(4, 2), data, {}, nn.CrossEntropyLoss())).sample
    assert sample[0].shape == (4,) and sample[1].shape == ()
    assert read(data, most=8, budget_s=1.0).size is None
