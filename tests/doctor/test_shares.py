"""Figures of decisions about single elements: at their best for the targets of the loss, and quiet where they are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trainwright as tw
from tests.doctor.law_loops import states

pytestmark = pytest.mark.slow  # watched loops, each of a few tenths of a second

PIXELS, WIDTH = 12, 8
Batches = list[tuple[Tensor, Tensor]]
Evaluate = Callable[[nn.Module, Batches], object]
Sum = Callable[[Tensor, Tensor], Tensor]


class Parts(nn.Module):
    """Logits of each pixel, by two parts that can be called alone."""

    def __init__(self, end: nn.Module) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(WIDTH, 24), nn.ReLU())
        self.decoder = nn.Sequential(nn.Linear(24, PIXELS), end)

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x))


def evaluated(evaluate: Evaluate, end: nn.Module | None = None, loss: Sum = F.binary_cross_entropy_with_logits) -> str:
    """What became of the law in a loop that evaluates after every third step; other laws find nothing."""
    torch.manual_seed(0)
    x = torch.randn(128, WIDTH)
    y = (x @ torch.randn(WIDTH, PIXELS) > 0.5).float()
    held_out = list(zip(x[64:].split(16), y[64:].split(16)))
    model = Parts(end or nn.Identity())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with tw.watch(model, optimizer, out=None, quiet=True, laws="cheap") as watch:
        for step in range(13):
            optimizer.zero_grad()
            loss(model(x[:64]), y[:64]).backward()
            optimizer.step()
            if step % 3 == 2:
                model.eval()
                with torch.no_grad():
                    shown = evaluate(model, held_out)
                model.train()
    assert shown and watch.session.failures == []
    laws = states(watch, "data")
    others = {name for name, law in laws.items() if law.state == "broken"} - {
        "perfect_predictions_are_right",
        "batches_vary",
    }
    assert not others
    return laws["perfect_predictions_are_right"].state


def share(
    *sums: Sum, loss: Sum = F.binary_cross_entropy_with_logits, smooth: float = 0.0, change: Sum = lambda out, y: y
) -> Evaluate:
    """The first sum over the second, or over the number of pixels, each over all batches."""

    def evaluate(model: nn.Module, batches: Batches) -> object:
        total, tops, bottoms = 0.0, 0.0, 0.0
        for x, y in batches:
            out = model(x)
            total += loss(out, change(out, y)).item() * len(y)
            tops += sums[0](out, y).sum().item()
            bottoms += sums[1](out, y).sum().item() if sums[1:] else y.numel()
        return total / 64, (tops + smooth) / (bottoms + smooth)

    return evaluate


def named(name: str, figure: Sum) -> Evaluate:
    """A figure that torch divides, as the mean over batches."""

    def evaluate(model: nn.Module, batches: Batches) -> object:
        losses = [F.binary_cross_entropy_with_logits(model(x), y).item() for x, y in batches]
        shares = [figure(model(x), y).item() for x, y in batches]
        return {"loss": sum(losses) / len(losses), name: sum(shares) / len(shares)}

    return evaluate


def both(out: Tensor, y: Tensor) -> Tensor:
    return (out > 0) & (y > 0.5)


def either(out: Tensor, y: Tensor) -> Tensor:
    return (out > 0) | (y > 0.5)


def equal(out: Tensor, y: Tensor) -> Tensor:
    return (out > 0) == (y > 0.5)


def dice(out: Tensor, y: Tensor) -> Tensor:
    found = (out.sigmoid() > 0.3).float()
    return ((2 * (found * y).sum(1) + 1) / (found.sum(1) + y.sum(1) + 1)).mean()


def macro_recall(out: Tensor, y: Tensor) -> Tensor:
    return ((out > 0) & (y > 0.5)).sum(0).div(y.sum(0) + 1e-6).mean()


def f1(out: Tensor, y: Tensor) -> Tensor:
    found = out > 0
    tp = (found & (y == 1)).sum()
    return 2 * tp / (2 * tp + (found & (y == 0)).sum() + (~found & (y == 1)).sum()).clamp(min=1)


def of_some(out: Tensor, y: Tensor) -> Tensor:
    """Every third pixel is not known."""
    return y.where(torch.arange(PIXELS) % 3 > 0, -1.0)


def ignoring(out: Tensor, y: Tensor) -> Tensor:
    known = y >= 0
    return (F.binary_cross_entropy_with_logits(out, y.clamp(min=0), reduction="none") * known).sum() / known.sum()


def smoothed(out: Tensor, y: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(out, 0.9 * y + 0.05)


def hinge(out: Tensor, y: Tensor) -> Tensor:
    return (1 - out * (2 * y - 1)).clamp(min=0).mean()


def soft_dice(out: Tensor, y: Tensor) -> Tensor:
    p = out.sigmoid()
    return 1 - (2 * (p * y).sum() + 1) / (p.sum() + y.sum() + 1)


def of_errors(model: nn.Module, batches: Batches) -> object:
    errors, losses = 0.0, []
    for x, y in batches:
        out = model(x)
        losses.append(F.binary_cross_entropy_with_logits(out, y).item())
        errors += ((out > 0) != (y > 0.5)).sum().item()
    return sum(losses) / len(losses), errors / (64 * PIXELS)


def by_parts(asked: Sum) -> Evaluate:
    def evaluate(model: nn.Module, batches: Batches) -> object:
        loss, right, rows = 0.0, 0.0, 0
        for x, y in batches:
            loss += F.binary_cross_entropy_with_logits(model(x), y).item() * len(x)
            right += asked(model.decoder(model.encoder(x)), y).float().mean(dim=1).sum().item()
            rows += len(x)
        return loss / rows, right / rows

    return evaluate


def two_heads(model: nn.Module, batches: Batches) -> object:
    """Of the second half no loss is computed, and its accuracy is of other targets."""
    loss, right, other = 0.0, 0.0, 0.0
    for x, y in batches:
        out, more = model(x), model(x + 1)
        loss += F.binary_cross_entropy_with_logits(out, y).item() * len(x)
        right += ((out > 0) == (y > 0.5)).sum().item()
        other += ((more > 0) == (y.roll(1, 1) > 0.5)).sum().item()
    return {"loss": loss / 64, "acc_a": right / (64 * PIXELS), "acc_b": other / (64 * PIXELS)}


def nothing_found(model: nn.Module, batches: Batches) -> object:
    return share(lambda out, y: (out > 9) & (y > 0.5), lambda out, y: (out > 9) | (y > 0.5))(model, batches)


def counted_in_torch(model: nn.Module, batches: Batches) -> object:
    """Sums of all batches are kept as tensors, and divided at the end."""
    tp, found, wanted, losses = torch.zeros(()), torch.zeros(()), torch.zeros(()), []
    for x, y in batches:
        out = model(x)
        losses.append(F.binary_cross_entropy_with_logits(out, y).item())
        tp += both(out, y).sum()
        found += (out > 0).sum()
        wanted += y.sum()
    precision, recall = tp / (found + 1e-8), tp / (wanted + 1e-8)
    f1 = 2 * precision * recall / (precision + recall + 1e-8)
    return {"loss": sum(losses) / 4, "precision": precision.item(), "recall": recall.item(), "f1": f1.item()}


def class_by_class(model: nn.Module, batches: Batches) -> object:
    out, y = torch.cat([model(x) for x, _ in batches]), torch.cat([y for _, y in batches])
    shares = []
    for found, wanted in zip((out > 0).T, (y > 0.5).T):
        right = (found & wanted).sum().item()
        shares.append(right / max(1, wanted.sum().item()))
    return {"loss": F.binary_cross_entropy_with_logits(out, y).item(), "macro_recall": sum(shares) / len(shares)}


def of_other_labels(change: Sum) -> Evaluate:
    """The accuracy is of labels that some of those of the loss differ from."""

    def evaluate(model: nn.Module, batches: Batches) -> object:
        out, y = torch.cat([model(x) for x, _ in batches]), torch.cat([y for _, y in batches])
        labels = change(out, y)
        loss = F.binary_cross_entropy_with_logits(out, y).item()
        right = ((out > 0) == (labels > 0.5)).float().mean().item()
        return {"loss": loss, "acc": right}

    return evaluate


@pytest.mark.parametrize(
    ("evaluate", "state"),
    [
        (counted_in_torch, "held"),
        (class_by_class, "not applicable"),
        (of_other_labels(lambda out, y: torch.where(torch.arange(y.numel()).view_as(y) % 7 == 0, 1 - y, y)), "held"),
        (share(both, either), "held"),
        (share(lambda out, y: (out.sigmoid() >= 0.4) & (y > 0.5), lambda out, y: y.bool()), "not applicable"),
        (share(both, lambda out, y: out > 0), "held"),
        (share(lambda out, y: (out > 0) & (y < 0.5), lambda out, y: y < 0.5), "not applicable"),
        (share(both), "not applicable"),
        (share(lambda out, y: equal(out, y) & (y > 0.5)), "not applicable"),
        (share(lambda out, y: equal(out, y) & (y > 0.5), either), "held"),
        (share(both, either, smooth=1.0), "not applicable"),
        (share(both, either, loss=soft_dice), "held"),
        (share(both, either, loss=smoothed), "held"),
        (share(equal), "held"),
        (share(equal, loss=hinge), "held"),
        (share(equal, loss=lambda out, y: F.mse_loss(out, 2 * y - 1)), "held"),
        (share(lambda out, y: (out > 0.5) == y, loss=F.mse_loss), "held"),
        (share(lambda out, y: out.round() == y, loss=F.mse_loss), "held"),
        (share(lambda out, y: ((out > 0) == (y > 0.5)).all(1), lambda out, y: torch.ones(len(y))), "held"),
        (share(lambda out, y: ((out > 0) == y)[of_some(out, y) >= 0], loss=ignoring, change=of_some), "not applicable"),
        (share(equal, loss=ignoring, change=of_some), "held"),
        (share(lambda out, y: out > 0), "not applicable"),
        (nothing_found, "not applicable"),
        (named("dice", dice), "held"),
        (named("macro_recall", macro_recall), "held"),
        (named("f1", f1), "held"),
        (named("top", lambda out, y: y.gather(1, out.topk(3).indices).mean()), "not applicable"),
        (named("precision", lambda out, y: y[out >= out.topk(3).values[:, -1:]].mean()), "not applicable"),
        (of_errors, "held"),
        (two_heads, "held"),
        (by_parts(equal), "held"),
        (share(both, lambda out, y: (out > 0) | (y < 0.5)), "broken"),
        (share(either, either), "broken"),
        (share(lambda out, y: (out > 0).roll(1, 1) == (y > 0.5)), "held"),
        (share(lambda out, y: (out > 20) == (y > 0.5)), "broken"),
        (share(lambda out, y: both(out, y), lambda out, y: (out > 0) == (out > 0)), "not applicable"),
        (named("dice", lambda out, y: dice(-out, y)), "not applicable"),
        (named("dice", lambda out, y: 1 - dice(out, y)), "broken"),
        (named("f1", lambda out, y: f1(out, 1 - y)), "broken"),
        (by_parts(lambda out, y: (out < 0) == (y > 0.5)), "broken"),
        (by_parts(lambda out, y: ((out > 0) == (y > 0.5))[:, :6]), "held"),
    ],
)
def test_shares_are_at_their_best_for_the_targets(evaluate: Evaluate, state: str) -> None:
    assert evaluated(evaluate) == state


@pytest.mark.parametrize(
    ("figure", "state"),
    [
        (lambda p, y: (p > 0.5) == (y > 0.5), "held"),
        (lambda p, y: (p > 0.9) == y.bool(), "held"),
        (lambda p, y: p.round() == y, "held"),
        (lambda p, y: (p > 0) == (y > 0.5), "broken"),
        (lambda p, y: (p > 0.5) == (p > 0.5), "not applicable"),
    ],
)
@pytest.mark.parametrize("loss", [F.binary_cross_entropy, F.mse_loss])
def test_shares_of_probabilities(figure: Sum, state: str, loss: Sum) -> None:
    assert evaluated(share(figure, loss=loss), nn.Sigmoid(), loss) == state


def of_counts(name: str, make: Callable[[int, int, int], float]) -> Evaluate:
    """A share by its name, of the pixels in both, of those that are found, and of those that are wanted."""

    def evaluate(model: nn.Module, batches: Batches) -> object:
        loss, both, found, wanted = 0.0, 0, 0, 0
        for x, y in batches:
            out = model(x)
            loss += F.binary_cross_entropy_with_logits(out, y).item() * len(y)
            both += int(((out > 0) & (y > 0.5)).sum())
            found += int((out > 0).sum())
            wanted += int((y > 0.5).sum())
        return {"loss": loss / 64, name: make(both, found, wanted)}

    return evaluate


@pytest.mark.parametrize(
    ("name", "make", "state"),
    [
        ("f1", lambda both, found, wanted: 2 * both / (found + wanted), "held"),
        ("iou", lambda both, found, wanted: both / (found + wanted - both), "held"),
        ("f1", lambda both, found, wanted: both / (found + wanted), "broken"),
        ("f1", lambda both, found, wanted: 2 * both / found, "broken"),
        ("iou", lambda both, found, wanted: 2 * both / (found + wanted - both), "broken"),
        ("iou", lambda both, found, wanted: both / (found + wanted), "broken"),
        ("f1", lambda both, found, wanted: 5 * both / (4 * wanted + found), "held"),
        ("overlap", lambda both, found, wanted: both / (found + wanted), "held"),
    ],
)
def test_shares_of_several_counts_are_one_for_perfect_predictions(
    name: str, make: Callable[[int, int, int], float], state: str
) -> None:
    became = evaluated(of_counts(name, make))
    assert (became == "broken") == (state == "broken")
