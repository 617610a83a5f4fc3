"""Converts the tracker's events into the bytes held at each moment, and the bytes kept for backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from trainwright.plan.call_trace import KINDS, Kind, Moment
from trainwright.plan.trace.caching_allocator import reserved_bytes
from trainwright.plan.trace.tracker import MemoryEvent, TrackedStorage


def kind_of(storage: TrackedStorage) -> Kind:
    """Return the kind of a storage. If none is set: activations if forward made it and backward freed it."""
    if storage.kind is not None:
        return storage.kind
    of_forward = storage.made_in in ("forward", "checkpointing")
    return "activations" if of_forward and storage.freed_in not in ("forward", "checkpointing") else "temporaries"


def moments(before: Sequence[TrackedStorage], events: Sequence[MemoryEvent]) -> tuple[Moment, ...]:
    """Return the bytes held after each event. ``before`` are the storages held at the start of the step."""
    held: dict[Kind, int] = dict.fromkeys(KINDS, 0)
    for storage in before:
        held[kind_of(storage)] += storage.num_bytes
    found = []
    for event in events:
        for storage in event.freed:
            held[kind_of(storage)] -= storage.num_bytes
        for storage in event.made:
            held[kind_of(storage)] += storage.num_bytes
        found.append(Moment(event.phase, event.micro, event.module, event.op, dict(held)))
    return tuple(found)


def reserved(before: Sequence[TrackedStorage], events: Sequence[MemoryEvent]) -> int:
    """Return the bytes that CUDA's caching allocator reserves for these events, including gaps."""
    changes = (([id(one) for one in event.freed], [(id(one), one.num_bytes) for one in event.made]) for event in events)
    return reserved_bytes(((id(storage), storage.num_bytes) for storage in before), changes)


def kept_for_backward(events: Sequence[MemoryEvent]) -> Mapping[str, int]:
    """Return the bytes that the first micro-batch's forward pass keeps for backward, by the module that made them."""
    sums: Counter[str] = Counter()
    for event in events:
        if event.phase == "forward" and event.micro == 0:
            for storage in event.made:
                if kind_of(storage) == "activations":
                    sums[event.module] += storage.num_bytes
    return dict(sums)
