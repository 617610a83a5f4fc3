"""The loss in the verdict of a watched loop that accumulates gradients."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import trainwright as tw
from trainwright.report.pages.log import IncrementalLog


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parts", "divisor", "reduction"),
    [(1, 1, "mean"), (4, 4, "mean"), (4, 1, "mean"), (4, 256, "sum")],
    ids=["one batch", "divided", "not divided", "sums"],
)
def test_verdict_and_page_have_the_loss_of_the_step(
    parts: int, divisor: int, reduction: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(256, 4), torch.randint(4, (256,))
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.01 if reduction == "sum" else 0.01 * divisor / parts)
    with tw.watch(model, optimizer, out=tmp_path / "run"):
        for _ in range(30):
            optimizer.zero_grad()
            for part in range(parts):
                rows = slice(64 * part, 64 * (part + 1))
                (F.cross_entropy(model(x[rows]), y[rows], reduction=reduction) / divisor).backward()
            optimizer.step()
    begin, end = map(float, re.findall(r"training loss ([0-9.]+) -> ([0-9.]+)", "".join(capfd.readouterr()))[0])
    assert end == pytest.approx(F.cross_entropy(model(x), y).item(), rel=0.1)
    lines = (tmp_path / "run" / "log.jsonl").read_bytes()
    first = lines.index(b"\n", lines.index(b'"kind":"watched"')) + 1  # a page may read before a step is examined
    log = IncrementalLog(tmp_path / "live.jsonl")
    for length in (first, len(lines)):
        log.path.write_bytes(lines[:length])
        log.advance()
    losses, means = dict(log.losses), log.means.columns()
    assert losses[1] == pytest.approx(begin, rel=0.01) and losses[30] == pytest.approx(end, rel=0.01)
    assert means["loss"][0] == pytest.approx(begin, rel=0.1)
