"""Characters of the help texts that ship with Python. Put your own text here."""

from pydoc_data.topics import topics

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

CHARACTERS = [chr(code) for code in range(32, 127)] + ["\n"]
"""The vocabulary; any other character is read as a space."""


def text(split: str) -> str:
    """Return the topics in one text; every tenth topic is held out for "val"."""
    names = sorted(topics)
    chosen = [name for name in names if (name in names[::10]) == (split == "val")]
    return "\n\n".join(topics[name] for name in chosen)


def encode(characters: str) -> Tensor:
    ids = {character: number for number, character in enumerate(CHARACTERS)}
    return torch.tensor([ids.get(character, 0) for character in characters])


def characters(split: str, block_size: int) -> TensorDataset:
    """Return (ids, the ids that follow): windows that do not overlap."""
    ids = encode(text(split))
    count = (len(ids) - 1) // block_size
    windows = ids[: count * block_size].view(count, block_size)
    following = ids[1 : count * block_size + 1].view(count, block_size)
    return TensorDataset(windows, following)
