"""What a loop keeps is seen while it runs."""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.doctor.checks.loops import alarms, mlp, watched
from trainwright.checkpoint.snapshot import LiveObjects
from trainwright.doctor.context import RunContext
from trainwright.doctor.diagnose import diagnose
from trainwright.doctor.discovery import check_of
from trainwright.doctor.measure.memory import MAX_READINGS, Growth, _python_objects
from trainwright.recorder.probes import WatchedObjects
from trainwright.recorder.program import RecordedStep
from trainwright.runs.records import Examined


def growth() -> Growth:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Growth(WatchedObjects(subject=LiveObjects([model], [optimizer], list(model.parameters()))))


KINDS: dict[str, Callable[[], object]] = {
    "tensors": lambda: torch.ones(2**19),
    "arrays": lambda: np.ones(2**18),
    "texts": lambda: "x" * 2**21,
    "objects": lambda: [bytes(400) for _ in range(2**12)],  # Python's own arenas have these, and malloc none
}
"""Of about 2 MiB each."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_kept_of_each_step_grows(kind: str) -> None:
    kept, probe, check = [], growth(), check_of("resources.memory_grows")
    assert check is not None
    for number in range(1, 209):
        kept.append(KINDS[kind]())
        probe.on_closed(RecordedStep(number))
    record = Examined(time_s=0.0, step=208, experiment="growth", values=probe.values() or {})
    assert diagnose(RunContext([record]), [check]).findings


def test_readings_of_a_long_run_are_thinned_out() -> None:
    probe = growth()
    for step in range(1, 10_001):
        probe.on_closed(RecordedStep(step))
    held = [each["step"] for each in (probe.values() or {})["held"]]
    assert MAX_READINGS // 2 <= len(held) <= MAX_READINGS
    assert held[-1] > 9_000 and len({after - before for before, after in pairwise(held)}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("removes", [False, True])
def test_hooks(removes: bool) -> None:
    model = mlp()

    def hook() -> None:
        handle = model[0].register_forward_hook(lambda *args: None)
        if removes:
            handle.remove()

    watch = watched(model, steps=66, after_update=hook)
    assert ("resources.hooks_grow" in alarms(watch)) == (not removes)


@pytest.mark.slow
@pytest.mark.parametrize("keep", ["loss", "loss.detach()", "output", "output.detach()"])
def test_what_is_kept_with_its_graph(keep: str) -> None:
    gc.collect()  # what another test has kept would be collected meanwhile
    kept: list[Tensor] = []

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        output = model(x)
        made = F.cross_entropy(output, y)
        value = made if keep.startswith("loss") else output
        kept.append(value.detach() if "detach" in keep else value)
        return made

    assert ("resources.graphs_kept" in alarms(watched(mlp(), loss=loss, steps=40))) == ("detach" not in keep)


def test_python_objects_of_a_dataset() -> None:
    class Texts:
        def __init__(self, rows: object) -> None:
            self.rows = rows

        def __getitem__(self, n: int) -> object:
            return n

    assert _python_objects(Texts([{"text": "a", "id": 1}] * 1000)) == 3000
    assert _python_objects(Texts(Texts({n: n for n in range(500)}))) == 500
    assert _python_objects(Texts(np.zeros(1000))) == 0


class Counting(nn.Module):
    """A model whose calls are counted in an attribute, which torch.compile takes for a constant."""

    def __init__(self, *, counts: bool) -> None:
        super().__init__()
        self.layers, self.counts, self.calls = mlp(), counts, 0

    def forward(self, x: Tensor) -> Tensor:
        if self.counts:
            self.calls += 1
        out: Tensor = self.layers(x * (1 + 1e-6 * self.calls))
        return out


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("counts", [True, False])
def test_a_model_that_is_compiled_again(counts: bool) -> None:
    torch._dynamo.reset()
    model = Counting(counts=counts)
    model.compile(backend="aot_eager")

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        size = 16 if counts else 15 + int(x[0, 0] > 0)  # lengths that vary are compiled once more, for any size
        return F.cross_entropy(model(x[:size]), y[:size])

    found = [each for each in watched(model, loss=loss).findings() if each.code == "resources.recompiles"]
    assert bool(found) == counts
    if counts:
        assert "stopped compiling" in found[0].symptom and found[0].where.source is not None
        assert "self.calls" in str(found[0].evidence)
