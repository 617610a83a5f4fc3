"""The tracer names the first op that broke the numbers, its module, line and samples; and no op of a healthy step."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from trainwright.replay.trace import Bad, Tracing
from zoo.host import Attention, cnn, mlp

INF = float("inf")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def traced(model: nn.Module, x: Any, loss: Callable[[Any], Tensor], *, grad: Tensor | None = None) -> Tracing:
    """One forward, loss and backward, seen."""
    with Tracing({"model": model}) as trace:
        loss(model(x)).backward(grad)
    return trace


def bad_of(trace: Tracing) -> Bad:
    assert trace.first_bad is not None
    return trace.first_bad


def line_of(function: Any, text: str) -> str:
    """``test_trace.py:123`` of the line of ``function`` that holds ``text``."""
    lines, start = inspect.getsourcelines(function)
    at = next(i for i, line in enumerate(lines) if text in line)
    return f"test_trace.py:{start + at}"


class Block(nn.Module):
    """Something done between two layers."""

    def __init__(self, middle: Callable[[Tensor], Tensor], features: int = 6) -> None:
        super().__init__()
        self.first, self.last, self.middle = nn.Linear(features, 6), nn.Linear(6, 3), middle

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x)))


def with_zero(x: Tensor, rows: list[int]) -> Tensor:
    """A zero in these rows, exactly, that still has a gradient."""
    keep = torch.ones_like(x)
    keep[rows] = 0
    return x * keep


# The hardest: what is hidden in one direction


@pytest.mark.parametrize("how", ["where", "index", "fill"])
def test_log_behind_where_gives_nan_in_backward_only(how: str) -> None:
    def middle(h: Tensor) -> Tensor:
        h = with_zero(h.abs(), [2, 5])
        if how == "where":
            return torch.where(h > 0, h.log(), 0)
        y = h.log()
        if how == "fill":
            return y.masked_fill(h == 0, 0.0)
        y = y.clone()
        y[h == 0] = 0
        return y

    bad = bad_of(traced(Block(middle), torch.randn(8, 6), lambda y: y.pow(2).mean()))
    assert (bad.what, bad.kind, bad.op.phase, bad.reached) == ("where_branch_backward", "op", "backward", "gradient")
    assert bad.rows == (2, 5)
    assert bad.hidden_by is not None


@pytest.mark.parametrize("f", [torch.sqrt, lambda x: 1 / x, lambda x: x.log() * x, lambda x: x**0.5, torch.rsqrt])
def test_other_functions_behind_where(f: Callable[[Tensor], Tensor]) -> None:
    def middle(h: Tensor) -> Tensor:
        h = with_zero(h.abs(), [1])
        return torch.where(h > 0, f(h), 0)

    trace = traced(Block(middle), torch.randn(4, 6), lambda y: y.pow(2).mean())
    bad = bad_of(trace)
    assert (bad.what, bad.rows) == ("where_branch_backward", (1,))
    source = bad.op.source
    assert source is not None and source.startswith("test_trace.py:")
    assert bad.op.module == ""


def test_masking_before_the_log_is_healthy() -> None:
    def middle(h: Tensor) -> Tensor:
        h = with_zero(h.abs(), [2])
        return torch.where(h > 0, torch.where(h > 0, h, 1).log(), 0)

    assert traced(Block(middle), torch.randn(8, 6), lambda y: y.sum()).first_bad is None


def test_exp_behind_where() -> None:
    def middle(h: Tensor) -> Tensor:
        big = h * torch.tensor([1.0, 1, 1000, 1]).unsqueeze(1)
        return torch.where(big.abs() < 50, big.abs().exp(), 0)

    bad = bad_of(traced(Block(middle), torch.randn(4, 6) + 1, lambda y: y.sum()))
    assert (bad.what, bad.op.name, bad.rows) == ("where_branch_backward", "exp", (2,))


class Distance(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(5, 4)

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        a, b = (self.net(each) for each in pair)
        return (a - b).pow(2).sum(1).sqrt()


def test_sqrt_at_zero_has_a_finite_loss_and_a_nan_gradient() -> None:
    a, b = torch.randn(8, 5), torch.randn(8, 5)
    b[3] = a[3]
    with Tracing({"model": (model := Distance())}) as trace:
        loss = model((a, b)).mean()
        loss.backward()
    bad = bad_of(trace)
    assert loss.isfinite()
    assert (bad.what, bad.op.phase, bad.rows, bad.reached) == ("sqrt_at_zero_backward", "backward", (3,), "gradient")
    assert bad.op.source == line_of(Distance.forward, ".sqrt()")
    assert bad.op.forward_op is not None and trace.ops[bad.op.forward_op].name == "sqrt"


@pytest.mark.parametrize("f", [lambda d: torch.linalg.norm(d, dim=1), lambda d: d.norm(dim=1), lambda d: d.std(1)])
def test_functions_with_a_subgradient_at_zero_are_healthy(f: Callable[[Tensor], Tensor]) -> None:
    def middle(h: Tensor) -> Tensor:
        return h * f(with_zero(h, [0])).unsqueeze(1)

    assert traced(Block(middle), torch.randn(4, 6), lambda y: y.sum()).first_bad is None


class SquareRoot(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sqrt()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grads[0] / (2 * x.sqrt())


def test_a_custom_function_is_seen_inside() -> None:
    model = Block(lambda h: SquareRoot.apply(with_zero(h.abs(), [1])))
    bad = bad_of(traced(model, torch.randn(4, 6), lambda y: y.sum()))
    assert (bad.what, bad.op.name, bad.op.phase, bad.rows) == ("sqrt_at_zero_backward", "div", "backward", (1,))
    assert bad.op.source == line_of(SquareRoot.backward, "grads[0]")


class Checkpointed(nn.Module):
    def __init__(self, block: nn.Module, *, use_reentrant: bool) -> None:
        super().__init__()
        self.into, self.block, self.use_reentrant = nn.Linear(6, 6), block, use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, self.into(x), use_reentrant=self.use_reentrant)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize(
    ("f", "what"), [(torch.sqrt, "sqrt_at_zero_backward"), (torch.log, "log_of_zero"), (lambda h: h / h, "div_by_zero")]
)
def test_under_checkpointing(f: Callable[[Tensor], Tensor], what: str, use_reentrant: bool) -> None:
    model = Checkpointed(Block(lambda h: f(with_zero(h.abs(), [1]))), use_reentrant=use_reentrant)
    trace = traced(model, torch.randn(4, 6), lambda y: y.sum())
    bad = bad_of(trace)
    assert (bad.what, bad.rows, bad.op.module) == (what, (1,), "block")
    assert not trace._modules.paths, "a checkpoint that stops early in the backward pass leaves no module on the stack"
    forward = [op for op in trace.ops if op.phase == "forward" and op.name == "addmm"]
    assert {op.module for op in forward} == {"into", "block.first", "block.last"}


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_with_dropout_is_healthy(use_reentrant: bool) -> None:
    block = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.ReLU(inplace=True), nn.Linear(6, 3))
    model = Checkpointed(block, use_reentrant=use_reentrant)
    trace = traced(model, torch.randn(4, 6), lambda y: y.sum())
    assert trace.first_bad is None
    slopes = [op for op in trace.ops if op.phase == "backward" and op.name == "threshold_backward"]
    assert [op.module for op in slopes] == ["block.2"]


# Masks


def attention_with(mask: Tensor) -> Callable[[Tensor], Tensor]:
    def middle(h: Tensor) -> Tensor:
        return (h @ h.transpose(1, 2)).masked_fill(mask, -INF).softmax(-1) @ h

    return middle


def test_a_fully_masked_row_names_the_sample() -> None:
    mask = torch.ones(4, 5, 5, dtype=torch.bool).triu(1)
    mask[2, 3] = True
    bad = bad_of(traced(Block(attention_with(mask)), torch.randn(4, 5, 6), lambda y: y.mean()))
    assert (bad.what, bad.op.name, bad.rows, bad.reached) == ("softmax_all_masked", "softmax", (2,), "loss")


def test_a_fully_masked_row_hidden_by_nan_to_num_is_still_found_by_its_gradient() -> None:
    mask = torch.zeros(4, 5, 5, dtype=torch.bool)
    mask[1, 0] = True

    def middle(h: Tensor) -> Tensor:
        added = torch.zeros(4, 5, 5).masked_fill(mask, -INF)
        return (h @ h.transpose(1, 2) + added).softmax(-1).nan_to_num(0) @ h

    bad = bad_of(traced(Block(middle), torch.randn(4, 5, 6), lambda y: y.mean()))
    assert (bad.what, bad.rows, bad.reached) == ("softmax_all_masked", (1,), "gradient")


@pytest.mark.parametrize("how", ["fill", "add", "buffer", "log", "argument"])
def test_a_causal_mask_is_healthy(how: str) -> None:
    T = 5
    allowed = torch.ones(T, T, dtype=torch.bool).tril()

    class Causal(Block):
        def __init__(self) -> None:
            super().__init__(lambda h: h)
            self.register_buffer("mask", torch.zeros(T, T).masked_fill(~allowed, -INF))

        def forward(self, x: Tensor, given: Tensor) -> Tensor:  # type: ignore[override]
            h = self.first(x)
            scores = h @ h.transpose(1, 2)
            fill = scores.masked_fill(~allowed, -INF)
            add = scores + torch.full((T, T), -INF).triu(1)
            ways = {"fill": fill, "add": add, "buffer": scores + self.mask, "log": scores + allowed.float().log()}
            return self.last(ways.get(how, scores + given).softmax(-1) @ h)

    with Tracing({"model": (model := Causal())}) as trace:
        model(torch.randn(4, T, 6), torch.zeros(T, T).masked_fill(~allowed, -INF)).mean().backward()
    assert trace.first_bad is None


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.feed = Attention(16, 2), mlp(16, 16, 32)
        self.norms = nn.ModuleList([nn.LayerNorm(16), nn.LayerNorm(16)])

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.feed(self.norms[1](x))


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_a_healthy_causal_transformer(dtype: torch.dtype | None) -> None:
    model = nn.Sequential(nn.Embedding(33, 16), Layer(), nn.Dropout(0.1), Layer(), nn.LayerNorm(16), nn.Linear(16, 33))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    ids = torch.randint(0, 33, (4, 12))
    with Tracing({"model": model}) as trace:
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    assert trace.first_bad is None
    assert {op.phase for op in trace.ops} == {"forward", "backward", "update"}
    softmax = [op for op in trace.ops if op.name == "softmax" and op.phase == "forward"]
    assert [op.module for op in softmax] == ["1.attention", "3.attention"]
    slopes = [op for op in trace.ops if op.name == "softmax_backward_data"]
    assert [trace.ops[op.forward_op or 0] for op in slopes] == softmax[::-1]
    assert all(op.source and op.source.startswith("host.py:") for op in softmax + slopes)
    assert not model[1]._forward_hooks and not model[1]._forward_pre_hooks


def test_scaled_dot_product_attention_with_a_masked_row_is_healthy() -> None:
    def middle(h: Tensor) -> Tensor:
        allowed = torch.ones(5, 5, dtype=torch.bool).tril()
        allowed[0] = False
        return F.scaled_dot_product_attention(h, h, h, attn_mask=allowed)

    assert traced(Block(middle), torch.randn(4, 5, 6), lambda y: y.mean()).first_bad is None


# The loss


def test_log_of_zero_then_times_zero() -> None:
    t = torch.tensor([0, 1, 2, 0])

    def loss(z: Tensor) -> Tensor:
        z = z + torch.tensor([[0.0], [0], [1], [0]]) * torch.tensor([500.0, 0, 0])
        return -(F.one_hot(t, 3) * torch.log(z.softmax(1))).sum()

    bad = bad_of(traced(nn.Linear(5, 3), torch.randn(4, 5), loss))
    assert (bad.what, bad.op.name, bad.rows, bad.reached, bad.op.module) == ("log_of_zero", "log", (2,), "loss", None)
    assert bad.op.source == line_of(test_log_of_zero_then_times_zero, "torch.log(z")


def test_no_valid_target_leaves_the_gradients_alone() -> None:
    t = torch.full((4,), -100)
    bad = bad_of(traced(nn.Linear(5, 3), torch.randn(4, 5), lambda z: F.cross_entropy(z, t)))
    assert (bad.what, bad.op.name, bad.reached) == ("no_valid_target", "nll_loss_forward", "loss")


def test_label_smoothing_over_masked_logits() -> None:
    def loss(z: Tensor) -> Tensor:
        z = z.clone()
        z[:, 2] = -INF
        return F.cross_entropy(z, torch.tensor([0, 1, 0, 1]), label_smoothing=0.1)

    bad = bad_of(traced(nn.Linear(5, 3), torch.randn(4, 5), loss))
    assert (bad.what, bad.op.name, bad.reached) == ("inf_logit_smoothing", "sum", "loss")
    assert bad.rows == (0, 1, 2, 3)


def test_masked_logits_without_smoothing_are_healthy_unless_they_are_the_target() -> None:
    hidden = torch.tensor([False, False, True])

    def loss(t: list[int]) -> Callable[[Tensor], Tensor]:
        return lambda z: F.cross_entropy(z.masked_fill(hidden, -INF), torch.tensor(t))

    assert traced(nn.Linear(5, 3), torch.randn(2, 5), loss([0, 1])).first_bad is None
    assert bad_of(traced(nn.Linear(5, 3), torch.randn(2, 5), loss([0, 2]))).what == "inf_at_target"


def test_ctc_names_the_sample_whose_target_is_too_long() -> None:
    targets, lengths = torch.tensor([[1, 2, 3], [1, 1, 1], [2, 3, 1]]), torch.tensor([3, 3, 3])

    def loss(z: Tensor, zero: bool = False) -> Tensor:
        log_probs = z.log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(log_probs, targets, torch.tensor([6, 4, 6]), lengths, zero_infinity=zero)

    model, x = nn.Linear(5, 4), torch.randn(3, 6, 5)
    bad = bad_of(traced(model, x, loss))
    assert (bad.what, bad.rows, bad.reached) == ("ctc_infeasible", (1,), "loss")
    model.zero_grad()
    assert traced(model, x, lambda z: loss(z, True)).first_bad is None


def test_empty_sequence_mean_pooled() -> None:
    keep = torch.ones(4, 5)
    keep[3] = 0

    def middle(h: Tensor) -> Tensor:
        return (h * keep.unsqueeze(-1)).sum(1) / keep.sum(1, keepdim=True)

    bad = bad_of(traced(Block(middle), torch.randn(4, 5, 6), lambda y: y.sum()))
    assert (bad.what, bad.op.name, bad.rows, bad.op.module) == ("div_by_zero", "div", (3,), "")


def test_mean_of_nothing() -> None:
    bad = bad_of(traced(nn.Linear(5, 3), torch.randn(4, 5), lambda z: z[z > 1e9].mean()))
    assert (bad.what, bad.op.name) == ("mean_of_empty", "mean")


def test_exp_of_a_large_log_variance() -> None:
    def loss(z: Tensor) -> Tensor:
        scale = torch.tensor([1.0, 1, 1, 1e4]).unsqueeze(1)
        return ((z.abs() + 1) * scale).exp().sum()

    bad = bad_of(traced(nn.Linear(5, 3), torch.randn(4, 5), loss))
    assert (bad.what, bad.rows) == ("exp_overflow", (3,))
    assert bad.op.inputs[0].max > 88.7


# What comes in


@pytest.mark.parametrize("value", [float("nan"), INF, -INF])
def test_a_non_finite_feature(value: float) -> None:
    x = torch.randn(8, 20)
    x[5, 3] = value
    bad = bad_of(traced(mlp(), x, lambda z: F.cross_entropy(z, torch.zeros(8, dtype=torch.long))))
    assert (bad.kind, bad.name, bad.rows) == ("input", "input[0]", (5,))


def test_a_feature_that_is_imputed_is_healthy() -> None:
    x = torch.randn(8, 20)
    x[5, 3] = float("nan")
    model = nn.Sequential(type("Impute", (nn.Module,), {"forward": lambda self, x: x.nan_to_num(0)})(), mlp())
    assert traced(model, x, lambda z: z.sum()).first_bad is None


def test_a_non_finite_target() -> None:
    t = torch.randn(8, 10)
    t[2, 1] = float("nan")
    bad = bad_of(traced(mlp(), torch.randn(8, 20), lambda z: F.mse_loss(z, t)))
    assert (bad.kind, bad.rows, bad.reached) == ("target", (2,), "loss")


def test_a_non_finite_weight_and_buffer_are_named() -> None:
    model = mlp()
    model[2].weight.data[0, 0] = float("nan")
    bad = bad_of(traced(model, torch.randn(8, 20), lambda z: z.sum()))
    assert (bad.kind, bad.name, bad.op.module) == ("weight", "2.weight", "2")
    net = cnn().eval()
    net[4].running_var[1] = float("nan")
    bad = bad_of(traced(net, torch.randn(4, 1, 8, 8), lambda z: z.sum()))
    assert (bad.kind, bad.name, bad.op.module) == ("buffer", "4.running_var", "4")


# Precision


def test_fp16_overflow_under_autocast() -> None:
    model = mlp()
    model[2].weight.data.mul_(1e4)
    x = torch.randn(8, 20) * 10
    with Tracing({"model": model}) as trace:
        with torch.autocast("cpu", torch.float16):
            z = model(x)
        F.cross_entropy(z.float(), torch.zeros(8, dtype=torch.long)).backward()
    bad = bad_of(trace)
    assert (bad.what, bad.op.module, bad.op.dtype, bad.fp32_finite) == ("fp16_overflow", "2", "float16", True)


@pytest.mark.parametrize("how", ["mul", "cast", "add", "inplace"])
def test_a_mask_too_large_for_fp16(how: str) -> None:
    hide = torch.zeros(4, 5)
    hide[1], hide[2, 3] = 1, 1

    def loss(z: Tensor) -> Tensor:
        z = z.half()
        if how == "mul":
            z = z + hide.half() * -1e9
        elif how == "cast":
            z = z + (hide * -1e9).half()
        elif how == "add":
            z = (z - hide.half() * 6e4) - hide.half() * 6e4
        else:
            z = z + hide.half().mul_(-1e9)
        return z.softmax(-1).float().sum()

    bad = bad_of(traced(nn.Linear(6, 5), torch.randn(4, 6), loss))
    assert (bad.what, bad.reached) == ("mask_overflow", "loss")


def test_bf16_overflow_is_no_matter_of_the_type() -> None:
    bad = bad_of(traced(nn.Linear(6, 5).bfloat16(), torch.randn(4, 6).bfloat16(), lambda z: (z * 1e38 * 1e38).sum()))
    assert bad.what == "overflow"


@pytest.mark.parametrize("foreach", [True, False])
def test_adam_with_an_eps_below_fp16(foreach: bool) -> None:
    model = nn.Linear(6, 5).half()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-8, foreach=foreach)
    x = torch.randn(4, 6).half() * 1e-2
    x[:, 0] = 0
    with Tracing({"model": model}) as trace:
        model(x).float().mean().backward()
        optimizer.step()
    bad = bad_of(trace)
    assert (bad.op.phase, bad.what, bad.reached) == ("update", "div_by_zero", "weight")


# Where things are


def test_a_shared_module_called_twice_and_lstm_and_in_place() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.shared = nn.LSTM(6, 6, batch_first=True), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            h = self.shared(self.shared(self.rnn(x)[0])).relu_()
            return h.mul(0).exp_().sub(1).log_()

    bad = bad_of(traced(Twice(), torch.randn(4, 3, 6), lambda y: y.sum()))
    assert (bad.what, bad.op.name, bad.op.module) == ("log_of_zero", "log", "")


def test_a_nan_written_into_a_gradient_by_hand() -> None:
    model = mlp()
    with Tracing({"model": model}) as trace:
        model(torch.randn(4, 20)).sum().backward()
        bias = model[2].bias
        assert bias.grad is not None
        bias.grad[0] = float("nan")
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    bad = bad_of(trace)
    assert bad.op.source == line_of(test_a_nan_written_into_a_gradient_by_hand, "bias.grad[0]")
    assert bad.reached == "gradient"


def test_a_hook_that_breaks_a_gradient() -> None:
    model = mlp()
    model[0].weight.register_hook(lambda grad: grad / 0)
    bad = bad_of(traced(model, torch.randn(4, 20), lambda z: z.sum()))
    assert (bad.what, bad.op.phase) == ("div_by_zero", "backward")
    assert bad.op.source == line_of(test_a_hook_that_breaks_a_gradient, "lambda grad")


def test_infinite_values_that_reach_nothing_are_no_fault() -> None:
    def loss(z: Tensor) -> Tensor:
        with torch.no_grad():
            assert (z.sum() / 0).isinf()
        return z.sum()

    assert traced(mlp(), torch.randn(4, 20), loss).first_bad is None


def test_two_micro_batches_and_two_roots() -> None:
    roots = {"encoder": mlp(20, 8), "head": mlp(8, 3)}
    x = torch.randn(4, 20)
    with Tracing(roots) as trace:
        roots["head"](roots["encoder"](x)).sum().backward()
        roots["head"](roots["encoder"](x)).abs().mul(0).log().sum().backward()
    assert bad_of(trace).what == "log_of_zero"
    assert {op.module for op in trace.ops if op.name == "addmm"} == {
        f"{root}.{i}" for root in roots for i in (0, 2, 4)
    }  # fmt: skip


def test_tracing_changes_no_number() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(mlp(), nn.Dropout(0.5)), torch.randn(8, 20)

    def grads() -> list[Tensor]:
        torch.manual_seed(1)
        model.zero_grad()
        model(x).pow(2).sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    plain = grads()
    with Tracing({"model": model}):
        seen = grads()
    assert all(torch.equal(a, b) for a, b in zip(plain, seen, strict=True))


def test_a_loss_scale_too_large_overflows_in_backward() -> None:
    model = mlp()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**32)
    with Tracing({"model": model}) as trace:
        with torch.autocast("cpu", torch.float16):
            z = model(torch.randn(8, 20))
        scaler.scale(z.float().pow(2).mean()).backward()
    bad = bad_of(trace)
    assert (bad.what, bad.op.phase, bad.reached, bad.fp32_finite) == ("fp16_overflow", "backward", "gradient", True)


def test_the_micro_batch_is_counted() -> None:
    model, batches = mlp(), torch.randn(4, 4, 20)
    batches[2, 2, 0] = float("nan")
    with Tracing({"model": model}) as trace:
        for x in batches.clone().unbind():
            model(x).sum().backward()
    bad = bad_of(trace)
    assert (bad.kind, bad.rows, bad.op.micro_batch) == ("input", (2,), 2)


def test_transforms_and_sparse_gradients_can_be_seen() -> None:
    model, table = nn.Linear(4, 2), nn.Embedding(10, 4, sparse=True)
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, weights, (x,)).pow(2).sum()

    with Tracing({"model": model, "table": table}) as trace:
        torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, torch.randn(8, 4))
        model(table(torch.tensor([1, 2, 1]))).sum().backward()
    assert trace.ops and trace.first_bad is None


def test_a_log_mask_beside_ones_like_it_is_healthy() -> None:
    def middle(h: Tensor) -> Tensor:
        scores = h @ h.transpose(1, 2) + torch.ones(5, 5).tril().log()
        return (scores.softmax(-1) * torch.ones_like(scores)) @ h

    assert traced(Block(middle), torch.randn(4, 5, 6), lambda y: y.mean()).first_bad is None


def test_statistics_poisoned_by_a_batch_that_is_not_trained_on() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    x = torch.randn(4, 4)
    x[1, 1] = float("nan")
    with Tracing({"model": net}) as trace:
        with torch.no_grad():
            net(x)
        net(torch.randn(4, 4)).sum().backward()
    bad = bad_of(trace)
    assert (bad.kind, bad.rows, bad.reached) == ("input", (1,), "buffer")
