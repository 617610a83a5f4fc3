"""LoRA through PEFT, on our models and on one of transformers."""

from __future__ import annotations

import copy
import inspect
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trainwright.assembly.adapters import add_adapters
from trainwright.errors import MissingExtra, RecipeError, UsageError
from trainwright.models.gpt import gpt
from trainwright.models.hf import hf_model
from trainwright.models.lora import adapters_of, add_lora, merged_weights
from trainwright.models.lstm import lstm
from trainwright.models.mlp import mlp
from trainwright.recipe import Lora

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("peft") is None, reason="needs peft")]
IDS = torch.randint(0, 11, (2, 6), generator=torch.Generator().manual_seed(0))


def our_gpt() -> nn.Module:
    return gpt(vocab_size=11, block_size=8, layers=2, heads=2, d_model=16)


def their_gpt() -> nn.Module:
    pytest.importorskip("transformers")
    return hf_model(architecture="GPT2LMHeadModel", vocab_size=11, n_positions=8, n_layer=2, n_head=2, n_embd=16)


def their_llama() -> nn.Module:
    pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return hf_model(architecture="LlamaForCausalLM", vocab_size=11, max_position_embeddings=8, **sizes)


def logits(model: nn.Module) -> Tensor:
    out = model(IDS)
    return out if isinstance(out, Tensor) else out.logits


def perturb(model: nn.Module) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.5)


# adapted layers: ours 2 x (4 attention + 2 MLP); GPT-2's 2 x (fused qkv, output, 2 MLP); Llama's 2 x (4 + 3)
each_model = pytest.mark.parametrize(("build", "adapted"), [(our_gpt, 12), (their_gpt, 8), (their_llama, 14)])


@each_model
def test_the_output_is_unchanged_at_the_start_and_only_adapters_train(build: Any, adapted: int) -> None:
    model = build().eval()
    base = {name for name, _ in model.named_parameters()}
    before, signature = logits(model), inspect.signature(model.forward)
    returned = add_lora(model, rank=3, alpha=6, dropout=0.1).eval()
    assert returned is model and inspect.signature(returned.forward) == signature
    assert torch.equal(logits(returned), before)
    perturb(returned)
    assert not torch.allclose(logits(returned), before, atol=1e-3)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert len(trained) == 2 * adapted
    assert all(name.endswith((".lora_A.default.weight", ".lora_B.default.weight")) for name in trained)
    frozen = {name.replace(".base_layer", "") for name, each in model.named_parameters() if not each.requires_grad}
    assert frozen == base
    assert not any("head" in name or "lm_head" in name for name in trained)
    logits(model).sum().backward()
    assert {name for name, parameter in model.named_parameters() if parameter.grad is not None} == trained


def test_targets_choose_the_layers() -> None:
    model = add_lora(our_gpt(), rank=2, alpha=2, targets=["query", "blocks.1.mlp.up"])
    adapted = {name.split(".lora_A")[0] for name, each in model.named_parameters() if ".lora_A." in name}
    assert adapted == {"blocks.0.attention.query", "blocks.1.attention.query", "blocks.1.mlp.up"}
    assert len(model.blocks) == 2 and model.block_size == 8


def test_without_lists_of_blocks_all_but_the_last_linear_layer_are_adapted() -> None:
    model = add_lora(mlp(sizes=[6, 5, 4, 3]), rank=2, alpha=2)
    adapted = {name.split(".lora_A")[0] for name, each in model.named_parameters() if ".lora_A." in name}
    assert adapted == {"layers.linear0", "layers.linear1"}


theirs_warn = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT asks transformers


@theirs_warn
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ({}, torch.bfloat16),
        ({"dora": True}, torch.bfloat16),
        ({"rslora": True}, torch.float32),
        ({"init": "gaussian"}, torch.float32),
        ({"init": "orthogonal"}, torch.float32),
        ({"init": "pissa"}, torch.float32),
    ],
    ids=["lora", "dora", "rslora", "gaussian", "orthogonal", "pissa"],
)
def test_weights_equal_those_of_peft_at_the_start_and_after_five_steps(kind: Any, dtype: torch.dtype) -> None:
    """Also the merged weights. The adapters of a bf16 model are fp32."""
    import peft

    torch.manual_seed(1)
    start = their_llama().to(dtype)
    torch.manual_seed(3)
    ours = add_lora(copy.deepcopy(start), rank=4, alpha=8, dropout=0.1, targets=["all-linear"], **kind)
    switches = {"use_dora": "dora" in kind, "use_rslora": "rslora" in kind, "init_lora_weights": kind.get("init", True)}
    config = peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules="all-linear", **switches)
    torch.manual_seed(3)
    theirs = peft.get_peft_model(copy.deepcopy(start), config)
    for steps in (0, 5):
        for model in (ours, theirs):
            torch.manual_seed(9)
            optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
            for _ in range(steps):
                optimizer.zero_grad()
                model(input_ids=IDS, labels=IDS).loss.backward()
                optimizer.step()
        expected = {name.removeprefix("base_model.model."): each for name, each in theirs.state_dict().items()}
        assert ours.state_dict().keys() == expected.keys()
        for name, each in ours.state_dict().items():
            assert torch.equal(each, expected[name]) and (each.dtype == torch.float32 or "lora_" not in name), name
    merged = merged_weights(ours.state_dict(), adapters_of(ours)["default"])
    expected = theirs.merge_and_unload().state_dict()
    assert merged.keys() == expected.keys()
    assert all(torch.equal(each, expected[name]) for name, each in merged.items())


@theirs_warn
@pytest.mark.parametrize("kind", ["embedding", "conv1d", "whole module", "patterns"])
def test_adapters_of_other_layers_are_merged_as_peft_does(kind: str) -> None:
    import peft

    model = their_gpt() if kind == "conv1d" else their_llama()
    switches: dict[str, Any] = {  # type: ignore[assignment]
        "embedding": {"target_modules": ["embed_tokens", "q_proj"]},
        "conv1d": {"target_modules": ["c_proj"], "fan_in_fan_out": True},  # c_proj of the attention is square
        "whole module": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
        "patterns": {
            "target_modules": ["q_proj", "v_proj"],
            "rank_pattern": {"v_proj": 2},
            "alpha_pattern": {"v_proj": 9},
        },
    }[kind]
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=3, lora_alpha=5, **switches))
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.5)
    merged = merged_weights(adapted.state_dict(), adapters_of(adapted)["default"])
    expected = adapted.merge_and_unload().state_dict()
    assert merged.keys() == expected.keys()
    assert all(torch.equal(each, expected[name]) for name, each in merged.items())


def test_all_linear_leaves_the_output_layer_out() -> None:
    adapted = add_lora(their_llama(), rank=2, targets=["all-linear"])
    names = {name.split(".lora_A")[0].rpartition(".")[2] for name, _ in adapted.named_parameters() if "lora_A" in name}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def test_a_wrong_target_of_a_recipe_is_at_its_targets() -> None:
    with pytest.raises(RecipeError) as caught:
        add_adapters(our_gpt(), Lora(rank=4, targets=("quary",)))
    assert [each.path for each in caught.value.problems] == ["model.lora.targets"]


def test_wrong_targets_and_sizes_are_refused_with_a_remedy() -> None:
    with pytest.raises(UsageError, match="'quary'") as caught:
        add_lora(our_gpt(), targets=["value", "quary"])
    assert "blocks.0.attention.query" in caught.value.remedy
    with pytest.raises(UsageError, match="no linear layer beside its output"):
        add_lora(lstm(vocab_size=11, d_model=4))
    with pytest.raises(UsageError, match="must be positive"):
        add_lora(our_gpt(), rank=0)
    with pytest.raises(UsageError, match="dropout"):
        add_lora(our_gpt(), dropout=1.0)


def test_without_peft_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(MissingExtra, match='pip install "peft>='):
        add_lora(our_gpt())
