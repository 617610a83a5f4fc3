"""Non-finite steps: the first op, its samples and its remedy are named; the healthy look-alikes are left alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from trainwright.doctor.precision.names import mechanisms, nonfinite

import trainwright as tw
from trainwright.doctor.context import RunContext
from trainwright.doctor.finding import Check, Finding
from trainwright.doctor.pages import codes as pages
from trainwright.report.findings import place
from trainwright.runlog.records import Examined, Found, Record, Watched
from zoo.host import cnn, images, loader, mlp, table

HELD = {"dtype": "float32", "shape": [4, 3], "min": 0.0, "max": 1.0, "absmax": 1.0, "nan": 0, "inf": 0, "zeros": 1}
FIRST = {
    "kind": "op", "what": "log_of_zero", "name": None, "reached": "loss", "op": "log", "kernel": "log",
    "phase": "forward", "module": None, "source": None, "dtype": "float32", "forward_inputs": [HELD], "output": HELD,
    "fp32_finite": None, "hidden_by": None, "micro_batch": 0, "eps": None, "rows": None, "ids": [], "empty": None,
}  # fmt: skip


def exam(experiment: str, step: int = 5, **values: Any) -> Examined:
    return Examined(time_s=0.0, step=step, experiment=experiment, values=values)


def trace(step: int = 5, gradients: tuple[str, ...] = ("0.weight",), **first: Any) -> Examined:
    told = {"scale": 1.0, "micro_batches": 1, "losses": [math.nan], "gradients": list(gradients)}
    return exam("trace", step, **told, first=FIRST | first)


def live(step: int = 5, **values: Any) -> Examined:
    return exam(
        "nonfinite", step, **{"inputs": [], "gradients": [], "num_gradients": 0, "num_after_clip": None} | values
    )


def skipped(step: int, loss: float = 1.0, kind: str = "scaler_skipped") -> Watched:
    return Watched(time_s=0.0, step=step, loss=loss, grad_norm=math.inf, lr=0.1, events=((kind, 0),))


def said(check: Check, *records: Record) -> list[Found]:
    return [each.found for each in check(RunContext(records)) if isinstance(each, Finding)]


def codes(check: Check, *records: Record) -> list[str]:
    return [each.code for each in said(check, *records)]


class TestFirstOp:
    def test_every_mechanism_has_a_page(self) -> None:
        named = {mechanisms.mechanism_of(FIRST | {"what": word}).code for word in mechanisms.WORDS}
        assert named <= set(pages())

    def test_the_model_itself_is_not_the_loss(self) -> None:
        """A module's path is "" where it is the model as a whole, and None where no module runs."""
        places = {
            None: ("in the loss", " in op log"),
            "": ("in the model itself", " in the model itself, op log"),
            "head": ("in head", " in module head, op log"),
        }
        for module, (words, at) in places.items():
            (found,) = said(nonfinite.nonfinite_step, trace(module=module, dtype=None))
            assert words in found.cause and place(found.where) == at

    def test_a_spoilt_loss_with_finite_gradients_is_a_warning(self) -> None:
        lost = {"what": "no_valid_target", "op": "cross_entropy"}
        assert [f.severity for f in said(nonfinite.nonfinite_step, trace(gradients=(), **lost))] == ["warning"]
        assert [f.severity for f in said(nonfinite.nonfinite_step, trace(**lost))] == ["critical"]

    def test_steps_on_broken_weights_are_consequences(self) -> None:
        broken = {"kind": "weight", "name": "0.weight", "what": "nan"}
        assert codes(nonfinite.nonfinite_step, trace(5), trace(6, **broken)) == ["num.log_of_zero"]
        assert codes(nonfinite.nonfinite_step, trace(6, **broken)) == ["num.nonfinite"]

    def test_samples_of_later_steps_are_gathered(self) -> None:
        one = {"kind": "input", "what": "nan", "name": "input[0]"}
        found = said(nonfinite.nonfinite_step, trace(5, **one, ids=[7]), trace(9, **one | {"what": "inf"}, ids=[3]))
        assert [(f.code, f.step, f.where.sample_ids, f.where.op) for f in found] == [
            ("data.nonfinite_input", 5, (3, 7), None)
        ]

    def test_after_divergence_the_op_is_only_where_it_ended(self) -> None:
        before = [Watched(time_s=0.0, step=n, loss=10.0**n, grad_norm=1.0, lr=0.1) for n in range(1, 5)]
        assert (
            said(nonfinite.nonfinite_step, *before, trace())[0].sure
            < 0.8
            < said(nonfinite.nonfinite_step, trace())[0].sure
        )

    def test_an_eps_that_float16_does_not_hold(self) -> None:
        update = {"phase": "update", "what": "div_by_zero", "op": "addcdiv", "reached": "weight", "dtype": "float16"}
        assert codes(nonfinite.nonfinite_step, trace(**update, eps=1e-8)) == ["prec.eps_underflow"]
        assert codes(nonfinite.nonfinite_step, trace(**update, eps=1e-4)) == ["num.div_by_zero"]


class TestGradients:
    @pytest.mark.parametrize(("before", "after", "expected"), [(1, 6, True), (6, 6, False), (0, 0, False)])
    def test_a_clip_that_spreads(self, before: int, after: int, expected: bool) -> None:
        seen = live(gradients=["2.bias"] * before, num_gradients=before, num_after_clip=after, dtype="float32")
        found = said(nonfinite.clip_spreads_nan, seen, exam("trace", first=None, losses=[1.0]))
        assert [(f.code, f.where.module) for f in found] == [("grad.clip_spreads_nan", "2")] * expected

    def test_a_blind_step_says_what_would_tell(self) -> None:
        (found,) = said(nonfinite.unexplained, live(num_gradients=1, gradients=["a.b"]), exam("trace", blind="why"))
        assert found.code == "num.nonfinite" and "why" in found.cause and "to find out" in found.remedy
        bad = {"call": 0, "rows": [1], "ids": [9], "nan": 1, "inf": 0, "dtype": "float32"}
        (found,) = said(nonfinite.unexplained, live(inputs=[bad]), exam("trace", blind="why"))
        assert (found.code, found.where.sample_ids) == ("data.nonfinite_input", (9,))

    def test_a_norm_that_overflows(self) -> None:
        assert codes(nonfinite.unexplained, live(), exam("trace", first=None, losses=[1.0])) == ["num.overflow"]


class TestScaler:
    def test_skips_that_the_scale_explains_are_healthy(self) -> None:
        steps = [skipped(n) for n in range(1, 16)]
        exams = [each for n in range(1, 5) for each in (live(n), exam("trace", n, finite_without_scale=True))]
        for check in (nonfinite.scaler_collapse, nonfinite.unexplained, nonfinite.nonfinite_step):
            assert not codes(check, *steps, *exams)

    def test_two_skips_that_no_scale_explains(self) -> None:
        steps = [skipped(n, math.nan) for n in (1, 2)]
        (found,) = said(nonfinite.scaler_collapse, *steps, trace(1), trace(2))
        assert (found.code, found.severity, found.where.op) == ("prec.scaler_collapse", "warning", "log")
        assert not codes(nonfinite.scaler_collapse, *steps, trace(1))

    def test_twenty_skips_are_enough(self) -> None:
        assert [f.severity for f in said(nonfinite.scaler_collapse, *map(skipped, range(5, 25)))] == ["critical"]
        apart = [skipped(n, kind="scaler_skipped" if n % 8 else "step") for n in range(1, 40)]
        assert not codes(nonfinite.scaler_collapse, *apart)


# In a loop


def trained(
    model: nn.Module,
    data: Any,
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor],
    *,
    window: int = 1,
    raises: bool = False,
    **watch: Any,
) -> list[Found]:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled="scaler" in watch)
    scalers = {"scaler": scaler} if "scaler" in watch else {}
    w = tw.watch(model, optimizer, loader=data, out=None, quiet=True, **(watch | scalers))
    with suppress(ArithmeticError), w:
        for i, (_, x, y) in enumerate(data):
            made = loss(model, x, y) / window
            if raises and not made.isfinite():
                raise ArithmeticError
            scaler.scale(made).backward()
            if (i + 1) % window == 0:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
    return w.findings()


def classify(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.slow
@pytest.mark.parametrize("how", [{}, {"on_nonfinite": "observe"}, {"raises": True}])
def test_a_sample_that_is_not_finite(how: dict[str, Any]) -> None:
    x, y = table(0, n=256)
    x[70, 3] = torch.nan
    found = trained(mlp(), loader(x, y, 0, batch=32, shuffle=False), classify, **how)[0]
    assert (found.code, found.severity, found.step, found.where.sample_ids) == (
        "data.nonfinite_input", "critical", 3, (70,),
    )  # fmt: skip
    assert "as it was: not finite" in found.tried[0].result and "loss 2.3" in found.tried[0].result


def test_a_scaler_skips_the_update_and_batchnorm_keeps_the_batch() -> None:
    x, y = images(0, n=128)
    x[70, 0, 1, 1] = torch.nan
    found = trained(cnn(), loader(x, y, 0, batch=32, shuffle=False), classify, scaler=True)
    assert [f.code for f in found[:2]] == ["data.nonfinite_input", "model.bn_stats_poisoned"]
    assert found[1].where.module == "1"


def test_one_micro_batch_of_four() -> None:
    x, y = table(0, n=256)
    x[32 * 4 + 2 * 32 + 5, 0] = 0

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return (model(x) * x[:, :1]).pow(2).sum(1).sqrt().mean()

    found = trained(mlp(), loader(x, y, 0, batch=32, shuffle=False), loss, window=4)[0]
    assert (found.code, found.step, found.where.op) == ("num.sqrt_grad_at_zero", 2, "sqrt")
    assert (found.where.micro_batch, found.where.sample_ids) == (2, (197,))


def test_what_the_loop_wrote_is_not_blamed_on_an_op() -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    data = loader(*table(0, n=128), 0, batch=32)
    with tw.watch(model, optimizer, loader=data, out=None, quiet=True) as w:
        for i, (_, x, y) in enumerate(data):
            optimizer.zero_grad()
            classify(model, x, y).backward()
            if i == 2:
                next(model[2].parameters()).grad[0] = torch.nan  # type: ignore[index]
            optimizer.step()
    found = w.findings()[0]
    assert (found.code, found.step, found.where.module) == ("num.nonfinite", 3, "2")
