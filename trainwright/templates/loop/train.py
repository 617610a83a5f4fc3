"""A plain PyTorch loop. tw.watch records it, examines it and prints a diagnosis."""

import torch
import torch.nn.functional as F
import trainwright as tw
from torch import nn
from torch.utils.data import DataLoader

from data import spirals
from model import make_model

EPOCHS = 20


def evaluate(model: nn.Module, loader: DataLoader) -> tuple[float, float]:
    """Return loss and accuracy, averaged over all samples."""
    model.eval()
    loss, correct, count = 0.0, 0, 0
    with torch.no_grad():
        for points, labels in loader:
            logits = model(points)
            loss += F.cross_entropy(logits, labels, reduction="sum").item()
            correct += int((logits.argmax(1) == labels).sum())
            count += len(labels)
    model.train()
    return loss / count, correct / count


def main() -> None:
    torch.manual_seed(0)
    model = make_model()
    train = DataLoader(spirals("train"), batch_size=32, shuffle=True)
    val = DataLoader(spirals("val"), batch_size=256)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)

    with tw.watch(
        model, optimizer, loader=train, scheduler=schedule, out="runs/loop"
    ) as watch:
        for epoch in range(EPOCHS):
            for points, labels in train:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(points), labels)
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
            schedule.step()
            val_loss, val_accuracy = evaluate(model, val)
            watch.log(val_loss=val_loss, val_accuracy=val_accuracy)
            print(
                f"epoch {epoch + 1}: loss {val_loss:.3f}, accuracy {val_accuracy:.3f}"
            )

    torch.save(model.state_dict(), "model.pt")


if __name__ == "__main__":
    main()
