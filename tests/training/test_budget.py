"""Runs whose length is what they may cost."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import trainwright as tw
from trainwright.checkpoint.train_state import TrainState
from trainwright.errors import RecipeError
from trainwright.monitoring.logbook import TelemetryReader
from trainwright.recipe import Duration, from_mapping, load
from trainwright.recipe.grid import grams_per_kwh
from trainwright.runs.reader import Usage, read_usage
from trainwright.runs.records import Ended, Saved, Started, Telemetry
from trainwright.runs.writer import LogWriter
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
    assert str(loaded.cost) == until and str(loaded.as_written.until) == until


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


@pytest.mark.parametrize(
    ("until", "used", "left_s"), [("5USD", Usage(3600, 9.0), 5400), ("2kWh", Usage(9e9, 1.5), None)]
)
def test_earlier_processes_count(until: str, used: Usage, left_s: float | None) -> None:
    loaded = within_budget(from_mapping({**RECIPE, "until": until}), 2.0, 700.0, 1, used)
    assert loaded.within_s == left_s


@pytest.mark.parametrize(("until", "used"), [("5USD", Usage(9000, 0.0)), ("2kWh", Usage(1.0, 2.5))])
def test_a_limit_that_is_used_up_names_a_higher_one(until: str, used: Usage) -> None:
    with pytest.raises(
        RecipeError, match=r"(?s)until: the run has used .* allow more in total: (10USD|5kWh)"
    ) as caught:
        within_budget(from_mapping({**RECIPE, "until": until}), 2.0, 700.0, 1, used)
    assert "before" in str(caught.value)


def test_the_usage_of_a_run_is_read_from_its_log(tmp_path: Path) -> None:
    begun = {"step": 0, "version": "0", "pid": 1}
    joules = {"gpu0/energy_joules": 3.6e6, "gpu1/energy_joules": 1.8e6}
    with closing(LogWriter(tmp_path / "log.jsonl")) as log:
        log.write(Started(time_s=100.0, **begun))
        log.write(Telemetry(time_s=150.0, step=1, values={name: value / 2 for name, value in joules.items()}))
        log.write(Telemetry(time_s=180.0, step=2, values=joules))
        log.write(Saved(time_s=190.0, step=2, path="step-2", bytes=1, seconds=1.0))
        log.write(Started(time_s=1000.0, **begun))  # the process before was killed
        log.write(Telemetry(time_s=1010.0, step=3, values=joules))
        ended = {"ending": "stopped", "reason": "", "step": 3, "loss": 1.0, "val_loss": None, "skipped": 0}
        log.write(Ended(time_s=1020.0, seconds=20.0, energy_kwh=3.25, **ended))
    assert read_usage(tmp_path / "log.jsonl") == Usage(90.0 + 20.0, 3.25)


def test_the_limit_holds_over_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    x = torch.randn(64, 4)
    settings = {"price": 3600.0, "log.doctor": False, "name": "run"}

    def fit(until: str, **more: Any) -> tw.Result:
        objects = nn.Linear(4, 2), (x, x[:, 0].gt(0).long()), nn.CrossEntropyLoss()
        return tw.fit(*objects, until=until, settings=settings, **more)

    first = fit("1.5USD")
    assert first.usd is not None and "until: 1.5USD" in (first.run / "recipe.yaml").read_text()
    with pytest.raises(RecipeError, match="the run has used"):
        fit("0.1USD", resume=first.run)
    second = fit(f"{first.usd + 2:.3f}USD", resume=first.run)
    assert second.usd is not None and second.usd > first.usd + 0.5 and second.step > first.step


def test_co2_follows_from_energy_and_grid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(TelemetryReader, "energy_kwh", property(lambda _self: 0.5))
    x, settings = torch.randn(64, 4), {"grid": "de", "log.doctor": False}
    result = tw.fit(nn.Linear(4, 2), (x, x[:, 0].gt(0).long()), nn.CrossEntropyLoss(), settings=settings)
    assert (result.energy_kwh, result.co2_g) == (0.5, 190.5)
    assert "0.5 kWh, 190 g CO2" in capsys.readouterr().out


@pytest.mark.parametrize(("grid", "grams"), [("NO", 30.0), ("380", 380.0)], ids=["norway", "grams"])
def test_a_grid_is_a_country_or_grams(tmp_path: Path, grid: str, grams: float) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(f"model: {{use: mlp}}\ndata: {{train: digits}}\ngrid: {grid}\n")
    found = load(path).recipe.grid
    assert found is not None and grams_per_kwh(found) == grams


def test_an_unknown_grid_names_a_known_one() -> None:
    with pytest.raises(RecipeError, match=r"(?s)no carbon intensity is known for 'DEU'.*write DE, or the grams"):
        from_mapping({**RECIPE, "grid": "DEU"})
