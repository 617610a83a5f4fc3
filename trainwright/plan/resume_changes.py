"""Classifies each difference between a checkpoint and the resumed run.

safe    mathematically the same run; at most last bits differ
maths   a different run from here on, which must be accepted
fatal   the checkpoint cannot be continued with this difference; ``why`` gives the remedy
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, TypeAlias, TypeGuard

from pydantic import TypeAdapter

from trainwright.errors import UsageError, listed, suggest
from trainwright.plan.batch import solve_batch
from trainwright.recipe import Duration, optimizer_row
from trainwright.recipe.load import FORMER_DEFAULTS
from trainwright.recipe.outline import field_at
from trainwright.recipe.yaml_core import core_tag

Kind = Literal["safe", "maths", "fatal"]
Verdict = tuple[Kind, str]
"""A class and its reason."""
RecipeValue: TypeAlias = Any
"""A value of a recipe, of the type that the schema gives its path: a number, text, a list, a mapping or None."""
RecipeJson: TypeAlias = Mapping[str, RecipeValue]
"""A recipe as ``recipe.model_dump(mode="json")`` gives it."""


@dataclass(frozen=True)
class RecipeDifference:
    """One path whose values (``was``, ``now``) differ between two recipes (``before``, ``after``).

    ``step`` is the number of completed steps.
    """

    path: str
    was: RecipeValue
    now: RecipeValue
    before: RecipeJson
    after: RecipeJson
    step: int


def classify(found: RecipeDifference) -> Verdict:
    """Return the class of a difference and its reason, by the rule with the longest path that covers it."""
    keys = found.path.split(".")
    above = (".".join(keys[:length]) for length in range(len(keys), 0, -1))
    rule = next((RULES[path] for path in above if path in RULES), UNKNOWN)
    return rule(found) if callable(rule) else rule


def _until(found: RecipeDifference) -> Verdict:
    was, now = Duration.parse(found.was), Duration.parse(found.now)
    if now.unit == "steps" and now.value <= found.step:
        return "fatal", f"step {found.step} is reached already: give more than {found.step}steps"
    if now.unit != was.unit:
        return "maths", "counted in another unit: the run ends, and its learning rate decays, elsewhere"
    if now.value < was.value:
        return "maths", "the run ends, and its learning rate decays, earlier"
    return "safe", "the run continues from its step; the warm-up stays, and a decay of the learning rate ends later"


def _packing(found: RecipeDifference) -> Verdict:
    ways = [recipe["data"].get("packing", {}).get("by") for recipe in (found.before, found.after)]
    if "bfd" in ways:
        return "maths", "rows hold other samples, so batch.size counts something else and the next epoch begins at once"
    return "safe", "the same samples make a step, with or without padding: last bits"


def _batch(found: RecipeDifference) -> Verdict:
    was, now = _global_batch(found.before), _global_batch(found.after)
    sizes = [recipe["batch"].get("size") for recipe in (found.before, found.after)]
    if was == now or (found.path != "batch.size" and None not in sizes):
        pieces = "dropout, BatchNorm and random numbers of a collate function depend on the micro-batch"
        return "safe", f"a step has the same samples, in other micro-batches: last bits; {pieces}"
    why, until = f"a step takes {now} samples instead of {was}", found.after["until"]
    if Duration.parse(until).unit in ("steps", "s"):
        return "maths", why
    return "maths", f"{why}; what is left of {until} is counted in these steps, and the schedule covers the new total"


def _global_batch(recipe: RecipeJson) -> int:
    batch = recipe["batch"]
    return batch.get("size") or solve_batch(None, batch.get("micro"), batch.get("accumulation")).size


def _ema(found: RecipeDifference) -> Verdict:
    if found.was is None:
        return "safe", "the weights train as before; their average begins with the current weights"
    return "maths", "the weights train as before, but their average is dropped or computed differently"


def _swa(found: RecipeDifference) -> Verdict:
    changed_lr = "the learning rate from model.swa.start on is another"
    before, now = (recipe["model"].get("swa") for recipe in (found.before, found.after))
    if before is None and now is not None:
        return ("safe", "the weights train as before") if now["lr"] is None else ("maths", changed_lr)
    if before is None or before["lr"] is not None or (now is not None and now["lr"] is not None):
        return "maths", f"{changed_lr}, and so is the average"
    return "maths", "the weights train as before, but their average is dropped or computed differently"


def _argument(found: RecipeDifference) -> Verdict:
    """Classify an optimizer argument: another implementation, state that the checkpoint lacks, or another update."""
    name = found.path.removeprefix("optimizer.args.").split(".")[0]
    row = optimizer_row(found.after["optimizer"]["use"])
    if name in ("fused", "foreach"):
        return "safe", _KERNELS
    if (name in row.adds_state and found.now is True) or name in row.splits_state:
        return "fatal", f"the checkpoint lacks moments that it needs: put it back, or {EXPORT}"
    return _UPDATE


def _fp8(found: RecipeDifference) -> Verdict:
    """Classify a key of ``fp8``, which has no effect in other precisions."""
    if {recipe.get("precision") for recipe in (found.before, found.after)}.isdisjoint(("fp8", "mxfp8")):
        return "safe", "it applies to precision: fp8 and mxfp8 only"
    if found.path == "fp8.emulate":
        return "safe", f"the same rounding of operands; {_KERNELS}"
    return "maths", "other layers are rounded to 8 bits, or with other scales; weights and moments are kept"


def _spikes(found: RecipeDifference) -> Verdict:
    """Classify a key of ``spikes``. With ``warn`` and ``off``, no key changes an update: they affect only reports."""
    policies = {(recipe.get("spikes") or {}).get("policy", "warn") for recipe in (found.before, found.after)}
    if policies <= {"warn", "off"}:
        return "safe", "spikes are reported or not; every update is the same"
    return "maths", "other updates are skipped when the gradient spikes"


VALIDATION: Verdict = "safe", "it is not trained on; its losses, and the best one, cannot be compared with earlier ones"
EXPORT = "export the weights and start a new run from them"
_UPDATE: Verdict = "maths", "from here on the weights are updated differently"
_ORDER = "the rest of this epoch comes in another order: some samples twice, some not at all"
_READING: Verdict = "safe", "how samples are read, not which"
_FOLDER: Verdict = "safe", "the run stays in its folder"
_KERNELS = "other kernels: last bits"
_RANKS: Verdict = "safe", "the same samples make a step, on other ranks: last bits; dropout draws other numbers"

# A rule may cover a section only if all its keys, including future ones, have the same class. A test requires a rule
# for each path in the other sections.
RULES: Mapping[str, Verdict | Callable[[RecipeDifference], Verdict]] = {
    "name": _FOLDER,
    "folder": _FOLDER,
    "preset": ("safe", "a recipe in a run folder states its settings, which are compared one by one"),
    "seed": ("maths", f"{_ORDER}; augmentation draws other numbers"),
    "deterministic": ("safe", _KERNELS),
    "device": ("safe", f"{_KERNELS}; dropout draws other numbers"),
    "precision": ("maths", "other arithmetic in forward and backward; weights and moments are kept"),
    "fp8": _fp8,
    "fp8.scales": _fp8,
    "fp8.layers": _fp8,
    "fp8.emulate": _fp8,
    "graphs": ("safe", f"{_KERNELS}; learning rates are rounded to float32"),
    "until": _until,
    "price": ("safe", "it does not change the training"),
    "grid": ("safe", "it does not change the training"),
    "model.use": ("maths", "another model, though the weights fit it"),
    "model.args": ("maths", "the model computes something else, though the weights fit it"),
    "model.freeze": ("maths", "other weights are trained; newly trained ones begin without moments"),
    "model.activation_checkpointing": ("safe", "activations are kept or recomputed, and are the same"),
    "model.compile": ("safe", f"{_KERNELS}; dropout draws other numbers"),
    "model.compile_mode": ("safe", _KERNELS),
    "model.ema": _ema,
    "model.swa": _swa,
    **dict.fromkeys((f"model.swa.{key}" for key in ("start", "every", "lr", "anneal", "anneal_by")), _swa),
    "model.swa.norm_batches": ("safe", "BatchNorm statistics of the average come from other batches"),
    "model.lora": ("maths", "the adapters compute something else, though the weights fit them"),
    "data.train": ("maths", "it may be other data, so the next epoch begins at once"),
    "data.val": VALIDATION,
    "data.more_val": VALIDATION,
    **dict.fromkeys(("data.packing.by", "data.packing.max_length"), _packing),
    "data.workers": _READING,
    "data.prefetch": _READING,
    "data.timeout": _READING,
    "data.pin_memory": _READING,
    "data.shuffle": ("maths", _ORDER),
    "data.drop_last": ("maths", "the short batch at the end of an epoch is left out, or no longer is"),
    "data.quarantine": ("maths", "other samples are left out"),
    "data.on_bad_sample": ("safe", "it matters only if a sample cannot be read"),
    "loss": ("maths", "something else is minimised"),
    "batch": _batch,
    "parallel.replicate": _RANKS,
    "parallel.shard": _RANKS,
    "parallel.zero": ("safe", "the same sums in another order: last bits"),
    "parallel.tensor": ("safe", "the same layers, divided among other ranks: last bits; dropout draws other numbers"),
    "parallel.sequence": ("safe", "the same sums in another order: last bits; dropout draws other numbers"),
    "parallel.async_tensor": ("safe", "the same sums in another order: last bits"),
    "parallel.context": ("safe", "the same sums in another order: last bits; dropout draws other numbers"),
    "parallel.expert": ("safe", "the same sums in another order: last bits; dropout draws other numbers"),
    "parallel.pipeline": ("safe", "the same layers on other ranks: last bits; dropout draws other numbers"),
    "parallel.schedule": ("safe", "the same sums in another order: last bits"),
    "parallel.stages": ("safe", "the same layers on other ranks: last bits; dropout draws other numbers"),
    "parallel.plan": ("safe", "the same layers, divided in another way: last bits"),
    "parallel.sync_batchnorm": ("maths", "BatchNorm has the statistics of other samples"),
    "parallel.exact": ("safe", "the same samples make a step, summed in another order: last bits"),
    "parallel.timeout": ("safe", "it changes no result"),
    "optimizer.use": ("fatal", f"the moments of one optimizer mean nothing to another: put it back, or {EXPORT}"),
    "optimizer.args": _argument,
    "optimizer.lr": ("maths", "steps of another size; the schedule continues at its step"),
    "optimizer.weight_decay": _UPDATE,
    "optimizer.decay_norms_and_biases": _UPDATE,
    "optimizer.groups": _UPDATE,
    "optimizer.clip": _UPDATE,
    "optimizer.lr_rule": _UPDATE,
    "optimizer.offload": ("safe", "the same update elsewhere: last bits"),
    "metrics": ("safe", "metrics only read"),
    "observers": ("safe", "observers only read, and may end the run; those at the same position keep their state"),
    "schedule": ("maths", "the learning rate follows another curve"),
    "spikes.policy": _spikes,
    "spikes.factor": _spikes,
    "evaluation": ("safe", "evaluation leaves no trace in the training"),
    "checkpoint": ("safe", "saving leaves no trace in the training"),
    "log": ("safe", "logging leaves no trace in the training"),
    "alerts": ("safe", "alerts do not affect the training"),
}
UNKNOWN: Verdict = "maths", "this version does not know it: it may matter"

Provenance: TypeAlias = Mapping[str, Any]
"""The content of ``runs.provenance``: text, and mappings of text."""

_IN_WORDS: Mapping[Kind, str] = {
    "fatal": "fatal",
    "maths": "changes the maths",
    "safe": "safe",
}  # the most severe first
_BUILD_THE_MODEL = ("model.use", "model.args", "model.lora", "code")
_MODEL_LIBRARIES = ("transformers", "peft")
_MACHINE = {
    "python": "last bits may differ",
    "driver": "last bits may differ",
    "hostname": "on another GPU or CPU last bits may differ",
}
_VARIABLES: Mapping[str, Verdict] = {
    "NVIDIA_TF32_OVERRIDE": ("maths", "matrix products on GPUs are computed in another precision"),
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": ("maths", "matrix products on GPUs are computed in another precision"),
    "CUBLAS_WORKSPACE_CONFIG": ("safe", "last bits may differ"),
    "MKL_CBWR": ("safe", "last bits may differ"),
}
_ORIGINS = ("code", "packages", *_MACHINE, "environment")
_MISFIT = "model"  # weights that do not fit although the recipe builds the same model
_ABSENT = object()


class CommandWith(Protocol):
    """Returns the command that accepts the paths in ``accept`` and does not change the paths in ``undo``."""

    def __call__(self, accept: Sequence[str], undo: Sequence[str] = (), /) -> str: ...


@dataclass(frozen=True)
class Change:
    """One difference between a checkpoint and the run that continues from it."""

    path: str
    before: str
    after: str
    kind: Kind
    why: str

    def __str__(self) -> str:
        return f"{self.path}: {self.before} -> {self.after} ({_IN_WORDS[self.kind]}): {self.why}"


def compare(
    before: Mapping[str, Mapping[str, Any]],
    after: Mapping[str, Mapping[str, Any]],
    *,
    step: int,
    mismatches: Sequence[str] = (),
) -> list[Change]:
    """Return all differences between the metadata of a checkpoint and of the current run, the most severe first.

    Metadata is ``{"recipe": ..., "provenance": ...}``; ``step`` is the checkpoint's. ``mismatches`` has one line for
    each group of parameters that do not fit the model. If there are any, changes of model, adapters and code are fatal.
    """
    changes = compare_recipes(before["recipe"], after["recipe"], step=step)
    same = _same_training_set(before["provenance"], after["provenance"])
    if same:
        why = f"the training set is the same: {same}"
        changes = [replace(each, kind="safe", why=why) if _is_in(each.path, "data.train") else each for each in changes]
    changes += compare_provenance(before["provenance"], after["provenance"])
    return sorted(_with_misfits(changes, mismatches), key=lambda change: list(_IN_WORDS).index(change.kind))


def _with_misfits(changes: list[Change], mismatches: Sequence[str]) -> list[Change]:
    if not mismatches:
        return changes
    reason = listed(mismatches, separator="; ")
    builders = [
        each for each in changes if each.kind == "maths" and any(_is_in(each.path, path) for path in _BUILD_THE_MODEL)
    ]
    if not builders:  # a model may be sized by its data, or come from a package
        why = f"{reason}; data, packages or imported code build it otherwise: put them back, or {EXPORT}"
        return [*changes, Change(_MISFIT, "the weights saved", "the model built", "fatal", why)]
    return [
        replace(each, kind="fatal", why=f"{reason}: put it back, or {EXPORT}") if each in builders else each
        for each in changes
    ]


def compare_recipes(before: RecipeJson, after: RecipeJson, *, step: int) -> list[Change]:
    """Return the differences between two recipes, each as ``recipe.model_dump(mode="json")`` gives it.

    A key that only one of them has counts as its default in the other. A checkpoint of an earlier version therefore
    does not differ in keys that were added since.
    """
    return [
        Change(
            path,
            _format_value(was),
            _format_value(now),
            *classify(RecipeDifference(path, was, now, before, after, step)),
        )
        for path, was, now in _differences(before, after)
    ]


def recipe_differences(before: RecipeJson, after: RecipeJson) -> dict[str, tuple[str, str]]:
    """Return the paths in which two recipes differ, each with both values as text."""
    return {path: (_format_value(was), _format_value(now)) for path, was, now in _differences(before, after)}


def _differences(
    before: RecipeValue, after: RecipeValue, path: str = ""
) -> Iterator[tuple[str, RecipeValue, RecipeValue]]:
    """Yield path and both values of each leaf that differs. A list of mappings is compared item by item."""
    if _is_list_of_mappings(before) and _is_list_of_mappings(after) and len(before) == len(after):
        before, after = ({str(i): each for i, each in enumerate(items)} for items in (before, after))
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for key in [*after, *(key for key in before if key not in after)]:
            below = f"{path}.{key}" if path else key
            was, now = (side[key] if key in side else _default(below) for side in (before, after))
            yield from _differences(was, now, below)
    elif before != after:
        yield path, before, after


def _is_list_of_mappings(value: object) -> TypeGuard[list[Mapping[str, RecipeValue]]]:
    return isinstance(value, list) and all(isinstance(each, Mapping) for each in value)


def _default(path: str) -> RecipeValue:
    """Return the default of a path in this schema or in earlier ones, or ``_ABSENT`` if it has none."""
    field = field_at(path.split("."))
    if field is None or field.is_required():
        return FORMER_DEFAULTS.get(path, _ABSENT)
    adapter: TypeAdapter[object] = TypeAdapter(field.rebuild_annotation())
    return adapter.dump_python(field.get_default(call_default_factory=True, validated_data={}), mode="json")


def compare_provenance(before: Provenance, after: Provenance) -> list[Change]:
    """Return the differences between two results of ``runs.provenance``: code, data, packages, machine.

    A fact that is unknown on one side is reported as unknown, and as safe.
    """
    return [
        *_data(before, after),
        *_base(before, after),
        *_code(before, after),
        *_packages(before, after),
        *_machine(before, after),
    ]


def _data(before: Provenance, after: Provenance) -> Iterator[Change]:
    was, now = before.get("data") or {}, after.get("data") or {}
    for name in ("train", "val"):
        old, new = was.get(name), now.get(name)
        if name not in {**was, **now} or (name == "val" and not (name in was and name in now)):
            continue  # validation on one side only: the recipe differs too
        if old == new and _covers_content(old):
            continue
        verdict: Verdict = "maths", "the data differs, so the next epoch begins at once"
        if name == "val":
            verdict = VALIDATION
        if old is None or new is None or old == new or not _comparable(old, new):
            verdict = "safe", "whether the data is the same is not known"
        yield Change(f"data.{name}", _brief(old), _brief(new), *verdict)


def _base(before: Provenance, after: Provenance) -> Iterator[Change]:
    """Compare the files of the pretrained model that a run starts from."""
    was, now = ((side.get("base") or {}).get("revision") for side in (before, after))
    if was and now and was != now:
        why = (
            "the files of the pretrained model differ; the weights come from the checkpoint, the configuration does not"
        )
        yield Change("model.args.name", _brief(was), _brief(now), "maths", why)


def _same_training_set(before: Provenance, after: Provenance) -> str:
    """Return the fingerprint that both have, or "" if they differ or do not cover the content."""
    was, now = ((side.get("data") or {}).get("train") for side in (before, after))
    return _brief(was) if was == now and _covers_content(was) else ""


def _comparable(one: str, other: str) -> bool:
    """Return True if different fingerprints mean different data. False if they cover different items of the data."""
    sizes = [set(re.findall(r"(\d+) items", each)) for each in (one, other)]
    if all(sizes) and sizes[0] != sizes[1]:
        return True
    covered = [each.partition("(")[2] for each in (one, other)]
    partly = any("only" in each or "quarantine" in each for each in covered)
    return not partly or (covered[0] == covered[1] and "quarantine" not in covered[0])


def _covers_content(fingerprint: str | None) -> bool:
    """Return True if different content has a different fingerprint. A stream is not read for its fingerprint."""
    return fingerprint is not None and "the type only" not in fingerprint and "length only" not in fingerprint


def _code(before: Provenance, after: Provenance) -> Iterator[Change]:
    """Compare the hashes of source files, because a new commit may have changed only other files."""
    was, now = before.get("sources") or {}, after.get("sources") or {}
    changed = [name for name in now if was.get(name) and now[name] and was[name] != now[name]]
    if changed:
        old, new = (listed([f"{name} {_brief(side[name])}" for name in changed]) for side in (was, now))
        yield Change("code", old, new, "maths", f"the source of {listed(changed)} differs")
        return
    old, new = _commit(before.get("git")), _commit(after.get("git"))
    unknown = [name for name in sorted({**was, **now}) if not (was.get(name) and now.get(name))]
    if old == new and not unknown:
        return
    if "sources" not in before:
        why = "whether the files that the recipe names are the same is not known"
    elif unknown:
        why = f"whether the source of {listed(unknown)} is the same is not known"
    elif now:
        why = "the files that the recipe names are the same; what they import was not compared"
    else:
        why = "the recipe names no file of yours"
    yield Change("code", old, new, "safe", why)


def _commit(git: Provenance | None) -> str:
    """Return the commit as text. Untracked files do not count: the run folder is one."""
    if git is None:
        return "not known"
    changes = f" with changes {_brief(git['diff_sha256'])}" if git["diff_sha256"] else ""
    return f"{_brief(git['commit'] or 'no commit')}{changes}"


def _packages(before: Provenance, after: Provenance) -> Iterator[Change]:
    was, now = before.get("packages"), after.get("packages")
    if not was or not now:
        if was != now:
            old, new = ("known" if side else "not known" for side in (was, now))
            yield Change("packages", old, new, "safe", "whether the packages are the same is not known")
        return
    versions = [
        (name, was["versions"].get(name), now["versions"].get(name)) for name in now["versions"] | was["versions"]
    ]
    changed = [each for each in versions if each[1] != each[2]]
    for name, old, new in changed:
        yield Change(f"packages.{name}", old or "not installed", new or "not installed", *_version(name, old, new))
    if not changed and was["sha256"] != now["sha256"]:
        old, new = (f"{side['count']} packages {_brief(side['sha256'])}" for side in (was, now))
        yield Change("packages", old, new, "safe", "they differ in others than those that runs are known to depend on")


def _version(name: str, old: str | None, new: str | None) -> Verdict:
    if name in _MODEL_LIBRARIES and old and new and old.partition(".")[0] != new.partition(".")[0]:
        return "maths", f"another major version of {name} may compute something else for the same model"
    return "safe", "last bits may differ"


def _machine(before: Provenance, after: Provenance) -> Iterator[Change]:
    """Yield differences that hint at other kernels.

    Linux's version, the command and the folder do not affect numbers.
    """
    for path, why in _MACHINE.items():
        if before.get(path) != after.get(path):
            yield Change(path, before.get(path) or "not known", after.get(path) or "not known", "safe", why)
    was, now = before.get("environment") or {}, after.get("environment") or {}
    for name, verdict in _VARIABLES.items():
        if was.get(name) != now.get(name):
            old, new = was.get(name, "not set"), now.get(name, "not set")
            yield Change(f"environment.{name}", old, new, *verdict)


def require_accepted(changes: Sequence[Change], accept: Sequence[str], *, command: CommandWith) -> list[Change]:
    """Return the changes of class ``maths``. For each, ``accept`` must have its path, a path above it, or ``all``.

    A path in ``accept`` may have no difference, so that a restarted job keeps its command. Raises UsageError that lists
    fatal changes, changes that are not accepted and unknown paths, and gives the ``command`` that would work.
    """
    fatal = [each for each in changes if each.kind == "fatal"]
    maths = [each for each in changes if each.kind == "maths"]
    refused = [each for each in maths if not any(_is_in(each.path, path) for path in accept)]
    unknown = [path for path in accept if not _can_differ(path)]
    if not (fatal or refused or unknown):
        return maths
    near = [each.path for each in refused or changes]
    lines = [*map(str, [*fatal, *refused])]
    lines += [f"--accept {path}: there is no such path{f'; {suggest(path, near)}' if near else ''}" for path in unknown]
    wanted = [*(path for path in accept if path not in unknown), *(each.path for each in refused)]
    undo = [each.path for each in fatal if each.path != _MISFIT]
    remedy = "undo them, or accept them" if refused else "leave out what is no path"
    raise UsageError(
        "\n  ".join(["the run cannot continue from its checkpoint with these changes:", *lines]),
        remedy=f"{'undo what is fatal, then' if fatal else remedy}: {command(_widest(wanted), undo)}",
    )


def on_command_line(command: str) -> CommandWith:
    """Return the CommandWith of a command line that takes ``--accept`` and ``--set``."""

    def command_with(accept: Sequence[str], undo: Sequence[str] = (), /) -> str:
        kept = _without_options(iter(shlex.split(command)), undo)
        return shlex.join([*kept, *(word for path in accept for word in ("--accept", path))])

    return command_with


def _without_options(words: Iterator[str], undo: Sequence[str]) -> Iterator[str]:
    """Yield the words without ``--accept PATH``, and without ``--set PATH=VALUE`` at, above or below a path to undo."""
    for word in words:
        option, joined, value = word.partition("=")
        if option not in ("--accept", "--set"):
            yield word
            continue
        value = value if joined else next(words, "")
        path = value.partition("=")[0]
        if option == "--set" and not any(_is_in(path, each) or _is_in(each, path) for each in undo):
            yield from (option, value)


def _widest(wanted: Sequence[str]) -> list[str]:
    """Return the paths in ``wanted`` that no other path in ``wanted`` covers, without duplicates."""
    return [path for path in dict.fromkeys(wanted) if not any(_is_in(path, up) for up in wanted if up != path)]


def _can_differ(path: str) -> bool:
    """Return True if a change may have this path, or one below it."""
    keys = path.split(".")
    keys = keys[: keys.index("args") + 1] if "args" in keys else keys
    return keys[0] in ("all", *_ORIGINS) or field_at(keys) is not None


def _is_in(path: str, section: str) -> bool:
    return section in ("all", path) or path.startswith(f"{section}.")


def _brief(text: str | None) -> str:
    """Return a fingerprint with its hash cut short."""
    return re.sub(r"[0-9a-f]{40,}", lambda found: found[0][:12], text) if text else "not known"


def _format_value(value: RecipeValue) -> str:
    """Return a value of a recipe on one line, as it is written in YAML."""
    if value is _ABSENT:
        return "not given"
    is_bare = isinstance(value, str) and value.isprintable() and core_tag(value).endswith(":str")
    text = value if is_bare else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."
