"""Stages by a table: the same outputs as the whole model, or refused with what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trainwright.assembly.stage_plan import StagedModel, stage_plan
from trainwright.distributed.split_plan import model_shape
from trainwright.engine.losses import language_model
from trainwright.engine.stage_passes import _ModelStandIn
from trainwright.errors import RecipeError, UsageError
from trainwright.models.gpt import gpt
from trainwright.models.hf import hf_model
from trainwright.plan.parallel import Degrees
from trainwright.plan.splits import ModelShape, require_fitting
from trainwright.recipe import from_mapping

IDS = torch.arange(24).view(2, 12) % 11
TABLE: Any = {"embed": "first", "places": "first", "layers.*": "block", "out": "last"}


class Own(nn.Module):
    """Made for no pipeline."""

    def __init__(self, again: float = 0.0, scale: float = 1.0) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(11, 8), nn.Embedding(12, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.out = nn.Linear(8, 11)
        self.again, self.scale = again, scale
        nn.init.zeros_(self.places.weight)

    def forward(self, ids: Tensor) -> Tensor:
        x = start = (self.embed(ids) + self.places(torch.arange(ids.shape[1]))) * self.scale
        for layer in self.layers:
            x = x + layer(x).tanh() + self.again * start
        return self.out(x)  # type: ignore[no-any-return]


class Blocks(Own):
    def __init__(self, again: float = 0.0, scale: float = 1.0) -> None:
        super().__init__(again, scale)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))

    def forward(self, ids: Tensor) -> Tensor:
        x = start = (self.embed(ids) + self.places(torch.arange(ids.shape[1]))) * self.scale
        for layer in self.layers:
            x = layer(x) + self.again * start
        return self.out(x)  # type: ignore[no-any-return]


def tried(model: nn.Module, table: Any, stages: int = 2) -> StagedModel:
    plan = stage_plan(model, table)
    assert plan is not None
    cut = StagedModel(model, plan)
    each = len(plan.blocks) // stages
    cut.require_same(IDS, [range(first, first + each) for first in range(0, len(plan.blocks), each)])
    return cut


LLAMA = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.mark.parametrize(
    ("architecture", "config"),
    [
        ("GPT2LMHeadModel", {"n_layer": 4, "n_head": 2, "n_embd": 16, "tie_word_embeddings": False}),
        ("LlamaForCausalLM", {"num_hidden_layers": 4, **LLAMA}),
        ("Qwen2ForCausalLM", {"num_hidden_layers": 4, "tie_word_embeddings": False, **LLAMA}),
        ("GPTNeoXForCausalLM", {"num_hidden_layers": 4, "hidden_size": 16, "num_attention_heads": 2}),
    ],
)
def test_models_of_transformers_are_cut_by_their_own_plan(architecture: str, config: dict[str, Any]) -> None:
    pytest.importorskip("transformers")
    model = hf_model(architecture=architecture, vocab_size=11, **config).train()
    before = {name: each.clone() for name, each in model.state_dict().items()}
    cut = tried(model, {}, stages=4)
    assert len(cut.plan.blocks) == 4
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
    whole = model.eval()(IDS).logits
    held = [name for name, _ in model.named_parameters()]
    cut.keep({2, 3}, is_first=False, is_last=True)
    rest = [name for name, _ in model.named_parameters()]
    assert 0 < len(rest) < len(held) and {*rest} < {*held}
    assert cut.as_returned(whole).logits is whole  # type: ignore[attr-defined]


def test_a_model_of_ones_own_is_cut_by_a_table_and_left_as_it_was() -> None:
    model = Blocks().train()
    tried(model, TABLE)
    assert model.training and not model.places.weight.any()


@pytest.mark.parametrize(
    ("make", "table", "error"),
    [
        (Own, TABLE, "away"),  # what is added to a block would be added again by each stage
        (lambda: Blocks(again=0.5), TABLE, "away"),
        (lambda: Blocks(scale=2.0), TABLE, "away"),
        (Blocks, {**TABLE, "layer.*": "block"}, "no module is named like 'layer.*'"),
        (Blocks, {k: v for k, v in TABLE.items() if k != "places"}, "places.weight is in no part"),
        (Blocks, {**TABLE, "layers.0.0": "first"}, "layers.0.0.weight is in two parts"),
        (Blocks, {"embed": "first", "places": "first", "layers": "last", "out": "last"}, "names no block"),
        (Blocks, {"embed": "last", "places": "last", "layers.*": "block", "out": "last"}, "cannot be computed"),
    ],
)
def test_what_would_train_something_else_is_refused(make: Callable[[], nn.Module], table: Any, error: str) -> None:
    with pytest.raises(UsageError, match=error) as raised:
        tried(make(), table)
    assert raised.value.remedy


@pytest.mark.parametrize("table", [{}, {"tokens": "first", "positions": "first", "blocks.*": "block", "head": "last"}])
def test_a_weight_of_two_blocks_is_refused_and_a_tied_embedding_is_not(table: Any) -> None:
    model = gpt(vocab_size=11, block_size=8, layers=2, heads=2, d_model=16, norm="rms")
    table = table and {**table, "norm": "last"}
    shape = model_shape(model, {}, stage_plan(model, table))
    assert (shape.blocks, shape.tied_bytes, shape.tied_blocks) == (2, 11 * 16 * 4, "")
    recipe = from_mapping({"model": "gpt", "data": {"train": "digits"}, "parallel": {"pipeline": 2}}).recipe
    require_fitting(recipe, Degrees(pipeline=2), shape)
    model.get_submodule("blocks.1.mlp.up").weight = model.get_submodule("blocks.0.mlp.up").weight
    with pytest.raises(RecipeError, match=r"blocks.0.mlp.up.weight and blocks.1.mlp.up.weight(?s:.)*parallel.shard"):
        require_fitting(recipe, Degrees(pipeline=2), model_shape(model, {}, stage_plan(model, table)))


def test_a_table_has_one_stage_on_each_rank() -> None:
    asked = {"schedule": "interleaved", "pipeline": 2}
    recipe = from_mapping({"model": "gpt", "data": {"train": "digits"}, "parallel": asked}).recipe
    with pytest.raises(RecipeError, match=r"parallel\.stages gives a rank one stage") as raised:
        require_fitting(recipe, Degrees(pipeline=2), ModelShape("Own", blocks=4, by_table=True))
    assert "1f1b" in str(raised.value)


@pytest.mark.parametrize(
    "loss",
    [
        lambda model, batch: model(batch[0][:, :-1]).sum(),
        lambda model, batch: model(batch[0], batch[1]).sum(),
        lambda model, batch: (model(batch[0]) + model(batch[0])).sum(),
    ],
)
def test_a_loss_that_asks_the_model_for_something_else_is_refused(loss: Any) -> None:
    given = _ModelStandIn(IDS, torch.zeros(2, 12, 11))
    language_model(given, (IDS, IDS))
    with pytest.raises(UsageError, match="asks the model for something else"):
        loss(_ModelStandIn(IDS, torch.zeros(2, 12, 11)), (IDS, IDS))
