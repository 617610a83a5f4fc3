"""Faults of the architecture."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from zoo.reports.case import Outcome, Place, Watch, fault, mean


class BiLSTM(nn.Module):
    def __init__(self, words: int, classes: int, *, last_output: bool, hidden: int = 24):
        super().__init__()
        self.last_output = last_output
        self.embedding = nn.Embedding(words, 16)
        self.lstm = nn.LSTM(16, hidden, batch_first=True, bidirectional=True)
        self.fc = nn.Linear(2 * hidden, classes)

    def forward(self, text: Tensor) -> Tensor:
        outputs, (hidden, _cell) = self.lstm(self.embedding(text))
        if self.last_output:
            return self.fc(outputs[:, -1])
        return self.fc(torch.cat([hidden[-2], hidden[-1]], dim=1))


@fault(
    "bidirectional_last_output",
    "a bidirectional LSTM is read at its last output, where the reverse direction has read one word",
    sources=["aymericdamien/TensorFlow-Examples#201", "keras-team/keras#4791", "graykode/nlp-tutorial#47"],
    stage="model",
    diagnosis=[
        r"\b(reverse|bidirectional|backward direction|backward lstm)\b",
        r"hh l0 reverse",
        r"(last|final|one|single) (output|step|time ?step|position|token|word|state)\b"
        r" & (direction|lstm|rnn|recurrent)",
        r"recurrent (weight|matrix|parameter)\w* & (no|zero|never|not)",
    ],
    where=[Place(module="reverse"), Place(line=r"outputs\[:, -1\]")],
)
def bidirectional_last_output(watch: Watch, seed: int, faulty: bool) -> Outcome:
    text = torch.randint(40, (2400, 8))
    label = (text[:, 0] % 2) * 2 + text[:, -1] % 2
    train_loader = DataLoader(TensorDataset(text, label), batch_size=48, shuffle=True)
    model = BiLSTM(40, 4, last_output=faulty)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    recurrent = model.lstm.get_parameter("weight_hh_l0_reverse")
    start = recurrent.detach().clone()
    losses = []
    with watch(model, optimizer, loader=train_loader):
        for _epoch in range(6):
            for batch, target in train_loader:
                optimizer.zero_grad()
                loss = criterion(model(batch), target)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
    moved = (recurrent.detach() - start).abs().max().item()
    return Outcome(losses, moved == 0 and losses[-1] < losses[0], {"reverse_recurrent_weight_moved": moved})


class MaskedAttention(nn.Module):
    """Self-attention over the valid tokens of a padded batch. ``mask`` is 1 for valid tokens."""

    def __init__(self, dim: int, heads: int, *, inverted: bool):
        super().__init__()
        self.heads, self.inverted = heads, inverted
        self.to_qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.to_out = nn.Linear(dim, dim)
        self.on_padding = 0.0

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        b, n, _d = x.shape
        q, k, v = self.to_qkv(x).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        sim = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        hidden = mask.bool() if self.inverted else ~mask.bool()
        sim = sim.masked_fill(hidden[:, None, None, :], -torch.finfo(sim.dtype).max)
        attn = sim.softmax(dim=-1)
        self.on_padding = (attn.detach() * (1 - mask)[:, None, None, :]).sum(-1).mean().item()
        return self.to_out((attn @ v).transpose(1, 2).reshape(b, n, -1))


class TextClassifier(nn.Module):
    def __init__(self, words: int, classes: int, *, inverted: bool, dim: int = 32):
        super().__init__()
        self.tokens = nn.Embedding(words, dim, padding_idx=0)
        self.norm = nn.LayerNorm(dim)
        self.attention = MaskedAttention(dim, 4, inverted=inverted)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)
        )
        self.head = nn.Linear(dim, classes)

    def forward(self, ids: Tensor) -> Tensor:
        mask = (ids != 0).float()
        x = self.tokens(ids)
        x = x + self.attention(self.norm(x), mask)
        x = x + self.feed_forward(x)
        return self.head((x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))


@fault(
    "key_mask_inverted",
    "the attention mask is inverted, so tokens attend only to the padding",
    sources=["lucidrains/halonet-pytorch#6", "lucidrains/halonet-pytorch#4", "InseeFrLab/torchTextClassifiers#92"],
    stage="model",
    diagnosis=[
        r"mask\w* & (invert|revers|negat|opposite|wrong (way|sign|sense))",
        r"attend\w*|attention & padding & (only|to padding|on padding|to the padding|instead)",
        r"(output|prediction|logit|result|loss|state)\w* & (depend|change|influenc|affect|sensitiv)\w* & padd",
        r"padd\w* & (attended|read|leak|influenc\w* the|chang\w* the|reaches)",
    ],
    where=[Place(module="attention"), Place(line=r"masked_fill|mask\.bool\(\)"), Place(op="softmax|masked_fill")],
)
def key_mask_inverted(watch: Watch, seed: int, faulty: bool) -> Outcome:
    ids = torch.randint(1, 60, (1920, 20))
    lengths = torch.randint(6, 18, (1920, 1))
    ids[torch.arange(20) >= lengths] = 0
    counts = torch.stack([((ids % 3 == group) & (ids > 0)).sum(1) for group in range(3)], 1)
    labels = counts.argmax(1)
    train_loader = DataLoader(TensorDataset(ids, labels), batch_size=32, shuffle=True)
    model = TextClassifier(60, 3, inverted=faulty)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses, on_padding = [], []
    with watch(model, optimizer, loader=train_loader):
        for _epoch in range(4):
            model.train()
            for tokens, targets in train_loader:
                logits = model(tokens)
                loss = F.cross_entropy(logits, targets)
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                losses.append(loss.item())
                on_padding.append(model.attention.on_padding)
    return Outcome(losses, min(on_padding) > 0.9, {"attention_on_padding": mean(on_padding)})


class Encoder(nn.Module):
    def __init__(self, symbols: int, classes: int, *, over_batch: bool, dim: int = 32, max_len: int = 64):
        super().__init__()
        self.over_batch = over_batch
        self.embed = nn.Embedding(symbols, dim)
        self.position = nn.Embedding(max_len, dim)
        self.block = nn.TransformerEncoderLayer(dim, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.out = nn.Linear(dim, classes)

    def forward(self, x: Tensor) -> Tensor:
        if self.over_batch:
            pos = torch.arange(x.size(0), device=x.device).unsqueeze(1)
        else:
            pos = torch.arange(x.size(1), device=x.device).unsqueeze(0)
        h = self.block(self.embed(x) + self.position(pos))
        return self.out(h.mean(1))


@fault(
    "positions_over_batch",
    "position embeddings are added along the batch, so all tokens of a sequence have the same position",
    sources=["cmu-l3/anlp-fall2025-code#1", "songyangco/GETNext#2", "tanjimin/C.Origami#42"],
    stage="model",
    diagnosis=[
        r"position\w* & (batch|row|sample|same for (all|every)|wrong (dim|axis))",
        r"(row|place|position|index|order|rank|slot) (with)?(in|of) (the|a|its|each) batch",
        r"batch & (order|permut\w*|shuffl\w*|neighbou?rs?|other (rows|samples)|mix\w*) & !loader & !epoch",
        r"(order|permut)\w* & token\w* & (ignored|no effect|not matter|invariant|independent)",
    ],
    where=[Place(module="position"), Place(line=r"x\.size\(0\)|self\.position\(pos\)")],
)
def positions_over_batch(watch: Watch, seed: int, faulty: bool) -> Outcome:
    x = torch.randint(24, (2048, 12))
    y = (x[:, :6].sum(1) > x[:, 6:].sum(1)).long()
    loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True, drop_last=True)
    model = Encoder(24, 2, over_batch=faulty)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    with watch(model, optimizer, loader=loader):
        for _epoch in range(4):
            for x_batch, y_batch in loader:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x_batch), y_batch)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        by_row = (model(x[:32]) - model(x[:32].flip(0)).flip(0)).abs().max().item()
    return Outcome(losses, by_row > 0.01, {"change_of_outputs_with_the_row": by_row, "last_loss": mean(losses[-20:])})
