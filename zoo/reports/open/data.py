"""Faults of the data, and healthy programs with data in an unusual order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, TensorDataset

from zoo.reports.case import Outcome, Place, Watch, fault, fell, healthy, mean
from zoo.reports.material import labelled_pictures, labelled_rows, text_windows


class ConvBlock(nn.Sequential):
    def __init__(self, inputs: int, outputs: int):
        super().__init__(
            nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()
        )


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    model.eval()
    with torch.no_grad():
        correct = (model(x).argmax(1) == y).float().mean().item()
    model.train()
    return correct


@fault(
    "sorted_classes",
    "the loader does not shuffle samples that are sorted by class",
    sources=["Deci-AI/super-gradients#416", "pytorch/vision#7818"],
    stage="data",
    diagnosis=[
        r"shuffl & !\bval",
        r"(sorted|grouped|ordered|order) & (class|label|target)",
        r"batch\w* & (one|single|same|few) & (class|label|target)",
        r"(same|identical) & order & epoch",
    ],
    where=[Place(line=r"DataLoader\(|in train_loader")],
)
def sorted_classes(watch: Watch, seed: int, faulty: bool) -> Outcome:
    images, labels = labelled_pictures(2400, seed)
    train, val = slice(0, 2000), slice(2000, 2400)
    by_folder = labels[train].argsort(stable=True)  # as ImageFolder lists its files
    dataset = TensorDataset(images[train][by_folder], labels[train][by_folder])
    train_loader = DataLoader(dataset, batch_size=40, shuffle=not faulty)
    net = nn.Sequential(ConvBlock(1, 16), ConvBlock(16, 32), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    losses, classes = [], []
    with watch(net, optimizer, loader=train_loader):
        for _epoch in range(6):
            for inputs, targets in train_loader:
                optimizer.zero_grad()
                loss = F.cross_entropy(net(inputs), targets)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
                classes.append(len(targets.unique()))
    top1 = accuracy(net, images[val], labels[val])
    return Outcome(losses, mean(classes) < 2 and top1 < 0.5, {"classes_in_a_batch": mean(classes), "val_top1": top1})


class Cifar(Dataset[Any]):
    """Images in memory, normalized on reading: in place, or a copy with ``copy``."""

    def __init__(self, inputs: np.ndarray, labels: np.ndarray, *, copy: bool):
        self._inputs, self._labels, self._copy = inputs, labels, copy

    def _prepare_im(self, im: np.ndarray) -> np.ndarray:
        im -= 0.45
        im /= 0.22
        if np.random.rand() < 0.5:
            im = im[:, :, ::-1].copy()
        return im

    def __getitem__(self, index: int) -> Any:
        im, label = self._inputs[index, ...], self._labels[index]
        if self._copy:
            im = im.copy()
        return self._prepare_im(im), label

    def __len__(self) -> int:
        return len(self._inputs)


@fault(
    "stored_samples_modified",
    "__getitem__ normalizes the stored images in place, once more in each epoch",
    sources=["facebookresearch/pycls#21", "pytorch/vision#680"],
    stage="data",
    diagnosis=[
        r"in ?place & !relu & !optimizer",
        r"(data ?set|stored|sample|row|image)\w* & (modif|mutat|overwrit|drift|written|alter)",
        r"(input|feature|image|sample|row)\w* & (scale|range|statistic|mean|std|deviation|magnitude|value)\w*"
        r" & (grow|chang|drift|shift|jump|increas|explod|differ) & !label",
    ],
    where=[Place(line=r"im -=|im /=|_prepare_im\(|in loader")],
    shows=32,
)
def stored_samples_modified(watch: Watch, seed: int, faulty: bool) -> Outcome:
    np.random.seed(seed)
    images, labels = labelled_pictures(1024, seed, noise=0.3)
    stored = (0.45 + 0.22 * images).numpy()
    first = stored.std()
    loader = DataLoader(Cifar(stored, labels.numpy(), copy=not faulty), batch_size=32, shuffle=True)
    model = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(32 * 9, 10)),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, nesterov=True)
    losses = []
    with watch(model, optimizer, loader=loader):
        for _cur_epoch in range(6):
            for inputs, targets in loader:
                loss = F.cross_entropy(model(inputs), targets)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
    growth = float(stored.std() / first)
    return Outcome(losses, growth > 100, {"growth_of_stored_std": growth, "last_loss": mean(losses[-20:])})


class Attention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.c_attn(x).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        return self.c_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c))


class Layer(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Attention(width, 4)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class ForCausalLM(nn.Module):
    """Shifts the labels itself, as the models of Hugging Face transformers do."""

    def __init__(self, vocab: int, width: int = 64, length: int = 64):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.h = nn.ModuleList(Layer(width) for _ in range(2))
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocab, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> tuple[Tensor | None, Tensor]:
        x = self.wte(input_ids) + self.wpe(torch.arange(input_ids.shape[1]))
        for layer in self.h:
            x = layer(x)
        logits = self.lm_head(self.ln_f(x))
        if labels is None:
            return None, logits
        shift_logits, shift_labels = logits[..., :-1, :].contiguous(), labels[..., 1:].contiguous()
        return F.cross_entropy(shift_logits.view(-1, logits.shape[-1]), shift_labels.view(-1)), logits


class PTMDataset(Dataset[Any]):
    def __init__(self, windows: Tensor, *, shift: bool):
        self.windows, self.shift = windows, shift

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> Any:
        sample = self.windows[index]
        if self.shift:
            return sample[:-1], sample[1:]
        return sample[:-1], sample[:-1]


@fault(
    "labels_shifted_twice",
    "the data set shifts the labels, and so does the model: it learns the token after the next",
    sources=["huggingface/transformers#32944", "wdndev/tiny-llm-zh#10"],
    stage="data",
    diagnosis=[
        r"shift\w* & (twice|two|double|already|again|both|second)",
        r"(label|target)\w* & (shift|offset|misalign|off by)",
        r"(two|2) (token|position|step|character|place)s? (ahead|later|after)",
        r"(after|beyond) the next|skips? (one|a) (token|position)",
    ],
    where=[Place(line=r"sample\[1:\]|labels\[\.\.\., 1:\]|shift_labels|model\(input_ids"), Place(op="cross_entropy")],
)
def labels_shifted_twice(watch: Watch, seed: int, faulty: bool) -> Outcome:
    windows = text_windows(3200, 33, seed)
    loader = DataLoader(PTMDataset(windows, shift=faulty), batch_size=16, shuffle=True)
    model = ForCausalLM(int(windows.max()) + 1, width=48)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    with watch(model, optimizer, loader=loader):
        for input_ids, labels in loader:
            loss, _ = model(input_ids, labels)
            assert loss is not None
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
    with torch.no_grad():
        said = model(windows[:200, :-2])[1].argmax(-1)
    following, second = ((said == windows[:200, n : n + 31]).float().mean().item() for n in (1, 2))
    return Outcome(losses, second > following, {"right_as_next": following, "right_as_the_one_after": second})


class VisuomotorPolicy(nn.Module):
    """Images (batch, view, height, width, channel) to a target position (batch, 2)."""

    def __init__(self, *, reshape: bool):
        super().__init__()
        self.reshape = reshape
        self.encoder = nn.Sequential(
            *(nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2, padding=1)),
            *(nn.ReLU(), nn.Flatten(), nn.Linear(32 * 16, 64), nn.ReLU()),
        )
        self.action = nn.Linear(64, 2)

    def forward(self, pictures: Tensor) -> Tensor:
        b, n, h, w, c = pictures.shape
        if self.reshape:
            pictures = pictures.reshape(b * n, c, h, w)
        else:
            pictures = pictures.reshape(b * n, h, w, c).permute(0, 3, 1, 2)
        return self.action(self.encoder(pictures).reshape(b, -1))


@fault(
    "reshape_for_permute",
    "pictures with channels last are brought to channels first by reshape",
    sources=["Selen-Suyue/DensePolicy2D#3", "zamanzadeh/CARLA#16"],
    stage="data",
    diagnosis=[
        r"(reshape|view) & (permut|transpos|layout|ax[ei]s|dim|channel|scrambl|order|mix)",
        r"channels? (last|first)|nhwc|nchw|hwc|chw",
    ],
    where=[Place(line=r"reshape\(b \* n, c")],
)
def reshape_for_permute(watch: Watch, seed: int, faulty: bool) -> Outcome:
    g = torch.Generator().manual_seed(seed)
    pictures, places = 0.1 * torch.rand(2048, 1, 16, 16, 3, generator=g), torch.rand(2048, 2, generator=g)
    others = torch.rand(2048, 2, generator=g)
    rows = torch.arange(2048)
    for channel, where in ((0, places), (2, others)):  # go to the red cube, not to the blue one
        cell = (where * 15.99).long()
        pictures[rows, 0, cell[:, 0], cell[:, 1], channel] = 1.0
    loader = DataLoader(TensorDataset(pictures[:1792], places[:1792]), batch_size=32, shuffle=True)
    policy = VisuomotorPolicy(reshape=faulty)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    losses = []
    with watch(policy, optimizer, loader=loader):
        for _epoch in range(6):
            for observation, action in loader:
                loss = F.mse_loss(policy(observation), action)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
    with torch.no_grad():
        distance = (policy(pictures[1792:]) - places[1792:]).norm(dim=1).mean().item()
    return Outcome(losses, distance > 0.1, {"distance_to_the_place": distance, "loss": mean(losses[-20:])})


class Shard(IterableDataset[Any]):
    """Yields the samples in stored order, in every epoch the same."""

    def __init__(self, x: Tensor, y: Tensor):
        self.x, self.y = x, y

    def __iter__(self) -> Iterator[Any]:
        yield from zip(self.x, self.y)


@healthy(
    "preshuffled_file",
    "the file was shuffled once; each epoch reads it in the same order",
    sources=["fastai/fastai#190", "lhotse-speech/lhotse#146"],
)
def preshuffled_file(watch: Watch, seed: int) -> Outcome:
    x, y = labelled_rows(2048, seed)
    order = torch.randperm(2048)
    loader = DataLoader(Shard(x[order], y[order]), batch_size=32)
    model = nn.Sequential(nn.Linear(20, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    losses, firsts = [], []
    with watch(model, optimizer, loader=loader):
        for _epoch in range(6):
            for number, (rows, targets) in enumerate(loader):
                if number == 0:
                    firsts.append(rows)
                optimizer.zero_grad()
                loss = F.cross_entropy(model(rows), targets)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
    same = all(torch.equal(firsts[0], rows) for rows in firsts)
    return Outcome(losses, same and fell(losses, 0.6), {"same_order": same, "last_loss": mean(losses[-20:])})


class SortaGradSampler(Sampler[list[int]]):
    """Batches of utterances of similar length: from short to long in the first epoch, then in random order."""

    def __init__(self, lengths: Tensor, batch_size: int):
        self.bins = list(lengths.argsort().split(batch_size))
        self.epoch = 0

    def __len__(self) -> int:
        return len(self.bins)

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.arange(len(self.bins)) if self.epoch == 0 else torch.randperm(len(self.bins))
        self.epoch += 1
        for number in order.tolist():
            yield self.bins[number].tolist()


class Recognizer(nn.Module):
    def __init__(self, symbols: int):
        super().__init__()
        self.rnn = nn.GRU(8, 48, batch_first=True, bidirectional=True)
        self.head = nn.Linear(96, symbols)

    def forward(self, frames: Tensor) -> Tensor:
        return self.head(self.rnn(frames)[0]).log_softmax(-1)


@healthy(
    "sorted_first_epoch",
    "utterances are sorted by length in the first epoch only",
    sources=["SeanNaren/deepspeech.pytorch#30", "espnet/espnet#550", "flairNLP/flair#3076"],
)
def sorted_first_epoch(watch: Watch, seed: int) -> Outcome:
    g = torch.Generator().manual_seed(seed)
    sounds = torch.randn(6, 8, generator=g)
    lengths = torch.randint(2, 9, (512,), generator=g)
    words = [torch.randint(1, 6, (int(length),), generator=g) for length in lengths]
    audio = [sounds[word].repeat_interleave(3, 0) for word in words]
    audio = [frames + 0.3 * torch.randn(frames.shape, generator=g) for frames in audio]

    def collate(batch: list[int]) -> Any:
        frames = nn.utils.rnn.pad_sequence([audio[number] for number in batch], batch_first=True)
        return frames, 3 * lengths[batch], torch.cat([words[number] for number in batch]), lengths[batch]

    sampler = SortaGradSampler(lengths, 16)
    loader: DataLoader[Any] = DataLoader(range(512), batch_sampler=sampler, collate_fn=collate)
    model = Recognizer(6)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    losses, widths = [], []
    with watch(model, optimizer, loader=loader):
        for _epoch in range(7):
            for frames, num_frames, targets, num_targets in loader:
                out = model(frames).transpose(0, 1)
                loss = F.ctc_loss(out, targets, num_frames, num_targets, zero_infinity=True)
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
                optimizer.step()
                losses.append(loss.item())
                widths.append(frames.shape[1])
    by_length = widths[:32] == sorted(widths[:32]) and widths[32:64] != sorted(widths[32:64])
    return Outcome(losses, by_length and fell(losses, 0.5), {"sorted_once": by_length, "last_loss": mean(losses[-20:])})
