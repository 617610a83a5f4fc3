"""Dropout is told from other draws by its one rate."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trainwright.doctor.measure.modes import drop_rate


@pytest.mark.parametrize(
    ("name", "args", "kwargs", "is_mask"),
    [
        ("bernoulli", (torch.full((4,), 0.9),), {}, True),
        ("bernoulli", (torch.randn(4), 0.9), {}, True),
        ("bernoulli_", (torch.randn(4),), {}, True),
        ("bernoulli_", (torch.randn(4), 0.9), {}, True),
        ("bernoulli_", (torch.randn(4),), {"p": torch.full((4,), 0.9)}, True),
        ("bernoulli", (torch.rand(4),), {}, False),
        ("bernoulli_", (torch.zeros(4), torch.rand(4)), {}, False),
    ],
)
def test_a_mask_is_drawn_with_one_rate(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], is_mask: bool) -> None:
    assert bool(drop_rate(name, args, kwargs)) == is_mask
