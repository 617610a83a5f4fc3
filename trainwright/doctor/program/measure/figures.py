"""The figures that a loop keeps in variables of its own: losses and shares of what is right, by their names."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from types import FrameType

import torch

from trainwright.doctor.program.facts import Figure, FiguresFacts
from trainwright.recorder.callers import calling_frame
from trainwright.recorder.probes import Probe, WatchSite
from trainwright.recorder.program import RecordedStep
from trainwright.runlog.json_values import Facts, strict

SHARE = re.compile(r"(^|_)(acc|accuracy|precision|recall|f1|auc|auroc|iou|dice|top[15])(_|$)")
LOSS = re.compile(r"(^|_)loss(es)?$")
OF_TRAINING = re.compile(r"(^|_)(train|training|running|total|sum|epoch|batch|step|avg|mean|ema|meters?)(_|$)")
"""Names of what is summed up on the way, and may be a part of a sum at any time."""
MAX_FIGURES = 32


class FiguresProbe(Probe):
    """Reads the local variables of the function that holds the loop, at looks."""

    name = FiguresFacts.experiment

    def __init__(self) -> None:
        self._frame: FrameType | None = None
        self._steps = 0
        self._seen: dict[str, Figure] = {}

    def begin(self, site: WatchSite) -> None:
        self._frame = calling_frame()

    def on_closed(self, step: RecordedStep) -> None:
        self._steps = step.step

    def end(self, error: BaseException | None) -> None:
        """The last figures; what the function holds is not kept alive."""
        self._read(is_last=True)
        self._frame = None

    def values(self) -> Facts | None:
        if not self._steps:
            return None
        self._read()
        return dict(strict(vars(FiguresFacts(tuple(self._seen.values())))))

    def _read(self, *, is_last: bool = False) -> None:
        for name, value in _figures(self._frame.f_locals) if self._frame is not None else ():
            if not math.isfinite(value) or (value == 0 and not is_last):
                continue  # not there yet, or about to be summed up
            known = self._seen.get(name)
            if known is None and len(self._seen) < MAX_FIGURES:
                self._seen[name] = Figure(name, _kind(name), value, value, value, self._steps)
            elif known is not None and known.last != value:
                low, high = min(known.low, value), max(known.high, value)
                self._seen[name] = Figure(name, known.kind, value, low, high, self._steps)


def _figures(variables: Mapping[str, object]) -> Iterator[tuple[str, float]]:
    """Variables with such a name, and such items of dictionaries and objects."""
    for name, value in list(variables.items()):
        inner = value if isinstance(value, dict) else vars(value) if name == "self" else {}
        for key, item in [(name, value), *((f"{name}_{key}", item) for key, item in list(inner.items())[:MAX_FIGURES])]:
            if (number := _number(item)) is not None and _kind(key):
                yield key, number


def _kind(name: str) -> str:
    """What a variable of that name holds: "share", "loss" (of an evaluation), or "" for anything else."""
    name = name.lower()
    if SHARE.search(name):
        return "share"
    is_own = name == "loss" or bool(OF_TRAINING.search(name))  # of the step, or summed up on the way
    return "loss" if LOSS.search(name) and not is_own else ""


def _number(value: object) -> float | None:
    if isinstance(value, float | int) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, torch.Tensor) and value.numel() == 1 and value.device.type == "cpu" and not value.is_complex():
        return float(value.detach())
    return None
