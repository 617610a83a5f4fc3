"""How many steps after its onset a fault is found: one small loop, faults of each family, three onsets.

    python -m benchmarks.law_delays [--onsets 1 20 100] [--steps 160] [--only PATTERN]

The doctor is asked after every step what it has found so far, so a delay is that of the look, and not that of the
record. What is asked for: nothing that is not finite reaches an update; a fault of gradient, update, function or loss
is found within 20 steps, one of the data within an epoch, which has 32 steps here. "end": at the end of the run. What
does no harm here must be found as an info: a factor of all gradients, which Adam divides out.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import trainwright as tw
from trainwright.runlog.records import Found

CLASSES, WIDTH, BATCH, ROWS = 4, 8, 16, 512
ALLOWED = {"precision": 0, "data": ROWS // BATCH}
"""Steps of delay that a family may have; all others 20."""
WARNED = ("critical", "warning")
HARMLESS = {"one half of the gradient": "law.update.gradients_are_those_made"}
"""This law is broken, and the updates are what they were: an info."""


class Net(nn.Module):
    """Two layers with a normalisation and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(WIDTH, 32), nn.BatchNorm1d(32)
        self.drop, self.head = nn.Dropout(0.1), nn.Linear(32, CLASSES)
        self.cut: Callable[[Tensor], Tensor] = lambda h: h

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.cut(self.drop(F.relu(self.norm(self.first(x))))))
        return out


@dataclass
class Loop:
    """What a fault may replace, from its onset on."""

    model: Net
    optimizer: torch.optim.Optimizer
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy
    batch: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = field(default=lambda x, y: (x, y))
    before_update: Callable[[], object] = lambda: None
    after_update: Callable[[], object] = lambda: None


Fault = Callable[[Loop], object]


def _cut(loop: Loop) -> None:
    loop.model.cut = lambda h: h.detach()


def _mean_of_rows(loop: Loop) -> None:
    loop.model.cut = lambda h: h - h.mean(0)


def _halved(loop: Loop) -> None:
    loop.before_update = lambda: [p.grad.mul_(0.5) for p in loop.model.parameters() if p.grad is not None]


def _negated(loop: Loop) -> None:
    loop.before_update = lambda: [p.grad.neg_() for p in loop.model.parameters() if p.grad is not None]


def _decays(loop: Loop) -> None:
    def shrink() -> None:
        with torch.no_grad():
            for p in loop.model.parameters():
                p.mul_(0.9)

    loop.after_update = shrink


def _one_batch(loop: Loop) -> None:
    first: list[tuple[Tensor, Tensor]] = []

    def same(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        first.append((x, y))
        return first[0]

    loop.batch = same


def _set(loop: Loop, **replaced: object) -> None:
    for name, value in replaced.items():
        setattr(loop, name, value)


def _rate(factor: float) -> Fault:
    def change(loop: Loop) -> None:
        for group in loop.optimizer.param_groups:
            group["lr"] *= factor

    return change


FAULTS: dict[str, tuple[str, Fault]] = {
    "an input that is not finite": ("precision", lambda loop: _set(loop, batch=lambda x, y: (x / 0, y))),
    "a layer that is cut off": ("gradient", _cut),
    "gradients changed by hand": ("update", _negated),
    "weights written to after the update": ("update", _decays),
    "outputs that depend on the batch": ("function", _mean_of_rows),
    "evaluation mode": ("program", lambda loop: loop.model.eval()),
    "one half of the gradient": ("update", _halved),
    "the sign of the loss": ("loss", lambda loop: _set(loop, loss=lambda out, y: -F.cross_entropy(out, y))),
    "a softmax before the loss": ("loss", lambda loop: _set(loop, loss=lambda o, y: F.cross_entropy(o.softmax(1), y))),
    "log_softmax over the rows": ("loss", lambda loop: _set(loop, loss=lambda o, y: F.nll_loss(o.log_softmax(0), y))),
    "rows that are cut off": ("loss", lambda loop: _set(loop, loss=lambda o, y: F.cross_entropy(o[::2], y[::2]))),
    "the same batch": ("data", _one_batch),
    "the same noise": ("vitals", lambda loop: _set(loop, after_update=lambda: torch.manual_seed(0))),
    "no rate": ("vitals", _rate(0.0)),
    "a rate ten thousand times too large": ("vitals", _rate(1e4)),
}
"""Each with the family of laws that it breaks."""


def delay_of(fault: Fault, onset: int, steps: int, code: str | None = None) -> tuple[int | None, list[str]]:
    """After how many steps something was found (None: never; ``steps``: at the end), and its codes.

    Something: a warning, or a finding with this ``code``.
    """

    def found_in(findings: Sequence[Found]) -> list[str]:
        return [each.code for each in findings if (each.severity in WARNED if code is None else each.code == code)]

    torch.manual_seed(0)
    x = torch.randn(ROWS, WIDTH)
    data = TensorDataset(x, (x @ torch.randn(WIDTH, CLASSES)).argmax(1))
    model = Net()
    loop = Loop(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    loader, step, found = DataLoader(data, BATCH, shuffle=True), 0, None
    with tw.watch(model, loop.optimizer, loader=loader, out=None, quiet=True) as watch:
        while step < steps:
            for x, y in loader:
                step += 1
                if step == onset:
                    fault(loop)
                x, y = loop.batch(x, y)
                loop.optimizer.zero_grad()
                loss = loop.loss(model(x), y)
                loss.backward()
                loop.before_update()
                loop.optimizer.step()
                loop.after_update()
                if found is None and found_in(watch.findings()):
                    found = step - onset
    codes = found_in(watch.findings())
    return (steps if codes else None) if found is None else found, codes


def main() -> None:
    """Prints a line for each fault with its delays, and the share within what is allowed for each onset."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--onsets", type=int, nargs="+", default=[1, 20, 100])
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--only", default="*")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    print(f"{'fault':38} {'family':10} {'allowed':>7}" + "".join(f"  onset {onset:4}" for onset in options.onsets))
    delays: dict[int, list[tuple[float, bool]]] = {onset: [] for onset in options.onsets}
    for name, (family, fault) in FAULTS.items():
        if not fnmatch.fnmatch(name, options.only):
            continue
        allowed, cells, codes = ALLOWED.get(family, 20), [], []
        for onset in options.onsets:
            delay, codes = delay_of(fault, onset, options.steps, HARMLESS.get(name))
            delays[onset].append((float("inf") if delay is None else delay, delay is not None and delay <= allowed))
            cells.append("never" if delay is None else "end" if delay == options.steps else str(delay))
        print(f"{name:38} {family:10} {allowed:7}" + "".join(f"  {c:>10}" for c in cells) + f"  {', '.join(codes[:2])}")
    for onset, each in delays.items():
        median, within = statistics.median(delay for delay, _ in each), sum(good for _, good in each)
        print(f"onset {onset}: {within} of {len(each)} within what is allowed; median {median:g} steps")


if __name__ == "__main__":
    main()
