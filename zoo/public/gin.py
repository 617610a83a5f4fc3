"""After pyg-team/pytorch_geometric, ``examples/mutag_gin.py``: batches of graphs, BatchNorm, sum pooling."""

import torch
import torch.nn.functional as F
from torch.nn import BatchNorm1d, Linear, ReLU, Sequential

from zoo.public import Result


class Data:
    """One graph, or a batch of graphs; ``batch`` then has the graph's index of each node."""

    def __init__(self, x, edge_index, y, batch=None, num_graphs=1):
        self.x, self.edge_index, self.y, self.batch, self.num_graphs = x, edge_index, y, batch, num_graphs

    def to(self, device):
        parts = (self.x, self.edge_index, self.y, self.batch)
        return Data(*(part.to(device) for part in parts), self.num_graphs)

    @staticmethod
    def collate(graphs):
        sizes = torch.tensor([len(graph.x) for graph in graphs])
        starts = sizes.cumsum(0) - sizes
        return Data(
            torch.cat([graph.x for graph in graphs]),
            torch.cat([graph.edge_index + start for graph, start in zip(graphs, starts)], dim=1),
            torch.cat([graph.y for graph in graphs]),
            torch.repeat_interleave(torch.arange(len(graphs)), sizes),
            len(graphs),
        )


def random_graph(label, g):
    """Label 1: most edges lead to the first 3 nodes. Label 0: a chain-like graph. Nodes are of 4 random kinds."""
    n = int(torch.randint(10, 20, (1,), generator=g))
    edges = []
    for node in range(1, n):
        if label:
            other = int(torch.randint(0, min(node, 3), (1,), generator=g))
        else:
            other = int(torch.randint(max(0, node - 2), node, (1,), generator=g))
        edges.append((node, other))
    extra = torch.randint(n, (3, 2), generator=g).tolist()
    edges += [(a, b) for a, b in extra if a != b]
    row, col = torch.tensor(edges).t()
    x = F.one_hot(torch.randint(4, (n,), generator=g), 4).float()
    edge_index = torch.stack([torch.cat([row, col]), torch.cat([col, row])])
    return Data(x, edge_index, torch.tensor([label]))


def dataset(n=300):
    g = torch.Generator().manual_seed(12345)
    return [random_graph(int(torch.randint(2, (1,), generator=g)), g) for _ in range(n)]


class GINConv(torch.nn.Module):
    def __init__(self, nn, train_eps=False):
        super().__init__()
        self.nn = nn
        if train_eps:
            self.eps = torch.nn.Parameter(torch.zeros(1))
        else:
            self.register_buffer("eps", torch.zeros(1))

    def forward(self, x, edge_index):
        out = torch.zeros_like(x).index_add(0, edge_index[1], x[edge_index[0]])
        return self.nn(out + (1 + self.eps) * x)


def global_add_pool(x, batch, size):
    return x.new_zeros(size, x.size(1)).index_add(0, batch, x)


class Net(torch.nn.Module):
    def __init__(self, in_channels, dim, out_channels):
        super().__init__()
        self.conv1 = GINConv(Sequential(Linear(in_channels, dim), BatchNorm1d(dim), ReLU(), Linear(dim, dim), ReLU()))
        self.conv2 = GINConv(Sequential(Linear(dim, dim), BatchNorm1d(dim), ReLU(), Linear(dim, dim), ReLU()))
        self.conv3 = GINConv(Sequential(Linear(dim, dim), BatchNorm1d(dim), ReLU(), Linear(dim, dim), ReLU()))
        self.lin1 = Linear(dim, dim)
        self.lin2 = Linear(dim, out_channels)

    def forward(self, x, edge_index, batch, num_graphs):
        x = self.conv1(x, edge_index)
        x = self.conv2(x, edge_index)
        x = self.conv3(x, edge_index)
        x = global_add_pool(x, batch, num_graphs)
        x = self.lin1(x).relu()
        x = F.dropout(x, p=0.5, training=self.training)
        x = self.lin2(x)
        return F.log_softmax(x, dim=-1)


def main(watch, seed, folder):
    torch.manual_seed(seed)
    graphs = dataset()
    train_dataset = graphs[len(graphs) // 5 :]
    test_dataset = graphs[: len(graphs) // 5]
    train_loader = torch.utils.data.DataLoader(train_dataset, batch_size=32, shuffle=True, collate_fn=Data.collate)
    test_loader = torch.utils.data.DataLoader(test_dataset, batch_size=32, collate_fn=Data.collate)
    device = torch.device("cpu")
    model = Net(4, 32, 2).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
    history = []

    def train(epoch):
        model.train()
        if epoch == 31:
            for param_group in optimizer.param_groups:
                param_group["lr"] = 0.5 * param_group["lr"]
        total_loss = 0
        for data in train_loader:
            data = data.to(device)
            optimizer.zero_grad()
            output = model(data.x, data.edge_index, data.batch, data.num_graphs)
            loss = F.nll_loss(output, data.y)
            loss.backward()
            optimizer.step()
            total_loss += float(loss) * data.num_graphs
            history.append(float(loss))
        return total_loss / len(train_loader.dataset)

    @torch.no_grad()
    def test(loader):
        model.eval()
        total_correct = 0
        for data in loader:
            data = data.to(device)
            out = model(data.x, data.edge_index, data.batch, data.num_graphs)
            total_correct += int((out.argmax(-1) == data.y).sum())
        return total_correct / len(loader.dataset)

    with watch(model, optimizer, loader=train_loader):
        for epoch in range(1, 41):
            loss = train(epoch)
            train_acc = test(train_loader)
            test_acc = test(test_loader)
            print(f"Epoch: {epoch:03d}, Loss: {loss:.4f} Train Acc: {train_acc:.4f} Test Acc: {test_acc:.4f}")
    torch.save(model.state_dict(), folder / "gin.pt")
    return Result("test accuracy", test_acc, 0.85, history, {"model": model, "optimizer": optimizer})
