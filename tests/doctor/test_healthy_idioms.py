"""Healthy programs in the idioms of public repositories, each of which got a false warning once."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

import trainwright as tw

pytestmark = pytest.mark.slow  # watched loops, each of a few tenths of a second

X = torch.randn(256, 8, generator=torch.Generator().manual_seed(1))
Y = X[:, :4].argmax(1)


def net(dropout: float = 0.0) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(dropout), nn.Linear(32, 4))


def batches(number: int, size: int = 16) -> Iterator[tuple[Tensor, Tensor]]:
    for step in range(number):
        rows = torch.arange(step * size, (step + 1) * size) % 192
        yield X[rows], Y[rows]


def watched(model: Any, optimizer: Any, **how: Any) -> tw.Watch:
    return tw.watch(model, optimizer, out=None, quiet=True, **how)


def alarms(watch: tw.Watch) -> set[str]:
    assert watch.session.failures == []
    return {each.code for each in watch.findings() if each.severity != "info"}


def step(optimizer: Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


# evaluations, and passes without gradients that are none


def partial_validation() -> tw.Watch:
    """As litgpt: five batches of the validation set, always the first."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    loader, validation = (DataLoader(TensorDataset(X, Y), 8, shuffle=shuffle) for shuffle in (True, False))
    with watched(model, optimizer, loader=loader) as watch:
        for _ in range(3):
            for x, y in loader:
                step(optimizer, F.cross_entropy(model(x), y))
            with torch.no_grad():
                for number, (x, y) in enumerate(validation):
                    if number == 5:
                        break
                    F.cross_entropy(model(x), y).item()
    return watch


def rollouts(rewarded: Callable[[Tensor, Tensor], Tensor]) -> tw.Watch:
    """A policy in train mode draws, is rewarded, and is trained on what it drew, as in PPO and GRPO."""
    policy = net(dropout=0.1)
    optimizer = torch.optim.Adam(policy.parameters(), 1e-3)
    with watched(policy, optimizer) as watch:
        for round_ in range(10):
            x, y = X[round_ * 16 : round_ * 16 + 16], Y[round_ * 16 : round_ * 16 + 16]
            with torch.no_grad():
                actions = torch.multinomial(policy(x).softmax(1), 1).squeeze(1)
                rewards = rewarded(actions, y)
                before = policy(x).log_softmax(1).gather(1, actions[:, None]).squeeze(1)
            for _ in range(4):
                ratio = (policy(x).log_softmax(1).gather(1, actions[:, None]).squeeze(1) - before).exp()
                step(optimizer, -(ratio * (rewards - rewards.mean())).mean())
    return watch


def equal_to_answers() -> tw.Watch:
    return rollouts(lambda actions, answers: (actions == answers).float())


def of_an_environment() -> tw.Watch:
    return rollouts(lambda actions, answers: torch.tensor([float(each) for each in actions.tolist()]))


def teacher() -> tw.Watch:
    """A mean teacher in train mode, whose weights follow at the end of a step."""
    student = net(dropout=0.1)
    average = copy.deepcopy(student)
    optimizer = torch.optim.Adam(student.parameters(), 1e-2)
    with watched(student, optimizer) as watch:
        for x, y in batches(40):
            with torch.no_grad():
                told = average(x).softmax(1)
            step(optimizer, F.cross_entropy(student(x), y) + F.mse_loss(student(x).softmax(1), told))
            with torch.no_grad():
                for mine, theirs in zip(average.parameters(), student.parameters()):
                    mine.lerp_(theirs, 0.1)
    return watch


# arithmetic


def divided_in_place() -> tw.Watch:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    with watched(model, optimizer) as watch:
        for number, (x, y) in enumerate(batches(48)):
            loss = F.cross_entropy(model(x), y)
            loss /= 4
            loss.backward()
            if number % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
    return watch


def critic() -> tw.Watch:
    """The last bias of a critic cancels in a difference, which is small beside outputs that have drifted away."""
    model = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
    nn.init.constant_(model[2].bias, 1000.0)
    optimizer = torch.optim.RMSprop(model.parameters(), 1e-3)
    with watched(model, optimizer) as watch:
        for x, _ in batches(48):
            step(optimizer, model(x).mean() - model(x + 0.3 * torch.randn_like(x)).mean())
    return watch


def maximised() -> tw.Watch:
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2, maximize=True)
    with watched(model, optimizer) as watch:
        for x, y in batches(40):
            step(optimizer, -F.cross_entropy(model(x), y))
    return watch


# attention between samples


class BetweenRows(nn.Module):
    """As SAINT: all samples are one sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(8, 16), nn.Linear(16, 4)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.into(x)[None]
        out: Tensor = self.out((rows + self.attention(rows, rows, rows)[0])[0])
        return out


class BatchSecond(BetweenRows):
    """A fault: the layer takes the batch for the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.into(x)[:, None]
        out: Tensor = self.out((rows + self.attention(rows, rows, rows)[0])[:, 0])
        return out


def supervised(model: nn.Module) -> tw.Watch:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    loader = DataLoader(TensorDataset(X, Y), 16, shuffle=True)
    with watched(model, optimizer, loader=loader) as watch:
        for x, y in loader:
            step(optimizer, F.cross_entropy(model(x), y))
    return watch


def between_rows() -> tw.Watch:
    return supervised(BetweenRows())


class Packed(nn.Module):
    """Attention within sequences that are packed into the rows, as given by their offsets, lengths or numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 48), nn.Linear(16, 4)

    def forward(self, x: Tensor, given: Tensor) -> Tensor:
        rows = torch.arange(len(x))
        ends = given.cumsum(0) if given[0] else given[1:]
        number = given if len(given) == len(x) else torch.bucketize(rows, ends, right=True)
        q, k, v = self.qkv(x).chunk(3, 1)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=number[:, None] == number)
        return self.out(mixed)  # type: ignore[no-any-return]


def packed(form: Callable[[Tensor], Tensor]) -> tw.Watch:
    model = Packed()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    with watched(model, optimizer) as watch:
        for _ in range(16):
            lengths = torch.randint(3, 9, (6,))
            x = torch.randn(int(lengths.sum()), 8)
            step(optimizer, F.cross_entropy(model(x, form(lengths)), x[:, :4].argmax(1)))
    return watch


def packed_with_offsets() -> tw.Watch:
    return packed(lambda lengths: F.pad(lengths.cumsum(0), (1, 0)))


def packed_with_lengths() -> tw.Watch:
    return packed(lambda lengths: lengths)


def packed_with_numbers() -> tw.Watch:
    return packed(lambda lengths: torch.arange(len(lengths)).repeat_interleave(lengths))


@pytest.mark.parametrize(
    "program",
    [
        packed_with_offsets,
        packed_with_lengths,
        packed_with_numbers,
        partial_validation,
        equal_to_answers,
        of_an_environment,
        teacher,
        divided_in_place,
        critic,
        maximised,
        between_rows,
    ],
    ids=lambda program: program.__name__,
)
def test_a_healthy_program_gets_no_warning(program: Callable[[], tw.Watch]) -> None:
    torch.manual_seed(0)
    assert alarms(program()) == set()


def test_a_layer_that_takes_the_batch_for_a_sequence_is_found() -> None:
    torch.manual_seed(0)
    assert "model.mixes_samples" in alarms(supervised(BatchSecond()))


def weighed(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tw.Loss:
    """A sum over samples, with its weights."""
    x, y = batch
    weights = torch.where(y == 0, 2.0, 1.0)
    return tw.Loss((weights * F.cross_entropy(model(x), y, reduction="none")).sum(), weights.sum())


def with_a_penalty(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tw.Loss:
    """A penalty that is a mean, times the number of samples."""
    x, y = batch
    out = model(x)
    penalty = 0.1 * F.mse_loss(out, torch.zeros_like(out)) * len(y)
    return tw.Loss(F.cross_entropy(out, y, reduction="sum") + penalty, len(y))


@pytest.mark.parametrize("loss", [weighed, with_a_penalty], ids=lambda loss: loss.__name__)
def test_a_sum_with_its_weight_is_a_mean(loss: Callable[..., tw.Loss], tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    result = tw.fit(net(), TensorDataset(X, Y), loss, lr=1e-2, until="24steps", batch=32, quiet=True)
    assert [each.code for each in result.findings] == []


class GraphConvolution(nn.Module):
    """Sums the features over the neighbours in a graph, whose adjacency is not in the module."""

    def __init__(self, adjacency: Callable[[], Tensor]) -> None:
        super().__init__()
        self.head, self.adjacency = nn.Linear(8, 4), adjacency

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.adjacency() @ self.head(x)
        return out


def make_ring() -> Tensor:
    return torch.eye(64) + torch.eye(64).roll(1, 0)


RING = make_ring()


@pytest.mark.parametrize(
    ("adjacency", "codes"), [(lambda: RING, []), (make_ring, ["model.mixes_samples"])], ids=["constant", "made"]
)
def test_a_constant_matrix_relates_nodes_of_a_graph(
    adjacency: Callable[[], Tensor], codes: list[str], tmp_path: Any, monkeypatch: Any
) -> None:
    """A matrix that is made in the forward pass, such as attention weights, may be a fault."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    result = tw.fit(
        GraphConvolution(adjacency), lambda: iter([(X[:64], Y[:64])] * 24), F.cross_entropy, lr=1e-2, quiet=True
    )
    assert [each.code for each in result.findings] == codes
