"""Everyday programs with words: reviews, dates, news in bags, names letter by letter."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset, TensorDataset

from zoo.programs.training import Training


class AttentiveBiLSTM(nn.Module):
    def __init__(self, vocab_size, emb_dim=24, hidden=24, p=0.3):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, emb_dim, padding_idx=0)
        self.lstm = nn.LSTM(emb_dim, hidden, batch_first=True, bidirectional=True)
        self.score = nn.Sequential(nn.Linear(2 * hidden, hidden), nn.Tanh(), nn.Linear(hidden, 1, bias=False))
        self.dropout, self.fc = nn.Dropout(p), nn.Linear(2 * hidden, 1)

    def forward(self, ids, lengths):
        packed = pack_padded_sequence(self.dropout(self.embedding(ids)), lengths, batch_first=True)
        out, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        scores = self.score(out).squeeze(2).masked_fill(ids == 0, float("-inf"))
        weights = scores.softmax(1)
        return self.fc(self.dropout((weights.unsqueeze(2) * out).sum(1))).squeeze(1)


class Reviews(Dataset):
    """Filler with up to three words of opinion, each perhaps after a "not"; the label is whether they sum to praise."""

    def __init__(self, size):
        self.rows = []
        while len(self.rows) < size:
            words = torch.randint(22, 60, (int(torch.randint(6, 20, ())),))
            total = 0
            for at in torch.randperm(len(words) // 2)[:3] * 2:
                word, negated = int(torch.randint(2, 22, ())), bool(torch.rand(()) < 0.25)
                words[at + 1] = word
                if negated:
                    words[at] = 1
                total += (1 if word < 12 else -1) * (-1 if negated else 1)
            if total:
                self.rows.append((words, float(total > 0)))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


def collate_reviews(batch):
    batch = sorted(batch, key=lambda row: len(row[0]), reverse=True)
    lengths = torch.tensor([len(words) for words, _ in batch])
    return pad_sequence([words for words, _ in batch], batch_first=True), lengths, torch.tensor([y for _, y in batch])


def attentive_reviews(t: Training) -> None:
    """Sentiment of padded reviews by a packed two-way LSTM with attention over its states; the best model is kept."""
    train_loader = DataLoader(Reviews(960), batch_size=32, shuffle=True, collate_fn=collate_reviews)
    valid_loader = DataLoader(Reviews(240), batch_size=80, collate_fn=collate_reviews)
    t.model, t.loaded, t.epochs = AttentiveBiLSTM(60), False, 8
    t.optimizers_of = lambda tr: [optim.Adam(tr.model.parameters(), lr=6e-3)]
    criterion = nn.BCEWithLogitsLoss()
    t.history = []

    def binary_accuracy(preds, y):
        return ((preds > 0).float() == y).float().mean().item()

    def evaluate(model):
        epoch_loss = epoch_acc = 0.0
        model.eval()
        with torch.no_grad():
            for text, lengths, y in valid_loader:
                predictions = model(text, lengths)
                epoch_loss += criterion(predictions, y).item()
                epoch_acc += binary_accuracy(predictions, y)
        return epoch_loss / len(valid_loader), epoch_acc / len(valid_loader)

    def train(tr):
        best_valid_loss, checkpoint = float("inf"), None
        for epoch in range(tr.epochs):
            tr.model.train()
            for text, lengths, y in train_loader:
                tr.optimizers[0].zero_grad()
                loss = criterion(tr.model(text, lengths), y)
                loss.backward()
                nn.utils.clip_grad_norm_(tr.model.parameters(), 1.0)
                tr.optimizers[0].step()
                yield loss.item()
            valid_loss, valid_acc = evaluate(tr.model)
            t.history.append({"epoch": epoch, "valid_loss": valid_loss, "valid_acc": valid_acc})
            if valid_loss < best_valid_loss:
                best_valid_loss, checkpoint = valid_loss, copy.deepcopy(tr.model.state_dict())
        tr.model.load_state_dict(checkpoint)

    t.loop = train


MONTHS = ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"]
PAD, BOS, EOS = 0, 1, 2
CHARACTERS = {c: i + 3 for i, c in enumerate("0123456789 ,./-abcdefghijklmnopqrstuvwxyz")}


def encode(text, length):
    ids = [CHARACTERS[c] for c in text]
    return ids + [PAD] * (length - len(ids))


def draw_dates(n):
    """Dates as people write them (padded), and as ISO 8601 between BOS and EOS."""
    sources, targets = [], []
    for year, month, day in zip(*(torch.randint(lo, hi, (n,)).tolist() for lo, hi in ((1990, 2030), (0, 12), (1, 29)))):
        forms = (
            f"{day} {MONTHS[month]} {year}", f"{MONTHS[month]} {day}, {year}", f"{day}.{month + 1}.{year}",
            f"{month + 1}/{day}/{year}",
        )  # fmt: skip
        sources.append(encode(forms[int(torch.randint(4, ()))], 12))
        targets.append([BOS, *encode(f"{year}-{month + 1:02d}-{day:02d}", 10), EOS])
    return torch.tensor(sources), torch.tensor(targets)


class DateTransformer(nn.Module):
    def __init__(self, vocab, d_model=48, nhead=4, dropout=0.05):
        super().__init__()
        self.d_model = d_model
        self.embed = nn.Embedding(vocab, d_model, padding_idx=PAD)
        nn.init.normal_(self.embed.weight[1:], std=d_model**-0.5)
        position, rate = (
            torch.arange(16.0)[:, None],
            torch.exp(torch.arange(0, d_model, 2) * (-math.log(1e4) / d_model)),
        )
        self.register_buffer("pe", torch.stack([(position * rate).sin(), (position * rate).cos()], 2).flatten(1))
        sizes = {"nhead": nhead, "dim_feedforward": 2 * d_model, "dropout": dropout, "batch_first": True}
        encoder_layer = nn.TransformerEncoderLayer(d_model, norm_first=True, **sizes)
        decoder_layer = nn.TransformerDecoderLayer(d_model, norm_first=True, **sizes)
        self.encoder = nn.TransformerEncoder(encoder_layer, 1, nn.LayerNorm(d_model), enable_nested_tensor=False)
        self.decoder = nn.TransformerDecoder(decoder_layer, 1, nn.LayerNorm(d_model))
        self.generator = nn.Linear(d_model, vocab)

    def place(self, ids):
        return self.embed(ids) * math.sqrt(self.d_model) + self.pe[: ids.shape[1]]

    def forward(self, src, tgt):
        causal = torch.ones(tgt.shape[1], tgt.shape[1], dtype=torch.bool).triu(1)
        padded = src == PAD
        memory = self.encoder(self.place(src), src_key_padding_mask=padded)
        out = self.decoder(self.place(tgt), memory, tgt_mask=causal, memory_key_padding_mask=padded)
        return self.generator(out)

    @torch.no_grad()
    def greedy(self, src, length=11):
        ys = torch.full((len(src), 1), BOS)
        for _ in range(length):
            ys = torch.cat([ys, self(src, ys)[:, -1].argmax(1, keepdim=True)], 1)
        return ys


def dates_transformer(t: Training) -> None:
    """Dates into ISO 8601 by encoder and decoder (Vaswani et al., 2017): teacher forcing, Noam, greedy decoding."""
    t.model, t.data, t.epochs = DateTransformer(len(CHARACTERS) + 3), TensorDataset(*draw_dates(1280)), 5
    val_src, val_tgt = draw_dates(128)
    t.optimizers_of = lambda tr: [optim.Adam(tr.model.parameters(), lr=1.0, betas=(0.9, 0.98), eps=1e-9)]

    def noam(step, warmup=60):
        return 0.5 * 48**-0.5 * min((step + 1) ** -0.5, (step + 1) * warmup**-1.5)

    t.scheduler_of = lambda opt: optim.lr_scheduler.LambdaLR(opt, noam)
    criterion = nn.CrossEntropyLoss(ignore_index=PAD, label_smoothing=0.1)
    t.history = []

    def train(tr):
        for epoch in range(tr.epochs):
            tr.model.train()
            for src, tgt in tr.batches:
                logits = tr.model(src, tgt[:, :-1])
                loss = criterion(logits.reshape(-1, logits.size(-1)), tgt[:, 1:].reshape(-1))
                tr.optimizers[0].zero_grad()
                loss.backward()
                tr.optimizers[0].step()
                tr.scheduler.step()
                yield loss.item()
            tr.model.eval()
            ys = tr.model.greedy(val_src)
            exact, characters = (ys == val_tgt).all(1).float().mean(), (ys == val_tgt)[:, 1:].float().mean()
            t.history.append({"epoch": epoch, "exact": exact.item(), "characters": characters.item()})

    t.loop = train


class TextClassificationModel(nn.Module):
    def __init__(self, vocab_size, embed_dim, num_class):
        super().__init__()
        self.embedding = nn.EmbeddingBag(vocab_size, embed_dim, sparse=False)
        self.fc = nn.Linear(embed_dim, num_class)
        self.init_weights()

    def init_weights(self):
        initrange = 0.5
        self.embedding.weight.data.uniform_(-initrange, initrange)
        self.fc.weight.data.uniform_(-initrange, initrange)
        self.fc.bias.data.zero_()

    def forward(self, text, offsets):
        return self.fc(self.embedding(text, offsets))


class News(Dataset):
    """Headlines of four desks: each has words of its own among those that all use, by Zipf's law."""

    def __init__(self, size, topics):
        self.labels = torch.randint(4, (size,))
        common = 1 / torch.arange(1.0, 301.0)
        self.texts = []
        for label in self.labels:
            length = int(torch.randint(8, 30, ()))
            words = torch.multinomial(common, length, replacement=True)
            own = 300 + 25 * label + torch.multinomial(topics[label], length, replacement=True)
            self.texts.append(torch.where(torch.rand(length) < 0.15, own, words))

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, i):
        return self.labels[i], self.texts[i]


def collate_batch(batch):
    label_list, text_list, offsets = [], [], [0]
    for label, text in batch:
        label_list.append(int(label))
        text_list.append(text)
        offsets.append(text.size(0))
    offsets = torch.tensor(offsets[:-1]).cumsum(dim=0)
    return torch.tensor(label_list), torch.cat(text_list), offsets


def news_bags(t: Training) -> None:
    """The tutorial on AG_NEWS: an EmbeddingBag, SGD at 5 with the norm clipped to 0.1, a tenth where accuracy falls."""
    topics = torch.rand(4, 25) + 0.2
    train_dataloader = DataLoader(News(1600, topics), batch_size=16, shuffle=True, collate_fn=collate_batch)
    valid_dataloader = DataLoader(News(320, topics), batch_size=16, shuffle=False, collate_fn=collate_batch)
    t.model, t.loaded, t.epochs = TextClassificationModel(400, 32, 4), False, 5
    t.optimizers_of = lambda tr: [optim.SGD(tr.model.parameters(), lr=5)]
    t.scheduler_of = lambda opt: optim.lr_scheduler.StepLR(opt, 1, gamma=0.1)
    criterion = nn.CrossEntropyLoss()
    t.log = []

    def evaluate(model, dataloader):
        model.eval()
        total_acc, total_count = 0, 0
        with torch.no_grad():
            for label, text, offsets in dataloader:
                predicted_label = model(text, offsets)
                total_acc += (predicted_label.argmax(1) == label).sum().item()
                total_count += label.size(0)
        return total_acc / total_count

    def train(tr):
        total_accu = None
        for epoch in range(1, tr.epochs + 1):
            tr.model.train()
            total_acc, total_count, log_interval = 0, 0, 50
            for idx, (label, text, offsets) in enumerate(train_dataloader):
                tr.optimizers[0].zero_grad()
                predicted_label = tr.model(text, offsets)
                loss = criterion(predicted_label, label)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(tr.model.parameters(), 0.1)
                tr.optimizers[0].step()
                total_acc += (predicted_label.argmax(1) == label).sum().item()
                total_count += label.size(0)
                if idx % log_interval == 0 and idx > 0:
                    t.log.append(f"| epoch {epoch} | {idx}/{len(train_dataloader)} | {total_acc / total_count:8.3f}")
                    total_acc, total_count = 0, 0
                yield loss.item()
            accu_val = evaluate(tr.model, valid_dataloader)
            if total_accu is not None and total_accu > accu_val:
                tr.scheduler.step()
            else:
                total_accu = accu_val
            t.log.append(f"| end of epoch {epoch} | valid accuracy {accu_val:8.3f}")

    t.loop = train


class LetterRNN(nn.Module):
    def __init__(self, input_size, hidden_size, output_size):
        super().__init__()
        self.hidden_size = hidden_size
        self.i2h = nn.Linear(input_size, hidden_size)
        self.h2h = nn.Linear(hidden_size, hidden_size)
        self.h2o = nn.Linear(hidden_size, output_size)

    def forward(self, letter, hidden):
        hidden = torch.tanh(self.i2h(letter) + self.h2h(hidden))
        return F.log_softmax(self.h2o(hidden), dim=1), hidden

    def init_hidden(self):
        return torch.zeros(1, self.hidden_size)


SYLLABLES = {
    "Italian": ["ro", "lli", "ni", "ca", "rossi", "bel", "tti", "mo"],
    "Japanese": ["ya", "ma", "ka", "to", "shi", "na", "ga", "wa"],
    "Polish": ["ski", "wicz", "kow", "cz", "sza", "dro", "now", "zy"],
}


def names_one_by_one(t: Training) -> None:
    """Whose language a surname is, letter by letter, one name a step, as the tutorial on character RNNs has it."""
    letters, categories = "abcdefghijklmnopqrstuvwxyz", list(SYLLABLES)

    def random_name(category):
        parts = SYLLABLES[category]
        return "".join(parts[int(i)] for i in torch.randint(len(parts), (int(torch.randint(2, 4, ())),)))

    def line_to_tensor(line):
        return F.one_hot(torch.tensor([letters.index(c) for c in line]), 26).float().unsqueeze(1)

    names = {category: [random_name(category) for _ in range(80)] for category in categories}
    held_out = {category: [random_name(category) for _ in range(20)] for category in categories}

    def random_training_example():
        category = int(torch.randint(3, ()))
        line = names[categories[category]][int(torch.randint(80, ()))]
        return torch.tensor([category]), line_to_tensor(line)

    t.model, t.loaded = LetterRNN(26, 48, 3), False
    t.optimizers_of = lambda tr: [optim.SGD(tr.model.parameters(), lr=0.02)]
    criterion = nn.NLLLoss()
    n_iters, print_every, plot_every = 900, 300, 100
    t.all_losses, t.printed = [], []

    def train(tr):
        rnn, optimizer, current_loss = tr.model, tr.optimizers[0], 0.0
        for it in range(1, n_iters + 1):
            category_tensor, line_tensor = random_training_example()
            hidden = rnn.init_hidden()
            optimizer.zero_grad()
            for i in range(line_tensor.size(0)):
                output, hidden = rnn(line_tensor[i], hidden)
            loss = criterion(output, category_tensor)
            loss.backward()
            nn.utils.clip_grad_norm_(rnn.parameters(), 3)
            optimizer.step()
            current_loss += loss.item()
            if it % print_every == 0:
                guess = categories[output.argmax(1).item()]
                t.printed.append(f"{it} {100 * it // n_iters}% {loss.item():.4f} {guess}")
            if it % plot_every == 0:
                t.all_losses.append(current_loss / plot_every)
                current_loss = 0.0
            yield loss.item()

        t.confusion = torch.zeros(3, 3)
        with torch.no_grad():
            for truth, category in enumerate(categories):
                for line in held_out[category]:
                    hidden = rnn.init_hidden()
                    for letter in line_to_tensor(line):
                        output, hidden = rnn(letter, hidden)
                    t.confusion[truth, output.argmax(1)] += 1

    t.loop = train


TEXTS: dict[Callable[[Training], None], str] = {
    attentive_reviews: "text",
    dates_transformer: "text",
    news_bags: "text",
    names_one_by_one: "text",
}
