"""Figures that are known by their names: shares over classes, perplexities, and the places of a tuple."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trainwright as tw
from tests.doctor.law_loops import states
from trainwright.doctor.data.measure.tuple_names import names_of_places

CLASSES = 4
Counts = tuple[Tensor, Tensor, Tensor]
Figure = Callable[[Counts], Tensor]
Counted = Callable[[Tensor, Tensor], Tensor]


def counted(logits: Tensor, y: Tensor, counts: Counts, classes: int) -> None:
    """True positives, false positives and false negatives of each class, as many programs count them."""
    guess = logits.argmax(1)
    for c in range(classes):
        counts[0][c] += ((guess == c) & (y == c)).sum()
        counts[1][c] += ((guess == c) & (y != c)).sum()
        counts[2][c] += ((guess != c) & (y == c)).sum()


def evaluated(figure: Figure, name: str = "macro_f1", classes: int = CLASSES) -> tuple[str, tw.Watch]:
    """What became of the law in a loop with a loss and one figure more; ``figure`` is made of the counts."""
    torch.manual_seed(0)
    x, model = torch.randn(128, 6), nn.Linear(6, classes)
    y = (x @ torch.randn(6, CLASSES)).argmax(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    metrics = {}
    with tw.watch(model, optimizer, out=None, quiet=True, laws="cheap") as watch:
        for step in range(9):
            F.cross_entropy(model(x[:64]), y[:64]).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 3 == 2:
                counts = (torch.zeros(classes), torch.zeros(classes), torch.zeros(classes))
                with torch.no_grad():
                    total = 0.0
                    for a, b in zip(x[64:].split(16), y[64:].split(16)):
                        logits = model(a)
                        total += F.cross_entropy(logits, b, reduction="sum").item()
                        counted(logits, b, counts, classes)
                metrics = {"val_loss": total / 64, name: figure(counts).item()}
    assert metrics and watch.session.failures == []
    return states(watch, "data")["perfect_predictions_are_right"].state, watch


def f1(counts: Counts) -> Tensor:
    tp, fp, fn = counts
    return 2 * tp / (2 * tp + fp + fn).clamp(min=1)


def of_precision(counts: Counts, over: Tensor) -> Tensor:
    precision, recall = counts[0] / over.clamp(min=1e-6), counts[0] / (counts[0] + counts[2]).clamp(min=1)
    return (2 * precision * recall / (precision + recall + 1e-8)).mean()


LEGAL: dict[str, tuple[Figure, str, int]] = {
    "macro": (lambda c: f1(c).mean(), "macro_f1", CLASSES),
    "of precision and recall": (lambda c: of_precision(c, c[0] + c[1]), "f1", CLASSES),
    "with a class that has no samples": (lambda c: f1(c).mean(), "macro_f1", CLASSES + 1),
    "without the first class": (lambda c: f1(c)[1:].mean(), "f1", CLASSES),
    "weighted": (lambda c: (f1(c) * (c[0] + c[2])).sum() / (c[0] + c[2]).sum(), "weighted_f1", CLASSES),
    "micro, in percent": (lambda c: 200 * c[0].sum() / (2 * c[0] + c[1] + c[2]).sum(), "micro_f1", CLASSES),
    "smooth": (lambda c: ((c[0] + 1) / (c[0] + c[1] + c[2] + 1)).mean(), "miou", CLASSES),
    "of one class": (lambda c: c[0][1] / (c[0][1] + c[2][1]), "recall", CLASSES),
    "balanced, a class has no samples": (lambda c: (c[0] / (c[0] + c[2]).clamp(min=1)).mean(), "bal_acc", CLASSES + 1),
    "what is no share": (lambda c: c[1].sum() / c[0].sum(), "ratio", CLASSES),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", LEGAL)
def test_shares_over_classes_are_whole(kind: str) -> None:
    figure, name, classes = LEGAL[kind]
    state, watch = evaluated(figure, name, classes)
    assert state in ("held", "not applicable")
    assert not [each for each in watch.findings() if each.severity != "info" and "batches" not in each.code]


BROKEN: dict[str, Figure] = {
    "false positives are counted as right": lambda c: f1((c[1], c[0], c[2])).mean(),
    "another sum is in the divisor": lambda c: of_precision(c, 2 * c[0]),
    "larger than for perfect predictions": lambda c: 1.5 - f1(c).mean() / 2,
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", BROKEN)
def test_a_share_that_is_not_whole_for_perfect_predictions_is_told(kind: str) -> None:
    assert evaluated(BROKEN[kind])[0] == "broken"


@pytest.mark.slow
@pytest.mark.parametrize(("made", "state"), [(math.exp, "held"), (float, "broken")])
def test_a_perplexity_is_made_of_the_loss(made: Callable[[float], float], state: str) -> None:
    torch.manual_seed(0)
    x, y, model = torch.randn(96, 6), torch.randint(3, (96,)), nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    perplexity = 0.0
    with tw.watch(model, optimizer, out=None, quiet=True, laws="cheap") as watch:
        for step in range(6):
            F.cross_entropy(model(x[:48]), y[:48]).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 3 == 2:
                with torch.no_grad():
                    parts = [F.cross_entropy(model(a), b).item() for a, b in zip(x[48:].split(16), y[48:].split(16))]
                perplexity = made(sum(parts) / len(parts))
    assert perplexity
    assert states(watch, "data")["figures_are_averages"].state == state


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ('log({"loss": shown[0], "iou": shown[1]})', {"shown.0": "shown.loss", "shown.1": "shown.iou"}),
        ("log(acc=round(float(shown[1]), 3))", {"shown.1": "shown.acc"}),
        ('print(f"val loss {shown[0]:.3f}, acc={shown[1]}")', {"shown.0": "shown.loss", "shown.1": "shown.acc"}),
        ("loss, _ = shown", {"shown.0": "shown.loss"}),
        ('log(a=shown[0], b=shown[0]); log({"c": shown[n], d: shown[-1]})', {}),
    ],
)
def test_places_of_a_tuple_have_the_names_that_their_readers_give_them(line: str, names: dict[str, str]) -> None:
    assert names_of_places(ast.parse(line)) == names
