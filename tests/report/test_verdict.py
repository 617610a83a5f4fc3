"""The verdict on a run: rules on series of losses, with their noise. ``tests/training/test_verdicts.py`` trains."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from trainwright.doctor.finding import make_finding
from trainwright.report.verdict import WORDS, VerdictFacts, judge, noise_of
from trainwright.runs.findings import Severity
from trainwright.runs.records import Evaluated, Found

STEPS = 200
Course = Callable[[float], float]


def series(course: Course, noise: float = 0.0, count: int = STEPS, seed: int = 0) -> list[tuple[int, float]]:
    """Losses over a run whose share that is done goes from 0 to 1."""
    draw = random.Random(seed)
    return [(step, course(step / count) + draw.gauss(0.0, noise)) for step in range(1, count + 1)]


def seen(*losses: float, steps: int = STEPS) -> list[Evaluated]:
    """Evaluations at equal distances."""
    each = steps / len(losses)
    return [
        Evaluated(time_s=0.0, step=round(each * (n + 1)), loss=loss, weight=1.0, metrics={}, seconds=0.1)
        for n, loss in enumerate(losses)
    ]


def facts(course: Course | None = None, noise: float = 0.0, **changes: Any) -> VerdictFacts:
    losses = [] if course is None else series(course, noise)
    made = VerdictFacts(state="finished", step=STEPS, losses=losses, is_one_objective=True)
    return replace(made, **changes)


def found(severity: Severity, code: str = "loss.wrong_sign") -> Found:
    return make_finding(code, severity, 1, symptom="", cause="", remedy="", sure=1.0).found


def falls(t: float) -> float:
    return 0.5 + 2 * math.exp(-5 * t)


LEARNS = facts(falls, 0.05)


@pytest.mark.parametrize(
    ("name", "run", "word"),
    [
        ("it learns", LEARNS, "no finding"),
        ("nobody examined it", replace(LEARNS, examined=False), "not examined"),
        ("no step", facts(step=0), "not measured"),
        ("no loss", facts(), "not measured"),
        ("a critical finding", replace(LEARNS, findings=[found("warning"), found("critical")]), "critical finding"),
        ("a warning", replace(LEARNS, findings=[found("warning")]), "warning"),
        ("an info", replace(LEARNS, findings=[found("info")]), "no finding"),
        ("stopped", replace(LEARNS, state="stopped", reason="SIGTERM"), "ended early"),
        ("out of data", replace(LEARNS, state="data_exhausted"), "ended early"),
        ("failed", replace(LEARNS, state="failed", reason="ValueError"), "failed"),
        ("killed", replace(LEARNS, state="killed"), "killed"),
        ("running", replace(LEARNS, state="running"), "running"),
        ("not known", replace(LEARNS, state="no end record"), "no end record"),
        ("not saved", replace(LEARNS, saved=False), "not saved"),
        ("killed by a fault", replace(LEARNS, state="killed", findings=[found("critical")]), "critical finding"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_word(name: str, run: VerdictFacts, word: str) -> None:
    verdict = judge(run)
    assert (verdict.word, verdict.best_step) == (word, None), name
    assert word in WORDS and "healthy" not in verdict.sentence


HEALTHY: dict[str, tuple[Course, float]] = {
    "fast": (lambda t: 0.5 + 2 * math.exp(-40 * t), 0.2),
    "slow": (lambda t: 1.0 - 0.1 * t, 0.02),
    "noisy": (falls, 1.0),
    "no noise": (falls, 0.0),
    "warm-up": (lambda t: 2.3 + 0.4 * math.sin(math.pi * min(10 * t, 1)) - 1.5 * t, 0.1),
    "plateau first": (lambda t: 2.3 - 2 * max(0.0, t - 0.7), 0.05),
    "negative": (lambda t: -3 * t, 0.3),
    "crosses zero": (lambda t: 1 - 2 * t, 0.1),
    "cyclic": (lambda t: falls(t) + 0.1 * math.sin(20 * t), 0.05),
    "spikes": (lambda t: falls(t) + 20.0 * (round(t * STEPS) % 37 == 0), 0.05),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_loss_that_falls_is_no_trouble(name: str) -> None:
    course, noise = HEALTHY[name]
    for count, seed in itertools.product((20, 100, 400), range(5)):
        run = facts(losses=series(course, noise, count, seed), step=count)
        assert judge(run).word == "no finding", (name, count, judge(run).sentence)


def test_a_loss_that_stays_has_learned_nothing() -> None:
    verdict = judge(facts(lambda t: math.log(2), 0.02))
    assert verdict.word == "learned nothing" and "0.69" in verdict.sentence


def test_a_short_run_is_too_short_to_say_that() -> None:
    short = facts(losses=series(lambda t: math.log(2), 0.02, 40), step=40)
    assert judge(short).word == "no finding"


def test_what_the_noise_hides_is_not_claimed() -> None:
    """A drop of 10 % may be there: the noise of one loss is twice the loss."""
    assert judge(facts(lambda t: 1.0 - 0.1 * t, 2.0)).word == "no finding"


def test_a_validation_loss_tells_where_the_training_loss_is_too_noisy() -> None:
    noisy = facts(lambda t: 0.7, 0.2)
    assert judge(noisy).word == "no finding"
    assert judge(replace(noisy, evaluations=seen(0.7, 0.7, 0.699, 0.7, 0.7))).word == "learned nothing"
    assert judge(replace(noisy, evaluations=seen(0.7, 0.6, 0.55, 0.5))).word == "no finding"


def test_a_guess_is_nothing_learned_even_where_the_first_loss_was_worse() -> None:
    calibrated = facts(lambda t: math.log(2) + 0.3 * math.exp(-40 * t), 0.02, is_one_objective=False)
    assert judge(calibrated).word == "no finding"
    verdict = judge(replace(calibrated, chance=math.log(2)))
    assert verdict.word == "learned nothing" and "guess among all classes is 0.6931" in verdict.sentence
    assert judge(replace(calibrated, chance=math.log(10))).word == "no finding"


def test_a_loss_that_is_no_fixed_objective_is_not_compared() -> None:
    """The losses of adversaries and policies may rise in a healthy run."""
    for course in (lambda t: 0.7, lambda t: 0.7 + t, lambda t: -0.1 + 0.3 * t):
        assert judge(facts(course, 0.02, is_one_objective=False)).word == "no finding"


@pytest.mark.parametrize(
    ("name", "run", "said"),
    [
        ("nan", facts(lambda t: math.nan if t > 0.9 else 1.0), "the training loss is not finite"),
        ("nan in validation", replace(LEARNS, evaluations=seen(1.0, math.nan)), "the validation loss is not finite"),
        ("rises at once", facts(lambda t: 2.3 + 5 * min(1.0, 50 * t), 0.3), "rose from 3."),
        ("ends before it recovers", facts(lambda t: 2.3 + (90 - 60 * t) * min(1.0, 50 * t), 0.3), "rose from 25"),
        ("explodes", facts(lambda t: 8.0 * 1.1 ** (t * STEPS)), "rose from 8."),
        ("falls and rises", facts(lambda t: falls(t) if t < 0.6 else 2.2, 0.05), "and rose to 2."),
        ("all is skipped", replace(LEARNS, skipped=150), "most updates were skipped"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_it_diverged(name: str, run: VerdictFacts, said: str) -> None:
    verdict = judge(run)
    assert verdict.word == "diverged" and said in verdict.sentence, (name, verdict.sentence)


def test_a_loss_that_falls_again_may_recover_in_a_run_that_goes_on() -> None:
    recovers = facts(lambda t: 2.3 + (90 - 60 * t) * min(1.0, 50 * t), 0.3, state="running")
    assert judge(recovers).word == "running"


def test_a_contrastive_loss_may_end_above_its_first_value() -> None:
    queue_fills = facts(lambda t: 0.5 + (7 - 3 * t) * min(1.0, 50 * t), 0.05)
    assert judge(queue_fills).word != "diverged"


def test_a_spike_in_the_middle_is_no_divergence() -> None:
    losses = [(step, 1e20 if step == 90 else loss) for step, loss in series(falls, 0.05)]
    assert judge(facts(losses=losses)).word == "no finding"


def test_losses_near_the_largest_float_are_not_finite() -> None:
    verdict = judge(facts(lambda t: 1.0 if t < 0.5 else 1.7e308, evaluations=seen(1.7e308, -1.7e308)))
    assert verdict.word == "diverged"


def test_one_loss_that_is_not_finite_is_no_divergence() -> None:
    losses = [*series(falls, 0.05), (STEPS + 1, math.inf)]
    assert judge(facts(losses=losses)).word == "no finding"


def val(course: Course, noise: float = 0.0, count: int = 10, seed: int = 0) -> list[Evaluated]:
    return seen(*(loss for _, loss in series(course, noise, count, seed)))


def test_overfitting_names_the_best_step() -> None:
    """The validation loss rises by half while the training loss goes to 0."""
    verdict = judge(facts(lambda t: 0.7 * math.exp(-8 * t), 0.02, evaluations=seen(0.6, 0.5, 0.52, 0.6, 0.68, 0.75)))
    assert (verdict.word, verdict.best_step) == ("overfits", 67)
    assert "lowest at step 67 (0.5000) and is 0.7500" in verdict.sentence


@pytest.mark.parametrize(
    ("name", "evaluations"),
    [
        ("none", []),
        ("one", seen(0.5)),
        ("two", seen(0.5, 0.9)),
        ("best at the end", seen(2.0, 1.5, 1.0, 0.7, 0.5)),
        ("best before the end", seen(2.0, 1.5, 1.0, 0.5, 0.9)),
        ("rises, then falls below", seen(2.3, 4.0, 6.0, 5.0, 3.0, 0.5)),
        ("a plateau", val(lambda t: 0.4 + 1.5 * math.exp(-10 * t), 0.02, 20)),
        ("a slight rise", val(lambda t: 0.4 + 1.5 * math.exp(-10 * t) + 0.01 * t, 0.0, 20)),
        ("the end is of the whole set", [*seen(0.9, 0.7, 0.6, 0.5), replace(seen(0.8)[0], batches=3)]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_no_overfitting(name: str, evaluations: Sequence[Evaluated]) -> None:
    verdict = judge(facts(falls, 0.05, evaluations=evaluations))
    assert (verdict.word, verdict.best_step) == ("no finding", None), (name, verdict.sentence)


@pytest.mark.parametrize("count", [5, 8, 30])
def test_noise_of_the_validation_is_no_overfitting(count: int) -> None:
    """The last two evaluations may well be above the best one, but hardly ever by so much."""
    runs = [facts(falls, 0.05, evaluations=val(lambda t: 0.4, 0.05, count, seed)) for seed in range(100)]
    assert sum(judge(run).word == "overfits" for run in runs) <= 2


def test_a_validation_loss_that_rises_with_the_training_loss_is_no_overfitting() -> None:
    rising = facts(lambda t: 0.5 + t, 0.02, is_one_objective=False, evaluations=seen(0.5, 0.6, 0.8, 1.0, 1.2))
    assert judge(rising).word == "no finding"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({}, "finished without a finding: training loss 2.000 -> 1.000"),
        ({"examined": False}, "finished, not examined by the doctor: training loss 2.000 -> 1.000"),
        (
            {"evaluations": seen(1.0, 0.9, 1.1)},
            "finished without a finding: training loss 2.000 -> 1.000, validation loss 1.100 (lowest 0.9000 at step "
            "133)",
        ),
        (
            {"references": {"unigram": 3.0, "bigram": 1.5}},
            "finished without a finding: training loss 2.000 -> 1.000, 0.50 below what a bigram table reaches (1.50)",
        ),
        (
            {"state": "stopped", "reason": "SIGTERM", "planned_steps": 400},
            "stopped by SIGTERM at step 200 of 400 without a finding: training loss 2.000 -> 1.000",
        ),
        (
            {"state": "failed", "reason": "ValueError: no", "findings": [found("critical")]},
            "failed at step 200 (ValueError: no), but 1 critical: loss.wrong_sign; training loss 2.000 -> 1.000",
        ),
        ({"state": "killed"}, "killed at step 200: training loss 2.000 -> 1.000"),
        (
            {"skipped": 3, "troubles": ("40% of the time went into waiting",)},
            "finished without a finding: training loss 2.000 -> 1.000; 3 of 200 updates were skipped (log.jsonl names "
            "each); 40% of the time went into waiting",
        ),
        ({"losses": ()}, "finished without a finding: no loss was measured"),
    ],
)
def test_the_sentence_says_what_was_measured(changes: dict[str, Any], sentence: str) -> None:
    assert judge(replace(facts(losses=[(1, 2.0), (2, 1.0)] + [(n, 1.0) for n in range(3, 9)]), **changes)).sentence == (
        sentence
    )


def test_the_noise_of_a_course_is_that_around_it() -> None:
    draw = random.Random(0)
    steep = [100 * math.exp(-n / 20) + draw.gauss(0.0, 0.3) for n in range(1000)]
    assert noise_of(steep) == pytest.approx(0.3, rel=0.1)
    assert noise_of([1.0]) == 0.0


@pytest.mark.parametrize(
    ("after", "says"), [((1.9, 2.4), "higher than before training on wiki (2.000 -> 2.400)"), ((1.9, 1.8), "")]
)
def test_a_source_that_became_worse_is_named(after: tuple[float, float], says: str) -> None:
    def evaluated(step: int, val: float, wiki: float) -> Evaluated:
        metrics = {"val.loss": val, "wiki.loss": wiki}
        return Evaluated(time_s=0.0, step=step, loss=val, weight=1.0, metrics=metrics, seconds=0.1)

    verdict = judge(replace(LEARNS, evaluations=[evaluated(0, 2.1, 2.0), evaluated(STEPS, *after)]))
    assert says in verdict.sentence and (verdict.word == "worse than before") is bool(says)


def test_warnings_of_the_audit_are_in_the_verdict() -> None:
    verdict = judge(replace(LEARNS, data_warnings=["loop", "refusal", "loop"]))
    assert verdict.word == "warning" and "the audit of the data warns of loop, refusal" in verdict.sentence


@pytest.mark.parametrize(
    ("losses", "word", "best_step"),
    [
        ((2.0, 1.8, 1.5), "no finding", None),
        ((2.0, 2.01), "no finding", None),
        ((2.0, 2.2, 2.3), "worse than before", None),
        ((2.0, 1.7, 2.3), "worse than before", STEPS // 2),
    ],
    ids=["better", "the same", "worse", "worse after it was better"],
)
def test_a_pretrained_model_is_compared_with_its_start(losses: Any, word: str, best_step: int | None) -> None:
    before = Evaluated(time_s=0.0, step=0, loss=losses[0], weight=1.0, metrics={}, seconds=0.1)
    verdict = judge(replace(LEARNS, evaluations=[before, *seen(*losses[1:])]))
    assert (verdict.word, verdict.best_step) == (word, best_step)
    assert ("before train" in verdict.sentence) == (len(losses) > 1)
    assert judge(replace(LEARNS, evaluations=seen(*losses))).word == "no finding"  # not before the first step


def test_a_validation_loss_that_is_nan_for_bad_samples_is_not_compared_with_the_start() -> None:
    bad = replace(seen(math.nan)[0], bad_samples=(3,))
    before = replace(seen(2.0)[0], step=0)
    verdict = judge(replace(LEARNS, evaluations=[before, bad]))
    assert verdict.word == "warning" and "NaN or infinity in the validation samples 3" in verdict.sentence
    assert "worse than before" not in verdict.sentence
