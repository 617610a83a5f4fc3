"""Chooses the layout of a run on a device: micro-batch, precision, activation checkpointing, chunks of the loss.

Every layout here gives the same training except for last bits (and for layers that depend on the micro-batch, such as
BatchNorm): the global batch is unchanged. The rule: of the layouts that fit and whose step time is within
``STEP_TIME_TOLERANCE`` of the fastest, take the simplest. Of its micro-batches, take the full batch, or else the one
with the lowest peak. The optimizer is offloaded only if nothing fits otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from trainwright.plan.amounts import human_bytes, human_seconds
from trainwright.plan.call_trace import Trace
from trainwright.plan.devices import Device
from trainwright.plan.make import Note
from trainwright.plan.roofline import StepTime, scaled_time
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
    """Return the step without the optimizer's state and update, which are on the host."""
    return replace(scaled, small=_without(scaled.small), large=_without(scaled.large))


def _without(trace: Trace) -> Trace:
    moments = []
    for each in trace.moments:
        gone = ("optimizer", "temporaries") if each.phase == "update" else ("optimizer",)
        moments.append(replace(each, held={kind: size for kind, size in each.held.items() if kind not in gone}))
    return replace(trace, moments=tuple(moments), work=tuple(w for w in trace.work if w.phase != "update"))


STEP_TIME_TOLERANCE = 0.02
MAX_MICRO_SIZES = 40
"""The most micro-batch sizes that are compared. If there are more, evenly spaced ones are chosen."""


@dataclass(frozen=True)
class Layout:
    """One layout of a model, for every micro-batch size.

    ``checkpointing`` is as in a recipe. ``complexity`` orders layouts: the simplest has 0.
    ``logits_bytes`` are the bytes of one sample's complete logits and their gradient in fp32; 0 if the loss cannot be
    chunked. A run computes the loss in chunks for micro-batches of more than ``plain_up_to`` samples, so the layout is
    valid on one side of this limit; None: for all micro-batches. ``scaled`` is the memory and work on the device,
    without the optimizer if it is offloaded.
    """

    precision: str
    checkpointing: str
    chunked: bool
    scaled: Scaled
    complexity: int = 0
    logits_bytes: int = 0
    offload: Offload | None = None
    plain_up_to: int | None = None

    def is_of(self, micro: int) -> bool:
        """Return True if a run with ``micro`` samples at a time computes the loss as this layout does."""
        return self.plain_up_to is None or self.chunked == (micro > self.plain_up_to)


@dataclass(frozen=True)
class Option:
    """A layout with a micro-batch on a device: its peak memory, and the time of a step of the global batch."""

    layout: Layout
    micro: int
    accumulation: int
    peak_bytes: int
    time: StepTime
    fits: bool

    @property
    def step_s(self) -> float:
        return self.time.step_s

    def cost(self) -> str:
        """Return text such as `31.2 GiB, 1.4 s a step`."""
        return f"{human_bytes(self.peak_bytes)}, {human_seconds(self.step_s)} a step"


@dataclass(frozen=True)
class Choice:
    """``best`` of the ``options`` is the chosen one, or the option with the lowest peak if none fits."""

    best: Option
    options: tuple[Option, ...]
    notes: tuple[Note, ...]

    @property
    def fits(self) -> bool:
        return self.best.fits


def choose(layouts: Sequence[Layout], device: Device, size: int, *, micro: int | None = None) -> Choice:
    """Return the best layout and micro-batch for ``size`` samples per step on one rank.

    ``micro`` is set if the recipe fixes the micro-batch.
    """
    sizes = [micro] if micro is not None else micro_sizes(size)
    options = [weigh(layout, device, size, each) for layout in layouts for each in sizes if layout.is_of(each)]
    preferred = [option for option in options if not option.layout.offload] or options
    fitting = [option for option in preferred if option.fits] or [option for option in options if option.fits]
    best = (
        pick(fitting) if fitting else min(preferred, key=lambda option: (option.peak_bytes, option.layout.complexity))
    )
    return Choice(best, tuple(options), _notes(best, options, device, fixed=micro is not None))


def offload_layouts(layouts: Sequence[Layout], device: Device) -> list[Layout]:
    """Return the layouts with an offloaded optimizer, if it has state and the device has a link to the host."""
    found = [(layout, offload_of(layout.scaled.small, device)) for layout in layouts]
    return [replace(layout, scaled=without_optimizer(layout.scaled), offload=moved) for layout, moved in found if moved]


def weigh(layout: Layout, device: Device, size: int, micro: int) -> Option:
    """Return the memory and time of one layout with one micro-batch size."""
    accumulation = -(-size // micro)
    peak = layout.scaled.peak_bytes(micro, accumulation)
    time = scaled_time(layout.scaled, micro, accumulation, device, layout.precision)
    fits = peak <= device.usable_bytes
    if layout.offload is not None:
        time = time.waiting("host", layout.offload.step_s)
        fits = fits and not layout.offload.lacks_room(device)
    return Option(layout, micro, accumulation, peak, time, fits)


def pick(options: Iterable[Option]) -> Option:
    """Return the simplest of the options that are about as fast as the fastest.

    Of equally simple options, return one without accumulation, or else the option with the lowest peak.
    """
    options = list(options)
    enough = min(option.step_s for option in options) * (1 + STEP_TIME_TOLERANCE)
    return min(
        (option for option in options if option.step_s <= enough),
        key=lambda option: (option.layout.complexity, option.accumulation > 1, option.peak_bytes, option.step_s),
    )


def micro_sizes(size: int) -> list[int]:
    """Return rising micro-batch sizes that cut ``size`` into equal parts, or nearly equal if it has few divisors."""
    divisors = [each for each in range(1, size + 1) if size % each == 0] if size <= 1 << 16 else []
    equal = divisors if len(divisors) > 3 else sorted({-(-size // count) for count in _counts(size)})
    return evenly_spaced(equal, MAX_MICRO_SIZES)


def evenly_spaced(sizes: Sequence[int], most: int) -> list[int]:
    """Return at most ``most`` of the rising sizes at even distances in the list, including both ends."""
    if len(sizes) <= most:
        return list(sizes)
    return sorted({sizes[round(i * (len(sizes) - 1) / (most - 1))] for i in range(most)})


def _counts(size: int) -> list[int]:
    """Return 1, 2, 3, ... up to ``size``; from 20 on, each count is about a tenth larger than the previous one."""
    found, count = [], 1
    while count < size:
        found.append(count)
        count += max(1, count // 10)
    return [*found, size]


def _notes(best: Option, options: Sequence[Option], device: Device, *, fixed: bool) -> tuple[Note, ...]:
    return (
        _micro_note(best, options, device, fixed=fixed),
        _precision_note(best, options, device),
        _checkpointing_note(best, options),
        _chunked_note(best, options),
        _offload_note(best, options, device),
    )


def _micro_note(best: Option, options: Sequence[Option], device: Device, *, fixed: bool) -> Note:
    chosen = f"{best.micro} x {best.accumulation}"
    if not best.fits:
        over = best.peak_bytes > device.usable_bytes
        more = f": more than the {human_bytes(device.usable_bytes)} usable" if over else ""
        return Note("micro-batch", chosen, f"{best.cost()}{more}")
    if fixed:
        return Note("micro-batch", chosen, f"set in the recipe; {best.cost()}")
    same = sorted((option for option in options if option.layout is best.layout), key=lambda option: option.micro)
    at = same.index(best)
    reasons = [f"{best.cost()}, spent {_spent(best)}"]
    reasons += [
        f"{option.micro} would be {_against(option, best)}" for option in (*same[at - 1 : at], *same[at + 1 : at + 2])
    ]
    return Note("micro-batch", chosen, "; ".join(reasons))


def _spent(option: Option) -> str:
    words = {
        "arithmetic": "on arithmetic",
        "memory": "on reading and writing memory",
        "launches": "waiting for the host",
        "host": "on the update in the host's memory",
    }
    name, seconds = max(option.time.spent.items(), key=lambda item: item[1])
    return f"{seconds / option.step_s:.0%} {words[name]}"


def _precision_note(best: Option, options: Sequence[Option], device: Device) -> Note:
    name = best.layout.precision
    shown = [each for each in device.precisions if each == name or "fp8" not in each]
    seconds = {each: best.time.flops / (device.flops[each] * device.reach_flops) for each in shown}
    rates = ", ".join(f"{human_seconds(took)} in {each}" for each, took in seconds.items())
    reasons = [f"the arithmetic of a step alone takes {rates}"]
    if name not in ("fp32", "tf32"):
        reasons.append("weights, gradients and moments stay in fp32 (master weights)")
    same = [option for option in options if (option.layout.offload is None) == (best.layout.offload is None)]
    others = {option.layout.precision for option in same} - {name}
    reasons += [f"{other} would be {_best_where(same, best, precision=other)}" for other in sorted(others)]
    if name in ("fp8", "mxfp8"):
        reasons.append("memory and time are planned as in bf16")
    return Note("precision", name, "; ".join(reasons))


def _checkpointing_note(best: Option, options: Sequence[Option]) -> Note:
    name = best.layout.checkpointing
    same = _comparable(options, best)
    others = list(dict.fromkeys(option.layout.checkpointing for option in same if option.layout.checkpointing != name))
    again = best.time.checkpointing_flops / best.time.flops if best.time.flops else 0.0
    reasons = [f"{again:.0%} of the arithmetic is recomputed" if again else "nothing is recomputed"]
    reasons += [f"{other} would be {_best_where(same, best, checkpointing=other)}" for other in others]
    return Note("checkpointing", name, "; ".join(reasons))


def _chunked_note(best: Option, options: Sequence[Option]) -> Note:
    name, logits = ("chunked" if best.layout.chunked else "plain"), best.layout.logits_bytes * best.micro
    if not logits:
        return Note("loss", name, "model and loss do not support logits in chunks")
    same = _comparable(options, best)
    if len({option.layout.chunked for option in same}) > 1:
        other = "plain" if best.layout.chunked else "chunked"
        return Note("loss", name, f"{other} would be {_best_where(same, best, chunked=not best.layout.chunked)}")
    verb = "would take" if best.layout.chunked else "take"
    return Note("loss", name, f"whole logits of a micro-batch and their gradient {verb} {human_bytes(logits)} in fp32")


def _offload_note(best: Option, options: Sequence[Option], device: Device) -> Note:
    topic, moved = "optimizer offload", best.layout.offload
    if moved is None:
        moved = offload_of(best.layout.scaled.small, device)
        if moved is None:
            return Note(topic, "no", "there is no optimizer state to move, or no other memory to move it to")
        others = [option for option in options if option.layout.offload]
        would = _best_of(others, best) if others else f"{human_bytes(moved.state_bytes)} less"
        return Note(topic, "no", f"it would be {would}; {_offload_times(moved)}")
    why = f"it frees {human_bytes(moved.state_bytes)} and takes {human_bytes(moved.host_bytes)} of the host's memory"
    if moved.lacks_room(device):
        why = f"{why}, of which {human_bytes(device.host_memory_bytes)} are free"
        return Note(topic, "yes", f"{why}; at most {HOST_MEMORY_FRACTION:.0%} of them may be used")
    needed = best.fits and any(option.layout.offload is None for option in options)
    return Note(topic, "yes", f"{why}; {_offload_times(moved)}{'; nothing fits without' if needed else ''}")


def _offload_times(moved: Offload) -> str:
    link, host = human_seconds(moved.link_s), human_seconds(moved.host_s)
    return f"{human_bytes(moved.link_bytes)} a step over the link to the host take {link}, the update there {host}"


def _best_where(options: Sequence[Option], best: Option, **wanted: object) -> str:
    """Compare ``best`` with the best of the options whose layout has the ``wanted`` values, as text."""
    return _best_of([o for o in options if all(getattr(o.layout, key) == value for key, value in wanted.items())], best)


def _comparable(options: Sequence[Option], best: Option) -> list[Option]:
    """Return the options with the same precision, and with the optimizer in the same place."""
    kind = (best.layout.precision, best.layout.offload is None)
    return [option for option in options if (option.layout.precision, option.layout.offload is None) == kind]


def _best_of(options: Sequence[Option], best: Option) -> str:
    """Compare ``best`` with the best of the options, as text."""
    fitting = [option for option in options if option.fits]
    if fitting:
        return _against(pick(fitting), best)
    return _against(min(options, key=lambda option: option.peak_bytes), best)


def _against(option: Option, best: Option) -> str:
    size = "" if option.micro == best.micro else f"at {option.micro} x {option.accumulation} "
    verdict = "" if option.fits else " and does not fit"
    return f"{size}{human_bytes(option.peak_bytes)}, {slower_or_faster(option.step_s / best.step_s)}{verdict}"


def slower_or_faster(ratio: float) -> str:
    """Return the ratio of two times as text: `as fast`, `12% slower` or `3% faster`."""
    change = ratio - 1
    return "as fast" if abs(change) < 0.005 else f"{abs(change):.0%} {'slower' if change > 0 else 'faster'}"
