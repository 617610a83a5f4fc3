"""Loops that call their model many times a step: most of their steps are recorded by losses and updates alone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical

import trainwright as tw
from trainwright.recorder.light import FIRST, MIN_CALLS
from trainwright.runs.records import Examined, Watched
from trainwright.watching.session import LIGHT_SNAPSHOTS

STEPS, FEW = 66, 20


@pytest.fixture(autouse=True)
def not_lifted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRAINWRIGHT_EXAMINE")


def policy() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 2))


def rewarded(model: nn.Module, calls: int) -> Tensor:
    """REINFORCE: the calls have a graph."""
    chances, rewards = [], []
    for _ in range(calls):
        drawn = Categorical(logits=model(torch.randn(4)))
        action = drawn.sample()
        chances.append(drawn.log_prob(action))
        rewards.append(float(action))
    gains = torch.tensor(rewards)
    return -(torch.stack(chances) * (gains - gains.mean())).sum()


def acted(model: nn.Module, calls: int) -> Tensor:
    """The calls have none, but for the last."""
    states = torch.randn(calls, 4)
    with torch.no_grad():
        actions = torch.stack([Categorical(logits=model(state)).sample() for state in states])
    return F.cross_entropy(model(states), actions)


def train(
    loss: Callable[[nn.Module, int], Tensor],
    watching: Callable[..., Any],
    *,
    calls: int = MIN_CALLS,
    bad: tuple[int, ...] = (),
    hooks: list[int] | None = None,
    steps: int = STEPS,
) -> tuple[Any, list[Tensor]]:
    """Returns the watch and the weights; ``hooks`` gets the number of hooks of the model within each step."""
    torch.manual_seed(0)
    model = policy()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    with watching(model, optimizer) as watch:
        for step in range(1, steps + 1):
            if hooks is not None:
                hooks.append(len(model._forward_hooks))
            optimizer.zero_grad()
            (loss(model, calls) * (float("nan") if step in bad else 1.0)).backward()
            optimizer.step()
    return watch, [p.detach().clone() for p in model.parameters()]


def watched(*given: Any) -> tw.Watch:
    return tw.watch(*given, out=None, quiet=True)


@pytest.mark.slow
@pytest.mark.parametrize("loss", [rewarded, acted])
def test_most_steps_have_no_hook_on_the_model_and_the_training_is_the_same(
    loss: Callable[[nn.Module, int], Tensor],
) -> None:
    hooks: list[int] = []
    watch, weights = train(loss, watched, hooks=hooks)
    _, alone = train(loss, lambda *given: nullcontext())
    assert all(torch.equal(a, b) for a, b in zip(weights, alone, strict=True))
    assert all(hooks[:FIRST]) and sum(hooks[FIRST:]) < 0.3 * len(hooks[FIRST:])
    assert hooks[LIGHT_SNAPSHOTS] == 1, "the step after a snapshot can be replayed"
    assert watch.session.failures == [] and not [each for each in watch.findings() if each.severity == "critical"]
    losses = {each.step: each.loss for each in watch.records if isinstance(each, Watched)}
    assert set(losses) >= set(range(1, 65)) and all(torch.isfinite(torch.tensor(list(losses.values()))))


@pytest.mark.parametrize("calls", [1, MIN_CALLS - 2])
def test_a_loop_of_few_calls_is_recorded_in_full(calls: int) -> None:
    hooks: list[int] = []
    train(acted, watched, calls=calls, hooks=hooks, steps=FEW)
    assert all(hooks)


@pytest.mark.slow
def test_where_everything_is_examined_every_step_is_recorded_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINWRIGHT_EXAMINE", "all")
    hooks: list[int] = []
    train(rewarded, watched, hooks=hooks, steps=FEW)
    assert all(hooks)


@pytest.mark.slow
def test_after_a_step_that_is_not_finite_the_next_ones_are_recorded_in_full() -> None:
    """The first of them cannot be replayed; the second can, and its operation is found."""
    watch, weights = train(rewarded, watched, bad=(70, 75), steps=76)
    assert all(torch.isfinite(each).all() for each in weights), "both updates were left out"
    traced = {
        each.step: each.values for each in watch.records if isinstance(each, Examined) and each.experiment == "trace"
    }
    assert "most of its steps are not recorded" in traced[70]["blind"]
    assert "blind" not in traced[75]
