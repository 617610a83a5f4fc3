"""How a run is laid out on a device: micro-batch, precision, what is computed again, how the loss is. Pure.

All that is weighed here gives the same training but for last bits (and for what looks at a micro-batch, as BatchNorm
does): the global batch stays. The rule: of what fits, the fastest; of what is as fast within ``AS_FAST``, the
plainest; of that the whole batch uncut, or else the cut that holds least. The optimizer goes to the host's memory only
where nothing fits otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from trainwright.plan.devices import Device
from trainwright.plan.explain import human_bytes, human_seconds
from trainwright.plan.make import Note
from trainwright.plan.offload import Offload, offload_of, without_optimizer
from trainwright.plan.roofline import StepTime, scaled_time
from trainwright.plan.scale import Scaled

AS_FAST = 0.02
MOST_SIZES = 40
"""Micro-batches that are weighed, evenly spread where there would be more."""


@dataclass(frozen=True)
class Layout:
    """One way to run a model, for every size. ``checkpointing`` as the recipe says it; ``rank``: the plainest is 0.

    ``logits_bytes`` are those of the whole logits of a sample and their gradient in fp32; 0: no chunks are possible.
    ``scaled`` is what the device holds and does: without the optimizer where that is an ``offload``.
    """

    precision: str
    checkpointing: str
    chunked: bool
    scaled: Scaled
    rank: int = 0
    logits_bytes: int = 0
    offload: Offload | None = None


@dataclass(frozen=True)
class Option:
    """A way in a micro-batch, on a device: what it holds at most and how long a step of the global batch takes."""

    way: Layout
    micro: int
    accumulation: int
    peak_bytes: int
    time: StepTime
    fits: bool

    @property
    def step_s(self) -> float:
        return self.time.step_s

    def cost(self) -> str:
        """`31.2 GiB, 1.4 s a step`"""
        return f"{human_bytes(self.peak_bytes)}, {human_seconds(self.step_s)} a step"


@dataclass(frozen=True)
class Choice:
    """``best`` is the option to take; where none fits, the one that holds least. ``options`` are all that
    were weighed."""

    best: Option
    options: tuple[Option, ...]
    notes: tuple[Note, ...]

    @property
    def fits(self) -> bool:
        return self.best.fits


def choose(ways: Sequence[Layout], device: Device, size: int, *, micro: int | None = None) -> Choice:
    """The best way and micro-batch for ``size`` samples a step on one rank; ``micro`` where the recipe fixes it."""
    sizes = [micro] if micro is not None else micro_sizes(size)
    options = [weigh(way, device, size, each) for way in ways for each in sizes]
    here = [option for option in options if not option.way.offload] or options
    fitting = [option for option in here if option.fits] or [option for option in options if option.fits]
    best = pick(fitting) if fitting else min(here, key=lambda option: (option.peak_bytes, option.way.rank))
    return Choice(best, tuple(options), _notes(best, options, device, fixed=micro is not None))


def offloaded(ways: Sequence[Layout], device: Device) -> list[Layout]:
    """The same with the optimizer in the host's memory, where there is something to move and somewhere to move it."""
    found = [(way, offload_of(way.scaled.small, device)) for way in ways]
    return [replace(way, scaled=without_optimizer(way.scaled), offload=moved) for way, moved in found if moved]


def weigh(way: Layout, device: Device, size: int, micro: int) -> Option:
    """One way in one micro-batch."""
    accumulation = -(-size // micro)
    peak = way.scaled.peak_bytes(micro, accumulation)
    time = scaled_time(way.scaled, micro, accumulation, device, way.precision)
    fits = peak <= device.usable_bytes
    if way.offload is not None:
        time = time.waiting("host", way.offload.step_s)
        fits = fits and not way.offload.lacks_room(device)
    return Option(way, micro, accumulation, peak, time, fits)


def pick(options: Iterable[Option]) -> Option:
    """The plainest of those that are as fast as the fastest; of these the batch uncut, or what holds least."""
    options = list(options)
    enough = min(option.step_s for option in options) * (1 + AS_FAST)
    return min(
        (option for option in options if option.step_s <= enough),
        key=lambda option: (option.way.rank, option.accumulation > 1, option.peak_bytes, option.step_s),
    )


def micro_sizes(size: int) -> list[int]:
    """Micro-batches that cut ``size`` samples into parts as equal as can be, rising; divisors where they suffice."""
    divisors = [each for each in range(1, size + 1) if size % each == 0] if size <= 1 << 16 else []
    equal = divisors if len(divisors) > 3 else sorted({-(-size // count) for count in _counts(size)})
    if len(equal) <= MOST_SIZES:
        return equal
    return sorted({equal[round(i * (len(equal) - 1) / (MOST_SIZES - 1))] for i in range(MOST_SIZES)})


def _counts(size: int) -> list[int]:
    """1, 2, 3 ... and then by steps of a tenth."""
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
        return Note("micro-batch", chosen, f"asked for in the recipe; {best.cost()}")
    same = sorted((option for option in options if option.way is best.way), key=lambda option: option.micro)
    at = same.index(best)
    said = [f"{best.cost()}, spent {_spent(best)}"]
    said += [
        f"{option.micro} would be {_against(option, best)}" for option in (*same[at - 1 : at], *same[at + 1 : at + 2])
    ]
    return Note("micro-batch", chosen, "; ".join(said))


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
    name = best.way.precision
    seconds = {each: best.time.flops / (device.flops[each] * device.reach_flops) for each in device.precisions}
    rates = ", ".join(f"{human_seconds(seconds[each])} in {each}" for each in device.precisions)
    said = [f"the arithmetic of a step alone takes {rates}"]
    if name in ("bf16", "fp16"):
        said.append("weights, gradients and moments stay in fp32 (master weights)")
    same = [option for option in options if (option.way.offload is None) == (best.way.offload is None)]
    others = {option.way.precision for option in same} - {name}
    said += [f"{other} would be {_best_where(same, best, precision=other)}" for other in sorted(others)]
    return Note("precision", name, "; ".join(said))


def _checkpointing_note(best: Option, options: Sequence[Option]) -> Note:
    name = best.way.checkpointing
    same = _alike(options, best)
    others = list(dict.fromkeys(option.way.checkpointing for option in same if option.way.checkpointing != name))
    share = best.time.recomputed_flops / best.time.flops if best.time.flops else 0.0
    said = [f"{share:.0%} of the arithmetic is done again" if share else "nothing is computed twice"]
    said += [f"{other} would be {_best_where(same, best, checkpointing=other)}" for other in others]
    return Note("checkpointing", name, "; ".join(said))


def _chunked_note(best: Option, options: Sequence[Option]) -> Note:
    name, logits = ("chunked" if best.way.chunked else "plain"), best.way.logits_bytes * best.micro
    if not logits:
        return Note("loss", name, "model and loss are not made for logits in chunks")
    same = _alike(options, best)
    if len({option.way.chunked for option in same}) > 1:
        other = "plain" if best.way.chunked else "chunked"
        return Note("loss", name, f"{other} would be {_best_where(same, best, chunked=not best.way.chunked)}")
    verb = "would take" if best.way.chunked else "take"
    return Note("loss", name, f"whole logits of a micro-batch and their gradient {verb} {human_bytes(logits)} in fp32")


def _offload_note(best: Option, options: Sequence[Option], device: Device) -> Note:
    topic, moved = "optimizer offload", best.way.offload
    if moved is None:
        moved = offload_of(best.way.scaled.small, device)
        if moved is None:
            return Note(topic, "no", "there is no optimizer state to move, or no other memory to move it to")
        others = [option for option in options if option.way.offload]
        would = _best_of(others, best) if others else f"{human_bytes(moved.state_bytes)} less"
        return Note(topic, "no", f"it would be {would}; {_moving(moved)}")
    why = f"it frees {human_bytes(moved.state_bytes)} and takes {human_bytes(moved.host_bytes)} of the host's memory"
    if moved.lacks_room(device):
        return Note(topic, "yes", f"{why}, where {human_bytes(device.host_memory_bytes)} are free and a tenth stays so")
    needed = best.fits and any(option.way.offload is None for option in options)
    return Note(topic, "yes", f"{why}; {_moving(moved)}{'; nothing fits without' if needed else ''}")


def _moving(moved: Offload) -> str:
    """What it costs in each step."""
    link, host = human_seconds(moved.link_s), human_seconds(moved.host_s)
    return f"{human_bytes(moved.link_bytes)} a step over the link to the host take {link}, the update there {host}"


def _best_where(options: Sequence[Option], best: Option, **wanted: object) -> str:
    """The best of the options that differ as ``wanted``: what it costs against ``best``."""
    return _best_of([o for o in options if all(getattr(o.way, key) == value for key, value in wanted.items())], best)


def _alike(options: Sequence[Option], best: Option) -> list[Option]:
    """Those of the same precision and place of the optimizer."""
    how = (best.way.precision, best.way.offload is None)
    return [option for option in options if (option.way.precision, option.way.offload is None) == how]


def _best_of(found: Sequence[Option], best: Option) -> str:
    """The best of them: what it costs against ``best``."""
    fitting = [option for option in found if option.fits]
    if fitting:
        return _against(pick(fitting), best)
    return _against(min(found, key=lambda option: option.peak_bytes), best)


def _against(option: Option, best: Option) -> str:
    size = "" if option.micro == best.micro else f"at {option.micro} x {option.accumulation} "
    change = option.step_s / best.step_s - 1
    time = "as fast" if abs(change) < 0.005 else f"{abs(change):.0%} {'slower' if change > 0 else 'faster'}"
    verdict = "" if option.fits else " and does not fit"
    return f"{size}{human_bytes(option.peak_bytes)}, {time}{verdict}"
