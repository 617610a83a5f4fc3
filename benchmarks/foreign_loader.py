"""The cost of a user's loader in ``tw.fit``, compared with a plain loop over the same loader.

    python -m benchmarks.foreign_loader [--rounds 5] [--steps 400] [--only PATTERN] [--quick] [--threads 1]

Both loops of a round train the same MLP (64-512-512-10, batches of 64, 1 to 2 ms per step) on the same kind of loader,
one after the other; the next round begins with the other loop. Both have AdamW, clipping, warm-up and cosine decay, as
the plain loop of ``step_overhead``. ``tw.fit`` has its defaults otherwise, including doctor and log. 400 steps take
half a second; ``step_overhead`` has 2000. The figures of a loader:

``LOADER_wall``  mean time of a step after the first 64, as a ratio to the plain loop
``LOADER_cpu``   the same in CPU time of the training thread, which other load affects less
``LOADER_median``  the same for the wall time of the median step, which leaves out saves and examinations
``LOADER_read``  CPU time of the training thread to read a batch, minus that of iterating over the loader, in us
"""

from __future__ import annotations

import fnmatch
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import count, islice, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler

import trainwright as tw
from benchmarks.figures import about, arguments, figure, ratios
from benchmarks.step_overhead_variants import CLIP_AT, FIRST, LR, WARMUP, Task, adamw, factor
from trainwright.data.loading import Loading, StepBatches
from trainwright.data.unwrap import unwrap

Loader = Callable[[Task], Any]


class Wide(Task):
    """An MLP whose step takes 1 to 2 ms."""

    def make_model(self) -> nn.Module:
        widths = (64, 512, 512)
        hidden = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())]
        return nn.Sequential(*hidden, nn.Linear(512, 10))

    def make_data(self) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(0)
        count = 64 * self.batch_size
        return torch.randn(count, 64, generator=draw), torch.randint(10, (count,), generator=draw)


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """Yields batches in a worker. A pass has 512 batches, so that it takes longer than the start of the workers."""

    def __init__(self, task: Task) -> None:
        self.task = task

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return islice(self.task.batches(), 512)


class Stateful:
    """A loader with ``state_dict``, whose state is the number of yielded batches."""

    def __init__(self, task: Task) -> None:
        self.task, self.given = task, 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for given, batch in enumerate(islice(self.task.batches(), 64), 1):
            self.given = given
            yield batch

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None: ...


def rows(task: Task) -> TensorDataset:
    return TensorDataset(*task.make_data())


def weighted(task: Task) -> DataLoader[Any]:
    data = rows(task)
    return DataLoader(data, task.batch_size, sampler=WeightedRandomSampler([1.0] * len(data), len(data)))


def in_batches(task: Task) -> DataLoader[Any]:
    data = rows(task)
    return DataLoader(data, batch_sampler=torch.arange(len(data)).reshape(-1, task.batch_size).tolist())


LOADERS: dict[str, Loader] = {
    "weighted_sampler": weighted,
    "batch_sampler": in_batches,
    "ready_batches": lambda task: DataLoader(list(islice(task.batches(), 64)), batch_size=None),  # type: ignore[arg-type]
    "iterable": lambda task: lambda: islice(task.batches(), 64),
    "stateful": Stateful,
    "one_worker": lambda task: DataLoader(Stream(task), batch_size=None, num_workers=1),
    "two_workers": lambda task: DataLoader(Stream(task), batch_size=None, num_workers=2),
}


class Clocks:
    """Wall and CPU time of the training thread after each step."""

    def __init__(self) -> None:
        self.times_s: list[tuple[float, float]] = []

    def observe(self, result: object, state: object) -> None:
        self.times_s.append((time.perf_counter(), time.thread_time()))

    def step_s(self, first: int) -> tuple[float, float, float]:
        """Returns mean wall time, mean CPU time and median wall time of a step after the first ``first`` steps."""
        (wall, cpu), (last_wall, last_cpu) = self.times_s[first], self.times_s[-1]
        number = len(self.times_s) - 1 - first
        each_s = [after - before for (before, _), (after, _) in pairwise(self.times_s[first:])]
        return (last_wall - wall) / number, (last_cpu - cpu) / number, statistics.median(each_s)


Way = Callable[[Task, Any, Clocks], None]


def by_hand(task: Task, loader: Any, clocks: Clocks) -> None:
    model = task.make_model()
    optimizer = adamw(model, {"fused": True})
    scheduler = LambdaLR(optimizer, factor(task.steps))
    passes = (loader() if callable(loader) else loader for _ in count())
    for x, y in islice((batch for each in passes for batch in each), task.steps):
        optimizer.zero_grad()
        task.loss(model(x), y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_AT)
        optimizer.step()
        scheduler.step()
        clocks.observe(None, None)


def by_fit(task: Task, loader: Any, clocks: Clocks) -> None:
    tw.fit(
        task.make_model(),
        loader,
        task.loss,
        until=f"{task.steps}steps",
        lr=LR,
        schedule="cosine",
        warmup=f"{min(WARMUP, task.steps // 2)}steps",
        clip=CLIP_AT,
        settings={"optimizer.weight_decay": 0.0},
        observers=[clocks.observe],
        quiet=True,
    )


def read_us(batches: Iterator[object], number: int) -> float:
    """Returns the CPU time of the thread to read a batch, in us."""
    next(batches)
    begin_s = time.thread_time()
    for _ in islice(batches, number):
        pass
    return 1e6 * (time.thread_time() - begin_s) / number


def extra_us(task: Task, make: Loader, number: int) -> float:
    """Return the CPU time that the engine adds to the reading of a batch, in us."""
    loader = make(task)
    passes = (loader() if callable(loader) else loader for _ in count())
    plain_us = read_us((batch for each in passes for batch in each), number)
    found = unwrap(make(task))
    size = found.batch_size or task.batch_size
    loading = Loading(size, size, order=found.order, collate=found.collate)
    return read_us(iter(StepBatches(found.dataset, loading)), number) - plain_us


def main() -> None:
    options = arguments(__doc__, rounds=(5, 1), steps=(400, 8), only=("*", "*"))
    torch.set_num_threads(options.threads)
    about("foreign_loader")
    task = Wide("wide", 64, options.steps)
    with tempfile.TemporaryDirectory(prefix="foreign-") as folder:
        os.chdir(folder)
        for name, make in LOADERS.items():
            if not fnmatch.fnmatch(name, options.only):
                continue
            seen: dict[Way, list[tuple[float, float, float]]] = {by_hand: [], by_fit: []}
            for number in range(options.rounds):
                for run in (by_hand, by_fit)[:: 1 if number % 2 else -1]:
                    clocks = Clocks()
                    run(task, make(task), clocks)
                    seen[run].append(clocks.step_s(min(FIRST, options.steps // 2)))
            extra = [extra_us(task, make, options.steps) for _ in range(options.rounds)]
            figure("foreign_loader", f"{name}_read", extra, unit="us", against="iterating over the loader")
            for at, kind in enumerate(("wall", "cpu", "median")):
                ours, theirs = ([each[at] for each in seen[run]] for run in (by_fit, by_hand))
                values = ratios(ours, theirs)
                figure("foreign_loader", f"{name}_{kind}", values, unit="ratio", against="the same loader by hand")
        os.chdir("/")


if __name__ == "__main__":
    main()
