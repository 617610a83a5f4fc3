"""After eriklindernoren/PyTorch-GAN, ``wgan_gp``: five critic updates for one of the generator, gradient penalty."""

import argparse
import os

import numpy as np
import torch
import torch.autograd as autograd
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

from zoo.public import Result
from zoo.public.data import digits, save_image, sliced_wasserstein


def main(watch, seed, folder):
    parser = argparse.ArgumentParser()
    parser.add_argument("--n_epochs", type=int, default=36, help="number of epochs of training")
    parser.add_argument("--batch_size", type=int, default=64, help="size of the batches")
    parser.add_argument("--lr", type=float, default=0.001, help="adam: learning rate")
    parser.add_argument("--b1", type=float, default=0.5, help="adam: decay of first order momentum of gradient")
    parser.add_argument("--b2", type=float, default=0.9, help="adam: decay of second order momentum of gradient")
    parser.add_argument("--latent_dim", type=int, default=16, help="dimensionality of the latent space")
    parser.add_argument("--img_size", type=int, default=8, help="size of each image dimension")
    parser.add_argument("--channels", type=int, default=1, help="number of image channels")
    parser.add_argument("--n_critic", type=int, default=5, help="number of training steps for discriminator per iter")
    parser.add_argument("--sample_interval", type=int, default=200, help="interval betwen image samples")
    opt = parser.parse_args([])
    print(opt)
    np.random.seed(seed)
    torch.manual_seed(seed)
    os.makedirs(folder / "images", exist_ok=True)
    img_shape = (opt.channels, opt.img_size, opt.img_size)

    class Generator(nn.Module):
        def __init__(self):
            super().__init__()

            def block(in_feat, out_feat, normalize=True):
                layers = [nn.Linear(in_feat, out_feat)]
                if normalize:
                    layers.append(nn.BatchNorm1d(out_feat))
                layers.append(nn.LeakyReLU(0.2, inplace=True))
                return layers

            self.model = nn.Sequential(
                *block(opt.latent_dim, 64, normalize=False),
                *block(64, 128),
                nn.Linear(128, int(np.prod(img_shape))),
                nn.Tanh(),
            )

        def forward(self, z):
            img = self.model(z)
            return img.view(img.shape[0], *img_shape)

    class Discriminator(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = nn.Sequential(
                nn.Linear(int(np.prod(img_shape)), 128),
                nn.LeakyReLU(0.2, inplace=True),
                nn.Linear(128, 64),
                nn.LeakyReLU(0.2, inplace=True),
                nn.Linear(64, 1),
            )

        def forward(self, img):
            return self.model(img.view(img.shape[0], -1))

    lambda_gp = 10
    generator = Generator()
    discriminator = Discriminator()
    x, y = digits("train")
    dataset = TensorDataset(torch.from_numpy(x)[:, None] * 2 - 1, torch.from_numpy(y))
    dataloader = DataLoader(dataset, batch_size=opt.batch_size, shuffle=True)
    optimizer_G = torch.optim.Adam(generator.parameters(), lr=opt.lr, betas=(opt.b1, opt.b2))
    optimizer_D = torch.optim.Adam(discriminator.parameters(), lr=opt.lr, betas=(opt.b1, opt.b2))
    Tensor = torch.FloatTensor

    def compute_gradient_penalty(D, real_samples, fake_samples):
        alpha = Tensor(np.random.random((real_samples.size(0), 1, 1, 1)))
        interpolates = (alpha * real_samples + ((1 - alpha) * fake_samples)).requires_grad_(True)
        d_interpolates = D(interpolates)
        fake = Tensor(real_samples.shape[0], 1).fill_(1.0)
        gradients = autograd.grad(
            outputs=d_interpolates,
            inputs=interpolates,
            grad_outputs=fake,
            create_graph=True,
            retain_graph=True,
            only_inputs=True,
        )[0]
        gradients = gradients.view(gradients.size(0), -1)
        return ((gradients.norm(2, dim=1) - 1) ** 2).mean()

    history = []
    batches_done = 0
    with watch([generator, discriminator], [optimizer_G, optimizer_D], loader=dataloader):
        for epoch in range(opt.n_epochs):
            for i, (imgs, _) in enumerate(dataloader):
                real_imgs = imgs.type(Tensor)

                # Train Discriminator
                optimizer_D.zero_grad()
                z = Tensor(np.random.normal(0, 1, (imgs.shape[0], opt.latent_dim)))
                fake_imgs = generator(z)
                real_validity = discriminator(real_imgs)
                fake_validity = discriminator(fake_imgs)
                gradient_penalty = compute_gradient_penalty(discriminator, real_imgs.data, fake_imgs.data)
                d_loss = -torch.mean(real_validity) + torch.mean(fake_validity) + lambda_gp * gradient_penalty
                d_loss.backward()
                optimizer_D.step()
                history.append(d_loss.item())

                optimizer_G.zero_grad()
                # Train the generator every n_critic steps
                if i % opt.n_critic == 0:
                    fake_imgs = generator(z)
                    fake_validity = discriminator(fake_imgs)
                    g_loss = -torch.mean(fake_validity)
                    g_loss.backward()
                    optimizer_G.step()
                    history.append(g_loss.item())
                    print(
                        f"[Epoch {epoch}/{opt.n_epochs}] [Batch {i}/{len(dataloader)}] "
                        f"[D loss: {d_loss.item():f}] [G loss: {g_loss.item():f}]"
                    )
                    if batches_done % opt.sample_interval == 0:
                        save_image(fake_imgs.data[:25], folder / f"images/{batches_done}.png", nrow=5, normalize=True)
                    batches_done += opt.n_critic

    real = torch.from_numpy(digits("test")[0])[:, None] * 2 - 1
    with torch.no_grad():
        fake = generator(Tensor(np.random.normal(0, 1, (len(real), opt.latent_dim))))
    objects = {"G": generator, "D": discriminator, "optimizer_G": optimizer_G, "optimizer_D": optimizer_D}
    distance = sliced_wasserstein(fake, real)
    return Result("distance to test images", distance, 0.25, history, objects, higher_is_better=False)
