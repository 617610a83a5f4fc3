"""Writes small checkpoints for the tests of stores."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import save_file

from trainwright.checkpoint.manifest import name_of, write_manifest
from trainwright.checkpoint.store import Best


def checkpoint(folder: Path, step: int, name: str | None = None, best: Best | None = None) -> Path:
    path = folder / (name or name_of(step))
    path.mkdir(parents=True)
    save_file({"w": torch.full((3,), float(step))}, path / "model.safetensors")
    save_file({"m": torch.full((5,), float(step))}, path / "rest.safetensors")
    (path / "state.json").write_text(json.dumps({"step": step}))
    write_manifest(path, step, asdict(best) if best else None)
    return path
