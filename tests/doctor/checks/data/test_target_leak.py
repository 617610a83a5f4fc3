"""Columns that tell the target: by all classes, on samples that are not the same ones again."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trainwright as tw
from tests.doctor.checks.data.loops import exam, said
from trainwright.doctor.checks.data.target_leak import target_leak
from trainwright.doctor.facts.data import BatchFacts, LeakingColumn
from trainwright.doctor.measure.batches import leaks


def samples(number: int, column: Tensor, columns: int = 6) -> Tensor:
    """Noise, with ``column`` as the third."""
    x = torch.randn(number, columns, generator=torch.Generator().manual_seed(1))
    x[:, 2] = column
    return x


def found(x: Tensor, y: Tensor) -> list[object]:
    return [leak.column for leak in leaks(x, y)]


def test_a_column_that_is_another_for_each_class() -> None:
    y = torch.arange(120) % 4
    assert found(samples(120, torch.tensor([0.3, -2.0, 5.0, 1.0])[y]), y) == [2]
    assert found(samples(120, torch.randn(120)), y) == []


def test_a_column_that_knows_one_class_of_four_does_not_tell_the_target() -> None:
    y = torch.arange(120) % 4
    assert found(samples(120, (y == 1).float()), y) == []
    assert found(samples(120, (y == 1).float()), (y == 1).long()) == [2]


def test_the_same_samples_again_are_no_class() -> None:
    """Each of 30 numbers comes eight times, with its sample: any column is constant where the target is."""
    y = torch.randn(30, generator=torch.Generator().manual_seed(2))
    x = samples(30, y.square())
    assert found(x.repeat(8, 1), y.repeat(8)) == []
    assert found(samples(30, 3 * y - 1).repeat(8, 1), y.repeat(8)) == [2]


def test_a_field_of_a_board_with_a_value_of_its_own_is_no_leak() -> None:
    """The values of fields: one is paid for, and no column tells all others apart."""
    field = torch.arange(400) % 25
    value = torch.tensor([0.1, 0.2])[field % 2].where(field != 3, 0.9)
    x = torch.cat([torch.nn.functional.one_hot(field, 25).float(), samples(400, torch.randn(400))], 1)
    assert found(x, value) == []


def leak(step: int, column: int, *, samples: int = 40, within: float = 0.0) -> object:
    return exam(step, BatchFacts(leaks=(LeakingColumn(column=column, within=within, samples=samples),)))


def test_a_leak_is_reported_where_it_is_certain() -> None:
    assert said(target_leak, leak(1, 3, samples=64)) == ["warning"]
    assert said(target_leak, leak(1, 3), leak(2, 3)) == ["warning"]
    assert said(target_leak, leak(1, 3, within=1e-5), leak(2, 3, within=1e-5)) == ["info"]
    assert not said(target_leak, leak(1, 3))
    assert not said(target_leak, leak(1, 3), leak(2, 7))


@pytest.mark.slow
@pytest.mark.parametrize(("known", "codes"), [(True, ["data.target_leak"]), (False, [])], ids=["leak", "healthy"])
def test_values_to_be_predicted_are_in_the_input(known: bool, codes: list[str]) -> None:
    """A block of past and future values, of which the future ones are the target."""
    torch.manual_seed(0)
    series = torch.randn(400).cumsum(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 3))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    with tw.watch(model, optimizer, out=None, quiet=True, examine="all") as watch:
        for starts in torch.randperm(380)[:192].split(32):
            block = torch.stack([series[n : n + 16] for n in starts.tolist()])
            target = block[:, 13:].clone()
            optimizer.zero_grad()
            F.mse_loss(model(block if known else block * (torch.arange(16) < 13)), target).backward()
            optimizer.step()
    assert [each.code for each in watch.findings() if each.code == "data.target_leak"] == codes
