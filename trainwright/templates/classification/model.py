"""A small convolutional network."""

from torch import Tensor, nn


class Net(nn.Module):
    """Maps images (N, 1, 8, 8) to logits (N, classes)."""

    def __init__(self, width: int = 32, classes: int = 10) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.head = nn.Linear(width * 4 * 4, classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images).flatten(1))
