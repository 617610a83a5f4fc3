"""The audit compares the operators that ran with the settings of the recipe."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainwright.plan.call_trace import Work
from trainwright.profiling.audit import AuditRow, audit
from trainwright.profiling.session import StepCounter
from trainwright.profiling.verdict import ProfileFacts


class Net(nn.Module):
    """Two layers; the second is computed in float32 whatever the loop asks for, if ``falls_back``."""

    def __init__(self, *, falls_back: bool) -> None:
        super().__init__()
        self.first, self.second, self.falls_back = nn.Linear(32, 64), nn.Linear(64, 64), falls_back

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.first(x))
        with torch.autocast("cpu", enabled=not self.falls_back and torch.is_autocast_enabled("cpu")):
            out: Tensor = self.second(h.float() if self.falls_back else h)
            return out


def counted(model: nn.Module, precision: str, *, fused: bool | None = True) -> ProfileFacts:
    """Trains one step under the counter of the profiler."""
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    counter = StepCounter([model])
    with counter:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = model(torch.randn(16, 32)).float().square().mean()
        loss.backward()
        optimizer.step()
    counter.close()
    return ProfileFacts("this CPU", precision, 1, 1.0, {}, work=counter.work(), fused=fused)


def rows(facts: ProfileFacts, *, on_gpu: bool = False) -> dict[str, AuditRow]:
    return {row.what: row for row in audit(facts, on_gpu=on_gpu)}


@pytest.mark.parametrize(("falls_back", "agrees"), [(False, True), (True, False)], ids=["bf16", "falls-back"])
def test_a_layer_that_is_computed_in_another_dtype_is_named(falls_back: bool, agrees: bool) -> None:
    row = rows(counted(Net(falls_back=falls_back), "bf16"))["matrix products"]
    assert (row.requested, row.agrees) == ("bfloat16", agrees)
    assert ("float32" in row.ran) == falls_back and ("second" in row.remedy) == falls_back
    assert ("NOT AS REQUESTED" in str(row)) == falls_back


def test_float32_is_float32() -> None:
    row = rows(counted(Net(falls_back=True), "fp32"))["matrix products"]
    assert row.agrees and row.ran == "float32 100%"


def test_an_autocast_of_the_users_is_seen_where_float32_is_asked_for() -> None:
    facts = counted(Net(falls_back=False), "bf16")
    assert not rows(ProfileFacts("this CPU", "fp32", 1, 1.0, {}, work=facts.work))["matrix products"].agrees


@pytest.mark.parametrize(("asked", "ran"), [(True, True), (True, False)], ids=["fused", "one-by-one"])
def test_the_update(asked: bool, ran: bool) -> None:
    facts = counted(Net(falls_back=False), "fp32", fused=ran)
    row = rows(ProfileFacts("this CPU", "fp32", 1, 1.0, {}, work=facts.work, fused=asked))["update"]
    assert row.agrees == ran and row.ran.startswith("fused" if ran else "one tensor at a time")


def work(op: str, dtype: str = "bfloat16", phase: str = "forward", flops: int = 100) -> Work:
    return Work(phase, "block", op, dtype, 1, flops, 10)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("op", "agrees"),
    [("_scaled_dot_product_flash_attention", True), ("_scaled_dot_product_efficient_attention", False)],
)
def test_attention_by_another_kernel_than_flash(op: str, agrees: bool) -> None:
    facts = ProfileFacts("H100", "bf16", 1, 1.0, {}, work=(work(op), work("mm")))
    assert rows(facts, on_gpu=True)["attention"].agrees == agrees


@pytest.mark.parametrize(
    ("kernel", "agrees"),
    [("ampere_tf32_s1688gemm_128x64", True), ("ampere_sgemm_128x64_tn", False)],
)
def test_tf32_is_seen_by_the_names_of_kernels(kernel: str, agrees: bool) -> None:
    facts = ProfileFacts("A100", "tf32", 1, 1.0, {}, work=(work("mm", "float32"),), kernels={kernel: 4.0})
    assert rows(facts, on_gpu=True)["matrix products"].agrees == agrees


@pytest.mark.parametrize(("op", "agrees"), [("_scaled_mm", True), ("mm", False)])
def test_layers_of_8_bits(op: str, agrees: bool) -> None:
    facts = ProfileFacts("H100", "fp8", 1, 1.0, {}, work=(work(op),))
    assert rows(facts, on_gpu=True)["8-bit layers"].agrees == agrees


@pytest.mark.parametrize(("kernels", "agrees"), [({"triton_poi_fused_add_0": 2.0}, True), ({}, False)])
def test_a_compiler_that_gave_up(kernels: dict[str, float], agrees: bool) -> None:
    facts = ProfileFacts("H100", "bf16", 1, 1.0, {}, compiled=True, kernels=kernels)
    assert rows(facts)["compiled model"].agrees == agrees
