"""The measurements of a profile of a loop, as values. Seconds, calls and bytes are per step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from trainwright.plan.call_trace import Work

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
    """The time of an operator without those that it calls. ``device_s``: on a GPU."""

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

    ``busy`` is the fraction of the time in which a GPU computed, None on a CPU. ``workers`` is None if unknown.
    ``kernels`` are calls of the kernels of a GPU and of compiled regions, by name.
    ``memory`` are the bytes that tensors held over the traced steps. ``left_out`` are the steps that an occasional
    evaluation, save or examination followed.
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

    def share(self, *phases: str) -> float:
        """Return the fraction of a step that these phases take."""
        return sum(self.phases.get(phase, 0.0) for phase in phases) / self.step_s if self.step_s else 0.0
