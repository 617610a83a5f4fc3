"""The batch-size finder: what it names trains in that memory, with the optimizer's state and an evaluation."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import forked
from trainwright.commands.batch_size import find_batch_size
from trainwright.errors import OutOfMemoryError, UsageError
from trainwright.recipe import load

RECIPE = """
until: 2steps
model: {use: "wide_model:make"}
data:
  train: {use: "wide_model:data", args: {count: 512}}
  val: {use: "wide_model:data", args: {count: 64}}
loss: cross_entropy
batch: {size: 96}
evaluation: {every: 1step}
log: {sinks: [], every: 1step}
"""
MODEL = """
import torch
from torch import nn

class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x):
        x = self.first(x)[:, :, None].expand(-1, -1, 32768) * 1.5
        return self.last(torch.tanh(x).mean(2))

def make():
    return Wide()

def data(count):
    draw = torch.Generator().manual_seed(0)
    return torch.utils.data.TensorDataset(torch.randn(count, 8, generator=draw), torch.zeros(count, dtype=torch.long))
"""
LIMITED = """
import resource, sys
from pathlib import Path
import torch
from trainwright.cli import main
import trainwright.training.run, trainwright.commands.batch_size
data = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData"))
most = int(data.split()[1]) * 1024 + int(sys.argv.pop(1)) * 2**20
resource.setrlimit(resource.RLIMIT_DATA, (most, most))
main()
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "wide_model.py").write_text(MODEL)
    (tmp_path / "wide.yaml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path / "wide.yaml"


def limited(mib: int, *words: str) -> dict[str, Any]:
    """The command line in a process that may take ``mib`` more than torch itself."""
    done = forked.run(LIMITED, str(mib), *words, "--json")
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory are set by Linux's RLIMIT_DATA")
def test_what_it_names_trains_under_the_same_limit(recipe: Path) -> None:
    """A sample wants about 3 MiB at the peak."""
    found = limited(160, "batch-size", str(recipe), "--margin", "0.25")
    assert 2 <= found["most"] <= 80 and 96 % found["micro"] == 0 and found["micro"] <= found["most"]

    beyond = [each["peak_bytes"] for each in found["tried"] if found["most"] < each["micro"] <= 2 * found["most"]]
    assert any(peak is None or peak > found["allowed_bytes"] for peak in beyond)  # it was not named for nothing
    sizes = ["--set", f"batch.size={found['most']}", "--set", f"batch.micro={found['most']}"]
    done = limited(160, "train", str(recipe), *sizes)
    assert '"kind":"outofmemory"' not in (Path(done["run"]) / "log.jsonl").read_text()


@pytest.mark.slow
def test_the_bound_and_the_margin_are_kept(recipe: Path) -> None:
    found = find_batch_size(load(recipe), most=24, margin=0.0)
    assert found.most == 24 and found.micro == 24 and "larger sizes were not requested" in found.bounded
    assert found.lines()[-1] == "for a batch of 96: --set batch.micro=24 (accumulation 4)"
    assert [each.micro for each in found.tried] == [8, 16, 24]


@pytest.mark.slow
def test_what_cannot_be_asked_for_is_said(recipe: Path) -> None:
    with pytest.raises(UsageError, match=r"--margin 1\.5"):
        find_batch_size(load(recipe), margin=1.5)
    with pytest.raises(OutOfMemoryError, match="one sample takes more than"):
        find_batch_size(load(recipe), memory_bytes=2**20)
