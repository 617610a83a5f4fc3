"""Checks of memory that ran out, or nearly does: what held it, and what would free most of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from trainwright.doctor.case import Case
from trainwright.doctor.finding import ExperimentRequest, Finding, OldCheck, finding
from trainwright.runlog.records import OutOfMemory, Telemetry, Where

OFTEN = 0.25
"""Flushes of the allocator's cache in a step: fewer may come from a single large batch."""
IN_A_ROW = 3
"""How many consecutive readings must each show that many flushes since the one before."""


def ran_out(case: Case) -> Iterator[Finding | ExperimentRequest]:
    """An attempt at a step ran out of memory. The run went on with smaller micro-batches, or gave up."""
    tries = [record for record in case.records if isinstance(record, OutOfMemory)]
    if not tries:
        return
    first, last = tries[0], tries[-1]
    given_up = last.next_micro is None
    leaks = _grows(tries)
    then = "and gave up" if given_up else f"and went on with {last.next_micro} at a time"
    where = f" in {last.module}" if last.module else ""
    yield finding(
        "mem.ran_out",
        "critical" if given_up else "warning",
        last.step,
        since_step=first.step,
        symptom=f"step {last.step} ran out of memory ({last.phase}{where}) with {last.micro} samples at a time, {then}",
        cause=(
            "the memory held between steps grows, so ever smaller micro-batches run out: something is not released"
            if leaks
            else f"of {_gib(last.in_use_bytes)} in use, {_held(last)}"
        ),
        remedy="; ".join(_remedies(last, leaks)),
        sure=0.95,
        stage="backward" if last.phase == "backward" else "forward",
        where=Where(module=last.module or None),
        evidence=[
            ("bytes in use when it ran out", last.in_use_bytes, f"at most {last.capacity_bytes}"),
            ("bytes that were freed when the attempt was given up: activations, temporaries", last.given_back_bytes),
            *((f"bytes of {kind}", held) for kind, held in last.held.items() if held),
            ("steps that ran out", len({each.step for each in tries}), 0),
        ],
    )


def _grows(tries: list[OutOfMemory]) -> bool:
    """Whether three steps ran out, and the memory left over after each grew, by a tenth in all."""
    last_of_step = list({each.step: each for each in tries}.values())
    left = [each.in_use_bytes - each.given_back_bytes for each in last_of_step]
    return len(left) >= 3 and left == sorted(left) and left[-1] > 1.1 * left[0]


def _held(seen: OutOfMemory) -> str:
    kinds = {**seen.held, "activations and temporaries": seen.given_back_bytes}
    largest = sorted(kinds, key=lambda kind: -kinds[kind])[:3]
    return ", ".join(f"{kind} take {_gib(kinds[kind])}" for kind in largest if kinds[kind])


def _remedies(seen: OutOfMemory, leaks: bool) -> Iterator[str]:
    """What would free memory, each with the most that it can free, the largest first."""
    if leaks:
        yield "look for what grows: losses, outputs or batches that are kept without detach()"
    activations, optimizer = seen.given_back_bytes, seen.held.get("optimizer", 0)
    if seen.reserved_bytes and seen.reserved_bytes > 1.2 * seen.in_use_bytes:
        waste = seen.reserved_bytes - seen.in_use_bytes
        yield f"PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True: {_gib(waste)} are reserved in pieces too small to use"
    remedies = [
        (activations, f"model.activation_checkpointing: block frees most of {_gib(activations)} of activations"),
        (activations // 2, f"precision: bf16 frees up to half of them, {_gib(activations // 2)}"),
        (optimizer // 2, f"optimizer.use: sgd or adafactor frees {_gib(optimizer // 2)} or more"),
        (seen.held.get("average", 0), f"model.ema: null or model.swa: null frees {_gib(seen.held.get('average', 0))}"),
    ]
    if seen.phase == "loss":
        yield "loss.chunked: true, so that the logits never exist as a whole"
    yield from (remedy for num_bytes, remedy in sorted(remedies, reverse=True) if num_bytes > 0.02 * seen.in_use_bytes)
    if seen.next_micro is not None:
        yield f"batch.micro: {seen.next_micro} from the start, which `trainwright batch-size` finds with a margin"


@dataclass(frozen=True)
class _Flushed:
    """What happened between two readings of the allocator of one device, at steps ``begin`` and ``end``."""

    begin: int
    end: int
    count: float
    allocated_bytes: float
    reserved_bytes: float


def thrashing(case: Case) -> Iterator[Finding | ExperimentRequest]:
    """In several readings in a row the allocator has flushed its cache in many of the steps before.

    Some flushes are usual: in the first steps, at an evaluation, when a step runs out of memory and is repeated.
    """
    names = {name for each in case.records if isinstance(each, Telemetry) for name in each.values}
    rows = [row for name in names if name.endswith("/allocator_retries") for row in _rows(case, name)]
    if not rows:
        return
    row = max(rows, key=lambda row: row[-1].end)
    begin, last = row[0].begin, row[-1]
    count, steps = sum(each.count for each in row), last.end - begin
    is_in_pieces = last.reserved_bytes > 1.2 * last.allocated_bytes > 0
    pieces = [
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, or max_split_size_mb:512 where that is not supported",
        "samples of similar length, or padded to a few lengths, so that blocks can be reused",
    ]
    yield finding(
        "mem.thrashing",
        "warning",
        last.end,
        since_step=begin + 1,
        symptom=f"the allocator flushed its cache {count:.0f} times in steps {begin + 1} to {last.end}, "
        f"{count / steps:.2g} times a step",
        cause="the device's memory is nearly full"
        + (", and its free blocks are too small (fragmentation)" if is_in_pieces else "")
        + ": for one allocation the allocator waits for the device, frees all cached blocks and allocates them again",
        remedy="; ".join(
            [*(pieces if is_in_pieces else ()), "a smaller batch.micro", *(() if is_in_pieces else pieces[:1])]
        ),
        sure=0.9,
        stage="forward",
        evidence=[
            ("flushes of the allocator's cache in a step", round(count / steps, 3), 0),
            ("readings in a row with such flushes", len(row), f"< {IN_A_ROW}"),
            ("bytes that tensors held, at the last reading", last.allocated_bytes),
            ("bytes that the allocator held", last.reserved_bytes),
        ],
    )


def _rows(case: Case, name: str) -> Iterator[list[_Flushed]]:
    """Runs of consecutive readings of a counter, each with many flushes since the one before."""
    own = name.removesuffix("allocator_retries")
    read = [each for each in case.records if isinstance(each, Telemetry) and name in each.values]
    row: list[_Flushed] = []
    for one, other in pairwise(read):
        steps, count = other.step - one.step, other.values[name] - one.values[name]
        if steps < 1 or count < OFTEN * steps:  # also where a resumed process counts from 0 again
            row = []
            continue
        held = (other.values.get(f"{own}{which}_bytes", 0.0) for which in ("allocated", "reserved"))
        row.append(_Flushed(one.step, other.step, count, *held))
        if len(row) >= IN_A_ROW:
            yield row


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.3g} GiB"


NAMES: tuple[OldCheck, ...] = (
    ran_out,
    thrashing,
)
