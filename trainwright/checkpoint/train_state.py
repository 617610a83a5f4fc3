"""TrainState: the state of a run after its n-th step, without derived values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainwright.checkpoint.average import NoAverage, WeightAverage
from trainwright.checkpoint.codec import StateDict
from trainwright.checkpoint.cursor import Cursor
from trainwright.checkpoint.ledger import SkipLedger
from trainwright.checkpoint.scaler import LossScaler, NoScaler
from trainwright.checkpoint.shards import holds_parts
from trainwright.checkpoint.spikes import SpikeDetector
from trainwright.distributed.group import SOLO, World


class Stateful(Protocol):
    """Has a state of tensors, numbers, strings and containers of them. The loaded state comes from a file."""

    def state_dict(self) -> StateDict: ...
    def load_state_dict(self, saved: StateDict, /) -> object: ...


@dataclass
class TrainState:
    """Everything that is needed to continue a run.

    The learning rate is a pure function of ``step`` and ``fraction`` and so is not state. Random number generators are
    process-wide; ``RngBag.capture()`` reads them when saving.

    Attributes:
        model: The model.
        optimizer: The optimizer.
        scaler: Loss scaler of fp16.
        ema: Average of the weights, if any.
        ledger: The steps whose update was skipped.
        data: Position in the data.
        spikes: Gradient norms by which a spike is detected.
        quarantine: Dataset positions of samples that are not trained on.
        loss: The loss if it is a module, which may have state.
        step: Number of completed optimizer steps. A skipped update counts: its batch was consumed.
        num_samples: Samples trained on.
        num_tokens: Tokens trained on.
        elapsed_s: Training time without evaluation and saving.
        fraction: Completed fraction of the run at the start of the last step (0..1).
        micro_limit: Maximum number of samples in a forward pass since memory ran out; None: unlimited.
        stateful: Further objects by name whose state belongs to the run: schedulers of torch, observers.
        stages: Ranks with the other stages of a pipeline-parallel model.
    """

    model: nn.Module
    optimizer: Optimizer
    scaler: LossScaler | NoScaler = field(default_factory=NoScaler)
    ema: WeightAverage | NoAverage = field(default_factory=NoAverage)
    ledger: SkipLedger = field(default_factory=SkipLedger)
    data: Cursor = field(default_factory=Cursor)
    spikes: SpikeDetector = field(default_factory=SpikeDetector)
    quarantine: set[int] = field(default_factory=set)
    loss: nn.Module | None = None
    step: int = 0
    num_samples: int = 0
    num_tokens: int = 0
    elapsed_s: float = 0.0
    fraction: float = 0.0
    micro_limit: int | None = None
    stateful: dict[str, Stateful] = field(default_factory=dict)
    stages: World = SOLO

    @property
    def roots(self) -> list[nn.Module]:
        """The model, and the loss if it is a module."""
        return [self.model] if self.loss is None else [self.model, self.loss]

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters of the optimizer."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    @property
    def device(self) -> torch.device:
        """The device of the first parameter of the optimizer."""
        first: Tensor = self.optimizer.param_groups[0]["params"][0]
        return first.device

    @property
    def is_divided(self) -> bool:
        """True if other ranks hold parts of the weights, so that no rank can save or evaluate the model alone."""
        return self.stages.size > 1 or holds_parts(self.model)
