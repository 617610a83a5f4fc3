"""Node numbers of joined graphs: measured in a watched loop, and judged."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import trainwright as tw
from tests.doctor.checks.data.loops import exam, is_not_applicable, said
from trainwright.doctor.checks.data.edges_not_shifted import edges_not_shifted
from trainwright.doctor.facts.data import BatchFacts, InputSpread


def edges(step: int, nodes: int, reached: int) -> object:
    return exam(step, BatchFacts(inputs=(InputSpread(shape=(nodes, 3), constant=False),), reached=reached))


def test_batches_whose_edges_are_among_the_first_nodes_are_reported() -> None:
    assert said(edges_not_shifted, edges(1, 100, 12), edges(2, 90, 12)) == ["warning"]
    assert not said(edges_not_shifted, edges(1, 100, 12), edges(2, 90, 88))
    assert is_not_applicable(edges_not_shifted, exam(1, BatchFacts()))


class Messages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.read = nn.Linear(6, 2)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        out: Tensor = self.read(torch.cat([x, torch.zeros_like(x).index_add_(0, edges[1], x[edges[0]])], 1))
        return out


Graph = tuple[Tensor, Tensor]


def codes(*, shifted: bool) -> list[str]:
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(5, 9, (64,), generator=generator).tolist()
    graphs = [
        (torch.randn(n, 3, generator=generator), torch.randint(n, (2, 2 * n), generator=generator)) for n in sizes
    ]

    def join(some: list[Graph]) -> tuple[Tensor, Tensor, Tensor]:
        starts = torch.tensor([0, *(len(x) for x, _ in some)]).cumsum(0) * shifted
        x = torch.cat([x for x, _ in some])
        return x, torch.cat([edges + n for (_, edges), n in zip(some, starts)], 1), (x[:, 0] > 0).long()

    torch.manual_seed(0)
    model = Messages()
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    with tw.watch(model, optimizer, out=None, quiet=True, examine="all") as watch:
        for x, edges, y in DataLoader(graphs, 8, collate_fn=join):
            optimizer.zero_grad()
            F.cross_entropy(model(x, edges), y).backward()
            optimizer.step()
    return [each.code for each in watch.findings() if each.code == "data.edges_not_shifted"]


@pytest.mark.slow
def test_graphs_are_joined_by_a_loader() -> None:
    assert codes(shifted=False) == ["data.edges_not_shifted"]
    assert codes(shifted=True) == []
