"""The loss in chunks against the plain one in float64, in every setting that training has."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager
from torch.fx import GraphModule
from torch.nn.utils.parametrizations import weight_norm

from tests.engine.plain import cut, gradients, relative_error
from trainwright.checkpoint.cursor import StepBatch
from trainwright.checkpoint.scaler import LossScaler
from trainwright.checkpoint.train_state import TrainState
from trainwright.engine import chunked
from trainwright.engine.chunked import chunked_cross_entropy, logits_bytes
from trainwright.engine.head import head_of, hf_head_of
from trainwright.engine.losses import hf_causal_lm, language_model
from trainwright.engine.precision import Precision
from trainwright.engine.step import make_step
from trainwright.errors import DataError, UsageError
from trainwright.models.gpt import gpt
from trainwright.models.hf import hf_model
from trainwright.models.lora import add_lora
from trainwright.models.lstm import lstm

N, D, V = 40, 16, 50
COMPILES = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own making


@pytest.fixture(autouse=True)
def several_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Six of seven rows, the last one short."""
    monkeypatch.setitem(chunked.CHUNK_BYTES, "cpu", 4 * V * 7)
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


@pytest.fixture
def two_chunks(several_chunks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks have at most 30 rows. Each is a part of the compiled graph."""
    monkeypatch.setitem(chunked.CHUNK_BYTES, "cpu", 4 * V * 30)


def problem(dtype: torch.dtype = torch.float32, *, bias: bool = False) -> tuple[list[Tensor], Tensor]:
    """hidden, weight and perhaps a bias; targets of which some are not counted."""
    shapes = [(N, D), (V, D), *([(V,)] if bias else [])]
    target = torch.randint(V, (N,))
    target[::5] = -100
    return [torch.randn(*shape, dtype=dtype).requires_grad_() for shape in shapes], target


def ours(inputs: list[Tensor], target: Tensor, **options: Any) -> Tensor:
    hidden, weight, *bias = inputs
    return chunked_cross_entropy(hidden, weight, target, bias_V=bias[0] if bias else None, **options)


def reference(
    inputs: list[Tensor], target: Tensor, *, z_loss: float = 0.0, softcap: float = 0.0, **options: Any
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The loss as one writes it down, in float64, and its gradients. ``options`` are those of F.cross_entropy."""
    inputs = [each.detach().double().requires_grad_() for each in inputs]
    logits = F.linear(*inputs)
    logits = softcap * torch.tanh(logits / softcap) if softcap else logits
    loss = F.cross_entropy(logits, target, reduction="sum", **options)
    loss = loss + z_loss * (logits.logsumexp(1).square() * (target != options.get("ignore_index", -100))).sum()
    return loss.detach(), torch.autograd.grad(loss, inputs)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("aligned", [1, 64])
@pytest.mark.parametrize(("weighed", "ignored"), [(False, -100), (True, 7)], ids=["plain", "class weights"])
def test_every_option_against_float64(
    dtype: torch.dtype, smoothing: float, aligned: int, weighed: bool, ignored: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One class weighs nothing. The weights do not apply to the z-loss, also in the reference."""
    monkeypatch.setitem(chunked.CLASS_ALIGNMENT, "cpu", aligned)
    bound = 1e-6 if dtype is torch.float32 else 1e-14
    weight = None
    if weighed:
        weight = torch.rand(V, dtype=dtype) * 3
        weight[5] = 0.0
    for bias, z_loss, softcap in itertools.product((False, True), (0.0, 0.01), (0.0, 3.0)):
        options: dict[str, Any] = {"ignore_index": ignored, "label_smoothing": smoothing}
        options |= {"z_loss": z_loss, "softcap": softcap}
        inputs, target = problem(dtype, bias=bias)
        target[target == -100] = ignored
        target[1] = 5
        loss = ours(inputs, target, weight_V=weight, **options)
        expected, grads = reference(inputs, target, weight=None if weight is None else weight.double(), **options)
        assert abs(loss.item() / expected.item() - 1) < bound
        for mine, other in zip(torch.autograd.grad(loss, inputs), grads, strict=True):
            assert relative_error(mine.double(), other) < bound


def test_weights_of_classes_in_fp16_are_there_when_the_gradients_are_made() -> None:
    """There they are made in the backward pass. As near as the plain loss, which rounds the same logits."""
    inputs, target = problem()
    weight = torch.rand(V)
    expected = reference(inputs, target, weight=weight.double())[1]

    def error(loss: Tensor) -> float:
        made = torch.autograd.grad(loss, inputs)
        return max(relative_error(mine.double(), other) for mine, other in zip(made, expected, strict=True))

    with torch.autocast("cpu", torch.float16):
        mine = ours(inputs, target, weight_V=weight)
        plain = F.cross_entropy(F.linear(*inputs).float(), target, weight, reduction="sum")
    assert error(mine) < 1.3 * error(plain) < 0.01


def test_weights_that_torch_refuses_are_refused() -> None:
    inputs, target = problem()
    with pytest.raises(RuntimeError, match="weight tensor should be defined"):
        ours(inputs, target, weight_V=torch.ones(V - 1))
    with pytest.raises(UsageError, match="not learned"):
        ours(inputs, target, weight_V=torch.ones(V, requires_grad=True))


def test_a_row_that_is_ignored_may_hold_anything() -> None:
    inputs, target = problem()
    inputs[0].data[0] = float("inf")
    assert target[0] == -100
    for weight in (None, torch.rand(V)):
        expected = F.cross_entropy(F.linear(*inputs), target, weight, reduction="sum", label_smoothing=0.1)
        torch.testing.assert_close(ours(inputs, target, weight_V=weight, label_smoothing=0.1), expected)
        assert expected.isfinite()


def test_the_gradient_is_multiplied_and_may_be_asked_for_twice() -> None:
    inputs, target = problem(bias=True)
    loss = 0.3 * ours(inputs, target)
    once, again = torch.autograd.grad(loss, inputs, retain_graph=True), torch.autograd.grad(loss, inputs)
    _, expected = reference(inputs, target)
    for first, second, other in zip(once, again, expected, strict=True):
        assert relative_error(first.double(), 0.3 * other) < 1e-6
        assert relative_error(second.double(), 0.3 * other) < 1e-6


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_what_is_frozen_gets_no_gradient(frozen: int) -> None:
    inputs, target = problem(bias=True)
    inputs[frozen].requires_grad_(False)
    ours(inputs, target).backward()  # type: ignore[no-untyped-call]
    assert [each.grad is None for each in inputs] == [number == frozen for number in range(3)]


def test_without_gradients_none_are_made() -> None:
    inputs, target = problem()
    with torch.no_grad():
        loss = ours(inputs, target)
    assert not loss.requires_grad
    assert abs(loss.item() / reference(inputs, target)[0].item() - 1) < 1e-6


def test_a_second_derivative_is_refused() -> None:
    inputs, target = problem()
    with pytest.raises(UsageError, match="no second derivative"):
        torch.autograd.grad(ours(inputs, target), inputs, create_graph=True)


def test_no_rows_and_no_counted_rows_give_zero() -> None:
    inputs, target = problem()
    for kept in (target[:0], torch.full_like(target, -100)):
        loss = ours([inputs[0][: len(kept)], inputs[1]], kept)
        assert loss.item() == 0.0
        mean = loss / (kept != -100).sum()
        assert mean.isnan()
        assert not torch.autograd.grad(loss, inputs[1], retain_graph=True)[0].any()
        assert not torch.autograd.grad(mean, inputs[1])[0].any(), "as of the plain loss"


@pytest.mark.parametrize("large", [1e4, float("inf"), float("nan")])
def test_large_and_broken_numbers_as_in_the_plain_loss(large: float) -> None:
    inputs, target = problem()
    inputs[0].data[3, 0] = large
    expected = F.cross_entropy(F.linear(*inputs), target, reduction="sum")
    torch.testing.assert_close(ours(inputs, target), expected, equal_nan=True)


def test_the_logits_are_never_whole() -> None:
    """The largest tensor that any operator makes has the elements of one chunk or of a gradient."""
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = [0]

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor):
                largest[0] = max(largest[0], out.numel())
            return out

    rows = 40 * V
    hidden, weight = torch.randn(rows, D, requires_grad=True), torch.randn(V, D, requires_grad=True)
    with Sizes():
        chunked_cross_entropy(hidden, weight, torch.randint(V, (rows,))).backward()
    assert largest[0] == hidden.numel() < rows * V


# the loss of the engine


def model_of(**options: Any) -> nn.Module:
    torch.manual_seed(1)
    return gpt(**{"vocab_size": V, "block_size": 8, "layers": 2, "heads": 2, "d_model": D, **options})


def tokens(rows: int = 6) -> tuple[Tensor, Tensor]:
    ids = torch.randint(V, (rows, 9))
    target = ids[:, 1:].clone()
    target[1, 3:] = -100
    target[4] = -100
    return ids[:, :-1], target


def plain(model: nn.Module, batch: Any) -> Any:
    return language_model(model, batch, chunked=False)


def parts(model: nn.Module, batch: Any) -> Any:
    return language_model(model, batch, chunked=True)


def doubled(model: nn.Module, batch: StepBatch) -> Tensor:
    return gradients(copy.deepcopy(model).double(), plain, batch)


@pytest.mark.parametrize("micro", [6, 2, 4])
@pytest.mark.parametrize(
    "options",
    [{}, {"tied": False}, {"logit_softcap": 2.0}, {"norm": "rms", "positions": "rope", "tied": False}],
    ids=str,
)
def test_the_engine_accumulates_the_same_gradients(options: dict[str, Any], micro: int) -> None:
    """Tied: the gradient of the head reaches the embedding. The reference is one micro-batch in float64."""
    model, data = model_of(**options), tokens()
    got = gradients(model, parts, cut(data, micro))
    assert relative_error(got.double(), doubled(model, cut(data, 6))) < 1e-5


@pytest.mark.parametrize("name", ["bf16", "fp16"])
@pytest.mark.parametrize("options", [{}, {"tied": False, "logit_softcap": 4.0}], ids=str)
def test_low_precision_is_as_near_as_the_plain_loss(name: Any, options: dict[str, Any]) -> None:
    model, batch = model_of(**options), cut(tokens(), 3)
    exact = doubled(model, cut(tokens_of(batch), 6))

    def error(loss: Any) -> float:
        seen: list[Tensor] = []
        state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.0))
        state.scaler = LossScaler(torch.device("cpu")) if name == "fp16" else state.scaler

        def look(state: TrainState) -> dict[str, Tensor]:
            seen.append(torch.cat([p.grad.flatten() for p in state.model.parameters() if p.grad is not None]))
            return {}

        make_step(loss, precision=Precision(name), probes=[look])(state, batch)
        return relative_error(seen[0].double(), exact)

    assert error(parts) < 1.3 * error(plain) < 0.01  # what each chunk gives the weight is rounded on its own


def tokens_of(batch: StepBatch) -> list[Tensor]:
    return [torch.cat([micro.data[at] for micro in batch.micro]) for at in range(2)]


def test_under_autocast_it_computes_in_the_dtype_of_a_linear_layer() -> None:
    inputs, target = problem()
    expected = ours([each.bfloat16() for each in inputs], target)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(ours(inputs, target), expected)
    assert not torch.equal(ours(inputs, target), expected)


def test_fp16_keeps_gradients_that_need_the_loss_scale() -> None:
    """Each row's share of the weight's gradient is below the least number of fp16; times the scale it is not."""
    hidden, weight = torch.full((8, D), 0.5), torch.zeros(V, D, requires_grad=True)
    with torch.autocast("cpu", torch.float16):
        loss = chunked_cross_entropy(hidden, weight, torch.zeros(8, dtype=torch.long)) * 1e-9
    (2.0**26 * loss).backward()
    assert weight.grad is not None
    assert weight.grad[1:].abs().min() > 0
    torch.testing.assert_close(weight.grad[1] / 2.0**26, torch.full((D,), 8 * 0.5 * 1e-9 / V), rtol=2e-3, atol=0)


def test_a_scale_is_not_rounded_to_the_precision_of_what_it_multiplies() -> None:
    """1/3 in bf16 is off by 0.1 %, for all elements alike."""
    hidden, weight = torch.randn(N, D).bfloat16().requires_grad_(), torch.randn(V, D).bfloat16()
    target = torch.randint(V, (N,))
    (once,) = torch.autograd.grad(chunked_cross_entropy(hidden, weight, target), hidden)
    (third,) = torch.autograd.grad(chunked_cross_entropy(hidden, weight, target) / 3, hidden)
    share = (third.double() * once.double()).sum() / once.double().square().sum()
    assert abs(share.item() * 3 - 1) < 3e-4


@pytest.mark.slow
def test_adapters_on_other_layers_and_a_frozen_head() -> None:
    model, batch = add_lora(model_of(), rank=2), cut(tokens(), 6)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    assert head_of(model) is not None
    assert relative_error(gradients(model, parts, batch).double(), doubled(model, batch)) < 1e-5
    assert model.get_parameter("head.weight").grad is None


@COMPILES
@pytest.mark.slow
@pytest.mark.parametrize("compiled", ["model", "loss"])
def test_compiled(compiled: str, two_chunks: None) -> None:
    model, batch = model_of(layers=1), cut(tokens(), 6)
    exact = doubled(model, batch)
    loss = torch.compile(parts, backend="aot_eager") if compiled == "loss" else parts
    if compiled == "model":
        model.compile(backend="aot_eager")
    assert relative_error(gradients(model, loss, batch).double(), exact) < 1e-5


@COMPILES
@pytest.mark.slow
def test_compiled_whole_the_operation_does_not_break_the_graph(two_chunks: None) -> None:
    inputs, target = problem()
    weight = torch.rand(V)
    for given in ({}, {"weight_V": weight, "label_smoothing": 0.1}):
        loss = torch.compile(ours, backend="aot_eager", fullgraph=True)(inputs, target, **given)
        expected = reference(inputs, target, **({"weight": weight.double(), "label_smoothing": 0.1} if given else {}))
        for mine, other in zip(torch.autograd.grad(loss, inputs), expected[1], strict=True):
            assert relative_error(mine.double(), other) < 1e-6


@pytest.mark.parametrize("label", [V, -1])
def test_a_label_out_of_range_names_its_rows(label: int) -> None:
    ids, target = tokens()
    target[2, 1:] = target[5, 0] = label
    messages = []
    for loss in (parts, plain):
        state = TrainState(model := model_of(), torch.optim.SGD(model.parameters(), lr=0.1))
        with pytest.raises(DataError) as caught:
            make_step(loss)(state, cut((ids, target), 6, first_id=500))
        assert caught.value.sample_ids == (502, 505)
        messages.append(caught.value.message)
    assert messages[0] == messages[1]


def test_auto_is_in_chunks_only_beyond_what_there_is_room_for() -> None:
    model, batch = model_of(), tokens()
    seen: list[tuple[int, ...]] = []
    model.register_forward_hook(lambda module, args, output: seen.append(tuple(output.shape)))
    needed = logits_bytes(48, V)
    for room in (None, needed, needed - 1):
        language_model(model, batch, max_logits_bytes=room)
    assert seen == [(6, 8, V), (6, 8, V), (6, 8, D)]
    language_model(model, batch, chunked=False, max_logits_bytes=0)
    language_model(model, batch, chunked=True, max_logits_bytes=None)
    assert seen[3:] == [(6, 8, V), (6, 8, D)], "what is asked for counts, whatever there is room for"


# which models take part


def test_a_model_without_a_head_of_its_own_is_refused_or_left_alone() -> None:
    model = nn.Sequential(nn.Embedding(V, D), nn.Linear(D, V))
    language_model(model, tokens())
    with pytest.raises(UsageError, match="Sequential hides the input") as caught:
        language_model(model, tokens(), chunked=True)
    assert "loss.chunked: auto" in caught.value.remedy


@pytest.mark.slow
def test_heads_that_are_more_than_a_linear_layer() -> None:
    assert head_of(lstm(vocab_size=V, d_model=D)) is not None
    assert head_of(add_lora(model_of(tied=False), targets=["head"])) is None
    model = model_of(tied=False)
    weight_norm(model.head)
    batch = cut(tokens(), 6)
    assert relative_error(gradients(model, parts, batch).double(), doubled(model, batch)) < 1e-5


HF = {
    "GPT2LMHeadModel": {"n_embd": D, "n_layer": 1, "n_head": 2, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0},
    "LlamaForCausalLM": {"num_key_value_heads": 2},
    "Gemma2ForCausalLM": {"num_key_value_heads": 2, "head_dim": 8},  # bounds its logits
    "GPTJForCausalLM": {"n_embd": D, "n_layer": 1, "n_head": 2, "rotary_dim": 4, "resid_pdrop": 0, "embd_pdrop": 0},
}
SHARED = {"hidden_size": D, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}


def of_transformers(architecture: str, **more: Any) -> nn.Module:
    sizes = HF.get(architecture, {})
    torch.manual_seed(2)
    return hf_model(architecture=architecture, vocab_size=V, **({} if "n_embd" in sizes else SHARED), **sizes, **more)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", HF)
def test_models_of_transformers(architecture: str) -> None:
    model, data = of_transformers(architecture), tokens()
    got = gradients(model, lambda model, batch: hf_causal_lm(model, batch, chunked=True), cut(data, 4))
    whole = copy.deepcopy(model).double()
    expected = gradients(whole, lambda model, batch: hf_causal_lm(model, batch, chunked=False), cut(data, 6))
    assert relative_error(got.double(), expected) < 1e-5


def aot_eager_in_place_of_inductor(graph: GraphModule, inputs: list[Tensor], **_: object) -> Any:
    return aot_eager(graph, inputs)


@COMPILES
@pytest.mark.slow
def test_a_compiled_model_of_transformers_stays_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the kernels: of those a C++ compiler makes one in a second or two."""
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", aot_eager_in_place_of_inductor)
    model, data = of_transformers("GPT2LMHeadModel"), tokens()
    expected = gradients(
        copy.deepcopy(model), lambda model, batch: hf_causal_lm(model, batch, chunked=False), cut(data, 6)
    )
    model.compile()
    got = gradients(model, lambda model, batch: hf_causal_lm(model, batch, chunked=True), cut(data, 6))
    assert relative_error(got, expected) < 1e-5
    assert model.base_model._compiled_call_impl is not None  # type: ignore[union-attr]


@pytest.mark.slow
def test_what_multiplies_its_logits_is_left_alone() -> None:
    model = of_transformers("CohereForCausalLM")
    before = {name: module.training for name, module in model.named_modules()}
    assert hf_head_of(model) is None
    assert {name: module.training for name, module in model.named_modules()} == before
    with pytest.raises(UsageError, match="CohereForCausalLM"):
        hf_causal_lm(model, tokens(), chunked=True)
    assert hf_head_of(of_transformers("GraniteForCausalLM", logits_scaling=4.0)) is None
    assert hf_head_of(nn.Linear(2, 2)) is None
