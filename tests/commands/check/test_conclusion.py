"""The conclusion of a check follows from its evidence: no part of it is contradicted."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.commands.check.checked import AMPLE, checked, model
from trainwright.commands.check.learning import ONE_BATCH_MAX_STEPS, BatchFit, RateEvidence, by_heart, learning_rate
from trainwright.commands.check.samples import _parts
from trainwright.commands.check.smoke import SmokeRun, afterwards, diagnosed, trained
from trainwright.commands.check.verdict import CheckResult, Verdict
from trainwright.engine.lr_range import LrRange
from trainwright.runs.records import Found

GUESS = math.log(2)
RANGE = LrRange((1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.2), (0.7, 0.7, 0.6, 0.5, 0.4, 0.9, 3.0), 3e-3, 0.2)
"""The loss falls from 0.003 on, is lowest at 0.03, and explodes at 0.2."""


def run(*losses: float, peak_lr: float = 1.0, guess: float | None = GUESS, **more: Any) -> SmokeRun:
    """A smoke run whose loss goes evenly from the first of ``losses`` to the last."""
    first, last = losses
    return SmokeRun(guess, peak_lr, [first + (last - first) * n / 99 for n in range(100)], **more)


LEARNS, ABOVE, UNKNOWN = run(0.7, 0.2), run(0.9, 0.9), SmokeRun(GUESS)


def evidence(lr: float, smoke: SmokeRun = UNKNOWN, fits: Sequence[BatchFit] = (), **more: Any) -> RateEvidence:
    return RateEvidence(lr, **{"num_steps": 1000.0, "moved": 0.1, "found": RANGE, "fits": fits, "smoke": smoke, **more})


def fit(lr: float, first: float, best: float, last: float | None = None, steps: int = ONE_BATCH_MAX_STEPS) -> BatchFit:
    return BatchFit(first, best, best if last is None else last, steps, lr)


@pytest.mark.parametrize(
    ("seen", "word"),
    [
        (evidence(0.5, ABOVE), "fail"),
        (evidence(0.5, UNKNOWN), "fail"),
        (evidence(0.5, run(0.7, 0.69, peak_lr=0.01)), "fail"),
        (evidence(0.5, run(0.7, 0.2, peak_lr=0.01)), "fail"),
        (evidence(0.5, LEARNS), "warn"),
        (evidence(0.1, LEARNS), "ok"),
        (evidence(0.1, ABOVE), "warn"),
        (evidence(0.1, run(6.2, 5.9, guess=4.9)), "ok"),
        (evidence(0.1, UNKNOWN, [fit(0.1, 0.7, 0.7), fit(0.003, 0.7, 0.1)]), "warn"),
        (evidence(0.1, ABOVE, [fit(0.1, 0.7, 0.7, math.nan, 4), fit(0.003, 0.7, 0.1)]), "fail"),
        (evidence(0.1, LEARNS, [fit(0.1, 0.7, 0.7, math.nan, 4), fit(0.003, 0.7, 0.1)]), "warn"),
        (evidence(0.01, UNKNOWN), "ok"),
        (evidence(0.01, UNKNOWN, found=None), "cannot tell"),
        (evidence(0.01, UNKNOWN, moved=20.0), "fail"),
        (evidence(0.01, LEARNS, moved=20.0), "warn"),
        (evidence(1e-9, UNKNOWN), "fail"),
        (evidence(5e-6, UNKNOWN), "warn"),
        (evidence(1e-7, LEARNS), "ok"),
    ],
    ids=[
        "explodes below, ends above a guess",
        "explodes below, no smoke run",
        "explodes below, warm-up not over",
        "explodes below, learns in the warm-up",
        "explodes below, learns at the peak",
        "below the explosion, learns",
        "below the explosion, ends above a guess",
        "below the explosion, above a guess and still falling",
        "one batch is learned at a lower rate only",
        "two signs without the range test",
        "one batch at a lower rate, but the smoke run learns",
        "in the range",
        "no range test",
        "first update too large",
        "first update large, and it learns",
        "far too low",
        "low",
        "low, and it learns",
    ],
)
def test_the_learning_rate_follows_all_that_was_measured(seen: RateEvidence, word: str) -> None:
    verdict = learning_rate(seen)
    assert verdict.word == word, verdict
    assert bool(verdict.remedy) == (word in ("warn", "fail"))


@pytest.mark.parametrize("lr", [1e-9, 1e-6, 3e-6, 0.25, 0.5, 5.0])
@pytest.mark.parametrize("good", [1e-3, 3e-3, 1e-2])
def test_a_remedy_for_the_rate_is_a_change_and_an_interval(lr: float, good: float) -> None:
    remedy = learning_rate(evidence(lr, found=replace(RANGE, suggestion=good))).remedy
    named = [float(each) for each in re.findall(r"\d[\d.]*(?:e-?\d+)?", remedy.split("(")[0])]
    assert named == sorted(set(named)) and named, remedy
    assert all(each < lr for each in named) if lr > 0.2 else all(each > lr for each in named), remedy


def test_a_rate_that_cannot_be_raised_needs_more_steps() -> None:
    verdict = learning_rate(evidence(2e-3, num_steps=1.0))
    assert verdict.word == "fail" and "until" in verdict.remedy


@pytest.mark.parametrize(
    ("smoke", "word", "words"),
    [
        (LEARNS, "ok", ""),
        (run(80.0, 0.9), "cannot tell", "no better than a guess"),
        (run(0.7, 0.7), "cannot tell", "does not fall"),
        (run(0.7, 2.0), "fail", "diverges"),
        (run(0.7, 2.0, skipped=1), "fail", "diverges"),
        (run(0.7, 0.2, skipped=1), "warn", "1 updates"),
        (run(0.7, math.nan), "fail", "not finite"),
        (run(5.0, 2.0, guess=None), "ok", ""),
    ],
    ids=[
        "learns",
        "above a guess",
        "no fall",
        "diverges",
        "a skip does not hide that it diverges",
        "skips",
        "ends in NaN",
        "no guess known",
    ],
)
def test_the_smoke_run(smoke: SmokeRun, word: str, words: str) -> None:
    [verdict] = trained(smoke, 1.0)
    assert verdict.word == word and words in verdict.seen, verdict
    assert (smoke.learned is True) == (word in ("ok", "warn"))


def test_a_warm_up_is_named() -> None:
    [verdict] = trained(run(0.7, 0.2, peak_lr=0.01), 0.5)
    assert "lr up to 0.01 of 0.5" in verdict.seen


def test_a_validation_loss_above_a_guess_is_not_called_good() -> None:
    bad = run(0.7, 0.2, val_loss=3.0)
    [verdict] = afterwards(bad)
    assert verdict.word == "cannot tell" and "guess" in verdict.seen
    assert bad.learned is False


def test_a_loss_that_is_not_finite_is_no_lack_of_time() -> None:
    """NaN took the place of the best loss, and the verdict was that there was no time."""
    [verdict] = by_heart([fit(0.1, 0.7, 0.7, math.nan, steps=3)], 0.1, inputs_vary=True, chance=None)
    assert verdict.word == "fail" and "diverges to nan" in verdict.seen


def test_one_batch_that_is_learned_at_another_rate_says_so() -> None:
    [verdict] = by_heart([fit(0.5, 0.7, 0.7), fit(0.003, 0.7, 0.1)], 0.5, inputs_vary=True, chance=None)
    assert verdict.word == "ok" and "not in 200 steps at the recipe's lr 0.5" in verdict.seen


def test_a_warning_does_not_hide_a_critical_finding_of_the_same_kind() -> None:
    found = Found(
        code="optim.lr_too_high", severity="critical", step=1, symptom="a", cause="b", remedy="c", sure=0.9, time_s=0.0
    )
    smoke = run(0.7, 0.2, watched=True, findings=[found])
    checkup = CheckResult("recipe.yaml")
    checkup.add(Verdict("warn", "learning rate", "", "lower it", "optim.lr_too_high"))
    assert [each.word for each in diagnosed(smoke, checkup)] == ["fail"]
    checkup.add(Verdict("fail", "learning rate", "", "lower it", "optim.lr_too_high"))
    assert list(diagnosed(smoke, checkup)) == []


@pytest.mark.parametrize(
    ("word", "complete", "learns", "trains", "words"),
    [
        ("ok", True, True, True, "this would train ("),
        ("ok", True, False, None, "no proof that it learns"),
        ("ok", False, True, None, "the rest was not checked"),
        ("cannot tell", True, True, True, "this would train ("),
        ("warn", True, True, True, "read the warnings"),
        ("warn", True, False, None, "no proof that it learns; read the warnings"),
        ("fail", True, True, False, "do not start this run: labels failed"),
        ("fail", False, False, False, "do not start this run: labels failed"),
    ],
)
def test_the_conclusion(word: Any, complete: bool, learns: bool, trains: bool | None, words: str) -> None:
    checkup = CheckResult("recipe.yaml", complete=complete, learns=learns)
    checkup.add(Verdict(word, "labels", "", "fix them"))
    assert checkup.trains is trains and checkup.to_json()["trains"] is trains
    assert words in checkup.summary()
    assert checkup.exit_code == (3 if word == "fail" else 0)


@pytest.mark.slow
def test_a_rate_above_the_explosion_of_its_own_range_test_fails() -> None:
    """A warm-up keeps the smoke run far below the peak, so that nothing else contradicts it."""
    changes = {
        "optimizer": {"use": "sgd", "lr": 10.0, "clip": {"by": "none"}},
        "schedule": {"use": "cosine", "warmup": "0.5run"},
        "until": "20000ep",
    }
    found = checked({**model("net", width=256), **changes}, AMPLE)
    [rate] = [each for each in found.verdicts if each.what == "learning rate"]
    assert rate.word == "fail" and "explodes at" in rate.seen, [v.seen for v in found.verdicts]
    assert found.exit_code == 3 and found.trains is False


@pytest.mark.slow
def test_what_a_short_training_raises_is_a_verdict() -> None:
    found = checked({"loss": "tests.commands.check.parts:sixteen_fail"}, AMPLE)
    assert found.exit_code == 3 and any("16 samples" in each.seen for each in found.verdicts)


def test_a_list_of_token_ids_has_no_label() -> None:
    inputs, target = _parts([1, 5, 202])
    assert target is None and inputs[0].tolist() == [1, 5, 202]
    assert _parts((1, 5, 202))[1] is None


@pytest.mark.parametrize("sample", [(4, 1), ([0.5, 2.0], 1), [torch.ones(3), 1]], ids=["pair", "row", "list"])
def test_the_last_of_other_sequences_is_the_label(sample: object) -> None:
    assert int(_parts(sample)[1]) == 1  # type: ignore[arg-type]
