"""The verb ``plan`` and what a recipe leaves to the plan, on real recipes and traces."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from trainwright.assembly.assemble import Parts, build_parts
from trainwright.cli import app
from trainwright.data.unwrap import unwrap
from trainwright.errors import RecipeError, UsageError
from trainwright.optim.offload import Offloaded, offloaded
from trainwright.plan.call_trace import Trace
from trainwright.plan.devices import Device, find_device, known_devices
from trainwright.plan.layout import Layout, offload_layouts
from trainwright.plan.machine import read_machine
from trainwright.plan.trace.blueprint import fake_copy, make_blueprint
from trainwright.plan.trace.fake_tensors import fake_tensors
from trainwright.plan.trace.layouts import LayoutSurvey
from trainwright.plan.trace.local_device import nominal_cpu, table_row
from trainwright.plan.trace.resolve import read_resolved, resolve
from trainwright.plan.trace.run_forecast import forecast
from trainwright.plan.trace.traced_step import TracedObjects, trace_step
from trainwright.recipe import Loaded, from_mapping, load
from trainwright.training.job import make_advance
from trainwright.training.prepare import prepare

RECIPES = Path(__file__).parents[2] / "recipes"
MIB, GIB = 1 << 20, 1 << 30
SLOWLY = [pytest.param(name, marks=pytest.mark.slow) for name in ("gpt-lora", "moe-text", "reinforce-cartpole")]
TINY = ("batch.size=96", "model.args.layers=1")
"""A trace costs what its operators do, so one block; it can be computed again as well."""
ONE_LAYER = ("model.args.layers=1",)
FEWER_LAYERS = {"gpt-lora": ONE_LAYER, "moe-text": ONE_LAYER}


TOO_LITTLE = 5 * MIB // 2
"""Takes the weights of such a gpt-tiny with all of their state, but not a step."""


TRACE = LayoutSurvey.trace


@pytest.fixture(autouse=True, scope="module")
def equal_steps_are_traced_once() -> Iterator[None]:
    """Several tests plan the same training for other amounts of memory, which no trace depends on."""
    traces: dict[object, Trace] = {}

    def trace(survey: LayoutSurvey, samples: int, **how: Any) -> Trace:
        settings = survey.blueprint.loaded.recipe.model_dump(exclude={"batch"})
        del settings["model"]["activation_checkpointing"], settings["optimizer"]["offload"]
        place = (survey.device.kind, survey.precision, survey.caches, id(survey.blueprint.live))
        key = (repr(settings), place, samples, repr(sorted(how.items())))
        if key not in traces:
            traces[key] = TRACE(survey, samples, **how)
        return traces[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LayoutSurvey, "trace", trace)
        yield


def cpu(memory_bytes: int) -> Device:
    return nominal_cpu(read_machine()).with_memory(memory_bytes)


def gpt(*settings: str) -> Loaded:
    return load(RECIPES / "gpt-tiny.yaml", overrides=[*TINY, *settings], environ={})


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", ["none", "selective", "block"])
@pytest.mark.parametrize(("kind", "precision"), [("cpu", "fp32"), ("cuda", "bf16")])
def test_what_is_scaled_is_what_is_traced(kind: str, precision: str, checkpointing: str) -> None:
    device = cpu(GIB) if kind == "cpu" else find_device("h100-80gb", known_devices())
    survey = LayoutSurvey(make_blueprint(gpt()), device, precision)  # type: ignore[arg-type]
    layout = survey.layout(checkpointing, chunked=False)
    traced = survey.trace(12, chunked=False, checkpointing=survey.checkpointing(checkpointing), accumulation=3)
    assert layout.scaled.peak_bytes(12, 3) == pytest.approx(traced.peak.total, rel=2e-3)
    assert layout.scaled.at(12, 3).flops == traced.flops


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lstm-text", *SLOWLY])
def test_recipes_of_the_box_are_planned(name: str) -> None:
    loaded = load(RECIPES / f"{name}.yaml", overrides=FEWER_LAYERS.get(name, ()), environ={})
    before = torch.get_rng_state()
    made = forecast(loaded, cpu(2 * GIB))
    assert torch.equal(torch.get_rng_state(), before)
    parts = build_parts(loaded, torch.device("cpu"))
    assert made.parameters == sum(parameter.numel() for parameter in parts.model.parameters())
    assert made.trainable == sum(p.numel() for p in parts.model.parameters() if p.requires_grad)
    assert made.written.fits
    assert made.written.step_s > 0


@pytest.mark.slow
def test_what_does_not_fit_gets_settings_that_do() -> None:
    small = cpu(8 * MIB)
    made = forecast(gpt(), small)
    assert not made.written.fits
    assert made.choice.fits
    resolved = forecast(gpt(*made.settings), small)
    assert resolved.written.fits
    assert resolved.written.peak_bytes == made.choice.best.peak_bytes


@pytest.mark.slow
def test_where_nothing_fits_other_training_is_proposed_and_not_silently_taken() -> None:
    made = forecast(gpt(), cpu(TOO_LITTLE))
    assert not made.choice.fits
    names = {remedy.name for remedy in made.remedies}
    assert {"Adafactor", "LoRA", "8-bit moments"} <= names


@pytest.mark.slow
def test_the_average_of_the_weights_is_counted() -> None:
    plain, average = (LayoutSurvey(make_blueprint(gpt(*ask)), cpu(GIB), "fp32") for ask in ([], ["model.ema=0.99"]))
    more = average.trace(2, chunked=False).peak.total - plain.trace(2, chunked=False).peak.total
    assert more == 4 * plain.blueprint.counts[1]


@pytest.mark.slow
def test_a_loss_in_chunks_is_scaled_from_whole_chunks() -> None:
    small = ["model.args.layers=1", "model.args.block_size=256", "data.train.args.block_size=256"]
    loaded = load(RECIPES / "gpt2-124m.yaml", overrides=small, environ={})
    device = find_device("h100-80gb", known_devices())
    survey = LayoutSurvey(make_blueprint(loaded), device, "bf16")
    layout, traced = survey.layout("none", chunked=True), survey.trace(64, chunked=True)
    assert traced.peak.total <= layout.scaled.peak_bytes(64, 1) <= 1.1 * traced.peak.total
    assert layout.scaled.at(64, 1).flops == pytest.approx(traced.flops, rel=1e-3)


@pytest.mark.slow
def test_a_loss_is_computed_in_chunks_only_where_its_logits_do_not_fit() -> None:
    """The recipe on a device with plenty of memory, and on one in which the logits of 8 samples are too much."""
    small = ["model.args.layers=1", "model.args.block_size=256", "batch.size=8", "batch.micro=8"]
    small += [f"data.{name}.args.block_size=256" for name in ("train", "val")]
    loaded = load(RECIPES / "gpt2-124m.yaml", overrides=small, environ={})
    large = find_device("h100-80gb", known_devices())
    blueprint, little = make_blueprint(loaded), large.with_memory(3 << 30)
    assert (blueprint.chunked(8, large), blueprint.chunked(1, little), blueprint.chunked(8, little)) == (
        False,
        False,
        True,
    )
    assert forecast(loaded, large).written.layout.chunked is False
    made = forecast(loaded, little)
    assert made.written.layout.chunked and "loss.chunked=true" not in made.settings, "a run decides alike"


@pytest.mark.slow
def test_augmented_samples_are_read_without_a_trace_in_the_random_state() -> None:
    before = torch.get_rng_state()
    made = make_blueprint(load(RECIPES / "resnet-digits.yaml", environ={}))
    made.train.dataset[0]
    assert not torch.equal(torch.get_rng_state(), before), "they draw nothing: another recipe is needed here"
    torch.set_rng_state(before)
    make_blueprint(load(RECIPES / "resnet-digits.yaml", environ={}))
    assert torch.equal(torch.get_rng_state(), before)


def test_nothing_is_traced_where_nothing_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainwright.plan.trace.resolve.make_blueprint", None)
    loaded = gpt("batch.micro=8", "model.activation_checkpointing=block")
    assert resolve(loaded, cpu(GIB)).loaded is loaded


@pytest.mark.slow
def test_auto_is_settled_the_same_each_time_and_can_be_kept() -> None:
    loaded = gpt("batch.micro=auto", "model.activation_checkpointing=auto")
    one, two = resolve(loaded, cpu(8 * MIB)), resolve(loaded, cpu(8 * MIB))
    assert one.loaded.recipe == two.loaded.recipe
    assert one.planned == two.planned
    assert isinstance(one.loaded.recipe.batch.micro, int)
    again = read_resolved(loaded, json.loads(json.dumps(one.to_json())))
    assert (again.loaded.recipe, again.planned) == (one.loaded.recipe, one.planned)
    assert {note.topic for note in one.notes} == {"micro-batch", "checkpointing"}


@pytest.mark.slow
def test_a_budget_in_bytes_is_kept_by_the_true_peak() -> None:
    loaded = gpt("batch.micro=24", "model.activation_checkpointing=20MiB", "model.args.layers=2")
    resolved = resolve(loaded, cpu(GIB))
    assert resolved.planned is not None
    assert 0 < resolved.planned.count <= 2
    survey = LayoutSurvey(make_blueprint(loaded), cpu(GIB), "fp32")
    traced = survey.trace(24, chunked=False, checkpointing=resolved.planned, accumulation=2)
    assert traced.peak.total <= 20 * MIB < survey.trace(24, chunked=False).peak.total


def test_a_model_handed_over_in_python_is_planned_as_a_copy() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 10))
    model[0].weight.requires_grad_(False)
    with fake_tensors():
        copied = fake_copy(model, torch.device("cpu"))
        assert [p.requires_grad for p in copied.parameters()] == [p.requires_grad for p in model.parameters()]
    data = unwrap((torch.zeros(64, 64), torch.zeros(64, dtype=torch.int64)))
    mapping = {"model": "live:model", "data": {"train": "live:train"}, "batch": {"size": 64, "micro": "auto"}}
    resolved = resolve(from_mapping(mapping), cpu(GIB), parts=Parts(model, data, {}, nn.CrossEntropyLoss()))
    assert resolved.loaded.recipe.batch.micro == 64
    assert type(model[0].weight) is nn.Parameter


@pytest.mark.parametrize(
    ("name", "expected"),
    [("NVIDIA A100-SXM4-40GB", "a100-40gb"), ("NVIDIA H100 80GB HBM3", "h100-80gb"), ("Tesla T4", "t4-16gb")],
)
def test_a_gpu_is_known_by_its_name(name: str, expected: str) -> None:
    row = find_device(expected, known_devices())
    assert table_row(name, row.memory_bytes) == row


def test_a_gpu_that_is_not_in_the_table_says_so() -> None:
    made = table_row("Frobnicator 9000", 24 * GIB)
    assert (made.name, made.memory_bytes) == ("Frobnicator 9000", 24 * GIB)
    assert "not in the table" in made.source


def two_billion(*settings: str) -> Loaded:
    """2.1 G parameters: few layers, which are traced one by one, d 8192, SwiGLU; an untied head over 32,000 tokens."""
    shape = ("layers=2", "d_model=8192", "heads=64")
    return load(RECIPES / "llama-7b.yaml", overrides=[*(f"model.args.{each}" for each in shape), *settings], environ={})


@pytest.mark.slow
def test_two_billion_parameters() -> None:
    made = forecast(two_billion(), find_device("h100-80gb", known_devices()).with_memory(24 * GIB))
    assert 2.0e9 < made.parameters < 2.2e9
    assert made.choice.fits
    layout = made.choice.best.layout
    state = layout.scaled.small.resident
    on_host = layout.offload.state_bytes if layout.offload else 0
    assert on_host > 0, "the optimizer's state has no room beside weights and gradients"
    held = state["weights"] + state["gradients"] + state.get("optimizer", 0) + on_host
    assert held == pytest.approx(16 * made.parameters, rel=1e-3)
    assert layout.precision == "bf16"
    assert 0.2 < made.choice.best.time.mfu < 0.6


@pytest.mark.slow
def test_two_billion_parameters_where_not_even_that_fits() -> None:
    made = forecast(two_billion(), find_device("h100-80gb", known_devices()).with_memory(19 * GIB))
    assert not made.choice.fits
    assert made.choice.best.layout.offload is None
    assert "optimizer offload" in {each.name for each in made.remedies if each.means == "here" and not each.fits}
    assert {each.name for each in made.remedies if each.means == "here" and each.fits} == {"LoRA"}


@pytest.mark.slow
def test_the_verb() -> None:
    small = [f"--set={each}" for each in TINY]
    command = ["plan", str(RECIPES / "gpt-tiny.yaml"), "--device", "a100-40gb", *small]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert "as written" in done.output
    assert "<- peak" in done.output and "fine-tuning" not in done.output
    refused = CliRunner().invoke(app, [*command[:2], "--device", "a100-40gb", "--memory", "650MiB", "--json", *small])
    answer = json.loads(refused.output.splitlines()[-1])
    assert refused.exit_code == 3
    assert answer["fits"] is False
    assert answer["exit"] == 3


def test_a_device_that_is_not_known(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["plan", str(RECIPES / "gpt-tiny.yaml"), "--device", "h100-81gb"])
    assert done.exit_code == 2
    assert "did you mean" in done.stderr


def a100(memory_bytes: int) -> Device:
    return find_device("a100-40gb", known_devices()).with_memory(memory_bytes)


@pytest.fixture(scope="module")
def tight() -> Device:
    """A GPU that takes gpt-tiny's weights and gradients, but not AdamW's moments beside them."""
    options = forecast(gpt("batch.micro=1"), a100(GIB)).choice.options
    least = min(option.peak_bytes for option in options if option.layout.offload is None)
    moved = min(option.peak_bytes for option in options if option.layout.offload is not None)
    assert moved < least
    return a100(int(((moved + least) / 2 + (600 << 20)) / 0.95))


@pytest.mark.slow
def test_the_optimizer_goes_to_the_host_where_nothing_else_fits(tight: Device) -> None:
    made = forecast(gpt(), tight)
    assert not made.written.fits
    assert made.choice.fits
    assert "optimizer.offload=true" in made.settings
    again = forecast(gpt(*made.settings), tight)
    assert again.written.fits
    assert again.written.peak_bytes == made.choice.best.peak_bytes
    assert again.trace.peak.total == again.written.peak_bytes
    assert forecast(gpt(*made.settings[:-1], "optimizer.offload=auto"), tight).written.fits
    without_blocks = load(RECIPES / "lstm-text.yaml", overrides=["optimizer.offload=true"], environ={})
    assert forecast(without_blocks, a100(2 * GIB)).written.layout.offload is not None


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["auto", "true", "false"])
def test_offload_is_settled_and_kept(setting: str, tight: Device) -> None:
    loaded = gpt("batch.micro=1", "model.activation_checkpointing=block", f"optimizer.offload={setting}")
    if setting == "auto":
        assert resolve(loaded, a100(2 * GIB)).loaded.recipe.optimizer.offload is False
    found = resolve(loaded, tight) if setting != "false" else resolve(loaded, a100(2 * GIB))
    assert found.loaded.recipe.optimizer.offload is (setting != "false")
    again = read_resolved(loaded, json.loads(json.dumps(found.to_json())))
    assert again.loaded.recipe == found.loaded.recipe
    assert [note.topic for note in found.notes] == (["optimizer offload"] if setting == "auto" else [])


@pytest.mark.slow
def test_offload_beside_what_else_the_plan_decides(tight: Device) -> None:
    has_open_settings = ("batch.micro=auto", "model.activation_checkpointing=auto")
    with pytest.raises(UsageError, match="no micro-batch fits"):
        resolve(gpt("batch.micro=auto"), tight)
    found = resolve(gpt(*has_open_settings, "optimizer.offload=auto"), tight)
    assert found.loaded.recipe.optimizer.offload is True
    assert found.planned is not None
    assert {note.topic for note in found.notes} == {"micro-batch", "optimizer offload", "checkpointing"}


def test_on_a_cpu_there_is_nothing_to_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainwright.plan.trace.resolve.make_blueprint", None)
    found = resolve(gpt("optimizer.offload=auto"), cpu(MIB))
    assert found.loaded.recipe.optimizer.offload is False
    assert "is the host's" in found.notes[0].why


def test_offload_that_gains_nothing_is_refused_with_its_place() -> None:
    for device in (cpu(GIB), a100(2 * GIB)):
        with pytest.raises(RecipeError, match=r"optimizer\.offload"):
            forecast(gpt("optimizer.offload=true", "optimizer.use=muon", "optimizer.args={}"), device)


@cache
def offloaded_layout() -> tuple[LayoutSurvey, Layout]:
    survey = LayoutSurvey(make_blueprint(gpt()), find_device("h100-80gb", known_devices()), "bf16")
    [layout] = offload_layouts([survey.layout("none", chunked=False)], survey.device)
    return survey, layout


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("accumulation", [1, 3])
def test_the_arithmetic_of_offload_is_that_of_a_trace(accumulation: int) -> None:
    survey, layout = offloaded_layout()

    def make(device: torch.device) -> TracedObjects:
        made = survey.blueprint.traced_objects(device, samples=12, chunked=False)
        assert made.optimizer is not None
        weights = [p for group in made.optimizer.param_groups for p in group["params"]]
        return replace(made, optimizer=offloaded(torch.optim.AdamW)(weights))

    traced = trace_step(make, device="cuda", precision="bf16", accumulation=accumulation)
    held = [m.total - m.held.get("optimizer", 0) for m in traced.moments if m.phase != "update"]
    assert max(held) == pytest.approx(layout.scaled.peak_bytes(12, accumulation), rel=2e-3)


@pytest.mark.slow
def test_a_run_with_it_is_the_same_bits_on_a_cpu() -> None:
    finals = []
    for setting in ("false", "true", "auto"):
        job = prepare(gpt("precision=fp32", "batch.size=8", f"optimizer.offload={setting}"))
        assert isinstance(job.state.optimizer, Offloaded) is (setting == "true")
        advance = make_advance(job)
        for data in islice(job.batches, 3):
            advance(job.state, data)
        finals.append(torch.cat([p.detach().flatten() for p in job.parts.model.parameters()]))
    assert all(torch.equal(finals[0], each) for each in finals)
