"""Derives the trace of a model with many equal blocks from the trace of the same model with two blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from trainwright.plan.call_trace import Kind, Moment, Trace, Work
from trainwright.plan.scale import PASSES, Scaled

KindBytes = Mapping[Kind, float]


@dataclass(frozen=True)
class Blocks:
    """The two traced blocks, by path, and the bytes of one block's weights.

    ``share`` is (trained weights of one block) / (trained weights of the traced model).
    """

    first: str
    second: str
    weight_bytes: int
    share: float


def grow_layout(scaled: Scaled, blocks: Blocks, count: int) -> Scaled:
    """Apply ``grow_trace`` to both traces."""
    return replace(scaled, small=grow_trace(scaled.small, blocks, count), large=grow_trace(scaled.large, blocks, count))


def grow_trace(trace: Trace, blocks: Blocks, count: int) -> Trace:
    """Return the trace of a model with ``count`` blocks, two or more.

    The additional blocks are inserted between the two traced ones. Each adds what the second one added: in the forward
    pass from its end on, and in the backward pass when it is done. Peaks within them lie between those of the two.
    """
    more = count - 2
    if not more:
        return trace
    begin, end = _span(trace.moments, blocks.second)
    forward, after = _added_bytes(trace.moments, blocks)
    kept: dict[Kind, float] = {**forward, "temporaries": 0}  # autocast's copies end with the forward pass
    whole = 1 + more * blocks.share  # ratio of trained weights
    moments = []
    for index, moment in enumerate(trace.moments):
        held: dict[Kind, float] = dict(moment.held)
        added: KindBytes = {} if index < begin else kept if index <= end else after
        if moment.phase == "forward" and index >= begin:
            added = forward
        if moment.phase == "update":
            added = {"gradients": after.get("gradients", 0) if held.get("gradients") else 0}
            held["temporaries"] = held.get("temporaries", 0) * whole
        for kind, size in added.items():
            held[kind] = max(0, held.get(kind, 0) + more * size)
        held["weights"] = held.get("weights", 0) + more * blocks.weight_bytes
        held["optimizer"] = held.get("optimizer", 0) * whole
        moments.append(
            Moment(moment.phase, moment.micro, moment.module, moment.op, {kind: round(b) for kind, b in held.items()})
        )
    work = tuple(_grow_work(each, blocks, count, whole) for each in trace.work)
    return replace(trace, moments=tuple(moments), work=work, kept=_kept_bytes(trace, blocks, count))


def _within(module: str, block: str) -> bool:
    return f"{module}.".startswith(f"{block}.")


def _span(moments: Sequence[Moment], block: str) -> tuple[int, int]:
    """Return the index of the first moment in the block's forward pass and of the last in its backward pass."""
    inside = [index for index, moment in enumerate(moments) if _within(moment.module, block)]
    return inside[0], inside[-1]


def _added_bytes(moments: Sequence[Moment], blocks: Blocks) -> tuple[KindBytes, KindBytes]:
    """Return the bytes that a block adds by the end of its forward pass, and by the end of its backward pass."""
    forward = _difference(_last(moments, blocks.first, forward=True), _last(moments, blocks.second, forward=True))
    backward = _difference(_last(moments, blocks.second, forward=False), _last(moments, blocks.first, forward=False))
    kinds = {*forward, *backward} - {"temporaries"}
    return forward, {kind: forward.get(kind, 0) + backward.get(kind, 0) for kind in kinds}


def _last(moments: Sequence[Moment], block: str, *, forward: bool) -> Moment:
    """Return the last moment within a block in one of the passes."""
    found = [m for m in moments if _within(m.module, block) and (m.phase == "forward") is forward]
    return found[-1]


def _difference(one: Moment, other: Moment) -> KindBytes:
    return {kind: other.held.get(kind, 0) - one.held.get(kind, 0) for kind in {*one.held, *other.held}}


def _grow_work(work: Work, blocks: Blocks, count: int, whole: float) -> Work:
    if _within(work.module, blocks.second):
        times: float = count - 1
    elif work.phase in PASSES:
        return work
    else:
        times = whole
    return replace(
        work, calls=round(work.calls * times), flops=round(work.flops * times), bytes=round(work.bytes * times)
    )


def _kept_bytes(trace: Trace, blocks: Blocks, count: int) -> dict[str, int]:
    return {path: size * (count - 1 if _within(path, blocks.second) else 1) for path, size in trace.kept.items()}
