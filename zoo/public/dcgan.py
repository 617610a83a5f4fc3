"""After pytorch/examples, ``dcgan/main.py``: labels 1 and 0, two backward calls for D, checkpoints by epoch."""

import random
from argparse import Namespace

import torch
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

from zoo.public import Result
from zoo.public.data import digits, save_image, sliced_wasserstein


def weights_init(m):
    kind = type(m).__name__
    if "Conv" in kind:
        m.weight.data.normal_(0.0, 0.02)
    elif "BatchNorm" in kind:
        m.weight.data.normal_(1.0, 0.02)
        m.bias.data.zero_()


class Generator(nn.Module):
    """From noise (n, nz, 1, 1) by way of 2x2 and 4x4 to pictures of 8x8."""

    def __init__(self, nz, width):
        super().__init__()

        def up(a, b, kernel, stride, padding):
            conv = nn.ConvTranspose2d(a, b, kernel, stride, padding, bias=False)
            return [conv, nn.BatchNorm2d(b), nn.ReLU(inplace=True)]

        last = nn.ConvTranspose2d(width, 1, 4, 2, 1, bias=False)
        self.net = nn.Sequential(*up(nz, 2 * width, 2, 1, 0), *up(2 * width, width, 4, 2, 1), last, nn.Tanh())

    def forward(self, z):
        return self.net(z)


class Discriminator(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, width, 4, 2, 1, bias=False),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(width, 2 * width, 4, 2, 1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(2 * width, 1, 2, bias=False),
            nn.Sigmoid(),
        )

    def forward(self, pictures):
        return self.net(pictures).flatten()


def main(watch, seed, folder):
    opt = Namespace(batchSize=64, nz=20, width=12, niter=26, lr=0.001, beta1=0.5, manualSeed=seed)
    print("Random Seed: ", opt.manualSeed)
    random.seed(opt.manualSeed)
    torch.manual_seed(opt.manualSeed)
    pictures, labels = digits("train")
    dataset = TensorDataset(torch.from_numpy(pictures)[:, None] * 2 - 1, torch.from_numpy(labels))
    dataloader = DataLoader(dataset, batch_size=opt.batchSize, shuffle=True)

    netG, netD = Generator(opt.nz, opt.width), Discriminator(opt.width)
    for net in (netG, netD):
        net.apply(weights_init)
        print(net)
    criterion = nn.BCELoss()
    fixed_noise = torch.randn(opt.batchSize, opt.nz, 1, 1)
    optimizerD, optimizerG = (optim.Adam(net.parameters(), opt.lr, (opt.beta1, 0.999)) for net in (netD, netG))
    history = []

    with watch([netG, netD], [optimizerG, optimizerD], loader=dataloader):
        for epoch in range(opt.niter):
            for i, (real, _) in enumerate(dataloader):
                n = len(real)
                # the discriminator: real pictures are 1, fakes are 0
                netD.zero_grad()
                label = torch.ones(n)
                output = netD(real)
                errD_real = criterion(output, label)
                errD_real.backward()
                D_x = output.mean().item()

                fake = netG(torch.randn(n, opt.nz, 1, 1))
                label.fill_(0)
                output = netD(fake.detach())
                errD_fake = criterion(output, label)
                errD_fake.backward()
                D_G_z1 = output.mean().item()
                optimizerD.step()

                # the generator: its fakes shall be taken for real
                netG.zero_grad()
                label.fill_(1)
                output = netD(fake)
                errG = criterion(output, label)
                errG.backward()
                optimizerG.step()

                errD = errD_real.item() + errD_fake.item()
                history += [errD, errG.item()]
                if i % 5 == 0:
                    where = f"[{epoch}/{opt.niter}][{i}/{len(dataloader)}]"
                    scores = f"D(x): {D_x:.4f} D(G(z)): {D_G_z1:.4f} / {output.mean().item():.4f}"
                    print(f"{where} Loss_D: {errD:.4f} Loss_G: {errG.item():.4f} {scores}")
                if i == 0:
                    save_image(real, folder / "real_samples.png", normalize=True)
                    shown = netG(fixed_noise).detach()
                    save_image(shown, folder / f"fake_samples_epoch_{epoch:03d}.png", normalize=True)
            torch.save(netG.state_dict(), folder / f"netG_epoch_{epoch}.pth")
            torch.save(netD.state_dict(), folder / f"netD_epoch_{epoch}.pth")

    unseen = torch.from_numpy(digits("test")[0])[:, None] * 2 - 1
    with torch.no_grad():
        distance = sliced_wasserstein(netG(torch.randn(len(unseen), opt.nz, 1, 1)), unseen)
    objects = {"netG": netG, "netD": netD, "optimizerG": optimizerG, "optimizerD": optimizerD}
    return Result("distance to test images", distance, 0.35, history, objects, higher_is_better=False)
