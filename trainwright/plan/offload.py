"""Savings and costs of optimizer offload, by arithmetic. The offloaded step is not traced."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from trainwright.plan.call_trace import Trace
from trainwright.plan.devices import Device
from trainwright.plan.scale import Scaled
from trainwright.recipe import optimizer_row

HOST_FLOPS = 1e12
"""FLOP/s of the host in an update: a nominal figure for about 32 cores."""
HOST_MEMORY_FRACTION = 0.9
"""The fraction of the host's free memory that may be used."""


def why_not_offloaded(use: str, args: Mapping[str, object]) -> str:
    """Return why offload makes no sense for this optimizer with these arguments, or "" if it does."""
    row = optimizer_row(use)
    if row.why_not_offloaded or row.values_per_weight(args):
        return row.why_not_offloaded
    without = f"without {row.needs_for_state} " if row.needs_for_state else ""
    return f"{without}it keeps nothing that could be moved"


@dataclass(frozen=True)
class Offload:
    """``state_bytes`` leave the device; ``host_bytes`` are used on the host: state, copies of weights and gradients.

    ``link_bytes`` cross the link in a step, half in each direction; ``host_s`` is the time of the update on the host.
    """

    state_bytes: int
    host_bytes: int
    link_bytes: int
    link_s: float
    host_s: float

    @property
    def step_s(self) -> float:
        """Seconds added to a step: copies and update run one after the other."""
        return self.link_s + self.host_s

    def lacks_room(self, device: Device) -> bool:
        """Return True if the host's free memory is known and too small."""
        room = device.host_memory_bytes * HOST_MEMORY_FRACTION
        return bool(room) and self.host_bytes > room


def offload_of(trace: Trace, device: Device) -> Offload | None:
    """Return the offload of a traced optimizer, or None if it has no state or the device has no link to a host."""
    state = trace.resident.get("optimizer", 0)
    if not state or not device.host_link:
        return None
    grads = max(moment.held.get("gradients", 0) for moment in trace.moments)
    flops = sum(work.flops for work in trace.work if work.phase == "update")
    moved = 2 * state + 3 * grads  # reads state, gradients and weights; writes state and weights
    host_s = max(moved / device.host_bandwidth, flops / HOST_FLOPS)
    return Offload(state, state + 2 * grads, 2 * grads, 2 * grads / device.host_link, host_s)


def without_optimizer(scaled: Scaled) -> Scaled:
    """Return the step on the device when state and update are on the host."""
    return replace(scaled, small=_without(scaled.small), large=_without(scaled.large))


def _without(trace: Trace) -> Trace:
    moments = []
    for each in trace.moments:
        gone = ("optimizer", "temporaries") if each.phase == "update" else ("optimizer",)
        moments.append(replace(each, held={kind: size for kind, size in each.held.items() if kind not in gone}))
    return replace(trace, moments=tuple(moments), work=tuple(w for w in trace.work if w.phase != "update"))
