"""Random states that repeat, and rates that are 0 or negative."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy
import pytest
import torch
from torch import nn

import trainwright as tw
from tests.doctor.checks.data.loops import exam, said
from tests.doctor.checks.loops import alarms, mlp, watched
from trainwright.doctor.check import Check
from trainwright.doctor.discovery import check_of
from trainwright.doctor.facts.weights import WeightsFacts


def of(code: str) -> Check:
    found = check_of(code)
    assert found is not None
    return found


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [True, False], ids=["seeded in each step", "seeded once"])
def test_a_seed_in_the_loop(seeds: bool) -> None:
    def after_update() -> None:
        if seeds:
            torch.manual_seed(1)

    found = alarms(watched(mlp(nn.Dropout(0.2)), after_update=after_update))
    assert ("loop.random_state_repeats" in found) == seeds


def keeps_the_state() -> None:
    state = torch.get_rng_state()
    torch.manual_seed(1)
    torch.set_rng_state(state)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preview", "draws", "found"),
    [
        (lambda: torch.manual_seed(1), True, True),
        (lambda: torch.manual_seed(1), False, False),
        (keeps_the_state, True, False),
    ],
    ids=["noise repeats", "nothing is drawn", "the state is kept"],
)
def test_a_preview_between_steps(preview: Callable[[], object], draws: bool, found: bool) -> None:
    """The noise is drawn before the model is called, which draws nothing itself."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x = torch.randn(8, 4)
    with tw.watch(model, optimizer, out=None, quiet=True, examine="listen") as watch:
        for step in range(24):
            if step % 3 == 0:
                preview()
            noise = torch.randn_like(x) if draws else 0.1 * x
            optimizer.zero_grad()
            (model(x + noise) - noise).square().mean().backward()
            optimizer.step()
    assert ("loop.random_state_repeats" in {each.code for each in watch.findings()}) == found


def constant_seed(step: int) -> float:
    numpy.random.seed(0)
    return float(numpy.random.rand())


def constant_seed_of_python(step: int) -> float:
    random.seed(0)
    return random.random()


def seed_of_the_step(step: int) -> float:
    numpy.random.seed(step)
    return float(numpy.random.rand())


def seed_without_draws(step: int) -> float:
    numpy.random.seed(0)
    return 1.0


def state_is_restored(step: int) -> float:
    state = numpy.random.get_state()
    numpy.random.seed(0)
    drawn = float(numpy.random.rand())
    numpy.random.set_state(state)
    return drawn


@pytest.mark.parametrize(
    ("draw", "found"),
    [
        (constant_seed, True),
        (constant_seed_of_python, True),
        (seed_of_the_step, False),
        (seed_without_draws, False),
        (state_is_restored, False),
    ],
)
def test_a_transform_that_seeds(draw: Callable[[int], float], found: bool) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with tw.watch(model, optimizer, out=None, quiet=True, examine="listen") as watch:
        for step in range(16):
            optimizer.zero_grad()
            model(torch.randn(8, 4) * draw(step)).square().mean().backward()
            optimizer.step()
    assert ("loop.random_state_repeats" in {each.code for each in watch.findings()}) == found


@pytest.mark.slow
def test_steps_that_draw_now_and_then_repeat_no_state() -> None:
    """A step begins in the state of the step before if nothing was drawn since."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x = torch.randn(8, 4)
    with tw.watch(model, optimizer, out=None, quiet=True, examine="listen") as watch:
        for step in range(48):
            if step % 8 == 0:
                torch.randperm(8)  # a loader that begins an epoch
            optimizer.zero_grad()
            loss = model(x).square().mean()
            if step % 3 == 0:
                loss = loss + 0.01 * torch.rand(())
            loss.backward()
            optimizer.step()
    assert "loop.random_state_repeats" not in {each.code for each in watch.findings()}


@pytest.mark.parametrize(
    ("steps", "since", "before", "found"),
    [(20, 1, 0.0, 1), (8, 1, 0.0, 0), (100, 70, 0.1, 1), (100, 96, 0.1, 0), (100, 70, 1e-4, 0)],
    ids=["from the start", "a warm-up", "cut", "a short tail", "decayed"],
)
def test_a_rate_of_0(steps: int, since: int, before: float, found: int) -> None:
    facts = WeightsFacts(
        steps=steps, updates=steps, tensors=4, moved=4, at_0_since=since, rate_before_0=before, highest_rate=0.1
    )
    assert len(said(of("schedule.learning_rate_zero"), exam(steps, facts))) == found
