"""An evaluation is a pass without gradients whose outputs are compared with targets; other passes are none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import trainwright as tw
from trainwright.doctor.context import RunContext
from trainwright.doctor.facts.modes import EvaluationFacts
from trainwright.recorder.comparisons import loss_functions

X = torch.randn(64, 6, generator=torch.Generator().manual_seed(0))
Y = X[:, :3].argmax(1)
SOFT = F.one_hot(Y, 3).float()


class Model(nn.Module):
    """Returns its loss, too, where it gets targets."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        logits: Tensor = self.layer(x)
        return logits if y is None else (logits, F.cross_entropy(logits, y))


def evaluations(between: Callable[[Model], object], *, steps: int = 6) -> EvaluationFacts | None:
    """What is known of the evaluations of a loop with ``between`` after every third step."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    kept = None
    with tw.watch(model, optimizer, out=None, quiet=True, examine="listen") as watch:
        for step in range(steps):
            logits = model(X[:32])
            loss = F.cross_entropy(logits, Y[:32])
            if isinstance(kept, Tensor):
                loss = loss + (logits * kept).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 3 == 2:
                with torch.no_grad():
                    kept = between(model)
    assert watch.session.failures == []
    return RunContext(watch.records).latest(EvaluationFacts)


def nll(model: Model) -> float:
    return -model(X).log_softmax(1).gather(1, Y[:, None]).mean().item()


def accuracy_over_batches(model: Model) -> float:
    right = sum(int((model(x).argmax(1) == y).sum()) for x, y in zip(X.split(16), Y.split(16)))
    return right / len(X)


def all_at_the_end(model: Model) -> float:
    outputs = torch.cat([model(x) for x in X.split(16)])
    return float((outputs - SOFT).square().mean())


@pytest.mark.slow
@pytest.mark.parametrize(
    "between",
    [
        lambda model: F.cross_entropy(model(X), Y),
        lambda model: F.kl_div(model(X).log_softmax(1), SOFT, reduction="batchmean"),
        lambda model: model(X, Y)[1],
        lambda model: (model(X).argmax(1) == Y).float().mean(),
        lambda model: (model(X).topk(2).indices == Y[:, None]).any(1).sum(),
        nll,
        accuracy_over_batches,
        all_at_the_end,
        lambda model: F.mse_loss(model.layer(X), SOFT) if model(X) is not None else None,
    ],
    ids=["loss", "divergence", "own loss", "equal", "top 2", "gathered", "batches", "at the end", "a part"],
)
def test_what_is_compared_with_targets_is_an_evaluation(between: Callable[[Model], object]) -> None:
    facts = evaluations(lambda model: [between(model)])
    assert facts is not None and facts.after == 6


def drawn(model: Model) -> list[int]:
    """As text is generated, until an end."""
    drawn, x = [], X[:1]
    for _ in range(4):
        token = torch.multinomial(model(x).softmax(1), 1)
        drawn.append(int(token))
        if (token == 2).all():
            break
        x = x + token
    return drawn


def with_noise(model: Model) -> float:
    """As a diffusion model samples: the noise that it begins with is no target."""
    x = torch.randn(8, 6)
    for _ in range(3):
        out: Tensor = model(x)
        x = x - 0.1 * F.pad(out, (0, 3)) + 0.1 * torch.randn_like(x)
    return x.mean().item()


def rewarded(model: Model) -> Tensor:
    """The rewards come after the actions, from outside of torch."""
    actions = model(X).argmax(1)
    rewards = torch.tensor([float(each) for each in actions.tolist()])
    return (rewards - model(X)[:, 0])[:32, None]


@pytest.mark.slow
@pytest.mark.parametrize(
    "between",
    [
        lambda model: [model(X)],
        lambda model: [model(X).mean().item()],
        lambda model: [model(X).argmax(1).numpy()],
        drawn,
        with_noise,
        rewarded,
        lambda model: F.cross_entropy(model(X[:32]), Y[:32], reduction="none")[:, None],
        lambda model: None,
    ],
    ids=["features", "a mean", "an array", "drawn", "noise", "a rollout", "trained on", "nothing"],
)
def test_what_is_not_compared_or_is_trained_on_is_none(between: Callable[[Model], object]) -> None:
    assert evaluations(between) is None


def test_loss_functions_are_those_with_a_reduction() -> None:
    assert {"cross_entropy", "nll_loss", "mse_loss", "kl_div", "ctc_loss"} <= loss_functions()
    assert not {"softmax", "linear", "gumbel_softmax"} & loss_functions()


@pytest.mark.slow
def test_a_single_evaluation_whose_iterator_may_have_the_address_of_the_last_one() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.2), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    train, valid = (DataLoader(TensorDataset(X, Y), 8, shuffle=shuffle) for shuffle in (True, False))
    with tw.watch(model, optimizer, out=None, quiet=True, examine="listen") as watch:
        for epoch in range(2):
            for x, y in train:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
            for x, y in valid if epoch == 0 else ():
                with torch.no_grad():
                    F.cross_entropy(model(x), y).item()
    assert "evaluation.in_train_mode" in [each.code for each in watch.findings()]
