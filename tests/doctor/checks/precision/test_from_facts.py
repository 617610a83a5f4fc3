"""Checks of precision and of non-finite steps on measurements, with the look-alikes that they are silent on."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tests.doctor.checks.loops import made_of, requested
from trainwright.doctor.check import Check
from trainwright.doctor.context import RunContext
from trainwright.doctor.diagnose import diagnose
from trainwright.doctor.discovery import check_of
from trainwright.doctor.facts.calls import ScalerFacts
from trainwright.doctor.facts.precision import (
    Aliased,
    BadInput,
    Emptied,
    FirstNonfinite,
    FormatFacts,
    LossInFp32Facts,
    MixedPrecisionFacts,
    SeenNonfinite,
    TraceFacts,
    ValueRange,
)
from trainwright.runs.json_values import strict
from trainwright.runs.records import Examined, Found, Watched

RANGE = ValueRange("float32", (4, 3), 0.0, 1.0, 0, 0, 1)
FIRST = FirstNonfinite(
    kind="op",
    what="log_of_zero",
    name=None,
    reached="loss",
    op="log",
    kernel="log",
    phase="forward",
    module=None,
    source="train.py:7",
    dtype="float32",
    inputs=(RANGE,),
    output=RANGE,
)
BROKEN = TraceFacts(micro_batches=1, losses=(math.nan,), gradients=("0.weight",), first=FIRST)


def of(code: str) -> Check:
    check = check_of(code)
    assert check is not None
    return check


def traced(**changes: object) -> TraceFacts:
    return replace(BROKEN, first=replace(FIRST, **changes))  # type: ignore[arg-type]


def told(*facts: tuple[int, object], steps: tuple[Watched, ...] = ()) -> list[Found]:
    """All alarms."""
    seen = [Examined(time_s=0.0, step=n, experiment=f.experiment, values=strict(vars(f))) for n, f in facts]  # type: ignore[attr-defined]
    return [each.found for each in diagnose(RunContext([*steps, *seen])).findings if each.found.severity != "info"]


@pytest.mark.parametrize(
    ("what", "code"),
    [
        ("log_of_zero", "precision.log_of_zero"),
        ("inf_at_target", "precision.log_of_zero"),
        ("div_by_zero", "precision.division_by_zero"),
        ("mean_of_empty", "precision.division_by_zero"),
        ("exp_overflow", "precision.overflow"),
        ("fp16_overflow", "precision.fp16_overflow"),
        ("mask_overflow", "precision.softmax_over_masked_row"),
        ("softmax_all_masked", "precision.softmax_over_masked_row"),
        ("overflow", "precision.overflow"),
        ("sqrt_of_negative", "precision.undefined_operation"),
        ("inf_minus_inf", "precision.undefined_operation"),
        ("eps_underflow", "precision.eps_underflow"),
        ("nan_written", "precision.nonfinite_step"),
        ("sqrt_at_zero_backward", "gradient.infinite_derivative"),
        ("where_branch_backward", "gradient.where_hides_nan"),
        ("inf_logit_smoothing", "loss.smoothing_over_masked_class"),
        ("ctc_infeasible", "loss.ctc_infeasible"),
        ("no_valid_target", "loss.no_valid_target"),
    ],
)
def test_each_mechanism_has_one_check(what: str, code: str) -> None:
    facts = traced(what=what, module="head", hidden_by="where", eps=1e-8)
    (found,) = told((5, SeenNonfinite(bad=True, num_gradients=1)), (5, facts))
    assert (found.code, found.severity, found.where.module, found.where.source) == (
        code, "critical", "head", "train.py:7",
    )  # fmt: skip
    assert "{" not in found.cause


def test_the_model_itself_is_not_the_loss() -> None:
    causes = {module: told((5, traced(module=module)))[0].cause for module in (None, "", "head")}
    assert "in the loss" in causes[None] and "in the model itself" in causes[""] and "in head" in causes["head"]


def test_a_loss_alone_is_a_warning() -> None:
    lost = replace(traced(what="no_valid_target", op="cross_entropy"), gradients=())
    assert [each.severity for each in told((5, lost))] == ["warning"]


def test_steps_on_broken_weights_are_consequences() -> None:
    weight = traced(kind="weight", name="0.weight", what="nan")
    assert [each.code for each in told((5, BROKEN), (6, weight))] == ["precision.log_of_zero"]
    assert [each.code for each in told((6, SeenNonfinite(bad=True)), (6, weight))] == ["precision.nonfinite_step"]


def test_samples_of_later_steps_are_gathered() -> None:
    first, second = (traced(kind="input", what="nan", name="input[0]", ids=(n,)) for n in (7, 3))
    (found,) = told((5, SeenNonfinite(bad=True)), (5, first), (9, SeenNonfinite(bad=True)), (9, second))
    assert (found.code, found.step, found.where.sample_ids, found.where.op) == (
        "data.nonfinite_input", 5, (3, 7), None,
    )  # fmt: skip


def test_an_empty_sample() -> None:
    codes = [each.code for each in told((5, traced(what="div_by_zero", rows=(2,), ids=(9,), empty=0.0)))]
    assert sorted(codes) == ["data.empty_sample", "precision.division_by_zero"]


def test_after_divergence_the_op_is_only_where_it_ended() -> None:
    before = tuple(Watched(time_s=0.0, step=n, loss=10.0**n, grad_norm=1.0, lr=0.1) for n in range(1, 5))
    diverged = [each for each in told((5, BROKEN), steps=before) if each.code == "precision.log_of_zero"]
    assert diverged[0].sure < 0.8 < told((5, BROKEN))[0].sure
    overflow = next(each for each in told((5, traced(what="overflow")), steps=before) if "overflow" in each.code)
    assert "learning rate" in str(overflow.cause) and "learning rate" in overflow.remedy
    assert "learning rate of" not in str(told((5, traced(what="overflow")))[0].cause)


@pytest.mark.parametrize(("before", "after", "expected"), [(1, 6, True), (6, 6, False), (0, 0, False)])
def test_a_clip_that_spreads(before: int, after: int, expected: bool) -> None:
    seen = SeenNonfinite(
        bad=True, gradients=("2.bias",) * before, num_gradients=before, num_after_clip=after, dtype="float32"
    )
    finite = TraceFacts(micro_batches=1, losses=(1.0,))
    found = made_of(of("gradient.clip_spreads_nan"), (5, seen), (5, finite))
    assert [each.where.module for each in found] == ["2"] * expected


def test_what_is_known_without_a_replay() -> None:
    blind = Examined(time_s=0.0, step=5, experiment="trace", values={"blind": "no room"})
    for seen, code in (
        (SeenNonfinite(bad=True, num_gradients=1, gradients=("a.b",)), "precision.nonfinite_step"),
        (SeenNonfinite(bad=True, inputs=(BadInput(dtype="float32", nan=1, inf=0, ids=(9,)),)), "data.nonfinite_input"),
    ):
        live = Examined(time_s=0.0, step=5, experiment="nonfinite", values=strict(vars(seen)))
        found = [each.found for each in diagnose(RunContext([live, blind])).findings]
        assert [each.code for each in found if each.severity != "info"] == [code]
    norm = told((5, SeenNonfinite(bad=True)), (5, TraceFacts(micro_batches=1, losses=(1.0,))))
    assert [each.code for each in norm] == ["precision.overflow"]


def skipped(step: int, loss: float = 1.0, kind: str = "scaler_skipped") -> Watched:
    return Watched(time_s=0.0, step=step, loss=loss, grad_norm=math.inf, lr=0.1, events=((kind, 0),))


class TestScaler:
    def test_skips_that_the_scale_explains_are_healthy(self) -> None:
        fine = TraceFacts(micro_batches=1, finite_without_scale=True)
        exams = [each for n in range(1, 5) for each in ((n, SeenNonfinite(bad=True)), (n, fine))]
        assert told(*exams, steps=tuple(map(skipped, range(1, 16)))) == []

    def test_a_collapse(self) -> None:
        check = of("precision.scaler_collapse")
        two = [skipped(n, math.nan) for n in (1, 2)]
        (found,) = made_of(check, (1, BROKEN), (2, BROKEN), steps=two)
        assert (found.severity, found.where.op) == ("warning", "log")
        assert not made_of(check, (1, BROKEN), steps=two)
        assert [f.severity for f in made_of(check, steps=[*map(skipped, range(5, 25))])] == ["critical"]
        assert not made_of(check, steps=[skipped(n, kind="scaler_skipped" if n % 8 else "step") for n in range(1, 40)])


@pytest.mark.parametrize(
    ("facts", "found"),
    [
        (ScalerFacts(steps=8), False),
        (ScalerFacts(scaled_updates=8), True),
        (ScalerFacts(steps=8, other=8), True),
    ],
)
def test_calls_of_a_scaler(facts: ScalerFacts, found: bool) -> None:
    assert bool(made_of(of("precision.gradients_not_unscaled"), (8, facts))) == found


@pytest.mark.parametrize(
    ("name", "facts", "found"),
    [
        ("lost_updates", MixedPrecisionFacts(still=0.95, updates=8), True),
        ("lost_updates", MixedPrecisionFacts(still=0.95, updates=8, kept_elsewhere=True), False),
        ("lost_updates", MixedPrecisionFacts(still=0.1, updates=8), False),
        ("lost_updates", MixedPrecisionFacts(still=0.1, updates=16, never_moved=("norm.weight",)), True),
        ("lost_updates", MixedPrecisionFacts(still=0.1, updates=8, never_moved=("norm.weight",)), False),
        ("lost_accumulation", MixedPrecisionFacts(micro_batches=64, sum_error=0.01, sum_rounding=0.0017), True),
        ("lost_accumulation", MixedPrecisionFacts(micro_batches=4, sum_error=0.003, sum_rounding=0.0017), False),
        ("autocast_stale_cache", MixedPrecisionFacts(stale_since=2), True),
        ("autocast_stale_cache", MixedPrecisionFacts(), False),
        ("fp16_underflow", MixedPrecisionFacts(zeros=0.9, rms_in_steps=3.0), True),
        ("fp16_underflow", MixedPrecisionFacts(zeros=0.1, rms_in_steps=3000.0), False),
    ],
)
def test_what_16_bits_lose(name: str, facts: MixedPrecisionFacts, found: bool) -> None:
    assert bool(made_of(of(f"precision.{name}"), (8, facts))) == found


def test_what_a_replayed_forward_pass_shows() -> None:
    formats = FormatFacts(
        dtype="float16", emptied=(Emptied("mul", "experts", 5e-9),), aliased=(Aliased("rope", "bfloat16", 700, 350),)
    )
    (zero,) = made_of(of("precision.fp16_underflow"), (1, MixedPrecisionFacts()), (1, formats))
    (same,) = made_of(of("precision.positions_low_precision"), (1, formats))
    assert (zero.where.module, zero.where.op, same.where.module) == ("experts", "mul", "rope")
    assert not made_of(of("precision.positions_low_precision"), (1, FormatFacts(dtype="bfloat16")))


@pytest.mark.parametrize(("errors", "found"), [((0.12, 0.11), 1), ((0.12, 0.02), 0), ((0.02, 0.12), 0), ((None,), 0)])
def test_one_batch_may_cancel_by_chance(errors: tuple[float | None, ...], found: int) -> None:
    check, formats = of("precision.cancellation"), (1, FormatFacts(dtype="bfloat16", loss_ops=("kl_div",)))
    exams = [(n + 2, LossInFp32Facts(loss=1.0, loss_in_fp32=1.0, error=error)) for n, error in enumerate(errors)]
    assert len(made_of(check, formats, *exams)) == found
    assert not requested(check, (1, FormatFacts()))
