"""Statistics by layer in some steps: norms of gradients, relative sizes of updates, and histograms of activations.

They are computed on the device and copied to the host asynchronously. Other steps have no hooks.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from trainwright.checkpoint.chained_optimizer import parts_of
from trainwright.checkpoint.shards import local
from trainwright.checkpoint.train_state import TrainState
from trainwright.checkpoint.transforms import is_transformed
from trainwright.engine.step import StepResult
from trainwright.runs import records
from trainwright.runs.records import OUTPUT_GRAD_LOG2, OutputGrads

R = TypeVar("R", bound=records.Record)

MAX_SAMPLED_ELEMENTS = 4096
"""Number of evenly spaced elements that represent a larger tensor. Moments of independent elements are 2 % off."""
LOWEST_EXPONENT = -24
"""Exponent of the first bin of the histograms of activations. The first bin has zeros and smaller values."""
NUM_BINS = 40
"""Number of bins of the histograms of activations, one per power of two."""
INITIAL_INTERVAL_STEPS = 25
"""Steps between two records at the beginning."""
RECORDS_PER_E_FOLD = 1000
"""Later, a record is written when the step number has grown by 1/1000: about 5000 records in a million steps."""
MAX_TIME_FRACTION = 0.005
"""Maximum fraction of the time of a run for these statistics."""
MAX_LAYERS = 200  # of a larger model, the first and the last 100


@dataclass(frozen=True)
class Layer:
    """A part of the model by its path: a module (None for a path that no module has), and its trained parameters."""

    path: str
    module: nn.Module | None
    parameters: tuple[nn.Parameter, ...]


def layers_of(*models: nn.Module) -> list[Layer]:
    """Return a layer per block, such as ``blocks.3`` (the path up to its first number), and per other trained module.

    With several models, as in a GAN, the path begins with the number of the model.
    """
    layers = []
    for number, model in enumerate(models):
        modules, prefix = dict(model.named_modules()), f"{number}." if len(models) > 1 else ""
        found: dict[str, list[nn.Parameter]] = {}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                found.setdefault(_path_of(name), []).append(parameter)
        layers += [Layer(prefix + path, modules.get(path), tuple(each)) for path, each in found.items()]
    return layers if len(layers) <= MAX_LAYERS else layers[: MAX_LAYERS // 2] + layers[-(MAX_LAYERS // 2) :]


def _path_of(name: str) -> str:
    parts = name.split(".")
    number = next((index for index, part in enumerate(parts) if part.isdigit()), None)
    return ".".join(parts[: number + 1] if number is not None else parts[:-1])


class Sampler:
    """Copies MAX_SAMPLED_ELEMENTS evenly spaced elements of a tensor. Elements of a smaller tensor are repeated."""

    def __init__(self) -> None:
        self._spread: dict[tuple[int, torch.device], Tensor] = {}

    def __call__(self, tensor: Tensor) -> Tensor:
        flat, count = tensor.detach().reshape(-1), tensor.numel()
        key = (count, flat.device)
        if key not in self._spread:
            places = torch.arange(MAX_SAMPLED_ELEMENTS, dtype=torch.float64, device="cpu") * (
                count / MAX_SAMPLED_ELEMENTS
            )
            self._spread[key] = places.long().to(flat.device, non_blocking=True)
        return flat[self._spread[key]]


class HostCopy:
    """Copies a tensor to the host without waiting for the device."""

    def __init__(self) -> None:
        self._pending: tuple[Tensor, torch.cuda.Event | None] | None = None

    @property
    def is_pending(self) -> bool:
        return self._pending is not None

    def start(self, values: Tensor) -> None:
        if values.device.type != "cuda":
            self._pending = values, None
            return
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True, device="cpu")
        host.copy_(values, non_blocking=True)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
        self._pending = host, done

    def take(self, *, wait: bool) -> Tensor | None:
        """Return the copy, once; None if there is none, or not yet."""
        if self._pending is None:
            return None
        values, done = self._pending
        if done is not None and not (wait or done.query()):  # type: ignore[no-untyped-call]
            return None
        if done is not None:
            done.synchronize()
        self._pending = None
        return values


class StepStats(ABC):
    """Statistics of single steps, from hooks that are registered for these steps only: of layers, or of gradients.

    ``paths`` are the names of what is measured. ``hooks_s`` are the total seconds in hooks.
    """

    def __init__(self, paths: tuple[str, ...]) -> None:
        self.paths = paths
        self.hooks_s = 0.0
        self._handles: list[RemovableHandle] = []
        self._sampled: dict[int, Tensor] = {}
        self._sample, self._copy = Sampler(), HostCopy()

    @property
    def is_pending(self) -> bool:
        return self._copy.is_pending

    @abstractmethod
    def begin(self) -> None: ...

    @abstractmethod
    def before_update(self, optimizer: Optimizer | None = None) -> None: ...

    @abstractmethod
    def after_update(self) -> None: ...

    @abstractmethod
    def read(self, *, wait: bool = False) -> Mapping[str, object] | None: ...

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []


class LayerStats(StepStats):
    """The statistics of one step at a time.

    Call ``begin`` before the forward pass, ``before_update`` when the gradients are complete, and ``after_update``
    after the step. ``read`` then returns the record once the host has it, without waiting. ``is_live`` returns True in
    a forward pass of training; others do not count. If a rank has shards of the parameters, the shards are measured,
    and ``combine_shards`` replaces their squared norms by those of the full parameters, in place. The tensor of norms
    has shape (3, parameters): of gradients, updates and weights.
    """

    def __init__(
        self,
        *models: nn.Module,
        activations: bool = True,
        is_live: Callable[[], bool] = torch.is_grad_enabled,
        combine_shards: Callable[[Tensor, Sequence[Tensor]], None] | None = None,
    ) -> None:
        self.layers = layers_of(*models)
        super().__init__(tuple(layer.path for layer in self.layers))
        self._with_activations = activations
        self._is_live = is_live
        self._combine_shards = combine_shards
        self._measured: dict[int, tuple[Tensor, Tensor]] = {}
        self._elements_per_sample: Tensor | None = None
        self._parameters = [p for layer in self.layers for p in layer.parameters]
        self._counts = [len(layer.parameters) for layer in self.layers]

    def begin(self) -> None:
        """Hook the layers for one forward pass. With several micro-batches, the first counts."""
        self._sampled, self._measured = {}, {}
        for index, layer in enumerate(self.layers if self._with_activations else ()):
            if layer.module is not None:
                self._handles.append(layer.module.register_forward_hook(self._hook(index)))

    def _hook(self, index: int) -> Callable[[nn.Module, object, object], None]:
        def keep(_module: nn.Module, _given: object, output: object) -> None:
            begin_s = time.perf_counter()
            is_new = index not in self._sampled and self._is_live()  # there may be an evaluation between two steps
            if is_new and not is_transformed() and (found := tensor_in(output)) is not None:
                with torch.no_grad():
                    self._sampled[index] = self._sample(local(found)).float()
            self.hooks_s += time.perf_counter() - begin_s

        keep.is_recorders = True  # type: ignore[attr-defined]  # replays need the user's hooks, and not this one
        return keep

    @torch.no_grad()
    def before_update(self, optimizer: Optimizer | None = None) -> None:
        """Compute norms of gradients and copy weights before the update: those of ``optimizer``, or all.

        With several optimizers, call it before the update of each. The first call of a step counts for each parameter.
        """
        owned = None if optimizer is None else {id(p) for group in optimizer.param_groups for p in group["params"]}
        new = [
            (index, p)
            for index, p in enumerate(self._parameters)
            if index not in self._measured and (owned is None or id(p) in owned)
        ]
        if not new:
            return
        norms = torch._foreach_norm([_dense(p) for _, p in new])
        for (index, p), norm in zip(new, norms, strict=True):
            self._measured[index] = norm.float().square(), self._some_of(local(p))
        if len(self._measured) == len(self._parameters):
            self.close()

    @torch.no_grad()
    def after_update(self) -> None:
        """Compute the ratios of updates to weights, and start the copy of all values to the host."""
        self.close()
        measured, self._measured = self._measured, {}
        if not measured:  # the step ended before its update
            return
        after = [self._some_of(local(p)) for p in self._parameters]
        for index in measured.keys() ^ range(len(after)):  # not updated in this step
            measured[index] = after[index].new_zeros((), dtype=torch.float32), after[index]
        grads, before = zip(*(measured[index] for index in range(len(after))), strict=True)
        moved = torch._foreach_sub(after, list(before))
        squares = torch.stack([torch.stack(grads), self._squares(moved), self._squares(before)])
        if self._combine_shards is not None:
            self._combine_shards(squares, self._parameters)
        layers = torch.stack([part.sum(1) for part in torch.split(squares, self._counts, dim=1)])
        norms, ratios = layers[:, 0].sqrt(), (layers[:, 1] / layers[:, 2]).sqrt()
        known = torch.stack(self._rows(ratios.device))
        self._copy.start(
            torch.cat([norms, ratios, known.mean(1), known.std(1), known.abs().amax(1), histogram(known).flatten()])
        )
        self._sampled = {}

    def _rows(self, device: torch.device) -> list[Tensor]:
        missing = torch.full((MAX_SAMPLED_ELEMENTS,), math.nan, device=device)
        return [self._sampled.get(index, missing).to(device) for index in range(len(self.layers))]

    def _squares(self, samples: Sequence[Tensor]) -> Tensor:
        """Return the squared norm of each parameter, estimated from its samples."""
        squares = torch.stack([norm.float() for norm in torch._foreach_norm(list(samples))]).square()
        if self._elements_per_sample is None:  # made once, because a copy to a GPU synchronizes
            ratios = [
                local(p).numel() / max(1, each.numel()) for p, each in zip(self._parameters, samples, strict=True)
            ]
            self._elements_per_sample = torch.tensor(ratios, device=squares.device)
        return squares * self._elements_per_sample

    def _some_of(self, tensor: Tensor) -> Tensor:
        """Return a copy of all elements, or of MAX_SAMPLED_ELEMENTS of them."""
        return tensor.detach().reshape(-1).clone() if tensor.numel() <= MAX_SAMPLED_ELEMENTS else self._sample(tensor)

    def read(self, *, wait: bool = False) -> Mapping[str, object] | None:
        """Return the fields of a Layers record once they are on the host; None before, and if there is nothing new."""
        values = self._copy.take(wait=wait)
        if values is None:
            return None
        count = len(self.layers)
        columns = values[: 5 * count].view(5, count).tolist()
        bins = values[5 * count :].view(count, NUM_BINS).mul(100 / MAX_SAMPLED_ELEMENTS).round().int().tolist()
        names = ("grad_norm", "update_ratio", "act_mean", "act_std", "act_max")
        fields: dict[str, object] = {name: tuple(map(short, column)) for name, column in zip(names, columns)}
        return fields | {"act_log2": tuple(map(without_ends, bins))}


def _dense(parameter: nn.Parameter) -> Tensor:
    """Return the gradient, or this rank's shard of it; the values of a sparse gradient; zero if there is none."""
    if parameter.grad is None:
        return torch.zeros((), device=parameter.device)
    grad = local(parameter.grad)
    return grad.coalesce().values() if grad.is_sparse else grad


def histogram(rows: Tensor, low: int = LOWEST_EXPONENT, bins: int = NUM_BINS) -> Tensor:
    """Return the counts of each row's elements by power of two: (rows, bins). Does not wait for the device."""
    powers = torch.frexp(rows.nan_to_num(0.0, 0.0, 0.0).abs()).exponent - 1 - low
    powers = torch.where(rows == 0, 0, powers).clamp_(0, bins - 1)
    counts = torch.zeros(len(rows), bins, device=rows.device)
    return counts.scatter_add_(1, powers.long(), torch.isfinite(rows).float())


def tensor_in(output: object) -> Tensor | None:
    """Return the first floating-point tensor in the output of a module; sparse and nested tensors do not count."""
    if isinstance(output, Tensor):
        readable = output.layout is torch.strided and not output.is_nested and output.is_floating_point()
        return output if readable and output.numel() else None
    values = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple | list) else ()
    return next((found for each in values if (found := tensor_in(each)) is not None), None)


def short(value: float) -> float:
    """Round to four significant digits."""
    return float(f"{value:.4g}")


def without_ends(counts: list[int]) -> tuple[int, ...]:
    """Return the index of the first non-zero count, and the counts from there to the last non-zero one; () for none."""
    filled = [index for index, count in enumerate(counts) if count]
    return (filled[0], *counts[filled[0] : filled[-1] + 1]) if filled else ()


class LayerLog(Generic[R]):
    """Writes a record in some steps. ``record`` makes it from the fields that ``stats`` has read.

    The second step is measured, then every 25th step, and fewer later on: see ``RECORDS_PER_E_FOLD``.
    Fewer steps are measured if the host time would exceed ``MAX_TIME_FRACTION``. This does not apply with ``in_step``,
    because all ranks take part in the same step.
    """

    def __init__(
        self,
        stats: StepStats,
        write: Callable[[R], None],
        record: Callable[..., R],
        *,
        in_step: bool = False,
        clock: Callable[[], float] = time.perf_counter,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._stats = stats
        self._to = write
        self._record = record
        self._clock, self._wall_clock = clock, wall_clock
        self._in_step = in_step
        self._next, self._measured = 0, 0
        self._paid_s = 0.0
        self._steps_s = 0.0
        self._named = False

    def is_due(self, step: int) -> bool:
        return step == self._measured

    def before_update(self, step: int, optimizer: Optimizer | None = None) -> None:
        """Measure the complete gradients of ``step``: those of ``optimizer``, or all."""
        if step == self._measured:
            begin_s = self._clock()
            self._stats.before_update(optimizer)
            self._paid_s += self._clock() - begin_s

    def after(self, step: int, step_s: float) -> None:
        """Handle the end of ``step``, which took ``step_s`` seconds."""
        self._steps_s += step_s
        if step != self._measured and step + 1 < self._next and not self._stats.is_pending:
            return
        begin_s = self._clock()
        if step == self._measured:
            self._stats.after_update()
            self._next = step + self.apart(step)
        if self._stats.is_pending:
            self._write(self._measured)
        may_cost = self._in_step or self._paid_s + self._stats.hooks_s <= MAX_TIME_FRACTION * self._steps_s
        if step + 1 >= self._next and may_cost:
            self._measured = step + 1
            self._stats.begin()
        self._paid_s += self._clock() - begin_s

    @staticmethod
    def apart(step: int) -> int:
        return max(INITIAL_INTERVAL_STEPS, step // RECORDS_PER_E_FOLD)

    def _write(self, step: int, *, wait: bool = False) -> None:
        fields = self._stats.read(wait=wait)
        if fields is None:
            return
        names = () if self._named else self._stats.paths
        self._named = True
        self._to(self._record(time_s=self._wall_clock(), step=step, layers=names, **fields))

    def close(self) -> None:
        self._stats.close()
        self._write(self._measured, wait=True)


class LayerObserver:
    """An observer that passes the steps of the engine to ``log``. The engine calls ``probe`` before each update."""

    def __init__(self, log: LayerLog[R]) -> None:
        self._log = log

    def is_due(self, state: TrainState) -> bool:
        return self._log.is_due(state.step + 1)

    def probe(self, state: TrainState) -> Mapping[str, Tensor]:
        """Measure the gradients if they are due. Adds nothing to the record of the step."""
        self._log.before_update(state.step + 1)
        return {}

    def observe(self, result: StepResult, _state: TrainState) -> None:
        self._log.after(result.step, result.step_s)

    def close(self) -> None:
        self._log.close()


class CustomStepLayers(LayerObserver):
    """Records statistics by layer for a custom step, which calls the optimizers itself in any order.

    Parameters of an optimizer that computes gradients in ``step(closure)``, such as LBFGS, are not measured: they have
    no gradients before the update.
    """

    def __init__(self, log: LayerLog[records.Layers], state: TrainState) -> None:
        super().__init__(log)
        self._state = state
        self._handles = [each.register_step_pre_hook(self._before) for each in parts_of(state.optimizer)]

    def _before(self, optimizer: Optimizer, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
        if not any(map(callable, (*args, *kwargs.values()))):
            self._log.before_update(self._state.step + 1, optimizer)

    def close(self) -> None:
        for each in self._handles:
            each.remove()
        super().close()


def scalars_of(record: records.Layers, paths: Sequence[str]) -> dict[str, float]:
    """Return the values for sinks: one number for each statistic of each layer."""
    columns = {"grad_norm": record.grad_norm, "update_ratio": record.update_ratio, "act_std": record.act_std}
    return {
        f"layers/{name}/{path}": value
        for name, column in columns.items()
        for path, value in zip(paths, column, strict=True)
        if not math.isnan(value)
    }


class OutputGradStats(StepStats):
    """Gradients with respect to the outputs of ``modules`` in one step, measured as ``LayerStats`` measures parameters.

    Norms are over all elements of all calls of a module in the step, including all micro-batches. Histograms are of
    MAX_SAMPLED_ELEMENTS from the call whose backward pass came first. Norms and histogrammed values are multiplied
    by ``factor``. A forward pass that activation checkpointing repeats is not counted again, because no gradient flows
    to its output.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        super().__init__(tuple(modules))
        self.factor: Tensor | float = 1.0
        self._modules = tuple(modules.values())
        self._norms: dict[int, Tensor] = {}

    def begin(self) -> None:
        self.discard()
        self._handles = [module.register_forward_hook(self._hook(at)) for at, module in enumerate(self._modules)]

    def _hook(self, index: int) -> Callable[[nn.Module, object, object], None]:
        def add(grad: Tensor) -> None:
            begin_s = time.perf_counter()
            with torch.no_grad():
                shard = local(grad.detach())
                norm = torch.linalg.vector_norm(shard, dtype=torch.promote_types(shard.dtype, torch.float32)).float()
                self._norms[index] = torch.hypot(self._norms[index], norm) if index in self._norms else norm
                if index not in self._sampled:
                    self._sampled[index] = self._sample(shard).float()
            self.hooks_s += time.perf_counter() - begin_s

        def keep(_module: nn.Module, _given: object, output: object) -> None:
            if torch.is_grad_enabled() and not is_transformed():
                found = tensor_in(output)
                if found is not None and found.requires_grad:
                    found.register_hook(add)  # type: ignore[no-untyped-call]

        keep.is_recorders = True  # type: ignore[attr-defined]  # replays need the user's hooks, and not this one
        return keep

    def before_update(self, _optimizer: Optimizer | None = None) -> None:
        """Remove the hooks after the backward passes of the step."""
        self.close()

    @torch.no_grad()
    def after_update(self) -> None:
        """Start the copy of norms and histograms to the host."""
        self.close()
        if not self._norms:
            return
        device = next(iter(self._norms.values())).device
        missing = torch.full((), torch.nan, device=device)
        no_sample = torch.full((MAX_SAMPLED_ELEMENTS,), torch.nan, device=device)
        places = range(len(self._modules))
        norms = torch.stack([self._norms[at].to(device) if at in self._norms else missing for at in places])
        seen = torch.tensor([at in self._norms for at in places], device="cpu").to(device, non_blocking=True)
        rows = torch.stack([self._sampled.get(at, no_sample).to(device) for at in places])
        norms = torch.where(seen, (norms * self.factor).nan_to_num(torch.inf, torch.inf), torch.nan)
        counts = histogram(rows * self.factor, OUTPUT_GRAD_LOG2.start, len(OUTPUT_GRAD_LOG2))
        self._copy.start(torch.cat([norms.float(), counts.flatten()]))
        self.discard()

    def discard(self) -> None:
        self._norms, self._sampled = {}, {}

    def read(self, *, wait: bool = False) -> Mapping[str, object] | None:
        """Return the fields of an OutputGrads record once they are on the host; None before, and if none is new."""
        values = self._copy.take(wait=wait)
        if values is None:
            return None
        count = len(self._modules)
        bins = values[count:].view(count, -1).mul(100 / MAX_SAMPLED_ELEMENTS).round().int().tolist()
        return {"norm": tuple(map(short, values[:count].tolist())), "log2": tuple(map(without_ends, bins))}


class OutputGradObserver(LayerObserver):
    """Records the gradients of ``stats`` in the steps that ``log`` chooses, without the loss scale."""

    def __init__(self, log: LayerLog[OutputGrads], stats: OutputGradStats) -> None:
        super().__init__(log)
        self._stats = stats

    def probe(self, state: TrainState) -> Mapping[str, Tensor]:
        """Store the loss scale of this step, which the update may change."""
        scale = state.scaler.scale
        self._stats.factor = 1.0 if scale is None else scale.reciprocal()
        return super().probe(state)

    def observe(self, result: StepResult, state: TrainState) -> None:
        if result.correction is not None:
            self._stats.factor = self._stats.factor * result.correction
        if result.oom_reports:  # the failed attempts were counted too
            self._stats.discard()
        super().observe(result, state)
