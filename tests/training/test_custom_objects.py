"""tw.fit with anybody's optimizer, schedule and observers: the same numbers as a loop by hand, and exact resume."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    MultiStepLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

import trainwright as tw
from trainwright.errors import RecipeError, UsageError

pytestmark = pytest.mark.process  # each starts threads that read the machine
ROWS, BATCH = 80, 32  # three steps an epoch, the last one short
PER_EPOCH = 3


def data(count: int = ROWS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, 20, generator=generator)
    return x, (x @ torch.randn(20, 3, generator=generator)).argmax(1)


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3))


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def fit(model: nn.Module, **given: Any) -> tw.Result:
    plain: dict[str, Any] = {"batch": BATCH, "seed": 1, "quiet": True, "settings": {"log.every": "1steps"}}
    plain["settings"] |= {"log.doctor": False} | given.pop("settings", {})
    if not {"epochs", "steps", "until"} & given.keys():
        plain["steps"] = 10
    return tw.fit(model, data(), nn.CrossEntropyLoss(), **plain, **given)


def rates(result: tw.Result) -> list[float]:
    lines = [json.loads(line) for line in (result.run / "log.jsonl").read_text().splitlines()]
    return [line["lr"] for line in lines if line["kind"] == "step"]


def notes(result: tw.Result) -> dict[str, tuple[str, str]]:
    found = json.loads((result.run / "plan.json").read_text())["notes"]
    return {note["topic"]: (note["choice"], note["why"]) for note in found}


Objects = Callable[[nn.Sequential], dict[str, Any]]


def _instance(model: nn.Sequential) -> dict[str, Any]:
    groups = [{"params": model[0].parameters(), "lr": 0.05}, {"params": model[3].parameters(), "weight_decay": 0.1}]
    return {"optimizer": SGD(groups, lr=0.1, momentum=0.9)}


def _several(model: nn.Sequential) -> dict[str, Any]:
    return {"optimizer": [AdamW(model[0].parameters(), lr=0.01), SGD(model[3].parameters(), lr=0.1, momentum=0.9)]}


def _one_cycle(model: nn.Sequential) -> dict[str, Any]:
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    return {"optimizer": optimizer, "schedule": OneCycleLR(optimizer, max_lr=0.2, total_steps=10)}


def _sequential(model: nn.Sequential) -> dict[str, Any]:
    optimizer = AdamW(model.parameters(), lr=0.01)
    warm, then = LinearLR(optimizer, 0.1, total_iters=4), MultiStepLR(optimizer, [2, 5])
    return {"optimizer": optimizer, "schedule": SequentialLR(optimizer, [warm, then], [4])}


def _by_epoch(model: nn.Sequential) -> dict[str, Any]:
    schedule = partial(StepLR, step_size=1, gamma=0.5)
    return {"optimizer": partial(SGD, lr=0.1), "schedule": schedule, "settings": {"schedule.every": "1ep"}}


def _each_its_own(model: nn.Sequential) -> dict[str, Any]:
    first, second = _several(model)["optimizer"]
    return {"optimizer": [first, second], "schedule": [CosineAnnealingLR(first, 10), StepLR(second, 2)]}


def _plateau(model: nn.Sequential) -> dict[str, Any]:
    schedule = partial(ReduceLROnPlateau, factor=0.5, patience=0, threshold=0.9)
    often = {"evaluation.every": "2steps"}
    return {"optimizer": AdamW, "lr": 0.01, "schedule": schedule, "val": data(40), "settings": often}


FORMS: dict[str, Objects] = {
    "an instance": _instance,
    "several": _several,
    "a class": lambda model: {"optimizer": AdamW, "lr": 0.01},
    "of the model": lambda model: {
        "optimizer": lambda model: [SGD(model[0].parameters(), 0.1), AdamW(model[3:].parameters())]
    },
    "of parameters": lambda model: {"optimizer": lambda parameters: SGD(parameters, lr=0.3)},
    "a function of the step": lambda model: {"lr": 0.1, "optimizer": "sgd", "schedule": lambda step: 0.9**step},
    "a function of step and share": lambda model: {"lr": 0.1, "schedule": lambda step, used: 1.0 - used},
    "OneCycleLR": _one_cycle,
    "SequentialLR": _sequential,
    "StepLR by epoch": _by_epoch,
    "one schedule for each": _each_its_own,
    "ReduceLROnPlateau": _plateau,
}


@pytest.mark.parametrize("form", FORMS)
def test_each_form_is_resumed_to_the_same_bits(form: str) -> None:
    straight, halves, again = net(), net(), net()
    whole = fit(straight, **FORMS[form](straight), name="straight")
    stopped = fit(halves, **FORMS[form](halves), name="halves", observers=[stop_at(4)])
    assert stopped.step == 4, "within the second epoch"
    ended = fit(again, **FORMS[form](again), name="halves", resume=stopped.run)
    assert (ended.ending, ended.step) == ("finished", 10)
    assert torch.equal(weights(again), weights(straight))
    assert rates(ended)[-10:] == rates(whole)
    groups = [
        [{k: v for k, v in g.items() if k != "params"} for g in r.state.optimizer.param_groups] for r in (whole, ended)
    ]  # type: ignore[union-attr]
    assert groups[0] == groups[1]
    assert not torch.equal(weights(straight), weights(net()))


def stop_at(step: int) -> Callable[[tw.StepResult, tw.TrainState], tw.Stop | None]:
    return lambda result, state: tw.Stop("enough") if result.step == step else None


def by_hand(
    model: nn.Module, optimizers: list[Optimizer], schedulers: list[LRScheduler], *, by_epoch: bool = False
) -> list[float]:
    """The loop that people write; returns the rates of its ten steps."""
    (x, y), rates = data(), []
    order = [slice(0, 32), slice(32, 64), slice(64, 80)]
    for step in range(10):
        rows = order[step % PER_EPOCH]
        loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        rates.append(float(optimizers[0].param_groups[0]["lr"]))
        for optimizer in optimizers:
            optimizer.step()
        if not by_epoch or (step + 1) % PER_EPOCH == 0:
            for scheduler in schedulers:
                scheduler.step()
    return rates


@pytest.mark.parametrize("form", ["an instance", "several", "OneCycleLR", "SequentialLR", "one schedule for each"])
def test_the_numbers_are_those_of_the_loop_by_hand(form: str) -> None:
    plain, ours = net().eval(), net().eval()  # without dropout
    objects = FORMS[form](plain)
    optimizers = objects["optimizer"] if isinstance(objects["optimizer"], list) else [objects["optimizer"]]
    given = objects.get("schedule", [])
    expected = by_hand(plain, optimizers, given if isinstance(given, list) else [given])
    still = nn.Sequential(ours[0], ours[1], nn.Identity(), ours[3])
    result = fit(still, **FORMS[form](still), settings={"data.shuffle": False})
    assert rates(result) == expected
    torch.testing.assert_close(weights(ours), weights(plain), rtol=0, atol=0)


def test_the_doctor_runs_such_steps_again_and_finds_nothing() -> None:
    """It would see at once that the replay of a step has another rate, or leaves an optimizer out."""
    model, plain = net(), net()
    result = fit(model, **_each_its_own(model), settings={"log.doctor": True})
    codes = {found.code for found in result.findings}
    assert codes <= {"schedule.unit_mismatch"}, "one of these schedules ends within the first epoch"
    log = [json.loads(line) for line in (result.run / "log.jsonl").read_text().splitlines()]
    again = [line["values"] for line in log if line["kind"] == "examined" and line["experiment"] == "again"]
    assert again and all(each["same_losses"] and each["norm_then"] == each["norm_now"] for each in again)
    fit(plain, **_each_its_own(plain))
    assert torch.equal(weights(model), weights(plain))


def test_a_schedule_that_ends_before_the_run_is_refused_at_the_start() -> None:
    model = net()
    with pytest.raises(RecipeError, match="total_steps=10, and the run has 12 steps") as caught:
        fit(model, steps=12, **_one_cycle(model))
    assert "write total_steps=12" in caught.value.problems[0].remedy
    assert fit(model, steps=11, **_one_cycle(model)).step == 11


def test_a_schedule_by_epoch_is_that_of_a_loop_that_steps_it_each_epoch() -> None:
    plain = net().eval()
    optimizer = SGD(plain.parameters(), lr=0.1)
    expected = by_hand(plain, [optimizer], [StepLR(optimizer, 1, 0.5)], by_epoch=True)
    result = fit(net(), **_by_epoch(net()))
    assert rates(result) == expected == [0.1] * 3 + [0.05] * 3 + [0.025] * 3 + [0.0125]
    assert notes(result)["schedule"][0] == "StepLR, stepped every 1ep"


def test_the_plateau_goes_by_the_validation() -> None:
    """With a threshold of 90 % no evaluation is an improvement, so each one halves the rate."""
    result = fit(net(), **_plateau(net()))
    assert rates(result) == [0.01] * 4 + [0.005] * 2 + [0.0025] * 2 + [0.00125] * 2


def test_rates_of_an_instance_stay_and_the_plan_says_what_is_not_trained() -> None:
    model = net()
    result = fit(model, optimizer=SGD(model[0].parameters(), lr=0.07))
    assert rates(result) == [0.07] * 10
    assert torch.equal(weights(model[3]), weights(net()[3]))
    assert notes(result)["not trained"] == ("2 parameters", "no optimizer holds 3.weight, 3.bias")
    plan = json.loads((result.run / "plan.json").read_text())
    assert (plan["lr"], plan["memory_bytes"]["optimizer"]) == (0.07, 0), "measured: SGD without momentum keeps nothing"


class Remembers(Optimizer):
    """Keeps three values for each weight, so what is assumed of a stranger would be wrong."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                own = self.state[p]
                for name in "abc":
                    own[name] = own.get(name, torch.zeros_like(p)) + p.grad
                p -= group["lr"] * own["a"] / 10


def test_the_memory_of_a_stranger_is_measured() -> None:
    model = net()
    result = fit(model, optimizer=Remembers)
    plan = json.loads((result.run / "plan.json").read_text())
    assert plan["memory_bytes"]["optimizer"] == 3 * 4 * weights(model).numel()


def test_functions_observe_and_stop() -> None:
    seen: list[tuple[int, int]] = []
    result = fit(net(), observers=[lambda result, state: seen.append((result.step, state.step)), stop_at(3)])
    assert seen == [(1, 1), (2, 2), (3, 3)] and result.reason == "enough"
    assert fit(net(), observers=stop_at(1)).step == 1, "a single one needs no list"


def test_the_length_and_the_device_in_words_of_their_own() -> None:
    assert fit(net(), epochs=2).step == 2 * PER_EPOCH
    assert fit(net(), steps=4, device=torch.device("cpu")).step == 4
    with pytest.raises(UsageError, match="set twice: until and steps"):
        fit(net(), steps=4, until="4steps")


def test_accumulation_alone_takes_the_batch_of_the_loader_for_a_micro_batch() -> None:
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data()), batch_size=8)
    result = tw.fit(net(), loader, nn.CrossEntropyLoss(), accumulation=3, steps=1, quiet=True)
    plan = json.loads((result.run / "plan.json").read_text())
    assert plan["batch"] == {"size": 24, "micro": 8, "accumulation": 3, "ranks": 1}


OBJECTS = """
import torch
from trainwright import Stop

def pair(model):
    return [torch.optim.SGD(model.layers[:1].parameters(), 0.1), torch.optim.AdamW(model.layers[1:].parameters(), 1e-3)]

def half(step, after=2):
    return 1.0 if step < after else 0.5

def enough(result, state, step=5):
    return Stop("seen enough") if result.step == step else None

class Counts:
    def __init__(self, to): self.left = to
    def observe(self, result, state):
        self.left -= 1
        return Stop("counted") if not self.left else None
    def state_dict(self): return {"left": self.left}
    def load_state_dict(self, saved): self.left = saved["left"]
"""


def test_a_recipe_names_the_same_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine_objects.py").write_text(OBJECTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    recipe = {
        "model": {"use": "mlp", "args": {"sizes": [64, 16, 10]}},
        "data": {"train": "digits", "val": "digits"},
        "until": "9steps",
        "optimizer": "mine_objects:pair",
        "schedule": {"use": "mine_objects:half", "args": {"after": 3}},
        "observers": [
            {"use": "mine_objects:enough", "args": {"step": 4}},
            {"use": "mine_objects:Counts", "args": {"to": 7}},
        ],
        "precision": "fp32",
        "log": {"every": "1steps", "doctor": False},
    }
    from trainwright.recipe import from_mapping
    from trainwright.runs.folder import RunFolder

    first = tw.train(from_mapping(recipe), quiet=True)
    assert (first.step, first.reason) == (4, "seen enough")
    assert rates(first) == [0.1] * 3 + [0.05]
    recipe["observers"] = [{"use": "mine_objects:enough"}, recipe["observers"][1]]
    second = tw.train(from_mapping(recipe), resume=RunFolder.open(first.run), quiet=True)
    assert (second.step, second.reason) == (5, "seen enough")
    recipe["observers"][0] = {"use": "mine_objects:enough", "args": {"step": 99}}
    third = tw.train(from_mapping(recipe), resume=RunFolder.open(first.run), quiet=True)
    assert (third.step, third.reason) == (7, "counted"), "what it had counted went on"
    stepped = {
        **recipe,
        "schedule": {"use": "torch.optim.lr_scheduler:StepLR", "args": {"step_size": 2}},
        "observers": [],
    }
    assert rates(tw.train(from_mapping(stepped), quiet=True))[:4] == pytest.approx([0.1, 0.1, 0.01, 0.01])


def test_the_recipe_of_the_page_is_one() -> None:
    import yaml

    from trainwright.recipe import from_mapping

    page = (Path(tw.__file__).parent.parent / "docs/how-to/train-your-model.md").read_text()
    recipe = from_mapping(
        {"model": "mypackage.nets:net", **yaml.safe_load(page.split("```yaml")[1].split("```")[0])}
    ).recipe
    assert str(recipe.schedule.every) == "1ep" and recipe.checkpoint.restore_best
    assert [each.use for each in recipe.observers] == ["early_stopping", "mypackage.watch:gradients"]
    assert (recipe.metrics[0].shown_name, recipe.data.more_val[0].name) == ("f1", "noisy")


def other() -> Any:
    return nn.Linear(2, 2).parameters()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (lambda m: {"optimizer": SGD(other(), 0.1)}, "not those of the model"),
        (lambda m: {"optimizer": [SGD(m.parameters(), 0.1), AdamW(m[0].parameters())]}, "2 parameters are in two"),
        (lambda m: {"optimizer": []}, "list of optimizers is empty"),
        (lambda m: {"optimizer": [SGD(m.parameters(), 0.1), "adamw"]}, "the optimizer is a str"),
        (lambda m: {"optimizer": torch.optim.LBFGS(m.parameters())}, "needs closure"),
        (lambda m: {"optimizer": SGD(m.parameters(), 0.1), "lr": 0.2}, "lr=0.2 has no effect"),
        (lambda m: {"optimizer": lambda model: SGD(model.parameters(), 0.1), "lr": 0.2}, "lr=0.2 has no effect"),
        (lambda m: {"optimizer": lambda p: SGD(p, 0.1), "settings": {"optimizer.weight_decay": 0.1}}, "no effect"),
        (
            lambda m: {"optimizer": SGD(m.parameters(), 0.1), "settings": {"optimizer.groups": []}},
            "optimizer was passed",
        ),
        (lambda m: {"optimizer": SGD(m.parameters(), 0.1), "settings": {"optimizer": "adamw"}}, "optimizer was passed"),
        (lambda m: {"optimizer": partial(SGD, momentums=0.9)}, "refuses its arguments"),  # type: ignore[call-arg]
        (lambda m: {"optimizer": lambda lr: 7}, "missing|refuses|optimizer is a"),
        (lambda m: {"schedule": StepLR(SGD(m.parameters(), 0.1), 3)}, "over another optimizer"),
        (lambda m: {"schedule": StepLR}, "StepLR cannot be made.*(.|\n)*functools.partial"),
        (lambda m: {"schedule": lambda optimizer: 7}, "gave a int"),
        (lambda m: {"schedule": lambda a, b, c: 1.0}, "takes neither one nor two"),
        (lambda m: {"schedule": lambda step: "a lot"}, "returned 'a lot' for step 0"),
        (lambda m: {"schedule": 0.1}, "the schedule is a float"),
        (lambda m: {"schedule": nn.Linear}, "the schedule is the class Linear"),
        (lambda m: {"schedule": lambda step: 1.0, "warmup": "2steps"}, "warmup has no effect"),
        (lambda m: {"schedule": lambda step: 1.0, "settings": {"schedule.floor": 0.1}}, "schedule was passed"),
        (lambda m: {"schedule": partial(StepLR, step_size=2), "settings": {"schedule.every": "3s"}}, "steps or epochs"),
        (lambda m: {"schedule": ReduceLROnPlateau}, "needs validation results"),
        (lambda m: {"observers": [tw.EarlyStopping()]}, "needs validation results"),
    ],
)
def test_what_cannot_be_is_said_in_words(given: Objects, said: str) -> None:
    model = net()
    with pytest.raises(UsageError, match=said):
        fit(model, **given(model))


@pytest.mark.filterwarnings("error")
def test_an_update_that_is_left_out_does_not_make_torch_warn() -> None:
    x, y = data()
    x[:BATCH] = torch.inf
    result = tw.fit(
        net(),
        (x, y),
        nn.CrossEntropyLoss(),
        steps=3,
        batch=BATCH,
        schedule=partial(LambdaLR, lr_lambda=lambda step: 1 / (1 + step)),
        settings={"data.shuffle": False},
        quiet=True,
    )
    assert result.skipped == 1


def test_the_saved_state_of_a_stranger_is_refused_in_words() -> None:
    model = net()
    stopped = fit(model, **_one_cycle(model), name="cycle", observers=[stop_at(4)])
    again = net()
    optimizer = SGD(again.parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(tw.TrainwrightError, match="StepLR has no"), warnings.catch_warnings():
        fit(
            again,
            optimizer=optimizer,
            schedule=StepLR(optimizer, 3),
            name="cycle",
            resume=stopped.run,
            accept=["schedule", "optimizer.lr"],
        )
