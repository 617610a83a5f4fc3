"""Precision, schedule, modes and memory: each check fires on its mechanism and is silent on the look-alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from trainwright.doctor.precision.names import formats
from trainwright.doctor.resources.names import held

from tests.rows import each_row
from trainwright.doctor.context import RunContext
from trainwright.doctor.finding import ExperimentRequest, Finding
from trainwright.doctor.finding import OldCheck as Check
from trainwright.doctor.measure.modes import drop_rate
from trainwright.runlog.records import Examined, Record, Watched

SHADOW: dict[str, Any] = {
    "error": None,
    "loss": 1.0,
    "loss_fp32": 1.0,
    "loss_in_fp32": 1.0,
    "lost": 0.0,
    "lost_norm": 0.0,
    "gradient_error": 0.03,
    "by_loss": 0.002,
    "scaled": {"scale": 65536.0, "gradient_error": 0.01, "lost": 0.01},
    "loss_ops": ["kl_div"],
    "emptied": [],
}
FP16: dict[str, Any] = {"values": ["float16"], "weights": [], "backwards": 1}
MEMORY: dict[str, Any] = {"old_losses": 20, "graphs_alive": 0, "losses_alive": 0, "old_outputs": 20, "outputs_alive": 0}


def exam(experiment: str, step: int = 4, **values: Any) -> Examined:
    return Examined(time_s=0.0, step=step, experiment=experiment, values=values)


def update(step: int, lr: float = 1e-3, *, autocast: bool = False) -> Watched:
    events = (("step", {"optimizer": 0, "autocast": autocast}),)
    return Watched(time_s=0.0, step=step, loss=1.0, grad_norm=1.0, lr=lr, events=events)


def said(check: Check, *records: Record, finished: bool = False) -> list[Finding | ExperimentRequest]:
    return list(check(RunContext(records, finished=finished)))


def codes(check: Check, *records: Record, finished: bool = False) -> list[str]:
    return [each.found.code for each in said(check, *records, finished=finished) if isinstance(each, Finding)]


class TestPrecision:
    def test_underflow_is_what_a_loss_scale_brings_back(self) -> None:
        lost = SHADOW | {"lost": 0.9, "gradient_error": 0.7}
        assert codes(formats.gradients_underflow, exam("formats", **FP16), exam("fp32_shadow", **lost)) == [
            "prec.fp16_underflow"
        ]
        as_lost = lost | {"scaled": {"scale": 65536.0, "gradient_error": 0.7, "lost": 0.9}}
        assert not codes(formats.gradients_underflow, exam("formats", **FP16), exam("fp32_shadow", **as_lost))

    def test_an_operation_that_gives_only_zero_is_named(self) -> None:
        emptied = {"op": "mul", "module": "experts", "dtype": "float16", "largest": 5e-9}
        found = said(formats.values_underflow, exam("fp32_shadow", **(SHADOW | {"emptied": [emptied]})))
        assert isinstance(found[0], Finding)
        assert (found[0].found.where.module, found[0].found.where.op) == ("experts", "mul")
        assert not said(formats.values_underflow, exam("fp32_shadow", **SHADOW))

    @pytest.mark.parametrize(
        ("others", "expected"), [((0.01, 0.12), 0), ((0.01, 0.12, 0.11), 1), ((0.01, 0.12, 0.02), 0)]
    )
    def test_one_batch_may_cancel_by_chance(self, others: tuple[float, ...], expected: int) -> None:
        exams = [exam("fp32_shadow", **(SHADOW | {"by_loss": share, "gradient_error": 0.2})) for share in others]
        assert len(codes(formats.loss_cancels, *exams)) == expected

    @pytest.mark.parametrize(("by_loss", "expected"), [(0.12, ["prec.cancellation"]), (0.01, []), (None, [])])
    def test_cancellation_is_the_share_of_the_loss(self, by_loss: float | None, expected: list[str]) -> None:
        values = SHADOW | {"by_loss": by_loss, "gradient_error": 0.2}
        assert codes(formats.loss_cancels, exam("fp32_shadow", **values)) == expected

    def test_a_blind_experiment_says_nothing(self) -> None:
        assert not said(formats.loss_cancels, exam("fp32_shadow", blind="gone"))

    @pytest.mark.parametrize(
        ("lr", "elsewhere", "expected"),
        [(1e-3, False, ["prec.lost_updates"]), (1e-6, False, []), (1e-3, True, [])],
        ids=["plain", "end of a schedule", "kept elsewhere"],
    )
    def test_lost_updates(self, lr: float, elsewhere: bool, expected: list[str]) -> None:
        kept = exam("updates_kept", step=2, still=0.95, elements=1000, kept_elsewhere=elsewhere)
        assert codes(formats.updates_are_lost, update(1), update(2, lr), kept) == expected

    @pytest.mark.parametrize(("off", "expected"), [(0.01, ["prec.lost_accumulation"]), (0.003, []), (None, [])])
    def test_lost_accumulation_is_more_than_one_rounding(self, off: float | None, expected: list[str]) -> None:
        sums = exam("summed_in_16_bit", micro_batches=64, off=off, rounded_once=0.0017)
        assert codes(formats.sums_lose, sums) == expected

    def test_stale_weights_are_asked_for_and_then_named(self) -> None:
        records = [update(2, autocast=True), exam("again", step=2, same_losses=False)]
        assert said(formats.autocast_keeps_old_weights, *records) == [ExperimentRequest("stale_weights", 2)]
        assert not said(formats.autocast_keeps_old_weights, update(2), records[1])
        stale = exam("stale_weights", step=2, then=[1.0], now=[0.9], weights_of_step=1)
        assert codes(formats.autocast_keeps_old_weights, *records, stale) == ["prec.autocast_stale_cache"]
        other = exam("stale_weights", step=2, then=[1.0], now=[0.9], weights_of_step=None)
        assert not codes(formats.autocast_keeps_old_weights, *records, other)

    def test_float32_runs_pay_nothing(self) -> None:
        assert not said(formats.what_16_bits_lose, exam("formats", values=[], weights=[], backwards=1))


def scheduled(*schedulers: dict[str, Any], **more: Any) -> Examined:
    values = {
        "steps": 12,
        "epochs": 1,
        "length": 16,
        "lrs": [[1, 1e-3], [11, 1e-4]],
        "peak": 1e-3,
        "peak_step": 1,
        "zero_steps": 0,
        "exhausted": None,
        "attached": True,
        "schedulers": [{"given": True, "since": 0, "metrics": []} | each for each in schedulers],
    }
    return exam("schedule", step=more.get("steps", 12), **(values | more))


class TestMemory:
    def test_graphs_or_outputs(self) -> None:
        graphs = exam("memory", **(MEMORY | {"graphs_alive": 20}))
        assert codes(held.graphs_kept, graphs) == ["mem.graph_retained_by_scalar"]
        outputs = exam("memory", **(MEMORY | {"outputs_alive": 20, "output_bytes": 1}))
        assert codes(held.outputs_kept, outputs) == ["mem.outputs_accumulated"]
        assert not codes(held.graphs_kept, exam("memory", **(MEMORY | {"graphs_alive": 2})))

    @pytest.mark.parametrize(
        ("nodes", "expected"), [([10, 15, 20, 25, 30], ["mem.graph_grows"]), ([10, 30, 12, 40, 50], []), ([10] * 5, [])]
    )
    def test_graph_grows_with_every_step(self, nodes: list[int], expected: list[str]) -> None:
        rows = [[step + 1, count, 1] for step, count in enumerate(nodes)]
        assert codes(held.graph_grows, exam("memory", nodes=rows)) == expected

    @pytest.mark.parametrize(
        ("copies", "expected"),
        [([0, 1, 2, 3, 4], ["mem.model_copies"]), ([1, 1, 1, 1], []), ([0, 1, 2, 5, 5, 5, 5], [])],
    )
    def test_model_copies_rise(self, copies: list[int], expected: list[str]) -> None:
        rows = [[8 * n, count, 100] for n, count in enumerate(copies)]
        assert codes(held.model_copies, exam("memory", copies=rows)) == expected

    @pytest.mark.parametrize(
        ("objects", "grown", "expected"),
        [(600_000, 10 * 2**20, ["mem.worker_copy_on_write"]), (600_000, 0, []), (100, 10 * 2**20, [])],
    )
    def test_copy_on_write(self, objects: int, grown: float, expected: list[str]) -> None:
        private = [[1, 2e7], [16, 2e7 + grown]]
        assert codes(held.copied_on_write, exam("memory", private=private, held=[objects, 21_000_000])) == expected


@each_row(
    ("name", "args", "kwargs", "is_mask"),
    [
        ("bernoulli", (torch.full((4,), 0.9),), {}, True),
        ("bernoulli", (torch.randn(4), 0.9), {}, True),
        ("bernoulli_", (torch.randn(4),), {}, True),
        ("bernoulli_", (torch.randn(4), 0.9), {}, True),
        ("bernoulli_", (torch.randn(4),), {"p": torch.full((4,), 0.9)}, True),
        ("bernoulli", (torch.rand(4),), {}, False),
        ("bernoulli_", (torch.zeros(4), torch.rand(4)), {}, False),
    ],
)
def test_a_mask_is_drawn_with_one_rate(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], is_mask: bool) -> None:
    assert bool(drop_rate(name, args, kwargs)) == is_mask
