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
    return exam(step, BatchFacts(inputs=(spread,), nodes=spread.shape[0], reached=reached, crossing=crossing))


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


class Joined:
    """Graphs in one object, as in graph libraries."""

    def __init__(self, kinds: Tensor, edges: Tensor, of_nodes: Tensor) -> None:
        self.kinds, self.edges, self.of_nodes = kinds, edges, of_nodes


class OfObject(Messages):
    def forward(self, joined: Joined) -> Tensor:  # type: ignore[override]
        return super().forward(joined.kinds, joined.edges, joined.of_nodes)


def codes(offsets: Callable[[Tensor], Tensor], *, has_loader: bool = True) -> list[str]:
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
    model = Messages() if has_loader else OfObject()
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    batches = [join(graphs[n : n + 8]) for n in range(0, len(graphs), 8)]
    with tw.watch(model, optimizer, out=None, quiet=True, examine="all") as watch:
        for x, edges, of_nodes in DataLoader(graphs, 8, collate_fn=join) if has_loader else batches:
            optimizer.zero_grad()
            scores = model(x, edges, of_nodes) if has_loader else model(Joined(x, edges, of_nodes))
            F.cross_entropy(scores, x).backward()
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
    assert codes(offsets) == codes(offsets, has_loader=False) == expected


class Pooled(Messages):
    """Attention over the nodes. Its softmax is over each graph, or over all graphs."""

    def __init__(self, *, by_graph: bool) -> None:
        super().__init__()
        self.by_graph, self.score = by_graph, nn.Linear(2, 1)

    def forward(self, kinds: Tensor, edges: Tensor, of_nodes: Tensor) -> Tensor:
        x = super().forward(kinds, edges, of_nodes)
        weights, sums = self.score(x).exp(), x.new_zeros(int(of_nodes[-1]) + 1, 1)
        sums = sums.index_add(0, of_nodes, weights)[of_nodes] if self.by_graph else weights.sum()
        return x.new_zeros(int(of_nodes[-1]) + 1, 2).index_add(0, of_nodes, weights / sums * x)


@pytest.mark.slow
@pytest.mark.parametrize("by_graph", [True, False], ids=["each graph", "all graphs"])
def test_a_softmax_over_the_nodes_of_all_graphs_mixes_samples(by_graph: bool) -> None:
    torch.manual_seed(0)
    model = Pooled(by_graph=by_graph)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    with tw.watch(model, optimizer, out=None, quiet=True, examine="all") as watch:
        for _ in range(4):
            of_nodes = torch.arange(6).repeat_interleave(torch.randint(3, 7, (6,)))
            edges = torch.stack([torch.arange(len(of_nodes))] * 2)
            optimizer.zero_grad()
            F.cross_entropy(model(torch.randint(2, of_nodes.shape), edges, of_nodes), torch.randint(2, (6,))).backward()
            optimizer.step()
    found = [each.severity for each in watch.findings() if each.code == "model.mixes_samples"]
    assert found == ([] if by_graph else ["warning"])
