"""The mask of a part of a sequence: what it hides, and that it is made once."""

from __future__ import annotations

import copy

import torch

from trainwright.models.gpt import CausalMask


def test_queries_see_all_before_them_and_themselves_and_the_mask_is_made_once() -> None:
    masks, query, key = CausalMask(), torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 5, 4)
    with torch.inference_mode():
        evaluated = masks.of(query, key)
    mask = masks.of(query, key)
    assert torch.equal(mask.exp(), torch.tensor([[1.0, 1, 1, 1, 0], [1, 1, 1, 1, 1]])) and not mask.is_inference()
    assert evaluated.is_inference() and masks.of(query, key) is mask
    assert masks.of(query, key[:, :, 1:]).shape == (2, 4) and copy.deepcopy(masks).of(query, key) is not mask
    with torch.autocast("cpu", torch.bfloat16):
        assert masks.of(query, key).dtype == torch.bfloat16
