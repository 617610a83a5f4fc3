"""Stores weights that are not trained, such as the base model of adapters, once for all checkpoints of a run."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from trainwright.checkpoint.manifest import FROZEN, file_entry, read_manifest
from trainwright.checkpoint.staging import num_bytes
from trainwright.checkpoint.tensor_file import write_tensors
from trainwright.errors import CheckpointError


def frozen_part(model: Mapping[str, Tensor], trained: Collection[str]) -> dict[str, Tensor]:
    """Return the tensors that are not trained if they are more than half of the bytes of the model; else {}.

    The buffers of a fully trained model, such as BatchNorm statistics, stay in the checkpoint.
    """
    frozen = {name: each for name, each in model.items() if name not in trained}
    return frozen if trained and 2 * num_bytes(frozen) > num_bytes(model) else {}


def write_frozen(frozen: Mapping[str, Tensor], folder: Path, others: Iterable[Path]) -> str:
    """Write frozen.safetensors into ``folder``, or a hard link to that of another checkpoint with the same content.

    Hashes of the content are compared, so weights that change without being trained are written again. A linked file is
    read once to detect damage. Returns the hash.
    """
    digest = _digest(frozen)
    for other in others:
        with suppress(CheckpointError, OSError):  # damaged, just deleted, or a file system without hard links
            manifest = read_manifest(other)
            if manifest.get("frozen") != digest:
                continue
            os.link(other / FROZEN, folder / FROZEN)
            if file_entry(folder / FROZEN) == manifest["files"].get(FROZEN):
                return digest
            (folder / FROZEN).unlink()
    (folder / FROZEN).unlink(missing_ok=True)
    write_tensors(frozen, folder / FROZEN)
    return digest


def _digest(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, each in sorted(tensors.items()):
        digest.update(f"{name} {each.dtype} {tuple(each.shape)}\n".encode())
        digest.update(each.detach().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
