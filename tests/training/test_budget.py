"""Runs whose length is what they may cost."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import trainwright as tw
from trainwright.checkpoint.train_state import TrainState
from trainwright.errors import RecipeError
from trainwright.recipe import Duration, from_mapping
from trainwright.training.budget import for_energy, within_budget

RECIPE = {"model": {"use": "mlp"}, "data": {"train": "digits"}}


@pytest.mark.parametrize(
    ("until", "stated", "ranks", "seconds"),
    [("5USD", None, 1, 9000), ("5USD", 4.0, 1, 4500), ("5USD", 2.0, 4, 2250), ("2kWh", None, 1, 2 * 3.6e6 / 700)],
    ids=["table", "recipe", "ranks", "energy"],
)
def test_a_cost_becomes_a_time(until: str, stated: float | None, ranks: int, seconds: float) -> None:
    loaded = within_budget(from_mapping({**RECIPE, "until": until, "price": stated}), 2.0, 700.0, ranks)
    assert loaded.recipe.until == Duration(seconds, "s")
    assert loaded.within_s == (seconds if "USD" in until and ranks == 1 else None)
    assert loaded.energy_kwh == (2.0 if "kWh" in until else None)


@pytest.mark.parametrize(
    ("until", "ranks", "remedy"),
    [("5USD", 1, "write price: 2.5"), ("2kWh", 1, "seconds or USD"), ("2kWh", 2, "in seconds")],
)
def test_what_is_not_known_is_an_error_with_its_remedy(until: str, ranks: int, remedy: str) -> None:
    loaded = from_mapping({**RECIPE, "until": until})
    with pytest.raises(RecipeError, match="until") as caught:
        within_budget(loaded, None, 700.0 if ranks > 1 else None, ranks)
    assert remedy in str(caught.value)


def test_only_the_length_of_a_run_is_a_cost() -> None:
    with pytest.raises(RecipeError, match="can only be the length of the run"):
        from_mapping({**RECIPE, "checkpoint": {"every": "1USD"}})


def test_a_run_ends_by_its_energy() -> None:
    used, now_s = [0.0], [0.0]
    until = for_energy(2.0, lambda: used[0], lambda: now_s[0])
    state = TrainState(model := nn.Linear(1, 1), torch.optim.SGD(model.parameters(), lr=0.1))
    assert until(state) == 0.0
    used[0], now_s[0] = 1.0, 0.1
    assert until(state) == 0.0  # the counter is not read again so soon
    now_s[0] = 1.0
    assert until(state) == 0.5
    used[0], now_s[0] = 2.5, 2.0
    assert until(state) == 1.25


def test_fit_ends_when_the_money_is_spent_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    x = torch.randn(64, 4)
    settings = {"price": 3600.0, "log.doctor": False}  # a dollar a second
    result = tw.fit(
        nn.Linear(4, 2), (x, x[:, 0].gt(0).long()), nn.CrossEntropyLoss(), until="1.5USD", settings=settings
    )
    assert result.ending == "finished" and result.usd is not None and 0.5 < result.usd < 30
    assert result.energy_kwh is None and result.to_json()["usd"] == result.usd
