"""Terms of model FLOPs utilization: the counted FLOPs of a sample and the peak rate of a known device."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from trainwright.assembly.assemble import Parts
from trainwright.assembly.checkpointing import apply_checkpointing
from trainwright.checkpoint.cursor import MicroBatch
from trainwright.data.unwrap import unwrap
from trainwright.plan.checkpointing import Checkpointing
from trainwright.plan.devices import find_device, known_devices
from trainwright.plan.trace.local_device import flops_of, known_device, peak_samples_s

WIDTH, SAMPLES = 8, 6
# Of a Linear: forward, gradient of the weights, and gradient of the input, which the first one does not need.
PRODUCTS = 3 + 3 + 2
FLOPS = PRODUCTS * 2 * SAMPLES * WIDTH * WIDTH


class Squares(nn.Module):
    """Three layers without bias."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class OnTheHost(nn.Linear):
    """Cannot be traced: fake tensors have no values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.from_numpy(x.numpy() * 2))


def parts_of(model: nn.Module) -> Parts:
    x = torch.randn(SAMPLES, WIDTH)
    return Parts(model, unwrap(TensorDataset(x, x)), {}, nn.MSELoss())


MICRO = MicroBatch((torch.randn(SAMPLES, WIDTH), torch.randn(SAMPLES, WIDTH)), np.arange(SAMPLES))


def test_flops_are_those_of_the_products_and_not_what_checkpointing_repeats() -> None:
    model = Squares()
    assert flops_of(parts_of(model), MICRO) == FLOPS
    assert apply_checkpointing(model, Checkpointing(((), (), ()))) == 3
    assert flops_of(parts_of(model), MICRO) == FLOPS
    assert not any(isinstance(p, torch._subclasses.FakeTensor) for p in model.parameters())


@pytest.mark.parametrize(("precision", "rate"), [("bf16", 989e12), ("tf32", 494e12), ("fp32", 67e12)])
def test_the_pace_at_the_peak_of_a_device(precision: str, rate: float) -> None:
    device = find_device("h200-141gb", known_devices())
    assert peak_samples_s(parts_of(Squares()), MICRO, device, precision) == pytest.approx(rate / (FLOPS / SAMPLES))


def test_what_is_not_known_gives_no_figure() -> None:
    device = find_device("h200-141gb", known_devices())
    assert known_device(torch.device("cpu")) is None
    assert peak_samples_s(parts_of(Squares()), MICRO, None, "bf16") is None
    assert peak_samples_s(parts_of(OnTheHost(WIDTH, WIDTH)), MICRO, device, "bf16") is None
    assert peak_samples_s(parts_of(nn.Tanh()), MICRO, device, "bf16") is None, "no product, no figure"
