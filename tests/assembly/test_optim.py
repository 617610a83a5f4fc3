"""Every optimizer over 20 steps against its formula in float64, torch, or another published implementation."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from tests.assembly.optim_net import DECAY, LR, STEPS, assert_near, fill_grads, net, train
from trainwright.errors import UsageError
from trainwright.optim.choose import make_optimizer
from trainwright.optim.groups import GroupRule
from trainwright.optim.lamb import Lamb, Lars
from trainwright.optim.muon import Muon, muon_groups, orthogonalize
from trainwright.recipe import OPTIMIZERS
from trainwright.recipe.resolve import import_factory

Formula = Callable[[Tensor, Tensor, dict[str, Any], float], Tensor]


def train_by(formula: Formula, model: nn.Module, decay: float = DECAY) -> list[Tensor]:
    """``formula(w, g, memory, decay)`` gives the next w; no decay on vectors, as without ``decay_norms_and_biases``."""
    memories: list[dict[str, Any]] = [{} for _ in model.parameters()]
    for step in range(STEPS):
        fill_grads(model, step)
        with torch.no_grad():
            for parameter, memory in zip(model.parameters(), memories):
                assert parameter.grad is not None
                memory["t"] = step + 1
                its_decay = decay if parameter.ndim > 1 else 0.0
                parameter.copy_(formula(parameter.clone(), parameter.grad.clone(), memory, its_decay))
    return [parameter.detach().clone() for parameter in model.parameters()]


def averaged(memory: dict[str, Any], key: str, value: Tensor, beta: float) -> Tensor:
    memory[key] = beta * memory.get(key, torch.zeros_like(value)) + (1 - beta) * value
    return memory[key]  # type: ignore[no-any-return]


def adam_direction(g: Tensor, memory: dict[str, Any], b1: float, b2: float, eps: float) -> Tensor:
    m, v = averaged(memory, "m", g, b1), averaged(memory, "v", g * g, b2)
    return m / (1 - b1 ** memory["t"]) / ((v / (1 - b2 ** memory["t"])).sqrt() + eps)


def sgd(w: Tensor, g: Tensor, memory: dict[str, Any], decay: float) -> Tensor:
    g = g + decay * w
    memory["b"] = 0.9 * memory["b"] + g if "b" in memory else g
    return w - LR * (g + 0.9 * memory["b"])


def adam(w: Tensor, g: Tensor, memory: dict[str, Any], decay: float) -> Tensor:
    return w - LR * adam_direction(g + decay * w, memory, 0.9, 0.999, 1e-8)


def adamw(w: Tensor, g: Tensor, memory: dict[str, Any], decay: float) -> Tensor:
    return w - LR * decay * w - LR * adam_direction(g, memory, 0.8, 0.99, 1e-7)


def lamb(w: Tensor, g: Tensor, memory: dict[str, Any], decay: float) -> Tensor:
    u = adam_direction(g, memory, 0.9, 0.999, 1e-6) + decay * w
    ratio = (w**2).sum().sqrt() / (u**2).sum().sqrt() if w.ndim > 1 else 1.0
    return w - LR * ratio * u


def lars(w: Tensor, g: Tensor, memory: dict[str, Any], decay: float) -> Tensor:
    size, slope = (w**2).sum().sqrt(), (g**2).sum().sqrt()
    local = 0.001 * size / (slope + decay * size + 1e-8) if w.ndim > 1 else 1.0
    memory["v"] = 0.9 * memory.get("v", 0.0) + LR * local * (g + decay * w)  # the paper's: the rate inside
    return w - memory["v"]


def adafactor(w: Tensor, g: Tensor, memory: dict[str, Any], decay: float) -> Tensor:
    """Shazeer & Stern 2018, arXiv 1804.04235, algorithms 4 and 5, with torch's lr and eps (its note)."""
    t, eps = memory["t"], torch.finfo(torch.float64).eps
    beta = 1 - t**-0.8
    size = max(1e-3, float((w**2).mean().sqrt())) * min(LR, 1 / math.sqrt(t))
    if g.ndim > 1:
        rows, columns = (averaged(memory, str(d), (g * g).sum(d, keepdim=True), beta) for d in (-1, -2))
        v = rows * columns / rows.sum(-2, keepdim=True)
    else:
        v = averaged(memory, "v", g * g, beta)
    u = g / v.sqrt().clamp(min=eps)
    return w - LR * decay * w - size * u / max(1.0, float((u**2).mean().sqrt()))


@pytest.mark.parametrize(
    ("name", "formula", "args"),
    [
        ("sgd", sgd, {"momentum": 0.9, "nesterov": True}),
        ("adam", adam, {}),
        ("adamw", adamw, {"betas": [0.8, 0.99], "eps": 1e-7}),
        ("adafactor", adafactor, {}),
        ("lamb", lamb, {}),
        ("lars", lars, {}),
    ],
)
def test_equals_its_formula(name: str, formula: Formula, args: dict[str, Any]) -> None:
    model = net()
    optimizer = make_optimizer(name, model, lr=LR, weight_decay=DECAY, decay_norms_and_biases=False, args=args)
    tolerance = 1e-11 if name == "adafactor" else 1e-12  # it takes its sums in another order
    assert_near(train(model, optimizer), train_by(formula, net()), tolerance)


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_every_implementation_of_torch_can_be_forced(name: str) -> None:
    chosen = net()
    weights = train(chosen, make_optimizer(name, chosen, lr=LR, weight_decay=DECAY))
    for forced in ({"fused": False, "foreach": False}, {"foreach": True}, {"fused": True}):
        model = net()
        optimizer = make_optimizer(name, model, lr=LR, weight_decay=DECAY, args=forced)
        assert bool(optimizer.param_groups[0]["fused"]) == bool(forced.get("fused"))
        assert_near(train(model, optimizer), weights, 1e-11)


def test_lamb_and_lars_take_ratio_one_where_a_norm_is_zero() -> None:
    for kind in (Lamb, Lars):
        zero, still = nn.Parameter(torch.zeros(3, 2)), nn.Parameter(torch.ones(3, 2))
        zero.grad, still.grad = torch.ones(3, 2), torch.zeros(3, 2)
        kind([zero, still], lr=0.5).step()
        torch.testing.assert_close(zero.detach(), torch.full((3, 2), -0.5), rtol=1e-5, atol=1e-6)
        assert torch.equal(still.detach(), torch.ones(3, 2))


def test_lamb_corrects_its_bias_in_float32_and_bfloat16() -> None:
    """The first step of Adam is lr * sign(g): 1 - 0.999 in plain float32 would be wrong in the 5th digit."""
    for dtype, tolerance in ((torch.float32, 2e-6), (torch.bfloat16, 1e-2)):
        parameter = nn.Parameter(torch.zeros(4, dtype=dtype))
        parameter.grad = torch.tensor([3.0, -2.0, 5.0, -7.0], dtype=dtype)
        Lamb([parameter], lr=1.0, eps=0.0).step()
        expected = torch.tensor([-1.0, 1.0, -1.0, 1.0], dtype=dtype)
        torch.testing.assert_close(parameter.detach(), expected, rtol=tolerance, atol=0.0)


@pytest.mark.parametrize("adjust_lr", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_equals_torchs(adjust_lr: Any, nesterov: bool) -> None:
    """torch's works in bfloat16, one matrix at a time; a batched product may round the last bit differently."""
    torch_muon = pytest.importorskip("torch.optim", reason="2.9").Muon
    torch.manual_seed(0)
    shapes = [(12, 4), (4, 12), (8, 8), (8, 8), (32, 16)]
    ours = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    theirs = [nn.Parameter(each.detach().clone()) for each in ours]
    start = [each.detach().clone() for each in ours]
    options: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9, "nesterov": nesterov}
    mine = Muon(ours, **options, adjust_lr=adjust_lr, ns_dtype="bfloat16")
    reference = torch_muon(theirs, **options, adjust_lr_fn=adjust_lr)
    for _ in range(STEPS):
        for a, b in zip(ours, theirs):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        mine.step()
        reference.step()
    for a, b, origin in zip(ours, theirs, start):
        assert ((a - b).norm() / (b - origin).norm()).item() < 0.01
        torch.testing.assert_close(
            mine.state[a]["momentum_buffer"], reference.state[b]["momentum_buffer"], rtol=1e-6, atol=1e-6
        )


def test_muon_in_float32_equals_its_formula() -> None:
    def newton_schulz(g: Tensor) -> Tensor:
        a, b, c = 3.4445, -4.7750, 2.0315
        x = g / (g**2).sum().sqrt()
        for _ in range(5):  # on the matrix as it stands, tall or wide: p(X X^T) X = X p(X^T X)
            gram = x @ x.T
            x = a * x + b * gram @ x + c * gram @ gram @ x
        return x

    def muon(w: Tensor, g: Tensor, memory: dict[str, Any], decay: float) -> Tensor:
        m = averaged(memory, "m", g, 0.95)
        u = newton_schulz((0.05 * g + 0.95 * m).flatten(1)).view_as(w)
        rows, columns = w.flatten(1).shape
        return w - LR * decay * w - LR * max(1.0, rows / columns) ** 0.5 * u

    def either(w: Tensor, g: Tensor, memory: dict[str, Any], decay: float) -> Tensor:
        hidden = tuple(w.shape) in {(4, 6, 3), (12, 4), (4, 12), (4, 4)}
        return (muon if hidden else adamw)(w, g, memory, decay)

    model = net(torch.float32)
    args = {"ns_dtype": "float32", "adamw_lr": LR, "adamw_betas": [0.8, 0.99], "adamw_eps": 1e-7}
    optimizer = make_optimizer("muon", model, lr=LR, weight_decay=DECAY, decay_norms_and_biases=False, args=args)
    assert_near(train(model, optimizer), train_by(either, net(torch.float32)), 1e-4)


def test_orthogonalize_brings_singular_values_near_one() -> None:
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonalize(torch.randn(5, 16, 64)))
    assert values.min() > 0.6 and values.max() < 1.3
    assert torch.equal(orthogonalize(torch.zeros(1, 3, 4)), torch.zeros(1, 3, 4))


def test_muons_adamw_is_torchs_bit_for_bit() -> None:
    model, reference = net(torch.float32), net(torch.float32)
    ours = Muon([{"params": list(model.parameters()), "algorithm": "adamw"}], lr=LR, weight_decay=DECAY)
    theirs = torch.optim.AdamW(reference.parameters(), lr=LR, weight_decay=DECAY, fused=True)
    for mine, other in zip(train(model, ours), train(reference, theirs)):
        assert torch.equal(mine, other)


def test_muon_with_adamws_scale_lends_its_rate_to_adamw() -> None:
    optimizer = make_optimizer("muon", net(), lr=0.01, args={"adjust_lr": "match_rms_adamw"})
    assert {group["lr"] for group in optimizer.param_groups} == {0.01}
    optimizer = make_optimizer("muon", net(), lr=0.01)
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 3e-4]


def test_muon_takes_the_groups_of_a_vector_only_for_adamw() -> None:
    with pytest.raises(UsageError, match="matrices"):
        Muon([nn.Parameter(torch.zeros(3))])
    groups = muon_groups(nn.Sequential(nn.Linear(3, 3)), lr=0.1, weight_decay=0.0)
    assert Muon(groups).param_groups[0]["algorithm"] == "adamw"  # its only layer is the head


def test_a_factory_of_the_user_gets_groups_and_arguments() -> None:
    model = net()
    optimizer = make_optimizer(
        torch.optim.RMSprop, model, lr=0.5, weight_decay=0.1, decay_norms_and_biases=False, args={"alpha": 0.7}
    )
    assert isinstance(optimizer, torch.optim.RMSprop)
    assert [(g["lr"], g["alpha"], g["weight_decay"]) for g in optimizer.param_groups] == [
        (0.5, 0.7, 0.1),
        (0.5, 0.7, 0.0),
    ]
    with pytest.raises(UsageError, match="RMSprop has no argument 'alhpa'") as caught:
        make_optimizer(torch.optim.RMSprop, model, lr=0.5, args={"alhpa": 0.7})
    assert "did you mean 'alpha'? it accepts: alpha, eps" in caught.value.remedy
    with pytest.raises(UsageError, match="RMSprop refuses"):
        make_optimizer(torch.optim.RMSprop, model, lr=0.5, args={"alpha": -0.7})


class ReadsAny(torch.optim.SGD):
    """Takes any keyword argument, and reads one of them."""

    def __init__(self, params: ParamsT, lr: float = 0.1, **kwargs: object) -> None:
        self.is_cautious = kwargs.get("cautious", False)
        super().__init__(params, lr)


class PassesOn(torch.optim.SGD):
    """Passes its keyword arguments on."""

    def __init__(self, params: ParamsT, lr: float = 0.1, **kwargs: Any) -> None:
        super().__init__(params, lr, **kwargs)


def test_an_argument_that_a_class_would_ignore_is_refused() -> None:
    assert make_optimizer(ReadsAny, net(), args={"cautious": True}).is_cautious  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match="ReadsAny has no argument 'cautios'"):
        make_optimizer(ReadsAny, net(), args={"cautios": True})
    assert make_optimizer(PassesOn, net(), args={"momentum": 0.5}).param_groups[0]["momentum"] == 0.5
    with pytest.raises(UsageError, match="PassesOn refuses its arguments"):
        make_optimizer(PassesOn, net(), args={"momentun": 0.5})


def test_a_misspelt_argument_of_pytorch_optimizer_is_refused() -> None:
    lion = pytest.importorskip("pytorch_optimizer").Lion
    assert make_optimizer("lion", net(), args={"use_gc": True}).param_groups[0]["use_gc"]
    with pytest.raises(UsageError, match="Lion has no argument 'beta'") as caught:
        make_optimizer(lion, net(), args={"beta": [0.9, 0.99]})
    assert "did you mean 'betas'? it accepts: betas, weight_decouple" in caught.value.remedy


def test_groups_and_decay_apply_to_an_optimizer_of_a_package() -> None:
    pytest.importorskip("pytorch_optimizer")
    rules = [GroupRule("up.*", lr_scale=0.5, weight_decay=0.3)]
    made = make_optimizer("lion", net(), lr=0.1, weight_decay=0.2, decay_norms_and_biases=False, rules=rules)
    found = sorted((g["lr"], g["weight_decay"]) for g in made.param_groups)
    assert found[0] == (0.05, 0.3) and set(found[1:]) == {(0.1, 0.0), (0.1, 0.2)}


def test_a_weight_decay_that_an_optimizer_does_not_have_is_refused() -> None:
    for given in ({"weight_decay": 0.1}, {"rules": [GroupRule("*", weight_decay=0.1)]}):
        with pytest.raises(UsageError, match="has no effect: Rprop has no weight decay"):
            make_optimizer(torch.optim.Rprop, net(), **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_is_not_given_has_the_default_of_the_class(name: str) -> None:
    """The rows of the catalog repeat them for the plan, which knows no torch."""
    row, optimizer = OPTIMIZERS[name], make_optimizer(name, net())
    defaults = {
        key: each.default
        for key, each in inspect.signature(import_factory(row.factory)).parameters.items()
        if each.default is not each.empty and key not in ("fused", "foreach")
    }
    assert {"lr": row.lr, "weight_decay": row.weight_decay}.items() <= defaults.items()
    group = optimizer.param_groups[0]
    assert {key: group[key] for key in defaults if key in group} == {
        key: value for key, value in defaults.items() if key in group
    }
    if not row.groups:
        assert len(optimizer.param_groups) == 1


def test_a_factory_of_the_user_keeps_its_own_defaults() -> None:
    optimizer = make_optimizer(torch.optim.AdamW, net())
    assert [(g["lr"], g["weight_decay"]) for g in optimizer.param_groups] == [(1e-3, 1e-2)]


def test_dampened_sgd_is_not_fused() -> None:
    assert not make_optimizer("sgd", net(), lr=0.1, args={"dampening": 0.1}).param_groups[0]["fused"]


@pytest.mark.parametrize(
    ("name", "args", "says"),
    [
        ("adamv", {}, "adamw"),
        ("adamw", {"beta": [0.9, 0.99]}, "betas"),
        ("adamw", {"weight_decay": 0.1}, "optimizer.weight_decay"),
        ("adamw", {"betas": [0.9, 1.5]}, "beta"),
        ("adamw", {"betas": 0.9}, "betas=0.9"),
        ("adamw", {"fused": True, "foreach": True}, "foreach"),
        ("sgd", {"nesterov": True, "momentum": 0.0}, "momentum"),
        ("sgd", {"momentum": "0.9"}, "momentum='0.9'"),
        ("muon", {"adamw_betas": [0.9]}, "two numbers"),
        ("muon", {"adjust_lr": "moonshot"}, "match_rms_adamw"),
        ("muon", {"momentum": 1.0}, "momentum"),
        ("lamb", {"betas": [0.9, 1.0]}, "betas[1]"),
        ("lars", {"trust_coefficient": -1}, "trust_coefficient"),
        ("adafactor", {"d": 0.5}, "d=0.5"),
    ],
)
def test_what_is_wrong_is_said_with_a_remedy(name: str, args: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError) as caught:
        make_optimizer(name, net(), lr=0.1, args=args)
    assert says in str(caught.value) and caught.value.remedy
    with pytest.raises(UsageError):
        make_optimizer("lamb" if name == "lamb" else "adamw", net(), lr=-1.0)
