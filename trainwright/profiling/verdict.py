"""Finds the bottleneck of a loop from its profile and the roofline of its device, and what to try. Without torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal

from trainwright.plan.amounts import human_seconds
from trainwright.plan.call_trace import Work
from trainwright.plan.devices import Device
from trainwright.plan.roofline import peak_rate, rate

COMPUTE = ("forward", "backward", "update")
PHASES = ("data", *COMPUTE, "exchange", "evaluation", "saving", "looking", "loop")
"""``looking``: observers, the recorder and the doctor. ``loop``: other code of the loop."""


@dataclass(frozen=True)
class Hot:
    """A place in the source where the host spends time. ``site`` is the innermost line of user code, if any."""

    phase: str
    label: str
    site: str
    seconds: float


@dataclass(frozen=True)
class OperatorTime:
    """The time of an operator without the operators that it calls. ``device_s`` is the time on a GPU."""

    phase: str
    op: str
    calls: float
    host_s: float
    device_s: float = 0.0


@dataclass(frozen=True)
class ModuleTime:
    """The time of the operators of one module, without its submodules."""

    path: str
    kind: str
    forward_s: float
    backward_s: float


@dataclass(frozen=True)
class HostSync:
    """An operator whose result the host waits for, at a line of user code."""

    op: str
    site: str
    phase: str
    calls: int


@dataclass(frozen=True)
class ProfileFacts:
    """A profile. ``phases`` add up to ``step_s``, the mean over ``steps`` steps that ran without a profiler.

    ``busy`` is the fraction of the time in which a GPU computed, None on a CPU. ``workers`` is the number of processes
    that read data, None if unknown. ``trace`` is the name of the trace file. ``failed`` has errors by missing part.
    ``kernels`` are the calls per step of GPU kernels and compiled regions, by name. ``memory`` are the bytes that
    tensors held over the traced steps. ``left_out`` is the number of timed steps that are not in the mean, because an
    occasional evaluation, save or examination followed them.
    """

    device: str
    precision: str
    steps: int
    step_s: float
    phases: Mapping[str, float]
    hot: tuple[Hot, ...] = ()
    left_out: int = 0
    work: tuple[Work, ...] = ()
    operators: tuple[OperatorTime, ...] = ()
    modules: tuple[ModuleTime, ...] = ()
    syncs: tuple[HostSync, ...] = ()
    memory: tuple[int, ...] = ()
    busy: float | None = None
    workers: int | None = None
    fused: bool | None = None
    compiled: bool = False
    kernels: Mapping[str, float] = field(default_factory=dict)
    trace: str | None = None
    failed: Mapping[str, str] = field(default_factory=dict)

    @property
    def compute_s(self) -> float:
        """Seconds in the forward pass, the backward pass and the update."""
        return sum(self.phases.get(phase, 0.0) for phase in COMPUTE)

    def fraction(self, *phases: str) -> float:
        """Return the fraction of a step that these phases take."""
        return sum(self.phases.get(phase, 0.0) for phase in phases) / self.step_s if self.step_s else 0.0


Bound = Literal["input", "communication", "overhead", "own code", "launch", "memory-bandwidth", "compute"]
WAITS: Mapping[str, tuple[str, ...]] = {
    "input": ("data",),
    "communication": ("exchange",),
    "overhead": ("saving", "looking", "evaluation"),
    "own code": ("loop",),
}
"""The phases of each bottleneck other than the computation."""
MIN_REPORTED_FRACTION = 0.05
"""Minimum fraction of a step that is reported. Smaller ones are within the noise of a machine with two cores."""
MIN_BOTTLENECK_FRACTION = 0.25
"""Minimum fraction of a step for which a wait is the bottleneck, if the computation is not launch-bound."""
CPU_HOST_TIME_RATIO = 5
"""Ratio on a CPU: host time of an operator in a training step (with autograd and modules) / of the operator alone."""
CACHED_BYTES = 1 << 20
"""On a CPU: the size up to which inputs and outputs of an operator stay in the caches, in bytes."""
MAX_IDLE_GPU_FRACTION = 0.5
"""If a GPU computes for less than this fraction of the time, the host is the bottleneck."""
MIN_BF16_RATIO = 1.3
"""Minimum speed-up of bf16 over fp32 in the device's rates that makes bf16 worth a try."""
TARGET_SAVING_FRACTION = 0.01
"""Fraction of a step that saving should take; the advice on checkpoint.every is computed from it."""


@dataclass(frozen=True)
class Advice:
    """A change to try. ``settings`` make it in a recipe, () if only the user can. ``changes`` is its side effect."""

    name: str
    why: str
    settings: tuple[str, ...] = ()
    changes: str = ""


@dataclass(frozen=True)
class BoundVerdict:
    """The bottleneck of the loop, the evidence, and what to try, in this order.

    ``roofline`` are seconds per step at the device's rates, by arithmetic, memory and launches. ``mfu`` is the fraction
    of the device's peak rate that the arithmetic reached, if known.
    """

    bound: Bound
    headline: str
    evidence: tuple[str, ...]
    advice: tuple[Advice, ...]
    roofline: Mapping[str, float]
    mfu: float | None = None


def judge(facts: ProfileFacts, device: Device) -> BoundVerdict:
    """Return the verdict on a profile that was measured on ``device``."""
    spent = _time_by_resource(facts, device)
    waits = {name: facts.fraction(*phases) for name, phases in WAITS.items()}
    main = max(waits, key=lambda name: waits[name])
    of_compute = _compute_bound(facts, spent)
    # Launch-bound computation can be made faster, too. Then a wait must take as long to count as the bottleneck.
    least = facts.fraction(*COMPUTE) if of_compute == "launch" else MIN_BOTTLENECK_FRACTION
    bound: Bound = main if waits[main] >= min(least, 0.5) else of_compute  # type: ignore[assignment]
    named = {name for name, fraction in waits.items() if fraction >= MIN_REPORTED_FRACTION} | {bound}
    flops = sum(work.flops for work in facts.work)
    mfu = flops / (facts.step_s * peak_rate(device, facts.precision)) if flops and facts.step_s else None
    return BoundVerdict(
        bound,
        _headline(bound, facts),
        tuple(_evidence(facts, spent, bound, named, mfu)),
        tuple(_advice(facts, device, bound, named)),
        spent,
        mfu,
    )


def _time_by_resource(facts: ProfileFacts, device: Device) -> dict[str, float]:
    """Return seconds by resource. An operator counts only for its slowest: arithmetic, memory, or the host's launch."""
    spent = {"arithmetic": 0.0, "memory": 0.0, "launches": 0.0}
    on_cpu = device.kind == "cpu"
    for work in facts.work:
        calls = max(1, work.calls)
        is_cached = on_cpu and work.bytes / calls < CACHED_BYTES
        needs = {
            "arithmetic": work.flops / (rate(device, work.dtype, facts.precision) * device.reach_flops),
            "memory": 0.0 if is_cached else work.bytes / (device.bandwidth * device.reach_bandwidth),
            "launches": calls * device.launch_s * (CPU_HOST_TIME_RATIO if on_cpu else 1),
        }
        longest = max(needs, key=lambda name: needs[name])
        spent[longest] += needs[longest]
    return spent


def _calls(facts: ProfileFacts) -> int:
    return sum(work.calls for work in facts.work)


def _compute_bound(facts: ProfileFacts, spent: Mapping[str, float]) -> Bound:
    if facts.busy is not None and facts.busy < MAX_IDLE_GPU_FRACTION:
        return "launch"
    longest = max(spent, key=lambda name: spent[name])
    return {"arithmetic": "compute", "memory": "memory-bandwidth"}.get(longest, "launch")  # type: ignore[return-value]


def _headline(bound: Bound, facts: ProfileFacts) -> str:
    match bound:
        case "input":
            return f"input-bound: {facts.fraction('data'):.0%} of a step waits for data, {_readers(facts)}"
        case "communication":
            return f"communication-bound: {facts.fraction('exchange'):.0%} of a step exchanges with other ranks"
        case "overhead":
            saving, looking = facts.fraction("saving"), facts.fraction("looking", "evaluation")
            what = "saves checkpoints" if saving >= looking else f"runs observers ({_slowest_observer(facts)})"
            return f"bound by overhead: {max(saving, looking):.0%} of a step {what}"
        case "own code":
            loop = f"{facts.fraction('loop'):.0%}"
            return f"bound by code of the loop: {loop} of a step runs beside the model and the optimizer"
        case "launch":
            each = human_seconds(facts.compute_s / max(1, _calls(facts)))
            return f"launch-bound: {_calls(facts):,} operators a step, {each} each: too small to keep the device busy"
        case "memory-bandwidth":
            return "memory-bandwidth-bound: most operators wait for memory, not for arithmetic"
        case _:
            return (
                f"compute-bound: {facts.fraction('forward', 'backward'):.0%} of a step is forward and backward passes"
            )


def _readers(facts: ProfileFacts) -> str:
    if facts.workers is None:
        return "which the loop reads"
    if not facts.workers:
        return "which the training process reads itself"
    return f"which {facts.workers} worker{'s' * (facts.workers > 1)} read{'s' * (facts.workers == 1)}"


def _slowest_observer(facts: ProfileFacts) -> str:
    labels: dict[str, float] = {}
    for hot in facts.hot:
        if hot.phase in ("looking", "evaluation"):
            labels[hot.label or hot.phase] = labels.get(hot.label or hot.phase, 0.0) + hot.seconds
    return max(labels, key=lambda label: labels[label]) if labels else "many observers"


def _evidence(
    facts: ProfileFacts, spent: Mapping[str, float], bound: Bound, named: set[str], mfu: float | None
) -> Iterator[str]:
    per = 1 / facts.step_s if facts.step_s else 0.0
    for hot in _hottest(facts, named):
        where = f" at {hot.site}" if hot.site else ""
        yield f"{hot.seconds * per:.0%} of a step: {hot.phase}, {hot.label or 'waiting'}{where}"
    if facts.work and bound in ("launch", "memory-bandwidth", "compute"):
        least = ", ".join(f"{name} {human_seconds(seconds)}" for name, seconds in spent.items())
        took = f"forward, backward and update took {human_seconds(facts.compute_s)}"
        yield f"by the roofline of {facts.device}: {least}; {took}"
    if mfu is not None and mfu <= 1:  # the peak of a CPU is measured; on a busy machine it is too low
        yield f"{mfu:.1%} of the peak rate of {facts.device} in {facts.precision}"
    if facts.busy is not None:
        yield f"the GPU computes {facts.busy:.0%} of the time"
    for sync in facts.syncs:
        cost = "the host waits for the GPU there" if facts.busy is not None else "costs nothing on a CPU, stalls a GPU"
        yield f"host sync: {sync.op} at {sync.site}, {sync.calls} a step, in {sync.phase} ({cost})"


def _hottest(facts: ProfileFacts, named: set[str]) -> list[Hot]:
    phases = {phase for name in named for phase in WAITS.get(name, ())}
    found = [hot for hot in facts.hot if hot.phase in phases and hot.seconds >= MIN_REPORTED_FRACTION * facts.step_s]
    return sorted(found, key=lambda hot: -hot.seconds)[:6]


def _advice(facts: ProfileFacts, device: Device, bound: Bound, named: set[str]) -> Iterator[Advice]:
    """Yield advice in the order in which to try it."""
    if bound == "input":
        yield from _of_input(facts)
    if facts.fraction("saving") >= MIN_REPORTED_FRACTION:
        times = max(2, round(facts.fraction("saving") / TARGET_SAVING_FRACTION))
        why = f"saving takes {facts.fraction('saving'):.0%} of a step; then below {TARGET_SAVING_FRACTION:.0%}"
        yield Advice(f"save every {times} times as many steps (checkpoint.every)", why)
    if facts.fraction("looking") >= MIN_REPORTED_FRACTION:
        yield Advice(
            f"run {_slowest_observer(facts)} less often", f"it takes {facts.fraction('looking'):.0%} of a step"
        )
    if "communication" in named:
        yield Advice("accumulate micro-batches, or exchange over a faster link", "exchanges take a part of each step")
    if facts.syncs:
        one = facts.syncs[0]
        often = "in each step" if one.calls == 1 else f"{one.calls} times per step"
        yield Advice(f"leave out the host sync at {one.site}, or do it less often", f"{one.op} {often}")
    if facts.fused is False and facts.fraction("update") >= MIN_REPORTED_FRACTION:
        yield Advice(
            "a fused optimizer", f"the update takes {facts.fraction('update'):.0%}", ("optimizer.args.fused=true",)
        )
    if bound in ("compute", "memory-bandwidth"):
        yield from _of_precision(facts, device, bound)
        if any("convolution" in work.op for work in facts.work):
            yield Advice("channels-last", "the model has convolutions", ("channels-last",))
    if bound in ("launch", "memory-bandwidth") and not facts.compiled:
        yield Advice("compile the model", "it joins small operators", ("model.compile=true",))
    if bound == "launch":
        yield Advice("a batch twice as large", "larger operators", ("batch x 2",), changes="the training")
    if "input" in named and bound != "input":
        yield from islice(_of_input(facts), 1)


def _of_input(facts: ProfileFacts) -> Iterator[Advice]:
    if facts.workers is None:
        yield Advice("another num_workers of the DataLoader, more or 0", "the loop waits for data")
        return
    counts = sorted({max(2, 2 * facts.workers), max(4, 4 * facts.workers)})
    for count in [*counts, *([0] if facts.workers else [])]:  # transferring batches may cost more than reading them
        yield Advice(f"{count} workers", f"now {facts.workers}", (f"data.workers={count}",))


def _of_precision(facts: ProfileFacts, device: Device, bound: Bound) -> Iterator[Advice]:
    full = {work.dtype for work in facts.work if work.flops} <= {"float32", "float64"}
    ratio = device.flops.get("bf16", 0.0) / rate(device, "float32", facts.precision)
    waits = bound == "memory-bandwidth" and "bf16" in device.flops
    if full and (ratio >= MIN_BF16_RATIO or waits):
        faster = f"the device is {ratio:.1f} times as fast in bf16"
        why = f"the passes compute in {facts.precision}, and {'bf16 is half as many bytes' if waits else faster}"
        yield Advice("bf16", why, ("precision=bf16",), changes="the rounding of the passes")
    if full and facts.precision == "fp32" and device.flops.get("tf32", 0.0) >= MIN_BF16_RATIO * device.flops["fp32"]:
        yield Advice("tf32", "matrix products on tensor cores", ("precision=tf32",), changes="the rounding of products")
