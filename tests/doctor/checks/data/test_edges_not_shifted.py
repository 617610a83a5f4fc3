"""Node numbers of joined graphs: measured in a watched loop, and judged."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import trainwright as tw
from tests.doctor.checks.data.loops import exam, is_not_applicable, said
from trainwright.doctor.checks.data.edges_not_shifted import edges_not_shifted
from trainwright.doctor.facts.data import BatchFacts, InputSpread


def edges(step: int, nodes: int, reached: int, crossing: float = 0.0) -> object:
    spread = InputSpread(shape=(nodes, 3), constant=False)
    return exam(step, BatchFacts(inputs=(spread,), reached=reached, crossing=crossing))


def test_batches_whose_edges_are_among_the_first_nodes_are_reported() -> None:
    assert said(edges_not_shifted, edges(1, 100, 12), edges(2, 90, 12)) == ["warning"]
    assert not said(edges_not_shifted, edges(1, 100, 12), edges(2, 90, 88))
    assert said(edges_not_shifted, edges(1, 100, 90, 0.7), edges(2, 90, 88, 0.6)) == ["warning"]
    assert not said(edges_not_shifted, edges(1, 100, 90, 0.7), edges(2, 90, 88))
    assert is_not_applicable(edges_not_shifted, exam(1, BatchFacts()))


class Messages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.read, self.embed = nn.Linear(6, 2), nn.Embedding(2, 3)

    def forward(self, kinds: Tensor, edges: Tensor, of_nodes: Tensor) -> Tensor:
        x = self.embed(kinds)
        out: Tensor = self.read(torch.cat([x, torch.zeros_like(x).index_add_(0, edges[1], x[edges[0]])], 1))
        return out


Graph = tuple[Tensor, Tensor]


def codes(offsets: Callable[[Tensor], Tensor]) -> list[str]:
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(5, 9, (64,), generator=generator).tolist()
    graphs = [
        (torch.randint(2, (n,), generator=generator), torch.randint(n, (2, 2 * n), generator=generator)) for n in sizes
    ]

    def join(some: list[Graph]) -> tuple[Tensor, ...]:
        sizes = torch.tensor([len(x) for x, _ in some])
        starts, of_nodes = offsets(sizes), torch.arange(len(some)).repeat_interleave(sizes)
        return torch.cat([x for x, _ in some]), torch.cat([e + n for (_, e), n in zip(some, starts)], 1), of_nodes

    torch.manual_seed(0)
    model = Messages()
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    with tw.watch(model, optimizer, out=None, quiet=True, examine="all") as watch:
        for x, edges, of_nodes in DataLoader(graphs, 8, collate_fn=join):
            optimizer.zero_grad()
            F.cross_entropy(model(x, edges, of_nodes), x).backward()
            optimizer.step()
    return [each.code for each in watch.findings() if each.code == "data.edges_not_shifted"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("offsets", "expected"),
    [
        (torch.zeros_like, ["data.edges_not_shifted"]),
        (lambda sizes: sizes.roll(1), ["data.edges_not_shifted"]),
        (lambda sizes: sizes.cumsum(0) - sizes, []),
    ],
    ids=["none", "of the graph before", "of all graphs before"],
)
def test_graphs_are_joined_by_a_loader(offsets: Callable[[Tensor], Tensor], expected: list[str]) -> None:
    assert codes(offsets) == expected
