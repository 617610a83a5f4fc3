"""Metrics over a full pass, never means of batch values."""

from __future__ import annotations

import copy
import inspect
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from trainwright.distributed.group import SOLO, World
from trainwright.engine.loss import Batch, Loss, LossFn, call_with_outputs
from trainwright.errors import RankError, UsageError, text_of

T = TypeVar("T")
_FORMS = (
    "give an object with update(outputs, targets), compute() and reset(), or a function (outputs, targets) -> float"
)


@runtime_checkable
class Metric(Protocol):
    """Accumulates outputs and targets over batches; metrics of ``torchmetrics`` satisfy it."""

    def update(self, outputs: object, targets: object, /) -> object: ...
    def compute(self) -> object: ...
    def reset(self) -> object: ...


@runtime_checkable
class RankedMetric(Metric, Protocol):
    """A metric that computes over several ranks."""

    def over_ranks(self, world: World) -> object:
        """Return the value over the batches of all ranks, the same on each. Every rank must call it."""
        ...


@runtime_checkable
class MergingMetric(Metric, Protocol):
    """A metric that can merge the state of other metrics into its own, as the metrics of ``torcheval`` can."""

    def merge_state(self, metrics: Iterable[Any], /) -> object: ...


@runtime_checkable
class LossMetric(Metric, Protocol):
    """A metric of the loss, which needs no outputs."""

    def take_loss(self, loss: Loss) -> object: ...


@runtime_checkable
class ModelMetric(Protocol):
    """A metric of the model, measured once in each evaluation, without the validation set."""

    def measure(self, model: nn.Module, /) -> Mapping[str, float]: ...


class ForwardOutputs(NamedTuple):
    """Outputs, targets and loss of one forward pass, detached."""

    outputs: object
    targets: object
    loss: Loss | None = None


class OutputKeeper:
    """Collects the results of the forward passes of a step or an evaluation, until ``pop`` is called.

    ``needs_outputs``: raise an error if the loss does not return the outputs of the model.
    """

    def __init__(self, *, needs_outputs: bool = True) -> None:
        self._needs_outputs = needs_outputs
        self._kept: list[ForwardOutputs] = []

    def around(self, loss_fn: LossFn) -> LossFn:
        """Return the same loss function, extended to store outputs and targets of each call."""

        def keeping(model: nn.Module, batch: Batch) -> Loss | Tensor:
            loss, outputs, targets = call_with_outputs(loss_fn, model, batch)
            if outputs is None and self._needs_outputs:
                raise UsageError(
                    "metrics need the outputs of the model, and this loss does not give them",
                    remedy="return tw.Loss(total, weight, outputs=logits, targets=labels), set loss.chunked to false "
                    "if a built-in loss is computed in chunks, or leave metrics out",
                )
            summed = Loss(loss.total.detach(), loss.weight) if isinstance(loss, Loss) else None
            kept = ForwardOutputs(_mapped(Tensor.detach, outputs), _mapped(Tensor.detach, targets), summed)
            self._kept.append(kept)
            return loss

        return keeping

    def clear(self) -> None:
        """Drop the results of a failed attempt, before the step starts again."""
        self._kept.clear()

    def pop(self) -> list[ForwardOutputs]:
        """Return the stored results, and clear them."""
        kept, self._kept = self._kept, []
        return kept


class Gathered:
    """A function of all outputs and all targets of a pass, which are gathered on the host."""

    def __init__(self, function: Callable[[object, object], object]) -> None:
        self.function = function
        self._seen: list[tuple[object, object]] = []

    def update(self, outputs: object, targets: object) -> None:
        self._seen.append(tree_map_only(Tensor, on_host, (outputs, targets)))

    def compute(self) -> object:
        return self.over_ranks(SOLO)

    def over_ranks(self, world: World) -> object:
        """Return the value over the batches of all ranks. Each rank gets all outputs."""
        everywhere = world.collect(joined(self._seen) if self._seen else None)
        outputs, targets = joined([each for each in everywhere if each is not None])
        try:
            return self.function(outputs, targets)
        except Exception:
            leaves = [each for each in tree_leaves(outputs) if isinstance(each, Tensor)]
            if all(bool(torch.isfinite(each).all()) for each in leaves):
                raise
            return math.nan  # most functions raise if outputs are not finite

    def reset(self) -> None:
        self._seen.clear()


class MetricSet:
    """Metrics by name that are updated with the same passes."""

    def __init__(self, metrics: Mapping[str, Metric | ModelMetric]) -> None:
        self._metrics = {name: each for name, each in metrics.items() if isinstance(each, Metric)}
        self._of_model = {name: each for name, each in metrics.items() if not isinstance(each, Metric)}

    def __bool__(self) -> bool:
        return bool(self._metrics)

    @property
    def keeper(self) -> OutputKeeper:
        """The object that collects the forward passes for these metrics."""
        return OutputKeeper(needs_outputs=not all(isinstance(each, LossMetric) for each in self._metrics.values()))

    def require_ranked(self) -> None:
        """Raise UsageError for a metric that cannot be combined over several ranks."""
        for name, metric in self._metrics.items():
            if not isinstance(metric, RankedMetric | MergingMetric) and not _of_torchmetrics(metric):
                raise UsageError(
                    f"the metric {name!r}, a {type(metric).__name__}, cannot be joined over several ranks",
                    remedy="give it merge_state(metrics), which adds the state of others to its own; or make it a "
                    "torchmetrics.Metric, whose states say how they are reduced (add_state), or a function "
                    "(outputs, targets) -> float; or train on one rank",
                )

    def copied(self) -> MetricSet:
        """Return empty metrics of the same kind. Raises UsageError for a metric that cannot be copied."""
        copies: dict[str, Metric] = {}
        for name, metric in self._metrics.items():
            try:
                copies[name] = Gathered(metric.function) if isinstance(metric, Gathered) else copy.deepcopy(metric)
            except Exception as error:
                raise UsageError(
                    f"the metric {name!r} cannot be copied for the training set: {text_of(error)}",
                    remedy="set log.metrics to false, so that only the validation set has metrics",
                ) from None
        found = MetricSet(copies)
        found.reset()
        return found

    def to(self, device: torch.device) -> None:
        """Move the metrics that have a method ``to`` to the device of the outputs."""
        for metric in self._metrics.values():
            if callable(move := getattr(metric, "to", None)):
                move(device)

    def update(self, seen: Sequence[ForwardOutputs]) -> None:
        for outputs, targets, loss in seen:
            for name, metric in self._metrics.items():
                try:
                    if isinstance(metric, LossMetric):
                        assert loss is not None, "the built-in losses return one"
                        metric.take_loss(loss)
                    else:
                        metric.update(_mapped(_widened, outputs), targets)
                except Exception as error:
                    raise _failed(name, error, outputs, targets) from error

    def compute(self, world: World = SOLO) -> dict[str, float]:
        """Return the values over the batches of all ranks, and reset. Every rank must call it."""
        values: dict[str, float] = {}
        for name, metric in self._metrics.items():
            try:
                found = _computed(metric, world)
            except RankError:
                raise
            except Exception as error:
                raise _failed(name, error) from error
            values.update(_numbers(name, found))
        self.reset()
        return values

    def measure(self, model: nn.Module, world: World = SOLO) -> dict[str, float]:
        """Return the values of the metrics of the model, measured on the first rank. Every rank must call it."""
        found: dict[str, float] = {}
        if world.rank == 0:
            for name, metric in self._of_model.items():
                found.update(_numbers(name, metric.measure(model)))
        return world.collect(found)[0] if self._of_model else {}

    def reset(self) -> None:
        for metric in self._metrics.values():
            metric.reset()


NO_METRICS = MetricSet({})


def metric_set(metric: Mapping[str, object]) -> MetricSet:
    """Validate the metrics of a user. Raises UsageError for values that are not metrics and for reserved names."""
    if not isinstance(metric, Mapping):
        raise UsageError(f"metrics is a {type(metric).__name__}", remedy="give a mapping: metrics={'f1': ...}")
    return MetricSet({name: _metric(name, each) for name, each in metric.items()})


def _metric(name: object, metric: object) -> Metric | ModelMetric:
    if not isinstance(name, str) or not name or name == "loss":
        raise UsageError(f"a metric is named {name!r}", remedy="give it a name of its own, such as 'f1'")
    if isinstance(metric, type):
        raise UsageError(f"the metric {name!r} is the class {metric.__name__}", remedy=f"write {metric.__name__}(...)")
    if isinstance(metric, Metric | ModelMetric):
        return metric
    if not callable(metric):
        raise UsageError(f"the metric {name!r} is a {type(metric).__name__}", remedy=_FORMS)
    try:
        signature = inspect.signature(metric)
        first = next(iter(signature.parameters), "")
        signature.bind(None, None)
    except ValueError:  # a builtin without a signature
        return Gathered(metric)
    except TypeError:
        raise UsageError(f"the metric {name!r}, {signature}, does not take (outputs, targets)", remedy=_FORMS) from None
    if first in ("y_true", "target", "targets", "labels"):
        function = getattr(metric, "__name__", "f")
        raise UsageError(
            f"the metric {name!r} takes the targets first, and would get the outputs there",
            remedy=f"write lambda outputs, targets: {function}(targets, outputs.argmax(1)), or what turns outputs into "
            "its predictions",
        )
    return Gathered(metric)


def _computed(metric: Metric, world: World) -> object:
    if isinstance(metric, RankedMetric):
        return metric.over_ranks(world)
    if isinstance(metric, MergingMetric) and world.size > 1 and not _of_torchmetrics(metric):
        return _merged(metric, world).compute()
    with synchronized(metric, world):
        return metric.compute()


def _merged(metric: MergingMetric, world: World) -> MergingMetric:
    """Return a metric with the state of all ranks, merged in the order of the ranks, so that all get the same bits."""
    first, *others = world.collect(metric)
    first.merge_state(others)
    return first


def _of_torchmetrics(metric: object) -> list[Any]:
    """Return the metrics of ``torchmetrics`` in this object; empty if it has none."""
    library = sys.modules.get("torchmetrics")
    if library is None or not isinstance(metric, nn.Module):
        return []
    return [each for each in metric.modules() if isinstance(each, library.Metric)]


@contextmanager
def synchronized(metric: object, world: World) -> Iterator[None]:
    """Make a metric of ``torchmetrics`` compute over the ranks of ``world``, and over no others.

    By default the metric uses torch's default process group. That group includes ranks that compute with the same
    samples, and its backend may not support the device of the metric.
    """

    def gather(state: Tensor, group: object = None) -> list[Tensor]:  # noqa: ARG001 - the keyword of torchmetrics
        everywhere = [each.to(state.device) for each in world.collect(state.cpu())]
        return [each for each in everywhere if each.numel()] or everywhere  # a rank without samples has no dtype

    parts = _of_torchmetrics(metric)
    before = [(each, each.dist_sync_fn, each.distributed_available_fn) for each in parts]
    for each in parts:
        each.dist_sync_fn, each.distributed_available_fn = gather, lambda: world.size > 1
    try:
        yield
    finally:
        for each, gathers, is_available in before:
            each.dist_sync_fn, each.distributed_available_fn = gathers, is_available


def _mapped(change: Callable[[Tensor], Tensor], value: object) -> object:
    """Return ``value`` with every tensor changed. A single tensor, the usual case, takes a faster path."""
    return change(value) if isinstance(value, Tensor) else tree_map_only(Tensor, change, value)


def on_host(tensor: Tensor) -> Tensor:
    """Return a copy on the CPU, with 16-bit numbers converted to float32."""
    return _widened(tensor).cpu()


def _widened(tensor: Tensor) -> Tensor:
    """Convert 16-bit outputs of autocast to float32, which every metric supports."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def joined(seen: Sequence[T]) -> T:
    """Return all batches as one, with tensors joined along their first dimension."""
    flat = [tree_flatten(each) for each in seen]
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    whole: T = tree_unflatten([_column(each) for each in columns], flat[0][1])
    return whole


def _column(values: Sequence[object]) -> object:
    tensors = [each for each in values if isinstance(each, Tensor)]
    if len(tensors) < len(values):
        return list(values)
    if len({each.shape[1:] for each in tensors}) > 1:
        shapes = " and ".join(dict.fromkeys(str(tuple(each.shape)) for each in tensors[:9]))
        raise UsageError(
            f"outputs or targets of the shapes {shapes} cannot be joined for a function",
            remedy="give an object with update, compute and reset, which sees them batch by batch",
        )
    return torch.cat(tensors) if tensors[0].dim() else torch.stack(tensors)


def _numbers(name: str, found: object) -> Iterator[tuple[str, float]]:
    """Yield (name, value) of a metric that is one number, or (name.key, value) for each key of a mapping."""
    if isinstance(found, Mapping):
        for key, value in found.items():
            yield from _numbers(f"{name}.{key}", value)
    elif isinstance(found, Real) or math.prod(getattr(found, "shape", (2,))) == 1:
        yield name, float(found)  # type: ignore[arg-type]
    else:
        what = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
        raise UsageError(
            f"the metric {name!r} gave {what}", remedy="let it give one number, or a mapping of names to numbers"
        )


def _failed(name: str, error: Exception, *of: object) -> UsageError:
    if isinstance(error, UsageError):
        return error
    shapes = [str(tuple(each.shape)) for each in tree_leaves(of) if isinstance(each, Tensor)]
    what = f" of outputs and targets of the shapes {' and '.join(shapes)}" if shapes else ""
    return UsageError(
        f"the metric {name!r} raised {text_of(error)}{what}",
        remedy="fix the metric, or the outputs that the loss returns",
    )
