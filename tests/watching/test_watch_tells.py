"""What a watched loop tells beside its diagnosis: statistics by layer, figures to sinks, alerts."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trainwright as tw
from tests.monitoring.webhook import Hook
from tests.watching.loops import X, Y, net, sgd, weights
from trainwright.errors import RecipeError, UsageError
from trainwright.runs.reader import read
from trainwright.runs.records import Layers, Record, Watched


@pytest.fixture
def hook() -> Iterator[Hook]:
    server = Hook()
    yield server
    server.shutdown()
    server.server_close()


def loop(
    out: Path | None, *, steps: int = 30, at: float = 0.5, **options: Any
) -> tuple[list[Tensor], Any, list[float]]:
    """The weights, the watch, and the clipped gradient norm of the first layer in each step."""
    torch.manual_seed(3)
    model = net()
    optimizer, norms = sgd(model), list[float]()
    with tw.watch(model, optimizer, out=out, examine="listen", quiet=True, **options) as watch:
        for number in range(steps):
            rows = torch.randperm(32)[:8]
            loss = F.cross_entropy(model(X[rows]), Y[rows])
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), at)
            norms.append(
                math.sqrt(sum(float(p.grad.square().sum()) for p in model[0].parameters() if p.grad is not None))
            )
            optimizer.step()
            optimizer.zero_grad()
            if number == 9:
                watch.log(val_loss=1.5)
    assert watch.session.failures == []
    assert not any(module._forward_hooks for module in model.modules())
    return weights(model), watch, norms


def log_of(watch: Any) -> list[Record]:
    return list(read(watch.folder.log).records)


@pytest.mark.slow
def test_layers_of_a_watched_loop(tmp_path: Path) -> None:
    with_layers, watch, norms = loop(tmp_path / "a")
    without, other, _ = loop(tmp_path / "b", layers=False)
    nowhere, *_ = loop(None)
    for one, two, three in zip(with_layers, without, nowhere, strict=True):
        assert torch.equal(one, two) and torch.equal(one, three)
    first, *later = [each for each in log_of(watch) if isinstance(each, Layers)]
    assert (first.step, first.layers) == (2, ("0", "3"))
    assert first.grad_norm[0] == pytest.approx(norms[1], rel=1e-3), "what the optimizer gets"
    assert all(each > 0 for each in (*first.update_ratio, *first.act_std))
    assert len(later) <= 1 and all(each.layers == () for each in later)
    assert not any(isinstance(each, Layers) for each in log_of(other))


def test_a_step_that_is_run_again_is_not_the_one_that_is_measured(tmp_path: Path) -> None:
    """After the first step it is looked at, when the hooks for the second are set already."""
    model = net()
    optimizer, largest = sgd(model), list[float]()
    with tw.watch(model, optimizer, out=tmp_path / "run", quiet=True) as watch:
        for rows in torch.arange(16).split(8):
            optimizer.zero_grad()
            logits = model(X[rows] * (1 + rows[0]))
            largest.append(float(logits.detach().abs().max()))
            F.cross_entropy(logits, Y[rows]).backward()
            optimizer.step()
    [record] = [each for each in log_of(watch) if isinstance(each, Layers)]
    assert record.act_max[1] == pytest.approx(largest[1], rel=1e-3)


def test_layers_of_optimizers_that_take_turns(tmp_path: Path) -> None:
    """Each is measured before its own update: when the second takes its turn, the first has no gradients any more."""
    models, norms = (net()[0], net()[3]), list[list[float]]()
    optimizers = [sgd(each) for each in models]
    with tw.watch(models, optimizers, out=tmp_path / "gan", examine="listen", quiet=True) as watch:
        for _ in range(4):
            norms.append([])
            for model, optimizer, width in zip(models, optimizers, (X.shape[1], models[1].in_features), strict=True):
                model(torch.ones(3, width)).square().mean().backward()
                norms[-1].append(float(nn.utils.get_total_norm([p.grad for p in model.parameters()])))  # type: ignore[misc]
                optimizer.step()
                optimizer.zero_grad()
    assert watch.session.failures == []
    first, *_ = [each for each in log_of(watch) if isinstance(each, Layers)]
    assert (first.step, len(first.layers)) == (2, 2)
    assert first.grad_norm == pytest.approx(norms[1], rel=1e-3)
    assert all(each > 0 for each in (*first.update_ratio, *first.act_std))


def test_sinks_get_what_the_log_gets(tmp_path: Path) -> None:
    _, watch, _ = loop(tmp_path / "a", sinks=["csv"])
    with (tmp_path / "a" / "metrics.csv").open(newline="") as file:
        rows = [(int(row["step"]), row["name"], float(row["value"])) for row in csv.DictReader(file)]
    watched = [each for each in log_of(watch) if isinstance(each, Watched)]
    assert len(watched) == 30
    assert [(s, v) for s, name, v in rows if name == "train/loss"] == [(each.step, each.loss) for each in watched]
    assert {name for _, name, _ in rows} >= {"train/grad_norm", "train/lr", "train/step_s", "layers/grad_norm/0"}
    assert (10, "val_loss", 1.5) in rows


def test_alerts_of_a_watched_loop(tmp_path: Path, hook: Hook, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOLD", hook.url)
    loop(tmp_path / "a", steps=3, alerts={"webhook": "TOLD", "loss_above": 0.01, "no_step_for": None})
    hook.wait()
    hook.wait()
    told = " ".join(each["text"] for each in hook.taken)
    assert "above 0.01" in told and "the run ended (finished)" in told


def test_what_cannot_be_told_is_refused_before_the_loop(tmp_path: Path) -> None:
    model = net()
    optimizer, out = sgd(model), tmp_path / "run"

    def watch(**options: Any) -> None:
        tw.watch(model, optimizer, **{"out": out, **options})

    with pytest.raises(RecipeError, match="tensorboard"):
        watch(sinks=["tensorbord"])
    with pytest.raises(RecipeError, match="must be a list"):
        watch(sinks=3)
    with pytest.raises(RecipeError, match="have no destination"):
        watch(alerts={"loss_above": 3.0})
    with pytest.raises(UsageError, match="TOLD is not set"):
        watch(alerts={"webhook": "TOLD"})
    with pytest.raises(UsageError, match="out is None"):
        watch(out=None, sinks=["csv"])
    assert not out.exists()
