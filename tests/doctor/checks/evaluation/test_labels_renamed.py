"""Classes that validation numbers in another way than training."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import trainwright as tw

CENTRES = 4 * torch.randn(5, 6, generator=torch.Generator().manual_seed(0))


def data(rows: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(5, (rows,), generator=generator)
    return TensorDataset(CENTRES[y] + torch.randn(rows, 6, generator=generator), y)


def hits(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> int:
    return sum(int((model(x).argmax(1) == y).sum()) for x, y in batches)


def loss(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> float:
    return sum(F.cross_entropy(model(x), y).item() for x, y in batches)


Evaluation = Callable[[nn.Module, Iterable[tuple[Tensor, Tensor]]], float]


def finding(names: Callable[[int], int], evaluate: Evaluation, *, epochs: int = 6, learns: bool = True) -> str | None:
    """Return the line of the finding after a run that evaluates training rows, and then validation rows."""
    torch.manual_seed(0)
    train, (x_val, y_val) = data(400, 1), data(200, 2).tensors
    model = nn.Linear(6, 5)
    optimizer = torch.optim.Adam(model.parameters(), 0.05 if learns else 1e-5)
    val: list[tuple[Tensor, int]] = [(x, names(int(y))) for x, y in zip(x_val, y_val)]
    val_loader: DataLoader[tuple[Tensor, Tensor]] = DataLoader(val, 64)  # type: ignore[arg-type]
    with tw.watch(model, optimizer, out=None, quiet=True, examine="listen") as watch:
        for _ in range(epochs):
            for x, y in DataLoader(train, 40, shuffle=True):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
            with torch.no_grad():
                evaluate(model, DataLoader(train, 100))
                evaluate(model, val_loader)
    assert watch.session.failures == []
    found = [each.where.source or "" for each in watch.findings() if each.code == "evaluation.labels_renamed"]
    return found[0] if found else None


@pytest.mark.slow
@pytest.mark.parametrize("evaluate", [hits, loss])
@pytest.mark.parametrize("names", [lambda y: (y + 1) % 5, lambda y: [1, 0, 2, 3, 4][y]], ids=["shifted", "exchanged"])
def test_other_class_numbers_are_found(names: Callable[[int], int], evaluate: Evaluation) -> None:
    assert finding(names, evaluate) is not None


@pytest.mark.slow
@pytest.mark.parametrize("learns", [True, False])
def test_the_same_class_numbers_are_healthy(learns: bool) -> None:
    assert finding(lambda y: y, hits, learns=learns) is None


@pytest.mark.slow
def test_one_class_that_was_not_learned_is_healthy() -> None:
    assert finding(lambda y: 3 if y == 2 else y, hits) is None


@pytest.mark.parametrize("vocabulary", [40, 4], ids=["next tokens", "classes of tokens"])
def test_next_tokens_are_no_class_numbers(vocabulary: int) -> None:
    """An untrained language model predicts another token for each context. Classes of tokens are still counted."""
    ids = (torch.arange(9) + torch.arange(32)[:, None]) % 5
    model = nn.Embedding(5, vocabulary)
    with torch.no_grad():
        model.weight.copy_(F.one_hot(torch.arange(5) % 4 if vocabulary == 4 else torch.arange(5) + 10, vocabulary))
    target = ids[:, 1:] if vocabulary == 40 else torch.tensor([1, 0, 3, 2, 1])[ids[:, :-1]]
    optimizer = torch.optim.SGD(model.parameters(), 1e-9)
    with tw.watch(model, optimizer, out=None, quiet=True, examine="listen") as watch:
        for _ in range(2):
            F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten() % vocabulary).backward()
            optimizer.step()
            with torch.no_grad():
                F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), target.flatten())
    assert watch.session.failures == []
    found = any(each.code == "evaluation.labels_renamed" for each in watch.findings())
    assert found == (vocabulary == 4)
