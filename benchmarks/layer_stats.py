"""What statistics by layer cost: the time of a run of ``tw.fit`` with them against the same without, interleaved.

    python -m benchmarks.layer_stats [--quick]

A GPT (4 blocks of 128, 12 x 64 tokens) and an MLP whose step takes about half a millisecond; both at the defaults, in
which the statistics are on. ``*_records`` is how many of them there were in a run. Ratios are medians over pairs of
runs, of the time between the tenth step and the last.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import trainwright as tw
from benchmarks.figures import about, arguments, figure, interleaved, ratios
from trainwright.models.gpt import gpt as gpt_model
from trainwright.runlog.reader import read
from trainwright.runlog.records import Layers

FIRST = 10
Task = tuple[nn.Module, Dataset[tuple[Tensor, ...]], Callable[..., Tensor], int]


def gpt() -> Task:
    """nanoGPT's CPU size."""
    ids = torch.randint(65, (960, 65))
    data = TensorDataset(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
    model = gpt_model(vocab_size=65, block_size=64, layers=4, heads=4, d_model=128)
    return model, data, lambda output, target: F.cross_entropy(output.flatten(0, 1), target.flatten()), 12


def mlp() -> Task:
    """The half-millisecond step."""
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    return model, TensorDataset(torch.randn(6400, 64), torch.randint(10, (6400,))), nn.CrossEntropyLoss(), 64


def seconds(make: Callable[[], Task], steps: int, counts: list[float], layers: bool) -> float:
    """The time of the steps after the first few; notes how many records there are."""
    torch.manual_seed(0)
    model, data, loss, batch = make()
    times: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        settings = {"folder": folder, "log.layers": layers, "checkpoint.every": None, "precision": "fp32"}
        observers = [lambda result, state: times.append(time.perf_counter())]
        done = tw.fit(model, data, loss, steps=steps, batch=batch, quiet=True, settings=settings, observers=observers)
        if layers:
            counts.append(sum(isinstance(each, Layers) for each in read(Path(done.run) / "log.jsonl").records))
    return times[-1] - times[FIRST - 1]


def main() -> None:
    """Two JSON lines for each model."""
    options = arguments(__doc__, rounds=(11, 2), mlp_steps=(4000, 100), gpt_steps=(150, 20))
    about("layer_stats")
    torch.set_num_threads(options.threads)
    for name, make, steps in (("gpt", gpt, options.gpt_steps), ("mlp", mlp, options.mlp_steps)):
        counts: list[float] = []
        run = partial(seconds, make, steps, counts)
        seen = interleaved({"without": partial(run, False), "with": partial(run, True)}, options.rounds)
        figure("layer_stats", name, ratios(seen["with"], seen["without"]), unit="ratio", against="log.layers: false")
        figure("layer_stats", f"{name}_records", counts, unit="records", against=f"{steps} steps")


if __name__ == "__main__":
    main()
