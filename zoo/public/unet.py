"""After milesial/Pytorch-UNet: cross entropy plus Dice, GradScaler, evaluated within the epoch, plateau schedule."""

import logging
import sys
from argparse import Namespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import optim
from torch.utils.data import DataLoader, Dataset, random_split
from tqdm import tqdm

from zoo.public import Result

logger = logging.getLogger("unet")


class DoubleConv(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.double_conv = nn.Sequential(
            nn.Conv2d(in_channels, out_channels, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(out_channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(out_channels, out_channels, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(out_channels),
            nn.ReLU(inplace=True),
        )

    def forward(self, x):
        return self.double_conv(x)


class Down(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.maxpool_conv = nn.Sequential(nn.MaxPool2d(2), DoubleConv(in_channels, out_channels))

    def forward(self, x):
        return self.maxpool_conv(x)


class Up(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.up = nn.ConvTranspose2d(in_channels, in_channels // 2, kernel_size=2, stride=2)
        self.conv = DoubleConv(in_channels, out_channels)

    def forward(self, x1, x2):
        x1 = self.up(x1)
        dy, dx = x2.size(2) - x1.size(2), x2.size(3) - x1.size(3)
        x1 = F.pad(x1, [dx // 2, dx - dx // 2, dy // 2, dy - dy // 2])
        return self.conv(torch.cat([x2, x1], dim=1))


class UNet(nn.Module):
    def __init__(self, n_channels, n_classes, width=8):
        super().__init__()
        self.n_channels, self.n_classes = n_channels, n_classes
        self.inc = DoubleConv(n_channels, width)
        self.down1, self.down2 = Down(width, 2 * width), Down(2 * width, 4 * width)
        self.up1, self.up2 = Up(4 * width, 2 * width), Up(2 * width, width)
        self.outc = nn.Conv2d(width, n_classes, kernel_size=1)

    def forward(self, x):
        x1 = self.inc(x)
        x2 = self.down1(x1)
        x3 = self.down2(x2)
        return self.outc(self.up2(self.up1(x3, x2), x1))


class ShapesDataset(Dataset):
    """Noisy pictures of a disc (class 1) and a square (class 2)."""

    def __init__(self, n, size, seed):
        g = torch.Generator().manual_seed(seed)
        rows, cols = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
        self.images, self.masks = [], []
        for _ in range(n):
            mask = torch.zeros(size, size, dtype=torch.long)
            cy, cx = torch.randint(6, size - 6, (2,), generator=g).tolist()
            top, left = torch.randint(1, size - 9, (2,), generator=g).tolist()
            mask[top : top + 7, left : left + 7] = 2
            mask[(rows - cy) ** 2 + (cols - cx) ** 2 <= 20] = 1
            shade = torch.tensor([0.2, 0.55, 0.8])[mask]
            self.images.append((shade + 0.12 * torch.randn(size, size, generator=g))[None])
            self.masks.append(mask)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, idx):
        return {"image": self.images[idx].float().contiguous(), "mask": self.masks[idx].long().contiguous()}


def dice_coeff(input, target, reduce_batch_first=False, epsilon=1e-6):
    sum_dim = (-1, -2) if input.dim() == 2 or not reduce_batch_first else (-1, -2, -3)
    inter = 2 * (input * target).sum(dim=sum_dim)
    sets_sum = input.sum(dim=sum_dim) + target.sum(dim=sum_dim)
    sets_sum = torch.where(sets_sum == 0, inter, sets_sum)
    return ((inter + epsilon) / (sets_sum + epsilon)).mean()


def multiclass_dice_coeff(input, target, reduce_batch_first=False, epsilon=1e-6):
    return dice_coeff(input.flatten(0, 1), target.flatten(0, 1), reduce_batch_first, epsilon)


def dice_loss(input, target):
    return 1 - multiclass_dice_coeff(input, target, reduce_batch_first=True)


@torch.inference_mode()
def evaluate(net, dataloader, device, amp):
    net.eval()
    num_val_batches = len(dataloader)
    dice_score = 0
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=amp):
        for batch in tqdm(dataloader, total=num_val_batches, desc="Validation round", unit="batch", leave=False):
            image, mask_true = batch["image"].to(device), batch["mask"].to(device)
            mask_pred = net(image)
            mask_true = F.one_hot(mask_true, net.n_classes).permute(0, 3, 1, 2).float()
            mask_pred = F.one_hot(mask_pred.argmax(dim=1), net.n_classes).permute(0, 3, 1, 2).float()
            dice_score += multiclass_dice_coeff(mask_pred[:, 1:], mask_true[:, 1:], reduce_batch_first=False)
    net.train()
    return dice_score / max(num_val_batches, 1)


def train_model(
    model, device, watch, dir_checkpoint, seed, epochs, batch_size, learning_rate, val_percent=0.2, amp=False,
    weight_decay=1e-8, momentum=0.9, gradient_clipping=1.0,
):  # fmt: skip
    dataset = ShapesDataset(160, 24, seed)
    n_val = int(len(dataset) * val_percent)
    n_train = len(dataset) - n_val
    train_set, val_set = random_split(dataset, [n_train, n_val], generator=torch.Generator().manual_seed(0))
    train_loader = DataLoader(train_set, shuffle=True, batch_size=batch_size)
    val_loader = DataLoader(val_set, shuffle=False, drop_last=True, batch_size=batch_size)
    logger.info(
        f"Starting training:\n    Epochs: {epochs}\n    Batch size: {batch_size}\n    Learning rate: {learning_rate}\n"
        f"    Training size: {n_train}\n    Validation size: {n_val}\n    Mixed Precision: {amp}"
    )

    optimizer = optim.RMSprop(
        model.parameters(), lr=learning_rate, weight_decay=weight_decay, momentum=momentum, foreach=True
    )
    scheduler = optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", patience=5)
    grad_scaler = torch.amp.GradScaler(device.type, enabled=amp)
    criterion = nn.CrossEntropyLoss() if model.n_classes > 1 else nn.BCEWithLogitsLoss()
    global_step, history = 0, []

    with watch(model, optimizer, loader=train_loader, scaler=grad_scaler, scheduler=scheduler):
        for epoch in range(1, epochs + 1):
            model.train()
            epoch_loss = 0
            with tqdm(total=n_train, desc=f"Epoch {epoch}/{epochs}", unit="img") as pbar:
                for batch in train_loader:
                    images, true_masks = batch["image"], batch["mask"]
                    assert images.shape[1] == model.n_channels
                    images = images.to(device=device, dtype=torch.float32)
                    true_masks = true_masks.to(device=device, dtype=torch.long)

                    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=amp):
                        masks_pred = model(images)
                        loss = criterion(masks_pred, true_masks)
                        loss += dice_loss(
                            F.softmax(masks_pred, dim=1).float(),
                            F.one_hot(true_masks, model.n_classes).permute(0, 3, 1, 2).float(),
                        )

                    optimizer.zero_grad(set_to_none=True)
                    grad_scaler.scale(loss).backward()
                    grad_scaler.unscale_(optimizer)
                    torch.nn.utils.clip_grad_norm_(model.parameters(), gradient_clipping)
                    grad_scaler.step(optimizer)
                    grad_scaler.update()

                    pbar.update(images.shape[0])
                    global_step += 1
                    epoch_loss += loss.item()
                    history.append(loss.item())
                    pbar.set_postfix(**{"loss (batch)": loss.item()})

                    division_step = n_train // (5 * batch_size)
                    if division_step > 0 and global_step % division_step == 0:
                        val_score = evaluate(model, val_loader, device, amp)
                        scheduler.step(val_score)
                        logger.info(f"Validation Dice score: {val_score}")
            state_dict = model.state_dict()
            torch.save(state_dict, str(dir_checkpoint / f"checkpoint_epoch{epoch}.pth"))
            logger.info(f"Checkpoint {epoch} saved!")
    objects = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": grad_scaler}
    return Result("Dice score", float(evaluate(model, val_loader, device, amp)), 0.8, history, objects)


def main(watch, seed, folder):
    args = Namespace(epochs=6, batch_size=4, lr=1e-4, amp=False, classes=3)
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    torch.manual_seed(seed)
    device = torch.device("cpu")
    logger.info(f"Using device {device}")
    model = UNet(n_channels=1, n_classes=args.classes)
    model = model.to(memory_format=torch.channels_last)
    logger.info(f"Network:\n\t{model.n_channels} input channels\n\t{model.n_classes} output channels (classes)")
    try:
        return train_model(model, device, watch, folder, seed, args.epochs, args.batch_size, args.lr, amp=args.amp)
    finally:
        logger.removeHandler(handler)
