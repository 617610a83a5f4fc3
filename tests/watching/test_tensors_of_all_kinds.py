"""Inputs, outputs and buffers that are no plain tensors: no part of the watch fails on them, and steps run again."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

import trainwright as tw

pytestmark = pytest.mark.slow  # watched loops, each of a few tenths of a second

ROWS, STEPS = 32, 9


def drawn() -> Tensor:
    return torch.randn(ROWS, 8)


def several() -> list[Tensor]:
    return [torch.randn(2 + n % 3, 8) for n in range(ROWS)]


def inference() -> Tensor:
    with torch.inference_mode():
        return drawn()


def masked() -> Tensor:
    return torch.masked.masked_tensor(drawn(), torch.rand(ROWS, 8) < 0.7)  # type: ignore[no-any-return, no-untyped-call]


KINDS: dict[str, tuple[Callable[[], object], Callable[..., Tensor]]] = {
    "coo": (lambda: drawn().relu().to_sparse(), lambda x: x.to_dense()),
    "csr": (lambda: drawn().relu().to_sparse_csr(), lambda x: x.to_dense()),
    "nested": (lambda: torch.nested.nested_tensor(several()), lambda x: torch.stack([t.mean(0) for t in x.unbind()])),
    "jagged": (
        lambda: torch.nested.nested_tensor(several(), layout=torch.jagged),
        lambda x: torch.stack([t.mean(0) for t in x.unbind()]),
    ),
    "quantised": (lambda: torch.quantize_per_tensor(drawn(), 0.1, 0, torch.qint8), lambda x: x.dequantize()),
    "float8": (lambda: drawn().to(torch.float8_e4m3fn), lambda x: x.float()),
    "conjugate": (lambda: drawn().to(torch.complex64).conj(), lambda x: x.real),
    "inference": (inference, lambda x: x.clone()),
    "masked": (masked, lambda x: x.to_tensor(0.0)),
    "packed": (lambda: pack_sequence(several(), enforce_sorted=False), lambda x: x.data[:ROWS]),
    "strings": (lambda: [str(n) for n in range(ROWS)], lambda x: torch.tensor([[float(n)] for n in x]) * torch.ones(8)),
    "empty and None": (lambda: [torch.empty(0, 3), None, drawn()], lambda x: x[2]),
}


class Net(nn.Module):
    """``plainly`` makes its input a plain tensor. The graph lies in a buffer, as those of graph networks do."""

    graph: Tensor

    def __init__(self, plainly: Callable[..., Tensor]) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
        self.register_buffer("graph", torch.eye(ROWS).to_sparse())
        self.plainly = plainly

    def forward(self, x: object) -> Tensor:
        return self.layers(torch.sparse.mm(self.graph, self.plainly(x)))  # type: ignore[no-any-return]


def run(model: nn.Module, make: Callable[[], object], read: Callable[..., Tensor] = lambda output: output) -> tw.Watch:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    y = torch.arange(ROWS) % 3
    with warnings.catch_warnings(), tw.watch(model, optimizer, quiet=True) as watch:
        warnings.simplefilter("ignore")
        for step in range(STEPS):
            optimizer.zero_grad()
            F.cross_entropy(read(model(make())), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if step % 8 == 7:
                with torch.no_grad():
                    model.eval()
                    read(model(make())).mean().item()
                    model.train()
    return watch


@pytest.mark.parametrize("kind", KINDS)
def test_an_input_of_any_kind_is_recorded_or_left_out(kind: str) -> None:
    torch.manual_seed(0)
    make, plainly = KINDS[kind]
    watch = run(Net(plainly), make)
    assert not watch.session.failures
    assert "loop.unseen" not in {each.code for each in watch.findings()}


class Layers(nn.Module):
    """A layer returns a nested tensor."""

    def __init__(self, layout: torch.layout) -> None:
        super().__init__()
        self.layer, self.head, self.layout = nn.Linear(8, 16), nn.Linear(16, 3), layout

    def forward(self, x: list[Tensor]) -> Tensor:
        hidden = self.layer(torch.nested.as_nested_tensor(x, layout=self.layout))
        return self.head(torch.nested.to_padded_tensor(hidden, 0.0).mean(1))  # type: ignore[no-any-return]


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_a_layer_may_return_a_nested_tensor(layout: torch.layout) -> None:
    torch.manual_seed(0)
    assert not run(Layers(layout), several).session.failures
