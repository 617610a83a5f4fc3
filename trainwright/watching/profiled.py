"""The profile of a watched loop: ``tw.watch(..., profile=True)``."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from trainwright.plan.trace.local_device import local_device
from trainwright.profiling.session import ProfileSession
from trainwright.profiling.verdict import judge
from trainwright.profiling.words import Profile
from trainwright.recorder.probes import Probe
from trainwright.recorder.program import RecordedStep
from trainwright.runs.folder import RunFolder

WARMUP_STEPS = 50
"""Default number of steps before a profile begins. The watch examines more of the first steps than of later ones."""
TRACE, NAME = "profile.json.gz", "profile.json"


class ProfileProbe(Probe):
    """Measures some steps of the loop for a profile. ``after`` is the number of steps before them."""

    name = "profile"

    def __init__(
        self,
        roots: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        loaders: Sequence[object],
        folder: RunFolder | None,
        after: int,
    ) -> None:
        self._session = ProfileSession(roots, trace=folder.traces / TRACE if folder else None, after=after)
        self._optimizers, self._loaders = optimizers, loaders
        self._device = next((p.device for root in roots for p in root.parameters()), torch.device("cpu"))

    def on_closed(self, step: RecordedStep) -> None:
        self._session.mark()

    def end(self, error: BaseException | None) -> None:
        self._session.close()

    def found(self) -> Profile | None:
        """Returns the profile; None if the loop ended before any step was timed."""
        workers = [each.num_workers for each in self._loaders if isinstance(each, DataLoader)]
        fused = [
            bool(group.get("fused")) for each in self._optimizers for group in each.param_groups if "fused" in group
        ]
        on_gpu = self._device.type == "cuda"
        facts = self._session.facts(
            device=torch.cuda.get_device_name(self._device) if on_gpu else "this CPU",
            precision="tf32" if on_gpu and torch.get_float32_matmul_precision() != "highest" else "fp32",
            workers=min(workers) if workers else None,
            fused=all(fused) if fused else None,
        )
        return None if facts is None else Profile(facts, judge(facts, local_device()))

    def leave(self, folder: RunFolder | None) -> list[str]:
        """Writes ``profile.json`` and returns the lines to print."""
        found = self.found()
        if found is None:
            return ["no profile: the loop was over before any step was timed"]
        if folder is not None:
            with suppress(OSError):
                folder.write_json(NAME, found.to_json())
        return [f"profile   {line}" if number == 0 else line for number, line in enumerate(found.lines())]
