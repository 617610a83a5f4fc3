"""``export RUN``: writes the weights of a run in formats that other programs read."""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from trainwright.assembly.adapters import config_of, plain_weights
from trainwright.assembly.assemble import build_model
from trainwright.checkpoint.contents import require_whole
from trainwright.checkpoint.manifest import name_of, step_of
from trainwright.checkpoint.rng import preserved_rng
from trainwright.checkpoint.staging import on_host
from trainwright.checkpoint.store import checkpoints, newest_valid, read_best
from trainwright.checkpoint.weights import load_plain_state_dict, read_weights, unwrapped
from trainwright.errors import CheckpointError, StorageError, UsageError, import_optional, require_choice, text_of
from trainwright.models.lora import adapters_of, save_adapter
from trainwright.models.pretrained import build_empty, hub_model_of, save_hub_model
from trainwright.recipe import Loaded, Recipe, load
from trainwright.recipe.resolve import is_live
from trainwright.report.model_card import model_card
from trainwright.runs.files import UnreadableFile
from trainwright.runs.folder import RunFolder, identity_of
from trainwright.runs.shapes import ProvenanceFile, read_as
from trainwright.runs.storage import draft_of, make_subfolder, remove_leftovers, storage_error
from trainwright.runs.system_calls import fsync
from trainwright.training.resume import restart_command, resume_command
from trainwright.training.subject import parts_of_run

FORMATS = ("safetensors", "hf", "state_dict")


@dataclass(frozen=True)
class Exported:
    """An exported folder of weights. ``tensors`` is the number of names; a tied weight has several.

    ``stepped_over`` has a message for each newer checkpoint that is damaged.
    """

    path: Path
    format: str
    step: int
    tensors: int
    bytes: int
    stepped_over: tuple[str, ...] = ()

    def to_json(self) -> dict[str, object]:
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
        format: ``safetensors`` (model.safetensors), ``state_dict`` (model.pt) or ``hf`` (the layout of the
            hub: safetensors, configurations, tokenizer, model card).
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
    _require_possible(folder, loaded.recipe, format, adapter)
    config = _adapter_config(folder, loaded.recipe) if adapter else None
    checkpoint, stepped_over = chosen_checkpoint(folder, which)
    step, kind = step_of(checkpoint), "adapter" if adapter else format
    assert step is not None, "a folder of another name is not listed as a checkpoint"
    out = new_folder(folder, f"{kind}-{name_of(step)}{'-average' if average else ''}", out)
    with draft_folder(out) as draft:
        weights = read_weights(checkpoint, average=average)
        about = {"format": "pt", "step": str(step), "weights": "average" if average else "trained"}
        if config is not None:
            base = _provenance(folder).base
            head, name = (base.head, base.name) if base else ([], None)
            tensors = save_adapter(weights, config, draft, head=head, base=name, about=about)
        else:
            tensors = _save_model(folder, loaded, weights, format, draft, about)
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


def _require_possible(run: RunFolder, recipe: Recipe, layout: str, adapter: bool) -> None:
    if adapter and _adapter_config(run, recipe) is None:
        raise UsageError("the run trained no adapter (its recipe has no model.lora)", remedy="leave --adapter out")
    if adapter and layout == "state_dict":
        raise UsageError("an adapter is written in PEFT's layout, which is safetensors", remedy="leave --format out")


def _live_model(folder: RunFolder, recipe: Recipe) -> nn.Module | None:
    """Return the model that the recorded function of a run of ``tw.fit`` builds; None for a run of a recipe.

    Raises UsageError if no function is recorded.
    """
    if not is_live(recipe.model.use):
        return None
    remedy = "export with --format safetensors, which needs no model, and load that into the model in Python"
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
    run: RunFolder, loaded: Loaded, weights: dict[str, object], layout: str, draft: Path, about: dict[str, str]
) -> int:
    """Write the model into the folder ``draft``. ``about`` is the metadata of safetensors. Returns the number of
    names.
    """
    if layout == "hf":
        return _save_hub(run, loaded, weights, draft, int(about["step"]))
    weights = without_adapters(run, loaded.recipe, weights)
    if layout == "safetensors":
        save_safetensors(weights, draft, about)
    else:
        content = io.BytesIO()  # as large as the model; torch.save to a file does not report a full disk
        torch.save(weights, content)
        (draft / "model.pt").write_bytes(content.getbuffer())
    return len(weights)


def without_adapters(run: RunFolder, recipe: Recipe, weights: Mapping[str, object]) -> dict[str, object]:
    """Return the weights of a checkpoint under the names of the base model: adapters merged, 4-bit layers in full."""
    try:
        return plain_weights(weights, _adapter_config(run, recipe))
    except UsageError as error:
        raise UsageError(error.message, remedy="export the adapter alone: --adapter") from None


def _adapter_config(run: RunFolder, recipe: Recipe) -> dict[str, Any] | None:
    """Return the fields of PEFT's configuration of the adapters that a run trained; None if it trained none."""
    adapters = _provenance(run).adapters or {}
    if len(adapters) > 1:
        remedy = "load the run's safetensors in Python, and merge or save them by PEFT"
        raise UsageError(f"the run has several adapters: {', '.join(adapters)}", remedy=remedy)
    for config in adapters.values():
        if config.get("peft_type", "LORA") != "LORA":
            remedy = "export with --format safetensors, and load that in Python"
            raise UsageError(f"the adapters are {config['peft_type']}, not LoRA", remedy=remedy)
        return config
    return None if recipe.model.lora is None else config_of(recipe.model.lora)


def _provenance(run: RunFolder) -> ProvenanceFile:
    try:
        return read_as(run.provenance, ProvenanceFile)
    except UnreadableFile:
        return ProvenanceFile()


def _save_hub(run: RunFolder, loaded: Loaded, weights: Mapping[str, object], draft: Path, step: int) -> int:
    """Write the layout of the hub: weights, configurations, tokenizer and a model card."""
    model = _hub_model(run, loaded, weights)
    save_hub_model(model, draft)
    for path in run.hub.iterdir() if run.hub.is_dir() else ():
        if not (draft / path.name).exists():
            shutil.copyfile(path, draft / path.name)
    (draft / "README.md").write_text(model_card(run, step, type(model).__name__), "utf-8")
    return len(model.state_dict())


def _hub_model(run: RunFolder, loaded: Loaded, weights: Mapping[str, object]) -> nn.Module:
    if run.hub.is_dir():
        with suppress(UsageError):  # its class is code of the base model's repository
            model: nn.Module = build_empty(run.hub)
            model.load_state_dict(without_adapters(run, loaded.recipe, weights), assign=True)
            model.tie_weights()  # type: ignore[operator]
            return model
    model = rebuilt(run, loaded, weights, _live_model(run, loaded.recipe))
    if hub_model_of(model) is None:
        raise UsageError(
            f"--format hf is for models of the transformers library (PreTrainedModel), not for {type(model).__name__}",
            remedy="use --format safetensors",
        )
    return model


def save_safetensors(weights: Mapping[str, object], folder: Path, about: dict[str, str]) -> None:
    """Write model.safetensors. Raises UsageError for a value that is not a tensor."""
    tensors = {name: value for name, value in weights.items() if isinstance(value, Tensor)}
    if extra := [name for name in weights if name not in tensors]:
        remedy = "trainwright export RUN --format state_dict keeps it"
        raise UsageError(f"{extra[0]} is not a tensor, and safetensors stores tensors only", remedy=remedy)
    save_file(on_host(tensors), folder / "model.safetensors", about)  # tied weights under all their names


def rebuilt(run: RunFolder, loaded: Loaded, weights: Mapping[str, object], made: nn.Module | None = None) -> nn.Module:
    """Return the recipe's model, or ``made``, with the weights of a checkpoint, on the CPU. Adapters are merged
    unless ``made`` has adapters itself.

    ``made`` is the model from the recorded function of the run.
    """
    with preserved_rng():
        model = build_model(loaded)[0] if made is None else made
        if not adapters_of(model):
            weights = without_adapters(run, loaded.recipe, weights)
    model = unwrapped(model).cpu()
    try:
        load_plain_state_dict(model, weights)
    except RuntimeError as error:
        raise CheckpointError(
            f"the checkpoint does not fit the model built from the recipe: {' '.join(str(error).split())[:400]}",
            remedy="give the recipe and code that it was trained with, or --format safetensors, which builds no model",
        ) from None
    return model


def push(folder: Path, name: str) -> str:
    """Upload an exported folder to the hub by ``huggingface_hub``, and return the address of the model.

    The repository ``name`` (``user/model``) is created as a private one if it does not exist. Raises UsageError if the
    hub refuses the upload, or cannot be reached.
    """
    hub_errors = import_optional("huggingface_hub.errors", needed_for="--push")
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        created = api.create_repo(name, private=True, exist_ok=True)
        api.upload_folder(repo_id=created.repo_id, folder_path=folder, commit_message="Upload a model by Trainwright")
    except (OSError, ValueError, hub_errors.HfHubHTTPError) as error:
        raise UsageError(
            f"{folder} is written, but it cannot be uploaded to {name}: {text_of(error, lines=1)[:300]}",
            remedy=f"log in (hf auth login) or set HF_TOKEN, then: hf upload {name} {folder}",
        ) from None
    return str(created)


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
