"""Legal techniques with rows of tables: embedded columns, rare labels, early stopping, a second task."""

from __future__ import annotations

import copy
import itertools

import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from zoo.programs.training import Training


def emb_size(cardinality: int) -> int:
    return min(600, round(1.6 * cardinality**0.56))


class TabularModel(nn.Module):
    def __init__(self, cardinalities, n_cont, layers=(64, 32), emb_p=0.04, p=0.1):
        super().__init__()
        self.embeds = nn.ModuleList([nn.Embedding(c, emb_size(c)) for c in cardinalities])
        for e in self.embeds:
            nn.init.trunc_normal_(e.weight, std=0.05, a=-0.1, b=0.1)
        self.emb_drop, self.bn_cont = nn.Dropout(emb_p), nn.BatchNorm1d(n_cont)
        sizes = [sum(e.embedding_dim for e in self.embeds) + n_cont, *layers]
        blocks = []
        for n_in, n_out in itertools.pairwise(sizes):
            blocks += [nn.Linear(n_in, n_out, bias=False), nn.BatchNorm1d(n_out), nn.ReLU(inplace=True), nn.Dropout(p)]
        self.layers = nn.Sequential(*blocks, nn.Linear(sizes[-1], 1))

    def forward(self, x_cat, x_cont):
        x = torch.cat([e(x_cat[:, i]) for i, e in enumerate(self.embeds)], 1)
        return self.layers(torch.cat([self.emb_drop(x), self.bn_cont(x_cont)], 1)).squeeze(1)


def entity_columns(t: Training) -> None:
    """Entity embeddings of categorical variables (Guo & Berkhahn, 2016), one-cycle, log of the sales as target."""
    cards, n = [50, 7, 12, 3], 2560
    cats = torch.stack([torch.randint(c, (n,)) for c in cards], 1)
    distance, temperature = torch.randn(n).mul(1.2).exp(), 12 + 8 * torch.randn(n)
    store, day, month = torch.randn(50) * 0.5, torch.randn(7) * 0.3, torch.randn(12) * 0.2
    log_sales = 8 + store[cats[:, 0]] + day[cats[:, 1]] * (1 + 0.5 * (cats[:, 3] == 1)) + month[cats[:, 2]]
    log_sales = log_sales - 0.15 * distance.log() + 0.01 * temperature + 0.1 * torch.randn(n)

    conts = torch.stack([distance.log(), temperature], 1)
    train, valid = slice(0, 2048), slice(2048, None)
    conts = (conts - conts[train].mean(0)) / conts[train].std(0)
    mean, std = log_sales[train].mean(), log_sales[train].std()
    y = (log_sales - mean) / std

    t.model = TabularModel(cards, conts.shape[1])
    t.data, t.batch_size, t.epochs = TensorDataset(cats[train], conts[train], y[train]), 64, 6
    t.loss = lambda model, batch: F.mse_loss(model(batch[0], batch[1]), batch[2])
    t.optimizers_of = lambda tr: [optim.AdamW(tr.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.01)]
    t.scheduler_of = lambda opt: optim.lr_scheduler.OneCycleLR(opt, max_lr=1e-2, total_steps=6 * 32, div_factor=25)
    t.rmspe = []

    @torch.no_grad()
    def exp_rmspe(tr, epoch):
        tr.model.eval()
        sales, pred = log_sales[valid].exp(), (tr.model(cats[valid], conts[valid]) * std + mean).exp()
        tr.rmspe.append(((sales - pred) / sales).pow(2).mean().sqrt().item())
        tr.model.train()

    t.each_epoch.append(exp_rmspe)


def auroc(scores, labels):
    """Mean over the columns of the chance that a positive is ranked above a negative."""
    areas = []
    for s, y in zip(scores.T, labels.T.bool()):
        areas.append((s[y][:, None] > s[~y][None]).float().mean())
    return torch.stack(areas).mean().item()


def weighted_labels(t: Training) -> None:
    """Several labels a row, with ``pos_weight`` of negatives over positives; areas under the curve on held-out rows."""
    n, features, labels = 1536, 24, 8
    x = torch.randn(n, features)
    score = torch.tanh(x @ torch.randn(features, 16) / features**0.5) @ torch.randn(16, labels)
    score = score + 0.5 * torch.randn(n, labels)
    prevalence = torch.linspace(0.04, 0.35, labels)
    y = (score > torch.stack([s.quantile(1 - p) for s, p in zip(score.T, prevalence)])).float()
    cut = 1280
    positives = y[:cut].sum(0)
    criterion = nn.BCEWithLogitsLoss(pos_weight=(cut - positives) / positives)

    t.model = nn.Sequential(
        nn.Linear(features, 96), nn.BatchNorm1d(96), nn.ReLU(), nn.Dropout(0.2),
        nn.Linear(96, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Dropout(0.2), nn.Linear(48, labels),
    )  # fmt: skip
    t.data, t.batch_size, t.epochs = TensorDataset(x[:cut], y[:cut]), 64, 10
    t.loss = lambda model, batch: criterion(model(batch[0]), batch[1])
    t.optimizers_of = lambda tr: [optim.AdamW(tr.parameters(), lr=4e-3, weight_decay=1e-2)]
    t.scheduler_of = lambda opt: optim.lr_scheduler.MultiStepLR(opt, milestones=[120, 170], gamma=0.3)
    t.history = []

    def validate(tr, epoch):
        tr.model.eval()
        with torch.inference_mode():
            tr.history.append({"epoch": epoch, "auc": auroc(tr.model(x[cut:]), y[cut:])})
        tr.model.train()

    t.each_epoch.append(validate)


def churn_notebook(t: Training) -> None:
    """Telco churn in one long cell: stratified split, scaler of the training rows, pos_weight, early stopping."""
    # ---- load the data
    n = 3000
    tenure = torch.randint(1, 73, (n,)).float()
    charges = 20 + 100 * torch.rand(n)
    calls = torch.poisson(torch.full((n,), 1.5))
    contract = torch.multinomial(torch.tensor([0.55, 0.25, 0.20]), n, replacement=True)
    logits = -2.5 - 0.06 * (tenure - 36) + 0.04 * (charges - 70) + 0.6 * (calls - 1.5)
    logits = logits + torch.tensor([1.0, -0.8, -2.0])[contract]
    churn = torch.bernoulli(torch.sigmoid(logits))

    # ---- stratified 80/20 split
    train_idx, val_idx = [], []
    for label in (0.0, 1.0):
        idx = torch.where(churn == label)[0]
        idx = idx[torch.randperm(len(idx))]
        cut = int(0.8 * len(idx))
        train_idx.append(idx[:cut])
        val_idx.append(idx[cut:])
    train_idx, val_idx = torch.cat(train_idx), torch.cat(val_idx)

    # ---- StandardScaler, fitted on the training rows only; one-hot for the contract
    numeric = torch.stack([tenure, charges, calls], dim=1)
    mu, sigma = numeric[train_idx].mean(dim=0), numeric[train_idx].std(dim=0)
    features = torch.cat([(numeric - mu) / sigma, F.one_hot(contract, 3).float()], dim=1)
    X_train, y_train = features[train_idx], churn[train_idx]
    X_val, y_val = features[val_idx], churn[val_idx]
    pos_weight = (y_train == 0).sum() / (y_train == 1).sum()

    t.model = nn.Sequential(
        nn.Linear(6, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1)
    )
    t.data, t.batch_size, t.epochs, t.lr = TensorDataset(X_train, y_train), 128, 12, 2e-3
    criterion = nn.BCEWithLogitsLoss(pos_weight=pos_weight)
    history = {"train_loss": [], "train_acc": [], "val_loss": [], "val_acc": [], "val_f1": []}
    t.history, t.log = history, []

    def train(training):
        model, optimizer = training.model, training.optimizers[0]
        best_val_loss, best_weights, patience, wait, step = float("inf"), None, 3, 0, 0
        for epoch in range(training.epochs):
            model.train()
            running_loss, correct, total = 0.0, 0, 0
            for inputs, labels in training.batches:
                optimizer.zero_grad()
                outputs = model(inputs).squeeze(1)
                loss = criterion(outputs, labels)
                loss.backward()
                optimizer.step()
                running_loss += loss.item() * inputs.size(0)
                correct += ((outputs > 0).float() == labels).sum().item()
                total += labels.size(0)
                step += 1
                if step % 10 == 0:
                    t.log.append(f"epoch {epoch + 1} step {step} loss {running_loss / total:.4f}")
                yield loss.item()

            model.eval()
            with torch.no_grad():
                val_outputs = model(X_val).squeeze(1)
                val_loss = criterion(val_outputs, y_val).item()
            val_pred = (val_outputs > 0).float()
            tp = (val_pred * y_val).sum().item()
            fp = (val_pred * (1 - y_val)).sum().item()
            fn = ((1 - val_pred) * y_val).sum().item()
            history["train_loss"].append(running_loss / total)
            history["train_acc"].append(correct / total)
            history["val_loss"].append(val_loss)
            history["val_acc"].append((val_pred == y_val).float().mean().item())
            history["val_f1"].append(2 * tp / max(2 * tp + fp + fn, 1))
            if val_loss < best_val_loss:
                best_val_loss, best_weights, wait = val_loss, copy.deepcopy(model.state_dict()), 0
            else:
                wait += 1
                if wait >= patience:
                    t.log.append(f"early stopping after epoch {epoch + 1}")
                    break
        model.load_state_dict(best_weights)

    t.loop = train


class HouseNet(nn.Module):
    def __init__(self, n_numeric, n_districts, width=48):
        super().__init__()
        self.district = nn.Embedding(n_districts, 4)
        self.trunk = nn.Sequential(
            nn.Linear(n_numeric + 4, width), nn.LayerNorm(width), nn.SiLU(), nn.Dropout(0.1),
            nn.Linear(width, width), nn.LayerNorm(width), nn.SiLU(),
        )  # fmt: skip
        self.price, self.quick = nn.Linear(width, 1), nn.Linear(width, 1)

    def forward(self, numeric, district):
        h = self.trunk(torch.cat([numeric, self.district(district)], dim=1))
        return self.price(h).squeeze(1), self.quick(h).squeeze(1)


def house_loss(model, batch):
    """Huber on the standardised log price, and BCE where it is known whether the house sold within a month."""
    numeric, district, price, quick = batch
    p, q = model(numeric, district)
    known = ~quick.isnan()
    second = F.binary_cross_entropy_with_logits(q[known], quick[known]) if known.any() else q.sum() * 0
    return F.smooth_l1_loss(p, price) + 0.5 * second


class EMATrainer:
    """Trains, follows the weights with an average, and keeps the average that does best."""

    def __init__(self, model, valid, decay=0.97):
        self.average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=True)
        self.valid, self.history, self.best = valid, [], (float("inf"), None)

    def validate(self, model):
        model.eval()
        with torch.no_grad():
            return house_loss(model, self.valid).item()

    def __call__(self, training):
        model, (optimizer,) = training.model, training.optimizers
        for epoch in range(training.epochs):
            model.train()
            for batch in training.batches:
                optimizer.zero_grad(set_to_none=True)
                loss = training.loss(model, batch)
                loss.backward()
                optimizer.step()
                self.average.update_parameters(model)
                yield loss.detach()
            row = {"epoch": epoch, "raw": self.validate(model), "ema": self.validate(self.average)}
            self.history.append(row)
            if row["ema"] < self.best[0]:
                self.best = row["ema"], copy.deepcopy(self.average.module.state_dict())
        model.load_state_dict(self.best[1])


def house_multitask(t: Training) -> None:
    """Log prices and a second task with missing labels; the rate is searched in four short runs; EMA for the rest."""
    n, n_train = 2560, 2048
    area, age, rooms = 30 + 120 * torch.rand(n), 80 * torch.rand(n), torch.randint(1, 7, (n,)).float()
    district, garden = torch.randint(12, (n,)), (torch.rand(n) < 0.4).float()
    level = 0.35 * torch.randn(12)
    worth = 8.5 + 0.85 * area.log() - 0.004 * age + 0.05 * rooms + 0.12 * garden * (level[district] > 0)
    worth = worth + level[district]
    price = (worth + 0.12 * torch.randn(n)).exp()
    quick = torch.bernoulli(torch.sigmoid(4 * level[district] + 0.06 * (40 - age) + garden))
    quick[torch.rand(n) < 0.3] = float("nan")

    numeric = torch.stack([area.log(), age, rooms, garden], dim=1)
    numeric = (numeric - numeric[:n_train].mean(0)) / numeric[:n_train].std(0)
    target = torch.log1p(price)
    target = (target - target[:n_train].mean()) / target[:n_train].std()
    columns = numeric, district, target, quick
    train, valid = TensorDataset(*(c[:n_train] for c in columns)), tuple(c[n_train:] for c in columns)

    def short_run(lr):
        model = HouseNet(4, 12)
        optimizer = optim.AdamW(model.parameters(), lr=lr, weight_decay=1e-2)
        for _ in range(2):
            for batch in DataLoader(train, batch_size=64, shuffle=True):
                optimizer.zero_grad()
                house_loss(model, batch).backward()
                optimizer.step()
        model.eval()
        with torch.no_grad():
            return house_loss(model, valid).item()

    t.search = {lr: short_run(lr) for lr in (1e-3, 3e-3, 1e-2, 3e-2)}
    t.lr = min(t.search, key=t.search.get)
    t.model, t.data, t.batch_size, t.epochs, t.loss = HouseNet(4, 12), train, 64, 6, house_loss
    t.optimizers_of = lambda tr: [optim.AdamW(tr.parameters(), lr=tr.lr, weight_decay=1e-2)]
    t.loop = t.trainer = EMATrainer(t.model, valid)
