"""After the PyTorch tutorial "NLP from scratch": GRU encoder, Bahdanau attention, teacher forcing, two optimizers."""

import math
import random
import time

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import optim
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from zoo.public import Result
from zoo.public.data import sentences

SOS_token = 0
EOS_token = 1
MAX_LENGTH = 14
device = torch.device("cpu")


class Lang:
    def __init__(self, name):
        self.name = name
        self.word2index = {}
        self.word2count = {}
        self.index2word = {0: "SOS", 1: "EOS"}
        self.n_words = 2

    def addSentence(self, sentence):
        for word in sentence.split(" "):
            if word not in self.word2index:
                self.word2index[word] = self.n_words
                self.word2count[word] = 1
                self.index2word[self.n_words] = word
                self.n_words += 1
            else:
                self.word2count[word] += 1


def foreign(sentence):
    """The language of the targets: each word is spelled backwards, and the last two come first."""
    words = [word[::-1] for word in sentence.split(" ")]
    return " ".join(words[-2:] + words[:-2])


def prepareData(n):
    pairs = [[line, foreign(line)] for line in sentences(n)]
    input_lang, output_lang = Lang("eng"), Lang("gne")
    print(f"Read {len(pairs)} sentence pairs")
    for pair in pairs:
        input_lang.addSentence(pair[0])
        output_lang.addSentence(pair[1])
    print("Counted words:")
    print(input_lang.name, input_lang.n_words)
    print(output_lang.name, output_lang.n_words)
    return input_lang, output_lang, pairs


class EncoderRNN(nn.Module):
    def __init__(self, input_size, hidden_size, dropout_p=0.1):
        super().__init__()
        self.hidden_size = hidden_size
        self.embedding = nn.Embedding(input_size, hidden_size)
        self.gru = nn.GRU(hidden_size, hidden_size, batch_first=True)
        self.dropout = nn.Dropout(dropout_p)

    def forward(self, input):
        embedded = self.dropout(self.embedding(input))
        output, hidden = self.gru(embedded)
        return output, hidden


class BahdanauAttention(nn.Module):
    def __init__(self, hidden_size):
        super().__init__()
        self.Wa = nn.Linear(hidden_size, hidden_size)
        self.Ua = nn.Linear(hidden_size, hidden_size)
        self.Va = nn.Linear(hidden_size, 1)

    def forward(self, query, keys):
        scores = self.Va(torch.tanh(self.Wa(query) + self.Ua(keys)))
        scores = scores.squeeze(2).unsqueeze(1)
        weights = F.softmax(scores, dim=-1)
        context = torch.bmm(weights, keys)
        return context, weights


class AttnDecoderRNN(nn.Module):
    def __init__(self, hidden_size, output_size, dropout_p=0.1):
        super().__init__()
        self.embedding = nn.Embedding(output_size, hidden_size)
        self.attention = BahdanauAttention(hidden_size)
        self.gru = nn.GRU(2 * hidden_size, hidden_size, batch_first=True)
        self.out = nn.Linear(hidden_size, output_size)
        self.dropout = nn.Dropout(dropout_p)

    def forward(self, encoder_outputs, encoder_hidden, target_tensor=None, teacher_forcing_ratio=1.0):
        batch_size = encoder_outputs.size(0)
        decoder_input = torch.empty(batch_size, 1, dtype=torch.long, device=device).fill_(SOS_token)
        decoder_hidden = encoder_hidden
        decoder_outputs = []
        attentions = []
        for i in range(MAX_LENGTH):
            decoder_output, decoder_hidden, attn_weights = self.forward_step(
                decoder_input, decoder_hidden, encoder_outputs
            )
            decoder_outputs.append(decoder_output)
            attentions.append(attn_weights)
            if target_tensor is not None and random.random() < teacher_forcing_ratio:
                decoder_input = target_tensor[:, i].unsqueeze(1)
            else:
                _, topi = decoder_output.topk(1)
                decoder_input = topi.squeeze(-1).detach()
        decoder_outputs = F.log_softmax(torch.cat(decoder_outputs, dim=1), dim=-1)
        return decoder_outputs, decoder_hidden, torch.cat(attentions, dim=1)

    def forward_step(self, input, hidden, encoder_outputs):
        embedded = self.dropout(self.embedding(input))
        query = hidden.permute(1, 0, 2)
        context, attn_weights = self.attention(query, encoder_outputs)
        output, hidden = self.gru(torch.cat((embedded, context), dim=2), hidden)
        return self.out(output), hidden, attn_weights


def indexesFromSentence(lang, sentence):
    return [lang.word2index[word] for word in sentence.split(" ")]


def tensorFromSentence(lang, sentence):
    indexes = indexesFromSentence(lang, sentence)
    indexes.append(EOS_token)
    return torch.tensor(indexes, dtype=torch.long, device=device).view(1, -1)


def get_dataloader(pairs, input_lang, output_lang, batch_size):
    input_ids = np.zeros((len(pairs), MAX_LENGTH), dtype=np.int32)
    target_ids = np.zeros((len(pairs), MAX_LENGTH), dtype=np.int32)
    for idx, (inp, tgt) in enumerate(pairs):
        inp_ids = [*indexesFromSentence(input_lang, inp), EOS_token]
        tgt_ids = [*indexesFromSentence(output_lang, tgt), EOS_token]
        input_ids[idx, : len(inp_ids)] = inp_ids
        target_ids[idx, : len(tgt_ids)] = tgt_ids
    train_data = TensorDataset(torch.LongTensor(input_ids), torch.LongTensor(target_ids))
    return DataLoader(train_data, sampler=RandomSampler(train_data), batch_size=batch_size)


def asMinutes(s):
    m = math.floor(s / 60)
    return f"{m:d}m {s - m * 60:d}s" if isinstance(s, int) else f"{m:d}m {int(s - m * 60):d}s"


def timeSince(since, percent):
    s = time.time() - since
    return f"{asMinutes(s)} (- {asMinutes(s / percent - s)})"


def train_epoch(dataloader, encoder, decoder, encoder_optimizer, decoder_optimizer, criterion, ratio, history):
    total_loss = 0
    for input_tensor, target_tensor in dataloader:
        encoder_optimizer.zero_grad()
        decoder_optimizer.zero_grad()
        encoder_outputs, encoder_hidden = encoder(input_tensor)
        decoder_outputs, _, _ = decoder(encoder_outputs, encoder_hidden, target_tensor, ratio)
        loss = criterion(decoder_outputs.view(-1, decoder_outputs.size(-1)), target_tensor.view(-1))
        loss.backward()
        encoder_optimizer.step()
        decoder_optimizer.step()
        total_loss += loss.item()
        history.append(loss.item())
    return total_loss / len(dataloader)


def train(train_dataloader, encoder, decoder, n_epochs, watch, learning_rate, print_every, plot_every, folder):
    start = time.time()
    plot_losses, history = [], []
    print_loss_total = 0
    plot_loss_total = 0
    encoder_optimizer = optim.Adam(encoder.parameters(), lr=learning_rate)
    decoder_optimizer = optim.Adam(decoder.parameters(), lr=learning_rate)
    criterion = nn.NLLLoss()
    with watch([encoder, decoder], [encoder_optimizer, decoder_optimizer], loader=train_dataloader):
        for epoch in range(1, n_epochs + 1):
            ratio = max(0.5, 1.0 - 0.5 * epoch / n_epochs)
            loss = train_epoch(
                train_dataloader, encoder, decoder, encoder_optimizer, decoder_optimizer, criterion, ratio, history
            )
            print_loss_total += loss
            plot_loss_total += loss
            if epoch % print_every == 0:
                print_loss_avg = print_loss_total / print_every
                print_loss_total = 0
                print(
                    f"{timeSince(start, epoch / n_epochs)} ({epoch} {epoch / n_epochs * 100:.0f}%) {print_loss_avg:.4f}"
                )
            if epoch % plot_every == 0:
                plot_losses.append(plot_loss_total / plot_every)
                plot_loss_total = 0
    np.savetxt(folder / "plot_losses.txt", plot_losses)
    return encoder_optimizer, decoder_optimizer, history


def evaluate(encoder, decoder, sentence, input_lang, output_lang):
    with torch.no_grad():
        input_tensor = tensorFromSentence(input_lang, sentence)
        encoder_outputs, encoder_hidden = encoder(input_tensor)
        decoder_outputs, _, decoder_attn = decoder(encoder_outputs, encoder_hidden)
        _, topi = decoder_outputs.topk(1)
        decoded_words = []
        for idx in topi.squeeze():
            if idx.item() == EOS_token:
                decoded_words.append("<EOS>")
                break
            decoded_words.append(output_lang.index2word[idx.item()])
    return decoded_words, decoder_attn


def evaluateRandomly(encoder, decoder, pairs, input_lang, output_lang, n=5):
    for _ in range(n):
        pair = random.choice(pairs)
        print(">", pair[0])
        print("=", pair[1])
        output_words, _ = evaluate(encoder, decoder, pair[0], input_lang, output_lang)
        print("<", " ".join(output_words))
        print("")


def main(watch, seed, folder):
    random.seed(seed)
    torch.manual_seed(seed)
    hidden_size = 48
    input_lang, output_lang, pairs = prepareData(800)
    pairs, test_pairs = pairs[:740], pairs[740:]
    train_dataloader = get_dataloader(pairs, input_lang, output_lang, batch_size=32)
    encoder = EncoderRNN(input_lang.n_words, hidden_size).to(device)
    decoder = AttnDecoderRNN(hidden_size, output_lang.n_words).to(device)
    optimizers = train(train_dataloader, encoder, decoder, 8, watch, 0.004, 1, 2, folder)
    encoder.eval()
    decoder.eval()
    evaluateRandomly(encoder, decoder, pairs, input_lang, output_lang)
    torch.save({"encoder": encoder.state_dict(), "decoder": decoder.state_dict()}, folder / "seq2seq.pt")
    right = total = 0
    for source, target in test_pairs:
        words, _ = evaluate(encoder, decoder, source, input_lang, output_lang)
        expected = [*target.split(" "), "<EOS>"]
        right += sum(a == b for a, b in zip(words, expected))
        total += len(expected)
    objects = {"encoder": encoder, "decoder": decoder, "optimizers": optimizers[0], "decoder_optimizer": optimizers[1]}
    return Result("right words of unseen sentences", right / total, 0.5, optimizers[2], objects)
