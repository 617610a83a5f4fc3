"""What each step of our own engine is given, kept while it trains: enough for the engine to take the step again."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainwright.engine.clip import ClipFn
from trainwright.engine.oom_report import tensors_in
from trainwright.recorder.program import Ids, RecordedStep
from trainwright.recorder.ring import Ring
from trainwright.state.cursor import StepBatch
from trainwright.state.scaler import LossScaler
from trainwright.state.snapshot import Snapshot
from trainwright.state.train_state import TrainState

HISTORY = 8
"""Steps with a program that experiments on several recorded steps may count on, where as many are held."""


@dataclass(slots=True)
class GivenStep:
    """Batch, random state, share of the run and loss scale at the begin of one step.

    ``versions`` are those of the ``tensors`` of the batch: each write in place adds one.

    ``left_out`` says why a spike policy left its update out; "": it did not.
    """

    step: int
    batch: StepBatch
    tensors: list[Tensor]
    versions: list[int]
    rng: Tensor
    rng_cuda: Tensor | None
    fraction: float
    micro_limit: int | None
    scale: tuple[Tensor, Tensor] | None
    left_out: str = ""

    @property
    def is_unchanged(self) -> bool:
        """Whether nobody has written into the batch since, in place."""
        return [tensor._version for tensor in self.tensors] == self.versions

    @property
    def ids(self) -> list[Ids]:
        """Sample ids of each micro-batch."""
        return [tuple(micro.ids.tolist()) for micro in self.batch.micro]

    @property
    def num_bytes(self) -> int:
        return sum([tensor.nbytes for tensor in self.tensors])


class GivenRecorder:
    """The witness of a live run: it notes what each step is given. About 5 us a step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.newest: GivenStep | None = None

    def step_begins(self, state: TrainState, batch: StepBatch) -> None:
        scaler = state.scaler
        tensors = [t for micro in batch.micro for t in tensors_in(micro.data) if not t.is_inference()]
        self.newest = GivenStep(
            state.step + 1,
            batch,
            tensors,
            [t._version for t in tensors],
            torch.default_generator.get_state(),
            torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else None,
            state.fraction,
            state.micro_limit,
            (scaler.scale, scaler.clean_steps) if isinstance(scaler, LossScaler) else None,
        )

    def gradients_are_cleared(self, optimizer: Optimizer) -> None: ...
    def loss_is_scaled(self, loss: Tensor, scaled: Tensor) -> None: ...
    def gradients_are_multiplied(self, factor: Tensor | float) -> None: ...
    def gradients_are_clipped(self, clip: ClipFn, parameters: Sequence[Tensor], total_norm: Tensor) -> None: ...


RecordFn = Callable[[Snapshot, Sequence[tuple[RecordedStep, GivenStep]]], None]
"""Takes given steps again from a state, and writes the program of each into its RecordedStep where it has none."""


class GivenRing(Ring):
    """A flight recorder of given steps: ``record`` makes their programs when somebody asks for them."""

    def __init__(self, *, keep: int, budget_bytes: float, record: RecordFn) -> None:
        super().__init__(keep=keep, budget_bytes=budget_bytes)
        self._given: dict[int, GivenStep] = {}
        self._record = record

    def add_given(self, step: RecordedStep, given: GivenStep) -> None:
        """``step`` has the numbers and the sample ids of the step, and no program yet."""
        step.num_bytes = given.num_bytes
        self._given[step.step] = given
        self.add(step)
        oldest = self.steps[0].step if self.steps else math.inf
        while self._given and (first := next(iter(self._given))) < oldest:
            del self._given[first]

    def given(self, step: int) -> GivenStep:
        """What a step that is held was given."""
        return self._given[step]

    def name_samples(self, step: RecordedStep) -> None:
        """Writes the sample ids into a step that is held: of most steps nobody reads them."""
        if not step.ids and step.step in self._given:
            step.ids = self._given[step.step].ids

    def way_to(self, step: int) -> tuple[Snapshot, list[RecordedStep]] | None:
        found = super().way_to(step)
        if found is None:
            return None
        self._fill(*found)
        return super().way_to(step)  # a program may show that a step cannot be replayed

    def way_from(self, snapshot: Snapshot, step: int) -> list[RecordedStep] | None:
        way = self._way(snapshot, step)
        if way is None:
            return None
        self._fill(snapshot, way)
        return self._way(snapshot, step)

    def way_to_unfinished(self, given: GivenStep) -> tuple[Snapshot, list[GivenStep]] | None:
        """The same for a step that raised and is not in the ring: a state, and what the steps from it on were given."""
        for snapshot in reversed(self.snapshots):
            if snapshot.step <= given.step and (way := self._way(snapshot, given.step - 1)) is not None:
                steps = [*(self._given[each.step] for each in way), given]
                return (snapshot, steps) if all(each.is_unchanged for each in steps) else None
        return None

    def recorded(self, step: int) -> list[RecordedStep]:
        """The newest steps up to ``step`` that have a program; at least HISTORY of them, if they are held."""
        for snapshot in reversed(self.snapshots):
            with_program = [each for each in self.steps if each.step <= step and each.program]
            if snapshot.step <= step and len(with_program) < HISTORY:
                oldest = min((each.step for each in with_program), default=step + 1)
                self.way_from(snapshot, max(snapshot.step, oldest - 1))
        return [each for each in self.steps if each.step <= step and each.program]

    def _fill(self, snapshot: Snapshot, way: list[RecordedStep]) -> None:
        if all(each.program or each.blind for each in way):
            return
        for each in way:
            given = self._given[each.step]
            each.ids = given.ids
            if not given.is_unchanged:
                each.blind = "the model writes into its input, so the step cannot be taken again"
        if not any(each.blind for each in way):
            self._record(snapshot, [(each, self._given[each.step]) for each in way])
