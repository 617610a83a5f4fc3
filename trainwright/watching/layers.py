"""Statistics by layer of a watched loop."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from trainwright.monitoring.layer_stats import LayerLog, LayerStats
from trainwright.recorder.calls import is_compiled
from trainwright.recorder.listener import has_listeners
from trainwright.recorder.probes import Probe, WatchSite
from trainwright.recorder.program import RecordedStep
from trainwright.recorder.user_types import Args
from trainwright.runs.records import Layers


class LayerProbe(Probe):
    """Writes Layers records. Gradients are those that the optimizer gets: unscaled, and clipped if the loop clips."""

    name = "layers"

    def __init__(self, stats: LayerStats, optimizers: Sequence[Optimizer]) -> None:
        self._stats, self._optimizers, self._step = stats, optimizers, 1

    def begin(self, site: WatchSite) -> None:
        self._log = LayerLog(self._stats, site.write, Layers)

    def on_step(self, optimizer: Optimizer, args: Args) -> None:
        if optimizer in self._optimizers:
            self._log.before_update(self._step, optimizer if len(self._optimizers) > 1 else None)

    def on_closed(self, step: RecordedStep) -> None:
        self._log.after(step.step, step.values["step_s"])
        self._step = step.step + 1

    def end(self, error: BaseException | None) -> None:
        self._log.close()


def _is_of_the_loop() -> bool:
    """Returns True if a forward pass belongs neither to an evaluation nor to a replay."""
    return torch.is_grad_enabled() and has_listeners()


def layer_probes(roots: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> list[LayerProbe]:
    """Returns one probe, or none for sharded weights.

    A compiled model is not hooked, because it would be compiled again.
    """
    modules = [module for root in roots for module in root.modules()]
    is_divided = any(is_traceable_wrapper_subclass(each) for root in roots for each in root.parameters())
    if is_divided or any("FullyShardedDataParallel" in type(each).__name__ for each in modules):
        return []
    stats = LayerStats(*roots, activations=not any(map(is_compiled, modules)), is_live=_is_of_the_loop)
    return [LayerProbe(stats, optimizers)] if stats.layers else []
