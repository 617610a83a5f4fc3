"""Verdicts on memory, before it is allocated, and on the time to read data compared with the time to compute."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from trainwright.assembly.assemble import Parts, build_model, count_parameters
from trainwright.checkpoint.rng import preserved_rng
from trainwright.commands.check.sandbox import Sandbox
from trainwright.commands.check.verdict import Verdict
from trainwright.data.unwrap import Unwrapped
from trainwright.plan.amounts import human_bytes, human_seconds
from trainwright.plan.devices import Device
from trainwright.plan.machine import read_machine
from trainwright.plan.memory import memory_bytes
from trainwright.plan.trace.local_device import local_device, nominal_cpu
from trainwright.plan.trace.run_forecast import as_written, forecast
from trainwright.recipe import Loaded
from trainwright.training.job import Job

WARNING_MEMORY_FRACTION = 0.8
"""Fraction of the available memory above which there is a warning."""
MIN_WAIT_S = 0.01
"""Wait per step below which there is no warning."""


def sized(loaded: Loaded, train: Unwrapped, available_bytes: int) -> Iterator[Verdict]:
    """Yield a verdict if weights, gradients and optimizer state do not fit. Weights are counted on the meta device."""
    recipe = loaded.recipe
    total = 0
    with contextlib.suppress(Exception), preserved_rng(), torch.device("meta"):
        # A model that reads its weights cannot be built on the meta device.
        total, trainable = count_parameters(build_model(loaded, train)[0])
    if not total:
        return
    few = recipe.model.lora is not None or recipe.model.freeze  # the number is unknown; 0 is a lower bound
    trainable = 0 if few else trainable
    optimizer = recipe.optimizer
    sizes = memory_bytes(optimizer.use, optimizer.args, parameters=total, trainable=trainable, activations=0)
    if (need := sum(sizes.values())) > available_bytes:
        yield _too_much(f"{total:,} parameters need", sizes, need, available_bytes)


def device_of(device: torch.device) -> Device:
    """Return the local device as an entry of the device table."""
    return local_device(probe=False) if device.type == "cuda" else nominal_cpu(read_machine())


def predicted(loaded: Loaded, parts: Parts, device: torch.device) -> Iterator[Verdict]:
    """Yield a verdict on the predicted peak of a step, before one is taken; none for a model that cannot be traced.

    ``parts`` are not prepared yet.
    """
    place, found = device_of(device), None
    try:
        written = as_written(loaded, place, parts=parts)
        if written is None or not written.fits:
            found = forecast(loaded, place, parts=parts)
            written = found.written
    except Exception:
        return
    need, usable = written.peak_bytes, place.usable_bytes
    message = f"a step peaks at {human_bytes(need)}, {human_bytes(usable)} are usable"
    if found is not None and not written.fits:
        others = (each.line() for each in found.remedies if each.fits and each.means != "devices")
        changes = found.settings or tuple(others)[:1]
        remedy = f"{', '.join(changes) or 'a smaller model'} (trainwright plan has the reasons)"
        yield Verdict("fail", "memory", message, remedy)
    elif need > WARNING_MEMORY_FRACTION * usable:
        yield Verdict("warn", "memory", message, "leave some room: asynchronous saving needs a copy in addition")
    else:
        yield Verdict("ok", "memory", message)


def memory(job: Job, available_bytes: int) -> Iterator[Verdict]:
    """Compare the peak of a step in the plan with the bytes that were available before the model was built."""
    sizes = job.plan.predicted.memory_bytes
    if sizes is None:
        yield Verdict("cannot tell", "memory", "the plan has no memory figures")
        return
    need = sum(sizes.values())
    message = (
        f"about {human_bytes(need)} of {human_bytes(available_bytes)} available, by the dry run: the plan cannot trace "
        "this model"
    )
    if need > available_bytes:
        yield _too_much("a step needs", sizes, need, available_bytes)
    elif need > WARNING_MEMORY_FRACTION * available_bytes:
        remedy = "leave some room: temporaries of kernels and a copy for asynchronous saving are needed in addition"
        yield Verdict("warn", "memory", message, remedy)
    else:
        yield Verdict("ok", "memory", message)


def _too_much(what: str, sizes: Mapping[str, int], need: int, available_bytes: int) -> Verdict:
    parts = ", ".join(f"{name} {human_bytes(size)}" for name, size in sizes.items() if size)
    return Verdict(
        "fail",
        "memory",
        f"{what} {human_bytes(need)} ({parts}), {human_bytes(available_bytes)} are available",
        "a smaller batch.micro, model.activation_checkpointing, LoRA or a smaller model: see trainwright plan",
    )


def speed(sandbox: Sandbox, step_s: float) -> Iterator[Verdict]:
    """Compare the wait for a batch with ``step_s``, the seconds of a step. Workers read while the step computes."""
    reading = sandbox.job.measured.reading
    if not reading.workers and len(sandbox.load_s) > 1:  # the first batch is read with cold caches
        load_s = statistics.median(sandbox.load_s[1:])
        reading = replace(reading, wait_s=load_s, read_s=load_s)
    by = f" by {reading.workers} workers, a step waits {human_seconds(reading.wait_s)} for it"
    by = by if reading.workers else ""
    message = f"{human_seconds(reading.read_s)} to read a batch{by}, {human_seconds(step_s)} to train on it"
    if reading.wait_s > MIN_WAIT_S and reading.wait_s > 0.5 * step_s:
        waiting = reading.wait_s / (reading.wait_s + step_s)
        remedy = f"{reading.advice()}; keep decoded samples; read larger pieces"
        yield Verdict("warn", "loading", f"{message}: {waiting:.0%} of the time is spent waiting", remedy)
    else:
        yield Verdict("ok", "loading", message)
