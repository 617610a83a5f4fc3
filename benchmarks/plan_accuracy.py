"""Predicted peak memory of one optimizer step relative to the measured peak, each case in a new process.

    python -m benchmarks.plan_accuracy [--quick] [--only gpt] [--held-out]

The prediction is that of ``trainwright.plan.trace.traced_step.trace_step``, with fake tensors and without allocations.
It is made after the measurement, with the same function that creates model, loss, optimizer and batch. On the CPU, the
profiler receives every allocation and release of torch's allocator from before the model is created; the measured peak
is the largest running sum within the second step. On a GPU, it is ``max_memory_allocated``. ``resident`` is the peak
resident memory of the process, above that before the model was created. It also includes memory that libraries allocate
without torch's allocator, memory that malloc keeps, and the records of the profiler.

``--held-out`` uses the models of ``held_out.py``, which were not used to develop the simulator. Prints one JSON line
per case with predicted / measured; the last lines have the largest deviation per model.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks import held_out
from trainwright.assembly.checkpointing import apply_checkpointing
from trainwright.checkpoint.cursor import MicroBatch, StepBatch
from trainwright.checkpoint.train_state import TrainState
from trainwright.engine.losses import cross_entropy, language_model
from trainwright.engine.precision import Precision
from trainwright.engine.step import make_step
from trainwright.models.gpt import gpt
from trainwright.models.hf import hf_model
from trainwright.models.lora import add_lora
from trainwright.models.lstm import lstm
from trainwright.models.resnet import resnet
from trainwright.optim.clip import make_clip
from trainwright.plan.checkpointing import Checkpointing
from trainwright.plan.trace.traced_step import TracedObjects, trace_step

VOCABULARY, LENGTH = 8192, 256
PRECISIONS = ("fp32", "bf16")
SECOND = "the second step"
Make = Callable[[torch.device], TracedObjects]


def _trained(model: nn.Module, loss: Any, micro: Any) -> TracedObjects:
    return TracedObjects(
        model, loss, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4), micro
    )


def _ids(rows: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.zeros(rows, LENGTH, dtype=torch.int64, device=device)
    return ids, ids.clone()


def _gpt(vocabulary: int) -> nn.Module:
    return gpt(vocab_size=vocabulary, block_size=LENGTH, layers=6, heads=6, d_model=384, dropout=0.1)


def make_gpt(device: torch.device) -> TracedObjects:
    return _trained(_gpt(VOCABULARY), language_model, _ids(8, device))


def make_lora(device: torch.device) -> TracedObjects:
    return _trained(add_lora(_gpt(512), rank=8), language_model, _ids(8, device))


def make_resnet(device: torch.device) -> TracedObjects:
    images, labels = torch.zeros(64, 3, 32, 32, device=device), torch.zeros(64, dtype=torch.int64, device=device)
    return _trained(resnet(depth=20, width=32), cross_entropy, (images, labels))


def make_lstm(device: torch.device) -> TracedObjects:
    return _trained(lstm(vocab_size=2048, d_model=384, dropout=0.1), language_model, _ids(16, device))


def make_bert(device: torch.device) -> TracedObjects:
    shape: dict[str, Any] = {
        "hidden_size": 384,
        "num_hidden_layers": 6,
        "num_attention_heads": 6,
        "intermediate_size": 1536,
    }
    model = hf_model(architecture="BertForMaskedLM", vocab_size=VOCABULARY, max_position_embeddings=LENGTH, **shape)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        ids_BT, target_BT = batch
        logits_BTV = model(input_ids=ids_BT, attention_mask=torch.ones_like(ids_BT)).logits
        return F.cross_entropy(logits_BTV.flatten(0, 1).float(), target_BT.flatten())

    return _trained(model, loss, _ids(8, device))


MODELS: dict[str, Make] = {
    "gpt": make_gpt,
    "resnet": make_resnet,
    "lstm": make_lstm,
    "lora": make_lora,
    "bert": make_bert,
}
HELD_OUT = {f"held_out_{name}": make for name, make in held_out.MODELS.items()}
BLOCKS = {"gpt": 6, "lora": 6, "resnet": 9, "bert": 6}
Case = tuple[str, str, int, bool]
"""Model, precision, accumulation, and whether activation checkpointing is on for every block."""


def cases(quick: bool, others: bool) -> list[Case]:
    if quick:
        return [("held_out_unet" if others else "gpt", "fp32", 1, False)]
    if others:
        return [(model, precision, 1, False) for model in HELD_OUT for precision in PRECISIONS]
    plain = [(model, precision, count, False) for model in MODELS for precision in PRECISIONS for count in (1, 4)]
    return plain + [(model, precision, 1, True) for model in BLOCKS for precision in PRECISIONS]


def measure(make: Make, case: Case, device: torch.device) -> dict[str, int]:
    """Returns the peak bytes of the second step: ``measured`` by the allocator, ``resident`` by the system."""
    _, precision, accumulation, checkpointed = case
    process = psutil.Process()
    before = process.memory_info().rss
    base = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        with device:
            subject = make(device)
        if checkpointed:
            apply_checkpointing(subject.model, Checkpointing.every(BLOCKS[case[0]]))
        how = Precision(precision, device.type)  # type: ignore[arg-type]
        assert subject.optimizer is not None
        state = TrainState(subject.model, subject.optimizer, scaler=how.scaler(device))
        copies = [subject.micro, *(tuple(t.clone() for t in subject.micro) for _ in range(accumulation - 1))]
        ids = torch.arange(len(subject.micro[0])).numpy()
        batch = StepBatch(tuple(MicroBatch(copy, ids) for copy in copies))
        advance = make_step(subject.loss, precision=how, clip=make_clip("norm"))
        advance(state, batch)
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak of resident memory
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        with record_function(SECOND):
            advance(state, batch)
        peak_rss = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    measured = torch.cuda.max_memory_allocated() - base if device.type == "cuda" else peak_of(profiled)
    return {"measured": measured, "resident": int(peak_rss.split()[1]) * 1024 - before}


def peak_of(profiled: profile) -> int:
    """Returns the largest running sum of the allocator's events within the second step, in bytes."""
    assert profiled.profiler is not None and profiled.profiler.kineto_results is not None
    events = profiled.profiler.kineto_results.events()
    second = next(event for event in events if event.name() == SECOND)
    begin_ns, end_ns = second.start_ns(), second.start_ns() + second.duration_ns()
    held = peak = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        held += event.nbytes()  # type: ignore[attr-defined]
        if begin_ns <= event.start_ns() <= end_ns:
            peak = max(peak, held)
    return peak


def predict(make: Make, case: Case, device: str) -> dict[str, Any]:
    model, precision, accumulation, checkpointed = case
    again = Checkpointing.every(BLOCKS[model]) if checkpointed else None
    how: dict[str, Any] = {"device": device, "precision": precision}
    trace = trace_step(make, **how, accumulation=accumulation, checkpointing=again)
    at = [trace.peak.phase, trace.peak.module, trace.peak.op]
    unseen = [[row.op, row.bound_bytes] for row in trace.unseen]
    # cublas allocates its workspace with torch's allocator, on CUDA only
    inside = sum(row.bound_bytes or 0 for row in trace.unseen if row.op == "cublas")
    return {"predicted": trace.peak.total + inside, "at": at, "held": dict(trace.peak.held), "unseen": unseen}


def one_case(case: Case, device: str) -> None:
    """Run one measurement in a separate process."""
    make = {**MODELS, **HELD_OUT}[case[0]]
    torch.manual_seed(0)
    seen = measure(make, case, torch.device(device))
    print(json.dumps({**seen, **predict(make, case, device)}), flush=True)


def in_a_process(case: Case, device: str, threads: int) -> dict[str, Any]:
    command = [sys.executable, "-W", "ignore", __file__, "--one", json.dumps(case), "--device", device]
    environ = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, capture_output=True, text=True, env=environ, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    seen: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return seen


def show(case: str, ratio: float, **more: Any) -> None:
    line = {"bench": "plan_accuracy", "case": case, "value": round(ratio, 5), "unit": "ratio", "against": "measured"}
    print(json.dumps({**line, **more}), flush=True)


def compare(options: argparse.Namespace) -> None:
    worst: dict[str, float] = {}
    for case in cases(options.quick, options.held_out):
        if options.only in case[0]:
            seen = in_a_process(case, options.device, options.threads)
            ratio = seen["predicted"] / seen["measured"]
            worst[case[0]] = max(worst.get(case[0], 1.0), ratio, key=lambda value: abs(value - 1))
            show("_".join([case[0], case[1], f"accum{case[2]}"] + ["checkpointed"] * case[3]), ratio, **seen)
    for model, ratio in worst.items():
        show(f"{model}_worst", ratio)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one case")
    parser.add_argument("--held-out", action="store_true", help="models that no rule was written by")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", default="", help="models with this in their name")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        one_case(tuple(json.loads(options.one)), options.device)
    else:
        compare(options)


if __name__ == "__main__":
    main()
