"""Reports the steps of the engine as the events that hooks report for any other loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from itertools import chain

from torch import Tensor, nn
from torch.optim import Optimizer

from trainwright.checkpoint.chained_optimizer import parts_of
from trainwright.checkpoint.cursor import MicroBatch, StepBatch
from trainwright.checkpoint.rng import TorchGenerators
from trainwright.checkpoint.train_state import TrainState
from trainwright.engine.step import StepResult
from trainwright.engine.witness import Passes
from trainwright.optim.clip import ClipFn, GradientClip
from trainwright.recorder.calls import is_compiled
from trainwright.recorder.deferred import DeferredStep, StepInputs, StepTemplate
from trainwright.recorder.gradients import parameters_of
from trainwright.recorder.listener import mute, tell, unmute
from trainwright.recorder.program import Backward, Call, RecordedStep
from trainwright.recorder.recording import LoopRecorder
from trainwright.recorder.veto import Veto


def called_roots(state: TrainState) -> list[nn.Module]:
    """Returns the modules that a step calls, and the loss if it has state."""
    loss = state.loss
    return [*called_parts(state.model), *([loss] if loss is not None and has_state(loss) else [])]


def has_state(module: nn.Module) -> bool:
    """Returns True if a module has parameters or buffers. A loss without them is treated as a function."""
    return any(True for _ in chain(module.parameters(), module.buffers()))


def called_parts(module: nn.Module) -> list[nn.Module]:
    """Returns the modules that a step calls: ``module``, or the modules in it if it has no ``forward``, as in a GAN."""
    has_own = any(True for _ in chain(module.parameters(recurse=False), module.buffers(recurse=False)))
    if type(module).forward is not nn.Module.forward or has_own or is_compiled(module):
        return [module]
    return [part for child in module.children() for part in called_parts(child)]


def engine_recorder(state: TrainState, closed: Callable[[RecordedStep], None], first_step: int) -> LoopRecorder:
    """Returns a recorder of the engine's steps that vetoes no update."""
    roots, optimizers = called_roots(state), parts_of(state.optimizer)
    veto = Veto(roots, parameters_of(roots, optimizers), "observe", together=optimizers)
    return LoopRecorder(
        roots,
        optimizers,
        closed,
        before_update=veto.before_update,
        after_update=veto.after_update,
        first_step=first_step,
        closes_itself=False,
    )


@dataclass(eq=False)
class EngineLoader:
    """Represents the loader of a dataset in the events of the engine."""

    dataset: object
    batch_size: int | None = None
    num_workers = 0
    persistent_workers = drop_last = False

    def __len__(self) -> int:
        if self.batch_size is None or not isinstance(self.dataset, Sized):
            raise TypeError("the number of batches is not known")
        return (len(self.dataset) + self.batch_size - 1) // self.batch_size


class _Pass:
    """The iterator of one pass over a dataset."""


@dataclass(eq=False)
class ReportedBatches:
    """The batches of a validation set, reported like those of a DataLoader."""

    loader: EngineLoader
    batches: Iterable[MicroBatch]

    def __iter__(self) -> Iterator[MicroBatch]:
        one_pass = _Pass()
        tell("on_epoch", self.loader, one_pass)
        for micro in self.batches:
            tell("on_batch", one_pass, micro.ids.tolist(), micro.data, 0.0)
            yield micro


class EngineSource:
    """A StepWitness that reports what hooks cannot observe in a step of the engine, and the end of the step.

    ``recorder`` records with ``closes_itself=False``. ``dataset`` is the training dataset. ``catch_up`` reports the
    deferred steps that were not reported yet.
    """

    def __init__(
        self, recorder: LoopRecorder, dataset: object = None, catch_up: Callable[[], None] = lambda: None
    ) -> None:
        self._recorder, self._loader, self._catch_up = recorder, EngineLoader(dataset), catch_up
        self._pass: _Pass | None = None
        self._epoch = -1
        self._scaler: object = None
        self._tries = 0
        self.passes: Passes | None = None
        self.template: StepTemplate | None = None
        """If set, the next step is deferred: its events are not reported, and its record is made from this template."""
        self._inputs: StepInputs | None = None

    def step_begins(self, state: TrainState, batch: StepBatch, generators: TorchGenerators) -> None:
        self._scaler, self._tries = state.scaler, 0
        epoch = batch.cursor.epoch - (batch.cursor.position == 0)
        if self._pass is None or epoch != self._epoch:
            self._catch_up()
            self._pass, self._epoch = _Pass(), epoch
            self._loader.batch_size = self._loader.batch_size or max(1, batch.size)
            tell("on_epoch", self._loader, self._pass)
        if self.template is not None:
            self._inputs = StepInputs(state, batch, generators)
            mute()
            return
        self._catch_up()
        self._tell_batch(batch)

    def _tell_batch(self, batch: StepBatch) -> None:
        for micro in batch.micro:
            tell("on_batch", self._pass, micro.ids.tolist(), micro.data, 0.0)

    @property
    def is_listening(self) -> bool:
        return self._inputs is None

    def can_repeat(self, passes: Passes) -> None:
        self.passes = passes

    def take_inputs(self) -> StepInputs | None:
        """Ends a deferred step: events are reported again. Returns its inputs; None for a step that was recorded."""
        inputs, self._inputs = self._inputs, None
        if inputs is not None:
            unmute()
        return inputs

    def memory_ran_out(self) -> bool:
        return False

    def gradients_are_cleared(self, optimizer: Optimizer) -> None:
        self._tries += 1
        if self._inputs is not None:
            return
        if self._tries > 1:  # memory ran out in the first attempt
            tell("on_begun_again")
        for part in parts_of(optimizer):
            tell("on_zero_grad", part)

    def loss_is_scaled(self, loss: Tensor, scaled: Tensor) -> None:
        if self._inputs is None:
            tell("on_scaled", self._scaler, loss, scaled)

    def gradients_are_multiplied(self, factor: Tensor | float) -> None:
        tell("on_multiplied", factor)

    def gradients_are_clipped(self, clip: ClipFn, parameters: Sequence[Tensor], total_norm: Tensor) -> None:
        if self._inputs is not None:
            return
        by, at = (clip.by, clip.at) if isinstance(clip, GradientClip) else ("custom", float("nan"))
        tell("on_clip", by, at, list(parameters), total_norm, clip if by == "custom" else None)

    def end_deferred(self, step: DeferredStep) -> None:
        """Reports and closes a step whose inputs were taken."""
        assert self.template is not None
        recorder, result = self._recorder, step.result
        self._tell_batch(step.inputs.batch)
        done = self.template.step(step, recorder)
        if len(result.batch.micro) > 1:  # memory ran out, so it was trained in parts
            done.inputs, done.blind = None, "it was trained in smaller micro-batches than the steps before it"
        _add_spike(done, result)
        recorder.close_deferred(done)

    def end_step(self, result: StepResult) -> None:
        """Closes the recorded step with the numbers of the engine."""
        recorder = self._recorder
        step = recorder.current
        step.loss, step.lr = result.loss, result.lr
        step.ids = [tuple(micro.ids.tolist()) for micro in result.batch.micro]
        if step.grad_norm is None:  # the update was skipped
            step.grad_norm = result.grad_norm
        micro = 0
        for each in step.program:
            if isinstance(each, Call):
                each.batch = micro
            elif isinstance(each, Backward):
                micro += 1
        _add_spike(step, result)
        recorder.close()


def _add_spike(step: RecordedStep, result: StepResult) -> None:
    if result.spike is not None:
        spike = result.spike.spike
        step.values["spike"] = [spike.grad_norm, spike.usual, spike.initial, result.spike.action]
        if result.spike.action == "rollback":
            step.values["edited"] = True  # the rollback has changed the state after the step
