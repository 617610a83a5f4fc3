"""Counts the labels in the batches, and compares them with batches drawn at random."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from trainwright.doctor.measure.datasets import length_of, peek
from trainwright.doctor.measure.epochs import Epoch, PendingBatch
from trainwright.recorder.program import Call, Operation, RecordedStep, constants_of

LABELLED = 64
"""Maximum number of batches whose labels are counted."""
PEEKED = 64
"""Number of samples that are read from a dataset to estimate the frequency of each label."""
DRAWS = 16


class LabelCounts:
    """Counts of each label value: in each batch, and in samples from all over the dataset.

    The labels are the column of a batch that the loss reads as its target.
    """

    def __init__(self) -> None:
        self._column: int | None = None
        self._batches: list[Counter[float]] = []
        self._everywhere: Counter[float] | None = None

    def wants(self, num_steps: int) -> bool:
        """Returns True if, after ``num_steps`` steps, the tensors of the next batch are needed."""
        return (self._column is None or len(self._batches) < LABELLED) and num_steps < 4 * LABELLED

    def add(self, step: RecordedStep, batches: Sequence[PendingBatch], num_steps: int) -> None:
        """Counts the labels in the batches that ``step``, the ``num_steps``-th, trained on."""
        with_leaves = [each for each in batches if each.leaves and not each.evaluating]
        if with_leaves and self._column is None and num_steps <= 4:
            self._column = _column_of_labels(step, with_leaves[-1])
        if self._column is not None and len(self._batches) < LABELLED:
            for each in with_leaves:
                if len(each.leaves) > self._column:
                    values = each.leaves[self._column].flatten()
                    self._batches.append(Counter(values.tolist()))

    def sample_dataset(self, epoch: Epoch | None) -> None:
        """Reads labels from all over the dataset, once, if epochs do not shuffle it and few labels occur in a batch."""
        if self._everywhere is not None or epoch is None or not epoch.ascending or not self._batches:
            return
        if sum(_entropy(each) for each in self._batches) > 1.5 * len(self._batches):
            return
        self._everywhere = Counter()
        dataset, column = epoch.loader.dataset, self._column
        size = length_of(dataset) or 0
        positions = [37 * i % PEEKED * size // PEEKED for i in range(PEEKED)] if size > PEEKED else []
        for leaves in peek(dataset, positions) if positions else []:
            if column is not None and len(leaves) > column and leaves[column].numel() == 1:
                self._everywhere[leaves[column].item()] += 1

    @property
    def entropies(self) -> tuple[float, ...]:
        """The entropy of the labels of each batch, in nats."""
        return tuple(map(_entropy, self._batches))

    def mixed(self) -> tuple[float, ...]:
        """Returns the lowest and the mean entropy over DRAWS random draws; () if too few labels are known.

        A draw replaces the labels of each batch by random ones. Its entropy is the mean over these batches.
        """
        known = self._everywhere or (sum(self._batches, Counter()) if len(self._batches) >= 4 else None)
        if not known:
            return ()
        shares = torch.tensor([*known.values()], dtype=torch.float64, device="cpu") / known.total()
        generator = torch.Generator().manual_seed(0)
        drawn = [_drawn_entropies(shares, each.total(), generator) for each in self._batches[:16] if each]
        means = torch.stack(drawn).mean(0)
        return float(means.min()), float(means.mean())


def _column_of_labels(step: RecordedStep, batch: PendingBatch) -> int | None:
    """Returns the column of a batch that the loss reads as its target. Sample ids and features are excluded."""
    targets = [t.flatten() for t in _targets(step)]
    ids = list(batch.ids) if isinstance(batch.ids, list | tuple) else []
    for column, leaf in enumerate(batch.leaves):
        flat = leaf.flatten()
        if leaf.ndim == 0 or len(flat) != len(leaf) or flat.tolist() == ids:
            continue
        if any(t.shape == flat.shape and torch.equal(t.cpu().double(), flat.cpu().double()) for t in targets):
            return column
    return None


def _targets(step: RecordedStep) -> list[Tensor]:
    """Returns the tensors from outside of the program that operations of the loss, or calls of models, read."""
    found = []
    for each in step.program:
        if isinstance(each, Operation | Call):
            found += [c.tensor for c in constants_of((each.args, each.kwargs)) if not c.tensor.requires_grad]
    return found


def _entropy(counts: Counter[float]) -> float:
    """Returns the entropy in nats."""
    total = sum(counts.values())
    return max(0.0, -sum(n / total * math.log(n / total) for n in counts.values())) if total else 0.0


def _drawn_entropies(shares: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """Returns the entropies (DRAWS,) of batches of ``size`` labels, drawn by their frequencies."""
    drawn = torch.multinomial(shares, DRAWS * size, replacement=True, generator=generator).view(DRAWS, size)
    counts = shares.new_zeros(DRAWS, len(shares)).scatter_add_(1, drawn, shares.new_ones(DRAWS, size))
    entropies: Tensor = torch.special.entr(counts / size).sum(1)
    return entropies
