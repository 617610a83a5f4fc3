"""Evaluations of correct programs that look like mistakes: they are told as an info, or not judged."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trainwright as tw
from tests.doctor.law_loops import BATCH, CLASSES, WIDTH, Loop, net, states, watched

TRAINED = 96


def severities(watch: tw.Watch, law: str) -> list[str]:
    return [each.severity for each in watch.findings() if each.code == f"law.data.{law}"]


def in_part(loop: Loop) -> None:
    loop.batch = lambda step: torch.arange(step * BATCH, (step + 1) * BATCH) % TRAINED


def two_phases() -> str:
    """A pass over all data between two loops, and its state in the law."""
    model, x = net(), torch.randn(64, WIDTH)
    optimizer = torch.optim.Adam(model.parameters())
    with tw.watch(model, optimizer, quiet=True) as watch:
        for _ in range(8):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        with torch.no_grad():
            centre = model(x).mean(0)
            F.mse_loss(model(x), x[:, :CLASSES])
        for _ in range(40):
            optimizer.zero_grad()
            (model(x) - centre).square().mean().backward()
            optimizer.step()
    return states(watch, "data")["evaluation_goes_on"].state


@pytest.mark.slow
def test_a_pass_between_two_loops_comes_once() -> None:
    assert two_phases() == "not applicable"


@pytest.mark.slow
@pytest.mark.parametrize(("compares", "found"), [(True, ["warning"]), (False, [])])
def test_a_pass_that_compares_nothing_is_no_evaluation(compares: bool, found: list[str]) -> None:
    def change(loop: Loop) -> None:
        def end(step: int) -> None:
            if step == 6:
                with torch.no_grad():
                    out = loop.model(loop.x)
                    assert (F.cross_entropy(out, loop.y) if compares else out.mean()).item() < 9.0

        loop.end = end

    assert severities(watched(change, steps=40), "evaluation_goes_on") == found


@pytest.mark.slow
@pytest.mark.parametrize(("first", "severity"), [(0, "info"), (64, "warning")])
def test_all_rows_may_be_evaluated_at_once(first: int, severity: str) -> None:
    def change(loop: Loop) -> None:
        in_part(loop)

        def end(step: int) -> None:
            if step % 6 == 5:
                with torch.no_grad():
                    F.cross_entropy(loop.model(loop.x[first:]), loop.y[first:])

        loop.end = end

    assert severities(watched(change, steps=26), "evaluation_is_apart") == [severity]


class Centred(nn.Module):
    """Subtracts what all features of a row have in common, as forecasts of windows do with their level."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x - x.mean(1, keepdim=True))  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "severity"), [(Centred, "info"), (lambda: net(0.0), "warning")])
def test_inputs_may_lie_elsewhere_where_the_loss_does_not_suffer(model: type[nn.Module], severity: str) -> None:
    def change(loop: Loop) -> None:
        in_part(loop)

        def end(step: int) -> None:
            if step % 6 == 5:
                with torch.no_grad():
                    rows = slice(0, TRAINED)
                    F.cross_entropy(loop.model(loop.x[rows] + 4.0), loop.y[rows]).item()

        loop.end = end

    found = severities(watched(change, steps=48, model=model, lr=3e-2), "evaluation_is_alike")
    assert set(found) == {severity} or (severity == "warning" and "warning" in found)


@pytest.mark.slow
def test_new_samples_in_each_evaluation_are_no_augmentation() -> None:
    def change(loop: Loop) -> None:
        loop.batch = lambda step: torch.arange(step * BATCH, (step + 1) * BATCH) % 80

        def end(step: int) -> None:
            if step % 5 == 4:
                with torch.no_grad():
                    F.cross_entropy(loop.model(torch.randn(48, WIDTH)), loop.y[:48])

        loop.end = end

    assert severities(watched(change, steps=26), "evaluation_is_the_same") == ["info"]


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
