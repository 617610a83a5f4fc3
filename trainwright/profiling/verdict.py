"""What bounds a loop, by its profile and the roofline of its device, and what to try next. Pure: no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from trainwright.plan.devices import Device
from trainwright.plan.explain import human_seconds
from trainwright.plan.roofline import peak_rate, rate
from trainwright.profiling.facts import COMPUTE, Hot, ProfileFacts

Bound = Literal["input", "communication", "overhead", "own code", "launch", "memory-bandwidth", "compute"]
WORTH = 0.05
"""Share of a step from which on it is named: less than that, and the noise of two cores hides it."""
MAIN = 0.25
"""Share of a step that waiting, saving, looking or the user's own code take at least where they bound the loop."""
PER_OPERATOR = 5
"""Of a CPU: the host's time for an operator of a training step, in calls of the smallest one: autograd and modules."""
CACHED_BYTES = 1 << 20
"""Of a CPU: what an operator reads and writes stays in the caches up to about this size."""
IDLE = 0.5
"""Share of the time that a GPU computes at most where the host is what it waits for."""
WORTH_BF16 = 1.3
"""Times as fast as fp32 that a device computes bf16, at least, where it is worth a try."""
AMORTISED = 0.01
"""Share of a step that saving takes after the advice."""


@dataclass(frozen=True)
class Advice:
    """Something to try. ``settings`` of a recipe do it; empty: only the user can. ``changes``: what else does."""

    name: str
    why: str
    settings: tuple[str, ...] = ()
    changes: str = ""


@dataclass(frozen=True)
class BoundVerdict:
    """What bounds the loop, why that is said, what else takes a share, and what to try, in this order.

    ``roofline`` are seconds of a step by what they would be spent on at the device's rates: arithmetic, memory,
    launches. ``mfu`` is the share of its peak rate that the arithmetic reached, where that is known.
    """

    bound: Bound
    headline: str
    evidence: tuple[str, ...]
    advice: tuple[Advice, ...]
    roofline: Mapping[str, float]
    mfu: float | None = None


def judge(facts: ProfileFacts, device: Device) -> BoundVerdict:
    """The verdict on a profile that was measured on ``device``."""
    spent = _spent(facts, device)
    waits = {
        "input": facts.share("data"),
        "communication": facts.share("exchange"),
        "overhead": facts.share("saving", "looking", "evaluation"),
        "own code": facts.share("loop"),
    }
    main = max(waits, key=lambda name: waits[name])
    of_compute = _of_compute(facts, spent)
    least = facts.share(*COMPUTE) if of_compute == "launch" else MAIN  # launches could be saved, too
    bound: Bound = main if waits[main] >= min(least, 0.5) else of_compute  # type: ignore[assignment]
    named = {name for name, share in waits.items() if share >= WORTH} | {bound}
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


def _spent(facts: ProfileFacts, device: Device) -> dict[str, float]:
    """Each operator counts for what it needs longest: arithmetic, memory, or the host to launch it."""
    spent = {"arithmetic": 0.0, "memory": 0.0, "launches": 0.0}
    on_cpu = device.kind == "cpu"
    for work in facts.work:
        calls = max(1, work.calls)
        is_cached = on_cpu and work.bytes / calls < CACHED_BYTES
        needs = {
            "arithmetic": work.flops / (rate(device, work.dtype, facts.precision) * device.reach_flops),
            "memory": 0.0 if is_cached else work.bytes / (device.bandwidth * device.reach_bandwidth),
            "launches": calls * device.launch_s * (PER_OPERATOR if on_cpu else 1),
        }
        longest = max(needs, key=lambda name: needs[name])
        spent[longest] += needs[longest]
    return spent


def _calls(facts: ProfileFacts) -> int:
    return sum(work.calls for work in facts.work)


def _of_compute(facts: ProfileFacts, spent: Mapping[str, float]) -> Bound:
    if facts.busy is not None and facts.busy < IDLE:
        return "launch"
    longest = max(spent, key=lambda name: spent[name])
    return {"arithmetic": "compute", "memory": "memory-bandwidth"}.get(longest, "launch")  # type: ignore[return-value]


def _headline(bound: Bound, facts: ProfileFacts) -> str:
    percent = {
        "input": facts.share("data"),
        "communication": facts.share("exchange"),
        "own code": facts.share("loop"),
    }
    match bound:
        case "input":
            return f"input-bound: {percent[bound]:.0%} of a step waits for data, {_readers(facts)}"
        case "communication":
            return f"communication-bound: {percent[bound]:.0%} of a step exchanges with other ranks"
        case "overhead":
            saving, looking = facts.share("saving"), facts.share("looking", "evaluation")
            what = "saves checkpoints" if saving >= looking else f"looks at the training ({_looker(facts)})"
            return f"bound by overhead: {max(saving, looking):.0%} of a step {what}"
        case "own code":
            return f"bound by code of the loop: {percent[bound]:.0%} of a step runs beside the model and the optimizer"
        case "launch":
            each = human_seconds(facts.compute_s / max(1, _calls(facts)))
            return f"launch-bound: {_calls(facts):,} operators a step, {each} each: too small to keep the device busy"
        case "memory-bandwidth":
            return "memory-bandwidth-bound: most operators wait for memory, not for arithmetic"
        case _:
            return f"compute-bound: {facts.share('forward', 'backward'):.0%} of a step is forward and backward passes"


def _readers(facts: ProfileFacts) -> str:
    if facts.workers is None:
        return "which the loop reads"
    if not facts.workers:
        return "which the training process reads itself"
    return f"which {facts.workers} worker{'s' * (facts.workers > 1)} read{'s' * (facts.workers == 1)}"


def _looker(facts: ProfileFacts) -> str:
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
    if mfu is not None and mfu <= 1:  # of a CPU the peak is measured, on a busy machine too low
        yield f"{mfu:.1%} of the peak rate of {facts.device} in {facts.precision}"
    if facts.busy is not None:
        yield f"the GPU computes {facts.busy:.0%} of the time"
    for sync in facts.syncs:
        cost = "the host waits for the GPU there" if facts.busy is not None else "costs nothing on a CPU, stalls a GPU"
        yield f"host sync: {sync.op} at {sync.site}, {sync.calls} a step, in {sync.phase} ({cost})"


_PHASES_OF: Mapping[str, tuple[str, ...]] = {
    "input": ("data",),
    "communication": ("exchange",),
    "overhead": ("saving", "looking", "evaluation"),
    "own code": ("loop",),
}


def _hottest(facts: ProfileFacts, named: set[str]) -> list[Hot]:
    phases = {phase for name in named for phase in _PHASES_OF.get(name, ())}
    found = [hot for hot in facts.hot if hot.phase in phases and hot.seconds >= WORTH * facts.step_s]
    return sorted(found, key=lambda hot: -hot.seconds)[:6]


def _advice(facts: ProfileFacts, device: Device, bound: Bound, named: set[str]) -> Iterator[Advice]:
    """Of what bounds the loop first."""
    if bound == "input":
        yield from _of_input(facts)
    if facts.share("saving") >= WORTH:
        times = max(2, round(facts.share("saving") / AMORTISED))
        why = f"saving takes {facts.share('saving'):.0%} of a step; then below {AMORTISED:.0%}"
        yield Advice(f"save every {times} times as many steps (checkpoint.every)", why)
    if facts.share("looking") >= WORTH:
        yield Advice(f"let {_looker(facts)} look less often", f"it takes {facts.share('looking'):.0%} of a step")
    if "communication" in named:
        yield Advice("accumulate micro-batches, or exchange over a faster link", "exchanges take a share of each step")
    if facts.syncs:
        one = facts.syncs[0]
        yield Advice(
            f"leave out the host sync at {one.site}, or do it now and then", f"{one.op} {_per_step(one.calls)}"
        )
    if facts.fused is False and facts.share("update") >= WORTH:
        yield Advice(
            "a fused optimizer", f"the update takes {facts.share('update'):.0%}", ("optimizer.args.fused=true",)
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
    for count in [*counts, *([0] if facts.workers else [])]:  # handing batches over may cost more than reading them
        yield Advice(f"{count} workers", f"now {facts.workers}", (f"data.workers={count}",))


def _of_precision(facts: ProfileFacts, device: Device, bound: Bound) -> Iterator[Advice]:
    full = {work.dtype for work in facts.work if work.flops} <= {"float32", "float64"}
    ratio = device.flops.get("bf16", 0.0) / rate(device, "float32", facts.precision)
    waits = bound == "memory-bandwidth" and "bf16" in device.flops
    if full and (ratio >= WORTH_BF16 or waits):
        faster = f"the device is {ratio:.1f} times as fast in bf16"
        why = f"the passes compute in {facts.precision}, and {'bf16 is half as many bytes' if waits else faster}"
        yield Advice("bf16", why, ("precision=bf16",), changes="the rounding of the passes")
    if full and facts.precision == "fp32" and device.flops.get("tf32", 0.0) >= WORTH_BF16 * device.flops["fp32"]:
        yield Advice("tf32", "matrix products on tensor cores", ("precision=tf32",), changes="the rounding of products")


def _per_step(calls: int) -> str:
    return "in each step" if calls == 1 else f"{calls} times a step"
