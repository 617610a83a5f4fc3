"""Legal techniques with decoded sequences: scheduled sampling, alignments, a conditional random field."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import TensorDataset

from zoo.programs.training import Training

PAD, SOS, EOS = 0, 1, 2


class EncoderRNN(nn.Module):
    def __init__(self, input_size, hidden_size):
        super().__init__()
        self.embedding = nn.Embedding(input_size, hidden_size, padding_idx=PAD)
        self.gru = nn.GRU(hidden_size, hidden_size, batch_first=True)

    def forward(self, ids, lengths):
        packed = pack_padded_sequence(self.embedding(ids), lengths, batch_first=True, enforce_sorted=False)
        output, hidden = self.gru(packed)
        output, _ = pad_packed_sequence(output, batch_first=True, total_length=ids.size(1))
        return output, hidden


class AttnDecoderRNN(nn.Module):
    def __init__(self, hidden_size, output_size):
        super().__init__()
        self.embedding = nn.Embedding(output_size, hidden_size, padding_idx=PAD)
        self.Wa, self.Ua = nn.Linear(hidden_size, hidden_size), nn.Linear(hidden_size, hidden_size, bias=False)
        self.Va = nn.Linear(hidden_size, 1, bias=False)
        self.gru = nn.GRU(2 * hidden_size, hidden_size, batch_first=True)
        self.out = nn.Linear(hidden_size, output_size)

    def forward_step(self, ids, hidden, keys, mapped_keys, mask):
        scores = self.Va(torch.tanh(self.Wa(hidden.transpose(0, 1)) + mapped_keys)).squeeze(-1)
        weights = scores.masked_fill(~mask, -float("inf")).softmax(-1)
        context = torch.bmm(weights.unsqueeze(1), keys)
        output, hidden = self.gru(torch.cat([self.embedding(ids).unsqueeze(1), context], -1), hidden)
        return self.out(output.squeeze(1)), hidden

    def forward(self, encoder_outputs, hidden, mask, target, teacher_forcing_ratio):
        mapped = self.Ua(encoder_outputs)
        decoder_input, logits = torch.full_like(target[:, 0], SOS), []
        for i in range(target.size(1)):
            step, hidden = self.forward_step(decoder_input, hidden, encoder_outputs, mapped, mask)
            logits.append(step)
            predicted = step.argmax(-1).detach()
            forced = torch.rand(len(target)) < teacher_forcing_ratio
            decoder_input = torch.where(forced, target[:, i], predicted)
        return torch.stack(logits, 1)


def seq2seq_scheduled(t: Training) -> None:
    """Attention (Bahdanau et al., 2015), trained with scheduled sampling (Bengio et al., 2015): text turned around."""
    n, longest, vocab = 960, 7, 15
    lengths = torch.randint(3, longest + 1, (n,))
    source = torch.randint(3, vocab, (n, longest)) * (torch.arange(longest) < lengths[:, None])
    target = torch.zeros(n, longest + 1, dtype=torch.long)
    for row, words, length in zip(target, source, lengths):
        row[:length] = words[:length].flip(0)
        row[length] = EOS

    t.data, t.epochs = TensorDataset(source, lengths, target), 7
    t.model, decoder = EncoderRNN(vocab, 48), AttnDecoderRNN(48, vocab)
    t.extra.append(decoder)
    criterion = nn.CrossEntropyLoss(ignore_index=PAD)
    t.optimizers_of = lambda tr: [optim.Adam(m.parameters(), lr=5e-3) for m in (tr.model, decoder)]

    def train_step(tr, batch):
        input_tensor, input_lengths, target_tensor = batch
        encoder_optimizer, decoder_optimizer = tr.optimizers
        encoder_optimizer.zero_grad()
        decoder_optimizer.zero_grad()
        k = 40.0  # inverse sigmoid decay: the truth at first, later more and more of the model's own words
        ratio = k / (k + math.exp(tr.steps / k))
        outputs, hidden = tr.model(input_tensor, input_lengths)
        logits = decoder(outputs, hidden, input_tensor != PAD, target_tensor, ratio)
        loss = criterion(logits.view(-1, logits.size(-1)), target_tensor.view(-1))
        loss.backward()
        for m in (tr.model, decoder):
            nn.utils.clip_grad_norm_(m.parameters(), 1.0)
        encoder_optimizer.step()
        decoder_optimizer.step()
        return loss.detach()

    t.update = train_step


class Acoustic(nn.Module):
    def __init__(self, bands: int, symbols: int) -> None:
        super().__init__()
        self.front = nn.Conv1d(bands, 32, 3, padding=1)
        self.rnn = nn.GRU(32, 24, batch_first=True, bidirectional=True)
        self.out = nn.Linear(48, symbols + 1)  # 0 is the blank

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        h = self.front(x.transpose(1, 2)).relu().transpose(1, 2)
        packed = pack_padded_sequence(h, lengths, batch_first=True, enforce_sorted=False)
        h, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=x.shape[1])
        return self.out(h).log_softmax(-1)


def _edits(a: list[int], b: list[int]) -> int:
    row = list(range(len(b) + 1))
    for i, one in enumerate(a, 1):
        last, row[0] = row[0], i
        for j, other in enumerate(b, 1):
            last, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, last + (one != other))
    return row[-1]


def _utterances(n: int, symbols: int, bands: int) -> tuple[Tensor, ...]:
    """Spectra (n, 30, bands) with their lengths, transcripts (n, 6) with theirs."""
    sounds = torch.randn(symbols + 1, bands)
    x, frames = torch.zeros(n, 30, bands), torch.zeros(n, dtype=torch.long)
    words, sizes = torch.zeros(n, 6, dtype=torch.long), torch.randint(3, 7, (n,))
    for row, size in enumerate(sizes.tolist()):
        words[row, :size] = torch.randint(1, symbols + 1, (size,))
        paused = torch.stack([words[row, :size], torch.zeros_like(words[row, :size])], 1).flatten()
        times = torch.stack([torch.randint(2, 5, (size,)), torch.ones(size).long()], 1).flatten()
        spoken = paused.repeat_interleave(times)
        frames[row] = len(spoken)
        x[row, : len(spoken)] = sounds[spoken] + 0.4 * torch.randn(len(spoken), bands)
    return x, frames, words, sizes


def transcribed(t: Training) -> None:
    """CTC (Graves et al., 2006): greedy decoding and its errors after each epoch, a rate that falls at plateaus."""
    symbols = 6
    everything = _utterances(640 + 64, symbols, 8)
    t.data = TensorDataset(*(each[64:] for each in everything))
    x, frames, words, sizes = (each[:64] for each in everything)
    t.model, t.lr, t.epochs = Acoustic(8, symbols), 5e-3, 9
    t.scheduler_of = lambda optimizer: ReduceLROnPlateau(optimizer, factor=0.5, patience=1)

    def symbol_error(log_probs: Tensor) -> float:
        wrong = 0
        for best, length, word, size in zip(log_probs.argmax(-1), frames, words, sizes):
            heard = torch.unique_consecutive(best[:length])
            wrong += _edits(heard[heard != 0].tolist(), word[:size].tolist())
        return wrong / int(sizes.sum())

    def loop(training: Training) -> Iterator[Tensor]:
        model, (optimizer,), errors = training.model, training.optimizers, []
        for _ in range(training.epochs):
            model.train()
            for inputs, input_lengths, targets, target_lengths in training.batches:
                log_probs = model(inputs, input_lengths).transpose(0, 1)
                loss = F.ctc_loss(log_probs, targets, input_lengths, target_lengths, blank=0)
                optimizer.zero_grad(set_to_none=False)
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 5.0)
                optimizer.step()
                yield loss.detach()
            model.eval()
            with torch.inference_mode():
                log_probs = model(x, frames)
                valid = F.ctc_loss(log_probs.transpose(0, 1), words, frames, sizes, blank=0)
            errors.append(symbol_error(log_probs))
            training.scheduler.step(valid.item())

    t.loop = loop


class CRF(nn.Module):
    def __init__(self, tags: int) -> None:
        super().__init__()
        self.transitions = nn.Parameter(torch.empty(tags, tags).uniform_(-0.1, 0.1))
        self.start, self.end = (nn.Parameter(torch.empty(tags).uniform_(-0.1, 0.1)) for _ in range(2))

    def forward(self, emissions: Tensor, tags: Tensor, mask: Tensor) -> Tensor:
        """Log-likelihood (batch,) of tags."""
        return self.score(emissions, tags, mask) - self.normalizer(emissions, mask)

    def score(self, emissions: Tensor, tags: Tensor, mask: Tensor) -> Tensor:
        steps = emissions.gather(2, tags.unsqueeze(2)).squeeze(2)
        moves = self.transitions[tags[:, :-1], tags[:, 1:]]
        last = tags.gather(1, mask.sum(1, keepdim=True) - 1).squeeze(1)
        return self.start[tags[:, 0]] + (steps * mask).sum(1) + (moves * mask[:, 1:]).sum(1) + self.end[last]

    def normalizer(self, emissions: Tensor, mask: Tensor) -> Tensor:
        alpha = self.start + emissions[:, 0]
        for i in range(1, emissions.shape[1]):
            following = torch.logsumexp(alpha.unsqueeze(2) + self.transitions, dim=1) + emissions[:, i]
            alpha = torch.where(mask[:, i, None], following, alpha)
        return torch.logsumexp(alpha + self.end, dim=1)

    @torch.no_grad()
    def viterbi(self, emissions: Tensor) -> list[int]:
        """The best path of one sentence (length, tags)."""
        best, back = self.start + emissions[0], []
        for emission in emissions[1:]:
            best, where = (best.unsqueeze(1) + self.transitions + emission).max(0)
            back.append(where)
        path = [int((best + self.end).argmax())]
        for where in reversed(back):
            path.append(int(where[path[-1]]))
        return path[::-1]


class Tagger(nn.Module):
    def __init__(self, vocab: int, tags: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, 16, padding_idx=0)
        self.lstm = nn.LSTM(16, 16, batch_first=True, bidirectional=True)
        self.emit = nn.Linear(32, tags)
        self.crf = CRF(tags)

    def forward(self, tokens: Tensor) -> Tensor:
        lengths = (tokens != 0).sum(1)
        packed = pack_padded_sequence(self.embedding(tokens), lengths, batch_first=True, enforce_sorted=False)
        h, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=tokens.shape[1])
        return self.emit(h)


def tagged_sequences(t: Training) -> None:
    """BiLSTM-CRF (Lample et al., 2016): the partition function by the forward algorithm, Viterbi in evaluation."""
    n, length, tags = 640 + 64, 10, 5
    y = torch.zeros(n, length, dtype=torch.long)
    y[:, 0] = torch.randint(2, (n,))
    for i in range(1, length):
        y[:, i] = (y[:, i - 1] + torch.where(torch.rand(n) < 0.75, 1, 3)) % tags
    words = 1 + (4 * y + torch.randint(8, y.shape)) % 20  # every word may have two tags
    mask = torch.arange(length) < torch.randint(5, length + 1, (n, 1))
    words, y = words * mask, y * mask
    t.data, accuracy = TensorDataset(words[64:], y[64:], mask[64:]), []
    t.model, t.lr, t.epochs = Tagger(21, tags), 1e-2, 6

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        words, y, mask = batch
        return -model.crf(model(words), y, mask).mean()

    @torch.no_grad()
    def evaluate(training: Training, epoch: int) -> None:
        model, right = training.model.eval(), 0
        for emissions, tags, size in zip(model(words[:64]), y[:64], mask[:64].sum(1).tolist()):
            right += sum(a == b for a, b in zip(model.crf.viterbi(emissions[:size]), tags.tolist()))
        accuracy.append(right / int(mask[:64].sum()))
        model.train()

    t.loss = loss
    t.each_epoch.append(evaluate)
