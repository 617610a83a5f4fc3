"""After salesforce/awd-lstm-lm: an LSTM whose state is carried over windows of random length, with AR and TAR."""

import math
import time
from argparse import Namespace

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from zoo.public import Result
from zoo.public.data import sentences


class Corpus:
    def __init__(self):
        lines = [[*line.split(), "<eos>"] for line in sentences(1400)]
        self.word2idx = {word: i for i, word in enumerate(dict.fromkeys(w for line in lines for w in line))}
        self.train, self.valid, self.test = map(self.encode, (lines[:1100], lines[1100:1250], lines[1250:]))

    def encode(self, lines):
        return torch.tensor([self.word2idx[word] for line in lines for word in line])


def batchify(tokens, columns):
    """Splits one long text (n,) into consecutive columns: (n // columns, columns)."""
    rows = len(tokens) // columns
    return tokens[: rows * columns].view(columns, rows).t().contiguous()


def repackage_hidden(h):
    """Detaches all tensors of a nested hidden state."""
    return h.detach() if torch.is_tensor(h) else type(h)(map(repackage_hidden, h))


def window(source, start, length):
    length = min(length, len(source) - 1 - start)
    return source[start : start + length], source[start + 1 : start + 1 + length].flatten()


class LockedDropout(nn.Module):
    """Dropout with the same mask at all time steps."""

    def forward(self, x, p):
        if not (self.training and p):
            return x
        return x * F.dropout(torch.ones_like(x[:1]), p)


class RNNModel(nn.Module):
    def __init__(self, ntoken, ninp, nhid, nlayers, dropout, dropouth, dropouti, dropoute):
        super().__init__()
        sizes = [ninp, *[nhid] * (nlayers - 1), ninp]
        self.encoder, self.decoder = nn.Embedding(ntoken, ninp), nn.Linear(ninp, ntoken)
        self.rnns = nn.ModuleList([nn.LSTM(a, b) for a, b in zip(sizes[:-1], sizes[1:])])
        self.lockdrop = LockedDropout()
        self.decoder.weight = self.encoder.weight  # tied
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)
        self.dropout, self.dropouth, self.dropouti, self.dropoute = dropout, dropouth, dropouti, dropoute

    def embed(self, words):
        table = self.encoder.weight
        if self.training and self.dropoute:  # leaves out whole words
            table = table * F.dropout(table.new_ones(len(table), 1), self.dropoute)
        return F.embedding(words, table)

    def forward(self, words, hidden, return_h=False):
        x = self.lockdrop(self.embed(words), self.dropouti)
        states, raw, dropped = [], [], []
        for i, (rnn, state) in enumerate(zip(self.rnns, hidden)):
            x, state = rnn(x, state)
            states.append(state)
            raw.append(x)
            x = self.lockdrop(x, self.dropout if i + 1 == len(self.rnns) else self.dropouth)
            dropped.append(x)
        decoded = self.decoder(x.flatten(0, 1))
        return (decoded, states, raw, dropped) if return_h else (decoded, states)

    def init_hidden(self, columns):
        weight = self.encoder.weight.data
        return [tuple(weight.new_zeros(1, columns, rnn.hidden_size) for _ in "hc") for rnn in self.rnns]


def shown(loss):
    return f"loss {loss:5.2f} | ppl {math.exp(loss):8.2f} | bpc {loss / math.log(2):8.3f}"


def main(watch, seed, folder):
    args = Namespace(
        emsize=48, nhid=96, nlayers=2, lr=8.0, clip=0.25, epochs=10, batch_size=12, bptt=20,
        dropout=0.1, dropouth=0.1, dropouti=0.1, dropoute=0.0, alpha=0.2, beta=0.1, wdecay=1.2e-6,
        seed=1111 + seed, log_interval=20, when=[8],
    )  # fmt: skip
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    save = folder / "model.pt"
    corpus = Corpus()
    train_data, val_data, test_data = batchify(corpus.train, args.batch_size), batchify(corpus.valid, 10), corpus.test
    model = RNNModel(
        len(corpus.word2idx), args.emsize, args.nhid, args.nlayers, args.dropout, args.dropouth, args.dropouti,
        args.dropoute,
    )  # fmt: skip
    criterion = nn.CrossEntropyLoss()
    params = [*model.parameters(), *criterion.parameters()]
    print("Args:", args)
    print("Model total parameters:", sum(p.numel() for p in params))
    optimizer = torch.optim.SGD(params, lr=args.lr, weight_decay=args.wdecay)
    history = []

    def evaluate(source, columns):
        model.eval()
        total, hidden = 0.0, model.init_hidden(columns)
        for start in range(0, len(source) - 1, args.bptt):
            words, targets = window(source, start, args.bptt)
            output, hidden = model(words, hidden)
            total += len(words) * criterion(output, targets).item()
            hidden = repackage_hidden(hidden)
        return total / len(source)

    def train(epoch):
        since, started = [], time.time()
        hidden = model.init_hidden(args.batch_size)
        start = batch = 0
        while start < len(train_data) - 2:
            usual = args.bptt if np.random.random() < 0.95 else args.bptt / 2
            seq_len = max(5, int(np.random.normal(usual, 5)))
            group = optimizer.param_groups[0]
            lr, group["lr"] = group["lr"], group["lr"] * seq_len / args.bptt
            model.train()
            words, targets = window(train_data, start, seq_len)

            hidden = repackage_hidden(hidden)
            optimizer.zero_grad()
            output, hidden, raw, dropped = model(words, hidden, return_h=True)
            raw_loss = criterion(output, targets)
            loss = raw_loss + args.alpha * dropped[-1].pow(2).mean()  # AR
            if len(words) > 1:
                loss = loss + args.beta * raw[-1].diff(dim=0).pow(2).mean()  # TAR
            loss.backward()
            nn.utils.clip_grad_norm_(params, args.clip)
            optimizer.step()
            group["lr"] = lr

            since.append(raw_loss.item())
            history.append(raw_loss.item())
            start, batch = start + seq_len, batch + 1
            if batch % args.log_interval == 0:
                ms = (time.time() - started) * 1000 / len(since)
                where = f"| epoch {epoch:3d} | {batch:5d}/{len(train_data) // args.bptt:5d} batches | lr {lr:05.5f} "
                print(f"{where}| ms/batch {ms:5.2f} | {shown(sum(since) / len(since))}")
                since, started = [], time.time()

    def model_save(path):
        with open(path, "wb") as file:
            torch.save([model, criterion, optimizer], file)

    stored_loss = math.inf
    with watch(model, optimizer):
        for epoch in range(1, args.epochs + 1):
            begun = time.time()
            train(epoch)
            val_loss = evaluate(val_data, 10)
            print("-" * 89)
            print(f"| end of epoch {epoch:3d} | time: {time.time() - begun:5.2f}s | valid {shown(val_loss)}")
            print("-" * 89)
            if val_loss < stored_loss:
                model_save(save)
                print("Saving model (new best validation)")
                stored_loss = val_loss
            if epoch in args.when:
                print("Saving model, then dividing the learning rate by 10")
                model_save(folder / f"model.pt.e{epoch}")
                optimizer.param_groups[0]["lr"] /= 10.0

    with open(save, "rb") as file:
        model, criterion, optimizer = torch.load(file, weights_only=False)
    test_loss = evaluate(batchify(test_data, 1), 1)
    print("=" * 89)
    print(f"| End of training | test {shown(test_loss)}")
    print("=" * 89)
    objects = {"model": model, "optimizer": optimizer}
    return Result("test perplexity", math.exp(test_loss), 4.0, history, objects, higher_is_better=False)
