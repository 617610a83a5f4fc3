"""ZClip and AdaGC against a transcription of the formulas of their papers, and against a published implementation."""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim import SGD, AdamW

from tests.engine.plain import cut
from trainwright.checkpoint.codec import same_bits
from trainwright.checkpoint.train_state import TrainState
from trainwright.engine.spikes import SpikeGuard
from trainwright.engine.step import make_step
from trainwright.errors import UsageError
from trainwright.optim.clip import AdaptiveClip, make_clip

APPLIED = torch.tensor(False)
SHAPES = ((5, 3), (5,), (4, 2, 3, 3), (1,))


def gradients(steps: int, spikes: dict[int, float], seed: int = 0) -> Iterator[list[Tensor]]:
    """Noise whose scale falls, multiplied in some steps."""
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        scale = spikes.get(step, 1.0) * (1 + 1 / (1 + step))
        yield [scale * torch.randn(shape, generator=generator) for shape in SHAPES]


def clipped(clip: AdaptiveClip, grads: list[Tensor], parameters: list[nn.Parameter]) -> list[Tensor]:
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad.clone()
    clip(parameters, get_total_norm(grads))
    clip.accept(APPLIED)
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def made(name: Any, **settings: Any) -> tuple[AdaptiveClip, list[nn.Parameter]]:
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    clip = make_clip(name, parameters=[(str(i), p) for i, p in enumerate(parameters)], **settings)
    assert isinstance(clip, AdaptiveClip)
    return clip, parameters


def norm_of(tensors: list[Tensor]) -> float:
    return math.sqrt(sum(float(each.double().square().sum()) for each in tensors))


class ZClipOfThePaper:
    """Section 3 of arXiv:2504.02507 in Python's floats."""

    def __init__(self, z: float = 2.5, alpha: float = 0.97, warmup: int = 25) -> None:
        self.z, self.alpha, self.warmup = z, alpha, warmup
        self.norms: list[float] = []
        self.mu = self.variance = 0.0

    def __call__(self, g: float) -> float:
        """The norm after clipping."""
        if len(self.norms) < self.warmup:
            self.norms.append(g)
            self.mu, self.variance = statistics.fmean(self.norms), statistics.pvariance(self.norms)
            return g
        sigma = math.sqrt(self.variance)
        z = (g - self.mu) / sigma
        if z > self.z:
            g = self.mu + self.z**2 / z * sigma
        self.mu = self.alpha * self.mu + (1 - self.alpha) * g
        self.variance = self.alpha * self.variance + (1 - self.alpha) * (g - self.mu) ** 2
        return g


@pytest.mark.parametrize("settings", [{}, {"z": 1.5, "decay": 0.9, "warmup": 8}], ids=["defaults", "own"])
def test_zclip_is_the_formula_of_its_paper(settings: dict[str, Any]) -> None:
    clip, parameters = made("zclip", **settings)
    names = {"z": "z", "decay": "alpha", "warmup": "warmup"}
    paper = ZClipOfThePaper(**{names[key]: value for key, value in settings.items()})
    cut_steps = 0
    for grads in gradients(120, {40: 30.0, 41: 4.0, 80: 1e4}):
        expected = paper(norm_of(grads))
        after = clipped(clip, grads, parameters)
        assert norm_of(after) == pytest.approx(expected, rel=1e-5)
        cut_steps += norm_of(after) < 0.999 * norm_of(grads)
    assert 3 <= cut_steps < 60
    assert clip.state_dict()["statistics"].tolist() == pytest.approx([120, paper.mu, paper.variance], rel=1e-5)


def test_zclip_without_any_spread_clips_nothing() -> None:
    clip, parameters = made("zclip", warmup=2)
    for factor in (1.0, 1.0, 1.0, 7.0):
        grads = [factor * torch.ones(shape) for shape in SHAPES]
        assert all(same_bits(a, b) for a, b in zip(clipped(clip, grads, parameters), grads, strict=True))


class AdaGCOfThePaper:
    """Algorithm 1 of arXiv:2502.11034."""

    def __init__(self, at: float = 1.0, ratio: float = 1.05, beta: float = 0.98, warmup: int = 100) -> None:
        self.at, self.ratio, self.beta, self.warmup, self.t = at, ratio, beta, warmup, 0
        self.gamma: dict[int, float] = {}

    def __call__(self, grads: list[Tensor]) -> list[Tensor]:
        self.t += 1
        total, result = norm_of(grads), list[Tensor]()
        for i, grad in enumerate(grads):
            norm = norm_of([grad])
            if self.t < self.warmup:
                h = min(self.at / total, 1.0)
                self.gamma[i] = min(self.gamma.get(i, math.inf), h * norm)
            else:
                h = min(self.ratio * self.gamma[i] / norm, 1.0)
                self.gamma[i] = self.beta * self.gamma[i] + (1 - self.beta) * h * norm
            result.append(grad * h)
        return result


@pytest.mark.parametrize(
    "settings", [{}, {"at": 3.0, "ratio": 1.5, "decay": 0.9, "warmup": 10}], ids=["defaults", "own"]
)
def test_adagc_is_the_algorithm_of_its_paper(settings: dict[str, Any]) -> None:
    clip, parameters = made("adagc", **settings)
    paper = AdaGCOfThePaper(**{"beta" if key == "decay" else key: value for key, value in settings.items()})
    for grads in gradients(150, {5: 50.0, 40: 30.0, 120: 1e3}):
        expected = paper(grads)
        for mine, reference in zip(clipped(clip, grads, parameters), expected, strict=True):
            torch.testing.assert_close(mine, reference)
    assert clip.state_dict()["statistics"].tolist() == pytest.approx([150, *paper.gamma.values()], rel=1e-5)


def test_adagc_before_adamw_is_adagc_of_pytorch_optimizer() -> None:
    theirs_of = pytest.importorskip("pytorch_optimizer").AdaGC
    settings = {"lr": 1e-2, "weight_decay": 0.1}
    clip, mine = made("adagc", warmup=12)
    theirs = copy.deepcopy(mine)
    optimizer, reference = AdamW(mine, **settings), theirs_of(theirs, warmup_steps=12, **settings)
    for grads in gradients(40, {20: 30.0, 30: 100.0}):
        clipped(clip, grads, mine)
        optimizer.step()
        for parameter, grad in zip(theirs, grads, strict=True):
            parameter.grad = grad.clone()
        reference.step()
        for one, other in zip(mine, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_adagc_begins_with_the_first_gradient_that_is_not_zero() -> None:
    """A gradient of zeros in the warm-up would make the average 0, and no gradient would get through ever after."""
    clip, parameters = made("adagc", warmup=3)
    for step, grads in enumerate(gradients(6, {})):
        grads[1] = torch.zeros_like(grads[1]) if step < 4 else grads[1]
        after = clipped(clip, grads, parameters)
        assert (step < 4) == (float(after[1].abs().sum()) == 0)
    assert math.isfinite(float(clip.state_dict()["statistics"][2]))


def test_a_parameter_without_a_gradient_is_left_out() -> None:
    clip, parameters = made("adagc", warmup=1)
    for grads in gradients(3, {}):
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad
        parameters[0].grad = None
        clip(parameters[1:], get_total_norm(grads[1:]))
        clip.accept(APPLIED)
    assert clip.state_dict()["statistics"].isinf().tolist() == [False, True, False, False, False]


@pytest.mark.parametrize("name", ["zclip", "adagc"])
def test_a_skipped_step_and_a_second_try_do_not_enter_the_statistics(name: str) -> None:
    clip, parameters = made(name, warmup=4)
    for grads in gradients(10, {}):
        clipped(clip, grads, parameters)
    before = clip.state_dict()["statistics"]
    for skipped in (torch.tensor(True), APPLIED):
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, math.nan if bool(skipped) else 2.0)
        total = get_total_norm([p.grad for p in parameters if p.grad is not None])
        clip(parameters, total)
        if not bool(skipped):
            first = [p.grad.clone() for p in parameters if p.grad is not None]
            for parameter in parameters:
                parameter.grad = torch.full_like(parameter, 2.0)
            clip(parameters, total)  # memory ran out after the first
            assert all(same_bits(a, p.grad) for a, p in zip(first, parameters, strict=True))  # type: ignore[arg-type]
        clip.accept(skipped)
        after = clip.state_dict()["statistics"]
        assert same_bits(after, before) == bool(skipped)
    assert float(after[0]) == float(before[0]) + 1


@pytest.mark.parametrize("name", ["zclip", "adagc"])
def test_statistics_are_those_of_the_same_clip_only(name: str) -> None:
    clip, parameters = made(name, warmup=4)
    for grads in gradients(10, {}):
        clipped(clip, grads, parameters)
    again, _ = made(name, warmup=4)
    again.load_state_dict(clip.state_dict())
    assert same_bits(again.state_dict()["statistics"], clip.state_dict()["statistics"])
    other, _ = made("adagc" if name == "zclip" else "zclip")
    other.load_state_dict(clip.state_dict())
    assert float(other.state_dict()["statistics"][0]) == 0


def test_the_averages_of_adagc_follow_the_names() -> None:
    clip, parameters = made("adagc", warmup=4)
    for grads in gradients(10, {}):
        clipped(clip, grads, parameters)
    swapped = make_clip("adagc", parameters=[(str(i), parameters[i]) for i in (3, 1)] + [("new", torch.zeros(2))])
    assert isinstance(swapped, AdaptiveClip)
    swapped.load_state_dict(clip.state_dict())
    count, *norms = clip.state_dict()["statistics"].tolist()
    assert swapped.state_dict()["statistics"].tolist() == [count, norms[3], norms[1], math.inf]


@pytest.mark.parametrize("name", ["zclip", "adagc"])
def test_a_step_whose_update_is_left_out_does_not_enter(name: Any) -> None:
    model = nn.Linear(4, 2)
    clip = make_clip(name, warmup=2, parameters=model.named_parameters())
    assert isinstance(clip, AdaptiveClip)
    state = TrainState(model, SGD(model.parameters(), lr=0.1))
    advance = make_step(nn.CrossEntropyLoss(), clip=clip, spikes=SpikeGuard("skip"))
    x, target = torch.ones(8, 4), torch.arange(8) % 2
    for step in range(20):
        data = math.nan * x if step == 3 else 1e4 * x if step == 18 else x
        result = advance(state, cut((data, target), 8))
        assert bool(result.skipped) == (step in (3, 18))
    assert float(clip.state_dict()["statistics"][0]) == 18


@pytest.mark.parametrize(
    ("name", "settings", "says"),
    [
        ("zclip", {"z": 0.0}, "z must be above 0"),
        ("zclip", {"decay": 1.0}, "between 0 and 1"),
        ("adagc", {"ratio": -1.0}, "ratio must be above 0"),
        ("adagc", {"warmup": 0}, "warmup at least 1"),
    ],
)
def test_numbers_out_of_range_are_refused(name: Any, settings: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        make_clip(name, parameters=[("w", torch.zeros(2))], **settings)


def test_adagc_asks_for_the_parameters() -> None:
    with pytest.raises(UsageError, match="got none") as caught:
        make_clip("adagc")
    assert "parameters=model.named_parameters()" in caught.value.remedy
