"""Programs as people write them every day: a first notebook, imitation, an agent, graphs, ratings."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import nn, optim
from torch.distributions import Categorical
from torch.nn import functional as F
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset

from zoo.programs.everyday_pictures import PICTURES
from zoo.programs.everyday_series import SERIES
from zoo.programs.everyday_texts import TEXTS
from zoo.programs.training import Training


def titanic_full_batch(t: Training) -> None:
    """The first notebook of many: 891 passengers, ages filled in, a sigmoid and BCELoss, all rows in each step."""
    n = 891
    pclass = torch.multinomial(torch.tensor([0.24, 0.21, 0.55]), n, replacement=True)
    female = (torch.rand(n) < 0.35).float()
    age = (30 + 14 * torch.randn(n)).clamp(1, 80)
    family = torch.poisson(torch.full((n,), 0.9))
    fare = torch.tensor([84.0, 20.0, 13.0])[pclass] * torch.randn(n).mul(0.4).exp()
    port = torch.multinomial(torch.tensor([0.72, 0.19, 0.09]), n, replacement=True)
    logit = -1.2 + 2.7 * female + torch.tensor([1.3, 0.3, -0.7])[pclass] - 0.03 * (age - 30) - 0.25 * family
    survived = torch.bernoulli(torch.sigmoid(logit))
    age[torch.rand(n) < 0.2] = float("nan")

    order = torch.randperm(n)
    train, test = order[:712], order[712:]
    age = torch.where(age.isnan(), age[train].nanmedian(), age)
    numeric = torch.stack([age, family, fare.log1p()], 1)
    numeric = (numeric - numeric[train].mean(0)) / numeric[train].std(0)
    X = torch.cat([numeric, female[:, None], F.one_hot(pclass, 3), F.one_hot(port, 3)], 1)
    y = survived[:, None]
    X_train, y_train, X_test, y_test = X[train], y[train], X[test], y[test]

    t.model = nn.Sequential(
        nn.Linear(X.shape[1], 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 1), nn.Sigmoid()
    )
    t.loaded, t.lr, t.epochs = False, 0.01, 100
    criterion = nn.BCELoss()
    t.printed = []

    def fit(tr):
        model, optimizer = tr.model, tr.optimizers[0]
        for epoch in range(tr.epochs):
            y_pred = model(X_train)
            loss = criterion(y_pred, y_train)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if epoch % 10 == 0:
                train_acc = (y_pred.round() == y_train).float().mean().item()
                with torch.no_grad():
                    test_acc = (model(X_test).round() == y_test).float().mean().item()
                t.printed.append(f"epoch {epoch}: loss {loss.item():.4f} train {train_acc:.3f} test {test_acc:.3f}")
            yield loss.item()

    t.loop = fit


class Lane:
    """Cars on a winding road: the offset from the middle, the heading, and the bend ahead."""

    def __init__(self, cars):
        self.offset, self.heading = 0.3 * torch.randn(cars), 0.1 * torch.randn(cars)
        self.phase, self.time = 6.28 * torch.rand(cars), 0

    def bend(self, ahead):
        return 0.25 * torch.sin(self.phase + 0.15 * (self.time + ahead))

    def observe(self):
        return torch.stack([self.offset, self.heading, self.bend(0), self.bend(3), self.bend(6)], 1)

    def expert(self):
        return (-0.8 * self.offset - 1.5 * self.heading + 2.0 * self.bend(0)).clamp(-1, 1)

    def step(self, steering):
        self.heading = self.heading + 0.2 * (steering + 0.05 * torch.randn_like(steering)) - 0.4 * self.bend(0)
        self.offset = self.offset + 0.5 * self.heading
        self.time += 1


def drive(policy, cars=12, steps=30, expert_share=0.0):
    """What was seen, what the expert would have done, and the mean distance from the middle."""
    lane, seen, advice, off = Lane(cars), [], [], []
    for _ in range(steps):
        obs, right = lane.observe(), lane.expert()
        seen.append(obs)
        advice.append(right)
        off.append(lane.offset.abs().mean())
        action = policy(obs).squeeze(1)
        lane.step(torch.where(torch.rand(cars) < expert_share, right, action))
    return torch.cat(seen), torch.cat(advice), torch.stack(off).mean().item()


def dagger_lane(t: Training) -> None:
    """Imitation by DAgger (Ross et al., 2011): the policy drives, the expert says what it should have done."""
    t.model = nn.Sequential(nn.Linear(5, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 1), nn.Tanh())
    t.optimizers_of = lambda tr: [optim.Adam(tr.model.parameters(), lr=2e-3)]
    t.loaded = False
    t.distance = []

    def rounds(tr):
        (optimizer,) = tr.optimizers
        collected = []
        for i in range(5):
            tr.model.eval()
            with torch.no_grad():
                obs, advice, _ = drive(tr.model, expert_share=0.5**i)
            collected.append(TensorDataset(obs, advice.unsqueeze(1)))
            loader = DataLoader(ConcatDataset(collected), batch_size=32, shuffle=True)

            tr.model.train()
            for _epoch in range(4):
                for obs, advice in loader:
                    loss = F.smooth_l1_loss(tr.model(obs), advice, beta=0.2)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    yield loss.item()

            tr.model.eval()
            with torch.no_grad():
                t.distance.append(drive(tr.model)[2])

    t.loop = rounds


class CartPoles:
    """Many poles at once, as in Barto, Sutton & Anderson (1983); one that has fallen stays where it is."""

    def __init__(self, n):
        self.state, self.alive = 0.1 * torch.rand(n, 4) - 0.05, torch.ones(n, dtype=torch.bool)

    def step(self, action):
        x, v, theta, omega = self.state.unbind(1)
        force, sin, cos = torch.where(action == 1, 10.0, -10.0), theta.sin(), theta.cos()
        push = (force + 0.05 * omega**2 * sin) / 1.1
        turn = (9.8 * sin - cos * push) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
        slide = push - 0.05 * turn * cos / 1.1
        moved = torch.stack([x + 0.02 * v, v + 0.02 * slide, theta + 0.02 * omega, omega + 0.02 * turn], 1)
        self.state = torch.where(self.alive[:, None], moved, self.state)
        self.alive = self.alive & (self.state[:, 0].abs() < 2.4) & (self.state[:, 2].abs() < 0.2095)


def cartpole_reinforce(t: Training) -> None:
    """REINFORCE (Williams, 1992) on cart-poles: discounted returns to go, normalised, and a little entropy."""
    t.model = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 2))
    t.optimizers_of = lambda tr: [optim.Adam(tr.model.parameters(), lr=1e-2)]
    t.loaded, gamma, t.running_reward, t.lengths = False, 0.98, 10.0, []

    @torch.no_grad()
    def rollout(policy):
        env, states, actions, masks = CartPoles(12), [], [], []
        for _ in range(120):
            action = Categorical(logits=policy(env.state)).sample()
            states.append(env.state)
            actions.append(action)
            masks.append(env.alive.float())
            env.step(action)
            if not env.alive.any():
                break
        return torch.stack(states), torch.stack(actions), torch.stack(masks)

    def learn(tr):
        for _episode in range(50):
            states, actions, masks = rollout(tr.model)
            R, returns = torch.zeros(12), []
            for r in masks.flip(0):
                R = r + gamma * R
                returns.insert(0, R)
            alive = masks.bool()
            returns = torch.stack(returns)[alive]
            returns = (returns - returns.mean()) / (returns.std() + 1e-8)
            policy = Categorical(logits=tr.model(states[alive]))
            loss = -(policy.log_prob(actions[alive]) * returns).mean() - 0.005 * policy.entropy().mean()
            tr.optimizers[0].zero_grad()
            loss.backward()
            tr.optimizers[0].step()
            length = masks.sum(0).mean().item()
            t.lengths.append(length)
            t.running_reward = 0.1 * length + 0.9 * t.running_reward
            yield loss.item()

    t.loop = learn


class GINLayer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.eps = nn.Parameter(torch.zeros(1))
        self.bond = nn.Linear(dim, dim, bias=False)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.LayerNorm(2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim))

    def forward(self, h, adj, mask):
        return h + self.mlp((1 + self.eps) * h + adj @ self.bond(h)) * mask


class MoleculeNet(nn.Module):
    def __init__(self, atom_types=4, dim=32, layers=3):
        super().__init__()
        self.atom_emb = nn.Embedding(atom_types + 1, dim, padding_idx=0)
        self.layers = nn.ModuleList([GINLayer(dim) for _ in range(layers)])
        self.readout = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, 1))

    def forward(self, atoms, adj):
        mask = (atoms > 0).unsqueeze(2).float()
        h = self.atom_emb(atoms)
        for layer in self.layers:
            h = layer(h, adj, mask)
        return self.readout((h * mask).sum(1)).squeeze(1)


def draw_molecules(n, size=9):
    """Trees of 4 to 9 atoms with single and double bonds, and a "solubility" of atoms, bonds and neighbours."""
    count = torch.randint(4, size + 1, (n,))
    exists = torch.arange(size) < count[:, None]
    atoms = torch.where(
        exists, torch.multinomial(torch.tensor([0.6, 0.15, 0.15, 0.1]), n * size, True).view(n, size) + 1, 0
    )
    adj = torch.zeros(n, size, size)
    for i in range(1, size):
        parent, order = (torch.rand(n) * i).long(), 1 + (torch.rand(n) < 0.2).float()
        adj[torch.arange(n), i, parent] = order * exists[:, i]
    adj = adj + adj.transpose(1, 2)
    polar = ((atoms == 2) | (atoms == 3)).float()
    value = torch.tensor([0.0, 0.35, -0.7, -0.9, 0.6])[atoms].sum(1)
    value = value - 0.5 * (polar[:, None] @ adj @ polar[:, :, None]).flatten() + 0.2 * (adj.sum(2) >= 3).sum(1)
    return atoms, adj, value + 0.1 * torch.randn(n)


def molecule_graphs(t: Training) -> None:
    """A property of small molecules by a graph isomorphism network (Xu et al., 2019) over padded dense adjacency."""
    atoms, adj, y = draw_molecules(1280)
    mean, std = y[:1024].mean(), y[:1024].std()
    val_atoms, val_adj, val_y = atoms[1024:], adj[1024:], y[1024:]
    t.model = MoleculeNet()
    t.data = TensorDataset(atoms[:1024], adj[:1024], (y[:1024] - mean) / std)
    t.epochs, t.history, t.best = 8, [], {"mae": float("inf"), "state": None}
    t.optimizers_of = lambda tr: [optim.AdamW(tr.model.parameters(), lr=2e-3, weight_decay=1e-4)]
    t.scheduler_of = lambda opt: optim.lr_scheduler.ExponentialLR(opt, gamma=0.85)

    def train_epoch(tr):
        tr.model.train()
        for a, e, target in tr.batches:
            tr.optimizers[0].zero_grad()
            loss = F.l1_loss(tr.model(a, e), target)
            loss.backward()
            tr.optimizers[0].step()
            yield loss.item()

    @torch.no_grad()
    def test_epoch(tr):
        tr.model.eval()
        pred = tr.model(val_atoms, val_adj) * std + mean
        r2 = 1 - (pred - val_y).pow(2).sum() / (val_y - val_y.mean()).pow(2).sum()
        return (pred - val_y).abs().mean().item(), r2.item()

    def main(tr):
        for _ in range(tr.epochs):
            losses = []
            for loss in train_epoch(tr):
                losses.append(loss)
                yield loss
            tr.scheduler.step()
            mae, r2 = test_epoch(tr)
            t.history.append({"train": sum(losses) / len(losses), "mae": mae, "r2": r2})
            if mae < t.best["mae"]:
                t.best = {"mae": mae, "state": copy.deepcopy(tr.model.state_dict())}
        tr.model.load_state_dict(t.best["state"])

    t.loop = main


class AutoRec(nn.Module):
    def __init__(self, items, hidden=32, p=0.1):
        super().__init__()
        self.drop = nn.Dropout(p)
        self.encoder, self.decoder = nn.Linear(items, hidden), nn.Linear(hidden, items)

    def forward(self, r):
        return self.decoder(torch.sigmoid(self.encoder(self.drop(r))))


def autorec_ratings(t: Training) -> None:
    """Stars of users by AutoRec (Sedhain et al., 2015): only seen ratings are in the loss; RMSE of held-out ones."""
    users, items = 512, 80
    taste, film = torch.randn(users, 3), torch.randn(items, 3)
    stars = 3.4 + 0.5 * torch.randn(users, 1) + 0.5 * torch.randn(items) + 0.5 * taste @ film.T
    stars = (stars + 0.3 * torch.randn(users, items)).round().clamp(1, 5)
    draw = torch.rand(users, items)
    seen, held_out = (draw < 0.3).float(), ((draw >= 0.3) & (draw < 0.36)).float()
    mu = (stars * seen).sum() / seen.sum()
    ratings = (stars - mu) * seen

    t.model, t.data = AutoRec(items), TensorDataset(ratings, seen)
    t.epochs, t.rmse = 16, []
    t.optimizers_of = lambda tr: [optim.Adam(tr.parameters(), lr=5e-3, weight_decay=1e-4)]
    t.loss = lambda model, batch: ((model(batch[0]) - batch[0]).pow(2) * batch[1]).sum() / batch[1].sum()

    def test(tr, epoch):
        tr.model.eval()
        with torch.no_grad():
            predicted = (tr.model(ratings) + mu).clamp(1, 5)
            t.rmse.append((((predicted - stars).pow(2) * held_out).sum() / held_out.sum()).sqrt().item())
        tr.model.train()

    t.each_epoch.append(test)


EVERYDAY: dict[Callable[[Training], None], str] = {
    titanic_full_batch: "table",
    dagger_lane: "regress",
    cartpole_reinforce: "table",
    molecule_graphs: "regress",
    autorec_ratings: "rebuild",
    **SERIES,
    **PICTURES,
    **TEXTS,
}
"""Each program and the task that it takes the place of."""
