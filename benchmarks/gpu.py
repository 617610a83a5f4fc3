"""Measurements on an NVIDIA GPU, part by part: ``scripts/gpu OUT [PART ...] [--limit S]``.

    tests     the tests that need a GPU (`pytest -m gpu`)
    sync      steps of the engine under torch.cuda.set_sync_debug_mode("error"); how often a step of tw.fit synchronises
    overhead  step_overhead.py on the GPU
    watch     watch_overhead.py on the GPU
    zoo       gpu_zoo.py: healthy programs and listed faults there
    stall     checkpoint_stall.py with GPT-2 124M on the GPU
    plan      plan_accuracy.py: the foreseen peak against torch.cuda.max_memory_allocated
    amp       tokens/s of GPT-2 124M by precision (fp8 with torchao), eager and compiled, against fp32
    mfu       model FLOPs utilization of GPT-2 124M in bf16, compiled

This file needs the standard library alone. Each part is a process of its own with a time limit; its figures go to
OUT/PART.jsonl as they come, and a part that fails, or finds no GPU, leaves a line that says so.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

PARTS = ("tests", "sync", "overhead", "watch", "zoo", "stall", "plan", "amp", "mfu")
LIMIT_S = 470.0


def run_part(part: str, out: Path, device: str, limit_s: float = LIMIT_S) -> bool:
    """Runs one part; appends a line with its time, or with its error. Returns whether it ended well."""
    child = [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu_parts", part, device]
    target, errors = out / f"{part}.jsonl", out / f"{part}.stderr"
    begin_s = time.perf_counter()
    with target.open("w") as figures, errors.open("w") as stderr:
        process = subprocess.Popen(child, stdout=figures, stderr=stderr, start_new_session=True)
        try:
            ending = f"exit code {code}" if (code := process.wait(timeout=limit_s)) else ""
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            ending = f"not done after {limit_s:g} s"
    line: dict[str, object] = {"bench": "gpu", "case": part, "seconds": round(time.perf_counter() - begin_s, 1)}
    if ending:
        line |= {"error": ending, "stderr": errors.read_text(errors="replace")[-2000:]}
    errors.unlink()
    with target.open("a") as figures:
        figures.write(json.dumps(line) + "\n")
    print(json.dumps(line), flush=True)
    return not ending


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the folder for the figures")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; default all")
    parser.add_argument("--limit", type=float, default=LIMIT_S, metavar="S", help="seconds that a part may take")
    options = parser.parse_args()
    if unknown := [part for part in options.parts if part not in PARTS]:
        parser.error(f"no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    options.out.mkdir(parents=True, exist_ok=True)
    device = os.environ.get("DEVICE", "cuda")
    good = [run_part(part, options.out.resolve(), device, options.limit) for part in options.parts or PARTS]
    raise SystemExit(0 if all(good) else 1)


if __name__ == "__main__":
    main()
