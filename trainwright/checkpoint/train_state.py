"""TrainState: what a run is after its n-th step, and nothing that follows from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from torch import nn
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
    """Keeps a state of tensors, numbers, texts and containers of them. What it loads comes from a file."""

    def state_dict(self) -> StateDict: ...
    def load_state_dict(self, saved: StateDict, /) -> object: ...


@dataclass
class TrainState:
    """Everything that is needed to continue.

    ``step`` counts completed optimizer steps: a step whose update was skipped consumed its batch and
    counts; the ledger names it. ``elapsed_s`` is training time alone, without evaluation and saving.
    ``fraction`` is the share of the run that was used when the last step began (0..1). The learning rate
    is a pure function of ``step`` and ``fraction`` and so is not state. The generators of random numbers
    are process-wide; ``RngBag.capture()`` reads them at the instant of saving. ``quarantine`` holds the positions of
    samples that are not trained on. ``loss`` is the loss where that is a module, which may keep state of its own.
    ``spikes`` remembers the gradient norms by which a spike is recognised. ``micro_limit`` is how many samples a
    forward pass takes at most since memory ran out; None: as they come. ``stages`` are the ranks that have the other
    stages of the model, where this one has a part of its layers. ``stateful`` are further objects, by name, whose state
    belongs to the run: schedulers of torch, observers that count.
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
    def is_divided(self) -> bool:
        """Whether other ranks hold parts of the weights, so that a rank can do little alone."""
        return self.stages.size > 1 or holds_parts(self.model)

    @property
    def saves_together(self) -> bool:
        """Whether a checkpoint has parts of other ranks, who must give them at the same time."""
        return self.is_divided or any(getattr(each, "saves_together", False) for each in self.stateful.values())
