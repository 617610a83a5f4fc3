"""Measurements on an NVIDIA GPU, in parts, the most valuable first: ``scripts/gpu OUT [PART ...]``.

    tests     the tests that need a GPU (`pytest -m gpu`)
    ranks     on two GPUs: the steps of two ranks equal those of one process, in each layout
    sync      steps of the engine under torch.cuda.set_sync_debug_mode("error"); synchronizations per step of tw.fit
    mfu       tokens/s and model FLOPs utilization of GPT-2 124M in bf16: eager, compiled, and captured in CUDA graphs
    graphs    a step of 2 ms and a GPT: plain loop, engine, engine with CUDA graphs
    overhead  step_overhead.py on the GPU: tw.fit and peers against a plain loop
    watch     watch_overhead.py on the GPU
    host      host_time.py: the CPU time that tw.fit and tw.watch add to a step
    plan      plan_accuracy.py: the predicted peak compared with torch.cuda.max_memory_allocated
    amp       tokens/s of GPT-2 124M by precision (fp8 with torchao), eager and compiled, compared with fp32
    train     tokens/s of `trainwright train` with the recipe of GPT-2 124M
    stall     checkpoint_stall.py with GPT-2 124M on the GPU
    zoo       gpu_zoo.py: healthy programs and faults of the zoo on the GPU

Each part is a process with a time limit below four minutes. Its figures are appended to OUT/PART.jsonl; the last line
has its duration, and its error if there was one. Parts that have succeeded are skipped unless ``--again`` is set, so
the benchmark can be split into several short sessions. ``--seconds`` limits a session: no part is started that may not
end in time. At the end, a table of all parts in OUT is printed and written to OUT/table.md. This file needs only the
standard library.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

PARTS = ("tests", "ranks", "sync", "mfu", "graphs", "overhead", "watch", "host", "plan", "amp", "train", "stall", "zoo")
LIMIT_S = 230.0


def lines_of(file: Path) -> list[dict[str, Any]]:
    """Returns the figures of a part so far. A line that was cut off by a kill is left out."""
    found: list[dict[str, Any]] = []
    for line in file.read_text(errors="replace").splitlines() if file.exists() else ():
        with suppress(ValueError):
            found.append(json.loads(line))
    return found


def is_done(part: str, out: Path) -> bool:
    """Returns True if the part has succeeded in an earlier session."""
    lines = lines_of(out / f"{part}.jsonl")
    return bool(lines) and lines[-1].get("case") == part and "seconds" in lines[-1] and "error" not in lines[-1]


def table(out: Path) -> Iterator[str]:
    """Yields a Markdown table of the figures of all parts."""
    yield "| part | case | median | unit | against | range |"
    yield "|---|---|---|---|---|---|"
    for part in PARTS:
        for line in lines_of(out / f"{part}.jsonl"):
            if "value" in line:
                low, high = line.get("spread") or ("", "")
                cells = (part, line.get("case"), line["value"], line.get("unit"), line.get("against", ""))
                yield f"| {' | '.join(map(str, cells))} | {low} to {high} |"
            elif "error" in line or "skipped" in line:
                yield f"| {part} | not measured | | | {line.get('error') or line['skipped']} | |"


def run_part(part: str, out: Path, device: str, limit_s: float = LIMIT_S) -> bool:
    """Runs one part, and appends a line with its duration and any error. Returns True if it succeeded."""
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
    parser.add_argument("--seconds", type=float, metavar="S", help="seconds of this sitting")
    parser.add_argument("--again", action="store_true", help="run parts again that have ended well")
    options = parser.parse_args()
    if unknown := [part for part in options.parts if part not in PARTS]:
        parser.error(f"no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    options.out.mkdir(parents=True, exist_ok=True)
    out, device, begin_s, good = options.out.resolve(), os.environ.get("DEVICE", "cuda"), time.perf_counter(), True
    for part in options.parts or PARTS:
        if is_done(part, out) and not options.again:
            continue
        if options.seconds is not None and time.perf_counter() - begin_s + options.limit > options.seconds:
            print(
                json.dumps({"bench": "gpu", "case": part, "skipped": "the next sitting: no time is left"}), flush=True
            )
            good = False
            continue
        good &= run_part(part, out, device, options.limit)
    lines = [*table(out)]
    (out / "table.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines), flush=True)
    raise SystemExit(0 if good else 1)


if __name__ == "__main__":
    main()
