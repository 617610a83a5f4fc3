"""What a recipe's model is made of and what one step keeps, traced without its memory, then drawn. Composition."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from trainwright.engine.loss import Loss, LossFn, as_loss_fn
from trainwright.engine.precision import PrecisionName
from trainwright.errors import StorageError
from trainwright.forecast.blueprint import blueprint
from trainwright.forecast.fake_tensors import DeviceName
from trainwright.forecast.graph_profiler import Dissection
from trainwright.forecast.traced_step import TracedObjects, trace_step
from trainwright.plan.batch import solve_batch
from trainwright.plan.explain import human_bytes
from trainwright.plan.fold import Folded, fold
from trainwright.plan.profile import GraphProfile
from trainwright.recipe import Loaded, Recipe
from trainwright.report.graph import Headline, graph_text
from trainwright.report.graph_svg import graph_svg

FEW = 2
"""Samples of the micro-batch that is drawn where the recipe leaves its size to the plan."""


@dataclass(frozen=True)
class Picture:
    """The anatomy of one micro-batch's step, and how it is shown."""

    headline: Headline
    anatomy: GraphProfile
    folded: Folded

    def lines(self) -> list[str]:
        return graph_text(self.headline, self.folded)

    def svg(self) -> str:
        return graph_svg(self.headline, self.folded)

    def to_json(self) -> dict[str, Any]:
        """``folded`` is what is shown; ``modules``, ``nodes`` and ``edges`` are all of it."""
        return {"headline": asdict(self.headline), "folded": self.folded.to_json(), **self.anatomy.to_json()}


def picture(loaded: Loaded, *, depth: int | None = None) -> Picture:
    """Builds the model of a recipe under fake tensors and takes one step of one micro-batch, nothing computed again.

    Raises RecipeError for what cannot be built, UsageError for a step that cannot be traced.
    """
    recipe, plan = loaded.recipe, blueprint(loaded)
    samples = _samples(recipe)
    precision = cast(PrecisionName, "fp32" if recipe.precision in ("auto", "tf32") else recipe.precision)
    make = partial(plan.subject, samples=samples, chunked=plan.chunked(samples))
    anatomy = dissect(make, precision=precision)
    headline = Headline(
        name=recipe.name,
        model=anatomy.parts[0].kind,
        samples=samples,
        precision=precision,
        parameters=sum(part.parameters for part in anatomy.parts),
        nodes=len(anatomy.nodes),
        edges=anatomy.edges,
        notes=tuple(_notes(recipe, anatomy)),
    )
    return Picture(headline, anatomy, fold(anatomy, depth))


def dissect(
    make: Callable[[torch.device], TracedObjects], *, device: DeviceName = "cpu", precision: PrecisionName = "fp32"
) -> GraphProfile:
    """The anatomy of a step of what ``make(device)`` gives (a Subject), with its FLOPs. Holds no memory for it."""
    watched: list[_Watched] = []

    def watch(place: torch.device) -> TracedObjects:
        subject = make(place)
        watched.append(_Watched(subject))
        return replace(subject, loss=watched[0], optimizer=None)

    trace = trace_step(watch, device=device, precision=precision, clip=False)
    anatomy = watched[0].anatomy
    assert anatomy is not None
    return anatomy.with_trace(trace)


class _Watched:
    """The loss of a subject, which takes the graph of its first call apart."""

    def __init__(self, subject: TracedObjects) -> None:
        self.anatomy: GraphProfile | None = None
        self._loss: LossFn = as_loss_fn(subject.loss)
        inner = getattr(subject.loss, "func", subject.loss)
        held = [*inner.parameters(), *inner.buffers()] if isinstance(inner, nn.Module) else []
        self._resident: list[Tensor] = held
        self._dissection = Dissection(subject.model)

    def __call__(self, model: nn.Module, batch: Any) -> Loss | Tensor:
        out = self._loss(model, batch)
        if self.anatomy is None:
            total = out.total if isinstance(out, Loss) else out
            self.anatomy = self._dissection.read(total, batch, self._resident)
            self._dissection.close()
        return out


def write(drawn: Picture, path: Path) -> None:
    """Raises StorageError where that is not possible."""
    try:
        path.write_text(drawn.svg(), encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error}", remedy="give another --svg") from None


def _samples(recipe: Recipe) -> int:
    micro: Any = recipe.batch.micro
    if micro == "auto":
        return FEW
    return solve_batch(recipe.batch.size, micro, recipe.batch.accumulation).micro


def _notes(recipe: Recipe, anatomy: GraphProfile) -> list[str]:
    found = []
    asked = recipe.model.activation_checkpointing
    if asked != "none":
        found.append(f"the recipe asks for activation_checkpointing: {asked}; drawn is the step without it")
    if hidden := sum(node.hidden for node in anatomy.nodes):
        found.append(f"{hidden} saved tensors are replaced by hooks of the model (checkpointing, offload): not counted")
    if anatomy.elsewhere_bytes > 0.01 * anatomy.saved_bytes:
        size = human_bytes(anatomy.elsewhere_bytes)
        found.append(f"{size} more wait for the backward pass in workspaces of kernels; no module's figure has them")
    if recipe.model.compile:
        found.append("the graph is that of the model as written; model.compile fuses some of it")
    return found
