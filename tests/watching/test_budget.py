"""What examinations may take, in seconds of a clock that the tests turn."""

from __future__ import annotations

import gc
import math
import random
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import trainwright as tw
from trainwright.doctor.finding import ExperimentRequest
from trainwright.doctor.measure import REPLAYS
from trainwright.replay.experiments import Experiment
from trainwright.replay.session import ReplaySession
from trainwright.runs.json_values import Facts
from trainwright.runs.records import Examined, Unexamined
from trainwright.watching.budget import END_S, EVIDENCE_S, FREE_S, ExaminationBudget
from trainwright.watching.experiments import ExperimentRunner

EXPERIMENTS = {each.name: each for each in REPLAYS}

CPU = torch.device("cpu")


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self, passed_s: float = 0.0) -> float:
        self.now_s += passed_s
        return self.now_s


@pytest.fixture(autouse=True)
def not_lifted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRAINWRIGHT_EXAMINE")


@pytest.fixture
def clock() -> Clock:
    return Clock()


def trained(budget: ExaminationBudget, clock: Clock, *step_s: float) -> ExaminationBudget:
    for each in step_s:
        clock.now_s += each
        budget.train()
        assert budget.trained_s >= 0.0  # the clock is read
    return budget


def spend(budget: ExaminationBudget, clock: Clock, seconds: float) -> None:
    with budget.spending():
        clock.now_s += seconds


def test_examinations_get_three_hundredths_of_the_first_seconds_and_one_of_the_later_ones(clock: Clock) -> None:
    budget = trained(ExaminationBudget(CPU, clock=clock), clock, *[1.0] * 100)
    assert budget.left_s == pytest.approx(3.0)
    spend(budget, clock, 2.0)
    assert budget.left_s == pytest.approx(1.0) and budget.trained_s == pytest.approx(100.0), "that was no training"
    trained(budget, clock, 100.0)
    assert budget.left_s == pytest.approx(2.0)


def test_however_short_a_run_is_it_may_spend_a_little_and_each_examination_half_of_it(clock: Clock) -> None:
    budget = trained(ExaminationBudget(CPU, clock=clock), clock, 1e-3)
    assert budget.left_s == pytest.approx(FREE_S / 2)
    spend(budget, clock, FREE_S / 2)
    assert budget.left_s == pytest.approx(FREE_S / 4) and budget.left_at_end_s == pytest.approx(FREE_S / 2, rel=0.1)


def test_the_end_takes_at_most_five_hundredths_of_the_run_and_three_seconds(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "perf_counter", clock)  # the thread has the processor for itself
    budget = trained(ExaminationBudget(CPU, clock=clock), clock, *[1.0] * 50)
    spend(budget, clock, 1.5)
    assert budget.left_at_end_s == pytest.approx(0.05 * 50 - 1.5)
    trained(budget, clock, 1000.0)
    assert budget.left_at_end_s == END_S


def test_the_seconds_at_the_end_are_of_the_wall(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that has a quarter of a processor gets a quarter of them."""
    monkeypatch.setattr(time, "perf_counter", lambda: 4 * clock())
    budget = trained(ExaminationBudget(CPU, clock=clock), clock, *[1.0] * 1000)
    assert budget.left_at_end_s == pytest.approx(END_S / 4)


def test_what_follows_evidence_has_seconds_of_its_own(clock: Clock) -> None:
    budget = trained(ExaminationBudget(CPU, clock=clock), clock, 1e-3)
    spend(budget, clock, 0.5)
    budget.spent_on_evidence_s += 0.5
    assert budget.left_for_evidence_s == EVIDENCE_S - 0.5 and budget.left_s == pytest.approx(FREE_S / 2)
    trained(budget, clock, *[1.0] * 50)
    assert budget.left_s == pytest.approx(1.5, rel=1e-3), "evidence is in addition"


def test_the_first_step_that_is_not_finite_may_take_longer(clock: Clock) -> None:
    budget = trained(ExaminationBudget(CPU, clock=clock), clock, 1.0, 1.0)
    assert budget.left_for_incident_s == pytest.approx(8 * budget.step_s)
    budget.has_replayed_incident = True
    assert budget.left_for_incident_s == budget.left_s


def test_a_step_takes_as_long_as_the_fastest_of_the_last_ones(clock: Clock) -> None:
    budget = trained(ExaminationBudget(CPU, clock=clock), clock, 2.0, *[0.5, 9.0, 0.4] * 3)
    assert budget.step_s == pytest.approx(0.4)


def test_on_a_gpu_the_clock_is_that_of_the_wall() -> None:
    wall, processor = ExaminationBudget(torch.device("cuda")), ExaminationBudget(CPU)
    before_s = wall.clock(), processor.clock()
    time.sleep(0.2)
    assert wall.clock() - before_s[0] > 0.19 and processor.clock() - before_s[1] < 0.1


@pytest.mark.parametrize("how", ["argument", "environment"])
def test_the_limit_can_be_lifted(how: str, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "environment":
        monkeypatch.setenv("TRAINWRIGHT_EXAMINE", "all")
    budget = ExaminationBudget(CPU, "all" if how == "argument" else "budget", clock)
    spend(budget, clock, 1e6)
    assert budget.left_s == budget.left_at_end_s == float("inf")


class Slow(nn.Module):
    """Its forward pass takes 0.4 s of the clock, its backward pass 0.6 s.

    It does not refer to the clock: a replay puts back what a model refers to.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        time.thread_time(0.4)  # type: ignore[call-arg]
        hidden = torch.tanh(self.first(x))
        if hidden.requires_grad:
            hidden.register_hook(self._backward)  # type: ignore[no-untyped-call]
        out: Tensor = self.last(hidden)
        return out

    def _backward(self, gradient: Tensor) -> None:
        time.thread_time(0.6)  # type: ignore[call-arg]


@pytest.fixture
def slow(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    monkeypatch.setattr(time, "thread_time", clock)
    monkeypatch.setattr(time, "perf_counter", clock)
    torch.manual_seed(0)
    yield Slow()


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
    x, y = torch.randn(16, 6), torch.arange(16) % 3
    for _ in range(count):
        optimizer.zero_grad()
        F.cross_entropy(model(x.clone()), y).backward()
        optimizer.step()


def replayed(watch: tw.Watch) -> list[str]:
    """The experiments that replay a step; the loss of the first step is seen without one."""
    slow = {name for name, each in EXPERIMENTS.items() if each.steps >= 0.3} - {"loss"}
    facts = [each for each in watch.records if isinstance(each, Examined) and each.experiment in slow]
    return [each.experiment for each in facts if "blind" not in each.values]


@pytest.mark.slow
@pytest.mark.parametrize("count", [20, 300])
def test_steps_of_a_second_never_wait_longer_than_they_have_earned(slow: Slow, count: int) -> None:
    """An experiment is not begun where it is predicted to take longer, and stopped where it does."""
    optimizer = torch.optim.SGD(slow.parameters(), 0.1)
    watch = tw.watch(slow, optimizer, out=None, quiet=True)
    spent = []
    with watch:
        for _ in range(count):
            steps(slow, optimizer, 1)
            spent.append((watch.session.budget.spent_s, watch.session.budget.trained_s))
    over = [(a, b) for a, b in spent if a > 0.03 * b + 1.0]  # a replay that is under way is not cut
    assert over == []
    budget = watch.session.budget
    assert budget.spent_s <= 0.04 * budget.trained_s + 1.0
    assert bool(replayed(watch)) == (count > 20), "a run that has earned a replay has made one"


def test_the_loss_of_the_first_step_is_examined_without_a_replay(slow: Slow, clock: Clock) -> None:
    optimizer = torch.optim.SGD(slow.parameters(), 0.1)
    x, y = torch.randn(16, 6), torch.arange(16) % 3
    with tw.watch(slow, optimizer, out=None, quiet=True) as watch:
        F.cross_entropy(slow(x).softmax(1), y).backward()
        optimizer.step()
        assert [each.code for each in watch.findings()] == ["loss.softmax_before_cross_entropy"]
        assert clock.now_s == pytest.approx(1.0)


def test_what_found_no_time_is_recorded(slow: Slow) -> None:
    optimizer = torch.optim.SGD(slow.parameters(), 0.1)
    with tw.watch(slow, optimizer, out=None, quiet=True) as watch:
        steps(slow, optimizer, 3)
    (left,) = [each for each in watch.records if isinstance(each, Unexamined)]
    assert {"update", "structure"} <= set(left.experiments) and left.step == 3 and left.bundle is None
    assert "again" not in left.experiments, "no check reads it"
    assert left.trained_s == pytest.approx(3.0) and left.examined_s == watch.session.budget.spent_s


def test_seconds_in_which_the_thread_waits_are_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainwright.watching.budget.FREE_S", 0.0)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with tw.watch(model, optimizer, out=None, quiet=True) as watch:
        for _ in range(3):
            steps(model, optimizer, 1)
            time.sleep(0.2)
    (left,) = [each for each in watch.records if isinstance(each, Unexamined)]
    budget = watch.session.budget
    assert left.examined_s == budget.spent_s, "with the examination at the end"
    assert left.trained_s == budget.trained_s < 0.6


def test_where_everything_found_time_nothing_is_left() -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with tw.watch(model, optimizer, out=None, quiet=True, examine="all") as watch:
        steps(model, optimizer, 4)
    assert [each for each in watch.records if isinstance(each, Unexamined)] == [] and "again" in replayed(watch)


@pytest.mark.parametrize("examine", ["budget", "all"])
def test_an_examination_of_more_than_a_second_is_announced(slow: Slow, examine: Any) -> None:
    optimizer = torch.optim.SGD(slow.parameters(), 0.1)
    said: list[str] = []
    with tw.watch(slow, optimizer, out=None, quiet=True, examine=examine) as watch:
        watch.session.runner._say = said.append
        steps(slow, optimizer, 1 if examine == "all" else 100)
    assert any(line.startswith("examining a step: it is replayed for more than 1 s") for line in said)
    assert any("at most" in line for line in said) == (examine == "budget")


def test_a_model_of_which_steps_are_short_is_examined_early() -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with tw.watch(model, optimizer, out=None, quiet=True) as watch:
        steps(model, optimizer, 4)
    assert len(set(replayed(watch))) > 4


def experiment(name: str, run: Callable[[ReplaySession], Facts], *, steps: float) -> Experiment:
    return Experiment(name, "first", run, memory=1.0, steps=steps, value=1.0, latest=math.inf)


def examined_by(watch: tw.Watch, *experiments: Experiment) -> None:
    watch.session.runner._experiments = {each.name: each for each in experiments}


def names_in(watch: tw.Watch) -> list[str]:
    return [e.experiment for e in watch.records if isinstance(e, Examined) and e.experiment in ("long", "short")]


@pytest.mark.slow
def test_the_time_of_an_experiment_that_cannot_be_stopped_is_charged(slow: Slow, clock: Clock) -> None:
    """Between two instructions of a replay nothing is stopped: what follows waits until the run has earned it."""

    def without_a_replay(session: ReplaySession) -> Facts:
        clock.now_s += 3.0
        return {}

    optimizer = torch.optim.SGD(slow.parameters(), 0.1)
    with tw.watch(slow, optimizer, out=None, quiet=True) as watch:
        short = experiment("short", lambda session: {}, steps=0.0)
        examined_by(watch, experiment("long", without_a_replay, steps=0.0), short)
        steps(slow, optimizer, 1)
        assert watch.session.budget.spent_s >= 3.0 and names_in(watch) == ["long"], "the next one found no time"
        steps(slow, optimizer, 95)
        assert names_in(watch) == ["long"]
        steps(slow, optimizer, 20)  # 3 % of 116 s
        assert names_in(watch) == ["long", "short"]


@pytest.mark.slow
def test_an_experiment_that_was_stopped_does_not_hold_up_the_others(slow: Slow) -> None:
    def for_ever(session: ReplaySession) -> Facts:
        while True:
            session.run()

    optimizer = torch.optim.SGD(slow.parameters(), 0.1)
    with tw.watch(slow, optimizer, out=None, quiet=True) as watch:
        short = experiment("short", lambda session: {}, steps=0.6)
        examined_by(watch, experiment("long", for_ever, steps=0.5), short)
        steps(slow, optimizer, 96)
        assert names_in(watch) == ["short"]
        assert watch.session.budget.spent_s <= 0.03 * watch.session.budget.trained_s + 1.0
    assert watch.session.runner.not_run() == ["long"]


class Mixed(Slow):
    """Adds the output of a neighbour to that of each sample."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out + out.roll(1, 0)


Captured = pytest.CaptureFixture[str]


@pytest.mark.parametrize("check", [True, False], ids=["check", "budget"])
def test_a_check_finds_in_the_first_step_what_the_budget_has_no_time_for(
    slow: Slow, capsys: Captured, check: bool
) -> None:
    model, rows = Mixed(), TensorDataset(torch.randn(256, 6), torch.arange(256) % 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with tw.watch(model, optimizer, out=None, check=check) as watch:
        batches = iter(DataLoader(rows, batch_size=16, shuffle=True))

        def step() -> None:
            x, y = next(batches)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

        step()
        assert [each.code for each in watch.findings()] == ["model.mixes_samples"] * check
        lines = capsys.readouterr().err.splitlines()
        assert any(line.startswith("1. warning: model.mixes_samples") for line in lines) == check
        assert any(line.startswith("check: step 1 was examined in full before the next") for line in lines) == check
        assert watch.session.budget.spent_s < 1.0, "the check takes nothing of the budget"
        for _ in range(8):
            step()
        assert watch.session.budget.spent_s < 1.0, "later steps keep to the budget"


def test_a_check_of_a_healthy_step_says_what_was_examined(slow: Slow, capsys: Captured) -> None:
    optimizer = torch.optim.SGD(slow.parameters(), 0.1)
    with tw.watch(slow, optimizer, out=None, check=True) as watch:
        steps(slow, optimizer, 1)
        lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("examining")]
        assert watch.session.runner.not_run() == [] and watch.findings() == []
    assert [line.partition(":")[0].split()[0] for line in lines] == ["check", "diagnosis", "examined"]
    assert lines[1] == "diagnosis: nothing found" and "1 recorded step, 1 of them replayed" in lines[2]


@pytest.mark.parametrize(
    ("make", "model", "said"),
    [
        (lambda p: torch.optim.SGD(p, 0.1), nn.LazyLinear(3), "check: step 2 was examined in full before the next one"),
        (
            lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
            nn.Linear(6, 3),
            "check: step 4 was examined without a replay: ",
        ),
    ],
    ids=["lazy", "lbfgs"],
)
def test_a_check_waits_a_little_for_a_step_that_can_be_replayed(
    make: Any, model: nn.Module, said: str, capsys: Captured
) -> None:
    x, y = torch.randn(16, 6), torch.arange(16) % 3
    optimizer = make(model.parameters())

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    with tw.watch(model, optimizer, out=None, check=True):
        for _ in range(5):
            optimizer.step(closure)
    assert [line.startswith(said) for line in capsys.readouterr().err.splitlines() if line.startswith("check:")] == [
        True
    ]


def test_a_check_of_a_loop_without_such_a_step_says_so(capsys: Captured) -> None:
    model = nn.Linear(6, 3)
    with tw.watch(model, torch.optim.SGD(model.parameters(), 0.1), out=None, check=True):
        model(torch.randn(4, 6)).sum().backward()
    assert "check: the loop ended before a step that can be replayed" in capsys.readouterr().err


def test_a_check_without_replays_is_refused() -> None:
    model = nn.Linear(6, 3)
    with pytest.raises(tw.TrainwrightError, match="check=True replays a step"):
        tw.watch(model, torch.optim.SGD(model.parameters(), 0.1), out=None, check=True, examine="listen")


def test_a_check_leaves_every_bit_as_it_was() -> None:
    def trained(count: int, *, check: bool) -> list[Any]:
        torch.manual_seed(3)
        random.seed(3)
        np.random.seed(3)
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        with tw.watch(model, optimizer, out=None, quiet=True, check=True) if check else nullcontext():
            steps(model, optimizer, count)
            moments = [value for state in optimizer.state.values() for value in state.values()]
            kept = [each.clone() for each in (*model.state_dict().values(), *moments, torch.get_rng_state())]
            grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            return [*kept, *grads, torch.tensor(random.random()), torch.tensor(np.random.rand())]

    for count in (1, 4):
        pairs = list(zip(trained(count, check=True), trained(count, check=False), strict=True))
        assert len(pairs) > 20 and all(torch.equal(a, b) for a, b in pairs)


def test_a_trial_that_finds_no_time_is_made_later(slow: Slow, clock: Clock) -> None:
    """A finding is written at once, and again with what its remedy came to."""
    optimizer = torch.optim.SGD(slow.parameters(), 0.1)
    x, y = torch.randn(16, 6), torch.arange(16) % 3
    with tw.watch(slow, optimizer, out=None, quiet=True) as watch:
        for _ in range(8):
            optimizer.zero_grad()
            F.cross_entropy(slow(x).softmax(1), y).backward()
            optimizer.step()
        runner: ExperimentRunner = watch.session.runner
        (found,) = watch.findings()
        assert found.tried == () and runner._trials
        clock.now_s += 5000.0
        for _ in range(64):
            optimizer.zero_grad()
            F.cross_entropy(slow(x).softmax(1), y).backward()
            optimizer.step()
            if not runner._trials:
                break
    assert [each.tried for each in watch.findings() if each.code == found.code] != [()] and not runner._trials


def test_full_collections_do_not_count() -> None:
    budget = ExaminationBudget(CPU)
    held: list[object] = [[] for _ in range(300_000)]
    with budget.spending():
        begin_s = time.thread_time()
        for _ in range(5):
            gc.collect()
        took_s = time.thread_time() - begin_s
    assert held and took_s > 0.01 and budget.spent_s < took_s / 4
    clocks = len(gc.callbacks)
    del budget
    gc.collect()
    assert len(gc.callbacks) == clocks - 1


def test_requests_for_two_steps_are_made_one_after_the_other() -> None:
    model, x = nn.Linear(4, 3), torch.randn(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with tw.watch(model, optimizer, out=None, quiet=True, examine="listen") as watch:
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        runner = ExperimentRunner(watch.session.runner.replayer.subject, watch.session.ring, ExaminationBudget(CPU))
        requests = [ExperimentRequest("update", step) for step in (1, 3)]
        measured = [runner.run_requested(3, requests)["update"]["step"] for _ in requests]
    assert measured == [1, 3]
