"""Legal techniques with pictures: read, masked, denoised, drawn pixel by pixel, with a backbone trained before."""

from __future__ import annotations

import io
import math

import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from zoo.programs.training import Training


class CaptchaNet(nn.Module):
    """(n, 1, 8, width) -> log-probabilities (width / 2, n, symbols + blank)."""

    def __init__(self, symbols: int, hidden: int = 32):
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU(), nn.MaxPool2d((2, 1)),
        )  # fmt: skip
        self.squeeze = nn.Linear(24 * 2, hidden)
        self.rnn = nn.GRU(hidden, hidden, bidirectional=True)
        self.classifier = nn.Linear(2 * hidden, symbols + 1)

    def forward(self, images):
        x = self.conv(images)
        x = x.permute(3, 0, 1, 2).flatten(2)
        x, _ = self.rnn(F.relu(self.squeeze(x)))
        return self.classifier(x).log_softmax(-1)


def draw_captchas(n: int, symbols: int = 6, longest: int = 5):
    """Strips with three to five glyphs in uneven distances; labels padded with 0, which is the blank as well."""
    glyphs = (torch.rand(symbols + 1, 8, 5) < 0.5).float()
    lengths = torch.randint(3, longest + 1, (n,))
    labels = torch.randint(1, symbols + 1, (n, longest)) * (torch.arange(longest) < lengths[:, None])
    strips = 0.2 * torch.randn(n, 1, 8, 36)
    for strip, label, length in zip(strips, labels, lengths):
        at = int(torch.randint(0, 3, ()))
        for symbol in label[:length]:
            strip[0, :, at : at + 5] += glyphs[symbol]
            at += 5 + int(torch.randint(1, 3, ()))
    return strips - strips.mean(), labels, lengths


def ctc_captcha(t: Training) -> None:
    """Connectionist temporal classification (Graves et al., 2006) on the columns of a picture."""
    t.data = TensorDataset(*draw_captchas(960))
    t.model, t.epochs = CaptchaNet(6), 7
    ctc = nn.CTCLoss(blank=0, zero_infinity=True)

    def loss(model, batch):
        images, labels, lengths = batch
        log_probs = model(images)
        steps = torch.full((len(images),), log_probs.shape[0])
        return ctc(log_probs, labels, steps, lengths)

    def update(tr, batch):
        (optimizer,) = tr.optimizers
        optimizer.zero_grad()
        value = loss(tr.model, batch)
        value.backward()
        nn.utils.clip_grad_norm_(tr.model.parameters(), 5.0)
        optimizer.step()
        return value.detach()

    t.loss, t.update = loss, update
    t.optimizers_of = lambda tr: [optim.Adam(tr.parameters(), lr=5e-3)]


def transformer(dim, depth, heads=4):
    layer = nn.TransformerEncoderLayer(
        dim, heads, 2 * dim, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    )
    return nn.TransformerEncoder(layer, depth, norm=nn.LayerNorm(dim), enable_nested_tensor=False)


class MAE(nn.Module):
    def __init__(self, *, patches=16, patch_dim=16, dim=48, decoder_dim=32, masking_ratio=0.625):
        super().__init__()
        self.num_masked = int(masking_ratio * patches)
        self.to_patch = nn.PixelUnshuffle(4)
        self.patch_to_emb = nn.Linear(patch_dim, dim)
        self.pos_embedding = nn.Parameter(0.02 * torch.randn(patches, dim))
        self.encoder = transformer(dim, 2)
        self.enc_to_dec = nn.Linear(dim, decoder_dim)
        self.mask_token = nn.Parameter(0.02 * torch.randn(decoder_dim))
        self.decoder_pos_emb = nn.Embedding(patches, decoder_dim)
        self.decoder = transformer(decoder_dim, 1)
        self.to_pixels = nn.Linear(decoder_dim, patch_dim)

    def forward(self, img):
        patches = self.to_patch(img).flatten(2).transpose(1, 2)
        batch, num_patches, _ = patches.shape
        tokens = self.patch_to_emb(patches) + self.pos_embedding

        # which patches are seen: others in each picture
        rand_indices = torch.rand(batch, num_patches).argsort(dim=-1)
        masked, unmasked = rand_indices[:, : self.num_masked], rand_indices[:, self.num_masked :]
        batch_range = torch.arange(batch)[:, None]
        masked_patches = patches[batch_range, masked]

        encoded = self.encoder(tokens[batch_range, unmasked])
        decoder_tokens = torch.empty(batch, num_patches, self.mask_token.shape[0])
        decoder_tokens[batch_range, unmasked] = self.enc_to_dec(encoded) + self.decoder_pos_emb(unmasked)
        decoder_tokens[batch_range, masked] = self.mask_token + self.decoder_pos_emb(masked)
        decoded = self.decoder(decoder_tokens)
        return F.mse_loss(self.to_pixels(decoded[batch_range, masked]), masked_patches)


def smooth_pictures(n, size=16):
    """A plane wave of a random direction and length and a blob each."""
    at = torch.linspace(-1, 1, size)
    yy, xx = torch.meshgrid(at, at, indexing="ij")
    angle, k, phase = torch.pi * torch.rand(n, 1, 1), 1.5 + 1.5 * torch.rand(n, 1, 1), 6.28 * torch.rand(n, 1, 1)
    wave = torch.sin(k * (xx * angle.cos() + yy * angle.sin()) + phase)
    cx, cy = 1.4 * torch.rand(2, n, 1, 1) - 0.7
    blob = 2 * torch.exp(-((xx - cx) ** 2 + (yy - cy) ** 2) / 0.3)
    pictures = wave + blob
    return ((pictures - pictures.mean()) / pictures.std())[:, None]


def masked_patches(t: Training) -> None:
    """Masked autoencoder (He et al., 2022): the encoder sees the patches that are left, the loss those that are not."""
    pictures = smooth_pictures(768)
    t.data, t.batch_size, t.epochs = TensorDataset(pictures), 48, 12
    t.model = MAE()
    total, warmup = 12 * 16, 20

    def schedule(step):
        return (
            (step + 1) / warmup if step < warmup else 0.5 * (1 + math.cos(math.pi * (step - warmup) / (total - warmup)))
        )

    def groups(tr):
        decay = [p for p in tr.model.parameters() if p.ndim >= 2]
        rest = [p for p in tr.model.parameters() if p.ndim < 2]
        params = [{"params": decay, "weight_decay": 0.05}, {"params": rest, "weight_decay": 0.0}]
        return [optim.AdamW(params, lr=3e-3, betas=(0.9, 0.95))]

    t.loss = lambda model, batch: model(batch[0])
    t.optimizers_of = groups
    t.scheduler_of = lambda opt: optim.lr_scheduler.LambdaLR(opt, schedule)


class DoubleConv(nn.Sequential):
    def __init__(self, c_in, c_out):
        conv = lambda a: [nn.Conv2d(a, c_out, 3, padding=1, bias=False), nn.BatchNorm2d(c_out), nn.ReLU(inplace=True)]  # noqa: E731
        super().__init__(*conv(c_in), *conv(c_out))


class UNet(nn.Module):
    def __init__(self, base=8):
        super().__init__()
        self.inc, self.down1, self.down2 = (
            DoubleConv(1, base),
            DoubleConv(base, 2 * base),
            DoubleConv(2 * base, 4 * base),
        )
        self.up1 = nn.ConvTranspose2d(4 * base, 2 * base, 2, stride=2)
        self.up2 = nn.ConvTranspose2d(2 * base, base, 2, stride=2)
        self.conv1, self.conv2 = DoubleConv(4 * base, 2 * base), DoubleConv(2 * base, base)
        self.outc = nn.Conv2d(base, 1, 1)

    def forward(self, x):
        x1 = self.inc(x)
        x2 = self.down1(F.max_pool2d(x1, 2))
        x3 = self.down2(F.max_pool2d(x2, 2))
        y = self.conv1(torch.cat([x2, self.up1(x3)], dim=1))
        y = self.conv2(torch.cat([x1, self.up2(y)], dim=1))
        return x - self.outc(y)


def unet_denoise(t: Training) -> None:
    """Blind denoising: a U-Net (Ronneberger et al., 2015) gives the noise that is to be taken away (DnCNN)."""
    n, size = 640, 16
    clean, at = torch.zeros(n, size, size), torch.arange(size)
    for _ in range(4):
        x0, y0 = torch.randint(-2, size - 3, (2, n, 1))
        w, h = torch.randint(4, 11, (2, n, 1))
        inside = ((at >= y0) & (at < y0 + h))[:, :, None] & ((at >= x0) & (at < x0 + w))[:, None, :]
        clean = torch.where(inside, torch.rand(n, 1, 1), clean)
    clean = clean.unsqueeze(1) - 0.5
    t.data, t.model, t.epochs = TensorDataset(clean[:576]), UNet(), 7
    g = torch.Generator().manual_seed(1000 + t.seed)
    val_noisy = clean[576:] + 0.2 * torch.randn(clean[576:].shape, generator=g)
    t.psnr = []

    def add_noise(batch):
        (images,) = batch
        sigma = 0.05 + 0.35 * torch.rand(len(images), 1, 1, 1)
        return images + sigma * torch.randn_like(images), images

    @torch.no_grad()
    def psnr(tr, epoch):
        tr.model.eval()
        mse = F.mse_loss(tr.model(val_noisy), clean[576:])
        tr.psnr.append(-10 * mse.log10().item())
        tr.model.train()

    t.transform = add_noise
    t.loss = lambda model, batch: F.mse_loss(model(batch[0]), batch[1])
    t.each_epoch.append(psnr)


class MaskedConv2d(nn.Conv2d):
    def __init__(self, mask_type: str, *args: int, **kwargs: int) -> None:
        super().__init__(*args, **kwargs)
        assert mask_type in {"A", "B"}
        self.register_buffer("mask", self.weight.data.clone())
        _, _, kH, kW = self.weight.size()
        self.mask.fill_(1)
        self.mask[:, :, kH // 2, kW // 2 + (mask_type == "B") :] = 0
        self.mask[:, :, kH // 2 + 1 :] = 0

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data *= self.mask
        return super().forward(x)


def _rectangles(n: int, size: int = 8) -> Tensor:
    corner, extent = torch.randint(0, 5, (n, 2)), torch.randint(2, 5, (n, 2))
    rows, cols = torch.arange(size)[None, :, None], torch.arange(size)[None, None, :]
    (top, left), (bottom, right) = corner.T[..., None, None], (corner + extent).T[..., None, None]
    filled = (rows >= top) & (rows < bottom) & (cols >= left) & (cols < right)
    return filled.float().unsqueeze(1)


def pixel_by_pixel(t: Training) -> None:
    """PixelCNN (van den Oord et al., 2016) on binary pictures; nats per picture, and those of held-out pictures."""
    t.data = TensorDataset(_rectangles(640), torch.zeros(640))
    held_out, history = _rectangles(128), []
    fm, layers = 16, []
    for number in range(4):
        kind, into, k = ("B", fm, 3) if number else ("A", 1, 5)
        layers += [MaskedConv2d(kind, into, fm, k, 1, k // 2, bias=False), nn.BatchNorm2d(fm), nn.ReLU(True)]
    t.model = nn.Sequential(*layers, nn.Conv2d(fm, 1, 1))
    t.epochs, t.lr = 8, 5e-3

    def nats(model: nn.Module, x: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(model(x), x, reduction="sum") / len(x)

    def evaluate(training: Training, epoch: int) -> None:
        training.model.eval()
        with torch.no_grad():
            history.append((epoch, nats(training.model, held_out).item()))
        training.model.train()

    t.loss = lambda model, batch: nats(model, batch[0])
    t.each_epoch.append(evaluate)


class TextureNet(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 12, 5, padding=2, bias=False), nn.BatchNorm2d(12), nn.ReLU())
        self.stage = nn.Sequential(
            nn.MaxPool2d(2), nn.Conv2d(12, 24, 3, padding=1, bias=False), nn.BatchNorm2d(24), nn.ReLU()
        )
        self.head = nn.Linear(24, classes)

    def forward(self, x):
        return self.head(self.stage(self.stem(x)).mean((2, 3)))


def draw_textures(kinds, size=16, noise=1.2):
    """Waves of a direction and a wavelength that the kind gives, of any phase."""
    n, grid = len(kinds), torch.arange(size).float()
    angle, wave = math.pi * (kinds % 4) / 4, torch.where(kinds < 4, 3.0, 5.0)
    at = grid[None, :, None] * angle.cos()[:, None, None] + grid[None, None, :] * angle.sin()[:, None, None]
    pictures = torch.sin(6.283 * at / wave[:, None, None] + 6.283 * torch.rand(n, 1, 1))
    return (pictures + noise * torch.randn(n, size, size))[:, None]


def pretrained_weights():
    """What a colleague left on the disk: a training on five other textures."""
    kinds = torch.randint(0, 5, (512,))
    pictures, model = draw_textures(kinds), TextureNet(5)
    optimizer = optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(4):
        for rows in torch.randperm(512).split(64):
            optimizer.zero_grad()
            F.cross_entropy(model(pictures[rows]), kinds[rows]).backward()
            optimizer.step()
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    return file


def finetuned_backbone(t: Training) -> None:
    """A head first, then one block after the other, each at a rate of its own; BN statistics stay; weighted sampler."""
    model = t.model = TextureNet(3)
    state = {k: v for k, v in torch.load(pretrained_weights()).items() if not k.startswith("head.")}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert missing == ["head.weight", "head.bias"] and not unexpected

    labels = torch.tensor([0] * 160 + [1] * 64 + [2] * 32)
    pictures = draw_textures(labels + 5)
    val_labels = torch.arange(3).repeat(40)
    val_pictures = draw_textures(val_labels + 5)
    t.data, t.batch_size, t.epochs = TensorDataset(pictures, labels), 16, 10
    weights = (1.0 / torch.bincount(labels).float())[labels]

    def balanced(tr):
        sampler = WeightedRandomSampler(weights, num_samples=len(weights), replacement=True)
        return DataLoader(tr.data, batch_size=tr.batch_size, sampler=sampler, drop_last=True)

    def discriminative(tr):
        groups = [(model.stem, 2e-4), (model.stage, 1e-3), (model.head, 5e-3)]
        return [optim.AdamW([{"params": m.parameters(), "lr": lr} for m, lr in groups], weight_decay=1e-2)]

    def freeze_bn(module):
        if isinstance(module, nn.BatchNorm2d):
            module.eval()

    def set_stage(tr, epoch):
        model.stage.requires_grad_(epoch >= 2)
        model.stem.requires_grad_(epoch >= 5)
        model.apply(freeze_bn)

    @torch.no_grad()
    def recalls(tr):
        if tr.steps % 16:
            return
        model.eval()
        found = model(val_pictures).argmax(1)
        t.recalls.append([(found == c)[val_labels == c].float().mean().item() for c in range(3)])
        model.train()
        model.apply(freeze_bn)

    t.recalls = []
    t.batches_of, t.optimizers_of = balanced, discriminative
    t.each_epoch.append(set_stage)
    t.each_step.append(recalls)
