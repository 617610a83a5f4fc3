"""Records steps of the engine by their batch alone. Their programs are recorded when a replay needs them.

A step with the same program as the step before it needs no hooks: its passes over the same batch, with the same state
of the generators, give this program again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from trainwright.checkpoint.cursor import StepBatch
from trainwright.checkpoint.rng import TorchGenerators
from trainwright.checkpoint.train_state import TrainState
from trainwright.engine.step import StepResult
from trainwright.engine.witness import Passes
from trainwright.recorder.hooks import listening_to_calls
from trainwright.recorder.listener import only
from trainwright.recorder.program import (
    Backward,
    Call,
    ClipGradients,
    Instruction,
    Operation,
    OptimizerStep,
    RecordedStep,
    ZeroGrad,
    constants_of,
)
from trainwright.recorder.recording import LoopRecorder
from trainwright.recorder.user_types import Kwargs
from trainwright.runs.json_values import Event

ORDINARY_VALUES = {"grads", "step_s", "wait_s", "lines"}
"""Names of the values of a step in which nothing unusual happened."""
ORDINARY_EVENTS = {"zero_grad", "forward", "backward", "clip", "step"}


class StepInputs(NamedTuple):
    """The inputs of a step: its batch, and the states of the generators at its beginning."""

    state: TrainState
    batch: StepBatch
    generators: TorchGenerators


class DeferredStep(NamedTuple):
    """A step that was trained and is not reported yet. ``groups`` are the hyperparameters of each optimizer."""

    inputs: StepInputs
    result: StepResult
    groups: list[list[Kwargs]]


@dataclass(frozen=True)
class StepTemplate:
    """The parts of a recorded step that later steps share, unless their program changes.

    ``clip`` is None for steps without clipping. ``size`` is the number of samples, 0 if unknown.
    """

    zeros: tuple[Instruction, ...]
    clip: ClipGradients | None
    events: tuple[Event, ...]
    values: dict[str, object]
    trained: tuple[int, int]
    num_bytes: int
    size: int
    program: list[Instruction]

    @classmethod
    def of(cls, step: RecordedStep) -> StepTemplate | None:
        """Returns the template of a step; None if a later step may differ in more than its numbers.

        A step with a template has one forward and one backward pass, no loss scale, and at most one clipping by norm.
        """
        events = [(kind, value) for kind, value in step.events if kind != "forward" or value[2]]
        kinds = [kind for kind, _ in events]
        calls, clips = step.calls, [each for each in step.program if isinstance(each, ClipGradients)]
        is_ordinary = (
            step.not_replayable is None
            and step.values.keys() <= ORDINARY_VALUES
            and set(kinds) <= ORDINARY_EVENTS
            and (kinds.count("forward"), kinds.count("backward"), len(calls)) == (1, 1, 1)
            and len(step.losses) == 1
            and calls[0].held is None
            and len(clips) <= 1
            and all(each.by == "norm" and each.function is None for each in clips)
        )
        if not is_ordinary or not all(each.is_unchanged for each in constants_of((calls[0].args, calls[0].kwargs))):
            return None
        zeros = tuple(each for each in step.program if isinstance(each, ZeroGrad))
        values = {"grads": step.values["grads"]} if "grads" in step.values else {}
        size = 0 if not step.ids or step.ids[0] is None else len(step.ids[0])
        clip = clips[0] if clips else None
        return cls(zeros, clip, tuple(events), values, step.trained, step.num_bytes, size, step.program)

    def step(self, step: DeferredStep, recorder: LoopRecorder) -> RecordedStep:
        """Returns the record of a deferred ``step``, made from this template and the events of ``recorder``."""
        inputs, result, groups = step
        clip, events, norm = self.clip, self.events, result.grad_norm
        known: Tensor | float = norm
        if clip is not None:
            found = float(norm) if norm.is_cpu else norm
            known = min(found, clip.at) if isinstance(found, float) else found.clamp(max=clip.at)  # NaN stays NaN
            events = tuple((k, {**v, "norm": found} if k == "clip" else v) for k, v in events)
        updates = [OptimizerStep(n, each) for n, each in enumerate(groups)]
        ids = tuple(inputs.batch.micro[0].ids.tolist())
        return RecordedStep(
            result.step,
            program=[*self.zeros, *([] if clip is None else [clip]), *updates],
            events=[*recorder.current.events, *events],
            ids=[ids],
            losses=[result.loss],
            loss=result.loss,
            grad_norm=known,
            lr=result.lr,
            trained=self.trained,
            num_bytes=self.num_bytes * max(1, len(ids)) // max(1, self.size),
            is_light=True,
            values=dict(self.values),
            inputs=inputs._replace(batch=result.batch),
        )


class DeferredRecorder:
    """Records the programs of deferred steps by repeating their passes on the live objects.

    The caller sets the live objects to a snapshot from before these steps, and restores them afterwards.
    """

    def __init__(self, roots: Sequence[nn.Module], optimizers: Sequence[Optimizer], passes: Passes) -> None:
        self._roots, self._passes = roots, passes
        self._done: list[RecordedStep] = []
        self._recorder = LoopRecorder(
            roots,
            optimizers,
            self._done.append,
            before_update=lambda step, optimizer, norm: None,
            after_update=lambda step, optimizer: None,
            closes_itself=False,
        )

    def record(self, steps: Sequence[RecordedStep], check: Callable[[], None]) -> None:
        """Records the programs of deferred ``steps``. ``check`` is called before each."""
        with only([self._recorder]), listening_to_calls([self._recorder], self._roots):
            for step in steps:
                check()
                if step.is_light and isinstance(step.inputs, StepInputs):
                    self._record(step, step.inputs)

    def _record(self, step: RecordedStep, inputs: StepInputs) -> None:
        inputs.generators.restore(self._recorder.device)
        self._passes(inputs.state, inputs.batch)
        for parameter in self._recorder.parameters:
            parameter.grad = None
        self._recorder.close()
        recorded = self._done.pop()
        computed = [each for each in recorded.program if isinstance(each, Call | Operation | Backward)]
        zeros = sum(isinstance(each, ZeroGrad) for each in step.program)
        step.program = [*step.program[:zeros], *computed, *step.program[zeros:]]
        step.blind, step.is_light, step.inputs = recorded.blind, False, None
        for each in step.calls:
            each.batch = 0


def repeat(recorder: LoopRecorder, passes: Passes, inputs: StepInputs) -> None:
    """Repeats the passes of a step that raised, so that ``recorder`` has its program up to the error.

    The exception is ignored: it is the one that ended the step.
    """
    inputs.generators.restore(recorder.device)
    with only([recorder]), suppress(Exception):
        passes(inputs.state, inputs.batch)
