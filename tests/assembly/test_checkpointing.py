"""Activation checkpointing: less is kept, and gradients, buffers and random numbers are the same bits."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from trainwright.assembly.assemble import Parts, prepare
from trainwright.assembly.checkpointing import (
    SELECTIVE,
    apply_checkpointing,
    checkpointing_as_requested,
    draws_random_numbers,
    family_of,
    find_blocks,
)
from trainwright.checkpoint.codec import same_bits
from trainwright.data.unwrap import unwrap
from trainwright.errors import RecipeError, UsageError
from trainwright.models.gpt import gpt
from trainwright.models.hf import hf_model
from trainwright.models.mlp import mlp
from trainwright.models.resnet import resnet
from trainwright.plan.checkpointing import Checkpointing, describe
from trainwright.recipe import from_mapping

VOCAB, LENGTH, WIDTH = 17, 12, 16
IDS = torch.randint(VOCAB, (4, LENGTH), generator=torch.Generator().manual_seed(1))
ROWS = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1))
Forward = Callable[[nn.Module], Tensor]


def our_gpt(**options: Any) -> nn.Module:
    return gpt(
        **{"vocab_size": VOCAB, "block_size": LENGTH, "layers": 3, "heads": 2, "d_model": 16, "dropout": 0.2, **options}
    )


class Odd(nn.Module):
    """All that makes a second run differ: buffers that each run changes, three generators, a checkpoint inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.outer = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        if random.random() < 0.3:
            return x
        inside = checkpoint(lambda y: self.dropout(F.gelu(self.inner(y))), x, use_reentrant=False)
        hidden = F.dropout(F.relu(self.norm(inside)), 0.1)
        return x + self.outer(hidden + torch.rand_like(hidden))


class InPlace(nn.Module):
    """Changes the output of a matmul in place, which is what is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).mul_(2.0).relu_()).tanh()


class Stack(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def twice() -> nn.Module:
    """One block that is used twice: autocast casts its weights once."""
    block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
    return Stack(block, block)


def bert() -> nn.Module:
    shape = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32}
    return hf_model(architecture="BertForMaskedLM", vocab_size=VOCAB, **shape)


def gpt2() -> nn.Module:
    """Without a cache: recomputation turns it off, which by itself changes the last bit in transformers 5."""
    return hf_model(vocab_size=VOCAB, n_positions=LENGTH, n_layer=3, n_head=2, n_embd=16, use_cache=False)


MODELS: dict[str, tuple[Callable[[], nn.Module], Forward]] = {
    "gpt": (our_gpt, lambda model: model(IDS)),
    "gpt, modern": (
        lambda: our_gpt(norm="rms", positions="rope", activation="swiglu", qk_norm=True, tied=False),
        lambda model: model(IDS),
    ),
    "gpt, without dropout": (lambda: our_gpt(dropout=0.0), lambda model: model(IDS)),
    "resnet": (resnet, lambda model: model(torch.ones(4, 3, 16, 16) + torch.arange(4.0)[:, None, None, None])),
    "odd": (lambda: Stack(*(Odd() for _ in range(4))), lambda model: model(ROWS)),
    "in place": (lambda: Stack(InPlace(), InPlace()), lambda model: model(ROWS)),
    "used twice": (twice, lambda model: model(ROWS)),
    "transformers, gpt2": (gpt2, lambda model: model(input_ids=IDS).logits),
    "transformers, bert": (bert, lambda model: model(input_ids=IDS).logits),
}
KEEPS: dict[str, tuple[tuple[str, ...] | None, ...]] = {
    "block": ((),),
    "selective": (SELECTIVE,),
    "single calls": (("matmul:1", "gelu", "native_layer_norm:0"),),
    "mixed": (None, (), SELECTIVE, ("attention",)),
}
CASTS = ("_to_copy", "clone", "detach")


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name][0]().train()


def recomputed(model: nn.Module, keeps: tuple[tuple[str, ...] | None, ...]) -> nn.Module:
    twin = copy.deepcopy(model)
    count = len(find_blocks(twin))
    apply_checkpointing(twin, Checkpointing(tuple(keeps[index % len(keeps)] for index in range(count))))
    return twin


@dataclass
class After:
    """The state after two micro-batches. The second must not reuse the random draws of the first."""

    grads: list[Tensor]
    buffers: list[Tensor]
    draws: tuple[Any, ...]


def after_two(model: nn.Module, forward: Forward, autocast: bool) -> After:
    torch.manual_seed(2)
    random.seed(4)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = forward(model)
        out.float().square().mean().backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return After(grads, list(model.buffers()), (torch.rand(3).tolist(), random.random()))


@pytest.mark.parametrize(
    ("name", "keep", "autocast"),
    [
        *((name, keep, False) for name in MODELS for keep in KEEPS),
        *((name, "single calls", True) for name in MODELS),  # autocast changes how often calls are made
    ],
)
def test_gradients_buffers_and_draws_are_the_same_bits(name: str, keep: str, autocast: bool) -> None:
    plain, forward = made(name), MODELS[name][1]
    twin = recomputed(plain, KEEPS[keep])
    expected, got = after_two(plain, forward, autocast), after_two(twin, forward, autocast)
    assert len(expected.grads) > 3
    assert all(same_bits(a, b) for a, b in zip(expected.grads, got.grads, strict=True))
    assert all(same_bits(a, b) for a, b in zip(expected.buffers, got.buffers, strict=True))
    assert expected.draws == got.draws


def test_casts_are_never_kept() -> None:
    """Autocast keeps the casts of weights, so the second run makes fewer of them than the first."""
    plain, forward = made("gpt"), MODELS["gpt"][1]
    expected = after_two(plain, forward, autocast=True)
    got = after_two(recomputed(plain, (CASTS,)), forward, autocast=True)
    assert all(same_bits(a, b) for a, b in zip(expected.grads, got.grads, strict=True))
    assert [family_of(getattr(torch.ops.aten, name).default) for name in CASTS] == [None, None, None]


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        self.calls[name] = self.calls.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("keep", "matmuls", "attentions"),
    [(None, 0, 0), ((), 5, 1), (("matmul:1",), 4, 1), (("matmul",), 0, 1), (SELECTIVE, 0, 0), (("attention",), 5, 0)],
    ids=str,
)
def test_backward_computes_again_what_is_not_kept(keep: tuple[str, ...] | None, matmuls: int, attentions: int) -> None:
    model = recomputed(our_gpt(dropout=0.0), (keep,))
    loss = model(IDS).square().mean()
    with Counting() as counting:
        loss.backward()
    assert counting.calls.get("addmm", 0) == 3 * matmuls  # not the last of a block: nothing behind it needs it
    attention = sum(n for op, n in counting.calls.items() if "attention" in op and "backward" not in op)
    assert attention == 3 * attentions


def saved_bytes(run: Callable[[], object]) -> int:
    total = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal total
        total += tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return total


@pytest.mark.parametrize("name", ["gpt", "transformers, gpt2"])
def test_less_is_kept_until_none_is_asked_for_again(name: str) -> None:
    model, forward = made(name), MODELS[name][1]
    keys, before, count = list(model.state_dict()), saved_bytes(lambda: forward(model)), len(find_blocks(model))
    for _ in range(2):  # once, however often a model is prepared
        assert apply_checkpointing(model, Checkpointing.every(count)) == count
        assert list(model.state_dict()) == keys
        assert saved_bytes(lambda: forward(model)) < 0.6 * before
    assert apply_checkpointing(model, Checkpointing.none(count)) == 0
    assert saved_bytes(lambda: forward(model)) == before
    assert not [module for module in model.modules() if "forward" in vars(module)]


def test_evaluation_computes_once_and_the_same() -> None:
    plain = made("gpt").eval()
    twin = recomputed(plain, (SELECTIVE,))
    assert same_bits(plain(IDS), twin(IDS))


def test_backward_twice() -> None:
    plain = made("odd")
    results = []
    for model in (plain, recomputed(plain, (SELECTIVE,))):
        torch.manual_seed(0)
        random.seed(1)
        loss = model(ROWS).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        results.append([p.grad for p in model.parameters() if p.grad is not None])
    assert len(results[0]) > 3
    assert all(same_bits(a, b) for a, b in zip(*results, strict=True))


def test_a_copy_computes_with_its_own_weights() -> None:
    model = recomputed(made("gpt"), ((),))
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in find_blocks(twin)[0].parameters():
            parameter.zero_()
    torch.manual_seed(0)
    mine = model(IDS)
    torch.manual_seed(0)
    assert not torch.allclose(mine, twin(IDS))


class Leaking(nn.Module):
    """Gives a kept output away, next to one that was computed from it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        kept = self.linear(x)
        return kept, (kept + 1).square()


def test_a_kept_output_that_is_changed_after_its_block_is_an_error_and_no_wrong_gradient() -> None:
    model = Stack(Leaking())
    apply_checkpointing(model, Checkpointing.every(1, ("matmul",)))
    kept, used = model(ROWS)
    kept.mul_(3.0)
    with pytest.raises(UsageError, match="changed in place after its block") as caught:
        used.sum().backward()
    assert "activation_checkpointing: block" in caught.value.remedy


def test_attention_draws_random_numbers_only_with_dropout() -> None:
    flash = torch.ops.aten._scaled_dot_product_flash_attention.default
    heads = torch.zeros(1, 2, 4, 8)
    assert not draws_random_numbers(flash, (heads, heads, heads), {})
    assert draws_random_numbers(flash, (heads, heads, heads, 0.1), {})
    assert draws_random_numbers(flash, (heads, heads, heads), {"dropout_p": 0.1})
    assert draws_random_numbers(torch.ops.aten.native_dropout.default, (heads, 0.1, True), {})
    assert not draws_random_numbers(torch.ops.aten.mm.default, (heads, heads), {})


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_compiled() -> None:
    plain = our_gpt(layers=2, dropout=0.0)
    keeps: dict[str, tuple[str, ...]] = {"block": (), "selective": ("matmul", "attention")}
    twins = {name: copy.deepcopy(plain) for name in keeps}
    for name, keep in keeps.items():
        apply_checkpointing(twins[name], Checkpointing.every(2, keep))
    results = {}
    for name, model in {"plain": plain, **twins}.items():
        torch._dynamo.reset()
        model.compile(backend="aot_eager_decomp_partition", fullgraph=True)
        results[name] = after_two(model, lambda model: model(IDS), autocast=False).grads
    for name in keeps:
        assert all(same_bits(a, b) for a, b in zip(results["plain"], results[name], strict=True)), name


class Repeated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.adapters = nn.ModuleList(nn.Linear(2, 2) for _ in range(9))
        self.layers = nn.ModuleList(nn.Bilinear(8, 8, 8) for _ in range(4))
        self.mixed = nn.Sequential(nn.Linear(400, 400), nn.ReLU())


def test_find_blocks() -> None:
    model = our_gpt()
    assert find_blocks(model) == list(model.get_submodule("blocks").children())
    repeated = Repeated()
    assert find_blocks(repeated) == list(repeated.layers)  # the most parameters, all of one class
    assert len(find_blocks(resnet())) > 1
    assert [type(block).__name__ for block in find_blocks(bert())] == ["BertLayer"] * 3
    with pytest.raises(UsageError, match="no list of equal blocks") as caught:
        find_blocks(mlp(sizes=[4, 8, 2]))
    assert "`blocks`" in caught.value.remedy


def test_a_plan_for_another_model_is_refused() -> None:
    with pytest.raises(UsageError, match="for 5 blocks does not fit a model of 3"):
        apply_checkpointing(our_gpt(), Checkpointing.every(5))


def prepared(ask: str, planned: Checkpointing | None = None) -> Parts:
    loaded = from_mapping({"model": {"use": "gpt", "activation_checkpointing": ask}, "data": {"train": "digits"}})
    parts = Parts(our_gpt(), unwrap([(IDS[0], IDS[0])]), {}, F.cross_entropy)
    return prepare(parts, loaded, torch.device("cpu"), planned)


def test_what_a_recipe_asks_for_is_applied_and_noted() -> None:
    assert prepared("none").notes == ()
    for ask, words in (("block", "3 blocks whole"), ("selective", "3 blocks except matmul, convolution, attention")):
        (note,) = prepared(ask).notes
        assert (note.topic, note.choice) == ("activation checkpointing", "3 blocks")
        assert words in note.why
    planned = Checkpointing((None, (), ("matmul:0", "matmul:2", "gelu")))
    (note,) = prepared("12GiB", planned).notes
    assert note.choice == "2 blocks"
    assert note.why.endswith("1 block not at all; 1 block whole; 1 block except matmul 0 2, gelu") == (
        describe(planned) == note.why
    )


def test_a_choice_that_nobody_made_is_an_error_with_a_remedy() -> None:
    with pytest.raises(RecipeError, match=r"model\.activation_checkpointing.*requires a plan") as caught:
        prepared("auto")
    assert "block" in str(caught.value)
    with pytest.raises(UsageError, match="'2GiB' requires a plan"):
        checkpointing_as_requested(our_gpt(), "2GiB")


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        ("blocks", "did you mean block"),
        ("12", "not a size of memory"),
        ("0GiB", "not a size"),
        ("twelve", "none, block"),
    ],
)
def test_what_a_recipe_may_not_say(ask: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        prepared(ask)
