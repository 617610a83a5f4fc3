"""Simulates CUDA's caching allocator: the segments that it reserves on the device and never returns.

The rules are those of torch's ``c10/cuda/CUDACachingAllocator.cpp`` with its default settings: sizes up to 1 MiB come
from segments of 2 MiB; up to 10 MiB from those of 20 MiB; larger ones get a segment of their own, rounded up to 2 MiB.
The smallest free block that fits is taken, and split when enough is left; free neighbours are merged.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass

MIB = 2**20
SMALL, SMALL_SEGMENT = MIB, 2 * MIB
MEDIUM, MEDIUM_SEGMENT = 10 * MIB, 20 * MIB
LARGE_UNIT = 2 * MIB
SMALLEST_BLOCK = 512


@dataclass(eq=False, slots=True)
class AllocatorBlock:
    """A part of a segment; ``before`` and ``after`` are its neighbours in the segment."""

    size: int
    number: int
    small: bool
    free: bool = False
    before: AllocatorBlock | None = None
    after: AllocatorBlock | None = None


class CachingAllocator:
    """Allocates and releases blocks. ``reserved`` are the bytes of all segments."""

    def __init__(self) -> None:
        self.reserved = 0
        self._free: dict[bool, list[tuple[int, int, AllocatorBlock]]] = {True: [], False: []}  # by size, then age
        self._count = 0

    def allocate(self, size: int) -> AllocatorBlock:
        """Return a block of at least ``size`` bytes, a multiple of 512."""
        small = size <= SMALL
        pool = self._free[small]
        place = bisect_left(pool, (size, -1))
        block = pool.pop(place)[2] if place < len(pool) else self._segment(size, small)
        block.free = False
        left = block.size - size
        if left >= SMALLEST_BLOCK if small else left > SMALL:
            self._split(block, size)
        return block

    def release(self, block: AllocatorBlock) -> None:
        """Free the block and merge it with free neighbours."""
        for other in (block.before, block.after):
            if other is not None and other.free:
                pool = self._free[other.small]
                del pool[bisect_left(pool, (other.size, other.number))]
                self._join(block, other)
        block.free = True
        insort(self._free[block.small], (block.size, block.number, block))

    def _segment(self, size: int, small: bool) -> AllocatorBlock:
        if small:
            whole = SMALL_SEGMENT
        else:
            whole = MEDIUM_SEGMENT if size < MEDIUM else -(-size // LARGE_UNIT) * LARGE_UNIT
        self.reserved += whole
        return self._block(whole, small)

    def _block(self, size: int, small: bool) -> AllocatorBlock:
        self._count += 1
        return AllocatorBlock(size, self._count, small)

    def _split(self, block: AllocatorBlock, size: int) -> None:
        rest = self._block(block.size - size, block.small)
        rest.before = block
        rest.after = block.after
        rest.free = True
        if block.after is not None:
            block.after.before = rest
        block.after, block.size = rest, size
        insort(self._free[block.small], (rest.size, rest.number, rest))

    def _join(self, block: AllocatorBlock, other: AllocatorBlock) -> None:
        block.size += other.size
        if other is block.before:
            block.before = other.before
            if other.before is not None:
                other.before.after = block
        else:
            block.after = other.after
            if other.after is not None:
                other.after.before = block


def reserved_bytes(
    before: Iterable[tuple[int, int]], changes: Iterable[tuple[list[int], list[tuple[int, int]]]]
) -> int:
    """Return the bytes reserved after a step.

    A storage is (number, bytes). A change is the numbers of the freed storages, then the storages that are made.
    """
    allocator, held = CachingAllocator(), {}
    for number, size in before:
        held[number] = allocator.allocate(size)
    for freed, made in changes:
        for number in freed:
            if number in held:
                allocator.release(held.pop(number))
        for number, size in made:
            if size:
                held[number] = allocator.allocate(size)
    return allocator.reserved
