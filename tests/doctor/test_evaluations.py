"""The laws of evaluations that only show beside training: what is random where, and what is cast."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.doctor.law_loops import BATCH, Change, Loop, states, watched
from trainwright.doctor.data.possible import Beside, _blind, _misled, _wrong_accuracy

TRAINED, EVERY = 80, 5
Prepare = Callable[[Tensor], Tensor]


def same(x: Tensor) -> Tensor:
    return x


def noisy(x: Tensor) -> Tensor:
    return x + 0.1 * torch.randn_like(x)


def scaled(x: Tensor) -> Tensor:
    """Each value by a factor of its own."""
    return x * (0.5 + torch.rand_like(x))


def dimmed(x: Tensor) -> Tensor:
    """Each row by a factor of its own."""
    return x * (0.5 + torch.rand(len(x), 1))


def cast(x: Tensor) -> Tensor:
    return x.to(torch.int64).float()


def prepared(trained: Prepare, evaluated: Prepare) -> Change:
    def change(loop: Loop) -> None:
        plain = loop.forward
        loop.batch = lambda step: torch.arange(step * BATCH, (step + 1) * BATCH) % TRAINED
        loop.forward = lambda x: plain(trained(x))

        def end(step: int) -> None:
            if step % EVERY == EVERY - 1:
                loop.model.eval()
                with torch.no_grad():
                    loop.model(evaluated(loop.x[TRAINED:]))
                loop.model.train()

        loop.end = end

    return change


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trained", "evaluated", "law", "state"),
    [
        (same, same, "evaluation_is_the_same", "held"),
        (noisy, same, "evaluation_is_the_same", "held"),
        (same, noisy, "evaluation_is_the_same", "broken"),
        (same, scaled, "evaluation_is_the_same", "broken"),
        (same, dimmed, "evaluation_is_the_same", "broken"),
        (cast, cast, "evaluation_is_alike", "held"),
        (noisy, cast, "evaluation_is_alike", "held"),
        (cast, same, "evaluation_is_alike", "broken"),
        (torch.round, noisy, "evaluation_is_alike", "broken"),
        (torch.floor, same, "evaluation_is_alike", "broken"),
    ],
)
def test_what_is_random_or_cast_in_one_of_both(trained: Prepare, evaluated: Prepare, law: str, state: str) -> None:
    watch = watched(prepared(trained, evaluated), steps=26)
    assert states(watch, "data")[law].state == state
    codes = {each.code for each in watch.findings() if each.severity == "warning"}
    assert (f"law.data.{law}" in codes) == (state == "broken")


def test_other_rows_each_time_are_an_info_where_training_has_them_too() -> None:
    watch = watched(prepared(noisy, noisy), steps=26)
    assert [each.severity for each in watch.findings() if "evaluation_is_the_same" in each.code] == ["info"]


@pytest.mark.parametrize(
    ("value", "loss", "rows", "wrong"),
    [
        (0.3, 0.3, 200, True),
        (0.25, 0.6, 64, True),
        (26.0, 0.3, 200, True),
        (0.1, 1.0, 64, True),
        (0.4, 0.3, 200, False),
        (0.3, 0.9, 200, False),
        (0.3, 0.3, 32, False),
        (0.26, 1.38, 200, False),
    ],
)
def test_an_accuracy_beside_the_losses_of_training(value: float, loss: float, rows: int, wrong: bool) -> None:
    beside = Beside(first=1.4, now=loss, classes=4, rows=rows)
    assert bool(_wrong_accuracy(value, beside) or _blind(value, beside)) == wrong


@pytest.mark.parametrize(
    ("value", "first", "now", "wrong"),
    [
        (1.9, 1.4, 0.3, True),
        (1.8, 1.6, 0.6, True),
        (5.0, 1.2, 0.01, True),
        (1.6, 1.4, 0.3, False),
        (1.9, 1.4, 0.9, False),
        (1.9, 4.0, 0.3, False),
    ],
)
def test_a_loss_above_that_of_knowing_nothing(value: float, first: float, now: float, wrong: bool) -> None:
    assert bool(_misled(value, Beside(first=first, now=now, classes=4))) == wrong
