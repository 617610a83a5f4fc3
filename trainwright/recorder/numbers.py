"""Reads losses and norms of a step as floats. From a GPU they are copied asynchronously and read some steps later."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from trainwright.recorder.program import RecordedStep
from trainwright.recorder.ranks import local_part
from trainwright.runs.json_values import Facts
from trainwright.runs.records import Watched

LATE = 2
"""Number of steps after which a GPU has usually computed losses and norms of a step, so that reading does not wait."""


def lateness(device: torch.device) -> int:
    """Returns the number of further steps after which the numbers of a step are read."""
    return LATE if device.type == "cuda" else 0


class Numbers(NamedTuple):
    """The numbers of one step. ``loss`` is NaN if unknown; ``clips`` are the norms that clipping computed.

    ``are_finite``: an unknown loss does not count as non-finite.
    """

    losses: tuple[float, ...]
    loss: float
    norm: float
    clips: tuple[float, ...]
    are_finite: bool

    @staticmethod
    def of(losses: tuple[float, ...], loss: float, norm: float, clips: tuple[float, ...] = ()) -> Numbers:
        """Makes Numbers. Tests here, once for all listeners, whether they are finite."""
        finite = math.isfinite(norm) and not math.isinf(loss) and all(map(math.isfinite, losses))
        return Numbers(losses, loss, norm, clips, finite)


def begin_reading(step: RecordedStep) -> Callable[[], Numbers]:
    """Starts to copy the numbers of a step to the host. Returns a function that waits for them."""
    losses = step.losses
    clips = [value["norm"] for kind, value in step.events if kind == "clip" and value["norm"] is not None]
    own = [] if step.loss is None else [step.loss]
    norm = [] if step.grad_norm is None else [step.grad_norm]
    read = late([*losses, *own, *norm, *clips])

    def numbers() -> Numbers:
        values = read()
        of_losses, at = tuple(values[: len(losses)]), len(losses)
        loss = values[at] if own else sum(of_losses) / len(of_losses) if of_losses else math.nan
        at += len(own)
        return Numbers.of(of_losses, loss, values[at] if norm else 0.0, tuple(values[at + len(norm) :]))

    return numbers


def late(values: Sequence[Tensor | float]) -> Callable[[], list[float]]:
    """Starts to copy 0-d tensors to the host. On the CPU they are read at once, because the loop may write to them."""
    known: list[float] = []
    for value in values:
        if isinstance(value, Tensor):
            if value.is_cuda:
                device = value.device
                break
            value = value.item() if type(value) is Tensor else float(local_part(value.detach()))
        known.append(value)
    else:
        return lambda: known
    with torch.no_grad():
        parts = [local_part(v).detach() if isinstance(v, Tensor) else torch.tensor(v, device="cpu") for v in values]
        if any(not v.is_cuda or v.shape or v.dtype != torch.float32 for v in parts):  # rare, and takes 10 us for each
            parts = [v.to(device, torch.float64).reshape(()) for v in parts]
        there = torch.stack(parts)
        here = torch.empty(there.shape, dtype=there.dtype, pin_memory=True, device="cpu")
        here.copy_(there, non_blocking=True)
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record(torch.cuda.current_stream(device))

    def read() -> list[float]:
        copied.synchronize()
        values: list[float] = here.tolist()
        return values

    return read


def as_record(step: RecordedStep, numbers: Numbers | None = None) -> Watched:
    """Returns the record of a step for the log. Without ``numbers`` they are read, which waits for a GPU."""
    numbers = numbers or begin_reading(step)()
    ids = [None if ids is None else len(ids) for ids in step.ids]
    values: Facts = {"losses": list(numbers.losses), "ids": ids, **step.values}
    if "carried" in values:
        values["carried"] = True
    if step.blind:
        values["blind"] = step.blind
    clips = iter(numbers.clips)
    return Watched(
        time_s=step.ended_s,
        step=step.step,
        loss=numbers.loss,
        grad_norm=numbers.norm,
        lr=step.lr,
        events=[
            (
                kind,
                value | {"norm": next(clips, value["norm"])} if kind == "clip" and value["norm"] is not None else value,
            )
            for kind, value in step.events
        ],
        values=values,
    )
