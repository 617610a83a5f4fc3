"""After salesforce/awd-lstm-lm: an LSTM whose state is carried over windows of random length, with AR and TAR."""

import math
import os
import time
from argparse import Namespace

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

from zoo.public import Result
from zoo.public.data import sentences


class Dictionary:
    def __init__(self):
        self.word2idx, self.idx2word = {}, []

    def add_word(self, word):
        if word not in self.word2idx:
            self.idx2word.append(word)
            self.word2idx[word] = len(self.idx2word) - 1
        return self.word2idx[word]


class Corpus:
    def __init__(self):
        self.dictionary = Dictionary()
        lines = [line.split() + ["<eos>"] for line in sentences(1400)]
        self.train = self.tokenize(lines[:1100])
        self.valid = self.tokenize(lines[1100:1250])
        self.test = self.tokenize(lines[1250:])

    def tokenize(self, lines):
        return torch.tensor([self.dictionary.add_word(word) for line in lines for word in line])


def batchify(data, bsz):
    nbatch = data.size(0) // bsz
    return data[: nbatch * bsz].view(bsz, -1).t().contiguous()


def repackage_hidden(h):
    """The same values, cut from their history."""
    return h.detach() if isinstance(h, torch.Tensor) else tuple(repackage_hidden(v) for v in h)


def get_batch(source, i, args, seq_len=None):
    seq_len = min(seq_len if seq_len else args.bptt, len(source) - 1 - i)
    return source[i : i + seq_len], source[i + 1 : i + 1 + seq_len].view(-1)


class LockedDropout(nn.Module):
    """One mask for all time steps."""

    def forward(self, x, dropout=0.5):
        if not self.training or not dropout:
            return x
        mask = x.new_empty(1, x.size(1), x.size(2)).bernoulli_(1 - dropout) / (1 - dropout)
        return mask.expand_as(x) * x


class RNNModel(nn.Module):
    def __init__(self, ntoken, ninp, nhid, nlayers, dropout, dropouth, dropouti, dropoute, tie_weights):
        super().__init__()
        self.lockdrop = LockedDropout()
        self.encoder = nn.Embedding(ntoken, ninp)
        sizes = [ninp] + [nhid] * (nlayers - 1) + [ninp]
        self.rnns = nn.ModuleList(nn.LSTM(a, b) for a, b in zip(sizes, sizes[1:]))
        self.decoder = nn.Linear(ninp, ntoken)
        if tie_weights:
            self.decoder.weight = self.encoder.weight
        self.encoder.weight.data.uniform_(-0.1, 0.1)
        self.decoder.bias.data.fill_(0)
        self.sizes = sizes[1:]
        self.dropout, self.dropouth, self.dropouti, self.dropoute = dropout, dropouth, dropouti, dropoute

    def embedded_dropout(self, words):
        weight = self.encoder.weight
        if self.training and self.dropoute:
            keep = weight.new_empty(weight.size(0), 1).bernoulli_(1 - self.dropoute) / (1 - self.dropoute)
            weight = keep.expand_as(weight) * weight
        return F.embedding(words, weight)

    def forward(self, input, hidden, return_h=False):
        raw_output = self.lockdrop(self.embedded_dropout(input), self.dropouti)
        new_hidden, raw_outputs, outputs = [], [], []
        for layer, rnn in enumerate(self.rnns):
            raw_output, new_h = rnn(raw_output, hidden[layer])
            new_hidden.append(new_h)
            raw_outputs.append(raw_output)
            if layer != len(self.rnns) - 1:
                raw_output = self.lockdrop(raw_output, self.dropouth)
                outputs.append(raw_output)
        output = self.lockdrop(raw_output, self.dropout)
        outputs.append(output)
        decoded = self.decoder(output.view(-1, output.size(2)))
        if return_h:
            return decoded, new_hidden, raw_outputs, outputs
        return decoded, new_hidden

    def init_hidden(self, bsz):
        weight = next(self.parameters()).data
        return [(weight.new_zeros(1, bsz, size), weight.new_zeros(1, bsz, size)) for size in self.sizes]


def main(watch, seed, folder):
    args = Namespace(
        emsize=48, nhid=96, nlayers=2, lr=8.0, clip=0.25, epochs=10, batch_size=12, bptt=20,
        dropout=0.1, dropouth=0.1, dropouti=0.1, dropoute=0.0, alpha=0.2, beta=0.1, wdecay=1.2e-6,
        seed=1111 + seed, log_interval=20, save=os.path.join(folder, "model.pt"), when=[8],
    )  # fmt: skip
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)

    print("Producing dataset...")
    corpus = Corpus()
    eval_batch_size = 10
    train_data = batchify(corpus.train, args.batch_size)
    val_data = batchify(corpus.valid, eval_batch_size)
    test_data = batchify(corpus.test, 1)

    ntokens = len(corpus.dictionary.idx2word)
    drops = (args.dropout, args.dropouth, args.dropouti, args.dropoute)
    model = RNNModel(ntokens, args.emsize, args.nhid, args.nlayers, *drops, tie_weights=True)
    criterion = nn.CrossEntropyLoss()
    params = list(model.parameters()) + list(criterion.parameters())
    print("Args:", {k: v for k, v in vars(args).items() if k != "save"})
    print("Model total parameters:", sum(x.numel() for x in params))
    optimizer = torch.optim.SGD(params, lr=args.lr, weight_decay=args.wdecay)
    history = []

    def evaluate(data_source, batch_size=10):
        model.eval()
        total_loss = 0
        hidden = model.init_hidden(batch_size)
        for i in range(0, data_source.size(0) - 1, args.bptt):
            data, targets = get_batch(data_source, i, args)
            output, hidden = model(data, hidden)
            total_loss += len(data) * criterion(output, targets).data
            hidden = repackage_hidden(hidden)
        return total_loss.item() / len(data_source)

    def train():
        total_loss = 0
        start_time = time.time()
        hidden = model.init_hidden(args.batch_size)
        batch, i = 0, 0
        while i < train_data.size(0) - 1 - 1:
            bptt = args.bptt if np.random.random() < 0.95 else args.bptt / 2.0
            seq_len = max(5, int(np.random.normal(bptt, 5)))
            lr2 = optimizer.param_groups[0]["lr"]
            optimizer.param_groups[0]["lr"] = lr2 * seq_len / args.bptt
            model.train()
            data, targets = get_batch(train_data, i, args, seq_len=seq_len)

            hidden = repackage_hidden(hidden)
            optimizer.zero_grad()
            output, hidden, rnn_hs, dropped_rnn_hs = model(data, hidden, return_h=True)
            raw_loss = criterion(output, targets)
            loss = raw_loss
            if args.alpha:
                loss = loss + sum(args.alpha * dropped_rnn_h.pow(2).mean() for dropped_rnn_h in dropped_rnn_hs[-1:])
            if args.beta and len(data) > 1:
                loss = loss + sum(args.beta * (rnn_h[1:] - rnn_h[:-1]).pow(2).mean() for rnn_h in rnn_hs[-1:])
            loss.backward()
            if args.clip:
                torch.nn.utils.clip_grad_norm_(params, args.clip)
            optimizer.step()

            history.append(raw_loss.item())
            total_loss += raw_loss.data
            optimizer.param_groups[0]["lr"] = lr2
            if batch % args.log_interval == 0 and batch > 0:
                cur_loss = total_loss.item() / args.log_interval
                elapsed = time.time() - start_time
                print(
                    f"| epoch {epoch:3d} | {batch:5d}/{len(train_data) // args.bptt:5d} batches | lr {lr2:05.5f} | "
                    f"ms/batch {elapsed * 1000 / args.log_interval:5.2f} | loss {cur_loss:5.2f} | "
                    f"ppl {math.exp(cur_loss):8.2f} | bpc {cur_loss / math.log(2):8.3f}"
                )
                total_loss = 0
                start_time = time.time()
            batch += 1
            i += seq_len

    def model_save(fn):
        with open(fn, "wb") as f:
            torch.save([model, criterion, optimizer], f)

    stored_loss = 100000000
    with watch(model, optimizer):
        for epoch in range(1, args.epochs + 1):
            epoch_start_time = time.time()
            train()
            val_loss = evaluate(val_data, eval_batch_size)
            print("-" * 89)
            print(
                f"| end of epoch {epoch:3d} | time: {time.time() - epoch_start_time:5.2f}s | "
                f"valid loss {val_loss:5.2f} | "
                f"valid ppl {math.exp(val_loss):8.2f} | valid bpc {val_loss / math.log(2):8.3f}"
            )
            print("-" * 89)
            if val_loss < stored_loss:
                model_save(args.save)
                print("Saving model (new best validation)")
                stored_loss = val_loss
            if epoch in args.when:
                print("Saving model before learning rate decreased")
                model_save(f"{args.save}.e{epoch}")
                print("Dividing learning rate by 10")
                optimizer.param_groups[0]["lr"] /= 10.0

    with open(args.save, "rb") as f:
        model, criterion, optimizer = torch.load(f, weights_only=False)
    test_loss = evaluate(test_data, 1)
    print("=" * 89)
    print(f"| End of training | test loss {test_loss:5.2f} | test ppl {math.exp(test_loss):8.2f}")
    print("=" * 89)
    objects = {"model": model, "optimizer": optimizer}
    return Result("test perplexity", math.exp(test_loss), 4.0, history, objects, higher_is_better=False)
