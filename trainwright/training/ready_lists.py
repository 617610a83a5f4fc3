"""Decides whether the items of a list are samples or ready batches, by their shapes and by what the model accepts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate, default_convert

from trainwright.engine.loss import Loss, as_loss_fn
from trainwright.errors import UsageError, text_of
from trainwright.plan.trace.blueprint import fake_copy
from trainwright.plan.trace.fake_tensors import UNTRACEABLE, fake_batch, fake_tensors

REMEDY = "pass ready batches as a function, lambda: batches, and samples as DataLoader(samples, batch_size=32)"
CPU = torch.device("cpu")


def ready_if_batches(data: object, model: nn.Module, loss: Callable[..., Any], argument: str) -> object:
    """Return a loader over the items of a list if they are ready batches; return any other data unchanged.

    Items look like batches if inputs and targets have the same number of rows. Samples may look so too, for example a
    sequence with one target vector per step. The list is therefore taken as batches only if just the last item is
    shorter, or if model and loss accept one item but not several stacked ones, or if they accept both and there is one
    target per row.

    Raises UsageError if both readings are possible, or neither.
    """
    if not isinstance(data, list | tuple) or (sizes := _rows(data)) is None:
        return data
    batches: DataLoader[Any] = DataLoader(data, batch_size=None)  # type: ignore[arg-type]
    if len(set(sizes[:-1])) == 1 and sizes[-1] < sizes[0]:
        return batches
    what = f"fit: {argument} is a {type(data).__name__} whose items have {sizes[0]} rows each"
    if len(set(sizes)) > 1:
        remedy = f"{REMEDY[:-1]}, collate_fn=tw.pad())"
        raise UsageError(
            f"{what.replace(' each', '')}, and others do not: they may be batches, or samples of different lengths",
            remedy=remedy,
        )
    one, several = _rejection_of(data[:1], model, loss), _rejection_of([data[0], data[-1]], model, loss)
    if one and several:
        raise UsageError(f"{what}: model and loss take neither one item nor several stacked: {one}", remedy=REMEDY)
    if one == "" and (several or _parts(data[0])[1].ndim == 1):  # a target for each row
        return batches
    if one or _parts(data[0])[0].ndim > 2:  # for example images
        return data
    raise UsageError(f"{what}: each may be a ready batch or a sample", remedy=REMEDY)


def _parts(item: object) -> list[Any]:
    """Return the tensors of an item; empty if it contains anything else."""
    parts = [*item.values()] if isinstance(item, Mapping) else [*item] if isinstance(item, tuple | list) else []
    return parts if all(isinstance(part, Tensor | np.ndarray) for part in parts) else []


def _rows(items: Sequence[object]) -> list[int] | None:
    """Return the number of rows of each item; None if the items do not look like batches of inputs and targets."""
    found = []
    for item in items:
        parts = _parts(item)
        if len(parts) < 2 or parts[0].ndim < 2 or any(part.ndim < 1 or len(part) != len(parts[0]) for part in parts):
            return None
        found.append(len(parts[0]))
    return found or None


def _rejection_of(items: Sequence[object], model: nn.Module, loss: Callable[..., Any]) -> str | None:
    """Return the error of model and loss for one item, or for several stacked; "" if they accept it.

    Runs on fake tensors. Returns None if that is not possible, because model or loss need values or cannot be copied.
    """
    converted = [default_convert(item) for item in items]  # type: ignore[no-untyped-call]
    batch = converted[0] if len(items) == 1 else default_collate(converted)
    with fake_tensors():
        try:
            judge = fake_copy(loss, CPU) if isinstance(loss, nn.Module) else loss
            copied = fake_copy(model, CPU)
        except Exception:
            return None
        try:
            found = as_loss_fn(judge)(copied, fake_batch(batch, CPU))
        except Exception as error:
            is_fake = isinstance(error, UNTRACEABLE) or "Fake" in str(error)
            return None if is_fake else text_of(error, lines=1)
    total = found.total if isinstance(found, Loss) else found
    return "" if isinstance(total, Tensor) and total.dim() == 0 else "the loss is not a scalar"
