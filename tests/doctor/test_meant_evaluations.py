"""Evaluations of correct programs that look like mistakes: they are told as an info, or not judged."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import trainwright as tw
from tests.doctor.law_loops import BATCH, WIDTH, Loop, net, watched

TRAINED = 96


def in_part(loop: Loop) -> None:
    loop.batch = lambda step: torch.arange(step * BATCH, (step + 1) * BATCH) % TRAINED


@pytest.mark.slow
def test_an_image_is_trained_and_the_model_stays() -> None:
    model, image = net(0.0), torch.randn(1, WIDTH, requires_grad=True)
    optimizer = torch.optim.Adam([image], lr=0.05)
    with tw.watch(model, optimizer, quiet=True) as watch:
        for _ in range(40):
            optimizer.zero_grad()
            (model(image) - 1.0).square().mean().backward()
            optimizer.step()
    assert [each.severity for each in watch.findings() if each.code == "optim.params_missing"] == ["info"]


@pytest.mark.slow
def test_an_evaluation_may_sample_what_dropout_makes_of_the_same_rows() -> None:
    def change(loop: Loop) -> None:
        in_part(loop)

        def end(step: int) -> None:
            if step % 6 == 5:
                with torch.no_grad():
                    samples = torch.stack([loop.model(loop.x[TRAINED:]) for _ in range(4)])
                    F.cross_entropy(samples.mean(0), loop.y[TRAINED:])

        loop.end = end

    found = [each for each in watched(change, steps=26).findings() if each.code == "evaluation.in_train_mode"]
    assert [each.severity for each in found] == ["info"]
