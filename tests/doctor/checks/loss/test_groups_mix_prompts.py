"""Advantages that are normalised over consecutive samples, whose prompts are repeated in another order."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import trainwright as tw

pytestmark = pytest.mark.slow

SIZE = 4


def in_turn(prompts: Tensor) -> Tensor:
    return prompts.repeat(SIZE, 1)


def together(prompts: Tensor) -> Tensor:
    return prompts.repeat_interleave(SIZE, 0)


def codes(repeated: object, *, consecutive: bool = True) -> list[str]:
    torch.manual_seed(0)
    model = nn.Linear(6, 5)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with tw.watch(model, optimizer, out=None, quiet=True, examine="listen") as watch:
        for _ in range(8):
            logp = model(repeated(torch.randn(6, 6))).log_softmax(-1)  # type: ignore[operator]
            answers = torch.multinomial(logp.detach().exp(), 1)
            grouped = torch.randn(24).view(-1, SIZE) if consecutive else torch.randn(24).view(SIZE, -1).T
            advantages = (grouped - grouped.mean(1, keepdim=True)) / grouped.std(1, keepdim=True)
            advantages = advantages.reshape(-1) if consecutive else advantages.T.reshape(-1)
            chosen = logp.gather(1, answers).squeeze(1)
            optimizer.zero_grad()
            (-(chosen - chosen.detach()).exp() * advantages).mean().backward()
            optimizer.step()
    assert watch.session.failures == []
    return [each.code for each in watch.findings() if each.code == "loss.groups_mix_prompts"]


def test_samples_of_a_prompt_in_turn_and_groups_in_a_row_are_found() -> None:
    assert codes(in_turn) == ["loss.groups_mix_prompts"]


def test_groups_of_one_prompt_are_not_reported() -> None:
    assert codes(together) == []
    assert codes(in_turn, consecutive=False) == []
    assert codes(lambda prompts: prompts.repeat(SIZE, 1) + torch.randn(24, 6)) == []  # no prompt is repeated
