"""After harvardnlp/annotated-transformer: the copy task with label smoothing, Noam's schedule and greedy decoding."""

import copy
import math
import time
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from zoo.public import Result

PAD, START = 0, 1


def clones(module, N):
    return nn.ModuleList(copy.deepcopy(module) for _ in range(N))


def subsequent_mask(size):
    """True where a position may attend: to itself and to those before it."""
    return torch.ones(1, size, size, dtype=torch.bool).tril()


class LayerNorm(nn.Module):
    def __init__(self, features, eps=1e-6):
        super().__init__()
        self.gain, self.shift = nn.Parameter(torch.ones(features)), nn.Parameter(torch.zeros(features))
        self.eps = eps

    def forward(self, x):
        centred = x - x.mean(-1, keepdim=True)
        return self.gain * centred / (x.std(-1, keepdim=True) + self.eps) + self.shift


class Sublayer(nn.Module):
    """A pre-norm residual connection: ``x + dropout(inner(norm(x)))``."""

    def __init__(self, size, dropout):
        super().__init__()
        self.norm, self.dropout = LayerNorm(size), nn.Dropout(dropout)

    def forward(self, x, inner):
        return x + self.dropout(inner(self.norm(x)))


class MultiHeadedAttention(nn.Module):
    def __init__(self, heads, size, dropout):
        super().__init__()
        self.heads = heads
        self.linears = clones(nn.Linear(size, size), 4)
        self.dropout = nn.Dropout(dropout)
        self.attn = None  # the last attention weights, for plots

    def split(self, linear, x):
        return linear(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, query, key, value, mask):
        q, k, v = (self.split(linear, x) for linear, x in zip(self.linears, (query, key, value)))
        scores = q @ k.mT / math.sqrt(q.size(-1))
        self.attn = self.dropout(scores.masked_fill(~mask.unsqueeze(1), -1e9).softmax(-1))
        return self.linears[3]((self.attn @ v).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """A layer of the encoder, or with ``src_attn`` of the decoder."""

    def __init__(self, size, self_attn, src_attn, feed_forward, dropout):
        super().__init__()
        self.self_attn, self.src_attn, self.feed_forward = self_attn, src_attn, feed_forward
        self.sublayers = clones(Sublayer(size, dropout), 2 if src_attn is None else 3)

    def forward(self, x, mask, memory=None, memory_mask=None):
        x = self.sublayers[0](x, lambda h: self.self_attn(h, h, h, mask))
        if self.src_attn is not None:
            x = self.sublayers[1](x, lambda h: self.src_attn(h, memory, memory, memory_mask))
        return self.sublayers[-1](x, self.feed_forward)


class Stack(nn.Module):
    def __init__(self, layer, N, size):
        super().__init__()
        self.layers, self.norm = clones(layer, N), LayerNorm(size)

    def forward(self, x, *context):
        for layer in self.layers:
            x = layer(x, *context)
        return self.norm(x)


class Embedding(nn.Module):
    """Scaled token embeddings plus sinusoidal positional encodings."""

    def __init__(self, vocab, size, dropout, longest=64):
        super().__init__()
        self.table, self.dropout = nn.Embedding(vocab, size), nn.Dropout(dropout)
        angles = torch.arange(longest)[:, None] * torch.exp(torch.arange(0, size, 2) / size * -math.log(1e4))
        self.register_buffer("pe", torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1))

    def forward(self, tokens):
        x = self.table(tokens) * math.sqrt(self.table.embedding_dim)
        return self.dropout(x + self.pe[: tokens.size(1)])


class EncoderDecoder(nn.Module):
    """``forward`` does not call ``generator``: the loss does."""

    def __init__(self, vocab, N=2, size=32, inner=64, heads=4, dropout=0.1):
        super().__init__()
        attn = MultiHeadedAttention(heads, size, dropout)
        ff = nn.Sequential(nn.Linear(size, inner), nn.ReLU(), nn.Dropout(dropout), nn.Linear(inner, size))
        own = copy.deepcopy
        self.encoder = Stack(Layer(size, own(attn), None, own(ff), dropout), N, size)
        self.decoder = Stack(Layer(size, own(attn), own(attn), own(ff), dropout), N, size)
        self.src_embed, self.tgt_embed = Embedding(vocab, size, dropout), Embedding(vocab, size, dropout)
        self.generator = nn.Sequential(nn.Linear(size, vocab), nn.LogSoftmax(dim=-1))
        self.size = size
        for matrix in (p for p in self.parameters() if p.dim() > 1):
            nn.init.xavier_uniform_(matrix)

    def encode(self, src, src_mask):
        return self.encoder(self.src_embed(src), src_mask)

    def decode(self, memory, src_mask, tgt, tgt_mask):
        return self.decoder(self.tgt_embed(tgt), tgt_mask, memory, src_mask)

    def forward(self, src, tgt, src_mask, tgt_mask):
        return self.decode(self.encode(src, src_mask), src_mask, tgt, tgt_mask)


class Batch:
    def __init__(self, src, tgt):
        self.src, self.tgt, self.tgt_y = src, tgt[:, :-1], tgt[:, 1:]
        self.src_mask = (src != PAD)[:, None]
        self.tgt_mask = (self.tgt != PAD)[:, None] & subsequent_mask(self.tgt.size(1))
        self.ntokens = int((self.tgt_y != PAD).sum())


def data_gen(vocab, batch_size, nbatches):
    """The copy task: source and target are the same 6 to 9 random tokens, padded to 9."""
    for _ in range(nbatches):
        data = torch.randint(1, vocab, (batch_size, 9))
        data[:, 0] = START
        data[torch.arange(9) >= torch.randint(6, 10, (batch_size, 1))] = PAD
        yield Batch(data, data.clone())


class LabelSmoothing(nn.Module):
    def __init__(self, size, smoothing):
        super().__init__()
        self.criterion = nn.KLDivLoss(reduction="sum")
        self.size, self.smoothing = size, smoothing

    def forward(self, log_probs, target):
        wanted = torch.full_like(log_probs, self.smoothing / (self.size - 2))
        wanted.scatter_(1, target[:, None], 1.0 - self.smoothing)
        wanted[:, PAD] = 0
        wanted[target == PAD] = 0
        return self.criterion(log_probs, wanted.detach())


class LossCompute:
    def __init__(self, generator, criterion, history=None):
        self.generator, self.criterion, self.history = generator, criterion, history

    def __call__(self, out, y, norm):
        node = self.criterion(self.generator(out).flatten(0, 1), y.flatten()) / norm
        if self.history is not None:
            self.history.append(node.item())
        return node.data * norm, node


@dataclass
class TrainState:
    step: int = 0
    samples: int = 0
    tokens: int = 0


class Nothing:
    """Stands in for the optimizer and the scheduler in an evaluation."""

    param_groups = ({"lr": 0.0},)

    def step(self):
        pass

    def zero_grad(self, set_to_none=True):
        pass


def run_epoch(batches, model, loss_compute, optimizer, scheduler, mode, state):
    begun, tokens_since, total_tokens, total_loss = time.time(), 0, 0, 0.0
    for i, batch in enumerate(batches):
        out = model(batch.src, batch.tgt, batch.src_mask, batch.tgt_mask)
        loss, loss_node = loss_compute(out, batch.tgt_y, batch.ntokens)
        if mode == "train":
            loss_node.backward()
            state.step += 1
            state.samples += len(batch.src)
            state.tokens += batch.ntokens
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            scheduler.step()
        total_loss += loss
        total_tokens += batch.ntokens
        tokens_since += batch.ntokens
        if mode == "train" and i % 20 == 1:
            speed = tokens_since / (time.time() - begun)
            lr = optimizer.param_groups[0]["lr"]
            print(
                f"Epoch Step: {i:6d} | Loss: {loss / batch.ntokens:6.2f} | Tokens / Sec: {speed:7.1f}/s "
                f"| Learning Rate: {lr:6.1e}"
            )
            begun, tokens_since = time.time(), 0
        del loss, loss_node
    return total_loss / total_tokens


def noam(step, size, factor, warmup):
    step = max(step, 1)
    return factor * size**-0.5 * min(step**-0.5, step * warmup**-1.5)


def greedy_decode(model, src, length):
    mask = torch.ones(1, 1, src.size(1), dtype=torch.bool)
    memory = model.encode(src, mask)
    ys = torch.full((1, 1), START)
    while ys.size(1) < length:
        out = model.decode(memory, mask, ys, subsequent_mask(ys.size(1)))
        ys = torch.cat([ys, model.generator(out[:, -1]).argmax(1, keepdim=True)], dim=1)
    return ys


def main(watch, seed, folder):
    torch.manual_seed(seed)
    V, batch_size, epochs = 11, 32, 6
    model = EncoderDecoder(V)
    criterion = LabelSmoothing(V, smoothing=0.1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1.0, betas=(0.9, 0.98), eps=1e-9)
    lr_scheduler = LambdaLR(optimizer, lambda step: noam(step, model.size, factor=1.0, warmup=100))
    history, state = [], TrainState()
    with watch(model, optimizer, scheduler=lr_scheduler):
        for epoch in range(epochs):
            print(f"Epoch {epoch} Training ====")
            model.train()
            compute = LossCompute(model.generator, criterion, history)
            run_epoch(data_gen(V, batch_size, 40), model, compute, optimizer, lr_scheduler, "train", state)
            print(f"Epoch {epoch} Validation ====")
            model.eval()
            compute = LossCompute(model.generator, criterion)
            print(run_epoch(data_gen(V, batch_size, 5), model, compute, Nothing(), Nothing(), "eval", state))
            torch.save(model.state_dict(), folder / f"copy_{epoch:02d}.pt")

    model.eval()
    print("Example:", greedy_decode(model, torch.arange(1, 10)[None], 9))
    right = 0
    for _ in range(10):
        src = torch.cat([torch.full((1, 1), START), torch.randint(1, V, (1, 8))], dim=1)
        right += int((greedy_decode(model, src, 9) == src).sum())
    objects = {"model": model, "optimizer": optimizer, "lr_scheduler": lr_scheduler}
    return Result("tokens copied", right / 90, 0.6, history, objects)
