"""Faults of the loss and of its targets, and a healthy program with a negative loss."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from zoo.reports.case import Outcome, Place, Watch, fault, fell, healthy, mean
from zoo.reports.material import text_windows


class NeuMF(nn.Module):
    """Scores of users and items, by a product of embeddings and a tower."""

    def __init__(self, users: int, items: int, factors: int, *, sigmoid: bool):
        super().__init__()
        self.embed_user_GMF, self.embed_item_GMF = nn.Embedding(users, factors), nn.Embedding(items, factors)
        self.embed_user_MLP, self.embed_item_MLP = nn.Embedding(users, factors), nn.Embedding(items, factors)
        self.MLP_layers = nn.Sequential(nn.Linear(2 * factors, 32), nn.ReLU(), nn.Linear(32, factors), nn.ReLU())
        self.predict_layer = nn.Linear(2 * factors, 1)
        self.sigmoid = sigmoid
        for embedding in self.modules():
            if isinstance(embedding, nn.Embedding):
                nn.init.normal_(embedding.weight, std=0.1)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        gmf = self.embed_user_GMF(user) * self.embed_item_GMF(item)
        mlp = self.MLP_layers(torch.cat([self.embed_user_MLP(user), self.embed_item_MLP(item)], -1))
        score = self.predict_layer(torch.cat([gmf, mlp], -1)).view(-1)
        return score.sigmoid() if self.sigmoid else score


@fault(
    "double_sigmoid",
    "the model ends with a sigmoid, and BCEWithLogitsLoss applies another one",
    sources=["yudi-mars/daisyRec#15", "Turoad/lanedet#32"],
    stage="loss",
    diagnosis=[
        r"sigmoid & (twice|two|double|already|second|again|before|probabilit|logits)",
        r"probabilit\w* & (logits|with logits) & (expect|instead|already|given|input)",
    ],
    where=[
        Place(line=r"sigmoid\(\)|BCEWithLogitsLoss|criterion\("),
        Place(op="binary_cross_entropy|sigmoid"),
    ],
)
def double_sigmoid(watch: Watch, seed: int, faulty: bool) -> Outcome:
    g = torch.Generator().manual_seed(seed)
    tastes, traits = torch.randn(200, 3, generator=g), torch.randn(120, 3, generator=g)
    user, item = torch.randint(200, (12000,), generator=g), torch.randint(120, (12000,), generator=g)
    label = ((tastes[user] * traits[item]).sum(1) > 0).float()
    train_loader = DataLoader(TensorDataset(user, item, label), batch_size=128, shuffle=True)
    model = NeuMF(200, 120, 8, sigmoid=faulty)
    criterion = nn.BCEWithLogitsLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    losses = []
    with watch(model, optimizer, loader=train_loader):
        for _epoch in range(5):
            model.train()
            for users, items, labels in train_loader:
                model.zero_grad()
                loss = criterion(model(users, items), labels)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
    last = mean(losses[-50:])
    return Outcome(losses, last > 0.49, {"last_loss": last, "first_loss": losses[0]})


class Block(nn.Module):
    def __init__(self, width: int, *, causal: bool):
        super().__init__()
        self.causal = causal
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.ffn = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        b, n, d = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(b, n, 3, 4, d // 4).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, n, d))
        return x + self.ffn(self.norm_2(x))


class TransformerWrapper(nn.Module):
    def __init__(self, num_tokens: int, max_seq_len: int, *, dim: int = 48, depth: int = 2, causal: bool):
        super().__init__()
        self.token_emb, self.pos_emb = nn.Embedding(num_tokens, dim), nn.Embedding(max_seq_len, dim)
        self.layers = nn.Sequential(*(Block(dim, causal=causal) for _ in range(depth)))
        self.norm, self.to_logits = nn.LayerNorm(dim), nn.Linear(dim, num_tokens)
        nn.init.normal_(self.token_emb.weight, std=0.02)
        nn.init.normal_(self.pos_emb.weight, std=0.02)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        h = self.token_emb(x) + self.pos_emb(torch.arange(x.shape[1]))
        if context is not None:
            h = h + context[:, None]
        return self.to_logits(self.norm(self.layers(h)))


class MLM(nn.Module):
    """A wrapper that masks tokens and gives the loss."""

    def __init__(self, transformer: nn.Module, mask_token_id: int, *, only_masked: bool, mask_prob: float = 0.15):
        super().__init__()
        self.transformer, self.mask_token_id = transformer, mask_token_id
        self.only_masked, self.mask_prob = only_masked, mask_prob

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        mask = torch.rand(tokens.shape) < self.mask_prob
        logits = self.transformer(tokens.masked_fill(mask, self.mask_token_id))
        labels = tokens.masked_fill(~mask, -100) if self.only_masked else tokens
        mlm_loss = F.cross_entropy(logits.transpose(1, 2), labels)
        with torch.no_grad():
            loss_at_masks = F.cross_entropy(logits.transpose(1, 2), tokens.masked_fill(~mask, -100))
        return mlm_loss, loss_at_masks


@fault(
    "mlm_every_token",
    "the masked language model is scored on every token, and most of them are in its input",
    sources=["lucidrains/mlm-pytorch#2", "huggingface/transformers#2759"],
    stage="loss",
    diagnosis=[
        r"(unmasked|not masked|every (token|position)|all (tokens|positions)|visible) & (loss|target|label|score)",
        r"(target|label)\w* & (in the input|equals? the input|cop(y|ied)|visible|same as the input|leak|identity)",
        r"copies & input|identity & (map|function)",
    ],
    where=[Place(line=r"mlm_loss|labels = "), Place(op="cross_entropy")],
)
def mlm_every_token(watch: Watch, seed: int, faulty: bool) -> Outcome:
    windows = text_windows(3200, 32, seed)
    symbols = int(windows.max()) + 1
    trainer = MLM(TransformerWrapper(symbols + 1, 32, causal=False), mask_token_id=symbols, only_masked=not faulty)
    optimizer = torch.optim.Adam(trainer.parameters(), lr=2e-3)
    loader = DataLoader(windows, batch_size=16, shuffle=True)
    losses, at_masks = [], []
    with watch(trainer, optimizer, loader=loader):
        for tokens in loader:
            loss, loss_at_masks = trainer(tokens)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            at_masks.append(loss_at_masks.item())
    last, last_at_masks = mean(losses[-20:]), mean(at_masks[-20:])
    return Outcome(losses, last < 0.5 * last_at_masks, {"last_loss": last, "at_masked_tokens": last_at_masks})


class AutoregressiveWrapper(nn.Module):
    def __init__(self, net: TransformerWrapper, ignore_index: int = -100, pad_value: int = 0):
        super().__init__()
        self.net, self.ignore_index, self.pad_value = net, ignore_index, pad_value

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        xi, xo = x[:, :-1], x[:, 1:]
        out = self.net(xi, context)
        return F.cross_entropy(out.transpose(1, 2), xo, ignore_index=self.ignore_index)


class OCR(nn.Module):
    """A picture of a formula to its tokens."""

    def __init__(self, tokens: int, max_seq_len: int, **options: Any):
        super().__init__()
        self.encoder = nn.Sequential(
            *(nn.Conv2d(1, 16, (8, 4), stride=4), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 8, 48)),
        )
        self.decoder = AutoregressiveWrapper(TransformerWrapper(tokens, max_seq_len, causal=True), **options)

    def forward(self, x: Tensor, tgt_seq: Tensor) -> Tensor:
        return self.decoder(tgt_seq, context=self.encoder(x))


@fault(
    "padding_in_loss",
    "padding is not ignored in the loss, and most targets are padding",
    sources=["lukas-blecher/LaTeX-OCR#305", "lucidrains/DALLE-pytorch#57"],
    stage="loss",
    diagnosis=[
        r"pad\w* & (loss|target|label|cross entropy|ignore)",
        r"ignore index & (not|never|missing|without|unused|no target)",
        r"(one|same|single) (class|token|value|target) & (most|majority|per ?cent|%|fraction) & (target|label)",
    ],
    where=[Place(line=r"ignore_index|cross_entropy|model\(images"), Place(op="cross_entropy")],
)
def padding_in_loss(watch: Watch, seed: int, faulty: bool) -> Outcome:
    g = torch.Generator().manual_seed(seed)
    pad, bos, eos, first, longest = 0, 1, 2, 3, 8
    glyphs = torch.randn(10, 8, 4, generator=g)
    lengths = torch.randint(2, longest + 1, (3840,), generator=g)
    lengths = torch.minimum(lengths, torch.randint(2, longest + 1, (3840,), generator=g))
    symbols = torch.randint(10, (3840, longest), generator=g)
    real = torch.arange(longest) < lengths[:, None]
    pictures = (glyphs[symbols] * real[..., None, None]).permute(0, 2, 1, 3).reshape(3840, 1, 8, 4 * longest)
    pictures = pictures + 0.2 * torch.randn(pictures.shape, generator=g)
    seqs = torch.full((3840, 24), pad)
    seqs[:, 0] = bos
    seqs[:, 1 : longest + 1] = (symbols + first).masked_fill(~real, pad)
    seqs[torch.arange(3840), lengths + 1] = eos
    dataloader = DataLoader(TensorDataset(seqs, pictures), batch_size=16, shuffle=True)
    model = OCR(10 + first, 24) if faulty else OCR(10 + first, 24, ignore_index=pad)
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    with watch(model, opt, loader=dataloader):
        for seq, images in dataloader:
            opt.zero_grad()
            loss = model(images, seq)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1)
            opt.step()
            losses.append(loss.item())
    with torch.no_grad():
        logits = model.decoder.net(seqs[:256, :-1], model.encoder(pictures[:256])).transpose(1, 2)
        apart = F.cross_entropy(logits, seqs[:256, 1:], ignore_index=pad).item()
    last = mean(losses[-20:])
    return Outcome(losses, last < 0.6 * apart, {"last_loss": last, "loss_of_real_tokens": apart})


PROMPT_LENGTH = 6


def collate_for_language_modeling(examples: list[list[int]], pad_token_id: int) -> tuple[Tensor, Tensor]:
    """Pads, and ignores the padding in the labels, as transformers' DataCollatorForLanguageModeling does."""
    width = max(map(len, examples))
    input_ids = torch.tensor([example + [pad_token_id] * (width - len(example)) for example in examples])
    labels = input_ids.clone()
    labels[labels == pad_token_id] = -100
    return input_ids, labels


@fault(
    "eos_is_padding",
    "the padding token is the end token: its labels are ignored, and no text ever ends",
    sources=["huggingface/blog#1302", "mlabonne/llm-course#33", "unslothai/unsloth#416"],
    stage="loss",
    diagnosis=[
        r"\beos\b|end of (sequence|text|sentence)|end token",
        r"pad\w* & (real|end|same|also|input|occurs) & (label|target|ignor|token)",
        r"(token|class)\w* & (never|always ignored|ignored) & (target|label|loss) & (input|occur|frequent|appear)",
    ],
    where=[Place(line=r"pad_token|labels\[labels|collate|cross_entropy"), Place(op="cross_entropy")],
)
def eos_is_padding(watch: Watch, seed: int, faulty: bool) -> Outcome:
    g = torch.Generator().manual_seed(seed)
    eos_token_id, sep, letters = 20, 21, 20
    pad_token_id = eos_token_id if faulty else 22
    examples = []
    for _ in range(3200):  # a word, a separator, the word in reverse, the end
        word = torch.randint(letters, (int(torch.randint(2, PROMPT_LENGTH, (1,), generator=g)),), generator=g).tolist()
        examples.append([*word, sep, *reversed(word), eos_token_id])
    loader: DataLoader[Any] = DataLoader(
        examples,
        batch_size=16,
        shuffle=True,
        collate_fn=lambda batch: collate_for_language_modeling(batch, pad_token_id),
    )
    model = TransformerWrapper(23, 2 * PROMPT_LENGTH + 2, causal=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    with watch(model, optimizer, loader=loader):
        for input_ids, labels in loader:
            logits = model(input_ids)
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    with torch.no_grad():
        prompts = [torch.tensor([example[:-1]]) for example in examples[:100]]
        ends = [model(prompt)[0, -1].softmax(-1)[eos_token_id].item() for prompt in prompts]
    return Outcome(losses, mean(ends) < 0.1, {"probability_of_the_end": mean(ends), "last_loss": mean(losses[-20:])})


class Coupling(nn.Module):
    """An affine coupling layer of RealNVP."""

    def __init__(self, flip: bool):
        super().__init__()
        self.flip = flip
        self.net = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2))
        nn.init.zeros_(self.net[-1].weight)
        nn.init.zeros_(self.net[-1].bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = x.flip(1).chunk(2, 1) if self.flip else x.chunk(2, 1)
        scale, shift = self.net(a).chunk(2, 1)
        b = b * scale.exp() + shift
        return (torch.cat([b, a], 1) if self.flip else torch.cat([a, b], 1)), scale.squeeze(1)


class NormalizingFlowModel(nn.Module):
    def __init__(self, depth: int):
        super().__init__()
        self.flows = nn.ModuleList(Coupling(flip=bool(number % 2)) for number in range(depth))

    def log_prob(self, x: Tensor) -> Tensor:
        log_det = torch.zeros(len(x))
        for flow in self.flows:
            x, ld = flow(x)
            log_det = log_det + ld
        return log_det - 0.5 * (x**2).sum(1) - math.log(2 * math.pi)


@healthy(
    "negative_likelihood",
    "a flow on narrow data: the negative log density falls far below 0",
    sources=["bayesiains/nflows#76", "karpathy/pytorch-normalizing-flows#7"],
)
def negative_likelihood(watch: Watch, seed: int) -> Outcome:
    angle = math.pi * torch.rand(8192)
    moon = (torch.rand(8192) < 0.5).float()
    x = torch.stack([angle.cos() + moon, angle.sin() * (1 - 2 * moon) + 0.5 * moon], 1) - torch.tensor([0.5, 0.25])
    x = 0.1 * (x + 0.05 * torch.randn(8192, 2))
    loader = DataLoader(TensorDataset(x), batch_size=128, shuffle=True)
    model = NormalizingFlowModel(6)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    with watch(model, optimizer, loader=loader):
        for _epoch in range(6):
            for (batch,) in loader:
                loss = -model.log_prob(batch).mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 5.0)
                optimizer.step()
                losses.append(loss.item())
    return Outcome(losses, mean(losses[-20:]) < -2 and fell(losses), {"loss": [losses[0], mean(losses[-20:])]})
