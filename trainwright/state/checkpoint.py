"""Saving and loading a TrainState: written aside, committed by one rename, never unpickled.

checkpoints/step-00000400/
  model.safetensors    the model's state_dict under its own key names
  rest.safetensors     tensors of the optimizer, EMA and random generators
  state.json           everything else
  manifest.json        sizes and sha256
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch.optim import Optimizer

from trainwright.errors import CheckpointError, StorageError
from trainwright.state.codec import as_file, decode, encode
from trainwright.state.cursor import Cursor
from trainwright.state.manifest import fsync, verify, write_manifest
from trainwright.state.rng import RngBag
from trainwright.state.train_state import TrainState

_SET_BY_RECIPE = ("lr", "weight_decay", "betas", "momentum", "eps", "nesterov")
_COUNTERS = ("step", "num_samples", "num_tokens", "elapsed_s", "fraction")


def save_checkpoint(state: TrainState, folder: Path) -> tuple[Path, int]:
    """Saves ``state`` as ``folder/step-XXXXXXXX``. Returns its path and its bytes.

    A kill at any instant leaves either the whole checkpoint or none. Raises StorageError when it cannot be
    written; nothing half-written stays behind then.
    """
    target = folder / f"step-{state.step:08d}"
    aside = folder / f".{target.name}.{os.getpid()}.tmp"
    with _storage_errors(aside):
        folder.mkdir(parents=True, exist_ok=True)
        _sweep(folder)
        aside.mkdir()
        _write(state, aside)
        num_bytes = write_manifest(aside)
        replaced = target.with_suffix(".old")  # still found by ``checkpoints`` should we be killed right here
        if target.exists():  # the same step again, after a resume
            shutil.rmtree(replaced, ignore_errors=True)
            target.rename(replaced)
        aside.rename(target)
        fsync(folder)
        shutil.rmtree(replaced, ignore_errors=True)
    return target, num_bytes


def _write(state: TrainState, folder: Path) -> None:
    model_tensors, model = encode(state.model.state_dict())
    rest_tensors, rest = encode(
        {
            "optimizer": state.optimizer.state_dict(),
            "scaler": state.scaler.state_dict(),
            "ema": state.ema.state_dict(),
            "ledger": state.ledger.state_dict(),
            "rng": RngBag.capture().state_dict(),
            "data": asdict(state.data),
            "counters": {name: getattr(state, name) for name in _COUNTERS},
        }
    )
    save_file(as_file(model_tensors), folder / "model.safetensors")
    save_file(as_file(rest_tensors), folder / "rest.safetensors")
    (folder / "state.json").write_text(
        json.dumps({"model": model, "rest": rest, "optimizer_class": type(state.optimizer).__name__})
    )


def load_checkpoint(state: TrainState, path: Path) -> None:
    """Verifies ``path`` and loads it into ``state`` in place; random generators of the process included.

    Raises CheckpointError when a file is missing or damaged, or when model or optimizer do not fit.
    """
    verify(path)
    loaded = json.loads((path / "state.json").read_text())
    try:
        state.model.load_state_dict(decode(load_file(path / "model.safetensors"), loaded["model"]))
        rest = decode(load_file(path / "rest.safetensors"), loaded["rest"])
        _load_optimizer(state.optimizer, rest["optimizer"], loaded["optimizer_class"])
        state.ema.load_state_dict(rest["ema"])
        state.scaler.load_state_dict(rest["scaler"])
    except (RuntimeError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{path} does not fit the model or optimizer built from the recipe: {_brief(error)}",
            remedy="resume with the recipe of the run (recipe.yaml in its folder)",
        ) from None
    state.ledger.load_state_dict(rest["ledger"])
    state.data = Cursor(**rest["data"])
    for name in _COUNTERS:
        setattr(state, name, rest["counters"][name])
    RngBag.from_state_dict(rest["rng"]).restore()


def _load_optimizer(optimizer: Optimizer, saved: dict[str, Any], saved_class: str) -> None:
    """Moments and counters come from the checkpoint; what a recipe sets stays as the optimizer was built.

    The base learning rate is taken anew from ``lr``, and the schedule goes on from the step that is reached.
    """
    if saved_class != type(optimizer).__name__:
        raise ValueError(f"it holds the state of {saved_class}, not of {type(optimizer).__name__}")
    built = [{key: group[key] for key in _SET_BY_RECIPE if key in group} for group in optimizer.param_groups]
    optimizer.load_state_dict(saved)
    for group, own in zip(optimizer.param_groups, built, strict=True):
        group.pop("initial_lr", None)
        group.update(own)


def checkpoints(folder: Path) -> list[Path]:
    """All committed checkpoints, newest first."""
    return sorted((path for path in folder.glob("step-*") if path.is_dir()), reverse=True)


def newest_valid(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that verifies, and what is wrong with each newer one."""
    broken: list[str] = []
    for path in checkpoints(folder):
        try:
            verify(path)
        except CheckpointError as error:
            broken.append(error.message)
        else:
            return path, broken
    return None, broken


def keep_newest(folder: Path, count: int, committed: Path) -> None:
    """Deletes all but the ``count`` newest checkpoints up to ``committed``, which was just written.

    Later ones are damaged (a resume stepped over them) and not counted: they must not push good ones out.
    """
    mine = [path for path in checkpoints(folder) if path.name <= committed.name]
    for path in mine[count:]:
        shutil.rmtree(path, ignore_errors=True)


def _sweep(folder: Path) -> None:
    """Removes what a killed save left behind."""
    for path in folder.glob(".step-*"):
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _storage_errors(aside: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        shutil.rmtree(aside, ignore_errors=True)
        if isinstance(error, TypeError):
            raise CheckpointError(
                f"the state cannot be saved: {_brief(error)}",
                remedy="keep tensors, numbers, strings and containers of them in extra state and parameter groups",
            ) from None
        if isinstance(error, OSError) or type(error).__name__ == "SafetensorError":
            raise StorageError(
                f"the checkpoint {aside.parent} could not be written: {_brief(error)}",
                remedy="free space or fix the permissions of that folder; older checkpoints there are intact",
            ) from None
        raise


def _brief(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines)[:400] or type(error).__name__
