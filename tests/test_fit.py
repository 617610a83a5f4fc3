"""tw.fit: a module of one's own in three lines, with whatever data and loss people have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trainwright as tw
from trainwright.errors import RecipeError, UsageError


@pytest.fixture(autouse=True)
def _in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def data(count: int = 256) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, 20, generator=generator)
    return x, (x @ torch.randn(20, 3, generator=generator)).argmax(1)


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 3))


def test_three_lines() -> None:
    model = net()
    result = tw.fit(model, data(), nn.CrossEntropyLoss(), until="20ep", lr=1e-2, quiet=True)
    assert result.ending == "finished" and result.step == 160
    assert result.loss is not None and result.loss < 0.5
    x, y = data()
    model.eval()
    assert (model(x).argmax(1) == y).float().mean() > 0.9


def test_a_loader_is_taken_apart() -> None:
    loader = DataLoader(TensorDataset(*data()), batch_size=64, shuffle=False, drop_last=True, num_workers=0)
    result = tw.fit(net(), loader, nn.functional.cross_entropy, until="2ep", quiet=True)
    assert result.step == 8
    plan = json.loads((result.run / "plan.json").read_text())
    assert plan["batch"]["size"] == 64
    assert "shuffle: false" in (result.run / "recipe.yaml").read_text()


def test_a_loss_over_model_and_batch_with_validation() -> None:
    def loss(model: nn.Module, batch: Any) -> tw.Loss:
        x, y = batch
        logits = model(x)
        hits = (logits.argmax(1) == y).sum()
        return tw.Loss(nn.functional.cross_entropy(logits, y, reduction="sum"), float(len(y)), {"hits": hits})

    result = tw.fit(net(), data(), loss, val=data(40), until="30steps", batch=32, accumulation=2, quiet=True)
    assert result.val_loss is not None and 0 <= result.metrics["hits"] <= 1
    plan = json.loads((result.run / "plan.json").read_text())
    assert plan["batch"] == {"size": 32, "micro": 16, "accumulation": 2, "ranks": 1}
    assert not [note for note in plan["notes"] if "plain mean" in note["why"]]


def test_a_mean_loss_is_said_in_the_plan() -> None:
    result = tw.fit(net(), data(), nn.CrossEntropyLoss(), until="2steps", quiet=True)
    notes = json.loads((result.run / "plan.json").read_text())["notes"]
    assert any("plain mean" in note["why"] and "batch size" in note["choice"] for note in notes)


def test_settings_reach_any_path() -> None:
    result = tw.fit(
        net(), data(), nn.CrossEntropyLoss(), until="2steps", quiet=True, settings={"optimizer.clip.at": 0.25}
    )
    assert "at: 0.25" in (result.run / "recipe.yaml").read_text()


def test_resume_in_python_is_the_same_bits() -> None:
    def weights(model: nn.Module) -> list[torch.Tensor]:
        return [p.detach().clone() for p in model.parameters()]

    straight = net()
    tw.fit(straight, data(), nn.CrossEntropyLoss(), until="40steps", name="straight", quiet=True)

    class StopAt:
        def observe(self, result: tw.StepResult, state: tw.TrainState) -> tw.Stop | None:
            return tw.Stop("enough") if result.step == 17 else None

        def close(self) -> None: ...

    first = net()
    settings: dict[str, Any] = {"until": "40steps", "name": "halves", "quiet": True}
    stopped = tw.fit(first, data(), nn.CrossEntropyLoss(), observers=[StopAt()], **settings)
    assert (stopped.ending, stopped.step) == ("stopped", 17)
    second = net()
    ended = tw.fit(second, data(), nn.CrossEntropyLoss(), resume=stopped.run, **settings)
    assert (ended.ending, ended.step) == ("finished", 40)
    assert all(torch.equal(a, b) for a, b in zip(weights(straight), weights(second), strict=True))


def test_mistakes_name_their_remedy() -> None:
    with pytest.raises(UsageError, match="Module"):
        tw.fit({}, data(), nn.CrossEntropyLoss())  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="learning_rate"):
        tw.fit(net(), data(), nn.CrossEntropyLoss(), learning_rate=1)
    with pytest.raises(UsageError, match="no dataset"):
        tw.fit(net(), 7, nn.CrossEntropyLoss())
    with pytest.raises(RecipeError, match="until"):
        tw.fit(net(), data(), nn.CrossEntropyLoss(), until="10")
    with pytest.raises(UsageError, match="def loss"):
        tw.fit(net(), (data()[0],), nn.CrossEntropyLoss(), until="1steps", quiet=True)


def test_a_stream_is_read_only_once() -> None:
    class OneShot(torch.utils.data.IterableDataset[Any]):
        def __init__(self) -> None:
            x, y = data(80)
            self.items = iter(list(zip(x, y, strict=True)))
            self.given = 0

        def __iter__(self) -> Any:
            for item in self.items:
                self.given += 1
                yield item

    stream = OneShot()
    result = tw.fit(net(), stream, nn.CrossEntropyLoss(), until="1000steps", batch=16, quiet=True)
    assert (result.ending, result.step, stream.given) == ("data_exhausted", 5, 80)
