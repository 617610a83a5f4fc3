"""After pytorch/examples, ``dcgan/main.py``: labels 1 and 0, two backward calls for D, checkpoints by epoch."""

import os
import random
from argparse import Namespace

import torch
import torch.nn as nn
import torch.optim as optim
from torch.utils.data import DataLoader, TensorDataset

from zoo.public import Result
from zoo.public.data import digits, save_image, sliced_wasserstein


def weights_init(m):
    classname = m.__class__.__name__
    if classname.find("Conv") != -1:
        nn.init.normal_(m.weight, 0.0, 0.02)
    elif classname.find("BatchNorm") != -1:
        nn.init.normal_(m.weight, 1.0, 0.02)
        nn.init.zeros_(m.bias)


class Generator(nn.Module):
    def __init__(self, nz, ngf, nc):
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(nz, ngf * 2, 2, 1, 0, bias=False),
            nn.BatchNorm2d(ngf * 2),
            nn.ReLU(True),
            nn.ConvTranspose2d(ngf * 2, ngf, 4, 2, 1, bias=False),
            nn.BatchNorm2d(ngf),
            nn.ReLU(True),
            nn.ConvTranspose2d(ngf, nc, 4, 2, 1, bias=False),
            nn.Tanh(),
        )

    def forward(self, input):
        return self.main(input)


class Discriminator(nn.Module):
    def __init__(self, ndf, nc):
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(nc, ndf, 4, 2, 1, bias=False),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(ndf, ndf * 2, 4, 2, 1, bias=False),
            nn.BatchNorm2d(ndf * 2),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(ndf * 2, 1, 2, 1, 0, bias=False),
            nn.Sigmoid(),
        )

    def forward(self, input):
        return self.main(input).view(-1, 1).squeeze(1)


def main(watch, seed, folder):
    opt = Namespace(
        batchSize=64, nz=20, ngf=12, ndf=12, niter=26, lr=0.001, beta1=0.5, outf=str(folder), manualSeed=seed
    )
    print("Random Seed: ", opt.manualSeed)
    random.seed(opt.manualSeed)
    torch.manual_seed(opt.manualSeed)
    os.makedirs(opt.outf, exist_ok=True)

    x, y = digits("train")
    dataset = TensorDataset(torch.from_numpy(x)[:, None] * 2 - 1, torch.from_numpy(y))
    dataloader = DataLoader(dataset, batch_size=opt.batchSize, shuffle=True, num_workers=0)
    device = torch.device("cpu")
    nz = opt.nz

    netG = Generator(nz, opt.ngf, 1).to(device)
    netG.apply(weights_init)
    print(netG)
    netD = Discriminator(opt.ndf, 1).to(device)
    netD.apply(weights_init)
    print(netD)

    criterion = nn.BCELoss()
    fixed_noise = torch.randn(opt.batchSize, nz, 1, 1, device=device)
    real_label = 1
    fake_label = 0
    optimizerD = optim.Adam(netD.parameters(), lr=opt.lr, betas=(opt.beta1, 0.999))
    optimizerG = optim.Adam(netG.parameters(), lr=opt.lr, betas=(opt.beta1, 0.999))
    history = []

    with watch([netG, netD], [optimizerG, optimizerD], loader=dataloader):
        for epoch in range(opt.niter):
            for i, data in enumerate(dataloader, 0):
                # D: maximize log(D(x)) + log(1 - D(G(z)))
                netD.zero_grad()
                real_cpu = data[0].to(device)
                batch_size = real_cpu.size(0)
                label = torch.full((batch_size,), real_label, dtype=real_cpu.dtype, device=device)
                output = netD(real_cpu)
                errD_real = criterion(output, label)
                errD_real.backward()
                D_x = output.mean().item()

                noise = torch.randn(batch_size, nz, 1, 1, device=device)
                fake = netG(noise)
                label.fill_(fake_label)
                output = netD(fake.detach())
                errD_fake = criterion(output, label)
                errD_fake.backward()
                D_G_z1 = output.mean().item()
                errD = errD_real + errD_fake
                optimizerD.step()

                # G: maximize log(D(G(z)))
                netG.zero_grad()
                label.fill_(real_label)  # the labels of the fakes are real for the cost of the generator
                output = netD(fake)
                errG = criterion(output, label)
                errG.backward()
                D_G_z2 = output.mean().item()
                optimizerG.step()

                history += [errD.item(), errG.item()]
                if i % 5 == 0:
                    print(
                        f"[{epoch}/{opt.niter}][{i}/{len(dataloader)}] Loss_D: {errD.item():.4f} "
                        f"Loss_G: {errG.item():.4f} D(x): {D_x:.4f} D(G(z)): {D_G_z1:.4f} / {D_G_z2:.4f}"
                    )
                if i % 100 == 0:
                    save_image(real_cpu, f"{opt.outf}/real_samples.png", normalize=True)
                    fake = netG(fixed_noise)
                    save_image(fake.detach(), f"{opt.outf}/fake_samples_epoch_{epoch:03d}.png", normalize=True)
            torch.save(netG.state_dict(), f"{opt.outf}/netG_epoch_{epoch}.pth")
            torch.save(netD.state_dict(), f"{opt.outf}/netD_epoch_{epoch}.pth")

    real = torch.from_numpy(digits("test")[0])[:, None] * 2 - 1
    with torch.no_grad():
        fake = netG(torch.randn(len(real), nz, 1, 1))
    distance = sliced_wasserstein(fake, real)
    objects = {"netG": netG, "netD": netD, "optimizerG": optimizerG, "optimizerD": optimizerD}
    return Result("distance to test images", distance, 0.35, history, objects, higher_is_better=False)
