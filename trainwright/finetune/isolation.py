"""Tests that the samples of a packed or padding-free batch do not see each other: each has the same logits alone.

Shapes: L tokens of a sample, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainwright.checkpoint.shards import is_divided, is_sharded
from trainwright.data.padding import IDS, IGNORE, LABELS, POSITIONS, ROW_LENGTHS
from trainwright.engine.evaluate import evaluating
from trainwright.engine.token_batch import TokenBatch, takes, token_batch
from trainwright.errors import UsageError

MAX_TOKENS_AT_START = 4096
"""Number of tokens of the first batch that are compared at the start of a run."""
TOLERANCES = {torch.float32: 1e-4, torch.float64: 1e-9}
"""Largest difference of logits that is rounding, relative to the largest logit, by dtype of the logits."""
TOLERANCE_ELSEWHERE = 5e-2
REMEDY = "set data.packing: none, or train a model whose attention follows position_ids, such as Llama or Qwen"


@dataclass(frozen=True)
class Isolation:
    """The comparison of the samples of a batch with the same samples alone.

    Attributes:
        samples: Number of samples that were compared.
        rows: Number of rows that they share.
        difference: The largest difference of a logit, relative to the largest logit.
        loss_difference: The largest difference of the summed loss of a sample, relative to the loss.
        tolerance: The largest difference that is rounding.
        reason: Why the logits differ; "" if they are equal.
    """

    samples: int = 0
    rows: int = 0
    difference: float = 0.0
    loss_difference: float = 0.0
    tolerance: float = 0.0
    reason: str = ""

    @property
    def exit_code(self) -> int:
        """0 if each sample is isolated, else 1."""
        return 1 if self.reason else 0

    def lines(self) -> list[str]:
        """Return the result as text."""
        if not self.samples:
            return ["nothing to compare: no two samples of the first batch share a row"]
        what = f"{self.samples} samples in {self.rows} rows, compared with each sample alone"
        figures = f"largest difference of logits {self.difference:.2g}, of losses {self.loss_difference:.2g}"
        verdict = f"NOT equal: {self.reason}" if self.reason else f"equal within {self.tolerance:.0e}"
        return [what, figures, *([verdict, f"fix: {REMEDY}"] if self.reason else [verdict])]

    def to_json(self) -> dict[str, object]:
        """Return the result as JSON values."""
        return {
            "equal": not self.reason,
            "samples": self.samples,
            "rows": self.rows,
            "difference": self.difference,
            "loss_difference": self.loss_difference,
            "tolerance": self.tolerance,
            "reason": self.reason,
        }


class _Sample(NamedTuple):
    """A sample inside the row that the model is called with."""

    ids: Tensor
    labels: Tensor
    row: int
    start: int

    @property
    def where(self) -> slice:
        return slice(self.start, self.start + len(self.ids))


def compare_alone(model: nn.Module, data: object, *, max_tokens: int | None = None) -> Isolation:
    """Compare the samples that share a row in a batch with the same samples alone, in evaluation mode.

    ``max_tokens`` limits the number of tokens of the rows; at least one row is compared. Each sample is a separate
    call of the model. Batches without packed rows have nothing to compare.
    """
    if not isinstance(data, Mapping) or not (POSITIONS in data or ROW_LENGTHS in data):
        return Isolation()
    batch = _with_shared_rows(data, max_tokens)
    if batch is None:
        return Isolation()
    if not takes(model, POSITIONS) and not takes(model, "kwargs"):
        return Isolation(1, 1, float("inf"), reason=f"the forward of {type(model).__name__} takes no position_ids")
    with evaluating(model), torch.autocast(batch[IDS].device.type, enabled=False):
        return _compared(model, batch)


def require_isolated(model: nn.Module, data: object) -> Isolation:
    """Compare samples of the first batch of a run. Raises UsageError if they see each other.

    Ranks that divide the weights must pass the same batch.
    """
    found = compare_alone(model, data, max_tokens=MAX_TOKENS_AT_START)
    if found.reason:
        raise UsageError(
            f"samples that share a row are not separated: {found.reason} (largest difference of logits to the sample "
            f"alone {found.difference:.2g}, of rounding {found.tolerance:.0e})",
            remedy=REMEDY,
        )
    return found


def _compared(model: nn.Module, batch: Mapping[str, Any]) -> Isolation:
    called = token_batch(model, batch)
    together = _logits(model, called)
    found = Isolation(rows=len(batch[IDS]), tolerance=TOLERANCES.get(together.dtype, TOLERANCE_ELSEWHERE))
    for sample in _samples(batch, called):
        alone = token_batch(model, {IDS: sample.ids[None], LABELS: sample.labels[None]})
        alone_LV, packed_LV = _logits(model, alone)[0], together[sample.row, sample.where]
        difference = _relative(packed_LV, alone_LV)
        losses = [
            F.cross_entropy(logits_LV.float(), target_L, ignore_index=IGNORE, reduction="sum").item()
            for logits_LV, target_L in (
                (alone_LV, alone.target[0]),
                (packed_LV, called.target[sample.row, sample.where]),
            )
        ]
        found = replace(
            found,
            samples=found.samples + 1,
            difference=max(found.difference, difference),
            loss_difference=max(found.loss_difference, abs(losses[1] - losses[0]) / max(abs(losses[0]), 1e-6)),
        )
        if found.reason:
            continue
        if not difference <= found.tolerance:
            found = replace(found, reason=_reason(model, called, together, sample, found.tolerance))
        elif not torch.equal(alone.target[0], called.target[sample.row, sample.where]):
            found = replace(found, reason="a token is trained to predict the first token of the next sample")
    return found


def _logits(model: nn.Module, called: TokenBatch) -> Tensor:
    """Return the logits. Bypasses torch.compile, which would compile for each length, but not the hooks of FSDP."""
    has_hooks: bool = is_sharded(model)
    call: Callable[..., Any] = model if has_hooks else model.forward
    logits: Tensor = call(**called.inputs).logits
    return logits.full_tensor() if is_divided(logits) else logits


def _relative(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).abs().max() / expected.float().abs().max().clamp(min=1e-12))


def _reason(model: nn.Module, called: TokenBatch, together: Tensor, sample: _Sample, tolerance: float) -> str:
    """Return why a sample differs: the logits depend on other samples, or only on its place in the row."""
    ids = called.inputs[IDS]
    changed = (ids + 1) % together.shape[-1]
    changed[sample.row, sample.where] = ids[sample.row, sample.where]
    again = _logits(model, called._replace(inputs={**called.inputs, IDS: changed}))
    moved = _relative(again[sample.row, sample.where], together[sample.row, sample.where])
    name = type(model).__name__
    if moved > tolerance:
        attention = getattr(getattr(model, "config", None), "_attn_implementation", None)
        how = f" with attn_implementation: {attention}" if attention else ""
        return f"{name}{how} lets a sample see the tokens of other samples in its row"
    return f"{name} ignores position_ids: a sample depends on its place in the row"


def _with_shared_rows(data: Mapping[str, Any], max_tokens: int | None) -> dict[str, Any] | None:
    """Return the rows that have several samples, up to a number of tokens; None if there are none."""
    ids_BT = data[IDS]
    if ROW_LENGTHS in data:
        rows = [*range(len(ids_BT))]
    else:
        rows = [row for row, starts in enumerate((data[POSITIONS] == 0).sum(1).tolist()) if starts > 1]
    if max_tokens is not None:
        at_least = 2 if ROW_LENGTHS in data else 1
        rows = rows[: max(at_least, max_tokens // ids_BT.shape[1])]
    if not rows or (ROW_LENGTHS in data and len(rows) < 2):
        return None
    batch = {name: value[rows] for name, value in data.items() if isinstance(value, Tensor)}
    return batch | ({ROW_LENGTHS: [data[ROW_LENGTHS][row] for row in rows]} if ROW_LENGTHS in data else {})


def _samples(batch: Mapping[str, Any], called: TokenBatch) -> Iterator[_Sample]:
    """Yield the samples of a batch that have a target, with their place in the rows of the call."""
    for row, (ids_T, labels_T) in enumerate(zip(batch[IDS], batch[LABELS], strict=True)):
        if ROW_LENGTHS in batch:
            begins, ends = [0], [batch[ROW_LENGTHS][row]]
            number, start = called.places[row]
        else:
            begins = (batch[POSITIONS][row] == 0).nonzero().flatten().tolist()
            ends = [*begins[1:], len(ids_T)]
            number, start = divmod(row * len(ids_T), called.target.shape[1])
        for begin, end in zip(begins, ends, strict=True):
            sample = _Sample(ids_T[begin:end], labels_T[begin:end], number, start + begin)
            if bool((sample.labels != IGNORE).any()):
                yield sample
