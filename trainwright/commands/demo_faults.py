"""``demo --break``: a plain PyTorch loop with a planted fault under ``tw.watch``, to show what the doctor reports."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from trainwright.errors import require_choice
from trainwright.plan.duration import Extent, Pace, extent
from trainwright.recipe import Duration
from trainwright.report.diagnosis import Report, diagnosis_of
from trainwright.runs.folder import RunFolder
from trainwright.watching.watch import watch

CONTEXT = 16
BATCH = 32
SAMPLES = 640
LENGTH = Extent(steps=60)


@dataclass(frozen=True)
class FaultyLoop:
    """A small network that predicts the next character, trained by a plain loop. ``what`` describes its fault.

    Each field from ``lr`` to ``step`` breaks one thing if it differs from its default.
    """

    what: str = "nothing is broken"
    lr: float = 3e-3
    poisoned: int | None = None
    fp16_gain: float = 1.0
    first_label: int = 0
    zero_grad: bool = True
    sign: float = 1.0
    softmax: bool = False
    head_only: bool = False
    step: bool = True
    length: Extent = LENGTH


FAULTS: dict[str, FaultyLoop] = {
    "none": FaultyLoop(),
    "lr": FaultyLoop("the learning rate is 3.0", lr=3.0),
    "nan": FaultyLoop("one input of sample 137 is NaN", poisoned=137),
    "fp16": FaultyLoop("the weights are so large that fp16 overflows, and there is no loss scaler", fp16_gain=1000.0),
    "labels": FaultyLoop("the labels count from 10", first_label=10),
    "zero-grad": FaultyLoop("optimizer.zero_grad() is missing", zero_grad=False, lr=0.1),
    "sign": FaultyLoop("the loss is maximised", sign=-1.0),
    "softmax": FaultyLoop("softmax is applied before cross-entropy", softmax=True),
    "params": FaultyLoop("the optimizer received the last layer only", head_only=True),
    "step": FaultyLoop("optimizer.step() is missing", step=False),
}


def show(fault: str, say: Callable[[str], None], *, budget: str | None = None) -> Report:
    """Train the loop with a fault of ``FAULTS`` and return the report. ``budget`` is a duration; None: 60 steps.

    Raises UsageError for an unknown fault or an invalid duration.
    """
    require_choice("the fault", fault, tuple(FAULTS))
    pace = Pace(BATCH, SAMPLES // BATCH, CONTEXT)
    length = LENGTH if budget is None else extent(Duration.parse(budget), pace)
    loop = replace(FAULTS[fault], length=length)
    how_long = f"{length.steps} steps" if length.steps else f"{length.seconds:g} s"
    say(f"planted: {loop.what}; {how_long} of a plain PyTorch loop under tw.watch")
    root = Path(tempfile.mkdtemp(prefix="trainwright-broken-"))
    threads = torch.get_num_threads()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        torch.set_num_threads(1)  # enough here; several threads would wait for each other on a busy machine
        try:
            run = _train(loop, root / fault)
        finally:
            torch.set_num_threads(threads)
    return diagnosis_of(run)


class _Windows(Dataset[tuple[Tensor, Tensor]]):
    """Samples of CONTEXT one-hot characters, shape (CONTEXT * V,), and the id of the next character."""

    def __init__(self, text: str, loop: FaultyLoop) -> None:
        self.symbols = sorted(set(text))
        ids = {symbol: number for number, symbol in enumerate(self.symbols)}
        self.ids = torch.tensor([ids[symbol] for symbol in text], device="cpu")
        self.loop = loop

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        piece = self.ids[index * 7 : index * 7 + CONTEXT + 1]
        x = F.one_hot(piece[:-1], len(self.symbols)).float().flatten()
        if index == self.loop.poisoned:
            x[3] = float("nan")
        return x, piece[-1] + self.loop.first_label


def _train(loop: FaultyLoop, out: Path) -> RunFolder:
    data = _Windows("".join(topics.values())[:8000], loop)
    vocab = len(data.symbols)
    model = nn.Sequential(
        nn.Linear(CONTEXT * vocab, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, vocab)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(loop.fp16_gain)
    parameters = list(model[-1].parameters()) if loop.head_only else list(model.parameters())
    kind = torch.optim.SGD if not loop.zero_grad else torch.optim.AdamW
    optimizer: torch.optim.Optimizer = kind(parameters, lr=loop.lr)
    loader = DataLoader(data, batch_size=BATCH, shuffle=True)
    taken, watching = 0, watch(model, optimizer, loader=loader, out=out, quiet=True)
    most, end_s = loop.length.steps or math.inf, time.perf_counter() + (loop.length.seconds or math.inf)
    with suppress(IndexError), watching:  # raised by labels that are out of range
        while taken < most and time.perf_counter() < end_s:
            for x, target in loader:
                if taken >= most or time.perf_counter() >= end_s:
                    break
                if loop.zero_grad:
                    optimizer.zero_grad()
                with torch.autocast("cpu", torch.float16, enabled=loop.fp16_gain != 1.0):
                    logits = model(x)
                    loss = F.cross_entropy(logits.softmax(1) if loop.softmax else logits, target)
                if loop.sign < 0:
                    loss = -loss
                loss.backward()  # type: ignore[no-untyped-call]
                if loop.step:
                    optimizer.step()
                taken += 1
    assert watching.folder is not None
    return watching.folder
