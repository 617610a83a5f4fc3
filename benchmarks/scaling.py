"""Several processes against one: ``tw.fit`` at its defaults, the same batch, one thread each.

    python -m benchmarks.scaling [--rounds 3] [--ranks 2] [--quick]

A round trains a small GPT in one process and on the ranks, in alternating order. ``speed_up`` is the median step of one
process by that of the ranks, ``efficiency`` that by the number of ranks, and ``communication`` the share of a step
of the ranks that the exchange of its gradients takes alone, timed afterwards on tensors of the same sizes.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks.figures import about, arguments, figure, ratios
from benchmarks.processes import Started

PROGRAM = """
import json, statistics, sys, time
import torch
from benchmarks.step_overhead_variants import make_task
import trainwright as tw
from trainwright.distributed import SOLO, Launch, joined
import os

steps = int(sys.argv[1])
task = make_task("gpt", steps)
times = []

class Clock:
    def observe(self, result, state):
        times.append(result.step_s - result.wait_s)

with joined(Launch.read(os.environ), 60.0) as world:
    model = task.make_model()
    tw.fit(model, task.make_data(), task.loss, until=f"{steps}steps", lr=1e-3, batch=task.batch_size, precision="fp32",
           observers=[Clock()], quiet=True, settings={"log.doctor": False})
    grads = [torch.zeros_like(p) for p in model.parameters()]
    taken = []
    for _ in range(20):
        begin_s = time.perf_counter()
        world.sum_(grads)
        taken.append(time.perf_counter() - begin_s)
    if world.rank == 0:
        print(json.dumps({"step_s": statistics.median(times[len(times) // 4:]), "sum_s": statistics.median(taken)}))
"""


def measured(ranks: int, steps: int, quick: bool) -> dict[str, float]:
    """Return the figures that the first of ``ranks`` processes prints."""
    with socket.socket() as free, tempfile.TemporaryDirectory(prefix="scaling-") as folder:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        path = os.pathsep.join([str(Path.cwd()), *filter(None, [os.environ.get("PYTHONPATH")])])
        shared = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "WORLD_SIZE": str(ranks)}
        shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        started = [
            Started(
                ["-W", "ignore", "-c", PROGRAM, str(steps)],
                cwd=Path(folder),
                env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                forks=quick,
            )
            for rank in range(ranks)
        ]
        printed = [each.output() for each in started]
    seen: dict[str, float] = json.loads(printed[0].splitlines()[-1])
    return seen


def main() -> None:
    options = arguments(__doc__, rounds=(3.0, 1.0), ranks=(2.0, 2.0), steps=(120.0, 12.0))
    ranks, steps = int(options.ranks), int(options.steps)
    about("scaling")
    alone, spread = [], []
    for number in range(int(options.rounds)):
        for count in (1, ranks) if number % 2 == 0 else (ranks, 1):
            (alone if count == 1 else spread).append(measured(count, steps, options.quick))
    gained = ratios([each["step_s"] for each in alone], [each["step_s"] for each in spread])
    against = f"one process, {os.cpu_count()} cores"
    figure("scaling", "one_step", [each["step_s"] for each in alone], unit="s", against="absolute")
    figure("scaling", f"speed_up_{ranks}", gained, unit="ratio", against=against)
    figure("scaling", f"efficiency_{ranks}", [each / ranks for each in gained], unit="ratio", against=against)
    shares = [each["sum_s"] / each["step_s"] for each in spread]
    figure("scaling", f"communication_{ranks}", shares, unit="share", against="a step of the ranks")
    print(f"medians: {statistics.median(gained):.2f} times as fast on {ranks} ranks", file=sys.stderr)


if __name__ == "__main__":
    main()
