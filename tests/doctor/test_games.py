"""The laws of games hold for usual ones, and each is broken by several mistakes in one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Adam

import trainwright as tw
from tests.rows import each_row
from trainwright.doctor.case import Case
from trainwright.doctor.diagnose import LAWS
from trainwright.doctor.finding import Finding
from trainwright.doctor.law import Holds, NotApplicable, Verdict

pytestmark = pytest.mark.slow  # watched loops, each of a few tenths of a second

DATA = torch.randn(16, 2, generator=torch.Generator().manual_seed(1)) + 2
JUDGES = {law.name.removeprefix("loss."): law.judge for law in LAWS if law.name.startswith("loss.")}
Score = Callable[[Tensor], Tensor]
SAME: Score = lambda made: made  # noqa: E731


def bce(target: float) -> Score:
    return lambda out: F.binary_cross_entropy_with_logits(out, torch.full_like(out, target))


IS_DATA, IS_MADE = bce(1.0), bce(0.0)


def no_penalty(critic: nn.Module, real: Tensor) -> Tensor:
    return torch.zeros(())


def slopes_of(critic: nn.Module, real: Tensor) -> Tensor:
    x = real.clone().requires_grad_(True)
    (slope,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
    return slope


@dataclass(frozen=True)
class Game:
    """The losses of the critic on data and on what is made, that of the maker, and what is done to what is made."""

    of_data: Score = IS_DATA
    of_made: Score = IS_MADE
    of_maker: Score = IS_DATA
    on_way: Score = SAME
    on_way_of_maker: Score = SAME
    penalty: Callable[[nn.Module, Tensor], Tensor] = no_penalty


def played(game: Game, steps: int = 6) -> Case:
    """The records of a few steps of a game."""
    torch.manual_seed(0)
    maker = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
    critic = nn.Sequential(nn.Linear(2, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))
    of_maker, of_critic = Adam(maker.parameters(), 1e-3), Adam(critic.parameters(), 1e-3)
    with tw.watch([maker, critic], [of_maker, of_critic], out=None, quiet=True, laws="loss") as watch:
        for _ in range(steps):
            made = game.on_way(maker(torch.randn(16, 3)).detach())
            loss = game.of_data(critic(DATA)) + game.of_made(critic(made)) + game.penalty(critic, DATA)
            of_critic.zero_grad()
            loss.backward()
            of_critic.step()
            of_maker.zero_grad()
            game.of_maker(critic(game.on_way_of_maker(maker(torch.randn(16, 3))))).backward()
            of_maker.step()
    assert watch.session.failures == []
    return Case(watch.records)


def verdicts(case: Case, law: str) -> list[Verdict]:
    return [*JUDGES[law](case)]


WASSERSTEIN = Game(lambda out: -out.mean(), lambda out: out.mean(), lambda out: -out.mean())
HINGE = Game(lambda out: (1 - out).relu().mean(), lambda out: (1 + out).relu().mean(), lambda out: -out.mean())
LOG_ONE_MINUS = Game(of_maker=lambda out: -F.binary_cross_entropy_with_logits(out, torch.zeros_like(out)))
SQUARES = Game(
    lambda out: F.mse_loss(out, torch.full_like(out, 5.0)),
    lambda out: F.mse_loss(out, torch.full_like(out, -5.0)),
    lambda out: F.mse_loss(out, torch.full_like(out, 5.0)),
)
SMOOTHED = Game(of_data=bce(0.9), on_way=lambda made: made.clone(), on_way_of_maker=lambda made: made.contiguous())
NOISY = Game(on_way=lambda made: made + 0.1 * torch.randn(16, 2), on_way_of_maker=lambda made: made)
ROUNDED = Game(on_way=lambda made: made.to(torch.bfloat16).float())


def test_usual_games_break_no_law() -> None:
    for number, game in enumerate((Game(), WASSERSTEIN, HINGE, LOG_ONE_MINUS, SQUARES, SMOOTHED, ROUNDED, NOISY)):
        case = played(game)
        [odds], [same] = verdicts(case, "players_are_at_odds"), verdicts(case, "judges_see_the_same")
        [minimum] = verdicts(case, "targets_are_the_minimum")
        assert isinstance(odds, NotApplicable if game is NOISY else Holds), (number, odds)
        assert isinstance(same, NotApplicable if game is NOISY else Holds), (number, same)
        assert isinstance(minimum, Holds | NotApplicable), (number, minimum)


@each_row(
    "game",
    [
        Game(of_maker=IS_MADE),
        Game(of_maker=lambda out: -IS_DATA(out)),
        Game(WASSERSTEIN.of_data, WASSERSTEIN.of_made, WASSERSTEIN.of_made),
        Game(HINGE.of_data, HINGE.of_made, HINGE.of_made),
    ],
)
def test_a_maker_that_helps_its_judge_is_found(game: Game) -> None:
    [verdict] = verdicts(played(game), "players_are_at_odds")
    assert isinstance(verdict, Finding) and verdict.found.severity == "warning"


@each_row(
    ("game", "word"),
    [
        (Game(on_way=lambda made: -made), "neg"),
        (Game(on_way_of_maker=lambda made: 3 * made), "mul"),
        (Game(on_way=lambda made: made.to(torch.int64).float()), "to and float"),
        (Game(on_way=torch.tanh), "tanh"),
    ],
)
def test_a_judge_that_is_given_other_things_by_the_maker_is_found(game: Game, word: str) -> None:
    [verdict] = verdicts(played(game, 2), "judges_see_the_same")
    assert isinstance(verdict, Finding) and word in verdict.found.cause


@each_row(
    "game",
    [
        Game(of_data=lambda out: -IS_DATA(out), of_made=lambda out: -IS_MADE(out)),
        Game(of_made=lambda out: -3 * IS_MADE(out)),
        Game(SQUARES.of_data, lambda out: -3 * SQUARES.of_made(out), SQUARES.of_maker),
    ],
)
def test_a_critic_that_unlearns_its_targets_is_found(game: Game) -> None:
    [verdict] = verdicts(played(game, 2), "targets_are_the_minimum")
    assert isinstance(verdict, Finding) and "rises" in verdict.found.symptom


PENALTIES: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda slope: 0.1 * slope.square().sum(1).mean(),
    lambda slope: 10 * (slope.norm(dim=1) - 1).square().mean(),
    lambda slope: (slope.norm(dim=1) - 1).relu().mean(),
    lambda slope: (1 - F.cosine_similarity(slope, torch.ones_like(slope))).mean(),
)
OTHERS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda slope: 0.1 / slope.square().sum(1).mean(),
    lambda slope: -0.1 * slope.square().sum(1).mean(),
    lambda slope: 1 - 0.1 * (slope.norm(dim=1) - 1).square().mean(),
)


def test_a_penalty_on_slopes_grows_with_them() -> None:
    for penalty in PENALTIES:
        case = played(Game(penalty=lambda critic, real, of=penalty: of(slopes_of(critic, real))), 2)
        [verdict] = verdicts(case, "slopes_are_bounded")
        assert isinstance(verdict, Holds), verdict
    for penalty in OTHERS:
        case = played(Game(penalty=lambda critic, real, of=penalty: of(slopes_of(critic, real))), 2)
        [verdict] = verdicts(case, "slopes_are_bounded")
        assert isinstance(verdict, Finding), verdict


@each_row(
    ("game", "kind"),
    [
        (Game(), Holds),
        (WASSERSTEIN, Holds),
        (Game(penalty=lambda critic, real: slopes_of(critic, real).square().sum(1).mean()), Holds),
        (Game(penalty=lambda critic, real: slopes_of(critic, real).square().sum(0).mean()), Finding),
        (Game(penalty=lambda critic, real: critic(real).square().sum()), Finding),
        (Game(of_made=lambda out: out.exp().sum()), Finding),
    ],
)
def test_the_loss_of_each_player_is_cut_alone(game: Game, kind: type[Holds] | type[Finding]) -> None:
    [verdict] = verdicts(played(game, 2), "batch_is_cut_anywhere")
    assert isinstance(verdict, kind)


def test_an_inner_loop_may_take_larger_steps() -> None:
    """The derivative by weights, of which the loss of a second step is made, is no penalty."""
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = Adam(model.parameters(), 1e-2)
    with tw.watch(model, optimizer, out=None, quiet=True, laws="loss") as watch:
        for _ in range(2):
            loss = F.mse_loss(model(DATA), DATA.sum(1, keepdim=True))
            weights = [*model.parameters()]
            inner = torch.autograd.grad(loss, weights, create_graph=True)
            weight, bias = (p - 1e-5 * g for p, g in zip(weights, inner))
            optimizer.zero_grad()
            (loss + F.mse_loss(F.linear(DATA, weight, bias), DATA.sum(1, keepdim=True))).backward()
            optimizer.step()
    [verdict] = verdicts(Case(watch.records), "slopes_are_bounded")
    assert isinstance(verdict, NotApplicable)


def test_two_copies_that_learn_apart_are_no_game() -> None:
    """Each has an optimizer of its own, and neither is given what the other makes."""
    torch.manual_seed(0)
    one = nn.Linear(2, 1)
    two = copy.deepcopy(one)
    optimizers = [Adam(each.parameters(), 1e-2) for each in (one, two)]
    with tw.watch([one, two], optimizers, out=None, quiet=True, laws="loss") as watch:
        for model, optimizer in zip((one, two) * 2, optimizers * 2):
            optimizer.zero_grad()
            F.mse_loss(model(DATA), DATA.sum(1, keepdim=True)).backward()
            optimizer.step()
    for law in ("players_are_at_odds", "judges_see_the_same"):
        [verdict] = verdicts(Case(watch.records), law)
        assert isinstance(verdict, NotApplicable)
