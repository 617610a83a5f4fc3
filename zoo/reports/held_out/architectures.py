"""Faults of the architecture: layers without a function, and dropout that cannot be switched off."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from zoo.reports.case import Outcome, Place, Watch, fault, fell, mean


class EmbedVector(nn.Module):
    """Embeds a question: a bidirectional LSTM, attention over its words, and a linear layer."""

    def __init__(self, words: int, relations: int, *, over_single: bool):
        super().__init__()
        self.over_single = over_single
        self.embed = nn.Embedding(words, 24)
        self.lstm = nn.LSTM(24, 24, bidirectional=True)
        self.attn = nn.Sequential(nn.Linear(72, 32), nn.Tanh(), nn.Linear(32, 1))
        self.hidden2tag = nn.Sequential(nn.Linear(72, 48), nn.ReLU(), nn.Linear(48, relations))

    def attention(self, x: Tensor, outputs: Tensor) -> Tensor:
        scores = self.attn(torch.cat((x, outputs), 2))
        return F.softmax(scores, dim=-1) if self.over_single else F.softmax(scores, dim=0)

    def forward(self, text: Tensor) -> Tensor:
        x = self.embed(text.t())
        outputs, _state = self.lstm(x)
        attn_weights = self.attention(x, outputs)
        attn_applied = (attn_weights * torch.cat((x, outputs), 2)).sum(0)
        return self.hidden2tag(attn_applied)


@fault(
    "attention_weights_all_one",
    "attention weights are a softmax over an axis of size 1, so all are 1 and the attention layer never learns",
    sources=["DEEP-PolyU/KEQA_WSDM19#2", "PetrochukM/PyTorch-NLP#2"],
    stage="model",
    diagnosis=[
        r"softmax & (one|single|size 1|dim\w*|axis|always 1|constant|over 1)",
        r"attention & (always|all) (1|one)\b",
        r"(attention|\battn)\w* & (constant|uniform|no effect|never (mov|chang|updat|train|learn)\w*|no gradient)",
    ],
    where=[Place(module="attn"), Place(op="softmax"), Place(line=r"F\.softmax")],
)
def attention_weights_all_one(watch: Watch, seed: int, faulty: bool) -> Outcome:
    text = torch.randint(20, 80, (2400, 10))
    relation = torch.randint(8, (2400,))
    text[torch.arange(2400), torch.randint(10, (2400,))] = relation
    train_loader = DataLoader(TensorDataset(text, relation), batch_size=40, shuffle=True)
    model = EmbedVector(80, 8, over_single=faulty)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    start = [parameter.detach().clone() for parameter in model.attn.parameters()]
    losses = []
    with watch(model, optimizer, loader=train_loader):
        for _epoch in range(4):
            model.train()
            for words, label in train_loader:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(words), label)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
    moved = max((p - old).abs().max().item() for p, old in zip(model.attn.parameters(), start, strict=True))
    return Outcome(losses, moved < 1e-5 and fell(losses), {"attention_moved": moved, "last_loss": mean(losses[-20:])})


class PartNet(nn.Module):
    """A small residual network with dropout in front of its classifier."""

    def __init__(self, classes: int, *, functional: bool):
        super().__init__()
        self.functional = functional
        self.conv1 = nn.Sequential(nn.Conv2d(1, 16, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.layer1 = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16))
        self.layer2 = nn.Sequential(
            nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()
        )
        self.dropout = nn.Dropout(p=0.5)
        self.fc = nn.Linear(32, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv1(x)
        x = F.relu(x + self.layer1(x))
        x = self.layer2(x).mean((2, 3))
        x = nn.Dropout(p=0.5)(x) if self.functional else self.dropout(x)
        return self.fc(x)


@fault(
    "dropout_in_evaluation",
    "a dropout layer is made in forward, so it is always in training mode and evaluation is random",
    sources=["yangze0930/NTS-Net#14", "rixwew/pytorch-fm#21", "delip/PyTorchNLPBook#28"],
    stage="evaluation",
    diagnosis=[
        r"dropout & (eval|validation|inference|mode|always|training|active|not registered)",
        r"(eval|validation|inference|no grad)\w*"
        r" & (random|nois|not repeatable|stochastic|nondeterministic|differ|dropout)",
        r"(module|layer)\w* & (made|created|constructed|built) & (forward|every step|each step)",
    ],
    where=[Place(line=r"nn\.Dropout\(p=0\.5\)\(x\)|dropout"), Place(op="dropout"), Place(module="dropout")],
    shows=40,
)
def dropout_in_evaluation(watch: Watch, seed: int, faulty: bool) -> Outcome:
    prototypes = F.interpolate(torch.randn(10, 1, 4, 4), size=(12, 12), mode="bilinear")
    labels = torch.randint(10, (1600,))
    images = prototypes[labels] + 0.8 * torch.randn(1600, 1, 12, 12)
    trainloader = DataLoader(TensorDataset(images[:1280], labels[:1280]), batch_size=32, shuffle=True)
    testloader = DataLoader(TensorDataset(images[1280:], labels[1280:]), batch_size=80)
    net = PartNet(10, functional=faulty)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    losses, test_accuracies = [], []
    with watch(net, optimizer, loader=trainloader):
        for _epoch in range(8):
            net.train()
            for img, label in trainloader:
                optimizer.zero_grad()
                loss = F.cross_entropy(net(img), label)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            net.eval()
            with torch.no_grad():
                correct = sum(int((net(img).argmax(1) == label).sum()) for img, label in testloader)
            test_accuracies.append(correct / 320)
    net.eval()
    with torch.no_grad():
        change = (net(images[:64]) - net(images[:64])).abs().max().item()
    return Outcome(losses, change > 0.01, {"change_between_two_evaluations": change, "accuracies": test_accuracies})
