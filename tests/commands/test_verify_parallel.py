"""`verify parallel` proves a recipe on several ranks, and finds a loss that is none on a share of the batch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from pathlib import Path

import pytest
import torch
from torch import nn

from tests import ranks
from tests.forked import COMMAND_LINE
from trainwright.commands.verify.parallel import LayoutProof, Sums, rounding, verify_parallel
from trainwright.errors import UsageError

pytestmark = [pytest.mark.process, pytest.mark.slow]

PARTS = """
import torch
from torch import nn
import trainwright as tw

def data():
    draw = torch.Generator().manual_seed(0)
    return torch.utils.data.TensorDataset(torch.randn(64, 8, generator=draw), torch.randint(3, (64,), generator=draw))

def plain():
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))

def drawing():
    return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 3))

def normed():
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 3))

def loss(output, target):
    return nn.functional.cross_entropy(output, target)

def by_rank(output, target):  # each rank scales what it sees of the batch
    import os
    return nn.functional.cross_entropy(output, target) * (1.0 + 0.01 * int(os.environ.get("RANK", "0")))
"""


def in_forks(words: Sequence[str], count: int, folder: Path) -> tuple[int, str]:
    done = ranks.run(COMMAND_LINE, count, *words, cwd=folder.parent)
    return max(each.returncode or 0 for each in done), done[0].stderr


def proved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str = "plain", loss: str = "loss", *settings: str
) -> LayoutProof:
    (tmp_path / "layout_parts.py").write_text(PARTS)
    (tmp_path / "recipe.yaml").write_text(
        f"model: layout_parts:{model}\ndata: {{train: layout_parts:data}}\nloss: layout_parts:{loss}\n"
        "batch: {size: 16}\nuntil: 9steps\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return verify_parallel(
        tmp_path / "recipe.yaml", steps=3, settings=["precision=fp32", *settings], run_ranks=in_forks
    )


def test_a_model_is_proved_within_rounding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proof = proved(tmp_path, monkeypatch)
    assert proof.equal and not proof.exact and proof.exit_code == 0
    assert 0 < proof.allowed.loss < 1e-5 and proof.speed_up > 0
    assert proof.lines()[0] == "3 steps on 2 ranks against one process, fp32: within rounding"


def test_what_rounding_explains_follows_from_dtype_and_sums() -> None:
    """Sums of random values in two orders stay within it, and a share that is counted twice does not."""
    draw = torch.Generator().manual_seed(0)
    for terms in (64, 1000, 10_000):
        values = torch.rand(terms, 200, generator=draw)
        one, other = reduce(torch.add, values), reduce(torch.add, values.flip(0))  # term after term
        bound = rounding(Sums(terms, 1), "fp32")
        farthest = float(((one - other).abs() / one).max())
        assert 0 < farthest < bound < 1 / terms
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    assert Sums.of(net, 16) == Sums(8 + 16 + 16, 2)
    assert rounding(Sums(40, 2), "bf16") > 2**-8 > rounding(Sums(40, 2), "fp32")


def test_the_layout_is_that_of_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sharded = ("loss", "parallel.shard=2")
    proof = proved(tmp_path, monkeypatch, "plain", *sharded)
    assert proof.equal and not proof.exact
    with pytest.raises(UsageError, match="ranks draw different ones"):
        proved(tmp_path, monkeypatch, "drawing", *sharded)


def test_dropout_is_proved_by_the_exact_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proof = proved(tmp_path, monkeypatch, "drawing")
    assert proof.equal and proof.exact and (proof.found.loss, proof.found.weights) == (0.0, 0.0)


def test_a_loss_that_differs_by_rank_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proof = proved(tmp_path, monkeypatch, loss="by_rank")
    assert not proof.equal and proof.exit_code == 1 and proof.found.loss > 1e-3
    assert "NOT within rounding" in proof.lines()[0] and "remedy" in proof.lines()[-1]


def test_what_sees_its_batch_has_nothing_to_compare_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="uses statistics of its micro-batch") as caught:
        proved(tmp_path, monkeypatch, "normed")
    assert "GroupNorm" in caught.value.remedy
