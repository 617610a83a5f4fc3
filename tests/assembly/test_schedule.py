"""Every schedule against torch's scheduler or an independent formula, at every step."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable

import pytest
import torch
from torch.optim import SGD
from torch.optim import lr_scheduler as torch_schedulers

from trainwright.errors import UsageError
from trainwright.optim.schedule import make_schedule
from trainwright.recipe import SCHEDULES

TOTAL = 60
Scheduler = torch_schedulers.LRScheduler


def torch_factors(make: Callable[[SGD], Scheduler], steps: int = TOTAL) -> list[float]:
    """The learning rate of each update, base 1, under one of torch's schedulers."""
    optimizer = SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = make(optimizer)
    factors = []
    for _ in range(steps):
        factors.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return factors


def factors(name: str, *, warmup: int | float = 0, floor: float = 0.0, **args: object) -> list[float]:
    schedule = make_schedule(name, total=TOTAL, warmup=warmup, floor=floor, args=args)
    return [schedule(step, math.nan) for step in range(TOTAL)]  # in steps, the fraction is ignored


def test_cosine_is_torchs_cosine_annealing() -> None:
    theirs = torch_factors(lambda o: torch_schedulers.CosineAnnealingLR(o, T_max=TOTAL, eta_min=0.1))
    assert factors("cosine", floor=0.1) == pytest.approx(theirs, rel=1e-9)


def test_warmup_and_cosine_are_torchs_sequence_of_both() -> None:
    def sequence(o: SGD) -> Scheduler:
        ramp = torch_schedulers.LinearLR(o, start_factor=1 / 12, total_iters=11)
        cosine = torch_schedulers.CosineAnnealingLR(o, T_max=TOTAL - 12, eta_min=0.05)
        return torch_schedulers.SequentialLR(o, [ramp, cosine], milestones=[12])

    assert factors("cosine", warmup=12, floor=0.05) == pytest.approx(torch_factors(sequence), rel=1e-9)
    assert factors("cosine", warmup=0.2, floor=0.05) == factors("cosine", warmup=12, floor=0.05)


@pytest.mark.parametrize("mult", [1, 2])
def test_restarts_are_torchs_warm_restarts(mult: int) -> None:
    def restarts(o: SGD) -> Scheduler:
        return torch_schedulers.CosineAnnealingWarmRestarts(o, T_0=7, T_mult=mult, eta_min=0.02)

    ours = factors("restarts", floor=0.02, cycle=7, mult=mult)
    assert ours == pytest.approx(torch_factors(restarts), rel=1e-9)


def test_restarts_decay_their_peaks_and_start_after_the_warmup() -> None:
    ours = factors("restarts", warmup=10, cycle=0.25, decay=0.5)  # cycles of 15 steps from step 10 on
    assert [ours[10], ours[25], ours[40], ours[55]] == [1.0, 0.5, 0.25, 0.125]
    assert factors("restarts", warmup=10, cycle=15, decay=0.5, floor=0.3)[55] == 0.3


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_polynomial_is_torchs_polynomial(power: float) -> None:
    theirs = torch_factors(lambda o: torch_schedulers.PolynomialLR(o, total_iters=TOTAL, power=power))
    assert factors("polynomial", power=power) == pytest.approx(theirs, rel=1e-9)
    if power == 1.0:
        assert factors("linear") == pytest.approx(theirs, rel=1e-9)


def test_step_decay_is_torchs_step_lr() -> None:
    theirs = torch_factors(lambda o: torch_schedulers.StepLR(o, step_size=14, gamma=0.3))
    assert factors("step", every=14, gamma=0.3) == pytest.approx(theirs, rel=1e-9)
    assert factors("step", every=0.5, floor=0.4)[-1] == 0.4


@pytest.mark.parametrize("shape", ["linear", "sqrt", "cosine"])
def test_wsd_is_warm_then_stable_then_decays(shape: str) -> None:
    fall = {
        "linear": lambda u: 1 - u,
        "sqrt": lambda u: 1 - u**0.5,
        "cosine": lambda u: math.cos(math.pi * u / 2) ** 2,
    }[shape]
    expected = [(i + 1) / 6 for i in range(6)] + [1.0] * 42 + [0.1 + 0.9 * fall(k / 12) for k in range(12)]
    assert factors("wsd", warmup=6, floor=0.1, decay=0.2, shape=shape) == pytest.approx(expected, rel=1e-12)
    assert factors("wsd", warmup=6, floor=0.1, decay=12, shape=shape) == pytest.approx(expected, rel=1e-12)


def test_the_first_and_the_last_step() -> None:
    ours = factors("cosine", warmup=10, floor=0.1)
    assert (ours[0], ours[9], ours[10]) == (1 / 10, 1.0, 1.0)
    assert 0.1 < ours[-1] < 0.102  # one step short of the floor, as torch's
    schedule = make_schedule("cosine", total=TOTAL, warmup=10, floor=0.1)
    assert schedule(TOTAL, 1.0) == schedule(TOTAL + 99, 1.0) == pytest.approx(0.1)
    assert factors("constant", warmup=10, warmup_floor=0.5)[:3] == [0.55, 0.6, 0.65]
    assert factors("constant") == [1.0] * TOTAL


def test_a_warmup_as_long_as_the_run_only_warms_up() -> None:
    assert factors("cosine", warmup=TOTAL) == [(i + 1) / TOTAL for i in range(TOTAL)]
    assert factors("linear", warmup=1.0)[-1] == 1.0


@pytest.mark.parametrize("name", ["cosine", "linear", "polynomial", "wsd"])
@pytest.mark.parametrize("warmup", [0, 0.1])
def test_under_a_time_budget_the_fraction_decides(name: str, warmup: float) -> None:
    schedule = make_schedule(name, total=None, warmup=warmup, floor=0.1)
    shares = [k / 500 for k in range(501)]
    ours = [schedule(step, share) for step, share in enumerate(shares)]
    assert ours == [schedule(0, share) for share in shares]  # pure, and the step says nothing
    peak = ours.index(max(ours))
    assert shares[peak] == warmup and ours[peak] == 1.0
    assert ours[: peak + 1] == sorted(ours[: peak + 1])
    assert ours[peak:] == sorted(ours[peak:], reverse=True)
    assert ours[-1] == pytest.approx(0.1)


def test_under_a_time_budget_both_clocks_agree_with_steps() -> None:
    """A run of 60 steps of equal length: its shares are i / 60, and both clocks must say the same."""
    by_time = make_schedule("cosine", total=None, warmup=0.25, floor=0.1)
    by_steps = make_schedule("cosine", total=TOTAL, warmup=15, floor=0.1)
    after_warmup = range(15, TOTAL)
    assert [by_time(0, i / TOTAL) for i in after_warmup] == pytest.approx(
        [by_steps(i, 0.0) for i in after_warmup], rel=1e-12
    )


def test_a_warmup_in_steps_multiplies_under_a_time_budget() -> None:
    warm = make_schedule("linear", total=None, warmup=10, floor=0.0)
    cold = make_schedule("linear", total=None, warmup=0, floor=0.0)
    assert warm(4, 0.3) == pytest.approx(0.5 * cold(4, 0.3))
    assert warm(10, 0.3) == cold(10, 0.3) == pytest.approx(0.7)


def test_restarts_and_steps_under_a_time_budget() -> None:
    by_share = make_schedule("restarts", total=None, args={"cycle": 0.25})
    assert by_share(3, 0.5) == 1.0 and by_share(3, 0.625) == pytest.approx(0.5)
    by_steps = make_schedule("restarts", total=None, warmup=2, args={"cycle": 10})
    assert by_steps(12, 0.9) == 1.0 and by_steps(17, 0.9) == pytest.approx(0.5)
    halves = make_schedule("step", total=None, args={"every": 0.5, "gamma": 0.1})
    assert [halves(0, share) for share in (0.0, 0.49, 0.5, 0.99)] == [1.0, 1.0, 0.1, 0.1]


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_resumed_run_gets_the_same_bits(name: str) -> None:
    schedule = make_schedule(name, total=TOTAL, warmup=5, floor=0.1)
    whole = [schedule(step, step / TOTAL) for step in range(TOTAL)]
    resumed = pickle.loads(pickle.dumps(schedule))
    assert [resumed(step, step / TOTAL) for step in range(23, TOTAL)] == whole[23:]
    assert repr(resumed) == repr(schedule)
    assert all(0 <= factor <= 1 for factor in whole)


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("cosin", {}, "cosine"),
        ("polynomial", {"args": {"pwoer": 2}}, "power"),
        ("cosine", {"args": {"power": 2}}, "warmup_floor"),
        ("cosine", {"warmup": -1}, "warmup"),
        ("cosine", {"warmup": 1.5}, "fraction"),
        ("cosine", {"warmup": "10"}, "warmup"),
        ("cosine", {"floor": 2}, "floor"),
        ("cosine", {"total": 0}, "total"),
        ("polynomial", {"args": {"power": 0}}, "power"),
        ("restarts", {"args": {"cycle": 0}}, "cycle"),
        ("restarts", {"args": {"mult": 0.5}}, "mult"),
        ("step", {"args": {"gamma": 0}}, "gamma"),
        ("wsd", {"args": {"shape": "sqr"}}, "sqrt"),
        ("wsd", {"total": None, "args": {"decay": 100}}, "fraction of the run"),
    ],
)
def test_what_is_wrong_is_said_with_a_remedy(name: str, options: dict[str, object], says: str) -> None:
    with pytest.raises(UsageError) as caught:
        make_schedule(name, **{"total": TOTAL, **options})  # type: ignore[arg-type]
    assert says in str(caught.value) and caught.value.remedy
