"""After Lightning's examples: a LightningModule and a DataModule, callbacks, a logger, resumed from "last", tested."""

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics.classification import MulticlassAccuracy

from zoo.public import Result
from zoo.public.data import digits


class DigitsDataModule(L.LightningDataModule):
    def __init__(self, batch_size=32):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage):
        full, test = (
            TensorDataset(torch.from_numpy(x)[:, None], torch.from_numpy(y)) for x, y in map(digits, ("train", "test"))
        )
        self.train, self.val = random_split(full, [1200, len(full) - 1200], torch.Generator().manual_seed(42))
        self.test = test

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=self.batch_size)

    def test_dataloader(self):
        return DataLoader(self.test, batch_size=self.batch_size)


class LitClassifier(L.LightningModule):
    def __init__(self, hidden_dim=64, learning_rate=5e-3, weight_decay=5e-4):
        super().__init__()
        self.save_hyperparameters()
        self.model = nn.Sequential(
            nn.Conv2d(1, 24, 3, padding=1, bias=False),
            nn.BatchNorm2d(24),
            nn.ReLU(),
            nn.Conv2d(24, 24, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(24),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(24 * 16, hidden_dim),
            nn.ReLU(),
            nn.Linear(hidden_dim, 10),
        )
        self.val_accuracy = MulticlassAccuracy(10)
        self.test_accuracy = MulticlassAccuracy(10)
        self.losses = []

    def forward(self, x):
        return F.log_softmax(self.model(x), dim=1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.nll_loss(self(x), y)
        self.losses.append(loss.item())
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.val_accuracy.update(logits, y)
        self.log("val_loss", F.nll_loss(logits, y), prog_bar=True)
        self.log("val_acc", self.val_accuracy, prog_bar=True)

    def test_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.test_accuracy.update(logits, y)
        self.log("test_loss", F.nll_loss(logits, y))
        self.log("test_acc", self.test_accuracy)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(
            self.parameters(), lr=self.hparams.learning_rate, momentum=0.9, weight_decay=self.hparams.weight_decay
        )
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=0.1, total_steps=int(self.trainer.estimated_stepping_batches)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def make_trainer(watch, folder, name, stop_after=None):
    class StopAfter(L.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            if stop_after is not None and trainer.current_epoch + 1 == stop_after:
                trainer.should_stop = True

    return L.Trainer(
        max_epochs=8,
        accelerator="cpu",
        devices=1,
        logger=CSVLogger(folder / "logs", name=name, version=0),
        callbacks=[
            ModelCheckpoint(folder / name, filename="best", monitor="val_loss", save_last=True),
            EarlyStopping("val_loss", patience=5),
            LearningRateMonitor(logging_interval="step"),
            StopAfter(),
            *watch.lightning(),
        ],
        gradient_clip_val=1.0,
        log_every_n_steps=10,
        enable_progress_bar=False,
    )


def main(watch, seed, folder):
    L.seed_everything(7 + seed, verbose=False)
    model = LitClassifier()
    trainer = make_trainer(watch, folder, "first", stop_after=4)
    trainer.fit(model, datamodule=DigitsDataModule())
    losses = model.losses

    model = LitClassifier()
    trainer = make_trainer(watch, folder, "second")
    trainer.fit(model, datamodule=DigitsDataModule(), ckpt_path=folder / "first" / "last.ckpt", weights_only=True)
    optimizer = trainer.optimizers[0]
    scheduler = trainer.lr_scheduler_configs[0].scheduler
    (metrics,) = trainer.test(model, datamodule=DigitsDataModule(), ckpt_path="best", weights_only=True)
    objects = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    return Result("test accuracy", metrics["test_acc"], 0.92, losses + model.losses, objects)
