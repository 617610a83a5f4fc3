"""What experiments say that they take, against the replays that they make."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import trainwright as tw
from trainwright.doctor.finding import ExperimentRequest
from trainwright.doctor.measure import REPLAYS, wiring
from trainwright.recorder.program import RecordedStep
from trainwright.replay.replayer import UNCHANGED, Intervention, Replayer, ReplayResult, Upto
from trainwright.watching.experiments import ExperimentRunner

EXPERIMENTS = {each.name: each for each in REPLAYS}

STEPS = {"forward": 0.35, "backward": 1.1, "step": 1.35}
"""Training steps that a replay takes as long as, by how far it goes."""
IN_FLOAT64 = 3.0


@pytest.mark.slow
def test_an_experiment_takes_about_as_long_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    made, taken = [0.0], dict[str, float]()
    run, measured = Replayer.run, ExperimentRunner._measured

    def counted(
        self: Replayer, recorded: RecordedStep, how: Intervention = UNCHANGED, *, upto: Upto = "step"
    ) -> ReplayResult:
        made[0] += STEPS[upto] * (IN_FLOAT64 if how.dtype == "fp64" else 1.0)
        return run(self, recorded, how, upto=upto)

    def noted(self: ExperimentRunner, name: str, *rest: Any) -> Any:
        before = made[0]
        facts = measured(self, name, *rest)
        if facts and "blind" not in facts[name]:
            taken[name] = max(taken.get(name, 0.0), made[0] - before)
        return facts

    monkeypatch.setattr(Replayer, "run", counted)
    monkeypatch.setattr(wiring, "MIN_UPDATES", wiring.MAX_UPDATES)  # else on a slow machine there are fewer
    monkeypatch.setattr(ExperimentRunner, "_measured", noted)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    with tw.watch(model, optimizer, out=None, quiet=True, examine="all") as watch:
        for _ in range(16):
            x = torch.randn(32, 8)
            optimizer.zero_grad()
            F.cross_entropy(model(x), (x[:, 0] > 0).long() + (x[:, 1] > 1).long()).backward()
            optimizer.step()
        watch.session.runner.run_requested(16, [ExperimentRequest(name, step=16) for name in EXPERIMENTS])
    assert len(taken) > 18 and Counter(EXPERIMENTS[name].when for name in taken)["requested"] > 5
    far = {name: (steps, EXPERIMENTS[name].steps) for name, steps in taken.items()}
    far = {name: (took, said) for name, (took, said) in far.items() if not 0.3 * took - 0.5 <= said <= 3 * took + 2.5}
    assert far == {}
