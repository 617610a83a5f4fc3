"""Steps of the engine that are recorded by their batch alone, and whose programs are recorded when they are needed."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import trainwright as tw
from trainwright.checkpoint.cursor import MicroBatch, StepBatch
from trainwright.engine.precision import Precision
from trainwright.engine.step import StepFn
from trainwright.errors import DataError
from trainwright.optim.clip import make_clip
from trainwright.recorder.listener import has_listeners
from trainwright.recorder.probes import Probe
from trainwright.recorder.program import Call, RecordedStep
from trainwright.recorder.user_types import Args, Kwargs
from trainwright.replay.session import ReplaySession
from trainwright.runs.records import Examined, Record, Watched
from trainwright.watching import session as sessions
from trainwright.watching.engine import EngineSession
from trainwright.watching.session import CALM_AFTER, FULL_EVERY

STEP = CALM_AFTER + FULL_EVERY // 2
"""A step that is deferred."""
LossFn = Callable[[nn.Module, tuple[Tensor, Tensor]], Tensor]


@pytest.fixture(autouse=True)
def not_lifted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRAINWRIGHT_EXAMINE")


class Net(nn.Module):
    """Has dropout, running statistics and, for large inputs, a logarithm of a negative number."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))

    def forward(self, x: Tensor) -> Tensor:
        gain: Tensor = (10.0 - x.amax()).log()
        out: Tensor = self.body(x) * gain
        return out


def batch(step: int, *, label: int | None = None, largest: float = 0.0) -> StepBatch:
    draw = torch.Generator().manual_seed(step)
    x = torch.randn(8, 4, generator=draw)
    x[0, 0] += largest
    y = torch.randint(3, (8,), generator=draw) if label is None else torch.full((8,), label)
    return StepBatch((MicroBatch((x, y), np.arange(8) + 8 * step),))


def by_hand(model: nn.Module, both: tuple[Tensor, Tensor]) -> Tensor:
    x, y = both
    return F.cross_entropy(model(x), y)


class Run:
    """A session over the engine, with the records that it wrote."""

    def __init__(
        self,
        *,
        clip: float | None = None,
        precision: str = "fp32",
        loss: object = by_hand,
        make: Callable[[], nn.Module] = Net,
    ) -> None:
        torch.manual_seed(0)
        self.model = make()
        self.state = tw.TrainState(self.model, torch.optim.Adam(self.model.parameters(), 0.01))
        self.written: list[Record] = []
        self.session = EngineSession(self.state, write=self.written.append)
        clips = make_clip("none") if clip is None else make_clip("norm", clip)
        how = Precision(precision, "cpu")  # type: ignore[arg-type]
        step = tw.make_step(loss, clip=clips, precision=how, witness=self.session.witness)  # type: ignore[arg-type]
        self.advance: StepFn = self.session.around(step)
        self.losses: list[float] = []

    def train(self, last: int) -> None:
        for step in range(len(self.losses) + 1, last + 1):
            self.one(batch(step))

    def one(self, of: StepBatch) -> None:
        result = self.advance(self.state, of)
        self.losses.append(float(result.loss))
        self.session.observe(result, self.state)


@pytest.fixture
def run() -> Run:
    return Run()


def is_deferred(run: Run, step: int) -> bool:
    run.session.catch_up()
    return next(each for each in run.session.ring.steps if each.step == step).inputs is not None


class Checkpointed(Net):
    """Computes its body again in the backward pass."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(super().forward, self.first(x), use_reentrant=self.reentrant)
        return out


def compiled() -> nn.Module:
    model: nn.Module = torch.compile(Net(), backend="eager")  # type: ignore[assignment]
    return model


def require_same_bits(run: Run, step: int) -> None:
    """A replay of the newest step gives the loss and the weights of the run, and changes nothing."""
    run.session.catch_up()
    before = [each.clone() for each in (*run.model.parameters(), *run.model.buffers())]
    generator = torch.get_rng_state()
    replayed = ReplaySession(run.session.runner.replayer, run.session.ring, step).run(upto="step")
    assert replayed.loss == run.losses[-1]
    live = dict(zip(run.session.runner.replayer.names, run.session.runner.replayer.subject.parameters))
    assert all(torch.equal(replayed.after[name], weight) for name, weight in live.items())
    assert all(map(torch.equal, before, (*run.model.parameters(), *run.model.buffers())))
    assert torch.equal(generator, torch.get_rng_state())


@pytest.mark.slow
@pytest.mark.parametrize(("clip", "precision"), [(None, "fp32"), (0.1, "fp32"), (1.0, "bf16")])
def test_a_deferred_step_is_replayed_with_the_same_bits(clip: float | None, precision: str) -> None:
    run = Run(clip=clip, precision=precision)
    run.train(STEP)
    assert is_deferred(run, STEP) and is_deferred(run, STEP - 1)
    require_same_bits(run, STEP)
    run.session.leave()


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(compiled, id="compiled"),
        pytest.param(lambda: Checkpointed(reentrant=False), id="checkpointed"),
        pytest.param(lambda: Checkpointed(reentrant=True), id="reentrant checkpoint"),
    ],
)
def test_steps_of_other_forward_passes_are_deferred(make: Callable[[], nn.Module]) -> None:
    run = Run(make=make)
    run.train(STEP)
    assert is_deferred(run, STEP) and is_deferred(run, STEP - 1)
    require_same_bits(run, STEP)
    (call,) = next(each for each in run.session.ring.steps if each.step == STEP).calls
    assert call.part == ""
    run.session.leave()


@pytest.mark.slow
def test_a_thread_with_another_model_is_no_part_of_a_deferred_step() -> None:
    def train(losses: list[float], stopped: threading.Event, steps: int) -> None:
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        with torch.no_grad():
            for n, each in enumerate(model.parameters()):
                each.copy_(torch.linspace(-1, 1, each.numel()).reshape(each.shape) / (n + 1))
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        x = torch.linspace(-1, 1, 32).reshape(8, 4)
        while len(losses) < steps or (not stopped.is_set() and len(losses) < 100_000):
            optimizer.zero_grad()
            loss = (model(x) - 1.0).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))

    run = Run(make=lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)))
    losses: list[float] = []
    stopped = threading.Event()
    thread = threading.Thread(target=train, args=(losses, stopped, 1))
    thread.start()
    try:
        run.train(STEP)
        assert is_deferred(run, STEP) and len(losses) > 1
        require_same_bits(run, STEP)
    finally:
        stopped.set()
        thread.join()
    recorded = next(each for each in run.session.ring.steps if each.step == STEP)
    assert len(recorded.calls) == 1 and len(recorded.updates) == 1 and len(recorded.losses) == 1
    run.session.leave()
    alone: list[float] = []
    train(alone, stopped, len(losses))
    assert losses == alone


@pytest.mark.slow
def test_two_threads_with_a_session_each_replay_their_deferred_steps() -> None:
    def train(n: int) -> None:
        run = runs[n]
        for last in range(STEP, STEP + 5):
            run.train(last)
            together.wait()  # both replay at the same time
            require_same_bits(run, last)
            together.wait()
        run.session.leave()

    def failing(n: int) -> None:
        try:
            train(n)
        except Exception as error:
            raised.append(error)
            together.abort()

    raised: list[Exception] = []
    shown = warnings.showwarning
    together = threading.Barrier(2, timeout=60)
    runs = [Run(make=lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))) for _ in range(2)]
    threads = [threading.Thread(target=failing, args=(n,)) for n in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert raised == []
    assert runs[0].losses == runs[1].losses
    assert warnings.showwarning is shown


@pytest.mark.slow
def test_a_step_that_is_not_finite_is_traced_to_its_operation(run: Run) -> None:
    run.train(STEP - 1)
    run.one(batch(STEP, largest=1000.0))  # it is examined at once
    (trace,) = [each for each in run.written if isinstance(each, Examined) and each.experiment == "trace"]
    assert trace.step == STEP and "log" in str(trace.values)
    assert trace.values.get("blind") is None
    run.session.leave()


@pytest.mark.slow
def test_the_operation_of_a_step_that_raised_is_known(run: Run) -> None:
    run.train(STEP - 1)
    with pytest.raises(DataError) as raised:
        run.advance(run.state, batch(STEP, label=7))
    weights = [each.clone() for each in run.model.parameters()]
    run.session.end(raised.value)
    (unfinished,) = [each for each in run.written if isinstance(each, Examined) and each.experiment == "unfinished"]
    assert unfinished.step == STEP and "cross_entropy" in unfinished.values["failed"]["op"]
    assert all(map(torch.equal, weights, run.model.parameters()))


@pytest.mark.slow
def test_an_interrupted_step_leaves_the_thread_with_its_events() -> None:
    def interrupted(model: nn.Module, both: tuple[Tensor, Tensor]) -> Tensor:
        if len(run.losses) == STEP - 1:  # type: ignore[attr-defined]
            raise KeyboardInterrupt
        return by_hand(model, both)

    run = Run(loss=interrupted)
    run.train(STEP - 1)
    assert run.session.is_next_deferred
    with pytest.raises(KeyboardInterrupt):
        run.advance(run.state, batch(STEP))
    assert has_listeners()
    run.session.leave()


@pytest.mark.slow
def test_after_an_incident_every_step_is_recorded_again(run: Run) -> None:
    run.train(STEP - 1)
    run.one(batch(STEP, largest=1000.0))
    run.train(STEP + CALM_AFTER // 2)
    assert not any(each.inputs for each in run.session.ring.steps if each.step > STEP)
    run.session.leave()


@pytest.mark.slow
def test_records_of_deferred_steps_have_the_events_of_the_others(run: Run) -> None:
    run.train(CALM_AFTER + 4 * FULL_EVERY)
    run.session.end(None)
    steps = [each for each in run.written if isinstance(each, Watched) and each.step > CALM_AFTER + 1]
    assert any(each.step % FULL_EVERY > 1 for each in steps), "a deferred step is among them"
    kinds = {tuple(kind for kind, _ in each.events) for each in steps}
    assert kinds in ({("forward", "backward", "step")}, {("zero_grad", "forward", "backward", "step")})
    assert all(each.loss == pytest.approx(run.losses[each.step - 1], rel=1e-6) for each in steps)


class Order(Probe):
    """The order of steps and of calls without gradients."""

    observes_every_step = True

    def __init__(self) -> None:
        self.heard: list[str] = []

    def on_forward_without_grad(self, root: nn.Module, args: Args, kwargs: Kwargs) -> None:
        self.heard.append("evaluation")

    def on_closed(self, step: RecordedStep) -> None:
        self.heard.append(str(step.step))


@pytest.mark.slow
def test_deferred_steps_are_reported_together_and_before_the_next_event(monkeypatch: pytest.MonkeyPatch) -> None:
    order = Order()
    monkeypatch.setattr(sessions, "LISTENERS", (lambda watched: order,))
    run = Run()
    run.train(CALM_AFTER + 2)
    for step in range(CALM_AFTER + 3, CALM_AFTER + 4 * FULL_EVERY):
        run.train(step)
        if len(order.heard) < step:
            break
    assert len(order.heard) < step, "it waits"
    with torch.no_grad():
        run.model(torch.zeros(2, 4))
    run.train(step + 8)
    run.session.end(None)
    expected = [str(each) for each in range(1, step + 9)]
    assert order.heard == [*expected[:step], "evaluation", *expected[step:]]


@pytest.mark.slow
def test_a_loss_that_runs_the_model_twice_is_never_deferred() -> None:
    def twice(model: nn.Module, both: tuple[Tensor, Tensor]) -> Tensor:
        x, y = both
        return F.cross_entropy(model(x), y) + 0.1 * F.cross_entropy(model(x + 0.01), y)

    run = Run(loss=twice)
    run.train(STEP)
    assert not any(each.inputs for each in run.session.ring.steps)
    assert sum(isinstance(each, Call) for each in run.session.ring.steps[-1].program) == 2
    run.session.leave()


@pytest.mark.slow
def test_training_has_the_same_bits_with_deferred_steps(run: Run) -> None:
    run.train(STEP + 40)
    run.session.end(None)
    torch.manual_seed(0)
    model = Net()
    state = tw.TrainState(model, torch.optim.Adam(model.parameters(), 0.01))
    advance = tw.make_step(by_hand)
    for step in range(1, STEP + 41):
        advance(state, batch(step))
    assert all(map(torch.equal, run.model.parameters(), model.parameters()))
    assert all(map(torch.equal, run.model.buffers(), model.buffers()))


def hook_names(model: nn.Module) -> list[list[str]]:
    return [
        [type(each).__name__ for each in hooks.values()] for hooks in (model._forward_pre_hooks, model._forward_hooks)
    ]


def test_a_deferred_step_calls_the_model_without_the_recorders_hooks(run: Run) -> None:
    during: dict[int, list[list[str]]] = {}
    run.model.register_forward_pre_hook(
        lambda module, args: during.update({len(run.losses) + 1: hook_names(run.model)})
    )
    run.train(STEP)
    assert is_deferred(run, STEP) and during[STEP] == [["function"], []]
    assert during[1] == [["Hook", "function"], ["Hook"]]
    assert hook_names(run.model) == during[1]  # also in their order: the recorder's first, then the loop's
    run.session.close()


def test_hooks_are_back_after_a_deferred_step_that_raises(run: Run) -> None:
    run.train(STEP - 1)

    def fail(module: nn.Module, args: object) -> None:
        raise ValueError("a hook of the loop")

    handle = run.model.register_forward_pre_hook(fail)
    assert run.session.is_next_deferred
    with pytest.raises(ValueError, match="of the loop"):
        run.one(batch(STEP))
    handle.remove()
    assert hook_names(run.model) == [["Hook"], ["Hook"]]
    run.session.close()


def test_a_session_that_could_not_begin_leaves_the_error_of_a_step(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("the watch")

    monkeypatch.setattr(sessions.WatchSession, "begin", fail)
    run.model.register_forward_pre_hook(lambda module, args: {}["of the loop"])
    with pytest.raises(KeyError, match="of the loop"):
        run.one(batch(1))
