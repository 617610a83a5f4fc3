"""Handwritten digits of 8 x 8 pixels, from scikit-learn. Put your own images here."""

import torch
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset


def digits(split: str) -> TensorDataset:
    """Return (image, label) pairs; every fifth image is held out for "val"."""
    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    is_val = torch.arange(len(images)) % 5 == 4
    rows = is_val if split == "val" else ~is_val
    return TensorDataset(images[rows], torch.tensor(labels)[rows])
