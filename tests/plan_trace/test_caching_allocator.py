"""The caching allocator in miniature: segments, splits, and blocks that grow together again."""

from __future__ import annotations

from functools import partial

import pytest

from tests.plan_trace.models import make_gpt
from trainwright.plan.trace.traced_step import MIB, CachingAllocator, reserved_bytes, trace_step
from trainwright.plan.trace.tracker import MemoryEvent, TrackedStorage


def test_small_blocks_share_a_segment_of_2_mib() -> None:
    reserve = CachingAllocator()
    for _ in range(4):
        reserve.allocate(MIB // 2)
    assert reserve.reserved == 2 * MIB
    reserve.allocate(512)
    assert reserve.reserved == 4 * MIB


def test_middle_sizes_share_20_mib_and_large_ones_are_rounded_to_2() -> None:
    reserve = CachingAllocator()
    for _ in range(4):
        reserve.allocate(5 * MIB)
    assert reserve.reserved == 20 * MIB
    reserve.allocate(31 * MIB)
    assert reserve.reserved == (20 + 32) * MIB


def test_what_is_freed_is_taken_again_and_neighbours_grow_together() -> None:
    reserve = CachingAllocator()
    blocks = [reserve.allocate(5 * MIB) for _ in range(4)]
    for block in (blocks[1], blocks[3], blocks[2]):
        reserve.release(block)
    reserve.allocate(15 * MIB)
    assert reserve.reserved == 20 * MIB


def test_gaps_are_not_used_by_what_does_not_fit() -> None:
    first, second, third, large = (TrackedStorage(size * MIB, None, "forward", "") for size in (20, 20, 20, 30))
    event = MemoryEvent("forward", 0, "", "mm", freed=[first, third], made=[large])
    assert reserved_bytes([first, second, third], [event]) == 90 * MIB


@pytest.mark.slow
def test_a_trace_for_cuda_tells_the_gaps() -> None:
    trace = trace_step(partial(make_gpt), device="cuda")
    gaps = next(unseen.bound_bytes for unseen in trace.unseen if unseen.op == "reserved")
    assert gaps is not None and 0 <= gaps < trace.peak.total
