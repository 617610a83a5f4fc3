"""What a figure of an evaluation is of: rows that are averaged, more than one, each decided about alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trainwright as tw
from tests.doctor.law_loops import CLASSES, WIDTH, net, states
from trainwright.doctor.data.measure.call_places import EACH_STEP, CallPlaces

pytestmark = pytest.mark.slow  # watched loops, each of a few tenths of a second

ROWS = 48
Evaluate = Callable[[nn.Module, Tensor, Tensor], object]


@torch.no_grad()
def mean(model: nn.Module, x: Tensor, y: Tensor) -> float:
    gains = (model(x).argmax(-1) == y).float() - 0.1
    return gains.mean().item()


@torch.no_grad()
def total(model: nn.Module, x: Tensor, y: Tensor) -> float:
    gains = (model(x).argmax(-1) == y).float() - 0.1
    return gains.sum().item()


@torch.no_grad()
def summed_loss(model: nn.Module, x: Tensor, y: Tensor) -> tuple[float, str]:
    losses = [F.cross_entropy(model(a), b, reduction="sum").item() for a, b in zip(x.split(20), y.split(20))]
    return sum(losses), "loss"


@torch.no_grad()
def number_of_hits(model: nn.Module, x: Tensor, y: Tensor) -> int:
    return sum((model(a).argmax(-1) == b).sum().item() for a, b in zip(x.split(20), y.split(20)))


@torch.no_grad()
def hits_and_count(model: nn.Module, x: Tensor, y: Tensor) -> tuple[int, int]:
    return (model(x).argmax(-1) == y).sum().item(), len(y)


@torch.no_grad()
def of_one_row(model: nn.Module, x: Tensor, y: Tensor) -> float:
    return mean(model, x[:1], y[:1])


@torch.no_grad()
def loss_of_one_row(model: nn.Module, x: Tensor, y: Tensor) -> float:
    return F.cross_entropy(model(x[:1]), y[:1]).item()


@torch.no_grad()
def distance_of_one_row(model: nn.Module, x: Tensor, y: Tensor) -> float:
    return (model(x[:1])[:, 0] - y[:1]).abs().mean().item()


@torch.no_grad()
def a_row_at_a_time(model: nn.Module, x: Tensor, y: Tensor) -> float:
    losses = [F.cross_entropy(model(x[i : i + 1]), y[i : i + 1]).item() for i in range(len(x))]
    return sum(losses) / len(losses)


@torch.no_grad()
def decided_at_once(model: nn.Module, x: Tensor, y: Tensor) -> float:
    return (model(x).argmax() == y).float().mean().item()


@torch.no_grad()
def least_at_once(model: nn.Module, x: Tensor, y: Tensor) -> float:
    place = torch.argmin(model(x))
    return (place - y).abs().float().mean().item()


@torch.no_grad()
def one_place_for_all(model: nn.Module, x: Tensor, y: Tensor) -> float:
    choice = model(x).softmax(-1).argmax().clamp(max=CLASSES - 1)
    return F.one_hot(choice, CLASSES).float()[y].mean().item()


@torch.no_grad()
def best_candidate(model: nn.Module, x: Tensor, y: Tensor) -> float:
    return float((model(x)[:, 0].argmax() == y).float().mean().item())


def evaluated(evaluate: Evaluate, *, rollout: bool = False, name: str = "reached") -> tw.Watch:
    """A loop that evaluates after every third step; with a rollout it calls the model before each step, too."""
    torch.manual_seed(0)
    x = torch.randn(64 + ROWS, WIDTH)
    y = (x @ torch.randn(WIDTH, CLASSES)).argmax(1)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    correct: object = None
    reached: object = None
    with tw.watch(model, optimizer, out=None, quiet=True, laws="cheap") as watch:
        for step in range(16):
            if rollout:
                with torch.no_grad():
                    model(x[:64]).argmax(-1)
            optimizer.zero_grad()
            F.cross_entropy(model(x[:64]), y[:64]).backward()
            optimizer.step()
            if step % 4 == 3:
                model.eval()
                told = evaluate(model, x[64:], y[64:])
                model.train()
                if name == "correct":
                    correct = told
                else:
                    reached = told
                del told
    assert (reached is None) != (correct is None) and watch.session.failures == []
    return watch


@pytest.mark.parametrize("evaluate", [mean, hits_and_count, a_row_at_a_time, best_candidate])
@pytest.mark.parametrize("law", ["figures_do_not_grow", "evaluation_has_rows", "rows_are_decided_apart"])
def test_the_laws_hold_for_averages(evaluate: Evaluate, law: str) -> None:
    assert states(evaluated(evaluate), "data")[law].state in ("held", "not applicable")


@pytest.mark.parametrize(
    ("evaluate", "law"),
    [
        (total, "figures_do_not_grow"),
        (summed_loss, "figures_do_not_grow"),
        (number_of_hits, "figures_do_not_grow"),
        (of_one_row, "evaluation_has_rows"),
        (loss_of_one_row, "evaluation_has_rows"),
        (distance_of_one_row, "evaluation_has_rows"),
        (decided_at_once, "rows_are_decided_apart"),
        (least_at_once, "rows_are_decided_apart"),
        (one_place_for_all, "rows_are_decided_apart"),
    ],
)
def test_each_is_broken_at_its_line(evaluate: Evaluate, law: str) -> None:
    [finding] = [each for each in evaluated(evaluate).findings() if each.code == f"law.data.{law}"]
    assert finding.severity == "warning" and (finding.where.source or "").startswith("test_amounts.py:")


def test_a_sum_by_its_name_is_none() -> None:
    assert states(evaluated(number_of_hits, name="correct"), "data")["figures_do_not_grow"].state == "not applicable"


def test_evaluations_are_heard_beside_rollouts() -> None:
    assert "reached" in states(evaluated(mean, rollout=True), "data")["figures_do_not_grow"].why


def test_what_calls_the_model_before_each_step_is_told_from_evaluations() -> None:
    places, rollout, evaluation = CallPlaces(), 10, 20
    for _ in range(EACH_STEP):
        assert not places.is_of_the_step(rollout)
        places.close()
    assert not places.is_of_the_step(rollout) and not places.has_evaluations
    assert not places.is_of_the_step(evaluation) and places.has_evaluations
    assert places.is_of_the_step(rollout)
