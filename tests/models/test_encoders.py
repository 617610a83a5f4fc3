"""ViT and BERT: the outputs of transformers for the same weights, published sizes, refusals, parallel plans."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trainwright.assembly.pipeline import keep_stage
from trainwright.distributed.split_plan import split_plan
from trainwright.errors import UsageError
from trainwright.models.bert import bert, bert_published
from trainwright.models.vit import vit, vit_published

BERT_NAMES = {
    r"^bert\.embeddings\.word_embeddings": "tokens",
    r"^bert\.embeddings\.position_embeddings": "positions",
    r"^bert\.embeddings\.token_type_embeddings": "types",
    r"^bert\.embeddings\.LayerNorm": "embedding_norm",
    r"^bert\.encoder\.layer": "blocks",
    r"attention\.self": "attention",
    r"attention\.output\.dense": "attention.output",
    r"attention\.output\.LayerNorm": "attention_norm",
    r"intermediate\.dense": "mlp.up",
    r"(\d)\.output\.dense": r"\1.mlp.down",
    r"(\d)\.output\.LayerNorm": r"\1.mlp_norm",
    r"^cls\.predictions\.transform\.dense": "transform",
    r"^cls\.predictions\.transform\.LayerNorm": "transform_norm",
    r"^cls\.predictions\.decoder": "head",
}
VIT_NAMES = {
    r"^vit\.embeddings\.cls_token": "embedding.class_token",
    r"^vit\.embeddings\.position_embeddings": "embedding.positions",
    r"^vit\.embeddings\.patch_embeddings\.projection": "embedding.patches",
    r"^vit\.(encoder\.)?layers?(?=\.)": "blocks",
    r"attention\.(attention\.)?(q_proj|query)": "attention.query",
    r"attention\.(attention\.)?(k_proj|key)": "attention.key",
    r"attention\.(attention\.)?(v_proj|value)": "attention.value",
    r"attention\.(o_proj|output\.dense)": "attention.output",
    r"layernorm_before": "attention_norm",
    r"layernorm_after": "mlp_norm",
    r"mlp\.fc1|intermediate\.dense": "mlp.up",
    r"mlp\.fc2|(?<=\d\.)output\.dense": "mlp.down",
    r"^vit\.layernorm": "norm",
    r"^classifier": "head",
}


def renamed(weights: Mapping[str, Tensor], names: Mapping[str, str]) -> dict[str, Tensor]:
    """The weights of a model of transformers under the names of ours."""
    found = {}
    for name, value in weights.items():
        for pattern, ours in names.items():
            name = re.sub(pattern, ours, name)
        found[name] = value
    return found


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def jittered(model: nn.Module) -> Any:
    """Every weight, norms and biases included, has a value that shows where it is used."""
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.eval()


@pytest.mark.slow
def test_bert_gives_the_outputs_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 8, "intermediate_size": 20}
    config = transformers.BertConfig(vocab_size=11, max_position_embeddings=6, **sizes)
    theirs = jittered(transformers.BertForMaskedLM(config))
    ours = bert(vocab_size=11, block_size=6, layers=2, heads=2, d_model=8, hidden=20, types=2).eval()
    weights = renamed(theirs.state_dict(), BERT_NAMES)
    weights.pop("cls.predictions.bias")  # is the bias of the decoder
    ours.load_state_dict(weights)
    ids_BT = torch.randint(0, 11, (3, 6))
    torch.testing.assert_close(ours(ids_BT), theirs(input_ids=ids_BT).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_vit_gives_the_outputs_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 8, "intermediate_size": 20}
    config = transformers.ViTConfig(image_size=12, patch_size=4, num_labels=3, layer_norm_eps=1e-6, **sizes)
    theirs = jittered(transformers.ViTForImageClassification(config))
    ours = vit(image_size=12, patch=4, layers=2, heads=2, d_model=8, hidden=20, classes=3).eval()
    ours.load_state_dict(renamed(theirs.state_dict(), VIT_NAMES))
    pixels = torch.randn(2, 3, 12, 12)
    torch.testing.assert_close(ours(pixels), theirs(pixel_values=pixels).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("make", "size", "parameters"),
    [
        (bert_published, "base", 109_514_298),  # 110 M, with the head of masked language modelling
        (bert_published, "large", 335_174_458),
        (vit_published, "Ti/16", 5_717_416),
        (vit_published, "S/16", 22_050_664),
        (vit_published, "B/16", 86_567_656),
        (vit_published, "B/32", 88_224_232),
        (vit_published, "L/16", 304_326_632),
        (vit_published, "H/14", 632_045_800),
    ],
)
def test_published_sizes_have_the_published_number_of_parameters(make: Any, size: str, parameters: int) -> None:
    with torch.device("meta"):
        assert count(make(size)) == parameters


SMALL_BERT = {"vocab_size": 11, "block_size": 6, "layers": 2, "heads": 2, "d_model": 8}
SMALL_VIT = {"image_size": 12, "patch": 4, "layers": 2, "heads": 2, "d_model": 8, "classes": 3}


@pytest.mark.parametrize("pre_norm", [False, True])
def test_every_weight_of_a_bert_gets_a_gradient_and_hidden_is_the_input_of_the_head(pre_norm: bool) -> None:
    model = bert(**SMALL_BERT, pre_norm=pre_norm, types=1, dropout=0.1)
    ids_BT = torch.randint(0, 11, (3, 6))
    model(ids_BT).square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    model.eval()
    torch.testing.assert_close(model.head(model(ids_BT, hidden=True)), model(ids_BT))


def test_a_vit_sees_all_patches_and_their_places() -> None:
    torch.manual_seed(0)
    model = vit(**SMALL_VIT)
    x = torch.randn(1, 3, 12, 12, requires_grad=True)
    model(x)[0, 0].backward()
    assert x.grad is not None and bool((x.grad.abs().amax(1) > 0).all())
    turned = x.detach().roll(4, dims=-1)
    assert not torch.allclose(model(turned), model(x), atol=1e-5)


@pytest.mark.parametrize(
    ("make", "x"),
    [
        (lambda: bert(**SMALL_BERT, types=2), torch.randint(0, 11, (3, 6))),
        (lambda: vit(**SMALL_VIT), torch.randn(2, 3, 12, 12)),
    ],
    ids=["bert", "vit"],
)
def test_the_stages_of_a_pipeline_compute_the_model(make: Any, x: Tensor) -> None:
    torch.manual_seed(0)
    whole = make()
    first, last = make(), make()
    for part in (first, last):
        part.load_state_dict(whole.state_dict())
    keep_stage(first, {0}, is_first=True, is_last=False)
    keep_stage(last, {1}, is_first=False, is_last=True)
    assert torch.equal(last(first(x)), whole(x))
    assert {*split_plan(whole, {})} >= {"blocks.0.attention.query", "blocks.1.mlp.down"}


@pytest.mark.parametrize(
    ("make", "options", "said"),
    [
        (vit, {**SMALL_VIT, "patch": 5}, "not divisible by patch"),
        (vit, {**SMALL_VIT, "heads": 3}, "not divisible by heads"),
        (vit_published, {"size": "B/17"}, "did you mean"),
        (bert, {**SMALL_BERT, "dropout": 1.0}, "dropout must be"),
        (bert, {"vocab_size": 3}, "bert needs block_size"),
        (bert_published, {"size": "bas"}, "did you mean 'base'"),
    ],
)
def test_wrong_options_are_refused_with_a_remedy(make: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        make(**options)
    assert caught.value.remedy


def test_inputs_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UsageError, match="8 x 8 pixels, but the model has image_size=12"):
        vit(**SMALL_VIT)(torch.randn(1, 3, 8, 8))
    with pytest.raises(UsageError, match="has 7 positions, the model block_size=6"):
        bert(**SMALL_BERT)(torch.zeros(1, 7, dtype=torch.int64))
