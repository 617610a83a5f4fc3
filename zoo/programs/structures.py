"""Legal techniques with graphs, trees and sets."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import LBFGS, Adam, Optimizer
from torch.utils.data import DataLoader, TensorDataset

from zoo.programs.training import Batch, Training


class GraphConv(nn.Module):
    def __init__(self, into: int, out: int) -> None:
        super().__init__()
        self.lin = nn.Linear(into, out, bias=False)
        self.bias = nn.Parameter(torch.zeros(out))

    def forward(self, x: Tensor, edges: Tensor, norm: Tensor) -> Tensor:
        x = self.lin(x)
        src, dst = edges
        out = torch.zeros_like(x)
        out.index_add_(0, dst, norm.unsqueeze(1) * x[src])
        return out + self.bias


class GCN(nn.Module):
    def __init__(self, edges: Tensor, nodes: int, features: int, classes: int) -> None:
        super().__init__()
        loops = torch.arange(nodes).expand(2, -1)
        self.register_buffer("edges", torch.cat([edges, loops], 1))
        degree = torch.zeros(nodes).index_add_(0, self.edges[1], torch.ones(self.edges.shape[1]))
        scale = degree.rsqrt()
        self.register_buffer("norm", scale[self.edges[0]] * scale[self.edges[1]])
        self.conv1, self.conv2 = GraphConv(features, 32), GraphConv(32, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(x, 0.3, self.training)
        x = F.relu(self.conv1(x, self.edges, self.norm))
        x = F.dropout(x, 0.5, self.training)
        return self.conv2(x, self.edges, self.norm)


def citation_graph(t: Training) -> None:
    """GCN (Kipf and Welling, 2017): few labelled nodes of one graph, early stopping, the best weights restored."""
    nodes, classes = 400, 4
    y = torch.randint(classes, (nodes,))
    odds = torch.where(y[:, None] == y, 0.05, 0.008)
    linked = torch.triu(torch.rand(nodes, nodes) < odds, diagonal=1)
    edges = (linked | linked.T).nonzero().T
    x = torch.randn(classes, 24)[y] + 2.5 * torch.randn(nodes, 24)
    x = (x - x.mean(0)) / x.std(0)
    order = torch.randperm(nodes)
    train, val = order[:80], order[80:180]
    t.model, t.loaded = GCN(edges, nodes, 24, classes), False
    t.optimizers_of = lambda training: [Adam(training.model.parameters(), lr=0.01, weight_decay=5e-4)]

    def loop(training: Training) -> Iterator[Tensor]:
        model, (optimizer,) = training.model, training.optimizers
        best, best_state, waited = math.inf, copy.deepcopy(model.state_dict()), 0
        for _ in range(200):
            model.train()
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x)[train], y[train])
            loss.backward()
            optimizer.step()
            yield loss.detach()
            model.eval()
            with torch.no_grad():
                val_loss = F.cross_entropy(model(x)[val], y[val]).item()
            if val_loss < best:
                best, best_state, waited = val_loss, copy.deepcopy(model.state_dict()), 0
            else:
                waited += 1
                if waited >= 50:
                    break
        model.load_state_dict(best_state)

    t.loop = loop


class AttentionBlock(nn.Module):
    """MAB of the set transformer: queries look at keys that are really there."""

    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.att = nn.MultiheadAttention(d, heads, batch_first=True)
        self.ff = nn.Sequential(nn.Linear(d, 2 * d), nn.ReLU(), nn.Linear(2 * d, d))
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)

    def forward(self, q: Tensor, k: Tensor, pad: Tensor) -> Tensor:
        h = self.ln1(q + self.att(q, k, k, key_padding_mask=pad, need_weights=False)[0])
        return self.ln2(h + self.ff(h))


class SetTransformer(nn.Module):
    def __init__(self, d: int = 32) -> None:
        super().__init__()
        self.embed = nn.Linear(2, d)
        self.enc = nn.ModuleList([AttentionBlock(d, 4), AttentionBlock(d, 4)])
        self.seed = nn.Parameter(torch.randn(1, 1, d) / d**0.5)
        self.pool = AttentionBlock(d, 4)
        self.out = nn.Linear(d, 1)

    def forward(self, points: Tensor, pad: Tensor) -> Tensor:
        h = self.embed(points)
        for block in self.enc:
            h = block(h, h, pad)
        pooled = self.pool(self.seed.expand(len(h), -1, -1), h, pad)
        return self.out(pooled[:, 0]).squeeze(-1)


def _trimmed(samples: list[tuple[Tensor, Tensor, Tensor]]) -> tuple[Tensor, ...]:
    points, sizes, targets = map(torch.stack, zip(*samples))
    longest = int(sizes.max())
    pad = torch.arange(longest) >= sizes[:, None]
    return points[:, :longest], pad, targets


def padded_sets(t: Training) -> None:
    """Set transformer (Lee et al., 2019): the diameter of sets of 2 to 12 points, padded to the longest of a batch."""
    n, most = 1024, 12
    sizes = torch.randint(2, most + 1, (n,))
    here = torch.arange(most) < sizes[:, None]
    points = torch.randn(n, most, 2) * here[..., None]
    both = here[:, :, None] & here[:, None, :]
    diameter = (torch.cdist(points, points) * both).amax((1, 2))
    t.data = TensorDataset(points, sizes, (diameter - diameter.mean()) / diameter.std())
    t.model, t.lr, t.epochs = SetTransformer(), 1e-3, 5
    t.batches_of = lambda training: DataLoader(
        training.data, batch_size=training.batch_size, shuffle=True, drop_last=True, collate_fn=_trimmed
    )

    def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        points, pad, target = batch
        return F.smooth_l1_loss(model(points, pad), target)

    t.loss = loss


class ChildSumTreeLSTM(nn.Module):
    """Trees in the layout of a heap: the children of node i are 2i + 1 and 2i + 2; absent nodes have the token PAD."""

    PAD = 5

    def __init__(self, depth: int = 4, dim: int = 32) -> None:
        super().__init__()
        self.depth, self.dim = depth, dim
        self.tokens = nn.Embedding(6, dim, padding_idx=self.PAD)
        self.W_iou, self.U_iou = nn.Linear(dim, 3 * dim), nn.Linear(dim, 3 * dim, bias=False)
        self.W_f, self.U_f = nn.Linear(dim, dim), nn.Linear(dim, dim, bias=False)
        self.classify = nn.Linear(dim, 2)
        nn.init.ones_(self.W_f.bias)

    def forward(self, tree: Tensor) -> Tensor:
        b, there, x = len(tree), (tree != self.PAD).unsqueeze(-1), self.tokens(tree)
        below = (1 << self.depth) // 2
        h = c = x.new_zeros(b, below, 2, self.dim)  # the leaves of the deepest level have no children
        states = []
        for level in reversed(range(self.depth)):
            at = slice((1 << level) - 1, (2 << level) - 1)
            i, o, u = (self.W_iou(x[:, at]) + self.U_iou(h.sum(2))).chunk(3, -1)
            f = torch.sigmoid(self.W_f(x[:, at]).unsqueeze(2) + self.U_f(h))
            cell = torch.sigmoid(i) * torch.tanh(u) + (f * c).sum(2)
            hidden = torch.sigmoid(o) * torch.tanh(cell)
            cell, hidden = cell * there[:, at], hidden * there[:, at]
            states.append(hidden)
            if level:
                c, h = (each.view(b, -1, 2, self.dim) for each in (cell, hidden))
        return self.classify(torch.cat(states[::-1], 1))


def _formulas(n: int) -> tuple[Tensor, Tensor]:
    """Trees of and (2), or (3), exclusive or (4) over bits; the value of every node, -100 where there is none."""
    rng = random.Random(int(torch.randint(1 << 30, ()).item()))
    trees, values = torch.full((n, 15), ChildSumTreeLSTM.PAD), torch.full((n, 15), -100)

    def grow(row: int, node: int) -> int:
        if node >= 7 or (node and rng.random() < 0.25):
            token = value = rng.randrange(2)
        else:
            token = rng.choice([2, 3, 4])
            left, right = grow(row, 2 * node + 1), grow(row, 2 * node + 2)
            value = (left & right, left | right, left ^ right)[token - 2]
        trees[row, node], values[row, node] = token, value
        return value

    for row in range(n):
        grow(row, 0)
    return trees, values


def parse_trees(t: Training) -> None:
    """Child-sum Tree-LSTM (Tai et al., 2015): every node of a formula is labelled, as in the sentiment treebank."""
    t.data = TensorDataset(*_formulas(640))
    t.model, t.lr, t.epochs = ChildSumTreeLSTM(), 5e-3, 9

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        tree, values = batch
        return F.cross_entropy(model(tree).flatten(0, 1), values.flatten(), ignore_index=-100)

    t.loss = loss


class LinearSEM(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.W = nn.Parameter(torch.zeros(d, d))
        self.register_buffer("off_diagonal", 1 - torch.eye(d))

    def adjacency(self):
        return self.W * self.off_diagonal

    def forward(self, x):
        return x @ self.adjacency()

    def h(self):
        A = self.adjacency()
        return torch.trace(torch.matrix_exp(A * A)) - A.shape[0]


def acyclic_graph(t: Training) -> None:
    """NOTEARS without a penalty (Zheng et al., 2018): a directed acyclic graph by an augmented Lagrangian."""
    d, n = 8, 1000
    truth = torch.zeros(d, d)
    for j in range(1, d):
        for i in torch.randperm(j)[:2].tolist():
            truth[i, j] = (0.5 + 0.5 * torch.rand(())) * (1 if torch.rand(()) < 0.5 else -1)
    x = torch.zeros(n, d)
    for j in range(d):  # columns are in topological order so far
        x[:, j] = x @ truth[:, j] + torch.randn(n)
    x = x[:, torch.randperm(d)].double()
    x = x - x.mean(0)
    t.data, t.model, t.loaded = TensorDataset(x), LinearSEM(d).double(), False
    t.optimizers_of = lambda training: [LBFGS(training.model.parameters(), max_iter=5, line_search_fn="strong_wolfe")]

    def solve(training):
        model, (opt,) = training.model, training.optimizers
        rho, alpha, h_old = 1.0, 0.0, math.inf

        def augmented_lagrangian():
            opt.zero_grad()
            h = model.h()
            value = 0.5 * (x - model(x)).pow(2).sum() / n + alpha * h + 0.5 * rho * h * h
            value.backward()
            return value

        for _outer in range(10):
            opt.state.clear()  # curvature of another objective
            for _inner in range(10):
                yield opt.step(augmented_lagrangian).detach()
            with torch.no_grad():
                h_new = model.h().item()
            alpha += rho * h_new
            if h_new > 0.25 * h_old:
                rho = min(10 * rho, 1e8)
            h_old = h_new

    t.loop = solve


class RiemannianSGD(Optimizer):
    """SGD in the Poincare ball: rescales by the inverse metric, steps, and projects back inside the ball."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                sq = p.pow(2).sum(-1, keepdim=True)
                p.add_(p.grad * (1 - sq).pow(2) / 4, alpha=-group["lr"])
                p.renorm_(2, 0, 1 - 1e-5)


class PoincareEmbedding(nn.Module):
    def __init__(self, n, dim):
        super().__init__()
        self.points = nn.Parameter(torch.empty(n, dim).uniform_(-1e-3, 1e-3))

    def forward(self, u, v):
        """Distances of u (n,) from each of v (n, k)."""
        a, b = self.points[u].unsqueeze(1), self.points[v]
        gap = (a - b).pow(2).sum(-1)
        room = (1 - a.pow(2).sum(-1)) * (1 - b.pow(2).sum(-1))
        return torch.acosh((1 + 2 * gap / room).clamp(min=1 + 1e-6))


def poincare_tree(t: Training) -> None:
    """Poincare embeddings of the transitive closure of a tree (Nickel and Kiela, 2017)."""
    parents = [-1] + [(i - 1) // 3 for i in range(1, 121)]  # a complete ternary tree of depth 4
    pairs, related = [], torch.eye(121, dtype=torch.bool)
    for node in range(121):
        up = parents[node]
        while up >= 0:
            pairs.append((node, up))
            related[node, up] = True
            up = parents[up]
    u, v = torch.tensor(pairs).T
    t.data = TensorDataset(u, v)
    t.model = PoincareEmbedding(121, 5)
    t.epochs = 16
    t.optimizers_of = lambda training: [RiemannianSGD(training.model.parameters(), lr=0.3)]

    def burn_in(training, epoch):
        training.optimizers[0].param_groups[0]["lr"] = 0.03 if epoch < 3 else 0.3

    def update(training, batch):
        (opt,) = training.optimizers
        u, v = batch
        negatives = torch.randint(121, (len(u), 20))
        distances = training.model(u, torch.cat([v.unsqueeze(1), negatives], 1))
        logits = -distances
        logits[:, 1:] = logits[:, 1:].masked_fill(related[u.unsqueeze(1), negatives], -math.inf)
        loss = F.cross_entropy(logits, torch.zeros(len(u), dtype=torch.long), reduction="sum")
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.detach() / len(u)

    t.each_epoch.append(burn_in)
    t.update = update
