"""The inputs of each step of our own engine, kept while it trains: enough for the engine to run the step again."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.optim import Optimizer

from trainwright.engine.clip import ClipFn
from trainwright.engine.witness import SILENT, StepWitness
from trainwright.recorder.engine_changes import EngineChanges
from trainwright.recorder.plain_tensors import num_bytes
from trainwright.recorder.program import Ids, RecordedStep
from trainwright.recorder.ring import Ring
from trainwright.recorder.shared_memory import PrivateCopies, is_of_worker
from trainwright.state.cursor import StepBatch
from trainwright.state.rng import TorchGenerators
from trainwright.state.scaler import LossScaler
from trainwright.state.snapshot import Snapshot
from trainwright.state.train_state import TrainState

HISTORY = 8
"""Steps with a program that experiments on several recorded steps may count on, where as many are held."""


@dataclass(slots=True)
class StepInputs:
    """Batch, random state, share of the run and loss scale at the begin of one step.

    ``versions`` are those of the ``tensors`` of the batch, which take ``num_bytes``: each write in place adds one.

    ``left_out`` says why a spike policy left its update out; "": it did not.
    """

    step: int
    batch: StepBatch
    tensors: list[Tensor]
    versions: list[int]
    num_bytes: int
    generators: TorchGenerators
    fraction: float
    micro_limit: int | None
    scale: tuple[Tensor, Tensor] | None
    left_out: str = ""

    @property
    def is_unchanged(self) -> bool:
        """Whether the batch was not written to since."""
        return [tensor._version for tensor in self.tensors] == self.versions

    @property
    def ids(self) -> list[Ids]:
        """Sample ids of each micro-batch."""
        return [tuple(micro.ids.tolist()) for micro in self.batch.micro]

    @property
    def sizes(self) -> list[int]:
        """Samples of each micro-batch."""
        return [len(micro.ids) for micro in self.batch.micro]


class InputRecorder:
    """The witness of a live run: it records the inputs of each step, and lets ``changes`` hear what it does.

    ``let_go`` frees what the doctor holds, and returns whether that was anything. ``live`` is a further witness of the
    steps; it is set for those whose program is recorded while they train.
    """

    def __init__(self, let_go: Callable[[], bool] = lambda: False, changes: EngineChanges | None = None) -> None:
        self.memory_ran_out, self.changes = let_go, changes or EngineChanges((), ())
        self.newest: StepInputs | None = None
        self.live: StepWitness = SILENT

    def step_begins(self, state: TrainState, batch: StepBatch, generators: TorchGenerators) -> None:
        scaler, tensors = state.scaler, batch.tensors
        self.changes.step_begins()
        self.newest = StepInputs(
            state.step + 1,
            batch,
            tensors,
            [each._version for each in tensors],
            sum([num_bytes(each) for each in tensors]),
            generators,
            state.fraction,
            state.micro_limit,
            (scaler.scale, scaler.clean_steps) if isinstance(scaler, LossScaler) else None,
        )
        self.live.step_begins(state, batch, generators)

    def gradients_are_cleared(self, optimizer: Optimizer) -> None:
        self.live.gradients_are_cleared(optimizer)

    def loss_is_scaled(self, loss: Tensor, scaled: Tensor) -> None:
        self.changes.loss_is_made(loss)
        self.live.loss_is_scaled(loss, scaled)

    def gradients_are_multiplied(self, factor: Tensor | float) -> None:
        self.live.gradients_are_multiplied(factor)

    def gradients_are_clipped(self, clip: ClipFn, parameters: Sequence[Tensor], total_norm: Tensor) -> None:
        self.live.gradients_are_clipped(clip, parameters, total_norm)


MakeFn = Callable[[], RecordedStep]
RecordFn = Callable[[Snapshot, Sequence[tuple[RecordedStep, StepInputs]]], Snapshot]
"""Runs steps again from a state and their inputs, and writes a program into each RecordedStep that has none.

Returns the state before the last of them.
"""


class InputRing(Ring):
    """A flight recorder of the inputs of steps: ``record`` makes the programs when they are needed.

    It holds inputs; of most steps nobody asks for the RecordedStep, which is made when somebody does.
    """

    def __init__(self, *, keep: int, budget_bytes: float, record: RecordFn) -> None:
        super().__init__(keep=keep, budget_bytes=budget_bytes)
        self._inputs: dict[int, StepInputs] = {}
        self._makes: dict[int, MakeFn] = {}
        self._made: dict[int, RecordedStep] = {}
        self._record = record

    @property
    def steps(self) -> Sequence[RecordedStep]:
        return [self.made(number) for number in self._inputs]

    def made(self, step: int) -> RecordedStep:
        """The record of a step that is held. Raises KeyError for another one."""
        if step not in self._made:
            made = self._made[step] = self._makes.pop(step)()
            made.num_bytes = self._inputs[step].num_bytes
        return self._made[step]

    def holds(self, step: int) -> bool:
        return step in self._inputs

    def is_made(self, step: int) -> bool:
        """Whether somebody has asked for the record of ``step``."""
        return step in self._made

    def let_go(self) -> bool:
        """Drops all steps and snapshots, and keeps half as much from now on. Returns whether it held any."""
        held = bool(self.snapshots or self._inputs)
        for step in self.steps:  # some may not be in the log yet
            self.name_samples(step)
        self.clear()
        self.budget_bytes /= 2
        return held

    def clear(self) -> None:
        super().clear()
        for each in (self._inputs, self._makes, self._made):
            each.clear()

    def add_with_inputs(self, step: RecordedStep, inputs: StepInputs) -> None:
        """``step`` has the numbers and the sample ids of the step, and no program yet."""
        self.add_inputs([inputs], [lambda: step])

    def add_inputs(self, steps: Sequence[StepInputs], makes: Sequence[MakeFn]) -> None:
        """As ``add_with_inputs`` of several steps; each of ``makes`` gives the record of one."""
        for inputs, make in zip(steps, makes):
            if inputs.tensors and is_of_worker(inputs.tensors[0]):  # then all are: one worker made them
                copies = PrivateCopies()
                for tensor in filter(is_of_worker, inputs.tensors):
                    is_simple = tensor.is_contiguous() and not tensor.storage_offset()
                    tensor.data = tensor.clone() if is_simple else copies.of(tensor)
            self._inputs[inputs.step], self._makes[inputs.step] = inputs, make
        self.add(*steps)

    def _shrink(self) -> None:
        super()._shrink()
        oldest = self._held[0].step if self._held else math.inf
        while self._inputs and (number := next(iter(self._inputs))) < oldest:  # they lie in the order of steps
            del self._inputs[number]
            self._makes.pop(number, None)
            self._made.pop(number, None)

    def inputs_of(self, step: int) -> StepInputs:
        """The inputs of a step that is held."""
        return self._inputs[step]

    def name_samples(self, step: RecordedStep) -> None:
        """Writes the sample ids into a step that is held: for most steps they are never read."""
        if not step.ids and step.step in self._inputs:
            step.ids = self._inputs[step.step].ids

    def steps_to(self, step: int) -> tuple[Snapshot, list[RecordedStep]] | None:
        found = super().steps_to(step)
        if found is None:
            return None
        before = self._fill(*found)
        if before is not None and before.step > self.snapshots[-1].step and self._has_room_for(before):
            self.add_snapshot(before)  # a replay of this step need not begin with those before it
        return super().steps_to(step)  # a program may show that a step cannot be replayed

    def _has_room_for(self, snapshot: Snapshot) -> bool:
        return self.num_bytes + snapshot.num_bytes <= self.budget_bytes

    def steps_from(self, snapshot: Snapshot, step: int) -> list[RecordedStep] | None:
        steps = self._steps_between(snapshot, step)
        if steps is None:
            return None
        self._fill(snapshot, steps)
        return self._steps_between(snapshot, step)

    def steps_to_unfinished(self, inputs: StepInputs) -> tuple[Snapshot, list[StepInputs]] | None:
        """The same for a step that raised and is not in the ring: a state, and the inputs of the steps from it on."""
        for snapshot in reversed(self.snapshots):
            if snapshot.step <= inputs.step and (steps := self._steps_between(snapshot, inputs.step - 1)) is not None:
                every = [*(self._inputs[each.step] for each in steps), inputs]
                return (snapshot, every) if all(each.is_unchanged for each in every) else None
        return None

    def recorded(self, step: int) -> list[RecordedStep]:
        """The newest steps up to ``step`` that have a program; at least HISTORY of them, if they are held."""
        for snapshot in reversed(self.snapshots):
            with_program = [each for each in self.steps if each.step <= step and each.program]
            if snapshot.step <= step and len(with_program) < HISTORY:
                oldest = min((each.step for each in with_program), default=step + 1)
                self.steps_from(snapshot, max(snapshot.step, oldest - 1))
        return [each for each in self.steps if each.step <= step and each.program]

    def _fill(self, snapshot: Snapshot, steps: list[RecordedStep]) -> Snapshot | None:
        if all(each.program or each.blind for each in steps):
            return None
        for each in steps:
            inputs = self._inputs[each.step]
            each.ids = inputs.ids
            if not inputs.is_unchanged:
                each.blind = "the model writes into its input, so the step cannot be taken again"
        if any(each.blind for each in steps):
            return None
        return self._record(snapshot, [(each, self._inputs[each.step]) for each in steps])
