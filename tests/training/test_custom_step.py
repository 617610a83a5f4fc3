"""``tw.fit(..., advance=step)``: a step of the user's own, with our log, checkpoints, doctor and evaluation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trainwright as tw
from trainwright.assembly.assemble import Parts, prepare
from trainwright.data.unwrap import unwrap
from trainwright.errors import RecipeError, UsageError
from trainwright.recipe import from_mapping
from trainwright.training.custom_objects import require_custom_step_fits


def data(count: int = 64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, 4, generator=generator)
    return x, x.sum(1, keepdim=True)


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(4, 1)


def step(state: tw.TrainState, batch: tw.StepBatch) -> tw.Loss:
    x, y = batch.data
    error = (state.model(x) - y).square()
    error.mean().backward()  # type: ignore[no-untyped-call]
    state.optimizer.step()
    return tw.Loss(error.sum(), float(len(x)), {"worst": error.max() * len(x)})


def fitted(until: str = "12steps", **options: Any) -> tw.Result:
    options = {"schedule": "cosine", **options}
    return tw.fit(net(), data(), advance=step, until=until, lr=0.05, batch=16, quiet=True, **options)


def records(run: Path, kind: str) -> list[dict[str, Any]]:
    lines = (json.loads(line) for line in (run / "log.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == kind]


@pytest.mark.examined
@pytest.mark.process
def test_it_learns_and_is_logged_watched_and_resumed() -> None:
    result = fitted(settings={"log.every": "1steps"})
    steps = records(result.run, "step")
    assert [line["step"] for line in steps] == list(range(1, 13))
    assert steps[-1]["loss"] < steps[0]["loss"] and steps[0]["probed"]["worst"] > steps[0]["loss"]
    assert steps[-1]["lr"] < 0.01, "the schedule"
    assert records(result.run, "found") == [] and result.findings == ()
    plan = json.loads((result.run / "plan.json").read_text())
    assert plan["precision"] == "fp32"
    (layers,) = records(result.run, "layers")
    assert layers["step"] == 2 and layers["grad_norm"][0] > 0 and layers["act_log2"][0]
    assert {"dry run", "precision"} <= {note["topic"] for note in plan["notes"]}
    assert "use: live:step" in (result.run / "recipe.yaml").read_text()
    assert fitted("14steps", resume=result.run).step == 14


@pytest.mark.process
def test_an_update_that_is_left_out_is_in_the_log() -> None:
    def once_bad(state: tw.TrainState, batch: tw.StepBatch) -> tw.Loss:
        output = step if state.step != 3 else bad
        return output(state, batch)

    def bad(state: tw.TrainState, batch: tw.StepBatch) -> tw.Loss:
        loss = state.model(batch.data[0]).sum() * float("inf")
        loss.backward()
        state.optimizer.step()
        return tw.Loss(loss, 1.0)

    result = tw.fit(net(), data(), advance=once_bad, until="6steps", lr=0.05, batch=16, quiet=True)
    assert result.skipped == 1 and result.state is not None
    assert [line["step"] for line in records(result.run, "skipped")] == [4]
    assert all(bool(p.isfinite().all()) for p in result.state.model.parameters())


@pytest.mark.process
def test_a_loss_beside_it_is_for_the_evaluation() -> None:
    result = tw.fit(
        net(), data(), F.mse_loss, advance=step, val=data(32), until="12steps", lr=0.1, batch=16, quiet=True
    )
    assert result.val_loss is not None and result.val_loss < 4.0


def rows(outputs: Tensor, targets: Tensor) -> float:
    assert outputs.shape == targets.shape
    return float(len(outputs))


@pytest.mark.process
def test_metrics_get_what_the_step_returns() -> None:
    def with_outputs(state: tw.TrainState, batch: tw.StepBatch) -> tw.Loss:
        return step(state, batch)._replace(outputs=state.model(batch.data[0]), targets=batch.data[1])

    options: dict[str, Any] = {"metrics": {"rows": rows}, "settings": {"log.every": "4steps"}, "quiet": True}
    result = tw.fit(net(), data(), advance=with_outputs, steps=12, lr=0.05, batch=16, **options)
    seen = [(line["step"], line["probed"]["rows"]) for line in records(result.run, "step")]
    assert seen == [(1, 16), (4, 48), (8, 64), (12, 64)], "of all steps since the record before"
    with pytest.raises(UsageError, match="metrics need the outputs"):
        fitted(metrics={"rows": rows})


def test_an_evaluation_needs_a_loss() -> None:
    with pytest.raises(UsageError, match="no loss to evaluate with") as caught:
        fitted(val=data(32))
    assert "advance=step" in caught.value.remedy


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"precision": "bf16"}, "precision is bf16"),
        ({"settings": {"spikes.policy": "skip"}}, "spikes.policy is skip"),
        ({"clip": 1.0}, "clipping by norm is set"),
    ],
)
def test_what_cannot_be_done_inside_of_it_is_refused_before_the_run(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=f"does not work if {said}"):
        fitted(**options)
    assert not Path("runs").exists()


def test_several_processes_are_refused() -> None:
    loaded = from_mapping({"model": "mlp", "data": {"train": "digits"}, "preset": "recommended"})
    require_custom_step_fits(loaded, 1)
    with pytest.raises(UsageError, match="it runs in 2 processes"):
        require_custom_step_fits(loaded, 2)


def test_an_optimizer_that_needs_a_closure_is_refused_without_one() -> None:
    model = net()
    with pytest.raises(RecipeError, match=r"(?s)LBFGS.step needs closure.*advance=step"):
        tw.fit(model, data(), F.mse_loss, optimizer=torch.optim.LBFGS(model.parameters()), until="2steps", quiet=True)


def test_a_loss_with_tensors_of_its_own_is_moved_to_the_device_of_the_model() -> None:
    loaded = from_mapping({"model": "mlp", "data": {"train": "digits"}})
    loss = nn.CrossEntropyLoss(weight=torch.ones(3))
    prepare(Parts(net(), unwrap(data()), {}, loss), loaded, torch.device("meta"))
    assert loss.weight is not None and loss.weight.device.type == "meta"
