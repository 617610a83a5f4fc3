"""Checks of the arguments of loss functions, each on faulty and on healthy losses."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trainwright as tw
from tests.doctor.checks.loss.loops import Loss, R, X, Y, codes

pytestmark = pytest.mark.slow


def ctc(scores: Tensor) -> Tensor:
    """The rows as the steps of one sequence."""
    return F.ctc_loss(scores[:, None], torch.tensor([[1, 2, 1]]), torch.tensor([len(scores)]), torch.tensor([3]))


TAGS = torch.randint(3, (64, 10), generator=torch.Generator().manual_seed(0))


PADDED = torch.where(torch.arange(10) < torch.randint(4, 11, (64, 1)), 1 + TAGS % 2, 0)


def loss_of(model: nn.Module, at: slice, tags: Tensor, ignored: int) -> Tensor:
    scores = model(X[at, None].expand(-1, 10, -1))
    return F.cross_entropy(scores.flatten(0, 1), tags[at].flatten(), ignore_index=ignored)


FAULTY: dict[str, list[Loss]] = {
    "loss.bounded_output": [
        lambda model, at: F.mse_loss(model(X[at])[:, 0].relu(), R[at]),
        lambda model, at: F.cross_entropy(model(X[at]).sigmoid(), Y[at]),
        lambda model, at: F.binary_cross_entropy_with_logits(model(X[at])[:, 0].relu(), (R[at] > 0).float()),
    ],
    "loss.cross_entropy_over_one_class": [
        lambda model, at: F.cross_entropy(model(X[at])[:, :1], (R[at] > 0).float()[:, None]),
        lambda model, at: F.cross_entropy(model(X[at])[:, :1], torch.zeros(16, dtype=torch.long)),
    ],
    "loss.detached_from_model": [
        lambda model, at: F.cross_entropy(model(X[at]).detach(), Y[at]).requires_grad_(),
        lambda model, at: F.cross_entropy(model(X[at]).data.clone().requires_grad_(), Y[at]),
    ],
    "loss.never_changes": [
        lambda model, at: -F.logsigmoid(0.1 * (model(X[at]).sum(1) - model(X[at]).sum(1).detach())).mean(),
        lambda model, at: F.mse_loss(model(X[at])[:, :1].softmax(1), torch.full((16, 1), 0.5)),
    ],
    "loss.nll_without_log_softmax": [
        lambda model, at: ctc(model(X[at])),
        lambda model, at: F.nll_loss(model(X[at]).softmax(1), Y[at]),
        lambda model, at: F.nll_loss(model(X[at]), Y[at]),
        lambda model, at: F.kl_div(model(X[at]).softmax(1), F.one_hot(Y[at], 3).float(), reduction="batchmean"),
    ],
    "loss.real_class_ignored": [
        lambda model, at: loss_of(model, at, TAGS, 0),
        lambda model, at: F.cross_entropy(model(X[at, None].expand(-1, 10, -1)).mT, TAGS[at], ignore_index=2),
    ],
    "loss.softmax_applied_twice": [
        lambda model, at: F.cross_entropy(model(X[at]), Y[at]) + model(X[at]).softmax(1).softmax(1).square().sum(),
        lambda model, at: -(F.one_hot(Y[at]) * model(X[at]).softmax(1).softmax(1)).sum(),
    ],
    "loss.softmax_before_cross_entropy": [
        lambda model, at: F.cross_entropy(model(X[at]).softmax(1), Y[at]),
        lambda model, at: F.nll_loss(model(X[at]).softmax(1).log_softmax(1), Y[at]),
        lambda model, at: F.binary_cross_entropy_with_logits(model(X[at]).sigmoid()[:, 0], (R[at] > 0).float()),
    ],
}
HEALTHY: dict[str, list[Loss]] = {
    "loss.bounded_output": [
        lambda model, at: F.mse_loss(model(X[at])[:, 0].relu(), R[at].abs()),
        lambda model, at: F.cross_entropy(model(X[at]), Y[at]),
        lambda model, at: F.mse_loss(model(X[at])[:, 0].sigmoid(), R[at].sigmoid()),
    ],
    "loss.cross_entropy_over_one_class": [
        lambda model, at: F.cross_entropy(model(X[at])[:, :2], (R[at] > 0).long()),
        lambda model, at: F.binary_cross_entropy_with_logits(model(X[at])[:, :1], (R[at] > 0).float()[:, None]),
    ],
    "loss.detached_from_model": [
        lambda model, at: F.cross_entropy(model(X[at]), Y[at]),
        lambda model, at: F.cross_entropy(model(X[at]), Y[at]) + F.cross_entropy(model(X[at]).detach(), Y[at]),
    ],
    "loss.never_changes": [
        lambda model, at: F.cross_entropy(model(X[at]), Y[at]),
        lambda model, at: (out := model(X[at]).sum()) - out.detach(),
    ],
    "loss.nll_without_log_softmax": [
        lambda model, at: ctc(model(X[at]).log_softmax(1)),
        lambda model, at: F.nll_loss(model(X[at]).log_softmax(1), Y[at]),
        lambda model, at: F.kl_div(model(X[at]).log_softmax(1), F.one_hot(Y[at], 3).float(), reduction="batchmean"),
        lambda model, at: F.nll_loss((1 - model(X[at]).softmax(1)) ** 2 * model(X[at]).log_softmax(1), Y[at]),
    ],
    "loss.real_class_ignored": [
        lambda model, at: loss_of(model, at, TAGS, -100),
        lambda model, at: loss_of(model, at, PADDED, 0),
    ],
    "loss.softmax_applied_twice": [
        lambda model, at: -(F.one_hot(Y[at]) * model(X[at]).softmax(1)).sum(),
        lambda model, at: F.nll_loss(model(X[at]).log_softmax(1), Y[at]),
    ],
    "loss.softmax_before_cross_entropy": [
        lambda model, at: F.cross_entropy(model(X[at]), Y[at]),
        lambda model, at: F.cross_entropy(model(X[at]).log_softmax(1), Y[at]),
        lambda model, at: F.cross_entropy(model(X[at]).relu(), Y[at]),
    ],
}


@pytest.mark.parametrize(("code", "loss"), [(code, loss) for code, losses in FAULTY.items() for loss in losses])
def test_a_fault_is_found(code: str, loss: Loss) -> None:
    assert code in codes(loss)


@pytest.mark.parametrize(("code", "loss"), [(code, loss) for code, losses in HEALTHY.items() for loss in losses])
def test_a_healthy_loss_is_not(code: str, loss: Loss) -> None:
    assert code not in codes(loss)


def test_the_evidence_of_a_divergence_names_what_was_measured() -> None:
    model, check = nn.Linear(6, 3), "loss.nll_without_log_softmax"
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    with tw.watch(model, optimizer, out=None, quiet=True) as watch:
        for _ in range(8):
            optimizer.zero_grad()
            F.kl_div(model(X).softmax(1), F.one_hot(Y, 3).float(), reduction="batchmean").backward()
            optimizer.step()
    (found,) = [each for each in watch.findings() if each.code == check]
    assert [(each.seen, each.expected) for each in found.evidence] == [("all", "none")]
    assert "kl_div(log_softmax" in found.remedy and "cross_entropy" not in found.remedy
