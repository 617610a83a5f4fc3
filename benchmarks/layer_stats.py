"""The cost of layer statistics in ``tw.fit``, measured within one run and relative to a run without them.

    python -m benchmarks.layer_stats [--quick]

A GPT (4 blocks of width 128, 12 x 64 tokens) and an MLP whose step takes about 0.5 ms train with the defaults, which
include the statistics, but without the doctor, whose examinations take many times as long. The first ten steps do not
count.

*_share    the extra time of the two steps that a record affects, relative to the median of their 16 neighbours, summed
           over all records, as a fraction of the time of the run
*_each     the extra time of one record in steps, median over the records of a run
*_ratio    time of a run with statistics / time of a run without, for alternating pairs of runs
*_records  number of records in a run

gpt_watched_* are the figures of the same GPT in a plain loop under ``tw.watch`` without replays.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import trainwright as tw
from benchmarks.figures import about, arguments, figure, interleaved, ratios
from trainwright.models.gpt import gpt as gpt_model
from trainwright.runs.reader import read
from trainwright.runs.records import Layers, Record

FIRST = 10
NEAR = 8
"""Number of neighbouring steps on each side of a record."""
Task = tuple[nn.Module, Dataset[tuple[Tensor, ...]], Callable[..., Tensor], int]


def gpt() -> Task:
    """A GPT of nanoGPT's size for CPUs."""
    ids = torch.randint(65, (960, 65))
    data = TensorDataset(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
    model = gpt_model(vocab_size=65, block_size=64, layers=4, heads=4, d_model=128)
    return model, data, lambda output, target: F.cross_entropy(output.flatten(0, 1), target.flatten()), 12


def mlp() -> Task:
    """An MLP whose step takes 0.5 ms."""
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    return model, TensorDataset(torch.randn(6400, 64), torch.randint(10, (6400,))), nn.CrossEntropyLoss(), 64


def extras_s(steps_s: Sequence[float], recorded: Sequence[int]) -> list[float]:
    """Return the extra time of each record. ``steps_s[n]`` is from the end of step n to the end of step n + 1.

    A record affects two of these times: hooks are set after the previous step, and statistics are computed after the
    recorded step.
    """
    touched = {index for step in recorded for index in (step - 1, step)}
    found = []
    for step in recorded:
        near = [n for n in range(max(FIRST, step - 1 - NEAR), step + 1 + NEAR) if n not in touched and n < len(steps_s)]
        if step > FIRST and step < len(steps_s) and near:
            usual_s = statistics.median(steps_s[n] for n in near)
            found.append(steps_s[step - 1] + steps_s[step] - 2 * usual_s)
    return found


def seconds(make: Callable[[], Task], steps: int, seen: dict[str, list[float]], layers: bool) -> float:
    """Returns the time of the steps after the first ten. Adds the figures within the run to ``seen``."""
    torch.manual_seed(0)
    model, data, loss, batch = make()
    ends = [time.perf_counter()]
    with tempfile.TemporaryDirectory() as folder:
        settings = {"folder": folder, "log.layers": layers, "log.doctor": False, "precision": "fp32"}
        observers = [lambda result, state: ends.append(time.perf_counter())]
        done = tw.fit(
            model,
            data,
            loss,
            steps=steps,
            batch=batch,
            quiet=True,
            settings={**settings, "checkpoint.every": None},
            observers=observers,
        )
        log = read(Path(done.run) / "log.jsonl").records if layers else []
    return seen_inside(ends, log, seen)


def watched_seconds(make: Callable[[], Task], steps: int, seen: dict[str, list[float]]) -> float:
    """Like ``seconds``, for a watched plain loop."""
    torch.manual_seed(0)
    model, data, loss, batch = make()
    optimizer, loader = torch.optim.AdamW(model.parameters()), DataLoader(data, batch, shuffle=True)
    batches = itertools.chain.from_iterable(loader for _ in itertools.count())
    ends = [time.perf_counter()]
    with tempfile.TemporaryDirectory() as folder:
        with tw.watch(model, optimizer, out=Path(folder) / "run", examine="listen", quiet=True):
            for x, y in itertools.islice(batches, steps):
                optimizer.zero_grad()
                loss(model(x), y).backward()
                optimizer.step()
                ends.append(time.perf_counter())
        log = read(Path(folder) / "run" / "log.jsonl").records
    return seen_inside(ends, log, seen)


def seen_inside(ends: Sequence[float], log: Iterable[Record], seen: dict[str, list[float]]) -> float:
    """Adds the extra time of a run's records to ``seen``. Returns the time of the steps after the first ten."""
    steps_s = [after - before for before, after in itertools.pairwise(ends)]
    total_s = ends[-1] - ends[FIRST]
    recorded = [each.step for each in log if isinstance(each, Layers)]
    if extras := extras_s(steps_s, recorded):
        seen["share"].append(sum(extras) / total_s)
        seen["each"].append(statistics.median(extras) / statistics.median(steps_s[FIRST:]))
        seen["records"].append(len(recorded))
    return total_s


def show(name: str, steps: int, seen: Mapping[str, list[float]]) -> None:
    for case, unit, against in (
        ("share", "share", "the time of the run"),
        ("each", "steps", "one record"),
        ("records", "records", f"{steps} steps"),
    ):
        figure("layer_stats", f"{name}_{case}", seen[case], unit=unit, against=against)


def main() -> None:
    """Prints four JSON lines for each model and three for the watched loop."""
    options = arguments(__doc__, rounds=(11, 2), mlp_steps=(4000, 100), gpt_steps=(400, 60))
    about("layer_stats")
    torch.set_num_threads(options.threads)
    for name, make, steps in (("gpt", gpt, options.gpt_steps), ("mlp", mlp, options.mlp_steps)):
        seen: dict[str, list[float]] = defaultdict(list)
        run = partial(seconds, make, steps, seen)
        times_s = interleaved({"without": partial(run, False), "with": partial(run, True)}, options.rounds)
        show(name, steps, seen)
        ratio = ratios(times_s["with"], times_s["without"])
        figure("layer_stats", f"{name}_ratio", ratio, unit="ratio", against="log.layers: false")
    watched: dict[str, list[float]] = defaultdict(list)
    for _ in range(options.rounds):
        watched_seconds(gpt, options.gpt_steps, watched)
    show("gpt_watched", options.gpt_steps, watched)


if __name__ == "__main__":
    main()
