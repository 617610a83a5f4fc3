"""Gradients that are wrong, not finite or cut off, and the programs that look like these."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.doctor.checks.data.loops import exam, said
from tests.doctor.checks.loops import alarms, mlp, watched
from trainwright.doctor.check import Check
from trainwright.doctor.context import RunContext
from trainwright.doctor.discovery import check_of
from trainwright.doctor.facts.precision import SeenNonfinite
from trainwright.doctor.facts.wiring import SavedFacts
from trainwright.doctor.finding import Finding
from trainwright.runs.records import Watched


def of(name: str) -> Check:
    found = check_of(f"gradient.{name}")
    assert found is not None
    return found


def distance(x: Tensor) -> Tensor:
    """The squared distance of equal vectors: 0."""
    return (x - x.detach()).square().sum(1)


def with_root(x: Tensor) -> Tensor:
    return distance(x).sqrt().sum()


def with_where(x: Tensor) -> Tensor:
    return torch.where(distance(x) > 0, distance(x).sqrt(), torch.zeros(())).sum()


def with_eps(x: Tensor) -> Tensor:
    return (distance(x) + 1e-6).sqrt().sum()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("term", "codes"),
    [(with_root, ["infinite_derivative"]), (with_where, ["where_hides_nan"]), (with_eps, [])],
    ids=["root of 0", "behind where", "with an eps"],
)
def test_derivatives_at_the_edge_of_a_domain(term: Any, codes: list[str]) -> None:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        out = model(x)
        return F.cross_entropy(out, y) + term(out)

    found = alarms(watched(mlp(), loss=loss, steps=4))
    assert found[:1] == [f"gradient.{code}" for code in codes]


def test_saved_tensors_and_recomputed_modules() -> None:
    assert said(of("saved_tensor_modified"), exam(1, SavedFacts(modified=("body",)))) == ["critical"]
    assert said(of("recompute_mismatch"), exam(1, SavedFacts(differs="body", kind="Block"))) == ["critical"]
    assert said(of("saved_tensor_modified"), exam(1, SavedFacts())) == []
    assert said(of("recompute_mismatch"), exam(1, SavedFacts())) == []


@pytest.mark.parametrize(("before", "after", "found"), [(1, 6, 1), (6, 6, 0), (0, 0, 0)])
def test_a_clip_that_spreads_nan(before: int, after: int, found: int) -> None:
    names = ("2.bias",) * before
    seen = SeenNonfinite(inputs=(), gradients=names, num_gradients=before, num_after_clip=after, dtype="float32")
    assert len(said(of("clip_spreads_nan"), exam(3, seen))) == found


@pytest.mark.parametrize(("last", "severities"), [(0.9, ["info"]), (9.0, ["warning"])])
def test_a_spike_that_the_loss_comes_back_from(last: float, severities: list[str]) -> None:
    losses = [1.0] * 40 + [9.0] * 12 + [last] * 12
    steps = [Watched(time_s=0.0, step=n, loss=loss, grad_norm=1.0, lr=0.1) for n, loss in enumerate(losses, 1)]
    assert said(of("spike"), *steps) == []
    steps[40].values["spike"] = [20.0, 1.0, 8.0, "warn"]
    assert said(of("spike"), *steps) == severities


def test_a_spike_of_a_loop_that_clips_does_not_advise_to_clip() -> None:
    steps = [Watched(time_s=0.0, step=n, loss=1.0, grad_norm=1.0, lr=0.1) for n in range(1, 49)]
    steps[40] = replace(steps[40], values={"spike": [20.0, 1.0, 8.0, "warn"]})
    (bare,) = of("spike").results(RunContext(steps))
    steps[40] = replace(steps[40], events=[("clip", {"by": "norm", "at": 1.0, "norm": 20.0, "parameters": 2})])
    (clipped,) = of("spike").results(RunContext(steps))
    assert isinstance(bare, Finding) and isinstance(clipped, Finding)
    assert "Clip the" in bare.found.remedy and "lip the" not in clipped.found.remedy
