"""The U-Net and the diffusion model that it is a part of."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import trainwright as tw
from tests.engine.plain import assert_same_bits, bits
from trainwright.engine.loss import ModelLoss
from trainwright.engine.losses import cross_entropy
from trainwright.errors import DataError, UsageError
from trainwright.models.diffusion import diffusion
from trainwright.models.unet import UNet, UNetConfig, time_embedding, unet


def test_a_unet_has_the_number_of_parameters_of_public_implementations() -> None:
    with torch.device("meta"):
        model = unet(classes=2)
    assert sum(parameter.numel() for parameter in model.parameters()) == 31_037_698  # milesial/Pytorch-UNet
    assert len(model.blocks) == 9


@pytest.mark.parametrize("timed", [False, True])
def test_every_weight_gets_a_gradient_and_every_pixel_an_output(timed: bool) -> None:
    model = UNet(UNetConfig(classes=4, channels=2, width=4, depth=2, timed=timed))
    out = model(torch.randn(3, 2, 8, 12), torch.tensor([0, 5, 9]) if timed else None)
    assert out.shape == (3, 4, 8, 12)
    out.square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())


def test_the_time_of_an_image_changes_its_output() -> None:
    torch.manual_seed(0)
    model = UNet(UNetConfig(classes=1, channels=1, width=4, depth=1, timed=True))
    x = torch.randn(2, 1, 4, 4)
    early, mixed = model(x, torch.tensor([1, 1])), model(x, torch.tensor([1, 90]))
    torch.testing.assert_close(early[0], mixed[0])
    assert not torch.allclose(early[1], mixed[1], atol=1e-4)
    angles = time_embedding(torch.tensor([3]), 4)[0]
    expected = [math.sin(3.0), math.sin(0.03), math.cos(3.0), math.cos(0.03)]
    torch.testing.assert_close(angles, torch.tensor(expected))


def test_cross_entropy_counts_pixels() -> None:
    torch.manual_seed(0)
    model, x = unet(classes=3, width=4, depth=1), torch.randn(2, 3, 4, 4)
    target = torch.randint(0, 3, (2, 4, 4))
    target[0, 0, 0] = -100
    loss = cross_entropy(model, (x, target))
    assert float(loss.weight) == 31
    torch.testing.assert_close(loss.total / 31, F.cross_entropy(model(x), target))
    assert int(loss.metrics["accuracy"]) == int((model(x).argmax(1) == target).sum())
    target[1, 2, 3] = 7
    with pytest.raises(DataError, match=r"label 7 is out of range: the model has 3 outputs") as caught:
        cross_entropy(model, (x, target))
    assert [*caught.value.sample_ids] == [1]


class Perfect(nn.Module):
    """Knows the image, so it can compute the noise."""

    def __init__(self, image: torch.Tensor, kept: torch.Tensor) -> None:
        super().__init__()
        self.image, self.alphas_cumprod, self.options = image, kept, UNetConfig(classes=1, channels=1)

    def forward(self, noisy: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        kept = self.alphas_cumprod[time][:, None, None, None]
        return (noisy - kept.sqrt() * self.image) / (1 - kept).sqrt()


def test_a_perfect_predictor_has_no_loss_and_samples_the_image() -> None:
    torch.manual_seed(0)
    model, image = diffusion(channels=1, width=4, depth=1, timesteps=50), torch.randn(1, 1, 4, 4)
    model.net = Perfect(image, model.alphas_cumprod)  # type: ignore[assignment]
    assert model(image.expand(8, 1, 4, 4)) < 1e-6
    samples = model.sample(3, size=4)
    torch.testing.assert_close(samples, image.expand(3, 1, 4, 4), rtol=1e-3, atol=1e-3)


def test_the_variances_are_those_of_the_paper() -> None:
    kept = diffusion(channels=1, width=4, depth=1).alphas_cumprod
    expected = (1 - torch.linspace(1e-4, 0.02, 1000)).cumprod(0)
    torch.testing.assert_close(kept, expected)
    assert diffusion(channels=1, width=4, depth=1, timesteps=100).alphas_cumprod[-1] < 1e-4


def test_two_evaluations_draw_the_same_noise_and_leave_the_generator_alone() -> None:
    model, x = diffusion(channels=1, width=4, depth=1, timesteps=50), torch.randn(4, 1, 4, 4)
    assert model(x) != model(x)
    model.eval()
    before = torch.get_rng_state()
    assert torch.equal(model(x), model(x)) and torch.equal(torch.get_rng_state(), before)


def trained(steps: int, **options: Any) -> tw.Result:
    torch.manual_seed(3)
    data = (torch.randn(32, 1, 4, 4, generator=torch.Generator().manual_seed(0)),)
    settings = {"log.doctor": False, "checkpoint.every": "1steps"}
    model = diffusion(channels=1, width=4, depth=1, timesteps=50)
    return tw.fit(model, data, ModelLoss(), steps=steps, batch=8, settings=settings, quiet=True, **options)


@pytest.mark.slow
def test_a_resumed_diffusion_draws_the_noise_of_an_undisturbed_run(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    whole, first = trained(6), trained(3)
    resumed = trained(6, resume=first.run)
    assert whole.state is not None and resumed.state is not None
    assert_same_bits(bits(resumed.state.model), bits(whole.state.model))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: unet(classes=0), "classes must be"),
        (lambda: unet(classes=2, width=4, depth=2)(torch.randn(1, 3, 6, 8)), "6 x 8 pixels cannot be halved 2 times"),
        (lambda: diffusion(timesteps=20), "timesteps=20 are too few"),
    ],
    ids=["classes", "sides", "timesteps"],
)
def test_wrong_options_are_refused_with_a_remedy(call: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        call()
    assert caught.value.remedy
