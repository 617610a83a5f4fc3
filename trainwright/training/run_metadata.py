"""The metadata of a run: recipe, plan and provenance, as files in its folder and as JSON in each checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from torch import nn

from trainwright.assembly.assemble import Parts
from trainwright.checkpoint.weights import unwrapped
from trainwright.data.fingerprint import fingerprint
from trainwright.models.lora import adapters_of
from trainwright.models.pretrained import hub_model_of, pretrained_of, write_hub_files
from trainwright.monitoring.module_tree import model_facts
from trainwright.plan.make import Note
from trainwright.recipe import Recipe, dump_masked
from trainwright.runs.files import read_text
from trainwright.runs.folder import RunFolder, write_identity
from trainwright.runs.lock import RunLock
from trainwright.runs.provenance import module_of, modules_of, provenance
from trainwright.runs.secrets import masked
from trainwright.runs.storage import draft_of, remove, remove_leftovers, storage_error
from trainwright.runs.supervision import NAME as SUPERVISION
from trainwright.training.job import Job

CHAT_TEMPLATE = "chat_template.jinja"
"""File of a tokenizer; it takes precedence over the template in tokenizer_config.json."""


def describe_origin(recipe: Recipe, parts: Parts) -> dict[str, Any]:
    """Return the provenance of this process: code, packages, machine, data and seeds."""
    roots = (parts.model, parts.train.origin, parts.loss)
    modules = chain.from_iterable(each.modules() for each in roots if isinstance(each, nn.Module))
    sets = {"train": parts.train, "val": parts.val}
    left_out = {"train": frozenset(recipe.data.quarantine)}
    prints = {name: fingerprint(data.origin, left_out.get(name, ())) for name, data in sets.items() if data is not None}
    found: dict[str, Any] = provenance(
        data_fingerprints={name: f"sha256:{each.sha256} ({each.how})" for name, each in prints.items()},
        seeds={"seed": recipe.seed},
        modules=[*modules_of(recipe.model_dump(mode="json")), *filter(None, map(module_of, roots))],
        live=[*modules, *roots, parts.train.collate, *filter(None, [parts.train.worker_init])],
        command=sys.argv,
    )
    if origin := pretrained_of(parts.model):
        head = [name for name in origin.new if name not in origin.new_in_base]
        found["base"] = {"name": origin.name, "revision": origin.revision, "dtype": origin.dtype, "head": head}
    if adapters := adapters_of(parts.model):
        found["adapters"] = adapters
    return found | {"objects": dict(parts.custom.rebuild)} if parts.custom.rebuild else found


def notes_of_data(provenance: Mapping[str, Any], resumed: str) -> Iterator[Note]:
    """Yield notes on how the data stream was resumed, and on fingerprints that cover only a part of the data."""
    if resumed:
        yield Note("data", "resumed", resumed)
    for name, made in provenance["data"].items():
        how = made.partition("(")[2].removesuffix(")")
        if how.startswith(("only", "type and length only")):
            yield Note("fingerprint", f"data.{name}, {how}", "a resume may not see that other items have changed")


def run_metadata(job: Job) -> dict[str, Any]:
    """Return the metadata for checkpoints, from which a resumed run reports what has changed."""
    return {
        "recipe": masked(job.loaded.as_written.model_dump(mode="json")),
        "plan": job.plan.to_json(),
        "provenance": job.provenance,
    }


def write_metadata(folder: RunFolder, job: Job) -> None:
    """Write recipe, plan, provenance and module tree of a new run."""
    folder.write_text("recipe.yaml", dump_masked(job.loaded.as_written))
    folder.write_json("plan.json", job.plan.to_json())
    folder.write_json("model.json", model_facts([job.state.model], job.marks))
    folder.write_json("provenance.json", job.provenance)
    _write_hub(folder, job)
    write_supervision(folder, job)


def _write_hub(folder: RunFolder, job: Job) -> None:
    """Write the files with which an export builds a model of ``transformers`` without the base model's folder."""
    model = unwrapped(job.state.model)
    if folder.hub.exists() or hub_model_of(model) is None:
        return
    draft = draft_of(folder.hub)
    try:
        draft.mkdir()
        if write_hub_files(model, draft):
            dataset = job.parts.train.dataset
            tokenizer: Any = next(filter(None, _each_given(dataset, "tokenizer")), None)
            if hasattr(tokenizer, "save_pretrained") and not _has_vocabulary(draft / "tokenizer.json", tokenizer):
                tokenizer.save_pretrained(draft)  # tokens were added, or it is not that of the base model
            if (template := next(filter(None, _each_given(dataset, "template_override")), None)) is not None:
                (draft / CHAT_TEMPLATE).write_text(template, encoding="utf-8")
            draft.rename(folder.hub)
    except OSError as error:
        raise storage_error(error, folder.hub, "write") from error
    finally:
        remove(draft)


def _each_given(dataset: object, name: str) -> Iterator[Any]:
    """Yield the values of an attribute of a data set and of the one that it wraps, such as a packed one."""
    while dataset is not None:
        yield getattr(dataset, name, None)
        dataset = getattr(dataset, "dataset", None)


def _has_vocabulary(path: Path, tokenizer: Any) -> bool:
    from tokenizers import Tokenizer

    try:
        return bool(Tokenizer.from_file(str(path)).get_vocab() == tokenizer.get_vocab())
    except Exception:  # tokenizers has no other class of errors, for a missing file as well
        return False


def write_supervision(folder: RunFolder, job: Job) -> None:
    """Write the audit of the data, if there is one."""
    if job.supervision:
        folder.write_json(SUPERVISION, job.supervision)


def rewrite_metadata(folder: RunFolder, job: Job) -> None:
    """Write recipe, plan and provenance of a resumed run. A recipe that differs is kept beside the new one."""
    remove_leftovers(folder.path)
    step = f"step-{job.state.step:08d}"
    before, now = read_text(folder.recipe, follow_links=True), dump_masked(job.loaded.as_written)
    if before != now:
        folder.write_text(f"recipe-before-{step}.yaml", before)
        folder.write_text("recipe.yaml", now)
    folder.write_json("plan.json", job.plan.to_json())
    folder.write_json("model.json", model_facts([job.state.model], job.marks))
    folder.write_json(f"provenance-from-{step}.json", job.provenance)
    _write_hub(folder, job)
    write_supervision(folder, job)


def folder_guard(
    folder: RunFolder, job: Job, lock: RunLock, identity: str, say: Callable[[str], None]
) -> Callable[[], None]:
    """Return a function to call around each save. It writes the metadata again if the folder was deleted.

    The function raises StorageError if the folder was renamed or unmounted, because then log and lock have moved with
    it, and checkpoints would go into another folder of the same name.
    """

    def require_folder() -> None:
        lock.require_place(folder.path)
        if not folder.recipe.exists():
            folder.path.mkdir(parents=True, exist_ok=True)
            write_metadata(folder, job)
            write_identity(folder, identity)
            say(f"{folder.path} was deleted while training: its metadata is written again")

    return require_folder
