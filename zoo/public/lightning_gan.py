"""After Lightning's ``generative_adversarial_net.py``: manual optimization, two optimizers that are toggled."""

import lightning as L
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, TensorDataset

from zoo.public import Result
from zoo.public.data import digits, save_image, sliced_wasserstein


class Generator(nn.Module):
    def __init__(self, latent_dim, img_shape):
        super().__init__()
        self.img_shape = img_shape

        def block(in_feat, out_feat, normalize=True):
            layers = [nn.Linear(in_feat, out_feat)]
            if normalize:
                layers.append(nn.BatchNorm1d(out_feat))
            layers.append(nn.LeakyReLU(0.2, inplace=True))
            return layers

        self.model = nn.Sequential(
            *block(latent_dim, 64, normalize=False),
            *block(64, 128),
            nn.Linear(128, int(np.prod(img_shape))),
            nn.Tanh(),
        )

    def forward(self, z):
        img = self.model(z)
        return img.view(img.size(0), *self.img_shape)


class Discriminator(nn.Module):
    def __init__(self, img_shape):
        super().__init__()
        self.model = nn.Sequential(
            nn.Linear(int(np.prod(img_shape)), 128),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Linear(128, 64),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Linear(64, 1),
        )

    def forward(self, img):
        return self.model(img.view(img.size(0), -1))


class GAN(L.LightningModule):
    def __init__(self, folder, img_shape=(1, 8, 8), lr=0.001, b1=0.5, b2=0.999, latent_dim=16):
        super().__init__()
        self.save_hyperparameters(ignore=["folder"])
        self.automatic_optimization = False
        self.folder = folder
        self.generator = Generator(latent_dim, img_shape)
        self.discriminator = Discriminator(img_shape)
        self.validation_z = torch.randn(16, self.hparams.latent_dim)
        self.losses = []

    def forward(self, z):
        return self.generator(z)

    @staticmethod
    def adversarial_loss(y_hat, y):
        return F.binary_cross_entropy_with_logits(y_hat, y)

    def training_step(self, batch):
        imgs, _ = batch
        opt_g, opt_d = self.optimizers()
        z = torch.randn(imgs.shape[0], self.hparams.latent_dim).type_as(imgs)

        # the generator
        self.toggle_optimizer(opt_g)
        valid = torch.ones(imgs.size(0), 1).type_as(imgs)
        g_loss = self.adversarial_loss(self.discriminator(self(z)), valid)
        opt_g.zero_grad()
        self.manual_backward(g_loss)
        opt_g.step()
        self.untoggle_optimizer(opt_g)

        # the discriminator
        self.toggle_optimizer(opt_d)
        real_loss = self.adversarial_loss(self.discriminator(imgs), valid)
        fake = torch.zeros(imgs.size(0), 1).type_as(imgs)
        fake_loss = self.adversarial_loss(self.discriminator(self(z).detach()), fake)
        d_loss = (real_loss + fake_loss) / 2
        opt_d.zero_grad()
        self.manual_backward(d_loss)
        opt_d.step()
        self.untoggle_optimizer(opt_d)

        self.losses += [g_loss.item(), d_loss.item()]
        self.log_dict({"d_loss": d_loss, "g_loss": g_loss}, prog_bar=True)

    def configure_optimizers(self):
        lr, b1, b2 = self.hparams.lr, self.hparams.b1, self.hparams.b2
        opt_g = torch.optim.Adam(self.generator.parameters(), lr=lr, betas=(b1, b2))
        opt_d = torch.optim.Adam(self.discriminator.parameters(), lr=lr, betas=(b1, b2))
        return [opt_g, opt_d], []

    def on_train_epoch_end(self):
        z = self.validation_z.type_as(self.generator.model[0].weight)
        sample_imgs = self(z)
        save_image(sample_imgs, self.folder / f"generated_{self.current_epoch}.png", nrow=4, normalize=True)


def main(watch, seed, folder):
    L.seed_everything(seed, verbose=False)
    x, y = digits("train")
    dataset = TensorDataset(torch.from_numpy(x)[:, None] * 2 - 1, torch.from_numpy(y))
    loader = DataLoader(dataset, batch_size=64, shuffle=True)
    model = GAN(folder)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=30,
        logger=CSVLogger(folder / "logs", name="gan", version=0),
        callbacks=watch.lightning(),
        log_every_n_steps=20,
        enable_progress_bar=False,
        default_root_dir=folder,
    )
    trainer.fit(model, loader)
    trainer.save_checkpoint(folder / "gan.ckpt")
    real = torch.from_numpy(digits("test")[0])[:, None] * 2 - 1
    with torch.no_grad():
        fake = model(torch.randn(len(real), 16))
    objects = {"model": model, "optimizer_g": trainer.optimizers[0], "optimizer_d": trainer.optimizers[1]}
    distance = sliced_wasserstein(fake, real)
    return Result("distance to test images", distance, 0.35, model.losses, objects, higher_is_better=False)
