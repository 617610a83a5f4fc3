"""tw.evaluate, tw.predict and their verbs: a checkpoint of a run on any data, without a training loop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import trainwright as tw
from tests.commands import made
from trainwright.commands.evaluate import evaluate_run, predict_run
from trainwright.errors import RecipeError, UsageError
from trainwright.recipe import from_mapping

pytestmark = pytest.mark.process  # each starts threads that read the machine
MINE = """
import torch
from torch.utils.data import TensorDataset

def some():
    return TensorDataset(torch.randn(13, 4, generator=torch.Generator().manual_seed(0)), torch.arange(13) % 2)

def accuracy(outputs, targets):
    return float((outputs.argmax(1) == targets).double().mean())
"""


@pytest.fixture(autouse=True)
def _in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine_evaluated.py").write_text(MINE)
    monkeypatch.syspath_prepend(str(tmp_path))


def data(count: int = 40) -> tuple[Tensor, Tensor]:
    x = torch.randn(count, 4, generator=torch.Generator().manual_seed(1))
    return x, torch.arange(count) % 2


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))


def recipe_run() -> tw.Result:
    recipe = {
        "model": {"use": "mlp", "args": {"sizes": [4, 8, 2]}, "ema": 0.9},
        "data": {"train": "mine_evaluated:some", "val": "mine_evaluated:some"},
        "metrics": ["mine_evaluated:accuracy"],
        "until": "6steps",
        "batch": {"size": 4},
        "precision": "fp32",
    }
    return tw.train(from_mapping(recipe), quiet=True)


def live_run(model: nn.Module) -> tw.Result:
    return tw.fit(model, data(), nn.CrossEntropyLoss(), val=data(13), steps=6, precision="fp32", quiet=True)


def test_a_run_folder_is_evaluated_as_the_run_itself_did() -> None:
    result = recipe_run()
    report = evaluate_run(result.run, "val", which="last", batch=5, average=False)
    assert report.result.loss == pytest.approx(result.val_loss, rel=1e-6)
    assert report.result.metrics["accuracy"] == result.metrics["accuracy"]
    assert report.step == 6 and json.loads(json.dumps(report.to_json()))["accuracy"] == result.metrics["accuracy"]
    assert evaluate_run(result.run, "mine_evaluated:some", which="", batch=None, average=False).result.weight == 13
    average = tw.evaluate(result.run, "train", which=6, average=True)
    assert average.loss == pytest.approx(result.metrics["ema_loss"], rel=1e-6)
    best = json.loads((result.run / "checkpoints" / "best.json").read_text())
    assert tw.evaluate(result.run, "val").loss == pytest.approx(best["value"], rel=1e-6)


def test_predictions_are_in_the_order_of_the_data() -> None:
    model = net()
    result = live_run(model)
    x, y = data(13)
    with torch.no_grad():
        expected = model.eval()(x)
    model.train()
    for given in ((x, y), (x,), torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=5)):
        torch.testing.assert_close(tw.predict(model, given, batch=4), expected)
    torch.testing.assert_close(tw.predict(result, (x, y)), expected)
    assert model.training, "the mode is as before"
    torch.testing.assert_close(tw.predict(result.run, (x, y), model=net(), which="last"), expected)


def test_a_model_is_evaluated_with_metrics() -> None:
    model, (x, y) = net(), data(13)
    found = tw.evaluate(model, (x, y), nn.CrossEntropyLoss(), metrics={"sum": lambda outputs, targets: outputs.sum()})
    with torch.no_grad():
        outputs = model.eval()(x)
    assert found.loss == pytest.approx(float(nn.functional.cross_entropy(outputs, y)), rel=1e-6)
    assert found.metrics["sum"] == pytest.approx(float(outputs.sum()), rel=1e-5)
    assert repr(found).startswith("loss 0.") and "sum" in repr(found)
    assert tw.evaluate(model, (x, y), "cross_entropy").loss == found.loss
    with pytest.raises(RecipeError, match="there is no module 'cross_entropie'"):
        tw.evaluate(model, (x, y), "cross_entropie")


def test_a_result_is_evaluated_with_what_its_run_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sums = {"sum": lambda outputs, targets: outputs.double().sum()}
    result = tw.fit(
        net(), data(13), nn.CrossEntropyLoss(), val=data(9), until="2steps", batch=4, metrics=sums, quiet=True
    )
    found = tw.evaluate(result, data(9))
    assert found.loss == pytest.approx(result.val_loss)
    assert found.metrics == pytest.approx(result.metrics)
    other = tw.evaluate(result, data(9), nn.CrossEntropyLoss(reduction="sum"), metrics={})
    assert other.loss > found.loss and not other.metrics


class Named(nn.Module):
    """Takes and gives parts by name, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = net()

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.inside(x)
        loss = {} if labels is None else {"loss": nn.functional.cross_entropy(logits, labels)}
        return {**loss, "logits": logits}


def test_batches_by_name() -> None:
    model, (x, y) = Named(), data(13)
    named = {"x": x, "labels": y, "number": torch.arange(13)}
    with torch.no_grad():
        expected = model.eval()(x)["logits"]
    torch.testing.assert_close(tw.predict(model, named), expected)
    found = tw.evaluate(model, {"x": x, "labels": y}, batch=13)
    assert found.loss == pytest.approx(float(nn.functional.cross_entropy(expected, y)), rel=1e-6)


def test_predictions_are_written(tmp_path: Path) -> None:
    result = recipe_run()
    done = predict_run(result.run, "val", out=None, which="last", batch=None, average=False)
    assert np.load(done.path).shape == (13, 2) and done.shapes == ((13, 2),)
    assert predict_run(result.run, "val", out=tmp_path / "x.pt", which="", batch=2, average=False).path.exists()
    for out, said in ((done.path, "exists already"), (tmp_path / "x.csv", "neither .npy nor .pt")):
        with pytest.raises(UsageError, match=said):
            predict_run(result.run, "val", out=out, which="", batch=None, average=False)


def test_the_verbs_on_a_run_folder(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from trainwright.cli import app

    result = recipe_run()
    capsys.readouterr()
    for words in (
        ["evaluate", str(result.run)],
        ["predict", str(result.run), "mine_evaluated:some", "--which", "last"],
    ):
        monkeypatch.setattr("sys.argv", ["trainwright", *words, "--json"])
        with pytest.raises(SystemExit) as ended:
            app()
        assert ended.value.code == 0
    evaluated, predicted = map(json.loads, capsys.readouterr().out.splitlines())
    assert set(evaluated) == {"run", "step", "weight", "loss", "accuracy"} and evaluated["weight"] == 13.0
    assert predicted["shapes"] == [[13, 2]] and np.load(predicted["path"]).shape == (13, 2)


def test_a_run_of_a_function_is_evaluated_by_its_folder_alone() -> None:
    result = tw.fit("tests.commands.made:make_by_name", steps=6, seed=0, quiet=True)
    report = evaluate_run(result.run, "val", which="last", batch=None, average=False)
    assert report.result.loss == pytest.approx(result.val_loss, rel=1e-6)
    assert report.result.metrics["accuracy"] == result.metrics["accuracy"]
    predicted = tw.predict(result.run, "val", which="last")
    torch.testing.assert_close(predicted, tw.predict(result, made.dataset()))


def test_what_is_not_there_is_said_in_words() -> None:
    live, model = live_run(net()).run, net()
    wrong: list[tuple[Any, str]] = [
        (lambda: tw.evaluate(live, data()), r"cannot be built from its folder(.|\n)*model=your_model"),
        (lambda: tw.evaluate(live, data(), model=net()), "the loss CrossEntropyLoss of the run was passed in Python"),
        (lambda: tw.evaluate(live, "val", nn.CrossEntropyLoss(), model=net()), "val set .* received it from Python"),
        (lambda: tw.predict(live, data(), model=nn.Linear(4, 2)), "do not fit the model"),
        (lambda: tw.predict(live, data(), model=net(), which=77), "no checkpoint of step 77"),
        (lambda: tw.predict(model, "val"), "the data is the text 'val'"),
        (lambda: tw.predict(model, data(), which="best"), "need a run folder"),
        (lambda: tw.predict(7, data()), "a int cannot be evaluated"),  # type: ignore[arg-type]
        (lambda: tw.evaluate(model, data()), "does not take this batch"),
        (lambda: tw.evaluate("nowhere", data()), "nowhere"),
    ]
    for call, said in wrong:
        with pytest.raises(UsageError, match=said):
            call()
