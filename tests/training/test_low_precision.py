"""Runs in emulated fp8 and with quantized moments: loss, memory, resume, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import trainwright as tw
from trainwright.checkpoint.codec import same_bits
from trainwright.checkpoint.weights import plain_state_dict
from trainwright.errors import RecipeError
from trainwright.recipe import from_mapping
from trainwright.runs.folder import RunFolder

NO_TORCHAO = pytest.mark.skipif(find_spec("torchao") is None, reason="needs torchao")
pytestmark = [pytest.mark.process, pytest.mark.slow, NO_TORCHAO]

STEPS = 60
GPT = {"use": "gpt", "args": {"block_size": 32, "layers": 1, "heads": 2, "d_model": 64}}
TEXT = {"use": "python-topics", "args": {"split": "train", "block_size": 32}}
FP8 = {"precision": "fp8", "fp8": {"emulate": True}}
VARIANTS: dict[str, dict[str, Any]] = {
    "fp8": FP8,
    "adamw8bit": {"optimizer": "adamw8bit"},
    "adamw4bit": {"optimizer": "adamw4bit"},
}


def trained(
    folder: Path,
    steps: int = STEPS,
    seed: int = 1,
    accept: Sequence[str] = (),
    *,
    resume: bool = False,
    **settings: Any,
) -> tw.Result:
    """Trains on in the folder with ``resume``."""
    optimizer = {"use": settings.pop("optimizer", "adamw"), "lr": 3e-3}
    recipe = {
        "name": folder.name,
        "folder": str(folder.parent),
        "seed": seed,
        "until": f"{steps}steps",
        "model": GPT,
        "data": {"train": TEXT, "val": {"use": "python-topics", "args": {"split": "val", "block_size": 32}}},
        "loss": "language_model",
        "batch": {"size": 8},
        "precision": "bf16",
        "optimizer": optimizer,
        "evaluation": {"every": f"{steps}steps", "batches": 40},
        "checkpoint": {"every": "100steps", "asynchronous": False},
        "log": {"doctor": False},
        **settings,
    }
    earlier = RunFolder.open(folder) if resume else None
    return tw.train(from_mapping(recipe), resume=earlier, accept=accept, quiet=True)


def state_tensors(result: tw.Result) -> dict[str, Tensor]:
    assert result.state is not None
    found = dict(plain_state_dict(result.state.model))
    for number, own in enumerate(result.state.optimizer.state.values()):
        found |= {f"{number}.{name}": value for name, value in own.items()}
    return found


@pytest.fixture(scope="module")
def baselines(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Validation losses of bf16 and AdamW by two seeds."""
    folder = tmp_path_factory.mktemp("baselines")
    return [trained(folder / f"seed{seed}", seed=seed).val_loss or 0.0 for seed in (1, 2)]


@pytest.mark.parametrize("name", VARIANTS)
def test_the_loss_is_within_the_band_of_two_seeds(name: str, baselines: list[float], tmp_path: Path) -> None:
    """The band is the distance of the two seeds, and at least 3 %."""
    result = trained(tmp_path / name, **VARIANTS[name])
    band = max(abs(baselines[0] - baselines[1]), 0.03 * baselines[0])
    assert result.val_loss == pytest.approx(baselines[0], abs=band)
    if "optimizer" in VARIANTS[name]:
        assert result.state is not None
        held = sum(value.nbytes for own in result.state.optimizer.state.values() for value in own.values())
        planned = json.loads((result.run / "plan.json").read_text())["memory_bytes"]["optimizer"]
        assert planned == pytest.approx(held, rel=0.02)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_resumed_run_has_the_same_bits(name: str, tmp_path: Path) -> None:
    straight = state_tensors(trained(tmp_path / "straight", 8, **VARIANTS[name]))
    trained(tmp_path / "stopped", 4, **VARIANTS[name])
    resumed = state_tensors(trained(tmp_path / "stopped", 8, resume=True, **VARIANTS[name]))
    assert straight.keys() == resumed.keys()
    assert [key for key in straight if not same_bits(straight[key], resumed[key])] == []
    assert not any(type(value) not in (Tensor, torch.nn.Parameter) for value in resumed.values())


def test_fp8_is_refused_before_the_first_step_where_the_device_lacks_it(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("the device may have fp8")
    with pytest.raises(RecipeError, match="does not compute fp8 in hardware") as failed:
        trained(tmp_path / "fp8", 4, precision="fp8")
    assert "precision: bf16" in str(failed.value)
    assert not (tmp_path / "fp8").exists()


def test_another_optimizer_on_resume_is_fatal_and_another_precision_must_be_accepted(tmp_path: Path) -> None:
    run = tmp_path / "run"
    trained(run, 4)
    with pytest.raises(tw.TrainwrightError, match=r"optimizer.use: adamw -> adamw8bit \(fatal\)"):
        trained(run, 8, resume=True, optimizer="adamw8bit")
    with pytest.raises(tw.TrainwrightError, match=r"precision: bf16 -> fp8 \(changes the maths\)"):
        trained(run, 8, resume=True, **FP8)
    assert trained(run, 8, resume=True, accept=["precision", "fp8"], **FP8).step == 8
