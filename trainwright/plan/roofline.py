"""The time of a step on a device by the roofline: each operator is bound by arithmetic, memory or the host."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from trainwright.plan.call_trace import Phase
from trainwright.plan.devices import Device
from trainwright.plan.scale import PASSES, Scaled

_NAMES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by phase, and by bottleneck (``arithmetic``, ``memory``, ``launches``, ``host``).

    ``flops`` and ``moved_bytes`` are of the complete step; ``peak_flops`` is the peak rate that ``mfu`` is relative to.
    """

    by_phase: Mapping[Phase, float]
    spent: Mapping[str, float]
    flops: int
    checkpointing_flops: int
    moved_bytes: int
    peak_flops: float

    @property
    def step_s(self) -> float:
        """Seconds of the complete step."""
        return sum(self.by_phase.values())

    def waiting(self, what: str, seconds: float) -> StepTime:
        """Return the same step with an update that takes ``seconds`` longer, spent on ``what``."""
        by_phase: dict[Phase, float] = {**self.by_phase, "update": self.by_phase.get("update", 0.0) + seconds}
        return replace(self, by_phase=by_phase, spent={**self.spent, what: seconds})

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation: the FLOPs that the model needs, as a fraction of the device's peak rate."""
        return (self.flops - self.checkpointing_flops) / (self.step_s * self.peak_flops) if self.step_s else 0.0


def scaled_time(scaled: Scaled, micro: int, accumulation: int, device: Device, precision: str) -> StepTime:
    """Return the time of the step ``scaled.at(micro, accumulation)``; equal layers are priced once.

    ``precision`` is the recipe's and decides how float32 matmuls are computed.
    """
    spent = {"arithmetic": 0.0, "memory": 0.0, "launches": 0.0}
    busy: dict[Phase, float] = defaultdict(float)
    launch: dict[Phase, float] = defaultdict(float)
    flops: dict[Phase, float] = defaultdict(float)
    moved_bytes = 0.0
    for phase, dtype, calls, each_flops, each_bytes, times in _work_rows(scaled, micro, accumulation):
        computing = max(each_flops, 0.0) / (rate(device, dtype, precision) * device.reach_flops)
        moving = max(each_bytes, 0.0) / (device.bandwidth * device.reach_bandwidth)
        busy[phase] += max(computing, moving) * times
        launch[phase] += calls * device.launch_s * times
        spent["arithmetic" if computing >= moving else "memory"] += max(computing, moving) * times
        flops[phase] += each_flops * times
        moved_bytes += each_bytes * times
    by_phase = {phase: max(seconds, launch[phase]) for phase, seconds in busy.items()}
    spent["launches"] = sum(by_phase.values()) - sum(busy.values())
    again = round(flops["checkpointing"])
    return StepTime(
        by_phase, spent, round(sum(flops.values())), again, round(moved_bytes), peak_rate(device, precision)
    )


def _work_rows(scaled: Scaled, micro: int, accumulation: int) -> Iterator[tuple[Phase, str, float, float, float, int]]:
    """Yield rows of phase, dtype, calls, FLOPs, bytes and repetitions."""
    for (phase, dtype, *lines), count in scaled.distinct.items():
        calls, flops, moved = (fixed + each * micro for fixed, each in lines)
        yield phase, dtype, calls, flops, moved, count * (accumulation if phase in PASSES else 1)
    if accumulation > 1:
        sums = max(moment.held.get("gradients", 0) for moment in scaled.small.moments)
        yield "backward", "float32", 1, 0.0, 3.0 * sums, accumulation - 1


def peak_rate(device: Device, precision: str) -> float:
    """Return the FLOP/s of the device in a recipe's precision, the denominator of utilisation."""
    peak = rate(device, "float32", precision) if precision in ("fp32", "tf32") else device.flops.get(precision, 0.0)
    return peak or device.flops["fp32"]


def rate(device: Device, dtype: str, precision: str) -> float:
    """Return the FLOP/s of matrix products in ``dtype``; a dtype without hardware support runs as fp32."""
    name = _NAMES.get(dtype, "fp32")
    if name == "fp32" and precision == "tf32" and dtype == "float32":
        name = "tf32"
    found = device.flops.get(name, device.flops["fp32"])
    return found / 2 if dtype in ("float64", "complex128") else found
