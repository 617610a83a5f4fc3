"""The band of two seeds, what breaks and what pays, on runs that are written by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from trainwright.commands.ladder.result import (
    Band,
    Ladder,
    MeasuredRung,
    RungResult,
    band_of,
    commented,
    gain,
    judge,
    measured,
    windows,
)
from trainwright.commands.ladder.rungs import batch_settings, divided_length, length_settings, rungs_of, steps_of
from trainwright.recipe.load import from_mapping
from trainwright.runs.records import Found
from trainwright.trials import Trial

CURVE = tuple(2.0 - index / 16 for index in range(16))
BASE = MeasuredRung(loss=1.0, curve=CURVE, sample_s=1e-3, peak_bytes=10**9, steps=200)
BAND = Band(loss=0.1, time=0.05, memory=0.05)


def finding(code: str, severity: str = "warning") -> Found:
    return Found(time_s=0, code=code, severity=severity, step=1, symptom="s", cause="c", remedy="r", sure=1.0)


def curve(shift: float) -> tuple[float, ...]:
    return tuple(loss + shift for loss in CURVE)


@pytest.mark.parametrize(
    ("second", "loss"),
    [
        pytest.param(replace(BASE, loss=1.2), 0.4, id="twice the difference of the final losses"),
        pytest.param(replace(BASE, curve=curve(0.3)), 0.6, id="twice that of the curves where it is larger"),
        pytest.param(BASE, 0.01, id="one per cent where they agree"),
        pytest.param(replace(BASE, curve=(*curve(9.0)[:8], *CURVE[8:])), 0.01, id="the first half does not count"),
    ],
)
def test_the_band_comes_from_two_seeds(second: MeasuredRung, loss: float) -> None:
    assert band_of(BASE, second).loss == pytest.approx(loss)


def test_the_margins_of_time_and_memory_are_those_of_the_machine() -> None:
    band = band_of(BASE, replace(BASE, sample_s=0.8e-3))
    assert (band.time, band.memory) == pytest.approx((0.2, 0.05))


@pytest.mark.parametrize(
    ("rung", "outcome", "why"),
    [
        pytest.param(replace(BASE, sample_s=0.5e-3), "adopted", "2.00x as fast", id="faster"),
        pytest.param(replace(BASE, loss=1.09, sample_s=0.5e-3), "adopted", "fast", id="within the band"),
        pytest.param(BASE, "does not pay", "no smaller", id="nothing gained"),
        pytest.param(replace(BASE, sample_s=0.96e-3), "does not pay", "", id="within the margin"),
        pytest.param(replace(BASE, loss=1.11, sample_s=0.5e-3), "breaks", "more than the band", id="worse"),
        pytest.param(replace(BASE, loss=0.5, sample_s=0.5e-3), "adopted", "", id="better"),
        pytest.param(replace(BASE, curve=curve(0.2)), "breaks", "second half", id="the curve is worse"),
        pytest.param(replace(BASE, loss=math.nan), "breaks", "final loss is not finite", id="not finite"),
        pytest.param(replace(BASE, curve=(*CURVE[:15], math.inf)), "breaks", "1 of 16 windows", id="not finite within"),
        pytest.param(replace(BASE, skipped=11), "breaks", "11 of 200 updates", id="skipped steps"),
        pytest.param(replace(BASE, skipped=10), "does not pay", "", id="a few skipped steps"),
        pytest.param(replace(BASE, findings=(finding("prec.x"),)), "breaks", "prec.x: s", id="a new finding"),
        pytest.param(replace(BASE, findings=(finding("known"),)), "does not pay", "", id="a finding of the baseline"),
        pytest.param(replace(BASE, findings=(finding("x", "info"),)), "does not pay", "", id="a note"),
        pytest.param(replace(BASE, findings=(finding("resources.y"),)), "does not pay", "", id="a finding about time"),
        pytest.param(replace(BASE, ended="failed", reason="ran out"), "breaks", "ran out", id="failed"),
    ],
)
def test_a_change_of_the_numerics_must_hold_the_loss_and_pay(rung: MeasuredRung, outcome: str, why: str) -> None:
    verdict = judge("numerics", rung, BASE, BASE.loss, BAND, {"known"})
    assert verdict.outcome == outcome
    assert why in verdict.why


def test_the_finding_that_breaks_a_rung_is_the_new_one() -> None:
    rung = replace(BASE, findings=(finding("known", "critical"), finding("prec.x")))
    broken = judge("numerics", rung, BASE, BASE.loss, BAND, {"known"})
    assert broken.finding is not None and broken.finding.code == "prec.x"
    row = RungResult("fp16", broken, {}, measured=rung)
    shown = "\n".join(Ladder(Path("x"), "r.yaml", 16, 8, (row,), BAND, best="fp32").lines())
    assert "prec.x" in shown and "known" not in shown
    worse = judge("numerics", replace(rung, loss=9.0), BASE, BASE.loss, BAND, {"known", "prec.x"})
    assert worse.outcome == "breaks" and worse.finding is None


def test_small_losses_of_several_rungs_do_not_add_up() -> None:
    below = replace(BASE, loss=1.08)
    rung = replace(BASE, loss=1.15, sample_s=0.5e-3)
    assert judge("numerics", rung, below, below.loss, BAND).outcome == "adopted"
    verdict = judge("numerics", rung, below, BASE.loss, BAND)
    assert verdict.outcome == "breaks"
    assert "the baseline" in verdict.why


@pytest.mark.parametrize(
    ("rung", "outcome"),
    [
        pytest.param(replace(BASE, loss=0.8, sample_s=2e-3), "adopted", id="better and slower"),
        pytest.param(replace(BASE, loss=0.95), "not better", id="the same"),
        pytest.param(replace(BASE, sample_s=0.5e-3), "adopted", id="the same and faster"),
        pytest.param(replace(BASE, loss=1.5, sample_s=0.5e-3), "not better", id="worse"),
        pytest.param(replace(BASE, loss=math.nan), "not better", id="diverged"),
        pytest.param(replace(BASE, curve=curve(0.3), sample_s=0.5e-3), "adopted", id="another curve to the same loss"),
    ],
)
def test_an_optimizer_is_an_alternative_that_never_ends_the_ladder(rung: MeasuredRung, outcome: str) -> None:
    assert judge("optimizer", rung, BASE, BASE.loss, BAND).outcome == outcome


def test_memory_pays_where_it_costs_less_time_than_it_saves() -> None:
    assert "40 % less memory" in gain(replace(BASE, peak_bytes=6 * 10**8, sample_s=1.3e-3), BASE, BAND).replace(
        "%", " %"
    )
    assert gain(replace(BASE, peak_bytes=9 * 10**8, sample_s=1.3e-3), BASE, BAND) == ""


def test_a_trial_is_measured_by_its_validation_loss_or_its_last_losses() -> None:
    losses = tuple((step, 1 / step) for step in range(1, 161))
    trial = Trial(Path("x"), (), "finished", steps=160, losses=losses, step_seconds=(9.0,) * 80 + (0.5,) * 80)
    found = measured(trial, 10)
    assert found.sample_s == pytest.approx(0.05), "the first steps, which compile, do not count"
    assert found.loss == pytest.approx(sum(1 / step for step in range(151, 161)) / 10)
    assert windows([1.0, 3.0]) == (1.0, 3.0)
    assert windows([]) == ()


RECIPE = {"model": "mlp", "data": {"train": "digits"}, "optimizer": "sgd", "batch": {"size": 32}}


def test_the_rungs_of_a_recipe() -> None:
    recipe = from_mapping({**RECIPE, "until": "90steps"}).recipe
    rungs = {rung.name: rung for rung in rungs_of(recipe, skip=["fp16"])}
    assert [*rungs][:2] == ["bf16", "fp16"] and [*rungs][-2:] == ["batch-x2", "batch-x4"]
    assert "requested" in rungs["fp16"].why_not
    assert "of the recipe" in rungs["sgd"].why_not
    assert not rungs["adamw"].why_not
    with pytest.raises(ValueError, match="fp17"):
        list(rungs_of(recipe, skip=["fp17"]))
    assert steps_of(recipe, None, None) == 92, "a multiple of four"
    assert steps_of(recipe, None, 3200) == 100
    with pytest.raises(ValueError, match="too few"):
        steps_of(recipe, None, 64)


def test_a_larger_batch_has_the_same_samples_its_rule_and_warm_up() -> None:
    recipe = from_mapping({**RECIPE, "until": "100steps"}).recipe
    settings = batch_settings(recipe, 4, "sgd")
    assert settings["batch.size"] == "128"
    assert (settings["optimizer.lr_rule.rule"], settings["optimizer.lr_rule.base_batch"]) == ("linear", "32")
    assert batch_settings(recipe, 4, "adamw")["optimizer.lr_rule.rule"] == "sqrt"
    assert settings["schedule.warmup"] == "0.05run"
    assert length_settings(recipe, 200, 4) == {"until": "50steps"}
    assert divided_length(recipe, 4) == {"until": "25steps"}
    ruled = from_mapping({**RECIPE, "optimizer": {"lr_rule": {"rule": "linear", "base_batch": 8}}}).recipe
    assert "optimizer.lr_rule.rule" not in batch_settings(ruled, 2, "adamw"), "the rule of the recipe stays"


def test_a_warm_up_in_steps_keeps_its_part_of_the_run() -> None:
    recipe = from_mapping({**RECIPE, "until": "1000steps", "schedule": {"use": "cosine", "warmup": "100steps"}}).recipe
    assert length_settings(recipe, 200) == {"until": "200steps", "schedule.warmup": "0.1run"}


def test_comments_are_at_the_lines_of_their_paths() -> None:
    text = "until: 1ep\nmodel:\n  use: mlp\n  args: {}\ndata:\n  train:\n    use: digits\n"
    notes = {"model.use": "one", "data.train.use": "two", "use": "nowhere"}
    assert commented(text, notes).splitlines() == [
        "until: 1ep",
        "model:",
        "  use: mlp  # one",
        "  args: {}",
        "data:",
        "  train:",
        "    use: digits  # two",
    ]
