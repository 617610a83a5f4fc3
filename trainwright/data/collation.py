"""Collates samples to a batch; if that fails, finds the samples at fault."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from torch import Tensor

Sample: TypeAlias = Any
"""Result of a dataset for one index, of any type."""
Batch: TypeAlias = Any
"""Result of a collate function: a tensor, or nested containers of tensors."""
Collate = Callable[[list[Sample]], Batch]


def samples_at_fault(samples: Sequence[Sample], collate: Collate) -> dict[int, str]:
    """Return, by index, a description of the samples without which the others can be collated.

    These are samples that cannot be collated even alone, else those of another form than most. Empty if no sample can
    be blamed: the others fail without them too, or no form has a majority.
    """
    alone = [at for at, sample in enumerate(samples) if not _collates([sample], collate)]
    found = {at: f"it is {_form(samples[at])}" for at in alone} or _of_another_form(samples)
    rest = [sample for at, sample in enumerate(samples) if at not in found]
    if not rest:  # each fails alone: the collate function is at fault, unless there was nothing to collate
        return {at: why for at, why in found.items() if samples[at] is None}
    return found if _collates(rest, collate) else {}


def _collates(samples: list[Sample], collate: Collate) -> bool:
    try:
        collate(samples)
    except Exception:
        return False
    return True


def _of_another_form(samples: Sequence[Sample]) -> dict[int, str]:
    forms = [_form(sample) for sample in samples]
    (usual, number), *others = Counter(forms).most_common()
    if not others or 2 * number <= len(forms):
        return {}
    return {at: f"it is {form}, the others are {usual}" for at, form in enumerate(forms) if form != usual}


def _form(value: object) -> str:
    """Return types and shapes of a sample, as text."""
    if isinstance(value, Tensor | np.ndarray):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_form(each)}" for key, each in value.items()) + "}"
    if isinstance(value, tuple | list):
        return "(" + ", ".join(_form(each) for each in value) + ")"
    return "None" if value is None else type(value).__name__
