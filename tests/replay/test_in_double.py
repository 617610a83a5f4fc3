"""A step that runs again in float64 is the same function, whatever the model makes in float32 on the way."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import trainwright as tw
from trainwright.replay.replayer import Intervention
from trainwright.replay.session import ReplaySession


class Causal(nn.Module):
    """Makes its mask in float32, which is no dtype of its weights in the replay."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(16, 11)

    def forward(self, ids: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        logits: Tensor = self.head(self.layer(self.embed(ids), src_mask=mask))
        return logits


@pytest.mark.slow
def test_attention_with_a_mask_of_another_dtype() -> None:
    torch.manual_seed(0)
    model = Causal()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compared: list[tuple[float, float, float, float]] = []

    def in_both(step: ReplaySession) -> None:
        once, twice = step.run(), step.run(Intervention(dtype="fp64"))
        compared.append((once.loss, twice.loss, once.grad_norm, twice.grad_norm))

    with tw.watch(model, optimizer, checks=[in_both], out=None, quiet=True) as watch:
        for _ in range(8):
            ids = torch.randint(11, (8, 13))
            optimizer.zero_grad()
            F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
            optimizer.step()
    assert len(compared) > 3
    for loss, loss_64, norm, norm_64 in compared:
        assert (loss, norm) == pytest.approx((loss_64, norm_64), rel=1e-5)
    assert watch.findings() == []
