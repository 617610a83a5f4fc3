"""Everyday programs with pictures: a VAE, maps into photographs, a style, a competition's kernel."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset, WeightedRandomSampler

from zoo.programs.training import Training


class VAE(nn.Module):
    def __init__(self, pixels=64, hidden=64, latent=6):
        super().__init__()
        self.fc1 = nn.Linear(pixels, hidden)
        self.fc21 = nn.Linear(hidden, latent)
        self.fc22 = nn.Linear(hidden, latent)
        self.fc3 = nn.Linear(latent, hidden)
        self.fc4 = nn.Linear(hidden, pixels)

    def encode(self, x):
        h1 = F.relu(self.fc1(x))
        return self.fc21(h1), self.fc22(h1)

    def reparameterize(self, mu, logvar):
        std = torch.exp(0.5 * logvar)
        return mu + torch.randn_like(std) * std

    def decode(self, z):
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z))))

    def forward(self, x):
        mu, logvar = self.encode(x.flatten(1))
        return self.decode(self.reparameterize(mu, logvar)), mu, logvar


GLYPHS = "0111010001100011000101110 0010001100001000010001110 1111000010011100100011111 1111000010001100001011110"


def variational_digits(t: Training) -> None:
    """Digits through a VAE (Kingma & Welling, 2014); sums over the pixels, KL warmed up, samples after each epoch."""
    glyphs = torch.tensor([[float(bit) for bit in rows] for rows in GLYPHS.split()]).view(-1, 1, 5, 5)
    n, n_train = 1200, 1024
    label, dy, dx = torch.randint(len(glyphs), (n,)), torch.randint(4, (n,)), torch.randint(4, (n,))
    pictures = torch.zeros(n, 1, 8, 8)
    for i in range(n):
        pictures[i, :, dy[i] : dy[i] + 5, dx[i] : dx[i] + 5] = glyphs[label[i]] * (0.7 + 0.3 * torch.rand(1))
    train, test = pictures[:n_train], pictures[n_train:]

    def loss_function(recon_x, x, mu, logvar, beta):
        bce = F.binary_cross_entropy(recon_x, x.view(-1, 64), reduction="sum")
        kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
        return bce + beta * kld

    t.model, t.data, t.epochs = VAE(), TensorDataset(train, label[:n_train]), 10
    t.optimizers_of = lambda tr: [optim.Adam(tr.model.parameters(), lr=2e-3)]
    t.test_losses, t.samples = [], []

    def main(tr):
        (optimizer,) = tr.optimizers
        for epoch in range(1, tr.epochs + 1):
            beta = min(1.0, epoch / 4)
            tr.model.train()
            for data, _ in tr.batches:
                optimizer.zero_grad()
                recon_batch, mu, logvar = tr.model(data)
                loss = loss_function(recon_batch, data, mu, logvar, beta)
                loss.backward()
                optimizer.step()
                yield loss.item() / len(data)
            tr.model.eval()
            with torch.no_grad():
                recon, mu, logvar = tr.model(test)
                t.test_losses.append(loss_function(recon, test, mu, logvar, 1.0).item() / len(test))
                t.samples.append(tr.model.decode(torch.randn(16, 6)).view(16, 1, 8, 8))

    t.loop = main


def down(n_in, n_out, norm=True):
    layers = [nn.Conv2d(n_in, n_out, 4, stride=2, padding=1, bias=not norm)]
    return nn.Sequential(*layers, *([nn.BatchNorm2d(n_out)] if norm else []), nn.LeakyReLU(0.2))


def up(n_in, n_out, p=0.0):
    layers = [nn.ConvTranspose2d(n_in, n_out, 4, stride=2, padding=1, bias=False), nn.BatchNorm2d(n_out)]
    return nn.Sequential(*layers, *([nn.Dropout(p)] if p else []), nn.ReLU())


class UnetGenerator(nn.Module):
    def __init__(self, n_in=3, n_out=3, ngf=12):
        super().__init__()
        self.down1, self.down2 = down(n_in, ngf, norm=False), down(ngf, 2 * ngf)
        self.down3 = down(2 * ngf, 4 * ngf)
        self.up3, self.up2 = up(4 * ngf, 2 * ngf, p=0.5), up(4 * ngf, ngf)
        self.last = nn.Sequential(nn.ConvTranspose2d(2 * ngf, n_out, 4, stride=2, padding=1), nn.Tanh())

    def forward(self, x):
        d1 = self.down1(x)
        d2 = self.down2(d1)
        u3 = self.up3(self.down3(d2))
        u2 = self.up2(torch.cat([u3, d2], 1))
        return self.last(torch.cat([u2, d1], 1))


class PatchDiscriminator(nn.Module):
    def __init__(self, n_in=6, ndf=12):
        super().__init__()
        self.model = nn.Sequential(down(n_in, ndf, norm=False), down(ndf, 2 * ndf), nn.Conv2d(2 * ndf, 1, 3, padding=1))

    def forward(self, condition, picture):
        return self.model(torch.cat([condition, picture], 1))


def weights_init(m):
    if isinstance(m, nn.Conv2d | nn.ConvTranspose2d):
        nn.init.normal_(m.weight, 0.0, 0.02)
    elif isinstance(m, nn.BatchNorm2d):
        nn.init.normal_(m.weight, 1.0, 0.02)
        nn.init.zeros_(m.bias)


def maps_and_photographs(n, size=16):
    """Fields, one road and one lake as a map of three classes, and the same place from above, in -1..1."""
    row, column = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    where, width = torch.randint(2, size - 2, (n, 1, 1)), torch.randint(1, 3, (n, 1, 1))
    lies = torch.rand(n, 1, 1) < 0.5
    road = (torch.where(lies, row, column) - where).abs() < width
    cy, cx, radius = (torch.randint(lo, hi, (n, 1, 1)) for lo, hi in ((3, 13), (3, 13), (2, 5)))
    lake = (row - cy) ** 2 + (column - cx) ** 2 <= radius**2
    classes = torch.where(lake, 2, torch.where(road, 1, 0))
    label_map = F.one_hot(classes, 3).permute(0, 3, 1, 2).float() * 2 - 1
    colours = torch.tensor([[-0.4, 0.3, -0.5], [0.4, 0.4, 0.4], [-0.7, -0.3, 0.5]])
    photo = colours[classes].permute(0, 3, 1, 2) + 0.08 * torch.randn(n, 3, size, size)
    furrows = 0.15 * torch.sin(1.5 * (row + column)) * (classes == 0)
    return label_map, (photo + furrows[:, None]).clamp(-1, 1)


def pix2pix_maps(t: Training) -> None:
    """Maps into photographs by pix2pix (Isola et al., 2017): a U-Net, a patch discriminator, 100 times L1."""
    t.model, netD = UnetGenerator().apply(weights_init), PatchDiscriminator().apply(weights_init)
    t.extra, t.data, t.batch_size, t.epochs = [netD], TensorDataset(*maps_and_photographs(320)), 16, 8
    val_map, val_photo = maps_and_photographs(48)
    t.optimizers_of = lambda tr: [
        optim.Adam(tr.model.parameters(), lr=2e-3, betas=(0.5, 0.999)),
        optim.Adam(netD.parameters(), lr=5e-4, betas=(0.5, 0.999)),
    ]
    criterion_gan, criterion_l1, lambda_l1 = nn.BCEWithLogitsLoss(), nn.L1Loss(), 100.0
    t.log = []

    def set_requires_grad(net, requires_grad):
        for param in net.parameters():
            param.requires_grad = requires_grad

    def train(tr):
        netG, (optG, optD) = tr.model, tr.optimizers
        for epoch in range(tr.epochs):
            netG.train()
            netD.train()
            for real_A, real_B in tr.batches:
                fake_B = netG(real_A)

                set_requires_grad(netD, True)
                optD.zero_grad()
                pred_fake = netD(real_A, fake_B.detach())
                pred_real = netD(real_A, real_B)
                loss_D_fake = criterion_gan(pred_fake, torch.zeros_like(pred_fake))
                loss_D_real = criterion_gan(pred_real, torch.ones_like(pred_real))
                loss_D = (loss_D_fake + loss_D_real) * 0.5
                loss_D.backward()
                optD.step()

                set_requires_grad(netD, False)
                optG.zero_grad()
                pred_fake = netD(real_A, fake_B)
                loss_G_GAN = criterion_gan(pred_fake, torch.ones_like(pred_fake))
                loss_G_L1 = criterion_l1(fake_B, real_B) * lambda_l1
                loss_G = loss_G_GAN + loss_G_L1
                loss_G.backward()
                optG.step()
                yield loss_G.item()
            netG.eval()
            with torch.no_grad():
                l1 = criterion_l1(netG(val_map), val_photo).item()
            t.log.append({"epoch": epoch, "G_GAN": loss_G_GAN.item(), "D": loss_D.item(), "val_L1": l1})
        set_requires_grad(netD, True)

    t.loop = train


def gram_matrix(features):
    n, c, h, w = features.shape
    flat = features.view(n * c, h * w)
    return flat @ flat.t() / (n * c * h * w)


class Canvas(nn.Module):
    def __init__(self, start):
        super().__init__()
        self.pixels = nn.Parameter(start.clone())

    def forward(self):
        return self.pixels


def style_transfer(t: Training) -> None:
    """The pixels are what learns (Gatys et al., 2016): content at one layer, Gram matrices of style at three."""
    size = 24
    row, column = torch.meshgrid(torch.linspace(-1, 1, size), torch.linspace(-1, 1, size), indexing="ij")
    disc = ((row**2 + column**2).sqrt() < 0.6).float()
    content = torch.stack([disc, 0.5 + 0.5 * row, 1 - disc])[None]
    stripes = 0.5 + 0.5 * torch.sin(12 * (row + 0.6 * column) + 2 * torch.rand(()))
    style = torch.stack([stripes, stripes**2, 0.3 + 0.2 * column])[None]

    cnn = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
    )  # fmt: skip
    for layer in cnn:
        if isinstance(layer, nn.Conv2d):
            nn.init.orthogonal_(layer.weight, gain=2**0.5)
    cnn.eval().requires_grad_(False)
    mean, std = torch.tensor([0.485, 0.456, 0.406]).view(-1, 1, 1), torch.tensor([0.229, 0.224, 0.225]).view(-1, 1, 1)

    def features(image):
        x, kept = (image - mean) / std, []
        for layer in cnn:
            x = layer(x)
            if isinstance(layer, nn.ReLU):
                kept.append(x)
        return kept

    content_target = features(content)[1]
    style_targets = [gram_matrix(f) for f in features(style)]

    t.model, t.loaded, t.epochs = Canvas(content), False, 200
    t.optimizers_of = lambda tr: [optim.Adam(tr.model.parameters(), lr=0.02)]
    t.printed = []

    def run_style_transfer(tr):
        (optimizer,) = tr.optimizers
        for step in range(tr.epochs):
            with torch.no_grad():
                tr.model.pixels.clamp_(0, 1)
            optimizer.zero_grad()
            found = features(tr.model())
            style_score = sum(F.mse_loss(gram_matrix(f), g) for f, g in zip(found, style_targets))
            content_score = F.mse_loss(found[1], content_target)
            loss = 1e4 * style_score + content_score
            loss.backward()
            optimizer.step()
            if step % 50 == 0:
                t.printed.append(f"step {step}: style {style_score.item():.6f} content {content_score.item():.4f}")
            yield loss.item()
        with torch.no_grad():
            tr.model.pixels.clamp_(0, 1)

    t.loop = run_style_transfer


class LeafDataset(Dataset):
    def __init__(self, images, labels, augment):
        self.images, self.labels, self.augment = images, labels, augment

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        image = self.images[i]
        if self.augment:
            if torch.rand(()) < 0.5:
                image = image.flip(2)
            if torch.rand(()) < 0.5:
                image = image.flip(1)
            image = torch.rot90(image, int(torch.randint(4, ())), (1, 2))
            image = image * (0.9 + 0.2 * torch.rand(3, 1, 1))
        return image, self.labels[i]


class BasicBlock(nn.Module):
    def __init__(self, n_in, n_out, stride=1):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(n_in, n_out, 3, stride, 1, bias=False), nn.BatchNorm2d(n_out)
        self.conv2, self.bn2 = nn.Conv2d(n_out, n_out, 3, 1, 1, bias=False), nn.BatchNorm2d(n_out)
        self.shortcut = nn.Sequential()
        if stride != 1 or n_in != n_out:
            self.shortcut = nn.Sequential(nn.Conv2d(n_in, n_out, 1, stride, bias=False), nn.BatchNorm2d(n_out))

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(out)) + self.shortcut(x))


def draw_leaves(n, size=16):
    """Green leaves: healthy, with rust spots, with mildew, with yellow veins, with a burnt rim; the first is common."""
    y = torch.multinomial(torch.tensor([0.5, 0.2, 0.12, 0.1, 0.08]), n, replacement=True)
    axis = torch.linspace(-1, 1, size)
    r = (axis[:, None] ** 2 + axis**2).sqrt()
    green = torch.tensor([0.2, 0.6, 0.2]).view(1, 3, 1, 1) * torch.where(r < 0.9, 1.0, 0.3)
    spots = torch.rand(n, 1, size, size) < 0.12
    marks = [
        torch.zeros(n, 1, size, size), spots.float(), F.avg_pool2d(spots.float() * 4, 3, 1, 1),
        (axis.abs() < 0.15).float().expand(n, 1, size, size), ((r > 0.65) & (r < 0.9)).float().expand(n, 1, size, size),
    ]  # fmt: skip
    tints = torch.tensor([[0, 0, 0], [0.5, -0.1, -0.1], [0.4, 0.3, 0.4], [0.5, 0.2, 0.0], [0.2, -0.3, -0.1]])
    mark = torch.stack(marks, 1)[torch.arange(n), y]
    return green + mark * tints[y][:, :, None, None] + 0.12 * torch.randn(n, 3, size, size), y


def leaf_kernel(t: Training) -> None:
    """A competition's kernel: rare diseases drawn more often, bfloat16, two batches a step, warm-up and cosine, TTA."""

    class CFG:
        batch_size, accum, epochs, lr, weight_decay, smoothing, max_norm = 16, 2, 6, 4e-3, 1e-2, 0.05, 5.0

    images, labels = draw_leaves(640)
    channel_mean, channel_std = images[:512].mean((0, 2, 3), keepdim=True), images[:512].std((0, 2, 3), keepdim=True)
    images = (images - channel_mean) / channel_std
    val_x, val_y = images[512:], labels[512:]
    counts = torch.bincount(labels[:512], minlength=5).float()
    sampler = WeightedRandomSampler((1.0 / counts)[labels[:512]], num_samples=512, replacement=True)
    train_loader = DataLoader(
        LeafDataset(images[:512], labels[:512], augment=True), CFG.batch_size, sampler=sampler, drop_last=True
    )

    t.model = nn.Sequential(
        nn.Conv2d(3, 12, 3, padding=1, bias=False), nn.BatchNorm2d(12), nn.ReLU(),
        BasicBlock(12, 12), BasicBlock(12, 24, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2),
        nn.Linear(24, 5),
    )  # fmt: skip
    t.accumulation, t.loaded = CFG.accum, False
    total, warmup = CFG.epochs * len(train_loader) // CFG.accum, 8

    def lr_at(step):
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (total - warmup)))

    t.optimizers_of = lambda tr: [optim.AdamW(tr.parameters(), lr=CFG.lr, weight_decay=CFG.weight_decay)]
    t.scheduler_of = lambda opt: optim.lr_scheduler.LambdaLR(opt, lr_at)
    criterion = nn.CrossEntropyLoss(label_smoothing=CFG.smoothing)
    t.history = []

    @torch.no_grad()
    def validate(model):
        model.eval()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            views = (val_x, val_x.flip(3), val_x.flip(2), val_x.transpose(2, 3))
            probs = torch.stack([model(view).float().softmax(1) for view in views]).mean(0)
        recalls = [(probs.argmax(1)[val_y == c] == c).float().mean() for c in val_y.unique()]
        return F.nll_loss(probs.log(), val_y).item(), torch.stack(recalls).mean().item()

    def train(tr):
        optimizer = tr.optimizers[0]
        for epoch in range(CFG.epochs):
            tr.model.train()
            running = 0.0
            optimizer.zero_grad()
            for i, (x, y) in enumerate(train_loader):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = criterion(tr.model(x), y)
                (loss / CFG.accum).backward()
                running += loss.item() / CFG.accum
                if (i + 1) % CFG.accum == 0:
                    nn.utils.clip_grad_norm_(tr.model.parameters(), CFG.max_norm)
                    optimizer.step()
                    optimizer.zero_grad()
                    tr.scheduler.step()
                    yield running
                    running = 0.0
            val_loss, balanced = validate(tr.model)
            t.history.append(f"epoch {epoch} val {val_loss:.4f} balanced accuracy {balanced:.4f}")

    t.loop = train


PICTURES: dict[Callable[[Training], None], str] = {
    variational_digits: "image",
    pix2pix_maps: "image",
    style_transfer: "image",
    leaf_kernel: "image",
}
