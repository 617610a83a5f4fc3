"""The law of baselines holds for usual policy gradients, and is broken where an expectation is added to a return."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.optim import Adam

import trainwright as tw
from tests.rows import each_row
from trainwright.doctor.case import Case
from trainwright.doctor.finding import Finding
from trainwright.doctor.law import Holds, NotApplicable, Verdict
from trainwright.doctor.loss.baselines import baselines_are_subtracted

DRAWS = torch.Generator().manual_seed(2)
SEEN, RETURNS = torch.randn(5, 8, 4, generator=DRAWS), torch.randn(5, 8, generator=DRAWS)
MOVES = torch.randint(3, (5, 8), generator=DRAWS)
Weigh = Callable[[Tensor], Tensor]


class Actor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.move, self.value = nn.Linear(4, 8), nn.Linear(8, 3), nn.Linear(8, 1)

    def forward(self, seen: Tensor) -> tuple[Tensor, Tensor]:
        h = self.body(seen).tanh()
        return self.move(h), self.value(h).squeeze(-1)


def verdict_on(weigh: Weigh, sign: float = -1.0, value_loss: Callable[..., Tensor] = F.mse_loss) -> Verdict:
    """Of a step of a policy gradient in which the log-probabilities are weighed so by what the values are."""
    torch.manual_seed(0)
    actor = Actor()
    optimizer = Adam(actor.parameters(), 1e-3)
    with tw.watch(actor, optimizer, out=None, quiet=True, laws="loss") as watch:
        for _ in range(2):
            logits, values = actor(SEEN)
            chosen = Categorical(logits=logits)
            policy = sign * (chosen.log_prob(MOVES) * weigh(values).detach()).mean()
            optimizer.zero_grad()
            (policy + value_loss(values, RETURNS) - 0.01 * chosen.entropy().mean()).backward()
            optimizer.step()
    assert watch.session.failures == []
    [verdict] = baselines_are_subtracted(Case(watch.records))
    return verdict


def normalised(each: Tensor) -> Tensor:
    return (each - each.mean()) / (each.std() + 1e-6)


@pytest.mark.slow
@each_row(
    ("weigh", "sign", "value_loss"),
    [
        (lambda values: RETURNS - values, -1.0, F.mse_loss),
        (lambda values: normalised(RETURNS - values), -1.0, F.smooth_l1_loss),
        (lambda values: (RETURNS - values).clamp(-1, 1), -1.0, F.huber_loss),
        (lambda values: RETURNS - values, 1.0, lambda values, costs: (values - costs).square().mean()),
    ],
)
def test_a_baseline_is_subtracted(weigh: Weigh, sign: float, value_loss: Callable[..., Tensor]) -> None:
    assert isinstance(verdict_on(weigh, sign, value_loss), Holds)


@each_row(
    "weigh",
    [
        lambda values: RETURNS + values,
        lambda values: normalised(RETURNS + values),
        lambda values: RETURNS - -0.5 * values,
    ],
)
def test_a_baseline_that_is_added_is_found(weigh: Weigh) -> None:
    verdict = verdict_on(weigh)
    assert isinstance(verdict, Finding) and verdict.found.severity == "warning"


@each_row("weigh", [lambda values: RETURNS, lambda values: 0.3 - values, lambda values: torch.ones(5, 8)])
def test_nothing_is_said_of_weights_that_are_not_made_of_both(weigh: Weigh) -> None:
    assert isinstance(verdict_on(weigh), NotApplicable)
