"""The ways to run a model, each traced in two small micro-batches. Composition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from trainwright.build.checkpointing import SELECTIVE, find_blocks
from trainwright.engine.precision import PrecisionName
from trainwright.errors import UsageError
from trainwright.forecast.blueprint import Blueprint
from trainwright.forecast.fake_tensors import fake_tensors, simulated_device
from trainwright.forecast.traced_step import trace_step
from trainwright.plan.checkpointing import Checkpointing
from trainwright.plan.devices import Device
from trainwright.plan.layout import Layout
from trainwright.plan.scale import Scaled, tidy
from trainwright.plan.trace import Trace

NO_GRADIENT = "look for .detach(), .item() or no_grad between the model and the loss"
CHECKPOINTING = ("none", "selective", "block")
"""From the plainest on: what is computed again of every block."""


@dataclass(frozen=True)
class LayoutSurvey:
    """Traces a blueprint as if on ``device``. ``chunked`` is decided once, for the smallest micro-batch traced."""

    blueprint: Blueprint
    device: Device
    precision: PrecisionName

    @cached_property
    def blocks(self) -> int:
        """Blocks that can be computed again; 0 without any."""
        with fake_tensors():
            place = simulated_device(self.device.kind)
            try:
                return len(find_blocks(self.blueprint.model(place)))
            except UsageError:
                return 0

    def way(self, checkpointing: str, *, chunked: bool) -> Layout:
        """One way, by two traces."""
        sizes = self.blueprint.sizes(chunked=chunked)
        recompute = self.recompute(checkpointing)
        small, large = (self.trace(size, chunked=chunked, recompute=recompute) for size in sizes)
        rank = 2 * CHECKPOINTING.index(checkpointing) + chunked
        logits = 8 * self.blueprint.targets * (self.blueprint.classes or 0)
        return Layout(self.precision, checkpointing, chunked, Scaled(small, large, sizes), rank, logits)

    def recompute(self, checkpointing: str) -> Checkpointing | None:
        """A fixed policy as what it computes again."""
        if checkpointing == "none":
            return None
        return Checkpointing.every(self.blocks, SELECTIVE if checkpointing == "selective" else ())

    def trace(
        self, samples: int, *, chunked: bool, recompute: Checkpointing | None = None, accumulation: int = 1
    ) -> Trace:
        """One step of micro-batches of ``samples``, the moving average of the weights included."""
        recipe = self.blueprint.loaded.recipe
        trace = trace_step(
            partial(self.blueprint.subject, samples=samples, chunked=chunked),
            device=self.device.kind,
            precision=self.precision,
            accumulation=accumulation,
            recompute=recompute,
            clip=recipe.optimizer.clip.by != "none",
        )
        if not any(moment.held.get("gradients") for moment in trace.moments):
            raise UsageError("no parameter got a gradient: the loss does not depend on the model", remedy=NO_GRADIENT)
        trace = tidy(trace)
        return trace if recipe.model.ema is None else _with_more(trace, 4 * self.blueprint.counts[1])

    def ways(self, checkpointing: Sequence[str]) -> list[Layout]:
        """Those that a recipe leaves open. Where not even the state fits, only the one that holds least is traced."""
        chunked = self.blueprint.chunked(self.blueprint.sizes(chunked=False)[0])
        names = [name for name in checkpointing if name == "none" or self.blocks] or ["none"]
        least = self.way(names[-1], chunked=chunked)
        if sum(least.scaled.small.resident.values()) > self.device.usable_bytes:
            return [least]
        return [*(self.way(name, chunked=chunked) for name in names[:-1]), least]


def _with_more(trace: Trace, size: int) -> Trace:
    """``size`` bytes of weights more at every moment."""
    moments = [
        replace(each, held={**each.held, "weights": each.held.get("weights", 0) + size}) for each in trace.moments
    ]
    return replace(trace, moments=tuple(moments))
