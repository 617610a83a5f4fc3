"""What a profile measured of a loop, as values. Seconds, calls and bytes are of one step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from trainwright.plan.call_trace import Work

COMPUTE = ("forward", "backward", "update")
PHASES = ("data", *COMPUTE, "exchange", "evaluation", "saving", "looking", "loop")
"""``looking``: observers, the recorder and the doctor. ``loop``: code of the loop that is none of the others."""


@dataclass(frozen=True)
class Hot:
    """A place in the source where the host was found. ``site`` is the innermost line of the user's own, if any."""

    phase: str
    label: str
    site: str
    seconds: float


@dataclass(frozen=True)
class OperatorTime:
    """An operator without those that it calls. ``device_s``: on a GPU."""

    phase: str
    op: str
    calls: float
    host_s: float
    device_s: float = 0.0


@dataclass(frozen=True)
class ModuleTime:
    """The operators of one module, without those of the modules in it."""

    path: str
    kind: str
    forward_s: float
    backward_s: float


@dataclass(frozen=True)
class HostSync:
    """An operator whose result the host waits for, at a line of the user's own."""

    op: str
    site: str
    phase: str
    calls: int


@dataclass(frozen=True)
class ProfileFacts:
    """A profile. ``phases`` add up to ``step_s``, the mean over ``steps`` steps that ran without a profiler.

    ``busy`` is the share of the time in which a GPU computed, None on a CPU. ``workers`` is None where nothing is known
    of them. ``memory`` are the bytes that tensors held over the traced steps. ``left_out`` are steps after which an
    evaluation, a save or a look of the doctor came, where that was only now and then.
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
    trace: str | None = None
    failed: Mapping[str, str] = field(default_factory=dict)

    @property
    def compute_s(self) -> float:
        """Seconds in the forward pass, the backward pass and the update."""
        return sum(self.phases.get(phase, 0.0) for phase in COMPUTE)

    def share(self, *phases: str) -> float:
        """The share of a step that these phases take."""
        return sum(self.phases.get(phase, 0.0) for phase in phases) / self.step_s if self.step_s else 0.0
