"""A list of ready batches is trained on as it is; where it may be one of samples, a sentence says what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import trainwright as tw
from trainwright.errors import UsageError
from trainwright.training.arguments import ready_if_batches

ROWS, FEATURES = 16, 20


def net(outputs: int = 2) -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, outputs))


def classes(*sizes: int) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(n, FEATURES), torch.randint(2, (n,))) for n in sizes]


def numbers(*sizes: int, width: int = 1) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(n, FEATURES), torch.randn(n, width)) for n in sizes]


class Squeezed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = net(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).squeeze(-1)  # type: ignore[no-any-return]


class Reads(nn.Module):
    """Branches on a value, which fake tensors do not have."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) if float(x.detach().sum()) < 1e9 else self.net(-x)  # type: ignore[no-any-return]


def tagging(output: Tensor, target: Tensor) -> Tensor:
    """A class for each step of a sequence; several sequences at once."""
    return F.cross_entropy(output.permute(0, 2, 1), target)


def by_name(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


EQUAL, SHORT = [ROWS] * 4, [ROWS, ROWS, 5]
BATCHES: dict[str, tuple[Any, nn.Module, Any]] = {
    "classes": (classes(*EQUAL), net(), nn.CrossEntropyLoss()),
    "a weighted loss": (classes(*EQUAL), net(), nn.CrossEntropyLoss(weight=torch.ones(2))),
    "a loss by its name": (classes(*EQUAL), net(), "cross_entropy"),
    "classes, the last one shorter": (classes(*SHORT), net(), nn.CrossEntropyLoss()),
    "a single one": (classes(ROWS), net(), nn.CrossEntropyLoss()),
    "lists": ([list(each) for each in classes(*EQUAL)], net(), nn.CrossEntropyLoss()),
    "a tuple": (tuple(classes(*EQUAL)), net(), nn.CrossEntropyLoss()),
    "arrays": ([(x.numpy(), y.numpy()) for x, y in classes(*EQUAL)], net(), nn.CrossEntropyLoss()),
    "by name": ([{"x": x, "y": y} for x, y in classes(*EQUAL)], net(), by_name),
    "numbers, the last one shorter": (numbers(*SHORT), net(1), nn.MSELoss()),
    "a number for each row": ([(x, y[:, 0]) for x, y in numbers(*EQUAL)], Squeezed(), nn.MSELoss()),
}
SAMPLES: dict[str, tuple[Any, nn.Module, Any]] = {
    "a class each": ([(torch.randn(FEATURES), torch.tensor(1)) for _ in range(40)], net(), nn.CrossEntropyLoss()),
    "a class each, in Python": ([(torch.randn(FEATURES), 1) for _ in range(40)], net(), nn.CrossEntropyLoss()),
    "sequences with a class for each step": (classes(*EQUAL), net(), tagging),
    "pictures of pictures": (
        [(torch.randn(3, 8, 8), torch.randn(3, 8, 8)) for _ in range(8)],
        nn.Conv2d(3, 3, 3, padding=1),
        nn.MSELoss(),
    ),
    "tokens": ([(torch.arange(9), torch.arange(9)) for _ in range(8)], nn.Embedding(9, 9), tagging),
}
REFUSED: dict[str, tuple[Any, nn.Module, Any]] = {
    "a vector for each row": (numbers(*EQUAL), net(1), nn.MSELoss()),
    "other lengths": (classes(5, ROWS, 9), net(), nn.CrossEntropyLoss()),
    "neither": (classes(*EQUAL), nn.Linear(7, 2), nn.CrossEntropyLoss()),
    "a model that needs values": (classes(*EQUAL), Reads(), nn.CrossEntropyLoss()),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BATCHES)
def test_ready_batches_are_taken_as_they_are(name: str, tmp_path: Path) -> None:
    data, model, loss = BATCHES[name]
    seen: list[int] = []
    tw.fit(
        model,
        data,
        loss,
        epochs=1,
        quiet=True,
        observers=[lambda result, state: seen.append(result.batch.size)],
        settings={"folder": str(tmp_path), "log.doctor": False},
    )
    assert seen == [len(next(iter(item.values() if isinstance(item, dict) else item))) for item in data]


@pytest.mark.parametrize("name", SAMPLES)
def test_samples_stay_samples(name: str) -> None:
    data, model, loss = SAMPLES[name]
    assert ready_if_batches(data, model, loss, "data") is data


@pytest.mark.parametrize("argument", ["data", "val"])
@pytest.mark.parametrize("name", REFUSED)
def test_what_may_be_both_or_is_neither_is_said_before_the_first_step(name: str, argument: str, tmp_path: Path) -> None:
    items, model, loss = REFUSED[name]
    good = TensorDataset(torch.randn(32, FEATURES), torch.randint(2, (32,)))
    data, val = (items, None) if argument == "data" else (good, items)
    with pytest.raises(UsageError, match=f"fit: {argument} is a list whose items have") as caught:
        tw.fit(model, data, loss, val=val, steps=1, quiet=True, settings={"folder": str(tmp_path)})
    assert "lambda: batches" in caught.value.remedy and "DataLoader(" in caught.value.remedy
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
def test_the_remedies_can_be_followed(tmp_path: Path) -> None:
    items, settings = numbers(*EQUAL), {"folder": str(tmp_path), "log.doctor": False}
    assert tw.fit(net(1), lambda: items, nn.MSELoss(), epochs=1, quiet=True, settings=settings).step == 4
    loader = DataLoader(items, batch_size=2)  # type: ignore[arg-type,var-annotated]
    assert tw.fit(net(1), loader, nn.MSELoss(), epochs=1, quiet=True, settings=settings).step == 2


def test_nothing_is_computed_to_decide_it() -> None:
    """Neither weights nor buffers of the model move, nor the random generator."""
    model = nn.Sequential(nn.BatchNorm1d(FEATURES), net())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    data = classes(*EQUAL)
    torch.manual_seed(0)
    expected = torch.rand(2)
    torch.manual_seed(0)
    assert ready_if_batches(data, model, nn.CrossEntropyLoss(), "data") is not data
    assert torch.equal(torch.rand(2), expected)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
