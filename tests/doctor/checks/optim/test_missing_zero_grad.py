"""Gradients that the turn of one optimizer leaves in another one, in loops that clear gradients in each step."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

import trainwright as tw

CODE = "optim.missing_zero_grad"


def _mlp(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 16), nn.ReLU(), nn.Linear(16, outputs))


def _adam(module: nn.Module) -> Optimizer:
    return torch.optim.Adam(module.parameters(), 1e-3)


class Loop:
    """A step of two networks: the generator's turn, or the turns of two heads on an encoder."""

    def __init__(self) -> None:
        self.first, self.second = _mlp(4, 8), _mlp(8, 1)
        self.of_first, self.of_second = (
            torch.optim.Adam(each.parameters(), 1e-3) for each in (self.first, self.second)
        )

    def turn(self, loss: Tensor, optimizer: Optimizer) -> None:
        loss.backward()
        optimizer.step()

    def generator_loss(self) -> Tensor:
        return F.softplus(-self.second(self.first(torch.randn(16, 4)))).mean()

    def critic_loss(self) -> Tensor:
        fake = self.first(torch.randn(16, 4)).detach()
        return (F.softplus(-self.second(torch.randn(16, 8))) + F.softplus(self.second(fake))).mean()


def cleared_after_its_step(loop: Loop) -> None:
    loop.of_first.zero_grad()
    loop.turn(loop.generator_loss(), loop.of_first)
    loop.turn(loop.critic_loss(), loop.of_second)
    loop.of_second.zero_grad()


def cleared_at_the_begin(loop: Loop) -> None:
    loop.of_first.zero_grad()
    loop.second.zero_grad()
    loop.turn(loop.generator_loss(), loop.of_first)
    loop.turn(loop.critic_loss(), loop.of_second)


def cleared_before_its_turn(loop: Loop) -> None:
    loop.of_first.zero_grad()
    loop.turn(loop.generator_loss(), loop.of_first)
    loop.second.zero_grad(set_to_none=False)
    loop.turn(loop.critic_loss(), loop.of_second)


def both_losses_before_both_steps(loop: Loop) -> None:
    loop.of_first.zero_grad()
    loop.of_second.zero_grad()
    loop.generator_loss().backward()
    loop.turn(loop.critic_loss(), loop.of_first)
    loop.of_second.step()


def frozen_in_the_other_turn(loop: Loop) -> None:
    loop.of_first.zero_grad()
    loop.of_second.zero_grad()
    loop.second.requires_grad_(False)
    loop.turn(loop.generator_loss(), loop.of_first)
    loop.second.requires_grad_(True)
    loop.turn(loop.critic_loss(), loop.of_second)


def a_head_then_its_encoder(loop: Loop) -> None:
    """The encoder collects the gradients of the head's loss and of its own."""
    loop.of_first.zero_grad()
    loop.of_second.zero_grad()
    x = torch.randn(16, 4)
    loop.turn(F.softplus(-loop.second(loop.first(x))).mean(), loop.of_second)
    loop.turn(loop.first(x).square().mean(), loop.of_first)


def reached_by_both_turns(loop: Loop) -> None:
    """An autoencoder: the second turn also trains the first network."""
    loop.of_first.zero_grad()
    loop.of_second.zero_grad()
    loop.turn(loop.generator_loss(), loop.of_first)
    loop.turn(loop.generator_loss(), loop.of_second)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (cleared_after_its_step, ["warning"]),
        (cleared_at_the_begin, ["warning"]),
        (cleared_before_its_turn, []),
        (both_losses_before_both_steps, []),
        (frozen_in_the_other_turn, []),
        (a_head_then_its_encoder, []),
        (reached_by_both_turns, []),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_gradients_left_by_another_turn(step: Callable[[Loop], None], expected: list[str]) -> None:
    torch.manual_seed(0)
    loop = Loop()
    with tw.watch([loop.first, loop.second], [loop.of_first, loop.of_second], out=None, quiet=True) as watch:
        for _ in range(40):
            step(loop)
    assert watch.session.failures == []
    assert [found.severity for found in watch.findings() if found.code == CODE] == expected


@pytest.mark.parametrize(("before", "severity"), [("cleared", None), ("left", "warning"), ("pretrained", "info")])
def test_gradients_of_a_pass_before_the_loop(before: str, severity: str | None) -> None:
    torch.manual_seed(0)
    model = _mlp(4, 1)
    optimizer = _adam(model)
    for _ in range(32 if before == "pretrained" else 1):
        model(torch.randn(16, 4)).square().mean().backward()
        if before == "pretrained":
            optimizer.step()
    if before == "cleared":
        model.zero_grad()
    with tw.watch(model, optimizer, out=None, quiet=True) as watch:
        for _ in range(12):
            model(torch.randn(16, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    found = [each for each in watch.findings() if each.code == CODE]
    assert [(each.step, each.severity) for each in found] == ([(1, severity)] if severity else [])
