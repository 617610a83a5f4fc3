"""GPT: published sizes, equality with transformers' GPT-2, causality of every option, generation."""

from __future__ import annotations

import copy
import math
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from trainwright.errors import UsageError
from trainwright.models.generate import generate
from trainwright.models.gpt import GPT, GPTConfig, NGram, Rope, gpt, gpt2

SMALL: dict[str, Any] = {"vocab_size": 11, "block_size": 12, "layers": 2, "heads": 2, "d_model": 16}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"norm": "rms", "positions": "rope", "activation": "relu2", "bias": False, "qk_norm": True},
    {"positions": "rope", "activation": "swiglu", "tied": False},
    {"bigram": 7},
    {"bigram": 121},
    {"bigram": 130, "ngram": 5},
    {"logit_softcap": 15.0},
    {"zero_init_out": True, "tied": False, "dropout": 0.2, "norm": "rms"},
]
each_option = pytest.mark.parametrize("options", OPTIONS, ids=lambda o: ",".join(o) or "gpt2")


def small(**options: Any) -> GPT:
    """A model whose every parameter is random: zero-initialised ones would hide a leak."""
    torch.manual_seed(0)
    model = gpt(**{**SMALL, **options})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model.eval()


def random_ids(batch: int = 3, length: int = 12) -> Tensor:
    return torch.randint(0, 11, (batch, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("size", "count"),
    [("124M", 124_439_808), ("355M", 354_823_168), ("774M", 774_030_080), ("1.5B", 1_557_611_200)],
)
def test_gpt2_has_the_published_number_of_parameters(size: str, count: int) -> None:
    with torch.device("meta"):
        model = gpt2(size)
    assert sum(parameter.numel() for parameter in model.parameters()) == count
    assert model.block_size == 1024


@pytest.mark.slow
def test_logits_equal_those_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=11, n_positions=12, n_layer=2, n_head=2, n_embd=16, bos_token_id=None, eos_token_id=None
    )
    theirs = transformers.GPT2LMHeadModel(config).eval()
    ours = small()
    with torch.no_grad():
        theirs.transformer.wte.weight.copy_(ours.tokens.weight)
        assert ours.positions is not None
        theirs.transformer.wpe.weight.copy_(ours.positions.weight)
        for block, other in zip(ours.blocks, theirs.transformer.h, strict=True):
            attention, mlp = block.attention, block.mlp
            fused = torch.cat([attention.query.weight, attention.key.weight, attention.value.weight])  # type: ignore[list-item]
            other.attn.c_attn.weight.copy_(fused.T)
            other.attn.c_attn.bias.copy_(torch.cat([attention.query.bias, attention.key.bias, attention.value.bias]))  # type: ignore[list-item]
            pairs = [(attention.output, other.attn.c_proj), (mlp.up, other.mlp.c_fc), (mlp.down, other.mlp.c_proj)]
            for linear, conv in pairs:
                conv.weight.copy_(linear.weight.T)
                conv.bias.copy_(linear.bias)
            other.ln_1.load_state_dict(block.attention_norm.state_dict())
            other.ln_2.load_state_dict(block.mlp_norm.state_dict())
        theirs.transformer.ln_f.load_state_dict(ours.norm.state_dict())
        ids = random_ids()
        torch.testing.assert_close(ours(ids), theirs(ids).logits, rtol=1e-5, atol=1e-5)


@each_option
def test_no_position_sees_a_later_one(options: dict[str, Any]) -> None:
    model, ids = small(**options), random_ids()
    before = model(ids)
    for position in range(1, 12):
        changed = ids.clone()
        changed[:, position:] = (changed[:, position:] + 1 + position % 10) % 11
        after = model(changed)
        torch.testing.assert_close(after[:, :position], before[:, :position], rtol=0, atol=1e-6)
        assert not torch.allclose(after[:, position], before[:, position], atol=1e-3)


@each_option
def test_every_parameter_gets_a_gradient_in_fp32_and_under_bf16_autocast(options: dict[str, Any]) -> None:
    for enabled in (False, True):
        model = small(**options).train()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            logits = model(random_ids())
        logits.float().logsumexp(-1).sum().backward()
        assert [name for name, each in model.named_parameters() if each.grad is None] == []


def test_the_initialisation_is_that_of_gpt2() -> None:
    torch.manual_seed(0)
    model = gpt(vocab_size=100, block_size=16, layers=8, heads=2, d_model=128)
    assert model.tokens.weight.std().item() == pytest.approx(0.02, rel=0.03)
    assert model.blocks[3].attention.query.weight.std().item() == pytest.approx(0.02, rel=0.03)
    assert model.blocks[3].mlp.down.weight.std().item() == pytest.approx(0.02 / 4, rel=0.03)
    assert model.blocks[3].attention.output.weight.std().item() == pytest.approx(0.02 / 4, rel=0.03)
    assert not model.blocks[0].mlp.up.bias.any()


def test_zero_init_out_makes_each_block_the_identity() -> None:
    model = gpt(**SMALL, zero_init_out=True)
    x_BTD = torch.randn(2, 5, 16)
    assert torch.equal(model.blocks[0](x_BTD), x_BTD)


def test_the_head_is_tied_also_after_a_start_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = gpt(**SMALL, positions="rope")
    model.to_empty(device="cpu")
    model.init_weights()
    assert model.head.weight is model.tokens.weight
    expected = gpt(**SMALL, positions="rope")
    for each in (model, expected):
        torch.manual_seed(0)
        each.init_weights()
    assert torch.equal(model.eval()(random_ids()), expected.eval()(random_ids()))
    assert gpt(**SMALL, tied=False).head.weight is not model.tokens.weight


def test_rope_depends_only_on_the_distance_and_its_tables_are_not_saved() -> None:
    rope = Rope(GPTConfig(**{**SMALL, "block_size": 4096}))
    query, key = torch.randn(2, 8)
    at = rope(torch.stack([query, key])[:, None, None].expand(2, 1, 4096, 8))
    scores = (at[0, 0, 7:] * at[1, 0, :-7]).sum(-1)
    torch.testing.assert_close(scores, scores[:1].expand_as(scores), rtol=1e-3, atol=1e-3)
    assert (at[0, 0, 4095] - at[0, 0, 4094]).abs().max() > 1e-2
    assert rope.state_dict() == {}
    assert rope(torch.zeros(1, 1, 3, 8, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_hashed_and_exact_bigram_tables() -> None:
    config = GPTConfig(**SMALL, bigram=121)
    exact, hashed = NGram(config, order=2), NGram(replace(config, bigram=5), order=2)
    assert exact.table.num_embeddings == 122 and hashed.table.num_embeddings == 6
    pairs = torch.cartesian_prod(torch.arange(11), torch.arange(11))
    rows = exact(pairs)
    assert torch.unique(rows[:, 1], dim=0).shape[0] == 121  # each pair has a row of its own
    assert torch.equal(rows[:, 0], exact.table.weight[-1:].expand(121, -1))
    assert torch.unique(hashed(pairs)[:, 1], dim=0).shape[0] == 5


@pytest.mark.parametrize("length", [1, 2, 3, 4, 9])
def test_an_ngram_row_is_decided_by_the_last_ids_alone(length: int) -> None:
    ngram = NGram(GPTConfig(**SMALL, bigram=10_000), order=4)
    ids = random_ids(length=length)
    rows = ngram(ids)
    assert rows.shape == (3, length, 16)
    for position in range(length):
        expected = ngram(ids[:, position - 3 : position + 1])[:, 3] if position >= 3 else ngram.table.weight[-1]
        assert torch.equal(rows[:, position], expected.expand(3, -1))


def test_hashes_spread_over_the_rows() -> None:
    ngram = NGram(GPTConfig(**{**SMALL, "vocab_size": 100, "bigram": 4096}), order=3)
    ngram.table.weight.data = torch.arange(4097.0)[:, None]
    triples = torch.randint(0, 100, (4096, 3))
    used = ngram(triples)[:, 2].unique().numel()
    assert used == pytest.approx(4096 * (1 - math.exp(-1)), rel=0.05)  # as many as of independent draws


def test_models_can_be_copied_and_pickled() -> None:
    model = small(positions="rope")
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(random_ids()), model(random_ids()))
        assert twin.head.weight is twin.tokens.weight


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"d_model": 17}, "try d_model=16"),
        ({"positions": "rope", "d_model": 6}, "rotates pairs"),
        ({"layer": 3}, "did you mean 'layers'"),
        ({"norm": "rsm"}, "did you mean 'rms'"),
        ({"layers": 0}, "layers must be a whole number >= 1"),
        ({"dropout": 1.5}, r"dropout must be in \[0, 1\)"),
        ({"ngram": 3}, "needs rows for its tables"),
        ({"logit_softcap": -1.0}, "logit_softcap must be >= 0"),
    ],
)
def test_wrong_options_are_refused_with_a_remedy(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        gpt(**{**SMALL, **options})
    assert caught.value.remedy


def test_missing_options_unknown_sizes_and_long_inputs_are_refused() -> None:
    with pytest.raises(UsageError, match="gpt needs vocab_size, block_size"):
        gpt(layers=2, heads=2, d_model=16)
    with pytest.raises(UsageError, match="size must be one of 124M"):
        gpt2("117M")
    with pytest.raises(UsageError, match="13 positions"):
        small()(random_ids(length=13))


def test_generation_is_repeatable_and_leaves_modes_and_global_random_numbers_alone() -> None:
    model = small(dropout=0.5).train()
    model.blocks[0].eval()  # as a frozen part is kept
    before = torch.get_rng_state()
    ids = random_ids(length=10)
    first, second = (generate(model, ids, tokens=20, top_k=5) for _ in range(2))
    assert first.shape == (3, 30) and torch.equal(first, second) and torch.equal(first[:, :10], ids)
    assert torch.equal(torch.get_rng_state(), before)
    assert model.training and model.blocks[1].mlp.training and not model.blocks[0].mlp.training
    other = generate(model, ids, tokens=20, generator=torch.Generator().manual_seed(7))
    assert not torch.equal(other, first)


def test_temperature_zero_and_top_one_take_the_likeliest_of_the_cropped_context() -> None:
    model, ids = small(), random_ids()
    greedy = generate(model, ids, tokens=4, temperature=0)
    assert torch.equal(greedy, generate(model, ids, tokens=4, top_k=1))
    for position in range(12, 16):
        window = greedy[:, position - 12 : position]
        assert torch.equal(greedy[:, position], model(window)[:, -1].argmax(-1))
    with pytest.raises(UsageError, match="temperature"):
        generate(model, ids, tokens=1, temperature=-1.0)
