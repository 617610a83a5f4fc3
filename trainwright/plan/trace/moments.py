"""What a step held at each moment, and what the forward pass left for backward: from the events of the tracker."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from trainwright.plan.call_trace import KINDS, Kind, Moment
from trainwright.plan.trace.caching_allocator import reserved_bytes
from trainwright.plan.trace.tracker import MemoryEvent, TrackedStorage


def kind_of(storage: TrackedStorage) -> Kind:
    """What a storage was for. Without a kind of its own: activations if forward made it and backward freed it."""
    if storage.kind is not None:
        return storage.kind
    of_forward = storage.made_in in ("forward", "checkpointing")
    return "activations" if of_forward and storage.freed_in not in ("forward", "checkpointing") else "temporaries"


def moments(before: Sequence[TrackedStorage], events: Sequence[MemoryEvent]) -> tuple[Moment, ...]:
    """What is held after each event. ``before`` are the storages that were held when the step began."""
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
    """Bytes that CUDA's caching allocator takes from the device for these events, segments and gaps included."""
    changes = (([id(one) for one in event.freed], [(id(one), one.num_bytes) for one in event.made]) for event in events)
    return reserved_bytes(((id(storage), storage.num_bytes) for storage in before), changes)


def kept_for_backward(events: Sequence[MemoryEvent]) -> Mapping[str, int]:
    """Bytes that the first micro-batch's forward pass leaves for backward, by the module that made them."""
    sums: Counter[str] = Counter()
    for event in events:
        if event.phase == "forward" and event.micro == 0:
            for storage in event.made:
                if kind_of(storage) == "activations":
                    sums[event.module] += storage.num_bytes
    return dict(sums)
