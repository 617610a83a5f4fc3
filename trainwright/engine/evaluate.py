"""Evaluation without side effects: training continues bit for bit as it would without it."""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor, nn

from trainwright.checkpoint.batch_cut import cut_micro
from trainwright.checkpoint.cursor import MicroBatch, tensors_in
from trainwright.checkpoint.rng import preserved_rng
from trainwright.checkpoint.shards import holds_parts, reshard
from trainwright.distributed.group import SOLO, World
from trainwright.distributed.memory import give_back
from trainwright.engine.input_errors import explaining
from trainwright.engine.loss import Loss, LossFn, as_loss_fn, call_loss
from trainwright.engine.metrics import NO_METRICS, MetricSet
from trainwright.engine.precision import FP32, Precision
from trainwright.engine.recover import is_out_of_memory
from trainwright.engine.user_log import LoggedMeans, collecting
from trainwright.errors import OutOfMemoryError, UsageError, suggest
from trainwright.runs.media import Loggable

MAX_BAD_SAMPLES = 5


@dataclass(frozen=True, repr=False)
class EvaluationResult:
    """Result of one evaluation.

    Attributes:
        loss: Mean over ``weight`` counted items.
        weight: Number of counted items.
        metrics: Means over ``weight``, or values of whole-pass metrics, by name.
        seconds: Wall time.
        batches: Number of batches if they are a fixed part of the validation set; 0 for the whole set.
        shown: Images, texts and histograms of ``tw.log`` by name, the first of each.
        bad_samples: Up to 5 samples with NaN or infinity in their data, if the loss is not finite.
    """

    loss: float
    weight: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    batches: int = 0
    shown: Mapping[str, Loggable] = field(default_factory=dict, compare=False)
    bad_samples: tuple[int, ...] = ()

    def __repr__(self) -> str:
        return ", ".join(f"{name} {value:.4g}" for name, value in self.figures.items()) + f" over {self.weight:,.6g}"

    @property
    def figures(self) -> dict[str, float]:
        """The loss and the metrics by name."""
        return {"loss": self.loss, **self.metrics}

    def figure(self, name: str) -> float:
        """Return one of ``figures``. Raises UsageError for an unknown name."""
        if name not in self.figures:
            raise UsageError(f"the validation has no metric {name!r}", remedy=suggest(name, self.figures))
        return float(self.figures[name])


@contextmanager
def evaluating(model: nn.Module, loss: object = None) -> Iterator[None]:
    """Set evaluation mode without gradients; restore the mode of every module and every random generator afterwards.

    Also applies to a ``loss`` that is a module. Its buffers are restored too, because it may keep running means.
    """
    roots = [each for each in (model, loss) if isinstance(each, nn.Module)]
    modes = {module: module.training for root in roots for module in root.modules()}
    kept = [(buffer, buffer.clone()) for buffer in loss.buffers()] if isinstance(loss, nn.Module) else []
    with torch.no_grad(), preserved_rng():
        for root in roots:
            root.eval()
        try:
            yield
        finally:
            for root in roots:
                reshard(root)
            for module, training in modes.items():
                module.training = training
            for buffer, before in kept:
                buffer.copy_(before)


def evaluate(
    model: nn.Module,
    loss: Callable[..., Loss | Tensor],
    batches: Iterable[MicroBatch],
    *,
    precision: Precision = FP32,
    world: World = SOLO,
    metrics: MetricSet = NO_METRICS,
) -> EvaluationResult:
    """Return the loss over ``batches``, weighted exactly, and ``metrics`` over all of them. One host sync at the end.

    Each rank of ``world`` evaluates its part of the batches; the result covers all parts and is the same on each rank.
    Figures of ``tw.log`` are weighted by samples.

    A batch that does not fit into memory is evaluated in halves, and so are all later batches.

    Raises:
        OutOfMemoryError: One sample does not fit, or memory ran out on ranks that divide the weights. They cannot halve
            a batch, because all ranks must make the same calls.
        UsageError: The model or the loss cannot process a batch.
    """
    loss_fn = as_loss_fn(loss)
    keeper = metrics.keeper
    logged = LoggedMeans(shows_first=True)
    if metrics:
        loss_fn = keeper.around(loss_fn)
        metrics.reset()
    begin_s = time.perf_counter()
    total: Tensor | float = 0.0
    weight: Tensor | float = 0  # counts stay integers, which are exact beyond 2**24
    sums: dict[str, Tensor | float] = {}
    with evaluating(model, loss), explaining(model), collecting(logged):
        for output in _outputs(loss_fn, model, batches, precision):
            metrics.update(keeper.pop()[-1:])  # earlier ones are from attempts that failed
            total = total + output.total.double()
            weight = weight + output.weight
            for name, metric in output.metrics.items():
                sums[name] = sums.get(name, 0.0) + metric.double()
        bad = [] if math.isfinite(total) else list(islice(_bad_samples(batches), MAX_BAD_SAMPLES))
    mine = _Sums(float(total), float(weight), {name: float(summed) for name, summed in sums.items()}, bad)
    parts = world.collect(mine)
    counted, means = _means(parts)
    bad = sorted({each for part in parts for each in part.bad_samples})[:MAX_BAD_SAMPLES]
    means |= logged.pop(world)
    if metrics and counted:
        means |= metrics.compute(world)
    seconds = time.perf_counter() - begin_s
    return EvaluationResult(means.pop(_LOSS), counted, means, seconds, shown=logged.pop_shown(), bad_samples=tuple(bad))


class _Sums(NamedTuple):
    total: float
    weight: float
    metrics: dict[str, float]
    bad_samples: list[int]


_LOSS = ""  # no metric has this name


def _means(parts: list[_Sums]) -> tuple[float, dict[str, float]]:
    weight = sum(part.weight for part in parts)
    sums = [{_LOSS: part.total, **part.metrics} for part in parts]
    names = dict.fromkeys(name for each in sums for name in each)
    return weight, {name: sum(each.get(name, 0.0) for each in sums) / weight if weight else math.nan for name in names}


def _bad_samples(batches: Iterable[MicroBatch]) -> Iterator[int]:
    """Yield the ids of samples with NaN or plus infinity. Minus infinity is used in masks."""
    for micro in batches:
        for tensor in tensors_in(micro.data):
            if tensor.is_floating_point() and tensor.dim() and len(tensor) == micro.size:
                bad = (tensor.isnan() | tensor.isposinf()).reshape(micro.size, -1).any(1)
                yield from micro.ids[bad.cpu()].tolist()


def _outputs(loss_fn: LossFn, model: nn.Module, batches: Iterable[MicroBatch], precision: Precision) -> Iterator[Loss]:
    limit: int | None = None
    for index, whole in enumerate(batches):
        waiting = [whole]
        while waiting:
            micro = waiting.pop(0)
            if limit is not None and micro.size > limit:
                waiting[:0] = cut_micro(micro, limit)
                continue
            output = _output(loss_fn, model, micro, precision, f"batch {index} of the evaluation")
            if output is None:
                limit = (micro.size + 1) // 2
                waiting.insert(0, micro)
            elif not micro.size:  # a rank that had no sample left
                continue
            elif isinstance(output, Tensor):
                yield Loss(output * micro.size, float(micro.size))
            else:
                yield output


def _output(
    loss_fn: LossFn, model: nn.Module, micro: MicroBatch, precision: Precision, where: str
) -> Loss | Tensor | None:
    """Return None if memory ran out; the memory of the attempt is freed."""
    try:
        with precision.autocast():
            return call_loss(loss_fn, model, micro, where)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        if micro.size == 1 or holds_parts(model):
            part = "one sample" if micro.size == 1 else "a batch of ranks that divide the weights"
            raise OutOfMemoryError(
                f"out of memory in {where}: {part} does not fit",
                whole=not holds_parts(model),
                remedy="evaluate shorter samples, fewer at a time (evaluation.batch), or on a device with more memory",
            ) from None
        traceback.clear_frames(error.__traceback__)
    give_back(next(model.parameters()).device)
    return None
