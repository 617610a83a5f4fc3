"""Features that leave torch inside of a model, and return without a graph."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.doctor.checks.loops import alarms, mlp, watched

CODE = "gradient.graph_cut"


class Model(nn.Module):
    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.encoder, self.head, self._between = mlp(), nn.Linear(4, 4), between

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self._between(self.encoder(x)))


class WithTarget(nn.Module):
    """The head also follows a network that is used as it is. The optimizer holds all parameters."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.model, self.fixed, self._between = mlp(), mlp(), between

    def forward(self, x: Tensor) -> Tensor:
        scores = self.model(x)
        return scores + F.mse_loss(scores, self._between(self.fixed(x)))


CUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "detach": lambda h: h.detach(),
    "an array": lambda h: torch.from_numpy(h.detach().numpy()),
    "a copy of an array": lambda h: torch.tensor(h.detach().numpy()),
    "a changed array that torch has not copied": lambda h: torch.from_numpy(2 * h.detach().numpy()),
    "a changed array": lambda h: torch.tensor(2 * h.detach().numpy()),
    "a list": lambda h: torch.tensor(h.tolist()),
    "a code": lambda h: F.one_hot(h.argmax(-1), 4).float(),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CUTS)
def test_an_encoder_is_cut_off(name: str) -> None:
    assert alarms(watched(Model(CUTS[name]), steps=24)) == [CODE]


@pytest.mark.slow
@pytest.mark.parametrize("name", CUTS)
def test_a_fixed_network_is_a_target(name: str) -> None:
    assert CODE not in alarms(watched(WithTarget(CUTS[name]), steps=24))


@pytest.mark.slow
def test_features_are_only_kept() -> None:
    kept: list[object] = []

    def keep(h: Tensor) -> Tensor:
        kept[:] = [h.detach().numpy(), h.tolist(), torch.tensor(h.detach().numpy())]
        return h

    assert alarms(watched(Model(keep), steps=24)) == []
