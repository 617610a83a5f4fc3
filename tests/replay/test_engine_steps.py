"""A step of the engine is replayed to the same bits, whatever it is made of, and leaves no trace."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import trainwright as tw
from trainwright.checkpoint.cursor import MicroBatch, StepBatch
from trainwright.checkpoint.snapshot import LiveObjects, entries_of
from trainwright.optim.clip import ClipFn
from trainwright.recorder.engine_source import EngineSource, engine_recorder
from trainwright.recorder.hooks import listening
from trainwright.recorder.program import Backward, Call, ClipGradients, Multiply
from trainwright.recorder.ring import Ring
from trainwright.replay.replayer import Replayer
from trainwright.replay.session import ReplaySession
from trainwright.replay.stage import NotReplayable
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
    """Seven recorded steps."""

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

        self.ring = Ring(keep=32, budget_bytes=math.inf)
        recorder = engine_recorder(self.state, self.ring.add, 1)
        source = EngineSource(recorder)
        self.objects = LiveObjects(recorder.roots, recorder.optimizers, recorder.parameters)
        advance = tw.make_step(loss, clip=clip, precision=precision, witness=source)
        self.ring.add_snapshot(self.objects.snapshot(1))
        with listening([recorder], recorder.roots):
            for step in range(1, STEPS + 1):
                source.end_step(advance(self.state, batch(step, micro)))
        assert recorder.failed is None

    def replay(self, step: int) -> ReplaySession:
        return ReplaySession(Replayer(self.objects, names_of(self.objects)), self.ring, step)


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


def test_an_input_that_was_written_to_is_not_replayed() -> None:
    run = Run(clip=CLIPS["norm"], precision=tw.Precision("fp32", "cpu"), micro=1, loss=nn.CrossEntropyLoss())
    run.replay(STEPS).inputs[0].zero_()
    with pytest.raises(NotReplayable, match="written to"):
        run.replay(STEPS).run()
    assert run.replay(STEPS - 1).run().error is None


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
        return self.layer(x - mean.lerp_(x.mean(0), 0.1) / (calls + 1))  # type: ignore[attr-defined]


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


def test_a_step_whose_optimizer_calls_a_closure_is_not_replayed() -> None:
    model, (x, y) = nn.Linear(6, 3), (torch.randn(8, 6), torch.randint(3, (8,)))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        return loss

    with tw.watch(model, optimizer, out=None, quiet=True, examine="listen") as watch:
        session = watch.session
        for _ in range(4):
            optimizer.step(closure)  # type: ignore[arg-type]
        played = ReplaySession(session.runner.replayer, session.ring, 3)
        assert len(played.run(upto="backward").losses) == 1
        with pytest.raises(NotReplayable, match="computes the loss itself"):
            played.run(upto="step")
