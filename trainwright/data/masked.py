"""Masked language modelling: texts with some characters hidden. Shapes: T block_size, V vocabulary."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor
from torch.utils.data import Dataset

from trainwright.data.text import CharText, Split, python_topics
from trainwright.errors import UsageError

IGNORE = -100
"""Target of a position that is not predicted."""
MASKED_FRACTION, REPLACED_FRACTION = 0.8, 0.1
"""Fractions of the chosen characters that are masked, and replaced by a random one; the rest stays (BERT, 3.1).
"""


class MaskedText(Dataset[tuple[Tensor, Tensor]]):
    """(ids_T, target_T) from windows of a text; the target of a character that was not chosen is -100.

    The choice is drawn from torch's global CPU generator when the item is read, which the reader seeds, so it changes
    from epoch to epoch. In a validation set it is a function of the index. The id of the mask is the last one.
    """

    def __init__(self, text: CharText, *, mask_share: float = 0.15) -> None:
        if not 0 < mask_share < 1:
            raise UsageError(f"mask_share must be in (0, 1); got {mask_share}", remedy="try mask_share=0.15")
        self.text, self.mask_share = text, mask_share
        self.vocabulary = (*text.vocabulary, "\N{REPLACEMENT CHARACTER}")
        self.classes, self.mask = text.classes + 1, text.classes
        self.sample_tokens = text.sample_tokens
        self.deterministic = text.split == "val"

    def __len__(self) -> int:
        return len(self.text)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        ids_T, _ = self.text[index]
        generator = torch.Generator("cpu").manual_seed(index % len(self)) if self.deterministic else None
        draw_2T = torch.rand(2, len(ids_T), generator=generator, device="cpu")
        other_T = torch.randint(self.mask, ids_T.shape, generator=generator, device="cpu")
        chosen_T, how_T = draw_2T[0] < self.mask_share, draw_2T[1]
        seen_T = torch.where(
            how_T < MASKED_FRACTION, self.mask, torch.where(how_T < MASKED_FRACTION + REPLACED_FRACTION, other_T, ids_T)
        )
        return torch.where(chosen_T, seen_T, ids_T), torch.where(chosen_T, ids_T, IGNORE)

    def content_sha256(self) -> str:
        """Return a hash of the text and of the fraction that is chosen."""
        return hashlib.sha256(f"{self.text.content_sha256()} {self.mask_share}".encode()).hexdigest()


def masked_topics(
    split: Split = "train", *, block_size: int = 64, val_share: float = 0.1, stride: int = 0, mask_share: float = 0.15
) -> MaskedText:
    """The help texts that ship with Python, of which some characters are hidden, for masked language modelling.

    Of the chosen characters 80 % are masked, 10 % replaced by a random one, and 10 % stay as they are. They are drawn
    again in each epoch; in ``val`` they are always the same.

    Args:
        split: ``train``, or ``val``, which is the end of the text.
        block_size: Characters of a sample.
        val_share: Fraction of the text that is held out for ``val``.
        stride: Characters from the beginning of a training sample to that of the next; 0: ``block_size``.
        mask_share: Fraction of the characters that are predicted.
    """
    text = python_topics(split, block_size=block_size, val_share=val_share, stride=stride)
    return MaskedText(text, mask_share=mask_share)
