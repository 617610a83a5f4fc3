"""Audits before the first step which labels of the data carry loss."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from trainwright.assembly.assemble import Parts
from trainwright.checkpoint.cursor import StepBatch
from trainwright.checkpoint.rng import preserved_rng
from trainwright.data.fork import first_samples
from trainwright.data.padding import IGNORE
from trainwright.data.unwrap import Unwrapped
from trainwright.engine.loss import ModelLoss
from trainwright.engine.losses import cross_entropy, out_of_range
from trainwright.errors import DataError
from trainwright.finetune.audit import ModelLimits, audit_batches, audit_set, limits_of, special_ids, tokenized_set_of
from trainwright.plan.make import Plan
from trainwright.runs.supervision import Supervision

MAX_SAMPLES_READ = 64
"""Samples that are read before a set is refused because its first batch carries no loss."""


def audit_parts(
    parts: Parts, first: StepBatch | None = None, left_out: Collection[int] = ()
) -> tuple[Supervision, ...]:
    """Return the audits of the data sets: of a tokenized set in full, of any other training set by its first batch.

    If there is no ``first`` batch or it is refused, some samples are read, but none at a position in ``left_out``.
    """
    limits = limits_of(parts.model)
    train = tokenized_set_of(parts.train.dataset)
    found = _audit_of_batches(parts, limits, first, left_out)
    if train is not None:  # its batches matter only if their collate function masks everything
        found = [audit_set(train, limits=limits), *(each for each in found if each.refusal is not None)]
    val = tokenized_set_of(parts.val.dataset) if parts.val is not None else None
    return (*found, *([audit_set(val, "val", train, limits)] if val is not None else []))


def require_supervised(audits: Sequence[Supervision]) -> None:
    """Raise DataError for a training set in which nothing carries loss."""
    for audit in audits:
        if audit.refusal is not None:
            raise DataError(audit.refusal.message, remedy=audit.refusal.remedy)


def require_labels_in_range(parts: Parts, plan: Plan, outputs: int | None, left_out: Collection[int]) -> None:
    """Raise DataError if labels in memory are no class of a cross-entropy, which would end the run in an epoch.

    The labels of samples in ``left_out`` may be any.
    """
    loss, data = parts.loss, parts.train.dataset
    is_known = loss is cross_entropy or (isinstance(loss, nn.CrossEntropyLoss) and loss.ignore_index == IGNORE)
    has_epoch = plan.extent.steps is None or plan.extent.steps >= (plan.steps_per_epoch or math.inf)
    if not (is_known and has_epoch and outputs and type(data) is TensorDataset and parts.train.order is None):
        return
    labels = data.tensors[-1]
    if len(data.tensors) < 2 or labels.dim() != 1 or labels.dtype != torch.int64:
        return
    wrong = (((labels < 0) & (labels != IGNORE)) | (labels >= outputs)).nonzero().flatten().tolist()
    if ids := [index for index in wrong if index not in left_out]:
        error = out_of_range(labels[ids], outputs, len(ids))
        few = f"{', '.join(map(str, ids[:8]))}{', ...' if len(ids) > 8 else ''}"
        raise DataError(f"{error.message} (samples {few})", sample_ids=ids, remedy=error.remedy)


def _audit_of_batches(
    parts: Parts, limits: ModelLimits, first: StepBatch | None, left_out: Collection[int]
) -> list[Supervision]:
    batches = [(micro.data, micro.ids.tolist()) for micro in first.micro] if first is not None else []
    found = _audited(parts, limits, batches, left_out)
    if first is None or (found is not None and found.refusal is not None):
        with preserved_rng():
            found = _audited(parts, limits, chain(batches, _read_batches(parts.train, left_out)), left_out)
    return [] if found is None else [found]


def _audited(parts: Parts, limits: ModelLimits, batches: Any, left_out: Collection[int]) -> Supervision | None:
    ignore_index = getattr(parts.loss, "ignore_index", IGNORE)
    ignore_index = ignore_index if isinstance(ignore_index, int) else IGNORE
    return audit_batches(
        batches,
        special=special_ids(parts.train.collate, parts.train.origin, parts.model),
        limits=limits,
        collate=parts.train.collate,
        ignore_index=ignore_index,
        model_shifts=isinstance(parts.loss, ModelLoss) and hasattr(parts.model, "config"),
        labelled_before=lambda: _is_labelled(parts.train, left_out, ignore_index),
        size=parts.train.samples,
    )


def _is_labelled(data: Unwrapped, left_out: Collection[int], ignore_index: int) -> bool | None:
    """Return True if labels of its samples carry loss, False if all are ignored; None if its samples have no labels."""
    found = None
    with preserved_rng():
        for sample in _read_samples(data, left_out):
            labels = sample.get("labels") if isinstance(sample, Mapping) else None
            if isinstance(sample, tuple | list) and len(sample) == 2:
                labels = sample[1]
            try:
                found = found or bool((torch.as_tensor(labels) != ignore_index).any())
            except (TypeError, ValueError, RuntimeError):  # no labels, or not yet as ids
                continue
    return found


def _read_samples(data: Unwrapped, left_out: Collection[int]) -> Iterator[Any]:
    return first_samples(data.dataset, MAX_SAMPLES_READ, left_out) if hasattr(data.dataset, "__getitem__") else iter(())


def _read_batches(data: Unwrapped, left_out: Collection[int]) -> Iterator[tuple[object, list[int]]]:
    """Yield batches of one sample each, as the collate function makes them."""
    for sample in _read_samples(data, left_out):
        try:
            yield data.collate([sample]), []
        except Exception:  # training reports the error when it reads this sample
            continue
