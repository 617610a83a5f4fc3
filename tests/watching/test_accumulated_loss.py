"""The loss in the verdict of a watched loop that accumulates gradients."""

import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import trainwright as tw


@pytest.mark.slow
@pytest.mark.parametrize(("parts", "divisor"), [(1, 1), (4, 4), (4, 1)], ids=["one batch", "divided", "not divided"])
def test_the_verdict_has_the_loss_of_the_step(parts: int, divisor: int, capfd: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(256, 4), torch.randint(4, (256,))
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.01 * divisor / parts)
    with tw.watch(model, optimizer, out=None):
        for _ in range(30):
            optimizer.zero_grad()
            for part in range(parts):
                rows = slice(64 * part, 64 * (part + 1))
                (F.cross_entropy(model(x[rows]), y[rows]) / divisor).backward()
            optimizer.step()
    end = float(re.findall(r"training loss .* -> ([0-9.]+)", "".join(capfd.readouterr()))[0])
    assert end == pytest.approx(F.cross_entropy(model(x), y).item(), rel=0.1)
