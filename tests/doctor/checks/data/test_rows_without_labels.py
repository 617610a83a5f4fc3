"""Texts whose answers are the targets, and rows without any target."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trainwright as tw

pytestmark = pytest.mark.slow

IGNORED = -100


def half_without(labels: Tensor) -> Tensor:
    labels[:, :5] = IGNORED
    labels[::2] = IGNORED
    return labels


def none(labels: Tensor) -> Tensor:
    return torch.full_like(labels, IGNORED)


def none_in_one_step(labels: Tensor) -> Tensor:
    return none(labels) if torch.rand(()) < 0.3 else labels


def answers(labels: Tensor) -> Tensor:
    labels[:, :5] = IGNORED
    return labels


def half_without_of_full_rows(labels: Tensor) -> Tensor:
    """Rows without labels beside rows in which every token has one: trained in part without labels, on purpose."""
    labels[::2] = IGNORED
    return labels


def masked_tokens(labels: Tensor) -> Tensor:
    labels[torch.rand(labels.shape) < 0.85] = IGNORED
    return labels


def codes(label: Callable[[Tensor], Tensor], *, flat: bool) -> list[str]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, 16), nn.Linear(16, 11))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with tw.watch(model, optimizer, out=None, quiet=True, examine="listen") as watch:
        for _ in range(10):
            ids = torch.randint(11, (8, 10))
            labels, scores = label(ids.clone()), model(ids)[:, :-1]
            optimizer.zero_grad()
            if flat:
                targets = labels[:, 1:].flatten()
                total = F.cross_entropy(scores.flatten(0, 1), targets, reduction="sum")
                (total / (targets != IGNORED).sum().clamp(min=1)).backward()
            else:
                F.cross_entropy(scores.transpose(1, 2), labels[:, 1:]).backward()
            optimizer.step()
    assert watch.session.failures == []
    return [each.code for each in watch.findings() if each.code == "data.rows_without_labels"]


@pytest.mark.parametrize("flat", [True, False], ids=["flat", "rows"])
def test_answers_that_are_missing_in_half_of_the_rows_are_found(flat: bool) -> None:
    assert codes(half_without, flat=flat) == ["data.rows_without_labels"]


def test_all_labels_that_are_ignored_are_found() -> None:
    assert codes(none, flat=True) == ["data.rows_without_labels"]


@pytest.mark.parametrize(
    "label",
    [answers, half_without_of_full_rows, masked_tokens, none_in_one_step],
    ids=lambda each: each.__name__,
)
def test_other_labels_are_not_reported(label: Callable[[Tensor], Tensor]) -> None:
    assert codes(label, flat=True) == []
