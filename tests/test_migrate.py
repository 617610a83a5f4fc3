"""The pairs of docs/how-to/migrate.md: both codes run and reach the same validation loss; ours is not longer."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import stdev
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

PAGE = Path(__file__).parent.parent / "docs/how-to/migrate.md"
BLOCKS = dict(
    re.findall(r"^<!-- (\w+(?:: \w+)?) -->\n```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
)
SEEDS = 5

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def _in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def loss_of(block: str, seed: int = 0) -> float:
    """The validation loss of the model that a block has trained."""
    namespace: dict[str, Any] = {"__name__": "a_page"}
    for name in ("given", block):
        torch.manual_seed(seed)
        exec(compile(BLOCKS[name], f"{PAGE} ({name})", "exec", dont_inherit=True), namespace)
    return validation_loss(namespace["model"], *namespace["val"].tensors)


@torch.no_grad()
def validation_loss(model: nn.Module, x: Tensor, y: Tensor) -> float:
    return float(F.cross_entropy(getattr(model, "net", model).eval()(x), y))


@pytest.fixture(scope="module")
def noise(tmp_path_factory: pytest.TempPathFactory) -> float:
    """Three standard deviations of the plain loop over seeds, and of the difference of two runs: sqrt(2) as much."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("noise"))
        return 3 * 2**0.5 * stdev(loss_of("theirs: plain", seed) for seed in range(SEEDS))


@pytest.mark.parametrize("library", ["plain", "lightning", "transformers", "accelerate", "keras"])
def test_both_codes_reach_the_same_loss_and_ours_is_not_longer(
    library: str, noise: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    if library != "plain":
        pytest.importorskip(library)
    ours, theirs = loss_of(f"ours: {library}"), loss_of(f"theirs: {library}")
    untrained = validation_loss(*first())
    assert abs(ours - theirs) < noise < 0.5 * (untrained - theirs), (ours, theirs, noise, untrained)
    assert lines(f"ours: {library}") <= lines(f"theirs: {library}")


def test_our_code_beside_that_of_keras_is_one_that_was_run() -> None:
    assert BLOCKS["ours: keras"] == BLOCKS["ours: transformers"]


def first() -> tuple[nn.Module, Tensor, Tensor]:
    namespace: dict[str, Any] = {}
    exec(BLOCKS["given"], namespace)
    torch.manual_seed(0)
    return namespace["net"](), *namespace["val"].tensors


def lines(block: str) -> int:
    return sum(1 for line in BLOCKS[block].splitlines() if line.strip())
