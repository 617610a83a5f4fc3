"""What a law assumes of a loop and a legal one does not do: margins, distances, differences, several models at once."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trainwright as tw
from tests.doctor.losses import Y16, X, Y, broken, case_of, ended, verdicts
from tests.rows import each_row
from trainwright.doctor.case import Case
from trainwright.doctor.diagnose import diagnose
from trainwright.doctor.finding import Finding
from trainwright.doctor.law import Holds, NotApplicable

OWN = F.one_hot(Y16, 3)


@each_row(
    ("loss", "is_broken"),
    [
        (lambda out: F.cross_entropy(16 * (out.tanh() - 0.5 * OWN), Y16), False),
        (lambda out: F.cross_entropy(-((30 * out).unsqueeze(1) - 30 * out[:3]).square().sum(2), Y16), False),
        (lambda out: F.cross_entropy(-torch.cdist(60 * out, 60 * out[:3]), Y16), False),
        (lambda out: F.cross_entropy(60 * out / out.square().sum(1, keepdim=True).sqrt(), Y16), True),
    ],
    ids=["margin", "squares", "distances", "directions"],
)
def test_scores_that_a_loop_makes_of_outputs(loss: Callable[[Tensor], Tensor], is_broken: bool) -> None:
    assert bool(broken(ended(case_of(loss)), "starts_at_chance")) == is_broken


def test_a_term_with_weights_of_zeros_is_judged_at_the_end() -> None:
    case = case_of(lambda out: F.cross_entropy(out, Y16) + (torch.zeros(16) * out.square().sum(1)).mean(), steps=2)
    assert isinstance(*verdicts(case, "every_term_matters"), NotApplicable)
    assert isinstance(*verdicts(Case(case.records, finished=True), "every_term_matters"), Finding)


class TwoTasks(nn.Module):
    """An answer for an old task, and one for a new one."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.old, self.new = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.body(x).tanh()
        return self.old(h), self.new(h)


def test_a_term_of_a_frozen_part_is_judged_by_the_later_stage() -> None:
    def train(thaw_at: int) -> Case:
        torch.manual_seed(0)
        model = TwoTasks()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with tw.watch(model, optimizer, out=None, quiet=True, laws="loss") as watch:
            for step in range(1, 9):
                for part in (model.body, model.old):
                    part.requires_grad_(step >= thaw_at)
                optimizer.zero_grad()
                old, new = model(X[:16])
                (F.cross_entropy(new, Y16) + F.cross_entropy(old / 2, Y16)).backward()
                optimizer.step()
        return Case(watch.records, finished=True)

    assert isinstance(*verdicts(train(thaw_at=5), "every_term_matters"), Holds)
    assert isinstance(*verdicts(train(thaw_at=99), "every_term_matters"), Finding)


def test_pairs_of_rows_with_columns_are_made_on_purpose() -> None:
    case = case_of(lambda out: -(-(X[:16, :3].unsqueeze(1) - out).square().sum(2)).exp().mean())
    assert "loss.broadcast_target" not in {each.code for each in diagnose(case).findings}


@pytest.mark.slow
def test_a_bias_cancels_out_of_a_difference() -> None:
    torch.manual_seed(0)
    critic = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.RMSprop(critic.parameters(), lr=1e-3)
    with tw.watch(critic, optimizer, out=None, quiet=True, laws="vitals.weights_move") as watch:
        for _ in range(56):
            optimizer.zero_grad()
            (critic(torch.randn(8, 6)).mean() - critic(X[:8]).mean()).backward()
            optimizer.step()
    [found] = [each for each in watch.findings() if each.code == "optim.weights_never_move"]
    assert (found.severity, found.where.module) == ("info", "2")


def test_several_models_learn_from_the_same_batch() -> None:
    torch.manual_seed(0)
    models = [nn.Linear(6, 3) for _ in range(3)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    with tw.watch(models, optimizers, out=None, quiet=True, laws=("data", "precision")) as watch:
        for step in range(12):
            rows = torch.arange(16) + 4 * step
            for model, optimizer in zip(models, optimizers):
                optimizer.zero_grad()
                F.cross_entropy(model(X[rows]), Y[rows]).backward()
                optimizer.step()
    assert [each.code for each in watch.findings() if each.severity != "info"] == []


def test_a_teacher_that_comes_late_is_no_stale_copy() -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    teacher = copy.deepcopy(model).requires_grad_(False)
    with tw.watch(model, optimizer, out=None, quiet=True, laws="program") as watch:
        for step in range(24):
            out = model(X[:16])
            loss = F.cross_entropy(out, Y16)
            if step == 12:
                teacher.load_state_dict(model.state_dict())
                teacher.eval()
            if step >= 12:
                with torch.no_grad():
                    wanted = teacher(X[:16])
                loss = loss + F.mse_loss(out, wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert "law.program.objects_belong_together" not in {each.code for each in watch.findings()}


class SignedSteps(torch.optim.Optimizer):
    """An optimizer of a user's own, whose groups have no learning rate."""

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        super().__init__(parameters, {"size": 1e-3})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["size"] * p.grad.sign())


def test_an_optimizer_without_a_learning_rate() -> None:
    model = nn.Linear(6, 3)
    optimizer = SignedSteps(model.parameters())
    with tw.watch(model, optimizer, out=None, quiet=True) as watch:
        for _ in range(24):
            optimizer.zero_grad()
            F.cross_entropy(model(torch.randn(16, 6)), Y16).backward()
            optimizer.step()
    assert watch.session.failures == []
    assert not [each for each in watch.findings() if "rate" in each.code]
