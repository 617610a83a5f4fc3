"""What a model makes itself is no target of the data; what a threshold leaves out is a choice; both by measurement."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trainwright as tw
from tests.doctor.losses import Y16, Loss, broken, case_of, ended, verdicts
from tests.rows import each_row
from trainwright.doctor.case import Case
from trainwright.doctor.diagnose import diagnose
from trainwright.doctor.finding import Finding
from trainwright.doctor.law import NotApplicable
from trainwright.runlog.records import Examined

pytestmark = pytest.mark.slow  # watched loops, each of a few tenths of a second


def surrogate(out: Tensor) -> Tensor:
    """The value of a bound, and the gradient of a score: VIMCO, REINFORCE."""
    score = 40 * out.sum(1) - 90
    return -(1e-2 * out.mean(1) + score - score.detach()).mean()


def commitment(out: Tensor) -> Tensor:
    """To codes that begin near 0."""
    codes = 1e-3 * out.detach().sign()
    return F.cross_entropy(out, Y16) + 0.25 * F.mse_loss(30 * out, codes)


def temporal_difference(out: Tensor) -> Tensor:
    return (40 * out[:, 0] - 1e-3 * out.detach().amax(1).roll(1)).square().mean()


@each_row("loss", [surrogate, commitment, temporal_difference], ids=lambda each: each.__name__)
def test_targets_of_the_models_own_say_nothing_of_scales(loss: Loss) -> None:
    case = case_of(loss)
    for law in ("starts_at_chance", "targets_are_the_minimum", "targets_are_centred"):
        assert not any(isinstance(each, Finding) for each in verdicts(case, law)), law


def test_a_difference_that_the_loss_is_linear_in_is_no_distance() -> None:
    """A divergence less a likelihood."""
    little = torch.linspace(0, 1e-3, 16)
    [linear] = verdicts(case_of(lambda out: (little - 40 * out.sum(1)).mean()), "starts_at_chance")
    [square] = verdicts(ended(case_of(lambda out: (little - 40 * out.sum(1)).square().mean())), "starts_at_chance")
    assert not isinstance(linear, Finding) and isinstance(square, Finding)


def test_a_target_from_outside_beside_one_of_the_models_own() -> None:
    loss = lambda out: F.cross_entropy(50 * out, Y16) + F.mse_loss(out, 0.1 * out.detach().sign())  # noqa: E731
    assert broken(ended(case_of(loss)), "starts_at_chance")


def test_the_sign_of_a_comparison_with_the_models_own_is_found() -> None:
    assert broken(case_of(lambda out: -F.mse_loss(out, 0.5 * out.detach().roll(1, 0))), "targets_are_the_minimum")


def of_the_sure(out: Tensor) -> Tensor:
    each = F.cross_entropy(out, out.detach().argmax(1), reduction="none")
    return (each * (out.detach().softmax(1).amax(1) > 0.9)).mean()


@each_row(
    ("more", "state"),
    [
        (of_the_sure, "not applicable"),
        (lambda out: (out.abs().mean() - 50).relu(), "not applicable"),
        (lambda out: out.clamp(min=40).mean(), "not applicable"),
        (lambda out: (out.square() * (Y16 > 7)[:, None]).mean(), "broken"),
        (lambda out: out.square().mean().detach(), "broken"),
        (lambda out: (out.detach().abs().mean() - 0.01).relu(), "broken"),
    ],
    ids=str,
)
def test_a_term_that_a_threshold_leaves_out(more: Loss, state: str) -> None:
    case = case_of(lambda out: F.cross_entropy(out, Y16) + more(out), steps=2)
    [law] = [
        each for each in diagnose(Case(case.records, finished=True)).laws if each.name == "loss.every_term_matters"
    ]
    assert law.state == state


def test_a_threshold_that_is_never_passed_is_an_info() -> None:
    case = case_of(lambda out: F.cross_entropy(out, Y16) + of_the_sure(out), steps=2)
    seen = [each for each in case.records if isinstance(each, Examined) and each.experiment == "terms"][-1]
    assert isinstance(*verdicts(case, "every_term_matters"), NotApplicable)
    later = Examined(time_s=0.0, step=128, experiment="terms", values=seen.values)
    [found] = verdicts(Case([*case.records, later]), "every_term_matters")
    assert isinstance(found, Finding)
    assert found.found.severity == "info"


X = torch.randn(64, 6, generator=torch.Generator().manual_seed(0))
Y = X[:, :3].argmax(1)


@each_row(
    ("mask", "state"),
    [
        (lambda out, y: out.detach().softmax(1).amax(1) > 0.9, "held"),
        (lambda out, y: out.detach().logsumexp(1) < 0.1, "held"),
        (lambda out, y: (out.detach().softmax(1).amax(1) > 0.9) & (torch.arange(len(y)) < 12), "not applicable"),
        (lambda out, y: y > 7, "broken"),
    ],
    ids=str,
)
def test_rows_that_a_threshold_leaves_out(mask: Callable[[Tensor, Tensor], Tensor], state: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with tw.watch(model, optimizer, out=None, quiet=True, laws="loss.every_row_counts") as watch:
        for n in range(4):
            rows = slice(16 * n, 16 * n + 16)
            optimizer.zero_grad()
            out = model(X[rows])
            each = F.cross_entropy(out, out.detach().argmax(1), reduction="none") * mask(out, Y[rows])
            (F.cross_entropy(out[:4], Y[rows][:4]) + each.mean()).backward()
            optimizer.step()
    assert watch.session.failures == []
    states = {each.name: each.state for each in diagnose(Case(watch.records, finished=True)).laws}
    assert states["loss.every_row_counts"] == state


def langevin(model: nn.Module, x: Tensor) -> Tensor:
    false = torch.randn_like(x)
    for _ in range(4):
        false = false.detach().requires_grad_()
        (slope,) = torch.autograd.grad(model(false).sum(), false)
        false = false - 0.5 * slope + 0.1 * torch.randn_like(false)
    return model(x).mean() - model(false.detach()).mean() + 0.1 * model(x).square().mean()


def denoised(model: nn.Module, x: Tensor) -> Tensor:
    """By the gradient of an energy."""
    noisy = (x + torch.randn_like(x)).requires_grad_()
    (slope,) = torch.autograd.grad(model(noisy).sum(), noisy, create_graph=True)
    return (noisy - slope - x).square().mean()


def attacked(model: nn.Module, x: Tensor) -> Tensor:
    near = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(F.mse_loss(model(near), x[:, :1]), near)
    return F.mse_loss(model((near + 0.1 * slope.sign()).detach()), x[:, :1])


def of_a_part(model: nn.Module, x: Tensor) -> Tensor:
    """A part of the model that is called alone makes the target."""
    return (40 * model(x) - 1e-3 * model.get_submodule("0")(x)[:, :1]).square().mean()


@each_row("loss", [langevin, denoised, attacked, of_a_part], ids=lambda each: each.__name__)
def test_steps_along_a_gradient_by_the_input(loss: Callable[[nn.Module, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.SiLU(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loader = torch.utils.data.DataLoader(X, batch_size=16)
    with tw.watch(model, optimizer, loader=loader, out=None, quiet=True, laws=("loss", "function")) as watch:
        for x in loader:
            optimizer.zero_grad()
            loss(model, x).backward()
            optimizer.step()
    assert watch.session.failures == []
    codes = {each.code for each in watch.findings() if each.severity != "info"}
    assert not codes & {"model.mixes_samples", "law.loss.starts_at_chance", "law.loss.targets_are_the_minimum"}
