"""The types of the arguments of ``tw.fit``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias, TypedDict

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

if TYPE_CHECKING:
    from trainwright.checkpoint.train_state import TrainState
    from trainwright.engine.manual_step import OwnStep
    from trainwright.engine.metrics import Metric
    from trainwright.engine.observer import Observer, Stop
    from trainwright.engine.step import StepResult

ModelLike: TypeAlias = nn.Module | str | Path | Callable[[], object]
"""A module, the folder or the hub name of a pretrained model, or a function that returns the arguments of ``tw.fit``,
passed as such or as ``"module:function"``."""
OptimizerLike: TypeAlias = Optimizer | Sequence[Optimizer] | Callable[..., Optimizer | Sequence[Optimizer]]
ScheduleLike: TypeAlias = (
    LRScheduler | Sequence[LRScheduler] | Callable[..., LRScheduler | Sequence[LRScheduler] | float]
)
Named: TypeAlias = str | Mapping[str, object]
"""``"accuracy"``, or a mapping as in a recipe: ``{"use": "top_k", "args": {"k": 3}}``."""
MetricsLike: TypeAlias = "str | Sequence[Named] | Mapping[str, Named | Metric | Callable[..., object]]"
"""One name, several of ``Named``, or a mapping from names to ``Named``, metric objects or functions."""

ObserverLike: TypeAlias = "Observer | Callable[[StepResult, TrainState], Stop | None] | str | Mapping[str, object]"


class RunOptions(TypedDict, total=False):
    """Arguments of ``tw.fit`` that define the training, other than model, data, loss and steps."""

    advance: OwnStep | None
    val: object
    until: str | None
    epochs: float | None
    lr: float | None
    batch: int | None
    accumulation: int | None
    optimizer: str | OptimizerLike | None
    schedule: str | ScheduleLike | None
    warmup: str | None
    clip: float | None
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16", "fp8", "mxfp8"] | None
    device: str | torch.device | None
    seed: int | None
    preset: Literal["recommended"] | None
    name: str | None
    settings: Mapping[str, object] | None
    metrics: MetricsLike | None
    observers: ObserverLike | Sequence[ObserverLike]
    restore_best: bool
    retain_grad: Sequence[str]


class FitOptions(RunOptions, total=False):
    """RunOptions with ``steps``."""

    steps: int | None
