"""Verdicts on what a run needs: memory, before it is taken, and the time that data take against that of computing."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator, Mapping

import torch

from trainwright.build.assemble import Parts, build_model
from trainwright.build.data import Unwrapped
from trainwright.build.model import count_parameters
from trainwright.forecast.local_device import local_device, nominal_cpu
from trainwright.forecast.run_forecast import forecast
from trainwright.plan.devices import Device
from trainwright.plan.machine import Machine, read_machine
from trainwright.plan.memory import memory_bytes
from trainwright.recipe import Loaded
from trainwright.state.rng import preserved_rng
from trainwright.training.job import Job
from trainwright.verbs.check.samples import DatasetSample
from trainwright.verbs.check.sandbox import Sandbox
from trainwright.verbs.check.verdict import Verdict

NEARLY = 0.8
"""Share of the memory at hand from which on it is close."""
UNTRACED = "by the rehearsal: the plan cannot trace this model"
SLOW_S = 0.01
"""A wait per step that is not worth a word."""


def memory_at_hand(device: torch.device, machine: Machine) -> int:
    """Bytes that may still be taken on a device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return machine.available_bytes


def sized(loaded: Loaded, train: Unwrapped, at_hand: int) -> Iterator[Verdict]:
    """Weights, gradients and optimizer state of the model, made without memory; only where they do not fit."""
    recipe = loaded.recipe
    total = 0
    with contextlib.suppress(Exception), preserved_rng(), torch.device("meta"):  # what reads weights cannot be made so
        total, trainable = count_parameters(build_model(loaded, train)[0])
    if not total:
        return
    few = recipe.model.lora is not None or recipe.model.freeze
    trainable = 0 if few else trainable
    optimizer = recipe.optimizer
    sizes = memory_bytes(optimizer.use, optimizer.args, parameters=total, trainable=trainable, activations=0)
    if (need := sum(sizes.values())) > at_hand:
        yield _too_much(f"{total:,} parameters need", sizes, need, at_hand)


def device_of(device: torch.device) -> Device:
    """The device at hand as the planner knows it."""
    return local_device(probe=False) if device.type == "cuda" else nominal_cpu(read_machine())


def foreseen(loaded: Loaded, parts: Parts, device: torch.device) -> Iterator[Verdict]:
    """The peak of a step by the planner, before one is taken; nothing for a model that it cannot trace."""
    try:
        with preserved_rng():
            made = forecast(loaded, device_of(device), parts=parts)
    except Exception:
        return
    need, usable = made.written.peak_bytes, made.device.usable_bytes
    said = f"a step peaks at {_gib(need)}, {_gib(usable)} are usable"
    if not made.written.fits:
        others = (each.line() for each in made.remedies if each.fits and each.means != "absent")
        ways = made.settings or tuple(others)[:1]
        remedy = f"{', '.join(ways) or 'a smaller model'} (trainwright plan has the reasons)"
        yield Verdict("fail", "memory", said, remedy)
    elif need > NEARLY * usable:
        yield Verdict("warn", "memory", said, "leave some room: a copy for asynchronous saving comes on top")
    else:
        yield Verdict("ok", "memory", said)


def memory(job: Job, at_hand: int) -> Iterator[Verdict]:
    """The peak of a step by the plan, against the memory at hand. ``at_hand``: before the model was made."""
    sizes = job.plan.memory_bytes
    if sizes is None:
        yield Verdict("cannot tell", "memory", "the plan has no figures")
        return
    need = sum(sizes.values())
    if need > at_hand:
        yield _too_much("a step needs", sizes, need, at_hand)
    elif need > NEARLY * at_hand:
        remedy = "leave some room: temporaries of kernels and a copy for asynchronous saving come on top"
        yield Verdict("warn", "memory", f"about {_gib(need)} of {_gib(at_hand)} at hand, {UNTRACED}", remedy)
    else:
        yield Verdict("ok", "memory", f"about {_gib(need)} of {_gib(at_hand)} at hand, {UNTRACED}")


def _too_much(what: str, sizes: Mapping[str, int], need: int, at_hand: int) -> Verdict:
    parts = ", ".join(f"{name} {_gib(size)}" for name, size in sizes.items() if size)
    return Verdict(
        "fail",
        "memory",
        f"{what} {_gib(need)} ({parts}), {_gib(at_hand)} are at hand",
        "a smaller batch.micro, model.activation_checkpointing, LoRA or a smaller model; trainwright plan weighs them",
    )


def _gib(size: int) -> str:
    return f"{size / 2**30:.3g} GiB" if size >= 2**28 else f"{size / 2**20:.3g} MiB"


def speed(bench: Sandbox, train: DatasetSample, step_s: float) -> Iterator[Verdict]:
    """Reading a batch against computing with it. Workers read while the step computes."""
    job = bench.job
    workers = job.recipe.data.workers
    if workers == 0 and len(bench.load_s) > 1:
        load_s = statistics.median(bench.load_s[1:])
    elif train.items:
        load_s = train.seconds / len(train.items) * job.plan.batch.size / max(1, workers)
    else:
        yield Verdict("cannot tell", "loading", "a stream: how long a batch takes to read is not known")
        return
    wait_s = max(0.0, load_s - step_s) if workers else load_s
    said = f"{_ms(load_s)} to read a batch{f' by {workers} workers' if workers else ''}, {_ms(step_s)} to train on it"
    if wait_s > SLOW_S and wait_s > 0.5 * step_s:
        share = wait_s / (wait_s + step_s)
        remedy = f"data.workers: {max(2, 2 * workers)} or more; keep decoded samples; read larger pieces"
        yield Verdict("warn", "loading", f"{said}: {share:.0%} of the time is spent waiting", remedy)
    else:
        yield Verdict("ok", "loading", said)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
