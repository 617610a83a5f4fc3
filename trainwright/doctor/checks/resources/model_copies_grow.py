"""See the function."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from trainwright.doctor.check import Result, check
from trainwright.doctor.context import RunContext
from trainwright.doctor.facts.resources import MemoryFacts

SMALL_BYTES = 8 * 2**20


@check(stage="loop", needs=MemoryFacts, explains=("resources.memory_grows",))
def model_copies_grow(run: RunContext) -> Iterator[Result]:
    """More and more copies of the model are in memory.

    How it is detected: modules with the class and the shapes of the model are counted now and then; their number rises
    three times and never falls. It is an info while all of them take less than 8 MiB.

    Exceptions: a few copies, such as an average or a target network, whose number is constant.

    Usual cause: `copy.deepcopy(model)` for each best model or snapshot, in a list.

    Fix: keep one copy, or write them to disk.
    """
    facts = run.latest(MemoryFacts)
    counts = [each.count for each in facts.copies] if facts else []
    steps_up = sum(b > a for a, b in pairwise(counts))
    has_more = len(counts) > 2 and counts[-1] > counts[len(counts) // 2]
    if facts is None or steps_up < 3 or not has_more or counts[-1] < 4 or any(b < a for a, b in pairwise(counts)):
        return
    yield run.finding(
        run.last_step,
        symptom=f"there are {counts[-1]} copies of the model in memory, and their number rises",
        severity=None if counts[-1] * facts.model_bytes > SMALL_BYTES else "info",
        evidence=[
            ("copies, by step", [[each.step, each.count] for each in facts.copies][-8:], "constant"),
            ("their bytes", counts[-1] * facts.model_bytes, facts.model_bytes),
        ],
    )
