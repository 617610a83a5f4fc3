"""The laws of evaluations that only show beside training: what is random where, and what is cast."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.doctor.law_loops import BATCH, Change, Loop, states, watched

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
                    (loop.model(evaluated(loop.x[TRAINED:])).argmax(1) == loop.y[TRAINED:]).sum()
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
