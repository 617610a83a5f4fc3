"""The dry run leaves nothing behind."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

from tests.engine.plain import cut
from trainwright.engine.dry_run import Mode, dry_run
from trainwright.engine.precision import FP32
from trainwright.state.train_state import TrainState


class Remembering(nn.Module):
    """Applies ``function`` and remembers its results weakly."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 3)
        self.name = name
        self.results: list[weakref.ref[Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inner(x)
        result: Tensor = torch.softmax(hidden, -1) if self.name == "softmax" else getattr(torch, self.name)(hidden)
        self.results.append(weakref.ref(result))
        return result


@pytest.mark.parametrize("name", ["tanh", "relu", "exp", "sigmoid", "softmax"])
def test_gives_back_the_activations_of_operators_that_save_their_result(name: str) -> None:
    model = Remembering(name)
    state = TrainState(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batch = cut((torch.randn(4, 8), torch.randint(3, (4,))), 4)
    seen = dry_run(state, batch, nn.functional.cross_entropy, modes=[Mode(FP32, 1)], budget_s=0)
    gc.collect()
    assert seen.activation_bytes > 0 and len(model.results) >= 4
    assert [result() for result in model.results] == [None] * len(model.results)
