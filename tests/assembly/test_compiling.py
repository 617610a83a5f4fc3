"""``model.compile: true`` compiles, whoever wrote ``forward``."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from trainwright.assembly.assemble import compile_in_place

pytestmark = [
    pytest.mark.slow,  # torch._dynamo is imported
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning"),  # of torch's own making
]


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).relu()


@pytest.mark.parametrize("make", [lambda: nn.Sequential(Own(), nn.ReLU()), lambda: nn.Linear(6, 3), Own])
def test_a_model_becomes_one_graph(make: type[nn.Module]) -> None:
    torch._dynamo.reset()
    counters.clear()
    model, x = make(), torch.randn(4, 6)
    names, expected = list(model.state_dict()), model(x)
    expected.sum().backward()
    grads = [p.grad for p in model.parameters()]
    model.zero_grad()
    compile_in_place(model, backend="aot_eager")
    assert torch.equal(model(x), expected)
    model(x).sum().backward()
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), grads, strict=True))
    assert (counters["stats"]["unique_graphs"], len(counters["graph_break"])) == (1, 0)
    assert list(model.state_dict()) == names
