"""What is done to a model before training: freezing, finding its blocks, activation checkpointing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainwright.build.model import checkpoint_blocks, count_parameters, find_blocks, freeze
from trainwright.errors import UsageError
from trainwright.models.gpt import GPT, gpt
from trainwright.models.hf import hf_model
from trainwright.models.mlp import mlp
from trainwright.models.resnet import resnet
from trainwright.state.codec import same_bits

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


class Repeated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.adapters = nn.ModuleList(nn.Linear(2, 2) for _ in range(9))
        self.layers = nn.ModuleList(nn.Bilinear(8, 8, 8) for _ in range(4))
        self.mixed = nn.Sequential(nn.Linear(400, 400), nn.ReLU())


def test_find_blocks() -> None:
    model = our_gpt()
    assert find_blocks(model) == list(model.blocks)
    repeated = Repeated()
    assert find_blocks(repeated) == list(repeated.layers)  # the most parameters, all of one class
    assert len(find_blocks(resnet())) > 1
    with pytest.raises(UsageError, match="no list of equal blocks") as caught:
        find_blocks(mlp(sizes=[4, 8, 2]))
    assert "`blocks`" in caught.value.remedy


def grads(model: nn.Module, forward: Callable[[nn.Module, Tensor], Tensor], autocast: bool) -> list[Tensor]:
    ids = torch.randint(VOCAB, (4, LENGTH), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(2)  # the dropout masks
    for _ in range(2):  # accumulates: the second forward must not reuse the first's masks
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = F.cross_entropy(forward(model, ids).flatten(0, 1).float(), ids.flatten())
        loss.backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def saved_bytes(run: Callable[[], object]) -> int:
    total = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal total
        total += tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return total


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, Tensor], Tensor]]] = {
    "gpt": (our_gpt, lambda model, ids: model(ids)),
    "gpt, modern": (
        lambda: our_gpt(norm="rms", positions="rope", activation="swiglu", qk_norm=True, tied=False),
        lambda model, ids: model(ids),
    ),
    "transformers": (
        lambda: hf_model(
            vocab_size=VOCAB,
            n_positions=LENGTH,
            n_layer=3,
            n_head=2,
            n_embd=16,
            use_cache=False,  # checkpointing turns it off, which by itself changes the last bit in transformers 5
        ),
        lambda model, ids: model(input_ids=ids).logits,
    ),
}


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_recomputed_activations_give_the_same_gradients(name: str, autocast: bool) -> None:
    make, forward = MODELS[name]
    torch.manual_seed(0)
    plain = make().train()
    recomputing = copy.deepcopy(plain)
    assert checkpoint_blocks(recomputing) >= 3
    assert list(recomputing.state_dict()) == list(plain.state_dict())
    ids = torch.zeros(4, LENGTH, dtype=torch.long)
    assert saved_bytes(lambda: forward(recomputing, ids)) < 0.6 * saved_bytes(lambda: forward(plain, ids))
    expected = grads(plain, forward, autocast)
    got = grads(recomputing, forward, autocast)
    assert len(got) == len(expected) > 10
    assert all(same_bits(a, b) for a, b in zip(got, expected, strict=True))
    plain.eval()
    recomputing.eval()
    assert same_bits(forward(recomputing, ids), forward(plain, ids))


def test_a_recomputing_model_can_be_copied_and_computes_with_its_own_weights() -> None:
    model = our_gpt()
    checkpoint_blocks(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.blocks.parameters():
            parameter.zero_()
    ids = torch.arange(LENGTH)[None]
    model.eval()
    twin.eval()
    assert not torch.allclose(model(ids), twin(ids))


def test_count_parameters_counts_tied_weights_once() -> None:
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
    model[1].weight = model[0].weight
    model.add_module("frozen", nn.Linear(2, 2).requires_grad_(False))
    assert count_parameters(model) == (15 + 6, 15)
