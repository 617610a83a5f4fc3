"""Gradients with respect to outputs of modules: the numbers are those of autograd; the training stays the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import trainwright as tw
from trainwright.errors import RecipeError
from trainwright.monitoring.layer_stats import OutputGradStats
from trainwright.report.pages.layers import POWERS
from trainwright.report.pages.render import runs_page
from trainwright.report.pages.view import RunView
from trainwright.runs.reader import read
from trainwright.runs.records import OUTPUT_GRAD_LOG2, OutputGrads, Step

PATTERNS = ["blocks.*", "head"]
NAMES = ("blocks.0", "blocks.0.0", "blocks.0.1", "blocks.1", "blocks.1.0", "blocks.1.1", "head")


class Blocks(nn.Module):
    """An embedding, blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2))
        self.head = nn.Linear(8, 3)
        self.checkpoints: bool | None = None
        """``use_reentrant`` of the checkpointed blocks; None: they are not checkpointed."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            is_on = self.checkpoints is not None
            x = x + (checkpoint(block, x, use_reentrant=self.checkpoints) if is_on else block(x))
        return self.head(x)


class Counted(nn.Module):
    """A loss that weighs by what it counts: micro-batches have different weights."""

    def forward(self, output: Tensor, target: Tensor) -> tw.Loss:
        counted = (target > 0).float()
        return tw.Loss(((output - target).square() * counted).sum(), counted.sum())


def by_hand(model: Blocks, ids: Tensor, target: Tensor, loss: nn.Module) -> dict[str, Tensor]:
    """Gradients of the loss of the whole batch with respect to the outputs of each module."""
    x = model.embedding(ids)
    outputs: dict[str, Tensor] = {}
    blocks: Any = model.blocks
    for number, block in enumerate(blocks):
        outputs[f"blocks.{number}.0"] = block[0](x)
        outputs[f"blocks.{number}.1"] = outputs[f"blocks.{number}"] = torch.relu(outputs[f"blocks.{number}.0"])
        x = x + outputs[f"blocks.{number}"]
    outputs["head"] = model.head(x)
    value = loss(outputs["head"], target)
    value = value.total / value.weight if isinstance(value, tw.Loss) else value
    return dict(zip(outputs, torch.autograd.grad(value, list(outputs.values())), strict=True))


def fit(folder: Path, loss: nn.Module, *, steps: int = 2, retain_grad: Any = PATTERNS, **options: Any) -> Any:
    """Two steps of SGD on one batch of 16; the second is recorded. ``before`` has the model as that step finds it."""
    torch.manual_seed(0)
    model = Blocks()
    model.checkpoints = options.pop("checkpoints", None)
    ids, target = torch.randint(5, (16, 4)), torch.randn(16, 4, 3)
    before: dict[str, Tensor] = {}

    def keep(result: Any, state: Any) -> None:
        if result.step == 1:
            before.update({name: each.clone() for name, each in state.model.state_dict().items()})

    settings = {"folder": str(folder), "log.doctor": False, "log.every": "1steps", **options.pop("settings", {})}
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = torch.utils.data.TensorDataset(ids, target)
    common: Any = {"steps": steps, "batch": 16, "quiet": True, "seed": 1, "observers": [keep], "optimizer": optimizer}
    done = tw.fit(model, data, loss, settings=settings, retain_grad=retain_grad, **common, **options)
    reference = Blocks()
    reference.load_state_dict(before)
    return done, by_hand(reference, ids, target, loss)


def of(done: Any, kind: type[Any]) -> list[Any]:
    return [each for each in read(Path(done.run) / "log.jsonl").records if isinstance(each, kind)]


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"accumulation": 4},
    "clipped": {"clip": 1e-3},
    "checkpointing": {"settings": {"model.activation_checkpointing": "block"}},
    "checkpointing of the model": {"checkpoints": False},
    "reentrant": {"checkpoints": True},
}


@pytest.mark.parametrize("loss", [nn.MSELoss(), Counted()], ids=["mean", "weighted"])
@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_the_numbers_are_those_of_autograd(tmp_path: Path, options: dict[str, Any], loss: nn.Module) -> None:
    done, expected = fit(tmp_path, loss, **options)
    (record,) = of(done, OutputGrads)
    assert (record.step, record.layers) == (2, NAMES)
    for name, norm in zip(NAMES, record.norm, strict=True):
        assert norm == pytest.approx(float(expected[name].norm()), rel=1e-3), name  # 4 digits are written


def test_a_histogram_is_by_powers_of_two() -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(16, 16), torch.randn(256, 16)
    stats = OutputGradStats({"layer": layer})
    stats.begin()
    output = layer(x)
    weights = torch.randn(256, 16) * 1e-6
    weights[:64] = 0
    (output * weights).sum().backward()
    stats.factor = 0.125
    stats.before_update()
    assert not layer._forward_hooks
    stats.after_update()
    fields: Any = stats.read()
    assert fields["norm"][0] == pytest.approx(0.125 * float(weights.norm()), rel=1e-3)
    first, *shares = fields["log2"][0]
    sizes = (weights.abs() * 0.125).flatten().numpy()
    powers = np.floor(np.log2(np.maximum(sizes, 2.0**OUTPUT_GRAD_LOG2.start))).astype(int) - OUTPUT_GRAD_LOG2.start
    expected = np.round(np.bincount(powers, minlength=len(OUTPUT_GRAD_LOG2)) * 100 / sizes.size).astype(int)
    assert first == 0 and shares[0] == 25
    assert shares == expected[: len(shares)].tolist() and not expected[len(shares) :].any()


def test_what_has_no_gradient_is_told_from_what_is_not_finite() -> None:
    layers = {name: nn.Linear(4, 4) for name in ("good", "never", "bad")}
    stats = OutputGradStats(layers)
    stats.begin()
    with torch.no_grad():
        layers["never"](torch.ones(2, 4))
    (layers["good"](torch.ones(2, 4)).sum() + (layers["bad"](torch.ones(2, 4)) * torch.nan).sum()).backward()
    stats.after_update()
    fields: Any = stats.read()
    good, never, bad = fields["norm"]
    assert good == pytest.approx(8**0.5, rel=1e-3) and never != never and bad == torch.inf
    assert [bool(each) for each in fields["log2"]] == [True, False, False]
    stats.begin()
    stats.after_update()
    assert stats.read() is None, "no backward pass"


def test_fp16_gradients_are_without_the_loss_scale(tmp_path: Path) -> None:
    done, expected = fit(tmp_path, nn.MSELoss(), precision="fp16")
    (record,) = of(done, OutputGrads)
    assert float(done.state.scaler.scale) > 1000
    for name, norm in zip(NAMES, record.norm, strict=True):
        assert norm == pytest.approx(float(expected[name].norm()), rel=0.02), name


@pytest.mark.slow
def test_training_keeps_its_bits_and_the_page_shows_them(tmp_path: Path) -> None:
    done, _ = fit(tmp_path / "a", nn.MSELoss(), steps=60)
    plain, _ = fit(tmp_path / "b", nn.MSELoss(), steps=60, retain_grad=())
    records = of(done, OutputGrads)
    assert records[0].step == 2 and not of(plain, OutputGrads)
    assert records[0].layers == NAMES and all(each.layers == () for each in records[1:])
    assert [each.loss for each in of(done, Step)] == [each.loss for each in of(plain, Step)]
    for (name, one), other in zip(done.state.model.state_dict().items(), plain.state.model.state_dict().values()):
        assert torch.equal(one, other), name
    assert not any(module._forward_hooks for module in done.state.model.modules())
    maps: Any = RunView.read(done.run).log.output_grads.to_json()
    assert maps[0]["layers"] == list(NAMES) and maps[0]["steps"] == [each.step for each in records]
    assert [each["layers"] for each in maps[1:]] == [POWERS] * len(NAMES)
    assert maps[-1]["maps"][0]["name"] == "gradient of head, % by size"
    assert "gradient of head, % by size" in runs_page([RunView.read(done.run)])


def test_all_problems_of_patterns_are_named_with_others(tmp_path: Path) -> None:
    settings = {"model.freeze": ["nothing"], "model.compile": True}
    with pytest.raises(RecipeError) as raised:
        fit(tmp_path, nn.MSELoss(), retain_grad=["block.0", "head"], settings=settings)
    text = str(raised.value)
    assert "no module is named like 'block.0'" in text and "nearest name is 'blocks.0'" in text
    assert "retain_grad needs hooks" in text and "no parameter is named like 'nothing'" in text
