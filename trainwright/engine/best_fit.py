"""Best fit decreasing: fills bins of one size with items of different lengths."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


def best_fit_decreasing(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Return bins of positions in ``lengths`` whose sums are at most ``room``, which no length exceeds.

    The longest item comes first, each into the fullest bin that has room for it. Equal lengths keep their order and of
    equally full bins the oldest is filled, so the bins are a function of the lengths. Zero lengths are left out.
    """
    bins: list[list[int]] = []
    by_room: list[deque[int]] = [deque() for _ in range(room + 1)]  # bins by the length that still fits
    rooms = 0  # bit n is set if a bin has room for n
    for position in sorted(range(len(lengths)), key=lambda each: -lengths[each]):
        length = lengths[position]
        if not length:
            continue
        fitting = rooms >> length
        if fitting:
            left = length + (fitting & -fitting).bit_length() - 1
            number = by_room[left].popleft()
            if not by_room[left]:
                rooms ^= 1 << left
        else:
            left, number = room, len(bins)
            bins.append([])
        bins[number].append(position)
        by_room[left - length].append(number)
        rooms |= 1 << (left - length)
    return bins
