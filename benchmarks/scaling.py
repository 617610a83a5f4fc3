"""Several ranks compared with one process: ``tw.fit`` without the doctor, the same batch, one thread per process.

    python -m benchmarks.scaling [--rounds 3] [--ranks 2] [--link yes|idle] [--batch 192] [--quick]

A round trains a small GPT in one process and on the ranks, in alternating order. ``speed_up`` is the median step time
of one process divided by that of the ranks, and ``efficiency`` is the speed-up divided by the number of ranks.
``communication`` is the time to exchange gradients of the same sizes, measured afterwards, as a fraction of a step.

``--link yes`` measures only how much of the communication the backward pass hides. It runs in a network namespace whose
link (`tc`, token bucket) needs as much time for the gradients as the backward pass. Steps that sum gradients during the
pass alternate with steps that sum them after it. ``hidden`` is the median difference of two consecutive steps, divided
by the time of the sum alone. With ``--link idle`` each linear layer sleeps before its backward pass, in proportion to
its weights, as if a device computed. Neither the pass nor the link needs the processor then, so other programs on it
hardly change the figure.

The time of one bucket cannot be hidden, because the link is idle until the first bucket is complete. gloo also needs
CPU time on each rank: ``link_sum_cpu_s`` for all gradients at once, and ``link_extra_cpu_s`` more in a step that sends
them in buckets. Without a free core, the latter delays the pass and reduces ``hidden``. It depends on the number of
buckets, not on the batch: it is a fifth of a backward pass of 50 ms (``--batch 32``), and 8 % of one of 0.3 s
(``--batch 192``, the default with ``--link yes``).
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
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

THROUGH_LINK = """
import json, os, statistics, subprocess, sys, time
import torch
import trainwright as tw
from trainwright.distributed import Launch, joined
from trainwright.engine.losses import language_model
from trainwright.engine.overlap import OverlappedSum
from trainwright.models.gpt import gpt

steps, idle_s, batch = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
times, cpu, reads = ([], []), ([], []), [0]

def alternate(self):  # every rank reads it once in each step
    reads[0] += 1
    return reads[0] % 2 == 0

OverlappedSum.is_enabled = property(alternate, lambda self, value: None)

class Clock:
    before_s = 0.0

    def observe(self, result, state):
        times[reads[0] % 2 == 0].append(result.step_s - result.wait_s)
        now_s = time.process_time()
        cpu[reads[0] % 2 == 0].append(now_s - self.before_s)
        self.before_s = now_s

def median_s(act, count, clock=time.perf_counter):
    taken = []
    for _ in range(count):
        begin_s = clock()
        act()
        taken.append(clock() - begin_s)
    return statistics.median(taken)

with joined(Launch.read(os.environ), 300.0) as world:
    torch.manual_seed(0)
    model = gpt(vocab_size=256, block_size=64, layers=4, heads=4, d_model=128, tied=False)
    layers = [each for each in model.modules() if isinstance(each, torch.nn.Linear)] if idle_s else []
    for each in layers:
        pause_s = idle_s * each.weight.numel() / sum(layer.weight.numel() for layer in layers)
        each.register_full_backward_pre_hook(lambda *_, pause_s=pause_s: time.sleep(pause_s))
    ids = torch.randint(256, (8 * batch, 65))
    data = (ids[:, :-1], ids[:, 1:])
    half = tuple(each[: batch // world.size] for each in data)
    losses = [language_model(model, half) for _ in range(8)]
    world.least(0)
    backward_s = max(world.collect(median_s(lambda: getattr(losses.pop(), "total").backward(), 8)))
    grads = [p.grad for p in model.parameters()]
    num_bytes = 2 * sum(each.nbytes for each in grads)  # of both directions
    if world.rank == 0:
        rate = f"{int(8 * num_bytes / backward_s)}"
        subprocess.run(f"tc qdisc add dev lo root tbf rate {rate} burst 128kb latency 10s".split(), check=True)
    world.least(0)
    sum_s = median_s(lambda: world.sum_(grads), 8)
    tw.fit(model, data, language_model, until=f"{steps}steps", lr=1e-4, batch=batch, precision="fp32",
           observers=[Clock()], quiet=True, settings={"log.doctor": False, "checkpoint.every": None})
    sum_s = statistics.median([sum_s, median_s(lambda: world.sum_(grads), 8)])
    sum_cpu_s = median_s(lambda: world.sum_(grads), 8, time.process_time)
    if world.rank == 0:
        after_s, during_s = (statistics.median(each[2:]) for each in times)
        after_cpu_s, during_cpu_s = (statistics.median(each[2:]) for each in cpu)
        gain_s = statistics.median([after - during for after, during in list(zip(*times))[2:]])
        seen = {"backward_s": backward_s, "sum_s": sum_s, "after_s": after_s, "during_s": during_s, "gain_s": gain_s,
                "sum_cpu_s": sum_cpu_s, "extra_cpu_s": during_cpu_s - after_cpu_s}
        print(json.dumps(seen))
"""
INSIDE = "SCALING_IN_NAMESPACE"
IDLE_S = 0.3
"""Time that the layers sleep in a backward pass with ``--link idle``."""


def measured(
    ranks: int, steps: int, quick: bool, program: str = PROGRAM, idle_s: float = 0.0, batch: int = 8
) -> dict[str, float]:
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
                ["-W", "ignore", "-c", program, str(steps), str(idle_s), str(batch)],
                cwd=Path(folder),
                env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                forks=quick,
            )
            for rank in range(ranks)
        ]
        printed = [each.output() for each in started]
    seen: dict[str, float] = json.loads(printed[0].splitlines()[-1])
    return seen


def measure_link(ranks: int, steps: int, rounds: int, batch: int, *, is_idle: bool) -> None:
    """Print how much of the communication is hidden. Starts this program again in a network namespace."""
    if INSIDE not in os.environ:
        again = [sys.executable, "-m", "benchmarks.scaling", *sys.argv[1:]]
        words = ["unshare", "-Urn", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", *again]
        os.execvpe("unshare", words, {**os.environ, INSIDE: "1", "GLOO_SOCKET_IFNAME": "lo"})
    about("scaling")
    found = []
    for _ in range(rounds):
        found.append(measured(ranks, steps, False, THROUGH_LINK, IDLE_S if is_idle else 0.0, 8 if is_idle else batch))
        subprocess.run(["tc", "qdisc", "del", "dev", "lo", "root"], check=True)
    hidden = [each["gain_s"] / each["sum_s"] for each in found]
    against = "the sum of the gradients alone"
    figure("scaling", f"hidden_{ranks}{'_idle' if is_idle else ''}", hidden, unit="fraction", against=against)
    figure(
        "scaling",
        "link",
        [each["sum_s"] / each["backward_s"] for each in found],
        unit="ratio",
        against="a backward pass",
    )
    for name in ("backward_s", "sum_s", "after_s", "during_s", "sum_cpu_s", "extra_cpu_s"):
        figure("scaling", f"link_{name}", [each[name] for each in found], unit="s", against="absolute")


def main() -> None:
    options = arguments(
        __doc__, rounds=(3.0, 1.0), ranks=(2.0, 2.0), steps=(120.0, 12.0), link=("no", "no"), batch=(192.0, 32.0)
    )
    ranks, steps = int(options.ranks), int(options.steps)
    if options.link != "no":
        measure_link(ranks, steps, int(options.rounds), int(options.batch), is_idle=options.link == "idle")
        return
    about("scaling")
    alone: list[dict[str, float]] = []
    spread: list[dict[str, float]] = []
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
