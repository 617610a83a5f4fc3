"""A step of our own engine, taken again on the bench: the same bits, whatever the step was made of, and no trace."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import trainwright as tw
from trainwright.engine.clip import ClipFn
from trainwright.engine.spikes import NO_SPIKES, SpikeHandler
from trainwright.engine.step import StepFn
from trainwright.engine.witness import StepWitness
from trainwright.recorder.inputs import InputRecorder, InputRing
from trainwright.recorder.program import Backward, Call, ClipGradients, Multiply, RecordedStep
from trainwright.replay.engine_bench import EngineBench
from trainwright.replay.replayer import Replayer
from trainwright.replay.session import ReplaySession
from trainwright.state.cursor import MicroBatch, StepBatch
from trainwright.state.rng import TorchGenerators
from trainwright.state.snapshot import entries_of
from trainwright.watching.experiments import names_of

STEPS = 7


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.3)
        self.last = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(torch.tanh(self.norm(self.first(x)))))


def halve(parameters: Sequence[Tensor], total_norm: Tensor) -> None:
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)


def weighted(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tw.Loss:
    """Micro-batches of unequal weight: the gradients are multiplied by a correction."""
    x, y = batch
    wanted = y > 0
    losses = nn.functional.cross_entropy(model(x), y, reduction="none")
    return tw.Loss((losses * wanted).sum(), wanted.sum())


def batch(seed: int, micro: int) -> StepBatch:
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for number in range(micro):
        x, y = torch.randn(8, 6, generator=generator), torch.randint(3, (8,), generator=generator)
        parts.append(MicroBatch((x, y), np.arange(8) + 8 * (micro * seed + number)))
    return StepBatch(tuple(parts))


class Run:
    """Seven steps that are recorded by their inputs."""

    def __init__(
        self,
        *,
        clip: ClipFn,
        precision: tw.Precision,
        micro: int,
        loss: Callable[..., object],
        net: type[nn.Module] = Net,
    ) -> None:
        torch.manual_seed(0)
        model = net()
        self.state = tw.TrainState(model, torch.optim.AdamW(model.parameters(), lr=0.01))
        self.state.scaler = precision.scaler(torch.device("cpu"))

        def make(witness: StepWitness, spikes: SpikeHandler = NO_SPIKES) -> StepFn:
            return tw.make_step(loss, clip=clip, precision=precision, witness=witness, spikes=spikes)

        self.bench = EngineBench(self.state, make)
        self.ring = InputRing(keep=32, budget_bytes=math.inf, record=self.bench.record)
        recorder = InputRecorder()
        advance = make(recorder)
        self.ring.add_snapshot(self.bench.objects.snapshot(1))
        for step in range(1, STEPS + 1):
            result = advance(self.state, batch(step, micro))
            recorded = RecordedStep(step, loss=result.loss, grad_norm=result.grad_norm, lr=result.lr)
            assert recorder.newest is not None
            self.ring.add_with_inputs(recorded, recorder.newest)
        self.results = {each.step: (float(each.loss), float(each.grad_norm)) for each in self.ring.steps}

    def replay(self, step: int) -> ReplaySession:
        return ReplaySession(Replayer(self.bench.objects, names_of(self.bench.objects)), self.ring, step)


CLIPS = {
    "norm": tw.make_clip("norm", 0.05),
    "value": tw.make_clip("value", 0.001),
    "agc": tw.make_clip("agc", 0.01),
    "none": tw.make_clip("none"),
    "custom": halve,
}


@pytest.mark.parametrize("clip", list(CLIPS))
@pytest.mark.parametrize("how", ["fp32", "bf16", "fp16", "weighted"])
def test_a_step_taken_again_is_the_same_bits(clip: str, how: str) -> None:
    precision = tw.Precision("fp32" if how == "weighted" else how, "cpu")
    loss = weighted if how == "weighted" else nn.CrossEntropyLoss()
    run = Run(clip=CLIPS[clip], precision=precision, micro=2, loss=loss)
    model, optimizer = run.state.model, run.state.optimizer
    before = {name: value.clone() for name, value in model.state_dict().items()}
    rng = torch.get_rng_state()

    session = run.replay(STEPS)
    result = session.run(upto="step")

    parameters = dict(model.named_parameters())
    assert all(torch.equal(result.after[name], value) for name, value in parameters.items())
    assert not all(torch.equal(result.before[name], value) for name, value in parameters.items())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), rng) and len(optimizer.state) == len(parameters)
    program = session.recorded_step.program
    assert sum(isinstance(each, Call) for each in program) == sum(isinstance(each, Backward) for each in program) == 2
    assert [each.by for each in program if isinstance(each, ClipGradients)] == ([] if clip == "none" else [clip])
    assert sum(isinstance(each, Multiply) for each in program) == (how in ("fp16", "weighted"))
    assert [call.batch for call in session.recorded_step.calls] == [0, 1]


def test_only_the_steps_that_are_asked_for_have_a_program() -> None:
    run = Run(clip=CLIPS["norm"], precision=tw.Precision("fp32", "cpu"), micro=1, loss=nn.CrossEntropyLoss())
    assert not any(each.program for each in run.ring.steps)
    run.ring.add_snapshot(run.bench.objects.snapshot(STEPS + 1))
    run.replay(3)
    assert [each.step for each in run.ring.steps if each.program] == [1, 2, 3]
    assert [each.step for each in run.ring.recorded(3)] == [1, 2, 3]


def test_the_state_before_the_newest_step_is_kept_where_there_is_room() -> None:
    run = Run(clip=CLIPS["norm"], precision=tw.Precision("fp32", "cpu"), micro=1, loss=nn.CrossEntropyLoss())
    kept = run.replay(STEPS).base()
    assert [each.step for each in run.ring.snapshots] == [1, STEPS] and kept is run.ring.snapshots[-1]
    run.ring.snapshots.pop()
    again = run.replay(STEPS).base()  # by the programs of the steps before
    assert kept.groups == again.groups and kept.attributes == again.attributes and kept.hooks == again.hooks
    for ours, theirs in zip([*kept.parameters, *kept.buffers], [*again.parameters, *again.buffers]):
        assert ours is theirs is None or torch.equal(ours, theirs)
    for number, state in kept.states[0].items():
        assert all(torch.equal(value, again.states[0][number][key]) for key, value in state.items())

    small = Run(clip=CLIPS["norm"], precision=tw.Precision("fp32", "cpu"), micro=1, loss=nn.CrossEntropyLoss())
    small.ring.budget_bytes = small.ring.num_bytes + kept.num_bytes - 1
    small.replay(STEPS)
    assert [each.step for each in small.ring.snapshots] == [1]


def test_an_input_that_was_written_to_is_not_taken_again() -> None:
    run = Run(clip=CLIPS["norm"], precision=tw.Precision("fp32", "cpu"), micro=1, loss=nn.CrossEntropyLoss())
    x, _ = run.ring.inputs_of(STEPS).batch.micro[0].data
    x.zero_()
    assert run.ring.steps_to(STEPS) is None
    assert run.ring.steps_to(STEPS - 1) is not None


class Counting(nn.Module):
    """It keeps a mean of what it sees in a tensor that is no buffer, and writes to it in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.mean = nn.Linear(6, 3), torch.zeros(6)

    def forward(self, x: Tensor) -> Tensor:
        self.mean.lerp_(x.mean(0), 0.1)
        return self.layer(x - self.mean)


class CountingInAList(Counting):
    """It keeps the mean in a list that another attribute refers to, and counts the calls in that list."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = [torch.zeros(6), 0]
        self.same = {"kept": self.kept}

    def forward(self, x: Tensor) -> Tensor:
        mean, calls = self.same["kept"]
        self.kept[1] = calls + 1
        return self.layer(x - mean.lerp_(x.mean(0), 0.1) / (calls + 1))


class CountingInADict(Counting):
    def __init__(self) -> None:
        super().__init__()
        self.kept = {"mean": torch.zeros(6)}

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x - self.kept["mean"].lerp_(x.mean(0), 0.1))


class CountingInATuple(Counting):
    def __init__(self) -> None:
        super().__init__()
        self.kept = (torch.zeros(6), "mean")
        self.mean = self.kept[0]

    def forward(self, x: Tensor) -> Tensor:
        self.mean.lerp_(x.mean(0), 0.1)
        return self.layer(x - self.kept[0])


def kept_in(model: nn.Module) -> list[object]:
    return [each for name in ("mean", "kept") for each in entries_of(getattr(model, name, None))]


@pytest.mark.parametrize("net", [Counting, CountingInAList, CountingInADict, CountingInATuple])
def test_a_tensor_that_a_forward_pass_writes_to_is_restored_and_is_the_live_one_again(net: type[nn.Module]) -> None:
    run = Run(clip=CLIPS["norm"], precision=tw.Precision("fp32", "cpu"), micro=1, loss=nn.CrossEntropyLoss(), net=net)
    model = run.state.model
    live, kept = dict(vars(model)), kept_in(model)
    before = [each.tolist() if isinstance(each, Tensor) else each for each in kept]
    result = run.replay(STEPS).run(upto="step")
    assert all(torch.equal(result.after[name], value) for name, value in model.named_parameters())
    assert all(value is live[name] for name, value in vars(model).items())
    assert all(now is then for now, then in zip(kept_in(model), kept, strict=True))
    assert [each.tolist() if isinstance(each, Tensor) else each for each in kept] == before


def test_no_batch_is_held_that_the_budget_has_no_room_for() -> None:
    ring = InputRing(keep=32, budget_bytes=1000, record=lambda snapshot, steps: None)
    recorder = InputRecorder()
    state = tw.TrainState(model := nn.Linear(6, 3), torch.optim.SGD(model.parameters(), 0.1))
    for step in range(1, 41):
        recorder.step_begins(state, batch(step, micro=4), TorchGenerators.read(torch.device("cpu")))
        assert recorder.newest is not None and recorder.newest.num_bytes > 1000
        ring.add_with_inputs(RecordedStep(step), recorder.newest)
    with pytest.raises(KeyError):
        ring.inputs_of(1)


def test_the_record_of_a_step_is_made_once_when_it_is_asked_for() -> None:
    ring = InputRing(keep=32, budget_bytes=1e9, record=lambda snapshot, steps: None)
    recorder, asked = InputRecorder(), list[int]()

    def make(step: int) -> RecordedStep:
        asked.append(step)
        return RecordedStep(step)

    state = tw.TrainState(model := nn.Linear(6, 3), torch.optim.SGD(model.parameters(), 0.1))
    for state.step in range(60):
        recorder.step_begins(state, batch(state.step + 1, micro=4), TorchGenerators.read(torch.device("cpu")))
        assert recorder.newest is not None
        ring.add_inputs([recorder.newest], [partial(make, state.step + 1)])
    assert not asked and not ring.holds(1) and ring.holds(60)
    newest = ring.made(60)
    assert newest.num_bytes == recorder.newest.num_bytes and ring.steps[-1] is newest
    assert sorted(asked) == [each.step for each in ring.steps]
    ring.clear()
    assert not ring.steps and not ring.holds(60)
