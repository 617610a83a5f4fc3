"""``graph RECIPE``: shows the modules of a model and what one step saves for backward, as text, SVG and JSON."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from trainwright.engine.loss import Loss, LossFn, as_loss_fn
from trainwright.engine.precision import PrecisionName
from trainwright.plan.amounts import human_bytes
from trainwright.plan.batch import solve_batch
from trainwright.plan.machine import read_machine
from trainwright.plan.profile import Folded, GraphProfile, fold
from trainwright.plan.trace.blueprint import make_blueprint
from trainwright.plan.trace.graph_profiler import GraphProfiler
from trainwright.plan.trace.local_device import nominal_cpu
from trainwright.plan.trace.traced_step import TracedObjects, trace_step
from trainwright.recipe import Loaded, Recipe
from trainwright.report.graph import Headline, graph_svg, graph_text

SAMPLES = 2
"""Samples of the drawn micro-batch if the recipe leaves its size to the plan."""


@dataclass(frozen=True)
class GraphPicture:
    """The profile of the step of one micro-batch, and its folded form for display."""

    headline: Headline
    profile: GraphProfile
    folded: Folded

    def lines(self) -> list[str]:
        return graph_text(self.headline, self.folded)

    def svg(self) -> str:
        return graph_svg(self.headline, self.folded)

    def to_json(self) -> dict[str, object]:
        """Return the object that ``--json`` prints. Only ``folded`` has equal blocks as one."""
        return {"headline": asdict(self.headline), "folded": asdict(self.folded), **self.profile.to_json()}


def draw_graph(loaded: Loaded, *, depth: int | None = None) -> GraphPicture:
    """Build the model of a recipe under fake tensors and profile a step of one micro-batch, without checkpointing.

    Raises RecipeError for objects that cannot be built, UsageError for a step that cannot be traced.
    """
    recipe, blueprint = loaded.recipe, make_blueprint(loaded)
    batch = recipe.batch
    samples = SAMPLES if batch.micro == "auto" else solve_batch(batch.size, batch.micro, batch.accumulation).micro
    precision = cast(PrecisionName, "fp32" if recipe.precision in (None, "auto", "tf32") else recipe.precision)
    chunked = blueprint.chunked(samples, nominal_cpu(read_machine()))  # the step is traced as on a CPU
    make = partial(blueprint.traced_objects, samples=samples, chunked=chunked)
    profile = profile_graph(make, precision=precision)
    headline = Headline(
        name=recipe.name,
        model=profile.modules[0].kind,
        samples=samples,
        precision=precision,
        parameters=sum(module.parameters for module in profile.modules),
        nodes=len(profile.nodes),
        edges=profile.edges,
        notes=tuple(_notes(recipe, profile)),
    )
    return GraphPicture(headline, profile, fold(profile, depth))


def profile_graph(make: Callable[[torch.device], TracedObjects], *, precision: PrecisionName = "fp32") -> GraphProfile:
    """Return the profile of one step of the objects that ``make`` builds, with FLOPs. Its tensors hold no memory."""
    losses: list[_ProfiledLoss] = []

    def watch(place: torch.device) -> TracedObjects:
        objects = make(place)
        losses.append(_ProfiledLoss(objects))
        return replace(objects, loss=losses[0], optimizer=None)

    trace = trace_step(watch, device="cpu", precision=precision, clip=False)
    profile = losses[0].profile
    assert profile is not None
    return profile.with_trace(trace)


class _ProfiledLoss:
    """The loss of ``objects``. Its first call profiles the autograd graph of the result."""

    def __init__(self, objects: TracedObjects) -> None:
        self.profile: GraphProfile | None = None
        self._loss: LossFn = as_loss_fn(objects.loss)
        inner = getattr(objects.loss, "func", objects.loss)
        tensors = [*inner.parameters(), *inner.buffers()] if isinstance(inner, nn.Module) else []
        self._resident: list[Tensor] = tensors
        self._profiler = GraphProfiler(objects.model)

    def __call__(self, model: nn.Module, batch: object) -> Loss | Tensor:
        out = self._loss(model, batch)
        if self.profile is None:
            total = out.total if isinstance(out, Loss) else out
            self.profile = self._profiler.read(total, batch, self._resident)
            self._profiler.close()
        return out


def _notes(recipe: Recipe, profile: GraphProfile) -> list[str]:
    found = []
    setting = recipe.model.activation_checkpointing
    if setting != "none":
        found.append(f"the recipe sets activation_checkpointing: {setting}; the drawing shows the step without it")
    if hidden := sum(node.hidden for node in profile.nodes):
        found.append(f"{hidden} saved tensors are replaced by hooks of the model (checkpointing, offload): not counted")
    if profile.elsewhere_bytes > 0.01 * profile.saved_bytes:
        size = human_bytes(profile.elsewhere_bytes)
        found.append(f"{size} more are held for the backward pass in workspaces of kernels, and counted for no module")
    if recipe.model.compile:
        found.append("the graph is that of the model as written; model.compile fuses some of it")
    return found
