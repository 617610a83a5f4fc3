"""Explains why torch rejected a batch: the inputs, read from the frame that raised, and the remedy."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

import torch
from torch import Tensor, nn

from trainwright.checkpoint.cursor import tensors_in
from trainwright.engine.recover import is_out_of_memory
from trainwright.errors import DataError, TrainwrightError, UsageError, text_of

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
LABELS = ("cross_entropy", "nll_loss")
BINARY = ("binary_cross_entropy", "binary_cross_entropy_with_logits")


@contextmanager
def explaining(model: nn.Module) -> Iterator[None]:
    """Raise UsageError instead of torch's error for a batch that does not fit the model or the loss.

    Other errors pass unchanged: errors in the user's code, and Trainwright's own errors.
    """
    try:
        yield
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        refused = None if is_out_of_memory(error) else refusal(error, model)
        if refused is None:
            raise
        raise refused from error


def refusal(error: Exception, model: nn.Module, batch: object = ()) -> UsageError | DataError | None:
    """Return what is wrong with the batch that made torch raise ``error``; None if unknown, or if it is our own error.

    A DataError has the rows of ``batch`` with ids or labels out of range.
    """
    if isinstance(error, TrainwrightError):
        return None
    if "modified by an inplace operation" in str(error):
        return UsageError(
            f"a value that the backward pass needs was overwritten: {text_of(error, lines=1)[:200]}",
            remedy="look for inplace=True, += and x[...] = y between the layers, and make a new tensor instead",
        )
    if "must be Tensor, not list" in str(error):
        return UsageError(
            f"the batch has a list instead of a tensor: {text_of(error, lines=1)[:200]}",
            remedy="let the samples hold tensors: dataset.with_format('torch') for Hugging Face, or a DataLoader with "
            "collate_fn=tw.pad(), which also pads them",
        )
    call = None if isinstance(error, TypeError) else _refusing_call(error, model)
    if call is None:
        return None
    try:
        remedies = [found for rule in _RULES if (found := rule(call))]
        rows = _rows_out_of_range(call, batch) if remedies else []
    except RuntimeError:  # an id out of range stops a GPU: its tensors cannot be read any more
        return None
    if not remedies:
        return None
    got = ", ".join(f"{name} {_shown(tensor)}" for name, tensor in call.inputs.items())
    message, remedy = f"{call.name} cannot work with {got}: {text_of(error, lines=1)[:200]}", "; ".join(remedies)
    if not rows:
        return UsageError(message, remedy=remedy)
    return DataError(message.rstrip("."), sample_ids=rows, remedy=remedy)


@dataclass(frozen=True)
class _Call:
    """A call of a module or torch function that raised. Tensors are keyed by parameter name.

    ``text`` is the message of torch.
    """

    text: str
    name: str
    function: str
    module: nn.Module | None
    inputs: Mapping[str, Tensor]
    weights: Mapping[str, Tensor]

    @property
    def first(self) -> Tensor:
        return next(iter(self.inputs.values()))

    @property
    def is_embedding(self) -> bool:
        return isinstance(self.module, nn.Embedding) or self.function == "embedding"


def _refusing_call(error: Exception, model: nn.Module) -> _Call | None:
    """Return the innermost call with tensor arguments."""
    found = None
    names = {module: name for name, module in model.named_modules()}
    trace = error.__traceback__
    while trace is not None:
        found = _call_of(trace.tb_frame, names, str(error)) or found
        trace = trace.tb_next
    return found


def _call_of(frame: FrameType, names: Mapping[nn.Module, str], text: str) -> _Call | None:
    code, values = frame.f_code, frame.f_locals
    parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    tensors = {name: values[name] for name in parameters if isinstance(values.get(name), Tensor)}
    module = values.get("self") if isinstance(values.get("self"), nn.Module) else None
    weights = {name: each for name, each in tensors.items() if isinstance(each, nn.Parameter)}
    inputs = {name: each for name, each in tensors.items() if name not in weights}
    if not inputs:
        return None
    if module is None:
        return _Call(text, code.co_name, code.co_name, None, inputs, weights)
    at = f" ({names[module]!r} of the model)" if names.get(module) else ""
    own = dict(module.named_parameters(recurse=False))
    return _Call(text, f"{type(module).__name__}{at}", code.co_name, module, inputs, {**own, **weights})


def _shown(tensor: Tensor) -> str:
    return f"{_type(tensor)} {tuple(tensor.shape)}"


def _type(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _ids(call: _Call) -> str:
    weight = call.weights.get("weight")
    if weight is None or not call.is_embedding:
        return ""
    ids, rows = call.first, len(weight)
    if ids.dtype not in (torch.int32, torch.int64):
        return "ids are whole numbers: ids.long()"
    if not ids.numel() or (int(ids.min()) >= 0 and int(ids.max()) < rows):
        return ""
    if _are_positions(ids):
        return (
            f"these are positions: the sequence has {ids.shape[-1]:,} tokens, and the model has an embedding for "
            f"{rows:,} positions; set max_length: {rows} for the data set or the tokenizer, or enlarge the embedding"
        )
    return (
        f"the ids reach from {int(ids.min())} to {int(ids.max())}, and the embedding has rows 0 to {rows - 1}: give it "
        "more (num_embeddings), or check how ids are made"
    )


def _rows_out_of_range(call: _Call, batch: object) -> list[int]:
    """Return the rows of ``batch`` with ids that an embedding does not have, or with labels that are no class.

    Returns [] unless the ids or labels are a tensor of the batch, flattened or without its first column at most.
    """
    if call.is_embedding and "weight" in call.weights:
        values, size, ignored = call.first, len(call.weights["weight"]), 0
    elif call.function in LABELS and len(call.inputs) > 1 and call.first.dim() > 1:
        scores, values = list(call.inputs.values())[:2]
        size, ignored = scores.shape[1], -100
    else:
        return []
    values = values.flatten()
    wrong = ((values < 0) & (values != ignored)) | (values >= size)
    for each in filter(Tensor.dim, tensors_in(batch)):
        for part in (each, each[..., 1:]) if each.dim() > 1 else (each,):
            if part.numel() == len(values) and torch.equal(part.flatten().to(values.dtype), values):
                return sorted({index // (len(values) // len(part)) for index in wrong.nonzero()[:, 0].tolist()})
    return []


def _are_positions(ids: Tensor) -> bool:
    """Return True if each id is the previous id plus 1, or is 0 because another packed sample begins."""
    if not ids.dim() or ids.shape[-1] < 2:
        return False
    return bool(((ids[..., 1:] == ids[..., :-1] + 1) | (ids[..., 1:] == 0)).all()) and bool((ids[..., 1:] > 0).any())


def _other_type(call: _Call) -> str:
    floats = [each for each in call.weights.values() if each.is_floating_point()]
    if "type" not in call.text or call.is_embedding or not floats or call.first.dtype == floats[0].dtype:
        return ""
    if not call.first.is_floating_point():
        bytes_too = "; for pictures of bytes x.float() / 255" if call.first.dtype == torch.uint8 else ""
        return f"its weights are {_type(floats[0])} and the input is whole numbers: x.float() in the data{bytes_too}"
    return (
        f"its weights are {_type(floats[0])}: convert the data, x.to(torch.{_type(floats[0])}), or the model, "
        f"model.to(torch.{_type(call.first)})"
    )


def _channels(call: _Call) -> str:
    if not isinstance(call.module, CONVOLUTIONS):
        return ""
    wanted, shape = call.module.in_channels, call.first.shape
    dims = 2 + len(call.module.kernel_size)
    if len(shape) == dims and shape[-1] == wanted != shape[1]:
        order = ", ".join(map(str, (0, dims - 1, *range(1, dims - 1))))
        return f"channels come second: x.permute({order})"
    if len(shape) == dims - 2 or (len(shape) == dims - 1 and wanted == 1):
        return f"it takes (samples, {wanted}, ...): x.unsqueeze(1) adds the channel"
    if len(shape) == dims and shape[1] != wanted:
        return f"the input has {shape[1]} channels, and the layer was made for in_channels={wanted}"
    return ""


def _features(call: _Call) -> str:
    if not isinstance(call.module, nn.Linear):
        return ""
    wanted, shape = call.module.in_features, call.first.shape
    if not shape or shape[-1] == wanted:
        return ""
    if math.prod(shape[1:]) == wanted:
        return "one row of features for each sample: put nn.Flatten() in front of it, or x.flatten(1) into the data"
    return f"the input ends in {shape[-1]} features, and the layer was made for in_features={wanted}"


def _one_row(call: _Call) -> str:
    if "batch_norm" not in call.function or len(call.first) != 1:
        return ""
    return "BatchNorm in training needs more than one sample: a larger batch, drop_last for the last one, or GroupNorm"


def _labels(call: _Call) -> str:
    if call.function not in LABELS or len(call.inputs) < 2:
        return ""
    scores, labels = list(call.inputs.values())[:2]
    if scores.dim() < 2:
        return "scores of shape (samples, classes), and a label for each sample"
    if labels.dim() == scores.dim() and labels.shape[1] == 1:
        return "one label for each sample, of shape (samples,): y.squeeze(1)"
    if labels.dtype != torch.int64 and labels.shape != scores.shape:
        return "labels are whole numbers of 64 bits: y.long()"
    if scores.dim() > 2 and labels.shape == scores.shape[:-1] and scores.shape[2:] != labels.shape[1:]:
        return "the classes come second in the scores: output.movedim(-1, 1); or one row for each label: flatten both"
    if len(scores) != len(labels):
        return f"{len(scores)} rows of scores and {len(labels)} labels: the data, or the model, merge or lose samples"
    if labels.shape == scores.shape and not labels.is_floating_point():
        return "targets of one-hot rows are floats: y.float(); or codes: y.argmax(1)"
    classes = scores.shape[1]
    counted = labels[labels != -100]
    if labels.shape == scores.shape or not counted.numel() or _within(counted, classes):
        return ""
    return (
        f"the labels reach from {int(counted.min())} to {int(counted.max())}, and the model has outputs 0 to "
        f"{classes - 1}: number the classes from 0, or give the model more outputs; -100 is not counted"
    )


def _within(labels: Tensor, classes: int) -> bool:
    return int(labels.min()) >= 0 and int(labels.max()) < classes


def _binary(call: _Call) -> str:
    if call.function not in BINARY or len(call.inputs) < 2:
        return ""
    scores, targets = list(call.inputs.values())[:2]
    if scores.shape != targets.shape:
        return ""
    if not targets.is_floating_point():
        return "targets are floats between 0 and 1 here: y.float()"
    if call.function == BINARY[0] and not bool(((scores >= 0) & (scores <= 1)).all()):
        return "it takes probabilities: use nn.BCEWithLogitsLoss for what the model gives, or end it with a sigmoid"
    return ""


def _shapes(call: _Call) -> str:
    if "input" not in call.inputs or "target" not in call.inputs:
        return ""
    output, target = call.inputs["input"], call.inputs["target"]
    if call.function in BINARY and output.dim() == 2 and output.shape[1] > 1 and target.shape == output.shape[:1]:
        return (
            f"for one of {output.shape[1]} classes, class numbers are whole numbers, y.long(), and the loss is "
            "cross_entropy; for yes or no, give the model one output"
        )
    if output.shape == target.shape or output.numel() != target.numel():
        return ""
    return "give both one shape: y.view_as(output), or output.squeeze(-1)"


_RULES: tuple[Callable[[_Call], str], ...] = (
    _ids,
    _channels,
    _features,
    _other_type,
    _one_row,
    _labels,
    _binary,
    _shapes,
)
"""Each returns the remedy for one cause, or "" if this is not the cause."""
