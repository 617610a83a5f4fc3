"""The layouts of a recipe on a device. Each is traced with two small micro-batches and extrapolated to other sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from trainwright.assembly.checkpointing import SELECTIVE, find_blocks
from trainwright.engine.precision import PrecisionName
from trainwright.errors import UsageError
from trainwright.plan.call_trace import Trace
from trainwright.plan.checkpointing import Checkpointing
from trainwright.plan.devices import Device
from trainwright.plan.layout import Layout
from trainwright.plan.scale import Scaled, tidy
from trainwright.plan.trace.blueprint import Blueprint
from trainwright.plan.trace.fake_tensors import fake_tensors, simulated_device
from trainwright.plan.trace.traced_step import trace_step

NO_GRADIENT = "look for .detach(), .item() or no_grad between the model and the loss"
POLICIES = ("none", "selective", "block")
"""Fixed policies of activation checkpointing, each with less memory and more time than the one before."""


@dataclass(frozen=True)
class LayoutSurvey:
    """Traces a blueprint as if on ``device``. ``caches`` is passed to ``Precision``."""

    blueprint: Blueprint
    device: Device
    precision: PrecisionName
    caches: bool = True

    @cached_property
    def blocks(self) -> int:
        """The number of blocks that support activation checkpointing; 0 if none."""
        with fake_tensors():
            place = simulated_device(self.device.kind)
            try:
                return len(find_blocks(self.blueprint.model(place)))
            except UsageError:
                return 0

    def layout(self, policy: str, *, chunked: bool) -> Layout:
        """Return the layout with one of ``POLICIES``. Costs two traces."""
        sizes = self.blueprint.sizes(chunked=chunked)
        checkpointing = self.checkpointing(policy)
        small, large = (self.trace(size, chunked=chunked, checkpointing=checkpointing) for size in sizes)
        complexity = 2 * POLICIES.index(policy) + chunked
        logits = 8 * self.blueprint.targets * (self.blueprint.classes or 0)
        return Layout(self.precision, policy, chunked, Scaled(small, large, sizes), complexity, logits)

    def checkpointing(self, policy: str) -> Checkpointing | None:
        """Return the checkpointing of each block under one of ``POLICIES``."""
        if policy == "none":
            return None
        return Checkpointing.every(self.blocks, SELECTIVE if policy == "selective" else ())

    def trace(
        self, samples: int, *, chunked: bool, checkpointing: Checkpointing | None = None, accumulation: int = 1
    ) -> Trace:
        """Return the trace of one step with micro-batches of ``samples``, including an average of the weights if
        configured.
        """
        recipe = self.blueprint.loaded.recipe
        trace = trace_step(
            partial(self.blueprint.traced_objects, samples=samples, chunked=chunked),
            device=self.device.kind,
            precision=self.precision,
            accumulation=accumulation,
            checkpointing=checkpointing,
            clip=recipe.optimizer.clip.by != "none",
            caches=self.caches,
        )
        if not any(moment.held.get("gradients") for moment in trace.moments):
            raise UsageError("no parameter got a gradient: the loss does not depend on the model", remedy=NO_GRADIENT)
        trace = tidy(trace)
        return _with_more_weights(trace, 4 * self.blueprint.counts[1]) if recipe.model.keeps_average else trace

    def layouts(self, policies: Sequence[str], sizes: Sequence[int]) -> list[Layout]:
        """Return each layout, by policy and with full or chunked logits, that a run with these micro-batch sizes may
        have.
        """
        plain_up_to = self.blueprint.plain_up_to(self.device)
        kinds = sorted({self.blueprint.chunked(size, self.device) for size in sizes})
        found = [layout for chunked in kinds for layout in self.layouts_of(policies, chunked=chunked)]
        return [replace(layout, plain_up_to=plain_up_to) for layout in found]

    def layouts_of(self, policies: Sequence[str], *, chunked: bool) -> list[Layout]:
        """Return the layout of each policy. If not even the state fits, only the one with least memory is traced."""
        policies = [policy for policy in policies if policy == "none" or self.blocks] or ["none"]
        least = self.layout(policies[-1], chunked=chunked)
        if sum(least.scaled.small.resident.values()) > self.device.usable_bytes:
            return [least]
        return [*(self.layout(policy, chunked=chunked) for policy in policies[:-1]), least]


def _with_more_weights(trace: Trace, num_bytes: int) -> Trace:
    moments = [
        replace(each, held={**each.held, "weights": each.held.get("weights", 0) + num_bytes}) for each in trace.moments
    ]
    return replace(trace, moments=tuple(moments))
