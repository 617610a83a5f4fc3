"""Legal techniques with a regime of their own: rates tried out, warm starts, streams of tasks, whole graphs."""

from __future__ import annotations

import copy
import math
import random

import torch
from torch import Tensor, nn, optim
from torch.func import functional_call, stack_module_state, vmap
from torch.nn import functional as F
from torch.optim import SGD
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, Subset, TensorDataset

from zoo.host import mlp
from zoo.programs.training import Batch, Training


def range_test(t: Training) -> None:
    """Learning-rate range test (Smith, 2017): rates grow until the loss flies off; all is put back, then one cycle."""
    t.batch_size, t.epochs = 64, 10
    t.optimizers_of = lambda tr: [optim.SGD(tr.parameters(), lr=1e-3, momentum=0.9, weight_decay=1e-4)]

    def lr_find(tr, start_lr=1e-4, end_lr=10.0, num_it=60, beta=0.9):
        (opt,) = tr.optimizers
        smooth, best, lrs, losses = 0.0, math.inf, [], []
        batches = iter(tr.batches)
        for it in range(num_it):
            batch = next(batches, None)
            if batch is None:
                batches = iter(tr.batches)
                batch = next(batches)
            opt.param_groups[0]["lr"] = lr = start_lr * (end_lr / start_lr) ** (it / (num_it - 1))
            loss = tr.plain_update(batch)
            yield loss
            smooth = beta * smooth + (1 - beta) * loss.item()
            lrs.append(lr)
            losses.append(smooth / (1 - beta ** (it + 1)))
            best = min(best, losses[-1])
            if not math.isfinite(losses[-1]) or losses[-1] > 4 * best:
                break
        tr.suggested = lrs[losses.index(min(losses))] / 10

    def fit_one_cycle(tr):
        (opt,) = tr.optimizers
        saved = copy.deepcopy(tr.model.state_dict()), copy.deepcopy(opt.state_dict())
        yield from lr_find(tr)
        tr.model.load_state_dict(saved[0])
        opt.load_state_dict(saved[1])
        steps = tr.epochs * len(tr.batches)
        sched = optim.lr_scheduler.OneCycleLR(opt, max_lr=tr.suggested, total_steps=steps, pct_start=0.25)
        for _ in range(tr.epochs):
            for batch in tr.batches:
                loss = tr.plain_update(batch)
                sched.step()
                yield loss

    t.loop = fit_one_cycle


def shrink_and_perturb(t: Training) -> None:
    """Warm starts that generalise: shrink and perturb (Ash & Adams, 2020), as more data arrive."""
    shrink, sigma, stages = 0.6, 0.01, 4
    order = torch.randperm(len(t.data)).tolist()

    def stage_by_stage(training):
        (opt,) = training.optimizers
        for stage in range(1, stages + 1):
            available = Subset(training.data, order[: stage * len(order) // stages])
            loader = DataLoader(available, batch_size=32, shuffle=True, drop_last=True)
            if stage > 1:
                with torch.no_grad():
                    for p in training.model.parameters():
                        p.mul_(shrink).add_(torch.randn_like(p), alpha=sigma)
                opt.state.clear()
            for _ in range(48 // len(loader) if stage < stages else 3):
                training.model.train()
                for xb, yb in loader:
                    opt.zero_grad(set_to_none=True)
                    loss = F.cross_entropy(training.model(xb), yb)
                    loss.backward()
                    opt.step()
                    yield loss.item()

    t.loop, t.loaded = stage_by_stage, False


class Reservoir:
    """A fair sample of all that was seen: inputs, labels, and the logits of that time."""

    def __init__(self, size: int, features: int, classes: int) -> None:
        self.x, self.y = torch.zeros(size, features), torch.zeros(size, dtype=torch.long)
        self.z, self.seen = torch.zeros(size, classes), 0

    def add(self, x: Tensor, y: Tensor, z: Tensor) -> None:
        for each in zip(x, y, z.detach()):
            place = self.seen if self.seen < len(self.x) else random.randrange(self.seen + 1)
            self.seen += 1
            if place < len(self.x):
                self.x[place], self.y[place], self.z[place] = each

    def draw(self, n: int) -> tuple[Tensor, Tensor, Tensor]:
        rows = torch.randint(min(self.seen, len(self.x)), (n,))
        return self.x[rows], self.y[rows], self.z[rows]


def dark_experience(t: Training) -> None:
    """DER++ (Buzzega et al., 2020): four tasks in a stream, one pass; features change places from task to task."""
    random.seed(t.seed)
    y = torch.randint(10, (4 * 1536,))
    x = torch.randn(10, 20)[y] + 1.2 * torch.randn(len(y), 20)
    orders = [torch.randperm(20) for _ in range(4)]
    x = torch.cat([part[:, order] for part, order in zip(x.chunk(4), orders)])
    t.data, t.shuffle, t.epochs, t.model = TensorDataset(x, y), False, 1, mlp(width=128)
    memory, alpha, beta = Reservoir(256, 20, 10), 0.3, 0.5
    t.optimizers_of = lambda training: [SGD(training.model.parameters(), lr=0.1)]

    def update(training: Training, batch: Batch) -> Tensor:
        net, (opt,) = training.model, training.optimizers
        inputs, labels = batch
        opt.zero_grad()
        outputs = net(inputs)
        loss = F.cross_entropy(outputs, labels)
        if memory.seen:
            old, _, logits = memory.draw(32)
            loss += alpha * F.mse_loss(net(old), logits)
            old, known, _ = memory.draw(32)
            loss += beta * F.cross_entropy(net(old), known)
        loss.backward()
        opt.step()
        memory.add(inputs, labels, outputs)
        return loss.detach()

    t.update = update


class FoldEnsemble(nn.Module):
    """One network and one scaler for each fold; all are called by one vmap."""

    def __init__(self, make, means, stds):
        super().__init__()
        nets = [make() for _ in range(len(means))]
        stacked, _ = stack_module_state(nets)
        self.names = list(stacked)
        self.stacked = nn.ParameterList([p.detach().clone() for p in stacked.values()])
        self.skeleton = [make().to("meta")]  # in a list: its parameters are not ours
        self.register_buffer("means", means)
        self.register_buffer("stds", stds)

    def forward(self, x):
        """(n, features) -> (folds, n, quantiles)."""

        def one(weights, mean, std):
            return functional_call(self.skeleton[0], weights, ((x - mean) / std,))

        return vmap(one)(dict(zip(self.names, self.stacked)), self.means, self.stds)


def vmapped_folds(t: Training) -> None:
    """Quantiles of delivery times by five networks, each blind to its own fold; out-of-fold pinball and coverage."""
    n, k, levels = 2048, 5, torch.tensor([0.1, 0.5, 0.9])
    km, rain = 1 + 14 * torch.rand(n), (torch.rand(n) < 0.3).float()
    hour, items = 8 + 14 * torch.rand(n), torch.randint(1, 9, (n,)).float()
    rush = torch.exp(-((hour - 18.5) ** 2) / 3)
    log_minutes = 2.2 + 0.55 * km.log() + 0.25 * rain + 0.4 * rush + 0.03 * items
    log_minutes = log_minutes + (0.1 + 0.2 * rush + 0.1 * rain) * torch.randn(n)
    traffic = rush + 0.5 * torch.randn(n)
    x = torch.stack([km, rain, hour, items, traffic], 1)
    y = (log_minutes - 3.3) / 0.5  # rounded figures from last year's report
    fold = torch.arange(n)[torch.randperm(n)] % k

    def make():
        return nn.Sequential(nn.Linear(5, 48), nn.GELU(), nn.Linear(48, 48), nn.GELU(), nn.Linear(48, 3))

    means = torch.stack([x[fold != f].mean(0) for f in range(k)])
    stds = torch.stack([x[fold != f].std(0) for f in range(k)])
    t.model = FoldEnsemble(make, means, stds)
    t.data, t.batch_size, t.epochs = TensorDataset(x, y, fold), 64, 6
    t.optimizers_of = lambda tr: [optim.Adam(tr.parameters(), lr=1e-3)]
    t.scheduler_of = lambda opt: OneCycleLR(opt, max_lr=8e-3, total_steps=6 * 32, pct_start=0.25)

    def pinball(prediction, target):
        error = target[..., None] - prediction
        return torch.maximum(levels * error, (levels - 1) * error).mean(-1)

    def loss(model, batch):
        xb, yb, fb = batch
        used = (torch.arange(k)[:, None] != fb).float()
        each = pinball(model(xb), yb.expand(k, -1))
        return ((each * used).sum(1) / used.sum(1)).sum()

    @torch.no_grad()
    def out_of_fold(tr, epoch):
        predicted = tr.model(x)[fold, torch.arange(n)]
        inside = (y > predicted[:, 0]) & (y < predicted[:, 2])
        t.oof.append((pinball(predicted, y).mean().item(), inside.float().mean().item()))

    t.oof, t.loss = [], loss
    t.each_epoch.append(out_of_fold)


def power_compressed(t: Training) -> None:
    """PowerSGD (Vogels et al., 2019): four workers exchange rank-2 gradients, each with an error memory of its own."""
    workers, rank = 4, 2
    t.batch_size, t.epochs = 64, 10
    t.optimizers_of = lambda training: [SGD(training.parameters(), lr=0.05, momentum=0.9, nesterov=True)]
    params = list(t.model.parameters())
    errors = [[torch.zeros_like(p) for p in params] for _ in range(workers)]
    Qs = [torch.randn(p.shape[1], rank) if p.ndim == 2 else None for p in params]

    def update(training, batch):
        (opt,) = training.optimizers
        shards = zip(batch[0].chunk(workers), batch[1].chunk(workers))
        deltas, losses = [], []
        for (x, y), error in zip(shards, errors):
            loss = F.cross_entropy(training.model(x), y)
            grads = torch.autograd.grad(loss, params)
            deltas.append([g + e for g, e in zip(grads, error)])
            losses.append(loss.detach())
        for k, p in enumerate(params):
            messages = torch.stack([delta[k] for delta in deltas])
            if Qs[k] is None:  # vectors go uncompressed
                p.grad = messages.mean(0)
                continue
            P = torch.linalg.qr((messages @ Qs[k]).mean(0)).Q
            Qs[k] = (messages.mT @ P).mean(0)
            p.grad = P @ Qs[k].T
            for w in range(workers):
                errors[w][k] = messages[w] - p.grad
        opt.step()
        return torch.stack(losses).mean()

    t.update = update


class GraphConvolution(nn.Module):
    def __init__(self, in_features, out_features):
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(torch.empty(in_features, out_features)),
            nn.Parameter(torch.zeros(out_features)),
        )
        nn.init.xavier_uniform_(self.weight)

    def forward(self, x, adj):
        return torch.spmm(adj, x @ self.weight) + self.bias


class GCN(nn.Module):
    def __init__(self, nfeat, nhid, nclass, dropout):
        super().__init__()
        self.gc1, self.gc2, self.dropout = GraphConvolution(nfeat, nhid), GraphConvolution(nhid, nclass), dropout

    def forward(self, x, adj):
        x = F.dropout(x, self.dropout, training=self.training)
        x = F.relu(self.gc1(x, adj))
        x = F.dropout(x, self.dropout, training=self.training)
        return F.log_softmax(self.gc2(x, adj), dim=1)


def gcn_citations(t: Training) -> None:
    """Semi-supervised classification with graph convolutions (Kipf & Welling, 2017): the whole graph in each step."""
    nodes, classes, words = 400, 4, 60
    labels = torch.arange(nodes) % classes
    same = labels[:, None] == labels
    upper = (torch.rand(nodes, nodes) < torch.where(same, 0.04, 0.005)).float().triu(1)
    adjacency = upper + upper.T + torch.eye(nodes)
    scale = adjacency.sum(1).rsqrt()
    adj = (scale[:, None] * adjacency * scale).to_sparse()
    usage = 0.04 + 0.12 * (torch.rand(classes, words) < 0.2)
    features = (torch.rand(nodes, words) < usage[labels]).float()
    features /= features.sum(1, keepdim=True).clamp(min=1)
    idx_train, idx_val = torch.arange(80), torch.arange(80, 240)

    t.model, t.data = GCN(words, 16, classes, 0.5), TensorDataset(features, labels)
    t.optimizers_of = lambda tr: [
        optim.Adam(
            [{"params": tr.model.gc1.parameters(), "weight_decay": 5e-4}, {"params": tr.model.gc2.parameters()}],
            lr=0.02,
        )
    ]
    t.val_acc = []

    def loop(tr):
        (optimizer,) = tr.optimizers
        for _epoch in range(200):
            tr.model.train()
            optimizer.zero_grad()
            output = tr.model(features, adj)
            loss_train = F.nll_loss(output[idx_train], labels[idx_train])
            loss_train.backward()
            optimizer.step()
            tr.model.eval()
            with torch.no_grad():
                output = tr.model(features, adj)
                tr.val_acc.append((output[idx_val].argmax(1) == labels[idx_val]).float().mean().item())
            yield loss_train.detach()

    t.loop, t.loaded = loop, False
