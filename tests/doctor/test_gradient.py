"""The laws of the gradient hold on healthy loops, and break, with the right place, where the backward pass is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trainwright as tw
from tests.rows import each_row
from trainwright.doctor.case import Case
from trainwright.doctor.diagnose import diagnose
from trainwright.doctor.gradient.measure.estimators import StraightThrough
from trainwright.runlog.records import Found

pytestmark = pytest.mark.slow  # watched loops, each of a few tenths of a second

Between = Callable[["Net", Tensor], Tensor]


class Net(nn.Module):
    """A residual block; ``between`` is what lies on its branch."""

    def __init__(self, between: Between) -> None:
        super().__init__()
        self.first, self.branch, self.head = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 3)
        self.norm, self.dropout, self.between = nn.BatchNorm1d(16), nn.Dropout(0.1), between

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.first(x))
        out: Tensor = self.head(self.dropout(self.norm(h + self.between(self, h))))
        return out


def plain(net: Net, h: Tensor) -> Tensor:
    return torch.tanh(net.branch(h))


def watched(
    between: Between = plain, *, micro: int = 1, divide: float = 1.0, dtype: torch.dtype = torch.float32
) -> Any:
    torch.manual_seed(0)
    x = torch.randn(128, 6)
    y = (x @ torch.randn(6, 3)).argmax(1)
    model = Net(between).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    with tw.watch(model, optimizer, out=None, quiet=True, laws="gradient") as watch:
        for _ in range(4):
            optimizer.zero_grad()
            for _ in range(micro):
                rows = torch.randperm(128)[:16]
                (F.cross_entropy(model(x[rows].to(dtype)).float(), y[rows]) / divide).backward()
            optimizer.step()
    assert watch.session.failures == []
    return watch


def states(watch: Any) -> dict[str, str]:
    laws = diagnose(Case(watch.records, finished=True)).laws
    return {each.name.removeprefix("gradient."): each.state for each in laws if each.name.startswith("gradient.")}


def alarms(watch: Any) -> dict[str, Found]:
    return {each.code: each for each in watch.findings() if each.severity != "info"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_laws_hold_on_a_healthy_loop(dtype: torch.dtype) -> None:
    watch = watched(dtype=dtype, micro=2, divide=2)
    assert states(watch) == {"reaches_all": "held", "is_the_derivative": "held", "adds_up": "held"}
    assert alarms(watch) == {}


def detached(net: Net, h: Tensor) -> Tensor:
    return torch.tanh(net.branch(h)).detach()


def without_graph(net: Net, h: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.tanh(net.branch(h))


def rebuilt(net: Net, h: Tensor) -> Tensor:
    return torch.tensor(net.branch(h).tolist(), dtype=h.dtype)


def whole_numbers(net: Net, h: Tensor) -> Tensor:
    return (9 * net.branch(h)).int().to(h.dtype)


def detached_weight(net: Net, h: Tensor) -> Tensor:
    return torch.tanh(F.linear(h, net.branch.weight.detach(), net.branch.bias.detach()))


@pytest.mark.parametrize("between", [detached, without_graph, rebuilt, whole_numbers, detached_weight])
def test_weights_that_no_gradient_reaches(between: Between) -> None:
    watch = watched(between)
    assert states(watch)["reaches_all"] == "broken"
    [(code, found)] = alarms(watch).items()
    assert code in ("law.gradient.reaches_all", "gradient.graph_cut")
    assert found.where.module == "branch" or code == "gradient.graph_cut"


class Reversed(torch.autograd.Function):
    """Gradient reversal."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return -0.5 * grad


def quantised(net: Net, h: Tensor) -> Tensor:
    w = net.branch.weight
    return torch.tanh(F.linear(h, w + (torch.round(20 * w) / 20 - w).detach(), net.branch.bias))


def reversed_gradient(net: Net, h: Tensor) -> Tensor:
    y: Tensor = Reversed.apply(torch.tanh(net.branch(h)))
    return y


def hooked(net: Net, h: Tensor) -> Tensor:
    y = torch.tanh(net.branch(h))
    if y.requires_grad:
        y.register_hook(lambda grad: 0.1 * grad)
    return y


def gated(net: Net, h: Tensor) -> Tensor:
    y = torch.tanh(net.branch(h))
    return y * y.detach().sigmoid()


def chosen(net: Net, h: Tensor) -> Tensor:
    """Hard choices between units, drawn by torch, which detaches within."""
    return F.gumbel_softmax(torch.tanh(net.branch(h)), hard=True)


@pytest.mark.parametrize("between", [quantised, reversed_gradient, hooked, gated, chosen])
def test_what_the_author_put_into_the_backward_pass_is_no_alarm(between: Between) -> None:
    assert alarms(watched(between)) == {}


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (lambda x: F.gumbel_softmax(x, hard=True), "gumbel_softmax"),
        (lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -8, 7), "fake_quantize_per_tensor_affine"),
        (lambda x: F.gumbel_softmax(x), ""),
        (torch.round, ""),
        (F.relu, ""),
        (lambda x: F.dropout(x), ""),
    ],
)
def test_functions_that_pass_a_gradient_where_they_have_no_slope(
    function: Callable[[Tensor], Tensor], found: str
) -> None:
    torch.manual_seed(0)
    x = torch.randn(16, 5, dtype=torch.float64, requires_grad=True)
    through, before = StraightThrough(), torch.get_rng_state()
    out = through(function, (x,), {})
    torch.set_rng_state(before)
    assert isinstance(out, Tensor) and torch.equal(out, function(x))
    assert bool(through.found) == bool(found)


class Codes(nn.Module):
    """A bottleneck of eight codes, that the optimizer holds; ``pull`` is a term of the loss that is not returned."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.codes, self.head = nn.Linear(6, 4), nn.Parameter(torch.randn(8, 4)), nn.Linear(4, 3)
        self.seen, self.pull = torch.zeros(0), torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        z = self.into(x)
        code = self.codes[torch.cdist(z, self.codes).argmin(1)].detach()
        self.seen, self.pull = z.detach(), F.mse_loss(z, code)
        out: Tensor = self.head(z + (code - z).detach())
        return out

    @torch.no_grad()
    def average(self) -> None:
        self.codes.lerp_(self.seen.mean(0), 0.05)

    def move(self) -> None:
        self.codes.data += 0.01 * (self.seen[:8] - self.codes.data)

    def leave(self) -> None:
        """Nothing updates them: they are cut off."""


@pytest.mark.parametrize(("follow", "is_cut"), [(Codes.average, False), (Codes.move, False), (Codes.leave, True)])
def test_codes_that_follow_otherwise_are_not_cut_off(follow: Callable[[Codes], None], is_cut: bool) -> None:
    torch.manual_seed(0)
    x, model = torch.randn(128, 6), Codes()
    y = (x @ torch.randn(6, 3)).argmax(1)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    with tw.watch(model, optimizer, out=None, quiet=True) as watch:
        for step in range(8):
            rows = torch.arange(16 * step, 16 * step + 16) % 128
            optimizer.zero_grad()
            (F.cross_entropy(model(x[rows]), y[rows]) + 0.25 * model.pull).backward()
            optimizer.step()
            follow(model)
    assert watch.session.failures == []
    cut = {"gradient.graph_cut", "law.gradient.reaches_all", "law.loss.every_term_matters"} & alarms(watch).keys()
    assert bool(cut) == is_cut


class Halved(torch.autograd.Function):
    """A square whose backward pass forgets the factor of two."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return grad * x


def wrong_function(net: Net, h: Tensor) -> Tensor:
    y: Tensor = Halved.apply(net.branch(h))
    return y


def written_to(net: Net, h: Tensor) -> Tensor:
    y = torch.sigmoid(net.branch(h))
    y.data.mul_(0.5)
    return y


def drawn_again(net: Net, h: Tensor) -> Tensor:
    def block(h: Tensor) -> Tensor:
        return F.dropout(torch.tanh(net.branch(h)), 0.5, net.training)

    out: Tensor = torch.utils.checkpoint.checkpoint(block, h, use_reentrant=False, preserve_rng_state=False)
    return out


@pytest.mark.parametrize("between", [wrong_function, written_to, drawn_again])
def test_a_backward_pass_that_does_not_fit_its_forward_pass(between: Between) -> None:
    watch = watched(between)
    assert states(watch)["is_the_derivative"] == "broken"
    names = {"gradient.wrong_backward", "gradient.saved_tensor_modified", "law.gradient.is_the_derivative"}
    assert len(alarms(watch).keys() & names) == 1


class Feedback(torch.autograd.Function):
    """The error goes back through weights of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, back: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x, back)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        x, back = ctx.saved_tensors
        return grad @ back, grad.T @ x, None


def through_feedback(net: Net, h: Tensor) -> Tensor:
    back = torch.randn(net.branch.weight.shape, generator=torch.Generator().manual_seed(3)).to(h)
    y: Tensor = Feedback.apply(h, net.branch.weight, back)
    return y


def test_a_backward_pass_with_weights_of_its_own_is_meant_so() -> None:
    watch = watched(through_feedback)
    assert states(watch)["is_the_derivative"] == "broken"
    assert alarms(watch) == {}


def test_a_kink_beside_the_weights_is_no_wrong_gradient() -> None:
    """The loss is steep only within 1e-6 of where a prediction is, which the usual step of a quotient steps over."""
    torch.manual_seed(0)
    x, model = torch.rand(16, 4), nn.Linear(4, 1)
    middle = model(x)[0].detach()
    optimizer = torch.optim.SGD(model.parameters(), 1e-12)
    with tw.watch(model, optimizer, out=None, quiet=True, laws="gradient") as watch:
        for _ in range(6):
            optimizer.zero_grad()
            out = model(x)
            steep = (out[0] - middle - 1e-6).abs() - (out[0] - middle + 1e-6).abs()
            (out.mean() - 0.1 * steep.sum()).backward()
            optimizer.step()
    assert states(watch)["is_the_derivative"] == "held"


@each_row(("divide", "code"), [(3.0, "law.gradient.adds_up"), (1.0, "accum.not_normalised")])
def test_micro_batches_that_do_not_add_up(divide: float, code: str) -> None:
    watch = watched(micro=4, divide=divide)
    assert states(watch)["adds_up"] == "broken"
    assert set(alarms(watch)) == {code}


def each_time(count: int) -> Callable[[int], int]:
    return lambda step: count


@each_row(
    ("told", "passes", "breaks"),
    [
        (2, each_time(2), False),
        (2, each_time(3), False),
        (1, each_time(1), False),
        (4, lambda step: 2 if step % 5 == 4 else 4, False),
        (2, each_time(1), True),
        (4, each_time(3), True),
        (3, lambda step: 3 if step % 5 == 4 else 1, True),
    ],
)
def test_a_step_has_as_many_micro_batches_as_were_told(told: int, passes: Callable[[int], int], breaks: bool) -> None:
    torch.manual_seed(0)
    x, model = torch.randn(128, 6), nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    with tw.watch(model, optimizer, accumulation=told, out=None, quiet=True, laws="gradient") as watch:
        for step in range(6):
            optimizer.zero_grad()
            for n in range(passes(step)):
                rows = torch.arange(8 * n + step, 8 * n + step + 8)
                (F.mse_loss(model(x[rows]), x[rows, :3]) / passes(step)).backward()
            optimizer.step()
    assert ("law.gradient.adds_up" in alarms(watch)) == breaks
