"""The argument ``metrics`` of ``tw.fit`` and ``tw.evaluate``: names of built-in metrics, or user objects."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from trainwright.engine.metrics import MetricSet, metric_set
from trainwright.errors import UsageError
from trainwright.recipe import from_mapping
from trainwright.recipe.resolve import LIVE
from trainwright.training.custom_objects import named_metrics

if TYPE_CHECKING:
    from trainwright.engine.metrics import Metric

Named: TypeAlias = str | Mapping[str, object]
"""``"accuracy"``, or a mapping as in a recipe: ``{"use": "top_k", "args": {"k": 3}}``."""
MetricsLike: TypeAlias = "str | Sequence[Named] | Mapping[str, Named | Metric | Callable[..., object]]"
"""One name, several names, or a mapping from names to these or to objects."""


def split_metrics(metrics: object) -> tuple[list[object], dict[str, object]]:
    """Split a ``MetricsLike`` or None into the value of the recipe key ``metrics`` and the objects by name.

    Raises UsageError for a value of any other type.
    """
    if metrics is None:
        return [], {}
    if isinstance(metrics, str):
        return [metrics], {}
    if isinstance(metrics, Mapping):
        named: list[object] = [_part(name, each) for name, each in metrics.items() if isinstance(each, str | Mapping)]
        objects: dict[str, object] = {
            name: each for name, each in metrics.items() if not isinstance(each, str | Mapping)
        }
        metric_set(objects)
        return named, objects
    if not isinstance(metrics, Sequence):
        raise UsageError(f"metrics is a {type(metrics).__name__}", remedy="give names: metrics=['accuracy', 'f1']")
    for each in metrics:
        if not isinstance(each, str | Mapping):
            name = getattr(each, "__name__", type(each).__name__)
            raise UsageError(
                f"the metric {name} has no name", remedy=f"give a mapping: metrics={{'{name.lower()}': ...}}"
            )
    return list(metrics), {}


def _part(name: object, asked: str | Mapping[Any, object]) -> dict[str, object]:
    return {"name": name, **({"use": asked} if isinstance(asked, str) else asked)}


def resolve_metrics(metrics: MetricsLike, loss: object) -> MetricSet:
    """Return the metrics of a call without a recipe, such as ``tw.evaluate``."""
    named, objects = split_metrics(metrics)
    nothing = f"{LIVE}:nothing"
    recipe = {"model": nothing, "data": {"train": nothing}, "loss": nothing, "metrics": named}
    return metric_set({**named_metrics(from_mapping(recipe, name="metrics"), loss), **objects})
