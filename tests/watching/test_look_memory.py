"""What a look takes of the memory: it leaves nothing behind, and where it runs out of it the run does not notice."""

from __future__ import annotations

import gc
import json
import sys
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from typing import cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trainwright as tw
from tests import forked
from trainwright.recorder.hooks import listening
from trainwright.recorder.probes import Probe
from trainwright.replay.memory import NOT_ENOUGH_MEMORY, ReplayMemory, _input_bytes
from trainwright.replay.replayer import NotReplayable
from trainwright.runs.records import Examined


class Mark:
    """Lives as long as the graph that it is put into."""


class Marking(nn.Module):
    """Puts a mark into the graph of each forward pass. ``is_short`` of memory where a step is replayed."""

    def __init__(self, is_short: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 3)
        self.alive: weakref.WeakSet[Mark] = weakref.WeakSet()
        self.is_short, self.is_live = is_short, False

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        if hidden.grad_fn is not None:
            mark = Mark()
            cast("dict[str, object]", hidden.grad_fn.metadata)["mark"] = mark
            self.alive.add(mark)
        if self.is_short and not self.is_live:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return cast("Tensor", self.last(hidden))


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def train(model: Marking, steps: int, *, watching: bool = True) -> tuple[tw.Watch, list[int]]:
    """Returns the watch, and how many graphs are alive after each step."""
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    x, y = torch.randn(16, 8), torch.randint(3, (16,))
    alive = []
    watch = tw.watch(model, optimizer, out=None, quiet=True)
    with watch if watching else nullcontext():
        for _ in range(steps):
            optimizer.zero_grad()
            model.is_live = True
            F.cross_entropy(model(x.clone()), y).backward()
            model.is_live = False
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            alive.append(len(model.alive))
    return watch, alive


@pytest.mark.usefixtures("no_collector")
def test_a_look_leaves_no_graph_behind() -> None:
    watch, alive = train(Marking(), 6)
    looked_at = {each.step for each in watch.records if isinstance(each, Examined)}
    assert {1, 2, 3, 4, 6} <= looked_at and alive == [0] * 6


@pytest.mark.usefixtures("no_collector")
def test_another_loop_within_a_step_leaves_nothing_behind() -> None:
    """As of a probe that is trained on the model between two steps: its losses are not those of the watched loop."""
    torch.manual_seed(0)
    model, other = nn.Linear(8, 3), Marking()
    optimizer, others = (torch.optim.AdamW(each.parameters(), 1e-3) for each in (model, other))
    held = []
    with tw.watch(model, optimizer, out=None, quiet=True) as watch:
        for step in range(20):
            x, y = torch.randn(16, 8), torch.randint(3, (16,))
            each, its = (model, optimizer) if step in (0, 1, 19) else (other, others)
            its.zero_grad()
            F.cross_entropy(each(x), y).backward()
            its.step()
            tape = watch.session.recording.tape
            held.append((len(other.alive), len(tape.operations), tape.num_bytes))
    assert watch.step == 3 and watch.session.failures == []
    assert held[3:19] == [held[3]] * 16 and held[3][0] == 0


@pytest.mark.usefixtures("no_collector")
def test_a_look_that_runs_out_of_memory_says_so_and_frees_all() -> None:
    torch.manual_seed(0)
    model = Marking(is_short=True)
    watch, alive = train(model, 4)
    blind = {each.experiment: each.values.get("blind") for each in watch.records if isinstance(each, Examined)}
    assert str(blind["again"]).startswith(NOT_ENOUGH_MEMORY) and alive == [0] * 4
    assert not [found for found in watch.findings() if found.severity == "critical"]
    assert watch.session.failures == []

    torch.manual_seed(0)
    alone = Marking(is_short=True)
    train(alone, 4, watching=False)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), alone.parameters(), strict=True))


def test_what_needs_more_than_there_is_does_not_begin() -> None:
    watch, _ = train(Marking(), 2)
    runner = watch.session.runner
    session = runner._session_of(2)
    runner._memory.require(session, 1.0)
    with pytest.raises(
        NotReplayable, match=rf"{NOT_ENOUGH_MEMORY}: it needs about [\d,]+ MiB, but [\d,]+ MiB are free"
    ):
        runner._memory.require(session, 1e12, is_capped=False)


def test_an_experiment_takes_twice_as_much_as_the_step_at_most() -> None:
    """However much is free."""
    watch, _ = train(Marking(), 2)
    session = watch.session.runner._session_of(2)
    memory = ReplayMemory()
    memory._bytes_by_size = {_input_bytes(session.recorded_step): 2**30}
    memory._free_step, memory._free = 2, 2**40
    memory.require(session, 1.9)
    with pytest.raises(
        NotReplayable, match=rf"{NOT_ENOUGH_MEMORY}: it needs about [\d,]+ MiB, but its limit is 2,048 MiB"
    ):
        memory.require(session, 4.0)
    memory.require(session, 4.0, is_capped=False)


PEAKS = """
import json, sys
import torch
from torch import nn
import torch.nn.functional as F
import trainwright as tw
from trainwright.watching import experiments
from pathlib import Path
from trainwright.distributed.memory import held_bytes, return_large_blocks

from trainwright.doctor.measure import REPLAYS
EXPERIMENTS = {each.name: each for each in REPLAYS}

return_large_blocks()
torch.set_num_threads(1)
cpu = torch.device("cpu")

def start_peak():
    Path("/proc/self/clear_refs").write_text("5")

def peak_bytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))

class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 2)
    def forward(self, x):
        return self.last(torch.tanh(self.first(x)[:, :, None].expand(-1, -1, 32768) * 1.5).mean(2))

class Runner(experiments.ExperimentRunner):
    def _run(self, names, step):
        facts = {}
        for name in names:
            before = held_bytes(cpu)
            start_peak()
            found = super()._run([name], step)
            if found and "blind" not in found[name]:
                weights = 3 * sum(p.nbytes for p in model.parameters())
                step_bytes = weights + self._memory._batch_bytes(self._session_of(step))
                foretold = step_bytes * EXPERIMENTS[name].memory
                peaks.append([name, peak_bytes() - before, held_bytes(cpu) - before, foretold])
            facts |= found
        return facts

def conv():
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 2))

peaks = []
torch.manual_seed(0)
for model, x in ((Wide(), torch.randn(8, 8)), (conv(), torch.randn(16, 3, 32, 32))):
    y = torch.randint(2, (len(x),))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    watch = tw.watch(model, optimizer, out=None, quiet=True)
    watch.session.runner.__class__ = Runner
    with watch:
        for _ in range(1):
            optimizer.zero_grad()
            F.cross_entropy(model(x.clone()), y).backward()
            optimizer.step()
print(json.dumps(peaks))
"""
NOISE_BYTES = 6 * 2**20
"""What a look keeps when it runs for the first time: code, buffers of kernels of float64, records."""


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
def test_each_experiment_takes_what_was_foretold_at_most_and_gives_it_back() -> None:
    done = forked.run(PEAKS)
    assert done.returncode == 0, done.stderr
    peaks = json.loads(done.stdout.splitlines()[-1])
    assert len({name for name, *_ in peaks}) > 10
    assert [row for row in peaks if row[1] > row[3] + NOISE_BYTES] == []
    assert [row for row in peaks if row[2] > NOISE_BYTES] == []


def test_activations_are_freed_where_a_listener_fails(no_collector: None) -> None:
    """A listener that runs out of memory must not hold what it was called with."""

    class Failing(Probe):
        name = "failing"

        def on_output(self, root: nn.Module, output: object) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    model = Marking()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    with tw.watch(model, optimizer, out=None, quiet=True) as watch:
        with listening([failing := Failing()], [model]):
            F.cross_entropy(model(torch.randn(16, 8)), torch.randint(3, (16,)))
        assert isinstance(failing.failed, torch.OutOfMemoryError)
        assert len(model.alive) == 0
        assert watch.session.failures == []


def test_a_micro_batch_is_freed_before_the_next(no_collector: None) -> None:
    """Measurements of layers and losses hold no tensors of the micro-batches before."""
    model = Marking()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    alive: list[int] = []

    def backward() -> weakref.ref[Tensor]:
        logits = model(torch.randn(16, 8)).view(-1, 3)
        loss = F.nll_loss(F.log_softmax(logits, 1), torch.randint(3, (16,)))
        (loss + (logits - torch.randn(16, 3)).square().mean()).backward()  # type: ignore[no-untyped-call]
        return weakref.ref(logits)

    with tw.watch(model, optimizer, out=None, quiet=True):
        for _ in range(3):
            held = [backward() for _ in range(3)]
            alive.append(sum(each() is not None for each in held))
            optimizer.step()
            optimizer.zero_grad()
    assert alive == [0, 0, 0]
