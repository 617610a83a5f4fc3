"""Nodes of a graph: training and evaluation choose other rows of the outputs for the same inputs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trainwright as tw
from tests.doctor.law_loops import states

pytestmark = pytest.mark.slow  # watched loops, each of a few tenths of a second

NODES, WIDTH = 120, 8


def evaluated(
    train: Tensor, held_out: list[Tensor], targets: Tensor | None = None, *, decides_first: bool = False
) -> str:
    """The state of the law where a loss of training has the rows ``train``, with ``targets`` or what is true."""
    torch.manual_seed(0)
    x = torch.randn(NODES, WIDTH)
    y = (x @ torch.randn(WIDTH, 3)).argmax(1)
    own = y if targets is None else torch.where(targets >= 0, targets, y)
    model = nn.Linear(WIDTH, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    shown = {}
    with tw.watch(model, optimizer, out=None, quiet=True, laws="cheap") as watch:
        for step in range(12):
            optimizer.zero_grad()
            F.nll_loss(model(x).log_softmax(1)[train], own[train]).backward()
            optimizer.step()
            if step % 4 == 3:
                with torch.no_grad():
                    for number, rows in enumerate(held_out):
                        out = model(x)
                        right = (out.argmax(1)[rows] if decides_first else out[rows].argmax(1)) == y[rows]
                        shown[f"acc_{number}"] = right.float().mean().item()
    assert shown and watch.session.failures == []
    return states(watch, "data")["evaluation_is_apart"].state


def mask(low: int, high: int) -> Tensor:
    return (torch.arange(NODES) >= low) & (torch.arange(NODES) < high)


@pytest.mark.parametrize(
    ("train", "held_out", "state"),
    [
        (mask(0, 60), [mask(60, 90), mask(90, 120)], "held"),
        (mask(0, 60), [mask(0, 60), mask(60, 120)], "held"),
        (mask(0, 60), [mask(0, 120)], "held"),
        (mask(0, 60), [mask(0, 20)], "held"),
        (torch.arange(60), [torch.arange(60, 120)], "held"),
        (mask(0, 70), [mask(60, 90)], "broken"),
        (torch.arange(70), [torch.arange(60, 90)], "broken"),
        (mask(1, 120), [mask(60, 90)], "broken"),
    ],
)
def test_what_is_chosen_is_chosen_apart(train: Tensor, held_out: list[Tensor], state: str) -> None:
    assert evaluated(train, held_out) == state


def test_decisions_may_come_before_the_choice() -> None:
    assert evaluated(mask(0, 70), [mask(60, 90)], decides_first=True) == "broken"
    assert evaluated(mask(0, 60), [mask(60, 90)], decides_first=True) == "held"


def test_rows_with_answers_in_place_of_targets_are_not_trained_on() -> None:
    targets = torch.full((NODES,), -1)
    targets[60:] = torch.arange(60) % 3
    assert evaluated(mask(0, 90), [mask(60, 120)], targets) == "held"
