"""Formats a plan: the memory of a step over time, its duration, and recommended changes, as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from trainwright.plan.amounts import human_bytes, human_seconds
from trainwright.plan.call_trace import KINDS, Kind, Moment, Trace
from trainwright.plan.devices import CUDA_CONTEXT_BYTES, FRAGMENTATION_FRACTION, Device
from trainwright.plan.layout import Option
from trainwright.plan.many_ranks import Placement, against

SIGNS: Mapping[Kind, str] = {
    "weights": "W",
    "buffers": "B",
    "optimizer": "O",
    "gradients": "G",
    "activations": "a",
    "temporaries": "t",
    "inputs": "i",
}
OUTSIDE_MODULES = "the loss or the model's own code"
"""The name of work that happens in no submodule of the model."""


def layout_lines(option: Option, device: Device, title: str) -> list[str]:
    """Return one layout as text: its settings, whether it fits, and the step time."""
    usable, layout = device.usable_bytes, option.layout
    verdict = f"fits, {human_bytes(usable - option.peak_bytes)} to spare" if option.fits else "does NOT fit"
    shape = f"{option.micro} x {option.accumulation}"
    loss = "loss in chunks" if layout.chunked else "plain loss"
    loss += ", optimizer on the host" if layout.offload else ""
    time, spent = option.time, option.time.spent
    fractions = ", ".join(f"{name} {seconds / option.step_s:.0%}" for name, seconds in spent.items() if seconds)
    return [
        f"{title:<11} {shape} (micro-batch x accumulation), {layout.precision}, "
        f"checkpointing {layout.checkpointing}, {loss}",
        f"  peak      {human_bytes(option.peak_bytes)} of {human_bytes(usable)} usable: {verdict}",
        f"  step      {human_seconds(option.step_s)} by the roofline ({fractions}), MFU {time.mfu:.0%}",
        f"  work      {human_flops(time.flops)}, {human_bytes(time.moved_bytes)} moved",
    ]


def human_flops(count: float) -> str:
    """Return a number of operations as text, such as `503 TFLOP` and `7.12 PFLOP`."""
    for unit in ("", "k", "M", "G", "T", "P"):
        if count < 999.5:
            return f"{count:.3g} {unit}FLOP"
        count /= 1000
    return f"{count:.3g} EFLOP"


def usable_line(device: Device) -> str:
    """Return how much of the memory is usable, and what the rest is reserved for."""
    reserved = [f"{FRAGMENTATION_FRACTION:.0%} for fragmentation"]
    reserved += [f"{human_bytes(CUDA_CONTEXT_BYTES)} for CUDA's context"] if device.kind == "cuda" else []
    memory, usable = human_bytes(device.memory_bytes), human_bytes(device.usable_bytes)
    return f"{device.name}, {memory}: {usable} usable ({' and '.join(reserved)} left out)"


def memory_lines(trace: Trace) -> list[str]:
    """Return the memory between steps and at the peak, by kind, and the modules that keep most for backward."""
    peak = trace.peak
    where = peak.module or ("" if peak.phase == "update" else OUTSIDE_MODULES)
    at = f"{peak.phase}, {peak.op}" + (f" in {where}" if where else "")
    lines = [f"at the peak {human_bytes(peak.total)} ({at})"]
    lines.append("  " + ", ".join(f"{kind} {human_bytes(peak.held[kind])}" for kind in KINDS if peak.held.get(kind)))
    resident = trace.resident
    parts = ", ".join(f"{kind} {human_bytes(resident[kind])}" for kind in KINDS if resident.get(kind))
    lines.append(f"between steps {human_bytes(sum(resident.values()))}: {parts}")
    if blocks := by_block(trace.kept):
        largest = ", ".join(f"{name} {human_bytes(size)}" for name, size in blocks[:5])
        more = f", {len(blocks) - 5} more" if len(blocks) > 5 else ""
        lines.append(f"kept for backward, a micro-batch: {largest}{more}")
    return lines


def by_block(kept: Mapping[str, int]) -> list[tuple[str, int]]:
    """Return bytes by block (``blocks.3``) or top-level module, the largest first.

    Blocks of one list that keep equally much become one entry, ``blocks.0-11 x 12``, with their sum.
    """
    sums: dict[str, int] = {}
    for path, size in kept.items():
        keys = path.split(".")
        number = next((i for i, key in enumerate(keys) if key.isdigit()), 0)
        name = ".".join(keys[: number + 1]) or OUTSIDE_MODULES
        sums[name] = sums.get(name, 0) + size
    alike: dict[tuple[str, str], list[str]] = {}
    for name, size in sums.items():
        above, _, last = name.rpartition(".")
        alike.setdefault((above, human_bytes(size)) if last.isdigit() else (name, ""), []).append(name)
    folded = [(_join_names(names), sum(sums[name] for name in names)) for names in alike.values()]
    return sorted(folded, key=lambda item: (-item[1], item[0]))


def _join_names(names: Sequence[str]) -> str:
    if len(names) == 1:
        return names[0]
    above = names[0].rpartition(".")[0]
    numbers = sorted(int(name.rpartition(".")[2]) for name in names)
    span = f"{above}.{numbers[0]}-{numbers[-1]}".removeprefix(".")
    return f"{span} x {len(names)}" if numbers[-1] - numbers[0] < len(names) else f"{len(names)} of {span}"


def timeline_text(trace: Trace, usable_bytes: int, title: str, width: int = 64, rows: int = 24) -> list[str]:
    """Return the step from top to bottom: a row for the peak of each part, a bar by kind, ``|`` at the usable memory.

    Similar neighbours become one row. ``title`` names the layout.
    """
    most = max(trace.peak.total, 1)
    scale = width / max(most, min(usable_bytes, 2 * most))
    limit = round(usable_bytes * scale)
    legend = "  ".join(f"{sign} {kind}" for kind, sign in SIGNS.items() if trace.peak.held.get(kind))
    lines = [f"one step    {title}", f"  {legend}" + ("  | usable" if limit <= width else "")]
    part = ""
    for moment, count in _group_similar(stretches(trace.moments, rows), 1 / scale):
        bar = _bar(moment, scale)
        if len(bar) <= limit <= width:
            bar = bar.ljust(limit) + "|"
        mark = " <- peak" if moment is trace.peak else ""
        mark += f"  ({count} alike)" if count > 1 else ""
        if (now := _part(moment, trace.moments)) != part and now:
            lines.append(f"  {now}:")
        part = now
        lines.append(f"  {moment.phase:<9} {human_bytes(moment.total):>9} {bar}{mark}")
    return lines


def _group_similar(moments: Sequence[Moment], tolerance: float) -> Iterator[tuple[Moment, int]]:
    """Yield the peak and size of each group of neighbours that differ by at most ``tolerance`` bytes in each kind."""
    group: list[Moment] = []
    for moment in moments:
        if group and not _near(group[0], moment, tolerance):
            yield max(group, key=lambda each: each.total), len(group)
            group = []
        group.append(moment)
    if group:
        yield max(group, key=lambda each: each.total), len(group)


def _near(one: Moment, other: Moment, tolerance: float) -> bool:
    if (one.micro, _pass(one)) != (other.micro, _pass(other)):
        return False
    return all(abs(one.held.get(kind, 0) - other.held.get(kind, 0)) <= tolerance for kind in KINDS)


def _part(moment: Moment, moments: Sequence[Moment]) -> str:
    """Return the micro-batches that a moment belongs to, as text; "" if there is only one, and for the update."""
    others = max(each.micro for each in moments)
    if not others or moment.phase == "update":
        return ""
    if not moment.micro:
        return "first micro-batch"
    return "second micro-batch" if others == 1 else f"each of the other {others} micro-batches"


def stretches(moments: Sequence[Moment], count: int) -> list[Moment]:
    """Return about ``count`` moments in order: the peaks of equal parts of each pass."""
    passes: list[list[Moment]] = []
    for moment in moments:
        if not passes or (passes[-1][0].micro, _pass(passes[-1][0])) != (moment.micro, _pass(moment)):
            passes.append([])
        passes[-1].append(moment)
    found = []
    for one in passes:
        parts = max(1, round(count * len(one) / len(moments)))
        edges = [round(i * len(one) / parts) for i in range(parts + 1)]
        found += [max(one[a:b], key=lambda moment: moment.total) for a, b in pairwise(edges) if a < b]
    return found


def _pass(moment: Moment) -> str:
    return "backward" if moment.phase == "checkpointing" else moment.phase


def _bar(moment: Moment, scale: float) -> str:
    bar, total = "", 0
    for kind, sign in SIGNS.items():
        total += moment.held.get(kind, 0)
        bar += sign * (round(total * scale) - len(bar))
    return bar


def placement_lines(placed: Placement, device: Device, title: str) -> list[str]:
    """Return one layout as text: its degrees, whether it fits, and the step time."""
    usable, peak = device.usable_bytes, placed.peak_bytes
    verdict = f"fits, {human_bytes(usable - peak)} to spare" if placed.fits else "does NOT fit"
    shape = f"{placed.micro} x {placed.accumulation} (micro-batch x accumulation), checkpointing {placed.policy}"
    parts = [
        f"computes {placed.busy_s / placed.step_s:.0%}",
        f"waits for exchanges {_fraction(placed.exposed_s, placed)}",
    ]
    parts += [f"for other stages {_fraction(placed.bubble_s, placed)}"] if placed.bubble_s else []
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


def _fraction(seconds: float, placed: Placement) -> str:
    return f"{seconds / placed.step_s:.0%}"
