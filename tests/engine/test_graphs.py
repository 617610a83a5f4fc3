"""Captured steps, with a back end that runs the captured Python function again instead of a CUDA graph."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import trainwright as tw
from trainwright.checkpoint.codec import same_bits
from trainwright.engine.graphs import MAX_CAPTURES, WARM_UP_STEPS, CudaGraphs, StepGraphs
from trainwright.engine.step import make_step
from trainwright.training.job import Job

T = TypeVar("T")
EAGER_STEPS = WARM_UP_STEPS + 1
"""Steps before the capture: the first one makes the moments of the optimizer, and with them a new state."""


class RepeatedCalls(CudaGraphs):
    """Replays by calling the function again. As a capture changes nothing, what it wrote is put back."""

    def __init__(self, *states: tw.TrainState, fraction: float = 1.0) -> None:
        self.states, self.fraction = states, fraction
        self.is_capturing = False
        self.warm_ups = self.captures = self.replays = 0

    def warm_up(self, work: Callable[[], T]) -> T:
        self.warm_ups += 1
        return work()

    def capture(self, work: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        self.captures += 1
        live = [each for state in self.states for each in tensors_of(state)]
        before, draws = [each.detach().clone() for each in live], torch.get_rng_state()
        self.is_capturing = True
        try:
            outputs = work()
        finally:
            self.is_capturing = False
            torch.set_rng_state(draws)
            with torch.no_grad():
                for each, value in zip(live, before, strict=True):
                    each.copy_(value)
        static = [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in tree_leaves(outputs)]
        kept = iter(static)
        outputs = torch.utils._pytree.tree_map(lambda leaf: next(kept), outputs)

        def replay() -> None:
            self.replays += 1
            for place, leaf in zip(static, tree_leaves(work()), strict=True):
                if isinstance(place, Tensor):
                    place.copy_(leaf)

        return outputs, replay

    def launch_fraction(self, work: Callable[[], T]) -> tuple[T, float]:
        return work(), self.fraction


def tensors_of(state: tw.TrainState) -> list[Tensor]:
    moments = [value for own in state.optimizer.state.values() for value in own.values() if isinstance(value, Tensor)]
    return [*state.model.parameters(), *state.model.buffers(), *moments]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))


def state_of(model: nn.Module, optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW) -> tw.TrainState:
    return tw.TrainState(model, optimizer(model.parameters(), lr=0.015625, fused=True))  # type: ignore[call-arg]


def batches(sizes: Callable[[int], int] = lambda step: 8, accumulation: int = 2) -> Iterator[tw.StepBatch]:
    draw, step = torch.Generator().manual_seed(1), 0
    while True:
        step += 1
        micro = []
        for _ in range(accumulation):
            x = torch.randn(sizes(step), 6, generator=draw)
            micro.append(tw.MicroBatch((x, x[:, :3].argmax(1)), np.arange(len(x))))
        yield tw.StepBatch(tuple(micro), tw.Cursor(0, step))


def halving(step: int, fraction: float) -> float:
    """Exact in float32, so that the learning rate is the same number on the device."""
    return 0.5 ** (step // 4)


def train(
    state: tw.TrainState, steps: int, graphs: StepGraphs | None, stream: Iterator[tw.StepBatch] | None = None
) -> list[Tensor]:
    torch.manual_seed(3)
    advance = make_step(nn.CrossEntropyLoss(), schedule=halving, clip=tw.make_clip("norm", 0.5), graphs=graphs)
    results = list(tw.steps(state, stream or batches(), advance, until=tw.for_steps(state.step + steps)))
    return [each.loss for each in results]


def trained(
    steps: int = 12, **about: object
) -> tuple[tw.TrainState, list[Tensor], StepGraphs, RepeatedCalls, list[str]]:
    said: list[str] = []
    state = state_of(net())
    backend = RepeatedCalls(state, **about)  # type: ignore[arg-type]
    graphs = StepGraphs(backend, report=said.append)
    return state, train(state, steps, graphs), graphs, backend, said


def assert_same_run(state: tw.TrainState, losses: list[Tensor], stream: Iterator[tw.StepBatch] | None = None) -> None:
    eager = state_of(net())
    expected = train(eager, len(losses), None, stream)
    assert all(same_bits(a, b) for a, b in zip(losses, expected, strict=True))
    assert all(same_bits(a, b) for a, b in zip(tensors_of(state), tensors_of(eager), strict=True))


def test_replayed_steps_train_to_the_bits_of_eager_steps() -> None:
    state, losses, graphs, backend, said = trained()
    assert (backend.warm_ups, backend.captures, backend.replays) == (1, 1, 12 - EAGER_STEPS)
    assert graphs.ended == "" and said == [] and graphs.num_replays == 12 - EAGER_STEPS
    assert state.step == 12 and state.num_samples == 12 * 16 and state.optimizer.param_groups[0]["lr"] == 0.015625 / 4
    assert_same_run(state, losses)


def test_each_shape_has_a_graph() -> None:
    state = state_of(net())
    backend = RepeatedCalls(state)
    graphs = StepGraphs(backend)
    losses = train(state, 16, graphs, batches(lambda step: 8 if step % 2 else 5))
    assert (backend.captures, graphs.num_replays, graphs.ended) == (2, 16 - EAGER_STEPS - WARM_UP_STEPS, "")
    assert_same_run(state, losses, batches(lambda step: 8 if step % 2 else 5))


def test_too_many_shapes_end_the_graphs() -> None:
    said: list[str] = []
    state = state_of(net())
    graphs = StepGraphs(RepeatedCalls(state), report=said.append)
    steps = (MAX_CAPTURES + 1) * (WARM_UP_STEPS + 1) + 1
    sizes = lambda step: 4 + max(0, step - 2) // (WARM_UP_STEPS + 1)  # noqa: E731
    losses = train(state, steps, graphs, batches(sizes, 1))
    assert graphs.num_captures == MAX_CAPTURES and len(said) == 1 and f"{MAX_CAPTURES} graphs" in said[0]
    assert_same_run(state, losses, batches(sizes, 1))


def test_a_model_that_reads_a_value_in_its_forward_pass_runs_eagerly() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = net()
            self.backend: RepeatedCalls | None = None

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.inner(x)
            random.random()
            if self.backend is not None and self.backend.is_capturing:
                raise RuntimeError("Cannot copy between CPU and CUDA tensors during CUDA graph capture\nmore")
            return out

    random.seed(0)
    model = Reads()
    state, said = state_of(model), list[str]()
    model.backend = RepeatedCalls(state)
    graphs = StepGraphs(model.backend, report=said.append)
    losses = train(state, 8, graphs)
    assert graphs.num_replays == 0 and model.backend.captures == 1
    assert said == [
        "the capture raised RuntimeError: Cannot copy between CPU and CUDA tensors during CUDA graph capture"
    ]
    assert_same_run(state, losses)
    drawn = random.random()
    random.seed(0)
    train(state_of(Reads()), 8, None)
    assert random.random() == drawn, "the failed capture has drawn no number"


def test_a_replay_that_differs_from_the_eager_step_is_not_used() -> None:
    class Wrong(RepeatedCalls):
        def capture(self, work: Callable[[], T]) -> tuple[T, Callable[[], None]]:
            outputs, replay = super().capture(work)

            def replay_wrongly() -> None:
                replay()
                with torch.no_grad():
                    next(iter(self.states[0].model.parameters()))[0, 0] += 1e-3

            return outputs, replay_wrongly

    state, said = state_of(net()), list[str]()
    losses = train(state, 8, StepGraphs(Wrong(state), report=said.append))
    assert len(said) == 1 and "differs from the eager step in 1 values: 0.weight" in said[0]
    assert_same_run(state, losses)


def test_numbers_drawn_on_the_host_are_not_repeated() -> None:
    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = net()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.inner(x)
            return out * (1.0 if random.random() < 0.5 else 2.0)

    random.seed(0)
    state, said = state_of(Skips()), list[str]()
    losses = train(state, 8, StepGraphs(RepeatedCalls(state), report=said.append))
    assert said == ["the step draws random numbers on the host, which a graph would repeat"]
    random.seed(0)
    assert all(same_bits(a, b) for a, b in zip(losses, train(state_of(Skips()), 8, None), strict=True))


def test_loading_a_state_makes_the_graph_invalid() -> None:
    state = state_of(net())
    backend = RepeatedCalls(state)
    graphs = StepGraphs(backend)
    train(state, 6, graphs)
    state.optimizer.load_state_dict(state.optimizer.state_dict())
    train(state, 6, graphs)
    assert backend.captures == 2 and graphs.ended == ""


def test_a_step_that_must_run_eagerly_is_followed_by_replays() -> None:
    state = state_of(net())
    graphs = StepGraphs(RepeatedCalls(state), runs_eagerly=lambda state: state.step in (5, 9))
    losses = train(state, 14, graphs)
    assert graphs.num_replays == 14 - EAGER_STEPS - 2
    assert_same_run(state, losses)


@pytest.mark.parametrize(("fraction", "replays"), [(0.5, 0), (0.97, 7)], ids=["device-bound", "launch-bound"])
def test_auto_captures_steps_that_wait_for_the_host(fraction: float, replays: int) -> None:
    said: list[str] = []
    state = state_of(net())
    backend = RepeatedCalls(state, fraction=fraction)
    graphs = StepGraphs(backend, only_if_launch_bound=True, report=said.append)
    losses = train(state, 12, graphs)
    assert graphs.num_replays == replays
    assert said == (
        [] if replays else ["the host launches a step in 50% of its time, so a graph would not make it faster"]
    )
    assert_same_run(state, losses)


def test_an_update_that_is_not_finite_is_skipped_and_named() -> None:
    def poisoned() -> Iterator[tw.StepBatch]:
        for batch in batches():
            if batch.cursor.position == 8:
                batch.micro[0].data[0].fill_(torch.nan)
            yield batch

    state = state_of(net())
    graphs = StepGraphs(RepeatedCalls(state))
    losses = train(state, 10, graphs, poisoned())
    state.ledger.read_pending()
    assert graphs.num_replays == 6 and [each.step for each in state.ledger.entries] == [8]
    assert_same_run(state, losses, poisoned())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda state: setattr(state, "scaler", tw.Precision("fp16", "cpu").scaler(torch.device("cpu"))),
            "precision: bf16",
        ),
        (lambda state: setattr(state, "optimizer", torch.optim.Rprop(state.model.parameters())), "Rprop cannot skip"),
    ],
    ids=["loss-scale", "optimizer"],
)
def test_what_needs_the_host_in_each_step_runs_eagerly(change: Callable[[tw.TrainState], None], reason: str) -> None:
    said: list[str] = []
    state = state_of(net())
    change(state)
    graphs = StepGraphs(RepeatedCalls(state), report=said.append)
    train(state, 5, graphs)
    assert len(said) == 1 and reason in said[0] and graphs.num_captures == 0


@pytest.mark.slow
def test_a_run_under_the_doctor_replays_the_steps_that_are_not_recorded_in_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recorder keeps the inputs of replayed steps, and examines them eagerly."""
    made: list[StepGraphs] = []

    def graphs_of(job: Job, report: Callable[[str], None], runs_eagerly: Callable[[tw.TrainState], bool]) -> StepGraphs:
        made.append(StepGraphs(RepeatedCalls(job.state), runs_eagerly=runs_eagerly, report=report))
        return made[0]

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("trainwright.training.open_run.step_graphs", graphs_of)
    monkeypatch.setattr("trainwright.watching.session.LONG_STEP_S", 60.0)
    x = torch.randn(256, 6)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.015625, fused=True)
    data = (x, x[:, :3].argmax(1))
    result = tw.fit(model, data, nn.CrossEntropyLoss(), until="200steps", optimizer=optimizer, batch=32, quiet=True)
    assert result.ending == "finished" and made[0].ended == "" and made[0].num_replays > 50
    assert not {"resources.graphs_not_used"} & {each.code for each in result.findings}
