"""A small multilayer perceptron."""

from torch import Tensor, nn


class Net(nn.Module):
    """Maps rows (N, columns) to logits (N, classes)."""

    def __init__(self, columns: int, classes: int, width: int, dropout: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(columns, width),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(width, classes),
        )

    def forward(self, rows: Tensor) -> Tensor:
        return self.layers(rows)
