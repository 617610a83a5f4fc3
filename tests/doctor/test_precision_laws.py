"""The laws of precision hold in every dtype, and break where digits or the range are lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from trainwright.doctor.precision.measure.batches import _narrowed

import trainwright as tw
from trainwright.doctor.context import RunContext
from trainwright.doctor.diagnose import diagnose
from trainwright.runlog.records import Found

Part = Callable[[Tensor], Tensor]


class Net(nn.Module):
    """``part`` is what lies between two layers."""

    def __init__(self, part: Part, dropout: float) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 3)
        self.part, self.dropout = part, nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.dropout(self.part(torch.tanh(self.second(torch.tanh(self.first(x)))))))
        return out


def same(x: Tensor) -> Tensor:
    return x


def watched(
    part: Part = same,
    *,
    dtype: torch.dtype = torch.float32,
    autocast: bool = False,
    dropout: float = 0.0,
    cast: Part = same,
    laws: Literal["all", "cheap", "precision"] = "all",
) -> Any:
    torch.manual_seed(0)
    x = torch.randn(96, 6)
    y = (x @ torch.randn(6, 3)).argmax(1)
    model = Net(part, dropout).to(torch.float32 if autocast else dtype)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    batches = DataLoader(TensorDataset(x, y), 16, shuffle=True)
    with tw.watch(model, optimizer, out=None, quiet=True, laws=laws) as watch:
        for inputs, targets in batches:
            with torch.autocast("cpu", dtype, enabled=autocast):
                outputs = model(cast(inputs).to(torch.float32 if autocast else dtype))
            optimizer.zero_grad()
            F.cross_entropy(outputs.float(), targets).backward()
            optimizer.step()
    assert watch.session.failures == []
    return watch


def states(watch: Any) -> dict[str, str]:
    laws = diagnose(RunContext(watch.records, finished=True)).laws
    return {each.name.removeprefix("precision."): each.state for each in laws if each.name.startswith("precision.")}


def found(watch: Any) -> dict[str, Found]:
    return {each.code: each for each in watch.findings() if each.code.startswith(("law.precision.", "prec."))}


@pytest.mark.parametrize(
    ("dtype", "autocast", "dropout"),
    [(torch.float32, False, 0.1), (torch.bfloat16, True, 0.0), (torch.float16, False, 0.0)],
)
def test_the_laws_hold_in_every_dtype(dtype: torch.dtype, autocast: bool, dropout: float) -> None:
    watch = watched(dtype=dtype, autocast=autocast, dropout=dropout)
    held = states(watch)
    assert (held["same_in_float64"], held["batches_keep_digits"]) == ("held", "held")
    assert held["stays_in_range"] == ("held" if dtype == torch.float16 else "not applicable")
    assert found(watch) == {}


class Drawn(torch.autograd.Function):
    """Bits with these probabilities; the gradient goes straight through."""

    @staticmethod
    def forward(ctx: Any, probabilities: Tensor) -> Tensor:
        return torch.bernoulli(probabilities)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def test_what_is_drawn_between_two_models_is_drawn_anew_in_float64() -> None:
    torch.manual_seed(0)
    x = torch.randn(96, 6)
    encoder, decoder = nn.Linear(6, 12), nn.Linear(12, 6)
    optimizer = torch.optim.SGD([*encoder.parameters(), *decoder.parameters()], 0.05)
    with tw.watch([encoder, decoder], optimizer, out=None, quiet=True) as watch:
        for rows in x.split(16):
            bits: Tensor = Drawn.apply(encoder(rows).sigmoid())  # type: ignore[no-untyped-call]
            optimizer.zero_grad()
            F.mse_loss(decoder(bits), rows).backward()
            optimizer.step()
    assert watch.session.failures == []
    assert states(watch)["same_in_float64"] == "not applicable" and found(watch) == {}


def moments(x: Tensor) -> Tensor:
    """A variance as the difference of large numbers."""
    shifted = x + 3000.0
    variance = (shifted * shifted).mean(1, keepdim=True) - shifted.mean(1, keepdim=True) ** 2
    return x / (variance.abs() + 1e-3).sqrt()


def far_away(x: Tensor) -> Tensor:
    return torch.sin((x + 2.0**22) - 2.0**22)


@pytest.mark.parametrize(
    ("part", "ops"), [(moments, {"sub", "__sub__"}), (far_away, {"sub", "__sub__", "add", "__add__"})]
)
def test_digits_that_are_lost_in_between(part: Part, ops: set[str]) -> None:
    broken = found(watched(part))["law.precision.same_in_float64"]
    assert (broken.severity, broken.since_step, broken.where.module) == ("warning", 1, "")
    assert broken.where.op in ops


def test_values_that_nearly_leave_their_range() -> None:
    def grown(x: Tensor) -> Tensor:
        return (x.abs() * 40000).log1p()

    broken = found(watched(grown, dtype=torch.float16))
    assert broken["law.precision.stays_in_range"].where.dtype == "float16"


@pytest.mark.parametrize(
    "narrow", [lambda x: x.int().float(), lambda x: x.to(torch.uint8), lambda x: (x + 0.1 * torch.randn_like(x)).long()]
)
def test_a_cast_that_takes_the_values_away(narrow: Part) -> None:
    broken = found(watched(cast=narrow, laws="cheap"))["law.precision.batches_keep_digits"]
    assert (broken.severity, broken.since_step) == ("warning", 1)


@pytest.mark.parametrize(
    "kept", [lambda x: x.half().float(), lambda x: x.bfloat16(), lambda x: 2 * x + 1, lambda x: x.double()]
)
def test_a_cast_or_a_change_that_keeps_them(kept: Part) -> None:
    assert states(watched(cast=kept, laws="cheap"))["batches_keep_digits"] == "held"


@pytest.mark.parametrize(
    "cut_off",
    [
        lambda x: (8 * x).to(torch.int64).float(),
        lambda x: x.long().to(x.dtype) + 1,
        lambda x: x * x.abs().int().double(),
    ],
)
def test_fractions_that_are_cut_off_inside_of_a_model(cut_off: Part) -> None:
    law = found(watched(lambda x: cut_off(2 * x).float() + x, laws="precision"))
    where = law["law.precision.fractions_stay"].where
    assert where.module == "" and (where.source or "").startswith("test_precision_laws.py:")


@pytest.mark.parametrize(
    "kept",
    [
        lambda x: x + (x.round() - x).detach(),
        lambda x: x - x.long().float(),
        lambda x: torch.eye(16)[(4 * x).long().clamp(0, 15)].sum(1) + x,
        lambda x: x.round().long().float() + x,
        lambda x: x.half().float(),
    ],
)
def test_whole_numbers_that_belong_there(kept: Part) -> None:
    assert states(watched(kept, laws="precision"))["fractions_stay"] == "held"


def test_a_mask_of_what_is_one_is_no_cast() -> None:
    heat = torch.rand(32, 4, generator=torch.Generator().manual_seed(0)).clamp(max=0.9)
    heat[::5] = 1.0
    assert _narrowed("loss", heat, (heat == 1).float()) is None
    assert _narrowed("loss", 5 * heat, (5 * heat).long()) is not None
