"""Remedies for a run that does not fit, with the peak memory that each leaves.

The peaks are arithmetic on the trace of the layout with the lowest peak; they are not traced.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Literal

from trainwright.plan.call_trace import Kind
from trainwright.plan.devices import Device
from trainwright.plan.explain import human_bytes, human_seconds
from trainwright.plan.layout import Offload

Means = Literal["here", "devices"]
"""``here``: remedies on this device. ``devices``: remedies with several devices."""


@dataclass(frozen=True)
class Remedy:
    """One change. ``settings`` are its ``--set`` arguments, () if this version has none."""

    name: str
    means: Means
    settings: tuple[str, ...]
    peak_bytes: int
    fits: bool
    why: str

    def line(self) -> str:
        """One line of text."""
        verdict = "fits" if self.fits else "does not fit"
        return f"{self.name}: about {human_bytes(self.peak_bytes)}, {verdict}; {self.why}"


@dataclass(frozen=True)
class PeakMemory:
    """Peak memory and parameters of the layout with the lowest peak. The optimizer is on the device.

    ``offload`` is what offload would move, None if it is impossible. ``cast_bytes`` are the 16-bit copies that autocast
    keeps of trained weights; it keeps none of frozen ones.
    """

    peak_bytes: int
    kinds: Mapping[Kind, int]
    optimizer: str
    parameters: int
    trainable: int
    has_lora: bool = False
    cast_bytes: int = 0
    offload: Offload | None = None

    @property
    def kept_casts(self) -> int:
        """Bytes of autocast copies in the peak."""
        return min(self.cast_bytes, self.kinds.get("temporaries", 0))

    def without(self, *kinds: Kind) -> int:
        """Return the peak without memory of these kinds."""
        return self.peak_bytes - sum(self.kinds.get(kind, 0) for kind in kinds)


def remedies(held: PeakMemory, device: Device) -> tuple[Remedy, ...]:
    """Return all changes that save memory: first those that fit, and remedies on this device before more devices."""
    found = [*_optimizers(held, device), *_lora(held, device), *_eight_bit(held, device)]
    found += [*_offload(held, device), *_sharding(held, device)]
    return tuple(sorted(found, key=lambda remedy: (not remedy.fits, remedy.means == "devices")))


def _make(device: Device, name: str, means: Means, settings: tuple[str, ...], peak_bytes: int, why: str) -> Remedy:
    return Remedy(name, means, settings, peak_bytes, peak_bytes <= device.usable_bytes, why)


def _optimizers(held: PeakMemory, device: Device) -> list[Remedy]:
    if held.optimizer in ("adafactor", "sgd") or not held.kinds.get("optimizer", 0):
        return []
    grads = held.kinds.get("gradients", 0)  # an update that may be skipped needs a copy of the gradients
    left = max(held.without("optimizer"), held.kinds.get("weights", 0) + 2 * grads)
    why = "its second moment is factored, so it keeps next to nothing; another optimizer: its lr must be tuned again"
    return [_make(device, "Adafactor", "here", ("optimizer.use=adafactor", "optimizer.args={}"), left, why)]


def _lora(held: PeakMemory, device: Device) -> list[Remedy]:
    if held.has_lora or held.trainable < held.parameters // 2:
        return []
    left = held.without("optimizer", "gradients") - held.kept_casts
    why = "adapters are trained, the weights stay unchanged (in fp32): right for a pretrained model, not for a new one"
    return [_make(device, "LoRA", "here", ("model.lora={rank: 8}",), left, why)]


def _eight_bit(held: PeakMemory, device: Device) -> list[Remedy]:
    moments = held.kinds.get("optimizer", 0)
    if held.optimizer not in ("adam", "adamw") or not moments:
        return []
    why = "AdamW with blockwise 8-bit moments (arXiv:2110.02861), by torchao"
    return [
        _make(device, "8-bit moments", "here", ("optimizer.use=adamw8bit",), held.peak_bytes - moments * 3 // 4, why)
    ]


def _offload(held: PeakMemory, device: Device) -> list[Remedy]:
    moved = held.offload
    if moved is None:
        return []
    host, more = human_bytes(moved.host_bytes), human_seconds(moved.step_s)
    why = f"moments and update in the host's memory, of which it takes {host}; a step takes {more} more"
    left, settings = held.peak_bytes - moved.state_bytes, ("optimizer.offload=true",)
    if moved.lacks_room(device):
        why = f"{why}; {human_bytes(device.host_memory_bytes)} are free there"
        return [Remedy("optimizer offload", "here", settings, left, False, why)]
    return [_make(device, "optimizer offload", "here", settings, left, why)]


def _sharding(held: PeakMemory, device: Device) -> list[Remedy]:
    shared = sum(held.kinds.get(kind, 0) for kind in ("weights", "gradients", "optimizer"))
    rest = held.peak_bytes - shared  # includes autocast's copies of the weights, which are not sharded
    room = device.usable_bytes - rest
    if device.kind == "cpu" or room <= 0 or not shared:
        return []
    count = max(2, ceil(shared / room))
    left = rest + shared // count
    why = "each holds its shard of weights, gradients and moments; the plan with --ranks says more"
    return [_make(device, f"sharding over {count} such devices", "devices", (f"parallel.shard={count}",), left, why)]
