"""Loss: a sum and its weight, never a mean, so that any split of the global batch gives the same gradient."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import reduce
from numbers import Real
from operator import add
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from trainwright.checkpoint.cursor import MicroBatch, StepBatch
from trainwright.checkpoint.shards import is_sharded
from trainwright.checkpoint.train_state import TrainState
from trainwright.engine.input_errors import refusal
from trainwright.engine.precision import Precision
from trainwright.engine.synced_norms import LOCAL_STATISTICS, SyncedNorms
from trainwright.engine.user_log import count_for
from trainwright.engine.witness import SILENT, StepWitness
from trainwright.errors import DataError, UsageError, text_of

_NO_METRICS: Mapping[str, Tensor] = MappingProxyType({})


class Loss(NamedTuple):
    """Result of a loss function for one micro-batch.

    The engine divides by the weight of the global batch.

    Attributes:
        total: 0-d, *summed* over the counted items (tokens, samples, pixels).
        weight: Number of counted items.
        metrics: Further sums over the same items (number correct, for example), tensors or numbers. They are reported
            divided by ``weight``.
        outputs: Passed to the metrics of the run (``tw.fit(metrics=...)``), if there are any.
        targets: As ``outputs``.
    """

    total: Tensor
    weight: Tensor | float
    metrics: Mapping[str, Any] = _NO_METRICS
    outputs: Any = None
    targets: Any = None


class Scored(NamedTuple):
    """Loss of a micro-batch, with the outputs and targets it was computed from; None if they are unknown."""

    loss: Loss | Tensor
    outputs: object = None
    targets: object = None


Batch: TypeAlias = Any
"""The data of one micro-batch: anything that the user's dataset returns and the loss function accepts."""
LossFn = Callable[[nn.Module, Batch], Loss | Tensor]
"""``loss(model, batch)``. A plain 0-d tensor is the mean over the samples of the micro-batch."""


_FORMS = "give loss(output, target), such as nn.CrossEntropyLoss(), or loss(model, batch) with a parameter named model"


def as_loss_fn(loss: Callable[..., Loss | Tensor]) -> LossFn:
    """Convert any supported loss function to the form that the engine calls.

    A callable whose first parameter is named ``model`` is called with ``(model, batch)``, or ``(model, *batch)`` if it
    requires more than two arguments. Any other callable takes two arguments of any names and is called with ``(output,
    target)``, as ``torch.nn.functional.cross_entropy`` and ``nn.CrossEntropyLoss()`` are; the batch must then be a pair
    ``(input, target)``, or ``(*inputs, target)``.

    Raises:
        UsageError: The loss has another signature.
    """
    require_callable(loss)
    if not takes_model(loss):
        return loss if isinstance(loss, _Supervised) else _Supervised(loss)
    return loss if _accepts(loss, 2) else _Unpacked(loss)


def call_with_outputs(loss_fn: LossFn, model: nn.Module, batch: Batch) -> Scored:
    """Call a loss function; the result includes outputs and targets if they are known."""
    if isinstance(loss_fn, _Supervised | ModelLoss):
        return loss_fn.call_with_outputs(model, batch)
    found = loss_fn(model, batch)
    return Scored(found, found.outputs, found.targets) if isinstance(found, Loss) else Scored(found)


def require_callable(loss: object) -> None:
    """Raise UsageError for a loss that is not callable, or for the class of a module instead of an instance."""
    if isinstance(loss, type) and issubclass(loss, nn.Module):
        name = loss.__name__
        raise UsageError(f"the loss is the class {name}, not one of its objects", remedy=f"write {name}()")
    if not callable(loss):
        got = f"{loss!r}" if isinstance(loss, str) else f"a {type(loss).__name__}"
        raise UsageError(f"the loss must be a function or a module; got {got}", remedy=_FORMS)
    if not _accepts(loss, 2) and not (takes_model(loss) and any(_accepts(loss, count) for count in range(3, 9))):
        raise UsageError(f"the loss {_shown(loss)} does not take two arguments, (output, target)", remedy=_FORMS)


def _shown(loss: Callable[..., object]) -> str:
    """Return the name and parameters of a loss; a builtin may have no signature."""
    name = getattr(loss, "__name__", type(loss).__name__)
    try:
        return f"{name}{inspect.signature(_called(loss))}"
    except ValueError:
        return str(name)


def _called(loss: Callable[..., object]) -> Callable[..., object]:
    return loss.forward if isinstance(loss, nn.Module) else loss


def _accepts(loss: Callable[..., object], count: int) -> bool:
    """Return True if ``loss`` takes ``count`` positional arguments, or has no signature (some builtins)."""
    try:
        inspect.signature(_called(loss)).bind(*[None] * count)
    except ValueError:
        return True
    except TypeError:
        return False
    return True


def takes_model(loss: Callable[..., object]) -> bool:
    """Return True if the first parameter is named ``model``."""
    try:
        first = next(iter(inspect.signature(_called(loss)).parameters), None)
    except ValueError:  # a builtin without a signature
        return False
    return first == "model"


def measures_progress(loss: Callable[..., object]) -> bool:
    """Return False for a loss with the attribute ``measures_progress = False``, such as a policy gradient.

    The value of such a loss may rise while the model learns.
    """
    return bool(getattr(loss, "measures_progress", True))


def call_loss(loss_fn: LossFn, model: nn.Module, micro: MicroBatch, where: str) -> Loss | Tensor:
    """Run one forward pass. Raise UsageError unless it returns a 0-d tensor, or a Loss with a 0-d total.

    The weight is returned as a number, or on a GPU as a detached 0-d tensor on that device; metrics are returned as
    tensors. The sign of a weight on a GPU is not checked, because that would cost a host sync.

    A DataError of the loss function, or for ids or labels out of range, names rows of the micro-batch. They are
    replaced by sample ids of the dataset, and ``where`` is added to the message.
    """
    count_for(micro.size)
    try:
        with nullcontext() if micro.size else _uncounted(model):
            output = loss_fn(model, micro.data)
    except DataError as error:
        raise _with_sample_ids(error, micro, where) from None
    except (IndexError, ValueError) as error:
        refused = refusal(error, model, micro.data)
        if refused is None:
            raise
        raise (_with_sample_ids(refused, micro, where) if isinstance(refused, DataError) else refused) from error
    except RuntimeError as error:
        if is_sharded(model) and "mixed torch.Tensor and DTensor" in str(error):
            raise UsageError(
                f"{where} computes with a weight that is not gathered: {text_of(error, lines=1)[:200]}",
                remedy="call the module that it belongs to, block(x), instead of using block.weight or "
                "block.forward(x): ranks that divide the weights gather them around the call",
            ) from None
        raise
    count_for(1)
    return validated_output(output, "the loss function gave")


def _with_sample_ids(error: DataError, micro: MicroBatch, where: str) -> DataError:
    ids = [int(micro.ids[row]) for row in error.sample_ids if row < micro.size]
    return DataError(f"{error.message} ({where}, samples {ids})", sample_ids=ids, remedy=error.remedy)


@contextmanager
def _uncounted(model: nn.Module) -> Iterator[None]:
    """Context in which modules that count over all ranks ignore the sample that a rank without samples repeats."""
    counting: list[Any] = [module for module in model.modules() if hasattr(module, "summed_over_ranks")]
    try:
        for module in counting:
            module.is_counting = False
        yield
    finally:
        for module in counting:
            module.is_counting = True


def validated_output(output: object, gave: str) -> Loss | Tensor:
    """Validate the result of a loss function and return it as ``call_loss`` does. ``gave`` begins the error message."""
    total = output.total if isinstance(output, Loss) else output
    if not isinstance(total, Tensor) or total.dim() != 0:
        got = f"a tensor of shape {tuple(total.shape)}" if isinstance(total, Tensor) else f"a {type(total).__name__}"
        raise UsageError(
            f"{gave} {got} where a single number is needed",
            remedy="return the mean as a 0-d tensor (loss.mean()), or tw.Loss(total=loss.sum(), weight=how_many)",
        )
    if not isinstance(output, Loss):
        return total
    metrics = {name: _metric(name, value, total) for name, value in output.metrics.items()}
    return Loss(total, _weight(output.weight, total), metrics)  # without outputs: a variable would keep them alive


def _weight(weight: object, total: Tensor) -> Tensor | float:
    """Return the weight, detached, on the device of the loss; on the CPU as a plain number."""
    if isinstance(weight, Tensor) and weight.numel() == 1:
        if total.device.type != "cpu":
            return weight.detach().to(total.device).reshape(())
        weight = float(weight.detach())
    if isinstance(weight, Real) and not float(weight) < 0:
        number: float = weight  # type: ignore[assignment]  # an int stays an int
        return number
    got = f"a tensor of shape {tuple(weight.shape)}" if isinstance(weight, Tensor) else repr(weight)
    raise UsageError(
        f"the weight of a Loss must be one number, 0 or more; got {got}",
        remedy="give how many things the total sums over: mask.sum(), or float(len(target))",
    )


def _metric(name: str, value: object, total: Tensor) -> Tensor:
    if isinstance(value, Real):
        return torch.tensor(float(value), dtype=torch.float64, device=total.device)
    if isinstance(value, Tensor) and value.numel() == 1:
        return value if value.dim() == 0 else value.reshape(())
    got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    raise UsageError(
        f"the metric {name!r} of a Loss must be one number; got {got}", remedy="give its sum over the micro-batch"
    )


class _Supervised:
    """Applies ``loss(output, target)`` to a batch of ``(*inputs, target)``."""

    def __init__(self, loss: Callable[..., Loss | Tensor]) -> None:
        self.loss = loss

    def __call__(self, model: nn.Module, batch: Batch) -> Loss | Tensor:
        return self.call_with_outputs(model, batch).loss

    def call_with_outputs(self, model: nn.Module, batch: Batch) -> Scored:
        if not isinstance(batch, tuple | list) or len(batch) < 2:
            raise UsageError(
                f"a loss of (output, target) needs batches of (input, target); this batch is a {type(batch).__name__}",
                remedy="write the loss as `def loss(model, batch): ...` and take the batch apart there",
            )
        *inputs, target = batch
        try:
            output = model(*inputs)
        except TypeError as error:
            signature = inspect.signature(model.forward)
            if _binds(signature, inputs, {}):
                raise  # the error has another cause
            raise UsageError(
                f"forward{signature} of the model does not take {len(inputs)} inputs: the batch has {len(batch)} "
                "parts, and the last is the target",
                remedy="let a sample be (input, target), or write the loss as `def loss(model, batch): ...` and take "
                "the batch apart there",
            ) from error
        try:
            return Scored(self.loss(output, target), output, target)
        except (TypeError, AttributeError) as error:  # the model may take other arguments
            error.add_note(_hint(self.loss, output, target))
            raise


def _hint(loss: Callable[..., object], output: object, target: object) -> str:
    if isinstance(target, tuple | list) and _is_text(target):
        return f"the labels are strings, such as {target[0]!r}: let the dataset return their numbers, from 0"
    if isinstance(output, Mapping | tuple | list):
        key = next((key for key in ("logits", *output) if key in output), 0) if isinstance(output, Mapping) else 0
        has = f" with {', '.join(map(str, output))}" if isinstance(output, Mapping) else ""
        part = f"lambda output, target: loss(output[{key!r}], target)"
        return f"the model returned a {type(output).__name__}{has}: pass the loss its part, {part}"
    return (
        f"{_shown(loss)} was called as loss(output, target), with what the model returned: to get the model and the "
        "batch instead, name its first parameter model"
    )


class _Unpacked:
    """Applies ``loss(model, x, y, ...)`` to a batch of ``(x, y, ...)``."""

    def __init__(self, loss: Callable[..., Loss | Tensor]) -> None:
        self.loss = loss

    def __call__(self, model: nn.Module, batch: Batch) -> Loss | Tensor:
        names = list(inspect.signature(_called(self.loss)).parameters)[1:]
        if not isinstance(batch, tuple | list) or not _accepts(self.loss, 1 + len(batch)):
            size = f" of {len(batch)}" if isinstance(batch, tuple | list) else ""
            raise UsageError(
                f"the loss takes (model, {', '.join(names)}), and this batch is a {type(batch).__name__}{size}",
                remedy="write the loss as `def loss(model, batch): ...` and take the batch apart there",
            )
        return self.loss(model, *batch)


class ModelLoss:
    """The loss that a model returns itself, as models of ``transformers`` do: a mean over the micro-batch.

    The means of the micro-batches of a step are weighted by their numbers of samples. For a causal language model,
    whose mean is over labelled tokens, use ``hf_causal_lm``: then the loss of a step does not depend on accumulation.

    The loss is ``output.loss``, ``output["loss"]``, the first element of a tuple, or the output itself. A batch that is
    a mapping is passed by keywords, a tuple by position. Metrics get the logits (``output.logits``, or the second
    element of a tuple) and the ``labels`` of the batch. For a causal language model each position gets the label that
    follows it.
    """

    def __call__(self, model: nn.Module, batch: Batch) -> Loss | Tensor:
        return self.call_with_outputs(model, batch).loss

    def call_with_outputs(self, model: nn.Module, batch: Batch) -> Scored:
        output = called_with(model, batch)
        loss = member(output, "loss", 0)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise UsageError(
                f"the model returned {_kind(output)} and no loss, and fit has no loss argument"
                + (f"; the batch has {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else ""),
                remedy="give a loss, loss=nn.CrossEntropyLoss(), or, for a model that computes one itself, batches "
                "with what it needs for that, such as labels",
            )
        logits, targets = member(output, "logits", 1), batch.get("labels") if isinstance(batch, Mapping) else None
        predicts_next = getattr(model, "loss_type", None) == "ForCausalLM"
        if predicts_next and isinstance(logits, Tensor) and isinstance(targets, Tensor) and logits.dim() == 3:
            logits, targets = logits[:, :-1], targets[:, 1:]
        return Scored(loss.reshape(()), logits, targets)


def called_with(model: nn.Module, batch: Batch) -> object:
    """Call the model with a full batch: a mapping by keywords, a tuple by position."""
    args: Sequence[object] = batch if isinstance(batch, tuple | list) else [batch]
    args, kwargs = ([], batch) if isinstance(batch, Mapping) else (args, {})
    try:
        return model(*args, **kwargs)
    except (TypeError, AttributeError, ValueError) as error:
        text = next((name for name, value in kwargs.items() if _is_text(value)), None)
        if text is not None:
            raise UsageError(
                f"the batch has text in {text!r}, such as {kwargs[text][0]!r}, and the model failed: {error}",
                remedy="let the samples hold numbers: token ids of a tokenizer, and labels from 0",
            ) from error
        if not isinstance(error, TypeError):
            raise
        signature = inspect.signature(model.forward)
        if _binds(signature, args, kwargs):
            raise  # the error has another cause
        what = f"the keys {', '.join(map(str, kwargs))}" if kwargs else f"{len(args)} parts"
        raise UsageError(
            f"forward{signature} of the model does not take this batch, which has {what}",
            remedy=_how_to_fit(signature, kwargs),
        ) from error


def _is_text(value: object) -> bool:
    return isinstance(value, tuple | list) and bool(value) and isinstance(value[0], str)


def _binds(signature: inspect.Signature, args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def _how_to_fit(signature: inspect.Signature, kwargs: Mapping[str, object]) -> str:
    """Return the remedy for a batch that the model does not accept: keys to leave out and keys to add."""
    taken = signature.parameters
    open_ended = {each.name for each in taken.values() if each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD)}
    takes_any = any(each.kind is each.VAR_KEYWORD for each in taken.values())
    too_many = [name for name in kwargs if name not in taken and not takes_any]
    needed = [name for name, each in taken.items() if each.default is each.empty and name not in open_ended]
    missing = [name for name in needed if name not in kwargs]
    if kwargs and (too_many or missing):
        words = [f"leave out {', '.join(too_many)}"] if too_many else []
        words += [f"add {', '.join(missing)}"] if missing else []
        return f"{' and '.join(words)} (of a table: remove_columns, rename_column), or give a loss: loss=my_loss"
    return "give a loss, loss=nn.CrossEntropyLoss(), or batches that are what the model takes"


def member(output: object, name: str, position: int) -> object:
    """Return a part of a model's output: an attribute, a key, or an element of a tuple.

    An output that is a tensor counts as a tuple of one element.
    """
    if isinstance(output, Mapping) and name in output:
        return output[name]
    if isinstance(output, tuple | list) and not hasattr(output, name):
        return output[position] if position < len(output) else None
    return output if isinstance(output, Tensor) and not position else getattr(output, name, None)


def _kind(output: object) -> str:
    if isinstance(output, Tensor):
        return f"a tensor of shape {tuple(output.shape)}"
    return f"a {type(output).__name__}"


N = TypeVar("N", Tensor, Tensor | float)


class Accumulated(NamedTuple):
    """Results of all forward and backward passes of one step.

    Attributes:
        loss: Mean over the global batch, 0-d.
        weight: Number of counted items in the global batch.
        micro_losses: Totals of the micro-batches in order, each 0-d. For a loss that returns means, each mean is
            multiplied by the micro-batch's fraction of the samples.
        metrics: Means over ``weight``.
        correction: Factor by which the gradients must still be multiplied; None for 1.
    """

    loss: Tensor
    weight: Tensor | float
    micro_losses: tuple[Tensor, ...]
    metrics: dict[str, Tensor]
    correction: Tensor | float | None


def accumulate(
    state: TrainState,
    batch: StepBatch,
    loss_fn: LossFn,
    precision: Precision,
    witness: StepWitness = SILENT,
    last_backward: Callable[[Accumulated], AbstractContextManager[Accumulated]] = nullcontext,
) -> Accumulated:
    """Run forward and scaled backward on every micro-batch; gradients add up in ``.grad``.

    The weight of the global batch is known only after the last forward pass. Each total is therefore divided by a
    provisional weight: the weight of the first micro-batch times the number of micro-batches. This keeps fp16 gradients
    in range. ``correction`` = provisional / true weight then makes the sum exact. It is exactly 1 when all
    micro-batches have equal weights. For a loss that returns a mean, the weights are the sample counts.

    A micro-batch whose loss depends on no parameter, for example because no item counts, has no backward pass. A
    micro-batch without samples (the rank has none left) has weight 0.

    ``last_backward`` is a context for the last backward pass. It receives the results of the forward passes on this
    rank, and yields the results to return, for example combined over all ranks.
    """
    outputs: list[Loss] = []
    size = batch.size or 1
    provisional: Tensor | float | None = None  # None: the loss returns means
    for index, micro in enumerate(batch.micro):
        with precision.autocast():
            output = call_loss(loss_fn, state.model, micro, f"micro-batch {index} of step {state.step + 1}")
            if isinstance(output, Tensor):
                share = micro.size / size
                objective = output if share == 1.0 else output * share
                output = Loss(objective.detach(), share)
            else:
                if not micro.size:
                    output = _with_zero_weight(output)
                if provisional is None:
                    provisional = _nonzero(output.weight) * len(batch.micro)
                objective = output.total / provisional
        outputs.append(Loss(output.total.detach(), output.weight, output.metrics))
        if len(outputs) == len(batch.micro):
            break
        _backward(state, objective, witness)
    with last_backward(_combined(outputs, provisional, batch.size)) as done:
        _backward(state, objective, witness)
    return done


def _backward(state: TrainState, objective: Tensor, witness: StepWitness) -> None:
    """Run the backward pass of a loss, unless it depends on no parameter."""
    if objective.requires_grad:
        scaled = state.scaler.scaled(objective)
        witness.loss_is_scaled(objective, scaled)
        scaled.backward()  # type: ignore[no-untyped-call]


def run_divided(
    state: TrainState,
    micro: MicroBatch,
    loss_fn: LossFn,
    precision: Precision,
    divisor: int,
    where: str,
    witness: StepWitness = SILENT,
    norms: SyncedNorms = LOCAL_STATISTICS,
) -> Loss:
    """Run forward and scaled backward on one micro-batch, with its total divided by a ``divisor`` known beforehand.

    Returns the detached loss.
    """
    with norms.synchronised(counts=micro.size > 0):
        with precision.autocast():
            output = summed_loss(loss_fn, state.model, micro, where)
            objective = output.total / divisor
        if objective.requires_grad:
            scaled = state.scaler.scaled(objective)
            witness.loss_is_scaled(objective, scaled)
            scaled.backward()  # type: ignore[no-untyped-call]
        elif is_sharded(state.model) or norms.exchange:
            raise UsageError(
                f"the loss of {where} depends on no parameter, and the other ranks wait for its gradient",
                remedy="let it depend on the model's output also where nothing is counted: output.sum() * 0",
            )
    return detached(output)


def summed_loss(loss_fn: LossFn, model: nn.Module, micro: MicroBatch, where: str) -> Loss:
    """Call the loss; a mean is multiplied by the number of samples, and the loss of no samples by 0."""
    output = call_loss(loss_fn, model, micro, where)
    if isinstance(output, Tensor):
        output = Loss(output * micro.size, float(micro.size))
    return output if micro.size else _with_zero_weight(output)


def detached(loss: Loss) -> Loss:
    """Return the loss without its autograd graph, outputs and targets."""
    return Loss(loss.total.detach(), loss.weight, {name: value.detach() for name, value in loss.metrics.items()})


def combine_divided(outputs: Sequence[Loss], divisor: int) -> Accumulated:
    """Combine micro-batches whose totals were divided by a ``divisor`` known beforehand."""
    done = _combined([*outputs], float(divisor), divisor)
    return done._replace(correction=divisor / _nonzero(done.weight))


def _with_zero_weight(output: Loss) -> Loss:
    """Return ``output`` with all values 0 but with its autograd graph, so that its backward pass still runs."""
    metrics = {name: value * 0.0 for name, value in output.metrics.items()}
    return Loss(output.total * 0.0, output.weight * 0.0, metrics)


def _nonzero(weight: Tensor | float) -> Tensor | float:
    """Return the weight, or 1 if the weight is 0, so that it can be a divisor. Needs no host sync."""
    return weight + (weight == 0)


def _combined(outputs: list[Loss], provisional: Tensor | float | None, size: int) -> Accumulated:
    totals = tuple(output.total for output in outputs)
    total = totals[0] if len(totals) == 1 else _sum(totals)
    if provisional is None:  # accumulate has multiplied each mean by its fraction of the samples
        return Accumulated(total, float(size), totals, {}, None)
    weight = _sum([output.weight for output in outputs])
    metrics = {name: _sum([o.metrics[name].detach() for o in outputs]) / weight for name in outputs[0].metrics}
    loss = total / weight
    correction: Tensor | float | None = provisional / _nonzero(weight)
    if len(outputs) == 1 or (isinstance(correction, float) and correction == 1.0):
        correction = None
    return Accumulated(loss, weight, totals, metrics, correction)


def _sum(values: Sequence[N]) -> N:
    """Sum without the ``0 +`` of Python's ``sum``, which launches one more kernel for tensors."""
    return reduce(add, values)


def loss_of_part(loss: Callable[..., Loss | Tensor], cut: Callable[[Tensor], Tensor]) -> LossFn:
    """Return a loss function for full batches (ids_BT, target_BT) whose model computes only a part of each sequence.

    ``cut`` selects the same part of the target.
    """
    loss_fn = as_loss_fn(loss)

    def of_part(model: nn.Module, batch: Batch) -> Loss | Tensor:
        *inputs, target = batch
        made = loss_fn(model, (*inputs, cut(target)))
        if isinstance(made, Tensor):
            raise UsageError(
                "parallel.context: the loss returns a mean, which hides the number of counted positions",
                remedy="return tw.Loss(total, weight), with the number of positions that count",
            )
        return made

    return of_part
