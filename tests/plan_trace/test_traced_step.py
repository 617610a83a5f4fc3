"""A simulated step against real ones, and against arithmetic."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.plan_trace.measured import measured_peak
from tests.plan_trace.models import (
    Make,
    example_ids,
    make_gpt,
    make_linear,
    make_lora,
    make_lstm,
    make_resnet,
)
from trainwright.engine.losses import language_model
from trainwright.engine.precision import PrecisionName
from trainwright.errors import UsageError
from trainwright.models.gpt import gpt
from trainwright.plan.checkpointing import Checkpointing
from trainwright.plan.trace.traced_step import TracedObjects, trace_step


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "precision", "accumulation", "within"),
    [
        (make_gpt, "bf16", 4, 0.01),
        (make_lora, "fp32", 1, 0.01),
        (make_resnet, "fp32", 2, 0.01),
        (make_lstm, "fp32", 1, 0.05),
    ],
    ids=["gpt-bf16-4", "lora", "resnet-2", "lstm"],
)
def test_the_peak_is_that_of_a_real_step(
    make: Make, precision: PrecisionName, accumulation: int, within: float
) -> None:
    real = measured_peak(make, precision=precision, accumulation=accumulation)
    trace = trace_step(make, device="cpu", precision=precision, accumulation=accumulation)
    assert trace.peak.total == pytest.approx(real, rel=within)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["muon", "adafactor"])
def test_the_state_of_any_optimizer_is_there_before_the_step(optimizer: str) -> None:
    make = partial(make_gpt, optimizer=optimizer, layers=1)
    assert trace_step(make, device="cpu").peak.total == pytest.approx(measured_peak(make), rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("keep", [(), ("matmul",)], ids=["whole", "matmul"])
def test_the_peak_with_activation_checkpointing_is_that_of_a_real_step(keep: tuple[str, ...]) -> None:
    checkpointing = Checkpointing.every(3, keep)
    real = measured_peak(make_gpt, checkpointing=checkpointing)
    trace = trace_step(make_gpt, device="cpu", checkpointing=checkpointing)
    assert trace.peak.total == pytest.approx(real, rel=0.01)
    assert trace.peak.total < trace_step(make_gpt, device="cpu").peak.total
    assert any(moment.phase == "checkpointing" for moment in trace.moments)


@pytest.mark.slow
def test_without_autocast_s_cache_no_block_keeps_its_copies_of_weights() -> None:
    """Where blocks are computed again: ranks that hold parts of the weights must not hold copies of the whole."""

    def most_in_forward(caches: bool) -> int:
        every = Checkpointing.every(3)
        trace = trace_step(make_gpt, device="cpu", precision="bf16", checkpointing=every, caches=caches)
        return max(moment.total for moment in trace.moments if not moment.held["gradients"])

    one_block = 12 * 128 * 128 * 2
    assert most_in_forward(True) - most_in_forward(False) > 1.9 * one_block


def test_bytes_by_kind_are_those_of_arithmetic() -> None:
    trace = trace_step(make_linear, device="cpu")
    weights = 4 * (32 * 64 + 64 * 8)
    assert trace.resident["weights"] == trace.resident["gradients"] == weights
    assert trace.resident["optimizer"] == 2 * weights + 2 * 4  # and a counter for each parameter
    assert trace.resident["inputs"] == 4 * (16 * 32 + 16 * 8)
    assert trace.resident["activations"] + trace.resident["temporaries"] <= 3 * 8  # the loss and the norm
    of_modules = {module: size for module, size in trace.kept.items() if module}
    assert of_modules == {"1": 4 * 16 * 64, "2": 4 * 16 * 8}  # what the ReLU gave, and what the loss compares


def test_flops_are_those_of_arithmetic_and_bytes_what_is_read_and_written() -> None:
    trace = trace_step(make_linear, device="cpu", accumulation=3)
    forward = 2 * 16 * (32 * 64 + 64 * 8)
    backward = 2 * forward - 2 * 16 * 32 * 64  # the input needs no gradient
    assert trace.flops == 3 * (forward + backward)
    first = next(work for work in trace.work if work.module == "0" and work.op == "mm" and work.phase == "forward")
    assert (first.calls, first.bytes) == (3, 3 * 4 * (16 * 32 + 32 * 64 + 16 * 64))


def test_moments_name_phase_micro_batch_and_module() -> None:
    trace = trace_step(make_gpt, device="cpu", accumulation=2)
    order = [(moment.phase, moment.micro) for moment in trace.moments]
    both = [("forward", 0), ("backward", 0), ("forward", 1), ("backward", 1), ("update", 1)]
    assert list(dict.fromkeys(order)) == both
    backward = [moment.module for moment in trace.moments if moment.phase == "backward" and moment.micro == 0]
    seen = list(dict.fromkeys(name.split(".")[1] for name in backward if name.startswith("blocks.")))
    assert seen == ["2", "1", "0"]
    assert {"blocks.0.mlp.up", "blocks.0.attention.query"} <= set(backward)


def test_without_an_optimizer_the_trace_ends_with_the_backward_pass() -> None:
    trace = trace_step(partial(make_linear, optimizer=False), device="cpu")
    assert {moment.phase for moment in trace.moments} == {"forward", "backward"}
    assert trace.resident["gradients"] == trace.resident["weights"]
    assert trace.resident["optimizer"] == 0


def test_the_process_is_left_as_it_was() -> None:
    def make(device: torch.device) -> TracedObjects:
        torch.manual_seed(7)
        random.seed(7)
        np.random.seed(7)
        torch.set_default_dtype(torch.float64)
        return make_linear(device)

    before = torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False), nn.Module._apply
    trace_step(make, device="cpu", precision="bf16")
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    np.testing.assert_equal(np.random.get_state(legacy=False), before[2])
    assert nn.Module._apply is before[3]
    assert torch.get_default_dtype() is torch.float32
    assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")
    assert type(torch.zeros(1)) is Tensor


def test_a_model_may_be_moved_and_keeps_its_tied_weights() -> None:
    def make(device: torch.device) -> TracedObjects:
        model = gpt(vocab_size=300, block_size=64, layers=1, heads=2, d_model=128).to(torch.float64).to(device)
        return TracedObjects(model, language_model, torch.optim.SGD(model.parameters(), lr=1e-3), example_ids())

    model = gpt(vocab_size=300, block_size=64, layers=1, heads=2, d_model=128)
    weights = 8 * sum(parameter.numel() for parameter in model.parameters())
    assert trace_step(make, device="cpu").resident["weights"] == weights


def _with_loss(loss: Callable[[nn.Module, Any], Tensor]) -> Make:
    def make(device: torch.device) -> TracedObjects:
        model = nn.Linear(32, 8)
        return TracedObjects(
            model, loss, torch.optim.SGD(model.parameters(), lr=1e-3), (torch.zeros(16, 32), torch.zeros(16))
        )

    return make


def test_masks_find_all_there_is() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        output = model(batch[0])
        return output[output > 0].sum() + output[(batch[1] == 0).nonzero().flatten()].sum()

    trace = trace_step(_with_loss(loss), device="cpu")
    assert max(moment.held["temporaries"] for moment in trace.moments) >= 4 * 16 * 8


def test_a_shape_that_depends_on_values_is_told_in_words() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return model(batch[0])[: len(torch.unique(batch[1]))].sum()

    with pytest.raises(UsageError, match=r"unique.* depends on the values"):
        trace_step(_with_loss(loss), device="cpu")


def test_an_error_of_torch_and_another_device_are_told_in_words() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return (model(batch[0]) @ batch[0]).sum()

    with pytest.raises(UsageError, match="the step cannot be simulated"):
        trace_step(_with_loss(loss), device="cpu")
    with pytest.raises(UsageError, match="simulated device must be one of cpu, cuda"):
        trace_step(make_linear, device="tpu")  # type: ignore[arg-type]
