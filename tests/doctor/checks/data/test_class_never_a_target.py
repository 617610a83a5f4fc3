"""data.class_never_a_target on faulty and on healthy programs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trainwright as tw
from tests.doctor.checks.data.loops import exam, is_not_applicable, said
from trainwright.doctor.checks.data.class_never_a_target import class_never_a_target
from trainwright.doctor.facts.data import RowsFacts, TargetsFacts
from trainwright.doctor.facts.loss import LossFacts, MeasuredLoss

CODE = "data.class_never_a_target"
ROWS = 640
DRAWN = torch.Generator().manual_seed(0)
X = torch.randn(ROWS, 8, generator=DRAWN)
Y = X[:, :5].argmax(1)
IDS = torch.randint(40, (ROWS, 6), generator=DRAWN)
DIGITS = torch.randint(2, 12, (ROWS, 6), generator=DRAWN)  # 0 pads, 1 begins a text
RARE = torch.where(torch.arange(ROWS) % 160 == 0, 3, Y % 3)
Loss = Callable[[nn.Module, Tensor], Tensor]


def codes(model: nn.Module, loss: Loss, *, sample: int = ROWS, steps: int = 40) -> list[str]:
    """Train for two epochs, or on the first ``sample`` rows only; the codes of warnings about data."""
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with tw.watch(model, optimizer, out=None, quiet=True, examine="listen") as watch:
        for step in range(steps):
            optimizer.zero_grad()
            loss(model, (torch.arange(32) + 32 * step) % sample).backward()
            optimizer.step()
    assert watch.session.failures == []
    return [found.code for found in watch.findings() if found.severity != "info"]


def mlp(classes: int) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, classes))


def tagger(tokens: int, classes: int) -> nn.Module:
    return nn.Sequential(nn.Embedding(tokens, 16), nn.Linear(16, classes))


FAULTY: dict[str, tuple[Callable[[], nn.Module], Loss]] = {
    "counted from 1": (lambda: mlp(6), lambda model, at: F.cross_entropy(model(X[at]), Y[at] + 1)),
    "too many outputs": (lambda: mlp(10), lambda model, at: F.nll_loss(model(X[at]).log_softmax(1), Y[at])),
    "a class was filtered out": (
        lambda: mlp(5),
        lambda model, at: F.cross_entropy(model(X[at]), torch.where(Y[at] == 2, 3, Y[at])),
    ),
    "tags": (
        lambda: tagger(40, 4),
        lambda model, at: F.cross_entropy(model(IDS[at]).flatten(0, 1), 1 + IDS[at].flatten() % 3),
    ),
}
HEALTHY: dict[str, tuple[Callable[[], nn.Module], Loss]] = {
    "all classes": (lambda: mlp(5), lambda model, at: F.cross_entropy(model(X[at]), Y[at])),
    "a rare class": (lambda: mlp(5), lambda model, at: F.cross_entropy(model(X[at]), RARE[at])),
    "ignore_index": (
        lambda: mlp(6),
        lambda model, at: F.cross_entropy(model(X[at]), torch.where(X[at, 7] > 0, Y[at] + 1, 0), ignore_index=0),
    ),
    "the rest is -100": (
        lambda: mlp(5),
        lambda model, at: F.cross_entropy(model(X[at]), torch.where(X[at, 7] > 0, Y[at], -100)),
    ),
    "a language": (
        lambda: tagger(12, 12),
        lambda model, at: F.cross_entropy(model(DIGITS[at, :-1]).flatten(0, 1), DIGITS[at, 1:].flatten()),
    ),
    "positions in the batch": (
        lambda: nn.Linear(8, 8),
        lambda model, at: F.cross_entropy(model(X[at]) @ torch.cat([X[at], X.flip(0)[at]]).T, torch.arange(32)),
    ),
    "generated and real samples": (
        lambda: mlp(6),
        lambda model, at: (
            F.cross_entropy(model(X[at]), Y[at]) + F.cross_entropy(model(torch.randn(32, 8)), torch.full((32,), 5))
        ),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("model", "loss"), FAULTY.values(), ids=FAULTY)
def test_the_fault_is_found(model: Callable[[], nn.Module], loss: Loss) -> None:
    assert CODE in codes(model(), loss)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "loss"), HEALTHY.values(), ids=HEALTHY)
def test_a_healthy_program_has_no_finding(model: Callable[[], nn.Module], loss: Loss) -> None:
    assert CODE not in codes(model(), loss)


@pytest.mark.slow
def test_the_same_few_samples_prove_nothing() -> None:
    assert CODE not in codes(mlp(6), lambda model, at: F.cross_entropy(model(X[at]), Y[at]), sample=64)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [11, 14, 18, 40])
def test_classes_that_come_one_after_another(steps: int) -> None:
    y = Y.sort().values
    assert CODE not in codes(mlp(5), lambda model, at: F.cross_entropy(model(X[at]), y[at]), steps=steps)


@pytest.mark.parametrize(
    ("classes", "counts", "distinct", "found"),
    [
        (4, (0, 99, 99, 99), 900, 1),
        (5, (99, 99, 99), 900, 1),
        (4, (0, 99, 99, 31), 900, 0),
        (4, (0, 99, 99, 99), 80, 0),
        (4, (0, 99, 99, 99), 297, 1),
        (3, (0, 99, 99, 99), 900, 1),
        (1000, (99, 99), 900, 0),
        (4, (0, 297), 900, 0),
    ],
)
def test_how_often_the_others_came(classes: int, counts: tuple[int, ...], distinct: int, found: int) -> None:
    calls = LossFacts(given=(MeasuredLoss(op="cross_entropy", classes=classes),))
    early, late = (TargetsFacts(targets=n, largest=3, counts=counts, rows=n, most=9) for n in (100, 297))
    seen = (exam(8, early), exam(32, late), exam(32, calls), exam(32, RowsFacts(steps=32, distinct=distinct)))
    assert len(said(class_never_a_target, *seen)) == found
    assert is_not_applicable(class_never_a_target, *seen) != bool(found)
