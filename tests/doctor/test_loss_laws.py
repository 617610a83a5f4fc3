"""The laws of the loss hold for usual losses, and each is broken by several mistakes in how one is computed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trainwright as tw
from tests.doctor.losses import JUDGES, R16, Y16, Loss, R, X, Y, broken, case_of, ended, verdicts
from tests.rows import each_row
from trainwright.doctor.case import Case
from trainwright.doctor.finding import ExperimentRequest, Finding
from trainwright.doctor.law import Holds, NotApplicable
from trainwright.doctor.loss.facts import (
    ComparedFacts,
    ComparisonsFacts,
    CutFacts,
    CutLoss,
    Learned,
    LearnedFacts,
    TermRatio,
)
from trainwright.doctor.loss.measure.comparing import compared
from trainwright.runlog.json_values import strict
from trainwright.runlog.records import Examined, Watched

COUNTED = (R16 > 0).float()
HEALTHY: tuple[Loss, ...] = (
    lambda out: F.cross_entropy(out, Y16),
    lambda out: F.cross_entropy(out, Y16, label_smoothing=0.1),
    lambda out: F.nll_loss(out.log_softmax(1), Y16),
    lambda out: F.cross_entropy(3 * out.tanh(), Y16),
    lambda out: F.cross_entropy(out, F.one_hot(Y16, 3).float()),
    lambda out: F.binary_cross_entropy_with_logits(out, (R16 > 0).float()),
    lambda out: F.mse_loss(out, R16),
    lambda out: ((out - R16) ** 2).mean(),
    lambda out: F.mse_loss(out, R16, reduction="sum") / 16 + 1e-3 * out.pow(2).sum() / 16,
    lambda out: F.cross_entropy(out, Y16) + 0.5 * F.mse_loss(out, R16),
    lambda out: ((out + 0.1) ** 2).mean() + F.mse_loss(out + R16, 2 * R16),
    lambda out: F.l1_loss(out, R16) + 0.1 * F.smooth_l1_loss(out, R16),
    lambda out: F.softplus(-out[:, 0]).mean() + 9 * F.softplus(9 + out[:, 1]).mean() + F.mse_loss(out[:, 2], R16[:, 2]),
    lambda out: F.cross_entropy(out, Y16) + ((out - R16).square() * COUNTED).sum() / COUNTED.sum().clamp(min=1),
    lambda out: F.binary_cross_entropy_with_logits(out, MASK) + unlike(out),
    lambda out: F.mse_loss(out, R16) - 0.5 * (out - R16).mean().square(),
    lambda out: F.cross_entropy(out, Y16, label_smoothing=0.2) + 0.5 * F.nll_loss(out.log_softmax(1), Y16),
)


SHARES = F.one_hot(Y16, 3).float()
MASK = (R16 > 0.5).float()


def unlike(out: Tensor, size: Callable[[Tensor], Tensor] = lambda p: p.sum(1)) -> Tensor:
    """Dice: what is not common to two sets, of each row."""
    p = out.sigmoid()
    return (1 - (2 * (p * MASK).sum(1) + 1) / (size(p) + MASK.sum(1) + 1)).mean()


def masked(each: Tensor) -> Tensor:
    """The mean over what counts."""
    return (each * COUNTED).sum() / COUNTED.sum()


def in_two_parts(out: Tensor, shares: Tensor) -> Tensor:
    """A loss of whose two terms only the first has a gradient, that of both, as those of sparsemax."""
    return ((shares - F.one_hot(Y16, 3)) * out).sum(1).mean() + (1 - shares.square().sum(1)).mean() / 2


def halves(out: Tensor, target: Tensor) -> Tensor:
    """A distance of two sums over pairs of which the second takes what it is made of as given."""
    return torch.cdist(out, target).square().mean() + torch.cdist(target, 1.0 * out.detach()).square().mean()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_laws_hold_for_usual_losses(dtype: torch.dtype) -> None:
    for number, loss in enumerate(HEALTHY if dtype == torch.float32 else HEALTHY[:3]):
        case = case_of(loss, dtype)
        for law in (
            "starts_at_chance",
            "targets_are_the_minimum",
            "like_is_compared_with_like",
            "batch_is_cut_anywhere",
        ):
            [verdict] = verdicts(case, law)
            assert isinstance(verdict, Holds), (number, law, verdict)
        for law in ("probabilities_add_up", "there_is_room_to_learn", "loss_has_a_bound"):
            [verdict] = verdicts(case, law)
            assert isinstance(verdict, Holds | NotApplicable), (number, law, verdict)


def test_a_term_less_a_constant_is_no_distance_where_something_else_chooses_it() -> None:
    """A zero-inflated count (Greene, 1994), whose normalising constant is taken off."""
    counts = torch.tensor([0.0, 1.0, 2.0, 5.0] * 4)

    def zero_inflated(out: Tensor) -> Tensor:
        log_size, log_mean, zero = out.unbind(1)
        size, log_total = log_size.exp(), torch.logaddexp(log_size, log_mean)
        chance = torch.lgamma(counts + size) - torch.lgamma(size) - torch.lgamma(counts + 1)
        chance = chance + size * (log_size - log_total) + counts * (log_mean - log_total)
        is_zero, is_not = F.logsigmoid(zero), F.logsigmoid(-zero)
        return -torch.where(counts == 0, torch.logaddexp(is_zero, is_not + chance), is_not + chance).mean()

    assert broken(case_of(zero_inflated), "targets_are_the_minimum") == []


@each_row("dtype", [torch.float32, torch.bfloat16])
def test_a_small_step_towards_the_targets_is_not_lost_in_rounding(dtype: torch.dtype) -> None:
    """Neighbours of 64 are half apart in bf16."""
    [verdict] = verdicts(case_of(lambda out: F.cross_entropy(64 + 4 * out, Y16), dtype), "targets_are_the_minimum")
    assert isinstance(verdict, Holds)


@each_row("sign", [1.0, -1.0])
def test_a_log_probability_is_weighed_with_both_signs(sign: float) -> None:
    """That of an action, by its advantage: some are to become likely, others unlikely."""
    advantages = sign * torch.linspace(-3.0, 1.0, 16)
    case = case_of(lambda out: (F.cross_entropy(out, Y16, reduction="none") * advantages).mean())
    assert isinstance(*verdicts(case, "targets_are_the_minimum"), NotApplicable)


def test_what_enters_a_loss_by_its_derivative_is_not_to_become_small() -> None:
    """As where gradients are matched: the loss that they are of is no part of the loss."""

    def unlike(out: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(F.cross_entropy(out, Y16), out, create_graph=True)
        return 1 - slope.square().sum()

    assert isinstance(*verdicts(case_of(unlike), "targets_are_the_minimum"), NotApplicable)


@pytest.mark.slow
@each_row(
    ("law", "loss"),
    [
        ("starts_at_chance", lambda out: F.cross_entropy(50 * out, Y16)),
        ("starts_at_chance", lambda out: F.binary_cross_entropy_with_logits(50 * out, (R16 > 0).float())),
        ("starts_at_chance", lambda out: F.nll_loss((50 * out).log_softmax(1), Y16)),
        ("starts_at_chance", lambda out: -F.logsigmoid(50 * out).mean() - F.logsigmoid(-50 * out).mean()),
        ("targets_are_the_minimum", lambda out: -F.mse_loss(out, R16)),
        ("targets_are_the_minimum", lambda out: 1 - F.cross_entropy(out, Y16)),
        ("targets_are_the_minimum", lambda out: -(F.cross_entropy(out, Y16, reduction="none") * COUNTED[:, 0]).sum()),
        ("targets_are_the_minimum", lambda out: 0 * F.mse_loss(out, R16) + out.pow(2).mean()),
        (
            "targets_are_the_minimum",
            lambda out: F.cross_entropy(out, Y16) - 3 * (out.softmax(1) - SHARES).square().sum(1).mean(),
        ),
        ("targets_are_the_minimum", lambda out: F.mse_loss(out, R16) - 1.2 * (out - R16).abs().mean()),
        ("loss_has_a_bound", lambda out: F.cross_entropy(out, Y16) - 1e-2 * out.square().mean()),
        ("loss_has_a_bound", lambda out: F.mse_loss(out[:, :2], R16[:, :2]) - (out[:, 2].exp() - out[:, 2]).mean()),
        ("loss_has_a_bound", lambda out: F.l1_loss(out, R16) - 0.1 * out.pow(2).sum(1).mean()),
        ("like_is_compared_with_like", lambda out: F.mse_loss(out.relu(), R16)),
        ("like_is_compared_with_like", lambda out: F.mse_loss(out.sigmoid(), 9 * R16)),
        ("like_is_compared_with_like", lambda out: (out + R16).square().mean()),
        ("like_is_compared_with_like", lambda out: ((out.float() + R16) ** 2 * COUNTED).sum() / COUNTED.sum()),
        ("like_is_compared_with_like", lambda out: (R16 + out.flatten(1)).abs().mean()),
        ("like_is_compared_with_like", lambda out: F.binary_cross_entropy_with_logits((R16 > 0).float(), out)),
        ("probabilities_add_up", lambda out: F.nll_loss(out.log_softmax(0), Y16)),
        ("probabilities_add_up", lambda out: F.nll_loss(2 * out.log_softmax(1), Y16)),
        ("probabilities_add_up", lambda out: F.nll_loss(out.sigmoid().log(), Y16)),
        ("there_is_room_to_learn", lambda out: F.cross_entropy(out.sigmoid(), Y16)),
        ("there_is_room_to_learn", lambda out: F.binary_cross_entropy_with_logits(out.relu(), (R16 > 0).float())),
        ("there_is_room_to_learn", lambda out: F.binary_cross_entropy_with_logits(out.tanh(), (R16 > 0).float())),
        ("batch_is_cut_anywhere", lambda out: F.mse_loss(out, R16) + 0.2 * out.pow(2).sum()),
        ("batch_is_cut_anywhere", lambda out: masked(out.square()) - 0.01 * (out * COUNTED).sum() / COUNTED.mean()),
        ("batch_is_cut_anywhere", lambda out: masked(out.abs()) + 0.1 * ((out - R16).square() * COUNTED).sum()),
        ("batch_is_cut_anywhere", lambda out: F.cross_entropy(out, Y16, reduction="sum") + out.abs().mean()),
        ("batch_is_cut_anywhere", lambda out: F.l1_loss(out, R16, reduction="sum") + F.cross_entropy(out, Y16)),
        ("batch_is_cut_anywhere", lambda out: F.l1_loss(out, R16) / len(out) + F.cross_entropy(out, Y16)),
        ("batch_is_cut_anywhere", lambda out: F.l1_loss(out, R16) + out.square().mean() / out.shape[0]),
        ("batch_is_cut_anywhere", lambda out: unlike(out, lambda p: p.sum())),
    ],
    ids=str,
)
def test_a_loss_that_is_computed_wrongly_is_found(law: str, loss: Loss) -> None:
    assert broken(ended(case_of(loss)), law)


@pytest.mark.slow
@each_row("steps", [8, 16, 24])
def test_a_loss_that_comes_down_at_once_may_start_far_above_chance(steps: int) -> None:
    """Scores of a scale that is meant: cosines times 30."""
    case = case_of(lambda out: F.cross_entropy(30 * F.normalize(out, dim=1), Y16), steps=steps)
    assert not broken(case, "starts_at_chance")


@each_row(("law", "loss"), [
    ("probabilities_add_up", lambda out: F.nll_loss((1 - out.softmax(1)) ** 2 * out.log_softmax(1), Y16)),
    ("probabilities_add_up", lambda out: F.nll_loss((1 - out.softmax(1) + 1e-6).log(), Y16)),
    ("batch_is_cut_anywhere", lambda out: F.mse_loss(out, R16) + 1e-4 * out.abs().sum()),
    ("targets_are_the_minimum", lambda out: F.softplus(R16 - out).mean() + out.square().mean()),
], ids=str)  # fmt: skip
def test_ways_of_a_loss_that_are_meant(law: str, loss: Loss) -> None:
    """A focal loss, labels that are wrong for sure, a penalty on all codes, margins."""
    assert not broken(ended(case_of(loss)), law)


@each_row("loss", [lambda out: F.mse_loss(100 * out, R16), lambda out: ((out + 9 - R16) ** 2).mean()])
def test_a_distance_that_starts_far_away_is_an_info(loss: Loss) -> None:
    [verdict] = verdicts(ended(case_of(loss)), "starts_at_chance")
    assert isinstance(verdict, Finding) and verdict.found.severity == "info"


def test_a_thing_that_is_compared_with_itself_is_found_once_it_stays_so() -> None:
    case = case_of(lambda out: F.mse_loss(out, out.detach()))
    assert verdicts(case, "like_is_compared_with_like") == []
    [seen] = [each for each in case.records if isinstance(each, Examined) and each.experiment == "comparisons"]
    later = Examined(time_s=0.0, step=9, experiment="comparisons", values=seen.values)
    [found] = broken(Case([*case.records, later]), "like_is_compared_with_like")
    assert "same values" in found.found.symptom


@pytest.mark.slow
@each_row(
    ("loss", "name"),
    [
        (lambda out: F.cross_entropy(out, Y16) + 0.1 * F.mse_loss(out, R16).detach(), "detach"),
        (lambda out: F.mse_loss(out.detach(), R16) + 0.01 * out.pow(2).mean(), "mse_loss"),
        (lambda out: F.cross_entropy(out, Y16) + 0.1 * F.mse_loss(out, R16), None),
        (lambda out: in_two_parts(out, out.softmax(1).detach()), None),
        (lambda out: out.new_zeros(()) + F.cross_entropy(out, Y16) + F.mse_loss(out, R16), None),
        (lambda out: F.cross_entropy(out, Y16) + 0.1 * (out.square() * (Y16 > 7)[:, None]).mean(), None),
        (lambda out: halves(out, R16), None),
    ],
    ids=str,
)
def test_a_term_that_is_not_learned_is_found(loss: Loss, name: str | None) -> None:
    found = broken(case_of(loss, steps=2), "every_term_matters")
    assert [each.found.where.op for each in found] == ([] if name is None else [name])


@pytest.mark.slow
@each_row(
    ("loss", "steps", "name"),
    [
        (lambda out: F.cross_entropy(out, Y16) + 1e-3 * out.pow(2).mean(), 16, None),
        (lambda out: F.cross_entropy(out, Y16) + F.relu(out.abs() - out.abs().max().detach() + 1e-4).mean(), 16, None),
        (lambda out: F.cross_entropy(out, Y16) + 1e-7 * out.pow(2).mean(), 8, None),
        (lambda out: F.cross_entropy(out, Y16) + 1e-7 * out.pow(2).mean(), 16, None),
        (lambda out: F.cross_entropy(out, Y16) + 0.1 * (1e-3 * out).pow(2).mean(), 16, "mean of pow"),
        (lambda out: F.cross_entropy(out, Y16) + 0.1 * (out / 1000).square().mean(), 16, "mean of square"),
        (lambda out: 1e6 * F.cross_entropy(out, Y16) + F.l1_loss(out, R16), 16, "l1_loss"),
    ],
    ids=str,
)
def test_a_term_without_effect_is_found(loss: Loss, steps: int, name: str | None) -> None:
    found = broken(case_of(loss, steps=steps), "every_term_matters")
    assert [each.found.where.op for each in found] == ([] if name is None else [name])


def test_a_sum_over_the_batch_is_told() -> None:
    [found] = verdicts(case_of(lambda out: F.cross_entropy(out, Y16, reduction="sum")), "batch_is_cut_anywhere")
    assert isinstance(found, Finding)
    assert found.found.severity == "info"


def test_a_loss_between_samples_is_not_cut() -> None:
    [verdict] = verdicts(case_of(lambda out: F.cross_entropy(out @ out.T, torch.arange(16))), "batch_is_cut_anywhere")
    assert isinstance(verdict, NotApplicable)


@each_row(
    ("terms", "divides", "count"),
    [
        ((1.0, 2.0), False, 1),
        ((1.0, 2.0), True, 0),
        ((2.0, 2.0), False, 0),
        ((1.0, 1.7), False, 0),
    ],
)
def test_terms_are_mixed_where_one_is_a_sum_and_one_a_mean(terms: tuple[float, ...], divides: bool, count: int) -> None:
    cut = CutLoss(1.5, tuple(TermRatio(f"term {n}", 1.0, ratio) for n, ratio in enumerate(terms)), divides)
    facts = CutFacts((CutLoss(1.0), cut))
    case = Case([Examined(time_s=0.0, step=1, experiment="batch_twice", values=strict(vars(facts)))])
    assert len(broken(case, "batch_is_cut_anywhere")) == count


@pytest.mark.slow
@each_row(("reduced", "op"), [(F.mse_loss, "mse_loss"), (F.cross_entropy, "cross_entropy")])
def test_what_a_mask_leaves_out_is_not_asked_for(reduced: Callable[..., Tensor], op: str) -> None:
    torch.manual_seed(0)
    model, x, kept = nn.Linear(8, 4), torch.randn(16, 8), torch.arange(16) < 10
    y = x[:, :4].argmax(1) if op == "cross_entropy" else x[:, :4] * 2 + 1
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    with tw.watch(model, optimizer, out=None, quiet=True, laws="loss") as watch:
        for _ in range(64):
            values = model(x * torch.where(kept, 1.0, 100.0)[:, None])
            losses = reduced(values, y, reduction="none").reshape(16, -1)
            loss = (losses * kept[:, None]).sum() / kept.sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    learned = Case(watch.records, finished=True).newest(LearnedFacts)
    assert learned is not None and [each.op for each in learned.calls] == [op]
    assert learned.calls[0].value < 0.5 * learned.calls[0].constant


def call(gained: float, told: float, error: float = 0.01) -> Learned:
    return Learned("cross_entropy", None, 1.0 - gained, 1.0, 1.0 - gained + told, gained, told, error)


@each_row(
    ("facts", "count"),
    [
        (LearnedFacts(8, (call(0.0, 0.0),)), 1),
        (LearnedFacts(8, (call(-0.5, 0.0),)), 1),
        (LearnedFacts(8, (call(0.3, 0.5), call(0.0, 0.01))), 1),
        (LearnedFacts(8, (call(0.3, 0.5), replace(call(0.0, 0.01), own_way=True))), 0),
        (LearnedFacts(8, (call(0.3, 0.5),)), 0),
        (LearnedFacts(8, (call(-0.2, 0.3),)), 0),
        (LearnedFacts(8, (call(0.0, 0.0, 0.1),)), 0),
        (LearnedFacts(8, (call(0.0, 0.0),), drawn=True), 0),
        (LearnedFacts(8), 0),
    ],
    ids=str,
)
def test_what_was_learned_is_judged_by_its_error(facts: LearnedFacts, count: int) -> None:
    case = Case([Examined(time_s=0.0, step=64, experiment="learned", values=strict(vars(facts)))])
    assert len(broken(case, "knows_more_than_nothing")) == count


def losses_of(loss: Callable[[int], float], noise: float = 0.1, steps: int = 80) -> list[Watched]:
    drawn = torch.randn(steps, generator=torch.Generator().manual_seed(0)).tolist()
    return [
        Watched(time_s=0.0, step=n, loss=loss(n) + noise * drawn[n - 1], grad_norm=1.0, lr=0.1)
        for n in range(1, steps + 1)
    ]


@each_row(
    ("losses", "more", "young"),
    [
        (losses_of(lambda n: 3.0), {}, ""),
        (losses_of(lambda n: 3.0 + 0.01 * n), {}, ""),
        (losses_of(lambda n: 3.0 + 1.5 * (n < 8)), {}, ""),
        (losses_of(lambda n: 3.0 - 0.01 * n), {}, "falls"),
        (losses_of(lambda n: 3.0 + 1.5 * (n < 20)), {}, "20 of 80 steps"),
        (losses_of(lambda n: 3.0), {"told": 0.01, "told_error": 0.002}, "shuffled"),
        (losses_of(lambda n: 3.0), {"told": 0.01, "told_error": 0.005}, ""),
        (losses_of(lambda n: 3.0), {"targets": 32, "classes": 1000}, "1000 classes"),
        (losses_of(lambda n: 3.0), {"targets": 32, "classes": 10}, ""),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_slow_learner_is_no_fault(losses: list[Watched], more: dict[str, Any], young: str) -> None:
    facts = strict(vars(LearnedFacts(8, (replace(call(0.0, 0.0), **more),))))
    case = Case([*losses, Examined(time_s=0.0, step=80, experiment="learned", values=facts)])
    [verdict] = verdicts(case, "knows_more_than_nothing")
    if young:
        assert isinstance(verdict, NotApplicable) and verdict.why.startswith("still learning") and young in verdict.why
    else:
        assert isinstance(verdict, Finding)


@each_row(("steps", "finished", "asks"), [(64, True, True), (64, False, False), (30, True, False)])
def test_what_was_learned_is_asked_for_at_the_end(steps: int, finished: bool, asks: bool) -> None:
    step = Watched(time_s=0.0, step=steps, loss=1.0, grad_norm=1.0, lr=0.1)
    asked = [*JUDGES["knows_more_than_nothing"](Case([step], finished=finished))]
    assert asked == ([ExperimentRequest("learned")] if asks else [])


@each_row(
    ("order", "learns"),
    [(torch.arange(64), True), (torch.randperm(64, generator=torch.Generator().manual_seed(1)), False)],
    ids=lambda value: "",
)
def test_what_was_learned_is_measured(order: Tensor, learns: bool) -> None:
    torch.manual_seed(0)
    model, targets = nn.Linear(6, 3), Y[order]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5 if learns else 1e-3)
    with tw.watch(model, optimizer, out=None, quiet=True, laws="loss") as watch:
        for n in range(8):
            optimizer.zero_grad()
            rows = slice(8 * n, 8 * n + 8)
            F.cross_entropy(model(X[rows]), targets[rows]).backward()
            optimizer.step()
        facts: Any = watch.session.runner.run_requested(8, [ExperimentRequest("learned")])["learned"]
    [found] = facts["calls"]
    assert facts["steps"] >= 3
    assert (found["told"] > 0.1) == learns


def test_the_best_constant_is_that_of_theory() -> None:
    out = torch.zeros(1000, 4)
    classes, values = torch.arange(1000) % 4, torch.randn(1000, generator=torch.Generator().manual_seed(0))
    entropy = compared(F.cross_entropy, (out, classes), {}, outside=True)
    assert entropy is not None
    assert entropy.of_constant() == pytest.approx(math.log(4), abs=2e-3)
    assert entropy.value(entropy.blank(), classes) == pytest.approx(math.log(4))
    squares = compared(F.mse_loss, (out[:, 0], values), {}, outside=True)
    assert squares is not None
    assert squares.of_constant() == pytest.approx(float(values.var()), rel=1e-6)


@each_row(
    ("function", "args"),
    [
        (F.cross_entropy, (torch.randn(8, 3), torch.arange(8) % 3)),
        (F.nll_loss, (torch.randn(8, 3).log_softmax(1), torch.arange(8) % 3)),
        (F.cross_entropy, (torch.randn(8, 3), torch.rand(8, 3).softmax(1))),
        (F.cross_entropy, (torch.randn(4, 3, 5), torch.arange(20).reshape(4, 5) % 3)),
        (F.binary_cross_entropy_with_logits, (torch.randn(8), torch.ones(8))),
        (F.binary_cross_entropy, (torch.rand(8), torch.ones(8))),
        (F.huber_loss, (torch.randn(8, 2), torch.randn(8, 2))),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_step_towards_the_target_makes_every_loss_smaller(function: Any, args: tuple[Tensor, Tensor]) -> None:
    each = compared(function, args, {}, outside=True)
    assert each is not None
    assert each.value(each.nearer(0.01), args[1]) < each.value(*args)


@each_row(
    ("share", "kind"),
    [(0.0, NotApplicable), (0.1, Holds), (0.5, Holds), (0.75, Finding), (0.9, Finding), (1.0, Finding)],
)
def test_label_smoothing_leaves_something_to_learn(share: float, kind: type) -> None:
    [verdict] = verdicts(
        case_of(lambda out: F.cross_entropy(out, Y16, label_smoothing=share)), "there_is_room_to_learn"
    )
    assert isinstance(verdict, kind)


FEW_LABELS, ONE_LABEL = (Y16.masked_fill(torch.arange(16) >= labels, -100) for labels in (3, 1))


def boxes(out: Tensor, are_there: Tensor) -> Tensor:
    """Summed over corners and averaged over the objects, as detectors do, beside a mean over all rows."""
    corners = F.smooth_l1_loss(out[are_there], R16[are_there], reduction="sum") / max(1, int(are_there.sum()))
    return F.cross_entropy(out, Y16) + corners


def labelled(out: Tensor, y: Tensor) -> Tensor:
    """A mean over the rows with a label, by their number, beside one over all rows."""
    share = out.softmax(1)
    entropy = -(share * out.log_softmax(1)).sum(1).mean()
    return F.cross_entropy(out, y, reduction="sum") / max(1, (y >= 0).sum().item()) + 0.1 * entropy


@each_row(
    ("loss", "kind"),
    [
        (lambda out: F.cross_entropy(out, Y16) + F.mse_loss(out, R16, reduction="sum") / R16.numel(), Holds),
        (lambda out: F.cross_entropy(out, Y16) + 0.01 * F.mse_loss(out, R16), Holds),
        (lambda out: (F.cross_entropy(out @ out.T, torch.arange(16)) + F.cross_entropy(out, Y16)) / 2, NotApplicable),
        (
            lambda out: F.cross_entropy(out @ out.T, torch.arange(16), reduction="sum") + F.cross_entropy(out, Y16),
            Finding,
        ),
        (lambda out: (F.l1_loss(out, R16) + F.mse_loss(out, R16, reduction="sum")) / 2, Finding),
    ],
)
def test_a_sum_among_means_is_read_from_the_calls(loss: Loss, kind: type) -> None:
    [verdict] = verdicts(case_of(loss), "batch_is_cut_anywhere")
    assert isinstance(verdict, kind)


@each_row(
    "loss",
    [
        lambda out: boxes(out, Y16 == 0),
        lambda out: labelled(out, FEW_LABELS),
        lambda out: labelled(out, ONE_LABEL),
    ],
)
def test_a_sum_over_the_number_of_what_counts_is_a_mean(loss: Loss) -> None:
    assert broken(case_of(loss), "batch_is_cut_anywhere") == []


FAR_AWAY = 20.0 + R


def values_learned(targets: Tensor, loss: Callable[[Tensor, Tensor], Tensor], steps: int, bias: float = 0.0) -> Case:
    """A run on these targets, whose last bias begins with ``bias``."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    nn.init.constant_(model[2].bias, bias)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    with tw.watch(model, optimizer, out=None, quiet=True, laws="loss") as watch:
        for n in range(steps):
            rows = torch.arange(16 * n, 16 * n + 16) % 64
            optimizer.zero_grad()
            loss(model(X[rows]), targets[rows]).backward()
            optimizer.step()
    assert watch.session.failures == []
    return Case(watch.records, finished=True)


SOON = 40
"""Steps after which an offset that is still there is an alarm; scales of a million are one from the begin."""


@pytest.mark.slow
@each_row(
    ("targets", "loss", "steps", "bias", "kind"),
    [
        (R, F.mse_loss, SOON, 0.0, Holds),
        (1.0 + R, F.mse_loss, SOON, 0.0, Holds),
        (0.5 + 0.001 * R, F.mse_loss, SOON, 0.0, Holds),
        (FAR_AWAY, F.mse_loss, SOON, 20.0, Holds),
        (FAR_AWAY, F.mse_loss, 22, 0.0, NotApplicable),
        (R.sign() * 0 + 1, F.mse_loss, SOON, 0.0, NotApplicable),
        ((R > 0).float(), F.binary_cross_entropy_with_logits, SOON, 0.0, NotApplicable),
        (FAR_AWAY, lambda out, y: F.cross_entropy(torch.cat([out - y, out], 1), y.argmax(1)), SOON, 0.0, NotApplicable),
        (FAR_AWAY, F.mse_loss, SOON, 0.0, Finding),
        (-FAR_AWAY, F.l1_loss, SOON, 0.0, Finding),
        (FAR_AWAY, lambda out, y: ((out - y) ** 2).mean(), SOON, 0.0, Finding),
        (100 * FAR_AWAY, F.smooth_l1_loss, SOON, 0.0, Finding),
        (1e6 * R, F.smooth_l1_loss, 8, 0.0, Holds),
        (1e12 * R, F.smooth_l1_loss, 8, 0.0, Finding),
        (1e12 * R, F.mse_loss, 8, 0.0, Finding),
    ],
    ids=lambda value: "",
)
def test_where_targets_lie_is_learned_soon(targets: Tensor, loss: Any, steps: int, bias: float, kind: type) -> None:
    found = verdicts(values_learned(targets, loss, steps, bias), "targets_are_centred")
    [verdict] = [each for each in found if not isinstance(each, ExperimentRequest)]
    assert isinstance(verdict, kind), verdict


@each_row(("until", "is_long"), [(4, False), (8, False), (16, True), (64, True)])
def test_an_offset_may_take_a_tenth_of_a_run(until: int, is_long: bool) -> None:
    def look(step: int) -> Examined:
        call = ComparedFacts("mse_loss", None, 40.0 if step <= until else 1.5, 40.0, 1.0, 16)
        return Examined(time_s=0.0, step=step, experiment="comparisons", values=strict(vars(ComparisonsFacts((call,)))))

    records = [Watched(time_s=0.0, step=n, loss=1.0, grad_norm=1.0, lr=0.1) for n in range(1, 101)]
    case = Case([*records, *map(look, (1, 4, 8, 16, 64, 100))], finished=True)
    assert bool(broken(case, "targets_are_centred")) == is_long


@pytest.mark.parametrize(
    ("loss", "is_broken"),
    [
        (lambda out: F.mse_loss(out, R16).detach() + 1e16 + 0.0 * out.sum(), True),
        (lambda out: F.mse_loss(out, R16) + 1e16, False),
    ],
    ids=["detached", "absorbed"],
)
def test_what_is_lost_in_rounding_has_a_part_in_the_loss(loss: Loss, is_broken: bool) -> None:
    """Beside a term of 1e16 no digit of the other shows, though it has a gradient."""
    assert bool(broken(case_of(loss), "targets_are_the_minimum")) == is_broken
