"""Saving and loading a TrainState: written to a temporary folder, committed by one rename, never unpickled.

checkpoints/step-00000400/
    model.safetensors    the model's state_dict under its key names; the averaged weights if the optimizer averages
                         them itself (see checkpoint/optimizer_modes.py)
    frozen.safetensors   what is not trained, if it is the larger part: the base model of adapters. It is one file on
                         disk, with a hard link from each checkpoint
    rest.safetensors     tensors of optimizer, EMA and random generators; the training weights if model.safetensors
                         has the averaged ones
    state.json           everything else, and the metadata of the run
    manifest.json        step, sizes and sha256

Ranks that divide the state write their parts themselves, see checkpoint/sharded.py.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeAlias

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from trainwright.checkpoint.codec import StateDict, Tree, encode
from trainwright.checkpoint.contents import read_contents
from trainwright.checkpoint.cursor import Cursor
from trainwright.checkpoint.manifest import (
    FROZEN,
    INVALID_CONTENT_ERRORS,
    file_entry,
    name_of,
    raising_checkpoint_error,
    read_manifest,
    read_state,
    verify,
    write_manifest,
)
from trainwright.checkpoint.moments import load_moments, moments
from trainwright.checkpoint.names import plain_name
from trainwright.checkpoint.optimizer_modes import both_weights
from trainwright.checkpoint.rng import RngBag
from trainwright.checkpoint.shards import holds_parts
from trainwright.checkpoint.staging import Staging, num_bytes, on_host
from trainwright.checkpoint.store import Best, checkpoints, delete, draft_of_step, is_own, sweep
from trainwright.checkpoint.tensor_file import open_tensors, write_tensors
from trainwright.checkpoint.train_state import TrainState
from trainwright.checkpoint.weights import load_plain_state_dict, plain_state_dict, unwrapped
from trainwright.errors import CheckpointError, DiskFullError, StorageError
from trainwright.runs.files import STATE
from trainwright.runs.system_calls import fsync


def frozen_part(model: Mapping[str, Tensor], trained: Collection[str]) -> dict[str, Tensor]:
    """Return the tensors that are not trained if they are more than half of the bytes of the model; else {}.

    The buffers of a fully trained model, such as BatchNorm statistics, stay in the checkpoint.
    """
    frozen = {name: each for name, each in model.items() if name not in trained}
    return frozen if trained and 2 * num_bytes(frozen) > num_bytes(model) else {}


def write_frozen(frozen: Mapping[str, Tensor], folder: Path, others: Iterable[Path]) -> str:
    """Write frozen.safetensors into ``folder``, or hard-link the file of another checkpoint with the same content.

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


_COUNTERS = ("step", "num_samples", "num_tokens", "elapsed_s", "fraction")
_TRAINED_PREFIXES = ("optimizer.", "ema.", "training_weights.")  # of the part "rest"
_SPARE_BYTES = 2**14  # for the manifest, headers and the folder itself


TensorName: TypeAlias = tuple[str, str]
"""The part ("model" or "rest") and the name of a tensor of a checkpoint."""


@dataclass(frozen=True)
class CheckpointData:
    """A state between two steps, ready to be written.

    ``values`` is the content of state.json; ``trained`` has the names of the model's tensors that are trained.
    """

    step: int
    tensors: Mapping[TensorName, Tensor]
    values: Mapping[str, Tree]
    trained: frozenset[str]

    def part(self, name: str) -> dict[str, Tensor]:
        """Return the tensors of "model" or "rest"."""
        return {tensor: each for (part, tensor), each in self.tensors.items() if part == name}


def capture(
    state: TrainState, staging: Staging | None = None, run_metadata: Mapping[str, Tree] | None = None
) -> CheckpointData:
    """Return the contents of a checkpoint of ``state``, with all tensors on the host.

    With ``staging``, all tensors are copies; without it, only those that cannot be written unchanged. ``run_metadata``
    is JSON about the run, stored unchanged. Raises CheckpointError for state that cannot be stored.
    """
    live = capture_live(state, run_metadata)
    return replace(live, tensors=staging.copy(live.tensors) if staging else on_host(live.tensors))


def capture_live(state: TrainState, run_metadata: Mapping[str, Tree] | None = None) -> CheckpointData:
    """Return the contents of a checkpoint of ``state`` with the live tensors, which may be on a device."""
    tensors, values = encoded_parts(state)
    return CheckpointData(state.step, tensors, {**values, "metadata": run_metadata or {}}, trained_names(state.model))


def tensors_of(state: TrainState) -> dict[TensorName, Tensor]:
    """Return the live tensors that ``capture`` copies, by part and name."""
    return encoded_parts(state)[0]


def trained_names(model: nn.Module) -> frozenset[str]:
    """Return the names of the parameters that are trained."""
    named = unwrapped(model).named_parameters(remove_duplicate=False)
    return frozenset(plain_name(name) for name, parameter in named if parameter.requires_grad)


def encoded_parts(state: TrainState) -> tuple[dict[TensorName, Tensor], StateDict]:
    """Return the live tensors of a state, and its other values as JSON.

    Raises CheckpointError for state that cannot be stored.
    """
    tensors: dict[TensorName, Tensor] = {}
    values: StateDict = {}
    with both_weights(state.optimizer) as weights:
        trees = {"model": _model(state.model, weights.averaged), "rest": _rest(state, weights.training)}
        for part, tree in trees.items():
            try:
                named, values[part] = encode(tree)
            except TypeError as error:
                raise CheckpointError(
                    f"the state cannot be saved: {_brief(error)}",
                    remedy="keep tensors, numbers, strings and containers of them in extra state and parameter groups",
                ) from None
            tensors |= {(part, name): tensor for name, tensor in named.items()}
    return tensors, values


def _model(model: nn.Module, averaged: Mapping[int, Tensor]) -> StateDict:
    plain = plain_state_dict(model, keep_vars=bool(averaged) or holds_parts(model))
    return {name: averaged.get(id(value), value) for name, value in plain.items()}


def _training_weights(model: nn.Module, training: Mapping[int, Tensor]) -> StateDict:
    """Return the training weights under all names, so that a tied weight appears several times."""
    plain = plain_state_dict(model, keep_vars=True) if training else {}
    return {name: training[id(value)] for name, value in plain.items() if id(value) in training}


def _rest(state: TrainState, training: Mapping[int, Tensor]) -> StateDict:
    return {
        "training_weights": _training_weights(state.model, training),
        "optimizer": moments(state.model, state.optimizer),
        "scaler": state.scaler.state_dict(),
        "ema": state.ema.state_dict(),
        "loss": {} if state.loss is None else state.loss.state_dict(),
        "transient": dict(_transient(state.model)),
        "ledger": state.ledger.state_dict(),
        "spikes": state.spikes.state_dict(),
        "quarantine": sorted(state.quarantine),
        "rng": RngBag.capture().state_dict(),
        "data": state.data.state_dict(),
        "counters": {name: getattr(state, name) for name in _COUNTERS},
        "micro_limit": state.micro_limit,
        "stateful": {name: each.state_dict() for name, each in state.stateful.items()},
    }


def _transient(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the non-persistent buffers, which a state_dict omits: a forward pass may write to them."""
    for path, module in unwrapped(model).named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name in module._non_persistent_buffers_set and buffer.layout == torch.strided:
                yield plain_name(f"{path}.{name}"), buffer


def commit(snapshot: CheckpointData, folder: Path, best: Best | None = None, run: str = "") -> tuple[Path, int]:
    """Write ``folder/step-XXXXXXXX``; ``best`` and the identity of the run are stored in its manifest.

    Returns its path and its size in bytes. If the process is killed at any time, either the complete checkpoint or none
    exists. If one of the errors below is raised, what was written is removed.

    Raises:
        StorageError: The checkpoint cannot be written, for example because a folder of another run has its name.
        CheckpointError: The state is not finite.
    """
    require_finite(snapshot.step, snapshot.tensors, snapshot.trained)
    values = values_as_text(snapshot.values)
    aside = draft_of_step(folder, snapshot.step, run)
    with storage_errors(aside):
        begin_draft(aside, folder / name_of(snapshot.step), run, num_bytes(snapshot.tensors) + len(values))
        model = snapshot.part("model")
        frozen = frozen_part(model, snapshot.trained)
        digest = write_frozen(frozen, aside, checkpoints(folder, run)) if frozen else None
        trained = {name: each for name, each in model.items() if name not in frozen}
        write_tensors(trained, aside / "model.safetensors")
        write_tensors(snapshot.part("rest"), aside / "rest.safetensors")
        (aside / "state.json").write_text(values, "utf-8")
        written = write_manifest(aside, snapshot.step, asdict(best) if best else None, run, frozen=digest)
        return put_in_place(aside, folder / name_of(snapshot.step), run), written


def values_as_text(values: Mapping[str, Tree]) -> str:
    """Return the content of state.json. Raises CheckpointError if it is too large to be read again."""
    text = json.dumps(values)
    if len(text) > STATE.num_bytes:
        raise CheckpointError(
            f"the state without its tensors takes {len(text):,} bytes, more than {STATE.num_bytes:,}",
            remedy="keep large values in tensors, or leave them out of what state_dict() and get_extra_state() return",
        )
    return text


def begin_draft(aside: Path, target: Path, run: str, needed_bytes: int) -> None:
    """Make the empty folder in which a checkpoint is written. Raises StorageError or OSError if it cannot become
    ``target``.
    """
    folder = target.parent
    folder.mkdir(parents=True, exist_ok=True)
    sweep(folder, run)
    for path in (target, _replaced(target)):
        _require_own(path, run)
    _require_space(folder, needed_bytes + _SPARE_BYTES)
    aside.mkdir()


def put_in_place(aside: Path, target: Path, run: str) -> Path:
    """Commit a complete checkpoint by one rename, and return its path."""
    replaced = _replaced(target)
    if target.exists():  # the same step again, after a resume
        delete(replaced, run)
        target.rename(replaced)
    aside.rename(target)
    fsync(target.parent)
    delete(replaced, run)
    return target


def _replaced(target: Path) -> Path:
    return target.with_suffix(".old")  # still found by ``checkpoints`` if the process is killed between two renames


def _require_own(path: Path, run: str) -> None:
    if os.path.lexists(path) and not is_own(path, run):
        raise StorageError(
            f"{path} is in the way: it is no checkpoint of this run",
            remedy="move it away, or give each run a folder of its own for its checkpoints",
        )


def save_checkpoint(
    state: TrainState, folder: Path | str, run_metadata: Mapping[str, Tree] | None = None
) -> tuple[Path, int]:
    """Save ``state`` and wait until it is on disk.

    Args:
        state: The state between two steps.
        folder: Folder of the run's checkpoints; created if missing.
        run_metadata: JSON about the run, stored unchanged.

    Returns:
        The path of the checkpoint and its size in bytes.

    Raises:
        StorageError: The checkpoint cannot be written.
        CheckpointError: The state is not finite or cannot be stored.
    """
    return commit(capture(state, run_metadata=run_metadata), Path(folder))


def load_checkpoint(state: TrainState, path: Path | str, *, verified: bool = False) -> None:
    """Load ``path`` into ``state`` in place, including the random generators of the process.

    The caller must restart the data at ``state.data``.

    Args:
        state: Overwritten.
        path: A checkpoint folder, ``step-XXXXXXXX``.
        verified: Skip the verification of sizes and hashes.

    Raises:
        CheckpointError: A file is missing or damaged, or model or optimizer do not match.
    """
    path = Path(path)
    if not verified:
        verify(path)
    contents = read_contents(path)
    rest = contents.rest
    try:
        weights = {**contents.model, **rest.get("training_weights", {})}
        load_plain_state_dict(state.model, weights, is_stage=state.stages.size > 1)
        load_moments(state.model, state.optimizer, rest["optimizer"])
        state.ema.load_state_dict(rest["ema"])
        state.scaler.load_state_dict(rest["scaler"])
        if state.loss is not None and rest["loss"]:
            state.loss.load_state_dict(rest["loss"])
        _load_transient(state.model, rest["transient"])
        for name, saved in rest.get("stateful", {}).items():
            if name in state.stateful:
                state.stateful[name].load_state_dict(saved)
    except INVALID_CONTENT_ERRORS as error:
        raise CheckpointError(
            f"{path} does not fit the model or optimizer built from the recipe: {_brief(error)}",
            remedy="resume with the recipe of the run (recipe.yaml in its folder)",
        ) from None
    with raising_checkpoint_error(path):
        state.ledger.load_state_dict(rest["ledger"])
        state.spikes.load_state_dict(rest.get("spikes", {}))
        state.quarantine = {*state.quarantine, *rest["quarantine"]}
        state.data = Cursor.from_state_dict(rest["data"])
        for name in _COUNTERS:
            setattr(state, name, rest["counters"][name])
        state.micro_limit = rest.get("micro_limit")  # older checkpoints have none
        contents.rng.restore()


@torch.no_grad()
def _load_transient(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Copy the saved buffers. Skips buffers of another shape, which their module computes when it needs them."""
    for name, buffer in _transient(model):
        if name in saved and saved[name].shape == buffer.shape:
            buffer.copy_(saved[name])


def read_run_metadata(path: Path) -> StateDict:
    """Return recipe, plan and provenance stored in a verified checkpoint."""
    with raising_checkpoint_error(path):
        metadata = read_state(path)["metadata"]
        return {name: metadata[name] for name in ("recipe", "plan", "provenance")}


def mismatches(state: TrainState, path: Path) -> list[str]:
    """Return one line for each tensor in which the model and a verified checkpoint differ in name or shape."""
    built = {name: each for name, each in plain_state_dict(state.model).items() if isinstance(each, Tensor)}
    with raising_checkpoint_error(path):
        names, tensors = read_state(path)["model"], open_tensors(path, "model")
        shapes = {
            name: tuple(tensors[value["__tensor__"]].shape)
            for name, value in names.items()
            if isinstance(value, dict) and "__tensor__" in value
        }
    lines = [f"{name} is not in the checkpoint" for name in built if name not in shapes]
    if state.stages.size == 1:
        lines += [f"{name} of the checkpoint is not in the model" for name in shapes if name not in built]
    return lines + [
        f"{name} has the shape {tuple(built[name].shape)}, in the checkpoint {shape}"
        for name, shape in shapes.items()
        if name in built and tuple(built[name].shape) != shape
    ]


def require_finite(step: int, tensors: Mapping[TensorName, Tensor], trained: Collection[str]) -> None:
    """Raise CheckpointError if any tensor has NaN, or if a trained weight, an average or a moment has infinity.

    Other tensors may have infinity, as masks do.
    """
    poisoned = []
    for (part, name), each in tensors.items():
        may_be_infinite = name not in trained if part == "model" else not name.startswith(_TRAINED_PREFIXES)
        if not _is_finite(each, or_infinite=may_be_infinite):
            poisoned.append(name)
    if poisoned:
        more = f" and {len(poisoned) - 3} more" if len(poisoned) > 3 else ""
        raise CheckpointError(
            f"the state of step {step} is not finite: {', '.join(poisoned[:3])}{more}",
            remedy="resume with a lower learning rate or in fp32; older checkpoints are intact",
        )


def _is_finite(tensor: Tensor, *, or_infinite: bool = False) -> bool:
    """Return True if all elements are finite. Uses minimum and maximum, which need no copy of the tensor."""
    if tensor.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64) or not tensor.numel():
        return True
    extremes = torch.stack(torch.aminmax(tensor))
    return not bool(extremes.isnan().any() if or_infinite else (~extremes.isfinite()).any())


def _require_space(folder: Path, needed_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        raise DiskFullError(
            f"the checkpoint needs {needed_bytes / 1e6:.3g} MB and the disk of {folder} has {free / 1e6:.3g} MB left",
            remedy="free space there; older checkpoints are intact",
        )


@contextmanager
def storage_errors(aside: Path) -> Iterator[None]:
    """Context that removes the draft of a checkpoint after an error. An error of the storage becomes a StorageError."""
    try:
        yield
    except Exception as error:
        shutil.rmtree(aside, ignore_errors=True)
        if isinstance(error, OSError | SafetensorError):
            raise StorageError(
                f"the checkpoint {aside.parent} could not be written: {_brief(error)}",
                remedy="free space or fix the permissions of that folder; older checkpoints there are intact",
            ) from None
        raise


def _brief(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines)[:400] or type(error).__name__


def merged(first: Tree, second: Tree) -> Tree:
    """Merge mappings by key and concatenate parameter groups; otherwise return the first."""
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        shared = {key: merged(first[key], second[key]) for key in first.keys() & second.keys()}
        return {**first, **second, **shared}
    if isinstance(first, list) and any(isinstance(each, Mapping) and "params" in each for each in first):
        return [*first, *second]
    return first
