"""Metrics over whole passes, several validation sets, and what goes by them: held against scikit-learn."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import trainwright as tw
from trainwright.errors import RecipeError, UsageError

sklearn_metrics = pytest.importorskip("sklearn.metrics")
torchmetrics = pytest.importorskip("torchmetrics")
pytestmark = pytest.mark.process  # each starts threads that read the machine
PLAIN: dict[str, Any] = {"precision": "fp32", "quiet": True}


def data(count: int = 90, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 20, generator=generator)
    return x, (x[:, :3] + 0.5 * torch.randn(count, 3, generator=generator)).argmax(1)


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 3))


def log(result: tw.Result, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (result.run / "log.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def macro_f1(outputs: Tensor, targets: Tensor) -> float:
    return float(sklearn_metrics.f1_score(targets, outputs.argmax(1), average="macro"))


class Weighted:
    """A metric of one's own: accuracy by weight, which it gets with the targets."""

    def __init__(self) -> None:
        self.hits = self.weight = 0.0

    def update(self, outputs: Tensor, targets: tuple[Tensor, Tensor]) -> None:
        labels, weight = targets
        self.hits += float(((outputs.argmax(1) == labels) * weight).double().sum())
        self.weight += float(weight.double().sum())

    def compute(self) -> dict[str, float]:
        return {"hits": self.hits, "share": self.hits / self.weight}

    def reset(self) -> None:
        self.__init__()  # type: ignore[misc]


def weighted_loss(model: nn.Module, batch: Any) -> tw.Loss:
    x, label, weight = batch
    logits = model(x)
    total = (nn.functional.cross_entropy(logits, label, reduction="none") * weight).sum()
    return tw.Loss(total, weight.sum(), outputs=logits, targets=(label, weight))


def test_over_the_whole_validation_set_as_scikit_learn_computes_them() -> None:
    """53 samples in batches of 8: the last batch has five, and accumulation leaves short micro-batches."""
    (x, y), model = data(53, seed=3), net()
    metrics = {
        "f1": torchmetrics.F1Score(task="multiclass", num_classes=3, average="macro"),
        "auc": torchmetrics.AUROC(task="multiclass", num_classes=3),
        "both": torchmetrics.MetricCollection(
            {"recall": torchmetrics.Recall(task="multiclass", num_classes=3, average="macro")}
        ),
        "mine": macro_f1,
    }
    result = tw.fit(
        model,
        data(),
        nn.CrossEntropyLoss(),
        val=(x, y),
        epochs=2,
        batch=32,
        accumulation=3,
        metrics=metrics,
        settings={"evaluation.batch": 8},
        **PLAIN,
    )
    with torch.no_grad():
        shares = model.eval()(x).softmax(1)
    expected = {
        "f1": sklearn_metrics.f1_score(y, shares.argmax(1), average="macro"),
        "auc": sklearn_metrics.roc_auc_score(y, shares.double() / shares.double().sum(1, True), multi_class="ovr"),
        "both.recall": sklearn_metrics.recall_score(y, shares.argmax(1), average="macro"),
        "mine": sklearn_metrics.f1_score(y, shares.argmax(1), average="macro"),
    }
    assert result.metrics == pytest.approx(expected, abs=1e-6)
    of_batches = np.mean([macro_f1(shares[i : i + 8], y[i : i + 8]) for i in range(0, 53, 8)])
    assert abs(of_batches - expected["f1"]) > 0.01, "the mean of batches would be another number"


def test_weights_count_in_metrics_of_ones_own() -> None:
    x, y = data(53)
    weight = torch.rand(53, generator=torch.Generator().manual_seed(5))
    model = net()
    given = {
        "weighted": Weighted(),
        "mine": lambda outputs, targets: sklearn_metrics.f1_score(
            targets[0], outputs.argmax(1), sample_weight=targets[1], average="macro"
        ),
    }
    settings = {"evaluation.batch": 8}
    result = tw.fit(
        model, (x, y, weight), weighted_loss, val=(x, y, weight), steps=4, metrics=given, settings=settings, **PLAIN
    )
    predicted = model.eval()(x).argmax(1)
    share = sklearn_metrics.accuracy_score(y, predicted, sample_weight=weight.double())
    f1 = sklearn_metrics.f1_score(y, predicted, sample_weight=weight, average="macro")
    assert result.metrics["weighted.share"] == pytest.approx(share, abs=1e-6)
    assert result.metrics["mine"] == pytest.approx(f1, abs=1e-6)


class Remembering(nn.Module):
    """Keeps what it gave while it trained."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.given = net(), list[Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inside(x)
        if self.training:
            self.given.append(found.detach().clone())
        return found


def test_training_metrics_are_of_the_steps_since_the_last_record() -> None:
    """Every epoch has steps of 32, 32 and 26 samples in three micro-batches; a record follows on three steps."""
    model, (x, y) = Remembering(), data()
    metrics = {"f1": torchmetrics.F1Score(task="multiclass", num_classes=3, average="macro"), "mine": macro_f1}
    settings = {"log.every": "3steps", "data.shuffle": False, "log.doctor": False}
    result = tw.fit(
        model,
        (x, y),
        nn.CrossEntropyLoss(),
        epochs=3,
        batch=32,
        accumulation=3,
        metrics=metrics,
        settings=settings,
        **PLAIN,
    )
    records = log(result, "step")
    assert [record["step"] for record in records] == [1, 3, 6, 9]
    whole = torch.cat(model.given[-9:])
    assert len(whole) == 90
    expected = macro_f1(whole, y)
    assert records[-1]["probed"] == pytest.approx({"f1": expected, "mine": expected}, abs=1e-6)
    plain = tw.fit(net(), (x, y), nn.CrossEntropyLoss(), epochs=3, batch=32, accumulation=3, settings=settings, **PLAIN)
    assert plain.loss == result.loss, "metrics only read"
    quiet = {**settings, "log.metrics": False}
    silent = tw.fit(net(), (x, y), nn.CrossEntropyLoss(), steps=3, metrics=metrics, settings=quiet, **PLAIN)
    assert log(silent, "step")[-1]["probed"] == {}


@pytest.mark.examined
def test_metrics_do_not_change_the_training_nor_each_other_in_a_replay() -> None:
    losses = []
    for metrics in (None, {"mine": macro_f1}):
        result = tw.fit(net(), data(), nn.CrossEntropyLoss(), val=data(40), steps=12, metrics=metrics, **PLAIN)
        losses.append((result.loss, result.val_loss))
    assert losses[0] == losses[1]


def test_several_validation_sets_and_the_best_goes_by_the_first() -> None:
    clean, noisy = data(40, seed=3), (data(40, seed=3)[0] + 2, data(40, seed=3)[1])
    model = net()
    result = tw.fit(
        model,
        data(),
        nn.CrossEntropyLoss(),
        val={"clean": clean, "noisy": noisy},
        steps=4,
        metrics={"f1": macro_f1},
        **PLAIN,
    )
    assert sorted(result.metrics) == ["clean.f1", "clean.loss", "noisy.f1", "noisy.loss"]
    assert result.metrics["clean.loss"] == result.val_loss != result.metrics["noisy.loss"]
    with torch.no_grad():
        outputs = model.eval()(noisy[0])
        loss = nn.functional.cross_entropy(outputs, noisy[1])
    assert result.metrics["noisy.loss"] == pytest.approx(float(loss), rel=1e-5)
    assert result.metrics["noisy.f1"] == pytest.approx(macro_f1(outputs, noisy[1]), abs=1e-6)
    best = json.loads((result.run / "checkpoints" / "best.json").read_text())
    assert best["metric"] == "loss" and best["value"] == min(line["loss"] for line in log(result, "evaluated"))
    by_noise = tw.fit(
        net(),
        data(),
        nn.CrossEntropyLoss(),
        val={"clean": clean, "noisy": noisy},
        steps=4,
        settings={"checkpoint.best": "noisy.loss"},
        **PLAIN,
    )
    assert json.loads((by_noise.run / "checkpoints" / "best.json").read_text())["metric"] == "noisy.loss"


MINE = """
import torch
from torch.utils.data import TensorDataset

def train_set():
    return TensorDataset(torch.randn(64, 4, generator=torch.Generator().manual_seed(0)), torch.arange(64) % 2)

def accuracy(outputs, targets, scale=1.0):
    return scale * float((outputs.argmax(1) == targets).double().mean())
"""


def test_a_recipe_names_metrics_and_further_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine_metrics.py").write_text(MINE)
    monkeypatch.syspath_prepend(str(tmp_path))
    from trainwright.recipe import from_mapping

    recipe = {
        "model": {"use": "mlp", "args": {"sizes": [4, 8, 2]}},
        "data": {
            "train": "mine_metrics:train_set",
            "val": "mine_metrics:train_set",
            "more_val": [{"name": "same", "use": "mine_metrics:train_set"}],
        },
        "until": "2steps",
        "metrics": ["mine_metrics:accuracy", {"name": "half", "use": "mine_metrics:accuracy", "args": {"scale": 0.5}}],
    }
    found = tw.train(from_mapping(recipe), quiet=True).metrics
    assert found["val.accuracy"] == found["same.accuracy"] and found["val.half"] == found["same.half"]
    with pytest.raises(RecipeError, match="has no 'accurracy'"):
        tw.train(from_mapping({**recipe, "metrics": ["mine_metrics:accurracy"]}), quiet=True)


class Answers(nn.Module):
    """A model that computes its loss itself, as those of transformers do."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.inside, self.form = net(), form

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.inside(input_ids)
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        if self.form == "attributes":
            return SimpleNamespace(loss=loss, logits=logits)
        return {"loss": loss, "logits": logits} if self.form == "keys" else (loss, logits)


class Rows(torch.utils.data.Dataset[Any]):
    def __init__(self, *names: str) -> None:
        self.names = names

    def __len__(self) -> int:
        return 90

    def __getitem__(self, index: int) -> Any:
        return {name: column[index] for name, column in zip(self.names, data(), strict=True)}


@pytest.mark.parametrize("form", ["attributes", "keys", "a tuple"])
def test_a_model_that_returns_its_loss_needs_none(form: str) -> None:
    batches = Rows("input_ids", "labels") if form != "a tuple" else data()
    model, plain = Answers(form), net()
    result = tw.fit(model, batches, steps=4, **PLAIN)
    expected = tw.fit(plain, data(), nn.CrossEntropyLoss(), steps=4, **PLAIN)
    assert result.loss == expected.loss
    assert "of_model" in (result.run / "recipe.yaml").read_text()
    if form != "a tuple":
        seen = tw.fit(Answers(form), batches, val=batches, metrics={"mine": macro_f1}, steps=2, **PLAIN)
        assert 0 < seen.metrics["mine"] <= 1


def test_a_batch_that_the_model_does_not_take_is_said_in_words() -> None:
    with pytest.raises(UsageError, match=r"forward\(input_ids.*\) .*of the model does not take this .* keys x, y"):
        tw.fit(Answers("keys"), Rows("x", "y"), steps=1, **PLAIN)
    with pytest.raises(UsageError, match="returned a dict and no loss"):
        tw.fit(Answers("keys"), (data()[0],), steps=1, **PLAIN)


def test_a_loss_of_the_model_and_the_parts_of_a_batch() -> None:
    def loss(model: nn.Module, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        return (nn.functional.cross_entropy(model(x), y, reduction="none") * weight).mean()

    parts = (*data(), torch.ones(90))
    result = tw.fit(net(), parts, loss, steps=4, **PLAIN)
    plain = tw.fit(net(), data(), lambda a, b: nn.functional.cross_entropy(a, b), steps=4, **PLAIN)
    assert result.loss == pytest.approx(plain.loss, rel=1e-6), "the sums are taken in another order"


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        ([macro_f1], "the metric macro_f1 has no name"),
        ({"f1": 1}, "the metric 'f1' is a int"),
        ({"f1": torchmetrics.F1Score}, r"is the class F1Score(.|\n)*write F1Score\(...\)"),
        ({"loss": macro_f1}, "a metric is named 'loss'"),
        ({"f1": sklearn_metrics.f1_score}, "takes the targets first(.|\n)*f1_score.targets, outputs.argmax"),
        ({"f1": lambda outputs: 1.0}, "does not take .outputs, targets"),
        ({"f1": lambda outputs, targets: outputs}, r"gave a tensor of shape \(\d+, 3\)"),
        ({"f1": lambda outputs, targets: 1 / 0}, "the metric 'f1' raised ZeroDivisionError"),
        ({"f1": torchmetrics.F1Score(task="multiclass", num_classes=2)}, "the metric 'f1' raised .*shapes"),
    ],
)
def test_what_is_no_metric_is_said_in_words(metrics: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        tw.fit(net(), data(), nn.CrossEntropyLoss(), val=data(40), steps=2, metrics=metrics, **PLAIN)


def test_a_loss_without_outputs_says_what_metrics_need() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    with pytest.raises(UsageError, match=r"metrics need the outputs(.|\n)*outputs=logits"):
        tw.fit(net(), data(), loss, steps=1, metrics={"f1": macro_f1}, **PLAIN)


@pytest.mark.parametrize("val", [{}, {7: data(40)}, {"a": data(40), "": data(40)}])
def test_validation_sets_need_names(val: Any) -> None:
    with pytest.raises(UsageError, match="fit: val is a mapping with"):
        tw.fit(net(), data(), nn.CrossEntropyLoss(), val=val, steps=1, **PLAIN)


def overfitted(**given: Any) -> tw.Result:
    settings = {"evaluation.every": "1steps", "log.doctor": False, "optimizer.clip.by": "none"}
    x, y = data(64)
    other = (data(64, seed=9)[0], data(64, seed=9)[1].roll(1))  # what is learned does not hold there
    plain: dict[str, Any] = {"batch": 64, "lr": 0.05, "settings": settings, "schedule": "constant", **PLAIN}
    return tw.fit(
        given.pop("model", None) or net(), (x, y), nn.CrossEntropyLoss(), val=other, steps=30, **plain, **given
    )


def test_early_stopping_and_the_best_weights_back() -> None:
    model = net()
    result = overfitted(model=model, observers=[tw.EarlyStopping(patience=3, min_delta=0.0)], restore_best=True)
    losses = [line["loss"] for line in log(result, "evaluated")]
    best = int(np.argmin(losses)) + 1
    assert result.ending == "stopped" and result.reason.startswith("early stopping: loss was not better than")
    assert result.step == best + 3 == len(losses) < 30
    assert result.restored == best
    other = (data(64, seed=9)[0], data(64, seed=9)[1].roll(1))
    with torch.no_grad():
        assert float(nn.functional.cross_entropy(model.eval()(other[0]), other[1])) == pytest.approx(
            min(losses), rel=1e-6
        )
    assert f"weights of step {best}, the best" in repr(result) and str(result.run) in str(result)


def test_patience_goes_on_counting_after_a_resume() -> None:
    def stopper(at: int) -> Callable[[tw.StepResult, tw.TrainState], tw.Stop | None]:
        return lambda result, state: tw.Stop("enough") if result.step == at else None

    whole = overfitted(observers=[tw.EarlyStopping(patience=4)])
    early = tw.EarlyStopping(patience=4)
    stopped = overfitted(observers=[early, stopper(whole.step - 2)], name="halves")
    assert early.waited == 2
    ended = overfitted(observers=[tw.EarlyStopping(patience=4)], name="halves", resume=stopped.run)
    assert (ended.step, ended.reason) == (whole.step, whole.reason)


def test_early_stopping_waits_while_the_accuracy_rises() -> None:
    result = overfitted(observers=[tw.EarlyStopping(patience=2, metric="accuracy")], metrics=["accuracy"])
    seen = [line["metrics"]["accuracy"] for line in log(result, "evaluated")]
    assert result.reason.startswith(f"early stopping: accuracy was not better than {max(seen):.6g}")
    assert max(seen[:2]) < max(seen) and result.step == seen.index(max(seen)) + 3


@pytest.mark.parametrize(("best", "steps"), [("val_loss", 0), ("f1_loss", 1)], ids=["known", "after an evaluation"])
def test_an_unknown_best_metric_is_an_error(best: str, steps: int) -> None:
    settings = {"checkpoint.best": best}
    with pytest.raises(UsageError, match=f"checkpoint.best: the validation has no metric '{best}'"):
        tw.fit(net(), data(), nn.CrossEntropyLoss(), val=data(), steps=1, settings=settings, **PLAIN)
    assert len([*Path("runs").rglob("step-*")]) == steps


def test_what_early_stopping_cannot_go_by() -> None:
    with pytest.raises(UsageError, match=r"no metric 'f1'"):
        overfitted(observers=[tw.EarlyStopping(metric="f1")])
    for wrong, said in (
        ({"patience": 0}, "patience is 0"),
        ({"min_delta": -1.0}, "min_delta"),
        ({"mode": "up"}, "mode"),
        ({"metric": "reward"}, "it is unknown if a larger reward is better"),
    ):
        with pytest.raises(UsageError, match=said):
            tw.EarlyStopping(**wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="restore_best needs a validation set"):
        tw.fit(net(), data(), nn.CrossEntropyLoss(), steps=1, restore_best=True, **PLAIN)


@pytest.mark.examined
def test_results_print_themselves_in_a_few_lines() -> None:
    seen: list[str] = []
    result = tw.fit(
        net(),
        data(),
        nn.CrossEntropyLoss(),
        val=data(40, seed=1),
        steps=2,
        observers=[lambda r, s: seen.append(str(r))],
        **PLAIN,
    )
    assert seen[0].startswith("step 1: loss 1.") and "\n" not in seen[0] and "32 samples" in seen[0]
    assert "; validation: loss" in seen[-1]
    assert repr(result).splitlines()[0].startswith("finished at step 2, loss ")
    assert [line.split()[0] for line in repr(result).splitlines()] == ["finished", "validation:", "verdict:", "run"]
