"""A softmax over the samples or positions where the classes compete, and softmaxes over samples that are intended."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import trainwright as tw
from tests.doctor.checks.loops import mlp, watched

CODE = "loss.softmax_over_samples"
Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


def _one_hot(y: Tensor) -> Tensor:
    return F.one_hot(y, 4).float()


FAULTY: dict[str, Loss] = {
    "nll": lambda m, x, y: F.nll_loss(F.log_softmax(m(x), dim=0), y),
    "log of softmax": lambda m, x, y: F.nll_loss((m(x).softmax(0) + 1e-9).log(), y),
    "cross entropy": lambda m, x, y: F.cross_entropy(m(x).softmax(0), y),
    "by hand": lambda m, x, y: -m(x).log_softmax(0)[torch.arange(len(y)), y].mean(),
    "gathered": lambda m, x, y: -m(x).log_softmax(0).gather(1, y[:, None]).mean(),
    "probabilities gathered": lambda m, x, y: -m(x).softmax(0).gather(1, y[:, None]).squeeze(1).log().mean(),
    "squared error": lambda m, x, y: F.mse_loss(m(x).softmax(0), _one_hot(y)),
    "one-hot": lambda m, x, y: -(_one_hot(y) * F.log_softmax(m(x), 0)).sum(1).mean(),
    "divergence": lambda m, x, y: F.kl_div(F.log_softmax(m(x), 0), _one_hot(y) * 0.9 + 0.025, reduction="batchmean"),
    "module": lambda m, x, y: nn.NLLLoss()(nn.LogSoftmax(dim=0)(m(x)), y),
}
HEALTHY: dict[str, Loss] = {
    "over the classes": lambda m, x, y: F.nll_loss(F.log_softmax(m(x), dim=-1), y),
    "transposed": lambda m, x, y: F.nll_loss(F.log_softmax(m(x).T, dim=0).T, y),
    "segmentation": lambda m, x, y: F.nll_loss(F.log_softmax(m(x).T[None], 1), y[None]),
    "weights of samples": lambda m, x, y: (
        F.cross_entropy(m(x), y, reduction="none") * m(x).square().sum(1).softmax(0)
    ).sum(),
    "weights over samples, in columns": lambda m, x, y: (m(x).softmax(0) * (m(x).detach() - _one_hot(y)).abs()).sum(),
    "tokens": lambda m, x, y: -m(x).view(4, -1, 4).log_softmax(-1).gather(-1, y.view(4, -1, 1)).mean(),
    "one position": lambda m, x, y: -m(x).view(4, -1, 4).log_softmax(-1)[torch.arange(4), y[:4], y[:4]].mean(),
    "pairs": lambda m, x, y: (
        F.nll_loss((m(x) @ m(x).T).log_softmax(1), torch.arange(len(x)))
        - (m(x) @ m(x).T).log_softmax(0).diagonal().mean()
    ),
    "one-hot": lambda m, x, y: -(_one_hot(y) * F.log_softmax(m(x), 1)).sum(1).mean(),
    "classes come first": lambda m, x, y: -m(x).T.log_softmax(0)[y, torch.arange(len(y))].mean(),
    "means of classes": lambda m, x, y: -(F.normalize(_one_hot(y), p=1, dim=0).T * m(x).T.log_softmax(0)).sum(),
    "pairs by number": lambda m, x, y: F.nll_loss((m(x) @ m(x).T).log_softmax(0), torch.arange(len(x))),
    "several captions of an image": lambda m, x, y: (
        -(m(x) @ m(torch.cat([x, x])).T).log_softmax(0)[torch.arange(len(x)).repeat(2), torch.arange(2 * len(x))].mean()
    ),
    "both directions": lambda m, x, y: _both_directions(m(x), y),
    "gate of a router": lambda m, x, y: F.cross_entropy(m(x) * _gate(m(x)), y),
    "load of a router": lambda m, x, y: F.cross_entropy(m(x), y) + (m(x).softmax(0) * _one_hot(m(x).argmax(1))).sum(),
    "unbatched attention": lambda m, x, y: F.cross_entropy((m(x) @ m(x[:6]).T).softmax(0).T @ m(x), y[:6]),
    "pooling over nodes": lambda m, x, y: F.cross_entropy((m(x).softmax(0) * _one_hot(y)).sum(0)[None], y[:1]),
    "Sinkhorn": lambda m, x, y: F.nll_loss(m(x).log_softmax(1).log_softmax(0), y),
}


def _both_directions(scores: Tensor, y: Tensor) -> Tensor:
    """From samples to the prototypes of classes, and back."""
    return F.cross_entropy(scores, y) - scores.log_softmax(0).gather(1, y[:, None]).mean()


def _gate(scores: Tensor) -> Tensor:
    """Tokens compete for each expert."""
    return scores.softmax(0).gather(1, scores.argmax(1, keepdim=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTY)
def test_classes_of_other_samples_compete(name: str) -> None:
    watch = watched(mlp(), loss=FAULTY[name], steps=24)
    (found,) = [each for each in watch.findings() if each.code == CODE]
    assert found.severity == "critical" and str(found.where.source).startswith("test_softmax_over_samples.py:")


@pytest.mark.slow
@pytest.mark.parametrize("name", HEALTHY)
def test_intended_axes(name: str) -> None:
    watch = watched(mlp(), loss=HEALTHY[name], steps=24)
    assert [each for each in watch.findings() if each.code == CODE] == []


@pytest.mark.slow
@pytest.mark.parametrize(("dim", "expected"), [(0, True), (1, False)])
def test_the_last_layer_is_a_softmax(dim: int, expected: bool) -> None:
    model = nn.Sequential(mlp(), nn.LogSoftmax(dim))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    with tw.watch(model, optimizer, out=None, quiet=True) as watch:
        for _ in range(24):
            optimizer.zero_grad()
            F.nll_loss(model(torch.randn(16, 8)), torch.randint(4, (16,))).backward()
            optimizer.step()
    assert (CODE in [each.code for each in watch.findings()]) == expected
