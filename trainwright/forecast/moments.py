"""From the events of a step to what was held when, and what the forward pass left for backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from trainwright.forecast.caching_allocator import reserved_bytes
from trainwright.forecast.tracker import MemoryEvent, Piece
from trainwright.plan.trace import KINDS, Kind, Moment


def kind_of(piece: Piece) -> Kind:
    """What a storage was for, as its life shows: what forward made and backward freed was kept for backward."""
    if piece.kind is not None:
        return piece.kind
    of_forward = piece.born in ("forward", "recompute")
    return "activations" if of_forward and piece.died not in ("forward", "recompute") else "temporaries"


def moments(before: Sequence[Piece], events: Sequence[MemoryEvent]) -> tuple[Moment, ...]:
    """What is held after each event. ``before`` is what was held when the step began."""
    held: dict[Kind, int] = dict.fromkeys(KINDS, 0)
    for piece in before:
        held[kind_of(piece)] += piece.size
    found = []
    for event in events:
        for piece in event.freed:
            held[kind_of(piece)] -= piece.size
        for piece in event.made:
            held[kind_of(piece)] += piece.size
        found.append(Moment(event.phase, event.micro, event.module, event.op, dict(held)))
    return tuple(found)


def reserved(before: Sequence[Piece], events: Sequence[MemoryEvent]) -> int:
    """Bytes that CUDA's caching allocator takes from the device for these events, segments and gaps included."""
    changes = (([id(p) for p in event.freed], [(id(p), p.size) for p in event.made]) for event in events)
    return reserved_bytes(((id(piece), piece.size) for piece in before), changes)


def kept(events: Sequence[MemoryEvent]) -> Mapping[str, int]:
    """Bytes that the first micro-batch's forward pass leaves for backward, by the module that made them."""
    sums: Counter[str] = Counter()
    for event in events:
        if event.phase == "forward" and event.micro == 0:
            for piece in event.made:
                if kind_of(piece) == "activations":
                    sums[event.module] += piece.size
    return dict(sums)
