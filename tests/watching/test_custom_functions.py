"""Losses with autograd Functions of the user's: a replay makes the gradients that their own backward passes make."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

import trainwright as tw
from tests.watching.loops import Watching, X, Y, both, exams, net, replays, sgd, weights
from trainwright.recorder.function_hooks import OWNER


class Ranks(Function):
    """Constant nearly everywhere; the gradient is the difference to the ranks of moved scores."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor) -> Tensor:
        ranks = scores.argsort(1).argsort(1).to(scores.dtype)
        ctx.save_for_backward(scores, ranks)
        return ranks

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        scores: Tensor
        ranks: Tensor
        scores, ranks = ctx.saved_tensors
        return (ranks - (scores - 10 * gradient).argsort(1).argsort(1).to(scores.dtype)) / 10


class Turned(Function):
    """The identity, in the newer style; its gradient is turned."""

    @staticmethod
    def forward(scores: Tensor, factor: float) -> Tensor:
        return scores.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
        ctx.factor = inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        factor: float = ctx.factor
        return factor * gradient, None


class Noisy(Function):
    """Rounds stochastically: it draws random numbers."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor) -> Tensor:
        return (scores + torch.rand(scores.shape)).floor()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def ranked(logits: Tensor, y: Tensor) -> Tensor:
    ranks: Tensor = Ranks.apply(logits)  # type: ignore[no-untyped-call]
    return ranks.gather(1, y.unsqueeze(1)).square().mean()


turned = Turned.apply
"""Bound before any loop is watched."""


def by_another_sign(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(Turned.apply(logits, -2.0), y)  # type: ignore[no-untyped-call]


def by_a_name(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(turned(logits, 0.5), y)  # type: ignore[no-untyped-call]


def rounded(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(Noisy.apply(4 * logits) / 4, y)  # type: ignore[no-untyped-call]


def trained(loss_of: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Watching], list[Tensor]]:
    def loop(watching: Watching) -> list[Tensor]:
        model = net()
        optimizer = sgd(model)
        with watching(model, optimizer):
            for _ in range(10):
                rows = torch.randperm(32)[:8]
                optimizer.zero_grad()
                loss_of(model(X[rows]), Y[rows]).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        return weights(model)

    return loop


@pytest.mark.parametrize("loss_of", [ranked, by_another_sign])
def test_a_replay_makes_the_gradients_of_the_function(loss_of: Callable[[Tensor, Tensor], Tensor]) -> None:
    watch = both(trained(loss_of))
    assert replays(watch)
    norms = [(each["norm_now"], each["norm_then"]) for each in exams(watch, "again")]
    assert all(now == pytest.approx(then, rel=1e-5) and now > 0.0 for now, then in norms)


def test_a_name_that_was_bound_before_is_replayed_if_torch_allows_it() -> None:
    watch = both(trained(by_a_name))
    assert replays(watch) == (OWNER is not Function)
    assert [found.code for found in watch.findings() if found.severity != "info"] == []


def test_nothing_is_said_of_a_function_that_draws() -> None:
    watch = both(trained(rounded))
    assert [found.code for found in watch.findings() if found.severity != "info"] == []


def test_a_function_that_raises_leaves_no_trace() -> None:
    def loop(watching: Watching) -> list[Tensor]:
        model = net()
        optimizer = sgd(model)
        with watching(model, optimizer):
            for step in range(6):
                optimizer.zero_grad()
                logits = model(X)
                if step == 2:
                    with pytest.raises(IndexError):
                        ranked(logits[0], Y)
                ranked(logits, Y).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        assert "apply" not in vars(torch.autograd.function._SingleLevelFunction)
        return weights(model)

    assert replays(both(loop))


def test_a_step_may_end_within_a_call_and_a_watch_begin_there() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch = tw.watch(model, optimizer, out=None, quiet=True)

    class Begins(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            watch.__enter__()
            return x * 1

    class Trains(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            with torch.enable_grad():
                optimizer.zero_grad()
                model(x.detach()).square().mean().backward()
                optimizer.step()
            return x * 1

    Begins.apply(torch.randn(2, 4, requires_grad=True))
    for _ in range(6):
        Trains.apply(torch.randn(8, 4, requires_grad=True))
    watch.__exit__(None, None, None)
    assert watch.step == 6 and watch.session.failures == []
