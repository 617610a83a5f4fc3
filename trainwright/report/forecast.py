"""Formats a plan: the memory of a step over time, its duration, and recommended changes, as text and charts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, pairwise

from trainwright.plan.call_trace import KINDS, Kind, Moment, Phase, Trace
from trainwright.plan.devices import CUDA_CONTEXT_BYTES, FRAGMENTATION_FRACTION, Device
from trainwright.plan.explain import human_bytes, human_seconds
from trainwright.plan.layout import Option
from trainwright.plan.many_ranks import Placement, against
from trainwright.report.svg import INK, TITLE, root, text

SIGNS: Mapping[Kind, str] = {
    "weights": "W",
    "buffers": "B",
    "optimizer": "O",
    "gradients": "G",
    "activations": "a",
    "temporaries": "t",
    "inputs": "i",
}
COLOURS: Mapping[Kind, str] = {
    "weights": "#1f7fd0",
    "buffers": "#0f8a94",
    "optimizer": "#9a5fd6",
    "gradients": "#cf5f1a",
    "activations": "#1f8f4e",
    "temporaries": "#d0455f",
    "inputs": "#767676",
}
OUTSIDE_MODULES = "the loss or the model's own code"
"""The name of work that happens in no submodule of the model."""
MIN_PASS_WIDTH = 0.1
"""The minimum width of a pass in a chart, as a fraction of the chart's width."""
_WIDTH, _HEIGHT = 860, 430
_LEFT = 70
_RIGHT = 700
_TOP = 44
_BOTTOM = 370


def layout_lines(option: Option, device: Device, title: str) -> list[str]:
    """Return one layout as text: its settings, whether it fits, and the step time."""
    usable, layout = device.usable_bytes, option.layout
    verdict = f"fits, {human_bytes(usable - option.peak_bytes)} to spare" if option.fits else "does NOT fit"
    shape = f"{option.micro} x {option.accumulation}"
    loss = "loss in chunks" if layout.chunked else "plain loss"
    loss += ", optimizer on the host" if layout.offload else ""
    time, spent = option.time, option.time.spent
    shares = ", ".join(f"{name} {seconds / option.step_s:.0%}" for name, seconds in spent.items() if seconds)
    return [
        f"{title:<11} {shape} (micro-batch x accumulation), {layout.precision}, "
        f"checkpointing {layout.checkpointing}, {loss}",
        f"  peak      {human_bytes(option.peak_bytes)} of {human_bytes(usable)} usable: {verdict}",
        f"  step      {human_seconds(option.step_s)} by the roofline ({shares}), MFU {time.mfu:.0%}",
        f"  work      {human_flops(time.flops)}, {human_bytes(time.moved_bytes)} moved",
    ]


def human_flops(count: float) -> str:
    """Return such as `503 TFLOP`, `7.12 PFLOP`."""
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


def timeline_svg(trace: Trace, device: Device, title: str, pass_s: Mapping[Phase, float]) -> str:
    """Return the step from left to right with memory stacked by kind, as one self-contained <svg> element.

    The width of a pass is its fraction of the time, and at least ``MIN_PASS_WIDTH``; ``pass_s`` are the seconds of one
    pass of each phase. Within a pass all operators have equal width.
    """
    moments = stretches(trace.moments, _RIGHT - _LEFT)
    edges = _edges(moments, pass_s)
    most = max(trace.peak.total * 1.05, min(device.usable_bytes * 1.05, trace.peak.total * 2), 1)
    parts = [
        root(_WIDTH, _HEIGHT, title),
        text(_LEFT, 20, title, TITLE),
        *_areas(moments, edges, most),
        *_scale(most),
        *_passes(moments, edges),
        *_parts(moments, edges),
        *_limit(device, most),
        *_legend(trace),
    ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _edges(moments: Sequence[Moment], pass_s: Mapping[Phase, float]) -> list[float]:
    """Return the x of the left edge of each moment, and of the right edge of the last."""
    passes = [list(group) for _, group in groupby(moments, key=_pass)]
    seconds = {**pass_s, "backward": pass_s.get("backward", 0.0) + pass_s.get("checkpointing", 0.0)}
    times = [seconds.get(_pass(each[0]), 0.0) for each in passes]  # type: ignore[call-overload]
    wide = [max(time / (sum(times) or 1.0), MIN_PASS_WIDTH) for time in times]
    edges = [float(_LEFT)]
    for each, share in zip(passes, wide, strict=True):
        step = (_RIGHT - _LEFT) * share / sum(wide) / len(each)
        edges += [edges[-1] + step * number for number in range(1, len(each) + 1)]
    return edges


def _areas(moments: Sequence[Moment], edges: Sequence[float], most: float) -> Iterator[str]:
    """Yield one polygon for each kind, stacked from the bottom up."""
    below = [0] * len(moments)
    for kind in SIGNS:
        above = [low + moment.held.get(kind, 0) for low, moment in zip(below, moments, strict=True)]
        if above != below:
            there = list(_steps(above, edges, most))
            back = list(_steps(below, edges, most))[::-1]
            points = " ".join(f"{x:.1f},{y:.1f}" for x, y in [*there, *back])
            yield f'<polygon points="{points}" fill="{COLOURS[kind]}" fill-opacity="0.85"/>'
        below = above


def _steps(heights: Sequence[int], edges: Sequence[float], most: float) -> Iterator[tuple[float, float]]:
    for height, (left, right) in zip(heights, pairwise(edges), strict=True):
        y = _BOTTOM - height / most * (_BOTTOM - _TOP)
        yield left, y
        yield right, y


def _scale(most: float) -> Iterator[str]:
    for quarter in range(5):
        y = _BOTTOM - quarter / 4 * (_BOTTOM - _TOP)
        yield f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{_RIGHT}" y2="{y:.1f}" stroke="{INK}" stroke-opacity="0.3"/>'
        yield text(_LEFT - 6, y + 4, human_bytes(most * quarter / 4), 'text-anchor="end"')


def _passes(moments: Sequence[Moment], edges: Sequence[float]) -> Iterator[str]:
    """Yield the name of each pass, and a line at its start."""
    at = 0
    for name, group in groupby(moments, key=_pass):
        x, at = edges[at], at + len(list(group))
        yield f'<line x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{_BOTTOM + 6}" stroke="{INK}" stroke-opacity="0.6"/>'
        if edges[at] - x > 50:
            yield text(x + 4, _BOTTOM + 18, name)


def _parts(moments: Sequence[Moment], edges: Sequence[float]) -> Iterator[str]:
    """Yield a second line below the passes: their micro-batches."""
    at = 0
    for words, group in groupby(_part(moment, moments) for moment in moments):
        x, at = edges[at], at + len(list(group))
        if words and edges[at] - x > 120:
            yield text(x + 4, _BOTTOM + 36, words)


def _limit(device: Device, most: float) -> Iterator[str]:
    if device.usable_bytes > most:
        return
    y = _BOTTOM - device.usable_bytes / most * (_BOTTOM - _TOP)
    yield (
        f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{_RIGHT}" y2="{y:.1f}" stroke="{INK}" stroke-width="2" '
        'stroke-dasharray="6 4"/>'
    )
    yield (
        f'<line x1="{_RIGHT + 8}" y1="{_TOP + 11}" x2="{_RIGHT + 22}" y2="{_TOP + 11}" stroke="{INK}" stroke-width="2" '
        'stroke-dasharray="6 2"/>'
    )
    yield text(_RIGHT + 26, _TOP + 15, f"usable {human_bytes(device.usable_bytes)}")


def _legend(trace: Trace) -> Iterator[str]:
    """Yield the kinds with their bytes at the peak, from the top down as they are drawn."""
    shown = [kind for kind in SIGNS if any(moment.held.get(kind) for moment in trace.moments)]
    yield text(_RIGHT + 8, _BOTTOM + 18, "width: time", 'font-size="10"')
    for row, kind in enumerate(reversed(shown)):
        y = _TOP + 40 + 20 * row
        yield f'<rect x="{_RIGHT + 8}" y="{y - 10}" width="12" height="12" fill="{COLOURS[kind]}"/>'
        yield text(_RIGHT + 26, y, f"{kind} {human_bytes(trace.peak.held.get(kind, 0))}")


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
