"""The laws of the resources: on real loops, and on readings made by hand of what takes long to grow."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
import torch.nn.functional as F
from tests.doctor.law_loops import Change, Loop, broken, found, states, watched
from torch import Tensor, nn
from trainwright.doctor.resources.facts import GrowthFacts, HeldResources
from trainwright.doctor.resources.measure import EVERY, FIRST, Growth

from tests.rows import each_row
from trainwright.doctor.context import RunContext
from trainwright.doctor.diagnose import diagnose
from trainwright.recorder.probes import WatchedObjects
from trainwright.recorder.program import RecordedStep
from trainwright.runlog.json_values import strict
from trainwright.runlog.records import Examined, Record, Watched, from_json, to_json
from trainwright.state.snapshot import LiveObjects
from trainwright.world.memory import unfreed_bytes

pytestmark = pytest.mark.slow  # watched loops, each of a few tenths of a second

MIB = 2**20


def growth() -> Growth:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Growth(WatchedObjects(subject=LiveObjects([model], [optimizer], list(model.parameters()))))


def grown(step: Callable[[int], object]) -> set[str]:
    """The laws that are broken by what each of 208 steps holds."""
    probe = growth()
    for number in range(1, 209):
        step(number)
        probe.on_closed(RecordedStep(number))
    return broken_by([logged(Examined(time_s=0.0, step=208, experiment="growth", values=probe.values() or {}))])


KINDS: dict[str, Callable[[], object]] = {
    "tensors": lambda: torch.ones(2**19),
    "arrays": lambda: np.ones(2**18),
    "texts": lambda: "x" * 2**21,
    "objects": lambda: [bytes(400) for _ in range(2**12)],  # Python's own arenas have these, and malloc none
}
"""Of about 2 MiB each: the law asks for a tenth of what the process holds, and one that ran other tests holds much."""


@each_row("kind", KINDS)
def test_what_is_kept_of_each_step_grows(kind: str) -> None:
    kept: list[object] = []
    assert grown(lambda n: kept.append(KINDS[kind]())) == {"memory_does_not_grow"}


def test_pages_of_a_file_and_freed_blocks_are_not_held(tmp_path: Path) -> None:
    np.zeros(2**27, dtype=np.uint8).tofile(tmp_path / "tokens.bin")
    tokens = np.memmap(tmp_path / "tokens.bin", dtype=np.uint8, mode="r")
    rss = psutil.Process().memory_info().rss
    assert grown(lambda n: tokens[(n - 1) * 2**19 : n * 2**19].sum()) == set()
    assert psutil.Process().memory_info().rss > rss + 64 * MIB  # it has them in memory
    blocks = [torch.ones(2**12) for _ in range(2**13)]
    before, last = unfreed_bytes(), blocks.pop()
    blocks.clear()
    assert last.numel() and before - unfreed_bytes() > 120 * MIB


def test_after_the_first_steps_readings_wait_for_their_share_of_the_time() -> None:
    probe = growth()
    for step in range(1, 10_001):  # in a moment
        probe.on_closed(RecordedStep(step))
    held = [each["step"] for each in (probe.values() or {})["held"]]
    assert held[: FIRST // EVERY] == list(range(EVERY, FIRST + 1, EVERY))
    assert len(held) < 2 * FIRST // EVERY


def hooked(loop: Loop) -> None:
    """Registers a hook in each step, and removes none."""
    loop.begin = lambda step: loop.model.get_submodule("1").register_forward_hook(lambda *args: None)


def hooked_on_a_weight(loop: Loop) -> None:
    loop.begin = lambda step: next(loop.model.parameters()).register_hook(lambda grad: None)


def hooked_and_removed(loop: Loop) -> None:
    def begin(step: int) -> None:
        loop.model.register_forward_hook(lambda *args: None).remove()

    loop.begin = begin


def features_kept(loop: Loop) -> None:
    """A list of what a layer gives, with the graph behind it."""
    kept: list[Tensor] = []
    loop.model.get_submodule("1").register_forward_hook(lambda module, args, output: kept.append(output))


def features_kept_without_graph(loop: Loop) -> None:
    kept: list[Tensor] = []
    loop.model.get_submodule("1").register_forward_hook(lambda module, args, output: kept.append(output.detach()))


def losses_kept(loop: Loop) -> None:
    kept: list[Tensor] = []

    def loss(out: Tensor, y: Tensor) -> Tensor:
        kept.append(F.cross_entropy(out, y))
        return kept[-1]

    loop.loss = loss


@pytest.mark.parametrize("change", [hooked_and_removed, features_kept_without_graph])
def test_the_laws_hold_on_a_healthy_loop(change: Change) -> None:
    assert broken(watched(change, steps=66), "resources") == set()


@pytest.mark.parametrize(("change", "module"), [(hooked, "1"), (hooked_on_a_weight, "")])
def test_hooks_that_are_added_in_each_step(change: Change, module: str) -> None:
    assert found(watched(change, steps=66), "law.resources.hooks_do_not_grow").where.module == module


@pytest.mark.parametrize("change", [features_kept, losses_kept])
def test_tensors_that_are_kept_with_their_graph(change: Change) -> None:
    gc.collect()  # what the test before has kept would be collected meanwhile
    assert "graphs_are_released" in broken(watched(change, steps=34), "resources")


def test_what_was_looked_at_is_told() -> None:
    state = states(watched(steps=66), "resources")
    assert state["hooks_do_not_grow"].why == "0 hooks after step 64"
    assert (state["data_are_there_in_time"].state, state["steps_keep_their_time"].state) == (
        "not applicable",
        "not looked at",
    )


def readings(change: Callable[[int, HeldResources], HeldResources], *, number: int = 20) -> list[Record]:
    """What was held after every 16th step, as it comes back from a log."""
    held = [HeldResources(step=16 * n, memory_bytes=500 * MIB, files=9, threads=4) for n in range(1, number + 1)]
    facts = GrowthFacts(held=tuple(change(n, each) for n, each in enumerate(held)))
    return [logged(Examined(time_s=0.0, step=16 * number, experiment="growth", values=strict(vars(facts))))]


def steps(step_s: Callable[[int], float], wait_s: Callable[[int], float] = lambda n: 0.0) -> list[Record]:
    def step(n: int) -> Watched:
        values = {"step_s": step_s(n), "wait_s": wait_s(n)}
        return Watched(time_s=0.0, step=n, loss=1.0, grad_norm=1.0, lr=0.1, values=values)

    return [logged(step(n)) for n in range(1, 121)]


def logged(record: Record) -> Record:
    return from_json(to_json(record))


def broken_by(records: list[Record]) -> set[str]:
    laws = diagnose(RunContext(records, finished=True)).laws
    return {each.name.removeprefix("resources.") for each in laws if each.state == "broken"}


FILES = {"files_and_threads_do_not_grow"}


@each_row(
    ("records", "expected"),
    [
        (readings(lambda n, held: held), set()),
        (readings(lambda n, held: replace(held, files=9 + n)), set()),
        (readings(lambda n, held: replace(held, files=9 + 8 * n)), FILES),
        (readings(lambda n, held: replace(held, files=9 + 8 * (n % 5))), set()),
        (readings(lambda n, held: replace(held, threads=4 + 2 * n)), FILES),
        (readings(lambda n, held: replace(held, threads=4 + min(n, 8))), set()),
        (readings(lambda n, held: replace(held, memory_bytes=(500 + 20 * n) * MIB)), {"memory_does_not_grow"}),
        (readings(lambda n, held: replace(held, device_bytes=(100 + 20 * n) * MIB)), {"memory_does_not_grow"}),
        (readings(lambda n, held: replace(held, memory_bytes=(500 + 50 * min(n, 8)) * MIB)), set()),
        (readings(lambda n, held: replace(held, memory_bytes=(500 + 40 * (n % 4)) * MIB)), set()),
        (steps(lambda n: 0.001), set()),
        (steps(lambda n: 0.001 + 0.0001 * n), {"steps_keep_their_time"}),
        (steps(lambda n: 0.001 + 0.01 * (n > 60)), set()),
        (steps(lambda n: 0.001 * (1 + n % 3)), set()),
        (steps(lambda n: 0.021, lambda n: 0.02), {"data_are_there_in_time"}),
        (steps(lambda n: 0.0011, lambda n: 0.001), set()),
        (steps(lambda n: 0.1, lambda n: 0.02), set()),
    ],
    ids=lambda value: str(value)[-60:],
)
def test_what_grows_is_told_from_what_is_filled(records: list[Record], expected: set[str]) -> None:
    assert broken_by(records) == expected
