"""Compares what a step uses with what its loader has returned: whether a cast has cost digits."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from trainwright.doctor.facts.precision import BatchDigitsFacts
from trainwright.recorder.probes import Probe, WatchedObjects
from trainwright.recorder.program import Call, Operation, RecordedStep, constants_of, tensors_of
from trainwright.runlog.json_values import Facts, strict

COMPARED = 4
"""The first steps, whose batches are compared."""
MAX_ELEMENTS, MAX_TENSORS = 1 << 20, 16
FOLLOWS = 0.5
"""Two tensors of a whole batch with a higher correlation are not so by chance."""
MASK_VALUES = 2
"""Different values of a mask, a sign, a comparison."""
NARROW = (torch.int64, torch.uint8, torch.float16, torch.bfloat16)
"""The coarsest first: what is whole in int64 may well be kept by the others."""


class BatchDigits(Probe):
    """Keeps the batches of the first steps until these are over."""

    name = BatchDigitsFacts.experiment

    def __init__(self, watched: WatchedObjects) -> None:
        self._embeds = any(isinstance(m, nn.Embedding) for root in watched.subject.roots for m in root.modules())
        self._fetched: list[Tensor] = []
        self._facts = BatchDigitsFacts(compared=0)
        self._is_new = False

    def on_batch(self, iterator: object, ids: object, batch: object, wait_s: float) -> None:
        if self._facts.compared < COMPARED:
            self._fetched = [*self._fetched, *tensors_of(batch)][-MAX_TENSORS:]

    def on_closed(self, step: RecordedStep) -> None:
        fetched, self._fetched = self._fetched, []
        if not fetched or self._facts.compared >= COMPARED:
            return
        found: list[BatchDigitsFacts] = []
        count, since = self._facts.compared + 1, self._facts.since or step.step
        for each in step.program:
            if not isinstance(each, Call | Operation):
                continue
            place = "model" if isinstance(each, Call) else "loss"
            for used in [c.tensor for c in constants_of((each.args, each.kwargs)) if c.is_unchanged]:
                is_table = self._embeds and place == "model" and used.dtype == torch.int64
                if is_table or any(_is_same(used, one) for one in fetched):
                    continue
                for one in [t for t in fetched if t.is_floating_point()]:
                    if (lost := what_is_lost(one, used)) is not None:
                        dtype, much, values = lost
                        found.append(
                            BatchDigitsFacts(
                                compared=count, since=since, place=place, dtype=dtype, lost=much, values=values
                            )
                        )
        worst = max(found, key=lambda each: each.lost, default=None)
        self._facts = worst or BatchDigitsFacts(**{**vars(self._facts), "compared": count})
        self._is_new = True

    def values(self) -> Facts | None:
        is_new, self._is_new = self._is_new, False
        return dict(strict(vars(self._facts))) if is_new else None


def _is_same(used: Tensor, fetched: Tensor) -> bool:
    return used.shape == fetched.shape and torch.equal(used.detach().cpu().double(), fetched.detach().cpu().double())


@torch.no_grad()
def what_is_lost(fetched: Tensor, used: Tensor) -> tuple[str, float, int] | None:
    """The dtype that ``used`` was cast to, what it lost in standard deviations, and its different values."""
    if used.shape != fetched.shape or not 1 < used.numel() <= MAX_ELEMENTS or used.is_complex():
        return None
    now, then = used.detach().to("cpu", torch.float64), fetched.detach().to("cpu", torch.float64)
    values = int(torch.unique(now).numel())
    if torch.equal(now, then) or not bool(torch.isfinite(then).all()):
        return None
    for dtype in NARROW:
        if torch.equal(fetched.detach().cpu().to(dtype).to(torch.float64), now):
            spread = float(then.std())
            lost = float((now - then).nan_to_num(posinf=spread).square().mean().sqrt()) / max(spread, 1e-300)
            is_mask = values <= MASK_VALUES and not dtype.is_floating_point
            return None if is_mask else (str(dtype).removeprefix("torch."), lost, values)
    if values <= MASK_VALUES or not bool((now == now.round()).all()) or bool((then == then.round()).all()):
        return None
    follows = float(torch.corrcoef(torch.stack([then.flatten(), now.flatten()]))[0, 1])
    return ("int64", math.sqrt(max(0.0, 1 - follows**2)), values) if follows > FOLLOWS else None
