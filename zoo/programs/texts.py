"""Legal techniques with labels of texts and of their words, from raw strings on."""

from __future__ import annotations

import copy
import itertools
import random
import re
from collections import Counter, defaultdict

import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

from zoo.programs.training import Training

TICKET_WORDS = {
    "billing": "invoice charged refund payment card subscription twice amount",
    "shipping": "parcel delivery courier address tracking late package warehouse",
    "account": "password login email locked reset username verify access",
    "product": "broken screen battery noise manual warranty button cable",
}


FILLER = "hello please i my the a is was since yesterday again help still not can you we thanks very order".split()  # noqa: SIM905


def write_ticket(rng, topic):
    """Words of the topic between fillers; now and then one of another topic."""
    words = []
    for _ in range(rng.randint(5, 16)):
        if rng.random() < 0.25:
            about = topic if rng.random() < 0.8 else rng.choice(list(TICKET_WORDS))
            words.append(rng.choice(TICKET_WORDS[about].split()))
        else:
            words.append(rng.choice(FILLER))
    return " ".join(words).capitalize() + rng.choice([".", "!", "...", "?"])


class TicketClassifier(nn.Module):
    def __init__(self, vocab_size, classes, dim=32, hidden=32):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, dim, padding_idx=0)
        self.lstm = nn.LSTM(dim, hidden, batch_first=True, bidirectional=True)
        self.dropout = nn.Dropout(0.3)
        self.fc = nn.Linear(2 * hidden, classes)

    def forward(self, ids, lengths):
        x = self.dropout(self.embedding(ids))
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        out, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=ids.size(1))
        out = out.masked_fill((ids == 0).unsqueeze(-1), float("-inf"))
        return self.fc(self.dropout(out.max(dim=1).values))


class TicketTrainer:
    def __init__(self, valid, patience=3):
        self.valid, self.patience = valid, patience
        self.metrics = defaultdict(list)

    @torch.no_grad()
    def evaluate(self, model):
        model.eval()
        ids, lengths, labels = self.valid
        logits = model(ids, lengths)
        return F.cross_entropy(logits, labels).item(), (logits.argmax(1) == labels).float().mean().item()

    def __call__(self, training):
        model, (optimizer,) = training.model, training.optimizers
        plateau = optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="min", factor=0.5, patience=1)
        best, bad = (float("inf"), None), 0
        for _ in range(training.epochs):
            model.train()
            seen, running = 0, 0.0
            for ids, lengths, labels in training.batches:
                loss = F.cross_entropy(model(ids, lengths), labels, label_smoothing=0.05)
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                seen, running = seen + len(labels), running + loss.item() * len(labels)
                yield loss.detach()
            val_loss, val_acc = self.evaluate(model)
            plateau.step(val_loss)
            for name, value in {"train": running / seen, "val": val_loss, "acc": val_acc}.items():
                self.metrics[name].append(value)
            if val_loss < best[0]:
                best, bad = (val_loss, copy.deepcopy(model.state_dict())), 0
            else:
                bad += 1
            if bad == self.patience:
                break
        model.load_state_dict(best[1])


def support_tickets(t: Training) -> None:
    """Raw strings to a vocabulary of the training part, padding cut by the collate function, packed bi-LSTM."""
    rng, topics = random.Random(t.seed), list(TICKET_WORDS)
    tickets = list({write_ticket(rng, topic): topic for topic in topics for _ in range(240)}.items())
    rng.shuffle(tickets)
    tokens = [re.findall(r"[a-z]+", text.lower()) for text, _ in tickets]
    counts = Counter(itertools.chain.from_iterable(tokens[:768]))
    vocab = {"<pad>": 0, "<unk>": 1}
    for word, count in counts.most_common():
        if count >= 2:
            vocab[word] = len(vocab)
    encoded = [torch.tensor([vocab.get(word, 1) for word in words]) for words in tokens]
    ids, lengths = pad_sequence(encoded, batch_first=True), torch.tensor([len(each) for each in encoded])
    labels = torch.tensor([topics.index(topic) for _, topic in tickets])

    def collate(samples):
        ids, lengths, labels = (torch.stack(column) for column in zip(*samples))
        return ids[:, : int(lengths.max())], lengths, labels

    t.model = TicketClassifier(len(vocab), len(topics))
    t.data, t.batch_size, t.epochs = TensorDataset(ids[:768], lengths[:768], labels[:768]), 32, 8
    t.batches_of = lambda tr: DataLoader(tr.data, tr.batch_size, shuffle=True, drop_last=True, collate_fn=collate)
    t.optimizers_of = lambda tr: [optim.AdamW(tr.parameters(), lr=3e-3, weight_decay=1e-2)]
    t.loop = t.trainer = TicketTrainer((ids[768:], lengths[768:], labels[768:]))


TAGS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC", "B-ORG", "I-ORG"]


PATTERNS = [
    "yesterday PER met PER in LOC", "ORG hired PER last month", "the flight to LOC was late", "shares of ORG fell",
    "PER moved from LOC to LOC", "PER left ORG after two years", "ORG opened an office in LOC", "police in LOC said so",
    "mister PER works for ORG near LOC", "doctor PER could not comment", "people of LOC voted for PER",
]  # fmt: skip


def write_sentence(rng, syllables):
    words, tags = [], []
    for word in rng.choice(PATTERNS).split():
        if not word.isupper():
            words.append(word)
            tags.append("O")
            continue
        for part in range(rng.choice((1, 1, 2))):
            words.append("".join(rng.choices(syllables, k=rng.randint(1, 3))))
            tags.append(("B-" if part == 0 else "I-") + word)
    return words, tags


def pieces_and_labels(words, tags, size=3):
    """Pieces of three letters; the first piece of a word carries its tag, the others -100."""
    pieces, labels = ["[CLS]"], [-100]
    for word, tag in zip(words, tags):
        for start in range(0, len(word), size):
            pieces.append(("##" if start else "") + word[start : start + size])
            labels.append(-100 if start else TAGS.index(tag))
    return pieces, labels


def entity_spans(tags):
    """{(begin, end, kind)} of a row of BIO tags."""
    spans, begin, kind = set(), None, ""
    for i, tag in enumerate([*tags, "O"]):
        if begin is not None and tag != "I-" + kind:
            spans.add((begin, i, kind))
            begin = None
        if tag[0] == "B":
            begin, kind = i, tag[2:]
    return spans


class TokenClassifier(nn.Module):
    def __init__(self, vocab_size, dim=40, max_len=64):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab_size, dim, padding_idx=0), nn.Embedding(max_len, dim)
        self.norm, self.drop = nn.LayerNorm(dim), nn.Dropout(0.1)
        layer = nn.TransformerEncoderLayer(dim, 4, 2 * dim, 0.1, "gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        self.classifier = nn.Linear(dim, len(TAGS))

    def forward(self, ids):
        x = self.drop(self.norm(self.tok(ids) + self.pos.weight[: ids.size(1)]))
        return self.classifier(self.encoder(x, src_key_padding_mask=ids == 0))


def subword_entities(t: Training) -> None:
    """Token classification as in the Hugging Face course: -100 on later pieces and padding, linear warmup and decay."""
    rng = random.Random(t.seed)
    syllables = ["".join(p) for p in itertools.product("bdklmrst", "aeiou", "nlrs")]
    syllables = rng.sample(syllables, 40)
    distinct = {}
    while len(distinct) < 896:
        words, tags = write_sentence(rng, syllables)
        distinct[" ".join(words)] = pieces_and_labels(words, tags)
    examples = list(distinct.values())
    counts = Counter(piece for pieces, _ in examples[:768] for piece in pieces)
    kept = sorted(piece for piece, count in counts.items() if count > 1)
    vocab = {piece: i for i, piece in enumerate(["[PAD]", "[UNK]", *kept])}

    def pad(rows):
        ids = [torch.tensor([vocab.get(piece, 1) for piece in pieces]) for pieces, _ in rows]
        labels = [torch.tensor(each) for _, each in rows]
        return pad_sequence(ids, batch_first=True), pad_sequence(labels, batch_first=True, padding_value=-100)

    valid_ids, valid_labels = pad(examples[768:])

    def trim(samples):
        ids, labels = (torch.stack(column) for column in zip(*samples))
        longest = int((ids != 0).sum(1).max())
        return ids[:, :longest], labels[:, :longest]

    t.model = TokenClassifier(len(vocab))
    t.data, t.batch_size, t.epochs = TensorDataset(*pad(examples[:768])), 32, 8
    t.batches_of = lambda tr: DataLoader(tr.data, tr.batch_size, shuffle=True, drop_last=True, collate_fn=trim)
    t.loss = lambda model, batch: F.cross_entropy(model(batch[0]).transpose(1, 2), batch[1], ignore_index=-100)
    total, warmup = 8 * 24, 19

    def configure(tr):
        groups = [
            {"params": [p for p in tr.parameters() if p.dim() > 1], "weight_decay": 0.01},
            {"params": [p for p in tr.parameters() if p.dim() == 1], "weight_decay": 0.0},
        ]
        return [optim.AdamW(groups, lr=4e-3)]

    def linear(step):
        return (step + 1) / warmup if step < warmup else max(0.0, (total - step) / (total - warmup))

    def clipped(tr, batch):
        (optimizer,) = tr.optimizers
        loss = tr.loss(tr.model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(tr.model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    @torch.no_grad()
    def f1(tr):
        if tr.steps % 24:
            return
        tr.model.eval()
        found, hits, predicted, true = tr.model(valid_ids).argmax(-1), 0, 0, 0
        for row, gold in zip(found, valid_labels):
            a = entity_spans([TAGS[i] for i in row[gold != -100]])
            b = entity_spans([TAGS[i] for i in gold[gold != -100]])
            hits, predicted, true = hits + len(a & b), predicted + len(a), true + len(b)
        t.f1.append(2 * hits / (predicted + true))
        tr.model.train()

    t.f1, t.optimizers_of, t.update = [], configure, clipped
    t.scheduler_of = lambda opt: LambdaLR(opt, linear)
    t.each_step.append(f1)
