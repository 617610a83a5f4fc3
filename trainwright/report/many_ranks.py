"""Formats a plan for many ranks: memory of a rank, communication, and step time."""

from __future__ import annotations

from collections.abc import Sequence

from trainwright.plan.call_trace import KINDS
from trainwright.plan.devices import Device
from trainwright.plan.explain import human_bytes, human_seconds
from trainwright.plan.many_ranks import Placement, against


def placement_lines(placed: Placement, device: Device, title: str) -> list[str]:
    """Return one layout as text: its degrees, whether it fits, and the step time."""
    usable, peak = device.usable_bytes, placed.peak_bytes
    verdict = f"fits, {human_bytes(usable - peak)} to spare" if placed.fits else "does NOT fit"
    shape = f"{placed.micro} x {placed.accumulation} (micro-batch x accumulation), checkpointing {placed.policy}"
    parts = [f"computes {placed.busy_s / placed.step_s:.0%}", f"waits for exchanges {_share(placed.exposed_s, placed)}"]
    parts += [f"for other stages {_share(placed.bubble_s, placed)}"] if placed.bubble_s else []
    zero = f", zero {placed.zero}" if placed.degrees.shard > 1 else ""
    return [
        f"{title:<11} {placed.degrees}{zero}, {shape}",
        f"  peak      {human_bytes(peak)} a rank of {human_bytes(usable)} usable: {verdict}",
        f"  step      {human_seconds(placed.step_s)} by the roofline ({', '.join(parts)}), MFU {placed.mfu:.0%}",
    ]


def memory_by_stage(placed: Placement) -> list[str]:
    """Return the memory at the peak by kind, and by pipeline stage if there are several."""
    held = ", ".join(f"{kind} {human_bytes(placed.held[kind])}" for kind in KINDS if placed.held.get(kind))
    lines = [f"at the peak a rank holds {held}"]
    if len(placed.stage_bytes) > 1:
        lines.append("by stage    " + ", ".join(map(human_bytes, placed.stage_bytes)))
    return lines


def traffic_lines(placed: Placement) -> list[str]:
    """Return a row for each kind of exchange."""
    if not placed.traffic:
        return ["exchanges   none"]
    total = sum(each.num_bytes for each in placed.traffic)
    hidden = placed.exchange_s - placed.exposed_s
    taken, behind = human_seconds(placed.exchange_s), human_seconds(max(0.0, hidden))
    lines = [f"exchanges   {human_bytes(total)} of whole tensors a step, {taken}, {behind} of it while a rank computes"]
    for each in placed.traffic:
        how = "overlaps" if each.hides else "waits"
        lines.append(
            f"  {each.axis:<10} {each.collective:<15} {each.what:<12} {each.pass_:<9} {each.calls:>7,} calls "
            f"{human_bytes(each.num_bytes):>9} {human_seconds(each.wait_s):>9}  {how}"
        )
    return lines


def runner_up_lines(options: Sequence[Placement], best: Placement) -> list[str]:
    """Return the cost of other layouts."""
    rows = [f"  {human_seconds(each.step_s):>9}  {each}: {against(each, best)}" for each in options]
    return ["others", *rows] if rows else []


def machine_line(device: Device) -> str:
    """Return the links of a machine."""
    node = device.node
    link, network = f"{node.link / 1e9:g} GB/s", f"{node.network / 1e9:g} GB/s"
    return f"  machine   {node.ranks} ranks, {link} from one to another, {network} from it to other machines"


def _share(seconds: float, placed: Placement) -> str:
    return f"{seconds / placed.step_s:.0%}"
