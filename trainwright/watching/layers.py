"""Statistics by layer of a loop that is watched."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from trainwright.observe.layer_stats import LayerLog, LayerStats
from trainwright.recorder.calls import is_compiled
from trainwright.recorder.probes import Probe, WatchSite
from trainwright.recorder.program import RecordedStep
from trainwright.recorder.user_types import Args


class LayerProbe(Probe):
    """Writes Layers records. Gradients are those that the optimizer gets: unscaled, and clipped if the loop clips."""

    name = "layers"

    def __init__(self, stats: LayerStats, optimizer: Optimizer) -> None:
        self._stats, self._optimizer, self._step = stats, optimizer, 1

    def begin(self, site: WatchSite) -> None:
        self._log = LayerLog(self._stats, site.write)

    def on_step(self, optimizer: Optimizer, args: Args) -> None:
        if optimizer is self._optimizer:
            self._log.before_update(self._step)

    def on_closed(self, step: RecordedStep) -> None:
        self._log.after(step.step, step.values["step_s"])
        self._step = step.step + 1

    def end(self, error: BaseException | None) -> None:
        self._log.close()


def layer_probes(roots: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> list[LayerProbe]:
    """One for the first model, or none: several optimizers take turns, and a rank's part of a weight is not the whole.

    A compiled model is not hooked: it would be compiled again.
    """
    model = roots[0]
    is_divided = any(is_traceable_wrapper_subclass(each) for each in model.parameters())
    if (
        len(optimizers) > 1
        or is_divided
        or any("FullyShardedDataParallel" in type(m).__name__ for m in model.modules())
    ):
        return []
    stats = LayerStats(model, activations=not any(map(is_compiled, model.modules())))
    return [LayerProbe(stats, optimizers[0])] if stats.layers else []
