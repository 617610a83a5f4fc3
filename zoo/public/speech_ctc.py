"""After AssemblyAI's tutorial "end-to-end speech recognition": residual CNN, bidirectional GRU, CTC, OneCycleLR."""

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.utils import data

from zoo.public import Result
from zoo.public.data import sentences


class TextTransform:
    def __init__(self):
        self.char_map = {c: i for i, c in enumerate("' abcdefghijklmnopqrstuvwxyz")}
        self.index_map = {i: c for c, i in self.char_map.items()}

    def text_to_int(self, text):
        return [self.char_map[c] for c in text]

    def int_to_text(self, labels):
        return "".join(self.index_map[i] for i in labels)


text_transform = TextTransform()


class SyntheticSpeech(data.Dataset):
    """Utterances of two words: each letter is a pattern of mel bands held for three to five frames."""

    def __init__(self, n, seed):
        patterns = torch.rand(28, 24, generator=torch.Generator().manual_seed(7)) < 0.3
        g = torch.Generator().manual_seed(seed)
        words = sorted({w for s in sentences(200) for w in s.split() if len(w) > 2})
        self.items = []
        for _ in range(n):
            first, second = torch.randint(len(words), (2,), generator=g).tolist()
            utterance = f"{words[first]} {words[second]}"
            frames = []
            for c in text_transform.text_to_int(utterance):
                held = int(torch.randint(3, 6, (1,), generator=g))
                frames.append(patterns[c].float().expand(held, -1))
            waveform = torch.cat(frames)
            self.items.append((waveform + 0.2 * torch.randn(waveform.shape, generator=g), utterance))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


def data_processing(batch, data_type="train"):
    spectrograms, labels, input_lengths, label_lengths = [], [], [], []
    for spec, utterance in batch:
        spec = spec.clone()
        if data_type == "train":  # masks of frequency and time
            band, start = np.random.randint(0, 22), np.random.randint(0, len(spec) - 2)
            spec[:, band : band + 2] = 0
            spec[start : start + 2] = 0
        spectrograms.append(spec)
        label = torch.Tensor(text_transform.text_to_int(utterance.lower()))
        labels.append(label)
        input_lengths.append(spec.shape[0] // 2)
        label_lengths.append(len(label))
    spectrograms = nn.utils.rnn.pad_sequence(spectrograms, batch_first=True).unsqueeze(1).transpose(2, 3)
    labels = nn.utils.rnn.pad_sequence(labels, batch_first=True)
    return spectrograms, labels, input_lengths, label_lengths


def GreedyDecoder(output, labels, label_lengths, blank_label=28, collapse_repeated=True):
    arg_maxes = torch.argmax(output, dim=2)
    decodes, targets = [], []
    for i, args in enumerate(arg_maxes):
        decode = []
        targets.append(text_transform.int_to_text(labels[i][: label_lengths[i]].tolist()))
        for j, index in enumerate(args):
            if index != blank_label:
                if collapse_repeated and j != 0 and index == args[j - 1]:
                    continue
                decode.append(index.item())
        decodes.append(text_transform.int_to_text(decode))
    return decodes, targets


def edit_distance(a, b):
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        previous, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            previous, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, previous + (x != y))
    return row[-1]


def cer(target, decoded):
    return edit_distance(target, decoded) / len(target)


def wer(target, decoded):
    return edit_distance(target.split(), decoded.split()) / len(target.split())


class CNNLayerNorm(nn.Module):
    def __init__(self, n_feats):
        super().__init__()
        self.layer_norm = nn.LayerNorm(n_feats)

    def forward(self, x):
        x = x.transpose(2, 3).contiguous()
        x = self.layer_norm(x)
        return x.transpose(2, 3).contiguous()


class ResidualCNN(nn.Module):
    def __init__(self, channels, kernel, dropout, n_feats):
        super().__init__()
        self.cnn1 = nn.Conv2d(channels, channels, kernel, 1, padding=kernel // 2)
        self.cnn2 = nn.Conv2d(channels, channels, kernel, 1, padding=kernel // 2)
        self.dropout1, self.dropout2 = nn.Dropout(dropout), nn.Dropout(dropout)
        self.layer_norm1, self.layer_norm2 = CNNLayerNorm(n_feats), CNNLayerNorm(n_feats)

    def forward(self, x):
        residual = x
        x = self.cnn1(self.dropout1(F.gelu(self.layer_norm1(x))))
        x = self.cnn2(self.dropout2(F.gelu(self.layer_norm2(x))))
        x += residual
        return x


class BidirectionalGRU(nn.Module):
    def __init__(self, rnn_dim, hidden_size, dropout):
        super().__init__()
        self.BiGRU = nn.GRU(rnn_dim, hidden_size, num_layers=1, batch_first=True, bidirectional=True)
        self.layer_norm = nn.LayerNorm(rnn_dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        x = F.gelu(self.layer_norm(x))
        x, _ = self.BiGRU(x)
        return self.dropout(x)


class SpeechRecognitionModel(nn.Module):
    def __init__(self, n_cnn_layers, rnn_dim, n_class, n_feats, stride=2, dropout=0.1):
        super().__init__()
        n_feats = n_feats // 2
        self.cnn = nn.Conv2d(1, 8, 3, stride=stride, padding=3 // 2)
        self.rescnn_layers = nn.Sequential(*[ResidualCNN(8, 3, dropout, n_feats) for _ in range(n_cnn_layers)])
        self.fully_connected = nn.Linear(n_feats * 8, rnn_dim)
        self.birnn_layers = nn.Sequential(BidirectionalGRU(rnn_dim, rnn_dim, dropout))
        self.classifier = nn.Sequential(
            nn.Linear(rnn_dim * 2, rnn_dim), nn.GELU(), nn.Dropout(dropout), nn.Linear(rnn_dim, n_class)
        )

    def forward(self, x):
        x = self.rescnn_layers(self.cnn(x))
        sizes = x.size()
        x = x.view(sizes[0], sizes[1] * sizes[2], sizes[3]).transpose(1, 2)
        x = self.birnn_layers(self.fully_connected(x))
        return self.classifier(x)


class IterMeter:
    def __init__(self):
        self.val = 0

    def step(self):
        self.val += 1

    def get(self):
        return self.val


def train(model, device, train_loader, criterion, optimizer, scheduler, epoch, iter_meter, history):
    model.train()
    data_len = len(train_loader.dataset)
    for batch_idx, _data in enumerate(train_loader):
        spectrograms, labels, input_lengths, label_lengths = _data
        spectrograms, labels = spectrograms.to(device), labels.to(device)
        optimizer.zero_grad()
        output = model(spectrograms)
        output = F.log_softmax(output, dim=2)
        output = output.transpose(0, 1)  # time, batch, class
        loss = criterion(output, labels, input_lengths, label_lengths)
        loss.backward()
        history.append(loss.item())
        optimizer.step()
        scheduler.step()
        iter_meter.step()
        if batch_idx % 10 == 0 or batch_idx == data_len:
            done = batch_idx * len(spectrograms)
            percent = 100.0 * batch_idx / len(train_loader)
            print(f"Train Epoch: {epoch} [{done}/{data_len} ({percent:.0f}%)]\tLoss: {loss.item():.6f}")


def test(model, device, test_loader, criterion, epoch, iter_meter):
    print("\nevaluating...")
    model.eval()
    test_loss = 0
    test_cer, test_wer = [], []
    with torch.no_grad():
        for _data in test_loader:
            spectrograms, labels, input_lengths, label_lengths = _data
            spectrograms, labels = spectrograms.to(device), labels.to(device)
            output = model(spectrograms)
            output = F.log_softmax(output, dim=2)
            output = output.transpose(0, 1)
            loss = criterion(output, labels, input_lengths, label_lengths)
            test_loss += loss.item() / len(test_loader)
            decoded_preds, decoded_targets = GreedyDecoder(output.transpose(0, 1), labels, label_lengths)
            for j in range(len(decoded_preds)):
                test_cer.append(cer(decoded_targets[j], decoded_preds[j]))
                test_wer.append(wer(decoded_targets[j], decoded_preds[j]))
    avg_cer, avg_wer = sum(test_cer) / len(test_cer), sum(test_wer) / len(test_wer)
    print(f"Test set: Average loss: {test_loss:.4f}, Average CER: {avg_cer:4f} Average WER: {avg_wer:.4f}\n")
    print(f"{decoded_targets[0]!r} -> {decoded_preds[0]!r}")
    return avg_cer


def main(watch, seed, folder):
    hparams = {
        "n_cnn_layers": 1, "rnn_dim": 48, "n_class": 29, "n_feats": 24, "stride": 2, "dropout": 0.1,
        "learning_rate": 6e-3, "batch_size": 16, "epochs": 6,
    }  # fmt: skip
    torch.manual_seed(7 + seed)
    np.random.seed(seed)
    device = torch.device("cpu")
    train_dataset, test_dataset = SyntheticSpeech(320, 1), SyntheticSpeech(48, 2)
    batch_size = hparams["batch_size"]
    train_loader = data.DataLoader(
        train_dataset, batch_size=batch_size, shuffle=True, collate_fn=lambda x: data_processing(x, "train")
    )
    test_loader = data.DataLoader(
        test_dataset, batch_size=batch_size, shuffle=False, collate_fn=lambda x: data_processing(x, "valid")
    )
    sizes = [hparams[key] for key in ("n_cnn_layers", "rnn_dim", "n_class", "n_feats", "stride", "dropout")]
    model = SpeechRecognitionModel(*sizes).to(device)
    print(model)
    print("Num Model Parameters", sum(param.nelement() for param in model.parameters()))
    optimizer = optim.AdamW(model.parameters(), hparams["learning_rate"])
    criterion = nn.CTCLoss(blank=28).to(device)
    scheduler = optim.lr_scheduler.OneCycleLR(
        optimizer,
        max_lr=hparams["learning_rate"],
        steps_per_epoch=len(train_loader),
        epochs=hparams["epochs"],
        anneal_strategy="linear",
    )
    iter_meter = IterMeter()
    history = []
    with watch(model, optimizer, loader=train_loader, scheduler=scheduler):
        for epoch in range(1, hparams["epochs"] + 1):
            train(model, device, train_loader, criterion, optimizer, scheduler, epoch, iter_meter, history)
            error = test(model, device, test_loader, criterion, epoch, iter_meter)
    torch.save(model.state_dict(), folder / "model.pt")
    objects = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    return Result("character error rate", error, 0.4, history, objects, higher_is_better=False)
