"""Legal techniques with learned representations: siamese views, mined triplets, attention of a teacher."""

from __future__ import annotations

import copy
import math

import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.optim import AdamW
from torch.optim.lr_scheduler import MultiStepLR
from torch.utils.data import DataLoader, Sampler, TensorDataset

from zoo.programs.training import Training


class SimSiam(nn.Module):
    def __init__(self, width=24, dim=64, pred_dim=16):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, width, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        )  # fmt: skip
        self.projector = nn.Sequential(
            nn.Linear(width, dim, bias=False), nn.BatchNorm1d(dim), nn.ReLU(inplace=True),
            nn.Linear(dim, dim, bias=False), nn.BatchNorm1d(dim, affine=False),
        )  # fmt: skip
        self.predictor = nn.Sequential(
            nn.Linear(dim, pred_dim, bias=False),
            nn.BatchNorm1d(pred_dim),
            nn.ReLU(inplace=True),
            nn.Linear(pred_dim, dim),
        )

    def forward(self, x1, x2):
        z1, z2 = self.projector(self.encoder(x1)), self.projector(self.encoder(x2))
        return self.predictor(z1), self.predictor(z2), z1.detach(), z2.detach()


def gratings(n, classes=4, size=16):
    y = torch.randint(classes, (n,))
    at = torch.arange(size).float()
    yy, xx = torch.meshgrid(at, at, indexing="ij")
    angle = (torch.pi * y / classes + 0.1 * torch.randn(n))[:, None, None]
    k = 0.8 + 0.4 * torch.rand(n, 1, 1)
    wave = torch.sin(k * (xx * angle.cos() + yy * angle.sin()) + 6.28 * torch.rand(n, 1, 1))
    return (1.4 * wave).unsqueeze(1), y


def simsiam(t: Training) -> None:
    """Simple siamese representation learning (Chen & He, 2021); the predictor keeps its learning rate."""
    t.data, t.batch_size, t.epochs = TensorDataset(*gratings(1024)), 64, 10
    t.model = SimSiam()
    criterion = nn.CosineSimilarity(dim=1)
    init_lr = 0.05

    def augment(x):
        """A crop of 12, other in each picture, a gain, an offset, noise."""
        n = len(x)
        windows = x.squeeze(1).unfold(1, 12, 1).unfold(2, 12, 1)
        crops = windows[torch.arange(n), torch.randint(5, (n,)), torch.randint(5, (n,))].unsqueeze(1)
        gain, offset = 0.6 + 0.8 * torch.rand(n, 1, 1, 1), 0.3 * torch.randn(n, 1, 1, 1)
        return crops * gain + offset + 0.3 * torch.randn_like(crops)

    def loss(model, batch):
        p1, p2, z1, z2 = model(*batch)
        return -(criterion(p1, z2).mean() + criterion(p2, z1).mean()) * 0.5

    def adjust_learning_rate(tr, epoch):
        cur_lr = init_lr * 0.5 * (1.0 + math.cos(math.pi * epoch / tr.epochs))
        for group in tr.optimizers[0].param_groups:
            group["lr"] = init_lr if group.get("fix_lr") else cur_lr

    def optimizer(tr):
        m = tr.model
        groups = [
            {"params": [*m.encoder.parameters(), *m.projector.parameters()], "fix_lr": False},
            {"params": m.predictor.parameters(), "fix_lr": True},
        ]
        return [optim.SGD(groups, init_lr, momentum=0.9, weight_decay=1e-4)]

    t.transform = lambda batch: (augment(batch[0]), augment(batch[0]))
    t.loss, t.optimizers_of = loss, optimizer
    t.each_epoch.append(adjust_learning_rate)


class DinoNet(nn.Module):
    def __init__(self, out=32):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.GroupNorm(2, 8),
            nn.GELU(),
            nn.Conv2d(8, 16, 3, stride=2, padding=1),
            nn.GroupNorm(4, 16),
            nn.GELU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
        )
        self.head = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 16))
        self.prototypes = nn.Linear(16, out, bias=False)

    def forward(self, x):
        z = F.normalize(self.head(self.backbone(x)), dim=-1)
        return F.linear(z, F.normalize(self.prototypes.weight, dim=-1))


def self_distillation_centred(t: Training) -> None:
    """DINO (Caron et al., 2021): a centred, sharpened momentum teacher sees whole views, the student also crops."""
    t.model = DinoNet()
    teacher = copy.deepcopy(t.model).requires_grad_(False)
    center = torch.zeros(32)
    t.batch_size, t.epochs = 64, 18
    t.optimizers_of = lambda training: [AdamW(training.model.parameters(), lr=4e-3, weight_decay=1e-3)]
    total = 18 * 10

    def whole(x):
        return x + 0.2 * torch.randn_like(x)

    def crop(x):
        i, j = torch.randint(3, (2,)).tolist()
        return x[:, :, i : i + 6, j : j + 6] + 0.2 * torch.randn(len(x), 1, 6, 6)

    def update(training, batch):
        nonlocal center
        student, (opt,) = training.model, training.optimizers
        x = batch[0]
        views = [whole(x), whole(x)]
        with torch.no_grad():
            outs = [teacher(v) for v in views]
            targets = [F.softmax((o - center) / 0.04, dim=-1) for o in outs]
        views += [crop(x), crop(x)]
        logs = [F.log_softmax(student(v) / 0.1, dim=-1) for v in views]
        terms = [-(p * q).sum(-1).mean() for i, p in enumerate(targets) for j, q in enumerate(logs) if i != j]
        loss = torch.stack(terms).mean()
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(student.parameters(), 3.0)
        opt.step()
        m = 1 - 0.04 * (math.cos(math.pi * training.steps / total) + 1) / 2
        with torch.no_grad():
            for a, b in zip(teacher.parameters(), student.parameters()):
                a.mul_(m).add_(b, alpha=1 - m)
            center = 0.9 * center + 0.1 * torch.cat(outs).mean(0)
        return loss.detach()

    t.update = update


class PKSampler(Sampler):
    """Batches of ``p`` identities with ``k`` pictures of each."""

    def __init__(self, labels, p, k, batches):
        self.rows = [torch.where(labels == c)[0] for c in labels.unique()]
        self.p, self.k, self.batches = p, k, batches

    def __len__(self):
        return self.batches

    def __iter__(self):
        for _ in range(self.batches):
            chosen = torch.randperm(len(self.rows))[: self.p].tolist()
            yield [i for c in chosen for i in self.rows[c][torch.randperm(len(self.rows[c]))[: self.k]].tolist()]


class EmbeddingNet(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        )  # fmt: skip
        self.fc = nn.Linear(32 * 9, dim)

    def forward(self, x):
        return F.normalize(self.fc(self.features(x).flatten(1)), dim=1)


def draw_faces(identities, per_identity, size=12):
    """A smooth pattern for each identity; pictures differ by shift, contrast, the side of the light, and noise."""
    patterns = F.interpolate(torch.randn(identities, 1, 5, 5), size=size, mode="bicubic")
    labels = torch.arange(identities).repeat_interleave(per_identity)
    n, ramp = len(labels), torch.linspace(-1, 1, size)
    faces = patterns[labels] * (0.7 + 0.6 * torch.rand(n, 1, 1, 1))
    light = 1.0 * torch.randn(n, 2, 1, 1, 1)
    faces = faces + light[:, 0] * ramp + light[:, 1] * ramp[:, None]
    shifts = torch.randint(-1, 2, (n, 2)).tolist()
    faces = torch.stack([face.roll(tuple(shift), (1, 2)) for face, shift in zip(faces, shifts)])
    return faces + 0.3 * torch.randn_like(faces), labels


def semi_hard_triplets(embeddings, labels, margin=0.2):
    """For each pair the nearest negative that is farther than the positive; the farthest of all if there is none."""
    distance = (2 - 2 * embeddings @ embeddings.T).clamp(min=0)
    same = labels[:, None] == labels
    anchors, positives = torch.where(same & ~torch.eye(len(labels), dtype=torch.bool))
    ap, an, negative = distance[anchors, positives], distance[anchors], ~same[anchors]
    beyond = an.masked_fill(~(negative & (an > ap[:, None])), float("inf")).min(1).values
    farthest = an.masked_fill(~negative, float("-inf")).max(1).values
    return F.relu(ap - torch.where(beyond.isinf(), farthest, beyond) + margin).mean()


def mined_triplets(t: Training) -> None:
    """FaceNet (Schroff et al., 2015): semi-hard negatives within the batch; recall at 1 on identities never seen."""
    faces, labels = draw_faces(128, 8)
    seen = labels < 104
    mean, std = faces[seen].mean(), faces[seen].std()
    faces = (faces - mean) / std
    t.model = EmbeddingNet()
    t.data, t.batch_size, t.epochs = TensorDataset(faces[seen], labels[seen]), 48, 5
    t.batches_of = lambda tr: DataLoader(tr.data, batch_sampler=PKSampler(labels[seen], p=12, k=4, batches=32))
    t.optimizers_of = lambda tr: [optim.Adam(tr.parameters(), lr=1e-3, weight_decay=1e-5)]
    t.loss = lambda model, batch: semi_hard_triplets(model(batch[0]), batch[1])
    t.recall = []

    @torch.no_grad()
    def recall_at_1(tr):
        if tr.steps % 32 != 0:
            return
        tr.model.eval()
        z, who = tr.model(faces[~seen]), labels[~seen]
        nearest = (z @ z.T).fill_diagonal_(-2).argmax(1)
        tr.recall.append((who[nearest] == who).float().mean().item())
        tr.model.train()

    t.each_step.append(recall_at_1)


class TwoStages(nn.Module):
    """Logits, and the activations after each stage."""

    def __init__(self, width, classes=4):
        super().__init__()
        self.one = nn.Sequential(nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.two = nn.Sequential(
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(2 * width), nn.ReLU()
        )
        self.fc = nn.Linear(2 * width * 16, classes)

    def forward(self, x):
        a = self.one(x)
        b = self.two(a)
        return self.fc(b.flatten(1)), (a, b)


def attention_map(a):
    return F.normalize(a.pow(2).mean(1).flatten(1))


def attentive_student(t: Training) -> None:
    """Distillation (Hinton et al., 2015) with attention transfer (Zagoruyko & Komodakis, 2017); MultiStepLR."""
    x, y = t.data.tensors
    x = x + 2.0 * torch.randn_like(x)  # the clean patterns are too easy
    x_train, y_train, x_val, y_val = x[:512], y[:512], x[512:], y[512:]
    teacher = TwoStages(24)
    optimizer = optim.Adam(teacher.parameters(), lr=2e-3)
    for _ in range(6):
        for rows in torch.randperm(512).split(64):
            optimizer.zero_grad()
            F.cross_entropy(teacher(x_train[rows])[0], y_train[rows]).backward()
            optimizer.step()
    teacher.eval().requires_grad_(False)

    temperature, alpha, beta = 4.0, 0.7, 1.0
    t.model = TwoStages(4)
    t.data, t.batch_size, t.epochs = TensorDataset(x_train, y_train), 32, 10
    t.optimizers_of = lambda tr: [optim.SGD(tr.parameters(), lr=0.03, momentum=0.9, nesterov=True, weight_decay=5e-4)]
    t.scheduler_of = lambda opt: MultiStepLR(opt, milestones=[96, 128], gamma=0.2)
    t.parts, t.val_acc = [], []

    def loss(model, batch):
        inputs, labels = batch
        logits, ours = model(inputs)
        with torch.no_grad():
            wanted, theirs = teacher(inputs)
        soft = F.kl_div(
            F.log_softmax(logits / temperature, 1), F.softmax(wanted / temperature, 1), reduction="batchmean"
        )
        hard = F.cross_entropy(logits, labels)
        pairs = zip(ours, theirs)
        maps = sum((attention_map(a) - attention_map(b)).pow(2).sum(1).mean() for a, b in pairs)
        t.parts.append((soft.item(), hard.item(), maps.item()))
        return alpha * temperature**2 * soft + (1 - alpha) * hard + beta * maps

    @torch.no_grad()
    def validate(tr, epoch):
        tr.model.eval()
        both = [(m(x_val)[0].argmax(1) == y_val).float().mean().item() for m in (tr.model, teacher)]
        t.val_acc.append(both)
        tr.model.train()

    t.loss = loss
    t.each_epoch.append(validate)
