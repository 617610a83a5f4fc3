"""The first batch is tried in what the recipe leaves open, and the mode that is chosen is timed."""

from __future__ import annotations

import sys
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from trainwright.checkpoint.cursor import MicroBatch, StepBatch
from trainwright.checkpoint.train_state import TrainState
from trainwright.distributed import SOLO
from trainwright.engine.precision import Precision
from trainwright.plan.make import RunFacts, choose_mode, choose_precision
from trainwright.training.first_batch import try_batch

FACTS = RunFacts(100, tokens_per_sample=0, parameters=9, trainable=9, device="cpu", device_name="a CPU")


class Gaining(nn.Linear):
    """It works for 10 ms in fp32 and for 3 ms in bf16, and waits as a busy machine lets it."""

    def forward(self, x: Tensor) -> Tensor:
        is_bf16 = torch.is_autocast_enabled("cpu")
        end_s = time.thread_time() + (0.003 if is_bf16 else 0.01)
        while time.thread_time() < end_s:
            pass
        time.sleep(0.03 if is_bf16 else 0.0)
        return super().forward(x)


@pytest.mark.slow
def test_the_mode_that_is_chosen_is_timed() -> None:
    model = Gaining(8, 1)
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batch = StepBatch((MicroBatch(torch.randn(1, 8), np.arange(1)),))
    for threads in ((1,), (2,), (2, 1)):
        facts = replace(FACTS, low_precision=("bf16",), threads=threads)
        seen = try_batch(state, batch, lambda model, x: model(x).mean(), Precision, facts, "auto", SOLO)
        precision, count = choose_mode("auto", facts, seen.seconds, seen.thread_s)
        assert precision == "bf16" and count in threads
        assert seen.seconds[precision, count] > 0.03
        assert {("fp32", count) for count in threads} < seen.seconds.keys()
        alone = try_batch(state, batch, lambda model, x: model(x).mean(), Precision, facts, "fp32", SOLO)
        assert alone.seconds.keys() == {("fp32", count) for count in threads}


@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory are set by Linux's rlimits")
def test_under_a_limit_of_memory_bf16_is_not_tried() -> None:
    import resource

    model = nn.Linear(8, 1)
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batch = StepBatch((MicroBatch(torch.randn(1, 8), np.arange(1)),))
    facts = replace(FACTS, low_precision=("bf16",), threads=(1,))
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (2**45, before[1]))  # more than any machine has, and a limit
    try:
        seen = try_batch(state, batch, lambda model, x: model(x).mean(), Precision, facts, "auto", SOLO)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
    assert seen.seconds.keys() == {("fp32", 1)}
    _, note = choose_precision("auto", "cpu", ("bf16",), {"fp32": seen.thread_s["fp32", 1]})
    assert "memory is limited" in note.why
