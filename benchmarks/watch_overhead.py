"""What ``tw.watch`` costs: time of a step with it against the same plain PyTorch loop without it, interleaved.

    python -m benchmarks.watch_overhead [--quick] [--device cuda]

Two loops: an MLP of about half a millisecond and a GPT (4 blocks of 128, 12 x 64 tokens). Ratios are medians over
pairs of runs in one process, after the first 64 steps: in these the watch looks closely more often, once in a run, and
``first_64_steps`` is what they take with it. ``memory`` is what the recorder held of its budget, ``collections`` how
often Python's garbage collector went through all objects in the measured steps: each time takes 0.1 s or more.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trainwright as tw
from benchmarks.figures import about, arguments, figure, interleaved, ratios
from trainwright.models.gpt import gpt as gpt_model


def mlp() -> tuple[nn.Module, Callable[[nn.Module, Any], Tensor], Iterator[Any]]:
    """The half-millisecond step."""
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    x, y = torch.randn(64, 64), torch.randint(10, (64,))
    return model, lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), _forever((x, y))


def gpt() -> tuple[nn.Module, Callable[[nn.Module, Any], Tensor], Iterator[Any]]:
    """nanoGPT's CPU size."""
    model = gpt_model(vocab_size=65, block_size=64, layers=4, heads=4, d_model=128)
    ids = torch.randint(65, (12, 65))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        logits = model(batch[0])
        return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())

    return model, loss, _forever((ids[:, :-1].contiguous(), ids[:, 1:].contiguous()))


def _forever(batch: Any) -> Iterator[Any]:
    while True:
        yield tuple(each.clone() for each in batch)


class Loop:
    """A plain loop."""

    def __init__(self, make: Callable[[], Any], device: str) -> None:
        torch.manual_seed(0)
        self.model, self.loss, self.batches = make()
        self.model.to(device)
        self.device = device
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-4)

    def steps(self, n: int) -> float:
        """Seconds for n steps."""
        begin_s = time.perf_counter()
        for _ in range(n):
            batch = tuple(each.to(self.device) for each in next(self.batches))
            self.optimizer.zero_grad()
            self.loss(self.model, batch).backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
        if self.device != "cpu":
            torch.cuda.synchronize()
        return time.perf_counter() - begin_s


@dataclass
class Watched:
    """Seconds of ``steps`` steps after the first 64; notes what these cost and what the recorder holds."""

    make: Callable[[], Any]
    steps: int
    memory_bytes: int
    device: str
    first_s: list[float] = field(default_factory=list)
    held: list[float] = field(default_factory=list)
    collections: list[float] = field(default_factory=list)

    def __call__(self) -> float:
        loop = Loop(self.make, self.device)
        with tw.watch(loop.model, loop.optimizer, out=None, quiet=True, memory_bytes=self.memory_bytes) as watch:
            self.first_s.append(loop.steps(64))
            before = _full_collections()
            seconds = loop.steps(self.steps)
            self.collections.append(_full_collections() - before)
            self.held.append(watch.held_bytes / self.memory_bytes)
        return seconds


def _full_collections() -> int:
    return gc.get_stats()[2]["collections"]


def plain(make: Callable[[], Any], steps: int, device: str) -> float:
    """The same without a watch."""
    loop = Loop(make, device)
    loop.steps(64)
    return loop.steps(steps)


def main() -> None:
    """Five JSON lines for each loop."""
    options = arguments(__doc__, rounds=(11, 2), mlp_steps=(1000, 50), gpt_steps=(64, 8), device=("cpu", "cpu"))
    about("watch_overhead")
    torch.set_num_threads(options.threads)
    for name, make, steps in (("mlp", mlp, options.mlp_steps), ("gpt", gpt, options.gpt_steps)):
        ours = Watched(make, steps, 2**26, options.device)
        seen = interleaved({"plain": partial(plain, make, steps, options.device), "watched": ours}, options.rounds)
        figure("watch_overhead", name, ratios(seen["watched"], seen["plain"]), unit="ratio", against="no watch")
        figure("watch_overhead", f"{name}_step", [1e3 * s / steps for s in seen["plain"]], unit="ms", against="")
        figure("watch_overhead", f"{name}_first_64_steps", ours.first_s, unit="s", against="")
        figure("watch_overhead", f"{name}_memory", ours.held, unit="share", against="the budget of 64 MiB")
        figure("watch_overhead", f"{name}_collections", ours.collections, unit="of all objects", against="")


if __name__ == "__main__":
    main()
