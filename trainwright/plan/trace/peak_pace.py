"""The samples per second at a device's peak rate, the denominator of model FLOPs utilisation (MFU)."""

from __future__ import annotations

import torch

from trainwright.assembly.assemble import Parts
from trainwright.checkpoint.cursor import MicroBatch
from trainwright.plan.devices import Device
from trainwright.plan.roofline import peak_rate
from trainwright.plan.trace.blueprint import fake_copy
from trainwright.plan.trace.fake_tensors import fake_batch
from trainwright.plan.trace.traced_step import TracedObjects, trace_step


def flops_of(parts: Parts, micro: MicroBatch) -> int:
    """Return the FLOPs of forward and backward of a micro-batch, without those repeated by activation checkpointing.

    They are counted under fake tensors. Raises whatever a model raises that cannot be copied or traced.
    """

    def make(place: torch.device) -> TracedObjects:
        return TracedObjects(fake_copy(parts.model, place), parts.loss, None, fake_batch(micro.data, place))

    trace = trace_step(make, device="cpu", clip=False)
    return sum(work.flops for work in trace.work if work.phase in ("forward", "backward"))


def peak_samples_s(parts: Parts, micro: MicroBatch, device: Device | None, precision: str) -> float | None:
    """Return the samples per second at the peak rate of ``device``, or None if the rate or the FLOPs are unknown."""
    if device is None or not micro.size:
        return None
    try:
        flops = flops_of(parts, micro)
    except Exception:  # a user's model may raise anything under fake tensors; then there is no figure
        return None
    return micro.size * peak_rate(device, precision) / flops if flops else None
