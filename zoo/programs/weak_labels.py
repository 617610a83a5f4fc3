"""Legal techniques with labels that are partial, noisy, counted by bags, logged or asked for."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import TensorDataset

from zoo.host import table
from zoo.programs.training import Training


def candidate_labels(t: Training) -> None:
    """PRODEN (Lv et al., 2020): of a set of candidates one is true; the confidences are refined as the model learns."""
    x, y = t.data.tensors
    n, k = len(y), 10
    candidates = (torch.rand(n, k) < 0.3).float()
    candidates[torch.arange(n), y] = 1.0
    confidence = candidates / candidates.sum(1, keepdim=True)

    t.data = TensorDataset(x, candidates, torch.arange(n))
    t.batch_size, t.epochs = 64, 14
    t.optimizers_of = lambda training: [SGD(training.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)]

    def update(training, batch):
        features, partial, index = batch
        opt = training.optimizers[0]
        outputs = training.model(features)
        loss = -(confidence[index] * F.log_softmax(outputs, dim=1)).sum(dim=1).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        # the labels that the model believes in, among the candidates
        with torch.no_grad():
            revised = F.softmax(outputs, dim=1) * partial
            confidence[index] = revised / revised.sum(dim=1, keepdim=True).clamp_min(1e-12)
        return loss.detach()

    t.update = update


class BagDataset:
    """Bags whose mixture of classes varies."""

    def __init__(self, images: Tensor, labels: Tensor, bags: int, size: int, classes: int):
        by_class = [np.flatnonzero(labels.numpy() == c) for c in range(classes)]
        rng = np.random.default_rng(int(torch.randint(2**31, ())))
        members, counts = [], []
        for _ in range(bags):
            count = rng.multinomial(size, rng.dirichlet(np.full(classes, 0.7)))
            members.append(np.concatenate([rng.choice(rows, c) for rows, c in zip(by_class, count)]))
            counts.append(count)
        self.members = torch.from_numpy(np.stack(members))
        self.counts = torch.from_numpy(np.stack(counts))
        self.images = images

    def tensors(self) -> TensorDataset:
        return TensorDataset(self.images[self.members], self.counts)


def bag_proportions(t: Training) -> None:
    """Label proportions (Ardehaly & Culotta, 2017): only the counts of the classes in a bag of pictures are known."""
    x, y = t.data.tensors
    t.data = BagDataset(x, y, bags=256, size=16, classes=4).tensors()
    t.batch_size, t.epochs, t.lr = 8, 6, 1e-2

    def proportion_loss(model, batch):
        bags, counts = batch
        logits = model(bags.flatten(0, 1)).unflatten(0, bags.shape[:2])
        # log of the mean probability within each bag
        log_mean = torch.logsumexp(logits.log_softmax(-1), dim=1) - math.log(bags.shape[1])
        wanted = counts.float() / counts.sum(1, keepdim=True)
        return F.kl_div(log_mean, wanted, reduction="batchmean")

    t.loss = proportion_loss


class ELRLoss(nn.Module):
    def __init__(self, num_examples, num_classes, beta=0.9, lam=2.0):
        super().__init__()
        self.register_buffer("target", torch.zeros(num_examples, num_classes))
        self.beta = beta
        self.lam = lam

    def forward(self, index, output, label):
        y_pred = torch.clamp(F.softmax(output, dim=1), 1e-4, 1.0 - 1e-4)
        y_pred_ = y_pred.detach()
        self.target[index] = self.beta * self.target[index] + (1 - self.beta) * (
            y_pred_ / y_pred_.sum(dim=1, keepdim=True)
        )
        ce_loss = F.cross_entropy(output, label)
        elr_reg = (1 - (self.target[index] * y_pred).sum(dim=1)).log().mean()
        return ce_loss + self.lam * elr_reg


def early_learning(t: Training) -> None:
    """Noisy labels: early-learning regularisation (Liu et al., 2020)."""
    images, clean = t.data.tensors
    flip = torch.rand(len(clean)) < 0.4
    noisy = torch.where(flip, torch.randint_like(clean, 4), clean)
    t.data = TensorDataset(images, noisy, torch.arange(len(noisy)))
    t.batch_size, t.epochs = 64, 20
    criterion = ELRLoss(len(noisy), 4)
    t.optimizers_of = lambda training: [SGD(training.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)]
    t.scheduler_of = lambda optimizer: CosineAnnealingLR(optimizer, T_max=200)

    def loss(model, batch):
        x, y, index = batch
        return criterion(index, model(x), y)

    t.loss = loss


def meta_pseudo_labels(t: Training) -> None:
    """Meta pseudo labels (Pham et al., 2021), without the second-order pass."""
    y = torch.randint(10, (1128,))
    x = (torch.randn(10, 20)[y] + torch.randn(1128, 20)) / math.sqrt(2)  # ten overlapping clusters
    x_l, y_l = x[:104], y[:104]
    t.data, t.batch_size, t.epochs = TensorDataset(x[104:]), 64, 15

    def make():
        return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 10))

    student, teacher = make(), make()
    t.model = student
    t.extra.append(teacher)
    t.optimizers_of = lambda training: [
        SGD(student.parameters(), lr=0.1, momentum=0.9, nesterov=True),
        SGD(teacher.parameters(), lr=0.05, momentum=0.9, nesterov=True),
    ]
    baseline = 0.0

    def augment(v):
        return v + 0.2 * torch.randn_like(v)

    def update(training, batch):
        nonlocal baseline
        s_optimizer, t_optimizer = training.optimizers
        (x_u,) = batch
        rows = torch.randint(len(x_l), (64,))
        images_l, targets = x_l[rows], y_l[rows]
        images_us = augment(x_u)

        # the teacher labels
        t_logits_l = teacher(images_l)
        t_logits_uw, t_logits_us = teacher(x_u), teacher(images_us)
        hard_pseudo = torch.distributions.Categorical(logits=t_logits_us.detach()).sample()
        soft_pseudo = t_logits_uw.detach().softmax(-1)
        t_loss_u = -(soft_pseudo * t_logits_us.log_softmax(-1)).sum(-1).mean()
        weight_u = min(1.0, (training.steps + 1) / 100)
        t_loss_uda = F.cross_entropy(t_logits_l, targets) + weight_u * t_loss_u

        # the student follows
        with torch.no_grad():
            s_loss_old = F.cross_entropy(student(images_l), targets)
        s_loss = F.cross_entropy(student(images_us), hard_pseudo)
        s_optimizer.zero_grad()
        s_loss.backward()
        s_optimizer.step()

        # and the teacher hears how much that helped
        with torch.no_grad():
            s_loss_new = F.cross_entropy(student(images_l), targets)
        gain = float(s_loss_old - s_loss_new)
        baseline = 0.99 * baseline + 0.01 * gain
        t_loss_mpl = (gain - baseline) * F.cross_entropy(t_logits_us, hard_pseudo)
        t_optimizer.zero_grad()
        (t_loss_uda + t_loss_mpl).backward()
        t_optimizer.step()
        return s_loss_new

    @torch.no_grad()
    def evaluate(training, epoch):
        t.history.append((student(x[104:]).argmax(1) == y[104:]).float().mean().item())

    t.history = []
    t.update = update
    t.each_epoch.append(evaluate)


def bandit_logs(t: Training) -> None:
    """BanditNet (Joachims et al., 2018): what the old policy did, how probable that was, whether it was wrong."""
    x, y = t.data.tensors
    x_log, y_log = x.repeat(3, 1), y.repeat(3)
    old_scores = x_log @ torch.randn(20, 10) * 0.3
    old_policy = 0.7 * old_scores.softmax(1) + 0.3 / 10
    action = torch.multinomial(old_policy, 1).squeeze(1)
    propensity = old_policy.gather(1, action[:, None]).squeeze(1)
    delta = (action != y_log).float()
    t.data = TensorDataset(x_log, action, propensity, delta)
    t.batch_size, t.epochs = 128, 10

    translation = 0.9  # the Lagrange multiplier of the self-normalising constraint

    def ips_loss(model, batch):
        context, a, p0, loss_seen = batch
        pi = model(context).softmax(dim=1).gather(1, a.unsqueeze(1)).squeeze(1)
        return ((loss_seen - translation) * pi / p0).mean()

    t.loss = ips_loss


def simulate_clicks(n: int, w: Tensor, docs: int = 8):
    x = torch.randn(n, docs, len(w))
    score = x @ w + 0.5 * x[..., 0] * x[..., 1]
    relevance = 0.05 + 0.95 * torch.sigmoid(3 * (score - 1))
    # the ranker in production looks at three features
    shown = (x[..., :3] @ w[:3] + torch.randn(n, docs)).argsort(dim=1, descending=True)
    x = x.gather(1, shown[..., None].expand_as(x))
    relevance = relevance.gather(1, shown)
    seen = torch.rand(n, docs) < 1.0 / torch.arange(1, docs + 1)
    clicks = (seen & (torch.rand(n, docs) < relevance)).float()
    kept = clicks.sum(1) > 0
    return x[kept], clicks[kept], relevance[kept]


class Ranker(nn.Module):
    def __init__(self, dim=10):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(dim, 32), nn.ELU(), nn.Linear(32, 16), nn.ELU(), nn.Linear(16, 1))

    def forward(self, docs):
        return self.net(docs).squeeze(-1)


class PositionBias(nn.Module):
    def __init__(self, positions=8):
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(positions))

    def forward(self, batch):
        return self.logits.expand(batch, -1)


def ndcg(scores, relevance):
    discount = 1.0 / torch.arange(2, scores.shape[1] + 2).log2()
    gain = (relevance.gather(1, scores.argsort(dim=1, descending=True)) * discount).sum(1)
    return (gain / (relevance.sort(dim=1, descending=True).values * discount).sum(1)).mean().item()


def _weighted_listwise(clicks, weights, logits):
    return -(clicks * weights * logits.log_softmax(dim=1)).sum(dim=1).mean()


def dual_clicks(t: Training) -> None:
    """Unbiased learning to rank from clicks: the dual learning algorithm (Ai et al., 2018)."""
    w = F.normalize(torch.randn(10), dim=0)
    x, clicks, _ = simulate_clicks(2600, w)
    t.data = TensorDataset(x, clicks)
    test_x, _, test_relevance = simulate_clicks(300, w)
    t.model, propensity = Ranker(), PositionBias()
    t.extra.append(propensity)
    t.batch_size, t.epochs = 64, 8
    t.optimizers_of = lambda training: [
        Adam(training.model.parameters(), lr=3e-3),
        Adam(propensity.parameters(), lr=2e-2),
    ]

    def update(training, batch):
        docs, clicked = batch
        rank_logits, position_logits = training.model(docs), propensity(len(docs))
        with torch.no_grad():
            observed, relevant = position_logits.softmax(1), rank_logits.softmax(1)
            inverse_propensity = (observed[:, :1] / observed).clamp(max=20)
            inverse_relevance = (relevant[:, :1] / relevant).clamp(max=20)
        rank_loss = _weighted_listwise(clicked, inverse_propensity, rank_logits)
        exam_loss = _weighted_listwise(clicked, inverse_relevance, position_logits)
        for opt in training.optimizers:
            opt.zero_grad()
        (rank_loss + exam_loss).backward()
        for opt in training.optimizers:
            opt.step()
        return (rank_loss + exam_loss).detach()

    @torch.no_grad()
    def evaluate(training, epoch):
        t.history.append(ndcg(training.model(test_x), test_relevance))

    t.history = []
    t.update = update
    t.each_epoch.append(evaluate)


def asked_labels(t: Training) -> None:
    """Active learning by BALD (Gal et al., 2017): train anew, ask for what dropout's networks dispute, six times."""
    x, y = table(t.seed, 1536, classes=4)
    test, pool = slice(0, 512), torch.arange(512, 1536)
    t.model = nn.Sequential(
        nn.Linear(20, 64), nn.ReLU(), nn.Dropout(0.25), nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.25), nn.Linear(64, 4)
    )
    t.loaded, accuracies = False, []
    t.optimizers_of = lambda training: [Adam(training.model.parameters(), lr=5e-3, weight_decay=1e-4)]

    @torch.no_grad()
    def bald(model: nn.Module, rows: Tensor, draws: int = 16) -> Tensor:
        model.train()  # dropout stays on
        log_p = torch.stack([model(x[rows]).log_softmax(-1) for _ in range(draws)])
        mean = log_p.exp().mean(0)
        return (log_p.exp() * log_p).sum(-1).mean(0) - (mean * mean.log()).sum(-1)

    def loop(training: Training) -> Iterator[Tensor]:
        model, (optimizer,) = training.model, training.optimizers
        weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
        unlabelled = pool[torch.randperm(len(pool))]
        labelled, unlabelled = unlabelled[:64], unlabelled[64:]
        for _ in range(6):
            model.load_state_dict(weights)
            optimizer.load_state_dict(state)
            model.train()
            for _ in range(36):
                rows = labelled[torch.randperm(len(labelled))[:32]]
                loss = F.cross_entropy(model(x[rows]), y[rows])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                yield loss.detach()
            model.eval()
            with torch.no_grad():
                accuracies.append((model(x[test]).argmax(1) == y[test]).float().mean().item())
            asked = torch.zeros(len(unlabelled), dtype=torch.bool)
            asked[bald(model, unlabelled).topk(48).indices] = True
            labelled, unlabelled = torch.cat([labelled, unlabelled[asked]]), unlabelled[~asked]

    t.loop = loop
