"""Chooses the mode of torch.compile for a long run, by timing real passes in each mode before the first step."""

from __future__ import annotations

import copy
import hashlib
import json
import statistics
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, get_args

import torch
from torch import nn

from trainwright.assembly.assemble import compile_in_place
from trainwright.checkpoint.cursor import StepBatch
from trainwright.checkpoint.isolation import NotIsolated
from trainwright.checkpoint.scaler import NoScaler
from trainwright.engine.dry_run import state_restored
from trainwright.engine.loss import accumulate, as_loss_fn
from trainwright.engine.step import clear_grads
from trainwright.errors import StorageError
from trainwright.finetune.store import cache_folder
from trainwright.plan.amounts import human_seconds
from trainwright.plan.header import RunHeader, Setting
from trainwright.plan.run_time import training_time_s
from trainwright.recipe.schema import CompileMode
from trainwright.runs.files import read_json
from trainwright.runs.storage import write_atomically
from trainwright.training.job import Job, has_doctor, until_of
from trainwright.training.resume import Earlier

MAX_TRIAL_FRACTION = 0.02
"""Maximum time to compile and time the modes / predicted time of the rest of the run."""
MIN_COMPILE_S = 10.0
"""Estimated seconds to compile in the first mode. The next mode is estimated at twice the longest time so far."""
MIN_GAIN = 1.03
"""Minimum time in the default mode / time in a mode that replaces it."""
MIN_ROUNDS = 5  # timed passes in each mode
MIN_TIMED_S = 1.0
"""Minimum seconds of all passes that are timed."""
MODE_KEY = "compile_mode"  # key of the chosen mode in the plan and in the cache file


def with_compile_mode(job: Job, earlier: Earlier | None) -> Job:
    """Return the job with its model compiled in the fastest mode, if ``model.compile_mode`` is ``auto``.

    The mode of an earlier part of the run is kept, as is the mode that another run of the same model, batch shapes and
    machine has measured. Otherwise the modes are timed if the run is long enough. State and batches are unchanged.
    """
    ask, plan = job.recipe.model, job.plan
    if not ask.compile or ask.compile_mode != "auto":
        return job
    first = next(job.batches)
    key, found = _key(job, first), dict[str, float]()
    file = cache_folder() / "compile" / f"{key}.json"
    left_s = (training_time_s(plan) or 0.0) * (1 - until_of(plan)(job.state))
    limit_s = MAX_TRIAL_FRACTION * left_s if plan.predicted.step_s else 0.0  # without a dry run, a trial is not safe
    if earlier is not None:
        mode, why = _mode_in(earlier.resolved) or "default", "as in the earlier part of the run"
    elif job.recipe.deterministic:
        mode, why = "default", "deterministic: true, and a measurement may choose another mode the next time"
    elif job.world.size > 1 or job.parts.custom.advance is not None:
        mode, why = "default", "modes are not measured with several ranks or a custom step"
    elif (known := _read(file)) is not None:
        mode, why = known, "measured in another run of this model"
    elif limit_s < MIN_COMPILE_S:
        mode, why = "default", "the run is too short to measure others"
    else:
        try:
            found, failed = _measured(job, first, limit_s)
        except NotIsolated as error:
            failed = [f"not measured: {error}"]
        best = min(found, key=lambda mode: found[mode], default="default")
        mode = best if found.get("default", 0.0) > MIN_GAIN * found.get(best, 0.0) else "default"
        times = ", ".join(f"{name} {human_seconds(seconds)}" for name, seconds in found.items())
        why = "; ".join([f"forward and backward pass take: {times or 'unknown'}", *failed])
        if found:  # otherwise the next run measures again
            with suppress(OSError, StorageError):
                file.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(file, json.dumps({MODE_KEY: mode, "seconds": found}))
    _compile(job.state.model, mode)
    job.provenance["compile"] = {"mode": mode, "key": key, "seconds": found, "why": why}
    header = RunHeader((*plan.header.settings, Setting("mode", f"{mode} of torch.compile", "planned", why)))
    plan = replace(plan, header=header, settled={**plan.settled, MODE_KEY: mode})
    return replace(job, plan=plan, batches=chain([first], job.batches))


def _read(file: Path) -> str | None:
    with suppress(StorageError):
        return _mode_in(read_json(file))
    return None


def _mode_in(settled: Any) -> str | None:
    mode = settled.get(MODE_KEY) if isinstance(settled, Mapping) else None
    return str(mode) if mode in get_args(CompileMode) and mode != "auto" else None


def _candidates(job: Job) -> list[str]:
    """Return the modes that can differ here, the default first.

    Modes with CUDA graphs overwrite the outputs of the previous step. They are left out with the doctor, whose recorder
    keeps outputs, and with ``graphs``, which captures the step itself.
    """
    has_graphs = job.device.type == "cuda" and not job.recipe.graphs and not has_doctor(job)
    return ["default", "max-autotune-no-cudagraphs", *(["reduce-overhead", "max-autotune"] if has_graphs else [])]


def _measured(job: Job, first: StepBatch, limit_s: float) -> tuple[dict[str, float], list[str]]:
    """Return the median seconds of forward and backward pass by mode, and the modes that failed, with the error.

    Compiled code is discarded, because torch stops compiling a function after eight versions of it. Compiling the
    chosen mode again is fast, because inductor caches its kernels on the disk.
    """
    loss_fn, unscaled = as_loss_fn(job.parts.loss), replace(job.state, scaler=NoScaler())
    clock = time.thread_time if job.device.type == "cpu" and job.plan.threads == 1 else time.perf_counter
    calls, times = dict[str, dict[nn.Module, Any]](), dict[str, list[float]]()
    failed, begin_s, longest_s = list[str](), time.perf_counter(), MIN_COMPILE_S / 2

    def timed(mode: str) -> float:
        for module, call in calls[mode].items():
            module._compiled_call_impl = call
        batch = replace(first, micro=copy.deepcopy(first.micro))  # a model may write into it
        clear_grads(job.state.optimizer)
        started_s = clock()
        float(accumulate(unscaled, batch, loss_fn, job.precision).loss)  # waits for the device
        return clock() - started_s

    job.matmul.set()
    torch.set_num_threads(job.plan.threads)
    with state_restored(job.state, job.parts.loss, compiled=True):
        for mode in _candidates(job):
            started_s = time.perf_counter()
            if started_s - begin_s + 2 * longest_s > limit_s:
                break
            calls[mode] = _compile(job.state.model, mode)
            try:
                timed(mode)
                timed(mode)  # captures CUDA graphs
                times[mode] = []
            except Exception as error:  # of the compiler, or out of memory; for the default, the first step reports it
                failed.append(f"{mode} failed: {type(error).__name__}")
            longest_s = max(longest_s, time.perf_counter() - started_s)
        rounds = 0
        while times and (rounds < MIN_ROUNDS or sum(map(sum, times.values())) < MIN_TIMED_S):
            rounds += 1
            for mode, each in times.items():
                each.append(timed(mode))
    torch.compiler.reset()
    return {mode: statistics.median(each) for mode, each in times.items()}, failed


def _compile(model: nn.Module, mode: str) -> dict[nn.Module, Any]:
    """Set the compiled modules to compile again in ``mode`` at their next call. Return their calls by module."""
    modules = [each for each in model.modules() if each._compiled_call_impl is not None]
    for module in modules:
        compile_in_place(module, mode=mode)
    return {module: module._compiled_call_impl for module in modules}


def _key(job: Job, first: StepBatch) -> str:
    """Return the hash of what the compiled code and its speed depend on."""
    origin, machine, ask = job.provenance, job.hardware.machine, job.recipe.model
    facts = [
        [origin.get(name) for name in ("packages", "sources", "python", "driver")],
        {name: value for name, value in (origin.get("environment") or {}).items() if name.startswith("TORCH")},
        [machine.cpu, [each.name for each in machine.gpus], job.plan.threads, job.plan.precision, str(job.matmul)],
        [ask.model_dump(mode="json"), repr(job.state.model), _candidates(job), dict(job.plan.settled)],
        [[list(each.shape), str(each.dtype), each.requires_grad] for each in job.state.model.parameters()],
        [[list(each.shape), str(each.dtype)] for each in first.tensors],
    ]
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()
