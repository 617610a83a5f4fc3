"""Freezing a model before training, and counting its parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from trainwright.assembly.assemble import count_parameters, freeze
from trainwright.errors import UsageError
from trainwright.models.gpt import GPT, gpt
from trainwright.models.mlp import mlp

VOCAB, LENGTH = 17, 12


def our_gpt(**options: Any) -> GPT:
    torch.manual_seed(0)
    return gpt(
        **{"vocab_size": VOCAB, "block_size": LENGTH, "layers": 3, "heads": 2, "d_model": 16, "dropout": 0.2, **options}
    )


def trainable(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_freeze_stops_what_the_globs_match_and_nothing_else() -> None:
    model = our_gpt(tied=False)
    names = {name for name, _ in model.named_parameters()}
    frozen = freeze(model, ["blocks.[01].*", "tokens.weight", "blocks.0.mlp.*"])
    expected = {name for name in names if name.startswith(("blocks.0.", "blocks.1.", "tokens."))}
    assert sorted(frozen) == sorted(expected)  # each once, though two patterns match some
    assert trainable(model) == names - expected
    F.cross_entropy(model(torch.zeros(1, 4, dtype=torch.long)).mT, torch.zeros(1, 4, dtype=torch.long)).backward()
    assert all((parameter.grad is None) == (name in expected) for name, parameter in model.named_parameters())


def test_freeze_knows_both_names_of_a_tied_weight() -> None:
    model = our_gpt(tied=True)
    freeze(model, ["head.weight"])
    assert not model.tokens.weight.requires_grad
    assert count_parameters(model)[0] - count_parameters(model)[1] == VOCAB * 16


def test_a_pattern_that_matches_nothing_changes_nothing_and_names_the_nearest() -> None:
    model = mlp(sizes=[4, 8, 2])
    before = trainable(model)
    with pytest.raises(UsageError, match=r"no parameter is named like 'layers\.linear1\.weight'") as caught:
        freeze(model, ["layers.linear0.*", "layers.linear1.weight"])
    assert "layers.linear0.weight" in caught.value.remedy
    assert trainable(model) == before
    with pytest.raises(UsageError, match="no parameter") as caught:
        freeze(model, ["@@@@"])
    assert "layers.linear0.weight" in caught.value.remedy


def test_nothing_left_to_train() -> None:
    with pytest.raises(UsageError, match="every parameter is frozen"):
        freeze(mlp(sizes=[4, 8, 2]), ["*"])


def test_count_parameters_counts_tied_weights_once() -> None:
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
    model[1].weight = model[0].weight
    model.add_module("frozen", nn.Linear(2, 2).requires_grad_(False))
    assert count_parameters(model) == (15 + 6, 15)
