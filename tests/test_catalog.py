"""One row adds an optimizer, a schedule, a sink or a device; what the rows say is held against what really runs."""

from __future__ import annotations

import inspect
import json
import runpy
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import trainwright as tw
from tests import forked
from trainwright.doctor.measure.mixed_precision import MOMENTS
from trainwright.errors import RecipeError, UsageError, install_remedy
from trainwright.optim.choose import make_optimizer
from trainwright.optim.guarded import GuardedOptimizer
from trainwright.plan.devices import find_device, known_devices, load_devices
from trainwright.plan.layout import why_not_offloaded
from trainwright.plan.memory import memory_bytes
from trainwright.plan.resume_changes import compare_recipes
from trainwright.plan.trace.run_forecast import forecast
from trainwright.recipe import (
    DATASETS,
    LOSSES,
    METRICS,
    MODELS,
    OBSERVERS,
    OPTIMIZER_ALIASES,
    OPTIMIZERS,
    SCHEDULES,
    SINKS,
    OptimizerRow,
    Row,
    SinkRow,
    from_mapping,
    json_schema,
    optimizer_row,
)
from trainwright.recipe.resolve import import_factory

ROOT = Path(tw.__file__).parent.parent
MLP = {"model": {"use": "mlp", "args": {"sizes": [64, 256, 256, 10]}}, "data": {"train": "digits"}}
SMALL = {"model": "gpt", "data": {"train": "python-topics"}}


class Lion(Optimizer):
    """Chen et al. 2023, arXiv 2302.06675: the sign of a momentum, and no second moment."""

    def __init__(
        self, params: Iterable[Tensor], lr: float = 1e-4, weight_decay: float = 0.0, beta: float = 0.9
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "beta": beta})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    average = self.state[parameter].setdefault("exp_avg", torch.zeros_like(parameter))
                    average.lerp_(parameter.grad, 1 - group["beta"])
                    parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(average.sign(), alpha=group["lr"])


def halves(total: int | None, warmup: float, floor: float, *, at: int = 1) -> object:
    """A schedule: half the learning rate from step ``at`` on."""
    return lambda step, fraction: 1.0 if step < at else 0.5


class Kept:
    """A sink that keeps the losses that it gets."""

    losses: ClassVar[dict[int, float]] = {}

    def __init__(self, folder: Path, config: Mapping[str, object], *, from_step: int) -> None:
        self.losses.clear()

    def open(self) -> None:
        """It is there."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        if "train/loss" in values:
            self.losses[step] = values["train/loss"]

    def text(self, step: int, name: str, text: str) -> None: ...

    def close(self, exit_code: int) -> None: ...


LION = OptimizerRow(
    "sign",
    f"{__name__}:Lion",
    "The sign of a momentum.",
    state_per_weight=1,
    decoupled=True,
    adds_state=("twice",),
    why_not_offloaded="this is a test",
)


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One row each, and nothing else."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(OPTIMIZERS, "sign", LION)
    monkeypatch.setitem(SCHEDULES, "halves", Row("halves", f"{__name__}:halves", "Half from some step on."))
    monkeypatch.setitem(SINKS, "kept", SinkRow("kept", f"{__name__}:Kept", "Keeps the losses."))


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 20, generator=generator)
    return x, (x @ torch.randn(20, 3, generator=generator)).argmax(1)


def records(run: Path, kind: str) -> list[dict[str, float]]:
    lines = (json.loads(line) for line in (run / "log.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == kind]


def net() -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(20, 3)


def trained(model: nn.Module, until: str, resume: Path | None = None) -> tw.Result:
    settings = {"log.sinks": ["kept"], "log.every": "1steps", "schedule.args.at": 4, "optimizer.args.beta": 0.8}
    return tw.fit(
        model,
        data(),
        nn.CrossEntropyLoss(),
        until=until,
        lr=0.01,
        optimizer="sign",
        schedule="halves",
        settings=settings,
        resume=resume,
        quiet=True,
    )


@pytest.mark.process
def test_what_one_row_adds_is_trained_with(added: None) -> None:
    model, before = net(), net()
    fit = trained(model, "8steps")
    steps = records(fit.run, "step")
    assert [line["lr"] for line in steps] == pytest.approx([0.01] * 4 + [0.005] * 4)
    assert Kept.losses == pytest.approx({line["step"]: line["loss"] for line in steps})
    travelled = float((model.weight - before.weight).detach().abs().max())
    assert travelled == pytest.approx(4 * 0.01 + 4 * 0.005, rel=1e-4)  # it moves each weight by the learning rate
    plan = json.loads((fit.run / "plan.json").read_text())
    assert plan["memory_bytes"]["optimizer"] == 4 * 63
    assert trained(model, "9steps", resume=fit.run).step == 9


def test_what_one_row_adds_is_known_to_the_recipe_and_the_plan(added: None) -> None:
    defs = json_schema()["$defs"]
    uses = [defs[section]["anyOf"][0]["anyOf"][0] for section in ("Optimizer", "Schedule")]
    at = [use["enum"].index(name) for use, name in zip(uses, ["sign", "halves"])]
    assert uses[0]["enumDescriptions"][at[0]] == "The sign of a momentum."
    assert uses[1]["enumDescriptions"][at[1]] == "Half from some step on."
    assert defs["Log"]["properties"]["sinks"]["items"]["enum"][-1] == "kept"
    with pytest.raises(RecipeError, match="did you mean sign"):
        from_mapping({**SMALL, "optimizer": "signn"})
    with pytest.raises(RecipeError, match="did you mean kept"):
        from_mapping({**SMALL, "log": {"sinks": ["kep"]}})
    with pytest.raises(UsageError, match="has no argument 'betta'") as caught:
        make_optimizer("sign", nn.Linear(2, 2), lr=0.1, args={"betta": 0.5})
    assert "did you mean 'beta'" in caught.value.remedy
    held = memory_bytes("sign", {"twice": True}, parameters=10, trainable=10, activations=0)
    assert held["optimizer"] == 2 * 4 * 10
    assert why_not_offloaded("sign", {}) == "this is a test"
    with pytest.raises(UsageError, match="cannot be offloaded: this is a test"):
        make_optimizer("sign", nn.Linear(2, 2), lr=0.1, offload=True)
    once, twice = (
        from_mapping({**SMALL, "optimizer": {"use": "sign", "args": {"twice": value}}}).recipe.model_dump(mode="json")
        for value in (False, True)
    )
    assert [change.kind for change in compare_recipes(once, twice, step=1)] == ["fatal"]


@pytest.mark.slow
def test_a_row_of_a_device_is_all_that_a_plan_needs(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("mine-9gb: {memory: 9GiB, bandwidth: 1e12, flops: {fp32: 2e13, bf16: 2e14}}\n")
    device = find_device("mine-9gb", load_devices(path))
    plan = forecast(from_mapping({**MLP, "precision": "auto"}), device)
    assert (plan.choice.best.layout.precision, plan.choice.fits) == ("bf16", True)
    assert not forecast(from_mapping(MLP), device.with_memory(1 << 20)).choice.fits


@pytest.mark.slow
def test_every_optimizer_can_be_planned_for_a_device_that_is_not_there() -> None:
    for name, row in OPTIMIZERS.items():
        args = {row.needs_for_state: 0.9} if row.needs_for_state else {}
        recipe = from_mapping({**MLP, "optimizer": {"use": name, "args": args}})
        trace = forecast(recipe, find_device("rtx4090", known_devices())).trace
        per_weight = trace.resident.get("optimizer", 0) / trace.resident["weights"]
        assert per_weight == pytest.approx(row.state_per_weight, abs=0.15), name


def test_every_row_names_a_factory_and_says_what_it_is() -> None:
    for rows in (MODELS, DATASETS, LOSSES, METRICS, OPTIMIZERS, SCHEDULES, OBSERVERS, SINKS):
        for name, row in rows.items():
            assert row.name == name
            assert callable(import_factory(row.factory)), name
            assert row.doc.endswith("."), name
            assert len(row.doc) < 100, name


@pytest.mark.process
@pytest.mark.parametrize("name", ["catalog", "reference"])
def test_a_page_is_as_its_script_prints_it(name: str) -> None:
    script = ROOT / "scripts" / f"{name}.py"
    done = forked.run("import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')", str(script))
    assert done.returncode == 0, done.stderr
    page = ROOT / "docs" / "reference" / {"catalog": "catalog.md", "reference": "api.md"}[name]
    assert page.read_text() == done.stdout, f"python scripts/{name}.py > {page.relative_to(ROOT)}"


@pytest.mark.slow
def test_every_short_name_of_another_package_stands_for_an_optimizer() -> None:
    package = pytest.importorskip("pytorch_optimizer")
    for name, row in OPTIMIZER_ALIASES.items():
        assert row.name == name and name not in OPTIMIZERS
        assert row.factory.startswith(f"{package.__name__}:")
        made = import_factory(row.factory)
        assert isinstance(made, type) and issubclass(made, Optimizer)
        assert from_mapping({**SMALL, "optimizer": name}).recipe.optimizer.use == row.factory


SCRIPT = runpy.run_path(str(ROOT / "scripts" / "catalog.py"))


@pytest.mark.parametrize("row", [*MODELS.values(), *DATASETS.values(), *LOSSES.values(), *OBSERVERS.values()], ids=str)
def test_every_argument_of_what_is_in_the_box_is_documented(row: Row) -> None:
    """The signature has the names and the docstring what they are, and neither has more than the other."""
    factory = import_factory(row.factory)
    text, meanings = SCRIPT["read"](inspect.getdoc(factory) or "")
    names = [name for name, *_ in SCRIPT["arguments"](factory)]
    assert text and list(meanings) == names
    assert all(len(meaning.split()) > 1 and meaning.endswith(".") for meaning in meanings.values())


def test_every_sink_has_its_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for row in SINKS.values():
        if row.package:
            [requirement] = project["optional-dependencies"][row.name]
            assert install_remedy(row.package) == f'pip install "{requirement}"'


def stepped(name: str, args: Mapping[str, object], decay: float = 0.0) -> tuple[nn.Module, Optimizer]:
    """After one step on gradients of ones; nearly all weights are in hidden matrices."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(3)], nn.Linear(256, 4, bias=False))
    optimizer = make_optimizer(name, model, lr=1e-3, weight_decay=decay, args=args)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return model, optimizer


def kept_values(optimizer: Optimizer) -> dict[str, Tensor]:
    return {
        f"{number}.{key}": value
        for number, state in enumerate(optimizer.state.values())
        for key, value in state.items()
        if isinstance(value, Tensor)
    }


CASES: list[tuple[str, dict[str, float]]] = [
    (row.name, dict(args)) for row in OPTIMIZERS.values() for args in ({}, *({name: True} for name in row.adds_state))
]
CASES += [
    (row.name, {row.needs_for_state: at}) for row in OPTIMIZERS.values() for at in (0.0, 0.9) if row.needs_for_state
]


@pytest.mark.parametrize(("name", "args"), CASES, ids=lambda case: str(case))
def test_the_state_of_an_optimizer_weighs_what_its_row_says(name: str, args: dict[str, object]) -> None:
    model, optimizer = stepped(name, args)
    weights = sum(parameter.numel() for parameter in model.parameters())
    num_bytes = sum(value.nbytes for value in kept_values(optimizer).values())
    assert num_bytes / (4 * weights) == pytest.approx(optimizer_row(name).values_per_weight(args), abs=0.02)
    full = {key.split(".")[1] for key, value in kept_values(optimizer).items() if value.numel() == 256 * 256}
    known = isinstance(optimizer, GuardedOptimizer) or full <= MOMENTS
    assert known, "a replay would take this state for a copy of the weights"


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_decoupled_weight_decay_stays_out_of_the_moments(name: str) -> None:
    args = {OPTIMIZERS[name].needs_for_state: 0.9} if OPTIMIZERS[name].needs_for_state else {}
    (moved, plain), (decayed, with_decay) = stepped(name, args), stepped(name, args, decay=0.1)
    assert not all(torch.equal(a, b) for a, b in zip(moved.parameters(), decayed.parameters()))
    pairs = zip(kept_values(plain).values(), kept_values(with_decay).values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs) == OPTIMIZERS[name].decoupled


def test_what_is_fused_takes_the_argument() -> None:
    for name, row in OPTIMIZERS.items():
        assert ("fused" in inspect.signature(import_factory(row.factory)).parameters) == row.fused, name
