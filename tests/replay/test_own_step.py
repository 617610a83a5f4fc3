"""A custom step: turns of several optimizers replay to the bit, other steps say why not."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam

import trainwright as tw
from trainwright.checkpoint.chained_optimizer import ChainedOptimizer
from trainwright.checkpoint.snapshot import LiveObjects
from trainwright.engine.manual_step import OwnStep
from trainwright.recorder.engine_source import EngineSource, called_parts, engine_recorder
from trainwright.recorder.hooks import listening
from trainwright.recorder.program import OptimizerStep
from trainwright.recorder.ring import Ring
from trainwright.replay.replayer import Replayer
from trainwright.replay.session import ReplaySession
from trainwright.replay.stage import NotReplayable
from trainwright.watching.experiments import names_of

STEPS = 4


class Players(nn.Module):
    """No module that is called: its parts are."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))


def turns(state: tw.TrainState, batch: tw.StepBatch) -> Tensor:
    players, (generator, critic) = state.model, state.optimizer.parts  # type: ignore[attr-defined]
    fake = players.generator(torch.randn(len(batch.data), 3))
    critic.zero_grad()
    loss = players.critic(fake.detach()).mean() - players.critic(batch.data).mean()
    loss.backward()
    critic.step()
    generator.zero_grad()
    (-players.critic(fake).mean()).backward()
    generator.step()
    return loss


def several(state: tw.TrainState, batch: tw.StepBatch) -> Tensor:
    """Inner epochs: the critic alone, twice."""
    for _ in range(2):
        state.optimizer.zero_grad()
        loss = state.model.critic(batch.data).square().mean()
        loss.backward()
        state.optimizer.step()
    return loss


def ran(step: OwnStep, optimizer: Callable[[Players], torch.optim.Optimizer]) -> tuple[tw.TrainState, ReplaySession]:
    """Four recorded steps, and a session on the last."""
    torch.manual_seed(0)
    players = Players()
    state = tw.TrainState(players, optimizer(players))
    ring = Ring(keep=8, budget_bytes=math.inf)
    recorder = engine_recorder(state, ring.add, 1)
    source = EngineSource(recorder)
    objects = LiveObjects(recorder.roots, recorder.optimizers, recorder.parameters)
    advance = tw.make_own_step(step, witness=source)
    ring.add_snapshot(objects.snapshot(1))
    with listening([recorder], recorder.roots):
        for number in range(1, STEPS + 1):
            batch = tw.StepBatch((tw.MicroBatch(torch.randn(8, 4), np.arange(8) + 8 * number),))
            source.end_step(advance(state, batch))
    return state, ReplaySession(Replayer(objects, names_of(objects)), ring, STEPS)


def both(players: Players) -> torch.optim.Optimizer:
    return ChainedOptimizer([Adam(players.generator.parameters(), 0.01), SGD(players.critic.parameters(), 0.1)])


def test_turns_are_taken_again_to_the_bit() -> None:
    state, session = ran(turns, both)
    before = {name: value.clone() for name, value in state.model.state_dict().items()}
    result = session.run(upto="step")
    live = list(state.model.parameters())
    assert all(torch.equal(again, value) for again, value in zip(result.after.values(), live, strict=True))
    assert not all(torch.equal(old, value) for old, value in zip(result.before.values(), live, strict=True))
    assert all(torch.equal(value, before[name]) for name, value in state.model.state_dict().items())
    steps = [each.optimizer for each in session.recorded_step.program if isinstance(each, OptimizerStep)]
    assert sorted(steps) == [0, 1]


def test_of_several_updates_of_one_optimizer_it_is_said_that_none_is_taken_again() -> None:
    with pytest.raises(NotReplayable, match="it makes several updates of one optimizer"):
        ran(several, lambda players: SGD(players.critic.parameters(), 0.1))


def test_the_modules_that_a_step_calls() -> None:
    players = Players()
    assert called_parts(players) == [players.generator, players.critic]
    assert called_parts(players.critic) == [players.critic]
    assert called_parts(nn.ModuleDict({"all": players})) == [players.generator, players.critic]
    players.register_buffer("center", torch.zeros(4))
    assert called_parts(players) == [players], "it has a state of its own, which a replay must put back"
