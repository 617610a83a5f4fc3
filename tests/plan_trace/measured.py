"""Memory of a real step as reported by the CPU allocator, to compare with that of a simulated step."""

from __future__ import annotations

import gc
from collections.abc import Callable

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from trainwright.assembly.checkpointing import apply_checkpointing
from trainwright.checkpoint.cursor import MicroBatch, StepBatch
from trainwright.checkpoint.train_state import TrainState
from trainwright.engine.precision import Precision, PrecisionName
from trainwright.engine.step import make_step
from trainwright.optim.clip import make_clip
from trainwright.plan.checkpointing import Checkpointing
from trainwright.plan.trace.traced_step import TracedObjects

SECOND = "the second step"


def measured_peak(
    make: Callable[[torch.device], TracedObjects],
    *,
    precision: PrecisionName = "fp32",
    accumulation: int = 1,
    checkpointing: Checkpointing | None = None,
) -> int:
    """Returns the peak memory of the second step in bytes, including the model: the running sum of allocator events."""
    gc.collect()  # else objects of an earlier test may be freed during the measurement
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        subject = make(torch.device("cpu"))
        if checkpointing is not None:
            apply_checkpointing(subject.model, checkpointing)
        assert subject.optimizer is not None
        state = TrainState(subject.model, subject.optimizer)
        copies = [subject.micro, *(tuple(t.clone() for t in subject.micro) for _ in range(accumulation - 1))]
        batch = StepBatch(tuple(MicroBatch(copy, np.arange(len(copy[0]))) for copy in copies))
        advance = make_step(subject.loss, precision=Precision(precision), clip=make_clip("norm"))
        advance(state, batch)
        with record_function(SECOND):
            advance(state, batch)
    assert profiled.profiler is not None and profiled.profiler.kineto_results is not None
    events = profiled.profiler.kineto_results.events()
    second = next(event for event in events if event.name() == SECOND)
    end_ns = second.start_ns() + second.duration_ns()
    held = peak = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        held += event.nbytes()
        if second.start_ns() <= event.start_ns() <= end_ns:
            peak = max(peak, held)
    return peak
