"""The argument ``metrics`` of ``tw.fit`` and ``tw.evaluate``: names, and objects of the user's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from trainwright.engine.metrics import MetricSet, metric_set
from trainwright.errors import UsageError
from trainwright.recipe import from_mapping
from trainwright.recipe.resolve import LIVE
from trainwright.training.own_objects import named_metrics

if TYPE_CHECKING:
    from trainwright.engine.metrics import Metric

Named: TypeAlias = str | Mapping[str, object]
"""``"accuracy"``, or as in a recipe ``{"use": "top_k", "args": {"k": 3}}``."""
MetricsLike: TypeAlias = "str | Sequence[Named] | Mapping[str, Named | Metric | Callable[..., object]]"
"""One name, several, or a mapping of names to these or to objects."""


def split_metrics(metrics: object) -> tuple[list[object], dict[str, object]]:
    """Returns the names for the key ``metrics`` of a recipe, and the objects by name, of a ``MetricsLike`` or None.

    Raises UsageError for anything else.
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


def asked_metrics(metrics: MetricsLike, loss: object) -> MetricSet:
    """The metrics of a call that has no recipe."""
    named, objects = split_metrics(metrics)
    nothing = f"{LIVE}:nothing"
    recipe = {"model": nothing, "data": {"train": nothing}, "loss": nothing, "metrics": named}
    return metric_set({**named_metrics(from_mapping(recipe, name="metrics"), loss), **objects})
