"""The stand-in for CUDA: the kernels and precisions that CUDA would choose."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.plan_trace.models import Make, make_bert, make_gpt, make_linear, make_lora, make_lstm, make_resnet
from trainwright.engine.precision import PrecisionName
from trainwright.plan.call_trace import Trace
from trainwright.plan.checkpointing import Checkpointing
from trainwright.plan.trace.simulated_lstm import simulated_lstm
from trainwright.plan.trace.traced_step import TracedObjects, trace_step

on_cuda = partial(trace_step, device="cuda")
make_one_layer = partial(make_gpt, layers=1)


def _ops(trace: Trace, phase: str = "forward") -> dict[str, set[str]]:
    """Operator -> dtypes."""
    found: dict[str, set[str]] = {}
    for work in trace.work:
        if work.phase == phase:
            found.setdefault(work.op, set()).add(work.dtype)
    return found


@pytest.mark.parametrize(
    ("make", "precision"),
    [
        (make_resnet, "bf16"),
        (make_lstm, "fp16"),
        (make_one_layer, "fp32"),
        (make_one_layer, "fp16"),
        pytest.param(make_lora, "bf16", marks=pytest.mark.slow),
        pytest.param(make_bert, "bf16", marks=pytest.mark.slow),
    ],
)
def test_every_model_in_the_box_can_be_simulated(make: Make, precision: PrecisionName) -> None:
    trace = on_cuda(make, precision=precision)
    assert trace.device == "cuda"
    assert all(size % 512 == 0 for moment in trace.moments for size in moment.held.values())
    assert trace.resident["activations"] <= 5 * 512  # the loss, and the scale of fp16
    assert trace.resident["gradients"] > 0
    assert {unseen.op for unseen in trace.unseen} >= {"cublas", "context"}


def test_16_bits_take_flash_attention_and_fp32_the_efficient_one() -> None:
    assert "_scaled_dot_product_flash_attention" in _ops(on_cuda(make_one_layer, precision="bf16"))
    assert "_scaled_dot_product_efficient_attention" in _ops(on_cuda(make_one_layer))


def test_autocast_computes_matmuls_in_16_bits_and_the_loss_in_32() -> None:
    ops = _ops(on_cuda(make_one_layer, precision="bf16"))
    assert ops["addmm"] == ops["_scaled_dot_product_flash_attention"] == {"bfloat16"}
    assert ops["_log_softmax"] == ops["native_layer_norm"] == {"float32"}


def test_a_weight_is_cast_once_in_a_forward_pass_and_the_cast_is_dropped_after() -> None:
    def make(device: torch.device) -> TracedObjects:
        layer = nn.Linear(64, 64, bias=False)
        model = nn.Sequential(layer, layer, layer)
        micro = (torch.zeros(8, 64), torch.zeros(8, 64))
        return TracedObjects(model, nn.functional.mse_loss, torch.optim.SGD(model.parameters(), lr=1e-3), micro)

    trace = on_cuda(make, precision="bf16")
    casts = [work.bytes for work in trace.work if work.op == "_to_copy" and work.module == "0" and not work.flops]
    assert 6 * 64 * 64 + 6 * 8 * 64 in casts  # the weight and the input, read in 4 bytes and written in 2, once
    assert [moment.held["activations"] for moment in trace.moments if moment.phase == "update"][-1] <= 512


def test_dropout_keeps_a_mask_of_one_byte() -> None:
    def make(device: torch.device) -> TracedObjects:
        model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5))
        micro = (torch.zeros(512, 64), torch.zeros(512, 64))
        return TracedObjects(model, nn.functional.mse_loss, None, micro)

    assert on_cuda(make).kept["1"] == 512 * 64 * (1 + 4)  # the mask, and what the loss compares


def test_an_lstm_is_one_operator_and_its_reserve_is_told() -> None:
    trace = on_cuda(make_lstm)
    assert [work.calls for work in trace.work if work.op == "lstm"] == [1]
    assert trace.flops == trace_step(make_lstm, device="cpu").flops
    assert "lstm" in {unseen.op for unseen in trace.unseen}


def test_optimizers_of_torch_update_all_parameters_at_once() -> None:
    assert any(op.startswith("_foreach") for op in _ops(on_cuda(make_linear), "update"))

    def fused(device: torch.device) -> TracedObjects:
        subject = make_linear(device)
        return TracedObjects(
            subject.model, subject.loss, torch.optim.AdamW(subject.model.parameters(), fused=True), subject.micro
        )

    trace = on_cuda(fused)
    assert "_fused_adamw_" in _ops(trace, "update")
    assert trace.resident["optimizer"] > 0


@pytest.mark.slow
def test_activation_checkpointing_lowers_the_peak_as_on_the_cpu() -> None:
    two = partial(make_gpt, layers=2)
    assert on_cuda(two, checkpointing=Checkpointing.every(2)).peak.total < on_cuda(two).peak.total


def test_the_process_trains_as_before() -> None:
    def trained() -> Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
        with torch.autocast("cpu", torch.bfloat16):
            model(torch.randn(4, 8)).sum().backward()
        grad: Any = model[0].weight.grad
        return grad

    before = trained()
    on_cuda(make_one_layer, precision="bf16")
    assert torch.equal(before, trained())
    assert not torch.accelerator.is_available()


def test_the_simulated_lstm_takes_the_place_of_the_real_one_within_its_context_alone() -> None:
    """As where there is a GPU, whose own LSTM torch has no whole shape function for."""
    module, x = torch.nn.LSTM(4, 6), torch.randn(3, 2, 4)
    before, _ = module(x)
    with simulated_lstm("CPU"), simulated_lstm("CPU"), FakeTensorMode(allow_non_fake_inputs=True):
        fake = torch.nn.LSTM(4, 6)
        out, _ = fake(torch.empty(3, 2, 4))
        assert out.grad_fn is not None and out.grad_fn.name() == "_FunctionBackward"
        out.sum().backward()
        assert all(weight.grad is not None for weight in fake.parameters())
    after, _ = module(x)
    torch.testing.assert_close(after, before, rtol=0, atol=0)
