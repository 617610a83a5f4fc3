"""The losses in the box: each a sum and its weight, and each names the rows that cannot be right."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainwright.engine.loss import Loss
from trainwright.errors import DataError, UsageError

IGNORE = -100


def cross_entropy(model: nn.Module, batch: Any) -> Loss:
    """Classification: batch ``(input, label_B)``, logits_BC; per sample, with ``accuracy``.

    Labels of -100 are not counted. Raises DataError naming the rows whose label is out of range (on the CPU;
    on a GPU such a label stops the device before Python can look).
    """
    x, label_B = batch
    logits_BC = model(x)
    loss = _sum_of_cross_entropy(logits_BC, label_B, rows=label_B.shape[0])
    correct = (logits_BC.detach().argmax(-1) == label_B).sum()
    return Loss(loss, (label_B != IGNORE).sum(), {"accuracy": correct})


def language_model(model: nn.Module, batch: Any) -> Loss:
    """Next-token prediction: batch ``(ids_BT, target_BT)``, logits_BTV; per token that is not -100."""
    ids_BT, target_BT = batch
    logits_BTV = model(ids_BT)
    total = _sum_of_cross_entropy(logits_BTV.flatten(0, -2), target_BT.flatten(), rows=target_BT.shape[0])
    return Loss(total, (target_BT != IGNORE).sum())


def mse(model: nn.Module, batch: Any) -> Loss:
    """Regression: batch ``(input, target)``; per element of the target.

    Raises UsageError when output and target differ in shape, where broadcasting would compare every sample
    with every other one.
    """
    x, target = batch
    output = model(x)
    if output.shape != target.shape:
        raise UsageError(
            f"mse: the output has shape {tuple(output.shape)} and the target {tuple(target.shape)}; "
            "broadcasting them would compare each sample with all others",
            remedy="give both the same shape, for instance with output.squeeze(-1)",
        )
    return Loss(F.mse_loss(output.float(), target.float(), reduction="sum"), float(target.numel()))


def hf_causal_lm(model: nn.Module, batch: Any) -> Loss:
    """A causal model of ``transformers`` on batches ``(ids_BT, target_BT)`` whose target is shifted."""
    ids_BT, target_BT = batch
    logits_BTV = model(input_ids=ids_BT).logits
    total = _sum_of_cross_entropy(logits_BTV.flatten(0, -2), target_BT.flatten(), rows=target_BT.shape[0])
    return Loss(total, (target_BT != IGNORE).sum())


def _sum_of_cross_entropy(logits_NC: Tensor, target_N: Tensor, *, rows: int) -> Tensor:
    """Summed in float32. ``rows`` is the number of samples that the N entries belong to, in equal parts."""
    try:
        return F.cross_entropy(logits_NC.float(), target_N, reduction="sum", ignore_index=IGNORE)
    except IndexError:
        classes = logits_NC.shape[-1]
        wrong = ((target_N < 0) & (target_N != IGNORE)) | (target_N >= classes)
        entries = wrong.nonzero().flatten()
        ids = torch.unique(entries // (len(target_N) // rows)).tolist()
        raise DataError(
            f"label {int(target_N[entries[0]])} is out of range: the model has {classes} outputs, "
            f"so labels must be 0..{classes - 1} or {IGNORE}",
            sample_ids=ids,
            remedy="number the classes from 0, or give the model more outputs",
        ) from None
