"""Memory growth over half an hour of training, with ``tw.fit`` at its defaults and in a plain loop under ``tw.watch``.

    python -m benchmarks.soak [--minutes 30] [--only fit,watch] [--threads 2] [--quick]

Each is a process that trains a small network with dropout and BatchNorm at full speed. Its memory, threads and open
files are sampled every few seconds. The first fifth of the time is left out, because buffers fill. ``rss`` is the
growth of resident memory from the second fifth to the last one, relative to the former; ``threads`` and ``files`` are
the growth of their numbers. ``peak`` is the largest resident memory, ``log`` the size of the log per 1,000 steps, and
``steps`` the number of steps.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import psutil

from benchmarks.figures import about, arguments, figure

NETWORK = """
import itertools
import sys
import time
import torch
from torch import nn
import trainwright as tw

minutes = float(sys.argv[1])
model = nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))
draw = torch.Generator().manual_seed(0)
x = torch.randn(4096, 20, generator=draw)
y = (x[:, :10] + 0.5 * torch.randn(4096, 10, generator=draw)).argmax(1)
"""
PROGRAMS = {
    "fit": NETWORK
    + """
result = tw.fit(model, (x, y), nn.functional.cross_entropy, val=(x[:512], y[:512]), until=f"{120 * minutes}s",
                batch=64, quiet=True)
print(result.step)
""",
    "watch": NETWORK
    + """
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=64, shuffle=True)
steps, end_s = 0, time.monotonic() + 60 * minutes
with tw.watch(model, optimizer, quiet=True):
    for inputs, targets in itertools.chain.from_iterable(itertools.repeat(loader)):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        steps += 1
        if time.monotonic() > end_s:
            break
print(steps)
""",
}
GRACE_S = 300.0


@dataclass(frozen=True)
class Sample:
    """The memory, files and threads of the process and its children at one time."""

    rss_bytes: int
    threads: int
    files: int


def sampled(process: psutil.Process) -> Sample:
    family = [process, *process.children(recursive=True)]
    return Sample(
        sum(each.memory_info().rss for each in family),
        sum(each.num_threads() for each in family),
        sum(each.num_fds() for each in family),
    )


def soak(name: str, minutes: float) -> tuple[list[Sample], int, int]:
    """Runs one program, and sends SIGTERM to ``tw.fit`` at the end of the time.

    Returns the samples, the number of steps, and the size of the log in bytes.
    """
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        command = [sys.executable, "-c", PROGRAMS[name], str(minutes)]
        said = Path(folder) / "said.txt"
        with said.open("w") as out, subprocess.Popen(command, cwd=folder, stdout=out, stderr=sys.stderr) as child:
            seen, begin_s, pause_s = [], time.monotonic(), max(0.5, minutes * 60 / 200)
            process = psutil.Process(child.pid)
            while child.poll() is None:
                time.sleep(pause_s)
                try:
                    seen.append(sampled(process))
                except psutil.NoSuchProcess:
                    continue  # the process or one of its children has just ended
                if name == "fit" and time.monotonic() - begin_s > 60 * minutes:
                    child.terminate()  # the run saves a checkpoint and ends
                    child.wait(GRACE_S)
        if child.returncode != 0:
            raise SystemExit(f"{name} ended with {child.returncode}")
        logs = sum(path.stat().st_size for path in Path(folder).rglob("log*.jsonl"))
        return seen, int(said.read_text().split()[-1]), logs


def report(name: str, minutes: float) -> None:
    seen, steps, log_bytes = soak(name, minutes)
    fifth = max(1, len(seen) // 5)
    early, late = seen[fifth : 2 * fifth], seen[-fifth:]
    if not early or not late:
        raise SystemExit("too short: nothing was seen")
    before, after = (median(each.rss_bytes for each in part) for part in (early, late))
    whole = f"{minutes:g} minutes"

    def show(case: str, value: float, unit: str, against: str = whole) -> None:
        figure("soak", f"{name}_{case}", [value], unit=unit, against=against)

    show("steps", steps, "steps")
    show("rss", after / before - 1, "share", "its second fifth")
    show("peak", max(each.rss_bytes for each in seen) / 2**20, "MiB")
    show("threads", median(each.threads for each in late) - median(each.threads for each in early), "threads")
    show("files", median(each.files for each in late) - median(each.files for each in early), "files")
    show("log", log_bytes / max(steps, 1) * 1000 / 1024, "KiB per 1,000 steps")


def main() -> None:
    options = arguments(__doc__, minutes=(30.0, 0.05), only=(",".join(PROGRAMS), "watch"))
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    about("soak")
    for name in options.only.split(","):
        report(name, options.minutes)


if __name__ == "__main__":
    main()
