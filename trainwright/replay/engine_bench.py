"""Writes the programs of steps of the engine: while they train, or by running them again with hooks and tape on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from copy import copy
from itertools import chain

from torch import Tensor, nn
from torch.optim import Optimizer

from trainwright.engine.accumulate import Accumulated
from trainwright.engine.clip import AdaptiveClip, ClipFn, GradientClip
from trainwright.engine.spikes import SpikeDecision, SpikeHandler
from trainwright.engine.step import StepFn
from trainwright.engine.witness import StepWitness
from trainwright.recorder.calls import is_compiled
from trainwright.recorder.hooks import Listener, listening
from trainwright.recorder.inputs import StepInputs
from trainwright.recorder.listener import tell, unmuted
from trainwright.recorder.program import Backward, Call, RecordedStep
from trainwright.recorder.recording import LoopRecorder
from trainwright.recorder.tape import Tape
from trainwright.recorder.veto import Veto
from trainwright.replay.deadline import Deadline
from trainwright.replay.stage import staged
from trainwright.state.chained import parts_of
from trainwright.state.cursor import StepBatch
from trainwright.state.rng import TorchGenerators
from trainwright.state.scaler import LossScaler
from trainwright.state.snapshot import LiveObjects, Snapshot
from trainwright.state.spikes import Spike
from trainwright.state.train_state import TrainState

MakeStep = Callable[[StepWitness, SpikeHandler], StepFn]
"""Makes the step function of the run, with these two instead of its own. It must not communicate with other ranks."""


def has_state(module: nn.Module) -> bool:
    """Whether it has parameters or buffers; a loss without any is a function as any other."""
    return any(True for _ in chain(module.parameters(), module.buffers()))


def called_parts(module: nn.Module) -> list[nn.Module]:
    """The modules that a step calls: of one without a ``forward``, such as the players of a GAN, those inside."""
    has_own = any(True for _ in chain(module.parameters(recurse=False), module.buffers(recurse=False)))
    if type(module).forward is not nn.Module.forward or has_own:
        return [module]
    return [part for child in module.children() for part in called_parts(child)]


class EngineBench:
    """Runs steps again from their inputs, on the live objects, whose state is restored afterwards.

    ``live`` is a witness that records the step which it is given to while that trains; then ``take_live`` returns it.
    ``probes`` receive the events of each step whose program is written, once. ``deadline`` ends a run between two
    steps.
    """

    def __init__(self, state: TrainState, make_step: MakeStep) -> None:
        roots = [
            *called_parts(state.model),
            *([state.loss] if state.loss is not None and has_state(state.loss) else []),
        ]
        self._recorder = LoopRecorder(
            roots,
            parts_of(state.optimizer),
            lambda step: self._taken.append(step),
            before_update=lambda step, part, norm: self._veto.before_update(step, state.optimizer),  # norm of all parts
            after_update=lambda step, part: self._veto.after_update(step, state.optimizer),
        )
        self._veto = Veto(roots, self._recorder.parameters, "observe")
        self.objects = LiveObjects(roots, parts_of(state.optimizer), self._recorder.parameters)
        self.probes: Sequence[Listener] = ()
        self.deadline = Deadline()
        self._state, self._spikes = state, _AsItWas()
        self._advance = make_step(_BenchWitness(self._recorder), self._spikes)
        self._taken: list[RecordedStep] = []
        self._listening = ExitStack()
        self.live = _LiveWitness(self._recorder, self._listen)

    @property
    def tape(self) -> Tape:
        return self._recorder.tape

    def record(self, snapshot: Snapshot, steps: Sequence[tuple[RecordedStep, StepInputs]]) -> Snapshot:
        """Writes the program of each step that has none; returns the state before the last of them.

        An exception of the user's code is not caught.
        """
        before = snapshot
        with staged(self.objects, snapshot):
            for recorded, inputs in steps:
                self.deadline.check()
                if recorded is steps[-1][0] and len(steps) > 1:
                    inputs.generators.restore(self._recorder.device)
                    before = self.objects.snapshot(inputs.step)
                if recorded.program:
                    self._advance(self._state_at(inputs), inputs.batch)
                else:
                    complete(recorded, self._recorded(inputs))
        return before

    def record_unfinished(
        self, snapshot: Snapshot, steps: Sequence[StepInputs]
    ) -> tuple[RecordedStep, Exception | None]:
        """Runs the steps, the last of which raised. Returns its record and what it raises now: None if nothing."""
        with staged(self.objects, snapshot):
            for inputs in steps[:-1]:
                self._advance(self._state_at(inputs), inputs.batch)
            try:
                return self._recorded(steps[-1]), None
            except Exception as error:
                unfinished = self._recorder.current
                unfinished.ids = list(steps[-1].ids)
                return unfinished, error

    def _recorded(self, inputs: StepInputs) -> RecordedStep:
        state = self._state_at(inputs)
        with unmuted(), self._listening:
            self._listen(inputs.step)
            self._advance(state, inputs.batch)
        return self._finished()

    def _listen(self, step: int) -> None:
        """Record what this thread does as ``step``, until ``_listening`` is closed."""
        recorder = self._recorder
        self._taken.clear()
        recorder.current = RecordedStep(step)
        self._listening.enter_context(listening([recorder, *self.probes], recorder.roots))
        self._listening.callback(recorder.stop_modes)

    def _finished(self) -> RecordedStep:
        """The step that was recorded just now. Raises what the recorder raised."""
        recorder = self._recorder
        if recorder.failed is not None:
            raise recorder.failed
        if not self._taken:  # its update was skipped, and no norm was seen at an update
            recorder.close()
            self._taken[-1].grad_norm = None
        if len(self._taken) > 1:
            self._taken[-1].blind = f"it makes {len(self._taken)} updates of one optimizer"
        return self._taken.pop()

    @property
    def can_record_live(self) -> bool:
        """Whether steps can be recorded while they train: what is compiled would be compiled again with hooks."""
        roots = [each for each in (self._state.model, self._state.loss) if each is not None]
        return self._recorder.failed is None and not any(is_compiled(m) for root in roots for m in root.modules())

    def take_live(self) -> RecordedStep:
        """Stop recording, and return the step that was recorded while it trained."""
        self.stop_live()
        return self._finished()

    def stop_live(self) -> None:
        """Stop recording. Does nothing where no step is being recorded."""
        self._listening.close()

    def _state_at(self, inputs: StepInputs) -> TrainState:
        """Returns a new TrainState of the live model and optimizer, which must be in the state before the step."""
        inputs.generators.restore(self._recorder.device)
        self._spikes.left_out = inputs.left_out
        state = TrainState(self._state.model, self._state.optimizer, loss=self._state.loss)
        state.step, state.fraction, state.micro_limit = inputs.step - 1, inputs.fraction, inputs.micro_limit
        if inputs.scale is not None and isinstance(self._state.scaler, LossScaler):
            state.scaler = scaler = copy(self._state.scaler)
            scaler.scale, scaler.clean_steps = inputs.scale
        return state


def complete(recorded: RecordedStep, again: RecordedStep) -> None:
    """Adds what only a program has to the recorded step; the numbers of the live step stay."""
    recorded.program, recorded.losses = again.program, again.losses
    recorded.events = [(kind, _read(value) if kind == "clip" else value) for kind, value in again.events]
    micro = 0
    for each in recorded.program:
        if isinstance(each, Call):
            each.batch = micro
        elif isinstance(each, Backward):
            micro += 1
    recorded.blind = again.blind
    if again.grad_norm is not None:
        recorded.grad_norm = again.grad_norm
    recorded.values |= {name: value for name, value in again.values.items() if name not in recorded.values}


def _read(clip: dict[str, object]) -> dict[str, object]:
    """Returns the event of a clip with its norm as a number, so that no tensor of the bench is kept."""
    norm = clip["norm"]
    return clip | {"norm": float(norm)} if isinstance(norm, Tensor) else clip


class _AsItWas:
    """Leaves an update out where the live step left it out."""

    left_out = ""

    def before_step(self, state: TrainState) -> None: ...
    def decide(self, state: TrainState, grad_norm: Tensor, skipped: Tensor) -> SpikeDecision | None:
        if not self.left_out:
            return None
        return SpikeDecision(Spike(state.step + 1, float(grad_norm), 0.0, 0.0), "skip", self.left_out)

    def after_step(self, state: TrainState, batch: StepBatch, done: Accumulated, grad_norm: Tensor) -> None: ...


class _BenchWitness:
    """Passes the events of the engine's step on to the listeners of this thread."""

    def __init__(self, recorder: LoopRecorder) -> None:
        self._recorder = recorder
        self._state: TrainState | None = None
        self._tries = 0

    def step_begins(self, state: TrainState, batch: StepBatch, generators: TorchGenerators) -> None:
        self._state, self._tries = state, 0

    def memory_ran_out(self) -> bool:
        return False

    def gradients_are_cleared(self, optimizer: Optimizer) -> None:
        self._tries += 1
        if self._tries > 1:  # memory ran out here
            self._recorder.begin_again()
        for part in parts_of(optimizer):
            tell("on_zero_grad", part)

    def loss_is_scaled(self, loss: Tensor, scaled: Tensor) -> None:
        assert self._state is not None
        tell("on_scaled", self._state.scaler, loss, scaled)

    def gradients_are_multiplied(self, factor: Tensor | float) -> None:
        tell("on_multiplied", factor)

    def gradients_are_clipped(self, clip: ClipFn, parameters: Sequence[Tensor], total_norm: Tensor) -> None:
        if isinstance(clip, AdaptiveClip):
            clip = clip.frozen(parameters, total_norm)
        by, at = (clip.by, float(clip.at)) if isinstance(clip, GradientClip) else ("custom", float("nan"))
        tell("on_clip", by, at, list(parameters), total_norm, clip if by == "custom" else None)


class _LiveWitness(_BenchWitness):
    """The same for the step that trains: ``listen`` is called with its number when it begins."""

    def __init__(self, recorder: LoopRecorder, listen: Callable[[int], None]) -> None:
        super().__init__(recorder)
        self._listen = listen

    def step_begins(self, state: TrainState, batch: StepBatch, generators: TorchGenerators) -> None:
        self._listen(state.step + 1)
        super().step_begins(state, batch, generators)
