"""Checks of memory on records made by hand: a cache that is flushed in each step, and its look-alikes.

The counter itself is torch's, of CUDA; here it is only read from a dictionary of the shape that torch gives.
"""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from trainwright.doctor.resources.names.shortage import thrashing

from tests.rows import each_row
from trainwright.doctor.context import RunContext
from trainwright.doctor.finding import Finding
from trainwright.observe.telemetry import allocator_values
from trainwright.runlog.records import Telemetry, from_json, to_json

GIB = float(2**30)


def readings(
    retries: list[float], *, every: int = 20, allocated: float = 70 * GIB, reserved: float = 78 * GIB, device: int = 0
) -> list[Telemetry]:
    """One reading each ``every`` steps, as they come back from a log."""
    made = []
    for number, count in enumerate(retries):
        own = {"allocator_retries": count, "allocated_bytes": allocated, "reserved_bytes": reserved}
        values = {f"cuda{device}/{name}": value for name, value in own.items()} | {"gpu0/busy_percent": 99.0}
        record = from_json(to_json(Telemetry(time_s=10.0 * number, step=every * number, values=values)))
        assert isinstance(record, Telemetry)
        made.append(record)
    return made


def found(*records: Telemetry) -> list[Finding]:
    said = list(thrashing(RunContext(records, finished=True)))
    assert all(isinstance(each, Finding) for each in said)
    return [each for each in said if isinstance(each, Finding)]


def test_a_cache_that_is_flushed_in_each_step() -> None:
    (said,) = found(*readings([0, 2, 22, 43, 63, 83]))
    assert (said.found.code, said.found.step, said.found.since_step) == ("mem.thrashing", 100, 21)
    assert "81 times in steps 21 to 100, 1 times a step" in said.found.symptom
    assert said.found.remedy.startswith("a smaller batch.micro")
    assert "expandable_segments:True" in said.found.remedy


def test_fragmented_memory_is_defragmented_first() -> None:
    (said,) = found(*readings([0, 20, 40, 60], allocated=50 * GIB))
    assert said.found.remedy.startswith("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True")
    assert "max_split_size_mb" in said.found.remedy
    assert "fragmentation" in said.found.cause


def test_steps_of_half_a_minute_have_a_reading_each() -> None:
    (said,) = found(*readings([0, 0, 1, 3, 4], every=1))
    assert (said.found.step, said.found.since_step) == (4, 2)


@each_row(
    "retries",
    [
        [],
        [5],
        [0] * 20,
        [0, 30, 30, 30, 30],  # the first steps
        list(accumulate([0, *[0, 0, 0, 6] * 6])),  # an evaluation now and then
        list(accumulate([0, *[2] * 20])),  # one batch in ten is longer
        [0, 20, 40, 3, 23, 43],  # a resumed process counts from 0: two and two
    ],
    ids=str,
)
def test_a_few_flushes_are_usual(retries: list[float]) -> None:
    assert found(*readings(retries)) == []


def test_one_device_of_two() -> None:
    both = zip(readings([0.0] * 5), readings([0, 20, 40, 60, 80], device=1), strict=True)
    (said,) = found(*[each for pair in both for each in pair])
    assert said.found.step == 80


def test_no_telemetry_of_an_allocator_says_nothing() -> None:
    host = Telemetry(time_s=0.0, step=1, values={"host/process_cpu_percent": 100.0})
    assert found(host, host) == []


def test_what_torch_counts_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    stats = {
        "num_alloc_retries": 7,
        "allocated_bytes": {"all": {"current": 3 * 2**30}},
        "reserved_bytes": {"all": {"current": 2**32}},
    }
    monkeypatch.setattr("torch.cuda.memory.memory_stats_as_nested_dict", lambda device=None: stats)
    monkeypatch.setattr("torch.cuda.memory_stats_as_nested_dict", lambda device=None: stats)
    values = allocator_values(torch.device("cuda", 1))
    assert values == {"cuda1/allocator_retries": 7.0, "cuda1/allocated_bytes": 3 * GIB, "cuda1/reserved_bytes": 4 * GIB}


def test_a_cpu_has_no_such_allocator() -> None:
    assert allocator_values(torch.device("cpu")) == {}
