"""After pyg-team/pytorch_geometric, ``examples/gcn.py``: one graph, masks, cached normalization, the best epoch."""

import argparse
import time
from types import SimpleNamespace

import torch
import torch.nn.functional as F

from zoo.public import Result


def log(**kwargs):
    print(", ".join(f"{key}: {f'{v:.4f}' if isinstance(v, float) else v}" for key, v in kwargs.items()))


def gcn_norm(edge_index, num_nodes):
    loops = torch.arange(num_nodes)
    row, col = torch.cat([edge_index, torch.stack([loops, loops])], dim=1)
    deg = torch.zeros(num_nodes).index_add_(0, col, torch.ones(len(col)))
    deg_inv_sqrt = deg.pow(-0.5)
    return torch.stack([row, col]), deg_inv_sqrt[row] * deg_inv_sqrt[col]


class GCNConv(torch.nn.Module):
    def __init__(self, in_channels, out_channels, cached=False):
        super().__init__()
        self.lin = torch.nn.Linear(in_channels, out_channels, bias=False)
        self.bias = torch.nn.Parameter(torch.zeros(out_channels))
        torch.nn.init.xavier_uniform_(self.lin.weight)
        self.cached, self._cached_edge_index = cached, None

    def forward(self, x, edge_index):
        if self._cached_edge_index is None or not self.cached:
            self._cached_edge_index = gcn_norm(edge_index, x.size(0))
        (row, col), weight = self._cached_edge_index
        x = self.lin(x)
        out = torch.zeros_like(x).index_add(0, col, weight[:, None] * x[row])
        return out + self.bias


class GCN(torch.nn.Module):
    def __init__(self, in_channels, hidden_channels, out_channels):
        super().__init__()
        self.conv1 = GCNConv(in_channels, hidden_channels, cached=True)
        self.conv2 = GCNConv(hidden_channels, out_channels, cached=True)

    def forward(self, x, edge_index):
        x = F.dropout(x, p=0.5, training=self.training)
        x = self.conv1(x, edge_index).relu()
        x = F.dropout(x, p=0.5, training=self.training)
        return self.conv2(x, edge_index)


def planted_citations(num_nodes=1400, num_classes=6, num_words=300):
    """A graph: papers of one class share words and cite each other more often; 20 per class are for training."""
    g = torch.Generator().manual_seed(0)
    y = torch.randint(num_classes, (num_nodes,), generator=g)
    topic = torch.rand(num_classes, num_words, generator=g) * 0.02
    topic += 0.05 * (torch.rand(num_classes, num_words, generator=g) < 0.06)
    x = (torch.rand(num_nodes, num_words, generator=g) < topic[y]).float()
    x = x / x.sum(1, keepdim=True).clamp(min=1.0)
    row, col = torch.randint(num_nodes, (2, 30000), generator=g)
    keep = torch.rand(len(row), generator=g) < torch.where(y[row] == y[col], 0.35, 0.03)
    row, col = row[keep], col[keep]
    order = torch.randperm(num_nodes, generator=g)
    masks = {name: torch.zeros(num_nodes, dtype=torch.bool) for name in ("train_mask", "val_mask", "test_mask")}
    for c in range(num_classes):
        masks["train_mask"][order[y[order] == c][:20]] = True
    rest = order[~masks["train_mask"][order]]
    masks["val_mask"][rest[:300]] = True
    masks["test_mask"][rest[300:900]] = True
    edge_index = torch.stack([torch.cat([row, col]), torch.cat([col, row])])
    return SimpleNamespace(x=x, y=y, edge_index=edge_index, num_classes=num_classes, **masks)


def main(watch, seed, folder):
    parser = argparse.ArgumentParser()
    parser.add_argument("--hidden_channels", type=int, default=16)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--epochs", type=int, default=200)
    args = parser.parse_args([])
    torch.manual_seed(seed)
    data = planted_citations()
    model = GCN(data.x.size(1), args.hidden_channels, data.num_classes)
    optimizer = torch.optim.Adam(
        [
            {"params": model.conv1.parameters(), "weight_decay": 5e-4},
            {"params": model.conv2.parameters(), "weight_decay": 0},
        ],
        lr=args.lr,
    )

    def train():
        model.train()
        optimizer.zero_grad()
        out = model(data.x, data.edge_index)
        loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
        loss.backward()
        optimizer.step()
        return float(loss)

    @torch.no_grad()
    def test():
        model.eval()
        pred = model(data.x, data.edge_index).argmax(dim=-1)
        accs = []
        for mask in [data.train_mask, data.val_mask, data.test_mask]:
            accs.append(int((pred[mask] == data.y[mask]).sum()) / int(mask.sum()))
        return accs

    best_val_acc = test_acc = 0
    times, history = [], []
    with watch(model, optimizer):
        for epoch in range(1, args.epochs + 1):
            start = time.time()
            loss = train()
            history.append(loss)
            train_acc, val_acc, tmp_test_acc = test()
            if val_acc > best_val_acc:
                best_val_acc = val_acc
                test_acc = tmp_test_acc
                torch.save(model.state_dict(), folder / "best_model.pt")
            log(Epoch=epoch, Loss=loss, Train=train_acc, Val=val_acc, Test=test_acc)
            times.append(time.time() - start)
    print(f"Median time per epoch: {torch.tensor(times).median():.4f}s")
    return Result("test accuracy", test_acc, 0.65, history, {"model": model, "optimizer": optimizer})
