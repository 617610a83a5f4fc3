"""The built-in losses. Each returns a sum and its weight, and names the rows that are invalid."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainwright.engine.chunked import IGNORE, chunked_cross_entropy, logits_bytes
from trainwright.engine.head import Head, head_of, hf_head_of, hidden_of_hf
from trainwright.engine.loss import Batch, Loss
from trainwright.engine.token_batch import embedding_noise, token_batch
from trainwright.engine.user_log import log
from trainwright.errors import DataError, UsageError

Chunked = Literal["auto"] | bool


def cross_entropy(model: nn.Module, batch: Batch) -> Loss:
    """Classification of a batch ``(input, label_B)`` by logits_BC: sum over labels, with ``accuracy``.

    Dense labels, such as the mask of a segmentation, have the shape of the logits without dimension 1: label_BHW and
    logits_BCHW. Labels of -100 are not counted.

    Raises:
        UsageError: The shapes do not match.
        DataError: A label is out of range; names the rows. On the CPU only: on a GPU such a label stops the device
            first.
    """
    x, label_B = _pair(batch, "cross_entropy")
    logits_BC = _logits_of(model(x))
    _require_labels(logits_BC, label_B)
    loss = _sum_of_cross_entropy(logits_BC, label_B, rows=label_B.shape[0])
    correct = (logits_BC.detach().argmax(1) == label_B).sum()
    return Loss(loss, (label_B != IGNORE).sum(), {"accuracy": correct}, logits_BC, label_B)


def _pair(batch: Batch, loss: str) -> tuple[Any, Any]:
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    keys = f" with {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else ""
    raise UsageError(
        f"{loss} needs batches of (input, target); this batch is a {type(batch).__name__}{keys}",
        remedy="for a model that returns its loss itself leave the loss out (of_model in a recipe), or write the loss "
        "as `def loss(model, batch): ...`",
    )


def _logits_of(output: Any) -> Tensor:
    """Return a tensor, or the logits of an output of ``transformers``."""
    logits: Tensor = output if isinstance(output, Tensor) else getattr(output, "logits", output)
    return logits


def _require_labels(logits_BC: Tensor, label_B: Tensor) -> None:
    if logits_BC.ndim > 1 and label_B.shape == logits_BC.shape[:1] + logits_BC.shape[2:]:
        return
    if logits_BC.ndim < 2:
        rule, remedy = "logits must have the shape (B, C)", "let the model return one logit for each class"
    else:
        needs = tuple(logits_BC.shape[:1] + logits_BC.shape[2:])
        rule, remedy = f"labels must have the shape {needs}", "give class numbers, one for each sample or place"
        if label_B.shape == logits_BC.shape:
            remedy = "for one-hot labels or probabilities give loss=nn.CrossEntropyLoss()"
        elif label_B.shape == (len(logits_BC), 1, *logits_BC.shape[2:]):
            remedy = "leave out their dimension of size 1: label.squeeze(1)"
        elif logits_BC.ndim == 3 and label_B.shape == logits_BC.shape[:2]:
            remedy = "put the classes into dimension 1, logits.transpose(1, 2); for tokens, loss: language_model"
    raise UsageError(
        f"cross_entropy: the logits have shape {tuple(logits_BC.shape)} and the labels {tuple(label_B.shape)}; {rule}",
        remedy=remedy,
    )


def language_model(
    model: nn.Module, batch: Batch, *, chunked: Chunked = "auto", max_logits_bytes: int | None = None
) -> Loss:
    """Next-token prediction on a batch ``(ids_BT, target_BT)`` by logits_BTV: sum over targets that are not -100.

    With ``chunked=True`` the logits are computed in chunks, never all at once; the model must support it (see
    ``engine.head``). ``"auto"`` computes in chunks if the model supports it and the logits would take more than
    ``max_logits_bytes``; None: never in chunks. The plan of a run sets ``max_logits_bytes``. In training, the numbers
    that ``model.training_metrics()`` returns are logged, if the model has that method.

    Raises:
        UsageError: ``chunked`` is True and the model does not support it.
    """
    ids_BT, target_BT = _pair(batch, "language_model")
    if head := _head_for(chunked, max_logits_bytes, target_BT.numel(), head_of, model):
        loss = _chunked_loss(model(ids_BT, hidden=True), head, target_BT)
    else:
        loss = _token_loss(_logits_of(model(ids_BT)), target_BT)
    if model.training and (training_metrics := getattr(model, "training_metrics", None)):
        log(**training_metrics())
    return loss


def mse(model: nn.Module, batch: Batch) -> Loss:
    """Regression on a batch ``(input, target)``: sum of squared errors over the elements of the target.

    Raises:
        UsageError: Output and target differ in shape, so that broadcasting would compare each sample with all others.
    """
    x, target = _pair(batch, "mse")
    output = model(x)
    if output.shape != target.shape:
        raise UsageError(
            f"mse: the output has shape {tuple(output.shape)} and the target {tuple(target.shape)}; "
            "broadcasting them would compare each sample with all others",
            remedy="give both the same shape, for instance with output.squeeze(-1)",
        )
    total = F.mse_loss(output.float(), target.float(), reduction="sum")
    return Loss(total, float(target.numel()), outputs=output, targets=target)


def hf_causal_lm(
    model: nn.Module,
    batch: Batch,
    *,
    neftune_alpha: float = 0.0,
    chunked: Chunked = "auto",
    max_logits_bytes: int | None = None,
) -> Loss:
    """Next-token prediction with a causal model of ``transformers``: sum over labels that are not -100.

    A batch is a mapping of ``input_ids`` and unshifted ``labels``, padded, packed or padding-free (see
    ``engine.token_batch``), or a pair ``(ids_BT, target_BT)`` with a shifted target. ``chunked`` and
    ``max_logits_bytes`` are as in ``language_model``. Chunked computation calls ``model.base_model``.

    Args:
        neftune_alpha: Size of the noise that is added to the input embeddings in training (NEFTune); 0: none.

    Raises:
        UsageError: The batch has no ``input_ids`` or no ``labels``.
        DataError: A label is out of range; names the rows. On the CPU only.
    """
    inputs, target_BT, by_row_BT, _ = token_batch(model, batch)
    head = _head_for(chunked, max_logits_bytes, target_BT.numel(), hf_head_of, model)
    with embedding_noise(model, inputs, neftune_alpha):
        output = model(**inputs).logits if head is None else hidden_of_hf(model, inputs)
    try:
        return _token_loss(output, target_BT) if head is None else _chunked_loss(output, head, target_BT)
    except DataError:
        if target_BT is by_row_BT:
            raise
        classes = output.shape[-1] if head is None else len(head.weight)
        raise out_of_range(by_row_BT.flatten(), classes, len(by_row_BT)) from None


def _head_for(
    chunked: Chunked, most: int | None, tokens: int, find: Callable[[nn.Module], Head | None], model: nn.Module
) -> Head | None:
    """Return the head for computing logits in chunks; None if they are computed all at once."""
    if chunked is False or (chunked == "auto" and most is None):
        return None
    head = find(model)
    if chunked is True and head is None:
        raise UsageError(
            f"the loss cannot be computed in chunks: {type(model).__name__} hides the input of its last layer, "
            "or that layer is more than a linear one",
            remedy="set loss.chunked: auto, or give the model's forward a parameter `hidden` and the model a `head`",
        )
    if head is not None and chunked == "auto" and most is not None and logits_bytes(tokens, len(head.weight)) <= most:
        return None
    return head


def _token_loss(logits_BTV: Tensor, target_BT: Tensor) -> Loss:
    total = _sum_of_cross_entropy(logits_BTV.flatten(0, -2), target_BT.flatten(), rows=target_BT.shape[0])
    return Loss(total, (target_BT != IGNORE).sum(), outputs=logits_BTV, targets=target_BT)


def _chunked_loss(hidden_BTD: Tensor, head: Head, target_BT: Tensor) -> Loss:
    weight_VD, target_N = head.weight, target_BT.flatten()
    try:
        total = chunked_cross_entropy(
            hidden_BTD.flatten(0, -2), weight_VD, target_N, bias_V=head.bias, softcap=head.softcap
        )
    except IndexError:
        raise out_of_range(target_N, len(weight_VD), target_BT.shape[0]) from None
    return Loss(total, (target_BT != IGNORE).sum())


def _sum_of_cross_entropy(logits_NC: Tensor, target_N: Tensor, *, rows: int) -> Tensor:
    """Return the sum in float32. ``rows`` is the number of samples, each with equally many labels."""
    try:
        return F.cross_entropy(logits_NC.float(), target_N, reduction="sum", ignore_index=IGNORE)
    except IndexError:
        raise out_of_range(target_N.flatten(), logits_NC.shape[1], rows) from None


def out_of_range(target_N: Tensor, classes: int, rows: int) -> DataError:
    """Return the error for labels that are no class. ``rows`` is the number of samples, each with equally many."""
    wrong = ((target_N < 0) & (target_N != IGNORE)) | (target_N >= classes)
    entries = wrong.nonzero().flatten()
    ids = torch.unique(entries // (len(target_N) // rows)).tolist()
    return DataError(
        f"label {int(target_N[entries[0]])} is out of range: the model has {classes} outputs, "
        f"so labels must be 0..{classes - 1} or {IGNORE}",
        sample_ids=ids,
        remedy="number the classes from 0, or give the model more outputs",
    )
