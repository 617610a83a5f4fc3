"""The simulator against real steps of models that none of its rules was written by (``benchmarks/held_out.py``)."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from benchmarks.held_out import MODELS
from tests.plan_trace.measured import measured_peak
from trainwright.plan.trace import hidden_memory
from trainwright.plan.trace.fake_tensors import fake_tensors
from trainwright.plan.trace.hidden_memory import Rows
from trainwright.plan.trace.traced_step import trace_step

FP32 = ("conv_groups", "transposed_stride2", "unet", "t5", "lstm_bidirectional_layers2", "lstm_projected")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize(("name", "precision"), [*((name, "fp32") for name in FP32), ("gru", "bf16")])
def test_the_peak_is_that_of_a_real_step(name: str, precision: str) -> None:
    if name == "t5":
        pytest.importorskip("transformers")
    real = measured_peak(MODELS[name], precision=precision)  # type: ignore[arg-type]
    trace = trace_step(MODELS[name], device="cpu", precision=precision)  # type: ignore[arg-type]
    bound = sum(each.bound_bytes or 0 for each in trace.unseen if each.op == "mm")
    assert 0.99 * real - bound < trace.peak.total < 1.01 * real


def test_a_call_that_is_large_is_made_with_fewer_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The predicted memory follows from two smaller calls. Inside another call it is the same."""
    x, weight = torch.zeros(24, 37, 20, 20), torch.zeros(45, 37, 3, 3)
    args = (x, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    op, rows = torch.ops.aten.convolution.default, Rows((0,), 1e6)
    whole = hidden_memory.measure_kernel_memory(op, args, rows)
    assert whole is not None and whole.left == 4 * 24 * 45 * 400
    assert whole.scratch > x.nbytes  # channels are padded
    monkeypatch.setattr(hidden_memory, "MAX_MEASURED_FLOPS", 8e6)
    assert hidden_memory.measure_kernel_memory(op, args, rows) == whole


def test_another_profiler_may_be_running(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the trace names a bound instead of the measured size."""
    monkeypatch.setattr(hidden_memory, "_record_allocations", lambda call: None)
    hidden_memory._allocations.cache_clear()
    trace = trace_step(MODELS["conv_dilated"], device="cpu")
    hidden_memory._allocations.cache_clear()
    (row,) = [each for each in trace.unseen if each.op == "convolution_backward"]
    assert row.bound_bytes and "cannot be seen" in row.why


def test_views_of_a_copied_parameter_are_of_its_memory() -> None:
    with fake_tensors():
        layer = copy.deepcopy(nn.Linear(8, 4))
        assert layer.weight.t().untyped_storage()._cdata == layer.weight.untyped_storage()._cdata
