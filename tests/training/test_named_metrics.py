"""Metrics by name, held against scikit-learn, and ``tw.log``."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trainwright as tw
from trainwright.engine.metrics import ForwardOutputs
from trainwright.errors import MissingExtra, RecipeError, UsageError
from trainwright.recipe import from_mapping
from trainwright.training.arguments import resolve_metrics

sklearn_metrics = pytest.importorskip("sklearn.metrics")
pytest.importorskip("torchmetrics")
Seen = tuple[Tensor, Tensor]


def scores(classes: int, count: int = 200) -> Seen:
    """Logits (N, C) and classes (N,)."""
    draw = torch.Generator().manual_seed(0)
    target = torch.randint(classes, (count,), generator=draw)
    return torch.randn(count, classes, generator=draw) + 1.5 * nn.functional.one_hot(target, classes), target


def yes_or_no() -> Seen:
    logits, target = scores(2)
    return logits[:, 1] - logits[:, 0], target.float()


def labels() -> Seen:
    draw = torch.Generator().manual_seed(1)
    target = torch.randint(2, (200, 4), generator=draw).float()
    return torch.randn(200, 4, generator=draw) + target, target


def numbers() -> Seen:
    draw = torch.Generator().manual_seed(2)
    target = torch.randn(200, 1, generator=draw)
    return target + 0.3 * torch.randn(200, 1, generator=draw), target


def measured(metrics: Any, seen: Seen, loss: object = None) -> dict[str, float]:
    """The metrics over ``seen`` in batches of uneven size."""
    found = resolve_metrics(metrics, loss)
    outputs, targets = seen
    for begin, end in ((0, 64), (64, 150), (150, 200)):
        found.update([ForwardOutputs(outputs[begin:end], targets[begin:end])])
    return found.compute()


def softmax(logits: Tensor) -> Any:
    return logits.softmax(1).numpy()


CLASSES, BINARY, LABELS, NUMBERS = scores(5), yes_or_no(), labels(), numbers()


@pytest.mark.parametrize(
    ("name", "seen", "expected"),
    [
        ("accuracy", CLASSES, lambda o, t: sklearn_metrics.accuracy_score(t, o.argmax(1))),
        ("f1", CLASSES, lambda o, t: sklearn_metrics.f1_score(t, o.argmax(1), average="macro")),
        ("precision", CLASSES, lambda o, t: sklearn_metrics.precision_score(t, o.argmax(1), average="macro")),
        ("recall", CLASSES, lambda o, t: sklearn_metrics.recall_score(t, o.argmax(1), average="macro")),
        ("auroc", CLASSES, lambda o, t: sklearn_metrics.roc_auc_score(t, softmax(o), multi_class="ovr")),
        ("perplexity", CLASSES, lambda o, t: math.exp(sklearn_metrics.log_loss(t, softmax(o)))),
        ("balanced_accuracy", CLASSES, lambda o, t: sklearn_metrics.balanced_accuracy_score(t, o.argmax(1))),
        ("matthews", CLASSES, lambda o, t: sklearn_metrics.matthews_corrcoef(t, o.argmax(1))),
        ("accuracy", BINARY, lambda o, t: sklearn_metrics.accuracy_score(t, o > 0)),
        ("f1", BINARY, lambda o, t: sklearn_metrics.f1_score(t, o > 0)),
        ("auroc", BINARY, lambda o, t: sklearn_metrics.roc_auc_score(t, o)),
        ("balanced_accuracy", BINARY, lambda o, t: sklearn_metrics.balanced_accuracy_score(t, o > 0)),
        ("accuracy", LABELS, lambda o, t: ((o > 0) == t.bool()).double().mean()),
        ("f1", LABELS, lambda o, t: sklearn_metrics.f1_score(t, o > 0, average="macro")),
        ("auroc", LABELS, lambda o, t: sklearn_metrics.roc_auc_score(t, o, average="macro")),
        ("mae", NUMBERS, lambda o, t: sklearn_metrics.mean_absolute_error(t, o)),
        ("mse", NUMBERS, lambda o, t: sklearn_metrics.mean_squared_error(t, o)),
        ("rmse", NUMBERS, lambda o, t: math.sqrt(sklearn_metrics.mean_squared_error(t, o))),
        ("r2", NUMBERS, lambda o, t: sklearn_metrics.r2_score(t, o)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_named_metric_is_that_of_scikit_learn(name: str, seen: Seen, expected: Any) -> None:
    assert measured([name], seen) == {name: pytest.approx(float(expected(*seen)), rel=1e-4)}


def test_top_k_takes_its_k() -> None:
    outputs, target = CLASSES
    expected = sklearn_metrics.top_k_accuracy_score(target, outputs, k=2)
    assert measured([{"use": "top_k", "name": "top2", "args": {"k": 2}}], CLASSES)["top2"] == pytest.approx(expected)


def test_targets_that_the_loss_ignores_do_not_count() -> None:
    outputs, target = CLASSES
    masked = target.clone()
    masked[::3] = -1
    kept = masked >= 0
    found = measured(["accuracy", "perplexity"], (outputs, masked), nn.CrossEntropyLoss(ignore_index=-1))
    assert found == pytest.approx(measured(["accuracy", "perplexity"], _padded(outputs[kept], target[kept])))


def _padded(outputs: Tensor, target: Tensor) -> Seen:
    """The same samples, followed by ignored ones up to 200."""
    more = 200 - len(target)
    return torch.cat([outputs, torch.zeros(more, 5)]), torch.cat([target, torch.full((more,), -100)])


def test_probabilities_are_taken_as_such_where_the_loss_says_so() -> None:
    outputs, target = BINARY
    near_half = torch.stack([outputs.sigmoid(), target])
    expected = float((near_half[0] > 0.5).eq(target.bool()).double().mean())
    assert measured(["accuracy"], (near_half[0], target), nn.BCELoss())["accuracy"] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("metrics", "seen", "said"),
    [
        (["mae"], CLASSES, "the metric 'mae': outputs of shape .* do not fit each other"),
        (["top5"], CLASSES, "each target is among 5 of 5 classes"),
        (["perplexity"], BINARY, "defined for multiclass tasks, and this one is binary"),
        (["f1"], NUMBERS, "the targets are not 0 and 1(.|\n)*mae, mse or r2"),
        ([{"use": "f1", "args": {"averag": "micro"}}], CLASSES, r"averag(.|\n)*args of MulticlassF1Score"),
    ],
)
def test_what_a_metric_is_not_defined_for(metrics: Any, seen: Seen, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        measured(metrics, seen)


@pytest.mark.parametrize(
    ("metrics", "error", "said"),
    [
        (["acuracy"], RecipeError, "did you mean accuracy"),
        (["f1", "f1"], RecipeError, "two metrics are named 'f1'"),
        ([nn.Identity()], UsageError, "the metric Identity has no name"),
        (3, UsageError, "metrics is a int"),
    ],
)
def test_a_wrong_name_is_an_error_before_the_first_step(metrics: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        tw.fit(nn.Linear(3, 2), (torch.randn(8, 3), torch.zeros(8).long()), nn.CrossEntropyLoss(), metrics=metrics)


def test_a_missing_package_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchmetrics", None)
    with pytest.raises(MissingExtra, match=r"trainwright\[metrics\]|torchmetrics"):
        resolve_metrics(["f1"], None)
    assert measured(["accuracy"], CLASSES), "sums need no package"


def records(run: Path, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


@pytest.mark.process
def test_names_in_fit_and_in_a_recipe_measure_the_same(tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(60, 6, generator=draw)
    y = x[:, :3].argmax(1)
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    more: Any = {"metrics": ["accuracy", "f1"], "steps": 4, "batch": 20, "quiet": True}
    result = tw.fit(model, (x, y), nn.CrossEntropyLoss(), val=(x[:31], y[:31]), **more)
    with torch.no_grad():
        predicted = model(x[:31]).argmax(1)
    assert result.metrics["accuracy"] == pytest.approx(float((predicted == y[:31]).double().mean()))
    assert result.metrics["f1"] == pytest.approx(sklearn_metrics.f1_score(y[:31], predicted, average="macro"))
    assert {"accuracy", "f1"} <= records(result.run, "step")[-1]["probed"].keys()
    assert tw.evaluate(result, (x[:31], y[:31])).metrics == pytest.approx(result.metrics)
    recipe = {
        "model": {"use": "mlp", "args": {"sizes": [6, 3]}},
        "data": {"train": "digits"},
        "loss": "cross_entropy",
        "metrics": ["accuracy", {"use": "f1", "args": {"average": "micro"}}],
    }
    assert [part.use for part in from_mapping(recipe, name="recipe").recipe.metrics] == ["accuracy", "f1"]


@pytest.mark.process
def test_log_from_a_step_a_loss_and_an_observer() -> None:
    x = torch.arange(24.0).reshape(24, 1)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        tw.log(largest=batch[0].max())
        return ((model(batch[0]) - batch[1]) ** 2).mean()  # type: ignore[no-any-return]

    def observer(result: tw.StepResult, state: tw.TrainState) -> None:
        tw.log(step_squared=float(state.step**2))

    more: Any = {"batch": 6, "epochs": 1, "quiet": True, "observers": [observer]}
    settings = {"data.shuffle": False, "log.every": "2steps"}
    result = tw.fit(nn.Linear(1, 1), (x, x), loss, val=(x[:10], x[:10]), settings=settings, **more)
    logged = [(each["step"], each["probed"]) for each in records(result.run, "step")]
    assert logged[-1] == (4, {"largest": (17.0 + 23.0) / 2, "step_squared": (4 + 9) / 2})
    # observers run after the record of a step: what they report is in the next one
    assert result.metrics == {"largest": pytest.approx((5 * 6 + 9 * 4) / 10)}, "by samples, without the training's"


@pytest.mark.process
def test_log_from_a_step_of_the_users_own() -> None:
    x = torch.arange(12.0).reshape(12, 1)

    def step(state: tw.TrainState, batch: tw.StepBatch) -> Tensor:
        loss = state.model(batch.micro[0].data[0]).square().mean()
        state.optimizer.zero_grad()
        loss.backward()
        state.optimizer.step()
        tw.log(number=state.step + 1)
        return loss.detach()  # type: ignore[no-any-return]

    result = tw.fit(nn.Linear(1, 1), (x, x), advance=step, batch=6, epochs=2, quiet=True, lr=1e-4)
    assert records(result.run, "step")[0]["probed"] == {"number": 1.0}


@pytest.mark.parametrize(
    ("figures", "said"),
    [
        ({"loss": 1.0}, "the log has 'loss' already"),
        ({"x": [1.0]}, "x is a list"),
        ({"x": torch.ones(2)}, r"shape \(2,\)"),
    ],
)
def test_log_refuses_what_is_no_figure(figures: dict[str, Any], said: str) -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        tw.log(**figures)
        return (output - target).square().mean()

    with pytest.raises(UsageError, match=said):
        tw.fit(nn.Linear(1, 1), (torch.ones(4, 1), torch.ones(4, 1)), loss, steps=1, quiet=True)


@pytest.mark.parametrize("unnamed", [("x", 1.0), ({"x": 1.0},)], ids=["pair", "mapping"])
def test_log_names_its_form_for_unnamed_figures(unnamed: tuple[Any, ...]) -> None:
    with pytest.raises(UsageError, match=r"write tw\.log\(name=value\)"):
        tw.log(*unnamed)


def test_log_outside_of_a_run_does_nothing() -> None:
    before = sorted(Path.cwd().rglob("*"))
    tw.log(anything=1.0)
    assert sorted(Path.cwd().rglob("*")) == before
