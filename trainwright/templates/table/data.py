"""Measurements of 569 tumours, from scikit-learn. Read your own table here."""

import torch
from sklearn.datasets import load_breast_cancer
from torch.utils.data import TensorDataset


def tumours(split: str) -> TensorDataset:
    """Return (30 measurements, 1 if benign); every fifth row is held out for "val"."""
    columns, labels = load_breast_cancer(return_X_y=True)
    inputs = torch.tensor(columns, dtype=torch.float32)
    is_val = torch.arange(len(inputs)) % 5 == 4
    seen = inputs[~is_val]  # the held out rows must not influence the scale
    inputs = (inputs - seen.mean(0)) / seen.std(0)
    rows = is_val if split == "val" else ~is_val
    return TensorDataset(inputs[rows], torch.tensor(labels)[rows])
