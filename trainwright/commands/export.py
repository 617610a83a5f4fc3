"""``export RUN``: writes the weights of a run in formats that other programs read."""

from __future__ import annotations

import io
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from trainwright.assembly.assemble import at_recipe, build_model
from trainwright.assembly.linear_layers import SCALE_SUFFIX, integer_weights, round_linear_layers
from trainwright.checkpoint.contents import require_whole
from trainwright.checkpoint.manifest import name_of, step_of
from trainwright.checkpoint.rng import preserved_rng
from trainwright.checkpoint.staging import on_host
from trainwright.checkpoint.store import checkpoints, newest_valid, read_best
from trainwright.checkpoint.weights import load_plain_state_dict, plain_state_dict, read_weights, unwrapped
from trainwright.errors import CheckpointError, MissingExtra, StorageError, UsageError, require_choice
from trainwright.models.lora import add_lora, merge_lora
from trainwright.recipe import Loaded, Recipe, load
from trainwright.recipe.resolve import is_live
from trainwright.recipe.schema import Lora
from trainwright.runs.drafts import draft_of, remove_leftovers
from trainwright.runs.folder import RunFolder
from trainwright.runs.identity import identity_of
from trainwright.runs.storage import make_subfolder, storage_error
from trainwright.runs.system_calls import fsync
from trainwright.training.resume import restart_command, resume_command
from trainwright.training.subject import parts_of_run

FORMATS = ("safetensors", "hf", "state_dict", "quantized")
_MODEL_FORMATS = ("hf", "quantized")
"""Formats whose files depend on more than the weights."""
_ADAPTER = (".lora_A.default.weight", ".lora_B.default.weight")


@dataclass(frozen=True)
class Exported:
    """An exported folder of weights.

    Attributes:
        path: The folder.
        format: The format.
        step: The step of the checkpoint.
        tensors: Number of names; a tied weight has several.
        bytes: Size of all files.
        stepped_over: A message for each newer checkpoint that is damaged.
    """

    path: Path
    format: str
    step: int
    tensors: int
    bytes: int
    stepped_over: tuple[str, ...] = ()

    def to_json(self) -> dict[str, object]:
        """Return the object that ``--json`` prints."""
        return {**vars(self), "path": str(self.path), "stepped_over": list(self.stepped_over)}


def export(
    run: Path,
    *,
    format: str,  # noqa: A002
    which: str = "last",
    average: bool = False,
    adapter: bool = False,
    out: Path | None = None,
) -> Exported:
    """Write the weights of one checkpoint of ``run`` into the new folder ``out``, completely or not at all.

    Args:
        run: The run folder.
        format: ``safetensors`` (model.safetensors), ``state_dict`` (model.pt), ``hf`` (the layout of the transformers
            library) or ``quantized`` (model.safetensors with the integers of a run with ``model.qat``).
        which: ``last`` (the newest intact checkpoint), ``best`` or a step.
        average: Use the moving average of the weights.
        adapter: Write LoRA adapters alone in PEFT's layout, instead of merging them into the weights.
        out: The new folder. Default: ``export/`` in the run folder.

    Raises:
        UsageError: The run does not have what is requested, or it cannot be exported in this format.
        CheckpointError: A checkpoint is damaged.
        StorageError: ``out`` cannot be written.
    """
    require_choice("the format", format, FORMATS)
    folder = RunFolder.open(run)
    loaded = load(folder.recipe, environ={})
    _require_possible(loaded.recipe, format, adapter)
    needs_model = not adapter and (format in _MODEL_FORMATS or loaded.recipe.model.lora is not None)
    made = _build_recorded_model(folder, loaded.recipe) if needs_model and is_live(loaded.recipe.model.use) else None
    checkpoint, stepped_over = chosen_checkpoint(folder, which)
    step, kind = step_of(checkpoint), "adapter" if adapter else format
    assert step is not None, "a folder of another name is not listed as a checkpoint"
    out = new_folder(folder, f"{kind}-{name_of(step)}{'-average' if average else ''}", out)
    with draft_folder(out) as draft:
        weights = read_weights(checkpoint, average=average)
        about = {"format": "pt", "step": str(step), "weights": "average" if average else "trained"}
        if adapter:
            assert loaded.recipe.model.lora is not None
            tensors = _save_adapter(weights, loaded.recipe.model.lora, draft, about)
        else:
            tensors = _save_model(weights, loaded, made, format, draft, about)
        num_bytes = sum(file.stat().st_size for file in draft.rglob("*"))
    return Exported(out, format, step, tensors, num_bytes, stepped_over)


def new_folder(run: RunFolder, name: str, out: Path | None) -> Path:
    """Return ``out``, or the folder of that name in the exports of a run. Raises UsageError if it exists."""
    if out is None:
        try:
            make_subfolder(run.path / "export")
        except OSError as error:
            raise storage_error(error, run.path / "export", "make the folder") from error
        out = run.path / "export" / name
    if os.path.lexists(out):
        raise UsageError(f"{out} exists already", remedy="give another folder with --out, or remove it")
    return out


def _require_possible(recipe: Recipe, layout: str, adapter: bool) -> None:
    if adapter and recipe.model.lora is None:
        raise UsageError("the run trained no adapter (its recipe has no model.lora)", remedy="leave --adapter out")
    if layout == "quantized" and recipe.model.qat is None:
        remedy = "train it with model.qat, or leave --format out"
        raise UsageError("the run did not round weights to integers (its recipe has no model.qat)", remedy=remedy)
    if adapter and layout == "state_dict":
        raise UsageError("an adapter is written in PEFT's layout, which is safetensors", remedy="leave --format out")


def _build_recorded_model(folder: RunFolder, recipe: Recipe) -> nn.Module:
    """Return the model that the recorded function of a run builds. Raises UsageError if none is recorded."""
    other = "--format safetensors" if recipe.model.lora is None else "--adapter"
    remedy = f"export with {other}, which needs no model, and load that into the model in Python"
    with preserved_rng():
        return parts_of_run(folder, remedy=remedy).model


def chosen_checkpoint(run: RunFolder, which: str) -> tuple[Path, tuple[str, ...]]:
    """Return the checkpoint that ``which`` names, and messages on newer ones that are damaged."""
    folder, identity = run.checkpoints, identity_of(run)
    by_step = {step_of(path): path for path in reversed(checkpoints(folder, identity))}
    if which == "last" or not by_step:
        newest, damaged = newest_valid(folder, require_whole, identity)
        if newest is None:
            lines = [*damaged, f"{run.path} has no checkpoint{' that verifies' if by_step else ''}"]
            raise CheckpointError(
                "\n".join(lines), remedy=f"train it: {restart_command(run) if by_step else resume_command(run)}"
            )
        return newest, tuple(damaged)
    remedy = f"--which last, or one of the saved steps: {', '.join(map(str, by_step))}"
    if which == "best":
        best = read_best(folder, identity)
        if best is None:
            raise UsageError(f"{run.path} has no best checkpoint: none was evaluated, or it was removed", remedy=remedy)
        return by_step[best.step], ()
    if not which.isdecimal():
        raise UsageError(f"{which!r} is not last, best or a step", remedy=remedy)
    if int(which) not in by_step:
        raise UsageError(f"{run.path} has no checkpoint of step {which}", remedy=remedy)
    return by_step[int(which)], ()


def _save_model(
    weights: dict[str, object],
    loaded: Loaded,
    made: nn.Module | None,
    layout: str,
    folder: Path,
    about: dict[str, str],
) -> int:
    if layout in _MODEL_FORMATS or loaded.recipe.model.lora is not None:  # only these need the model itself
        model = rebuilt(loaded, weights, made)
        weights = plain_state_dict(model)
    if layout == "quantized":
        for name, integers, scale in integer_weights(model):
            weights |= {name: integers, f"{name}{SCALE_SUFFIX}": scale}
    if layout == "hf":
        _save_pretrained(model, folder)
    elif layout in ("safetensors", "quantized"):
        save_safetensors(weights, folder, about)
    else:
        whole = io.BytesIO()  # as large as the model; torch.save to a file does not report a full disk
        torch.save(weights, whole)
        (folder / "model.pt").write_bytes(whole.getbuffer())
    return len(weights)


def save_safetensors(weights: Mapping[str, object], folder: Path, about: dict[str, str]) -> None:
    """Write model.safetensors. Raises UsageError for a value that is not a tensor."""
    tensors = _tensors(weights)
    if extra := [name for name in weights if name not in tensors]:
        remedy = "trainwright export RUN --format state_dict keeps it"
        raise UsageError(f"{extra[0]} is not a tensor, and safetensors stores tensors only", remedy=remedy)
    save_file(on_host(tensors), folder / "model.safetensors", about)  # tied weights under all their names


def _tensors(weights: Mapping[str, object]) -> dict[str, Tensor]:
    """Return the values that are tensors. A state dict may have others."""
    return {name: value for name, value in weights.items() if isinstance(value, Tensor)}


def rebuilt(loaded: Loaded, weights: Mapping[str, object], made: nn.Module | None = None) -> nn.Module:
    """Return the recipe's model, or ``made``, with these weights and merged adapters, on the CPU.

    ``made`` is the model from the recorded function of the run.
    """
    lora = loaded.recipe.model.lora
    with preserved_rng():
        model = build_model(loaded)[0] if made is None else made
        if lora is not None:
            with at_recipe(loaded.source, "model.lora"):
                model = add_lora(model, **lora.model_dump())
        if loaded.recipe.model.qat is not None:
            with at_recipe(loaded.source, "model.qat"):
                round_linear_layers(model, loaded.recipe.model.qat)
    model = unwrapped(model).cpu()
    try:
        load_plain_state_dict(model, weights)
    except RuntimeError as error:
        raise CheckpointError(
            f"the checkpoint does not fit the model built from the recipe: {' '.join(str(error).split())[:400]}",
            remedy="give the recipe and code that it was trained with, or --format safetensors, which builds no model",
        ) from None
    try:
        return model if lora is None else merge_lora(model)
    except UsageError as error:
        raise UsageError(error.message, remedy="export the adapter alone: --adapter") from None


def _save_pretrained(model: nn.Module, folder: Path) -> None:
    base = getattr(sys.modules.get("transformers"), "PreTrainedModel", None)  # imported if it built the model
    if base is None or not isinstance(model, base):
        raise UsageError(
            f"--format hf is for models of the transformers library (PreTrainedModel), not for {type(model).__name__}",
            remedy="use --format safetensors",
        )
    model.save_pretrained(folder)


def _save_adapter(weights: Mapping[str, object], lora: Lora, folder: Path, about: dict[str, str]) -> int:
    """Write the layout of ``PeftModel.save_pretrained`` from names and shapes alone, without building a model."""
    try:
        import peft
    except ModuleNotFoundError as error:
        if error.name != "peft":
            raise
        raise MissingExtra("peft", needed_for="--adapter") from None
    all_tensors = _tensors(weights)
    tensors = {name: value for name, value in all_tensors.items() if name.endswith(_ADAPTER)}
    targets = sorted({name.rpartition(".lora_")[0] for name in tensors})
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=targets,
        bias="none",
        fan_in_fan_out=any(_is_transposed(all_tensors, target) for target in targets),
        inference_mode=True,
    )
    config.save_pretrained(folder)
    renamed = {f"base_model.model.{name.removesuffix('.default.weight')}.weight": tensors[name] for name in tensors}
    save_file(on_host(renamed), folder / "adapter_model.safetensors", about)
    return len(renamed)


def _is_transposed(weights: Mapping[str, Tensor], target: str) -> bool:
    """Return True if a layer has its weight as (in, out), as transformers' Conv1D; False for a square one."""
    rows, columns = weights[f"{target}.base_layer.weight"].shape
    return rows != columns and rows == weights[f"{target}.lora_A.default.weight"].shape[1]


@contextmanager
def draft_folder(out: Path) -> Iterator[Path]:
    """Provide a folder to write into. It is renamed to ``out`` when everything is written and synced, or removed on an
    error.

    Leftovers of a killed export, which are as large as the model, are removed first.
    """
    draft = draft_of(out)
    try:
        remove_leftovers(out.parent)
        draft.mkdir(parents=True)
        yield draft
        for path in (*draft.rglob("*"), draft):
            fsync(path)
        draft.rename(out)
        fsync(out.parent)
    except OSError as error:
        raise storage_error(error, out, "write") from error
    except SafetensorError as error:
        raise StorageError(f"cannot write {out}: {error}", remedy="give a folder on another disk with --out") from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)
