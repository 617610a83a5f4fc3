"""Legal techniques with what is where in a picture: boxes, masks, centres."""

from __future__ import annotations

import itertools

import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.optim.lr_scheduler import MultiStepLR
from torch.utils.data import TensorDataset

from zoo.programs.training import Training


def draw_shapes(n: int, size: int = 24):
    """One bright rectangle, ellipse or frame on noise. Boxes are (x0, y0, x1, y1) in units of the picture."""
    kind = torch.randint(3, (n,))
    wh = 0.25 + 0.35 * torch.rand(n, 2)
    centre = wh / 2 + torch.rand(n, 2) * (1 - wh)
    grid = (torch.arange(size) + 0.5) / size
    u = (grid - centre[:, :1]).div(wh[:, :1] / 2)[:, None, :].expand(n, size, size)
    v = (grid - centre[:, 1:]).div(wh[:, 1:] / 2)[:, :, None].expand(n, size, size)
    square, disk = torch.maximum(u.abs(), v.abs()) <= 1, u**2 + v**2 <= 1
    hole = torch.maximum(u.abs(), v.abs()) <= 0.5
    shape = torch.where(
        (kind == 0)[:, None, None], square, torch.where((kind == 1)[:, None, None], disk, square & ~hole)
    )
    pictures = shape.float() * (0.8 + 0.4 * torch.rand(n, 1, 1)) + 0.15 * torch.randn(n, size, size)
    return (
        ((pictures - pictures.mean()) / pictures.std()).unsqueeze(1),
        kind,
        torch.cat([centre - wh / 2, centre + wh / 2], 1),
    )


def generalized_iou(a, b):
    """Of boxes (n, 4), row by row."""
    area_a, area_b = (a[:, 2:] - a[:, :2]).prod(1), (b[:, 2:] - b[:, :2]).prod(1)
    inter = (torch.min(a[:, 2:], b[:, 2:]) - torch.max(a[:, :2], b[:, :2])).clamp(min=0).prod(1)
    hull = (torch.max(a[:, 2:], b[:, 2:]) - torch.min(a[:, :2], b[:, :2])).prod(1)
    union = area_a + area_b - inter
    return inter / union - (hull - union) / hull


class Localizer(nn.Module):
    def __init__(self, classes=3):
        super().__init__()
        widths, layers = [1, 16, 32, 32], []
        for a, b in itertools.pairwise(widths):
            layers += [nn.Conv2d(a, b, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU(inplace=True)]
        self.backbone = nn.Sequential(*layers, nn.Flatten())
        self.neck = nn.Sequential(nn.Linear(32 * 3 * 3, 64), nn.ReLU(inplace=True))
        self.class_head, self.box_head = nn.Linear(64, classes), nn.Linear(64, 4)

    def forward(self, x):
        x = self.neck(self.backbone(x))
        cxcy, wh = self.box_head(x).sigmoid().chunk(2, 1)
        return self.class_head(x), torch.cat([cxcy - wh / 2, cxcy + wh / 2], 1)


def box_and_class(t: Training) -> None:
    """A class head and a box head; for boxes L1 and generalised IoU (Rezatofighi et al., 2019) as DETR weighs them."""
    t.data = TensorDataset(*draw_shapes(896))
    t.model, t.epochs = Localizer(), 6

    def loss(model, batch):
        images, labels, boxes = batch
        logits, predicted = model(images)
        loss_box = F.l1_loss(predicted, boxes, reduction="none").sum(1).mean()
        loss_giou = (1 - generalized_iou(predicted, boxes)).mean()
        return F.cross_entropy(logits, labels) + 5 * loss_box + 2 * loss_giou

    t.loss = loss


class DoubleConv(nn.Sequential):
    def __init__(self, c_in, c_out):
        super().__init__(
            nn.Conv2d(c_in, c_out, 3, padding=1, bias=False), nn.BatchNorm2d(c_out), nn.ReLU(inplace=True),
            nn.Conv2d(c_out, c_out, 3, padding=1, bias=False), nn.BatchNorm2d(c_out), nn.ReLU(inplace=True),
        )  # fmt: skip


class SmallUNet(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.pool = nn.MaxPool2d(2)
        self.down1, self.down2, self.bottom = (
            DoubleConv(3, width), DoubleConv(width, 2 * width), DoubleConv(2 * width, 4 * width),
        )  # fmt: skip
        self.up2, self.dec2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2), DoubleConv(4 * width, 2 * width)
        self.up1, self.dec1 = nn.ConvTranspose2d(2 * width, width, 2, stride=2), DoubleConv(2 * width, width)
        self.out = nn.Conv2d(width, 1, 1)

    def forward(self, x):
        d1 = self.down1(x)
        d2 = self.down2(self.pool(d1))
        x = self.bottom(self.pool(d2))
        x = self.dec2(torch.cat([self.up2(x), d2], dim=1))
        x = self.dec1(torch.cat([self.up1(x), d1], dim=1))
        return self.out(x)


def draw_roads(n, size=24):
    """Grey stripes that bend through coloured ground, and grey roofs that are no roads."""
    along, across = torch.arange(size).float(), torch.arange(size).float()[:, None]
    start, slope = 6 + 12 * torch.rand(n, 1), 0.6 * (torch.rand(n, 1) - 0.5)
    centre = start + slope * (along - size / 2) + 2 * torch.sin(0.25 * along + 6.28 * torch.rand(n, 1))
    masks = ((across - centre[:, None, :]).abs() < 1.8).float()
    turned = torch.rand(n) < 0.5
    masks[turned] = masks[turned].transpose(1, 2)
    ground = F.interpolate(torch.randn(n, 3, 4, 4), size=size, mode="bilinear")
    roofs = torch.zeros(n, size, size)
    for image, (row, col) in zip(roofs, torch.randint(0, size - 5, (n, 2)).tolist()):
        image[row : row + 5, col : col + 5] = 1
    grey = torch.maximum(masks, roofs)[:, None]
    images = (1 - grey) * ground + grey * 0.8 + 0.3 * torch.randn(n, 3, size, size)
    return images, masks[:, None]


def dice_loss(logits, target, smooth=1.0):
    p = logits.sigmoid()
    overlap = (p * target).sum((1, 2, 3))
    return (1 - (2 * overlap + smooth) / (p.sum((1, 2, 3)) + target.sum((1, 2, 3)) + smooth)).mean()


def road_masks(t: Training) -> None:
    """U-Net, BCE + Dice, flips of picture and mask together, bfloat16 autocast, polynomial decay set by hand."""
    images, masks = draw_roads(384)
    mean, std = images[:320].mean((0, 2, 3), keepdim=True), images[:320].std((0, 2, 3), keepdim=True)
    images = (images - mean) / std
    t.model = SmallUNet()
    t.data, t.batch_size, t.epochs = TensorDataset(images[:320], masks[:320]), 16, 7
    t.optimizers_of = lambda tr: [optim.SGD(tr.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-4)]
    max_iter, t.iou = 7 * 20, []

    def augment(batch):
        x, y = batch
        if torch.rand(()) < 0.5:
            x, y = x.flip(-1), y.flip(-1)
        if torch.rand(()) < 0.5:
            x, y = x.flip(-2), y.flip(-2)
        turns = int(torch.randint(4, ()))
        return torch.rot90(x, turns, (2, 3)), torch.rot90(y, turns, (2, 3))

    def update(tr, batch):
        x, y = batch
        for group in tr.optimizers[0].param_groups:
            group["lr"] = 0.05 * (1 - tr.steps / max_iter) ** 0.9
        tr.optimizers[0].zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = tr.model(x)
        logits = logits.float()
        loss = F.binary_cross_entropy_with_logits(logits, y) + dice_loss(logits, y)
        loss.backward()
        tr.optimizers[0].step()
        return loss.detach()

    def validate(tr):
        if tr.steps % 20:
            return
        tr.model.eval()
        with torch.inference_mode():
            found, true = tr.model(images[320:]) > 0, masks[320:] > 0.5
        t.iou.append((found & true).sum().item() / (found | true).sum().item())
        tr.model.train()

    t.transform, t.update = augment, update
    t.each_step.append(validate)


def conv_bn(c_in, c_out, stride=1):
    conv = nn.Conv2d(c_in, c_out, 3, stride=stride, padding=1, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(c_out), nn.ReLU(inplace=True))


class PointDetector(nn.Module):
    def __init__(self, classes=2, width=16):
        super().__init__()
        self.backbone = nn.Sequential(conv_bn(1, width, 2), conv_bn(width, 2 * width, 2), conv_bn(2 * width, 2 * width))
        self.heat, self.offset, self.size = (
            nn.Sequential(nn.Conv2d(2 * width, width, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(width, out, 1))
            for out in (classes, 2, 1)
        )
        nn.init.constant_(self.heat[-1].bias, -2.19)

    def forward(self, x):
        x = self.backbone(x)
        return self.heat(x), self.offset(x), self.size(x)


def draw_scenes(n, size=32, stride=4):
    """Discs and crosses, at most one in each quarter: picture, heat maps, offsets, sizes, and where the centres are."""
    centres = torch.tensor([[8.0, 8.0], [8.0, 24.0], [24.0, 8.0], [24.0, 24.0]]) + 3 * (2 * torch.rand(n, 4, 2) - 1)
    radius, kind = 3 + 2 * torch.rand(n, 4), torch.randint(2, (n, 4))
    present = torch.rand(n, 4) < 0.5
    present[torch.arange(n), torch.randint(4, (n,))] = True

    pixels = torch.arange(size) + 0.5
    dy, dx = pixels[:, None] - centres[..., 0, None, None], pixels - centres[..., 1, None, None]
    r = radius[..., None, None]
    disc = dx**2 + dy**2 < r**2
    cross = (torch.maximum(dx.abs(), dy.abs()) < r) & (torch.minimum(dx.abs(), dy.abs()) < 0.35 * r)
    inside = torch.where(kind[..., None, None] == 0, disc, cross)
    picture = (inside & present[..., None, None]).any(1, keepdim=True) + 0.3 * torch.randn(n, 1, size, size)

    cells, m = (centres / stride).long(), size // stride
    grid = torch.arange(m)
    away = (grid[:, None] - cells[..., 0, None, None]) ** 2 + (grid - cells[..., 1, None, None]) ** 2
    bumps = torch.exp(-away / (2 * (r / stride / 2) ** 2)) * present[..., None, None]
    heat = torch.stack([(bumps * (kind == c)[..., None, None]).amax(1) for c in range(2)], 1)
    at, offset, extent = torch.zeros(n, 1, m, m), torch.zeros(n, 2, m, m), torch.zeros(n, 1, m, m)
    i, j = present.nonzero(as_tuple=True)
    row, col = cells[i, j].unbind(1)
    at[i, 0, row, col] = 1.0
    offset[i, :, row, col] = centres[i, j] / stride - cells[i, j]
    extent[i, 0, row, col] = 2 * radius[i, j] / stride
    return picture, heat, at, offset, extent


def centre_loss(outputs, targets):
    (heat, offset, size), (true_heat, at, true_offset, true_size) = outputs, targets
    p, peak = heat.sigmoid().clamp(1e-4, 1 - 1e-4), true_heat == 1
    at_peaks = ((1 - p) ** 2 * p.log())[peak].sum()
    around = ((1 - true_heat) ** 4 * p**2 * (1 - p).log())[~peak].sum()
    count = at.sum().clamp(min=1)
    focal = -(at_peaks + around) / count
    l1_offset = ((offset - true_offset).abs() * at).sum() / count
    l1_size = ((size - true_size).abs() * at).sum() / count
    return focal + l1_offset + 0.1 * l1_size


def centre_points(t: Training) -> None:
    """Objects as points (Zhou et al., 2019): penalty-reduced focal loss on the heat maps, L1 where the centres are."""
    columns = draw_scenes(768)
    mean, std = columns[0][:640].mean(), columns[0][:640].std()
    columns = ((columns[0] - mean) / std, *columns[1:])
    t.model = PointDetector()
    t.data, t.batch_size, t.epochs = TensorDataset(*(c[:640] for c in columns)), 32, 10
    t.loss = lambda model, batch: centre_loss(model(batch[0]), batch[1:])
    t.optimizers_of = lambda tr: [optim.Adam(tr.parameters(), lr=3e-3)]
    t.scheduler_of = lambda opt: MultiStepLR(opt, milestones=[140, 180], gamma=0.3)
    t.val = []

    @torch.no_grad()
    def validate(tr):
        if tr.steps % 20:
            return
        tr.model.eval()
        picture, *targets = (c[640:] for c in columns)
        outputs = tr.model(picture)
        p = outputs[0].sigmoid()
        found = (p == F.max_pool2d(p, 3, stride=1, padding=1)) & (p > 0.3)
        true = targets[0] == 1
        near_true, near_found = (F.max_pool2d(each.float(), 3, stride=1, padding=1) > 0 for each in (true, found))
        precision = (found & near_true).sum().item() / max(found.sum().item(), 1)
        recall = (true & near_found).sum().item() / true.sum().item()
        tr.val.append((centre_loss(outputs, targets).item(), precision, recall))
        tr.model.train()

    t.each_step.append(validate)
