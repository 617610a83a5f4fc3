"""Updates that are many times too small are found by what three times their way, or ten times the rate, would give."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from tests.doctor.law_loops import Change, Loop, as_it_is, broken, states, watched
from tests.rows import each_row
from trainwright.doctor.case import Case
from trainwright.doctor.finding import ExperimentRequest, Finding
from trainwright.doctor.law import Holds, NotApplicable
from trainwright.doctor.vitals.facts import HigherRatesFacts, ReachFacts, VitalsFacts
from trainwright.doctor.vitals.reach import higher_rates_gain_little, is_left_at_its_top, way_is_used
from trainwright.runlog.json_values import strict
from trainwright.runlog.records import Examined, Watched

STRAIGHT = ReachFacts(8, 40, 2.0, 1.9, 1.7, True)


def tenth_of_the_loss(loop: Loop) -> None:
    loop.loss = lambda out, y: F.cross_entropy(out, y) / 10


def clipped(loop: Loop) -> None:
    loop.before_update = lambda step: nn.utils.clip_grad_norm_(loop.model.parameters(), 0.05)


def warm_for_ever(loop: Loop) -> None:
    for group in loop.optimizer.param_groups:
        group["lr"] /= 10


def comes_down_at_once(loop: Loop) -> None:
    def come_down(step: int) -> None:
        loop.optimizer.param_groups[0]["lr"] *= 0.05 if step == 20 else 1.0

    loop.end = come_down


def decays_each_step(loop: Loop) -> None:
    def decay(step: int) -> None:
        loop.optimizer.param_groups[0]["lr"] *= 0.92 if step > 4 else 1.0

    loop.end = decay


def ends_its_cosine_too_soon(loop: Loop) -> None:
    highest = loop.optimizer.param_groups[0]["lr"]

    def follow(step: int) -> None:  # planned for 24 steps of the 56
        share = min(1.0, step / 24)
        loop.optimizer.param_groups[0]["lr"] = highest * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * share)))

    loop.begin = follow


def rises_all_the_time(loop: Loop) -> None:
    def rise(step: int) -> None:
        loop.optimizer.param_groups[0]["lr"] = 1e-5 * step

    loop.begin = rise


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "optimizer", "lr", "state"),
    [
        (as_it_is, AdamW, 1e-2, "not applicable"),
        (as_it_is, partial(SGD, momentum=0.9), 0.1, "not applicable"),
        (comes_down_at_once, AdamW, 1e-2, "broken"),
        (decays_each_step, AdamW, 1e-2, "broken"),
        (ends_its_cosine_too_soon, AdamW, 1e-2, "broken"),
        (rises_all_the_time, AdamW, 1e-2, "not applicable"),
    ],
    ids=["as it is", "as it is, SGD", "comes down", "decays", "ends too soon", "warms up"],
)
def test_rates_that_ten_times_as_much_would_beat(
    change: Change, optimizer: Callable[..., Optimizer], lr: float, state: str
) -> None:
    watch = watched(change, steps=56, optimizer=optimizer, lr=lr)
    assert states(watch, "vitals")["higher_rates_gain_little"].state == state


@pytest.mark.slow
@pytest.mark.parametrize(("lr", "is_too_low"), [(3e-4, True), (1e-2, False)])
def test_a_rate_that_was_always_far_too_low(lr: float, is_too_low: bool) -> None:
    watch = watched(as_it_is, steps=128, lr=lr)
    assert (states(watch, "vitals")["higher_rates_gain_little"].state == "broken") == is_too_low


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "optimizer", "lr", "breaks"),
    [
        (as_it_is, AdamW, 1e-2, False),
        (as_it_is, partial(SGD, momentum=0.9), 0.1, False),
        (warm_for_ever, AdamW, 1e-2, True),
        (tenth_of_the_loss, SGD, 0.1, True),
        (clipped, SGD, 0.1, True),
    ],
    ids=["as it is", "as it is, SGD", "warm for ever", "a tenth of the loss", "clipped"],
)
def test_updates_that_are_too_small(
    change: Change, optimizer: Callable[..., Optimizer], lr: float, breaks: bool
) -> None:
    watch = watched(change, steps=48, optimizer=optimizer, lr=lr)
    assert ("way_is_used" in broken(watch, "vitals")) == breaks


def case_of(
    *facts: ReachFacts | HigherRatesFacts,
    rate: Callable[[int], float] = lambda step: 0.1,
    loss: Callable[[int], float] = lambda step: 1.0,
    steps: int = 130,
    frozen: int = 0,
) -> Case:
    event: dict[str, object] = {"optimizer": 0}
    records = [
        Watched(time_s=0.0, step=n, loss=loss(n), grad_norm=1.0, lr=rate(n), events=strict((("step", event),)))
        for n in range(1, steps + 1)
    ]
    vitals = VitalsFacts(steps=steps, updates=steps, tensors=4, frozen_still=frozen)
    seen = [
        Examined(time_s=0.0, step=each.until, experiment=each.experiment, values=strict(vars(each))) for each in facts
    ]
    last = Examined(time_s=0.0, step=steps, experiment="vitals", values=strict(vars(vitals)))
    return Case([*records, *seen, last], finished=True)


@each_row(
    ("case", "kind"),
    [
        (case_of(STRAIGHT, ReachFacts(16, 48, 1.9, 1.8, 1.6, True)), Finding),
        (case_of(STRAIGHT), Holds),
        (case_of(STRAIGHT, ReachFacts(16, 48, 1.9, 1.8, 1.6, False)), Holds),
        (case_of(STRAIGHT, ReachFacts(16, 48, 1.9, 1.8, 1.79, True)), Holds),
        (case_of(STRAIGHT, ReachFacts(16, 48, 1.9, 1.8, 1.6, True), frozen=1), NotApplicable),
        (case_of(STRAIGHT, ReachFacts(16, 48, 1.9, 1.8, 1.6, True), rate=lambda step: 1.0 / step), Holds),
    ],
    ids=lambda value: "",
)
def test_two_looks_with_a_steady_rate_must_show_it(case: Case, kind: type) -> None:
    verdicts = [each for each in way_is_used(case) if isinstance(each, Finding | Holds | NotApplicable)]
    assert [type(each) for each in verdicts] == [kind]


SLOW = HigherRatesFacts(90, 130, 2.0, 1.9, 1.7, 1.6, fell=True, surely=True)


@pytest.mark.parametrize(
    ("steps", "updates", "severity"),
    [
        (60, 48, "info"),
        (110, 48, "info"),
        (130, 48, "warning"),
        (130, 32, "info"),
        (130, 0, "warning"),
        (60, 150, "warning"),
    ],
    ids=["a trial", "a short run", "a run", "skipped", "not counted", "resumed"],
)
def test_a_trial_of_a_few_steps_is_told_no_more_than_that(steps: int, updates: int, severity: str) -> None:
    again = ReachFacts(16, 48, -1.9, -2.0, -2.4, True, updates)
    [finding] = [
        each
        for each in way_is_used(case_of(STRAIGHT, again, replace(SLOW, until=steps), steps=steps))
        if isinstance(each, Finding)
    ]
    assert finding.found.severity == severity


@pytest.mark.parametrize("surely", [True, False])
def test_larger_rates_must_gain_as_well(surely: bool) -> None:
    again = ReachFacts(16, 48, -1.9, -2.0, -2.4, True, 48)
    verdicts = list(way_is_used(case_of(STRAIGHT, again)))
    assert "higher_rates" in [each.experiment for each in verdicts if isinstance(each, ExperimentRequest)]
    case = case_of(STRAIGHT, again, replace(SLOW, surely=surely))
    [finding] = [each for each in way_is_used(case) if isinstance(each, Finding)]
    assert finding.found.severity == ("warning" if surely else "info")


def test_a_loss_that_goes_up_and_down_through_0_is_no_measure() -> None:
    """As that of a policy, whose targets are other ones in each step."""
    again = ReachFacts(16, 48, -1.9, -2.0, -2.4, True, 48)
    case = case_of(STRAIGHT, again, SLOW, loss=lambda step: (-1.0) ** (step // 3))
    for law in (way_is_used, higher_rates_gain_little):
        assert not any(isinstance(each, Finding | Holds) for each in law(case))


@pytest.mark.parametrize("again", [(1.9, 1.8, 1.4), (-1.9, -2.0, -2.2)], ids=["a rate with care", "in proportion"])
def test_a_loss_that_falls_slowly_is_an_info(again: tuple[float, float, float]) -> None:
    [finding] = [
        each for each in way_is_used(case_of(STRAIGHT, ReachFacts(16, 48, *again, True))) if isinstance(each, Finding)
    ]
    assert finding.found.severity == "info"


def early(step: int) -> float:
    return 0.1 if step < 20 else 0.01


FAR = replace(SLOW, tenfold=1.2, nearly_as=True)
LAST = ReachFacts(80, 130, 2.0, 1.9, 1.8, False)


@each_row(
    ("case", "kind"),
    [
        (case_of(SLOW, rate=early), Finding),
        (case_of(replace(SLOW, surely=False), rate=early), Holds),
        (case_of(replace(SLOW, fell=False), rate=early), Holds),
        (case_of(replace(SLOW, tenfold=1.89), rate=early), Holds),
        (case_of(replace(SLOW, drawn=True), rate=early), NotApplicable),
        (case_of(SLOW, frozen=1, rate=early), NotApplicable),
        (case_of(SLOW), ExperimentRequest),
        (case_of(LAST), ExperimentRequest),
        (case_of(LAST, SLOW), Holds),
        (case_of(LAST, FAR), Finding),
        (case_of(replace(LAST, until=90), replace(FAR, until=90), steps=90), NotApplicable),
        (case_of(LAST, FAR, frozen=1), NotApplicable),
        (case_of(replace(LAST, endless=True), FAR), NotApplicable),
        (case_of(replace(LAST, beyond=1.9), FAR), NotApplicable),
        (case_of(LAST, FAR, rate=lambda step: 0.1 * step), NotApplicable),
        (case_of(SLOW, rate=lambda step: 0.1 if step < 120 else 0.01), NotApplicable),
        (case_of(LAST, SLOW, rate=lambda step: early(step) * (1 + step / 100)), NotApplicable),
        (case_of(rate=early), ExperimentRequest),
    ],
    ids=lambda value: "",
)
def test_a_rate_must_surely_be_too_small(case: Case, kind: type) -> None:
    assert [type(each) for each in higher_rates_gain_little(case)] == [kind]


@pytest.mark.parametrize("updates", [0, 512])
def test_a_run_that_goes_slowly_is_an_info(updates: int) -> None:
    case = case_of(replace(SLOW, updates=updates), steps=130, rate=early)
    [finding] = [each for each in higher_rates_gain_little(case) if isinstance(each, Finding)]
    assert finding.found.severity == "info"


@each_row(
    ("rates", "is_left"),
    [
        ([*range(1, 11), *[1] * 50], True),
        ([*range(1, 11), *[10] * 50], False),
        ([*range(1, 11), *(10 - 0.18 * n for n in range(50))], False),
        ([10, 1] * 20, False),
        ([10] * 12 + [1] * 40, False),
        ([*range(1, 31), *[1] * 20], False),
        ([*range(1, 11), *[1] * 25, *[5] * 25], False),
    ],
    ids=lambda value: "",
)
def test_a_warm_up_that_is_left_at_its_top(rates: list[float], is_left: bool) -> None:
    assert is_left_at_its_top(rates) == is_left


def grows(step: int) -> float:
    return 0.1 if step <= 48 else 0.1 + 0.01 * (step - 48)


def test_a_rate_that_has_grown_since_is_no_longer_that_of_the_way() -> None:
    """Hypergradients, distances that are learned, long warm-ups; one that goes on to be too small is seen again."""
    again = ReachFacts(16, 48, 1.9, 1.8, 1.6, True)
    later = [ReachFacts(n - 32, n, 1.9, 1.8, 1.6, True) for n in (120, 128)]
    assert not any(isinstance(each, Finding) for each in way_is_used(case_of(STRAIGHT, again, rate=grows)))
    slow = case_of(STRAIGHT, again, *later, rate=grows)
    assert any(isinstance(each, Finding) for each in way_is_used(slow))


def difference(out: Tensor, y: Tensor) -> Tensor:
    """Of the scores of two kinds of samples: a critic, a ranking without a margin, contrastive divergence."""
    return out[y > 1].mean() - out[y <= 1].mean()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "endless"),
    [
        (difference, True),
        (lambda out, y: (y - y.float().mean()) @ out[:, 0] / len(y), True),
        (lambda out, y: F.softplus(difference(out, y)), False),
        (lambda out, y: difference(out, y) + 1e-2 * out.square().mean(), False),
        (lambda out, y: -out.log_softmax(1).gather(1, y[:, None]).mean(), False),
    ],
    ids=["difference", "covariance", "logistic", "held", "likelihood"],
)
def test_a_difference_of_outputs_has_no_minimum(loss: Callable[[Tensor, Tensor], Tensor], endless: bool) -> None:
    def change(loop: Loop) -> None:
        loop.loss = loss

    watch = watched(change, steps=50, optimizer=SGD, lr=1e-3)
    [*_, seen] = [facts for _, facts in Case(watch.records, finished=True).every(ReachFacts)]
    assert seen.endless == (endless and seen.surely)
    assert not (endless and "way_is_used" in broken(watch, "vitals"))


def test_a_way_without_end_is_none_that_tells() -> None:
    again = ReachFacts(16, 48, 1.9, 1.8, 1.6, True, endless=True)
    assert [type(each) for each in way_is_used(case_of(STRAIGHT, again))][-1] is NotApplicable
