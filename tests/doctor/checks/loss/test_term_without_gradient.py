"""Tests of loss.term_without_gradient."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trainwright as tw
from tests.doctor.checks.loss.loops import Loss, X, Y, codes

pytestmark = pytest.mark.slow
CODE = "loss.term_without_gradient"


def penalty(model: nn.Module, at: slice, create_graph: bool) -> Tensor:
    x = X[at].clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).tanh().sum(), x, create_graph=create_graph)
    return (slope.norm(dim=1) - 1).square().mean()


FAULTY: list[Loss] = [
    lambda model, at: F.cross_entropy(model(X[at]), Y[at]) + 10 * penalty(model, at, create_graph=False),
    lambda model, at: F.cross_entropy(model(X[at]), Y[at]) + 0.1 * model(X[at]).detach().square().mean(),
]
TEACHER = nn.Linear(X.shape[1], 3).requires_grad_(False)


def distance(student: Tensor, teacher: Tensor) -> Tensor:
    return F.kl_div(student.log_softmax(1), teacher.log_softmax(1), log_target=True, reduction="batchmean")


FAULTY += [
    lambda model, at: F.cross_entropy(model(X[at]), Y[at]) + 4 * distance(TEACHER(X[at]), TEACHER(X[at])),
    lambda model, at: 0.3 * F.cross_entropy(model(X[at]), Y[at]) + F.mse_loss(TEACHER(X[at]), X[at, :3]),
    # its factors broadcast: the probabilities are summed over their own axis
    lambda model, at: (
        F.cross_entropy(z := model(X[at]), Y[at])
        + 0.5 * (z.detach().softmax(1).mean(0)[:, None] * z.softmax(1).mean(0)[None]).sum()
    ),
]
HEALTHY: list[Loss] = [
    lambda model, at: F.cross_entropy(model(X[at]), Y[at]) + 4 * distance(model(X[at]), TEACHER(X[at])),
    lambda model, at: F.cross_entropy(z := model(X[at]), Y[at]) + 0.5 * z.softmax(1).mean(0).square().sum(),
    lambda model, at: F.cross_entropy(model(X[at]), Y[at]) + 10 * penalty(model, at, create_graph=True),
    lambda model, at: (loss := F.cross_entropy(model(X[at]), Y[at])) - loss.detach() + 1,
    lambda model, at: F.cross_entropy(model(X[at]), Y[at]) + X[at].mean(),
    lambda model, at: ((p := (z := model(X[at])).softmax(1).detach()) * z).mean() + p.square().mean(),
]


@pytest.mark.parametrize("loss", FAULTY)
def test_found(loss: Loss) -> None:
    assert CODE in codes(loss)


@pytest.mark.parametrize("loss", HEALTHY)
def test_silent(loss: Loss) -> None:
    assert CODE not in codes(loss)


@pytest.mark.parametrize(("detaches", "found"), [(True, True), (False, False)])
def test_the_step_of_a_generator(detaches: bool, found: bool) -> None:
    torch.manual_seed(0)
    generator, critic = nn.Linear(X.shape[1], 4), nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizers = [torch.optim.Adam(each.parameters(), 1e-3) for each in (generator, critic)]
    real = torch.randn(len(X), 4)
    with tw.watch([generator, critic], optimizers, out=None, quiet=True, checks=["loss"]) as watch:
        for _ in range(8):
            fake = generator(X)
            judged = critic(fake.detach() if detaches else fake)
            optimizers[0].zero_grad()
            (F.mse_loss(judged, torch.ones_like(judged)) + 10 * F.l1_loss(fake, real)).backward()
            optimizers[0].step()
            optimizers[1].zero_grad()
            judged = critic(torch.cat([real, generator(X).detach()]))
            F.mse_loss(judged, torch.arange(len(judged))[:, None].lt(len(X)).float()).backward()
            optimizers[1].step()
    assert (CODE in {each.code for each in watch.findings() if each.severity != "info"}) == found
